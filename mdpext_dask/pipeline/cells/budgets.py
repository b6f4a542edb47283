"""What neighbours on a lattice may differ by, given a mechanism that is within ε.

Between points of a lattice that is not yet the finest, records are interpolated log-convexly, and normalising
adds to their slopes. Where that is largest it is a divergence: towards a neighbour with row w, the slope of
the log-normaliser at a point with row z is −KL(z‖w) = Σ_y z_y (log w_y − log z_y), the same for all outputs.
It is charged to the budgets as it was last; what it has become is seen by the certificate.

At a corner of a cell of the lattice, differences along its two sides make a certificate vector. Budgets are
its components, with what is left of ε shared out in its own direction: so the reference keeps them, an edge
takes the least of its corners, and whatever keeps them has vectors within ε.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import norm_rank
from mdpext_dask.extend.normalise import exponential

Floats = NDArray[np.float64]
# What is left is never shared out more unevenly than this.
_LEAST_COMPONENT = 0.25
# Log probabilities that differ at all differ by more: squares of less than this are no normal numbers.
_NOTHING = math.sqrt(np.finfo(float).tiny)


def normaliser_drift(scores: Floats) -> tuple[Floats, Floats]:
    """Return how much normalising may add to differences along the edges of a lattice.

    Parameters
    ----------
    scores
        Log probabilities, float64 of shape (n + 1, m + 1, K).

    Returns
    -------
    drift_x, drift_y
        float64 of shape (n, m + 1) and (n + 1, m).
    """
    rows = exponential(scores)
    drifts = []
    for axis in (0, 1):
        step = np.diff(scores, axis=axis)
        before, after = (rows[:-1], rows[1:]) if axis == 0 else (rows[:, :-1], rows[:, 1:])
        drifts.append(
            np.maximum(-np.add.reduce(before * step, axis=-1), np.add.reduce(after * step, axis=-1))
        )
    return drifts[0], drifts[1]


def edge_budgets(
    scores: Floats, allowed: float, drift: tuple[Floats, Floats], dual_exponent: float, margin: float
) -> tuple[Floats, Floats]:
    """Return what log probabilities of neighbours on a lattice may differ by.

    Parameters
    ----------
    scores
        Log probabilities of the reference, float64 of shape (n + 1, m + 1, K).
    allowed
        ε times the spacing of the lattice.
    drift
        :func:`normaliser_drift`, or zeros on the finest lattice.
    dual_exponent
        q.
    margin
        By what share of `allowed` the reference keeps its budgets, so that programs have an interior.

    Returns
    -------
    budget_x, budget_y
        float64 of shape (n, m + 1, K) and (n + 1, m, K); the reference keeps them by a margin.
    """
    east, north = np.abs(np.diff(scores, axis=0)), np.abs(np.diff(scores, axis=1))
    drift_x, drift_y = drift[0][..., None], drift[1][..., None]
    steep_x, steep_y = east + drift_x, north + drift_y
    budget_x, budget_y = np.full_like(east, np.inf), np.full_like(north, np.inf)
    for side in (slice(None, -1), slice(1, None)):  # the lower and the upper side of a cell
        for flank in (slice(None, -1), slice(1, None)):  # its left and its right one
            x, y = _shared_out(steep_x[:, side], steep_y[flank], allowed, dual_exponent)
            np.minimum(budget_x[:, side], x, out=budget_x[:, side])
            np.minimum(budget_y[flank], y, out=budget_y[flank])
    return (
        np.maximum(budget_x - drift_x, east) + margin * allowed,
        np.maximum(budget_y - drift_y, north) + margin * allowed,
    )


def _shared_out(first: Floats, second: Floats, allowed: float, q: float) -> tuple[Floats, Floats]:
    """Return multiples of vectors with a q-norm of at most `allowed`, but never less than themselves."""
    if math.isinf(q):
        return np.maximum(first, allowed), np.maximum(second, allowed)
    # A little more even than they are, where that is not too long already.
    even_first = np.maximum(first, _LEAST_COMPONENT * second)
    even_second = np.maximum(second, _LEAST_COMPONENT * first)
    # Where both vanish, or their squares do, both get the same.
    nothing = np.maximum(even_first, even_second) < _NOTHING
    even_first, even_second = np.where(nothing, 1.0, even_first), np.where(nothing, 1.0, even_second)
    scale = allowed / _norm(even_first, even_second, q)
    fits = scale >= 1
    own = np.maximum(allowed / np.where(nothing, 1.0, _norm(first, second, q)), 1.0)
    return (
        np.where(fits | nothing, scale * even_first, own * first),
        np.where(fits | nothing, scale * even_second, own * second),
    )


def _norm(first: Floats, second: Floats, q: float) -> Floats:
    rank = norm_rank(first.copy(), second.copy(), q)
    return np.asarray(np.sqrt(rank) if q == 2 else rank)
