"""Jobs whose region is not a rectangle."""

from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.problem.projection import Projection
from tests.support.problems import point_file, polygon_file

PLANE = Projection(-73.97, 40.78)


# A U of cells of 2 km, arms of one cell, and a gap of two: the sides keep off the cells beyond.
CELL_KM, CELLS = 2.0, (4, 5)


_U = [(0, 0), (8, 0), (8, 10), (6.1, 10), (6.1, 1.9), (1.9, 1.9), (1.9, 10), (0, 10), (0, 0)]


# At the tips of the arms, half-way down, and at the bottom.
_OUTPUTS = [(1, 9), (7, 9), (1, 5), (7, 5), (4, 1)]


def geojson(path: Path, *rings: list[tuple[float, float]], centre: tuple[float, float] = (0, 0)) -> str:
    """Write a polygon of km around a place in Manhattan; the first ring is the shell."""
    shifted = [np.array(ring, dtype=float) - centre for ring in rings]
    return polygon_file(path, *map(PLANE.to_degrees, shifted))


def u_job(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a job on the U: Euclidean loss, uniform prior, outputs in both arms, one cell a block."""
    # Ten metres less at the far ends: sides bulge, and a grid of whole cells must not be one cell larger.
    ring = [(min(x, 7.99), min(y, 9.99)) for x, y in _U]
    region = geojson(folder / "u.geojson", ring, centre=(4, 5))
    places = PLANE.to_degrees(np.array(_OUTPUTS, dtype=float) - (4, 5))
    outputs = point_file(folder / "outputs.csv", "lon,lat", places)
    job: dict[str, dict[str, Any]] = {
        "domain": {"roads": "builtin:manhattan", "region": region, "cell_km": CELL_KM, "refine": [2]},
        "privacy": {"epsilon_per_km": 1.0, "budget": "bound"}, "outputs": {"choose": "file", "file": outputs},
        "prior": {"kind": "uniform"}, "loss": {"kind": "euclidean"}, "store": {"block_cells": [1, 1]},
        "cluster": {"kind": "inline"},
    }  # fmt: skip
    for name, keys in sections.items():
        job[name].update(keys)
    return job
