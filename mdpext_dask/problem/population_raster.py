"""A prior from a GeoTIFF of population: how much of it falls to each record.

The value of a pixel is the number of people in it, as in WorldPop and GHSL. It is spread evenly over a
lattice of points inside the pixel, several for each record, and each adds its share to the nearest record. So
mass is kept, pixels larger than the spacing of the records leave no holes, and smaller ones add up. (GDAL's
resampling by sums loses about 1 % of the mass.) Only the part of the raster around the grid is read.
"""

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.problem.grid import Array, Box, Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.optional_libraries import import_optional

# Most and fewest points of a pixel along the spacing of the records. Shares of two records in the same pixel
# differ by at most one point along each axis.
_BEST, _LEAST = 8, 2
# Most points in all; most points, and most pixels, at a time.
_MOST_POINTS = 1 << 26
_AT_ONCE = 1 << 20
# Samples along each side of the grid: of its outline in the raster, and of the size of pixels.
_OUTLINE, _SAMPLES = 257, 9
# Margin for pixels that are larger between the samples.
_MORE = 1.05
# Pixels to read beyond the sampled outline, which is curved.
_MARGIN = 2
# Share of a pixel by which a raster may miss the border of the grid through rounding.
_EDGE = 1e-6
_POLES = ((0.0, 90.0), (0.0, -90.0))
# GDAL also reads files beside it, which are no part of a job's identity: only the file itself counts.
_ALONE = {"GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR", "GDAL_PAM_ENABLED": "NO"}
# Rows from, to, and columns from, to; the ends exclusive.
Window = tuple[int, int, int, int]
# Farther than any place on Earth.
_NOWHERE_KM = 1e6
_DEGREES = "OGC:CRS84"


@dataclass(frozen=True)
class Population:
    """The population of a grid.

    Parameters
    ----------
    mass
        Population of every record, float64 of shape ``grid.shape``, ≥ 0, not all zero.
    outside
        Population outside the grid in pixels at its border.
    covered
        Whether the raster covers the whole grid.
    """

    mass: Array
    outside: float
    covered: bool


def read_population(path: Path, grid: Grid, projection: Projection) -> Population:
    """Return how much of a raster's population falls to each record.

    Pixels without data count as empty.

    Raises
    ------
    DataError
        If the file cannot be read or is no GeoTIFF of one band with a known place on Earth, if a value is
        negative or infinite, if there is nobody in the grid, or if pixels are too large for such records.
    SpecError
        If rasterio is not installed.
    """
    rasterio = import_optional("rasterio", f"{path}: a GeoTIFF")
    from rasterio.errors import RasterioError

    if not path.is_file():
        raise DataError(f"{path}: {'is no file' if path.exists() else 'no such file'}")
    try:
        with warnings.catch_warnings(), rasterio.Env(**_ALONE):
            # Rasters without a place on Earth are refused below.
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(path, driver="GTiff") as dataset:
                return _Raster(path, dataset, grid, projection).population()
    except (RasterioError, OSError) as error:
        raise DataError(f"{path}: not a readable GeoTIFF: {first_line(error)}") from None


