"""Weighted k-means in the plane, to the same bits wherever it runs.

Lloyd's algorithm (Lloyd 1982) from the start that k-means++ draws (Arthur and Vassilvitskii 2007); SciPy's
k-means has no weights. Sums are taken in the order of the points, ties go to the first centre, and nothing
runs in threads, so that the result depends on the points and the random seed only.
"""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.problem.grid import Array

# Squared distances that are held at a time.
_AT_ONCE = 1 << 22
# Lloyd's algorithm ends by itself, on few points after tens of passes; this bounds its time.
_MOST_PASSES = 1000
# Of the largest weight; less would be rounded away when it is multiplied.
_LIGHTEST = 1e-250


def weighted_centres(xy: Array, weight: Array, count: int, generator: np.random.Generator) -> Array:
    """Return centres c at a local minimum of Σ_i w_i min_k ‖x_i − c_k‖²: no pass of Lloyd's improves them.

    Parameters
    ----------
    xy
        Distinct points, float64 of shape (n, 2).
    weight
        float64 of shape (n,), > 0; only their ratios count.
    count
        How many centres, at most n.
    generator
        Draws the start.

    Returns
    -------
    float64 of shape (count, 2), in increasing order of their first, then their second coordinate. Each is the
    weighted mean of the points that are nearest to it, of which there is at least one.

    Raises
    ------
    DataError
        If there are fewer points than centres.
    """
    if count > len(xy):
        raise DataError(f"{count} centres are wanted of {len(xy)} places")
    weight = np.maximum(weight / weight.max(), _LIGHTEST)
    centres = xy[_start(xy, weight, count, generator)]
    nearest, least = np.full(len(xy), -1), np.inf
    for _ in range(_MOST_PASSES):
        found, square = _assigned(xy, centres)
        square = _fill_empty(found, square, weight, count)
        # Summed in order, which is the same on every machine.
        total = float(np.cumsum(weight * square)[-1])
        # Rounding alone may move a point back and forth for ever.
        if np.array_equal(found, nearest) or total > least:
            break
        nearest, least = found, total
        mass = np.bincount(nearest, weights=weight, minlength=count)
        sums = [np.bincount(nearest, weights=weight * axis, minlength=count) for axis in xy.T]
        centres = np.stack([total / mass for total in sums], axis=-1)
    return centres[np.lexsort((centres[:, 1], centres[:, 0]))]


def _start(xy: Array, weight: Array, count: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """Draw distinct points, each in proportion to w_i times its squared distance from those before it."""
    chosen: list[int] = []
    square = np.ones(len(xy))
    for _ in range(count):
        upto = np.cumsum(weight * square)
        # The sum has underflowed: take any points that are left.
        if not upto[-1] > 0:
            left = np.setdiff1d(np.arange(len(xy)), chosen)
            return np.array([*chosen, *left[: count - len(chosen)]], dtype=np.intp)
        drawn = int(np.searchsorted(upto, generator.random() * upto[-1], side="right"))
        chosen.append(min(drawn, int(np.flatnonzero(square)[-1])))
        # By operations that no machine merges.
        x, y = (xy - xy[chosen[-1]]).T
        away = np.asarray(x * x + y * y)
        square = away if len(chosen) == 1 else np.minimum(square, away)
    return np.array(chosen, dtype=np.intp)


def _assigned(xy: Array, centres: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the nearest centre of each point, the first of several, and the squared distance to it."""
    nearest, square = np.empty(len(xy), dtype=np.intp), np.empty(len(xy))
    rows = max(1, _AT_ONCE // len(centres))
    for first in range(0, len(xy), rows):
        part = slice(first, first + rows)
        x, y = (xy[part, axis, None] - centres[:, axis] for axis in (0, 1))
        squares = x * x + y * y
        nearest[part] = np.argmin(squares, axis=1)
        square[part] = np.take_along_axis(squares, nearest[part, None], axis=1)[:, 0]
    return nearest, square


def _fill_empty(nearest: NDArray[np.intp], square: Array, weight: Array, count: int) -> Array:
    """Give each centre without points the one that costs most, of a centre with several; return squares."""
    members = np.bincount(nearest, minlength=count)
    for empty in np.flatnonzero(members == 0):
        cost = np.where(members[nearest] > 1, weight * square, -1.0)
        moved = int(np.argmax(cost))
        members[nearest[moved]] -= 1
        members[empty] += 1
        nearest[moved] = empty
        square[moved] = 0.0
    return square
