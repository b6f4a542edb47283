"""Polygons of shapefiles and GeoPackages, in whatever reference system, in degrees on WGS 84."""

from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import FULL_TURN
from mdpext_dask.readers.reference_systems import metres_per_unit, to_degrees
from mdpext_dask.readers.vector_layers import Layer, layer_names, read_layer

# A shapefile is several files, which a .zip keeps together.
SUFFIXES = (".shp", ".zip", ".gpkg")
_KEY = "domain.region"
# Sides are straight in their own system: over a kilometre that and straight in degrees differ by centimetres.
_PIECE_M = 1000.0
_POLYGON, _MULTIPOLYGON = 3, 6


def read_polygons(path: Path) -> tuple[list[Any], int]:
    """Read the polygons of the one layer that has some.

    Parameters
    ----------
    path
        A shapefile, also in a .zip, or a GeoPackage.

    Returns
    -------
    polygons
        Shapely's, in degrees, west in [-180, 180]; of one across the antimeridian longitudes exceed 180.
    skipped
        How many geometries of other kinds there are.

    Raises
    ------
    DataError
        If it cannot be read, does not say what its coordinates are, several layers hold polygons, or one is
        broken.
    SpecError
        If pyogrio is not installed.
    """
    import shapely

    if not path.is_file():
        raise DataError(f"{_KEY}: {path} does not exist")
    layers = [read_layer(path, name, _KEY) for name in layer_names(path, _KEY)]
    kinds = [shapely.get_type_id(layer.shapes) for layer in layers]
    areas = [np.isin(kind, (_POLYGON, _MULTIPOLYGON)) for kind in kinds]
    holding = [number for number, area in enumerate(areas) if area.any()]
    if len(holding) > 1:
        raise DataError(
            f"{_KEY}: {path}: several layers hold polygons: "
            f"{', '.join(layers[number].name for number in holding)}; leave one"
        )
    skipped = sum(int(np.sum((kind >= 0) & ~area)) for kind, area in zip(kinds, areas, strict=True))
    if not holding:
        return [], skipped
    layer, area = layers[holding[0]], areas[holding[0]]
    parts = shapely.get_parts(layer.shapes[area])
    return [on_ground(part, layer, f"{_KEY}: {path}") for part in parts[~shapely.is_empty(parts)]], skipped


def on_ground(polygon: Any, layer: Layer, source: str) -> Any:
    """Return a polygon of a layer in degrees; `source` is named where it cannot be.

    Raises
    ------
    DataError
        If the layer does not say what its coordinates are, or the polygon is broken, not on the Earth or
        around a pole, where there is no polygon in degrees.
    """
    import shapely

    if layer.crs is None:
        raise DataError(
            f"{source}: does not say what its coordinates are: it has no coordinate reference system "
            "(of a shapefile, that is the .prj beside it)"
        )
    if not shapely.is_valid(polygon):
        raise DataError(f"{source}: a polygon is broken: {shapely.is_valid_reason(polygon)}")
    unit_m = metres_per_unit(layer.crs, source)
    if unit_m is not None:
        polygon = shapely.segmentize(polygon, _PIECE_M / unit_m)
    shell, *holes = (
        to_degrees(shapely.get_coordinates(ring), layer.crs, source)
        for ring in (polygon.exterior, *polygon.interiors)
    )
    lonlat = np.concatenate([shell, *holes])
    if not (np.isfinite(lonlat).all() and np.all(np.abs(lonlat) <= (FULL_TURN, FULL_TURN / 4))):
        raise DataError(f"{source}: a polygon is not on the Earth in {layer.crs.splitlines()[0][:40]}")
    if unit_m is not None:
        # Longitudes jump where a ring crosses the antimeridian; it is the sides that are short.
        shell[:, 0] = np.unwrap(shell[:, 0], period=FULL_TURN)
        if abs(shell[-1, 0] - shell[0, 0]) > FULL_TURN / 2:
            raise DataError(f"{source}: a polygon goes around a pole, which polygons in degrees cannot")
        for hole in holes:
            hole[:, 0] = np.unwrap(np.append(shell[:1, 0], hole[:, 0]), period=FULL_TURN)[1:]
    turns = np.floor((min(shell[:, 0]) + FULL_TURN / 2) / FULL_TURN) * FULL_TURN
    moved = [ring - (turns, 0.0) for ring in (shell, *holes)] if turns else [shell, *holes]
    return shapely.Polygon(moved[0], moved[1:])
