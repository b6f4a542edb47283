"""What is handed to a cluster, and how a job is followed, without any cluster."""

import itertools
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdpext_dask.cli.submit import follow
from mdpext_dask.cli.submit.files import job_text
from mdpext_dask.cli.submit.follow import JobState
from mdpext_dask.cli.submit.slurm import ONE_JOB, SlurmJobs, array_scripts, run_scripts
from mdpext_dask.compute.dask_settings import nested
from mdpext_dask.errors import (
    EXIT_BAD_INPUT,
    ClusterError,
    GuaranteeViolation,
    IncompleteStoreError,
    SolverError,
    SpecError,
)
from mdpext_dask.events import Event, StageFinished
from mdpext_dask.job.spec import load_job, parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.inside import run_inside
from tests.support.problems import write_toml
from tests.support.refusals import refused
from tests.support.submissions import notes_of, program

PROJECT = Path(__file__).resolve().parents[2]
SHIPPED = PROJECT / "deploy" / "slurm"
Job = Callable[..., dict[str, dict[str, Any]]]
Submit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, small_job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> Submit:
    """Return a function that submits a small job to Slurm where there is none: code, output, errors."""
    write_toml(tmp_path / "job.toml", small_job())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    return partial(run_inside, capfd, "submit", "job.toml")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


# --- files ------------------------------------------------------------------------------------------


def test_shipped_scripts_are_those_of_the_demo() -> None:
    spec = load_job(PROJECT / "workflows" / "manhattan.toml")
    setting = (spec, "/shared/manhattan.zarr", Path("/shared/venv/bin/python"))
    written = {**run_scripts(*setting), **array_scripts(*setting, plan_job(spec)["blocks"], 1001)}
    assert {name: (SHIPPED / name).read_text() for name in written} == written
    assert {path.name for path in SHIPPED.iterdir()} == {*written, "jobqueue.yaml"}
    for name in written:
        subprocess.run(["bash", "-n", SHIPPED / name], check=True)


def test_shipped_settings_of_jobqueue_are_known_to_it() -> None:
    jobqueue = pytest.importorskip("dask_jobqueue")
    own = yaml.safe_load((Path(jobqueue.__file__).parent / "jobqueue.yaml").read_text())
    shipped = yaml.safe_load((SHIPPED / "jobqueue.yaml").read_text())
    assert ({*shipped}, {*shipped["jobqueue"]}) == ({"jobqueue"}, {"slurm"})
    assert {*shipped["jobqueue"]["slurm"]} <= {*own["jobqueue"]["slurm"]}


def test_the_job_that_is_written_is_the_same_job(small_job: Job, tmp_path: Path) -> None:
    fields = 'name "quoted" \\ ü.csv'
    (tmp_path / fields).write_text("lon,lat\n-73.98,40.75\n-73.97,40.76\n")
    job = small_job(
        domain={"metric_p": "inf", "bbox": [-74.0, 40.7, -73.9, 40.8]}, seed={"refine_seconds": 1e-3},
        prior={"kind": "file", "file": str(tmp_path / fields)}, cluster={"workers": 7},
        compare={"methods": ["em"], "cases": {"a b": ["outputs.count=4"]}},
    )  # fmt: skip
    spec = parse_job(job)
    path = tmp_path / "written.toml"
    path.write_text(job_text(spec, ONE_JOB), encoding="utf-8")
    again = load_job(path)
    assert (again.fingerprint(), again) == (spec.fingerprint(), spec.model_copy(update={"cluster": ONE_JOB}))
    assert tomllib.loads(path.read_text())["cluster"] == {"kind": "address", "address": "scheduler.json"}


