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
    return Problem(
        grid=grid,
        epsilon_per_km=epsilon,
        metric_p=p,
        output_xy_km=np.asarray(outputs, dtype=np.float64),
        prior=prior / prior.sum(),
        loss=EuclideanLoss(np.asarray(outputs, dtype=np.float64)),
        min_probability=0.0,
    )


def rows_of(method: Method, problem: Problem) -> Floats:
    rows = method(problem, LONG).rows
    assert rows is not None
    return rows(slice(0, problem.grid.shape[0]))


def holds(rows: Floats, problem: Problem, epsilon: float | None = None) -> bool:
    records = problem.records_xy_km(slice(0, problem.grid.shape[0]))
    report = audit(
        rows.reshape(len(records), -1),
        "exhaustive",
        points=records,
        epsilon_per_km=problem.epsilon_per_km if epsilon is None else epsilon,
        metric_p=problem.metric_p,
    )
    return report.holds


def expected_loss(problem: Problem, rows: Floats) -> float:
    records = problem.records_xy_km(slice(0, problem.grid.shape[0]))
    costs = problem.loss.rows(records).reshape(rows.shape)
    return float((problem.prior[..., None] * rows * costs).sum())
