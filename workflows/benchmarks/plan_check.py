"""Hold what `plan` says against what jobs take on this machine, stage by stage.

    python workflows/benchmarks/plan_check.py [NAME ...] [--workers 1] [--roads FOLDER]

For every job and stage: planned seconds, wall clock, processor seconds of client and of workers, and wall
clock over plan. Where the machine does other work as well, processor seconds of a single worker say more; the
client's go up with the time that it waits. Jobs on Rome need its network, as a folder `rome` with
nodes.csv.gz and edges.csv.gz under `--roads` or the environment's MDPEXT_ROADS.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from scale import Meter

from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.run import build

HERE = Path(__file__).resolve().parents[1]
_MANHATTAN, _ROME = HERE / "manhattan-published.toml", HERE / "rome.toml"
_DENSE = ["domain.cell_km=0.5", "domain.refine=[12]"]
_FEW = ["outputs.count=16", "domain.refine=[2, 2]"]
JOBS: dict[str, tuple[Path, list[str]]] = {
    "half": (_MANHATTAN, ['privacy.budget="half"']),
    "bound": (_MANHATTAN, ['privacy.budget="bound"']),
    "dense-bound": (_MANHATTAN, [*_DENSE, 'privacy.budget="bound"']),
    "certified": (_MANHATTAN, []),
    "mcshane-whitney": (_MANHATTAN, ['extension.method="mcshane-whitney"']),
    "cell-lp": (_MANHATTAN, [*_FEW, 'extension.method="cell-lp"', 'privacy.budget="half"']),
    "euclidean": (_MANHATTAN, ['loss.kind="euclidean"', 'privacy.budget="bound"']),
    "rome": (_ROME, []),
    "rome-certified": (_ROME, ['privacy.budget="certified"']),
}


def main() -> None:
    """Run the jobs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(JOBS)}; default: all")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--roads", type=Path, default=os.environ.get("MDPEXT_ROADS"))
    options = parser.parse_args()
    for name in options.names or JOBS:
        job, keys = JOBS[name]
        if job == _ROME:
            if options.roads is None:
                print(f"\n{name}: left out, there is no network (--roads)")
                continue
            keys = [*keys, f'domain.roads="{options.roads / "rome"}"']
        spec = load_job(job, keys)
        with tempfile.TemporaryDirectory() as folder, Meter() as meter:
            summary = build(spec, f"{folder}/m.zarr", workers=options.workers, observer=meter)
        show(name, summary, meter)


def show(name: str, summary: dict[str, Any], meter: Meter) -> None:
    """Print one job's table."""
    records, outputs, seeds = summary["records"], summary["outputs"], summary["seeds"]
    print(f"\n{name}: {records:,} records x {outputs} outputs, {seeds} seeds, {summary['blocks']} blocks")
    print(f"{'':<12}{'planned s':>10}{'wall s':>10}{'client cpu':>12}{'workers':>10}{'wall/plan':>11}")
    planned, took = summary["seconds_planned"], summary["seconds"]
    for stage in [stage for stage in (*meter.seconds, "total") if stage in planned]:
        used = f"{'':>22}"
        if stage in meter.seconds:
            used = f"{meter.client_cpu[stage]:12.2f}{meter.worker_cpu[stage]:10.2f}"
        ratio = took[stage] / planned[stage] if planned[stage] else float("nan")
        print(f"{stage:<12}{planned[stage]:10.2f}{took[stage]:10.2f}{used}{ratio:11.2f}", flush=True)


if __name__ == "__main__":
    main()
