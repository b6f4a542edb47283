"""Programs of windows: HiGHS as oracle, and rows that keep ε with all around them."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.errors import SolverError
from mdpext_dask.seed import window_program
from mdpext_dask.seed.grid_rows import directions
from mdpext_dask.seed.highs import rows_of_two, solve_linear_program
from mdpext_dask.seed.record_program import Lattice, LatticePromise, solve_records
from mdpext_dask.seed.window_program import WindowProblem, solve_window

Floats = NDArray[np.float64]
REACH, LEAST, SIDE_KM = 3, 1e-9, 0.5


def case(seed: int, shape: tuple[int, int], outputs: int, epsilon: float) -> tuple[Lattice, Floats]:
    """Return a lattice with random costs, and rows on it that keep 0.9 ε."""
    rng = np.random.default_rng(seed)
    x_km, y_km = (np.arange(side) * SIDE_KM for side in shape)
    places = rng.random((outputs, 2)) * [max(x_km[-1], 1.0), max(y_km[-1], 1.0)]
    apart = np.hypot(x_km[:, None, None] - places[:, 0], y_km[None, :, None] - places[:, 1])
    rows = np.exp(-0.45 * epsilon * apart)  # normalising costs as much again
    rows /= rows.sum(axis=-1, keepdims=True)
    prior = rng.random(shape)
    prior /= prior.sum()
    return Lattice(x_km, y_km, prior[..., None] * apart, np.ones(shape, dtype=bool)), rows


def by_highs(lattice: Lattice, around: Floats, free: tuple[slice, slice], promise: LatticePromise) -> float:
    """Return the least cost of the window's rows, every pair of a step written down."""
    inside = {
        place: number
        for number, place in enumerate(
            itertools.product(range(free[0].start, free[0].stop), range(free[1].start, free[1].stop))
        )
    }
    outputs, count = around.shape[-1], len(inside)
    lower, upper = np.full((count, outputs), LEAST), np.ones((count, outputs))
    first, second, weight = [], [], []
    for place, number in inside.items():
        for a, b in (*directions(REACH), *((-a, -b) for a, b in directions(REACH))):
            other = place[0] + a, place[1] + b
            growth = promise.growth(abs(a) * SIDE_KM, abs(b) * SIDE_KM)
            if other in inside:
                # growth z_other - z_here >= 0
                first.append(inside[other]), second.append(number), weight.append(growth)
            elif all(0 <= at < side for at, side in zip(other, around.shape, strict=False)):
                np.maximum(lower[number], around[other] / growth, out=lower[number])
                np.minimum(upper[number], around[other] * growth, out=upper[number])
    one, two, grown = (np.repeat(np.array(values), outputs) for values in (first, second, weight))
    output = np.tile(np.arange(outputs), len(first))
    pairs = rows_of_two(
        (one * outputs + output, grown), (two * outputs + output, -np.ones(len(one))), count * outputs
    )
    sums = sparse.kron(sparse.eye_array(count), np.ones((1, outputs)))
    totals = around[free].sum(axis=-1).ravel()
    cost = lattice.cost.reshape(-1)
    scale = cost.max()
    found, *_ = solve_linear_program(
        "a window",
        cost=cost / scale,
        bounds=(lower.ravel(), upper.ravel()),
        matrix=sparse.csr_array(sparse.vstack([pairs, sums])),
        row_bounds=(
            np.concatenate([np.zeros(len(one)), totals]),
            np.concatenate([np.full(len(one), np.inf), totals]),
        ),
    )
    return float(cost @ found)


def part_of(lattice: Lattice, free: tuple[slice, slice]) -> Lattice:
    return Lattice(lattice.x_km[free[0]], lattice.y_km[free[1]], lattice.cost[free], lattice.kept[free])


