"""What any baseline must keep, checked row by row."""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask import audit
from mdpext_dask.evaluation.baselines.problem import Method, Problem
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss

Floats = NDArray[np.float64]
LONG = 1000.0


def problem_of(
    outputs: Floats, epsilon: float = 1.0, p: float = 2.0, grid: Grid | None = None, seed: int = 0
) -> Problem:
    grid = grid or Grid(0.0, 0.0, 2, 2, 1.0, (2,))
    prior = np.random.default_rng(seed).random(grid.shape)
    outputs = np.asarray(outputs, dtype=np.float64)
    return Problem(
        grid, epsilon, p, outputs, prior / prior.sum(), EuclideanLoss(outputs), min_probability=0.0
    )


def rows_of(method: Method, problem: Problem) -> Floats:
    """Return all rows that a method makes, float64 of the grid's shape and K."""
    rows = method(problem, LONG).rows
    assert rows is not None
    return rows(slice(None))


def holds(rows: Floats, problem: Problem, epsilon: float | None = None) -> bool:
    """Whether an exhaustive audit passes rows, float64 of any shape that ends in K."""
    report = audit(
        rows.reshape(-1, problem.outputs),
        "exhaustive",
        points=problem.records_xy_km(slice(None)),
        epsilon_per_km=problem.epsilon_per_km if epsilon is None else epsilon,
        metric_p=problem.metric_p,
    )
    return report.holds


def expected_loss(problem: Problem, rows: Floats) -> float:
    """Return Σ_x π(x) Σ_y M(y|x) c(x, y) in km."""
    costs = problem.loss.rows(problem.records_xy_km(slice(None))).reshape(rows.shape)
    return float((problem.prior[..., None] * rows * costs).sum())
