"""Districts: which records belong to which part of the city, and what people there lose and give away."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError, first_line
from mdpext_dask.evaluation.quantiles import weighted_quantiles
from mdpext_dask.evaluation.spread import SHARES
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import HALF_TURN
from mdpext_dask.readers.vector_files import on_ground, read_layers
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
OPTION = "--districts"
# Rectangles along a side, where nobody says which districts there are.
_RECTANGLES = 4
# Properties that a polygon's name is looked for in, in this order.
_NAMES = ("name", "NAME", "Name", "id", "ID")
# About a kilometre: see mdpext_dask.problem.region.
_PIECE_DEGREES = 0.01
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
    parts, counts = [], []
    for records, cells in zip(grid.shape, (grid.cells_x, grid.cells_y), strict=True):
        count = min(_RECTANGLES, cells)
        starts = np.array([part[0] for part in np.array_split(np.arange(cells), count)])
        cell = np.minimum(np.arange(records) // grid.factor, cells - 1)
        parts.append(np.searchsorted(starts, cell, side="right") - 1)
        counts.append(count)
    label = parts[0][:, None] * counts[1] + parts[1][None, :]
    names = tuple(
        f"column {a + 1} of {counts[0]}, row {b + 1} of {counts[1]}"
        for a in range(counts[0])
        for b in range(counts[1])
    )
    return Districts(names, label.astype(np.int32))


def read_districts(store: MechanismStore, path: Path) -> Districts:
    """Return the districts of a file of polygons: GeoJSON, or whatever GDAL reads.

    Their names are the property `name`, or `id`; else they are numbered from 1. Several polygons of one name
    are one district. A record in several, or on the side between two, belongs to the first in the file.

    Raises
    ------
    DataError
        If the file cannot be read, or has no polygons.
    SpecError
        If the store's plane is nowhere on Earth, so that degrees say nothing about it.
    """
    if store.projection is None:
        raise SpecError(f"{OPTION}: {path}: is in degrees, but the store has no place on Earth")
    polygons = _geojson(path) if path.suffix.lower() in _GEOJSON else _by_gdal(path)
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

    plane = shapely.transform(shapely.segmentize(polygon, _PIECE_DEGREES), projection.to_plane)
    if not np.isfinite(shapely.get_coordinates(plane)).all():
        raise DataError(f"{OPTION}: {path}: reaches too far around the Earth for one plane")
    shapely.prepare(plane)
    west, south, east, north = shapely.bounds(plane)
    x, y = grid.x_km(), grid.y_km()
    across = slice(*np.searchsorted(x, (west, np.nextafter(east, np.inf))))
    along = slice(*np.searchsorted(y, (south, np.nextafter(north, np.inf))))
    for i in range(across.start, across.stop):
        inside = shapely.intersects_xy(plane, np.full(along.stop - along.start, x[i]), y[along])
        column = label[i, along]
        column[inside & (column < 0)] = number


def _geojson(path: Path) -> list[tuple[str, Any]]:
    import shapely

    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        features = document["features"] if document["type"] == "FeatureCollection" else [document]
        found = []
        for number, feature in enumerate(features, 1):
            geometry = feature["geometry"] if feature["type"] == "Feature" else feature
            if geometry is None:
                continue
            shape = shapely.from_geojson(json.dumps(geometry))
            found.append((_name(feature.get("properties"), number), shape))
    except FileNotFoundError:
        raise DataError(f"{OPTION}: {path} does not exist") from None
    except OSError as error:
        raise DataError(f"{OPTION}: {path} cannot be read: {first_line(error)}") from None
    except (ValueError, RecursionError, shapely.errors.GEOSException) as error:
        raise DataError(f"{OPTION}: {path}: not a GeoJSON file: {first_line(error)}") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{OPTION}: {path}: not a GeoJSON file: features must have a geometry") from None
    return _checked(found, path)


def _by_gdal(path: Path) -> list[tuple[str, Any]]:
    """Return the polygons of the first layer with some, of a shapefile or a GeoPackage, in degrees."""
    import shapely

    if not path.exists():
        raise DataError(f"{OPTION}: {path} does not exist")
    for layer in read_layers(path, OPTION):
        flat = [number for number, shape in enumerate(layer.shapes) if shapely.get_dimensions(shape) == 2]
        if not flat:
            continue
        named = {key: values.tolist() for key, values in layer.fields.items()}
        found = []
        for number in flat:
            name = _name({key: values[number] for key, values in named.items()}, number + 1)
            parts = shapely.get_parts(layer.shapes[number])
            found += [
                (name, on_ground(part, layer, f"{OPTION}: {path}"))
                for part in parts[~shapely.is_empty(parts)]
            ]
        return found
    return []


def _name(properties: Any, number: int) -> str:
    found = properties if isinstance(properties, dict) else {}
    names = [str(found[key]) for key in _NAMES if found.get(key) not in (None, "")]
    return names[0] if names else str(number)


def _checked(found: list[tuple[str, Any]], path: Path) -> list[tuple[str, Any]]:
    """Return polygons alone, as they should be.

    Raises
    ------
    DataError
        If one is broken, or not in degrees.
    """
    import shapely

    polygons = []
    for name, shape in found:
        if shapely.get_dimensions(shape) != 2 or shapely.is_empty(shape):
            continue  # points and lines do not count
        if not shapely.is_valid(shape):
            raise DataError(
                f"{OPTION}: {path}: {name!r} is broken: {first_line(shapely.is_valid_reason(shape))}"
            )
        west, south, east, north = shapely.bounds(shape)
        if not (west >= -180 and east <= 180 and south >= -90 and north <= 90):
            raise DataError(f"{OPTION}: {path}: {name!r} is out of range; coordinates must be degrees")
        if any(_goes_round(ring) for part in shapely.get_parts(shape) for ring in shapely.get_rings(part)):
            raise DataError(
                f"{OPTION}: {path}: {name!r} has a side that goes more than half-way round the Earth; "
                "polygons across the antimeridian must be cut there (RFC 7946, section 3.1.9)"
            )
        polygons.append((name, shape))
    return polygons


def _goes_round(ring: Any) -> bool:
    import shapely

    return bool((np.abs(np.diff(shapely.get_coordinates(ring)[:, 0])) > HALF_TURN).any())


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
        shape, in km; not-a-number where π is 0.

    Returns
    -------
    For every district, and for what is in none if anybody is there: `name`, `records` with a prior,
    `probability`, and given that somebody is there: `loss_km`, `loss_quantiles_km`, `inference_error_km`;
    null where nobody is. Quantiles of 0 and 1 are those of the best and of the worst record.
    """
    used = np.isfinite(loss_km) & (prior > 0)
    label, weight = districts.label[used], prior[used]
    losses, errors = loss_km[used], error_km[used]
    order = np.argsort(label, kind="stable")
    ends = np.searchsorted(label[order], np.arange(-1, len(districts.names)), side="right")
    answers = []
    for number, name in [*enumerate(districts.names), (-1, ELSEWHERE)]:
        at = order[(ends[number] if number >= 0 else 0) : ends[number + 1]]
        if number < 0 and not len(at):
            continue
        mass = float(weight[at].sum())
        answer: dict[str, Any] = {"name": name, "records": len(at), "probability": mass}
        there = len(at) > 0
        answer["loss_km"] = float((weight[at] * losses[at]).sum() / mass) if there else None
        answer["loss_quantiles_km"] = weighted_quantiles(losses[at], weight[at], SHARES) if there else None
        answer["inference_error_km"] = float((weight[at] * errors[at]).sum() / mass) if there else None
        answers.append(answer)
    return answers
