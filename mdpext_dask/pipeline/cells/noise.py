"""Planar Laplace noise as a place to begin from, on all records.

Noise follows the direction from each output all by itself, and where source cells are so large that a seed LP
knows little of what is inside, reporting the output nearest to a noisy place can lose less than whatever is
interpolated from seeds. So cell programs on the last level may begin from it as well. It keeps ε, but what is
asked for here is the certificate, which is a little more on a lattice: so ε is lowered until that holds. As
everything that cell programs make, it is proved by the certificate of the finished store and by nothing else.
"""

import math
from dataclasses import replace

import numpy as np

from mdpext_dask.auditors.certificate import norm_rank
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.noise import planar_laplace
from mdpext_dask.evaluation.baselines.problem import Array, Problem, RowsOf, strips
from mdpext_dask.seed.budget import dual_exponent

# Beyond so many numbers it would take longer than the programs do.
MOST_NUMBERS = 10_000_000
_SECONDS = 600.0
# How often ε is lowered at most, and how close below the target it has to come out.
_LOWERINGS, _CLOSE = 6, 1e-6


def noise_within(problem: Problem, target: float, floor: float) -> RowsOf | None:
    """Return rows of planar Laplace noise whose certificate is within a target.

    Parameters
    ----------
    problem
        The problem.
    target
        ε that the certificate may reach, in 1/km.
    floor
        δ, which all rows are raised to by the same mixture with the uniform one: that lowers every slope.

    Returns
    -------
    Strips of rows, float64; None if it would take too long, or cannot be had.
    """
    if problem.grid.records * problem.outputs > MOST_NUMBERS:
        return None
    epsilon = target
    share = problem.outputs * floor
    try:
        for _ in range(_LOWERINGS):
            made = planar_laplace(replace(problem, epsilon_per_km=epsilon), _SECONDS).rows
            assert made is not None  # this mechanism has rows
            kept = np.concatenate([made(east) for east in strips(problem)])
            kept = (1 - share) * kept + floor
            reached = steepest(kept, problem.grid.spacing_km, dual_exponent(problem.metric_p))
            if reached <= target:
                return lambda east: kept[east]
            epsilon *= target / reached * (1 - _CLOSE)
    except SolverError:
        return None
    return None


def steepest(rows: Array, spacing_km: float, q: float) -> float:
    """Return the largest certificate vector of rows on a lattice, without allowances for rounding, in 1/km.

    Parameters
    ----------
    rows
        M, positive, float64 of shape (n_x, n_y, K).
    spacing_km
        Spacing h of the lattice, in km.
    q
        Exponent of the norm, dual to the metric's.
    """
    return max(_steepest_between(np.log(rows[i : i + 2]), spacing_km, q) for i in range(len(rows) - 1))


def _steepest_between(logs: Array, spacing_km: float, q: float) -> float:
    across = np.abs(logs[1] - logs[0])
    along = np.abs(np.diff(logs, axis=1))
    # Of a fine cell: its steeper side each way is at one of its corners with the other's.
    largest = np.maximum(across[1:], across[:-1]), np.maximum(along[0], along[1])
    rank = float(norm_rank(*largest, q).max())
    return (math.sqrt(rank) if q == 2 else rank) / spacing_km
