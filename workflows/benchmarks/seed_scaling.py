"""How the structured seed solver scales, against HiGHS where that ends in time.

    python workflows/benchmarks/seed_scaling.py [--roads FOLDER] [--threads N] [--highs-seconds 300] [--quick]

Seed programs on a 20 km square with travel-distance loss, 20 tasks, epsilon = 1/km and the published `half`
budgets: of Manhattan, which is built in, or of the network in FOLDER, around its median node. Every solve
runs in a process of its own, one after the other; seconds are those of the solve alone, memory is the
process' largest. HiGHS is its interior-point method without crossover. Prints a table, and draws seconds
and memory against seeds and outputs into `workflows/images/seed_scaling.png`.
"""

import argparse
import contextlib
import math
import multiprocessing
import queue
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mdpext_dask.compute.executor import processors
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.loss import assemble_seed_cost, corner_costs
from mdpext_dask.readers.roads.read_network import read_roads
from mdpext_dask.seed.budget import axis_budgets, even_split, half_budgets
from mdpext_dask.seed.highs import solve_highs
from mdpext_dask.seed.interior_point import solve_interior_point
from mdpext_dask.seed.model import SeedMechanism, SeedProblem
from mdpext_dask.seed.solve import one_blas_thread

PICTURE = Path(__file__).resolve().parents[1] / "images" / "seed_scaling.png"
SIDE_KM, EPSILON, FLOOR, TASKS = 20.0, 1.0, 1e-6, 20
# Records along a side of the square, about: what the cost is averaged over.
RECORDS = 48
# A little more than there are anywhere, so that the square is no larger than its source cells.
KM_PER_DEGREE = 111.8


@dataclass(frozen=True)
class Case:
    """A program: source cells along a side, outputs (None: the seeds), gap, whether HiGHS tries."""

    cells: int
    outputs: int | None
    gap: float
    highs: bool = False

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return (self.cells + 1) ** 2


@dataclass(frozen=True)
class Solved:
    """What came out."""

    mechanism: SeedMechanism
    seconds: float
    bytes: int


TABLE = (
    Case(12, None, 1e-6, highs=True),
    Case(12, 100, 1e-6, highs=True),
    Case(16, None, 1e-6, highs=True),
    Case(24, 100, 1e-5),
    Case(48, 100, 1e-4),
    Case(32, None, 1e-4),
)
ALONG_SEEDS = tuple(Case(cells, 100, 1e-5) for cells in (6, 9, 12, 16, 20, 24, 32, 40))
ALONG_OUTPUTS = tuple(Case(16, outputs, 1e-5) for outputs in (10, 30, 100, 300, 1000))
QUICK = (Case(6, None, 1e-6, highs=True), Case(8, 40, 1e-5))