def test_every_shipped_job_can_be_written(fixed_problem: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "written.toml"
    for workflow in (PROJECT / "workflows").rglob("*.toml"):
        spec = load_job(workflow)
        path.write_text(job_text(spec, ONE_JOB), encoding="utf-8")
        assert load_job(path) == spec.model_copy(update={"cluster": ONE_JOB})
    # With a loss file, it is its content that counts.
    loss = f"loss.file={fixed_problem('rome-20km')}"
    spec = load_job(PROJECT / "workflows" / "rome-20km-fixed.toml", [loss])
    path.write_text(job_text(spec, ONE_JOB), encoding="utf-8")
    assert load_job(path).fingerprint() == spec.fingerprint()


def test_what_a_job_asks_of_slurm(small_job: Job) -> None:
    section = {"workers": 12, "memory_gib": 1.5, "queue": "long", "account": "city", "walltime_hours": 36.01}
    job = small_job(cluster={**section, "options": ["--exclusive", "--qos=low"]})
    setting = (parse_job(job), "s3://bucket/it's.zarr", Path("/with space/python"))
    (run,) = run_scripts(*setting).values()
    common = ["--mem-per-cpu=1536M", "--time=36:01:00", "--partition=long", "--account=city"]
    assert {*common, "--ntasks=13", "--cpus-per-task=1", "--job-name=small-run"} < {*directives(run)}
    # What the user says goes last, so that it counts.
    assert directives(run)[-2:] == ["--exclusive", "--qos=low"]
    assert {"count=12", "limit=1.5GiB"} < {*run.splitlines()}
    given = [line for line in run.splitlines() if line.startswith(("python=", "store="))]
    echo = "\n".join([*given, 'printf "%s\\n" "$python" "$store"'])
    echoed = subprocess.check_output(["bash", "-c", echo], text=True)
    assert echoed == "/with space/python\ns3://bucket/it's.zarr\n"
    scripts = array_scripts(*setting, 1000, 1001)
    assert list(scripts) == ["init.sbatch", "partition.sbatch", "finalise.sbatch"]
    assert all({*common} < {*directives(script)} for script in scripts.values())
    # One node has so many processors.
    assert {"--ntasks=1", "--cpus-per-task=8"} < {*directives(scripts["init.sbatch"])}
    assert "--array=0-47%12" in directives(scripts["partition.sbatch"])


@pytest.mark.parametrize(
    ("blocks", "workers", "most"), [(1, 4, 1001), (21, 2, 1001), (21, 3, 5), (900, 4096, 101), (7, 4, 1)]
)
def test_tasks_of_an_array_share_all_blocks(small_job: Job, blocks: int, workers: int, most: int) -> None:
    spec = parse_job(small_job(cluster={"workers": workers}))
    script = array_scripts(spec, "/a.zarr", Path("/bin/echo"), blocks, most)["partition.sbatch"]
    (array,) = [line for line in directives(script) if line.startswith("--array=")]
    last = int(array.removeprefix("--array=0-").partition("%")[0])
    assert last < most
    # Run as Slurm would, with a program that prints its arguments.
    loop = f'for SLURM_ARRAY_TASK_ID in $(seq 0 {last}); do (eval "$1"); done'
    said = subprocess.run(["bash", "-c", loop, "-", script], capture_output=True, text=True, check=True)
    ranges = [line.split("--range ")[1].split()[0].split(":") for line in said.stdout.splitlines()]
    edges = [(int(first), int(end)) for first, end in ranges]
    assert (edges[0][0], edges[-1][1]) == (0, blocks)
    assert all(first < end for first, end in edges)
    assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(edges))


# --- the command ------------------------------------------------------------------------------------


def test_a_dry_run_writes_all_and_submits_nothing(submit: Submit, tmp_path: Path) -> None:
    code, out, err = submit("--to", "slurm", "--dry-run", "--set", "cluster.workers=3")
    assert (code, err) == (0, "")
    place = tmp_path / "small-slurm"
    written = {path.name for path in place.iterdir()}
    assert written == {"job.toml", "dask.yaml", "run.sbatch", ".mdpext-submit"}
    assert shlex.split(out) == ["sbatch", "--parsable", f"--chdir={place}", str(place / "run.sbatch")]
    assert yaml.safe_load((place / "dask.yaml").read_text()) == nested()
    script = (place / "run.sbatch").read_text()
    assert f"python={Path(sys.executable).absolute()}" in script
    assert f"store={tmp_path / 'small.zarr'}" in script
    assert not (tmp_path / "small.zarr").exists()


