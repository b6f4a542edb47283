"""What it takes to measure attackers of a finished store, by stage: processor seconds, and memory.

    mdpext run workflows/rome.toml --set outputs.count=100 --store rome.zarr
    python workflows/benchmarks/attackers.py rome.zarr [--releases 100]

Everything runs in this process, so that its processor seconds are all there are; the memory is the most that
it has had, with all libraries.
"""

import argparse
import resource
import sys
import time

from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.evaluation.attackers.measure import measure_attacks, prepare
from mdpext_dask.evaluation.attackers.requests import AttackRequest
from mdpext_dask.evaluation.evaluate import measure_spread
from mdpext_dask.events import Event, StageFinished
from mdpext_dask.store.mechanism_store import MechanismStore

# Of getrusage: kilobytes on Linux, bytes on macOS.
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--releases", type=int, default=100)
    options = parser.parse_args()
    store = MechanismStore.open(options.store)
    print(f"{store.grid.records:,} records x {store.outputs} outputs, {store.plan.blocks} blocks\n")
    print("| stage | seconds of one processor | most memory so far |\n|---|---|---|")
    before = started = time.process_time()

    def observe(event: Event) -> None:
        nonlocal before
        if isinstance(event, StageFinished):
            now = time.process_time()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES / 2**20
            print(f"| {event.stage} | {now - before:.2f} | {memory:.0f} MiB |", flush=True)
            before = now

    attack = prepare(store, AttackRequest(releases=options.releases))
    executor, stages = InlineExecutor(), Stages(observe)
    spread = measure_spread(store, executor, stages, keep_records=attack.keeps_records)
    found = measure_attacks(store, executor, stages, spread, attack)
    print(f"| all | {time.process_time() - started:.2f} | |\n")
    for key in ("inference_error_km", "inference_error_lower_km", "error_under_loss_km", "leakage_bits"):
        print(f"{key}: {found[key]}")
    print(f"not measured: {found['not_measured']}")


if __name__ == "__main__":
    main()