def make_problem(case: Case, roads: str) -> SeedProblem:
    """Make the seed program of a case."""
    lon, lat = np.median(read_roads(roads, None).lonlat, axis=0)
    across = SIDE_KM / 2 / KM_PER_DEGREE / np.cos(np.radians(lat))
    along = SIDE_KM / 2 / KM_PER_DEGREE
    outputs = {"choose": "seeds"} if case.outputs is None else {"count": case.outputs}
    job = {
        "domain": {
            "roads": roads,
            "bbox": [float(lon - across), float(lat - along), float(lon + across), float(lat + along)],
            "cell_km": SIDE_KM / case.cells,
            "refine": [max(RECORDS // case.cells, 1)],
        },
        "privacy": {"epsilon_per_km": EPSILON},
        "outputs": outputs,
        "prior": {"kind": "uniform"},
        "loss": {"tasks": TASKS},
    }
    domain = build_domain(parse_job(job))
    grid = domain.grid
    everything = slice(0, grid.cells_x), slice(0, grid.cells_y)
    cost = assemble_seed_cost(grid, corner_costs(grid, domain.loss, domain.prior, everything))
    beta = half_budgets(even_split(EPSILON, 2.0)).beta
    return SeedProblem(cost, grid.seeds_shape, *axis_budgets(grid, beta), FLOOR)


def work(case: Case, roads: str, threads: int, solver: str, answers: "multiprocessing.Queue[Solved]") -> None:
    """Solve one case; what a process of its own does."""
    problem = make_problem(case, roads)
    started = time.perf_counter()
    if solver == "highs":
        mechanism = solve_highs(problem)
    else:
        with one_blas_thread():
            mechanism = solve_interior_point(problem, gap=case.gap, threads=threads)
    seconds = time.perf_counter() - started
    answers.put(Solved(mechanism, seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def solve(case: Case, roads: str, threads: int, solver: str, limit: float | None = None) -> Solved | None:
    """Solve a case in a fresh process; None if it takes longer than the limit."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[Solved] = context.Queue()
    process = context.Process(target=work, args=(case, roads, threads, solver, answers), daemon=True)
    process.start()
    deadline = math.inf if limit is None else time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=1)
            if process.exitcode is not None:
                raise SystemExit(f"{solver} at {case} ended with exit code {process.exitcode}")
        return None
    finally:
        process.kill()
        process.join()


def table(cases: tuple[Case, ...], roads: str, threads: int, limit: float) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield (
        "| seeds x outputs | gap asked / reached | structured | iterations | memory | HiGHS | ratio "
        "| objectives differ by |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        ours = solve(case, roads, threads, "structured")
        assert ours is not None
        seeds, outputs = ours.mechanism.rows.shape
        line = (
            f"| {seeds:,} x {outputs:,} | {case.gap:.0e} / {ours.mechanism.gap:.1e} | {ours.seconds:.2f} s "
            f"| {ours.mechanism.iterations} | {ours.bytes / 2**30:.2f} GiB |"
        )
        if not case.highs:
            yield f"{line} - | - | - |"
            continue
        theirs = solve(case, roads, threads, "highs", limit)
        if theirs is None:
            yield f"{line} > {limit:.0f} s | > {limit / ours.seconds:.0f} | - |"
            continue
        apart = abs(ours.mechanism.primal / theirs.mechanism.primal - 1)
        yield f"{line} {theirs.seconds:.2f} s | {theirs.seconds / ours.seconds:.1f} | {apart:.1e} |"


def draw(curves: dict[str, list[tuple[int, Solved]]], path: Path) -> None:
    """Draw seconds and memory along seeds and outputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(10, 4), layout="constrained")
    for axis, (title, points) in zip(axes, curves.items(), strict=True):
        sizes = [size for size, _ in points]
        axis.loglog(sizes, [p.seconds for _, p in points], "o-", color="C0", label="seconds")
        axis.loglog(sizes, [p.bytes / 2**30 for _, p in points], "s--", color="C1", label="GiB")
        axis.set(title=title, xlabel=title.split(",")[0], ylabel="seconds, GiB")
        axis.grid(which="both", alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--roads", default="builtin:manhattan", help="folder of a road network")
    parser.add_argument("--threads", type=int, default=processors())
    parser.add_argument("--highs-seconds", type=float, default=300.0, help="when to stop HiGHS")
    parser.add_argument("--quick", action="store_true", help="small programs, no picture")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    given = parser.parse_args()
    cases = QUICK if given.quick else TABLE
    for line in table(cases, given.roads, given.threads, given.highs_seconds):
        print(line, flush=True)
    if given.quick:
        return
    curves: dict[str, list[tuple[int, Solved]]] = {}
    for title, along in (("seeds, 100 outputs", ALONG_SEEDS), ("outputs, 289 seeds", ALONG_OUTPUTS)):
        curves[title] = []
        for case in along:
            solved = solve(case, given.roads, given.threads, "structured")
            assert solved is not None
            size = case.seeds if along is ALONG_SEEDS else solved.mechanism.rows.shape[1]
            curves[title].append((size, solved))
            print(f"{title}: {size:,}: {solved.seconds:.2f} s, {solved.bytes / 2**30:.2f} GiB", flush=True)
    draw(curves, given.output)
    print(f"drawn: {given.output}")


if __name__ == "__main__":
    main()
