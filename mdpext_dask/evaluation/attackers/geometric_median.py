"""The place from which weighted places are nearest on average, and a bound below which no place gets.

f(g) = Σ_i w_i ‖p_i − g‖₂ is convex. For any subgradient s of f at g, and any minimiser g*,

    f(g*) ≥ f(g) − ‖s‖ ‖g* − g‖,   W ‖g* − g‖ ≤ f(g*) + f(g) ≤ 2 f(g),   W = Σ w,

by convexity and the triangle inequality, so f(g*) ≥ f(g) (1 − 2 ‖s‖ / W): whatever an iteration does, it ends
with a bound. E. Weiszfeld, "Sur le point pour lequel la somme des distances de n points donnés est minimum"
(1937); Y. Vardi, C.-H. Zhang, "The multivariate L1-median and associated data depth" (PNAS 2000), for places
that g may fall on.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MOST_STEPS = 60
# Steps at most where each reads all records.
_MOST_PASSES = 8
# Relative duality gap at which to stop.
_GOOD_GAP = 1e-7
_EPS = sys.float_info.epsilon


@dataclass(frozen=True)
class Median:
    """A guess, what it costs, and what every guess costs at least.

    Parameters
    ----------
    guess_km
        Where, float64 of shape (2,), in km.
    cost_km
        f at the guess, in km times the unit of weights.
    lower_km
        A lower bound on f anywhere, rounding included.
    """

    guess_km: Array
    cost_km: float
    lower_km: float


# A slope holds f and its derivatives at a place, seven numbers along the last axis of an array: f; the
# gradient of what is not at the place itself, Σ w (g − p) / ‖g − p‖; its Hessian xx, xy, yy; and the weight
# of what is at the place itself, where f has a kink. Slopes of parts add up.
COST, HERE, SLOPE_NUMBERS = 0, 6, 7


def slope_at(east_km: Array, north_km: Array, weights: Array) -> Array:
    """Return f and its derivatives, from where places are as seen from the guess.

    Parameters
    ----------
    east_km, north_km
        p − g, float64 of a shape (..., n), in km.
    weights
        w ≥ 0, float64 of shape (..., n).

    Returns
    -------
    Sums over the last axis, float64 of shape (..., 7).
    """
    apart = np.hypot(east_km, north_km)
    away = apart > 0
    safe = np.where(away, apart, 1.0)
    # Unit vectors from the guess to the places; of one at the guess itself, the vector 0.
    x, y, over = east_km / safe, north_km / safe, weights / safe
    sums = [
        (weights * apart).sum(axis=-1),
        -(weights * x).sum(axis=-1),
        -(weights * y).sum(axis=-1),
        # (I − u uᵀ) w / r, which is (y, −x) (y, −x)ᵀ w / r.
        (over * y * y).sum(axis=-1),
        -(over * x * y).sum(axis=-1),
        (over * x * x).sum(axis=-1),
        (weights * ~away).sum(axis=-1),
    ]
    return np.stack(sums, axis=-1)


def least_subgradient(slope: Array) -> Array:
    """Return the norm of the shortest subgradient."""
    norm = np.hypot(slope[..., 1], slope[..., 2])
    return np.asarray(np.maximum(norm - slope[..., HERE], 0.0))


def _step(slope: Array) -> Array:
    """Return how far to go from here, of shape (..., 2), for weights that add up to 1.

    A step of Newton's method, or of Weiszfeld's where there is no curvature; of Vardi's and Zhang's where
    something at the place itself holds on to it, which not every way downhill without it overcomes. Steps
    are at most as long as twice the mean distance, beyond which no minimiser is.
    """
    cost, gx, gy, xx, xy, yy, here = np.moveaxis(slope, -1, 0)
    trace, determinant = xx + yy, xx * yy - xy * xy
    newton = (determinant > 1e-9 * trace * trace) & (here == 0)
    safe = np.where(newton, determinant, 1.0)
    norm = np.hypot(gx, gy)
    pull = np.where(norm > 0, least_subgradient(slope) / np.where(norm > 0, norm, 1.0), 0.0)
    pull = pull / np.where(trace > 0, trace, 1.0)
    x = np.where(newton, (yy * gx - xy * gy) / safe, gx * pull)
    y = np.where(newton, (xx * gy - xy * gx) / safe, gy * pull)
    length = np.hypot(x, y)
    shrink = np.minimum(1.0, 2 * cost / np.where(length > 0, length, 1.0))
    return np.asarray(-np.stack([x * shrink, y * shrink], axis=-1))


def lower_bound(slope: Array, total: Array | float, terms: int) -> Array:
    """Return f (1 − 2 ‖s‖ / W), rounded down.

    Parameters
    ----------
    slope
        f at any places.
    total
        W > 0.
    terms
        How many numbers were added up for each.
    """
    # Every sum has terms of no more than W, or than f; each is off by a few roundings of that many terms.
    rounding = 8 * (terms + 8) * _EPS
    share = least_subgradient(slope) / total + rounding
    return np.asarray(np.maximum(slope[..., COST] * (1 - rounding) * (1 - 2 * share), 0.0))


def descend(
    judge: Callable[[Array], Array],
    guesses_km: Array,
    nearest: Callable[[Array], Array],
    bound: Callable[[Array], Array],
    weight: Array,
    gap: float,
) -> tuple[Array, Array, Array]:
    """Improve many guesses at once, where to judge them is to read all records.

    Parameters
    ----------
    judge
        Returns f and its derivatives, of shape (G, n, m), at guesses of shape (G, n, m, 2); in each, weights
        add up to 1.
    guesses_km
        Where to begin: G ≥ 1 guesses each, float64 of shape (G, n, m, 2), in km.
    nearest
        Returns the nearest records of places, where f has its kinks.
    bound
        Returns lower bounds on the least f from f anywhere; see :func:`lower_bound`.
    weight
        What each of them counts, float64 of shape (n, m).
    gap
        Stop once means over the first axis are so close to their bounds, relatively.

    Returns
    -------
    guess, cost, lower
        The best guesses found, of shape (n, m, 2); f there, and lower bounds on it, of shape (n, m).
    """
    guesses, slopes = guesses_km, judge(guesses_km)
    lower = bound(slopes).max(axis=0)
    part = np.ones(lower.shape)
    passes = 0
    while True:
        which = slopes[..., COST].argmin(axis=0)[None, ..., None]
        best, guess = (np.take_along_axis(values, which, axis=0)[0] for values in (slopes, guesses))
        cost = best[..., COST]
        close = (weight * (cost - lower)).sum(axis=0) <= gap * (weight * cost).sum(axis=0)
        if passes == _MOST_PASSES or close.all():
            return guess, cost, np.minimum(lower, cost)
        following = guess + part[..., None] * _step(best)
        tried = np.stack([following, nearest(following)])
        found = judge(tried)
        lower = np.maximum(lower, bound(found).max(axis=0))
        guesses, slopes = np.stack([guess, *tried]), np.stack([best, *found])
        # Half of a step that led uphill, the next time.
        part = np.where(slopes[1, ..., COST] < cost, np.minimum(2 * part, 1), part / 2)
        passes += 1


def geometric_median(points_km: Array, weights: Array) -> Median:
    """Return a place from which weighted places are nearest on average, to a relative gap of about 1e-7.

    Newton's method, begun at the best of the mean and the heaviest place, with steps halved until f is less
    and doubled while it is less still; wherever it gets near to a place, that is tried, as f has its kinks
    there. The gap is not promised: the bound is.

    Parameters
    ----------
    points_km
        float64 of shape (n, 2), in km.
    weights
        w ≥ 0, not all zero, float64 of shape (n,).
    """
    held = weights > 0
    points, share = points_km[held], weights[held]
    total = float(share.sum())
    share = share / total
    mean = (share[:, None] * points).sum(axis=0)
    found = min((_look(points, share, at) for at in (mean, points[share.argmax()])), key=_cost)
    best = _bound(found, len(share))
    for _ in range(_MOST_STEPS):
        slope, at = found
        if best >= _cost(found) * (1 - _GOOD_GAP) or float(least_subgradient(slope)) == 0:
            break
        step, better = _step(slope), found
        for _ in range(30):
            better = _look(points, share, at + step)
            best = max(best, _bound(better, len(share)))
            if _cost(better) < _cost(found):
                break
            step = step / 2
        # Beside a kink the curvature is large, and steps are far too short.
        while _cost(longer := _look(points, share, at + 2 * step)) < _cost(better):
            step, better = 2 * step, longer
        near = int(np.hypot(points[:, 0] - better[1][0], points[:, 1] - better[1][1]).argmin())
        # A place where f is least is as heavy as f is steep beside it, to either side.
        if 2 * share[near] >= float(least_subgradient(better[0])):
            kink = _look(points, share, points[near])
            best = max(best, _bound(kink, len(share)))
            better = min(better, kink, key=_cost)
        if not _cost(better) < _cost(found):
            break
        found = better
    return Median(found[1], _cost(found) * total, best * total * (1 - 4 * (len(share) + 1) * _EPS))


def _look(points: Array, share: Array, at: Array) -> tuple[Array, Array]:
    return slope_at(points[:, 0] - at[0], points[:, 1] - at[1], share), at


def _cost(found: tuple[Array, Array]) -> float:
    return float(found[0][COST])


def _bound(found: tuple[Array, Array], terms: int) -> float:
    bound = float(lower_bound(found[0], 1.0, terms))
    return bound if math.isfinite(bound) else 0.0
