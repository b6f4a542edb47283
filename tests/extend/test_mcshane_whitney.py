"""McShane-Whitney extension: its definition, budgets at every level, where the published recipe fails."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import StoreError
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.mcshane_whitney import McShaneWhitney, refined_budgets
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init, partition
from mdpext_dask.seed.budget import bound_budgets, even_split, half_budgets
from mdpext_dask.seed.solve import solve_seed_problem
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.reference import SEEDS, audited_epsilon, corners_of, softmax
from tests.support.refusals import refused
from tests.support.seed_problems import problem_of_axes

Array = NDArray[np.float64]
Size = tuple[int, int]
Job = Callable[..., dict[str, dict[str, Any]]]
# What arithmetic in float64 may add to scores of a few tens.
ROUNDING = 1e-12

shapes = st.tuples(st.integers(1, 3), st.integers(1, 3))
levels = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
betas = st.tuples(*[st.floats(0.05, 4)] * 2)


def scores_within(rng: np.random.Generator, cells: Size, outputs: int, beta: tuple[float, float]) -> Array:
    """Return scores of corners that keep the budgets of both axes, and use them on most edges.

    Each output's is the largest of a few cones, so edges on which nothing happens are rare.
    """
    i, j = np.meshgrid(*(np.arange(n + 1.0) for n in cells), indexing="ij")
    tips = rng.uniform((-1, -1), np.array(cells) + 1, size=(3, outputs, 2))
    heights = rng.normal(scale=sum(beta), size=(3, outputs))
    east, north = (np.abs(place[..., None, None] - tips[..., axis]) for axis, place in enumerate((i, j)))
    return np.asarray((heights - (beta[0] * east + beta[1] * north)).max(axis=-2) - 5)


def free_corners(rng: np.random.Generator, cells: Size, outputs: int, refine: tuple[int, ...]) -> Corners:
    """Return corners whose budgets differ by edge, direction and output, and are not always kept."""
    east, north = cells
    scores = np.log(softmax(rng.normal(scale=2, size=(east + 1, north + 1, outputs))))
    budget_x = rng.uniform(0.1, 4, size=(2, east, north + 1, outputs))
    return Corners(scores, budget_x, rng.uniform(0.1, 4, size=(2, east + 1, north, outputs)), refine)


# --- slow, obvious versions -----------------------------------------------------------------------


def envelopes(a: Array, b: Array, t: float, rise: Any, fall: Any) -> tuple[Array, Array]:
    """Return both envelopes at the share t of a segment from a to b, by their definition."""
    return np.maximum(a - t * fall, b - (1 - t) * rise), np.minimum(a + t * rise, b + (1 - t) * fall)


def along_first_axis(values: Array, parts: int, budget: float) -> tuple[Array, float]:
    """Extend between neighbours by the mean of the envelopes; return also how far these cross, at most."""
    fine, crossing = [], -math.inf
    for a, b in itertools.pairwise(values):
        for step in range(parts):
            lower, upper = envelopes(a, b, step / parts, budget, budget)
            crossing = max(crossing, float((lower - upper).max()))
            fine.append((lower + upper) / 2)
    return np.array([*fine, values[-1]]), crossing


def one_level(scores: Array, parts: int, beta: tuple[float, float]) -> tuple[Array, float]:
    """Extend a lattice to the next one, first along y, then along x; return also the largest crossing."""
    lines, first = along_first_axis(scores.swapaxes(0, 1), parts, beta[1])
    fine, second = along_first_axis(lines.swapaxes(0, 1), parts, beta[0])
    return fine, max(first, second)


def level_by_level(
    scores: Array, refine: tuple[int, ...], beta: tuple[float, float], *, normalise: bool
) -> tuple[list[Array], float]:
    """Return the scores of every level, and the largest crossing; the published recipe normalises."""
    found, worst = [], -math.inf
    for parts in refine:
        scores, crossing = one_level(scores, parts, beta)
        if normalise:
            scores = np.log(softmax(scores))
        found.append(scores)
        worst = max(worst, crossing)
        beta = beta[0] / parts, beta[1] / parts
    return found, worst


def from_all_seeds(scores: Array, factor: int, beta: tuple[float, float]) -> Array:
    """Return the mean of both envelopes over all seeds, with the metric Σ β_t |Δ_t|."""
    east, north = scores.shape[0] - 1, scores.shape[1] - 1
    fine = np.empty((east * factor + 1, north * factor + 1, scores.shape[2]))
    for i, j in np.ndindex(fine.shape[:2]):
        seeds = list(np.ndindex(scores.shape[:2]))
        away = [beta[0] * abs(i / factor - a) + beta[1] * abs(j / factor - b) for a, b in seeds]
        lower = np.max([scores[s] - d for s, d in zip(seeds, away, strict=True)], axis=0)
        upper = np.min([scores[s] + d for s, d in zip(seeds, away, strict=True)], axis=0)
        fine[i, j] = (lower + upper) / 2
    return fine


def steepest(scores: Array, factor: int) -> Array:
    """Return the largest slope along both axes, by source cell."""
    return np.array([np.abs(np.diff(scores, axis=axis)).max() * factor for axis in (0, 1)])


# --- the rule -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(parts=st.integers(1, 12), outputs=st.integers(1, 5), seed=SEEDS)
def test_on_a_segment_it_is_the_mean_of_the_envelopes(parts: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(scale=3, size=(2, outputs))
    # Budgets that the ends keep, some of them with nothing to spare.
    spare = rng.choice([0.0, 0.3, 2.0], size=(2, outputs))
    rise, fall = np.maximum(b - a, 0.1) + spare[0], np.maximum(a - b, 0.1) + spare[1]
    budgets = np.array([[[rise]], [[fall]]]), np.empty((2, 2, 0, outputs))
    line = Corners(np.array([[a], [b]]), *budgets, (parts,))
    got = McShaneWhitney().scores(line)[:, 0]
    assert np.array_equal(got[[0, -1]], [a, b])
    for step, value in enumerate(got):
        lower, upper = envelopes(a, b, step / parts, rise, fall)
        assert (lower <= upper + ROUNDING).all()
        assert ((lower - ROUNDING <= value) & (value <= upper + ROUNDING)).all()
        assert np.abs(value - (lower + upper) / 2).max() <= ROUNDING


def test_budgets_give_way_to_differences_that_exceed_them() -> None:
    ends = np.array([[[0.0, -3.0]], [[-3.0, 0.0]]])
    line = Corners(ends, np.full((2, 1, 1, 1), 1.0), np.empty((2, 2, 0, 1)), (6,))
    got = McShaneWhitney().scores(line)[:, 0]
    assert got == pytest.approx(np.linspace(ends[0, 0], ends[1, 0], 7), abs=ROUNDING)


@given(cells=shapes, refine=levels, outputs=st.integers(1, 5), beta=betas, seed=SEEDS)
def test_scores_keep_their_budgets_at_every_level(
    cells: Size, refine: tuple[int, ...], outputs: int, beta: tuple[float, float], seed: int
) -> None:
    """Along both axes, within source cells and across them; envelopes never cross on the way."""
    scores = scores_within(np.random.default_rng(seed), cells, outputs, beta)
    expected, crossing = level_by_level(scores, refine, beta, normalise=False)
    assert crossing <= ROUNDING
    for number, literal in enumerate(expected, start=1):
        got = McShaneWhitney().scores(corners_of(scores, refine[:number], beta))
        factor = math.prod(refine[:number])
        assert np.abs(got - literal).max() <= ROUNDING
        assert np.array_equal(got[::factor, ::factor], scores)
        assert (steepest(got, factor) <= np.array(beta) + ROUNDING * factor).all()
        # Nothing leaves the range of the corners: scores of stored rows do not get out of hand.
        assert scores.min(axis=(0, 1)) == pytest.approx(got.min(axis=(0, 1)))
        assert scores.max(axis=(0, 1)) == pytest.approx(got.max(axis=(0, 1)))


@given(
    cells=shapes, refine=st.sampled_from([(2,), (3,), (2, 2), (2, 3)]), outputs=st.integers(2, 5), beta=betas,
    one_stage=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_normalising_costs_a_factor_of_two_at_most(
    cells: Size, refine: tuple[int, ...], outputs: int, beta: tuple[float, float], one_stage: bool, seed: int
) -> None:
    """Brute force over all pairs of records."""
    scores = scores_within(np.random.default_rng(seed), cells, outputs, beta)
    rows = McShaneWhitney(one_stage=one_stage).rows(corners_of(scores, refine, beta))
    x, y = (np.arange(n) / math.prod(refine) for n in rows.shape[:2])
    for p, both in ((1, max(beta)), (2, math.hypot(*beta)), (math.inf, sum(beta))):
        assert audited_epsilon(rows, x, y, p) <= 2 * both + 1e-5


def test_it_promises_that_factor() -> None:
    """So `bound` budgets are the published ones with the even split, whatever the cells and the metric."""
    for epsilon, cell_km, p in ((1.0, 3.0, 2.0), (0.3, 0.1, 1.0), (7.0, 5.0, math.inf)):
        split = even_split(epsilon, p)
        bound = bound_budgets(split, cell_km, McShaneWhitney().steepening)
        assert bound.beta == pytest.approx(half_budgets(split).beta, rel=1e-9)
        assert max(bound.beta) * 2 <= split[0]


# --- the published recipe -------------------------------------------------------------------------


def test_normalising_at_every_level_as_published_breaks_epsilon_and_ours_keeps_it() -> None:
    """Seeds of a small LP under half of ε; both recipes on the same seeds and budgets.

    Normalised rows change faster than the budget that their scores kept. Taken as anchors for the next level
    with that budget, they have no Lipschitz function between them: the lower envelope rises above the upper.
    """
    refine, delta, outputs = (2, 3, 4), 2.0, 5
    beta, claimed = (delta, delta), 2 * math.hypot(delta, delta)
    found: tuple[float, Array] = (-math.inf, np.empty(0))
    for number in range(8):
        cost = np.random.default_rng(number).uniform(size=(6, outputs))
        problem = problem_of_axes(cost, (2, 3), beta, 1e-6)
        scores = np.log(solve_seed_problem(problem, "highs", 1e-6).rows).reshape(2, 3, outputs)
        crossing = level_by_level(scores, refine, beta, normalise=True)[1]
        found = max(found, (crossing, scores), key=lambda one: one[0])
    crossing, scores = found
    assert crossing > 0.3
    factor = math.prod(refine)
    x, y = np.arange(factor + 1) / factor, np.arange(2 * factor + 1) / factor
    published = np.exp(level_by_level(scores, refine, beta, normalise=True)[0][-1])
    assert audited_epsilon(published, x, y, 2) > 1.1 * claimed
    assert level_by_level(scores, refine, beta, normalise=False)[1] <= ROUNDING
    assert audited_epsilon(McShaneWhitney().rows(corners_of(scores, refine, beta)), x, y, 2) < claimed


# --- one stage ------------------------------------------------------------------------------------


@given(cells=shapes, factor=st.integers(1, 5), outputs=st.integers(1, 4), beta=betas, seed=SEEDS)
def test_one_stage_is_both_envelopes_over_all_seeds(
    cells: Size, factor: int, outputs: int, beta: tuple[float, float], seed: int
) -> None:
    """Although it looks at the corners of a record's own cell only."""
    scores = scores_within(np.random.default_rng(seed), cells, outputs, beta)
    got = McShaneWhitney(one_stage=True).scores(corners_of(scores, (factor,), beta))
    assert got == pytest.approx(from_all_seeds(scores, factor, beta), rel=1e-12, abs=ROUNDING)
    assert (steepest(got, factor) <= np.array(beta) + ROUNDING * factor).all()


