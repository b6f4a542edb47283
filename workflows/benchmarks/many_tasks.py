"""What very many tasks cost: how many a second, and the memory of client and scheduler.

    python workflows/benchmarks/many_tasks.py [--tasks 100000] [--blocks 1000] [--workers 2] [--json]

Scheduler and workers are processes of their own on loopback, with the settings in deploy/dask.yaml. Measured
are

- *nothing*: tasks that only return, through the executor that jobs use;
- *extend*, *finish*: a store of tiny blocks, each one source cell of 3 x 3 records and two outputs, whose
  seed is made up (a planar exponential mechanism), certified as any other;
- what the client does with all receipts of such a store: `read`, `summarise`, `resume` when it is complete.

Memory is what the system has given to a process (resident), sampled ten times a second.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mdpext_dask.compute.executor import Executor, open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.events import silent
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.pipeline.run import build, extend, finish
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.store.integrity import require_all_blocks
from mdpext_dask.store.mechanism_store import MechanismStore

SETTINGS = Path(__file__).resolve().parents[2] / "deploy" / "dask.yaml"
MIB = 2**20
# Sides of the built-in network, in km.
EXTENT_KM = 9.0, 21.0
# Of ε: slope of the made-up seed, from which interpolating and normalising take nothing away.
SHARE = 0.25


def nothing(number: int) -> int:
    """Return a task's number."""
    return number


class Memory:
    """Largest resident memory of this process and of the scheduler since the last look, in MiB."""

    def __init__(self, scheduler: int) -> None:
        self._processes = {"client": psutil.Process(), "scheduler": psutil.Process(scheduler)}
        self._peaks = dict.fromkeys(self._processes, 0.0)
        self._stop = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            for name, process in self._processes.items():
                with contextlib.suppress(psutil.Error):
                    self._peaks[name] = max(self._peaks[name], process.memory_info().rss / MIB)

    def peaks(self) -> dict[str, int]:
        """Return the peaks, and begin anew."""
        time.sleep(0.2)
        found = {f"{name}_mib": math.ceil(peak) for name, peak in self._peaks.items()}
        self._peaks = dict.fromkeys(self._processes, 0.0)
        return found

    def scheduler_seconds(self) -> float:
        """Return the processor time that the scheduler has taken so far, in seconds."""
        times = self._processes["scheduler"].cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()


@contextlib.contextmanager
def dask_processes(workers: int, folder: Path) -> Iterator[tuple[str, int]]:
    """Start a scheduler and workers, and give the file with the address and the scheduler's process."""
    file = folder / "scheduler.json"
    environment = {**os.environ, "DASK_CONFIG": str(SETTINGS)}
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> int:
        with (folder / "dask.log").open("ab") as log:
            command = [sys.executable, "-m", "dask", *arguments, "--scheduler-file", str(file)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[-1].pid

    try:
        scheduler = start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        while not file.exists():
            time.sleep(0.05)
        start("worker", "--host", "127.0.0.1", "--nworkers", str(workers), "--nthreads", "1")
        yield str(file), scheduler
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def job_of(blocks: int, file: str) -> JobSpec:
    """Return a job of about so many blocks, one for each source cell."""
    side = math.sqrt(math.prod(EXTENT_KM) / blocks)
    return parse_job(
        {
            "job": {"name": "many"},
            "domain": {"roads": "builtin:manhattan", "cell_km": side, "refine": [2]},
            "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
            "outputs": {"count": 2},
            "loss": {"kind": "euclidean"},
            "prior": {"kind": "uniform"},
            "store": {"block_cells": [1, 1]},
            "cluster": {"kind": "address", "address": file},
        }
    )


def store_with_seed(spec: JobSpec, url: str) -> MechanismStore:
    """Create a job's store, with a seed that costs nothing."""
    # Not as a job begins: it would be refused for what a seed LP of so many corners needs.
    store = create(spec, url, build_domain(spec))
    grid = store.grid
    x, y = (
        origin + grid.cell_km * np.arange(count)
        for origin, count in zip((grid.west_km, grid.south_km), grid.seeds_shape, strict=True)
    )
    places = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 1, 2)
    outputs = store.output_xy_km()
    rows = np.exp(-SHARE * spec.privacy.epsilon_per_km * np.linalg.norm(places - outputs, axis=-1))
    rows /= rows.sum(axis=1, keepdims=True)
    store.write_seed(SeedMechanism(rows, 1.0, 1.0, "made up", 0), {}, rows, {})
    return MechanismStore.open(url, mode="r+")


def run_nothing(executor: Executor, tasks: int) -> None:
    """Run tasks that do nothing, and check that each was done once."""
    seen = np.zeros(tasks, dtype=bool)
    for position, result in executor.map("nothing", nothing, [(n,) for n in range(tasks)]):
        assert position == result
        seen[position] = True
    assert seen.all()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # What was started must end with this process, however it is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory(prefix="mdpext-many-") as name, contextlib.ExitStack() as stack:
        folder, url = Path(name), f"{name}/many.zarr"
        file, scheduler = stack.enter_context(dask_processes(arguments.workers, folder))
        memory = Memory(scheduler)
        stack.callback(memory.stop)

        def measured(what: str, count: int, act: Callable[[], Any]) -> Any:
            memory.peaks()
            clocks = time.perf_counter, time.process_time, memory.scheduler_seconds
            before = [clock() for clock in clocks]
            result = act()
            spent = [clock() - start for clock, start in zip(clocks, before, strict=True)]
            names = "seconds", "client_cpu_seconds", "scheduler_cpu_seconds"
            rows.append(
                {"what": what, "count": count, **dict(zip(names, spent, strict=True)), **memory.peaks()}
            )
            if not arguments.json:
                row = rows[-1]
                print(
                    f"{what:10} {count:8,} {spent[0]:9.2f} s {count / spent[0]:9,.0f} / s; "
                    f"client {spent[1]:.2f} s of CPU, {row['client_mib']:,} MiB; "
                    f"scheduler {spent[2]:.2f} s of CPU, {row['scheduler_mib']:,} MiB",
                    flush=True,
                )
            return result

        with open_executor(ClusterSection(kind="address", address=file)) as executor:
            measured("nothing", arguments.tasks, lambda: run_nothing(executor, arguments.tasks))
            if arguments.blocks:
                spec = job_of(arguments.blocks, file)
                store = measured("create", arguments.blocks, lambda: store_with_seed(spec, url))
                blocks, stages = store.plan.blocks, Stages(silent)
                measured("extend", blocks, lambda: extend(store, executor, stages))
                measured("read", blocks, lambda: require_all_blocks(store))
                measured("finish", blocks, lambda: finish(store, executor, stages))
                measured("summarise", blocks, lambda: summarise(store))
                measured("resume", blocks, lambda: build(spec, url))
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
