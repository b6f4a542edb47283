"""What a job will cost before it runs: bytes, tasks, memory, seconds.

The rates were measured on one machine (two cores of a server processor of 2024); they scale a plan, they
do not promise.
"""

import math
from dataclasses import dataclass
from typing import Any

import psutil

from mdpext_dask.budget import candidate_splits, design_epsilon, many_seeds, planar_epsilon
from mdpext_dask.cells.improve import MORE_SWEEPS, PATCH, TRIAL_SWEEPS, box_count
from mdpext_dask.domain import check_counts, output_count
from mdpext_dask.errors import SpecError
from mdpext_dask.extend.choose import check_operator
from mdpext_dask.frame import FileFrame, Frame, build_frame
from mdpext_dask.grid import Grid
from mdpext_dask.partition import FLOAT32, FLOAT64, Plan
from mdpext_dask.seeding import COARSE_SHARES, DENSE_SEEDS, DENSE_SHARES
from mdpext_dask.spec import JobSpec, check_min_probability
from mdpext_dask.stored_loss import CACHE_BYTES

WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
# Seconds for one element of the (records x outputs) array and one worker.
_EXTEND = 2.0e-8
_AUDIT = 1.7e-8
_EVALUATE = 0.8e-8
_LOSS = 1.0e-8
# Reading and checking one element of a loss file.
_READ = 1.0e-8
# Seconds for one task, whatever it does: opening the store, the scheduler.
_TASK = 0.008
# Reading a network costs so much a node; a shortest-path tree, so much a node again.
_NODE, _TREE_NODE = 6e-6, 1.7e-7
# The structured solver: measured 0.1 s at 132 x 20, 0.9 s at 200 x 64, 5 s at 625 x 100, 65 s at 2,401 x 100.
_SEED_ENTRY, _SEED_FLOP = 5e-5, 2.5e-9
# About how many seed programs and trials of a whole mechanism a search for certified budgets takes, without
# and with refining; what a round of refining takes, programs being easier; a trial.
_SEARCH_SOLVES, _SEARCH_TRIALS, _TRIAL = 13, 20, 6e-8
_STARTS, _FEW_STARTS, _TRIALS_OF_START, _TRIALS_OF_ROUND, _PROGRAM = 4, 2, 3, 3, 0.5
# A trial with certificate vectors needs up to so many times what extending a block does.
_TRIAL_PEAK = 15
# What the rows of a refining program need for one seed and output, measured at 2,401 x 100.
_REFINING_BYTES = 7_000
# Cell programs: seconds for a number of a lattice in a try, tries of a sweep on a coarse level, splits that
# are searched.
_CELL, _TRIES, _SPLITS = 4e-6, 3, {"certified": 5, "half": 2, "bound": 2}
# What a task on the largest box needs, measured; arrays over records and outputs that are there at once.
_CELL_BYTES, _ARRAYS = 160 * 2**20, 6
_START = 1.3
# Arrays over all records that the client holds while it makes the prior.
_CLIENT_ARRAYS = 4


def check_memory(spec: JobSpec, frame: Frame | FileFrame) -> None:
    """Refuse a job whose arrays cannot fit into this machine, before any of them is made.

    Raises
    ------
    SpecError
        With what is needed and what there is.
    """
    grid = frame.grid
    plan = Plan.of(grid, output_count(spec, frame), spec.store.block_cells, frame.kept)
    needed = _CLIENT_ARRAYS * grid.records * FLOAT64
    if isinstance(frame, FileFrame):
        needed += frame.problem.loss_bytes
    if spec.cluster.kind != "address":
        workers = spec.cluster.workers if spec.cluster.kind == "local" else 1
        certified = spec.privacy.budget == "certified"
        peak = plan.peak_bytes(spec.extension.method) * (_TRIAL_PEAK if certified else 1)
        if spec.extension.method == "cell-lp":
            peak += _CELL_BYTES
        needed += workers * (peak + _table_bytes(spec, frame))
        # One worker solves the seed LP: factors of all outputs, about sixty arrays (J, K), three (J, J).
        entries = grid.seeds * plan.outputs
        needed += FLOAT64 * (2 * entries * min(grid.seeds_shape) + 60 * entries + 3 * grid.seeds**2)
        if certified and spec.seed.refine_rounds:
            needed += _REFINING_BYTES * entries
    available = psutil.virtual_memory().total
    if needed > available:
        raise SpecError(
            f"domain: {grid.records:,} records x {plan.outputs} outputs need {needed / 2**30:,.1f} GiB of "
            f"memory here, but there are {available / 2**30:,.1f} GiB; use larger cells, less refinement or "
            "smaller store.block_cells"
        )


