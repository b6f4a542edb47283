"""Road networks as two CSV files: what is built in, what a place's download is kept as, and one's own."""

import gzip
from pathlib import Path

import numpy as np

from mdpext_dask.job.spec import ROAD_FILES
from mdpext_dask.readers.roads.network import RoadNetwork, assemble
from mdpext_dask.readers.tables import read_csv

_NODE_COLUMNS, _EDGE_COLUMNS = ("id", "lon", "lat"), ("u", "v", "length_m", "oneway")


def read_folder(folder: Path, *, directions_known: bool = True) -> RoadNetwork:
    """Read nodes.csv.gz (id, lon, lat) and edges.csv.gz (u, v, length_m, oneway).

    Raises
    ------
    DataError
        With file, line and text of what is wrong.
    """
    nodes, edges = (
        read_csv(folder / name, columns)
        for name, columns in zip(ROAD_FILES, (_NODE_COLUMNS, _EDGE_COLUMNS), strict=True)
    )
    length_m, oneway = edges.finite("length_m"), edges.integers("oneway")
    edges.refuse_where(length_m < 0, "length_m", "is negative")
    edges.refuse_where(~np.isin(oneway, (0, 1)), "oneway", "is neither 0 nor 1")
    lonlat = np.stack([nodes.finite("lon"), nodes.finite("lat")], axis=-1)
    ids, ends = nodes.integers("id"), (edges.integers("u"), edges.integers("v"))
    return assemble(
        ids, lonlat, ends, length_m / 1000, oneway == 1, str(folder), directions_known=directions_known
    )


def write_folder(network: RoadNetwork, folder: Path) -> None:
    """Write a network so that :func:`read_folder` can read it; equal networks give equal bytes.

    Nodes are numbered anew, from 0.
    """
    nodes = ((i, repr(lon), repr(lat)) for i, (lon, lat) in enumerate(network.lonlat.tolist()))
    edges = zip(
        network.start.tolist(),
        network.end.tolist(),
        map(repr, (network.length_km * 1000).tolist()),
        network.oneway.astype(int).tolist(),
        strict=True,
    )
    for name, columns, rows in zip(ROAD_FILES, (_NODE_COLUMNS, _EDGE_COLUMNS), (nodes, edges), strict=True):
        text = "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n"
        # Without a name and a time, equal tables are equal files.
        with (folder / name).open("wb") as packed, gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as file:
            file.write(text.encode())
