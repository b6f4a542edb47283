"""What any baseline must keep, checked row by row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

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
    return Problem(grid, epsilon, p, outputs, prior / prior.sum(), EuclideanLoss(outputs), 0.0)


def rows_of(method: Method, problem: Problem) -> Floats:
    """Return all rows that a method makes, float64 of the grid's shape and K."""
    rows = method(problem, LONG).rows
    assert rows is not None
    return rows(slice(None))


def holds(rows: Floats, problem: Problem, epsilon: float | None = None) -> bool:
    """Whether an exhaustive audit passes rows, float64 of any shape that ends in K."""
    promise = {"epsilon_per_km": epsilon or problem.epsilon_per_km, "metric_p": problem.metric_p}
    points, rows = problem.records_xy_km(slice(None)), rows.reshape(-1, problem.outputs)
    return audit(rows, "exhaustive", points=points, **promise).holds


def expected_loss(problem: Problem, rows: Floats) -> float:
    """Return Σ_x π(x) Σ_y M(y|x) c(x, y) in km."""
    costs = problem.loss.rows(problem.records_xy_km(slice(None))).reshape(rows.shape)
    return float((problem.prior[..., None] * rows * costs).sum())


def least_loss(cost: Floats, budget: Floats, floor: float = 0.0) -> float | None:
    """Return the least Σ C_ik z_ik of rows with z_ik ≤ exp(b_ij) z_jk, by another solver.

    Parameters
    ----------
    cost
        C, float64 of shape (N, K), not all zero.
    budget
        b, float64 of shape (N, N); infinite where nothing is promised.
    floor
        Least probability.

    Returns
    -------
    None where the solver fails.
    """
    records, outputs = cost.shape
    risen, fallen = np.nonzero(np.isfinite(budget) & ~np.eye(records, dtype=bool))
    at = np.tile(np.arange(len(risen)), 2), np.concatenate([risen, fallen])
    values = np.concatenate([np.ones(len(risen)), -np.exp(budget[risen, fallen])])
    pairs = sparse.csr_array((values, at), shape=(len(risen), records))
    scale = cost.max()
    kept: Any = sparse.kron(pairs, sparse.eye_array(outputs)), np.zeros(len(risen) * outputs)
    sums = sparse.kron(sparse.eye_array(records), np.ones((1, outputs))), np.ones(records)
    kept = kept if len(risen) else (None, None)
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solved = linprog(cost.ravel() / scale, *kept, *sums, (floor, 1), options=options)
    return float(solved.fun * scale) if solved.status == 0 else None
