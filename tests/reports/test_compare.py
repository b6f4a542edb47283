"""Comparing methods: limits that end what does not end, answers that are kept, and one table."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.errors import MdpextError, SpecError, StoreError, printable
from mdpext_dask.events import Note
from mdpext_dask.files import scratch_in
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec, load_job, parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.reports.compare import attempt
from mdpext_dask.reports.compare.answers import BOUND, Case, given_up, is_settled, read_answer, write_answer
from mdpext_dask.reports.compare.figure import _labels
from mdpext_dask.reports.compare.methods import METHODS, OWN, chosen, own_method
from mdpext_dask.reports.compare.protocol import cases_of, compare
from mdpext_dask.reports.compare.summary import CaseSummary, summarise_case
from mdpext_dask.reports.compare.tables import as_json, bound_sentence, show_tables, write_results
from tests.support.processes import wait_until
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
# What programs outside read of every row.
ROW_KEYS = {
    "method", "family", "completed", "loss_km", "loss_standard_error", "seconds", "epsilon_audited",
    "violation_ratio", "repeats", "reason",
}  # fmt: skip


# --- a process with limits ------------------------------------------------------------------------

# What stands in for the construction of a method, in a process that is otherwise the package's own.
_CONSTRUCTIONS = r"""
import os, runpy, signal, sys, time
from mdpext_dask.errors import SolverError, StoreError
from mdpext_dask.evaluation.baselines import noise
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee

def sleep(): time.sleep(60)
def fill(): bytearray(2 * 2**30)
def complain(): raise SolverError("too large:\n a million rows")
def fail(): raise StoreError("disk full")
def crash(): raise KeyError("what")
def die(): os.kill(os.getpid(), signal.SIGSEGV)
def leave(): sys.exit(3)

def method(problem, seconds):
    {work}()
    return BaselineMechanism(None, Guarantee.NONE, "nothing", 1.0, 0.1)

noise.exponential_mechanism = method
sys.argv[0] = "attempt"
runpy.run_module("mdpext_dask.reports.compare.attempt", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("work", "reason", "kind"),
    [
        ("sleep", "not finished within 1 s", "limited"),
        ("fill", "more than 0.5 GiB of memory are needed", "limited"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("complain", "too large: a million rows", None), ("fail", "disk full", "passing"),
            ("crash", "KeyError: 'what'", "passing"),
            ("die", f"ended by signal {int(signal.SIGSEGV)}", "passing"),
            ("leave", "SystemExit: 3", "passing"),
        )),
    ],
)  # fmt: skip
def test_a_method_that_fails(
    spec: JobSpec, tmp_path: Path, monkeypatch: Any, work: str, reason: str, kind: str | None
) -> None:
    program = tmp_path / "python"
    code = tmp_path / "code.py"
    code.write_text(_CONSTRUCTIONS.replace("{work}", work))
    program.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{code}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    path = tmp_path / "0.json"
    attempt.attempt(attempt.Request("em", spec.canonical(), str(path), str(tmp_path), 1.0, 2**29, 0))
    found = read_answer(path)
    assert found is not None
    assert (found["completed"], found["reason"]) == (False, reason)
    assert {name for name in ("limited", "passing") if found[name]} == ({kind} if kind else set())


def test_nothing_is_answered_for_a_parent_that_has_gone(spec: JobSpec, tmp_path: Path) -> None:
    request = attempt.Request("em", spec.canonical(), str(tmp_path / "0.json"), str(tmp_path), 1.0, 2**29, 0)
    (tmp_path / "request.json").write_text(json.dumps(asdict(request)))
    command = [sys.executable, "-m", attempt.__name__, str(tmp_path / "request.json"), str(os.getpid() + 1)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "0.json").exists()


# --- cases and methods ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(small_job: Job) -> JobSpec:
    job = small_job(privacy={"budget": "certified"}, domain={"cell_km": 4.0, "refine": [2]})
    cases = {"half": ["privacy.epsilon_per_km=0.5"], "finer": ["domain.refine=[2, 2]"]}
    return parse_job({**job, "compare": {"repeats": 3, "bound_seconds": 0.0, "cases": cases}})


def test_methods_by_name() -> None:
    assert chosen(["mw", "em"]) == ("em", "mw")
    assert chosen(None) == tuple(METHODS)
    assert all(callable(entry.function()) for entry in METHODS.values() if entry.made_by is not None)
    refused(SpecError, r"--methods: there is no method 'mlaet'; did you mean mlaet-", chosen, ["mlaet"])
    refused(SpecError, "names none", chosen, [])


