"""Polygons of GeoJSON files; errors name the feature, and what is wrong with it."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mdpext_dask.errors import DataError
from mdpext_dask.readers.json_files import read_json
from mdpext_dask.readers.longitudes import FULL_TURN, HALF_TURN

# A ring ends at its first position.
_LEAST_POSITIONS = 4
# The crs member of files older than RFC 7946 whose coordinates are degrees on WGS 84.
_DEGREES_CRS = ("CRS84", "4326")
# Objects that hold others, and their key.
_MEMBERS = {"FeatureCollection": "features", "GeometryCollection": "geometries"}


class FeaturePolygon(NamedTuple):
    """One polygon of a file.

    Parameters
    ----------
    shape
        Shapely's, in degrees.
    feature
        Number of its feature in the file, from 1.
    properties
        The properties of that feature, whatever they are.
    """

    shape: Any
    feature: int
    properties: Any


def read_geojson_polygons(path: Path, key: str) -> tuple[list[FeaturePolygon], int]:
    """Read all polygons of a GeoJSON file (RFC 7946), however deep they lie.

    Parameters
    ----------
    path
        The file.
    key
        Where the job names it, or the option.

    Returns
    -------
    polygons
        In the order of the file; without those that have no rings.
    skipped
        How many geometries of other kinds there are.

    Raises
    ------
    DataError
        If it cannot be read, its coordinates are not degrees on WGS 84, or a polygon is broken.
    """
    source = f"{key}: {path}"
    document = read_json(path, source)
    reader = _Reader(source)
    reader.check_crs(document)
    try:
        return list(reader.polygons(document)), reader.skipped
    except RecursionError:
        raise DataError(f"{source}: not a GeoJSON file: objects in objects without end") from None


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._feature: int | None = None
        self._properties: Any = None
        self.skipped = 0

    def _bad(self, complaint: str) -> DataError:
        where = "" if self._feature is None else f"feature {self._feature}: "
        return DataError(f"{self._source}: {where}{complaint}")

    def check_crs(self, document: Any) -> None:
        crs = document.get("crs") if isinstance(document, dict) else None
        if crs is not None and not any(name in json.dumps(crs) for name in _DEGREES_CRS):
            raise self._bad("has a crs of its own; coordinates must be degrees on WGS 84")

    def polygons(self, entry: Any) -> Iterator[FeaturePolygon]:
        """Yield every polygon under a GeoJSON object; those without rings are left out."""
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind is not None and not isinstance(kind, str):
            raise self._bad(f"not a GeoJSON file: a type must be a name, got {json.dumps(kind)[:40]}")
        if kind in _MEMBERS:
            for number, member in enumerate(self._list(entry, _MEMBERS[kind]), start=1):
                if kind == "FeatureCollection":
                    self._feature = number
                yield from self.polygons(member)
        elif kind == "Feature":
            self._properties = entry.get("properties")
            if entry.get("geometry") is not None:
                yield from self.polygons(entry["geometry"])
        elif kind in ("Polygon", "MultiPolygon"):
            listed = self._list(entry, "coordinates")
            for rings in listed if kind == "MultiPolygon" else [listed]:
                if rings:
                    yield FeaturePolygon(self._polygon(rings), self._feature or 1, self._properties)
        elif kind in ("Point", "MultiPoint", "LineString", "MultiLineString"):
            self.skipped += 1
        else:
            raise self._bad(f"not a GeoJSON file: an object has the type {kind!r}")

    def _polygon(self, rings: Any) -> Any:
        import shapely

        if not isinstance(rings, list):
            raise self._bad("the coordinates of a polygon must be a list of rings")
        shell, *holes = [self._ring(ring) for ring in rings]
        polygon = shapely.Polygon(shell, holes)
        if not shapely.is_valid(polygon):
            raise self._bad(f"a polygon is broken: {shapely.is_valid_reason(polygon)}")
        return polygon

    def _list(self, entry: dict[str, Any], key: str) -> list[Any]:
        value = entry.get(key)
        if not isinstance(value, list):
            raise self._bad(f"{entry['type']}: {key} must be a list")
        return value

    def _ring(self, ring: Any) -> list[tuple[float, float]]:
        if not isinstance(ring, list) or len(ring) < _LEAST_POSITIONS:
            raise self._bad(f"a ring must be a list of at least {_LEAST_POSITIONS} positions")
        places = [self._place(position) for position in ring]
        if places[0] != places[-1]:
            raise self._bad(
                f"a ring is not closed: it begins at {list(places[0])} and ends at {list(places[-1])}"
            )
        for (lon, _), (to, _) in pairwise(places):
            # Sides of a polygon all around the Earth may lie along the poles.
            if abs(to - lon) > HALF_TURN and abs(lon) + abs(to) < FULL_TURN:
                raise self._bad(
                    f"a side goes from longitude {lon:g} to {to:g}, more than half-way round the Earth; "
                    "polygons across the antimeridian must be cut there (RFC 7946, section 3.1.9)"
                )
        return places

    def _place(self, position: Any) -> tuple[float, float]:
        numbers = position[:2] if isinstance(position, list) else []
        if len(numbers) < 2 or not all(
            isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < math.inf for n in numbers
        ):
            raise self._bad(f"a position must be [lon, lat], got {json.dumps(position)[:40]}")
        lon, lat = map(float, numbers)
        if abs(lon) > 180 or abs(lat) > 90:
            raise self._bad(f"lon {lon:g}, lat {lat:g} is out of range; coordinates must be degrees")
        return lon, lat
