"""Records cut into halves of halves of halves, and what each half says at most: what lets pairs be skipped.

For two sets of records A and B let hi_y, lo_y be the largest and smallest ℓ(y|·) in each, and D the distance
of their bounding boxes. Then for all x in A, x' in B

    |ℓ(y|x) − ℓ(y|x')| ≤ max(hi_y(A) − lo_y(B), hi_y(B) − lo_y(A))   and   ‖x − x'‖_p ≥ D,

so where the left is at most ε D, no pair between them breaks its bound.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array

# Records of a tile at most. Tables of all pairs of two tiles must stay in the processor's cache.
TILE = 128
# What a computed distance may be off by, relative to it: a few roundings, and those of powers.
LENGTH_ERROR = 1e-13
# Numbers of a table of bounds that are worked on at once.
BOUNDS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Level:
    """Sets of records at one depth.

    Parameters
    ----------
    low, high
        Corners of the bounding boxes, float64 of shape (sets, 2), in km.
    least, most
        Smallest and largest ℓ(y|·), float64 of shape (sets, K).
    """

    low: Array
    high: Array
    least: Array
    most: Array


@dataclass(frozen=True)
class Tiles:
    """Records in the order of their tiles, with the levels above; made by :func:`tiles_of`.

    Parameters
    ----------
    order
        Positions in what was given, shape (n,).
    starts
        Where tiles begin in that order, and n.
    levels
        From all records as one set down to the tiles; every set has two halves on the next level.
    """

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    levels: tuple[Level, ...]


def cut_in_halves(xy_km: Array, most: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Cut points in halves across the longer side of their box, and so on until none has more than `most`.

    Parameters
    ----------
    xy_km
        Points, float64 of shape (n, 2), n ≥ 1, in km.
    most
        Points of a piece at most, ≥ 2.

    Returns
    -------
    order
        Point numbers in the order of the pieces, shape (n,).
    starts
        Where pieces begin in that order, and n; there are 2^depth of them, which differ by one point at most.
    """
    order = np.arange(len(xy_km))
    depth = max(math.ceil(math.log2(len(xy_km) / most)), 0)
    for level in range(depth):
        starts = _starts(len(xy_km), level)
        halves = _starts(len(xy_km), level + 1)[1::2]
        for start, middle, stop in zip(starts[:-1], halves, starts[1:], strict=True):
            part = order[start:stop]
            points = xy_km[part]
            axis = int(np.ptp(points[:, 1]) > np.ptp(points[:, 0]))
            order[start:stop] = part[np.argpartition(points[:, axis], middle - start)]
    return order, _starts(len(xy_km), depth)


def tiles_of(xy_km: Array, logs: Array, most: int) -> Tiles:
    """Cut records into tiles, and say what every set of them holds at most.

    Parameters
    ----------
    xy_km
        Points, float64 of shape (n, 2), n ≥ 1, in km.
    logs
        ℓ(y|·), float64 of shape (n, K).
    most
        Records of a tile at most.
    """
    order, starts = cut_in_halves(xy_km, most)
    points, values = xy_km[order], logs[order]
    least = np.minimum.reduceat(values, starts[:-1])
    largest = np.maximum.reduceat(values, starts[:-1])
    tiles = Level(
        np.minimum.reduceat(points, starts[:-1]), np.maximum.reduceat(points, starts[:-1]), least, largest
    )
    levels = [tiles]
    while len(levels[-1].low) > 1:
        level = levels[-1]
        levels.append(
            Level(
                np.minimum(level.low[::2], level.low[1::2]),
                np.maximum(level.high[::2], level.high[1::2]),
                np.minimum(level.least[::2], level.least[1::2]),
                np.maximum(level.most[::2], level.most[1::2]),
            )
        )
    return Tiles(order, starts, tuple(reversed(levels)))


def box_distance(
    first: Level, second: Level, a: NDArray[np.intp], b: NDArray[np.intp], p: float, error_km: float = 0.0
) -> Array:
    """Return what d_p between sets `a` of one level and `b` of another is at least, in km.

    Parameters
    ----------
    first, second
        The levels.
    a, b
        Which sets of them.
    p
        Exponent of the metric.
    error_km
        What distances in the plane may be off by.
    """
    gap = np.maximum(np.maximum(first.low[a] - second.high[b], second.low[b] - first.high[a]), 0.0)
    apart = lengths(gap[..., 0], gap[..., 1], p)
    return np.maximum(apart * (1 - LENGTH_ERROR) - error_km, 0.0)


def largest_differences(first: Level, second: Level, a: NDArray[np.intp], b: NDArray[np.intp]) -> Array:
    """Return what |ℓ(y|x) − ℓ(y|x')| is at most between sets, float64 of shape (pairs of sets, K)."""
    up = np.subtract(first.most[a], second.least[b])
    down = np.subtract(second.most[b], first.least[a])
    return np.maximum(up, down, out=up)


def pairs_to_look_at(
    first: Tiles, second: Tiles, p: float, slope: float, errors: tuple[float, float], *, same: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the pairs of tiles that may hold a pair of records with |Δℓ| > slope · d_p, hierarchically.

    Parameters
    ----------
    first, second
        The tiles.
    p
        Exponent of the metric.
    slope
        In 1/km.
    errors
        What differences of ℓ, and distances in km, may be off by.
    same
        Whether both are the same, so that each pair of tiles is wanted once.

    Returns
    -------
    Tile numbers of `first` and `second`, of equal length.
    """
    depths = len(first.levels) - 1, len(second.levels) - 1
    a = b = np.zeros(1, dtype=np.intp)
    for depth in range(max(depths) + 1):
        here = first.levels[min(depth, depths[0])], second.levels[min(depth, depths[1])]
        kept = np.zeros(len(a), dtype=bool)
        at_once = max(BOUNDS_AT_ONCE // here[0].least.shape[1], 1)
        for start in range(0, len(a), at_once):
            part = slice(start, start + at_once)
            reach = slope * box_distance(*here, a[part], b[part], p, errors[1])
            kept[part] = largest_differences(*here, a[part], b[part]).max(axis=1) + errors[0] > reach
        a, b = a[kept], b[kept]
        if depth < depths[0]:
            a, b = np.concatenate([2 * a, 2 * a + 1]), np.concatenate([b, b])
        if depth < depths[1]:
            a, b = np.concatenate([a, a]), np.concatenate([2 * b, 2 * b + 1])
        if same:
            once = a <= b
            a, b = a[once], b[once]
    return a, b


def lengths(dx: Array, dy: Array, p: float, out: Array | None = None) -> Array:
    """Return ‖(dx, dy)‖_p elementwise, within :data:`LENGTH_ERROR`; overwrites both."""
    np.abs(dx, out=dx)
    np.abs(dy, out=dy)
    if p == 1:
        return np.add(dx, dy, out=out)
    if math.isinf(p):
        return np.maximum(dx, dy, out=out)
    if p == 2:
        # Coordinates are kilometres on Earth: squares neither overflow nor lose what counts.
        dx *= dx
        dy *= dy
        return np.sqrt(np.add(dx, dy, out=dx), out=out)
    largest = np.maximum(dx, dy)
    safe = np.where(largest > 0, largest, 1.0)
    return np.multiply(largest, ((dx / safe) ** p + (dy / safe) ** p) ** (1 / p), out=out)


def _starts(n: int, depth: int) -> NDArray[np.intp]:
    """Return where the 2^depth pieces of n points begin, and n."""
    return np.array([n * piece // 2**depth for piece in range(2**depth + 1)], dtype=np.intp)
