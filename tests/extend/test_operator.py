"""Operators of the user: the example of the documentation, what is asked of one, and what is refused."""

import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.errors import EXIT_BAD_INPUT, EXIT_CRASH, GuaranteeViolation, MdpextError, SpecError
from mdpext_dask.events import Event, StageFinished
from mdpext_dask.extend.choose import operator_of, seed_programs
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.operator import Operator
from mdpext_dask.job.sections import ExtensionSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build, finalise, init, partition
from mdpext_dask.problem.grid import Grid
from mdpext_dask.seed.budget import bound_budgets
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.inside import run_inside
from tests.support.problems import write_toml
from tests.support.reference import SEEDS, audited_epsilon, corners_of, softmax, spread_over_orders
from tests.support.refusals import refusal, refused

PROJECT = Path(__file__).resolve().parents[2]
Job = Callable[..., dict[str, dict[str, Any]]]

MODULE = """
import math

import numpy as np

from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.extend.operator import Operator


def plain(corners):
    parts = math.prod(corners.refine)
    return interpolated(interpolated(corners.scores, parts), parts, axis=1)


class Smooth(Operator):
    '''Log-linear with weights 3 t^2 - 2 t^3, up to 1.5 times as steep; normalising at most doubles that.'''

    linear = True

    def scores(self, corners):
        parts, scores = math.prod(corners.refine), corners.scores
        t = (np.arange(parts) / parts)[:, None, None]
        weight = t * t * (3 - 2 * t)
        for axis in (0, 1):
            scores = np.moveaxis(scores, axis, 0)
            fine = (1 - weight) * scores[:-1, None] + weight * scores[1:, None]
            fine = np.concatenate([fine.reshape(-1, *scores.shape[1:]), scores[-1:]])
            scores = np.moveaxis(fine, 0, axis)
        return scores

    def steepening(self, delta_axis, delta_other):
        return 3.0


class Unpromising(Operator):
    def scores(self, corners):
        return plain(corners)


def operator(name, base=Unpromising, **methods):
    globals()[name] = type(name, (base,), {**methods, "__module__": __name__})


def steepening(value):
    return {"steepening": lambda *_: value}


def raising(error):
    def method(*_):
        raise error

    return method


def holed(self, corners):
    scores = np.array(plain(corners))
    scores[0, 1, 0] = np.nan
    return scores


def late(self, corners):
    if corners.scores.shape[1] > 2:  # on more than a single cell
        raise IndexError("out of range")
    return plain(corners)


operator("Promising", **steepening(2.0))
# Says how it was called.
operator("Levels", Promising, scores=lambda _, c: plain(c) * (1 - 0.01 * len(c.refine)))
# Promises what it does not keep.
operator("Bold", scores=lambda _, c: 3 * plain(c), **steepening(1.0))
# Spreads scores beyond what float64 can exponentiate.
operator("Wild", scores=lambda _, c: 1e4 * plain(c))
# Looks at a corner that is none of the record's cell.
operator("FarSighted", Promising, scores=lambda _, c: plain(c) + 0.01 * c.scores[-1, -1])
operator("Nothing", object)
operator("Unfinished", Operator)
operator("Broken", __init__=raising(RuntimeError("no file\\nwith tables")))
operator("Argumentative", __init__=lambda self, table: None)
operator("Failing", scores=raising(IndexError("out of range")))
operator("Short", scores=lambda _, c: plain(c)[:-1])
operator("Empty", scores=holed)
operator("Certain", scores=lambda _, c: np.where(plain(c) > -1, 0.0, -np.inf))
operator("Flat", rows=lambda self, c: self.scores(c))
operator("Modest", **steepening(0.5))
operator("Undecided", **steepening(float("nan")))
operator("Overflowing", steepening=lambda *_: math.exp(1000))
operator("Quitting", steepening=raising(SystemExit(0)))
operator("Resigning", scores=raising(SystemExit(0)))
operator("Vanishing", scores=raising(GeneratorExit))
operator("Backwards", steepening=lambda _, along, across: 10 / min(along, 1))
operator("LateFailure", scores=late)
number = 7
"""


