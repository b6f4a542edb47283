"""How a large job goes: seconds and memory by stage on one worker and more, resuming, and plain writing.

    python workflows/benchmarks/scale.py [JOB.toml] [--workers 1 2] [--folder FOLDER] [--set
    section.key=value]

The seed is solved once, beforehand, and what is then done is measured for every number of workers, each on
a copy of the store. In the table are wall clock and processor seconds of client and workers by stage, and
the largest resident set of the client and of any worker, sampled twenty times a second. Then:

- *resume*: the command `mdpext run` once more on the finished store, with everything it takes to start;
- *plain write*: every block ready-made, written to an array with the same shards, chunks and compressor by
  as many workers, against extending the blocks once more; see ``throughput.py``, which does it repeatedly.

It needs about four times the store's bytes on disk, and leaves nothing there.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import zarr
from throughput import empty_copy, plain_write, timed

from mdpext_dask.compute.executor import open_executor
from mdpext_dask.events import Event, StageFinished, StageStarted
from mdpext_dask.job.spec import JobSpec, load_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.pipeline.tasks import extend_block
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.mechanism_store import EXTENDING, MechanismStore

JOB = Path(__file__).resolve().parents[1] / "scale.toml"
_SAMPLES_PER_SECOND = 20
_MIB = 2**20


class Meter:
    """Follows a run: seconds of wall clock and processors by stage, and the largest resident sets.

    Use it as a context manager, and as the run's observer.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.client_cpu: dict[str, float] = defaultdict(float)
        self.worker_cpu: dict[str, float] = defaultdict(float)
        self.client_peak = self.worker_peak = 0
        self._process = psutil.Process()
        self._began: tuple[float, float] = 0.0, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, event: Event) -> None:
        """Take note of stages."""
        if isinstance(event, StageStarted):
            self._began = self._cpu()
        elif isinstance(event, StageFinished):
            client, workers = self._cpu()
            self.seconds[event.stage] = event.seconds
            self.client_cpu[event.stage] = client - self._began[0]
            self.worker_cpu[event.stage] = workers - self._began[1]

    def _cpu(self) -> tuple[float, float]:
        """Return processor seconds of this process and of its children so far."""
        own = self._process.cpu_times()
        workers = 0.0
        for child in self._process.children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.Error:
                continue
            workers += times.user + times.system
        return own.user + own.system, workers

    def _sample(self) -> None:
        children: list[psutil.Process] = []
        looked = -math.inf
        while not self._ended.wait(1 / _SAMPLES_PER_SECOND):
            self.client_peak = max(self.client_peak, self._process.memory_info().rss)
            if time.monotonic() > looked + 1:  # looking for them takes longer than looking at them
                children, looked = self._process.children(recursive=True), time.monotonic()
            for child in children:
                try:
                    self.worker_peak = max(self.worker_peak, child.memory_info().rss)
                except psutil.Error:
                    continue


def table(meters: dict[int, Meter], totals: dict[int, float]) -> str:
    """Return a table of what was measured by number of workers."""
    rows = {"": [f"{f'{n} workers: s':>14}{'client cpu':>12}{'workers':>9}" for n in meters]}
    for stage in next(iter(meters.values())).seconds:
        rows[stage] = [
            f"{m.seconds[stage]:14.2f}{m.client_cpu[stage]:12.2f}{m.worker_cpu[stage]:9.2f}"
            for m in meters.values()
        ]
    rows["end to end"] = [f"{totals[n]:14.2f}{'':>21}" for n in meters]
    for what in ("client", "worker"):
        peaks = [getattr(meter, f"{what}_peak") / _MIB for meter in meters.values()]
        rows[f"{what} MiB"] = [f"{peak:14.0f}{'':>21}" for peak in peaks]
    return "\n".join(f"{name:<12}{''.join(cells)}".rstrip() for name, cells in rows.items())


def finish_copy(spec: JobSpec, seeded: Path, copy: Path, workers: int) -> tuple[Meter, float]:
    """Do all but the seed on a copy of a store; return what was measured, and the seconds of it all."""
    shutil.copytree(seeded, copy)
    started = time.perf_counter()
    with Meter() as meter:
        build(spec, str(copy), workers=workers, observer=meter)
    return meter, time.perf_counter() - started


def against_plain_write(spec: JobSpec, url: str, folder: Path, workers: int) -> tuple[float, float]:
    """Return seconds of writing all blocks ready-made, and of extending them."""
    store = MechanismStore.open(url, mode="r+")
    store.update(state=EXTENDING)  # a complete store would not let its blocks be written again
    original = zarr.open_array(f"{url}/probability", mode="r")
    ready, target = str(folder / "ready.npy"), str(folder / "plain.zarr")
    pages = np.lib.format.open_memmap(ready, mode="w+", dtype=original.dtype, shape=original.shape)
    for block in store.plan:
        pages[block.owned_x, block.owned_y] = store.read("probability", block.owned_x, block.owned_y)
    pages.flush()
    empty_copy(url, target)
    blocks = range(store.plan.blocks)
    objects.delete_keys(store.objects, [receipts.key_of(index) for index in blocks])
    with open_executor(spec.cluster, workers) as executor:
        # The first tasks of a worker import what they need.
        timed(executor, plain_write, [(url, index, target, ready) for index in blocks[: 2 * workers]])
        plain = timed(executor, plain_write, [(url, index, target, ready) for index in blocks])
        extending = timed(executor, extend_block, [(url, index) for index in blocks])
    return plain, extending


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", nargs="?", type=Path, default=JOB)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where to work; default: a new one for temporary files")
    parser.add_argument("--no-plain", action="store_true", help="leave out the comparison with plain writing")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    options = parser.parse_args()
    spec = load_job(options.job, options.set)
    meters: dict[int, Meter] = {}
    totals: dict[int, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        seeded, finished = folder / "seeded.zarr", folder / "finished.zarr"
        with Meter() as meter:
            planned = init(spec, str(seeded), workers=max(options.workers), observer=meter)
        print(f"{spec.job.name}: {planned['records']:,} records x {planned['outputs']} outputs")
        print("seed, beforehand: " + ", ".join(f"{name} {s:.2f} s" for name, s in meter.seconds.items()))
        for workers in options.workers:
            shutil.rmtree(finished, ignore_errors=True)
            meters[workers], totals[workers] = finish_copy(spec, seeded, finished, workers)
        print(table(meters, totals))
        most, least = max(options.workers), min(options.workers)
        if most > least:
            faster = totals[least] / totals[most]
            tasks = ("extend", "audit", "evaluate")
            of_tasks = [sum(meters[n].seconds[stage] for stage in tasks) for n in (least, most)]
            print(
                f"{least} -> {most} workers: {faster:.2f} times as fast, the stages with tasks "
                f"{of_tasks[0] / of_tasks[1]:.2f} times"
            )
        command = [sys.executable, "-m", "mdpext_dask.cli", "run", str(options.job), "--store", str(finished)]
        command += [word for one in options.set for word in ("--set", one)]
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        print(f"resume on the finished store: {time.perf_counter() - started:.2f} s")
        if not options.no_plain:
            plain, extending = against_plain_write(spec, str(finished), folder, most)
            print(
                f"plain write {plain:.2f} s, extend + write {extending:.2f} s: {plain / extending:.2f} of it"
            )


if __name__ == "__main__":
    main()
