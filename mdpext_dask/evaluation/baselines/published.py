"""Two published extension recipes that break ε, re-stated from their description; no guarantee.

Both start from a seed that keeps ε with room to spare (budgets of half of it, the best of the published
splits) and refine it level by level, using the normalised rows of one level as the anchors of the next.
Neither takes the slopes of its anchors into account: their own is 0.5/km whatever ε is. Distances are
Euclidean. What the package does instead is in :mod:`mdpext_dask.extend` and
:mod:`mdpext_dask.pipeline.cells`.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy import sparse
from scipy.special import softmax

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Guarantee, Problem
from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import assemble_seed_cost, corner_costs
from mdpext_dask.seed.budget import axis_budgets, candidate_splits, half_budgets
from mdpext_dask.seed.highs import InfeasibleError, rows_of_two, solve_linear_program
from mdpext_dask.seed.model import SeedMechanism, SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem

# The slope of both recipes, in 1/km.
SLOPE = 0.5
# What a new point on a side that two cells share is made of; see :func:`by_envelopes`.
Sides = Literal["parent", "own"]
_CORNERS = tuple(itertools.product((0, 1), repeat=2))
# Numbers of rows in memory, and of the rows of a cell's program, that are hopeless.
_MOST_NUMBERS, _MOST_COEFFICIENTS = 2**29, 2**24


def published_mcshane_whitney(problem: Problem, seconds: float) -> BaselineMechanism:
    """Refine the seed by the mean of both envelopes over the parent's corners; see :func:`by_envelopes`.

    The description leaves open what a point on a side between two cells is made of. This is the reading in
    its favour: the corners of the side itself, on which both cells agree. On the published grid of Rome, at
    ε = 1/km, it costs less than the other and breaks ε less (1.35 times, not 1.81).

    Raises
    ------
    SolverError
        If the time is up or the problem is too large.
    """
    clock = Clock(seconds)
    corners, facts = _best_seed(problem, clock)
    rows, crossings = by_envelopes(corners, problem.grid, "own", clock)
    return BaselineMechanism(
        rows=lambda east: rows[east],
        guarantee=Guarantee.NONE,
        note="Envelopes of a fixed slope over rows that were normalised at every level: they cross where the "
        "rows are steeper, and normalising makes them steeper than ε.",
        facts={**facts, "crossing_by_level": crossings},
    )


def published_cell_programs(problem: Problem, seconds: float) -> BaselineMechanism:
    """Refine the seed by averages on sides and a linear program in every cell; see :func:`by_cell_programs`.

    Raises
    ------
    SolverError
        If the time is up or the problem is too large.
    """
    clock = Clock(seconds)
    corners, facts = _best_seed(problem, clock)
    rows, counts = by_cell_programs(
        corners, problem.grid, problem.loss.rows, problem.min_probability, clock=clock
    )
    return BaselineMechanism(
        rows=lambda east: rows[east],
        guarantee=Guarantee.NONE,
        note="Cell programs know their corners and not their sides, which are arithmetic averages; where one "
        "has no solution its inner points are averages, too: both are steeper than ε.",
        facts={
            **facts,
            "infeasible_share": sum(failed for failed, _ in counts) / sum(cells for _, cells in counts),
            "infeasible_share_by_level": [failed / cells for failed, cells in counts],
        },
    )


class Clock:
    """How much time is left.

    Parameters
    ----------
    seconds
        How much there is.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._seconds, self._end = seconds, time.perf_counter() + seconds

    def left(self, doing: str) -> float:
        """Return how many seconds are left.

        Raises
        ------
        SolverError
            If there are none.
        """
        left = self._end - time.perf_counter()
        if left <= 0:
            raise SolverError(f"out of time after {self._seconds:g} s, {doing}")
        return left


def _best_seed(problem: Problem, clock: Clock) -> tuple[Array, dict[str, Any]]:
    """Return the seed on the corners under the published split of ε that costs least, and what it is."""
    grid, outputs = problem.grid, problem.outputs
    if grid.records * outputs > _MOST_NUMBERS:
        raise SolverError(f"{grid.records:,} records x {outputs} outputs are too many to hold in memory")
    cost, seeds = seed_cost(problem), []
    for split in candidate_splits(problem.epsilon_per_km, problem.metric_p):
        clock.left("solving the seed")
        seeds.append((split, solve_half_seed(problem, cost, split)))
    split, seed = min(seeds, key=lambda found: found[1].primal)
    facts = {"slope_per_km": SLOPE, "split_per_km": list(split), "seed_primal_km": seed.primal}
    return seed.rows.reshape(*grid.seeds_shape, -1), facts