def test_a_dry_run_of_an_array_prints_lines_for_a_shell(submit: Submit, tmp_path: Path) -> None:
    place = tmp_path / "a folder"
    code, out, _ = submit("--to", "slurm", "--dry-run", "--array", "--folder", place)
    assert code == 0
    # A shell with a program in place of sbatch, which notes how it was called.
    program(tmp_path, "sbatch", f'echo "$@" >> "{tmp_path}/calls"\necho 4$#')
    subprocess.run(["/bin/bash", "-ec", out], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    names = [call.split()[-1].rpartition("/")[2] for call in calls]
    assert names == ["init.sbatch", "partition.sbatch", "finalise.sbatch"]
    assert ["afterok" in call for call in calls] == [False, True, True]
    assert "--dependency=afterok:43 " in calls[1]
    assert tomllib.loads((place / "job.toml").read_text())["cluster"] == {"kind": "local", "workers": 2}


def test_without_slurm_there_is_one_line_and_the_files(submit: Submit, tmp_path: Path) -> None:
    code, out, err = submit("--to", "slurm", "--json")
    assert code == EXIT_BAD_INPUT
    assert err.startswith("error: --to slurm: there is no sbatch here; ")
    assert err.count("\n") == 1
    assert json.loads(out)["error"] == "SpecError"
    assert (tmp_path / "small-slurm" / "run.sbatch").is_file()
    assert not (tmp_path / "small-slurm" / "submitted.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "moon"], "--to: must be slurm or kubernetes, got 'moon'"),
        (["--to", "slurm", "--set", "domain.bbox=[0.0, 0.0, 1.0, 1.0]"], "no road within reach"),
        (["--to", "slurm", "--folder", "job.toml"], "job.toml: cannot be written"),
        (["--to", "slurm", "--store", "job.toml"], "job.toml: is a file, not a store"),
    ],
)
def test_careless_submissions(submit: Submit, arguments: list[str], said: str, tmp_path: Path) -> None:
    code, _, err = submit(*arguments)
    assert code == EXIT_BAD_INPUT
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*-slurm"))


def test_another_job_s_store_is_not_submitted_to(submit: Submit, tmp_path: Path, small_job: Job) -> None:
    init(parse_job(small_job(outputs={"count": 5})), str(tmp_path / "small.zarr"))
    code, _, err = submit("--to", "slurm")
    assert code == EXIT_BAD_INPUT
    assert "belongs to another job, which differs in outputs.count" in err


