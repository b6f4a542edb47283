"""A region: polygons of a file or of a place, and the source cells that meet them.

A region selects the records that are kept. It does not change what is certified: the seed program and the
certificate cover the whole rectangle around it, which is convex (PROOF.md, section 2).

Sides of polygons are straight in longitude and latitude, as in GeoJSON (RFC 7946); they are cut into short
pieces before they are projected, so that they are at the right place in the plane. RFC 7946 (section 3.1.9)
requires polygons to be cut at the antimeridian; their parts are joined here, with longitudes beyond 180.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.sections import PLACE, PLACE_PREFIX
from mdpext_dask.job.spec import BUILTIN_PREFIX
from mdpext_dask.problem.grid import Box, Grid
from mdpext_dask.problem.projection import LARGEST_RADIUS_KM, Projection
from mdpext_dask.readers.longitudes import FULL_TURN, HALF_TURN, Degrees, arc, east_of
from mdpext_dask.readers.polygon_geojson import read_geojson_polygons
from mdpext_dask.readers.roads.downloads import outline_of_place
from mdpext_dask.readers.vector_files import POLYGON_SUFFIXES, read_polygons

# About a kilometre: a straight piece in degrees and one in the plane then differ by centimetres.
_PIECE_DEGREES = 0.01
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Region:
    """One or more polygons, with or without holes.

    Parameters
    ----------
    path
        The file they come from, or the place.
    shape
        The polygons, as one Shapely geometry in degrees; across the antimeridian longitudes exceed 180.
    notes
        What a user should know.
    """

    path: str
    shape: Any
    notes: tuple[str, ...]

    @property
    def box_degrees(self) -> Degrees:
        """West, south, east, north of the region, in degrees; west > east across the antimeridian."""
        west, south, east, north = map(float, self.shape.bounds)
        return west, south, east - FULL_TURN if east > HALF_TURN else east, north

    def within(self, box: Degrees) -> "Region":
        """Return the part of the region in a box: west, south, east, north in degrees.

        Raises
        ------
        DataError
            If there is none.
        """
        import shapely

        west, south, east, north = box
        east = east_of(west, east)
        # Longitudes of one or both may exceed 180 degrees.
        turns = [shapely.box(west + turn, south, east + turn, north) for turn in (0.0, FULL_TURN, -FULL_TURN)]
        reached = [turn for turn in turns if shapely.box(*self.shape.bounds).intersects(turn)] or turns[:1]
        part = shapely.intersection(self.shape, shapely.union_all(reached) if reached[1:] else reached[0])
        if reached[1:]:
            parts = shapely.get_parts(part)
            part = _joined([polygon for polygon in parts if polygon.area > 0])
        if part.area == 0:
            raise DataError(
                f"domain.region: {self.path}: lies outside domain.bbox {list(box)}; the region spans "
                f"{rounded(self.box_degrees)}"
            )
        left_out = 1 - part.area / self.shape.area
        notes = (f"{left_out:.1%} of the region lies outside domain.bbox",) if left_out > _ROUNDING else ()
        return replace(self, shape=part, notes=self.notes + notes)

    def outline_km(self, projection: Projection) -> NDArray[np.float64]:
        """Return places along the region's border in the plane, float64 of shape (n, 2), in km.

        Raises
        ------
        DataError
            If there is no plane for the whole of it.
        """
        import shapely

        return np.asarray(shapely.get_coordinates(self._in_plane(projection)), dtype=np.float64)

    def box_km(self, projection: Projection) -> Box:
        """Return the box around the region in the plane.

        Raises
        ------
        DataError
            If the region is too large for one plane.
        """
        box = Box.around(self.outline_km(projection))
        if box.radius_km > LARGEST_RADIUS_KM:
            raise DataError(
                f"domain.region: {self.path}: is too large for one plane: its box reaches "
                f"{box.radius_km:.0f} km from its centre, {LARGEST_RADIUS_KM:.0f} km is the most"
            )
        return box

    def cells(self, grid: Grid, projection: Projection) -> NDArray[np.bool_]:
        """Return which source cells meet the region, even in a single point of their sides.

        Returns
        -------
        bool of shape (cells_x, cells_y).
        """
        import shapely

        shape = self._in_plane(projection)
        shapely.prepare(shape)
        x = grid.west_km + np.arange(grid.cells_x + 1) * grid.cell_km
        y = grid.south_km + np.arange(grid.cells_y + 1) * grid.cell_km
        kept = np.zeros((grid.cells_x, grid.cells_y), dtype=bool)
        # A quadtree: squares of cells are split where the border passes, so most cells are not tested alone.
        side = 1 << (max(kept.shape) - 1).bit_length()
        west, south = np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
        while side:
            east, north = np.minimum(west + side, grid.cells_x), np.minimum(south + side, grid.cells_y)
            squares = shapely.box(x[west], y[south], x[east], y[north])
            meets = shapely.intersects(shape, squares)
            whole = shapely.covers(shape, squares) | (side == 1)
            for a, b, c, d in zip(*(v[meets & whole] for v in (west, south, east, north)), strict=True):
                kept[a:c, b:d] = True
            side //= 2
            halves = [(a, b) for a in (0, side) for b in (0, side)]
            west, south = (
                np.concatenate([v[meets & ~whole] + half[axis] for half in halves])
                for axis, v in enumerate((west, south))
            )
            there = (west < grid.cells_x) & (south < grid.cells_y)
            west, south = west[there], south[there]
        return kept

    def _in_plane(self, projection: Projection) -> Any:
        return in_plane(self.shape, projection, f"domain.region: {self.path}")


def in_plane(shape: Any, projection: Projection, source: str) -> Any:
    """Return a geometry in degrees as one in the plane, in km; `source` is named where there is none.

    Raises
    ------
    DataError
        If a part of it lies where the plane does not reach.
    """
    import shapely

    plane = shapely.transform(shapely.segmentize(shape, _PIECE_DEGREES), projection.to_plane)
    if not np.isfinite(shapely.get_coordinates(plane)).all():
        raise DataError(f"{source}: reaches too far around the Earth for one plane")
    return plane


def rounded(degrees: Degrees) -> list[float]:
    """Return a box in degrees for a message."""
    return [round(d, 4) for d in degrees]


def read_region(name: str, place: str | None = None) -> Region:
    """Read polygons from a GeoJSON file, a shapefile or a GeoPackage; points and lines do not count.

    Parameters
    ----------
    name
        Path of the file; ``"place"`` for the outline of `place`, ``"place:NAME"`` for that of another one.
    place
        The job's place, if it has one.

    Raises
    ------
    DataError
        If it cannot be read, holds no polygon, or one that is broken.
    SpecError
        If it needs an extra that is not installed.
    """
    if name.startswith(BUILTIN_PREFIX):
        raise DataError(f"domain.region: {name}: there are no built-in regions; give a path")
    path = Path(name)
    if (of := outlined(name, place)) is not None:
        path, name = outline_of_place(of, "domain.region"), of
    elif name.lower().endswith(POLYGON_SUFFIXES):
        polygons, skipped = read_polygons(path)
        return _region(name, polygons, skipped)
    found, skipped = read_geojson_polygons(path, "domain.region")
    return _region(name, [polygon.shape for polygon in found], skipped)


def outlined(name: str | None, place: str | None) -> str | None:
    """Return the place whose outline a region is; None of a file, and without a region."""
    if name == PLACE:
        return place
    return name.removeprefix(PLACE_PREFIX) if name is not None and name.startswith(PLACE_PREFIX) else None


def _region(name: str, polygons: list[Any], skipped: int) -> Region:
    if not polygons:
        raise DataError(f"domain.region: {name}: holds no polygons")
    notes = (f"{name}: points and lines do not count; {skipped} left out",) if skipped else ()
    return Region(name, _joined(polygons), notes)


def _joined(polygons: list[Any]) -> Any:
    """Return the union of polygons in degrees; beyond the antimeridian, 360 is added to their longitudes."""
    import shapely

    if polygons:
        bounds = shapely.bounds(polygons)
        west, east = arc(bounds[:, 0], bounds[:, 2])
        if west > east:
            turn = np.array([FULL_TURN, 0.0])
            beyond = bounds[:, 0] < west
            polygons = [
                shapely.transform(polygon, lambda lonlat: lonlat + turn) if over else polygon
                for polygon, over in zip(polygons, beyond, strict=True)
            ]
    return shapely.union_all(polygons)
