"""Faults, with real processes: after whatever has broken, run again, and the bytes are the same."""

import itertools
import json
import os
import re
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mdpext_dask import BoundRequest, audit, evaluate, open_mechanism
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, SpecError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline import tasks
from mdpext_dask.pipeline.memory import check_memory
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.store import objects, receipts, schema
from mdpext_dask.store.integrity import CERTIFICATE
from mdpext_dask.store.mechanism_store import COMPLETE, MechanismStore
from tests.support.disks import Disk, small_disk
from tests.support.forged import flip_a_bit
from tests.support.inside import run_inside
from tests.support.processes import (
    INTERRUPTED,
    Command,
    Moment,
    Processes,
    digests,
    job_file,
    moments,
    processes_in,
    receipt_files,
    valid_receipts,
    wait_until,
)
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
# Of random moments; another one gives other moments.
RANDOM_SEED = int(os.environ.get("MDPEXT_FAULTS_SEED", "20261128"))
LOCAL = {"kind": "local", "workers": 2}
LARGE = {"block_cells": [3, 3]}


def fault_job(small_job: Job, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a small job of many blocks, so that there is always something left to break."""
    usual = {"domain": {"cell_km": 2.0, "refine": [2, 4]}, "store": {"block_cells": [1, 1]}}
    return small_job(**{**usual, "outputs": {"count": 6}, **sections})


def mostly_slow(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return cases as parameters, all but some of them for the long round of tests only."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


class Undisturbed(NamedTuple):
    """What comes of the job when nothing breaks."""

    path: Path
    digests: dict[str, str]
    blocks: int


def built_undisturbed(folder: Path, job: dict[str, Any]) -> Undisturbed:
    blocks = build(parse_job(job), str(folder / "s.zarr"))["blocks"]
    return Undisturbed(folder / "s.zarr", digests(folder / "s.zarr"), blocks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Undisturbed:
    return built_undisturbed(tmp_path_factory.mktemp("undisturbed"), fault_job(small_job))


@pytest.fixture(scope="module")
def undisturbed_in_large_blocks(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Undisturbed:
    return built_undisturbed(tmp_path_factory.mktemp("undisturbed"), fault_job(small_job, store=LARGE))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with processes_in(tmp_path) as starter:
        yield starter


def same_as(undisturbed: Undisturbed, path: Path, kept: dict[str, bytes]) -> None:
    """Assert that a store is complete, with the right bytes, and that no finished block was done twice."""
    assert MechanismStore.open(str(path)).state == "complete"
    assert digests(path) == undisturbed.digests
    redone = [name for name, content in kept.items() if (path / "receipts" / name).read_bytes() != content]
    assert not redone, f"done twice: {redone}"
    assert not list(path.rglob("*.partial"))


# --- killed ---------------------------------------------------------------------------------------


class Scene:
    """A job under way on one kind of cluster, and what of it can be killed."""

    def __init__(
        self, processes: Processes, folder: Path, job: dict[str, Any], *, quick: bool = False
    ) -> None:
        self.processes, self.store, self.quick = processes, folder / "s.zarr", quick
        self.job = job_file(folder, job)
        self.spec = parse_job({**job, "cluster": {"kind": "inline"}})

    def run(self, *more: object, **options: Any) -> Command:
        command = "run", self.job, "--store", self.store, "--progress", "none", *more
        return self.processes.mdpext(*command, **options)

    def finish(self, *more: object) -> None:
        """Run again, where the job ran, or in this process where time is short."""
        if self.quick:
            build(self.spec, str(self.store))
            return
        again = self.run(*more)
        assert again.code() == 0, again.stderr

    # Each starts the job, strikes at the moment, and returns the receipts that were valid then.

    def local_worker(self, moment: Moment, *, all_of_them: bool = False) -> dict[str, bytes]:
        """Kill one worker process, or all of them; others take their places."""
        command = self.run()
        moment.wait(self.store, command)
        workers = command.workers()
        kept = valid_receipts(self.store)
        for worker in workers if all_of_them else workers[:1]:
            worker.kill()
        if command.code() != 0:
            assert command.code() == 3, command.stderr
            self.finish()
        return kept

    def all_local_workers(self, moment: Moment) -> dict[str, bytes]:
        return self.local_worker(moment, all_of_them=True)

    def client(self, moment: Moment, *, and_workers: bool = False) -> dict[str, bytes]:
        """Kill the command, whose workers then end by themselves, or all of them at once."""
        command = self.run()
        moment.wait(self.store, command)
        (command.kill_group if and_workers else command.kill)()
        wait_until(lambda: not command.members(), "the orphaned workers to end", 30)
        kept = valid_receipts(self.store)
        self.finish()
        return kept

    def everything(self, moment: Moment) -> dict[str, bytes]:
        return self.client(moment, and_workers=True)

    def partition(self, moment: Moment) -> dict[str, bytes]:
        """Kill a command that extends blocks in its own process."""
        init(self.spec, str(self.store))
        blocks = MechanismStore.open(str(self.store)).plan.blocks
        command = self.processes.mdpext("partition", self.store, "--range", f"0:{blocks}")
        moment.wait(self.store, command)
        command.kill()
        kept = valid_receipts(self.store)
        self.finish()
        return kept

    def address_worker(self, moment: Moment, *, all_of_them: bool = False) -> dict[str, bytes]:
        """Kill one of two workers of a scheduler, or both with their nannies; others come in their places."""
        _, address = self.processes.scheduler()
        workers = [self.processes.worker(address) for _ in range(2)]
        command = self.run(*self.at(address))
        moment.wait(self.store, command)
        kept = valid_receipts(self.store)
        for worker in workers if all_of_them else workers[:1]:
            worker.kill_group()
        self.processes.worker(address)
        if command.code() != 0:
            assert command.code() == 3, command.stderr
            self.finish(*self.at(address))
        return kept

    def all_address_workers(self, moment: Moment) -> dict[str, bytes]:
        return self.address_worker(moment, all_of_them=True)

    def scheduler(self, moment: Moment) -> dict[str, bytes]:
        """Kill the scheduler; the command ends, and goes on with another scheduler."""
        scheduler, address = self.processes.scheduler()
        worker = self.processes.worker(address)
        command = self.run(*self.at(address))
        moment.wait(self.store, command)
        scheduler.kill()
        assert command.code() in (0, 3), command.stderr
        assert "Traceback" not in command.stderr
        worker.kill_group()
        kept = valid_receipts(self.store)
        if not self.quick:
            _, address = self.processes.scheduler()
            self.processes.worker(address)
        self.finish(*self.at(address))
        return kept

    @staticmethod
    def at(address: str) -> list[str]:
        return ["--set", "cluster.kind=address", "--set", f"cluster.address={address}"]


VICTIMS = (
    "local_worker", "all_local_workers", "client", "everything", "partition", "address_worker",
    "all_address_workers", "scheduler",
)  # fmt: skip


def strike_at(scene: Scene, victim: str, moment: Moment, undisturbed: Undisturbed) -> None:
    same_as(undisturbed, scene.store, getattr(scene, victim)(moment))
    assert audit(str(scene.store)).holds


@pytest.mark.parametrize("victim", mostly_slow(VICTIMS, "everything"))
def test_killed(tmp_path: Path, small_job: Job, processes: Processes, undisturbed: Any, victim: str) -> None:
    moment = moments(RANDOM_SEED, 1, 0, undisturbed.blocks // 2)[0]
    scene = Scene(processes, tmp_path, fault_job(small_job, cluster=LOCAL), quick=True)
    strike_at(scene, victim, moment, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_at_20_moments(tmp_path: Path, small_job: Job, undisturbed: Undisturbed, victim: str) -> None:
    """Ten spread over the whole of the command's life, ten while blocks are written."""
    job = fault_job(small_job, cluster=LOCAL)
    with processes_in(tmp_path) as measured:
        started = time.monotonic()
        if victim == "partition":
            store = tmp_path / "measured.zarr"
            measured.done("init", job_file(tmp_path, job), "--store", store)
            started = time.monotonic()
            measured.done("partition", store, "--range", f"0:{undisturbed.blocks}")
        else:
            measured.done("run", job_file(tmp_path, job), "--store", tmp_path / "measured.zarr")
        seconds = time.monotonic() - started
    for number, moment in enumerate(moments(RANDOM_SEED, 20, seconds, undisturbed.blocks)):
        folder = tmp_path / str(number)
        folder.mkdir()
        print(f"{victim}, moment {number}: {moment}")
        with processes_in(folder) as processes:
            strike_at(Scene(processes, folder, job), victim, moment, undisturbed)


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


class Outcome(NamedTuple):
    code: int
    errors: list[str]


@pytest.fixture
def inside(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command in this process, where it can be struck at any line."""

    def call(*arguments: object) -> Outcome:
        code, _, err = run_inside(capfd, *arguments)
        return Outcome(code, err.splitlines())

    return call


# What is about to be written when the disk breaks: where it is called, and at which call.
WRITES = {
    "the template": (schema, "write_arrays", 1), "the state of the template": (MechanismStore, "update", 1),
    "the cost of the seed": (MechanismStore, "write_seed_cost", 1),
    "the seed": (MechanismStore, "write_seed", 1), "the extension": (MechanismStore, "write_extension", 1),
    "a block": (MechanismStore, "write_shards", 3), "a receipt": (receipts, "write_receipt", 4),
    "what is swept": (objects, "sweep", 1), "the copies of descriptions": (objects, "consolidate", 1),
    "the certificate": (objects, "put_json", -1), "the last attributes": (MechanismStore, "update", -1),
}  # fmt: skip


def strike(monkeypatch: pytest.MonkeyPatch, write: str, breaks: Callable[[], None]) -> list[str]:
    """Have the disk break right before a write, once."""
    owner, name, number = WRITES[write]
    original, calls = getattr(owner, name), []

    def broken(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        last = named.get("state") == COMPLETE or any(argument is CERTIFICATE for argument in arguments)
        if len(calls) == number or (number < 0 and last and "struck" not in calls):
            calls.append("struck")
            breaks()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, broken)
    return calls


QUICK_BREAKS = {("full", "a receipt"), ("read-only", "a block")}


@pytest.mark.parametrize(
    ("fault", "write"),
    [
        pytest.param(*case, marks=() if case in QUICK_BREAKS else pytest.mark.slow)
        for case in itertools.product(("full", "read-only"), WRITES)
    ],
)
def test_a_disk_that_breaks_before(
    tmp_path: Path,
    small_job: Job,
    disk: Disk,
    inside: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    undisturbed_in_large_blocks: Undisturbed,
    fault: str,
    write: str,
) -> None:
    """One line that names the place, exit 3 on a full disk; in order again, run again and it is as ever."""
    path = disk / "s.zarr"
    job = job_file(tmp_path, fault_job(small_job, store=LARGE))
    command = ["run", job, "--store", path, "--progress", "none"]
    calls = strike(monkeypatch, write, disk.fill if fault == "full" else lambda: disk.remount("ro"))
    failed = inside(*command)
    assert "struck" in calls
    assert failed.code == (3 if fault == "full" else 2), failed.errors
    assert len(failed.errors) == 1, failed.errors
    assert not re.search(r"\.partial|[0-9a-f]{32}", failed.errors[0])
    assert str(path) in failed.errors[0]
    assert ("No space left" if fault == "full" else "Read-only") in failed.errors[0]
    kept = valid_receipts(path)
    disk.remount("rw,size=32m")
    if (path / "zarr.json").exists():
        assert MechanismStore.open(str(path)).state != COMPLETE
    assert inside(*command).code == 0
    same_as(undisturbed_in_large_blocks, path, kept)
    assert audit(str(path)).holds


# --- what is left behind --------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def long_job(small_job: Job, kind: str) -> dict[str, dict[str, Any]]:
    """Return a job with a seed in a moment, and then some seconds of blocks."""
    return small_job(domain={"refine": [200]}, cluster={"kind": kind})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        ("local", "group"),
        pytest.param("inline", "command", marks=pytest.mark.slow),
        pytest.param("local", "command", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda s: s.name
)
def test_after_a_signal_nothing_is_left(
    tmp_path: Path,
    small_job: Job,
    processes: Processes,
    scratch: Path,
    kind: str,
    whom: str,
    how: signal.Signals,
) -> None:
    """A batch system sends SIGTERM, to all processes of a job or to the first."""
    job, store = job_file(tmp_path, long_job(small_job, kind)), tmp_path / "s.zarr"
    command = processes.mdpext("run", job, "--store", store, "--progress=none", env={"TMPDIR": str(scratch)})
    wait_until(lambda: receipt_files(store) or command.ended(), "a first receipt")
    (os.killpg if whom == "group" else os.kill)(command.pid, how)
    assert command.code() == 3, command.stderr
    assert command.stderr.splitlines() == [INTERRUPTED]
    wait_until(lambda: not command.members(), "all its processes to end", 30)
    assert not list(scratch.iterdir())
    assert MechanismStore.open(str(store)).state != COMPLETE


@pytest.mark.slow
def test_run_leaves_nothing(tmp_path: Path, small_job: Job, processes: Processes, scratch: Path) -> None:
    job, store = job_file(tmp_path, long_job(small_job, "local")), tmp_path / "s.zarr"
    how = ("--store", store, "--json", "--progress", "none")
    command = processes.mdpext("run", job, *how, env={"TMPDIR": str(scratch)})
    wait_until(lambda: receipt_files(store) or command.ended(), "a first receipt")
    command.workers()[0].kill()
    assert command.code() == 0, command.stderr
    assert json.loads(command.stdout)["state"] == COMPLETE
    assert not command.stderr
    wait_until(lambda: not command.members(), "all its processes to end", 30)
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_scratch_of_killed_run(tmp_path: Path, small_job: Job, processes: Processes, scratch: Path) -> None:
    job, store = job_file(tmp_path, fault_job(small_job, cluster=LOCAL)), tmp_path / "s.zarr"
    command = processes.mdpext("run", job, "--store", store, env={"TMPDIR": str(scratch)})
    wait_until(lambda: receipt_files(store) or command.ended(), "a first receipt")
    command.kill_group()
    assert list(scratch.iterdir())
    processes.done("run", job, "--store", store, env={"TMPDIR": str(scratch)})
    assert not list(scratch.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", mostly_slow(["status --json", "status", "audit --json"], "status"))
def test_a_closed_pipe_is_no_crash(processes: Processes, undisturbed: Undisturbed, arguments: str) -> None:
    """As in ``mdpext status STORE | head -0``, and of those who read neither answers nor errors."""
    name, *options = arguments.split()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        command = processes.mdpext(name, undisturbed.path, *options, stdout=unread)
    assert command.code() == 141
    assert "Traceback" not in command.stderr
    assert "BrokenPipe" not in command.stderr


# --- frozen, and clocks ---------------------------------------------------------------------------

# As long as the scheduler waits for a worker that says nothing; it never waits less than five seconds.
IMPATIENT = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "3s"}


@pytest.mark.slow
def test_a_worker_frozen_for_long_is_given_up_and_does_no_harm_afterwards(
    tmp_path: Path, small_job: Job, processes: Processes, undisturbed: Undisturbed
) -> None:
    """The others finish the job; then it is let go on with whatever it was at."""
    _, address = processes.scheduler(env=IMPATIENT)
    processes.worker(address)
    frozen = processes.worker(address, "--no-nanny")
    scene = Scene(processes, tmp_path, fault_job(small_job))
    command = scene.run(*scene.at(address))
    wait_until(lambda: receipts_of(scene.store, frozen.pid) or command.ended(), "a receipt of that worker")
    os.kill(frozen.pid, signal.SIGSTOP)
    kept = valid_receipts(scene.store)
    try:
        assert command.code() == 0, command.stderr
        same_as(undisturbed, scene.store, kept)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    # It learns that it has been given up, and ends, or reports as a new one.
    wait_until(lambda: frozen.ended() or "Starting established" in frozen.stderr, "the worker to notice")
    processes.end()
    same_as(undisturbed, scene.store, kept)
    assert audit(str(scene.store)).holds


@pytest.mark.slow
def test_a_frozen_worker(tmp_path: Path, small_job: Job, processes: Any, undisturbed: Undisturbed) -> None:
    scene = Scene(processes, tmp_path, fault_job(small_job, cluster=LOCAL))
    command = scene.run(env=IMPATIENT)
    wait_until(lambda: receipt_files(scene.store) or command.ended(), "a first receipt")
    command.workers()[0].send_signal(signal.SIGSTOP)
    kept = valid_receipts(scene.store)
    assert command.code() == 0, command.stderr
    wait_until(lambda: not command.members(), "all its processes to end", 30)
    same_as(undisturbed, scene.store, kept)


def receipts_of(store: Path, pid: int) -> list[Path]:
    """Return the receipts that a process has written."""
    return [file for file in receipt_files(store) if f':{pid}"' in file.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"), [(tasks, "extended_block"), (tasks, "encode_block")], ids=["extend", "encode"]
)
def test_a_task_that_slept_while_others_did_its_work_writes_nothing(
    tmp_path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """A store that is finished meanwhile is left alone, and so is one that has been made anew."""
    path, spec = tmp_path / "s.zarr", parse_job(fault_job(small_job, store=LARGE))
    other = parse_job(fault_job(small_job, store=LARGE, privacy={"epsilon_per_km": 0.5}))
    init(spec, str(path))
    monkeypatch.setattr(tasks, "_LONG_SECONDS", 0.0)

    def asleep_until(done: Callable[[], object]) -> None:
        def asleep(*arguments: Any) -> Any:
            monkeypatch.setattr(owner, name, original)
            found = original(*arguments)
            done()
            return found

        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, asleep)
        tasks.extend_block(str(path), 1)

    asleep_until(lambda: build(spec, str(path)))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    tasks.extend_block(str(path), 1)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    receipts.void(MechanismStore.open(str(path), mode="r+").objects, [1])
    MechanismStore.open(str(path), mode="r+").update(state="extending")
    with pytest.raises(StoreError, match="the seed has changed; is another run at work"):
        asleep_until(lambda: build(other, str(path), overwrite=True))
    assert audit(str(path)).holds
    open_mechanism(path, verify=True)


# Python runs this in every process before anything else.
WALL_CLOCK = """
import os, time
true_time = time.time
def wall_time():
    with open(os.environ["WALL_CLOCK"]) as behind:
        return true_time() - float(behind.read())
time.time = wall_time
"""


@pytest.mark.slow
def test_a_run_whose_clock_is_put_back_by_a_day_can_be_killed_and_run_again(
    tmp_path: Path, small_job: Job, processes: Processes, undisturbed: Undisturbed
) -> None:
    """Put back in client, scheduler and workers at once, while blocks are written.

    Dask goes by the clock on the wall and may then wait for a day.
    """
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(WALL_CLOCK)
    clock = tmp_path / "clock"
    clock.write_text("0")
    path = os.pathsep.join([str(tmp_path / "first"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "WALL_CLOCK": str(clock)}
    scene = Scene(processes, tmp_path, fault_job(small_job, cluster=LOCAL))
    command = scene.run("--json", env=env)
    wait_until(lambda: receipt_files(scene.store) or command.ended(), "a first receipt")
    kept = valid_receipts(scene.store)
    (tmp_path / "clock.new").write_text("86400")
    (tmp_path / "clock.new").rename(clock)
    time.sleep(1)
    command.kill()
    clock.write_text("0")
    again = scene.run("--json", env=env)
    assert again.code() == 0, again.stderr
    same_as(undisturbed, scene.store, kept)
    assert audit(str(scene.store)).holds


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", pytest.param("slurm", marks=pytest.mark.slow)])
def test_a_task_that_a_worker_cannot_hold_is_refused_before_work(small_job: Job, kind: str) -> None:
    def check(gib: float, **sections: dict[str, Any]) -> None:
        spec = parse_job(small_job(cluster={"kind": kind, "memory_gib": gib}, **sections))
        check_memory(spec, build_geometry(spec))

    check(0.25)
    refused(SpecError, r"^cluster\.memory_gib: .* pauses at 85% of 0\.15", check, 0.15)
    large = {"outputs": {"count": 400}, "domain": {"refine": [60]}, "store": {"block_cells": [9, 9]}}
    error = refused(SpecError, r"or smaller store\.block_cells", check, 0.5, **large)
    needed = float(re.search(r"needs ([\d.]+) GiB", str(error))[1])
    check(1.02 * needed / 0.85, **large)
    refused(SpecError, "", check, 0.98 * needed / 0.85, **large)
    check(0.5, **{**large, "store": {"block_cells": [1, 1]}})


GREEDY = """
import math, multiprocessing, time
import numpy as np
from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.extend.operator import Operator

class Greedy(Operator):
    def scores(self, corners):
        taken = []
        while multiprocessing.parent_process() is not None:  # in a worker
            taken.append(np.ones(2**21))
            time.sleep(0.01)
            assert len(taken) < 200, "3 GiB, and nobody minds"
        parts = math.prod(corners.refine)
        return interpolated(interpolated(corners.scores, parts), parts, axis=1)

    def steepening(self, delta_axis, delta_other):
        return 2.0
"""


@pytest.mark.slow
def test_a_task_over_its_memory_ends_the_run(tmp_path: Path, small_job: Job, processes: Processes) -> None:
    """The nanny kills the worker; after as many workers as are allowed to die, no more are tried."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    cluster = {"kind": "local", "workers": 1, "memory_gib": 0.5}
    job = small_job(extension={"method": "greedy:Greedy"}, cluster=cluster)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    store = tmp_path / "s.zarr"
    command = processes.mdpext("run", job_file(tmp_path, job), "--store", store, "--progress=none", env=env)
    assert command.code() == 3, command.stderr
    (line,) = command.stderr.splitlines()
    assert line.startswith("error: extend: workers keep dying (out of memory, or without mdpext_dask?); what")
    wait_until(lambda: not command.members(), "all its processes to end", 30)
    assert MechanismStore.open(str(store)).state == "extending"


# --- damage ---------------------------------------------------------------------------------------


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


NO_RECEIPT = "no receipt of blocks: 2"


def of_another(receipt: Path, block: int) -> None:
    content = {**json.loads(receipt.read_text()), "block": block}
    receipt.with_name(f"{block:08d}.json").write_text(json.dumps(content))


# What happens to a receipt, to a shard or to the store; what a finished store then complains of.
HARM: dict[str, tuple[Callable[[Path, Path, Path], object], str | None]] = {
    "receipt truncated": (lambda _, receipt, __: os.truncate(receipt, 40), NO_RECEIPT),
    "receipt empty": (lambda _, receipt, __: os.truncate(receipt, 0), NO_RECEIPT),
    "receipt garbage": (lambda _, receipt, __: receipt.write_bytes(b"\xff\x00\x80" * 99), NO_RECEIPT),
    "receipt of no sense": (
        lambda _, receipt, __: receipt.write_text('{"block": [2], "shards": 7}'), NO_RECEIPT
    ),
    "another block's receipt": (
        lambda _, receipt, __: shutil.copy(receipt.with_name("00000001.json"), receipt), NO_RECEIPT
    ),
    "receipts swapped": (
        lambda _, receipt, __: swap(receipt, receipt.with_name("00000001.json")), "no receipt of blocks: 1, 2"
    ),
    "receipt of a block that is none": (lambda _, receipt, __: of_another(receipt, 999), None),
    "receipt gone": (lambda _, receipt, __: receipt.unlink(missing_ok=True), NO_RECEIPT),
    "shard truncated": (lambda _, __, shard: os.truncate(shard, 100), "changed shards: probability/c/0/2/0"),
    "shard empty": (lambda _, __, shard: os.truncate(shard, 0), "changed shards: probability/c/0/2/0"),
    "shard changed": (lambda _, __, shard: flip_a_bit(shard), "changed shards: probability/c/0/2/0"),
    "shard gone": (lambda _, __, shard: shard.unlink(), "missing shards: probability/c/0/2/0"),
    "leftovers everywhere": (
        lambda store, receipt, shard: [
            (place / "zarr.json.0123.partial").write_bytes(b"{")
            for place in (store, receipt.parent, shard.parent, store / "seed", store / "audit")
        ],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "harm",
    mostly_slow(
        HARM, "receipt of a block that is none", "shard changed",
    ),
)  # fmt: skip
def test_what_is_damaged_is_named_when_finished_and_mended_by_running_again(
    tmp_path: Path, small_job: Job, undisturbed_in_large_blocks: Undisturbed, harm: str
) -> None:
    good, spec = undisturbed_in_large_blocks, parse_job(fault_job(small_job, store=LARGE))
    path = shutil.copytree(good.path, tmp_path / "s.zarr")
    spoil, complaint = HARM[harm]

    def spoilt() -> None:
        store = MechanismStore.open(str(path))
        spoil(path, path / receipts.key_of(2), path / store.shard_keys(store.plan[2])[0])

    spoilt()
    if complaint is None:
        open_mechanism(path, verify=True)
        assert audit(str(path)).holds
    else:
        refused(GuaranteeViolation, re.escape(complaint), open_mechanism, path, verify=True)
        if "receipt" in complaint:  # there is nothing to hold the bytes against
            refused(IncompleteStoreError, r"missing, in 1 range: [12]:3; run the job again", audit, str(path))
        else:
            assert not audit(str(path)).holds
            assert MechanismStore.open(str(path)).state == "refused"
        assert build(spec, str(path))["state"] == COMPLETE
        spoilt()  # and now while there is work to do
    MechanismStore.open(str(path), mode="r+").update(state="extending")
    assert build(spec, str(path))["state"] == COMPLETE
    same_as(good, path, {})
    assert {file.name for file in receipt_files(path)} == {file.name for file in receipt_files(good.path)}
    open_mechanism(path, verify=True)
    assert audit(str(path)).holds


# --- older stores ---------------------------------------------------------------------------------


@pytest.fixture
def oldest(tmp_path: Path) -> Path:
    """Return a store that the first code with a command line has written.

    That is the commit "Run the whole job on any executor, resumable, from the command line", with a lattice
    of 9 x 9 streets, cells of 1 km, ``refine = [2]``, ``budget = "bound"``, 5 outputs, 3 tasks. It says
    neither which cells it keeps nor what its problem hashes to.
    """
    with zipfile.ZipFile(Path(__file__).parents[1] / "support" / "data" / "oldest-store.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "old.zarr"


def test_the_oldest_store_is_read(oldest: Path, small_job: Job) -> None:
    mechanism = open_mechanism(oldest, verify=True)
    assert mechanism.row(lon=-73.98, lat=40.75).sum() == pytest.approx(1)
    assert mechanism.sample(lon=-73.98, lat=40.75, n=3).shape == (3, 2)
    refused(StoreError, "has no remap; run mdpext remap", open_mechanism, oldest, remap=True)
    summary = summarise(MechanismStore.open(str(oldest)))
    assert (summary["state"], summary["blocks_done"], summary["records"]) == (COMPLETE, 6, 49)
    assert summary["records_inside"] == 49
    assert (
        summary["loss_km"]
        == evaluate(str(oldest), bound=BoundRequest(seconds=0), attacks=None)["loss_km"]
        == 0.7582520068327583
    )
    for method in ("certificate", "exhaustive", "boundary"):
        report = audit(str(oldest), method)
        assert report.passed
        assert not report.changed
    assert audit(str(oldest)).epsilon == pytest.approx(summary["epsilon_certified"], rel=1e-12)
    assert MechanismStore.open(str(oldest)).state == COMPLETE
    # What netCDF cannot hold is text, and the CRS where mapping software looks for it, although the store has
    # neither.
    mechanism.dataset.to_netcdf(oldest / "old.nc", engine="scipy")
    assert "crs_wkt" in mechanism.dataset.prior.coords["spatial_ref"].attrs
    assert '"job": {' in (oldest / "zarr.json").read_text()
    # A job of today has keys that were not asked for then.
    with pytest.raises(StoreError, match=r"belongs to another job, which differs in .*domain\.rotation_deg"):
        build(parse_job(fault_job(small_job)), str(oldest))


def test_the_oldest_store_is_held_against_what_it_says(oldest: Path) -> None:
    store = MechanismStore.open(str(oldest), mode="r+")
    shard = oldest / store.shard_keys(store.plan[3])[0]
    flip_a_bit(shard)
    refused(GuaranteeViolation, "changed shards", open_mechanism, oldest, verify=True)
    flip_a_bit(shard)
    hashes = store.attributes["chunk_hashes"]
    store.update(chunk_hashes={**hashes, "digest": "0" * 64})
    refused(GuaranteeViolation, "chunk_hashes has changed", open_mechanism, oldest, verify=True)
    store.update(chunk_hashes=hashes)  # by now as the present version stores it
    assert '"job": {' not in (oldest / "zarr.json").read_text()
    assert open_mechanism(oldest, verify=True).sample(lon=-73.98, lat=40.75, n=3).shape == (3, 2)


def test_no_downgrade_to_the_oldest_layout(tmp_path: Path, undisturbed_in_large_blocks: Undisturbed) -> None:
    path = shutil.copytree(undisturbed_in_large_blocks.path, tmp_path / "s.zarr")
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"].pop("problem_sha256")
    (path / "zarr.json").write_text(json.dumps(root))
    refused(StoreError, "problem_sha256 missing", open_mechanism, path)
    # Nor its description be taken out of the digest.
    store = MechanismStore.open(str(undisturbed_in_large_blocks.path))
    digest = receipts.digest_of(store.read_receipts(), b"")
    path = shutil.copytree(undisturbed_in_large_blocks.path, tmp_path / "t.zarr")
    store = MechanismStore.open(str(path), mode="r+")
    store.update(chunk_hashes={**store.attributes["chunk_hashes"], "digest": digest})
    refused(GuaranteeViolation, "chunk_hashes", open_mechanism, path, verify=True)
