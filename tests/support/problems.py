"""What tests of jobs and problems share: small inputs, and all rows of a store."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pyproj import Geod

from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.geometry import RoadGeometry, build_geometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of

WGS84 = Geod(ellps="WGS84")
JobMaker = Callable[..., dict[str, dict[str, Any]]]


def write_toml(path: Path, job: dict[str, dict[str, Any]]) -> None:
    """Write a job file."""
    lines = []
    for section, keys in job.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines))


def road_geometry(job: dict[str, dict[str, Any]]) -> RoadGeometry:
    geometry = build_geometry(parse_job(job))
    assert isinstance(geometry, RoadGeometry)
    return geometry


def all_rows(store: MechanismStore) -> np.ndarray:
    return rows_of(store, *(slice(0, n) for n in store.grid.shape))


def all_records(grid: Grid) -> np.ndarray:
    """Return the records' places in the order of their flat indices, of shape (N, 2), in km."""
    return np.stack(np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij"), axis=-1).reshape(-1, 2)


def ground_km(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return distances on WGS 84 of places, lon and lat in degrees, of shapes (..., 2) that broadcast."""
    one, other = np.broadcast_arrays(one, other)
    return np.asarray(WGS84.inv(one[..., 0], one[..., 1], other[..., 0], other[..., 1])[2]) / 1000


def road_folder(folder: Path, nodes: Iterable[tuple[Any, ...]], streets: Iterable[tuple[Any, ...]]) -> str:
    """Write a road network: nodes (id, lon, lat) and streets (u, v, length_m, oneway)."""
    folder.mkdir()
    for name, header, rows in (("nodes", "id,lon,lat", nodes), ("edges", "u,v,length_m,oneway", streets)):
        text = "\n".join([header, *(",".join(map(str, row)) for row in rows)])
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder)


def point_file(path: Path, columns: str, places: Iterable[Iterable[float]]) -> str:
    """Write places with the columns that are named."""
    lines = [columns, *(",".join(repr(float(v)) for v in place) for place in places)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def polygon_file(path: Path, *rings: Any) -> str:
    """Write a polygon in degrees as GeoJSON; the first ring is the shell."""
    coordinates = [np.asarray(ring, dtype=float).tolist() for ring in rings]
    path.write_text(json.dumps({"type": "Polygon", "coordinates": coordinates}))
    return str(path)
