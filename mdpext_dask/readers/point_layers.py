"""Points from GeoPackages, whose layers may be in any reference system."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mdpext_dask.errors import DataError
from mdpext_dask.readers.point_chunks import BY_NAME, WEIGHT, PointChunk, PointColumns, Wanted, check_numbers
from mdpext_dask.readers.reference_systems import to_degrees
from mdpext_dask.readers.tables import LONLAT, check_columns, find_column
from mdpext_dask.readers.vector_files import read_layers


def layer_pieces(
    path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Iterator[PointChunk]:
    """Yield the points of the one layer of a GeoPackage in one piece, in degrees.

    Raises
    ------
    DataError
        With file, feature (from 1) and what is wrong with it, or what else is wrong.
    SpecError
        If pyogrio is not installed.
    """
    import shapely

    columns.refuse(path)
    if not path.exists():
        raise DataError(f"{path}: no such file")
    layers = read_layers(path)
    if len(layers) != 1:
        found = ", ".join(layer.name for layer in layers) or "none"
        raise DataError(f"{path}: must have one layer, found {found}; leave the one with the points")
    layer = layers[0]
    if layer.crs is None:
        raise DataError(f"{path}: {layer.name}: has no coordinate reference system")
    other = shapely.get_type_id(layer.shapes) != shapely.GeometryType.POINT
    other |= shapely.is_empty(layer.shapes)
    if other.any():
        row = int(np.argmax(other))
        shape = layer.shapes[row]
        what = "missing" if shape is None or shape.is_empty else f"a {shape.geom_type}, not a Point"
        raise DataError(f"{path}: feature {row + 1}: its geometry is {what}")
    names = list(layer.fields)
    check_columns(names, extra, path)
    extra = (*extra, *columns.users_in(names))
    lonlat = to_degrees(shapely.get_coordinates(layer.shapes), layer.crs, str(path))
    values, called = dict(zip(LONLAT, lonlat.T, strict=True)), dict(zip(LONLAT, LONLAT, strict=True))
    if weights and (weight := find_column(names, WEIGHT, path)):
        column, called[WEIGHT] = layer.fields[weight], weight
        if column.dtype.kind not in "iuf":
            raise DataError(f"{path}: column {weight} holds {column.dtype}, not numbers")
        values[WEIGHT] = column.astype(np.float64)
    check_numbers(values, path, "feature", range(1, len(lonlat) + 1), called)
    text = {name: ["" if v is None else str(v) for v in layer.fields[name].tolist()] for name in extra}
    yield Wanted(called, tuple(extra)).chunk(values, text, 0)
