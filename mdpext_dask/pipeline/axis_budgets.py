"""Seeds under one budget for each axis."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.compute.stages import sorted_out
from mdpext_dask.pipeline.tasks import solve_seed
from mdpext_dask.seed import budget
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.seed.solve import GAP
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extension_arrays, operator_of_store

# How well a program with many seeds is solved.
LARGE_GAP = 1e-4


@dataclass(frozen=True)
class Chosen:
    """A seed to extend.

    Parameters
    ----------
    seed
        The LP of the budgets that are kept, as it was solved.
    rows
        Rows to extend, float64 of shape (J, K): its own, tempered, or refined.
    extension
        What else they are extended from, by name of the array.
    facts
        What to note about it.
    """

    seed: SeedMechanism
    rows: NDArray[np.float64]
    extension: dict[str, NDArray[np.float64]]
    facts: dict[str, Any]


def solve_splits(store: MechanismStore, executor: Executor, design_epsilon: float, kind: str) -> Chosen:
    """Solve the seed LP under one budget for each axis; return the best seed, its rows, and what to note.

    Parameters
    ----------
    store
        The store, with its seed cost.
    executor
        Where the LPs are solved.
    design_epsilon
        ε to design for, in 1/km.
    kind
        ``"half"``: the published budgets, for the published splits of ε and the even one; ``"bound"``: the
        closed form for the even split.
    """
    p, operator = store.metric_p, operator_of_store(store)
    if kind == "half":
        candidates = [budget.half_budgets(split) for split in budget.candidate_splits(design_epsilon, p)]
    else:
        split = budget.even_split(design_epsilon, p)
        candidates = [budget.bound_budgets(split, store.grid.cell_km, operator.steepening)]
    arguments = [(store.url, candidate.beta, GAP) for candidate in candidates]
    seeds = list(sorted_out(executor.map("seed", solve_seed, arguments)))
    best = min(range(len(seeds)), key=lambda position: seeds[position].primal)
    tried = [
        {"split_per_km": list(candidate.split), "primal_km": seed.primal, "dual_km": seed.dual}
        for candidate, seed in zip(candidates, seeds, strict=True)
    ]
    return _chosen(store, seeds[best], candidates[best], {"solves": len(candidates), "tried": tried})


def seed_of_share(store: MechanismStore, executor: Executor, design_epsilon: float, share: float) -> Chosen:
    """Solve the seed LP under a share of ε, evenly split between the axes.

    Parameters
    ----------
    store
        The store, with its seed cost.
    executor
        Where the LP is solved.
    design_epsilon
        ε to design for, in 1/km.
    share
        How much of ε budgets are.
    """
    even = budget.even_split(design_epsilon, store.metric_p)
    budgets = budget.AxisBudgets(even, (share * even[0], share * even[1]))
    gap = LARGE_GAP if budget.many_seeds(store.grid.seeds) else GAP
    seed = solve_alone(store, executor, solve_seed, budgets.beta, gap)
    return _chosen(store, seed, budgets, {"budget_share": share, "solves": 1})


def _chosen(
    store: MechanismStore, seed: SeedMechanism, budgets: budget.AxisBudgets, facts: dict[str, Any]
) -> Chosen:
    arrays = extension_arrays(
        operator_of_store(store), budget.axis_budgets(store.grid, budgets.beta), exponent=1.0
    )
    noted = {"beta_per_km": list(budgets.beta), "split_per_km": list(budgets.split), **facts}
    return Chosen(seed, seed.rows, arrays, noted)
