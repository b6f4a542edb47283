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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MOST_STEPS = 60
# Steps at most where each reads all records.
_MOST_PASSES = 8
# Relative: what is gained beyond is less than anybody can see.
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


@dataclass(frozen=True)
class Slope:
    """f and its derivatives at some places; all arrays have one entry a place.

    Parameters
    ----------
    cost
        f.
    gradient
        Of what is not at the place itself: Σ w (g − p) / ‖g − p‖, of shape (..., 2).
    hessian
        Its derivative: xx, xy, yy, of shape (..., 3).
    here
        Weight of what is at the place itself, where f has a kink.
    """

    cost: Array
    gradient: Array
    hessian: Array
    here: Array

    @classmethod
    def zero(cls, shape: tuple[int, ...]) -> "Slope":
        """Return f and its derivatives of no places at all."""
        return cls(np.zeros(shape), np.zeros((*shape, 2)), np.zeros((*shape, 3)), np.zeros(shape))

    def over(self, total: Array) -> "Slope":
        """Return f / W and its derivatives."""
        deep = total[..., None]
        return Slope(self.cost / total, self.gradient / deep, self.hessian / deep, self.here / total)

    def along_last(self) -> "Slope":
        """Return the same with one more axis, of length 1, after the others."""
        return Slope(
            self.cost[..., None],
            self.gradient[..., None, :],
            self.hessian[..., None, :],
            self.here[..., None],
        )

    def chosen(self, which: NDArray[np.intp]) -> "Slope":
        """Return the entries along the first axis that are chosen, for all others."""
        return Slope(
            *(
                np.take_along_axis(part, which.reshape(1, *which.shape, *[1] * deeper), axis=0)[0]
                for part, deeper in ((self.cost, 0), (self.gradient, 1), (self.hessian, 1), (self.here, 0))
            )
        )

    def least_subgradient(self) -> Array:
        """Return the norm of the shortest subgradient."""
        norm = np.hypot(self.gradient[..., 0], self.gradient[..., 1])
        return np.asarray(np.maximum(norm - self.here, 0.0))

    def step(self) -> Array:
        """Return how far to go from here, of shape (..., 2), for weights that add up to 1.

        A step of Newton's method, or of Weiszfeld's where there is no curvature; of Vardi's and Zhang's where
        something at the place itself holds on to it, which not every way downhill without it overcomes. Steps
        are at most as long as twice the mean distance, beyond which no minimiser is.
        """
        xx, xy, yy = np.moveaxis(self.hessian, -1, 0)
        gx, gy = np.moveaxis(self.gradient, -1, 0)
        trace, determinant = xx + yy, xx * yy - xy * xy
        newton = (determinant > 1e-9 * trace * trace) & (self.here == 0)
        safe = np.where(newton, determinant, 1.0)
        norm = np.hypot(gx, gy)
        pull = np.where(norm > 0, self.least_subgradient() / np.where(norm > 0, norm, 1.0), 0.0)
        pull = pull / np.where(trace > 0, trace, 1.0)
        x = np.where(newton, (yy * gx - xy * gy) / safe, gx * pull)
        y = np.where(newton, (xx * gy - xy * gx) / safe, gy * pull)
        length = np.hypot(x, y)
        shrink = np.minimum(1.0, 2 * self.cost / np.where(length > 0, length, 1.0))
        return np.asarray(-np.stack([x * shrink, y * shrink], axis=-1))


def slope_at(east_km: Array, north_km: Array, weights: Array) -> Slope:
    """Return f and its derivatives, from where places are as seen from the guess.

    Parameters
    ----------
    east_km, north_km
        p − g, float64 of a shape (..., n), in km.
    weights
        w ≥ 0, float64 of shape (..., n).

    Returns
    -------
    Sums over the last axis.
    """
    apart = np.hypot(east_km, north_km)
    away = apart > 0
    safe = np.where(away, apart, 1.0)
    # Unit vectors from the guess to the places; of one at the guess itself, the vector 0.
    x, y, over = east_km / safe, north_km / safe, weights / safe
    return Slope(
        cost=(weights * apart).sum(axis=-1),
        gradient=-np.stack([(weights * x).sum(axis=-1), (weights * y).sum(axis=-1)], axis=-1),
        # (I − u uᵀ) w / r, which is (y, −x) (y, −x)ᵀ w / r.
        hessian=np.stack(
            [(over * y * y).sum(axis=-1), -(over * x * y).sum(axis=-1), (over * x * x).sum(axis=-1)], axis=-1
        ),
        here=(weights * ~away).sum(axis=-1),
    )


