"""Programs of patches with HiGHS, one by one: where the structured method fails, and as its reference."""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.errors import SolverError
from mdpext_dask.pipeline.cells.programs import Patches, Solutions, usable
from mdpext_dask.seed.highs import solve_linear_program

# Coefficients below this share of 1 are left out.
_NEGLIGIBLE = 1e-11


def solve_with_highs(patches: Patches) -> Solutions:
    """Solve programs; those that HiGHS cannot solve have failed."""
    points, outputs, programs = patches.cost.shape
    u = np.ones_like(patches.cost)
    failed = np.zeros(programs, dtype=bool)
    for program in range(programs):
        try:
            u[..., program] = _solve_one(patches.part(np.array([program]))).reshape(points, outputs)
        except SolverError:
            failed[program] = True
    return usable(patches, u, failed)


def _solve_one(patches: Patches) -> NDArray[np.float64]:
    points, outputs, _ = patches.cost.shape
    reference = patches.reference[..., 0]
    cost = (patches.cost[..., 0] - patches.cost[..., 0].min(axis=1, keepdims=True)) * reference
    scale = float(cost.sum()) or 1.0
    # u_j − w u_i ≥ 0 for every pair and output; then the sums of the points' rows.
    pairs = np.array(patches.pairs, dtype=np.intp).reshape(-1, 2)
    count = len(pairs) * outputs
    output = np.tile(np.arange(outputs), len(pairs))
    first = np.repeat(pairs[:, 0], outputs) * outputs + output
    second = np.repeat(pairs[:, 1], outputs) * outputs + output
    values = np.concatenate([-patches.weight[..., 0].ravel(), np.ones(count)])
    where = np.tile(np.arange(count), 2), np.concatenate([first, second])
    budgets = sparse.csr_array((values, where), shape=(count, points * outputs))
    sums = sparse.csr_array(
        (reference.ravel(), (np.repeat(np.arange(points), outputs), np.arange(points * outputs))),
        shape=(points, points * outputs),
    )
    # HiGHS refuses coefficients that it would drop; rows are normalised afterwards, and nobody misses them.
    sums.data[sums.data < _NEGLIGIBLE] = 0
    sums.eliminate_zeros()
    budgets.data[np.abs(budgets.data) < _NEGLIGIBLE] = 0
    budgets.eliminate_zeros()
    u, _, _ = solve_linear_program(
        f"the program of a patch of {points} records, {outputs} outputs",
        cost=cost.ravel() / scale,
        bounds=(patches.lower[..., 0].ravel(), patches.upper[..., 0].ravel()),
        matrix=sparse.csr_array(sparse.vstack([budgets, sums])),
        row_bounds=(
            np.concatenate([np.zeros(count), np.ones(points)]),
            np.concatenate([np.full(count, np.inf), np.ones(points)]),
        ),
    )
    return u
