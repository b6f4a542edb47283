"""Making a store's seed: its cost, its budgets, and for cell programs the records that come of it."""

from typing import Any

import numpy as np

from mdpext_dask.cells.improve import improve_cells
from mdpext_dask.cluster import Executor
from mdpext_dask.loss import assemble_seed_cost
from mdpext_dask.search import search_budgets
from mdpext_dask.spec import JobSpec, parse_job
from mdpext_dask.splits import Chosen, seeds_by_share, solve_splits
from mdpext_dask.stages import Stages
from mdpext_dask.store import MechanismStore
from mdpext_dask.tasks import seed_cost_block

CELL_PROGRAMS = "cell-lp"


def job_of(store: MechanismStore) -> JobSpec:
    """Return the job that a store was made for."""
    return parse_job(store.attributes["job"], source=store.url)


def seed_job(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Make the seed cost, solve the seed LP under the job's budgets, and keep the best."""
    if store.has_seed():
        return
    spec = job_of(store)
    if not store.has_seed_cost:
        with stages.stage("loss", store.plan.blocks):
            _make_cost(store, executor, stages)
    design = float(store.attributes["epsilon_design_per_km"])
    by_cells = spec.extension.method == CELL_PROGRAMS
    with stages.stage("seed"):
        candidates = _candidates(store, executor, stages, design, spec.privacy.budget, by_cells=by_cells)
    chosen, records, facts = candidates[0], None, {}
    if by_cells:
        with stages.stage("cells"):
            rows = [candidate.rows for candidate in candidates]
            found = improve_cells(store, executor, rows, design, spec.extension.sweeps, stages.observer)
            chosen, records, facts = candidates[found.candidate], found.name, found.facts
    store.write_seed(chosen.seed, {**chosen.facts, **facts}, chosen.rows, chosen.extension, records)


def _make_cost(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    plan, grid = store.plan, store.grid
    cost = np.empty((grid.cells_x, grid.cells_y, 2, 2, plan.outputs))
    arguments: list[tuple[Any, ...]] = [(store.url, index) for index in range(plan.blocks)]
    for index, part in stages.run(executor, "loss", seed_cost_block, arguments):
        block = plan[index]
        cost[block.cells_x, block.cells_y] = part
    store.write_seed_cost(assemble_seed_cost(grid, cost))


def _candidates(
    store: MechanismStore, executor: Executor, stages: Stages, design: float, budget: str, *, by_cells: bool
) -> list[Chosen]:
    """Return seeds to choose from: one, unless cell programs are to find out how much of ε it may use."""
    if budget != "certified":
        return [solve_splits(store, executor, design, budget)]
    if by_cells:
        # Certified budgets leave nothing of ε to the programs, and what refining gains they gain as well.
        return seeds_by_share(store, executor, design)
    return [search_budgets(store, executor, design, stages.observer)]
