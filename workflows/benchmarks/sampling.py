"""How fast a store and an exported city are sampled from.

    python workflows/benchmarks/sampling.py STORE [--points 1000000] [--repeats 5]

STORE is a finished store. Each figure is the best of the repeats, in processor seconds of all threads, so
that others on the machine weigh less, and for the whole command in elapsed seconds as well. Points are
drawn around the middle of the grid, a few of them outside of it.

- *one sample, warm*: a place that has been asked for before.
- *points at once*: from an array in memory, with its projection.
- *file*: ``mdpext sample`` on a CSV file, with starting Python, reading and writing.
- *import, load*: ``python -c "from mdpext_dask.runtime import open_city"`` less ``python -c pass``, of which
  numpy is most; opening the file, and its first sample.
- *size*: of the exported file, packed both ways, and of the rows as float32.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.runtime import open_city
from mdpext_dask.runtime.location_sampler import Reporter
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.mechanism import Mechanism, open_mechanism

_CALLS = 20_000
# Of the half-width of the grid.
_SPREAD = 0.4


def best(action: Callable[[], object], repeats: int) -> float:
    """Return the least processor time that an action takes, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def program(arguments: list[str], repeats: int) -> tuple[float, float]:
    """Return the least processor and elapsed time that a program takes, in seconds."""
    found = []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found.append((spent, elapsed))
    processor, elapsed_all = zip(*found, strict=True)
    return min(processor), min(elapsed_all)


def places_of(mechanism: Mechanism, n: int) -> NDArray[np.float64]:
    """Return places in degrees around the outputs of a mechanism, float64 of shape (n, 2)."""
    outputs = mechanism.output_lonlat
    half = np.ptp(outputs, axis=0) / 2
    drawn = np.random.default_rng(0).normal(size=(n, 2)) * _SPREAD * half
    return np.asarray(outputs.mean(axis=0) + drawn)


def measure(store: str, n: int, repeats: int, folder: Path) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    python = sys.executable
    mechanism = open_mechanism(store)
    places = places_of(mechanism, n)
    files = {packing: folder / f"{packing}.mdp" for packing in ("auto", "rows")}
    sizes = {packing: export_city(store, path, packing, overwrite=True) for packing, path in files.items()}
    city = open_city(files["auto"])
    lines = []
    lon, lat = places[0].tolist()
    sources: list[tuple[str, Reporter]] = [("store", mechanism), ("runtime", city)]
    for name, source in sources:
        source.sample(lon, lat)

        def many(source: Reporter = source) -> None:
            for _ in range(_CALLS):
                source.sample(lon, lat)

        lines.append((f"one sample, warm, {name}", f"{best(many, repeats) / _CALLS * 1e6:.1f} µs"))
    for name, source in sources:
        seconds = best(lambda source=source: source.sample_points(places), repeats)  # type: ignore[misc]
        lines.append((f"{n:,} points at once, {name}", f"{seconds:.2f} s, {n / seconds / 1e6:.2f} M/s"))
    points = folder / "points.csv"
    with points.open("w") as file:
        file.write("lon,lat\n")
        file.writelines(f"{lon!r},{lat!r}\n" for lon, lat in places.tolist())
    sample = ["-m", "mdpext_dask.cli", "sample", store, str(points), "-o", str(folder / "out.csv"), "--json"]
    processor, elapsed = program([python, *sample], repeats)
    lines.append((f"{n:,} points, file, whole command", f"{processor:.2f} s ({elapsed:.2f} s elapsed)"))
    started, _ = program([python, "-c", "pass"], 3 * repeats)
    with_numpy, _ = program([python, "-c", "import numpy"], 3 * repeats)
    imported, _ = program([python, "-c", "from mdpext_dask.runtime import open_city"], 3 * repeats)
    lines.append(
        (
            "import the runtime",
            f"{1e3 * (imported - started):.0f} ms, numpy {1e3 * (with_numpy - started):.0f} ms",
        )
    )
    for packing, path in files.items():
        load = best(lambda path=path: open_city(path), repeats)  # type: ignore[misc]
        first = best(lambda path=path: open_city(path).sample(lon, lat), repeats)  # type: ignore[misc]
        size = sizes[packing]
        lines.append((f"load, {size['packing']}", f"{1e3 * load:.1f} ms, with a sample {1e3 * first:.1f} ms"))
        lines.append((f"size, {size['packing']}", f"{size['bytes']:,} bytes, {size['ratio']:.1f} times less"))
    lines.append(("rows as float32", f"{sizes['auto']['bytes_raw']:,} bytes"))
    return lines


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description="How fast a store and an exported city are sampled from.")
    parser.add_argument("store")
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(given.store, given.points, given.repeats, Path(folder))
    print(f"{given.store}, {os.cpu_count()} processors, numpy {np.__version__}")
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
