"""Whom processes of this machine obey: their own run and its caller; no store, and no other user."""

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdpext_dask import audit, build, evaluate, report, trust_operators
from mdpext_dask.compute import executor as executor_module
from mdpext_dask.compute.executor import open_executor, open_for_reader
from mdpext_dask.errors import ClusterError, SpecError
from mdpext_dask.events import Event, Note
from mdpext_dask.extend.choose import trusted_operators
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import fingerprint_of, parse_job
from mdpext_dask.pipeline.run import finalise, partition
from mdpext_dask.reports.plots import plot_loss
from mdpext_dask.sampling.remap_store import remap_store
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import operator_of_store
from tests.support.forged import attribute
from tests.support.refusals import refusal, refused

Job = Callable[..., dict[str, dict[str, Any]]]
NOBODY = 65534
# Prints every address that answers to somebody who has no certificate, or one of his own.
INTRUDER = """
import asyncio, os, sys
import distributed.comm.tcp
from distributed import Security
from distributed.core import connect

ways = ("tcp", {}), ("tls", Security.temporary().get_connection_args("client"))

async def enter(address):
    for scheme, given in ways:
        try:
            comm = await connect(scheme + "://" + address, timeout=2, **given)
            await comm.write({"op": "identity", "reply": True})
            print(address, scheme, type(await comm.read()))
            return
        except (OSError, asyncio.TimeoutError):
            pass

# Loads what is imported while connecting: another user may not even read this Python.
asyncio.run(enter("127.0.0.1:1"))
if os.geteuid() != int(sys.argv[1]):
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
for address in sys.argv[2:]:
    asyncio.run(enter(address))
"""