class _Raster:
    """An open raster and the grid that its population is counted on."""

    def __init__(self, path: Path, dataset: Any, grid: Grid, projection: Projection) -> None:
        from pyproj import CRS, Transformer
        from pyproj.exceptions import CRSError

        self._path, self._dataset, self._grid, self._projection = path, dataset, grid, projection
        if dataset.count != 1:
            raise DataError(f"{path}: has {dataset.count} bands; must have one, of population")
        if not re.fullmatch(r"u?int\d+|float\d+", str(dataset.dtypes[0])):
            raise DataError(f"{path}: holds {dataset.dtypes[0]}, not numbers of people")
        if dataset.crs is None or dataset.transform.is_identity or dataset.transform.determinant == 0:
            raise DataError(f"{path}: does not say where on Earth it lies; files beside it do not count")
        try:
            crs = CRS.from_wkt(dataset.crs.to_wkt())
        except CRSError as error:
            raise DataError(f"{path}: has a crs that is not known: {first_line(error)}") from None
        # A full turn of longitude in the units of the raster; None for projected systems.
        self._turn = 2 * math.pi / crs.axis_info[0].unit_conversion_factor if crs.is_geographic else None
        self._to_raster = Transformer.from_crs(_DEGREES, crs, always_xy=True)
        self._to_degrees = Transformer.from_crs(crs, _DEGREES, always_xy=True)

    def population(self) -> Population:
        """Return the mass of every record."""
        windows, covered = self._windows()
        sizes = self._sizes()
        parts, reach = self._parts(*sizes), _MORE * math.hypot(*sizes) / 2
        mass, outside = np.zeros(self._grid.records), 0.0
        for xy, share in (found for window in windows for found in self._shares(window, parts, reach)):
            i, j, inside = self._grid.nearest_records(xy)
            record = (i * self._grid.shape[1] + j)[inside]
            mass += np.bincount(record, weights=share[inside], minlength=self._grid.records)
            outside += float(share[~inside].sum())
        if not mass.any():
            raise DataError(f"{self._path}: there is nobody in the grid")
        return Population(mass.reshape(self._grid.shape), outside, covered)

    def _shares(self, window: Window, parts: tuple[int, int], reach: float) -> Iterator[tuple[Array, Array]]:
        """Yield points in the plane, float64 of shape (n, 2), in km, and the population of each.

        Pixels whose centres are farther than `reach` from the grid are skipped.
        """
        box, points = self._grid.box, math.prod(parts)
        near = Box(box.west_km - reach, box.south_km - reach, box.east_km + reach, box.north_km + reach)
        pixels = max(1, _AT_ONCE // points)
        for rows, columns in self._strips(window):
            value = self._read(rows, columns)
            there = np.flatnonzero(value)
            for first in range(0, len(there), pixels):
                part = there[first : first + pixels]
                row, column = part // value.shape[1] + rows[0], part % value.shape[1] + columns[0]
                centre = self._in_plane(row + 0.5, column + 0.5)
                kept = near.contains(centre)
                corner = None if points == 1 else self._corners(row[kept], column[kept])
                xy = self._points(centre[kept], corner, parts)
                yield xy.reshape(-1, 2), np.repeat(value.ravel()[part[kept]] / points, points)

    def _windows(self) -> tuple[list[Window], bool]:
        """Return disjoint windows to read, and whether they cover the grid.

        The map from the plane to the raster is one to one and continuous, so the grid lies inside its own
        outline, except at a seam, where a raster ends and continues at its other end. So degrees are looked
        up as they are, a turn to the east and a turn to the west: rasters may count from -180 or from 0. In
        other systems, rows that a seam cuts are read whole.
        """
        box, height, width = self._grid.box, self._dataset.height, self._dataset.width
        along = np.linspace(0, 1, _OUTLINE)
        x, y = box.west_km + along * box.width_km, box.south_km + along * box.height_km
        across = [np.stack([x, np.full_like(x, north)], axis=-1) for north in (box.south_km, box.north_km)]
        upwards = [np.stack([np.full_like(y, east), y], axis=-1) for east in (box.west_km, box.east_km)]
        outline = [self._in_crs(side) for side in (*across, *upwards)]
        # One step along a side of more than half of its extent.
        seam = any(
            (np.abs(np.diff(s, axis=0)).max(axis=0) > np.ptp(s, axis=0).max() / 2).any() for s in outline
        )
        places = np.concatenate([*outline, *(self._pole(*pole) for pole in _POLES)])
        windows: list[Window] = []
        covered = np.zeros(len(places), dtype=bool)
        for turn in (0.0,) if self._turn is None else (-self._turn, 0.0, self._turn):
            row, column = self._pixels_at(places + np.array([turn, 0.0]))
            place = np.stack([row, column])
            if not np.isfinite(place).all():
                raise DataError(f"{self._path}: its pixels have no size, so that none of it is in the grid")
            covered |= ((place >= -_EDGE) & (place <= np.array([[height], [width]]) + _EDGE)).all(axis=0)
            top, bottom = _clipped(row, height)
            left, right = (0, width) if seam else _clipped(column, width)
            if top < bottom and left < right:
                windows = _with(windows, (top, bottom, left, right))
        if not windows:
            raise DataError(f"{self._path}: lies elsewhere: none of it is in the grid")
        return windows, bool(covered.all())

    def _pole(self, lon: float, lat: float) -> Array:
        """Return a pole in the raster's system, if it is in the grid; in degrees, both ends of its row."""
        place = self._projection.to_plane(np.array([[lon, lat]]))
        if not self._grid.box.contains(place)[0]:
            return np.empty((0, 2))
        found = self._in_crs(place)
        half = None if self._turn is None else self._turn / 2
        return found if half is None else found + np.array([[-half, 0.0], [half, 0.0]])

    def _strips(self, window: Window) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield rows and columns of parts of the window, of at most 2^20 pixels each."""
        top, bottom, left, right = window
        width = min(right - left, _AT_ONCE)
        height = max(1, _AT_ONCE // width)
        for row in range(top, bottom, height):
            for column in range(left, right, width):
                yield (row, min(row + height, bottom)), (column, min(column + width, right))

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """Return pixels, 0 where there is no data."""
        band = self._dataset.read(1, window=(rows, columns), masked=True)
        scale, offset = self._dataset.scales[0], self._dataset.offsets[0]
        value = np.asarray(band.data.astype(np.float64) * scale + offset)
        value[np.ma.getmaskarray(band) | np.isnan(value)] = 0.0
        bad = (value < 0) | np.isinf(value)
        if bad.any():
            row, column = (int(index[0]) for index in np.nonzero(bad))
            raise DataError(
                f"{self._path}: row {rows[0] + row + 1}, column {columns[0] + column + 1}: "
                f"{value[row, column]:g} is no number of people; if it stands for no data, the file must say "
                "so"
            )
        return value

    def _in_crs(self, xy_km: Array) -> Array:
        """Project places in the plane to the system of the raster, float64 of shape (n, 2).

        Longitudes are at most half a turn from the middle of the grid.
        """
        box = self._grid.box
        middle = np.array([[(box.west_km + box.east_km) / 2, (box.south_km + box.north_km) / 2]])
        degrees = self._projection.to_degrees(np.concatenate([middle, xy_km]))
        found = np.stack(self._to_raster.transform(*degrees.T), axis=-1)
        if not np.isfinite(found).all():
            raise DataError(f"{self._path}: its crs does not reach the grid")
        if self._turn is not None:
            off = found[:, 0] - found[0, 0]
            found[:, 0] -= np.where(np.abs(off) > self._turn / 2, np.copysign(self._turn, off), 0.0)
        return np.asarray(found[1:])

    def _pixels_at(self, places: Array) -> tuple[Array, Array]:
        """Return rows and columns, counted in pixels, of places in the system of the raster."""
        column, row = _moved(~self._dataset.transform, *places.T)
        return row, column

    def _sizes(self) -> tuple[float, float]:
        """Return the largest sides of pixels in the grid, along columns and along rows, in km."""
        box, along = self._grid.box, np.linspace(0, 1, _SAMPLES)
        x, y = box.west_km + along * box.width_km, box.south_km + along * box.height_km
        places = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
        row, column = (np.floor(place).astype(np.intp) for place in self._pixels_at(self._in_crs(places)))
        corner = self._corners(row, column)
        # At a seam, pixels may reach beyond the edge of the map.
        corner = corner[(np.abs(corner) < _NOWHERE_KM).all(axis=(1, 2, 3))]
        if not len(corner):
            raise DataError(f"{self._path}: its pixels are too large to be places on Earth")
        down, across = corner[:, 1, :] - corner[:, 0, :], corner[:, :, 1] - corner[:, :, 0]
        return float(np.hypot(*down.T).max()), float(np.hypot(*across.T).max())

    def _parts(self, down_km: float, across_km: float) -> tuple[int, int]:
        """Return the numbers of points in a pixel of such sides, along its columns and along its rows."""
        box, spacing, reach = self._grid.box, self._grid.spacing_km, math.hypot(down_km, across_km)
        # Pixels that reach over the border are counted whole.
        steps = np.abs(np.array(self._dataset.transform[:6]))[[0, 1, 3, 4]]
        if down_km * across_km == 0 or (self._turn is not None and max(steps) > self._turn / 8):
            raise DataError(f"{self._path}: its pixels are too large to be places on Earth")
        pixels = (box.width_km + 2 * reach) * (box.height_km + 2 * reach) / (down_km * across_km)
        for along in range(_BEST, _LEAST - 1, -1):
            parts = math.ceil(down_km * along / spacing), math.ceil(across_km * along / spacing)
            if math.prod(parts) * pixels <= _MOST_POINTS or parts == (1, 1):
                return parts
        raise DataError(
            f"{self._path}: pixels of {down_km:.3g} km x {across_km:.3g} km are too large for records "
            f"{spacing:.3g} km apart; use larger cells or less refinement"
        )

    def _corners(self, row: NDArray[np.intp], column: NDArray[np.intp]) -> Array:
        """Return the corners of pixels in the plane, float64 of shape (n, 2, 2, 2): down, across, x and y."""
        down, across = (np.arange(2)[:, None], np.arange(2)[None, :])
        rows, columns = np.broadcast_arrays(row[:, None, None] + down, column[:, None, None] + across)
        return self._in_plane(rows.ravel(), columns.ravel()).reshape(*rows.shape, 2)

    def _in_plane(self, row: NDArray[Any], column: NDArray[Any]) -> Array:
        """Return places of the raster, counted in pixels, in the plane, float64 of shape (n, 2)."""
        east, north = _moved(self._dataset.transform, column, row)
        xy = self._projection.to_plane(np.stack(self._to_degrees.transform(east, north), axis=-1))
        # Near the edge of a map of the world there may be no such place; it is not in the grid.
        xy[~np.isfinite(xy).all(axis=-1)] = _NOWHERE_KM
        return xy

    def _points(self, centre_km: Array, corner: Array | None, parts: tuple[int, int]) -> Array:
        """Return the points in pixels, float64 of shape (pixels, points, 2), in km.

        They are interpolated between the corners, with an error of about the side squared over eight radii of
        the Earth: 2 cm for 1 km.
        """
        if corner is None:
            return centre_km[:, None]
        down, across = ((np.arange(n) + 0.5) / n for n in parts)
        weight = [np.outer(a, b).ravel() for a in (1 - down, down) for b in (1 - across, across)]
        return np.asarray(np.einsum("nca,cp->npa", corner.reshape(-1, 4, 2), np.stack(weight)))


def _clipped(place: Array, size: int) -> tuple[int, int]:
    """Return the range of existing pixels around places, its end exclusive."""
    first, last = math.floor(place.min()) - _MARGIN, math.ceil(place.max()) + _MARGIN
    return max(first, 0), min(last, size)


def _with(windows: list[Window], new: Window) -> list[Window]:
    """Return windows with another one added; overlapping windows are merged."""
    apart = []
    for old in windows:
        if new[0] < old[1] and old[0] < new[1] and new[2] < old[3] and old[2] < new[3]:
            new = min(old[0], new[0]), max(old[1], new[1]), min(old[2], new[2]), max(old[3], new[3])
        else:
            apart.append(old)
    return [*apart, new] if len(apart) == len(windows) else _with(apart, new)


def _moved(transform: Any, x: NDArray[Any], y: NDArray[Any]) -> tuple[Array, Array]:
    """Apply an affine map; versions of its library differ in the operator for this."""
    a, b, c, d, e, f = transform[:6]
    return a * x + b * y + c, d * x + e * y + f
