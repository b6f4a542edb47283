"""What reading points costs, by format.

    python workflows/benchmarks/point_formats.py [--points 1000000] [--chunk 200000] [--repeats 3]

Points are drawn, written in every format with all their digits, and read in chunks, each time by a process of
its own that has loaded its libraries before. Printed are the size of the file, the processor time of all
threads (the least of all repeats), and by how much the process had grown, at most, when it had a chunk.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mdpext_dask.readers.point_files import point_chunks

FORMATS = ("csv", "csv.gz", "parquet", "geojson", "geojsonl")
# Read before the clock starts, so that imports are not what is measured.
FEW = 10


def main() -> None:
    """Write, read and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--read", nargs=2, metavar=("FEW", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        few, many = map(Path, arguments.read)
        print(json.dumps(measured(few, many, arguments.chunk)))
        return
    print(f"{arguments.points:,} points in chunks of {arguments.chunk:,}")
    print(f"{'format':10} {'MB':>7} {'CPU s':>7} {'points/s':>12} {'MB more':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMATS:
            few, many = (Path(folder) / f"{count}.{form}" for count in (FEW, arguments.points))
            for path, count in ((few, FEW), (many, arguments.points)):
                write(path, form, np.random.default_rng(0).uniform((12, 41), (13, 42), (count, 2)))
            command = [sys.executable, __file__, "--chunk", str(arguments.chunk), "--read"]
            command += [str(few), str(many)]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                for _ in range(arguments.repeats)
            ]
            seconds, grown = (min(run[key] for run in runs) for key in ("seconds", "grown"))
            rate = arguments.points / seconds
            print(
                f"{form:10} {many.stat().st_size / 1e6:7.1f} {seconds:7.2f} {rate:12,.0f} {grown / 1e6:8.0f}"
            )


def measured(few: Path, many: Path, chunk: int) -> dict[str, float]:
    """Return processor seconds and bytes that reading a file takes of this process."""
    for _ in point_chunks(few, weights=True):
        pass
    process = psutil.Process()
    before, most, started = process.memory_info().rss, 0, time.process_time()
    for _ in point_chunks(many, weights=True, chunk_points=chunk):
        most = max(most, process.memory_info().rss)
    return {"seconds": time.process_time() - started, "grown": float(most - before)}


def write(path: Path, form: str, lonlat: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Write points in a format."""
    if form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table({"lon": lonlat[:, 0], "lat": lonlat[:, 1]})
        parquet.write_table(table, path, row_group_size=100_000)
        return
    text = "".join(lines(form, lonlat)).encode()
    path.write_bytes(gzip.compress(text) if form.endswith(".gz") else text)


def lines(form: str, lonlat: np.ndarray[Any, np.dtype[np.float64]]) -> Iterator[str]:
    """Yield the text of a file."""
    if form.startswith("csv"):
        yield "lon,lat\n"
        yield from (f"{lon!r},{lat!r}\n" for lon, lat in lonlat.tolist())
        return
    one_by_one = form == "geojsonl"
    if not one_by_one:
        yield '{"type": "FeatureCollection", "features": [\n'
    for number, place in enumerate(lonlat.tolist(), start=1):
        geometry = f'{{"type": "Point", "coordinates": {place}}}'
        yield f'{{"type": "Feature", "properties": {{}}, "geometry": {geometry}}}'
        yield "\n" if one_by_one or number == len(lonlat) else ",\n"
    if not one_by_one:
        yield "]}\n"


if __name__ == "__main__":
    main()