def test_cases_are_the_job_with_some_keys_set(spec: JobSpec) -> None:
    assert [case.name for case in cases_of(spec, None, ["em"])] == ["the job"]
    half, finer = cases_of(spec, ["all"], ["em"])
    assert half.spec.privacy.epsilon_per_km == 0.5
    assert finer.spec.domain.refine == (2, 2)
    assert half.spec.domain == spec.domain
    assert [case.name for case in cases_of(spec, ["finer"], None)] == ["finer"]


def test_a_case_that_is_none_is_named(spec: JobSpec, small_job: Job) -> None:
    with pytest.raises(SpecError, match="--cases: there is no case 'depth'; there are half, finer"):
        cases_of(spec, ["depth"], None)
    refused(SpecError, "--cases: names none", cases_of, spec, [], None)
    wrong = parse_job({**small_job(), "compare": {"cases": {"odd": ["privacy.epsilon_per_km=-1"]}}})
    refused(SpecError, r"compare\.cases: odd: .*epsilon_per_km", cases_of, wrong, ["odd"], None)


def test_the_jobs_own_settings_are_marked_or_added(spec: JobSpec, small_job: Job) -> None:
    (case,) = cases_of(spec, None, None)
    assert (case.default, case.methods) == ("mlaet-a", tuple(METHODS))
    certified = small_job(privacy={"budget": "certified"}, extension={"method": "cell-lp"})
    assert own_method(parse_job(certified)) == "mlaet-o"
    # What leaves the method open is a method of its own: the better of two.
    del certified["extension"]
    assert own_method(parse_job(certified)) == OWN
    other = parse_job(small_job(privacy={"budget": "bound"}))
    assert own_method(other) == OWN
    (case,) = cases_of(other, None, None)
    assert case.methods == (*METHODS, OWN)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_is_known_by_all_that_decides_it(spec: JobSpec) -> None:
    def key(method: str, **sections: dict[str, Any]) -> str:
        job = spec.canonical()
        for name, keys in sections.items():
            job[name] = {**job[name], **keys}
        return Case("any", parse_job(job), (), "").key(method)

    for method in ("em", "aipo", BOUND):
        assert key(method) == key(method)
        assert key(method) != key(method, privacy={"epsilon_per_km": 2.0})
        assert key(method) != key(method, outputs={"count": 7})
        assert key(method) == key(method, cluster={"kind": "local"}, job={"name": "other"})
    # How ours are made is nothing to the others, and budgets of the job are nothing to one that sets its own.
    assert key("em") == key("em", extension={"method": "cell-lp"}, privacy={"budget": "half"})
    assert key("aipo") == key("aipo", extension={"method": "cell-lp"}, privacy={"budget": "half"})
    assert key("aipo") != key("aipo", seed={"solver": "highs"})
    assert key("em") != key("laplace")


def test_answers_are_settled_unless_there_is_more_time_now() -> None:
    done = {"completed": True}
    late = {"completed": False, "limited": True, "limit_seconds": 10.0}
    impossible = {"completed": False, "limited": False, "reason": "no"}
    assert is_settled(done, 100)
    assert is_settled(late, 10)
    assert not is_settled(late, 11)
    assert is_settled(impossible, 1e9)
    assert not is_settled(None, 1)
    assert not is_settled({"completed": True, "given_seconds": 5.0}, 10)
    # A program may be refused for the time that it would take; a crash is no answer.
    refused = {"completed": False, "limited": False, "limit_seconds": 10.0, "reason": "about 20 s of work"}
    assert is_settled(refused, 10)
    assert not is_settled(refused, 11)
    assert not is_settled({**refused, "passing": True}, 10)


def test_answers_of_two_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "0.json", Path.write_text

    def slowly(self: Path, *text: Any, **how: Any) -> int:
        # While this one is written, another is, from beginning to end.
        monkeypatch.setattr(Path, "write_text", write)
        write_answer(path, answer(1.0))
        return write(self, *text, **how)

    monkeypatch.setattr(Path, "write_text", slowly)
    write_answer(path, answer(2.0))
    assert read_answer(path) == answer(2.0)
    assert list(tmp_path.iterdir()) == [path]


