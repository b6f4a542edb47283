"""Simulate jobs of several sizes on 1 to 4,096 workers: how long, and what holds them up.

    python workflows/benchmarks/scale_simulation.py [--store-gb-per-s 5] [--worker-gb-per-s 0.25]
    [--dispatch-ms 2.5]
                                         [-o workflows/images/scaling.png]

A discrete-event model. A worker that is free asks for a task; client and scheduler hand tasks out one after
the other, each taking them `--dispatch-ms`. The worker computes as long as the cost model says
(``mdpext_dask/pipeline/cost_model.py``, measured), and then moves the task's bytes, over its own
connection and through a store that serves the transfers in the order in which they come. The seed program is
solved on one worker, and the client reads the problem before and the receipts after, one thing after another.
Jobs of noise have tiles in the place of a seed, which are tasks like others, and write what is near.

It leaves out what could only make things better (workers fetch a task while they compute another, and move
bytes while they compute) and what could only make them worse (workers that die or are slow, other users of
the store). The store's figures are assumptions, to be replaced by those of the store at hand.
"""

import argparse
import heapq
from dataclasses import dataclass
from pathlib import Path

from mdpext_dask.extend.noise_remap import tile_count
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.cost_model import JobCosts
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.blocks import Plan, reach_of

PICTURE = Path(__file__).resolve().parents[1] / "images" / "scaling.png"
WORKERS = tuple(2**power for power in range(13))
# What compression leaves of the probabilities, measured on workflows/scale.toml; and how often a stage moves
# them: extending writes, an audit hashes and reads, evaluating reads.
_COMPRESSED = 0.65
_MOVES = {"loss": 0.0, "extend": 1.0, "audit": 2.0, "evaluate": 1.0}
_GB = 1e9
# Of more tasks than this, a stage is that of so many, and longer in proportion.
_MOST_TASKS = 50_000
_RESOURCES = ("workers", "scheduler", "store", "seed", "client")


@dataclass(frozen=True)
class Size:
    """A job: its grid, and its outputs; of noise, how far records are apart. Others have a seed program."""

    name: str
    cells: tuple[int, int]
    factor: int
    outputs: int
    spacing_km: float | None = None

    def costs(self) -> JobCosts:
        """Return what it takes: travel to fifty tasks, 100,000 nodes; budgets in closed form, or noise."""
        if self.spacing_km is not None:
            cell_km = self.spacing_km * self.factor
            job = {
                "job": {"name": "simulated"},
                "domain": {"roads": "builtin:manhattan", "cell_km": cell_km, "refine": [self.factor]},
                "privacy": {"epsilon_per_km": 5.0},
                "outputs": {"count": self.outputs},
                "prior": {"kind": "uniform"},
                "extension": {"method": "noise"},
                "cluster": {"kind": "address", "address": "tcp://scheduler:8786"},
            }
            grid = Grid(0.0, 0.0, *self.cells, cell_km, (self.factor,))
            plan = Plan.of(grid, self.outputs, reach_km=reach_of("noise", "travel", 5.0))
            return JobCosts(parse_job(job), plan, self.outputs, 50, 0, 0, 0, uniform_prior=True)
        job = {
            "job": {"name": "simulated"},
            "domain": {"roads": "builtin:manhattan", "cell_km": 1.0, "refine": [self.factor]},
            "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
            "outputs": {"count": self.outputs},
            "loss": {"tasks": 50},
            "cluster": {"kind": "address", "address": "tcp://scheduler:8786"},
        }
        plan = Plan.of(Grid(0.0, 0.0, *self.cells, 1.0, (self.factor,)), self.outputs)
        return JobCosts(parse_job(job), plan, nodes=100_000, trees=50, solves=1, rounds=0, trials=0)


SIZES = (
    Size("100 thousand x 64", (9, 19), 24, 64),
    Size("10 million x 100", (18, 39), 120, 100),
    Size("100 million x 300", (50, 50), 200, 300),
    Size("1,000 million x 1,000, 2,600 seeds", (50, 50), 632, 1000),
    Size("1,000 million x 1,000, 10,200 seeds", (100, 100), 316, 1000),
    Size("noise, 99 thousand x 4,197", (9, 19), 24, 4_197, spacing_km=0.042),
    Size("noise, 2.4 million x 7,000", (48, 48), 32, 7_000, spacing_km=0.0125),
    Size("noise, 1,000 million x 100,000", (3_953, 3_953), 8, 100_000, spacing_km=0.0125),
)


@dataclass(frozen=True)
class Machines:
    """What a job runs on.

    Parameters
    ----------
    dispatch
        Seconds of client and scheduler for a task.
    store_bytes, worker_bytes
        Bytes per second that the store moves in all, and that a worker's connection does.
    """

    dispatch: float
    store_bytes: float
    worker_bytes: float