def test_one_stage_is_not_level_by_level() -> None:
    scores = scores_within(np.random.default_rng(1), (2, 2), 3, (1.0, 1.0))
    corners = corners_of(scores, (2, 3), (1.0, 1.0))
    at_once, by_level = (McShaneWhitney(one_stage=one).scores(corners) for one in (True, False))
    assert np.abs(at_once - by_level).max() > 0.05
    # How many levels there are makes no difference to it.
    single = corners_of(scores, (6,), (1.0, 1.0))
    assert np.array_equal(at_once, McShaneWhitney(one_stage=True).scores(single))


# --- what any budgets do --------------------------------------------------------------------------


OPERATORS = LogConvex(), McShaneWhitney(), McShaneWhitney(one_stage=True)


@settings(max_examples=90)
@given(
    cells=st.tuples(st.integers(1, 4), st.integers(1, 4)), outputs=st.integers(1, 9) | st.integers(60, 70),
    refine=levels, operator=st.sampled_from(OPERATORS), seed=SEEDS,
)  # fmt: skip
def test_bits_do_not_depend_on_the_block(
    cells: Size, outputs: int, refine: tuple[int, ...], operator: Operator, seed: int
) -> None:
    """Any sub-block, closed sides included, is the same to the last bit (requirement A2)."""
    rng = np.random.default_rng(seed)
    corners = free_corners(rng, cells, outputs, refine)
    (x0, x1), (y0, y1) = (sorted(rng.choice(n + 1, size=2, replace=False)) for n in cells)
    part = Corners(
        np.ascontiguousarray(corners.scores[x0 : x1 + 1, y0 : y1 + 1]),
        corners.budget_x[:, x0:x1, y0 : y1 + 1], corners.budget_y[:, x0 : x1 + 1, y0:y1], refine,
    )  # fmt: skip
    factor = math.prod(refine)
    inside = np.s_[x0 * factor : x1 * factor + 1, y0 * factor : y1 * factor + 1]
    assert np.array_equal(operator.scores(part), operator.scores(corners)[inside])
    assert np.array_equal(operator.rows(part), operator.rows(corners)[inside])