def test_scratch_of_others_stays_unless_they_are_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from mdpext_dask.files import scratch_in\n"
        "with scratch_in(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with scratch_in(tmp_path) as mine:
        assert {path.stem for path in tmp_path.iterdir()} == {mine.name}
        with scratch_in(tmp_path) as other:
            assert mine.is_dir()
            assert other != mine
        assert mine.is_dir()
        assert not other.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_did_not_end_once_is_not_tried_again(tmp_path: Path) -> None:
    write_answer(
        tmp_path / "0.json", {"completed": False, "limited": True, "limit_seconds": 9, "reason": "slow"}
    )
    assert given_up(tmp_path / "1.json", 9) == "slow"
    assert given_up(tmp_path / "1.json", 10) is None
    assert given_up(tmp_path / "0.json", 9) is None


WHOLE = {
    "completed": True, "reason": None, "loss_km": 2.0, "seconds": 2.0, "epsilon_audited": 0.9,
    "violation_ratio": 0.0, "verdict": "holds", "guarantee": "epsilon", "note": "kept",
}  # fmt: skip
BAD_FIGURES = (None, "x", math.nan, -1.0, [], True)
BOUNDED = {"completed": True, "lower_bound_km": 1.0, "expected_km": 1.0, "stride": 1}
DAMAGED: list[Any] = [
    *({**WHOLE, key: value} for key in ("loss_km", "seconds") for value in BAD_FIGURES),
    {"completed": True, "loss_km": 1.0, "seconds": 1.0}, {"completed": False}, {"loss_km": 1},
    {"completed": "yes"}, {"completed": False, "limited": True, "reason": "slow"}, [],
    {**BOUNDED, "lower_bound_km": None}, {**BOUNDED, "expected_km": "x"}, {**BOUNDED, "given_seconds": "x"},
]  # fmt: skip


