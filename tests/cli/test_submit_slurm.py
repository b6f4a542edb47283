"""Jobs on a real Slurm: as one job, as an array, followed, let go of, ended in the middle, refused."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.cli.submit.slurm import SlurmJobs
from mdpext_dask.compute.executor import open_executor
from mdpext_dask.errors import EXIT_BAD_INPUT, EXIT_GUARANTEE, EXIT_INCOMPLETE
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support import slurm_cluster
from tests.support.inside import Capture, Outcome, run_inside
from tests.support.problems import write_toml
from tests.support.processes import wait_until
from tests.support.slurm_cluster import Slurm
from tests.support.slurm_operators import FREE, HELD_BY, OPEN, setting

PROJECT = Path(__file__).resolve().parents[2]
# Each waits for many processes to start.
pytestmark = pytest.mark.timeout(600)
Job = Callable[..., dict[str, dict[str, Any]]]
# A block for each source cell.
BLOCKS = 21
HELD, BOLD = "tests.support.slurm_operators:Held", "tests.support.slurm_operators:Bold"
ARRAY_TASKS = 3


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Return a running Slurm."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with slurm_cluster.running(Path(folder), ARRAY_TASKS) as found:
                yield found
        except slurm_cluster.CannotStartError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> dict[str, bytes]:
    """Return the shards of the job, run in this process."""
    path = tmp_path_factory.mktemp("undisturbed") / "small.zarr"
    build(parse_job(small_job(store={"block_cells": [1, 1]})), str(path))
    return shards(path)


@pytest.fixture
def folder(tmp_path: Path, small_job: Job, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder, which Python and shells must quote, with the job; commands find Slurm."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    place = tmp_path / "it's $HERE"
    place.mkdir()
    job = small_job(store={"block_cells": [1, 1]}, cluster={"workers": 2, "walltime_hours": 0.2})
    write_toml(place / "job.toml", job)
    monkeypatch.setenv(HELD_BY, str(place / "small.zarr" / "receipts"))
    monkeypatch.chdir(place)
    yield place
    slurm.call("scancel", "--user=root")


def shards(store: Path) -> dict[str, bytes]:
    """Return what is stored of the mechanism's rows."""
    files = (file for file in (store / "probability" / "c").rglob("*") if file.is_file())
    return {str(file.relative_to(store)): file.read_bytes() for file in files}


def receipts(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (store / "receipts").glob("0*.json")}


