"""Layers of GeoPackages, shapefiles and what else GDAL reads, by pyogrio."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.optional_libraries import import_osm


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
        What reference system they are in; None where the file does not say.
    fields
        Its columns by name, each of shape (n,).
    """

    name: str
    shapes: NDArray[np.object_]
    crs: str | None
    fields: dict[str, NDArray[Any]]


def layer_names(path: Path, key: str) -> list[str]:
    """Return the names of a file's layers.

    Raises
    ------
    DataError
        If it cannot be read; `key` says where the job names it.
    SpecError
        If pyogrio is not installed.
    """
    pyogrio = import_osm("pyogrio", f"{key}: {path}")
    try:
        with _quiet():
            return [str(name) for name, _ in pyogrio.list_layers(path)]
    except _errors(pyogrio) as error:
        raise DataError(f"{key}: {path}: cannot be read: {first_line(error)}") from None


def read_layer(path: Path, name: str, key: str) -> Layer:
    """Read one layer of a file.

    Raises
    ------
    DataError
        If it cannot be read; `key` says where the job names it.
    SpecError
        If pyogrio is not installed.
    """
    import shapely

    pyogrio = import_osm("pyogrio", f"{key}: {path}")
    try:
        with _quiet():
            meta, _, geometry, fields = pyogrio.raw.read(path, layer=name, force_2d=True)
        shapes = np.full(len(fields[0]) if fields else 0, None) if geometry is None else geometry
        shapes = np.asarray(shapely.from_wkb(shapes), dtype=object)
    except (*_errors(pyogrio), shapely.errors.ShapelyError) as error:
        raise DataError(f"{key}: {path}: {name}: cannot be read: {first_line(error)}") from None
    crs = meta["crs"]
    columns = dict(zip(map(str, meta["fields"]), fields, strict=True))
    return Layer(name, shapes, None if crs is None else str(crs), columns)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what GDAL thinks of a file's details from the screen; what matters is refused in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _errors(pyogrio: Any) -> tuple[type[Exception], ...]:
    return (pyogrio.errors.DataSourceError, pyogrio.errors.DataLayerError, OSError, ValueError, RuntimeError)