def readme_module() -> str:
    text = (PROJECT / "docs" / "operators.md").read_text()
    return text.partition("<!-- operator -->\n```python\n")[2].partition("```")[0]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder on Python's path with modules of operators, one of them the README's."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "own_operators.py").write_text(MODULE)
    (folder / "mean.py").write_text(readme_module())
    (folder / "leaving.py").write_text("raise SystemExit(3)")
    (folder / "misspelt.py").write_text("class Operator(:\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield folder
    for name in ("own_operators", "mean"):
        sys.modules.pop(name, None)


def own(method: str, stages: str = "levels") -> Operator:
    return operator_of(ExtensionSection.model_validate({"method": method, "stages": stages}))


def seeds(rng: np.random.Generator, shape: tuple[int, int], outputs: int) -> NDArray[np.float64]:
    return np.log(softmax(rng.normal(scale=2, size=(*shape, outputs))))


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refine", [(2, 3), (2, 3, 4), (3, 3)])
def test_linear_in_a_transform_the_order_makes_no_difference(refine: tuple[int, ...]) -> None:
    """Of probabilities or of their logarithms: any order of levels, either axis first, normalised or not."""
    scores = seeds(np.random.default_rng(0), (3, 2), 5)
    for operator in (own("mean:Mean"), LogConvex()):
        assert max(spread_over_orders(operator, scores, refine)) < 1e-12


def test_the_check_of_the_order_can_fail() -> None:
    """Smoothed weights within each level are not smoothed weights at once."""
    scores = seeds(np.random.default_rng(0), (3, 2), 5)
    by_levels, by_axes = spread_over_orders(own("own_operators:Smooth"), scores, (2, 3))
    assert by_levels > 0.1
    assert by_axes < 1e-12


def test_the_mean_needs_no_normaliser() -> None:
    scores = seeds(np.random.default_rng(1), (3, 4), 6)
    fine = own("mean:Mean").scores(corners_of(scores, (2, 3)))
    assert np.exp(fine).sum(axis=-1) == pytest.approx(1, abs=1e-14)
    assert np.exp(fine[3, 3]) == pytest.approx(np.exp(scores[:2, :2]).mean(axis=(0, 1)))


@given(factor=st.integers(1, 20), outputs=st.integers(2, 5), scale=st.floats(0.1, 4), seed=SEEDS)
def test_the_mean_is_as_steep_as_it_says_at_most(factor: int, outputs: int, scale: float, seed: int) -> None:
    scores = np.log(softmax(np.random.default_rng(seed).normal(scale=scale, size=(2, 3, outputs))))
    operator, fine = own("mean:Mean"), own("mean:Mean").scores(corners_of(scores, (factor,)))
    delta = [float(np.abs(np.diff(scores, axis=axis)).max()) for axis in (0, 1)]
    for axis in (0, 1):
        slope = float(np.abs(np.diff(fine, axis=axis)).max()) * factor
        assert slope <= delta[axis] * operator.steepening(delta[axis], delta[1 - axis]) + 1e-11


def test_what_the_mean_says_is_nearly_reached() -> None:
    """On an edge that uses its budget, at its lower end; so a smaller number would be wrong."""
    low = 0.01 * math.exp(-1.5)
    scores = np.log([[[0.01, 0.99]] * 2, [[low, 1 - low]] * 2])
    fine = own("mean:Mean").scores(corners_of(scores, (1000,)))
    slope = float(np.abs(np.diff(fine[..., 0], axis=0)).max()) * 1000
    assert slope == pytest.approx(1.5 * own("mean:Mean").steepening(1.5, 0.0), rel=2e-3)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 40.0])
def test_closed_form_budgets_are_the_largest_that_a_promise_allows(epsilon: float) -> None:
    operator, cell_km = own("mean:Mean"), 3.0
    budgets = bound_budgets((epsilon, epsilon / 2), cell_km, operator.steepening)
    for beta, limit in zip(budgets.beta, budgets.split, strict=True):
        # δ s(δ) = e^δ − 1
        assert math.expm1(beta * cell_km) / cell_km <= limit
        assert beta == pytest.approx(math.log1p(limit * cell_km) / cell_km, rel=1e-9)


def test_tempering_a_linear_rule_is_tempering_its_seed() -> None:
    scores, alpha = seeds(np.random.default_rng(2), (3, 3), 5), 0.6
    operator = own("own_operators:Smooth")
    assert operator.linear
    rows = operator.rows(corners_of(scores, (4,))).astype(np.float64)
    tempered = operator.rows(corners_of(np.log(softmax(alpha * scores)), (4,)))
    assert tempered == pytest.approx(softmax(alpha * np.log(rows)), rel=1e-6)
    assert operator.rows(corners_of(scores, (4,), exponent=alpha)) == pytest.approx(tempered, rel=1e-6)


