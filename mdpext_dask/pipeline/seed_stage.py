"""Making a store's seed: its cost, its budgets, and for cell programs the records that come of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.job.sections import CELL_PROGRAMS
from mdpext_dask.pipeline.axis_budgets import Chosen, seed_of_share, solve_splits
from mdpext_dask.pipeline.budget_search import search_budgets
from mdpext_dask.pipeline.cells.improve import improve_cells
from mdpext_dask.pipeline.tasks import seed_cost_block
from mdpext_dask.problem.loss import assemble_seed_cost
from mdpext_dask.store.mechanism_store import MechanismStore, job_of

# Of ε: budgets of the seeds that cell programs may begin with, on coarse seeds and on dense ones, where ε h_0
# is at most so much.
COARSE_SHARES, DENSE_SHARES, DENSE_SEEDS = (0.4, 0.5, 0.6, 0.75), (0.6, 0.75), 3.0


def seed_job(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Make the seed cost, solve the seed LP under the job's budgets, and keep the best."""
    if store.has_seed():
        return
    spec = job_of(store)
    if not store.has_seed_cost:
        with stages.stage("loss", store.plan.blocks, "blocks"):
            _make_cost(store, executor, stages)
    design = float(store.attributes["epsilon_design_per_km"])
    if spec.extension.method == CELL_PROGRAMS:
        with stages.stage("cells"):
            candidates = _Candidates(store, executor, stages, design, spec.privacy.budget)
            found = improve_cells(store, executor, candidates, design, spec.extension.sweeps, stages.observer)
            chosen, records, facts = candidates[found.candidate], found.name, found.facts
            if "rounds" not in chosen.facts:
                # Those of another candidate, whose budgets were searched.
                store.delete_seed_arrays("budget_x", "budget_y")
    else:
        with stages.stage("seed"):
            chosen, records, facts = _seed(store, executor, stages, design, spec.privacy.budget), None, {}
    store.write_seed(chosen.seed, {**chosen.facts, **facts}, chosen.rows, chosen.extension, records)


def _seed(store: MechanismStore, executor: Executor, stages: Stages, design: float, budget: str) -> Chosen:
    if budget == "certified":
        return search_budgets(store, executor, design, stages.observer)
    return solve_splits(store, executor, design, budget)


class _Candidates:
    """Seeds that cell programs may begin with, solved when they are asked for.

    With `certified` budgets it is for the programs to find out how much of ε the seed should use. Coarse
    seeds should leave much to the programs, which gain what refining seeds would, and more. On dense seeds
    there is less to gain between them, and the certified and refined seed competes.
    """

    def __init__(
        self, store: MechanismStore, executor: Executor, stages: Stages, design: float, budget: str
    ) -> None:
        named = partial(_seed, store, executor, stages, design, budget)
        self._solve: list[Callable[[], Chosen]] = [named]
        if budget == "certified":
            dense = design * store.grid.cell_km <= DENSE_SEEDS
            shares = DENSE_SHARES if dense else COARSE_SHARES
            by_share = [partial(seed_of_share, store, executor, design, share) for share in shares]
            self._solve = [*by_share, named] if dense else [*by_share]
        self._solved: dict[int, Chosen] = {}

    def __len__(self) -> int:
        return len(self._solve)

    def __getitem__(self, index: int) -> Chosen:
        if index not in self._solved:
            self._solved[index] = self._solve[index]()
        return self._solved[index]


def _make_cost(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    plan, grid = store.plan, store.grid
    cost = np.empty((grid.cells_x, grid.cells_y, 2, 2, plan.outputs))
    arguments: list[tuple[Any, ...]] = [(store.url, index) for index in range(plan.blocks)]
    for index, part in stages.run(executor, "loss", seed_cost_block, arguments):
        block = plan[index]
        cost[block.cells_x, block.cells_y] = part
    store.write_seed_cost(assemble_seed_cost(grid, cost))
