"""Two published extension recipes that break ε, re-stated from their description: known-bad mechanisms.

Both start from a seed that keeps ε with room to spare and refine it level by level, using the normalised rows
of one level as the anchors of the next. Neither takes the slopes of its anchors into account: their own is
0.5/km whatever ε is. Nothing here is what the package does; an auditor that passes one of these is broken.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from mdpext_dask.budget import half_budgets
from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.seed.model import SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem
from tests.reference import softmax

Array = NDArray[np.float64]
Sides = Literal["parent", "own"]

CELL_KM = 4.77
OUTPUTS = 20
FLOOR = 1e-6
REFINE = (2, 3, 4)
# The slope of both recipes, in 1/km.
SLOPE = 0.5
NODES = 2000
# Standard deviation of the nodes around the centre of the city, over the side of the rectangle.
SPREAD = 0.35
# What HiGHS allows for, absolute: the least it accepts, so that a floor of 1e-6 is kept to a part in 10,000
# and what breaks is the recipe and not the solver. Its default of 1e-7 is a tenth of the floor.
SOLVER_TOLERANCE = 1e-10
# What linprog answers where a program has no solution; anything else than this and 0 is a failure of ours.
SOLVED, INFEASIBLE = 0, 2


@dataclass(frozen=True)
class CoarseMechanism:
    """A solved seed on the corners of square source cells.

    Parameters
    ----------
    rows
        z, float64 of shape (cells east + 1, cells north + 1, K).
    outputs_km
        Where the outputs lie, float64 of shape (K, 2), from the lower left corner.
    """

    rows: Array
    outputs_km: Array


@dataclass(frozen=True)
class FineMechanism:
    """Rows on the fine lattice.

    Parameters
    ----------
    probability
        M(y|x), float64 of shape (len(x_km), len(y_km), K).
    x_km, y_km
        Coordinates from the lower left corner, float64.
    """

    probability: Array
    x_km: Array
    y_km: Array

    @classmethod
    def of(cls, rows: Array, factor: int) -> "FineMechanism":
        """Return rows of the source cells' subdivision into factor × factor with their coordinates."""
        return cls(rows, *(np.arange(n) * (CELL_KM / factor) for n in rows.shape[:2]))


def rome_like_seed(
    cells: tuple[int, int], split: tuple[float, float], factor: int = math.prod(REFINE), number: int = 0
) -> CoarseMechanism:
    """Solve a seed LP like the one published for Rome, on fewer cells.

    Euclidean loss; outputs are drawn from road nodes, which crowd towards the centre, and the prior of a
    record is how many of them are nearest to it, pushed down to the seeds by interpolation weights.

    Parameters
    ----------
    cells
        Source cells to the east and to the north.
    split
        (ε_1, ε_2), in 1/km; budgets are half of them.
    factor
        Refinement factor of the records that the prior is about.
    number
        Seed of the random nodes.
    """
    rng = np.random.default_rng(number)
    sides = CELL_KM * np.array(cells)
    nodes = rng.normal(sides / 2, SPREAD * sides, size=(4 * NODES, 2))
    nodes = nodes[((nodes >= 0) & (nodes <= sides)).all(axis=1)][:NODES]
    outputs = nodes[rng.choice(len(nodes), OUTPUTS, replace=False)]
    x, y = (np.arange(n * factor + 1) / factor for n in cells)
    prior = np.zeros((len(x), len(y)))
    np.add.at(prior, tuple(np.rint(nodes * (factor / CELL_KM)).astype(int).T), 1 / len(nodes))
    loss = np.hypot(CELL_KM * x[:, None, None] - outputs[:, 0], CELL_KM * y[None, :, None] - outputs[:, 1])
    hat_x, hat_y = (
        np.maximum(0, 1 - np.abs(places[:, None] - np.arange(n + 1)))
        for places, n in zip((x, y), cells, strict=True)
    )
    cost = np.einsum("xi,yj,xy,xyk->ijk", hat_x, hat_y, prior, loss)
    problem = SeedProblem.with_axis_budgets(
        cost.reshape(-1, OUTPUTS), cost.shape[:2], half_budgets(split).beta, CELL_KM, FLOOR
    )
    return CoarseMechanism(solve_seed_problem(problem).rows.reshape(cost.shape), outputs)


