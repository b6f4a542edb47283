"""A problem like the one published for Rome, on fewer cells, and two published recipes on it.

What the recipes make breaks ε: an auditor that passes it is broken.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.evaluation.baselines import published
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.baselines.published import Sides, seed_cost
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss

Array = NDArray[np.float64]

CELL_KM = 4.77
OUTPUTS = 20
FLOOR = 1e-6
REFINE = (2, 3, 4)
NODES = 2000
# Standard deviation of the nodes around the centre of the city, over the side of the rectangle.
SPREAD = 0.35


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

    def grid(self, refine: tuple[int, ...]) -> Grid:
        """Return the grid whose source cells have these corners."""
        return Grid(0.0, 0.0, self.rows.shape[0] - 1, self.rows.shape[1] - 1, CELL_KM, refine)


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
    def of(cls, rows: Array, grid: Grid) -> "FineMechanism":
        """Return rows of all records of a grid with their coordinates."""
        return cls(rows, *(np.arange(n) * (CELL_KM / grid.factor) for n in rows.shape[:2]))


def rome_like_problem(
    cells: tuple[int, int], epsilon: float, refine: tuple[int, ...] = REFINE, number: int = 0
) -> Problem:
    """Return a problem like the one published for Rome, on fewer cells.

    Euclidean loss; outputs are drawn from road nodes, which crowd towards the centre, and the prior of a
    record is how many of them are nearest to it.

    Parameters
    ----------
    cells
        Source cells to the east and to the north.
    epsilon
        ε, in 1/km.
    refine
        Subdivisions of every level.
    number
        Seed of the random nodes.
    """
    rng = np.random.default_rng(number)
    grid = Grid(0.0, 0.0, *cells, CELL_KM, refine)
    sides = CELL_KM * np.array(cells)
    nodes = rng.normal(sides / 2, SPREAD * sides, size=(4 * NODES, 2))
    nodes = nodes[((nodes >= 0) & (nodes <= sides)).all(axis=1)][:NODES]
    outputs = nodes[rng.choice(len(nodes), OUTPUTS, replace=False)]
    prior = np.zeros(grid.shape)
    np.add.at(prior, tuple(np.rint(nodes / grid.spacing_km).astype(int).T), 1 / len(nodes))
    return Problem(grid, epsilon, 2.0, outputs, prior, EuclideanLoss(outputs), FLOOR)


def rome_like_seed(cells: tuple[int, int], split: tuple[float, float]) -> CoarseMechanism:
    """Solve the seed LP of a problem like the one published for Rome, under half of a split of ε."""
    problem = rome_like_problem(cells, math.hypot(*split))
    seed = published.solve_half_seed(problem, seed_cost(problem), split)
    return CoarseMechanism(seed.rows.reshape(*problem.grid.seeds_shape, -1), problem.output_xy_km)


def by_envelopes(
    seed: CoarseMechanism, refine: tuple[int, ...] = REFINE, sides: Sides = "parent"
) -> tuple[FineMechanism, list[float]]:
    """Refine a seed by :func:`~mdpext_dask.evaluation.baselines.published.by_envelopes`, with crossings."""
    grid = seed.grid(refine)
    rows, crossings = published.by_envelopes(seed.rows, grid, sides)
    return FineMechanism.of(rows, grid), crossings


def by_cell_programs(seed: CoarseMechanism, refine: tuple[int, ...] = REFINE) -> tuple[FineMechanism, float]:
    """Refine a seed by ``published.by_cell_programs``.

    The loss is Euclidean.

    Returns the share of cells, of all levels together, whose program has no solution, as well.
    """
    grid, loss = seed.grid(refine), EuclideanLoss(seed.outputs_km).rows
    rows, counts = published.by_cell_programs(seed.rows, grid, loss, FLOOR)
    failed, cells = (sum(column) for column in zip(*counts, strict=True))
    return FineMechanism.of(rows, grid), failed / cells
