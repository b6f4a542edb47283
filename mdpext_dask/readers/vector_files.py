"""Layers and polygons of shapefiles, GeoPackages and what else GDAL reads, by pyogrio."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.longitudes import FULL_TURN
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.reference_systems import metres_per_unit, to_degrees
from mdpext_dask.readers.tables import not_utf8

# Regions: a shapefile is several files, which a .zip keeps together.
POLYGON_SUFFIXES = (".shp", ".zip", ".gpkg")
_REGION = "domain.region"
# Sides are straight in their own system: over a kilometre that and straight in degrees differ by centimetres.
_PIECE_M = 1000.0
_POLYGON, _MULTIPOLYGON = 3, 6


@dataclass(frozen=True)
class Layer:
    """One layer of a file.

    Parameters
    ----------
    name
        What it is called.
    shapes
        Its geometries, Shapely's, in two dimensions, object of shape (n,); None where a row has none.
    crs
        Their reference system; None where the file does not name it.
    fields
        Its columns by name, each of shape (n,).
    """

    name: str
    shapes: NDArray[np.object_]
    crs: str | None
    fields: dict[str, NDArray[Any]]


def read_layers(path: Path, key: str | None = None, fields: Sequence[str] | None = None) -> list[Layer]:
    """Read all layers of a file.

    Parameters
    ----------
    path
        The file.
    key
        Where the job names it, or the option.
    fields
        Columns to read, where they are there; default: all.

    Raises
    ------
    DataError
        If it cannot be read.
    SpecError
        If pyogrio is not installed.
    """
    import shapely

    source = str(path) if key is None else f"{key}: {path}"
    pyogrio = import_optional("pyogrio", source)
    layers = []
    try:
        with warnings.catch_warnings(action="ignore"):  # GDAL warns of details; what matters is refused below
            for name, _ in pyogrio.list_layers(path):
                meta, _, geometry, data = pyogrio.raw.read(path, layer=name, force_2d=True, columns=fields)
                shapes = np.full(len(data[0]) if data else 0, None) if geometry is None else geometry
                shapes = np.asarray(shapely.from_wkb(shapes), dtype=object)
                columns = dict(zip(map(str, meta["fields"]), data, strict=True))
                crs = None if meta["crs"] is None else str(meta["crs"])
                layers.append(Layer(str(name), shapes, crs, columns))
    except UnicodeDecodeError as error:
        raise not_utf8(f"{source}: its table of properties", error) from None
    except NameError:  # pyogrio's own, of a reference system that GDAL cannot write down
        raise DataError(f"{source}: its coordinate reference system is damaged") from None
    except (RuntimeError, OSError, ValueError, shapely.errors.ShapelyError) as error:
        raise DataError(f"{source}: cannot be read: {first_line(error)}") from None
    return layers


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

    source = f"{_REGION}: {path}"
    if not path.is_file():
        raise DataError(f"{source} does not exist")
    holding, skipped = [], 0
    for layer in read_layers(path, _REGION, ()):
        kind = shapely.get_type_id(layer.shapes)
        area = np.isin(kind, (_POLYGON, _MULTIPOLYGON))
        skipped += int(np.sum((kind >= 0) & ~area))
        if area.any():
            holding.append((layer, shapely.get_parts(layer.shapes[area])))
    if len(holding) > 1:
        names = ", ".join(layer.name for layer, _ in holding)
        raise DataError(f"{source}: several layers hold polygons: {names}; leave one")
    return [
        on_ground(part, layer, source) for layer, parts in holding for part in parts[~shapely.is_empty(parts)]
    ], skipped


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
