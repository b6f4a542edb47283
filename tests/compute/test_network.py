"""Scheduler, workers and client as processes of their own, on one machine and on several that are cut off."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from mdpext_dask import audit, build
from mdpext_dask.compute import executor as cluster_module
from mdpext_dask.compute.executor import DaskExecutor, open_executor
from mdpext_dask.errors import ClusterError, SpecError, StoreError
from mdpext_dask.events import Event, TaskDone
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.hosts import Network, network
from tests.support.problems import write_toml
from tests.support.processes import Command, Host, Processes, free_ports, processes_in, wait_until
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
SlowJob = Callable[[str], dict[str, dict[str, Any]]]

# An operator that takes its time where it is told to, so that there is a middle to do something in.
SLOW = """
import os
import time

from mdpext_dask.extend.log_convex import LogConvex
from tests.support.problems import write_toml


class Slow(LogConvex):
    def rows(self, corners):
        time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
        return super().rows(corners)
"""
DASK_YAML = Path(__file__).resolve().parents[2] / "deploy" / "dask.yaml"
# The least that Dask takes is 11 s; a cut cable is noticed after so long.
TCP_SECONDS = 12
CUT = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{TCP_SECONDS}s"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the slow operator, which this process can import, too."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "slow_operator.py").write_text(SLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def job(small_job: Job) -> SlowJob:
    """Return a function from a scheduler's address, or "" for none, to a job of 21 blocks."""

    def make(address: str) -> dict[str, dict[str, Any]]:
        where = {"kind": "address", "address": address} if address else {"kind": "inline"}
        own = {"method": "slow_operator:Slow"}
        return small_job(extension=own, store={"block_cells": [1, 1]}, cluster=where)

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, job: SlowJob, library: Path) -> Path:  # noqa: ARG001
    """Return the store that the job gives in one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "s.zarr"
    build(parse_job(job("")), str(path))
    return path


@pytest.fixture
def here(tmp_path: Path, library: Path) -> Iterator[Processes]:
    settings = {"DASK_CONFIG": str(DASK_YAML), "PYTHONPATH": str(library), "SLOW_SECONDS": "0.3"}
    with processes_in(tmp_path / "here", settings) as made:
        yield made


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network("sched", "one", "two", "client") as made:
        yield made


def same_shards(path: Path, reference: Path) -> bool:
    files = [f.relative_to(reference) for f in (reference / "probability").rglob("*") if f.is_file()]
    assert len(files) > 21
    return all((path / f).read_bytes() == (reference / f).read_bytes() for f in files)


def assert_sound(path: Path, reference: Path) -> None:
    assert same_shards(path, reference)
    assert audit(str(path)).holds


def blocks_done(path: Path) -> int:
    return len(list(path.glob("receipts/0*.json")))


def workers_of(path: Path) -> set[str]:
    """Return who wrote the blocks of a store."""
    return {receipt.worker for receipt in MechanismStore.open(str(path)).read_receipts().values()}


def at_block(number: int, act: Callable[[], None]) -> Callable[[Event], None]:
    """Return an observer that does something once, after so many blocks."""
    seen: list[Event] = []

    def observe(event: Event) -> None:
        if isinstance(event, TaskDone) and event.stage == "extend":
            seen.append(event)
            if len(seen) == number:
                act()

    return observe


def nothing(number: int) -> int:
    return number


def failing(error: BaseException) -> None:
    raise error


def executor_at(address: str) -> None:
    """Open and close the executor of a scheduler."""
    with open_executor(ClusterSection(kind="address", address=address)):
        pass


# --- one machine ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_come_and_go(tmp_path: Path, job: SlowJob, undisturbed: Path, here: Processes) -> None:
    here.scheduler()
    file = here.folder / "scheduler.json"
    first = here.worker(str(file))
    later: list[Command] = []
    path = tmp_path / "s.zarr"

    def leave() -> None:
        wait_until(lambda: len(workers_of(path)) == 2, later[0])
        first.process.send_signal(signal.SIGTERM)

    join, leaves = at_block(2, lambda: later.append(here.worker(str(file)))), at_block(6, leave)
    spec = parse_job(job(str(file)))
    summary = build(spec, str(path), observer=lambda event: (join(event), leaves(event))[0])
    assert summary["state"] == "complete"
    assert first.code() == 0
    assert len(workers_of(path)) == 2
    assert same_shards(path, undisturbed)


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str]]:
    """Return a scheduler without workers, and its address."""
    with processes_in(tmp_path_factory.mktemp("lonely"), {"DASK_CONFIG": str(DASK_YAML)}) as made:
        yield made.scheduler()


def test_a_scheduler_without_workers(lonely: tuple[Command, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdpext_dask.compute.workers.CONNECT_SECONDS", 0.5)
    with pytest.raises(ClusterError, match=f"scheduler with workers answers at {lonely[1]}: .*0/1 workers"):
        executor_at(lonely[1])


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 1)
    refused(ClusterError, f"answers at {address}", executor_at, address)
    assert capfd.readouterr() == ("", "")


def test_all_workers_lost_for_good(lonely: tuple[Command, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_ASK_SECONDS", 0.2)
    with Client(lonely[1]) as client:
        executor = DaskExecutor(client, on_this_machine=False, return_seconds=0.5)
        with pytest.raises(ClusterError, match="extend: there are no workers, for 0 s; what"):
            list(executor.map("extend", nothing, [(1,)]))


@pytest.mark.parametrize(
    "error", [TimeoutError("its own"), ConnectionResetError("its own"), OSError("its own")]
)
def test_an_error_of_a_task_is_no_lost_scheduler(scheduler_address: str, error: OSError) -> None:
    with Client(scheduler_address) as client:
        executor = DaskExecutor(client, on_this_machine=False)
        refused(type(error), "its own", lambda: list(executor.map("failing", failing, [(error,)])))


def test_a_scheduler_that_freezes(lonely: tuple[Command, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(cluster_module, "_ANSWER_SECONDS", 1)
    scheduler, address = lonely
    with Client(address, timeout=1) as client:
        executor = DaskExecutor(client, on_this_machine=False)
        tasks = executor.map("extend", nothing, [(1,)])
        assert executor.workers == 1  # there are none, but work is divided by it
        scheduler.process.send_signal(signal.SIGSTOP)
        try:
            refused(ClusterError, f"the scheduler at {address} does not answer any more", next, tasks)
        finally:
            scheduler.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_scheduler_that_is_killed_is_one_error_and_the_next_one_goes_on(
    tmp_path: Path, job: SlowJob, undisturbed: Path, here: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    port, path = free_ports(1)[0], tmp_path / "s.zarr"
    scheduler, address = here.scheduler(port=port)
    here.worker(address)
    spec = parse_job(job(address))
    with pytest.raises(ClusterError, match=f"the scheduler at {address} does not answer any more"):
        build(spec, str(path), observer=at_block(3, scheduler.kill))
    assert capfd.readouterr() == ("", "")
    assert blocks_done(path) >= 3
    here.environment["SLOW_SECONDS"] = "0"
    here.scheduler(port=port)
    here.worker(address)
    assert build(spec, str(path))["state"] == "complete"
    assert same_shards(path, undisturbed)


# --- software that differs ------------------------------------------------------------------------


def other_versions(folder: Path, **packages: str) -> dict[str, str]:
    """Return an environment in which packages say that they are of other versions."""
    for name, version in packages.items():
        description = folder / f"{name}-{version}.dist-info" / "METADATA"
        description.parent.mkdir(parents=True)
        description.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "package",
    [
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["zarr", pytest.param("mdpext_dask", marks=pytest.mark.slow)]
        )
    ],
)
def test_a_worker_with_other_software(tmp_path: Path, small_job: Job, here: Processes, package: str) -> None:
    _, address = here.scheduler()
    here.worker(address, env=other_versions(tmp_path / "other", **{package: "9.9.9"}))
    spec = parse_job(small_job(cluster={"kind": "address", "address": address}))
    name = package.replace("_", "-")
    said = rf"worker tcp://127\.0\.0\.1:\d+ has {name} 9\.9\.9 instead of {metadata.version(name)}"
    refused(SpecError, said, lambda: build(spec, str(tmp_path / "s.zarr")))
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.slow
@pytest.mark.parametrize("member", ["worker", "scheduler"])
def test_a_member_without_this_package(tmp_path: Path, small_job: Job, here: Processes, member: str) -> None:
    (tmp_path / "mdpext_dask.py").write_text("raise ImportError('not here')")
    env = {"PYTHONPATH": str(tmp_path)}
    _, address = here.scheduler(env=env if member == "scheduler" else None)
    here.worker(address, env=env if member == "worker" else None)
    spec = parse_job(small_job(cluster={"kind": "address", "address": address}))
    with pytest.raises(SpecError, match=rf"{member}[\w:/. ]* does not know mdpext_dask \(.*not.*install"):
        build(spec, str(tmp_path / "s.zarr"))
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.slow
def test_one_that_joins_late_is_refused(tmp_path: Path, job: SlowJob, here: Processes, library: Path) -> None:
    _, address = here.scheduler()
    here.worker(address)
    other = other_versions(tmp_path / "other", zarr="9.9.9")
    other["PYTHONPATH"] += f":{library}"
    path = tmp_path / "s.zarr"
    spec = parse_job(job(address))
    with pytest.raises(SpecError, match=r"worker tcp://\S+ has zarr 9\.9\.9 instead of"):
        build(spec, str(path), observer=at_block(2, lambda: here.worker(address, env=other) and None))
    assert 2 <= blocks_done(path) < 21
    assert len(workers_of(path)) == 1


# --- folders that differ --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_store_says_so(tmp_path: Path, job: SlowJob, here: Processes) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a process may not have folders of its own here")
    folder = tmp_path / "shared"
    folder.mkdir()
    cover = f'mount -t tmpfs none "{folder}" && exec "$@"'
    hidden = Host("elsewhere", "127.0.0.1", ("unshare", "--mount", "sh", "-c", cover, "sh"))
    _, address = here.scheduler()
    here.worker(address, host=hidden)
    spec = parse_job(job(address))
    with pytest.raises(StoreError, match=r"s\.zarr: no such store \(so says worker tcp://127"):
        build(spec, str(folder / "s.zarr"))
    assert blocks_done(folder / "s.zarr") == 0


# --- who may speak to whom ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the settings of a cluster whose members show each other a certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no command openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), check=True, cwd=folder, capture_output=True)
    prefix = "DASK_DISTRIBUTED__COMM__"
    settings = {f"{prefix}REQUIRE_ENCRYPTION": "True", f"{prefix}TLS__CA_FILE": str(folder / "cert.pem")}
    for member in ("SCHEDULER", "WORKER", "CLIENT"):
        settings[f"{prefix}TLS__{member}__CERT"] = str(folder / "cert.pem")
        settings[f"{prefix}TLS__{member}__KEY"] = str(folder / "key.pem")
    return settings


@pytest.mark.slow
def test_with_certificates_strangers_are_kept_out(
    tmp_path: Path, job: SlowJob, undisturbed: Path, here: Processes, certificate: dict[str, str]
) -> None:
    _, address = here.scheduler("--protocol", "tls", env=certificate)
    here.worker(address, env={**certificate, "SLOW_SECONDS": "0"})
    path, toml = tmp_path / "s.zarr", tmp_path / "job.toml"
    write_toml(toml, job(address))
    command = ("run", toml, "--store", path, "--json", "--progress", "none")
    code, message = here.mdpext(*command).refusal()
    assert code == 3
    assert address in message
    assert not path.exists()
    assert here.mdpext(*command, env=certificate).document()["state"] == "complete"
    assert same_shards(path, undisturbed)


@pytest.mark.slow
def test_a_worker_whose_lifetime_ends(tmp_path: Path, job: SlowJob, undisturbed: Path, here: Any) -> None:
    _, address = here.scheduler()
    brief = here.worker(address, "--lifetime", "8s")
    here.worker(address)
    path = tmp_path / "s.zarr"
    spec = parse_job(job(address))
    ended = at_block(10, lambda: wait_until(brief.ended, brief))
    assert build(spec, str(path), observer=ended)["state"] == "complete"
    assert brief.code() == 0
    assert same_shards(path, undisturbed)


# --- several machines -----------------------------------------------------------------------------


class Several:
    """A scheduler, two workers and a client on hosts of their own, with a run in its middle."""

    def __init__(self, place: Processes, hosts: Network, job: SlowJob, folder: Path) -> None:
        self.place, self.hosts = place, hosts
        self.path, self.toml = folder / "s.zarr", folder / "job.toml"
        place.environment.update(CUT)
        _, self.address = place.scheduler(host=hosts["sched"])
        self.workers = {name: self.work(name) for name in ("one", "two")}
        write_toml(self.toml, job(self.address))

    def work(self, name: str) -> Command:
        return self.place.worker(self.address, host=self.hosts[name])

    def run(self) -> Command:
        command = ("run", self.toml, "--store", self.path, "--json", "--progress", "none")
        return self.place.mdpext(*command, host=self.hosts["client"])

    def running(self, blocks: int) -> Command:
        """Start a run and return it once so many blocks are done."""
        client = self.run()
        wait_until(lambda: blocks_done(self.path) >= blocks or client.ended(), client)
        assert not client.ended(), client.stderr
        return client


@pytest.fixture
def several(here: Processes, hosts: Network, job: SlowJob, tmp_path: Path) -> Several:
    here.environment["SLOW_SECONDS"] = "2"
    return Several(here, hosts, job, tmp_path)


@pytest.mark.slow
def test_a_host_is_lost(here: Processes, hosts: Any, job: SlowJob, tmp_path: Path, undisturbed: Path) -> None:
    """A cable that is out for a second or two is no matter: nothing is lost, nobody is given up."""
    several = Several(here, hosts, job, tmp_path)
    client = several.running(4)
    hosts.cut_for(1.5, "one")
    assert client.document()["state"] == "complete"
    assert not any(worker.ended() for worker in several.workers.values())
    assert len(workers_of(several.path)) == 2
    assert same_shards(several.path, undisturbed)


@pytest.mark.slow
def test_a_worker_that_is_cut_off_comes_back(several: Several, hosts: Network, undisturbed: Path) -> None:
    client = several.running(4)
    hosts.cut("one")
    started = time.monotonic()
    # It ends when it notices, and whoever started it may start it again.
    several.workers["one"].code(5 * TCP_SECONDS)
    hosts.mend("one")
    assert not client.ended(), client.stderr
    several.work("one")
    assert client.document()["state"] == "complete"
    assert time.monotonic() - started < 60
    assert len(workers_of(several.path)) == 3
    assert_sound(several.path, undisturbed)


@pytest.mark.slow
def test_a_worker_cut_off_at_the_end_of_a_stage(several: Several, hosts: Network, undisturbed: Path) -> None:
    client = several.running(16)
    hosts.cut("one")
    started = time.monotonic()
    assert client.document()["state"] == "complete"
    assert time.monotonic() - started < 5 * TCP_SECONDS
    assert_sound(several.path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["sched", "client"])
def test_client_and_scheduler_part(several: Several, hosts: Network, undisturbed: Path, lost: str) -> None:
    client = several.running(4)
    hosts.cut(lost)
    started = time.monotonic()
    code, message = client.refusal()
    assert time.monotonic() - started < 5 * TCP_SECONDS
    assert code == 3
    assert f"the scheduler at {several.address} does not answer any more" in message
    hosts.mend(lost)
    if lost == "sched":
        for name, worker in several.workers.items():
            worker.code()  # they have no one to work for
            several.work(name)
    assert several.run().document()["state"] == "complete"
    assert_sound(several.path, undisturbed)


@pytest.mark.slow
def test_client_and_scheduler_are_cut_for_a_moment(several: Several, hosts: Any, undisturbed: Path) -> None:
    client = several.running(4)
    for name in ("sched", "client"):
        hosts.cut_for(4, name)
        time.sleep(1)
    assert client.document()["state"] == "complete"
    assert same_shards(several.path, undisturbed)