def seed_cost(problem: Problem) -> Array:
    """Return C = Wᵀ diag(π) L of a problem, float64 of shape (J, K), in km, as a store's seed has it."""
    grid = problem.grid
    cells = slice(0, grid.cells_x), slice(0, grid.cells_y)
    return assemble_seed_cost(grid, corner_costs(grid, problem.loss, problem.prior, cells))


def solve_half_seed(problem: Problem, cost: Array, split: tuple[float, float]) -> SeedMechanism:
    """Solve the seed LP under the published budgets, half of a split.

    Parameters
    ----------
    problem
        The problem.
    cost
        Its :func:`seed_cost`.
    split
        (ε_1, ε_2), in 1/km.
    """
    grid = problem.grid
    budgets = axis_budgets(grid, half_budgets(split).beta)
    return solve_seed_problem(SeedProblem(cost, grid.seeds_shape, *budgets, problem.min_probability))


# --- envelopes ------------------------------------------------------------------------------------


def by_envelopes(
    rows: Array, grid: Grid, sides: Sides, clock: Clock | None = None
) -> tuple[Array, list[float]]:
    """Refine by the mean of both envelopes over the parent's corners, normalising at every level.

    log z = (upper + lower) / 2 with upper = min_c (log z_c + 0.5 d(x, c)) and
    lower = max_c (log z_c - 0.5 d(x, c)), d the distance in km, whatever ε is.

    Parameters
    ----------
    rows
        z on the corners of the source cells, float64 of shape (cells_x + 1, cells_y + 1, K).
    grid
        The grid.
    sides
        What a new point on a side shared by two cells is made of. The description says the corners of the
        parent, but there are two: ``"parent"`` takes the four corners of the first of them, ``"own"`` the two
        corners of the side, on which both agree.
    clock
        When to give up.

    Returns
    -------
    rows
        On the fine lattice, float64 of shape (n_x, n_y, K).
    crossings
        By level, how far the lower envelope rises above the upper one, at most, in log units.

    Raises
    ------
    SolverError
        If the time is up.
    """
    side, crossings, clock = grid.cell_km, [], clock or Clock()
    for parts in grid.refine:
        logs, crossing = np.log(rows), -math.inf
        corners = logs[:-1, :-1], logs[:-1, 1:], logs[1:, :-1], logs[1:, 1:]
        fine = np.empty((*((n - 1) * parts + 1 for n in rows.shape[:2]), rows.shape[2]))
        across, along = ((n - 1) * parts for n in rows.shape[:2])
        # In this order, what the first of two cells makes of their common side is what stays.
        for a, b in itertools.product(range(parts + 1), repeat=2):
            clock.left("extending")
            reach = SLOPE * _distances_to_corners(a, b, parts, side)
            if sides == "own":
                # Corners that do not belong to a point's side are out of reach for it.
                off = [abs(a - i * parts) == parts or abs(b - j * parts) == parts for i, j in _CORNERS]
                reach = np.where(off, math.inf, reach)
            upper = np.min([c + r for c, r in zip(corners, reach, strict=True)], axis=0)
            lower = np.max([c - r for c, r in zip(corners, reach, strict=True)], axis=0)
            crossing = max(crossing, float((lower - upper).max()))
            fine[a : a + across : parts, b : b + along : parts] = (upper + lower) / 2
        # Only what is new is made of envelopes: where they cross, they miss even the corners themselves.
        fine[::parts, ::parts] = logs
        rows, side = softmax(fine, axis=-1), side / parts
        crossings.append(crossing)
    return rows, crossings


def _distances_to_corners(a: int, b: int, parts: int, side: float) -> Array:
    """Return the distances, in km, of a cell's point (a, b) to its four corners, x first."""
    return np.array([side * math.dist((a / parts, b / parts), corner) for corner in _CORNERS])


# --- cell programs --------------------------------------------------------------------------------


