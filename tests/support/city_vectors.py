"""Test vectors of the city file: small cities, and what any reader must make of them.

    python -m tests.support.city_vectors tests/runtime/vectors

writes them. Nothing here is drawn, fitted or taken from a library of mathematics, so that they are the same
bytes on every machine: places and outputs are on simple patterns, exponentials and logarithms are our own.
Compressed bytes depend on the version of zlib; what is in them does not.
"""

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.noise import Kernel, NoiseLattice, NoiseTables
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.problem.grid import Grid, coarse_radius_km
from mdpext_dask.runtime import City, city_layout, open_city
from mdpext_dask.runtime.random_bits import Words, words_of
from mdpext_dask.runtime.signatures import CITY, SigningKey
from mdpext_dask.runtime.sticky import StickyKey

VECTORS = "vectors.json"
SIGNING_KEY = SigningKey(bytes(range(32)))
STICKY_KEY = StickyKey(bytes(range(100, 132)), "2026 é")
USERS = "anna", "Ännchen von Tharau", "7" * 100
# Of a box of 0.1 by 0.08 degrees around the centre.
_FIT = {
    "half_lon": 0.1, "middle_lat": 40.78, "half_lat": 0.08,
    "x": [[8.441431556, -1.828334626e-06], [-0.01012748748, -7.664323352e-10],
          [-5.534981935e-06, 3.846777493e-12], [-6.107341625e-11, 6.659779408e-13]],
    "y": [[-1.820915097e-11, 0.004811501521], [8.88397263, -3.176360055e-06],
          [6.178157444e-05, -6.263345924e-09], [9.010939388e-09, -1.571598096e-12]],
}  # fmt: skip

Header = dict[str, Any]


def outputs_on(grid: Grid, number: int, *, planar: bool) -> dict[str, Any]:
    """Return outputs on a pattern over a grid, and somewhat beyond; degrees only roughly where they are."""
    k = np.arange(number)
    x = grid.west_km - 0.5 + (k * 37 % number) * ((grid.box.width_km + 1.0) / number)
    y = grid.south_km - 0.5 + (k * 11 % 16) * ((grid.box.height_km + 1.0) / 16)
    nowhere = [None] * number
    return {
        "lon": nowhere if planar else [round(-73.97 + v / 84.4, 6) for v in x.tolist()],
        "lat": nowhere if planar else [round(40.78 + v / 111.0, 6) for v in y.tolist()],
        "x": x.tolist(), "y": y.tolist(),
    }  # fmt: skip


def header_of(grid: Grid, outputs: dict[str, Any], **more: Any) -> Header:
    planar = outputs["lon"][0] is None
    metric_p = float(more.get("metric_p", 2.0))
    return {
        "epsilon_per_km": 1.0, "epsilon_certified": 0.96875, "metric_p": metric_p, "distortion": 1.25e-6,
        "quantisation_km": coarse_radius_km(1, grid.spacing_km, metric_p), "title": "Test vector, Zürich 🗺",
        "attribution": "nobody", "content_sha256": "0" * 64, "grid": dataclasses.asdict(grid), "kept": None,
        "projection": None if planar else {"centre_lon": -73.97, "centre_lat": 40.78}, "plane_fit": None,
        "outputs": outputs, "remap": None,
    } | more  # fmt: skip


def scores_at(at: NDArray[np.float64], outputs: dict[str, Any], steep: float) -> NDArray[np.float64]:
    """Return log probabilities that fall with the distance: float64 of shape (..., K)."""
    dx = at[..., :1] - np.array(outputs["x"])
    dy = at[..., 1:] - np.array(outputs["y"])
    score = -steep * np.sqrt(dx * dx + dy * dy)
    return np.asarray(score - logarithm(exponential(score).sum(axis=-1, keepdims=True)))