def _table_bytes(spec: JobSpec, frame: Frame | FileFrame) -> int:
    """Return what a worker holds of the loss: travel tables, twice while they are read; a part of a table."""
    if isinstance(frame, FileFrame):
        return min(CACHE_BYTES, frame.problem.loss_bytes)
    tasks = spec.loss.tasks if spec.loss.kind == "travel" else 0
    return 2 * frame.network.nodes * (tasks * FLOAT32 + 2 * FLOAT64)


def _seed_work(spec: JobSpec, grid: Grid) -> tuple[int, int, int]:
    """Return about how many seed programs, rounds of refining and trials of a mechanism a job takes."""
    if spec.privacy.budget == "half":
        return len(candidate_splits(spec.privacy.epsilon_per_km, spec.domain.metric_p)), 0, 0
    if spec.privacy.budget == "bound":
        return 1, 0, 0
    shares = 0
    if spec.extension.method == "cell-lp":
        if spec.privacy.epsilon_per_km * grid.cell_km > DENSE_SEEDS:
            return len(COARSE_SHARES), 0, 0
        shares = len(DENSE_SHARES)
    rounds = spec.seed.refine_rounds
    if not rounds:
        return shares + _SEARCH_SOLVES, 0, _SEARCH_TRIALS
    starts = _FEW_STARTS if many_seeds(grid.seeds) else _STARTS
    return shares + starts, rounds, _TRIALS_OF_START * starts + _TRIALS_OF_ROUND * rounds


@dataclass(frozen=True)
class _CellWork:
    """What cell programs take.

    Parameters
    ----------
    seconds
        About how long, of one worker.
    parts
        Over how many workers most of it can be shared out.
    tasks
        How many tasks.
    work_bytes
        Bytes of arrays in the making beside the store, at most.
    """

    seconds: float
    parts: int
    tasks: int
    work_bytes: int


def _cell_work(spec: JobSpec, plan: Plan) -> _CellWork:
    """Return about what cell programs take; nothing, if the job has none."""
    if spec.extension.method != "cell-lp":
        return _CellWork(0.0, 1, 0, 0)
    grid = plan.grid
    parts = [n for n in grid.refine if n > 1] or [1]
    coarser = range(len(parts) - 1, -1, -1)
    sweeps = [spec.extension.sweeps * MORE_SWEEPS**number for number in coarser]
    tries = [_TRIES] * (len(parts) - 1) + [1]
    # Splits are judged on the first level.
    sweeps[0] += TRIAL_SWEEPS * (_SPLITS[spec.privacy.budget] - 1)
    seconds, tasks, done, boxes = 0.0, 0, 1, 1
    for step, count, tried in zip(parts, sweeps, tries, strict=True):
        done *= step
        points = (grid.cells_x * done + 1) * (grid.cells_y * done + 1)
        boxes = round(box_count(points / PATCH**2))
        work = points * plan.outputs * _CELL + grid.records * plan.outputs * _TRIAL + 2 * boxes * _TASK
        seconds += count * tried * work
        tasks += count * tried * 2 * boxes
    return _CellWork(seconds, boxes, tasks, _ARRAYS * grid.records * plan.outputs * FLOAT64)


