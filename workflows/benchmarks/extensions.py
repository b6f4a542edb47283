"""Compare extension methods on the same records, outputs, prior and loss: loss, seconds, certificate.

    python workflows/benchmarks/extensions.py --roads FOLDER                 # Rome: three depths, three
    epsilons python workflows/benchmarks/extensions.py --roads FOLDER --depths 3 --epsilons 1 --workers 1

FOLDER holds nodes.csv.gz and edges.csv.gz of a city's network; the job is workflows/rome.toml. Seconds are
those of the whole job, from reading the network to the evaluated store, on local processes. Prints a table in
Markdown, or with --json one line a run.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from mdpext_dask import build, load_job

_JOB = Path(__file__).resolve().parents[1] / "rome.toml"
_REFINE = {1: "[2]", 2: "[2, 3]", 3: "[2, 3, 4]"}
_METHODS = (
    ("log-convex", "half"),
    ("log-convex", "certified"),
    ("mcshane-whitney", "half"),
    ("mcshane-whitney", "certified"),
    ("cell-lp", "half"),
    ("cell-lp", "certified"),
)


def run(
    arguments: argparse.Namespace, method: str, budget: str, depth: int, epsilon: float
) -> dict[str, Any]:
    """Build one store in a temporary folder and return its summary."""
    overrides = [
        f"domain.roads={arguments.roads}",
        f"domain.refine={_REFINE[depth]}",
        f"privacy.epsilon_per_km={epsilon}",
        f"privacy.budget={budget}",
        f"extension.method={method}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        spec = load_job(_JOB, [*overrides, *arguments.set])
        return build(spec, f"{folder}/store.zarr", workers=arguments.workers)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roads", required=True, help="folder of the road network")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], choices=_REFINE)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--methods", nargs="+", default=sorted({method for method, _ in _METHODS}))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print(
            "| records | epsilon | method | budget | loss (km) | certified / promised | fallbacks | seconds |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for depth in arguments.depths:
        for epsilon in arguments.epsilons:
            for method, budget in _METHODS:
                if method not in arguments.methods:
                    continue
                done = run(arguments, method, budget, depth, epsilon)
                used = done["epsilon_certified"] / done["epsilon_planar_per_km"]
                if arguments.json:
                    print(json.dumps({**done, "budget": budget, "depth": depth}), flush=True)
                    continue
                print(
                    f"| {done['records']:,} | {epsilon:g} | {method} | {budget} | {done['loss_km']:.3f} | "
                    f"{used:.4f} | {done['fallbacks']} | {done['seconds']['total']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