def _intrude(addresses: list[str], user: int) -> str:
    if user != os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    bare = [address.partition("://")[2] for address in addresses]
    command = [sys.executable, "-c", INTRUDER, str(user), *bare]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "user", [pytest.param(os.geteuid(), marks=pytest.mark.slow), NOBODY], ids=["oneself", "nobody"]
)
def test_nobody_else_reaches_local_workers(user: int, scheduler_address: str) -> None:
    # Without certificates, anybody is let in.
    assert "tcp" in _intrude([scheduler_address], user)
    with open_executor(ClusterSection(workers=1)) as executor:
        assert dict(executor.map("double", abs, [(-4,)])) == {0: 4}
        assert executor.dashboard is None
        said = executor._client.scheduler_info()  # type: ignore[union-attr]
        workers = said["workers"].values()
        private = [said["address"], *said["workers"], *(worker["nanny"] for worker in workers)]
        assert all(address.startswith("tls://127.0.0.1:") for address in private)
        assert _intrude(private, user) == ""
        public = {said["services"]["dashboard"], *(worker["services"]["dashboard"] for worker in workers)}
        # What else listens serves no pages.
        this = psutil.Process()
        listening = {
            connection.laddr.port
            for process in (this, *this.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert public | {int(address.rpartition(":")[2]) for address in private} <= listening
        for port in public:
            for page in ("status", "health", "metrics", "info/main/workers.html", "json/identity.json"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5)


# --- readers of a store ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    path = tmp_path_factory.mktemp("trust") / "s.zarr"
    build(parse_job(small_job()), str(path))
    return path


READERS: dict[str, Callable[..., object]] = {
    "audit": audit, "evaluate": evaluate, "remap": lambda path, **how: remap_store(str(path), **how),
    "finalise": lambda path, **how: finalise(str(path), **how),
    "report": lambda path, **how: report(
        path, path.parent / "r.html", bound_seconds=0, overwrite=True, **how
    ),
    "plot": lambda path, **how: plot_loss(MechanismStore.open(str(path)), **how),
}  # fmt: skip
SECTIONS = {
    "address": {"address": "tcp://127.0.0.1:1"},
    "slurm": {"options": ["--reservation=theirs"], "memory_gib": 1.0},
    "kubernetes": {"image": "theirs"},
    "local": {"workers": 4000, "memory_gib": 0.01},
}


class Asked(Exception):
    pass


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", SECTIONS)
def test_a_store_s_cluster_is_never_used(
    built: Path, tmp_path: Path, monkeypatch: Any, reader: str, kind: str
) -> None:
    path = tmp_path / "s.zarr"
    shutil.copytree(built, path)
    job = MechanismStore.open(str(path)).attributes["job"]
    state = "extending" if reader == "finalise" else "complete"
    attribute(path, state=state, job={**job, "cluster": {"kind": kind, **SECTIONS[kind]}})
    asked: list[tuple[ClusterSection, int]] = []

    def start(_: ExitStack, cluster: ClusterSection, workers: int) -> Any:
        asked.append((cluster, workers))
        raise Asked

    for each in executor_module.START:
        monkeypatch.setitem(executor_module.START, each, start)
    monkeypatch.setattr(executor_module, "processors", lambda: 3)
    refused(Asked, "", READERS[reader], path, workers=2)
    assert asked.pop() == (ClusterSection(), 2)
    if reader != "plot":
        refused(Asked, "", READERS[reader], path, scheduler="tcp://mine:1")
        assert asked.pop()[0] == ClusterSection(kind="address", address="tcp://mine:1")
    if (reader, kind) in {("remap", "address"), ("finalise", "slurm"), ("plot", "local"), ("audit", "local")}:
        READERS[reader](path)  # small stores are read in this process
    assert not asked


def test_the_caller_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[ClusterSection, int]] = []

    def start(_: ExitStack, cluster: ClusterSection, workers: int) -> Any:
        asked.append((cluster, workers))
        raise Asked

    monkeypatch.setitem(executor_module.START, "local", start)
    monkeypatch.setattr(executor_module, "processors", lambda: 2)
    with pytest.raises(Asked), open_for_reader(None, small=False):
        pass
    assert asked == [(ClusterSection(), 2)]
    with open_for_reader(1, small=False) as executor:
        assert (executor.workers, executor.threads) == (1, 1)
    for given in ({"workers": 0}, {"workers": None, "scheduler": "somewhere"}):
        refusal(lambda given=given: open_for_reader(**given, small=True), "--", kind=SpecError)


def test_operators_run_if_named(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mdpext_dask.extend.choose._TRUSTED", set())
    path = tmp_path / "s.zarr"
    shutil.copytree(built, path)
    store = MechanismStore.open(str(path)).attributes
    named = {"extension": {**store["job"]["extension"], "method": "theirs:Operator"}}
    identity = {**store["identity"], **named}
    attribute(
        path, state="extending", job={**store["job"], **named}, identity=identity,
        fingerprint=fingerprint_of(identity),
    )  # fmt: skip
    refusal(lambda: operator_of_store(MechanismStore.open(str(path))), "--operator theirs:", kind=SpecError)
    shutil.rmtree(path / "receipts")
    refusal(lambda: partition(str(path), 0, 1), "theirs:Operator", kind=SpecError)
    assert not (tmp_path / "ran").exists()
    trust_operators("theirs:Operator", "log-convex")
    assert trusted_operators() == {"theirs:Operator"}
    refusal(lambda: operator_of_store(MechanismStore.open(str(path))), "theirs:Operator", kind=SpecError)
    assert (tmp_path / "ran").exists()


# --- job files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "to", "told"),
    [
        ({}, None, ()),
        ({"cluster": {"kind": "local"}}, None, ()),
        ({"cluster": {"kind": "address", "address": "tcp://a:1"}}, None, ("scheduler at tcp://a:1",)),
        ({"cluster": {"kind": "slurm", "options": ["--nice=1"]}}, None, ("Slurm with --nice=1",)),
        ({}, "kubernetes", ("Kubernetes",)),
        ({"extension": {"method": "their.code:Class"}}, None, ("code of their.code:Class",)),
        ({"domain": {"region": "place:Oz"}}, None, ("OpenStreetMap", "'Oz'")),
    ],
)
def test_what_a_job_reaches_is_told(
    small_job: Job, sections: dict[str, Any], to: str | None, told: tuple[str, ...]
) -> None:
    events: list[Event] = []
    tell_beyond(events.append, parse_job(small_job(**sections)), to=to)
    texts = [event.text for event in events if isinstance(event, Note)]
    assert len(texts) == len(events) == bool(told)
    assert all(part in texts[0] and "\n" not in texts[0] for part in told)


def test_it_is_told_before_anything_is_reached(small_job: Job, path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def observe(event: Event) -> None:
            if isinstance(event, Note) and address in event.text:
                refused(BlockingIOError, "", server.accept)
                raise ClusterError("told")

        spec = parse_job(small_job(cluster={"kind": "address", "address": address}))
        refusal(lambda: build(spec, str(path), observer=observe), "told", kind=ClusterError)
