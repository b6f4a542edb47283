"""What rounding may cost a mechanism whose formula keeps ε exactly, and the lesser ε that pays for it.

An exponential mechanism or a planar Laplace uses all of ε between some pairs of records, up to differences
smaller than rounding. A formula for ε' < ε leaves the difference to what float64 does to it.
"""

import numpy as np

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array, Problem
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, log_ratio_error

# Sums of up to K probabilities and their division, in units of 2^-53 for each term.
_SUM_ERROR_PER_OUTPUT = 2.0**-52
# -log of the smallest probability that is surely a normal number of float64, whatever a row is divided by.
LARGEST_LOG = 700.0


def least_spacing_km(problem: Problem) -> float:
    """Return a distance that no two records fall short of, for any p, in km."""
    steps = np.concatenate([np.diff(problem.grid.x_km()), np.diff(problem.grid.y_km())])
    return float(steps.min()) * (1 - NORM_RELATIVE_ERROR)


def epsilon_within(problem: Problem, epsilon_per_km: float, log_error: float) -> float:
    """Return the ε' for a formula whose rows are computed with errors, so that they keep ε all the same.

    Rows are divided by their totals when they are used. If every entry is within a factor e^{±r} of what it
    stands for, then so is a total, and a log ratio of two records is off by at most 4 r, and by what adding
    up some outputs takes. For a distance d ≥ h, ε' d + 4 r ≤ ε d if ε' ≤ ε − 4 r / h. What an audit in
    float64 may be off by is set aside as well, so that it need not decide ties in more digits.

    Parameters
    ----------
    problem
        The problem.
    epsilon_per_km
        ε to keep, in 1/km.
    log_error
        r: what the logarithm of an entry may be off by, but for a factor that a row has in common.

    Raises
    ------
    SolverError
        If that takes half of ε or more.
    """
    sums = 4 * problem.outputs * _SUM_ERROR_PER_OUTPUT
    audit = 2 * log_ratio_error(problem.outputs, LARGEST_LOG)
    kept = epsilon_per_km * (1 - 2 * NORM_RELATIVE_ERROR)
    kept -= (4 * log_error + sums + audit) / least_spacing_km(problem)
    if not kept > epsilon_per_km / 2:
        raise SolverError(
            f"epsilon of {epsilon_per_km:g}/km over a spacing of {problem.grid.spacing_km:g} km is lost in "
            "rounding; use larger cells or less refinement"
        )
    return float(kept)


def corners_xy_km(problem: Problem) -> Array:
    """Return the four corners of the rectangle of records, float64 of shape (4, 2), in km."""
    x, y = problem.grid.x_km(), problem.grid.y_km()
    return np.array([(a, b) for a in (x[0], x[-1]) for b in (y[0], y[-1])])