def test_an_answer_that_is_damaged_is_none(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    assert read_answer(path) is None
    for whole in (WHOLE, BOUNDED, {"completed": False, "reason": "no"}):
        path.write_text(json.dumps(whole))
        assert read_answer(path) == whole
    for text in ["", "{", "[" * 100_000, *map(json.dumps, DAMAGED)]:
        path.write_text(text)
        assert read_answer(path) is None, text[:100]


# --- summary --------------------------------------------------------------------------------------


def answer(loss: float, **more: Any) -> dict[str, Any]:
    return {**WHOLE, "loss_km": loss, **more}


def summarised(spec: JobSpec, folder: Path, told: dict[str, list[dict[str, Any]]]) -> CaseSummary:
    (case,) = cases_of(spec, None, [name for name in told if name != BOUND])
    for method, several in told.items():
        for repetition, one in enumerate(several):
            write_answer(case.answer_path(folder, method, repetition), one)
    facts: dict[str, object] = {
        "name": "small", "records": 9, "outputs": 8, "seeds": 4, "cell_km": 4.0, "epsilon_per_km": 1.0,
    }  # fmt: skip
    return summarise_case(folder, case, facts, 3, with_bound=True)


def test_a_row_is_mean_and_standard_error_over_repetitions(spec: JobSpec, tmp_path: Path) -> None:
    bounds = [{"completed": True, "lower_bound_km": b, "expected_km": b, "stride": 2} for b in (1, 2, 2)]
    broken = {"epsilon_audited": "inf", "violation_ratio": 0.5, "verdict": "violated"}
    late = {"completed": False, "limited": True, "limit_seconds": 1, "reason": "slow"}
    told = {
        "em": [answer(2.0), answer(4.0, **broken), answer(3.0)],
        "mlaet-a": [answer(1.5), answer(2.5), answer(2.0)], "lp": [answer(1.2), late], BOUND: bounds,
    }  # fmt: skip
    summary = summarised(spec, tmp_path, told)
    rows = {row["method"]: row for row in summary.rows}
    assert [row["method"] for row in summary.rows] == ["lp", "mlaet-a", "em"]
    em, ours, lp = rows["em"], rows["mlaet-a"], rows["lp"]
    assert set(em) >= ROW_KEYS
    assert em["loss_km"] == 3.0
    assert em["loss_standard_error"] == pytest.approx(1 / math.sqrt(3))  # s = 1, n = 3
    # The worst repetition counts.
    assert (em["epsilon_audited"], em["violation_ratio"], em["verdict"]) == ("inf", 0.5, "violated")
    # Paired by repetition: 2/1.5, 4/2.5, 3/2.
    assert em["loss_to_default"] == pytest.approx((2 / 1.5 + 4 / 2.5 + 3 / 2) / 3)
    assert em["gap"] == pytest.approx((2 / 1 + 4 / 2 + 3 / 2) / 3 - 1)
    assert ours["default"]
    assert ours["loss_to_default"] == 1.0
    assert not lp["completed"]
    assert lp["repeats"] == 1
    assert lp["loss_standard_error"] is None
    assert lp["reason"] == "1 of 3 repetitions: slow"
    assert summary.problem["lower_bound_km"] == pytest.approx(5 / 3)


def test_only_what_is_certified_is_a_bound_and_on_these_outputs_alone(spec: JobSpec, tmp_path: Path) -> None:
    part = {"completed": True, "lower_bound_km": 1.0, "expected_km": 1.5, "stride": 2}
    elsewhere = {"epsilon_audited": None, "violation_ratio": None, "verdict": "not audited"}
    told = {"em": [answer(2.0)], "laplace-roads": [answer(0.9, **elsewhere)], BOUND: [part]}
    summary = summarised(spec, tmp_path, told)
    assert summary.problem["lower_bound_km"] == 1.0
    assert {row["method"]: row["gap"] for row in summary.rows} == {"em": 1.0, "laplace-roads": None}
    assert "less than 1.000 km (certified)" in bound_sentence(summary)
    assert "all of them would make it about 1.500 km" in bound_sentence(summary)


def test_results_are_written_as_tables_and_a_picture(spec: JobSpec, tmp_path: Path) -> None:
    lost = {"completed": False, "limited": False, "reason": "a < b & too <large>"}
    told = {"em": [answer(2.0), answer(3.0)], "lp": [lost], "aipo": [answer(4.0, violation_ratio=1e-6)]}
    summary = summarised(spec, tmp_path / "answers", told)
    files = {path.name: path for path in write_results(tmp_path, [summary])}
    assert set(files) == {
        "table.md", "table.html", "table.csv", "answers.csv", "results.json", "utility-time.png",
    }  # fmt: skip
    markdown = files["table.md"].read_text()
    assert "| EM | predefined noise | 2.500 ± 0.980 |" in markdown  # 1.96 · (√½ / √2)
    assert "1.0e-06" in markdown
    assert "- LP, all pairs: 1 of 3 repetitions: a < b & too <large>." in markdown
    page = files["table.html"].read_text()
    assert "a &lt; b &amp; too &lt;large&gt;" in page
    assert "<large>" not in page
    with files["answers.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["repetition"]) for row in rows] == [
        ("em", "0"), ("em", "1"), ("lp", "0"), ("aipo", "0"),
    ]  # fmt: skip
    assert json.loads(files["results.json"].read_text()) == json.loads(json.dumps(as_json([summary])))
    assert files["utility-time.png"].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "text",
    [
        "=1+1",
        "\uff1d1",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["+cmd|'/c calc'!A0", "-2+3", "@SUM(A1)", "\t=1"]
        ),
    ],
)
def test_no_cell_of_a_table_is_a_formula(text: str, spec: JobSpec, tmp_path: Path) -> None:
    lost = {"completed": False, "limited": False, "reason": f"{text}\x1b[31m | x"}
    summary = summarised(spec, tmp_path / "answers", {"em": [answer(2.0)], "lp": [lost]})
    summary.rows[0]["title"] = text
    write_results(tmp_path, [summary])
    for name in ("answers.csv", "table.csv"):
        content = (tmp_path / name).read_text()
        cells = [cell for row in csv.reader(io.StringIO(content)) for cell in row]
        assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@", "\uff1d"))]
        assert any(printable(text) in cell for cell in cells)
        assert all(map(str.isprintable, content.split("\n")))
    markdown = (tmp_path / "table.md").read_text()
    assert all(map(str.isprintable, markdown.split("\n")))
    lines = [line for line in markdown.split("\n") if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {10}


def test_of_several_cases_problem_is_a_list(spec: JobSpec, tmp_path: Path) -> None:
    one = summarised(spec, tmp_path, {"em": [answer(2.0)]})
    assert as_json([one])["problem"]["case"] == "the job"
    both = as_json([one, one])
    assert [problem["case"] for problem in both["problem"]] == ["the job", "the job"]
    assert len(both["rows"]) == 2


def test_names_of_cases_are_free(spec: JobSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = r"[/x] $\frac$ <script> 世"
    lost = {"completed": False, "limited": False, "reason": "why [/y]"}
    summary = summarised(spec, tmp_path, {"em": [answer(2.0)], BOUND: [lost]})
    summary = CaseSummary(name, summary.problem, summary.rows, summary.answers)
    show_tables([summary], write_results(tmp_path, [summary]))
    assert "<script>" not in (tmp_path / "table.html").read_text()
    printed = capsys.readouterr().out
    assert r"[/x] $\frac$" in printed
    assert "why [/y]" in printed


def test_a_job_that_loses_to_the_plain_thing_is_told_so_in_words(
    small_job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parse_job(small_job(privacy={"budget": "certified"}, extension={"method": "log-convex"}))
    own = own_method(spec)
    assert own == "mlaet-a"
    late = {"completed": False, "limited": True, "limit_seconds": 1, "reason": "slow"}
    for loss, beaten in ((1.5, True), (0.5, False)):
        folder = tmp_path / str(loss)
        told = {own: [answer(loss)], "laplace": [answer(1.0)], "lp": [late]}
        files = write_results(folder, [summary := summarised(spec, folder, told)])
        show_tables([summary], files, verbose=False)
        said = " ".join(capsys.readouterr().out.split())
        warned = "loses 50.0% more than the plain thing, planar noise at the nearest output: set extension"
        assert (warned in said) == beaten
        assert "Without a result: LP, all pairs (-v says why)." in said
        assert "slow" not in said
        show_tables([summary], files)
        assert "slow" in capsys.readouterr().out


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CaseSummary]:
    """Return the folder and the summary of a comparison in this process."""
    folder = tmp_path_factory.mktemp("compared")
    (summary,) = compare(spec, folder, methods=["em", "aipo", "lp-a"], repeats=1, bound_seconds=1)
    return folder, summary


def test_methods_are_compared_on_the_same_problem(spec: JobSpec, compared: tuple[Path, CaseSummary]) -> None:
    folder, summary = compared
    rows = {row["method"]: row for row in summary.rows}
    assert all(row["completed"] and row["repeats"] == 1 for row in rows.values())
    assert rows["em"]["verdict"] == rows["aipo"]["verdict"] == "holds"
    assert rows["em"]["epsilon_audited"] <= 1
    assert rows["em"]["violation_ratio"] == 0
    # Records on both sides of the middle between two corners are no more than a step apart.
    assert rows["lp-a"]["verdict"] == "violated"
    assert rows["lp-a"]["epsilon_audited"] > 1
    assert rows["lp-a"]["guarantee"] == "none"
    assert 0 < summary.problem["lower_bound_km"] < min(rows["em"]["loss_km"], rows["aipo"]["loss_km"])
    assert [path.name for path in folder.iterdir()] == ["answers"]
    # Nothing is left to do, whatever it would have been done with.
    before = {path: path.stat().st_mtime_ns for path in (folder / "answers").rglob("*.json")}
    elsewhere = spec.model_copy(update={"cluster": ClusterSection(kind="address", address="127.0.0.1:1")})
    (again,) = compare(elsewhere, folder, methods=["em", "aipo", "lp-a"], repeats=1, bound_seconds=1)
    assert again == summary
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "answers").rglob("*.json")}


