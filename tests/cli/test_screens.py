"""Answers and help as somebody sees them for the first time."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer import Context
from typer.main import get_command

from mdpext_dask.cli.main import app
from mdpext_dask.cli.screens import Screen, called, plan_screen, store_screen
from mdpext_dask.evaluation.bound.kept import BOUND
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.inside import Outcome, run_inside

# Log-convex between few seeds loses more than planar noise does.
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
[extension]
method = "log-convex"
[cluster]
kind = "inline"
"""
NOISE = ("--set", "extension.method=noise", "--set", "privacy.budget=certified")
CERTIFIED = ("--set", "privacy.budget=certified", "--set", "seed.refine_rounds=2")
GROUP: Any = get_command(app)
COMMANDS = {name: GROUP.get_command(Context(GROUP), name) for name in GROUP.list_commands(Context(GROUP))}
MOST_LINES = 15

Inside = Callable[..., Outcome]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job and its store, which a process has made that knows only the module."""
    folder = tmp_path_factory.mktemp("screens")
    (folder / "job.toml").write_text(JOB)
    (folder / "p.csv").write_text("lon,lat\n-73.98,40.75\n")
    command = [sys.executable, "-W", "error", "-m", "mdpext_dask", "run", "job.toml", "-q"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy, which is the working folder."""
    copy = shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return copy


@pytest.fixture
def inside(folder: Path, capfd: pytest.CaptureFixture[str]) -> Inside:  # noqa: ARG001 where it runs
    return lambda command, *more: run_inside(capfd, *command.split(), *more)


def rows(screen: str) -> dict[str, str]:
    """Return the texts of a screen by their labels."""
    found: dict[str, str] = {}
    label = ""
    for line in screen.splitlines()[1:]:
        first, _, rest = line.partition("  ")
        label = first.strip() or label
        found[label] = f"{found.get(label, '')} {rest.strip()}".strip()
    return found


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_a_run_ends_with_one_screen(columns: int, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = inside("run job.toml --store new.zarr", *NOISE)
    lines = outcome.stdout.splitlines()
    assert outcome.returncode == 0
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= columns
    said, summary = rows(outcome.stdout), inside("status new.zarr --json").document()
    assert said["promised"] == "ε = 1/km"
    assert said["certified"].startswith(f"ε = {summary['epsilon_certified']:.6g}/km, proved for all pairs")
    assert said["error"] == f"{1000 * summary['loss_km']:,.0f} m expected in road distance"
    assert said["plain"].startswith(f"{1000 * summary['plain_loss_km']:,.0f} m with planar noise")
    assert said["plain"].endswith(f"this errs {-summary['over_plain']:.1%} less")
    assert said["bound"] == "not known yet: mdpext evaluate computes it"
    assert said["store"].startswith("new.zarr: noise, 6 outputs, made in ")
    for command in ("audit new.zarr", "show new.zarr", "sample new.zarr POINTS.csv -o OUT.csv"):
        assert command in said["next"]
    assert "loses" not in said


@pytest.mark.slow
def test_the_diary_of_solvers_is_for_those_who_ask(inside: Inside) -> None:
    briefly = inside("run job.toml --store a.zarr", *CERTIFIED)
    fully = inside("run job.toml --store b.zarr -v", *CERTIFIED)
    diary = re.compile("budgets: round|refining, round|cells above|tempered")
    assert not diary.search(briefly.stdout + briefly.stderr)
    assert diary.search(fully.stderr)
    assert "took " in fully.stderr
    # The same screen, and after it all names and values of the document.
    screen, values = fully.stdout.split("\n\n")
    assert rows(screen)["error"] == rows(briefly.stdout)["error"]
    summary = inside("status b.zarr --json").document()
    assert [line.split(" ")[0] for line in values.splitlines() if line[0] != " "] == list(
        {
            key: None
            for key in summarise(MechanismStore.open("b.zarr"))
            if key != "notes" or not summary["notes"]
        }
    )
    assert summary["fingerprint"] in values


def test_who_loses_to_the_plain_thing_says_so_and_what_it_advises_helps(inside: Inside) -> None:
    document = inside("status tiny.zarr --json").document()
    assert document["loss_km"] > document["plain_loss_km"]
    said = rows(inside("run job.toml").stdout)
    assert said["plain"].endswith(f"this errs {document['over_plain']:.1%} more")
    assert said["loses"] == f"to the plain thing: set {document['plain_advice']}, which does not"
    assert (
        'extension.method = "noise"' in rows(inside("evaluate tiny.zarr --bound-seconds 0").stdout)["loses"]
    )
    settings = re.findall(r'([\w.]+) = "(\w+)"', document["plain_advice"])
    sets = [word for key, value in settings for word in ("--set", f"{key}={value}")]
    better = inside("run job.toml --store b.zarr --json", *sets).document()
    assert better["loss_km"] < better["plain_loss_km"] < document["loss_km"]
    assert better["plain_advice"] is None


def test_a_bound_is_shown_once_it_is_known(folder: Path, inside: Inside) -> None:
    found = inside("evaluate tiny.zarr --bound-seconds 1 --no-attacks --json").document()
    document = inside("status tiny.zarr --json").document()
    assert document["lower_bound_certified_km"] == found["lower_bound_certified_km"] > 0
    bound = f"{1000 * found['lower_bound_certified_km']:,.0f} m: no mechanism that keeps ε errs less"
    assert rows(inside("status tiny.zarr").stdout)["bound"].startswith(bound)
    # What cannot be a bound is none.
    path = folder / "tiny.zarr" / BOUND
    kept = json.loads(path.read_text())
    for wrong in (2 * document["loss_km"], -1.0, "much", None):
        path.write_text(json.dumps({**kept, "lower_bound_certified_km": wrong}))
        assert inside("status tiny.zarr --json").document()["lower_bound_certified_km"] is None


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "command",
    ["status tiny.zarr", "plan job.toml", "audit tiny.zarr", "evaluate tiny.zarr --bound-seconds 1",
     "sample tiny.zarr p.csv -o o.csv", "export tiny.zarr -o c.mdp", "remap tiny.zarr",
     "partition tiny.zarr 0", "init job.toml --store i.zarr", "finalise tiny.zarr"],
)  # fmt: skip
def test_every_answer_fits_a_screen(
    command: str, columns: int, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = inside(command)
    lines = outcome.stdout.splitlines()
    assert outcome.returncode == 0, outcome.stderr
    assert 2 < len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line.endswith(" ")]
    assert len(inside(f"{command} --verbose", *(["--overwrite"] * ("-o " in command))).stdout) > len(
        outcome.stdout
    )


