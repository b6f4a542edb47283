"""The command line: keys, exit codes, one line of error, nothing left behind."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from mdpext_dask.cli.options import app
from mdpext_dask.files import scratch_in
from tests.support.inside import Outcome, run_inside
from tests.support.processes import INTERRUPTED

JOB = """
[job]
name = "tiny"
[domain]
roads = "builtin:manhattan"
cell_km = 3.0
refine = [2, 2]
[privacy]
epsilon_per_km = 1.0
budget = "bound"
[outputs]
count = 6
[loss]
tasks = 4
[cluster]
kind = "inline"
"""


def mdpext(*arguments: object, folder: Path, env: dict[str, str] | None = None) -> Outcome:
    """Run a command in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "mdpext_dask.cli", *map(str, arguments)]
    how: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **(env or {})}, "timeout": 120}
    done = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def is_gone(group: int) -> bool:
    """Wait until no process of a group is left; helpers of the interpreter end a moment after it."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


Inside = Callable[..., Outcome]


def assert_refused(outcome: Outcome, complaint: str) -> None:
    """Assert exit code 2, no output, and one line of error with a complaint in it."""
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert complaint in outcome.stderr


def shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command of the package with a shell's redirections."""
    words = f"{sys.executable} -W error -m mdpext_dask.cli {command}"
    return subprocess.run(["sh", "-c", words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Inside:
    """Return a function that runs a command in a folder and in this process."""

    def call(*arguments: object, folder: Path) -> Outcome:
        monkeypatch.chdir(folder)
        return run_inside(capfd, *arguments)

    return call


def answer(*arguments: object, folder: Path) -> dict[str, Any]:
    return mdpext(*arguments, "--json", folder=folder).document()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "job.toml").write_text(JOB)
    answer("run", "job.toml", folder=folder)
    return folder


def test_a_job_from_beginning_to_end(folder: Path, inside: Inside) -> None:
    planned = inside("plan", "job.toml", "--json", folder=folder).document()
    assert list(folder.iterdir()) == [folder / "job.toml"]
    finished = mdpext("run", "job.toml", "--json", "--progress", "json", folder=folder)
    summary = json.loads(finished.stdout)
    events = [json.loads(line) for line in finished.stderr.splitlines()]
    stages = [event["stage"] for event in events if event["event"] == "StageFinished"]
    assert stages == ["domain", "loss", "seed", "extend", "boundary", "audit", "evaluate"]
    for key in ("records", "outputs", "seeds", "blocks"):
        assert planned[key] == summary[key]
    assert planned["store_bytes"] == summary["records"] * summary["outputs"] * 4
    assert {"peak_bytes_per_task", "tasks", "seconds_by_workers"} <= set(planned)
    assert summary["store"] == str(folder / "tiny.zarr")
    assert inside("status", "tiny.zarr", "--json", folder=folder).document() == summary
    assert inside("run", "job.toml", "--json", folder=folder).document() == summary

    audited = inside("audit", "tiny.zarr", "--method", "certificate", "--json", folder=folder).document()
    assert audited["holds"] is True
    assert (audited["epsilon_certified"], audited["violations"]) == (summary["epsilon_certified"], 0)
    assert set(audited["worst"]) >= {"x", "x_prime", "output", "log_ratio", "bound"}
    assert {"method", "epsilon_per_km", "triples_checked", "violation_ratio", "seconds"} <= set(audited)

    evaluated = inside("evaluate", "tiny.zarr", "--bound-seconds", "1", "--json", folder=folder).document()
    assert evaluated["loss_km"] == pytest.approx(summary["loss_km"], rel=1e-12)

    (folder / "p.csv").write_text("lon,lat\n-73.98,40.75\n-70,40\n")
    sampled = answer("sample", "tiny.zarr", "p.csv", "-o", "o.csv", folder=folder)
    assert (sampled["points"], sampled["outside"]) == (2, 1)
    assert len((folder / "o.csv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_in_pieces(folder: Path, inside: Inside) -> None:
    store = "elsewhere.zarr"
    planned = inside("init", "job.toml", "--store", store, "--json", folder=folder).document()
    assert planned["state"] == "planned"
    early = inside("finalise", store, "--json", folder=folder).document(3)
    assert early["error"] == "IncompleteStoreError"
    assert inside("audit", store, "--json", folder=folder).document(3)["exit_code"] == 3
    for index in range(planned["blocks"] - 1):
        inside("partition", store, index, "--json", folder=folder).document()
    last = planned["blocks"]
    answer("partition", store, "--range", f"{last - 1}:{last}", folder=folder)
    assert answer("finalise", store, folder=folder)["state"] == "complete"


@pytest.mark.slow
def test_overrides_and_workers(folder: Path) -> None:
    summary = answer(
        "run", "job.toml", "--set", "privacy.epsilon_per_km=0.5", "--set", "cluster.kind=local",
        "--set", "domain.metric_p=inf", "--set", "privacy.budget=half",
        "--workers", 1, "--store", "s.zarr", folder=folder,
    )  # fmt: skip
    assert (summary["epsilon_per_km"], summary["metric_p"], summary["budget"]) == (0.5, "inf", "half")


def test_a_tampered_store_fails_the_audit(folder: Path, done: Path, inside: Inside) -> None:
    shutil.copytree(done / "tiny.zarr", folder / "tiny.zarr")
    array = zarr.open_array(str(folder / "tiny.zarr" / "probability"), mode="r+")
    array[3, 4, 2] *= np.float32(1.05)
    audited = mdpext("audit", "tiny.zarr", "--json", folder=folder)
    assert audited.returncode == 1
    assert json.loads(audited.stdout)["holds"] is False
    assert "worst triple" in audited.stderr
    assert audited.stderr.count("\n") == len(audited.stderr.splitlines())
    (folder / "p.csv").write_text("lon,lat\n-73.98,40.75\n")
    assert inside("sample", "tiny.zarr", "p.csv", "-o", "o.csv", folder=folder).returncode == 1
    assert not (folder / "o.csv").exists()
    assert inside("status", "tiny.zarr", "--json", folder=folder).document()["state"] == "refused"
    assert inside("run", "job.toml", "--json", folder=folder).document()["state"] == "complete"


def test_the_status_says_what_is_not_sampled(folder: Path, done: Path, inside: Inside) -> None:
    """Of a store that says that it is complete; an audit is what helps where receipts are gone."""
    store = shutil.copytree(done / "tiny.zarr", folder / "tiny.zarr")
    whole = inside("status", store, "--json", folder=folder).document()
    assert (whole["state"], whole["receipts"], whole["refusal"]) == ("complete", "all", None)
    (folder / "p.csv").write_text("lon,lat\n-73.98,40.75\n")
    for lost, receipts in (("audit/certificate.json", "all"), ("receipts/00000000.json", "missing")):
        (store / lost).unlink()
        found = inside("status", store, "--json", folder=folder).document()
        assert (found["state"], found["receipts"]) == ("complete", receipts)
        assert f"mdpext audit {store}" in found["refusal"]
        refused = inside("sample", store, "p.csv", "-o", "o.csv", "--json", folder=folder)
        assert refused.document(code=1)["message"] == found["refusal"]
    said = inside("status", store, folder=folder).stdout.split()
    assert said[said.index("receipts") + 1] == "missing"


# One of each kind; every key and every fault of a file is tested where it is read.
BAD = {
    "privacy.epsilon_per_km=nan": "epsilon_per_km", "domain.cel_km=1": "did you mean cell_km",
    "domain.refine=[1.5]": "refine", "domain.cell_km=1e-9": "at most 1e+08",
    "domain.cell_km=1e-300": "at most 1e+08", "domain.bbox=[12.0, 41.0, 12.5, 41.5]": "no road within reach",
    "domain.roads=builtin:atlantis": "not built in", "loss.tasks=100000": "only 4197 road",
    "loss.directed=true": "lost the directions", "nonsense": "section.key=value",
    "cluster.address=nonsense": "address",
}  # fmt: skip


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_line_and_exit_2(folder: Path, override: str, inside: Inside) -> None:
    before = sorted(folder.iterdir())
    for command in ("run", "init"):
        assert_refused(inside(command, "job.toml", "--set", override, folder=folder), BAD[override])
        assert sorted(folder.iterdir()) == before


NODES = "id,lon,lat\n1,-73.98,40.75\n2,-73.94,40.79\n3,-73.96,40.80\n4,-73.99,40.72\n"
EDGES = "u,v,length_m,oneway\n1,2,9900,0\n2,3,9900,0\n3,4,9900,0\n"
BAD_FILES = {
    "text in a number column": (NODES.replace("40.75", "north"), EDGES, "line 2: lat 'north'"),
    "too few nodes": (NODES, EDGES, "holds only 4 road nodes"),
    "disconnected": (NODES, "u,v,length_m,oneway\n1,1,5,0\n", "falls apart"),
    "a file is missing": (NODES, None, "no such file"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_network_is_one_line_and_exit_2(folder: Path, fault: str, inside: Inside) -> None:
    nodes, edges, complaint = BAD_FILES[fault]
    roads = folder / "roads"
    roads.mkdir()
    (roads / "nodes.csv.gz").write_bytes(gzip.compress(nodes.encode()))
    if edges is not None:
        (roads / "edges.csv.gz").write_bytes(gzip.compress(edges.encode()))
    before = sorted(folder.rglob("*"))
    sets = ("--set", "domain.roads=roads", "--set", "domain.cell_km=1")
    assert_refused(inside("run", "job.toml", *sets, folder=folder), complaint)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "place", ["/proc/nothing/here.zarr", "job.toml", "job.toml/inside.zarr", "/dev/null/x.zarr"]
)
def test_a_place_that_cannot_be_written(folder: Path, place: str, inside: Inside) -> None:
    assert_refused(inside("run", "job.toml", "--store", place, folder=folder), place)
    assert list(folder.iterdir()) == [folder / "job.toml"]


def test_another_job_s_store_is_left_alone(done: Path, inside: Inside) -> None:
    failed = inside("run", "job.toml", "--set", "privacy.epsilon_per_km=2", folder=done)
    assert_refused(failed, "privacy.epsilon_per_km")
    assert inside("status", "tiny.zarr", "--json", folder=done).document()["epsilon_per_km"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["status", "missing.zarr"], "no such store"),
        (["status", "null.zarr"], "null.zarr"),
        (["audit", "tiny.zarr", "--method", "guess"], "--method"),
        (["sample", "tiny.zarr", "none.csv", "-o", "o.csv"], "no such file"),
        (["sample", "tiny.zarr", "job.toml", "-o", "o.csv"], "job.toml"),
        (["sample", "tiny.zarr", "bad.csv", "-o", "o.csv"],
         "error: bad.csv: line 3: lat 'here' is not a finite number\n"),
        (["sample", "tiny.zarr", "degrees.csv", "-o", "o.csv"], "look like degrees"),
        (["sample", "tiny.zarr", "degrees.csv", "-o", "tiny.zarr/zarr.json"], "inside the store"),
        (["partition", "tiny.zarr"], "either a block or --range"),
        (["partition", "tiny.zarr", "--range", "x"], "A:B"),
        (["partition", "tiny.zarr", "999"], "there are no blocks"),
        (["run", "missing.toml"], "no such job file"),
        (["run", "job.toml", "--progress", "loud"], "--progress"),
        (["run", "job.toml", "--store", "memory://a.zarr"], "would be gone with this command"),
        (["run", "job.toml", "--store", ""], "error: --store: the path is empty\n"),
    ],
)  # fmt: skip
def test_careless_commands(done: Path, arguments: list[str], complaint: str, inside: Inside) -> None:
    (done / "bad.csv").write_text("lon,lat\n-73.98,40.7\n-73.98,here\n")
    (done / "degrees.csv").write_text("x_km,y_km\n-73.98,40.75\n")
    (done / "null.zarr").mkdir(exist_ok=True)
    (done / "null.zarr" / "zarr.json").write_text("null")
    assert_refused(inside(*arguments, folder=done), complaint)
    assert not (done / "o.csv").exists()


@pytest.mark.slow
def test_no_scheduler_at_the_address(folder: Path) -> None:
    failed = mdpext(
        "run", "job.toml", "--set", "cluster.kind=address", "--set", "cluster.address=tcp://127.0.0.1:9",
        folder=folder, env={"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"},
    )  # fmt: skip
    assert failed.returncode == 3
    assert "no scheduler with workers answers" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "job.toml", "--workers", "0"], ["run", "job.toml", "--frob"], ["fly"],
     ["partition", "x.zarr", "--range", "²:3"], ["sample", "x.zarr", "p.csv"]],
)  # fmt: skip
def test_usage_errors_are_one_line(folder: Path, arguments: list[str], inside: Inside) -> None:
    failed = inside(*arguments, "--json", folder=folder)
    assert (failed.returncode, len(failed.stderr.splitlines())) == (2, 1)
    assert json.loads(failed.stdout)["exit_code"] == 2