def test_budgets_of_finer_edges_share_out_those_of_the_edge() -> None:
    corners = free_corners(np.random.default_rng(0), (2, 3), 4, (3,))
    along_x, along_y = refined_budgets(corners.budget_x, corners.budget_y, 3)
    assert along_x.shape == (2, 6, 10, 4)
    assert along_y.shape == (2, 7, 9, 4)
    assert along_x.reshape(2, 2, 3, 10, 4).sum(axis=2)[:, :, ::3] == pytest.approx(corners.budget_x)
    assert along_y.reshape(2, 7, 3, 3, 4).sum(axis=3)[:, ::3] == pytest.approx(corners.budget_y)
    between = corners.budget_x[:, :, 0] * 2 / 3 + corners.budget_x[:, :, 1] / 3
    assert along_x[:, ::3, 1] * 3 == pytest.approx(between)


@settings(max_examples=8)
@given(cells=shapes, refine=levels, one_stage=st.booleans(), alpha=st.floats(0.01, 3), seed=SEEDS)
def test_tempering(cells: Size, refine: tuple[int, ...], one_stage: bool, alpha: float, seed: int) -> None:
    operator = McShaneWhitney(one_stage=one_stage)
    plain = free_corners(np.random.default_rng(seed), cells, 4, refine)
    scaled = Corners(alpha * plain.scores, alpha * plain.budget_x, alpha * plain.budget_y, refine)
    assert operator.scores(scaled) == pytest.approx(alpha * operator.scores(plain), abs=1e-11)
    by_exponent = Corners(plain.scores, plain.budget_x, plain.budget_y, refine, alpha)
    expected = softmax(alpha * np.log(operator.rows(plain).astype(np.float64)))
    for tempered in (by_exponent, scaled):
        assert operator.rows(tempered) == pytest.approx(expected, rel=1e-6)