def test_a_store_in_pieces_and_one_that_is_refused_say_what_comes_next(folder: Path, inside: Inside) -> None:
    inside("init job.toml --store i.zarr -q")
    said = rows(inside("status i.zarr").stdout)
    assert (said["seed"], said["blocks"]) == ("is solved", "0 of 1 are done")
    assert "partition i.zarr --range 0:1" in said["next"]
    assert "run JOB.toml" in said["next"]
    inside("partition i.zarr 0 -q")
    assert "finalise i.zarr" in rows(inside("status i.zarr").stdout)["next"]
    array = zarr.open_array(str(folder / "tiny.zarr" / "probability"), mode="r+")
    array[3, 4, 2] *= np.float32(1.5)
    audited = inside("audit tiny.zarr")
    assert audited.returncode == 1
    assert audited.stdout.startswith("tiny.zarr: ")
    assert {"worst", "changed"} <= set(rows(audited.stdout))
    refused = inside("status tiny.zarr").stdout
    assert refused.startswith("tiny.zarr is refused: it does not keep its promise")
    assert rows(refused)["certified"].endswith("by the last certificate, which does not count")
    assert "audit tiny.zarr" in rows(refused)["next"]


def test_a_store_that_has_lost_its_certificate_is_not_called_proved(folder: Path, inside: Inside) -> None:
    (folder / "tiny.zarr" / "audit" / "certificate.json").unlink()
    said = inside("status tiny.zarr").stdout
    assert said.startswith("tiny.zarr is complete, but not to be used as it is")
    assert rows(said)["refused"]
    assert "proved" not in said


def test_colours_are_left_out_or_put_in_as_is_wished(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inside("status tiny.zarr").stdout
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = inside("status tiny.zarr").stdout
    assert "\x1b[1;32m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(\d;)?3\dm", inside("status tiny.zarr").stdout)


