"""What a job will take before it runs: bytes, tasks, memory, the scheduler's work, seconds."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mdpext_dask.compute.executor import WINDOW, WINDOW_OF_WORKER
from mdpext_dask.evaluation.baselines.fine_noise import cells_of, posterior_reach
from mdpext_dask.extend.noise import NoiseLattice
from mdpext_dask.extend.noise_remap import BLOCK, MOST_MOMENTS, TILE, tile_count
from mdpext_dask.job.sections import CELL_PROGRAMS, LOG_CONVEX, NOISE, RECORDS, WINDOWS
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.budget_search import ENOUGH_REFINING
from mdpext_dask.pipeline.cells.improve import MORE_SWEEPS, PATCH, TRIAL_SWEEPS, box_count
from mdpext_dask.pipeline.cells.noise import MOST_NUMBERS
from mdpext_dask.pipeline.memory import noise_outputs, noise_places, noise_tile
from mdpext_dask.pipeline.seed_stage import COARSE_SHARES, DENSE_SEEDS, DENSE_SHARES
from mdpext_dask.pipeline.windows.sizes import SHARE, window_program, windows_of_job
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.outputs import output_count
from mdpext_dask.seed.budget import candidate_splits, many_seeds
from mdpext_dask.seed.record_program import predicted_seconds, record_reach
from mdpext_dask.store.blocks import FLOAT32, FLOAT64, Plan
from mdpext_dask.store.mechanism_store import plan_of

WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
# About how many seed programs and trials of a whole mechanism a search for certified budgets takes; where
# refining has rounds enough, it begins sooner; and trials of a round of refining.
_SEARCH_SOLVES, _SEARCH_TRIALS = 14, 20
_STARTS, _FEW_STARTS, _TRIALS_OF_START, _TRIALS_OF_ROUND = 4, 2, 2, 4
# Cell programs: tries of a sweep on a coarse level, splits that are searched; arrays over records and outputs
# that are there at once.
_TRIES, _SPLITS, _ARRAYS = 3, {"certified": 5, "half": 2, "bound": 2}, 6
# What the scheduler and the client hold of a task together, in bytes.
_TASK_BYTES = 20_000
# What a task answers with, in bytes, where that is little.
_ANSWER_BYTES = 500

# Seconds that a job's parts take, each measured alone on one core of a server processor at 2.1 GHz; shared
# machines of that kind are up to 1.6 times as fast from one second to the next. They scale a plan, they do
# not promise. `workflows/benchmarks/plan_check.py` compares them with jobs on this machine; docs/scaling.md
# has what it finds. First those of a worker: an element of the (records x outputs) array; and a task,
# whatever it does: opening the store, reading the corners, writing small objects.
ELEMENT = {"loss": 1.3e-8, "extend": 3.5e-8, "audit": 4.5e-8, "evaluate": 1.6e-8, "trial": 5.0e-8}
TASK = {"loss": 0.014, "extend": 0.026, "audit": 0.022, "evaluate": 0.016, "trial": 0.020}
# What operators that make scores of their own take more for an element, in extending and in trials.
_SCORES = 3.5e-8
# Reading and checking one element of a loss file.
_READ = 1.0e-8
# What client and scheduler do for a task, one after the other, whichever worker runs it.
DISPATCH = 2.5e-3
# What the client does for a block when a store is finished: lists it, reads its receipt, compares its sides.
_CLOSE, _CLOSE_BLOCK = 0.05, 1.0e-3
# Reading a network costs so much a node; a shortest-path tree, so much a node again; the libraries that it
# takes; and the prior, a record.
_NODE, _TREE_NODE, _LIBRARIES, _RECORD = 6e-6, 1.7e-7, 0.35, 1.2e-8
# An iteration of the structured solver: a line of seeds, an entry (seed and output), a multiplication in the
# sum of inverses.
_SEED_LINE, _SEED_ENTRY, _SEED_FLOP = 3.7e-4, 2.1e-6, 8.5e-11
# Its iterations at 10,000 entries and ε h = 1, and by which powers of these; but not more often than so much.
# Programs of a uniform prior take fewer. Measured: 29 at 200 seeds x 16 outputs, 38 at 200 x 64, 57 at
# 741 x 64 (ε h = 1/2), 63 at 2,499 x 40; 19 at 132 x 20 and 29 at 132 x 100 (ε h = 4.8), 16 (ε h = 14).
_ITERATIONS, _USUAL_ENTRIES, _BY_ENTRIES, _BY_CELL, _MOST_ITERATIONS = 36, 10_000, 0.3, -0.15, 65
_UNIFORM = 0.8
# The program over all records, as many times as bounds on as many take: it ends nearer to its optimum where
# most probabilities are tiny. Measured 1 to 3.2.
_RECORDS_MORE = 2.0
# What workers load before the first one.
_FIRST_PROGRAM = 0.3
# A program of a round of refining, as a share of one from the start.
_PROGRAM = 0.63
# Cell programs: a number of a lattice in a try; and what the client takes to make planar noise, which the
# last level is begun from as well, for an element.
_CELL, _NOISE = 4e-6, 1.0e-5
# Choosing the remap of noise: to begin with; a tile; a pair of a noise cell and a place within reach, and an
# output more of it; a loss between a place of a tile and an output.
_REMAP, _REMAP_TILE, _REMAP_PAIR, _REMAP_OUTPUT, _REMAP_LOSS = 2.0, 0.05, 5e-9, 3e-11, 6e-8
# Candidates lie within so much, times 1 / ε, of a block of cells.
_REMAP_RADIUS = 3.0
# Rows of noise: a record; an element near it, and of so many outputs more, as near ones share chunks with
# others; and the loss of an output at a place with a prior. Measured at 1,000 to 27,397 outputs and 64
# thousand to 2.2 million records: jobs take 0.8 to 1.8 times as long.
_NOISE_RECORD = {"extend": 5.0e-5, "audit": 3.5e-5, "evaluate": 2.6e-5}
_NOISE_ELEMENT, _BESIDE_NEAR = {"extend": 5.0e-8, "audit": 3.5e-8}, 1024
_NOISE_LOSS = 1.0e-7
# Starting processes, and what they import.
_START = 2.2


def _seed_work(spec: JobSpec, grid: Grid) -> tuple[int, int, int]:
    """Return about how many seed programs, rounds of refining and trials of a mechanism a job takes."""
    if spec.extension.method in (NOISE, WINDOWS):
        return 0, 0, 0
    if spec.extension.method == RECORDS:
        return 1, 0, 0
    if spec.privacy.budget == "half":
        return len(candidate_splits(spec.privacy.epsilon_per_km, spec.domain.metric_p)), 0, 0
    if spec.privacy.budget == "bound":
        return 1, 0, 0
    shares = 0
    if spec.extension.method == CELL_PROGRAMS:
        if spec.privacy.epsilon_per_km * grid.cell_km > DENSE_SEEDS:
            return len(COARSE_SHARES), 0, 0
        shares = len(DENSE_SHARES)
    # Only interpolated scores are refined.
    rounds = spec.seed.refine_rounds if spec.extension.method in (LOG_CONVEX, CELL_PROGRAMS) else 0
    if not rounds:
        return shares + _SEARCH_SOLVES, 0, _SEARCH_TRIALS
    if rounds < ENOUGH_REFINING:
        return shares + _SEARCH_SOLVES, rounds, _SEARCH_TRIALS + _TRIALS_OF_ROUND * rounds
    starts = _FEW_STARTS if many_seeds(grid.seeds) else _STARTS
    return shares + starts, rounds, _TRIALS_OF_START * starts + _TRIALS_OF_ROUND * rounds


@dataclass(frozen=True)
class _CellWork:
    """What cell programs take.

    Parameters
    ----------
    seconds
        About how long, of one worker.
    client_seconds
        And of the client, meanwhile.
    parts
        Over how many workers most of it can be shared out.
    tasks
        How many tasks.
    work_bytes
        Bytes of arrays in the making beside the store, at most.
    """

    seconds: float
    client_seconds: float
    parts: int
    tasks: int
    work_bytes: int


def _cell_work(spec: JobSpec, plan: Plan) -> _CellWork:
    """Return about what cell programs take; nothing, if the job has none."""
    if spec.extension.method != CELL_PROGRAMS:
        return _CellWork(0.0, 0.0, 1, 0, 0)
    grid = plan.grid
    parts = [n for n in grid.refine if n > 1] or [1]
    coarser = range(len(parts) - 1, -1, -1)
    sweeps = [spec.extension.sweeps * MORE_SWEEPS**number for number in coarser]
    tries = [_TRIES] * (len(parts) - 1) + [1]
    # Splits are judged on the first level.
    sweeps[0] += TRIAL_SWEEPS * (_SPLITS[spec.privacy.budget] - 1)
    elements, client = grid.records * plan.outputs, 0.0
    if spec.privacy.budget == "certified" and elements <= MOST_NUMBERS:
        sweeps[-1] += MORE_SWEEPS * spec.extension.sweeps
        client = _NOISE * elements
    seconds, tasks, done, boxes = 0.0, 0, 1, 1
    for step, count, tried in zip(parts, sweeps, tries, strict=True):
        done *= step
        points = (grid.cells_x * done + 1) * (grid.cells_y * done + 1)
        boxes = round(box_count(points / PATCH**2))
        work = points * plan.outputs * _CELL + elements * ELEMENT["trial"] + 2 * boxes * TASK["trial"]
        seconds += count * tried * work
        tasks += count * tried * 2 * boxes
    return _CellWork(seconds, client, boxes, tasks, _ARRAYS * elements * FLOAT64)


@dataclass(frozen=True)
class JobCosts:
    """What a job will take, but for the number of workers.

    Parameters
    ----------
    spec
        The job.
    plan
        How its grid is cut.
    nodes, trees
        Road nodes, and shortest-path trees over them; none where the loss is read from a file or Euclidean.
    solves, rounds, trials
        About how many seed programs, rounds of refining, and trials of a whole mechanism there will be.
    uniform_prior
        Whether all records are equally likely.
    """

    spec: JobSpec
    plan: Plan
    nodes: int
    trees: int
    solves: int
    rounds: int
    trials: int
    uniform_prior: bool = False

    @classmethod
    def of(cls, spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> "JobCosts":
        """Return the costs of a job with the network, or the loss file, and the grid of `geometry`."""
        plan = plan_of(spec, geometry.grid, output_count(spec, geometry), geometry.kept)
        nodes = geometry.network.nodes if isinstance(geometry, RoadGeometry) else 0
        trees = spec.loss.tasks if spec.loss.kind == "travel" else 0
        uniform = spec.prior.kind == "uniform"
        if isinstance(geometry, FileGeometry):
            uniform = bool(np.ptp(geometry.problem.prior) == 0)
        return cls(spec, plan, nodes, trees, *_seed_work(spec, geometry.grid), uniform_prior=uniform)

    @property
    def elements(self) -> int:
        """Records times outputs, of which far ones of local rows are not counted."""
        return self.plan.grid.records * self.plan.near_outputs

    @cached_property
    def cells(self) -> "_CellWork":
        """What cell programs take."""
        return _cell_work(self.spec, self.plan)

    @property
    def tasks(self) -> int:
        """A task for each block in loss, extend, audit, evaluate and every trial; and those of the seed."""
        stages, seeds = (4, self.solves + self.rounds) if self.noise is None else (3, tile_count(self.noise))
        stages += bool(self.windows)  # the loss of the noise that they begin with
        return (stages + self.trials) * self.plan.blocks + seeds + sum(self.windows) + self.cells.tasks

    @property
    def dispatch(self) -> float:
        """Seconds of client and scheduler for every task; none where tasks run in this process."""
        return 0.0 if self.spec.cluster.kind == "inline" else DISPATCH

    def task_seconds(self) -> dict[str, float]:
        """Return how long a worker has a task of each stage, in s."""
        elements = self.elements / self.plan.blocks
        scores = 0.0 if self.spec.extension.method in (LOG_CONVEX, CELL_PROGRAMS) else _SCORES
        more = {"extend": scores, "trial": scores}
        if self.noise is not None:
            return self._noise_task_seconds()
        return {stage: elements * (ELEMENT[stage] + more.get(stage, 0.0)) + TASK[stage] for stage in TASK}

    def _noise_task_seconds(self) -> dict[str, float]:
        grid, outputs, blocks = self.plan.grid, self.plan.outputs, self.plan.blocks
        near = min(self.plan.near_outputs + _BESIDE_NEAR, outputs)
        places = noise_places(self.spec, grid, self.nodes)
        work = {"evaluate": places * outputs * _NOISE_LOSS}
        for stage, each in _NOISE_RECORD.items():
            element = _NOISE_ELEMENT.get(stage, 0.0)
            work[stage] = work.get(stage, 0.0) + grid.records * (each + near * element)
        return {stage: work.get(stage, 0.0) / blocks + each for stage, each in TASK.items()}

    @property
    def program_seconds(self) -> float:
        """How long a seed program takes, in s; or the one over all records."""
        if self.spec.extension.method == RECORDS:
            reach = record_reach(self.plan.grid.shape, self.spec.domain.metric_p, self.plan.outputs)
            each = predicted_seconds(self.plan.grid.shape, self.plan.outputs, reach)
            return TASK["trial"] + _RECORDS_MORE * each
        seeds, shape, outputs = self.plan.grid.seeds, self.plan.grid.seeds_shape, self.plan.outputs
        entries = seeds * outputs
        each = _SEED_LINE * max(shape) + _SEED_ENTRY * entries + _SEED_FLOP * entries * seeds * min(shape)
        steep = math.pow(self.spec.privacy.epsilon_per_km * self.plan.grid.cell_km, _BY_CELL)
        iterations = _ITERATIONS * math.pow(entries / _USUAL_ENTRIES, _BY_ENTRIES) * steep
        solving = each * min(iterations, _MOST_ITERATIONS) * (_UNIFORM if self.uniform_prior else 1.0)
        return TASK["trial"] + solving

    @cached_property
    def noise(self) -> NoiseLattice | None:
        """The cells of noise, if the job has noise, or begins with it."""
        if self.spec.extension.method not in (NOISE, WINDOWS):
            return None
        return cells_of(self.plan.grid, self.spec.privacy.epsilon_per_km)

    @cached_property
    def windows(self) -> list[int]:
        """How many windows there are, turn by turn, about: not those where nothing is kept."""
        if self.spec.extension.method != WINDOWS:
            return []
        windows = windows_of_job(self.spec, self.plan.grid, self.plan.outputs)
        kept = 1 - len(self.plan.skipped) / self.plan.blocks
        return [math.ceil(kept * windows.count(turn)) for turn in range(windows.turns)]

    def _window_seconds(self, workers: int) -> float:
        """Return how long programs of windows take."""
        if not self.windows:
            return 0.0
        each = predicted_seconds(*window_program(self.spec, self.plan.grid, self.plan.outputs))
        turns = sum(math.ceil(count / workers) for count in self.windows)
        return turns * (SHARE * each + TASK["trial"])

    @cached_property
    def noise_seconds(self) -> float:
        """How long a worker takes for a tile of cells of noise on average, in s."""
        spec, grid, noise = self.spec, self.plan.grid, self.noise
        if noise is None:
            return 0.0
        epsilon, places = spec.privacy.epsilon_per_km, noise_places(spec, grid, self.nodes)
        reach, tiles = posterior_reach(noise, epsilon), tile_count(noise)
        block = BLOCK * noise.cell_km + 2 * _REMAP_RADIUS / epsilon
        outputs = noise_outputs(spec, grid, self.plan.outputs, block)
        pairs = places * math.pi * reach**2
        # So many tiles take the losses of a place.
        times = min((1 + 2 * reach / TILE) ** 2, tiles)
        near, found = noise_tile(spec, grid, self.nodes, self.plan.outputs)
        if near * found > MOST_MOMENTS:  # which are found again for every block
            found = max(found, outputs * (TILE // BLOCK) ** 2)
        losses = times * places * found
        work = pairs * (_REMAP_PAIR + outputs * _REMAP_OUTPUT) + losses * _REMAP_LOSS
        return _REMAP_TILE + work / tiles

    def seconds(self, workers: int) -> dict[str, float]:
        """Return about how long each stage takes, and all of it, with so many workers, in s."""
        blocks, program = self.plan.blocks, self.program_seconds
        # Tasks go out one after the other, and the last ones leave workers idle.
        turns = math.ceil(blocks / workers)
        of_tasks = {
            stage: max(turns * each, blocks * self.dispatch) for stage, each in self.task_seconds().items()
        }
        # Splits are solved side by side, rounds of a search one after the other.
        solves = self.solves if self.trials else -(-self.solves // workers)
        refining = min(program * _PROGRAM * self.rounds, self.spec.seed.refine_seconds or math.inf)
        seed = _FIRST_PROGRAM + program * solves + refining + self.trials * of_tasks.pop("trial")
        if self.noise is not None:
            turns = math.ceil(tile_count(self.noise) / workers)
            seed, of_tasks["loss"] = _REMAP + turns * self.noise_seconds, 0.0
            seed += self._window_seconds(workers) + bool(self.windows) * of_tasks["evaluate"]
        if self.spec.extension.method == RECORDS:
            of_tasks["loss"] = 0.0  # the program is solved by who reads its costs
        # Cell programs solve the seeds that they begin with themselves.
        cells = 0.0
        if self.cells.tasks:
            cells = self.cells.seconds / min(workers, self.cells.parts) + self.cells.client_seconds + seed
        seconds = {
            "domain": self._domain_seconds(),
            "loss": of_tasks["loss"],
            "seed": 0.0 if cells else seed,
            **({"cells": cells} if cells else {}),
            "extend": of_tasks["extend"],
            "boundary": _CLOSE + blocks * _CLOSE_BLOCK,
            "audit": of_tasks["audit"],
            "evaluate": of_tasks["evaluate"],
        }
        start = _START if self.spec.cluster.kind == "local" else 0.0
        seconds["total"] = sum(seconds.values()) + start
        return {name: round(value, 3) for name, value in seconds.items()}

    def _domain_seconds(self) -> float:
        read = 0.0 if self.nodes else self.elements * _READ
        network = self.nodes * (_NODE + self.trees * _TREE_NODE)
        return _LIBRARIES + network + read + self.plan.grid.records * _RECORD

    def scheduler(self) -> dict[str, Any]:
        """Return what the scheduler has to do; see docs/scaling.md."""
        longest = self.task_seconds()
        answers = 4 * self.plan.grid.source_cells * self.plan.outputs * FLOAT64  # parts of the seed cost
        if self.noise is not None:
            answers = math.prod(self.noise.shape) * FLOAT32
        held = {str(n): min(self.plan.blocks, max(WINDOW, WINDOW_OF_WORKER * n)) for n in WORKER_COUNTS}
        return {
            "tasks_at_once": held,
            "bytes_at_once": {n: count * _TASK_BYTES for n, count in held.items()},
            "seconds_per_task": self.dispatch,
            # Beyond so many workers a stage goes no faster, for tasks do not come any faster.
            "workers_at_most": {
                stage: max(min(int(each / DISPATCH), self.plan.blocks), 1) for stage, each in longest.items()
            },
            "result_bytes": answers + (3 + self.trials) * self.plan.blocks * _ANSWER_BYTES,
        }