def plan_job(spec: JobSpec) -> dict[str, Any]:
    """Return what ``plan`` prints: sizes exactly, seconds as an estimate by number of workers.

    Raises
    ------
    SpecError, DataError
        For what :func:`mdpext_dask.run.build` would refuse about network, grid and outputs.
    """
    frame = build_frame(spec)
    grid = frame.grid
    outputs = output_count(spec, frame)
    check_min_probability(spec.privacy.min_probability, outputs)
    check_counts(spec, frame)
    check_memory(spec, frame)
    planar = planar_epsilon(spec.privacy.epsilon_per_km, frame.distortion)
    p, budget = spec.domain.metric_p, spec.privacy.budget
    design = design_epsilon(planar, grid.spacing_km, outputs, p)
    check_operator(spec.extension, budget, design, grid, outputs, p)
    plan = Plan.of(grid, outputs, spec.store.block_cells, frame.kept)
    solves, rounds, trials = _seed_work(spec, grid)
    cells = _cell_work(spec, plan)
    elements = grid.records * outputs
    trees = spec.loss.tasks if spec.loss.kind == "travel" else 0
    nodes, nodes_read = 0, 0
    if isinstance(frame, Frame):
        nodes, nodes_read = frame.network.nodes, frame.network.nodes_read
    work = grid.seeds**2 * min(grid.seeds_shape)
    lp_seconds = outputs * (_SEED_ENTRY * grid.seeds + _SEED_FLOP * work)

    by_workers = {}
    for workers in WORKER_COUNTS:
        shared = min(workers, plan.blocks)
        seconds = {
            "domain": nodes * (_NODE + trees * _TREE_NODE) + (0 if nodes else elements * _READ),
            "loss": (elements * _LOSS + plan.blocks * _TASK) / shared,
            # Splits are solved side by side, rounds of a search one after the other.
            "seed": lp_seconds * (solves if trials else -(-solves // workers))
            + min(lp_seconds * _PROGRAM * rounds, spec.seed.refine_seconds or math.inf)
            + trials * (elements * _TRIAL + plan.blocks * _TASK) / shared,
            **({"cells": cells.seconds / min(workers, cells.parts)} if cells.tasks else {}),
            "extend": (elements * _EXTEND + plan.blocks * _TASK) / shared,
            "audit": (elements * _AUDIT + plan.blocks * _TASK) / shared,
            "evaluate": (elements * _EVALUATE + plan.blocks * _TASK) / shared,
        }
        total = sum(seconds.values()) + (_START if spec.cluster.kind == "local" else 0)
        by_workers[str(workers)] = {name: round(s, 3) for name, s in seconds.items()} | {
            "total": round(total, 3)
        }
    return {
        "records": grid.records,
        "records_inside": grid.count_vertices_of(frame.kept),
        "outputs": outputs,
        "seeds": grid.seeds,
        "source_cells": grid.source_cells,
        "source_cells_kept": int(frame.kept.sum()),
        "cells": [grid.cells_x, grid.cells_y],
        "blocks": plan.blocks,
        "blocks_skipped": len(plan.skipped),
        "block_cells": list(plan.block_cells),
        "store_bytes": plan.store_bytes,
        # Beside it while cell programs run; a sixth of it stays, so that blocks can be extended again.
        "work_bytes": cells.work_bytes,
        "peak_bytes_per_task": plan.peak_bytes(spec.extension.method),
        # What a worker holds besides, once.
        "table_bytes_per_worker": _table_bytes(spec, frame),
        # One task a block in each of loss, extend, audit, evaluate and every trial; and the seed LPs.
        "tasks": (4 + trials) * plan.blocks + solves + rounds + cells.tasks,
        "seconds_by_workers": by_workers,
        "road_nodes": nodes,
        "road_nodes_read": nodes_read,
        "distortion": frame.distortion,
        "rotation_deg": 0.0 if frame.projection is None else frame.projection.rotation_deg,
    }
