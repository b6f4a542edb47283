"""How fast blocks are extended and certified, against plain writes and reads of the same store.

    python workflows/benchmarks/throughput.py [JOB.toml] [--workers 2] [--repeats 5] [--set section.key=value]

Everything is measured in one run, alternating, on the same workers and layout:

- *plain write*: each task takes its block ready-made from memory-mapped pages and writes it to an array
  with the same shards, chunks and compressor; nothing else.
- *extend*: what a job does for a block: read the corners, extend, write, read back and hash, receipt.
- *read*: each task reads the closed block that the certificate needs.
- *certify*: what an audit does for a block: read it, check its hashes, certify.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from mdpext_dask.auditors.certificate import certify_block
from mdpext_dask.compute.executor import Executor, open_executor
from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.pipeline.tasks import extend_block
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.mechanism_store import EXTENDING, MechanismStore

DEMO = Path(__file__).resolve().parents[1] / "manhattan-published.toml"


def plain_write(url: str, index: int, target: str, ready: str) -> None:
    """Write one block, ready-made, with the layout of the store."""
    block = MechanismStore.open(url).plan[index]
    array = zarr.open_array(target, mode="r+")
    array[block.owned_x, block.owned_y, :] = np.load(ready, mmap_mode="r")[block.owned_x, block.owned_y]


def empty_copy(url: str, target: str) -> None:
    """Create an array at `target` with the layout of the probabilities of the store at `url`."""
    original = zarr.open_array(f"{url}/probability", mode="r")
    zarr.create_array(
        target,
        shape=original.shape,
        dtype=original.dtype,
        chunks=original.chunks,
        shards=original.shards,
        compressors=original.compressors,
        fill_value=np.nan,
    )


def plain_read(url: str, index: int) -> None:
    """Read one block and the row after it."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    store.read("probability", block.closed_x, block.closed_y)


def timed(executor: Executor, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> float:
    """Return the seconds that all tasks take together."""
    started = time.perf_counter()
    for _ in executor.map("bench", function, arguments):
        pass
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    options = parser.parse_args()
    spec = load_job(options.job, options.set)

    with tempfile.TemporaryDirectory() as folder:
        url, target, ready = (str(Path(folder) / name) for name in ("m.zarr", "plain.zarr", "ready.npy"))
        build(spec, url, workers=options.workers)
        store = MechanismStore.open(url, mode="r+")
        store.update(state=EXTENDING)  # a complete store would not let its blocks be written again
        np.save(ready, store.read("probability"))
        empty_copy(url, target)
        blocks = range(store.plan.blocks)
        keys = [receipts.key_of(index) for index in blocks]
        elements = store.plan.store_bytes // 4
        limit = float(store.attributes["epsilon_planar_per_km"])
        seconds: dict[str, list[float]] = {"plain write": [], "extend": [], "read": [], "certify": []}
        with open_executor(spec.cluster, options.workers) as executor:
            workers = executor.workers
            for repeat in range(options.repeats + 1):
                objects.delete_keys(store.objects, keys)
                measured = {
                    "plain write": timed(executor, plain_write, [(url, i, target, ready) for i in blocks]),
                    "extend": timed(executor, extend_block, [(url, i) for i in blocks]),
                    "read": timed(executor, plain_read, [(url, i) for i in blocks]),
                    "certify": timed(
                        executor, certify_block, [(url, i, store.metric_p, limit) for i in blocks]
                    ),
                }
                if repeat:  # the first warms caches and imports
                    for name, value in measured.items():
                        seconds[name].append(value)

    print(
        f"{spec.job.name}: {elements / 1e6:.1f} M probabilities in {len(blocks)} blocks, "
        f"{workers} workers, median of {options.repeats}"
    )
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:<12} {middle:7.3f} s   {elements / middle / 1e6:7.1f} M/s")
    write_ratio = statistics.median(
        plain / ours for plain, ours in zip(seconds["plain write"], seconds["extend"], strict=True)
    )
    read_ratio = statistics.median(
        ours / plain for plain, ours in zip(seconds["read"], seconds["certify"], strict=True)
    )
    print(f"extend + write at {write_ratio:.2f} of a plain write; certificate {read_ratio:.2f} reads")


if __name__ == "__main__":
    main()