@pytest.mark.parametrize("method", ["mean:Mean", "own_operators:Smooth"])
def test_bits_do_not_depend_on_the_block(method: str) -> None:
    scores, operator = seeds(np.random.default_rng(3), (5, 4), 3), own(method)
    whole, part = (operator.rows(corners_of(s, (2, 3))) for s in (scores, scores[1:3, 2:]))
    assert np.array_equal(part, whole[6:13, 12:])


def test_rows_are_the_same_column_by_column_and_all_at_once() -> None:
    scores = seeds(np.random.default_rng(4), (4, 3), 5)
    for operator in (own("mean:Mean"), own("own_operators:Smooth")):
        expected = softmax(0.7 * operator.scores(corners_of(scores, (2, 2))))
        assert operator.rows(corners_of(scores, (2, 2), exponent=0.7)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", ["mean:Mean", "own_operators:Smooth"])
@pytest.mark.parametrize(
    ("block_cells", "refine", "outputs"), [([4, 5], [4, 6], 60), ([4, 5], [2, 3], 300), ([1, 1], [60], 20)]
)
def test_memory(small_job: Job, method: str, block_cells: list[int], refine: list[int], outputs: int) -> None:
    domain, store = {"cell_km": 2.0, "refine": refine}, {"block_cells": block_cells}
    job = small_job(domain=domain, outputs={"count": outputs}, extension={"method": method}, store=store)
    scores = seeds(np.random.default_rng(0), (block_cells[0] + 1, block_cells[1] + 1), outputs)
    corners = corners_of(scores, tuple(refine))
    operator = own(method)
    tracemalloc.start()
    operator.rows(corners)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    planned = plan_job(parse_job(job))["peak_bytes_per_task"]
    assert planned / 10 < peak < planned


# --- in the pipeline ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mean:Mean", "own_operators:Smooth"])
@pytest.mark.parametrize("budget", [pytest.param("bound", marks=pytest.mark.slow), "certified"])
def test_an_operator_of_ones_own_is_certified(path: Path, small_job: Job, method: str, budget: str) -> None:
    url = str(path)
    job = small_job(extension={"method": method}, privacy={"budget": budget}, store={"block_cells": [2, 3]})
    job["seed"] = {"refine_rounds": 2}
    summary = build(parse_job(job), url)
    assert (summary["state"], summary["method"], summary["boundary_mismatches"]) == ("complete", method, 0)
    store = MechanismStore.open(url)
    exact = audited_epsilon(store.read("probability"), store.read("x"), store.read("y"), 2.0)
    assert exact <= summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]
    # Whoever takes no budgets is given none; who is linear has its seed tempered, not its scores.
    extension = {"extension_x", "extension_y", "extension_exponent"} & store.seed_arrays()
    assert extension == (set() if method.endswith("Smooth") else {"extension_exponent"})
    assert store.seed_attributes["extension"] == sorted(extension)
    if budget == "certified":
        assert summary["epsilon_certified"] >= 0.99 * summary["epsilon_planar_per_km"]


def test_without_a_promise_the_certificate_finds_budgets(tmp_path: Path, small_job: Job) -> None:
    """The rule is log-convex, but keeps that to itself."""
    job = small_job(extension={"method": "own_operators:Unpromising"}, privacy={"budget": "certified"})
    summary = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert summary["state"] == "complete"
    known = small_job(privacy={"budget": "certified"}, seed={"refine_rounds": 0})
    expected = build(parse_job(known), str(tmp_path / "k.zarr"))
    assert summary["loss_km"] == pytest.approx(expected["loss_km"], rel=0.01)


def test_scores_out_of_all_bounds_are_tempered(path: Path, small_job: Job) -> None:
    sizes = {"domain": {"cell_km": 6.0}, "outputs": {"count": 4}}
    job = small_job(extension={"method": "own_operators:Wild"}, privacy={"budget": "certified"}, **sizes)
    summary = build(parse_job(job), str(path))
    assert summary["state"] == "complete"
    assert summary["epsilon_certified"] >= 0.99 * summary["epsilon_planar_per_km"]


