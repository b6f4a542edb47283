"""Some of many places that stand for all of them, the denser where these are."""

import numpy as np
from numpy.typing import NDArray

# How often a square around all places is halved; and halvings of the logarithm of the threshold.
_LEVELS, _HALVINGS = 20, 16
# Of a curve through points: steps along the longer axis.
_CURVE = 2**16 - 1


def thinned(xy_km: NDArray[np.float64], distance_km: float, most: int) -> tuple[NDArray[np.intp], float]:
    """Return places that stand for all, and how far these are from those that stand for them on average.

    A square is quartered while the number of places in it times its side exceeds a threshold; the place that
    is nearest to the mean of a square's stands for them. So every square adds about as much to the sum of
    distances, which is about the least for as many, where places are dense. The threshold is the largest that
    keeps `distance_km`, or else the least that keeps `most`.

    Parameters
    ----------
    xy_km
        Places, float64 of shape (n, 2), in km.
    distance_km
        Largest mean distance, in km, if `most` allows it.
    most
        Largest number of those that are chosen, at least 1.

    Returns
    -------
    Their indices in ascending order, of shape (K,); and the mean distance, in km.
    """
    offset = xy_km - xy_km.min(axis=0)
    side = max(float(offset.max()), 1e-9) * (1 + 1e-9)
    square = np.empty((_LEVELS, len(xy_km)), dtype=np.int32)
    weight = np.zeros(square.shape, dtype=np.float32)  # 0 on the last level: it is not divided any further
    for level in range(_LEVELS):
        east, north = (offset * (2**level / side)).astype(np.int64).T
        _, square[level], places = np.unique(east << _LEVELS | north, return_inverse=True, return_counts=True)
        if level < _LEVELS - 1:
            weight[level] = np.where(places > 1, places * side / 2**level, 0)[square[level]]

    def chosen(threshold: float) -> tuple[NDArray[np.intp], float]:
        level = np.count_nonzero(weight > threshold, axis=0)
        divided = level * len(xy_km) + square[level, np.arange(len(xy_km))]
        _, of, places = np.unique(divided, return_inverse=True, return_counts=True)
        middle = np.stack([np.bincount(of, axis) / places for axis in xy_km.T], axis=-1)
        order = np.lexsort((np.hypot(*(xy_km - middle[of]).T), of))
        kept = order[np.cumsum(places) - places]
        return np.sort(kept), float(np.hypot(*(xy_km - xy_km[kept[of]]).T).mean())

    low, high = 1e-9 * side, 2 * side * len(xy_km)
    found = chosen(0.0)
    enough = len(found[0]) <= most  # then only the distance counts
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        tried = chosen(middle)
        if len(tried[0]) > most:
            low = middle
        elif tried[1] <= distance_km:
            found, enough, low = tried, True, middle
        else:
            high = middle
    return found if enough else chosen(high)


def along_a_curve(xy_km: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return an order of points in which neighbours are near each other: Morton's curve.

    Parameters
    ----------
    xy_km
        Points, float64 of shape (n, 2), in km.
    """
    low = xy_km.min(axis=0)
    across = float(np.ptp(xy_km, axis=0).max()) or 1.0
    # Whole numbers below 2^16, so that the two of a point interleave into 32 bits.
    steps = ((xy_km - low) / across * _CURVE).astype(np.uint64)
    codes = np.zeros(len(xy_km), dtype=np.uint64)
    for bit in range(_CURVE.bit_length()):
        for axis in (0, 1):
            codes |= ((steps[:, axis] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(2 * bit + axis)
    return np.argsort(codes, kind="stable")