def test_a_crash_is_no_failed_guarantee(folder: Path, inside: Inside, monkeypatch: Any) -> None:
    monkeypatch.setattr("mdpext_dask.pipeline.plan.plan_job", lambda *_: 1 / 0)
    failed = inside("plan", "job.toml", "--json", folder=folder)
    assert failed.returncode == 70
    assert json.loads(failed.stdout)["error"] == "MdpextError"
    assert "ZeroDivisionError" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("inline", marks=pytest.mark.slow), "local"])
def test_an_interrupt_is_one_line_exit_3_and_leaves_no_process(folder: Path, kind: str) -> None:
    """SIGINT to the whole group, as a terminal sends it, while blocks are extended."""
    # A seed in a moment, and then some seconds of blocks.
    job = JOB.replace("refine = [2, 2]", "refine = [800]").replace("inline", kind)
    (folder / "job.toml").write_text(job)
    command = [sys.executable, "-m", "mdpext_dask.cli", "run", "job.toml", "--progress", "none", "--json"]
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "tiny.zarr" / "seed").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.splitlines() == [INTERRUPTED]
    assert json.loads(out)["exit_code"] == 3
    assert is_gone(process.pid)
    assert answer("run", "job.toml", folder=folder)["state"] == "complete"


@pytest.mark.parametrize(
    ("command", "kept"),
    [("run job.toml", "finished blocks are kept, and the seed once it is solved; what was under way is not"),
     ("init job.toml", "the seed is kept once it is solved"), ("finalise tiny.zarr", "the blocks are kept"),
     ("partition tiny.zarr 0", "the one under way is not"), ("compare job.toml", "finished answers are kept"),
     ("sample tiny.zarr p.csv -o o.csv", "no report is written"), ("evaluate tiny.zarr", "nothing is kept"),
     ("report tiny.zarr", "nothing is kept"), ("plan job.toml", "nothing is kept")],
)  # fmt: skip
def test_an_interrupted_command_says_what_is_kept(
    folder: Path, command: str, kept: str, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("job.spec.load_job", "store.mechanism_store.MechanismStore.open"):
        monkeypatch.setattr(f"mdpext_dask.{place}", interrupt)
    monkeypatch.setattr("os.dup2", lambda *_: None)  # standard error stays
    ended = inside(*command.split(), folder=folder)
    assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
    assert ended.stderr.startswith("error: interrupted; ")
    assert kept in ended.stderr


def test_a_job_from_windows_and_one_that_cannot_fit(folder: Path, inside: Inside) -> None:
    for command in ("plan", "run"):
        failed = inside(command, "job.toml", "--set", "domain.refine=[100, 100, 100]", folder=folder)
        assert failed.returncode == 2
        assert "GiB" in failed.stderr
        assert list(folder.iterdir()) == [folder / "job.toml"]
    (folder / "job.toml").write_bytes(b"\xef\xbb\xbf" + JOB.replace("\n", "\r\n").encode())
    assert inside("plan", "job.toml", "--json", folder=folder).returncode == 0


def test_reports_go_through_devices_and_links(done: Path, inside: Inside) -> None:
    (done / "p.csv").write_text("lon,lat\n-73.98,40.75\n")
    assert inside("sample", "tiny.zarr", "p.csv", "-o", "/dev/null", folder=done).returncode == 0
    assert Path("/dev/null").is_char_device()
    (done / "real.csv").touch()
    (done / "link.csv").symlink_to("real.csv")
    again = "sample", "tiny.zarr", "p.csv", "-o", "link.csv"
    assert_refused(inside(*again, folder=done), "link.csv: exists already")
    assert inside(*again, "--overwrite", folder=done).returncode == 0
    assert (done / "link.csv").is_symlink()
    assert len((done / "real.csv").read_text().splitlines()) == 2


def test_help_names_every_command(folder: Path, inside: Inside) -> None:
    shown = inside("--help", folder=folder).stdout
    for command in app.registered_commands:
        assert (command.name or getattr(command.callback, "__name__", "?")) in shown


@pytest.mark.parametrize(
    "streams",
    [
        ">/dev/full 2>&1",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["2>/dev/full", ">/dev/full", ">&-", "2>&-", ">&- 2>&- <&-"]
        ),
    ],
)
def test_what_cannot_be_printed_does_not_look_like_a_broken_guarantee(folder: Path, streams: str) -> None:
    ended = shell(f"status nothing.zarr --json {streams}", folder)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_answer_that_cannot_be_written_is_told_and_a_full_log_stops_nothing(folder: Path) -> None:
    full = shell("plan job.toml --json >/dev/full", folder)
    assert full.returncode == 3
    assert full.stderr == "error: the answer cannot be written: No space left on device\n"
    ended = shell("run job.toml --progress plain --json 2>/dev/full", folder)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["state"] == "complete"


