"""Small exported cities made without a store, and copies of cities in which anything may be changed."""

import copy
import dataclasses
import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.auditors.certificate import certify_cells
from mdpext_dask.problem.grid import Grid, coarse_radius_km
from mdpext_dask.problem.projection import Projection
from mdpext_dask.runtime import city_header, city_layout
from mdpext_dask.runtime.geodesic import PlaneFit
from mdpext_dask.seed.budget import planar_epsilon

# Changes the header and the sections of a city.
Change = Callable[[dict[str, Any], list[bytes]], object]
# What stands in a header for text that is no JSON value of Python's.
RAW = "raw JSON: "
# What may stand in a header in the place of anything.
WORTHLESS: list[Any] = [
    None, True, False, "", "x", "\x1b[31m", [], {}, [[]], 0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, -1e308,
    2**31, 2**62, -(2**63), 2**64, 10**400, float("nan"), float("inf"), float("-inf"), "inf", "0" * 64,
    10**8, 10**6, 89.9999, 180, RAW + "[",
]  # fmt: skip
GRID = Grid(-3.0, -2.0, 3, 2, 2.0, (2,))
PLANE = Projection(-73.97, 40.78, 12.0)


def write_city(path: Path, packing: str = city_header.SEED, *, steep: float = 0.4) -> Path:
    """Write a city of ε = 1/km whose seed's log scores fall by `steep` per km from four outputs."""
    xy = np.array([[-2.0, -1.0], [0.5, 1.0], [2.5, 1.5], [2.0, -1.5]])
    away = np.hypot(*(GRID.seeds_xy_km()[:, None] - xy).transpose(2, 0, 1)).reshape(*GRID.seeds_shape, 4)
    scores = -steep * away - np.log(np.exp(-steep * away).sum(axis=-1, keepdims=True))
    tiles = city_layout.Tiles(GRID, (2, 1))
    rows = [tiles.extended(scores, tile) for tile in range(len(tiles))]
    whole = city_layout.Tiles(GRID, (3, 2)).extended(scores, 0)
    seed = packing == city_header.SEED
    sections = [city_layout.pack_table(scores)] if seed else [city_layout.pack_rows(part) for part in rows]
    distortion, lonlat = PLANE.distortion(GRID.box.radius_km), PLANE.to_degrees(xy)
    header = {
        "epsilon_per_km": 1.0, "epsilon_planar_per_km": planar_epsilon(1.0, distortion),
        "epsilon_certified": min(certify_cells(whole, GRID.x_km(), GRID.y_km(), 2.0).epsilon, 1.0),
        "distortion": distortion, "metric_p": 2.0,
        "quantisation_km": coarse_radius_km(1, GRID.spacing_km, 2.0), "attribution": "nobody",
        "content_sha256": "0" * 64, "certificate_sha256": "1" * 64, "grid": dataclasses.asdict(GRID),
        "kept": "b4", "projection": dataclasses.asdict(PLANE), "plane_fit": dataclasses.asdict(_fit()),
        "outputs": dict(zip(("lon", "lat", "x", "y"), [*lonlat.T.tolist(), *xy.T.tolist()], strict=True)),
        "remap": [0, 1, 1, 3], "packing": packing, "tile_cells": [2, 1],
        "sections": [[len(part), hashlib.sha256(part).hexdigest()] for part in sections],
        "rows_sha256": [city_layout.rows_sha256(part) for part in rows],
    }  # fmt: skip
    path.write_bytes(city_layout.encode(header) + b"".join(sections))
    return path


def _fit() -> PlaneFit:
    unturned = dataclasses.replace(PLANE, rotation_deg=0.0)

    def plane(east: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = unturned.to_plane(np.stack([PLANE.centre_lon + east, lat], axis=-1)).T
        return x, y

    fit = PlaneFit.of(plane, 0.06, PLANE.centre_lat, 0.05)
    assert fit is not None
    return fit


def taken_apart(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Return the header and the sections of a city."""
    content = path.read_bytes()
    start = 48 + int.from_bytes(content[12:16], "little")
    header, sections = json.loads(content[48:start]), []
    for size, _ in header["sections"]:
        sections.append(content[start : start + size])
        start += size
    return header, sections


def rewritten(path: Path, target: Path, change: Change) -> Path:
    """Write another file whose digests are right."""
    header, sections = taken_apart(path)
    before = list(sections)
    change(header, sections)
    if sections != before:
        header["sections"] = [[len(part), hashlib.sha256(part).hexdigest()] for part in sections]
    text = json.dumps(header)
    while RAW in text:
        first, _, rest = text.partition(f'"{RAW}')
        raw, _, last = rest.partition('"')
        text = first + raw * 100_000 + last
    target.write_bytes(with_header(text.encode()) + b"".join(sections))
    return target


def with_header(content: bytes) -> bytes:
    """Return the bytes before the sections, for a header of these bytes."""
    prefix = struct.pack("<8sII", city_layout.MAGIC, city_layout.VERSION, len(content))
    return prefix + hashlib.sha256(prefix + content).digest() + content


def put(*keys: Any, value: object) -> Change:
    """Return a change of an entry of the header."""

    def change(header: Any, _: list[bytes]) -> None:
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the containers of a document with the keys of all that they hold."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places_in(inner)


def spoil(header: dict[str, Any], sections: list[bytes], rng: random.Random) -> None:
    """Change a header, its sections, or both in one of many ways."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(list(places_in(header)))
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        elif kind == 2:
            holder[key] = copy.deepcopy(rng.choice(list(places_in(header)))[0])
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice((0, 2, 1000))
        elif kind == 4 and isinstance(holder[key], int | float):
            holder[key] *= rng.choice((-1, 0, 2, 1000, 1e9, 1e-9, 10**30))
        elif kind == 5 and rng.random() < 0.3:
            sections[:] = [rng.randbytes(rng.randrange(1, 99)) for _ in sections]
        else:
            holder[key] = copy.deepcopy(rng.choice(WORTHLESS))
