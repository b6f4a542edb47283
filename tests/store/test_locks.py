"""One run at a time on a store, whoever dies, on whatever machine, whatever clocks say."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zarr.storage import LocalStore

from mdpext_dask.errors import ClusterError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.store import locks, objects
from mdpext_dask.store.locks import KEY, Holder, hold, holder_of
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]

_HOLD = """
import sys, time
from mdpext_dask.store.locks import hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def another(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a process that holds the lock of ``a.zarr``."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path / "a.zarr")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 1.0)


def _elsewhere(**changes: Any) -> dict[str, Any]:
    """Return a lock of a run on another machine, which may be alive."""
    lock = {"owner": "somebody", "host": "far", "machine": "far 1", "pid": 7, "started": 1.0, "beat": 3}
    return {**lock, **changes}


def _put(folder: Path, content: Any) -> LocalStore:
    folder.mkdir(exist_ok=True)
    (folder / KEY).write_text(content if isinstance(content, str) else json.dumps(content))
    return LocalStore(folder)


def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path, another: subprocess.Popen[str]) -> None:
    url = str(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match=rf"a\.zarr: another run .*process {another.pid} on "), hold(url):
        pass
    holder = holder_of(LocalStore(url))
    assert holder is not None
    assert holder.pid == another.pid


@pytest.mark.parametrize("reaped", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_killed_runs_lock_is_taken(tmp_path: Path, another: subprocess.Popen[str], reaped: bool) -> None:
    another.send_signal(signal.SIGKILL)
    if reaped:
        another.wait()
    else:  # a zombie still has its number
        os.waitid(os.P_PID, another.pid, os.WEXITED | os.WNOWAIT)
    store = LocalStore(tmp_path / "a.zarr")
    assert holder_of(store) is None
    started = time.monotonic()
    with hold(str(tmp_path / "a.zarr")):
        now = holder_of(store)
        assert now is not None
        assert now.pid == os.getpid()
    assert time.monotonic() - started < locks.PATIENCE_SECONDS / 2


def test_a_process_number_given_to_somebody_else_is_no_life(tmp_path: Path) -> None:
    own = Holder.this_process()
    store = _put(tmp_path / "a.zarr", json.dumps({**own.__dict__, "started": own.started - 1}))
    assert holder_of(store) is None


def test_a_frozen_run_is_not_a_dead_one(tmp_path: Path, another: subprocess.Popen[str]) -> None:
    another.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreError, match="another run"), hold(str(tmp_path / "a.zarr")):
            pass
    finally:
        another.send_signal(signal.SIGCONT)


@pytest.mark.usefixtures("hurried")
def test_a_run_elsewhere_is_dead_when_its_counter_stands_still(tmp_path: Path) -> None:
    store, told = _put(tmp_path / "a.zarr", _elsewhere()), []
    assert holder_of(store) is not None
    with hold(str(tmp_path / "a.zarr"), told.append):
        assert json.loads((tmp_path / "a.zarr" / KEY).read_text())["pid"] == os.getpid()
    assert any("process 7 on far" in text for text in told)


def test_a_run_whose_counter_advances_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is waited for no longer than for the first change, however busy the machine is.
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    store, stop = _put(tmp_path / "a.zarr", _elsewhere()), threading.Event()

    def live() -> None:
        beat = 3
        while not stop.wait(0.2):
            beat -= 1  # any change is life; nobody says that counters or clocks only go up
            objects.put_bytes(store, KEY, json.dumps(_elsewhere(beat=beat)).encode())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        url, said = str(tmp_path / "a.zarr"), r"another run .*process 7 on far"
        with pytest.raises(StoreError, match=said), hold(url):
            pass
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("hurried")
def test_a_run_whose_lock_is_taken_over_stops(tmp_path: Path) -> None:
    with hold(str(tmp_path / "a.zarr")) as lock:
        lock.require()
        _put(tmp_path / "a.zarr", _elsewhere(beat=0))
        refused(ClusterError, "process 7 on far has taken this store over", _require_for, lock, 20)
    # It is not its own to remove.
    assert json.loads((tmp_path / "a.zarr" / KEY).read_text())["owner"] == "somebody"


@pytest.mark.usefixtures("hurried")
def test_one_of_many_gets_a_dead_runs_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than threads of a busy machine may take from seeing that it is dead to writing their own.
    monkeypatch.setattr(locks, "_SETTLE_SECONDS", 3.0)
    _put(tmp_path / "a.zarr", json.dumps({**Holder.this_process().__dict__, "started": 0.0}))
    start, held, refused = threading.Barrier(8), [], []
    done = threading.Event()

    def contend() -> None:
        start.wait()
        try:
            with hold(str(tmp_path / "a.zarr")):
                held.append(1)
                done.wait(20)
        except StoreError:
            refused.append(1)
        if len(refused) == 7:
            done.set()

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 7)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"owner": 1}', "null"])
def test_a_damaged_lock_is_nobody_s(tmp_path: Path, content: str) -> None:
    _put(tmp_path / "a.zarr", content)
    with hold(str(tmp_path / "a.zarr")):
        pass
    assert not (tmp_path / "a.zarr").exists() or not any((tmp_path / "a.zarr").iterdir())


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold(str(tmp_path / "new" / "folder" / "a.zarr")):
        raise KeyError
    assert not any(tmp_path.iterdir())


