"""What no mechanism can beat, by stride: certified lower bounds, and what they take.

    python workflows/benchmarks/bounds.py workflows/rome-20km-fixed.toml --set loss.file=PATH
        [--epsilon 0.5 1 1.5] [--stride 4 2] [--workers 2] [--offsets N]

Only the problem of the job is made: prior, loss and grid; no mechanism. Seconds are of a clock and, without
workers (`--workers 0`: this process, with threads for programs that are large enough), of its processors too.
"""

import argparse
import tempfile
import time
from pathlib import Path

from mdpext_dask.compute.executor import open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, lower_bound
from mdpext_dask.events import silent
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.problem.domain import build_domain


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--stride", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--offsets", type=int)
    options = parser.parse_args()
    cluster = ClusterSection(kind="inline")
    if options.workers:
        cluster = ClusterSection(kind="local", workers=options.workers)
    print(
        "| ε | stride | offsets | lower bound | standard error | certified | seconds | of processors |\n"
        + "|---" * 8
        + "|"
    )
    for epsilon in options.epsilon:
        spec = load_job(options.job, [*options.set, f"privacy.epsilon_per_km={epsilon}"])
        with tempfile.TemporaryDirectory() as folder, open_executor(cluster) as executor:
            url, stages = str(Path(folder) / "problem.zarr"), Stages(silent)
            store = create(spec, url, build_domain(spec))
            for stride in options.stride:
                before = time.process_time()
                found = lower_bound(
                    store, executor, stages, BoundRequest(stride=stride, offsets=options.offsets)
                )
                spent = time.process_time() - before
                error = "" if found.standard_error_km is None else f"{found.standard_error_km:.4f}"
                processors = "" if options.workers else f"{spent:.0f}"
                print(
                    f"| {epsilon:g} | {stride} | {found.offsets_used} of {found.offsets_total} | "
                    f"{found.lower_bound_km:.4f} km | {error} | {found.certified_km:.4f} km | "
                    f"{found.seconds:.0f} | {processors} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
