"""Small road networks anywhere on Earth: lattices of streets around a place, a kilometre or so apart."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import FULL_TURN, HALF_TURN
from mdpext_dask.readers.roads.csv_folder import write_folder
from mdpext_dask.readers.roads.network import RoadNetwork, ground_km


def wrapped(lon: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return longitudes in [-180, 180]; those that are there already keep their bits."""
    return np.where(np.abs(lon) <= HALF_TURN, lon, (lon + HALF_TURN) % FULL_TURN - HALF_TURN)


def lattice(lon: float, lat: float, nodes: int = 9, step_km: float = 1.0) -> RoadNetwork:
    """Return `nodes` x `nodes` junctions around a place, with streets between neighbours."""
    offset = (np.arange(nodes) - (nodes - 1) / 2) * step_km
    xy = np.stack(np.meshgrid(offset, offset, indexing="ij"), axis=-1).reshape(-1, 2)
    lonlat = Projection(lon, lat).to_degrees(xy)
    lonlat[:, 0] = wrapped(lonlat[:, 0])
    number = np.arange(nodes * nodes).reshape(nodes, nodes)
    start = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    end = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    return RoadNetwork(
        lonlat=lonlat, start=start, end=end, length_km=ground_km(lonlat[start], lonlat[end]),
        oneway=np.zeros(len(start), dtype=bool), directions_known=True, source="a lattice",
        nodes_read=len(lonlat),
    )  # fmt: skip


def lattice_folder(folder: Path, lon: float, lat: float, nodes: int = 9, step_km: float = 1.0) -> str:
    """Write such a network as a folder of CSV files, and return its path."""
    folder.mkdir()
    write_folder(lattice(lon, lat, nodes, step_km), folder)
    return str(folder)