def test_behind_a_url_it_is_the_same(tmp_path: Path) -> None:
    url = f"memory://locks-{tmp_path.name}/a.zarr"
    with hold(url), pytest.raises(StoreError, match="another run"), hold(url):
        pass
    with hold(url):
        pass


def test_two_runs_on_one_store(tmp_path: Path, small_job: Job, another: subprocess.Popen[str]) -> None:
    url, spec = str(tmp_path / "a.zarr"), parse_job(small_job())
    for overwrite in (False, True):
        refused(StoreError, "another run", build, spec, url, overwrite=overwrite)
    another.kill()
    another.wait()
    summary = build(spec, url)
    assert summary["state"] == "complete"
    assert summary["running"] is None
    assert not (tmp_path / "a.zarr" / KEY).exists()


@pytest.mark.parametrize(
    "other",
    [{}, pytest.param({"privacy": {"epsilon_per_km": 0.5}}, marks=pytest.mark.slow)],
    ids=["same job", "another"],
)
def test_a_run_that_slept_at_its_end(tmp_path: Path, small_job: Job, monkeypatch: Any, other: Any) -> None:
    """Its store was taken over and replaced meanwhile by one of which nothing is certified yet."""
    url = str(tmp_path / "a.zarr")
    consolidate = objects.consolidate

    def asleep(store: Any) -> None:
        monkeypatch.setattr(objects, "consolidate", consolidate)
        MechanismStore.clear(url)
        (tmp_path / "a.zarr" / KEY).unlink()
        init(parse_job(small_job(**other)), url)
        consolidate(store)

    monkeypatch.setattr(objects, "consolidate", asleep)
    # Whichever it sees first: that the lock is another's, or that the store is.
    said = r"has taken this store|has changed while it was cert"
    with pytest.raises((ClusterError, StoreError), match=said):
        build(parse_job(small_job()), url)
    assert MechanismStore.open(url).state == "planned"


def test_bad_input_leaves_no_folder(tmp_path: Path, small_job: Job) -> None:
    spec = parse_job(small_job(outputs={"count": 100_000}, privacy={"min_probability": 1e-9}))
    refused(ValueError, "outputs", build, spec, str(tmp_path / "a" / "b.zarr"))
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_half_deleted_is_overwritten(tmp_path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    url, spec = str(tmp_path / "a.zarr"), parse_job(small_job())
    build(spec, url)
    with monkeypatch.context() as patch:
        patch.setattr(objects.shutil, "rmtree", _raise)
        refused(StoreError, "cannot be deleted", build, spec, url, overwrite=True)
    assert build(spec, url)["state"] == "complete"


def test_what_vanishes_during_deletion_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the drafts of the lock, which its holder writes every few seconds."""
    folder = tmp_path / "a.zarr"
    store = _put(folder, _elsewhere())
    listed = [folder / name for name in ("lock.0123.partial", KEY, "zarr.json", "other")]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    (folder / "zarr.json").write_text("{}")
    objects.delete_everything(store, str(folder), first="receipts", last="zarr.json")
    assert [path.name for path in listed if path.exists()] == [KEY]


@pytest.mark.parametrize("what", ["draft", "folder"])
def test_a_run_that_ends_takes_nothing_from_one_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It sweeps up drafts, and the folders that it has made; whoever writes there then writes once more."""
    write, struck = objects._write_new, []

    def swept(path: Path, value: bytes) -> None:
        if what == "draft":
            write(path, value)
        if not struck:
            struck.append(path)
            path.unlink(missing_ok=True)
            path.parent.rmdir()
        if what == "folder":
            write(path, value)

    monkeypatch.setattr(objects, "_write_new", swept)
    with hold(str(tmp_path / "a.zarr")):
        assert struck


def test_what_cannot_be_locked_names_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(path: Path, _: bytes) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(objects, "_write_new", vanish)
    said = str(refused(StoreError, "No such file", hold(str(tmp_path / "a.zarr")).__enter__))
    assert ".partial" not in said


_HOLDERS = """
import random, sys, time
from mdpext_dask.errors import IncompleteStoreError
from mdpext_dask.store import locks, objects
url, until = sys.argv[1], time.monotonic() + 1.0
while time.monotonic() < until:
    try:
        with locks.hold(url):
            if random.random() < 0.5:
                objects.sweep(objects.open_objects(url))
    except IncompleteStoreError as error:
        assert "another run is at work" in str(error), error
"""


@pytest.mark.slow
def test_many_that_begin_and_end_at_once(tmp_path: Path) -> None:
    """Any other error than the one that says so ends one of them."""
    command = [sys.executable, "-c", _HOLDERS, str(tmp_path / "deep" / "a.zarr")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[1] for process in started] == [""] * 3


def _require_for(lock: locks.Lock, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lock.require()
        time.sleep(0.01)


def _raise(*_: object) -> None:
    raise OSError("no more")
