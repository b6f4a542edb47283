"""The exponential mechanism: M(y|x) ∝ exp(−ε d_p(x, y) / 2).

McSherry & Talwar, "Mechanism design via differential privacy" (FOCS 2007); with a metric, Chatzikokolakis,
Andrés, Bordenabe & Palamidessi, "Broadening the scope of differential privacy using metrics" (PETS 2013).
"""

import numpy as np

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Guarantee, Problem
from mdpext_dask.evaluation.baselines.rounding import LARGEST_LOG, corners_xy_km, epsilon_within
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR

# Of a product and an exponential, relative to the result; more than any library's.
_EXPONENTIAL_ERROR = 1e-14


def exponential_mechanism(problem: Problem, seconds: float) -> BaselineMechanism:  # noqa: ARG001 takes none
    """Return the exponential mechanism for d_p on the problem's outputs.

    With w_y(x) = exp(−ε d_p(x, y) / 2), the triangle inequality gives w_y(x) ≤ e^{ε d_p(x, x') / 2} w_y(x'),
    for every output, hence also for their sum Z, the other way round:
    M(y|x) / M(y|x') = w_y(x) / w_y(x') · Z(x') / Z(x) ≤ e^{ε d_p(x, x')}. The bound is all but reached where
    an output lies on one side of two records and all likelier ones on the other; so rounding is paid for,
    see :func:`mdpext_dask.evaluation.baselines.rounding.epsilon_within`.

    Parameters
    ----------
    problem
        The problem.
    seconds
        Not needed: there is nothing to solve.

    Raises
    ------
    SolverError
        If float64 cannot hold the least probabilities, or rounding takes too much of ε.
    """
    epsilon = problem.epsilon_per_km
    # d_p(x, y) is convex in x, so it is largest at a corner.
    furthest = float(problem.distances_km(corners_xy_km(problem), problem.output_xy_km).max())
    # No row has a nearest output closer than 0, nor a total of more than K times its largest entry.
    if epsilon / 2 * furthest + np.log(problem.outputs) > LARGEST_LOG:
        raise SolverError(
            f"exponential mechanism: probabilities down to exp(-{epsilon / 2 * furthest:.0f}) are below what "
            "float64 holds; epsilon times the extent of the domain must be at most about 1,400"
        )
    log_error = epsilon / 2 * furthest * (NORM_RELATIVE_ERROR + _EXPONENTIAL_ERROR) + _EXPONENTIAL_ERROR
    used = epsilon_within(problem, epsilon, log_error)

    def rows(east: slice) -> Array:
        distance = problem.distances_km(problem.records_xy_km(east), problem.output_xy_km)
        # A factor that a row has in common is divided out again; this one makes its largest entry 1.
        distance -= distance.min(axis=1, keepdims=True)
        weights = np.exp(distance * (-used / 2))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights.reshape(-1, problem.grid.shape[1], problem.outputs)

    return BaselineMechanism(
        rows=rows,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs, by the triangle inequality: half of it for scores, half for totals.",
        facts={"epsilon_used_per_km": used},
    )
