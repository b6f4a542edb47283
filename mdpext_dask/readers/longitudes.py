"""Degrees: their ranges, and boxes across the antimeridian.

As RFC 7946 (section 5.2) writes it, a box is west, south, east, north in degrees. Where west is larger than
east, it goes from west over 180 to east: [177, -20, -178, -15] is 5 degrees wide.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdpext_dask.errors import DataError

FULL_TURN = 360.0
HALF_TURN = FULL_TURN / 2
Degrees = tuple[float, float, float, float]


def east_of(west: float, east: float) -> float:
    """Return the longitude of the east side of a box, counted on from its west side: at most west + 360."""
    return east if east >= west else east + FULL_TURN


def between(lon: NDArray[np.float64], west: float, east: float) -> NDArray[np.bool_]:
    """Whether longitudes, in [-180, 180], lie in a box from `west` to `east`, sides included."""
    if west <= east:
        return np.asarray((lon >= west) & (lon <= east))
    return np.asarray((lon >= west) | (lon <= east))


def as_swapped(box: Degrees, lonlat: NDArray[np.float64]) -> str:
    """Return a hint if places, shape (n, 2), lie in a box once its latitudes and longitudes change places."""
    south, west, north, east = box
    lon, lat = lonlat.T
    if not (between(lon, west, east) & (lat >= south) & (lat <= north)).any():
        return ""
    return f"; the order is west, south, east, north: say {[west, south, east, north]}"


def arc(west: ArrayLike, east: ArrayLike) -> tuple[float, float]:
    """Return west and east of the smallest arc that covers arcs; west > east where 180 is inside.

    All the way round but for the largest gap between them. Of arcs that span less than half a turn it is
    their least and largest longitude.

    Parameters
    ----------
    west, east
        Arcs in degrees, float64 of shape (n,), west ≤ east; equal for single places. West is in [-180, 180],
        and so is east, but of an arc that is itself across the antimeridian.
    """
    begin, end = np.asarray(west, dtype=np.float64), np.asarray(east, dtype=np.float64)
    least, largest = float(begin.min()), float(end.max())
    if largest - least <= HALF_TURN:
        return least, largest
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    gaps = begin[1:] - reached[:-1]
    widest = int(np.argmax(gaps)) if len(gaps) else 0
    if len(gaps) == 0 or gaps[widest] <= least + FULL_TURN - largest:
        return least, largest
    return float(begin[widest + 1]), max(float(reached[widest]), largest - FULL_TURN)


def first_outside(lonlat: NDArray[np.float64]) -> tuple[int, str] | None:
    """Return the first row of float64 (n, 2) that cannot be lon and lat in degrees, and what is wrong."""
    outside = ~((np.abs(lonlat[:, 0]) <= 180) & (np.abs(lonlat[:, 1]) <= 90))
    if not outside.any():
        return None
    row = int(np.argmax(outside))
    lon, lat = lonlat[row]
    return row, f"lon {lon:g}, lat {lat:g} is out of range; coordinates must be degrees"


def check_degrees(lonlat: NDArray[np.float64], source: object) -> None:
    """Refuse float64 (n, 2) that cannot be longitudes and latitudes in degrees.

    Raises
    ------
    DataError
        With the source and the first such row, counted from 1.
    """
    if found := first_outside(lonlat):
        raise DataError(f"{source}: row {found[0] + 1}: {found[1]}")