def test_stages_are_what_the_operator_sees(tmp_path: Path, small_job: Job) -> None:
    rows = []
    for stages in ("levels", "one"):
        url = str(tmp_path / stages)
        job = small_job(extension={"method": "own_operators:Levels", "stages": stages}, outputs={"count": 2})
        init(parse_job(job), url)
        store = MechanismStore.open(url, mode="r+")
        seed = np.log(softmax(np.add.outer(np.zeros(store.grid.seeds_shape), [0.0, 1.0])))
        store.write_seed_arrays({"score": seed})
        partition(url, 0, 1)
        first = MechanismStore.open(url).read("probability")[0, 0].astype(np.float64)
        rows.append(np.diff(np.log(first)))
    assert (rows[0], rows[1]) == (pytest.approx(0.98, abs=1e-5), pytest.approx(0.99, abs=1e-5))


@pytest.mark.slow
def test_processes_import_the_operator_too(tmp_path: Path, small_job: Job, folder: Path) -> None:
    """By the command line, as in the README; the bytes are those of this process."""
    job = small_job(extension={"method": "mean:Mean"}, store={"block_cells": [2, 3]})
    here, there = tmp_path / "here.zarr", tmp_path / "there.zarr"
    build(parse_job(job), str(here))
    write_toml(tmp_path / "job.toml", {**job, "cluster": {"kind": "local", "workers": 2}, "extension": {}})
    command = [sys.executable, "-P", "-m", "mdpext_dask.cli", "run", str(tmp_path / "job.toml")]
    options = ["--set", "extension.method=mean:Mean", "--store", str(there), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "complete"
    rows = [MechanismStore.open(str(url)).read("probability") for url in (here, there)]
    assert np.array_equal(*rows)


# --- what must be refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "says", "budget"),
    [
        ("own_operators:Unpromising", '"bound" needs .*promises nothing; use "certified"', "bound"),
        ("own_operators:Unpromising", '"half" needs .*promises inf; use "certified"', "half"),
        ("own_operators:Smooth", '"half" needs .*promises 3; use "bound" or "certified"', "half"),
        # Enough for the even split, but not for all that are tried.
        ("mean:Mean", '"half" needs .*promises 2.2.*; use "bound" or "certified"', "half"),
        *(pytest.param(*fault, "certified", marks=pytest.mark.slow if number % 3 else ())
          for number, fault in enumerate((
            ("no_such_module:Mean", "no_such_module:Mean: cannot be made .*No module named"),
            ("os:getcwd", "os:getcwd: is not a subclass of .*Operator"),
            ("sys:exit", "sys:exit: is not a subclass of .*Operator"),
            ("own_operators:Quitting", "steepening fails: SystemExit: 0"),
            ("own_operators:Resigning", "Resigning: fails: SystemExit: 0"),
            ("own_operators:Missing", "has no attribute 'Missing'"),
            ("own_operators:Nothing", "is not a subclass of .*Operator"),
            ("own_operators:number", "is not a subclass of .*Operator"),
            ("own_operators:Unfinished", "cannot be made .*scores"),
            ("own_operators:Broken", "cannot be made .*RuntimeError: no file$"),
            ("own_operators:Argumentative", "cannot be made .*table"),
            ("leaving:Mean", "cannot be made .*SystemExit"),
            ("misspelt:Operator", "cannot be made .*SyntaxError"),
            ("own_operators:Failing", "own_operators:Failing: fails: IndexError: out of range"),
            ("own_operators:Short", r"scores have the shape \(4, 5, 8\), not \(5, 5, 8\)"),
            ("own_operators:Empty", r"scores must be finite; that of \(0, 1, 0\) is nan"),
            ("own_operators:Certain", "scores must be finite; .* is -inf"),
            ("own_operators:Flat", "rows are float64 of shape .*, not float32"),
            ("own_operators:Modest", "steepening must be at least 1, but is 0.5"),
            ("own_operators:Undecided", "steepening must be at least 1, but is nan"),
            ("own_operators:Overflowing", "steepening fails: OverflowError"),
            ("own_operators:Backwards", "steepening allows no budgets"),
        ))),
    ],
)  # fmt: skip
def test_what_cannot_work(path: Path, small_job: Job, method: str, says: str, budget: str) -> None:
    spec = parse_job(small_job(extension={"method": method}, privacy={"budget": budget}))
    stages: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, StageFinished):
            stages.append(event.stage)

    for action in (lambda: build(spec, str(path), observer=watch), lambda: plan_job(spec)):
        assert re.search(says, refusal(action, kind=SpecError))
    assert stages == []
    assert not path.exists()