def by_cell_programs(
    rows: Array, grid: Grid, loss: Callable[[Array], Array], floor: float, clock: Clock | None = None
) -> tuple[Array, list[tuple[int, int]]]:
    """Refine by arithmetic averages on sides and a small linear program inside every cell.

    The program knows the four corners of its cell and its own points, not the points on the sides; where it
    has no solution, arithmetic averages take its place.

    Parameters
    ----------
    rows, grid, clock
        See :func:`by_envelopes`.
    loss
        From places, float64 of shape (n, 2) in km, to c(x, y_k), float64 of shape (n, K), in km.
    floor
        Least probability δ.

    Returns
    -------
    rows
        On the fine lattice, float64 of shape (n_x, n_y, K).
    counts
        By level, how many cells have a program without a solution, and how many cells there are.

    Raises
    ------
    SolverError
        If the time is up, or the programs are too large.
    """
    counts: list[tuple[int, int]] = []
    side, clock = grid.cell_km, clock or Clock()
    for parts in grid.refine:
        fine = np.ascontiguousarray(interpolated(interpolated(rows, parts), parts, axis=1))
        cells = rows.shape[0] - 1, rows.shape[1] - 1
        failed = 0
        if parts > 1:
            program = _CellProgram(parts, side, rows.shape[2], floor)
            for i, j in np.ndindex(cells):
                corner = np.array([grid.west_km + i * side, grid.south_km + j * side])
                left = clock.left(f"level {len(counts) + 1}, cell {i * cells[1] + j} of {math.prod(cells)}")
                inside = program.solve(rows[i : i + 2, j : j + 2], loss(corner + program.points_km), left)
                if inside is None:
                    failed += 1
                    continue
                fine[i * parts + 1 : (i + 1) * parts, j * parts + 1 : (j + 1) * parts] = inside
        rows, side = fine, side / parts
        counts.append((failed, math.prod(cells)))
    return rows, counts


class _CellProgram:
    """The program of the cells of a level.

        min Σ c(i, k) z_ik   s.t.  Σ_k z_ik = 1,  z_ik ≥ δ,  z_ik ≤ exp(0.5 d(i, j)) z_jk

    between any two inner points and between inner points and corners, both ways.

    Parameters
    ----------
    parts
        Subdivisions of the cells.
    side
        Their side, in km.
    outputs
        Number K of outputs.
    floor
        Least probability δ.

    Raises
    ------
    SolverError
        If it is too large.
    """

    def __init__(self, parts: int, side: float, outputs: int, floor: float) -> None:
        steps = list(itertools.product(range(1, parts), repeat=2))
        self.points_km: Array = np.array(steps) * (side / parts)
        self._shape, self._floor = (parts - 1, parts - 1, outputs), floor
        # Against corners, which are given, the constraints are bounds.
        apart = np.array([_distances_to_corners(a, b, parts, side) for a, b in steps])
        self._growth = np.exp(SLOPE * apart)[..., None]
        count = len(steps)
        relations = count * (count - 1) * outputs
        if 2 * relations > _MOST_COEFFICIENTS:
            raise SolverError(
                f"a cell's program with {count} inner points and {outputs} outputs has {relations:,} rows"
            )
        pairs = np.array(list(itertools.permutations(range(count), 2)), dtype=int).reshape(-1, 2)
        limits = np.exp(SLOPE * np.hypot(*(self.points_km[pairs[:, 0]] - self.points_km[pairs[:, 1]]).T))
        first, second = ((pairs[:, end, None] * outputs + np.arange(outputs)).ravel() for end in (0, 1))
        growth = np.repeat(limits, outputs)
        below = rows_of_two((first, np.ones(relations)), (second, -growth), count * outputs)
        totals = sparse.kron(sparse.eye_array(count), np.ones((1, outputs)))
        self._matrix = sparse.csr_array(sparse.vstack([below, totals]))
        self._row_bounds = (
            np.concatenate([np.full(relations, -np.inf), np.ones(count)]),
            np.concatenate([np.zeros(relations), np.ones(count)]),
        )

    def solve(self, corners: Array, cost: Array, seconds: float) -> Array | None:
        """Return the cheapest rows inside a cell, (parts − 1, parts − 1, K); None if there are none."""
        anchors = corners.reshape(1, 4, -1)
        lower = np.maximum((anchors / self._growth).max(axis=1), self._floor)
        upper = (anchors * self._growth).min(axis=1)
        if (lower > upper).any():
            return None
        try:
            rows, _, _ = solve_linear_program(
                "the program of a cell",
                cost=cost.ravel(),
                bounds=(lower.ravel(), upper.ravel()),
                matrix=self._matrix,
                row_bounds=self._row_bounds,
                simplex=True,
                seconds=seconds,
            )
        except InfeasibleError:
            return None
        return rows.reshape(self._shape)