def test_long_names_and_commands_are_not_broken(folder: Path, inside: Inside) -> None:
    name = f"{'x' * 100} y.zarr"
    shutil.copytree(folder / "tiny.zarr", folder / name)
    said = inside("status", name).stdout
    assert f"audit {shlex.quote(name)}\n" in said
    assert len(said.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("width", [1, 30, 80, 200])
def test_a_screen_holds_all_words_at_any_width(width: int) -> None:
    screen = Screen("of what", "", [("a label", "ten words " * 5), ("東京", "wide")], [("do it", "why not")])
    text = screen.text(width).plain
    assert text.split().count("words") == 5
    assert {"of", "what", "label", "東京", "wide", "do", "it"} <= set(text.split())


def test_a_remap_and_several_worker_counts_are_told_of(inside: Inside) -> None:
    inside("remap tiny.zarr -q")
    summary = inside("status tiny.zarr --json").document()
    assert "remap" in dict(store_screen(summary).rows)
    planned = inside("plan job.toml --json").document()
    same = {workers: {"seed": 1.0, "total": 2.0} for workers in ("1", "2", "8", "32")}
    times = dict(plan_screen({**planned, "seconds_by_workers": same}, "job.toml").rows)["time"]
    assert times == "about 2.0 s with any number of workers; seed takes longest"


def test_commands_that_come_next_are_called_as_this_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("on path", "beside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mdpext").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mdpext").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "on path"))
    beside = str(tmp_path / "beside" / "mdpext")
    for program, expected in (
        (str(tmp_path / "on path" / "mdpext"), "mdpext audit a"),
        (beside, f"{shlex.quote(beside)} audit a"),
        ("/x/mdpext_dask/__main__.py", "python -m mdpext_dask audit a"),
        ("-c", "mdpext audit a"),
    ):
        monkeypatch.setattr("sys.argv", [program])
        assert called("audit", "a") == expected


# --- quiet ----------------------------------------------------------------------------------------

QUIET = {
    "run": "job.toml --store q.zarr", "plan": "job.toml", "init": "job.toml --store q.zarr",
    "partition": "tiny.zarr 0", "finalise": "tiny.zarr", "audit": "tiny.zarr", "remap": "tiny.zarr",
    "evaluate": "tiny.zarr --bound-seconds 0", "sample": "tiny.zarr p.csv -o o.csv",
    "export": "tiny.zarr -o c.mdp", "report": "tiny.zarr --bound-seconds 0", "show": "tiny.zarr -o s.html",
    "start": "builtin:manhattan --hide 2000 -o start.toml",
    "compare": "job.toml --methods em --repeats 1 --bound-seconds 0",
    "sweep": "job.toml --epsilon 1 -o swept",
    "submit": "job.toml --to slurm --dry-run --store q.zarr",
}  # fmt: skip


def test_every_command_that_shows_progress_can_be_quiet() -> None:
    options = {name: {o for p in command.params for o in p.opts} for name, command in COMMANDS.items()}
    assert {name for name, names in options.items() if "--progress" in names} <= set(QUIET)
    assert {name for name, names in options.items() if "--quiet" in names} == set(QUIET)


# Those that take long, or do what others do.
_NOT_EVERY_TIME = ("compare", "sweep", "show", "start", "report", "evaluate", "remap", "export")


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.slow if name in _NOT_EVERY_TIME else ()) for name in QUIET],
)
def test_quiet_commands_print_nothing_if_all_is_well(command: str, inside: Inside) -> None:
    assert inside(f"{command} {QUIET[command]} --quiet") == (0, "", "")


def test_quiet_commands_tell_of_errors_and_answer_programs(inside: Inside) -> None:
    failed = inside("run missing.toml -q")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
    asked = inside("status tiny.zarr --json").document()
    answered = inside("run job.toml -q --json")
    assert (answered.document(), answered.stderr) == (asked, "")


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_an_example_and_no_types_of_flags(name: str, inside: Inside) -> None:
    shown = inside(f"{name} --help").stdout
    assert "<bool>" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    epilog = COMMANDS[name].epilog if name else GROUP.epilog
    example = epilog.removeprefix("Example: ")
    assert " ".join(example.split()) in " ".join(shown.split())
    # The parser takes it.
    program, *words = shlex.split(example)
    assert program == "mdpext"
    assert words[0] == name or not name
    COMMANDS[words[0]].make_context(words[0], words[1:])


def test_commands_are_in_groups(inside: Inside) -> None:
    shown = inside("--help").stdout
    titles = re.findall(r"^╭─ (.*?) ─+╮$", shown, flags=re.MULTILINE)
    assert titles == [
        "Options", "Make a store", "The same in pieces, and on clusters", "Prove and measure", "Use a store",
        "Keys and signatures",
    ]  # fmt: skip
    assert "Commands" not in titles


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "mdpext_dask", "status", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage: python -m mdpext_dask status [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("mdpext ru", ["run"]), ("mdpext audit --method s", ["sampled"]), ("mdpext run --qu", ["--quiet"])],
)
def test_shells_complete_commands_options_and_values(words: str, expected: list[str]) -> None:
    asked = {"_MDPEXT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = "import sys; sys.argv[0] = 'mdpext'; from mdpext_dask.cli.main import main; main()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, expected, "")
