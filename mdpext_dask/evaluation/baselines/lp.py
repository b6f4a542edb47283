"""The optimal mechanism: the linear program over all records and all pairs; and LP-A, on the coarse grid.

N. E. Bordenabe, K. Chatzikokolakis, C. Palamidessi, "Optimal geo-indistinguishable mechanisms for location
privacy", CCS 2014.

A pair needs no rows of its own where a record z lies between its two, d(x, z) + d(z, x') = d(x, x'): their
budgets add up. On a lattice that leaves few directions (:func:`needed_directions`), of which the program
starts with the shortest and makes the others where they are broken.

LP-A is the usual way around the size of the linear program, called LP or LP+CA (coarse approximation) where
newer methods are compared with it: R. Liu, C. Qiu, arXiv 2509.08720, and arXiv 2601.09946. Every record
borrows the row of its nearest corner. It is ε-mDP between corners. Two records on both sides of the line
between two corners are one fine step h apart but use rows that may differ by ε h_0: the log ratio may be
F = h_0 / h times what ε allows.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.evaluation.baselines import pair_rows
from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem

# Directions that a program starts with: steps of at most this many records along an axis.
_FIRST_STEPS = 2


def full_lp(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make the optimal mechanism.

    Raises
    ------
    SolverError
        If there are too many records, or it is not solved in time.
    """
    grid, outputs = problem.grid, problem.outputs
    what = "the linear program over all records"
    pair_rows.check_size(what, grid.records, outputs, seconds)
    xy = problem.records_xy_km(slice(None))
    solution = solve_lattice(problem, xy, costs(problem), grid.shape, seconds, what)
    rows = solution.rows.reshape(*grid.shape, outputs)
    return BaselineMechanism(
        rows=lambda east: rows[east],
        guarantee=Guarantee.EPSILON,
        note="Kept between all pairs of records; the loss is within the gap of the least possible.",
        facts=solution.facts(),
    )


def coarse_lp(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make the optimal mechanism of the corners of the source cells, for all records.

    Prior and cost of every record count at its nearest corner; half way, at the one to the east or north.

    Raises
    ------
    SolverError
        If there are too many corners, or it is not solved in time.
    """
    grid, outputs = problem.grid, problem.outputs
    what = "the linear program on the coarse grid"
    pair_rows.check_size(what, grid.seeds, outputs, seconds)
    i, j = ((np.arange(length, dtype=np.intp) + grid.factor // 2) // grid.factor for length in grid.shape)
    cost: Array = np.zeros((*grid.seeds_shape, outputs))
    np.add.at(cost, (i[:, None], j), costs(problem).reshape(*grid.shape, outputs))
    solution = solve_lattice(
        problem, grid.seeds_xy_km(), cost.reshape(-1, outputs), grid.seeds_shape, seconds, what
    )
    corners = solution.rows.reshape(*grid.seeds_shape, outputs)
    return BaselineMechanism(
        rows=lambda east: corners[i[east]][:, j],
        # Where every record is a corner there is nothing to borrow.
        guarantee=Guarantee.NONE if grid.factor > 1 else Guarantee.EPSILON,
        note=(
            "Kept between the corners of source cells: neighbouring records that use the rows of two corners "
            f"may differ {grid.factor} times as much as ε allows."
        ),
        facts={"corners": grid.seeds} | solution.facts(),
    )


def costs(problem: Problem) -> Array:
    """Return π(x) c(x, y) of all records, float64 of shape (N, K), in km."""
    columns = (
        (prior[:, None], problem.records_xy_km(slice(i, i + 1))) for i, prior in enumerate(problem.prior)
    )
    return np.concatenate([prior * problem.loss.rows(records) for prior, records in columns])


def solve_lattice(
    problem: Problem, xy_km: Array, cost: Array, shape: tuple[int, int], seconds: float, what: str
) -> pair_rows.PairSolution:
    """Solve the program over places on a lattice.

    Parameters
    ----------
    problem
        Where ε, the metric and the floor come from.
    xy_km
        The places, north fastest, float64 of shape (n · m, 2), in km.
    cost
        Their costs, float64 of shape (n · m, K), in km.
    shape
        n places to the east and m to the north.
    seconds
        Time limit.
    what
        What to call it in errors.

    Raises
    ------
    SolverError
        If it is not solved in time.
    """
    budget = pair_rows.budgets(problem.epsilon_per_km, problem.distances_km(xy_km, xy_km))
    program = pair_rows.PairProgram(cost, budget, problem.min_probability)
    first = needed_directions(shape, problem.metric_p)
    first = first[np.abs(first).max(axis=1) <= _FIRST_STEPS]
    return pair_rows.solve_pairs(program, pairs_along(first, shape), seconds, what)


def needed_directions(shape: tuple[int, int], p: float) -> NDArray[np.intp]:
    """Return the directions (a, b) of the pairs that no shorter ones imply.

    For 1 < p < ∞ the unit ball is strictly convex, so a place lies between two others only on their segment:
    a and b without a common divisor are left. For p = 1 every monotone staircase is as short as it gets, so
    single steps along the axes are left; for p = ∞ every path of steps (1, s), |s| ≤ 1, is, so the eight
    neighbours are.

    Parameters
    ----------
    shape
        Places to the east and to the north.
    p
        Exponent of the metric, at least 1.

    Returns
    -------
    Integers of shape (n, 2), one of (a, b) and (−a, −b): a > 0, or a = 0 and b > 0.
    """
    longest = shape if 1 < p < math.inf else (min(shape[0], 2), min(shape[1], 2))
    found = [
        (a, b)
        for a in range(longest[0])
        for b in range(1 - longest[1], longest[1])
        if (a > 0 or b > 0) and math.gcd(a, b) == 1 and not (p == 1 and a and b)
    ]
    return np.array(found, dtype=np.intp).reshape(-1, 2)


def pairs_along(directions: NDArray[np.intp], shape: tuple[int, int]) -> tuple[Indices, Indices]:
    """Return all pairs of places that lie along some directions, each once: two arrays of flat indices."""
    index = np.arange(shape[0] * shape[1], dtype=np.intp).reshape(shape)
    first, second = [], []
    for a, b in directions:
        width, height = shape[0] - a, shape[1] - abs(b)
        low, high = max(-b, 0), max(b, 0)
        first.append(index[:width, low : low + height].ravel())
        second.append(index[a:, high : high + height].ravel())
    none = index[:0, 0]
    return np.concatenate([none, *first]), np.concatenate([none, *second])
