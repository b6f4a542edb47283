"""A job as `mdpext start` writes it against tries by hand: what each of them loses, and how long it takes.

    mdpext start PLACE --epsilon 5 --output place.toml
    python workflows/benchmarks/defaults.py place.toml [--workers 2] [--without "300 outputs, log-convex" ...]

Records stay where they are, but in the try that says so: fewer would lose less and hide less. A try that the
job refuses is shown with the reason.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mdpext_dask.errors import MdpextError, first_line
from mdpext_dask.job.spec import JobSpec, load_job, with_overrides
from mdpext_dask.pipeline.run import build


def tries(spec: JobSpec, outputs: int) -> Iterator[tuple[str, list[str]]]:
    """Yield names of tries, and what they set.

    Parameters
    ----------
    spec
        The job, with `cell_km` and `refine` as `mdpext start` writes them.
    outputs
        How many outputs it has of itself.

    Raises
    ------
    SystemExit
        If its records would not stay where they are.
    """
    cell_km, refine = spec.domain.cell_km, spec.domain.refine
    if cell_km is None or refine is None or refine[0] != 2:
        raise SystemExit(
            "the job needs domain.cell_km and refine, which begins with 2, as mdpext start writes them"
        )
    yield "all road nodes", ["outputs.choose=all-road-nodes", "outputs.limit=200000"]
    for share in (1.5, 0.25):
        count = int(share * outputs)
        yield f"{count:,} road nodes", ["outputs.choose=road-nodes", f"outputs.count={count}"]
    yield "1,000 road nodes", ["outputs.choose=road-nodes", "outputs.count=1000"]
    centres = min(5000, outputs)
    yield f"{centres:,} centres of the prior", ["outputs.choose=prior", f"outputs.count={centres}"]
    yield "cells of half the side", [f"domain.cell_km={cell_km / 2}", f"domain.refine={list(refine[1:])}"]
    yield "cells of twice the side", [f"domain.cell_km={cell_km * 2}", f"domain.refine={[2, *refine]}"]
    yield "records nearer by a quarter", [f"domain.cell_km={cell_km * 0.75}"]
    yield (
        "300 outputs, log-convex",
        ["outputs.choose=road-nodes", "outputs.count=300", "extension.method=log-convex"],
    )
    yield "3,000 s of programs", ["extension.seconds=3000"]


def main() -> None:
    """Measure and print, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--without", nargs="+", default=[], help="tries that are left out")
    options = parser.parse_args()
    spec = load_job(options.job, options.set)
    print("| try | outputs | method | loss, km | against the job | seconds |\n" + "|---" * 6 + "|")

    def measured(name: str, changes: list[str]) -> tuple[float, int]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = build(with_overrides(spec, changes), Path(folder) / "s.zarr", workers=options.workers)
            except MdpextError as error:
                print(f"| {name} | | | {first_line(error)} | | |", flush=True)
                return float("nan"), 0
        loss, outputs = float(found["loss_km"]), int(found["outputs"])
        against = f"{loss / own - 1:+.2%}" if changes else ""
        cells = (name, f"{outputs:,}", found["method"], f"{loss:.4f}", against)
        print(f"| {' | '.join(cells)} | {time.monotonic() - began:.0f} |", flush=True)
        return loss, outputs

    own = float("nan")
    own, outputs = measured("the job", [])
    if not outputs:
        return
    for name, changes in tries(spec, outputs):
        if name not in options.without:
            measured(name, changes)


if __name__ == "__main__":
    main()
