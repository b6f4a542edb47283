"""Road networks as two CSV files: what is built in, what a place's download is kept as, and one's own."""

import gzip
import io
from pathlib import Path

import numpy as np

from mdpext_dask.job.spec import ROAD_FILES
from mdpext_dask.readers.csv_tables import complain_where, integers, numbers, read_csv
from mdpext_dask.readers.roads.network import RoadNetwork, assemble

_NODE_COLUMNS, _EDGE_COLUMNS = ("id", "lon", "lat"), ("u", "v", "length_m", "oneway")


def read_folder(folder: Path, *, directions_known: bool = True) -> RoadNetwork:
    """Read nodes.csv.gz (id, lon, lat) and edges.csv.gz (u, v, length_m, oneway).

    Raises
    ------
    DataError
        With file, line and text of what is wrong.
    """
    nodes_path, edges_path = (folder / name for name in ROAD_FILES)
    nodes = read_csv(nodes_path, required=_NODE_COLUMNS)
    edges = read_csv(edges_path, required=_EDGE_COLUMNS)

    ids = integers(nodes, "id", nodes_path)
    lonlat = np.stack([numbers(nodes, c, nodes_path) for c in ("lon", "lat")], axis=-1)
    length_m = numbers(edges, "length_m", edges_path)
    complain_where(length_m < 0, edges, "length_m", edges_path, "is negative")
    oneway = integers(edges, "oneway", edges_path)
    complain_where(~np.isin(oneway, (0, 1)), edges, "oneway", edges_path, "is neither 0 nor 1")
    return assemble(
        ids=ids,
        lonlat=lonlat,
        ends=(integers(edges, "u", edges_path), integers(edges, "v", edges_path)),
        length_km=length_m / 1000,
        oneway=oneway == 1,
        directions_known=directions_known,
        source=str(folder),
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
        packed = io.BytesIO()
        # Without a name and a time, equal tables are equal files.
        with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as file:
            file.write(text.encode())
        (folder / name).write_bytes(packed.getvalue())
