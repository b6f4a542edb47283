"""The programs of patches: feasible, never worse, as good as HiGHS, the same bits in every batch."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.pipeline.cells import programs
from mdpext_dask.pipeline.cells import sweep as sweeping
from mdpext_dask.pipeline.cells.lattice import Box, Lines, boxes_of, cell_patches, line_patches
from mdpext_dask.pipeline.cells.sweep import Window, edge_budgets, normaliser_drift, sweep
from mdpext_dask.seed.budget import dual_exponent
from tests.support.reference import SEEDS, softmax

MARGIN = 1e-6


def neighbours(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Return pairs of neighbours, both ways, points numbered along the second axis."""
    points = list(itertools.product(range(shape[0]), range(shape[1])))
    number = {point: n for n, point in enumerate(points)}
    return [
        (number[a], number[b])
        for a, b in itertools.product(points, points)
        if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1
    ]


def random_patches(
    rng: np.random.Generator, shape: tuple[int, int], outputs: int, count: int, tight: float = 0.3
) -> programs.Patches:
    points, pairs = math.prod(shape), tuple(neighbours(shape))
    reference = softmax(rng.normal(scale=1.5, size=(points, count, outputs))).swapaxes(1, 2)
    return programs.Patches(
        cost=rng.uniform(0, 3, size=(points, outputs, count)),
        reference=reference,
        pairs=pairs,
        # Between neighbours the reference uses a random share of what it may.
        weight=np.exp(-tight * rng.uniform(1e-5, 1, size=(len(pairs), outputs, count))),
        lower=np.exp(-tight * rng.uniform(1e-5, 2, size=(points, outputs, count))),
        upper=np.exp(tight * rng.uniform(1e-5, 2, size=(points, outputs, count))),
        band=shape[1],
    )


def worst_violation(patches: programs.Patches, u: NDArray[np.float64]) -> float:
    """Return the largest violation of any row, in u."""
    rows = [patches.weight[r] * u[i] - u[j] for r, (i, j) in enumerate(patches.pairs)]
    return max(float(row.max()) for row in [*rows, patches.lower - u, u - patches.upper])


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3)), outputs=st.integers(1, 7), seed=SEEDS)
def test_solutions_are_feasible_and_match_highs(shape: tuple[int, int], outputs: int, seed: int) -> None:
    patches = random_patches(np.random.default_rng(seed), shape, outputs, count=4)
    ours, theirs = programs.solve_patches(patches), programs.solve_with_highs(patches)
    assert not ours.failed.any()
    assert worst_violation(patches, ours.u) <= 1e-12
    assert np.abs((patches.reference * ours.u).sum(axis=1) - 1).max() < 1e-8
    gain, best = patches.gain(ours.u), patches.gain(theirs.u)
    assert (gain >= 0).all()
    assert (gain >= best - 1e-4 * (patches.cost * patches.reference).sum(axis=(0, 1))).all()


