"""Making a store's seed: its cost, its budgets, and for cell programs the records that come of it."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.job.sections import CELL_PROGRAMS, NOISE
from mdpext_dask.pipeline.axis_budgets import Chosen, seed_of_share, solve_splits
from mdpext_dask.pipeline.budget_search import search_budgets
from mdpext_dask.pipeline.cells.improve import CellPrograms
from mdpext_dask.pipeline.noise_stage import noise_job
from mdpext_dask.pipeline.tasks import seed_cost_block
from mdpext_dask.problem.loss import assemble_seed_cost
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import job_of

# Of ε: budgets of the seeds that cell programs may begin with, on coarse seeds and on dense ones, where ε h_0
# is at most so much.
COARSE_SHARES, DENSE_SHARES, DENSE_SEEDS = (0.4, 0.5, 0.6, 0.75), (0.6, 0.75), 3.0


def seed_job(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Make the seed cost, solve the seed LP under the job's budgets, keep the best; or make noise."""
    if store.has_seed():
        return
    spec = job_of(store)
    if spec.extension.method == NOISE:
        noise_job(store, executor, stages)
        return
    if not store.has_seed_cost:
        with stages.stage("loss", store.plan.blocks, "blocks"):
            _make_cost(store, executor, stages)
    design, budget = float(store.attributes["epsilon_design_per_km"]), spec.privacy.budget
    if budget == "certified":
        solve = partial(search_budgets, store, executor, design, stages.observer)
    else:
        solve = partial(solve_splits, store, executor, design, budget)
    if spec.extension.method != CELL_PROGRAMS:
        with stages.stage("seed"):
            chosen = solve()
        store.write_seed(chosen.seed, chosen.facts, chosen.rows, chosen.extension)
        return
    with stages.stage("cells"):
        candidates: list[Callable[[], Chosen]] = [cache(solve)]
        if budget == "certified":
            of_share = partial(seed_of_share, store, executor, design)
            candidates = _candidates(of_share, solve, dense=design * store.grid.cell_km <= DENSE_SEEDS)
        programs = CellPrograms(store, executor, design, spec.extension.sweeps, stages.observer)
        best, records, facts = programs.run(candidates)
        chosen = candidates[best]()
        if "rounds" not in chosen.facts:
            # Those of another candidate, whose budgets were searched.
            store.delete_seed_arrays("budget_x", "budget_y")
    store.write_seed(chosen.seed, {**chosen.facts, **facts}, chosen.rows, chosen.extension, records)


def _candidates(
    of_share: Callable[[float], Chosen], certified: Callable[[], Chosen], *, dense: bool
) -> list[Callable[[], Chosen]]:
    """Return seeds that cell programs may begin with, each solved when it is first asked for.

    With `certified` budgets it is for the programs to find out how much of ε the seed should use. Coarse
    seeds should leave much to the programs, which gain what refining seeds would, and more. On dense seeds
    there is less to gain between them, and the certified and refined seed competes.
    """
    solvers: list[Callable[[], Chosen]]
    solvers = [partial(of_share, share) for share in (DENSE_SHARES if dense else COARSE_SHARES)]
    if dense:
        solvers.append(certified)
    return [cache(solve) for solve in solvers]


def _make_cost(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    plan, grid = store.plan, store.grid
    cost = np.empty((grid.cells_x, grid.cells_y, 2, 2, plan.outputs))
    arguments = [(store.url, index) for index in range(plan.blocks)]
    for index, part in stages.run(executor, "loss", seed_cost_block, arguments):
        block = plan[index]
        cost[block.cells_x, block.cells_y] = part
    store.write_seed_cost(assemble_seed_cost(grid, cost))
