"""From places to the records that they are reported from.

A location is first moved to its nearest record. Locations outside the grid, anywhere on Earth, are moved to
its border first, in a way that increases no distance between two of them (PROOF.md, section 3).
"""

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError, first_line
from mdpext_dask.problem.grid import Grid, coarse_radius_km, coarse_steps
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import check_degrees

# Of the radius of the disc that places are moved into: up to here rounding does not decide whether they are.
_WELL_INSIDE = 0.999
# Places that are nearer to their mirror images, in degrees, are not taken for mistakes.
_SWAPPED_DEGREES = 5.0


class Places:
    """The plane and the lattice of a mechanism.

    Parameters
    ----------
    source
        What to name in errors.
    grid
        The records.
    kept
        Source cells of the region, bool of shape (cells_x, cells_y).
    projection
        From degrees to the plane; None where places are x and y only.
    metric_p
        Exponent of the metric.
    """

    def __init__(
        self,
        source: str,
        grid: Grid,
        kept: NDArray[np.bool_],
        projection: Projection | None,
        metric_p: float,
    ) -> None:
        self._source, self.metric_p = source, metric_p
        self.grid, self.projection = grid, projection
        self._kept, self.all_kept = kept, bool(kept.all())

    def one(
        self, lon: float | None, lat: float | None, x_km: float | None, y_km: float | None
    ) -> tuple[float, float]:
        """Return one place in the plane, x and y in km.

        Raises
        ------
        SpecError
            If it is not given in one way, or not by numbers in range.
        """
        if x_km is None and y_km is None and lon is not None and lat is not None:
            east, north = _number(lon), _number(lat)
            if not (abs(east) <= 180 and abs(north) <= 90):
                raise SpecError(f"lon, lat: must be degrees, got {lon!r}, {lat!r}")
            return self._one_in_plane(east, north)
        if lon is None and lat is None and x_km is not None and y_km is not None:
            x, y = _number(x_km), _number(y_km)
            if not (math.isfinite(x) and math.isfinite(y)):
                raise SpecError(f"x_km, y_km: must be finite, got {x_km!r}, {y_km!r}")
            return x, y
        raise SpecError("a place is given either by lon and lat or by x_km and y_km")

    def many(self, coordinates: NDArray[Any], *, planar: bool) -> NDArray[np.float64]:
        """Return places in the plane, float64 of shape (n, 2), in km.

        Parameters
        ----------
        coordinates
            Numbers of shape (n, 2): lon and lat in degrees, or x and y in km.
        planar
            Whether they are x and y.

        Raises
        ------
        DataError
            If they are not finite numbers, two for each place, in range.
        SpecError
            If they are degrees and the mechanism is planar.
        """
        checked = _checked(coordinates)
        if planar:
            return checked
        check_degrees(checked, "points")
        return self.in_plane(checked)

    def record(self, xy_km: tuple[float, float], place_km: float | None) -> tuple[int, int]:
        """Return the record (i, j) to report one place from; see :meth:`records`."""
        return self.grid.record_at(*xy_km, self._steps(place_km))

    def records(
        self, xy_km: NDArray[np.float64], place_km: float | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the flat indices of the records to report from, and whether the nearest is of the region.

        Parameters
        ----------
        xy_km
            Places, float64 of shape (n, 2), in km.
        place_km
            Side of coarse places, in km, if they are made coarse.

        Raises
        ------
        SpecError
            If that is not a positive number.
        """
        i, j, inside = self.grid.nearest_records(xy_km)
        if not self.all_kept:
            inside &= self.grid.are_vertices_of(self._kept, i, j)
        if place_km is not None:
            i, j = self.grid.coarse_records(xy_km, self._steps(place_km))
        return np.asarray(i * self.grid.shape[1] + j, dtype=np.int64), inside

    def quantisation_km(self, place_km: float | None) -> float:
        """Return the largest distance a place in the grid is moved, in km."""
        return coarse_radius_km(self._steps(place_km), self.grid.spacing_km, self.metric_p)

    def holds_degrees(self, coordinates: NDArray[np.float64]) -> bool:
        """Whether all of these numbers, shape (n, 2), are places in the grid if they are lon and lat."""
        if self.projection is None or not (np.abs(coordinates) <= (180, 90)).all():
            return False
        return bool(self.grid.box.contains(self.projection.to_plane(coordinates)).all())

    def holds_swapped(self, coordinates: NDArray[np.float64]) -> bool:
        """Whether all of these numbers, shape (n, 2), are places in the grid if they are lat and lon.

        Near the diagonal, where they may well be meant as they are, the answer is no.
        """
        far = np.abs(coordinates[:, 0] - coordinates[:, 1]) > _SWAPPED_DEGREES
        return bool(far.all()) and self.holds_degrees(coordinates[:, ::-1])

    def in_plane(self, lonlat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Project places anywhere on Earth so that no distance grows beyond what ε was charged for.

        For p = 2 distances are those on the ground, so far places are moved to where the distortion is
        charged; for other p they are those of the plane.
        """
        if self.projection is None:
            raise SpecError(
                f"lon, lat: {self._source} is planar, its loss file has no centre_lon, centre_lat; give "
                "x_km, y_km"
            )
        if self.metric_p == 2:
            return self.projection.to_disc(lonlat, self.grid.box.radius_km)
        xy = self.projection.to_plane(lonlat)
        if not np.isfinite(xy).all():
            raise DataError("points: a place on the other side of the Earth has no place in the plane")
        return xy

    def _one_in_plane(self, lon: float, lat: float) -> tuple[float, float]:
        """Return what :meth:`in_plane` does, bit by bit; where nothing is moved, in a tenth of the time."""
        if self.projection is not None and self.metric_p == 2:
            x, y = self.projection.point_to_plane(lon, lat)
            if math.hypot(x, y) < _WELL_INSIDE * self.grid.box.radius_km:
                return x, y
        x, y = self.in_plane(np.array([[lon, lat]]))[0].tolist()
        return x, y

    def _steps(self, place_km: float | None) -> int:
        return 1 if place_km is None else coarse_steps(place_km, self.grid.spacing_km)


def _number(value: Any) -> float:
    """Return a number, or what is not-a-number for everything else, texts with numbers in them too."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _checked(coordinates: NDArray[Any]) -> NDArray[np.float64]:
    """Return coordinates as float64 of shape (n, 2).

    Raises
    ------
    DataError
        If they are not that, or not finite. Numbers in texts are not taken for numbers.
    """
    try:
        found = np.asarray(coordinates)
    except ValueError as error:
        raise DataError(f"points: coordinates must be numbers: {first_line(error)}") from None
    if found.dtype.kind not in "fiu" or found.shape[1:] != (2,):
        raise DataError(
            f"points: coordinates must be numbers, two for each place, got {found.dtype}{found.shape}"
        )
    if not np.isfinite(found).all():
        raise DataError("points: coordinates must be finite numbers")
    return found.astype(np.float64, copy=False)