@pytest.mark.parametrize("method", ["leaving:Mean", "own_operators:Resigning", "own_operators:Vanishing"])
def test_ending_the_process_is_no_success(tmp_path: Path, small_job: Job, capfd: Any, method: str) -> None:
    write_toml(tmp_path / "job.toml", small_job(extension={"method": method}))
    ended = run_inside(capfd, "run", tmp_path / "job.toml", "--store", tmp_path / "s.zarr")
    assert ended.returncode == (EXIT_CRASH if "Vanishing" in method else EXIT_BAD_INPUT)
    assert "error: " in ended.stderr
    assert not (tmp_path / "s.zarr").exists()


def test_half_is_allowed_where_the_promise_is_two_or_less(path: Path, small_job: Job) -> None:
    job = small_job(extension={"method": "mean:Mean"}, privacy={"budget": "half"}, domain={"cell_km": 2.0})
    summary = build(parse_job(job), str(path))
    assert summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]


@pytest.mark.parametrize(
    "cluster", [{"kind": "inline"}, pytest.param({"kind": "local", "workers": 1}, marks=pytest.mark.slow)]
)
def test_what_fails_only_on_a_block_is_one_error(path: Path, small_job: Job, cluster: dict[str, Any]) -> None:
    extension, privacy = {"method": "own_operators:LateFailure"}, {"budget": "certified"}
    job = small_job(extension=extension, privacy=privacy, cluster=cluster)
    with pytest.raises(SpecError, match="LateFailure: fails: IndexError: out of range"):
        build(parse_job(job), str(path))


@pytest.mark.parametrize(
    "block_cells", [[2, 2], *(pytest.param(case, marks=pytest.mark.slow) for case in [[1, 9], [9, 1]])]
)
def test_an_operator_that_is_not_local_is_caught(path: Path, small_job: Job, block_cells: list[int]) -> None:
    job = small_job(extension={"method": "own_operators:FarSighted"}, store={"block_cells": block_cells})
    refused(GuaranteeViolation, r"disagree on record .*not local", lambda: build(parse_job(job), str(path)))
    assert MechanismStore.open(str(path)).state == "refused"


def test_a_promise_that_is_not_kept_is_caught_by_the_certificate(tmp_path: Path, small_job: Job) -> None:
    bold = {"method": "own_operators:Bold"}
    with pytest.raises(GuaranteeViolation, match=r"certificate .* exceeds"):
        build(parse_job(small_job(extension=bold)), str(tmp_path / "bound.zarr"))
    # Where the certificate sets the budgets, nobody relies on it.
    job = small_job(extension=bold, privacy={"budget": "certified"})
    assert build(parse_job(job), str(tmp_path / "certified.zarr"))["state"] == "complete"


def test_a_finished_store_does_not_need_its_operator(path: Path, small_job: Job, folder: Path) -> None:
    (folder / "passing.py").write_text("from mean import Mean\n")
    url = str(path)

    def forget() -> None:
        (folder / "passing.py").unlink()
        del sys.modules["passing"]

    job = parse_job(small_job(extension={"method": "passing:Mean"}))
    blocks = init(job, url)["blocks"]
    forget()
    for attempt in (lambda: build(job, url), lambda: partition(url, 0, blocks)):
        refused(MdpextError, "passing:Mean: cannot be made", attempt)
    (folder / "passing.py").write_text("from mean import Mean\n")
    partition(url, 0, blocks)
    forget()
    assert finalise(url)["state"] == build(job, url)["state"] == "complete"


@pytest.mark.parametrize(
    ("epsilon", "cell_km", "refine", "programs"),
    [
        (1.0, 2.0, (4,), "cell-lp"),
        (1.0, 1.9, (4,), "log-convex"),
        (0.4, 4.0, (4,), "log-convex"),
        (1.0, 4.0, (1, 1), "log-convex"),
    ],
)
def test_coarse_seeds_are_extended_by_programs(
    epsilon: float, cell_km: float, refine: tuple[int, ...], programs: str
) -> None:
    assert seed_programs(epsilon, Grid(0.0, 0.0, 3, 3, cell_km, refine)) == programs