@pytest.mark.slow
def test_where_rows_arise(spec: JobSpec, tmp_path: Path, any_cluster: ClusterSection, compared: Any) -> None:
    job = spec.model_copy(update={"cluster": any_cluster})
    (summary,) = compare(job, tmp_path, methods=["em", "aipo"], repeats=1, bound_seconds=0)

    def losses(summary: CaseSummary) -> list[tuple[float, float]]:
        answers = {one["method"]: one for one in summary.answers if one["repetition"] == 0}
        return [(answers[name]["loss_km"], answers[name]["epsilon_audited"]) for name in ("em", "aipo")]

    assert losses(summary) == losses(compared[1])


@pytest.mark.slow
def test_a_method_that_does_not_end_gets_a_row_with_the_reason(spec: JobSpec, tmp_path: Path) -> None:
    soon = {"limit_seconds": 0.05, "bound_seconds": 0}
    (summary,) = compare(spec, tmp_path, methods=["em", "mlaet-a"], repeats=1, **soon)
    lost = {row["method"]: row for row in summary.rows}["mlaet-a"]
    assert not lost["completed"]
    assert lost["loss_km"] is None
    assert lost["reason"] == "not finished within 0.05 s"
    assert "not finished within 0.05 s" in write_results(tmp_path, [summary])[0].read_text()
    # With more time it is tried again.
    (summary,) = compare(spec, tmp_path, methods=["mlaet-a"], repeats=1, limit_seconds=60, bound_seconds=0)
    assert summary.rows[0]["completed"]