# --- in the pipeline ------------------------------------------------------------------------------


def job_of(small_job: Job, stages: str = "levels", **sections: dict[str, Any]) -> dict[str, Any]:
    return small_job(extension={"method": "mcshane-whitney", "stages": stages}, **sections)


@pytest.mark.parametrize(
    ("budget", "stages", "p"),
    [
        ("half", "levels", 2), ("certified", "one", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("half", "levels", 1), ("half", "one", "inf"), ("bound", "levels", "inf"), ("bound", "one", 1),
            ("bound", "one", 2),
            ("certified", "levels", 1),
        )),
    ],
)  # fmt: skip
def test_every_budget_certified(path: Path, small_job: Job, budget: str, stages: str, p: float | str) -> None:
    job = job_of(small_job, stages, privacy={"budget": budget}, domain={"metric_p": p})
    summary = build(parse_job(job), str(path))
    assert (summary["state"], summary["method"]) == ("complete", "mcshane-whitney")
    assert 0.3 < summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]
    store = MechanismStore.open(str(path))
    exact = audited_epsilon(store.read("probability"), store.read("x"), store.read("y"), store.metric_p)
    assert exact <= summary["epsilon_certified"]
    # What it is extended from is kept, and nothing of what was tried.
    assert {"extension_x", "extension_y", "extension_exponent"} <= store.seed_arrays()
    assert not [name for name in store.seed_arrays() if name.startswith("trial_")]


