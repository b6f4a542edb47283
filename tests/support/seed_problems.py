"""Random seed programs, and what their solutions must keep."""

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.seed.model import SeedProblem


def problem_of_axes(
    cost: NDArray[np.float64], shape: tuple[int, int], deltas: tuple[float, float], min_probability: float
) -> SeedProblem:
    """Return the LP with one budget β h_0 for each axis."""
    budget_x = np.full((2, shape[0] - 1, shape[1], 1), deltas[0])
    budget_y = np.full((2, shape[0], shape[1] - 1, 1), deltas[1])
    return SeedProblem(cost, shape, budget_x, budget_y, min_probability)


def random_problem(rng: np.random.Generator, **changes: Any) -> SeedProblem:
    """Return a small LP with budgets per axis, or per directed edge and output."""
    shape = changes.pop("seeds_shape", (int(rng.integers(1, 5)), int(rng.integers(2, 5))))
    outputs = int(rng.integers(2, 7))
    values: dict[str, Any] = {
        "cost": rng.exponential(size=(shape[0] * shape[1], outputs)),
        "deltas": tuple(rng.uniform(0.05, 3, size=2) * rng.uniform(0.2, 2)),
        "min_probability": float(10 ** rng.uniform(-8, -2)),
        **changes,
    }
    problem = problem_of_axes(shape=shape, **values)
    if changes or rng.integers(2):
        return problem
    return dataclasses.replace(
        problem,
        budget_x=rng.uniform(0.02, 4, size=(2, shape[0] - 1, shape[1], outputs)),
        budget_y=rng.uniform(0.02, 4, size=(2, shape[0], shape[1] - 1, outputs)),
    )


def edges(problem: SeedProblem) -> list[tuple[int, int, int, float]]:
    """Return (seed that may rise, over which, output, budget) one by one."""
    nx, ny = problem.seeds_shape
    outputs = problem.cost.shape[1]
    shape_x, shape_y = (2, nx - 1, ny, outputs), (2, nx, ny - 1, outputs)
    budget_x = np.broadcast_to(problem.budget_x, shape_x)
    budget_y = np.broadcast_to(problem.budget_y, shape_y)
    found = []
    for i in range(nx):
        for j in range(ny):
            for k in range(outputs):
                if i + 1 < nx:
                    here, there = i * ny + j, (i + 1) * ny + j
                    found.append((there, here, k, float(budget_x[0, i, j, k])))
                    found.append((here, there, k, float(budget_x[1, i, j, k])))
                if j + 1 < ny:
                    here, there = i * ny + j, i * ny + j + 1
                    found.append((there, here, k, float(budget_y[0, i, j, k])))
                    found.append((here, there, k, float(budget_y[1, i, j, k])))
    return found


def assert_feasible(problem: SeedProblem, rows: NDArray[np.float64]) -> None:
    """Check every constraint with nothing of the package but the numbers."""
    for risen, fallen, k, budget in edges(problem):
        assert math.log(rows[risen, k]) - math.log(rows[fallen, k]) <= budget
    assert rows.min() >= problem.min_probability
    assert np.abs(rows.sum(axis=1) - 1).max() <= 1e-14