def test_a_home_folder_in_quotes(folder: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    assert inside("run", "job.toml", "--store", "~/a.zarr", folder=folder).returncode == 0
    assert (folder / "home" / "a.zarr" / "zarr.json").exists()
    assert not (folder / "~").exists()


def test_submitting_into_a_folder_of_one_s_own_overwrites_nothing(folder: Path, inside: Inside) -> None:
    before = (folder / "job.toml").read_text()
    submit = ("submit", "job.toml", "--to", "slurm", "--dry-run", "--folder")
    assert_refused(inside(*submit, ".", folder=folder), "has job.toml already")
    assert (folder / "job.toml").read_text() == before
    for _ in range(2):  # what it has written itself it may write again
        assert inside(*submit, "new", folder=folder).returncode == 0


def test_what_lies_about_in_a_shared_folder_is_let_lie(tmp_path: Path) -> None:
    """A pipe of that name would be waited for; a link would lead elsewhere."""
    os.mkfifo(tmp_path / "scratch-evil.lock")
    (tmp_path / "precious").mkdir()
    (tmp_path / "scratch-link.lock").symlink_to(tmp_path / "scratch-evil.lock")
    with scratch_in(tmp_path) as own:
        assert own.is_dir()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"scratch-evil.lock", "scratch-link.lock", "precious"}