def _seed_city(*, signed: bool) -> bytes:
    """Return a city whose rows follow from its seed: turned, remapped, with a region."""
    grid = Grid(-3.0, -2.0, 3, 2, 2.0, (2, 2))
    outputs = outputs_on(grid, 137, planar=False)
    scores = scores_at(grid.seeds_xy_km(), outputs, 0.4).reshape(*grid.seeds_shape, 137)
    tiles = city_layout.Tiles(grid, (2, 1))
    header = header_of(
        grid,
        outputs,
        kept="b4",
        remap=[k // 3 * 3 for k in range(137)],
        projection={"centre_lon": -73.97, "centre_lat": 40.78, "rotation_deg": 12.5},
        plane_fit=_FIT,
    )
    rows = [tiles.extended(scores, tile) for tile in range(len(tiles))]
    return file_of(header, "seed", (2, 1), rows, [city_layout.pack_table(scores)], signed=signed)


def _noise_city(per_cell: int, per_record: int) -> bytes:
    """Return a city whose rows follow from tables of noise, most outputs of which are far from a record."""
    grid = Grid(-2.0, -1.0, 4, 3, 1.0, (3,))
    outputs = outputs_on(grid, 40, planar=False)
    lattice = NoiseLattice(grid, per_cell, per_record, 4)
    x, y = (middles[None] for middles in lattice.middles_km())
    cells = np.stack(np.broadcast_arrays(x.T, y), axis=-1)
    away = cells[..., None, :] - np.stack([outputs["x"], outputs["y"]], axis=-1)
    reported = (away * away).sum(axis=-1).argmin(axis=-1).astype(np.int32)
    phase = np.arange(per_cell) - (per_cell - 1) / 2
    step = np.arange(-4.0, 5.0) * (lattice.cell_km)
    offset = step[None] - phase[:, None] * grid.spacing_km
    dx, dy = offset[:, None, :, None], offset[None, :, None, :]
    density = exponential(-1.0 * np.sqrt(dx * dx + dy * dy)) * lattice.cell_km**2
    masses = np.maximum(density - 0.3 * lattice.cell_km**2, 0)
    totals = np.full((per_cell, per_cell), float(masses.reshape(per_cell**2, -1).sum(axis=1).max()))
    tables = NoiseTables(Kernel(lattice, masses, totals), reported, 40, 2.0**-10)
    tiles = city_layout.Tiles(grid, (3, 2))
    header = header_of(grid, outputs, plane_fit=_FIT)
    header["noise"] = {"per_cell": per_cell, "per_record": per_record, "reach": 4, "floor": 2.0**-10}
    rows = [tables.stored_rows(*tiles.records(tile)) for tile in range(len(tiles))]
    sections = [city_layout.pack_table(table) for table in (reported, masses, totals)]
    return file_of(header, "noise", (3, 2), rows, sections)


def _rows_city(metric_p: float, *, planar: bool) -> bytes:
    """Return a city that has its rows."""
    grid = Grid(-1.5, 0.25, 2, 3, 1.5, (3,))
    outputs = outputs_on(grid, 12, planar=planar)
    xy = np.stack(np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij"), axis=-1)
    rows = exponential(scores_at(xy, outputs, 0.5)).astype(np.float32)
    tiles = city_layout.Tiles(grid, (1, 2))
    header = header_of(grid, outputs, kept="e8" if planar else None, metric_p=metric_p)
    if metric_p == np.inf:
        header["metric_p"] = "inf"
    parts = [np.ascontiguousarray(rows[tiles.records(tile)]) for tile in range(len(tiles))]
    return file_of(header, "rows", (1, 2), parts, [city_layout.pack_rows(part) for part in parts])


def file_of(
    header: Header,
    packing: str,
    tile: tuple[int, int],
    rows: list[NDArray[np.float32]],
    sections: list[bytes],
    *,
    signed: bool = False,
) -> bytes:
    header |= {
        "packing": packing, "tile_cells": list(tile),
        "sections": [[len(part), hashlib.sha256(part).hexdigest()] for part in sections],
        "rows_sha256": [city_layout.rows_sha256(part) for part in rows],
    }  # fmt: skip
    if signed:
        header["signature"] = SIGNING_KEY.signed(CITY, header)
    return city_layout.encode(header) + b"".join(sections)


CITIES: dict[str, Callable[[], bytes]] = {
    "seed": lambda: _seed_city(signed=False),
    "signed": lambda: _seed_city(signed=True),
    "noise": lambda: _noise_city(2, 1),
    "noise-between": lambda: _noise_city(1, 2),
    "rows": lambda: _rows_city(2.0, planar=False),
    "rows-planar": lambda: _rows_city(1.0, planar=True),
    "rows-inf": lambda: _rows_city(np.inf, planar=False),
}


# --- what a reader must make of them ----------------------------------------------------------------


def places_of(city: City) -> list[dict[str, float]]:
    """Return places in, next to and far from a city, none of them nearly as near to another record."""
    box = city.places.grid.box
    share = [(0.13, 0.21), (0.48, 0.77), (0.91, 0.06), (0.37, 0.52), (-0.4, 0.3), (1.7, 1.9), (0.6, -2.3)]
    found = [
        {"x": box.west_km + a * box.width_km, "y": box.south_km + b * box.height_km} for a, b in share
    ] + [{"x": 1e300, "y": -5.0}]
    if not city.planar:
        degrees = [(-73.9712, 40.7843), (-73.99, 40.771), (-73.958, 40.79), (-73.9, 40.7), (-74.4, 40.7)]
        degrees += [(12.5, 41.9), (106.0, -40.5), (0.0, 90.0), (106.03, -40.78), (179.9, -12.0)]
        found += [{"lon": lon, "lat": lat} for lon, lat in degrees]
    return found


def _asked(place: dict[str, float]) -> tuple[NDArray[np.float64], bool]:
    return np.array([list(place.values())]), "x" in place


def random_bytes(number: int) -> bytes:
    """Return bytes for one draw; every third begins with numbers that are rejected."""
    content = hashlib.sha256(f"draw {number}".encode()).digest()
    return (b"\xff" * 8 + content[:24]) if number % 3 == 2 else content


def words_from(content: bytes) -> Words:
    """Return a source of numbers that has these bytes, each once."""
    words: Iterator[np.uint64] = iter(words_of(content))
    return lambda n: np.array([next(words) for _ in range(n)], dtype=np.uint64)


def vectors_of(path: Path) -> dict[str, Any]:
    """Return what follows from a city, in numbers that JSON keeps: texts where they are large."""
    city = open_city(path)
    header = city._content.header
    found = {
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "mechanism_sha256": city.mechanism_sha256,
        "rows_sha256": header["rows_sha256"],
    }
    if "signature" in header:  # all else is as in the city that is not signed
        return found | {"public_key": header["signature"]["public_key"]}
    return found | {"rows": _rows_of(city)} | _answers_of(city)


def _rows_of(city: City) -> list[dict[str, Any]]:
    grid, tiles, found = city.places.grid, city._content.tiles, []
    for i, j in ((1, 2), (grid.shape[0] - 1, grid.shape[1] - 1)):
        tile = tiles.of_records(i, j)
        x, y = tiles.records(tile)
        row, sums = city._content.rows(tile)[i - x.start, j - y.start], city._cumulative(i, j)
        weights = np.diff(sums, prepend=np.uint64(0))[:3]
        found.append({
            "record": [i, j], "float32": row.astype(">f4").tobytes().hex(),
            "first_weights": list(map(str, weights.tolist())), "total": str(sums[-1]),
        })  # fmt: skip
    return found


def _answers_of(city: City) -> dict[str, Any]:
    """Return the records of places, and what is drawn there."""
    grid = city.places.grid
    records: list[Any] = []
    draws: list[Any] = []
    sticky: list[Any] = []
    for number, place in enumerate(places_of(city)):
        asked, planar = _asked(place)
        xy = city.places.many(asked, planar=planar)
        for place_km in (None, 1.3):
            (record,), (inside,) = city.places.records(xy, place_km)
            i, j = divmod(int(record), grid.shape[1])
            records.append([place, place_km, i, j, not inside])
        for repeat in range(2):
            content = random_bytes(2 * number + repeat)
            outputs, _ = city.sample_points(asked, planar=planar, entropy_for_tests=words_from(content))
            draws.append([place, content.hex(), int(outputs[0])])
        user, side_km = USERS[number % len(USERS)], 0.7 if number % 2 else None
        outputs, _ = city.sample_points(
            asked, planar=planar, users=[user], sticky=STICKY_KEY, place_km=side_km
        )
        sticky.append([place, user, side_km, int(outputs[0])])
    return {"records": records, "draws": draws, "sticky": sticky}


def refusals_of(content: bytes) -> list[dict[str, Any]]:
    """Return changes of a city after which no reader may use it: bytes at an offset, or another length."""
    header = 48 + int.from_bytes(content[12:16], "little")
    changed = {
        "another magic": (0, "4d"), "a newer version": (8, "02"), "another digest": (16, _other(content[16])),
        "a changed header": (60, _other(content[60])), "a longer header": (12, "ffffff7f"),
    }  # fmt: skip
    lengths = 0, 7, 8, 47, 48, header - 1, header, len(content) - 1
    return [
        *({"why": why, "at": at, "bytes": found} for why, (at, found) in changed.items()),
        *({"why": f"the first {length} bytes", "length": length} for length in lengths),
        {"why": "a changed section", "at": header, "bytes": _other(content[header])},
        {"why": "a byte too many", "append": "00"},
    ]


def _other(byte: int) -> str:
    return f"{byte ^ 1:02x}"


def refused_form(content: bytes, change: dict[str, Any]) -> bytes:
    """Return a city after a change of :func:`refusals_of`."""
    if "length" in change:
        return content[: change["length"]]
    if "append" in change:
        return content + bytes.fromhex(change["append"])
    found = bytes.fromhex(change["bytes"])
    return content[: change["at"]] + found + content[change["at"] + len(found) :]


def vectors(folder: Path) -> str:
    """Return the text of all vectors of the cities in a folder."""
    key = {"secret": STICKY_KEY.secret.hex(), "epoch": STICKY_KEY.epoch, "key_id": STICKY_KEY.key_id}
    document = {
        "format": "mdpext test vectors, version 1", "sticky_key": key, "public_key": SIGNING_KEY.public_key,
        "records": "place, place_km, i, j, whether it lies outside", "draws": "place, random bytes, output",
        "sticky": "place, user, place_km, output",
        "cities": {name: vectors_of(folder / f"{name}.mdp") for name in CITIES},
        "refused": {"rows": refusals_of((folder / "rows.mdp").read_bytes())},
    }  # fmt: skip
    return (
        json.dumps(document, indent=None, separators=(",", ":"), default=bool).replace("],[{", "],\n[{")
        + "\n"
    )


def write(folder: Path) -> None:
    """Write all cities, and what follows from them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in CITIES.items():
        (folder / f"{name}.mdp").write_bytes(made())
    (folder / VECTORS).write_text(vectors(folder), encoding="utf-8")


def main() -> None:
    """Write the vectors into a folder."""
    parser = argparse.ArgumentParser(description="Write the test vectors of the city file.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