# --- what Slurm says --------------------------------------------------------------------------------


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Return a function that sets what ``scontrol show job N`` says."""
    said = f'cat "{tmp_path}/said-$3" 2>/dev/null && exit 0'
    unknown = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
    program(tmp_path, "scontrol", f"{said}\n{unknown}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda job, text: (tmp_path / f"said-{job}").write_text(text) and None


def part(job: str, state: str, reason: str = "None", code: str = "0:0", array: str = "") -> str:
    task = f"ArrayJobId={array.split('_')[0]} ArrayTaskId={array.split('_')[1]} " if array else ""
    return (
        f"JobId={job} {task}JobName=x UserId=root(0) JobState={state} Reason={reason} Dependency=(null) "
        f"ExitCode={code} RunTime=00:00:00 Command=/tmp/JobState=/a.sbatch\n"
    )


@pytest.mark.parametrize(
    ("answers", "state", "message"),
    [
        ({}, "gone", "Slurm does not know it any more"),
        *(({"1": part("1", *said)}, state, message) for said, state, message in (
            (("PENDING", "Priority"), "pending", "Priority"), (("CONFIGURING",), "running", ""),
            (("COMPLETED",), "done", ""), (("CANCELLED", "None", "0:15"), "failed", "cancelled"),
            (("FAILED", "NonZeroExitCode", "3:0"), "failed", "exit code 3"),
            (("FAILED", "RaisedSignal:9", "0:9"), "failed", "killed by signal 9"),
            (("TIMEOUT",), "failed", "its time was up (cluster.walltime_hours)"),
            (("OUT_OF_MEMORY",), "failed", "its memory was not enough (cluster.memory_gib)"))),
        # A chain of three.
        ({"1": part("1", "COMPLETED"), "2": part("2", "PENDING", "Resources", array="2_3-7%2"),
          "3": part("3", "PENDING", "Dependency")}, "running", "Resources"),
        ({"1": part("1", "COMPLETED"),
          "2": part("4", "RUNNING", array="2_0") + part("5", "FAILED", code="1:0", array="2_1"),
          "3": part("3", "PENDING", "Dependency")}, "running", ""),
        ({"2": part("4", "COMPLETED", array="2_0") + part("5", "FAILED", code="2:0", array="2_1"),
          "3": part("3", "CANCELLED")}, "failed", "exit code 2 (and 1 more): what its output says"),
        ({"3": part("3", "COMPLETED")}, "done", ""),
        ({"1": part("1", "COMPLETED")}, "gone", "Slurm does not know it any more"),
    ],
)  # fmt: skip
def test_states(answers: dict[str, str], state: str, message: str, says: Any, tmp_path: Path) -> None:
    for job, text in answers.items():
        says(job, text)
    (tmp_path / "partition-2_1.out").write_text("error: first\nerror: what its output says\nmore\n")
    chain = len(answers) > 1 or "3" in answers or (state == "gone" and bool(answers))
    found = SlurmJobs(("1", "2", "3") if chain else ("1",), tmp_path).state()
    assert (found.state, found.message) == (state, message)
    codes = {"exit code 3": 3, "exit code 2 (and 1 more): what its output says": 2}
    assert found.exit_code == codes.get(message)


def test_slurm_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", "echo 'scontrol: error: Unable to contact' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    refused(ClusterError, r"^Slurm does not answer: Unable to contact$", SlurmJobs(("1",), tmp_path).state)


# --- following --------------------------------------------------------------------------------------


def followed(url: str, *steps: JobState | Exception | Callable[[], JobState]) -> list[Event]:
    """Follow a job that is in these states one after the other; a step may also be something to do."""
    left, events = list(steps), list[Event]()

    def ask() -> JobState:
        step = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, JobState) else step()

    follow.follow("Test job 7", ask, url, events.append)
    return events


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(follow, "_LONGEST_WAIT", 0.002)
    monkeypatch.setattr(follow, "_REST", 0)


PENDING, RUNNING, DONE = JobState("pending", "Priority"), JobState("running"), JobState("done")


def test_a_job_is_followed_through_its_stages(tmp_path: Path, small_job: Job) -> None:
    spec, url = parse_job(small_job(store={"block_cells": [2, 2]})), str(tmp_path / "small.zarr")

    def begin() -> JobState:
        init(spec, url)
        return RUNNING

    def end() -> JobState:
        build(spec, url)
        return DONE

    lost = ClusterError("no answer")
    events = followed(url, PENDING, PENDING, RUNNING, lost, lost, begin, RUNNING, end)
    stages = [event.stage for event in events if isinstance(event, StageFinished)]
    assert stages == ["queue", "seed", "extend", "audit"]
    assert notes_of(events) == ["Test job 7 waits: Priority", "no answer"]


@pytest.mark.parametrize(
    ("final", "error"),
    [
        *((JobState("failed", f"exit code {code}", code), error) for code, error in (
            (1, GuaranteeViolation), (2, SpecError), (3, IncompleteStoreError), (4, SolverError),
            (70, IncompleteStoreError))),
        (JobState("failed", "cancelled"), IncompleteStoreError),
        (JobState("gone", "not known"), IncompleteStoreError),
    ],
)  # fmt: skip
def test_an_end_that_is_none(final: JobState, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match=f"Test job 7 (has failed|is gone): {final.message}") as raised:
        followed(str(tmp_path / "none.zarr"), RUNNING, final)
    assert ("submit again" in str(raised.value)) == (error is IncompleteStoreError)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> str:
    url = str(tmp_path_factory.mktemp("complete") / "small.zarr")
    build(parse_job(small_job()), url)
    return url


def test_a_complete_store_is_the_end_unless_it_is_of_another_job(complete: str) -> None:
    for said in (DONE, JobState("gone"), JobState("failed", "cancelled")):
        followed(complete, said)
    final = JobState("failed", "a.zarr: belongs to another job", EXIT_BAD_INPUT)
    refused(SpecError, "belongs to another job", followed, complete, RUNNING, final)


def test_a_store_that_is_refused(tmp_path: Path, small_job: Job) -> None:
    url = str(tmp_path / "small.zarr")
    init(parse_job(small_job()), url)
    MechanismStore.open(url, mode="r+").update(state="refused")
    refused(GuaranteeViolation, "does not hold", lambda: followed(url, JobState("gone")))
    # A cancelled job says nothing about its guarantee.
    refused(IncompleteStoreError, "", lambda: followed(url, JobState("failed", "cancelled")))


def test_a_store_that_cannot_be_read_from_here(tmp_path: Path) -> None:
    (note,) = notes_of(followed(str(tmp_path / "elsewhere.zarr"), DONE))
    assert "has ended well, but its store cannot be read from here" in note


def test_an_interrupt_ends_following(tmp_path: Path) -> None:
    def interrupt() -> JobState:
        raise KeyboardInterrupt

    with pytest.raises(IncompleteStoreError, match="no longer followed; Test job 7 goes on"):
        followed(str(tmp_path / "none.zarr"), RUNNING, interrupt)
