"""What looks wrong about input that can be read: points far away or swapped, an ε that hides nothing or all.

What is found becomes sentences, which go where all notes go: to the observer, once, and into ``notes`` of
stores and answers. They name rows and distances, never a place. Lengths of roads are judged where they are
read, in :mod:`mdpext_dask.readers.roads.network`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdpext_dask.errors import SpecError, as_number, shown
from mdpext_dask.problem.grid import Array, Grid
from mdpext_dask.problem.projection import Projection

# Points this far outside the grid are hardly those of people near its border.
_FAR_KM = 10.0
# How far outside one place is said to be, in km: in few words, so that they do not give it away.
_OUTSIDE_KM = (1000, 100, 10)
# Places whose longitude and latitude differ by less, in degrees, are not taken for swapped ones.
_SWAPPED_DEGREES = 5.0
# A degree of latitude is nowhere shorter than 110.5 km.
_KM_PER_DEGREE = 110.0
# What a report should still hide, in km, and the exponent ε d from which places are told apart; below it over
# all of the grid, reports say next to nothing.
_HIDDEN_KM, _TELLING = 0.01, 1.0
# 1/m in 1/km.
_PER_METRE = 1000
# Larger exponents are shown as such.
_LARGEST_SHOWN = 50.0


class PointsSeen:
    """What looks wrong about the points of a file, a chunk at a time.

    Only points outside are looked at, so that files with few of them cost nothing.

    Parameters
    ----------
    grid, projection
        Where points should be; without a projection they are x and y.

    Attributes
    ----------
    count, outside
        Points so far, and those of them that lie outside.
    """

    def __init__(self, grid: Grid, projection: Projection | None) -> None:
        self._grid, self._projection = grid, projection
        self.count = self.outside = 0
        self._swapped, self._degrees, self._at_zero = _Rows(), _Rows(), _Rows()
        # Its number, from 1.
        self._furthest, self._furthest_km = 0, 0.0

    def add(
        self,
        coordinates: Array,
        xy_km: Array,
        outside: NDArray[np.bool_],
        *,
        planar: bool,
        first_row: int = 0,
    ) -> None:
        """Look at the next points.

        Parameters
        ----------
        coordinates
            As the file has them, float64 of shape (n, 2).
        xy_km
            The same in the plane; not finite where it has no place for them.
        outside
            Which lie outside, bool of shape (n,).
        planar
            Whether the file has x and y.
        first_row
            Number of the first of them in the file, from 0.
        """
        self.count += len(coordinates)
        rows = np.flatnonzero(outside)
        if not len(rows):
            return
        self.outside += len(rows)
        away = self._grid.box.distance_km(xy_km[rows])
        furthest = int(np.argmax(away))
        if away[furthest] > self._furthest_km:
            self._furthest_km = float(away[furthest])
            self._furthest = first_row + int(rows[furthest]) + 1
        given, numbers = coordinates[rows], first_row + rows + 1
        self._at_zero.add(numbers[~given.any(axis=1)])
        if planar:
            self._degrees.add(numbers[_hold(given, self._grid, self._projection)])
        else:
            self._swapped.add(numbers[_look_swapped(given, self._grid, self._projection)])

    @property
    def all_outside(self) -> bool:
        """Whether all points so far lie outside."""
        return self.outside == self.count

    @property
    def all_swapped(self) -> bool:
        """Whether all points so far lie outside, and would lie in the grid with lon and lat exchanged.

        Near the diagonal both readings are plausible, and the answer is no.
        """
        return self._swapped.count == self.count

    @property
    def all_degrees(self) -> bool:
        """Whether all points so far are x and y outside the grid, and would lie in it as degrees."""
        return self._degrees.count == self.count

    def said(self, area: str = "grid") -> str:
        """Return all that is wrong, for an error; `area` is the word for where points should be."""
        return "; ".join([self._where(area), *self._doubts()])

    def notes(self, source: str, area: str = "grid", *, left_out: bool = False) -> tuple[str, ...]:
        """Return notes on the points of a file, where there is something to say.

        Parameters
        ----------
        source
            The file, to be named.
        area
            The word for where points should be.
        left_out
            Whether points outside do not count; how many there are is then said in any case.
        """
        parts = self._doubts()
        if self.outside and (left_out or self.all_outside or self._furthest_km >= _FAR_KM):
            parts.insert(0, self._where(area) + (" and were left out" if left_out else ""))
        return tuple(f"{source}: {part}" for part in parts)

    def _where(self, area: str) -> str:
        which = "all" if self.all_outside else f"{self.outside:,} of"
        said = f"{which} {self.count:,} points lie outside the {area}"
        if self._furthest_km == 0:  # in the rectangle, but not in the region
            return said
        away = f"{self._furthest_km:,.0f}" if self._furthest_km >= _FAR_KM else f"{self._furthest_km:.2g}"
        return f"{said} (the furthest, point {self._furthest}, by {away} km)"

    def _doubts(self) -> list[str]:
        """Return what single points look like."""
        looks = {
            "longitude and latitude look swapped": self._swapped,
            "x_km and y_km look like degrees": self._degrees,
            "0, 0 often stands for no place": self._at_zero,
        }
        return [f"{what}: {rows}" for what, rows in looks.items() if rows.count]


@dataclass
class _Rows:
    """How many points of some kind there are, and the number of the first, from 1."""

    count: int = 0
    first: int = 0

    def add(self, numbers: NDArray[np.int64]) -> None:
        if len(numbers):
            self.first = self.first or int(numbers[0])
            self.count += len(numbers)

    def __str__(self) -> str:
        if self.count == 1:
            return f"point {self.first}"
        return f"{self.count:,} points, the first of them point {self.first}"


def doubt_on_place(xy_km: Array, lonlat: Array | None, grid: Grid, projection: Projection | None) -> str:
    """Return what to say of one place that lies outside.

    Parameters
    ----------
    xy_km
        The place in the plane, float64 of shape (1, 2).
    lonlat
        The same in degrees, if it was given so.
    grid, projection
        Where it should be.
    """
    away = float(grid.box.distance_km(xy_km)[0])
    far = next((f"more than {least:,} km " for least in _OUTSIDE_KM if away > least), "")
    said = f"the place lies {far}outside the {'grid' if away > 0 else 'region'}"
    if lonlat is not None and _look_swapped(lonlat, grid, projection)[0]:
        return f"{said}; its longitude and latitude look swapped"
    return said


def doubt_on_accuracy(accuracy_m: float, epsilon_per_km: float) -> str:
    """Return what to say of a place that is known less well than 1/ε; "" of any other.

    Parameters
    ----------
    accuracy_m
        How well it is known, in m.
    epsilon_per_km
        As promised, in 1/km.

    Raises
    ------
    SpecError
        If the accuracy is no distance.
    """
    if not 0 <= as_number(accuracy_m) < math.inf:
        raise SpecError(f"accuracy_m: must be a number of metres from 0, got {shown(accuracy_m)}")
    hidden_m = 1000 / epsilon_per_km
    if accuracy_m <= hidden_m:
        return ""
    return (
        f"the position is known to {accuracy_m:,.0f} m only, which is more than 1/ε = {hidden_m:,.0f} m: the "
        "report is of little use"
    )


@dataclass
class AccuraciesSeen:
    """How well positions are known, of many at a time.

    Parameters
    ----------
    epsilon_per_km
        As promised, in 1/km.
    """

    epsilon_per_km: float
    _count: int = 0
    _poor: int = 0
    _worst_m: float = 0.0

    def add(self, accuracy_m: ArrayLike, count: int) -> None:
        """Look at the next positions.

        Parameters
        ----------
        accuracy_m
            How well each of them is known, in m, numbers of shape (count,); NaN where that is not known.
        count
            How many there are.

        Raises
        ------
        SpecError
            If these are not so many distances.
        """
        try:
            found = np.asarray(accuracy_m)
        except ValueError:  # rows of different lengths
            found = np.empty(0, dtype=object)
        if found.dtype.kind not in "fiu" or found.shape != (count,):
            raise SpecError(f"accuracy_m: must be {count:,} numbers of metres, one for each place")
        if (found < 0).any() or np.isinf(found).any():
            raise SpecError("accuracy_m: must be numbers of metres from 0, or NaN where it is not known")
        poor = found[found > 1000 / self.epsilon_per_km]  # NaN is not
        self._count += count
        self._poor += len(poor)
        self._worst_m = max(self._worst_m, float(poor.max(initial=0.0)))

    def said(self) -> str:
        """Return what to say of those that are known less well than 1/ε; "" without any."""
        if not self._poor:
            return ""
        return (
            f"{self._poor:,} of {self._count:,} positions are known less well than 1/ε = "
            f"{1000 / self.epsilon_per_km:,.0f} m, the worst to {self._worst_m:,.0f} m: their reports are of "
            "little use"
        )


def _look_swapped(lonlat: Array, grid: Grid, projection: Projection | None) -> NDArray[np.bool_]:
    """Whether places outside the grid, shape (n, 2) in degrees, lie in it with lon and lat exchanged."""
    apart = np.abs(lonlat[:, 0] - lonlat[:, 1]) > _SWAPPED_DEGREES
    return apart & _hold(lonlat[:, ::-1], grid, projection)


def _hold(lonlat: Array, grid: Grid, projection: Projection | None) -> NDArray[np.bool_]:
    """Whether numbers, shape (n, 2), are places in the grid if they are lon and lat."""
    found = np.zeros(len(lonlat), dtype=bool)
    if projection is None:
        return found
    # Most are not, and are not worth a projection.
    near = np.abs(lonlat[:, 1] - projection.centre_lat) <= grid.box.radius_km / _KM_PER_DEGREE
    rows = np.flatnonzero(near & (np.abs(lonlat) <= (180, 90)).all(axis=1))
    found[rows] = grid.box.contains(projection.to_plane(lonlat[rows]))
    return found


def notes_on_epsilon(epsilon_per_km: float, grid: Grid) -> tuple[str, ...]:
    """Return a note where ε hides not even 10 m, or no record from the next, or leaves next to nothing.

    Parameters
    ----------
    epsilon_per_km
        As promised, in 1/km.
    grid
        The records.
    """
    # No distance between two records is longer, whatever the metric.
    longest = grid.box.width_km + grid.box.height_km
    meant = ""
    factors = [f"{_factor(epsilon_per_km * d)} at {name}" for d, name in ((0.1, "100 m"), (1.0, "1 km"))]
    if epsilon_per_km * _HIDDEN_KM > _TELLING:
        what = "hides not even 10 m"
    elif epsilon_per_km * grid.spacing_km > _TELLING:
        what = "hides a place from no other record"
        factors.append(f"{_factor(epsilon_per_km * grid.spacing_km)} between records")
    elif epsilon_per_km * longest < _TELLING:
        what = "leaves next to nothing in a report"
        factors.append(f"{_factor(epsilon_per_km * longest)} across the grid")
        # Not where 1/m would be as odd.
        if _TELLING / longest <= epsilon_per_km * _PER_METRE <= _TELLING / _HIDDEN_KM:
            meant = f"; if it was meant per metre, say {epsilon_per_km * _PER_METRE:g}"
    else:
        return ()
    return (
        f"privacy.epsilon_per_km: {epsilon_per_km:g} {what}: it lets the probabilities of a report from two "
        f"places differ by a factor of {', '.join(factors)}{meant}",
    )


def _factor(exponent: float) -> str:
    return f"{math.exp(exponent):.4g}" if exponent <= _LARGEST_SHOWN else f"e^{exponent:g}"