@pytest.mark.parametrize(
    ("shape", "free"),
    [
        ((7, 7), (slice(2, 5), slice(2, 5))),
        ((9, 5), (slice(3, 9), slice(1, 4))),
        ((5, 8), (slice(0, 4), slice(3, 8))),
        ((6, 2), (slice(0, 4), slice(0, 2))),
        ((6, 5), (slice(4, 6), slice(1, 4))),
        ((6, 6), (slice(2, 3), slice(5, 6))),
        ((4, 5), (slice(0, 4), slice(0, 5))),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_as_good_as_highs(
    monkeypatch: pytest.MonkeyPatch, seed: int, shape: tuple[int, int], free: tuple[slice, slice]
) -> None:
    monkeypatch.setattr(window_program, "_GAP", 1e-6)
    lattice, rows = case(seed, shape, 5, 1.5)
    around = rows[..., :4]  # what the fifth has stays
    lattice = Lattice(lattice.x_km, lattice.y_km, lattice.cost[..., :4], lattice.kept)
    promise, part = LatticePromise(1.5, 2.0), part_of(lattice, free)
    problem = WindowProblem.of(part, around, free, (SIDE_KM, SIDE_KM), promise, REACH, LEAST)
    found = solve_window(problem, promise, REACH, 0.0)
    best = by_highs(part, around, free, promise)
    assert np.allclose(found.sum(axis=-1), around[free].sum(axis=-1), rtol=1e-12)
    assert (part.cost * found).sum() == pytest.approx(best, rel=1e-4)
    assert best < (part.cost * around[free]).sum()
    changed = around.copy()
    changed[free] = found
    for a, b in directions(REACH):
        allowed = 1.5 * SIDE_KM * np.hypot(a, b) * (1 + 1e-6)
        i, j = np.indices(shape)
        there = (i + a < shape[0]) & (j + b >= 0) & (j + b < shape[1])
        logs = np.log(changed)
        steps = logs[i[there] + a, j[there] + b] - logs[i[there], j[there]]
        assert steps.size == 0 or np.abs(steps).max() <= allowed


def test_a_window_that_is_the_whole_lattice_is_the_program_over_all_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_program, "_GAP", 1e-6)
    lattice, rows = case(2, (6, 5), 4, 1.0)
    promise, every = LatticePromise(1.0, 2.0), (slice(0, 6), slice(0, 5))
    problem = WindowProblem.of(lattice, rows, every, (SIDE_KM, SIDE_KM), promise, REACH, LEAST)
    found = solve_window(problem, promise, REACH, 0.0)
    best = solve_records(lattice, promise, REACH, LEAST, gap=1e-6)
    assert (lattice.cost * found).sum() == pytest.approx(best.primal, rel=1e-4)


def test_where_the_objective_settles_most_is_gained() -> None:
    lattice, rows = case(4, (9, 9), 6, 1.5)
    promise, free = LatticePromise(1.5, 2.0), (slice(2, 8), slice(1, 8))
    part = part_of(lattice, free)
    problem = WindowProblem.of(part, rows, free, (SIDE_KM, SIDE_KM), promise, REACH, LEAST)
    early = (part.cost * solve_window(problem, promise, REACH, 0.02)).sum()
    before, late = (
        (part.cost * rows[free]).sum(),
        (part.cost * solve_window(problem, promise, REACH, 0.0)).sum(),
    )
    assert late <= early * (1 + 1e-6)
    assert before - early >= 0.9 * (before - late)


def test_what_costs_nothing_stays_and_what_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lattice, rows = case(3, (5, 5), 3, 1.0)
    promise, free = LatticePromise(1.0, 2.0), (slice(1, 4), slice(1, 4))
    part = part_of(lattice, free)
    given: Any = (rows, free, (SIDE_KM, SIDE_KM), promise, REACH, LEAST)
    free_of_cost = Lattice(part.x_km, part.y_km, 0 * part.cost, part.kept)
    assert np.array_equal(
        solve_window(WindowProblem.of(free_of_cost, *given), promise, REACH, 0.0), rows[free]
    )
    monkeypatch.setattr(window_program, "_ITERATIONS", 0)
    with pytest.raises(SolverError, match="no step"):
        solve_window(WindowProblem.of(part, *given), promise, REACH, 0.0)