def by_envelopes(
    seed: CoarseMechanism, refine: tuple[int, ...] = REFINE, sides: Sides = "parent"
) -> tuple[FineMechanism, list[float]]:
    """Refine by the mean of both envelopes over the parent's corners, normalising at every level.

    log z = (upper + lower) / 2 with upper = min_c (log z_c + 0.5 d(x, c)) and
    lower = max_c (log z_c − 0.5 d(x, c)), d the Euclidean distance in km, whatever ε is.

    Parameters
    ----------
    seed
        Where to start from.
    refine
        Subdivisions of every level.
    sides
        What a new point on a side shared by two cells is made of. The description says the corners of the
        parent, but there are two: ``"parent"`` takes the four corners of the first of them, ``"own"`` the two
        corners of the side, on which both agree.

    Returns
    -------
    mechanism
        On the fine lattice.
    crossings
        By level, how far the lower envelope rises above the upper one, at most, in log units.
    """
    rows, side, crossings = seed.rows, CELL_KM, []
    for parts in refine:
        logs, crossing = np.log(rows), -math.inf
        fine = np.full((*((n - 1) * parts + 1 for n in rows.shape[:2]), rows.shape[2]), np.nan)
        away = _distances_to_corners(parts, side)
        if sides == "own":
            # Corners that do not belong to a point's side are out of reach for it.
            step = np.arange(parts + 1)[:, None]
            across, along = (step == parts, step == 0)
            off_x = np.hstack([across, across, along, along])[:, None]
            off_y = np.hstack([across, along, across, along])[None, :]
            away = np.where(off_x | off_y, math.inf, away)
        for i, j in np.ndindex(rows.shape[0] - 1, rows.shape[1] - 1):
            corners = logs[i : i + 2, j : j + 2].reshape(4, -1)
            reach = SLOPE * away[..., None]
            upper, lower = (corners + reach).min(axis=2), (corners - reach).max(axis=2)
            crossing = max(crossing, float((lower - upper).max()))
            cell = fine[i * parts : (i + 1) * parts + 1, j * parts : (j + 1) * parts + 1]
            np.copyto(cell, (upper + lower) / 2, where=np.isnan(cell))
        # Only what is new is made of envelopes: where they cross, they miss even the corners themselves.
        fine[::parts, ::parts] = logs
        rows, side = softmax(fine), side / parts
        crossings.append(crossing)
    return FineMechanism.of(rows, math.prod(refine)), crossings


def by_cell_programs(seed: CoarseMechanism, refine: tuple[int, ...] = REFINE) -> tuple[FineMechanism, float]:
    """Refine by arithmetic averages on sides and a small linear program inside every cell.

    The program knows the four corners of its cell and its own points, not the points on the sides; where it
    has no solution, arithmetic averages take its place.

    Parameters
    ----------
    seed
        Where to start from.
    refine
        Subdivisions of every level, each at least 2.

    Returns
    -------
    mechanism
        On the fine lattice.
    infeasible
        The share of cells, of all levels together, whose program has no solution.
    """
    rows, side, cells, infeasible = seed.rows, CELL_KM, 0, 0
    for parts in refine:
        fine = np.ascontiguousarray(interpolated(interpolated(rows, parts), parts, axis=1))
        for i, j in np.ndindex(rows.shape[0] - 1, rows.shape[1] - 1):
            corners = rows[i : i + 2, j : j + 2].reshape(4, -1)
            outputs = seed.outputs_km - side * np.array([i, j])
            inside = _solve_inside(corners, outputs, parts, side)
            cells += 1
            if inside is None:
                infeasible += 1
                continue
            fine[i * parts + 1 : (i + 1) * parts, j * parts + 1 : (j + 1) * parts] = inside
        rows, side = fine, side / parts
    return FineMechanism.of(rows, math.prod(refine)), infeasible / cells


def _distances_to_corners(parts: int, side: float) -> Array:
    """Return distances of a cell's points to its corners, (parts + 1, parts + 1, 4), x first."""
    t = np.arange(parts + 1) / parts
    corners = np.array(list(itertools.product((0, 1), repeat=2)))
    return np.asarray(side * np.hypot(t[:, None, None] - corners[:, 0], t[None, :, None] - corners[:, 1]))


def _solve_inside(corners: Array, outputs_km: Array, parts: int, side: float) -> Array | None:
    """Return the cheapest rows inside one cell, (parts − 1, parts − 1, K); None if there are none.

    min Σ d(i, k) z_ik  s.t.  Σ_k z_ik = 1,  z_ik ≥ δ,  z_ik ≤ exp(0.5 d(i, j)) z_jk

    between any two inner points and between inner points and corners, both ways.
    """
    inner = np.arange(1, parts) / parts * side
    points = np.array(list(itertools.product(inner, inner)))
    count, outputs = len(points), len(outputs_km)
    growth = np.exp(SLOPE * _distances_to_corners(parts, side)[1:-1, 1:-1].reshape(count, 4, 1))
    # Against corners, which are given, the constraints are bounds.
    lower = np.maximum((corners / growth).max(axis=1), FLOOR)
    upper = (corners * growth).min(axis=1)
    if (lower > upper).any():
        return None
    pairs = np.array(list(itertools.permutations(range(count), 2)), dtype=int).reshape(-1, 2)
    limits = np.exp(SLOPE * np.hypot(*(points[pairs[:, 0]] - points[pairs[:, 1]]).T))
    first, second = ((pairs[:, end, None] * outputs + np.arange(outputs)).ravel() for end in (0, 1))
    constraint = np.arange(len(first))
    relations = coo_array(
        (
            np.concatenate([np.ones(len(first)), -np.repeat(limits, outputs)]),
            (np.tile(constraint, 2), np.concatenate([first, second])),
        ),
        shape=(len(first), count * outputs),
    )
    totals = coo_array(np.kron(np.eye(count), np.ones(outputs)))
    answer = linprog(
        np.hypot(*(points[:, None] - outputs_km).transpose(2, 0, 1)).ravel(),
        A_ub=relations.tocsr(),
        b_ub=np.zeros(len(first)),
        A_eq=totals.tocsr(),
        b_eq=np.ones(count),
        bounds=np.stack([lower.ravel(), upper.ravel()], axis=1),
        method="highs",
        options={"primal_feasibility_tolerance": SOLVER_TOLERANCE},
    )
    if answer.status == INFEASIBLE:
        return None
    if answer.status != SOLVED:
        raise RuntimeError(f"the program of a cell was neither solved nor refuted: {answer.message}")
    return np.asarray(answer.x.reshape(parts - 1, parts - 1, outputs))