@pytest.mark.slow
def test_certified_budgets_use_epsilon_and_cost_less(tmp_path: Path, small_job: Job) -> None:
    def made(budget: str) -> dict[str, Any]:
        job = job_of(small_job, privacy={"budget": budget})
        return build(parse_job(job), str(tmp_path / f"{budget}.zarr"))

    certified, bound = made("certified"), made("bound")
    assert certified["epsilon_certified"] >= 0.99 * certified["epsilon_planar_per_km"]
    assert certified["loss_km"] < bound["loss_km"]
    # The exponent is what tempered it; the rows at the seeds are those that its objective is about.
    store = MechanismStore.open(str(tmp_path / "certified.zarr"))
    assert store.read("seed/extension_exponent")[0] == pytest.approx(store.seed_attributes["tempering"])
    seeds = store.read("probability")[::4, ::4].astype(np.float64)
    cost = store.read_seed_cost().reshape(seeds.shape)
    assert (seeds * cost).sum() == pytest.approx(store.seed_attributes["tempered_primal_km"], rel=1e-6)


@pytest.mark.parametrize("stages", ["levels", pytest.param("one", marks=pytest.mark.slow)])
def test_blocks_do_not_decide_the_bytes(tmp_path: Path, small_job: Job, stages: str) -> None:
    layouts: list[dict[str, Any]] = [{}, *({"store": {"block_cells": cells}} for cells in ([1, 1], [2, 3]))]
    found = []
    for number, layout in enumerate(layouts):
        url = str(tmp_path / f"{number}.zarr")
        assert build(parse_job(job_of(small_job, stages, **layout)), url)["boundary_mismatches"] == 0
        found.append(MechanismStore.open(url).read("probability"))
    assert all(np.array_equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(
    "name",
    [
        "extension_exponent",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ["extension_x", "extension_y"]),
    ],
)
def test_receipts_refer_to_budgets_and_exponent(tmp_path: Path, small_job: Job, name: str) -> None:
    job, path = parse_job(job_of(small_job)), tmp_path / "s.zarr"
    init(job, str(path))
    array = zarr.open_array(str(path / "seed" / name), mode="r+")
    solved = np.asarray(array[...])
    # Lost: reads as not-a-number, never as something to extend from.
    array[...] = np.full(array.shape, np.nan)
    refused(StoreError, "damaged", lambda: partition(str(path), 0, 1))
    # Changed before the end: the seed is solved anew.
    array[...] = 0.9 * solved
    assert not MechanismStore.open(str(path)).has_seed()
    assert build(job, str(path))["state"] == "complete"
    assert MechanismStore.open(str(path)).read(f"seed/{name}") == pytest.approx(solved)
    # Changed afterwards: the audit says so.
    array = zarr.open_array(str(path / "seed" / name), mode="r+")
    array[...] = 0.9 * solved
    report = audit(str(path))
    assert not report.holds
    assert report.changed == ("seed",)
