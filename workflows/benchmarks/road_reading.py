"""How long reading an extract of OpenStreetMap takes, and how much memory: synthetic cities of any size.

Of a city's nodes one in eight belongs to a road, as in extracts of European cities; the others are houses.

    python workflows/benchmarks/road_reading.py --nodes 1000000 16000000
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.readers.roads.openstreetmap import read_osm

_STREET = 8  # nodes of a street between two junctions
_HOUSES = 7  # nodes of houses for each node of a street


def write_city(path: Path, nodes: int, *, says_sorted: bool) -> None:
    """Write a city with so many nodes: a lattice of streets, and houses that no street uses."""
    import osmium

    header: Any = osmium.io.Header()
    if says_sorted:
        header.set("sorting", "Type_then_ID")
    road_nodes = nodes // (1 + _HOUSES)
    side = int((road_nodes / (2 * _STREET)) ** 0.5)
    mutable = osmium.osm.mutable
    with osmium.SimpleWriter(path, header=header, overwrite=True) as writer:
        pitch = 0.001
        streets, number = [], 0
        at: dict[tuple[int, int], int] = {}
        for i in range(side):
            for j in range(side):
                number += 1
                at[i, j] = number
                writer.add(mutable.Node(id=number, location=(12 + pitch * i, 41 + pitch * j)))
        for i in range(side):
            for j in range(side):
                for east, north in ((1, 0), (0, 1)):
                    if (i + east, j + north) not in at:
                        continue
                    bends = []
                    for step in range(1, _STREET):
                        number += 1
                        bends.append(number)
                        share = pitch * step / _STREET
                        place = (12 + pitch * i + share * east, 41 + pitch * j + share * north)
                        writer.add(mutable.Node(id=number, location=place))
                    streets.append([at[i, j], *bends, at[i + east, j + north]])
        # Near one another, as they are numbered; anywhere they would take more room than in a real file.
        steps = np.random.default_rng(0).normal(scale=3e-4, size=(max(nodes - number, 0), 2))
        for place in ([12.5, 41.5] + np.cumsum(steps, axis=0) / 10).tolist():
            number += 1
            writer.add(mutable.Node(id=number, location=place))
        for way, refs in enumerate(streets, 1):
            writer.add(mutable.Way(id=way, nodes=refs, tags={"highway": "residential"}))


def measure(path: Path) -> None:
    """Print one line of the table for one file; in a process of its own, for the memory."""
    start = time.process_time()
    network = read_osm(path)
    seconds = time.process_time() - start
    # Of this program alone; what getrusage says includes the parent before it was replaced. Linux has it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
    size_mib = path.stat().st_size / 2**20
    print(f"| {path.name} | {size_mib:.0f} | {network.nodes} | {seconds:.1f} | {peak_mib:.0f} |")


def main() -> None:
    """Make cities, read each in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        measure(arguments.read)
        return
    print("| file | MiB | junctions | seconds of CPU | peak MiB |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for nodes in arguments.nodes:
            for says_sorted in (True, False):
                path = Path(folder) / f"{'sorted' if says_sorted else 'unsorted'}-{nodes}.osm.pbf"
                write_city(path, nodes, says_sorted=says_sorted)
                subprocess.run([sys.executable, __file__, "--read", path], check=True)


if __name__ == "__main__":
    main()
