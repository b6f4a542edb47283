"""Programs of windows: loss and seconds, turn by turn, for windows of several sides.

    python workflows/benchmarks/windows.py JOB.toml [--set SECTION.KEY=VALUE] [--side 7 11 15] [--moving 1e-3]

A line for every turn: the loss after it, and the seconds of this process so far, which is alone.
"""

import argparse
import tempfile
import time
from pathlib import Path

from mdpext_dask.events import Event, Note
from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.pipeline.windows import sizes, tasks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--side", type=int, nargs="+", default=[7, 11, 15])
    parser.add_argument("--moving", type=float, nargs="+", default=[tasks.MOVING])
    options = parser.parse_args()
    changes = ["cluster.kind=inline", "extension.method=windows", *options.set]
    print(
        "| side | outputs above | turn | programs | loss, km | seconds of the processor |\n"
        + "|---" * 6
        + "|"
    )
    for side in options.side:
        for moving in options.moving:
            # The last side that there is, however long it takes.
            sizes.SIDES, sizes.SECONDS, tasks.MOVING = (side,), 0.0, moving
            began = time.process_time()

            def tell(event: Event, row: str = f"| {side} | {moving:g}", began: float = began) -> None:
                if isinstance(event, Note) and event.text.startswith("windows: turn"):
                    turn, programs, _, loss, _ = event.text.removeprefix("windows: turn ").split()
                    spent = time.process_time() - began
                    print(f"{row} | {turn[:-1]} | {programs} | {loss} | {spent:.0f} |", flush=True)

            with tempfile.TemporaryDirectory() as folder:
                build(load_job(options.job, changes), str(Path(folder) / "s.zarr"), observer=tell)


if __name__ == "__main__":
    main()