def stage_seconds(tasks: int, each: float, moved: float, workers: int, on: Machines) -> float:
    """Return how long a stage takes.

    Parameters
    ----------
    tasks
        Number of tasks.
    each
        Seconds that a worker computes for one.
    moved
        Bytes that one moves.
    workers, on
        How many there are, and what they have.
    """
    if tasks > _MOST_TASKS:  # beginning and end matter little then
        part = stage_seconds(_MOST_TASKS, each, moved, workers, on)
        return part * tasks / _MOST_TASKS
    # (when, which worker, whether it has computed and wants to move bytes)
    events = [(0.0, worker, False) for worker in range(min(workers, tasks))]
    scheduler = store = end = 0.0
    given = 0
    while events:
        now, worker, computed = heapq.heappop(events)
        if computed:
            store = max(store, now) + moved / on.store_bytes
            heapq.heappush(events, (max(store, now + moved / on.worker_bytes), worker, False))
            continue
        end = now
        if given < tasks:
            given += 1
            scheduler = max(scheduler, now) + on.dispatch
            heapq.heappush(events, (scheduler + each, worker, True))
    return end


def simulate(size: Size, workers: int, on: Machines) -> tuple[float, str]:
    """Return how long a job takes with so many workers, and which resource is busy longest."""
    costs = size.costs()
    blocks, each = costs.plan.blocks, costs.task_seconds()
    stored = costs.plan.store_bytes / blocks * _COMPRESSED
    serial = costs.seconds(1)
    busy = dict.fromkeys(_RESOURCES, 0.0)
    busy["seed"], busy["client"] = serial["seed"], serial["domain"] + serial["boundary"]
    if costs.noise is not None:
        tiles = tile_count(costs.noise)
        busy["seed"] = stage_seconds(tiles, costs.noise_seconds, 0.0, workers, on)
    total = busy["seed"] + busy["client"]
    for stage, moves in _MOVES.items():
        if costs.noise is not None and stage == "loss":
            continue
        moved = moves * stored
        total += stage_seconds(blocks, each[stage], moved, workers, on)
        busy["workers"] += blocks * (each[stage] + moved / on.worker_bytes) / min(workers, blocks)
        busy["scheduler"] += blocks * on.dispatch
        busy["store"] += blocks * moved / on.store_bytes
    return total, max(busy, key=lambda resource: busy[resource])


def draw(curves: dict[str, list[tuple[float, str]]], path: Path) -> None:
    """Draw seconds by workers; the mark says what holds a job up."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    # Okabe and Ito's colours, told apart by everybody; marks carry the rest.
    colours = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442")
    marks = dict(zip(_RESOURCES, ("o", "s", "^", "D", "v"), strict=True))
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for (name, curve), colour in zip(curves.items(), colours, strict=True):
        axes.plot(WORKERS, [seconds for seconds, _ in curve], color=colour, label=name)
        for workers, (seconds, held_up_by) in zip(WORKERS, curve, strict=True):
            axes.plot(workers, seconds, marks[held_up_by], color=colour, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="workers of one core", ylabel="seconds, seed included")
    axes.set_xticks(WORKERS[::2], [f"{n:,}" for n in WORKERS[::2]])
    axes.grid(which="major", alpha=0.3)
    sizes = axes.legend(title="records x outputs", fontsize=8, loc="lower left")
    axes.add_artist(sizes)
    used = {resource for curve in curves.values() for _, resource in curve}
    shown = [
        Line2D([], [], linestyle="", marker=marks[resource], color="#555555", label=resource)
        for resource in _RESOURCES
        if resource in used
    ]
    axes.legend(handles=shown, title="busy longest", fontsize=8, loc="upper right")
    axes.set_ylim(bottom=1e-4, top=1e8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Simulate, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store-gb-per-s", type=float, default=5.0)
    parser.add_argument("--worker-gb-per-s", type=float, default=0.25)
    parser.add_argument("--dispatch-ms", type=float, default=2.5)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    on = Machines(options.dispatch_ms / 1e3, options.store_gb_per_s * _GB, options.worker_gb_per_s * _GB)
    curves: dict[str, list[tuple[float, str]]] = {}
    print(
        "| records x outputs | blocks | block | seed | " + " | ".join(f"{n:,}" for n in WORKERS[::3]) + " |"
    )
    print("|" + "---|" * (4 + len(WORKERS[::3])))
    for size in SIZES:
        costs = size.costs()
        curves[size.name] = [simulate(size, workers, on) for workers in WORKERS]
        seed = costs.program_seconds if costs.noise is None else costs.noise_seconds * tile_count(costs.noise)
        block = costs.plan.store_bytes / costs.plan.blocks
        cells = [f"{seconds:,.0f} s ({what})" for seconds, what in curves[size.name][::3]]
        print(
            f"| {size.name} | {costs.plan.blocks:,} | {block / 2**20:,.0f} MiB | "
            f"{seed:,.0f} s | {' | '.join(cells)} |"
        )
    draw(curves, options.output)
    print(f"drawn: {options.output}")


if __name__ == "__main__":
    main()