def submission(*arguments: object) -> "subprocess.Popen[str]":
    """Start a submit as a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "mdpext_dask.cli", "submit", "job.toml", "--to", "slurm"]
    command += map(str, arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def held(store: Path, *arguments: object) -> "subprocess.Popen[str]":
    """Start a submit of a job that stops after its first blocks, and wait until it has."""
    process = submission("--set", f"extension.method={HELD}", *arguments)
    wait_until(lambda: len(receipts(store)) >= FREE, "blocks", 120)
    return process


def submitted(*arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """Submit, wait for the end, and return the document and what was said on standard error."""
    process = submission("--json", *arguments)
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err + outputs()
    assert "Traceback" not in err
    return json.loads(out), err


def outputs() -> str:
    return "".join(file.read_text() for file in Path().glob("*-slurm/*[0-9].out"))


def inside(capfd: Capture, *arguments: object) -> Outcome:
    return run_inside(capfd, "submit", "job.toml", "--to", "slurm", *arguments)


# --- on a real Slurm --------------------------------------------------------------------------------


def test_one_job_from_beginning_to_end(folder: Path, undisturbed: dict[str, bytes]) -> None:
    document, err = submitted()
    assert (document["state"], len(document["jobs"])) == ("done", 1)
    store = MechanismStore.open(str(folder / "small.zarr"))
    assert (store.state, len(store.read_receipts())) == ("complete", BLOCKS)
    assert shards(folder / "small.zarr") == undisturbed
    # Both workers had their share, and neither was this process.
    workers = {receipt.worker for receipt in store.read_receipts().values()}
    assert len(workers) == 2
    assert "note: submitted Slurm job" in err
    assert "Traceback" not in outputs()
    # There is nothing to do a second time.
    again, err = submitted()
    assert (again["state"], again["jobs"]) == ("done", [])
    assert "nothing to submit" in err


@pytest.mark.slow
def test_an_array_from_beginning_to_end(folder: Path, slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    # With one worker, so that there are few tasks.
    document, _ = submitted("--array", "--set", "cluster.workers=1")
    assert (document["state"], len(document["jobs"])) == ("done", 3)
    assert len([job for job in slurm.jobs() if job.startswith(f"{document['jobs'][1]}_")]) == ARRAY_TASKS
    assert shards(folder / "small.zarr") == undisturbed


def test_what_slurm_refuses_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = inside(capfd, "--detach", "--set", "cluster.queue=nowhere", "--json")
    assert code == EXIT_BAD_INPUT
    assert "refused by Slurm: Batch job submission failed: Invalid partition" in err.splitlines()[-1]
    assert json.loads(out)["exit_code"] == EXIT_BAD_INPUT
    assert not (folder / "small-slurm" / "submitted.json").exists()


@pytest.mark.usefixtures("folder")
def test_nothing_is_left_queued_where_part_of_a_chain_is_refused(
    slurm: Slurm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(slurm.jobs())
    # Slurm's own limit, not the one that is asked for, is in the way of the array only.
    monkeypatch.setattr("mdpext_dask.cli.submit.slurm._array_tasks", lambda: 1001)
    code, _, err = inside(capfd, "--array", "--detach", "--set", "cluster.workers=5")
    assert code == EXIT_BAD_INPUT
    assert "partition.sbatch: refused by Slurm" in err
    assert "Invalid job array specification" in err
    (job,) = set(slurm.jobs()) - before
    wait_until(lambda: slurm.jobs().get(job) == "CANCELLED", "the first of the chain to be cancelled")


def test_a_job_is_submitted_once(folder: Path, slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    held = ("--detach", "--set", 'cluster.options=["--hold"]', "--json")
    document = inside(capfd, *held).document()
    assert document["state"] == "submitted"
    (job,) = document["jobs"]
    assert json.loads((folder / "small-slurm" / "submitted.json").read_text())["jobs"] == [job]
    code, _, err = inside(capfd, *held)
    assert code == EXIT_BAD_INPUT
    assert f"Slurm job {job} of an earlier submit is still pending" in err
    slurm.call("scancel", job)
    assert inside(capfd, *held).document()["jobs"] != [job]


def test_state_of_jobs_that_slurm_does_not_know(folder: Path) -> None:
    assert SlurmJobs(("4000000",), folder).state().state == "gone"


@pytest.mark.slow
def test_many_parts_on_two_nodes(folder: Path, undisturbed: dict[str, bytes]) -> None:
    """As many tasks as Slurm lets an array have; then workers that reach each other between nodes."""
    document, _ = submitted("--array", "--set", "cluster.workers=4", "--store", "array.zarr")
    assert f"--array=0-{ARRAY_TASKS - 1}%4" in (folder / "small-slurm" / "partition.sbatch").read_text()
    assert document["state"] == "done"
    assert shards(folder / "array.zarr") == undisturbed
    sets = ("--set", 'cluster.options=["--nodes=2"]', "--set", "cluster.memory_gib=0.5")
    submitted(*sets, "--store", "nodes.zarr")
    assert shards(folder / "nodes.zarr") == undisturbed


@pytest.mark.slow
def test_a_job_goes_on_when_its_client_is_killed(folder: Path, undisturbed: dict[str, bytes]) -> None:
    process = submission()
    wait_until(lambda: receipts(folder / "small.zarr") != {}, "the first block", 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = str(folder / "small.zarr")
    wait_until(lambda: MechanismStore.open(store).state == "complete", "the job to end", 120)
    assert shards(folder / "small.zarr") == undisturbed


@pytest.mark.slow
def test_an_interrupt_lets_go_of_a_job(folder: Path, slurm: Slurm) -> None:
    process = held(folder / "small.zarr")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INCOMPLETE
    assert "no longer followed; Slurm job" in err.splitlines()[-1]
    assert "RUNNING" in slurm.jobs().values()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one job", "array"])
def test_a_cancelled_job_goes_on(kind: str, folder: Path, slurm: Slurm, undisturbed: Any) -> None:
    array, store = ["--array"] if kind == "array" else [], folder / "small.zarr"
    process = held(store, *array)
    slurm.call("scancel", "--user=root")
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_INCOMPLETE, err
    assert "has failed: cancelled" in err.splitlines()[-1]
    assert "submit again" in err.splitlines()[-1]
    done = receipts(store)
    assert FREE <= len(done) < BLOCKS
    (folder / OPEN).touch()
    document, _ = submitted("--set", f"extension.method={HELD}", *array)
    assert document["state"] == "done"
    assert shards(store) == undisturbed
    # What had been done was not done again.
    assert done.items() <= receipts(store).items()


@pytest.mark.slow
def test_a_job_that_slurm_queues_again(folder: Path, slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    """As it does when a node fails; whoever follows it still does."""
    process = held(folder / "small.zarr", "--json")
    done = receipts(folder / "small.zarr")
    (job,) = json.loads((folder / "small-slurm" / "submitted.json").read_text())["jobs"]
    slurm.call("scontrol", "requeue", job)
    (folder / OPEN).touch()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err + outputs()
    assert json.loads(out)["state"] == "done"
    assert shards(folder / "small.zarr") == undisturbed
    assert done.items() <= receipts(folder / "small.zarr").items()


@pytest.mark.slow
def test_slurm_may_be_away_for_a_while(folder: Path, slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    process = held(folder / "small.zarr", "--progress", "json")
    slurm.stop_controller()
    try:
        said = ""
        while "Slurm does not answer" not in said:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert said, "the submission has ended"
    finally:
        slurm.start_controller()
    (folder / OPEN).touch()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert shards(folder / "small.zarr") == undisturbed


@pytest.mark.slow
def test_workers_that_a_run_asks_for(folder: Path, slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    """With ``kind = "slurm"`` the run is here, and each worker is a job."""
    sets = ["cluster.kind=slurm", "cluster.memory_gib=1"]
    command = [sys.executable, "-W", "error", "-m", "mdpext_dask.cli", "run", "job.toml"]
    command += [word for one in sets for word in ("--set", one)]
    how: dict[str, Any] = {"env": {**os.environ, "DASK_JOBQUEUE__SLURM__INTERFACE": "lo"}, "timeout": 200}
    done = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shards(folder / "small.zarr") == undisturbed
    wait_until(lambda: not {"RUNNING", "PENDING"} & {*slurm.jobs().values()}, "the workers to end")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_workers_that_are_jobs_have_the_settings_of_all() -> None:
    import dask

    section = ClusterSection(kind="slurm", workers=1, memory_gib=1, walltime_hours=0.1)
    with dask.config.set({"jobqueue.slurm.interface": "lo"}), open_executor(section) as executor:
        names = [("distributed.worker.memory.spill",), ("distributed.worker.memory.pause",)]
        assert dict(executor.map("settings", setting, names)) == {0: False, 1: 0.85}
        assert executor.memory_bytes == 2**30


@pytest.mark.slow
def test_a_job_whose_time_is_up(folder: Path, undisturbed: dict[str, bytes]) -> None:
    arguments = ["--set", f"extension.method={HELD}", "--set", "cluster.walltime_hours=0.001"]
    _, err = submitted(*arguments, code=EXIT_INCOMPLETE)
    assert "its time was up (cluster.walltime_hours)" in err.splitlines()[-1]
    (folder / OPEN).touch()
    submitted(*arguments)
    assert shards(folder / "small.zarr") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one job", "array"])
def test_a_guarantee_that_does_not_hold_is_told(kind: str, folder: Path) -> None:
    arguments = ["--set", f"extension.method={BOLD}", *(["--array"] if kind == "array" else [])]
    document, err = submitted(*arguments, code=EXIT_GUARANTEE)
    assert document["error"] == "GuaranteeViolation"
    assert "exit code 1" in err.splitlines()[-1]
    assert MechanismStore.open(str(folder / "small.zarr")).state == "refused"


@pytest.mark.slow
def test_all_workers_die(folder: Path, slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    """A job without workers does not wait for its time to be up."""
    process = held(folder / "small.zarr")
    (job,) = json.loads((folder / "small-slurm" / "submitted.json").read_text())["jobs"]
    slurm.call("scancel", "--signal=KILL", f"{job}.0")
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_INCOMPLETE, err
    assert "were killed; what is done is kept" in err.splitlines()[-1]
    (folder / OPEN).touch()
    submitted("--set", f"extension.method={HELD}")
    assert shards(folder / "small.zarr") == undisturbed