@pytest.mark.parametrize("outputs", [3, 9, *(pytest.param(case, marks=pytest.mark.slow) for case in [1, 17])])
def test_a_sweep_has_the_same_bits_in_every_batch(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program at a time, as many as there are, and something between."""
    window = window_of(np.random.default_rng(outputs), (13, 14), outputs, allowed=0.5)
    lines = Lines(12, 4, 0), Lines(13, 4, 2)
    found = []
    for elements in (1, 300, 10**6):
        monkeypatch.setattr(sweeping, "_BATCH_ELEMENTS", elements)
        found.append(swept_twice(window, lines))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_where_nothing_may_move_the_reference_comes_back() -> None:
    """Every budget used up but for a hair: no room, and no failure either."""
    tight = random_patches(np.random.default_rng(1), (3, 3), 5, count=8, tight=1e-7)
    solutions = programs.solve_patches(tight)
    assert not solutions.failed.any()
    assert np.abs(solutions.u - 1).max() < 1e-6
    assert worst_violation(tight, solutions.u) <= 1e-12


def test_one_record_free_of_its_neighbours_reports_the_cheapest_output() -> None:
    cost = np.array([3.0, 1.0, 2.0]).reshape(1, 3, 1)
    reference = np.full((1, 3, 1), 1 / 3)
    least, most = np.full((1, 3, 1), 3e-6), np.full((1, 3, 1), 3.0)
    free = programs.Patches(cost, reference, (), np.empty((0, 3, 1)), least, most, 1)
    assert (reference * programs.solve_patches(free).u)[0, :, 0] == pytest.approx(
        [1e-6, 1 - 2e-6, 1e-6], abs=1e-4
    )


# --- budgets --------------------------------------------------------------------------------------


@given(p=st.sampled_from([1.0, 1.5, 2.0, 4.0, math.inf]), allowed=st.floats(0.01, 3.0), seed=SEEDS)
def test_budgets_hold_the_reference_and_keep_vectors_within(p: float, allowed: float, seed: int) -> None:
    rng, q = np.random.default_rng(seed), dual_exponent(p)
    scores = np.log(softmax(rng.normal(scale=0.4 * allowed, size=(4, 3, 5))))
    drift = (rng.uniform(0, 0.1 * allowed, size=(3, 3)), rng.uniform(0, 0.1 * allowed, size=(4, 2)))
    budget_x, budget_y = edge_budgets(scores, allowed, drift, q, MARGIN)
    east, north = np.abs(np.diff(scores, axis=0)), np.abs(np.diff(scores, axis=1))
    assert (budget_x >= east + 0.99 * MARGIN * allowed).all()
    assert (budget_y >= north + 0.99 * MARGIN * allowed).all()
    for i, j, k, side, flank in itertools.product(range(3), range(2), range(5), (0, 1), (0, 1)):
        charged = np.array([drift[0][i, j + side], drift[1][i + flank, j]])
        own = np.array([east[i, j + side, k], north[i + flank, j, k]]) + charged
        vector = np.array([budget_x[i, j + side, k], budget_y[i + flank, j, k]]) + charged
        limit = max(allowed, float(np.linalg.norm(own, ord=q)))
        assert np.linalg.norm(vector, ord=q) <= limit * (1 + 2 * MARGIN + 1e-12)


def test_what_is_left_of_epsilon_is_shared_out() -> None:
    """A flat mechanism may rise by ε h / √2 along both axes; one that uses all of ε, no further."""
    budget_x, budget_y = edge_budgets(
        np.log(np.full((2, 2, 3), 1 / 3)), 1.0, (np.zeros((1, 2)), np.zeros((2, 1))), 2.0, MARGIN
    )
    assert np.allclose([*budget_x.ravel(), *budget_y.ravel()], math.sqrt(0.5), rtol=1e-5)
    steep = np.log(softmax(np.array([[[0.0, 0.0], [0.0, 0.0]], [[0.6, -0.6], [0.6, -0.6]]])))
    change = abs(steep[1, 0, 0] - steep[0, 0, 0]), abs(steep[1, 0, 1] - steep[0, 0, 1])
    budget_x, _ = edge_budgets(steep, min(change), (np.zeros((1, 2)), np.zeros((2, 1))), 2.0, MARGIN)
    assert budget_x[0, 0] == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("q", [1.0, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("allowed", [0.1, 5.0, 80.0])
def test_flat_edges_are_shared_out_without_a_warning(q: float, allowed: float) -> None:
    """Flat along one axis, along both, by next to nothing, or steeper than is left."""
    scores = np.zeros((3, 3, 2))
    scores[2] += [1.0, 1e-200]
    scores[:, 2] += [100.0, 5e-324]
    budgets = edge_budgets(scores, allowed, (np.zeros((2, 3)), np.zeros((3, 2))), q, MARGIN)
    for budget in budgets:
        assert np.isfinite(budget).all()
        assert (budget > 0).all()
    corner = np.array([budgets[0][0, 0], budgets[1][0, 0]])  # of a cell where all is flat
    assert corner == pytest.approx(allowed if math.isinf(q) else allowed / 2 ** (1 / q), rel=3 * MARGIN)


def test_the_drift_is_the_slope_of_the_log_normaliser_at_the_ends() -> None:
    """Interpolate between two rows; the log-normaliser's slope at either end, by finite differences."""
    scores = np.log(softmax(np.random.default_rng(5).normal(size=(2, 1, 6))))
    drift = normaliser_drift(scores)[0][0, 0]
    t = 1e-6
    inner = [(1 - s) * scores[0, 0] + s * scores[1, 0] for s in (t, 1 - t)]
    assert drift == pytest.approx(max([abs(math.log(np.exp(f).sum())) / t for f in inner]), rel=1e-4)


def test_records_between_neighbours_that_keep_their_budgets_are_within_epsilon() -> None:
    """What the charge for the normaliser is for, along a line."""
    scores = np.log(softmax(np.random.default_rng(6).normal(scale=0.8, size=(2, 2, 6))))
    drift_x, drift_y = normaliser_drift(scores)
    fine = np.log(extend_log_convex(scores, 64).astype(float))
    for k in range(6):
        for line, (a, b) in enumerate(((scores[0, 0], scores[1, 0]), (scores[0, 1], scores[1, 1]))):
            steepest = np.abs(np.diff(fine[:, 64 * line, k])).max() * 64
            assert steepest <= abs(b[k] - a[k]) + drift_x[0, line] + 1e-4
    assert drift_y.min() >= 0


# --- sweeps ---------------------------------------------------------------------------------------


@given(
    last=st.tuples(st.integers(1, 17), st.integers(1, 17)), patch=st.integers(2, 5),
    offset=st.tuples(st.integers(0, 4), st.integers(0, 4)), side=st.integers(1, 3),
)  # fmt: skip
def test_sweep_has_every_point(last: tuple[int, int], patch: int, offset: tuple[int, int], side: int) -> None:
    """Crossings, points on lines, and points inside cells part the lattice, however it is cut into boxes."""
    lines = tuple(Lines(n, patch, o % patch) for n, o in zip(last, offset, strict=True))
    seen = np.zeros((last[0] + 1, last[1] + 1), dtype=int)
    owner = np.full(seen.shape, -1)
    programs_of = np.zeros((2, *seen.shape), dtype=int)
    for number, box in enumerate(boxes_of(lines, side * patch)):
        assert (owner[box.part()] == -1).all()
        owner[box.part()] = number
        for turn, patches in enumerate((line_patches(lines, box), cell_patches(lines, box))):
            for (east, north), places in patches.items():
                for i, j in places:
                    part = slice(i, i + east), slice(j, j + north)
                    seen[part] += 1
                    programs_of[turn][part] = (i + 1) * 100 + j
                    assert (owner[part] == number).all()
    assert (owner >= 0).all()
    crossings = np.ix_(lines[0].positions(0, last[0]), lines[1].positions(0, last[1]))
    seen[crossings] += 1
    assert (seen == 1).all()
    # No program of one turn has a neighbour in another one.
    for found in programs_of:
        for a, b in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
            assert ((a == b) | (a == 0) | (b == 0)).all()


def window_of(rng: np.random.Generator, shape: tuple[int, int], outputs: int, allowed: float) -> Window:
    scores = np.log(softmax(np.cumsum(rng.normal(scale=0.1 * allowed, size=(*shape, outputs)), axis=0)))
    nothing = np.zeros((shape[0] - 1, shape[1])), np.zeros((shape[0], shape[1] - 1))
    budget_x, budget_y = edge_budgets(scores, allowed, nothing, 2.0, MARGIN)
    cost = rng.uniform(0, 1, size=scores.shape)
    return Window((0, 0), scores, budget_x, budget_y, cost, np.zeros(shape, dtype=bool), 1e-6)


def swept_twice(window: Window, lines: tuple[Lines, Lines]) -> NDArray[np.float64]:
    n, m = window.scores.shape[:2]
    box = Box((0, n), (0, m))
    sides, _ = sweep(window, window.scores, line_patches(lines, box), math.inf)
    return sweep(window, sides, cell_patches(lines, box), math.inf)[0]


@settings(max_examples=15)
@given(
    shape=st.tuples(st.integers(2, 10), st.integers(2, 10)), outputs=st.integers(2, 6),
    offset=st.tuples(st.integers(0, 3), st.integers(0, 3)), seed=SEEDS,
)  # fmt: skip
def test_sweep_invariants(shape: tuple[int, int], outputs: int, offset: tuple[int, int], seed: int) -> None:
    window = window_of(np.random.default_rng(seed), shape, outputs, allowed=0.5)
    lines = Lines(shape[0] - 1, 4, offset[0]), Lines(shape[1] - 1, 4, offset[1])
    result = swept_twice(window, lines)
    assert (np.abs(np.diff(result, axis=0)) <= window.budget_x + 1e-9).all()
    assert (np.abs(np.diff(result, axis=1)) <= window.budget_y + 1e-9).all()
    assert np.abs(np.exp(result).sum(axis=-1) - 1).max() < 1e-12
    assert np.exp(result).min() >= 1e-6 * (1 - 2e-5)
    before, after = ((window.cost * np.exp(s)).sum() for s in (window.scores, result))
    assert after <= before * (1 + 1e-9)
    crossings = np.ix_(lines[0].positions(0, shape[0]), lines[1].positions(0, shape[1]))
    assert np.array_equal(result[crossings], window.scores[crossings])


def test_a_tube_bounds_how_far_lines_go_and_frozen_points_stay() -> None:
    window = window_of(np.random.default_rng(3), (9, 9), 5, allowed=0.8)
    lines = Lines(8, 4, 0), Lines(8, 4, 0)
    moved, swept = sweep(window, window.scores, line_patches(lines, Box((0, 9), (0, 9))), 0.05)
    assert 0.01 < np.abs(moved - window.scores).max() <= 0.05 + 1e-6
    assert (swept.programs, swept.fallbacks) == (12, ())
    window.frozen[:5] = True
    held, swept = sweep(window, window.scores, line_patches(lines, Box((0, 9), (0, 9))), math.inf)
    assert np.array_equal(held[:5], window.scores[:5])
    assert not np.array_equal(held[5:], window.scores[5:])
    # Lines that run into the frozen half are not solved at all.
    assert swept.programs == 5


def test_programs_that_fail_are_solved_by_highs_and_else_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    window = window_of(np.random.default_rng(4), (5, 5), 4, allowed=0.6)
    lines = Lines(4, 4, 0), Lines(4, 4, 0)
    patches = cell_patches(lines, Box((0, 5), (0, 5)))
    expected, swept = sweep(window, window.scores, patches, math.inf)
    assert (swept.programs, swept.by_highs, swept.fallbacks) == (1, 0, ())

    def fails(patches: programs.Patches) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        count = patches.cost.shape[-1]
        return np.full_like(patches.cost, np.nan), np.full(count, np.inf)

    monkeypatch.setattr(programs, "_interior_point", fails)
    by_highs, swept = sweep(window, window.scores, patches, math.inf)
    assert (swept.programs, swept.by_highs, swept.fallbacks) == (1, 1, ())
    cost = [(window.cost * np.exp(scores)).sum() for scores in (expected, by_highs)]
    assert cost[0] == pytest.approx(cost[1], rel=1e-5)

    def fails_too(patches: programs.Patches) -> programs.Solutions:
        return programs.Solutions(np.ones_like(patches.cost), np.ones(patches.cost.shape[-1], dtype=bool))

    monkeypatch.setattr(sweeping, "solve_with_highs", fails_too)
    stays, swept = sweep(window, window.scores, patches, math.inf)
    assert np.array_equal(stays, window.scores)
    assert (swept.programs, swept.by_highs, swept.fallbacks) == (1, 0, ((1, 1, 3, 3),))


def test_highs_solves_programs_at_the_floor() -> None:
    """Coefficients of 1e-11 are not dropped."""
    patches = random_patches(np.random.default_rng(8), (3, 3), 6, count=3)
    reference = patches.reference.copy()
    reference[:, 1:] *= 1e-10
    reference[:, 0] = 1 - reference[:, 1:].sum(axis=1)
    small = dataclasses.replace(patches, reference=reference)
    ours, theirs = programs.solve_patches(small), programs.solve_with_highs(small)
    assert not ours.failed.any()
    assert not theirs.failed.any()


def test_highs_says_so_when_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise SolverError("no")

    monkeypatch.setattr("mdpext_dask.pipeline.cells.programs.solve_linear_program", fails)
    solutions = programs.solve_with_highs(random_patches(np.random.default_rng(0), (2, 2), 3, count=2))
    assert solutions.failed.all()
    assert (solutions.u == 1).all()


# --- the logarithm --------------------------------------------------------------------------------


@given(st.floats(1e-300, 1e300))
def test_logarithm_is_accurate(x: float) -> None:
    assert float(logarithm(np.array([x]))[0]) == pytest.approx(math.log(x), rel=4e-16, abs=3e-16)


def test_logarithm_undoes_the_exponential() -> None:
    x = np.random.default_rng(0).uniform(-30, 0, 1000)
    assert np.abs(logarithm(exponential(x)) - x).max() < 1e-14
    assert logarithm(np.ones(3)).tolist() == [0.0, 0.0, 0.0]
