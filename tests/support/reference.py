"""Slow, obvious versions of what the package does fast, written apart from it."""

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.extend.operator import Corners, Operator

# Of random examples.
SEEDS = st.integers(0, 2**32 - 1)


def dual(p: float) -> float:
    """Return q with 1/p + 1/q = 1."""
    return math.inf if p == 1 else 1.0 if math.isinf(p) else p / (p - 1)


def distance(a: NDArray[np.float64], b: NDArray[np.float64], p: float) -> float:
    """Return the l_p distance of two points."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b), ord=p))


def steepest(rows: NDArray[np.floating], points: NDArray[np.float64], p: float = 2.0) -> float:
    """Return sup |log M(k|a) - log M(k|b)| / d_p(a, b) over all pairs of rows and outputs."""
    wide = rows.astype(np.float64)
    logs = np.log(wide / wide.sum(axis=1, keepdims=True))
    worst = 0.0
    for first in range(len(points) - 1):
        apart = np.linalg.norm(points[first + 1 :] - points[first], ord=p, axis=1)
        worst = max(worst, float((np.abs(logs[first + 1 :] - logs[first]).max(axis=1) / apart).max()))
    return worst


def audited_epsilon(probability: NDArray[np.floating], x: Any, y: Any, p: float) -> float:
    """Return it of all records of a lattice; probabilities have the shape (len(x), len(y), K)."""
    points = np.array(list(itertools.product(x, y)))
    return steepest(probability.reshape(len(points), -1), points, p)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalise exp(scores) over the last axis."""
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def interpolate(corners: NDArray[np.float64], s: float, t: float) -> NDArray[np.float64]:
    """Return the bilinear interpolant of corners of shape (2, 2, ...) at (s, t) in [0, 1]^2."""
    return (
        (1 - s) * (1 - t) * corners[0, 0]
        + s * (1 - t) * corners[1, 0]
        + (1 - s) * t * corners[0, 1]
        + s * t * corners[1, 1]
    )


def random_mechanism(
    rng: np.random.Generator, shape: tuple[int, int], outputs: int, roughness: float
) -> NDArray[np.float32]:
    """Return random rows, float32 of shape (*shape, outputs), the rougher the less private."""
    return softmax(rng.normal(scale=roughness, size=(*shape, outputs))).astype(np.float32)


def corners_of(
    scores: NDArray[np.float64],
    refine: tuple[int, ...],
    budgets: tuple[float, float] = (math.inf, math.inf),
    exponent: float = 1.0,
) -> Corners:
    """Return corners with one budget β h_0 for each axis."""
    east, north = (n - 1 for n in scores.shape[:2])
    budget_x = np.full((2, east, north + 1, 1), budgets[0])
    return Corners(scores, budget_x, np.full((2, east + 1, north, 1), budgets[1]), refine, exponent)


def spread_over_orders(
    operator: Operator, scores: NDArray[np.float64], refine: tuple[int, ...]
) -> tuple[float, float]:
    """Return by how much log probabilities depend on the way in which an operator that takes no budgets goes.

    Parameters
    ----------
    operator
        The operator.
    scores
        log z on the corners of a few source cells, float64 of shape (n, m, K).
    refine
        Subdivisions of every level.

    Returns
    -------
    by_levels
        Largest difference between doing all at once and going level by level, in every order of the levels,
        with rows normalised in between or not.
    by_axes
        Largest difference between taking x first and taking y first.
    """

    def extended(values: NDArray[np.float64], parts: int) -> NDArray[np.float64]:
        return operator.scores(corners_of(values, (parts,)))

    factor = math.prod(refine)
    at_once = np.log(softmax(extended(scores, factor)))
    turned = extended(scores.swapaxes(0, 1), factor).swapaxes(0, 1)
    by_levels = 0.0
    for order, normalising in itertools.product(itertools.permutations(refine), (False, True)):
        values = scores
        for parts in order:
            values = extended(values, parts)
            if normalising:
                values = np.log(softmax(values))
        by_levels = max(by_levels, float(np.abs(np.log(softmax(values)) - at_once).max()))
    return by_levels, float(np.abs(np.log(softmax(turned)) - at_once).max())