def test_without_what_commands_need_there_is_a_line_and_no_traceback() -> None:
    script = "import sys; sys.modules['typer'] = None; import mdpext_dask.cli.main as m; m.main(['--help'])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "pip install mdpext-dask" in run.stderr
    assert run.stderr.count("\n") == 1


def test_standard_input_and_output(done: Path) -> None:
    """CSV in, CSV out, and what is told goes to standard error."""
    (done / "points.csv").write_text("lon,lat\n-73.98,40.75\n-73.97,40.76\n")
    outcome = shell("sample tiny.zarr - -o - < points.csv", done)
    assert [line.split(",")[0] for line in outcome.stdout.splitlines()] == ["row", "0", "1"], outcome.stderr
    assert "points" in outcome.stderr
    assert not (done / "-").exists()


def test_an_older_python_is_told_in_one_line() -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 10, 4, 'final', 0); "
        "runpy._run_module_as_main('mdpext_dask.cli')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "mdpext_dask needs Python 3.11 or newer; this is 3.10.4" in done.stderr
    # Nothing stands before the check that an older Python could not read or import.
    first = (Path(__file__).parents[2] / "mdpext_dask" / "__init__.py").read_text().partition("if sys.v")[0]
    imports = [line for line in first.splitlines() if line.startswith(("import", "from"))]
    assert imports == [
        "import sys", "from importlib import import_module", "from typing import TYPE_CHECKING, Any"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_script_on_standard_input_may_use_several_processes(done: Path) -> None:
    """Processes that start import the script of their parent, which cannot be read again."""
    script = "from mdpext_dask import audit; print(audit('tiny.zarr', workers=2).verdict)"
    command = ["sh", "-c", f'echo "{script}" | {sys.executable} -']
    outcome = subprocess.run(command, cwd=done, capture_output=True, text=True, check=False, timeout=120)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "holds\n", "")
