"""Districts: which records belong to which part of the city, and what people there lose and give away."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.evaluation.quantiles import weighted_quantiles
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import in_plane
from mdpext_dask.readers.polygon_geojson import read_geojson_polygons
from mdpext_dask.readers.vector_files import on_ground, read_layers
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
OPTION = "--districts"
# Rectangles along a side, without a file of districts.
_RECTANGLES = 4
# Properties that a polygon's name is looked for in, in this order.
_NAMES = ("name", "NAME", "Name", "id", "ID")
_GEOJSON = (".geojson", ".json")
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Districts:
    """Parts of the city.

    Parameters
    ----------
    names
        What they are called.
    label
        Which one every record belongs to, int32 of the grid's shape; -1 for none.
    """

    names: tuple[str, ...]
    label: NDArray[np.int32]


def rectangles(grid: Grid) -> Districts:
    """Return up to four by four rectangles of whole source cells, named from the south-west.

    A record on a side between two belongs to the one to its upper right, as records do to source cells.
    """
    parts = []
    for records, cells in zip(grid.shape, (grid.cells_x, grid.cells_y), strict=True):
        starts = [part[0] for part in np.array_split(np.arange(cells), min(_RECTANGLES, cells))]
        cell = np.minimum(np.arange(records) // grid.factor, cells - 1)
        parts.append(np.searchsorted(starts, cell, side="right") - 1)
    across, along = (int(part[-1]) + 1 for part in parts)
    label = parts[0][:, None] * along + parts[1]
    places = np.ndindex(across, along)
    names = tuple(f"column {a + 1} of {across}, row {b + 1} of {along}" for a, b in places)
    return Districts(names, label.astype(np.int32))


def read_districts(store: MechanismStore, path: Path, name: str | None = None) -> Districts:
    """Return the districts of a file of polygons: GeoJSON, or whatever GDAL reads.

    Their names are the property `name`, or `id`, or the one that is asked for; else they are numbered from
    1. Several polygons of one name are one district. A record in several, or on the side between two, belongs
    to the first in the file.

    Parameters
    ----------
    name
        The property, or column, with their names, which all of them must have then.

    Raises
    ------
    DataError
        If the file cannot be read, or has no polygons.
    SpecError
        If the store's plane is nowhere on Earth, so that degrees say nothing about it.
    """
    if store.projection is None:
        raise SpecError(f"{OPTION}: {path}: is in degrees, but the store has no place on Earth")
    keys = _NAMES if name is None else (name,)
    polygons = (_geojson if path.suffix.lower() in _GEOJSON else _by_gdal)(path, keys)
    if not polygons:
        raise DataError(f"{OPTION}: {path}: holds no polygons")
    names = tuple(dict.fromkeys(name for name, _ in polygons))
    label = np.full(store.grid.shape, -1, dtype=np.int32)
    for name, polygon in polygons:
        _paint(label, names.index(name), polygon, store.grid, store.projection, path)
    return Districts(names, label)


def _paint(
    label: NDArray[np.int32], number: int, polygon: Any, grid: Grid, projection: Projection, path: Path
) -> None:
    """Give a polygon the records in it that have no district yet."""
    import shapely

    plane = in_plane(polygon, projection, f"{OPTION}: {path}")
    shapely.prepare(plane)
    west, south, east, north = shapely.bounds(plane)
    x, y = grid.x_km(), grid.y_km()
    across = slice(*np.searchsorted(x, (west, np.nextafter(east, np.inf))))
    along = slice(*np.searchsorted(y, (south, np.nextafter(north, np.inf))))
    for i in range(across.start, across.stop):
        inside = shapely.intersects_xy(plane, np.full(along.stop - along.start, x[i]), y[along])
        column = label[i, along]
        column[inside & (column < 0)] = number


def _geojson(path: Path, keys: tuple[str, ...]) -> list[tuple[str, Any]]:
    found, _ = read_geojson_polygons(path, OPTION)
    return [(_name(one.properties, one.feature, keys, path), one.shape) for one in found]


def _by_gdal(path: Path, keys: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the polygons of the first layer with some, of a shapefile or a GeoPackage, in degrees."""
    import shapely

    if not path.exists():
        raise DataError(f"{OPTION}: {path} does not exist")
    for layer in read_layers(path, OPTION):
        flat = [number for number, shape in enumerate(layer.shapes) if shapely.get_dimensions(shape) == 2]
        named, found = {key: values.tolist() for key, values in layer.fields.items()}, []
        for number in flat:
            name = _name({key: values[number] for key, values in named.items()}, number + 1, keys, path)
            parts = shapely.get_parts(layer.shapes[number])
            source = f"{OPTION}: {path}"
            found += [(name, on_ground(part, layer, source)) for part in parts[~shapely.is_empty(parts)]]
        if flat:
            return found
    return []


def _name(properties: Any, number: int, keys: tuple[str, ...], path: Path) -> str:
    """Return the name of a feature: its number if it has none, unless the user has said where it is.

    Raises
    ------
    DataError
        If it is not there.
    """
    found = properties if isinstance(properties, dict) else {}
    names = [str(found[key]) for key in keys if found.get(key) not in (None, "")]
    if not names and keys is not _NAMES:
        there = ", ".join(found) or "none"
        raise DataError(
            f"{OPTION}: {path}: feature {number}: the property {keys[0]} is missing or empty; found {there}"
        )
    return names[0] if names else str(number)


def by_district(districts: Districts, prior: Array, loss_km: Array, error_km: Array) -> list[dict[str, Any]]:
    """Return what people in every district lose, and how far off the informed attacker is with them.

    Parameters
    ----------
    districts
        Which record belongs where.
    prior
        π, float64 of the grid's shape.
    loss_km, error_km
        Expected loss of every record, and expected distance to the attacker's guess, float64 of the same
        shape, in km; NaN where π is 0.

    Returns
    -------
    For every district, and for the records in none if they have a prior: `name`, `records` with a prior,
    `probability`, and conditional on it `loss_km`, `loss_quantiles_km` and `inference_error_km`, null where
    the probability is 0. Quantiles of 0 and 1 are those of the best and of the worst record.
    """
    used = np.isfinite(loss_km) & (prior > 0)
    label, weight = districts.label[used], prior[used]
    losses, errors = loss_km[used], error_km[used]
    order = np.argsort(label, kind="stable")
    ends = np.searchsorted(label[order], np.arange(-1, len(districts.names)), side="right")
    answers = []
    for number, name in [*enumerate(districts.names), (-1, ELSEWHERE)]:
        at = order[(ends[number] if number >= 0 else 0) : ends[number + 1]]
        mass = float(weight[at].sum())
        known: dict[str, Any] = dict.fromkeys(("loss_km", "loss_quantiles_km", "inference_error_km"))
        if len(at):
            known = {
                "loss_km": float((weight[at] * losses[at]).sum() / mass),
                "loss_quantiles_km": weighted_quantiles(losses[at], weight[at]),
                "inference_error_km": float((weight[at] * errors[at]).sum() / mass),
            }
        if len(at) or number >= 0:
            answers.append({"name": name, "records": len(at), "probability": mass, **known})
    return answers