@pytest.mark.slow
def test_where_nothing_is_drawn_there_is_one_repetition(small_job: Job, tmp_path: Path) -> None:
    domain = {"cell_km": 4.0, "refine": [2]}
    job = small_job(
        outputs={"choose": "seeds"},
        loss={"kind": "euclidean"},
        domain=domain,
        privacy={"epsilon_per_km": 0.5},
    )
    del job["outputs"]["count"]
    notes: list[str] = []
    (summary,) = compare(
        parse_job(job), tmp_path, methods=["aipo"], repeats=9, bound_seconds=0,
        observer=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )  # fmt: skip
    assert summary.rows[0]["completed"]
    assert summary.rows[0]["repeats"] == 1
    assert notes == ["the job: outputs and loss are given, so there is one problem only"]


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("limit_seconds", value) for value in (-1.0, 0.0, math.nan, math.inf, 1e300)),
     *(("bound_seconds", value) for value in (-1.0, math.nan)), ("repeats", 0), ("repeats", 10**20)],
)  # fmt: skip
def test_given_numbers_have_the_limits_of_a_job(spec: JobSpec, tmp_path: Path, key: str, value: Any) -> None:
    option = {"repeats": "repeats", "limit_seconds": "limit", "bound_seconds": "bound-seconds"}[key]
    refused(SpecError, f"--{option}: ", compare, spec, tmp_path / "new", methods=["em"], **{key: value})
    assert not (tmp_path / "new").exists()


def test_methods_get_one_thread_each(spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(attempt, "create", lambda *_: None)
    monkeypatch.setattr(attempt, "complete", lambda _store, executor, _stages: used.append(executor.threads))
    request = attempt.Request("mlaet-a", spec.canonical(), "", str(tmp_path), 60, 2**30, 0)
    attempt._construct(request, spec, build_domain(spec), tmp_path)
    assert used == [1]


def test_what_cannot_be_is_refused_before_anything_is_written(spec: JobSpec, tmp_path: Path) -> None:
    many = parse_job({**spec.canonical(), "outputs": {"choose": "road-nodes", "count": 900_000}})
    refused(MdpextError, r"the job: .*only", compare, many, tmp_path / "out", methods=["em"])
    (tmp_path / "zarr.json").write_text("{}")
    refused(StoreError, "is a Zarr store", compare, spec, tmp_path, methods=["em"])
    assert [path.name for path in tmp_path.iterdir()] == ["zarr.json"]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'job.name = "small"\n'
        'domain = {roads = "builtin:manhattan", cell_km = 4.0, refine = [2]}\n'
        "privacy.epsilon_per_km = 1.0\noutputs.count = 8\nloss.tasks = 5\ncluster.workers = 1\n"
    )
    command = [
        sys.executable, "-m", "mdpext_dask.cli", "compare", str(job), "--methods", "em,aipo",
        "--repeats", "2", "--bound-seconds", "0", "--output", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list((tmp_path / "out").rglob("em/*/0.json")), "the first answer")
    found = list((tmp_path / "out").rglob("em/*/0.json"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = {path: path.read_bytes() for path in found}
    document = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert all(row["completed"] and row["repeats"] == 2 for row in document["rows"])
    assert {path: path.read_bytes() for path in found} == first
    losses = {row["method"]: row["loss_km"] for row in document["rows"]}
    other = compare(load_job(job), tmp_path / "other", methods=["em", "aipo"], repeats=2, bound_seconds=0)
    assert losses == {row["method"]: row["loss_km"] for row in other[0].rows}


def test_points_that_lie_together_share_a_label() -> None:
    points = [(1.0, 2.0, "a"), (100.0, 2.0, "d"), (1.2, 2.001, "b"), (1.1, 3.0, "c")]
    assert _labels(points) == [(1.0, 2.0, "a\nb"), (1.1, 3.0, "c"), (100.0, 2.0, "d")]
    assert _labels([]) == []