def stacked(slopes: Sequence[Slope]) -> Slope:
    """Return f and its derivatives along a new first axis."""
    return Slope(
        np.stack([slope.cost for slope in slopes]),
        np.stack([slope.gradient for slope in slopes]),
        np.stack([slope.hessian for slope in slopes]),
        np.stack([slope.here for slope in slopes]),
    )


def add_slope(total: Slope, at: tuple[int | slice, ...], part: Slope) -> None:
    """Add a part of the places to f and its derivatives, at some entries."""
    total.cost[at] += part.cost
    total.gradient[at] += part.gradient
    total.hessian[at] += part.hessian
    total.here[at] += part.here


def lower_bound(slope: Slope, total: Array | float, terms: int) -> Array:
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
    # Every sum has terms of no more than W, or than f; each is off by a few roundings of so many terms.
    rounding = 8 * (terms + 8) * _EPS
    share = slope.least_subgradient() / total + rounding
    return np.asarray(np.maximum(slope.cost * (1 - rounding) * (1 - 2 * share), 0.0))


def descend(
    judge: Callable[[Array], Slope],
    guesses_km: Array,
    nearest: Callable[[Array], Array],
    bound: Callable[[Slope], Array],
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
    slope = judge(guesses_km)
    lower = bound(slope).max(axis=0)
    which = slope.cost.argmin(axis=0)
    best, guess = slope.chosen(which), np.take_along_axis(guesses_km, which[None, ..., None], axis=0)[0]
    part = np.ones(which.shape)
    for _ in range(_MOST_PASSES):
        if ((weight * (best.cost - lower)).sum(axis=0) <= gap * (weight * best.cost).sum(axis=0)).all():
            break
        following = guess + part[..., None] * best.step()
        tried = np.stack([following, nearest(following)])
        slope = judge(tried)
        lower = np.maximum(lower, bound(slope).max(axis=0))
        slopes = stacked([best, *(slope.chosen(np.full(part.shape, g)) for g in (0, 1))])
        which = slopes.cost.argmin(axis=0)
        best = slopes.chosen(which)
        guess = np.take_along_axis(np.stack([guess, *tried]), which[None, ..., None], axis=0)[0]
        # Half of a step that led uphill, the next time.
        part = np.where(slopes.cost[1] < slopes.cost[0], np.minimum(2 * part, 1), part / 2)
    return guess, best.cost, np.minimum(lower, best.cost)


def geometric_median(points_km: Array, weights: Array) -> Median:
    """Return a place from which weighted places are nearest on average, to a relative gap of about 1e-7.

    Newton's method, begun at the best of the mean and the heaviest place, with steps halved until f is less;
    wherever it gets near to a place, that is tried, as f has its kinks there. The gap is not promised: the
    bound is.

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
        if best >= float(slope.cost) * (1 - _GOOD_GAP) or float(slope.least_subgradient()) == 0:
            break
        step, better = slope.step(), found
        for _ in range(30):
            better = _look(points, share, at + step)
            best = max(best, _bound(better, len(share)))
            if _cost(better) < _cost(found):
                break
            step = step / 2
        near = int(np.hypot(points[:, 0] - better[1][0], points[:, 1] - better[1][1]).argmin())
        # A place where f is least is as heavy as f is steep beside it, to either side.
        if 2 * share[near] >= float(better[0].least_subgradient()):
            kink = _look(points, share, points[near])
            best = max(best, _bound(kink, len(share)))
            better = min(better, kink, key=_cost)
        if not _cost(better) < _cost(found):
            break
        found = better
    return Median(found[1], _cost(found) * total, best * total * (1 - 4 * (len(share) + 1) * _EPS))


def _look(points: Array, share: Array, at: Array) -> tuple[Slope, Array]:
    return slope_at(points[:, 0] - at[0], points[:, 1] - at[1], share), at


def _cost(found: tuple[Slope, Array]) -> float:
    return float(found[0].cost)


def _bound(found: tuple[Slope, Array], terms: int) -> float:
    bound = float(lower_bound(found[0], 1.0, terms))
    return bound if math.isfinite(bound) else 0.0
