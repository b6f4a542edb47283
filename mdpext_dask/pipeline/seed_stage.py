"""Making a store's seed: its cost, budgets and, for cell programs, records; or noise; or records alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from mdpext_dask.auditors.directions import RADII, largest_steps, looseness, sides_of, slopes, steps_of
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.bound.lattices import lattice_of
from mdpext_dask.events import Note
from mdpext_dask.extend.choose import seed_programs
from mdpext_dask.job.sections import CELL_PROGRAMS, FITTING, NOISE, RECORDS, WINDOWS
from mdpext_dask.pipeline.axis_budgets import Chosen, seed_of_share, solve_splits
from mdpext_dask.pipeline.budget_search import search_budgets
from mdpext_dask.pipeline.cells.improve import PROGRESS, CellPrograms
from mdpext_dask.pipeline.noise_stage import find_noise, noise_loss, write_noise
from mdpext_dask.pipeline.tasks import seed_cost_block
from mdpext_dask.pipeline.windows.improve import WindowSeed, improve_noise
from mdpext_dask.problem.grid import Array
from mdpext_dask.problem.loss import assemble_seed_cost
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.seed.record_program import RECORD_GAP, LatticePromise, record_reach, solve_records
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extension_of_store, job_of
from mdpext_dask.store.schema import METHOD_CHOSEN, METHOD_IN_WORDS, METHOD_TRIED, NOISE_TABLES, RECORD_SCORES

# Of ε: budgets of the seeds that cell programs may begin with, on coarse seeds and on dense ones, where ε h_0
# is at most so much.
COARSE_SHARES, DENSE_SHARES, DENSE_SEEDS = (0.4, 0.5, 0.6, 0.75), (0.6, 0.75), 3.0

# Name of the log probabilities of all records, where one program makes them; and the shares of the uniform
# mechanism that are tried where these do not keep ε by the solver's tolerance.
_RECORD_ROWS = "record_score"
_LEAST_SHARE, _LARGEST_SHARE = 1e-8, 1e-3


def seed_job(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Make the store's seed: solved, or noise; or both, of which the one is kept that loses less."""
    method = extension_of_store(store).method
    if method == FITTING:  # until the choice is noted, which is the last thing: all of it is made again
        _better(store, executor, stages)
    elif store.has_seed():
        return
    elif method == NOISE:
        write_noise(store, find_noise(store, executor, stages))
    elif method == RECORDS:
        _solve_records(store, executor, stages).write(store)
    elif method == WINDOWS:
        improve_noise(store, executor, stages).write(store)
    else:
        _solve(store, executor, stages, method).write(store)


@dataclass(frozen=True)
class _Solved:
    """A solved seed that is not written yet.

    Parameters
    ----------
    chosen
        The seed.
    facts
        What to note about it.
    records
        Name of the array with the log probabilities of all records, if cell programs have made them.
    """

    chosen: Chosen
    facts: dict[str, Any]
    records: str | None = None

    def write(self, store: MechanismStore) -> None:
        """Make it the store's seed."""
        chosen = self.chosen
        store.write_seed(chosen.seed, self.facts, chosen.rows, chosen.extension, self.records)


def _better(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Make noise and solve the seed, and keep what loses less: noise, if that is the same."""
    seeds = seed_programs(float(store.attributes["epsilon_per_km"]), store.grid)
    method = str(store.attributes.get(METHOD_TRIED, seeds))
    noise = None
    solved: _Solved | WindowSeed | None = None
    failed: dict[str, SolverError] = {}
    noise_km = solved_km = math.inf
    try:
        noise = find_noise(store, executor, stages)
        noise_km = noise_loss(store, noise, executor, stages)
    except SolverError as error:
        failed[NOISE] = error
        if method == WINDOWS:  # they begin with noise
            method = seeds
    try:
        if method == RECORDS:
            solved = _solve_records(store, executor, stages)
        elif method == WINDOWS:
            solved = improve_noise(store, executor, stages)
        else:
            solved = _solve(store, executor, stages, method, noise_km)
        solved_km = solved.facts["loss_km"]
    except SolverError as error:
        failed[method] = error
    if noise is not None and noise_km <= solved_km:
        write_noise(store, noise)
        if PROGRESS in store.seed_attributes:
            store.note_seed({PROGRESS: None})
        store.delete_seed_arrays(*(store.seed_arrays() - set(NOISE_TABLES)))
        best, other = (NOISE, noise_km), (method, solved_km)
    elif solved is not None:
        solved.write(store)
        store.delete_seed_arrays(*NOISE_TABLES)
        best, other = (method, solved_km), (NOISE, noise_km)
    else:
        raise SolverError("; ".join(map(str, failed.values())))
    (chosen, loss_km), (beaten, beaten_km) = best, other
    would = str(failed[beaten]) if beaten in failed else f"{beaten} would lose {beaten_km:.4g} km"
    words = f"method: {chosen}, which loses {loss_km:.4g} km; {would}"
    store.update(**{METHOD_CHOSEN: chosen, METHOD_IN_WORDS: words})
    stages.observer(Note(words))


def _solve(
    store: MechanismStore, executor: Executor, stages: Stages, method: str, beat_km: float = math.inf
) -> _Solved:
    """Make the seed cost, and solve the seed LP under the job's budgets; or go through cell programs.

    What competes loses `beat_km`; where the seed LP cannot come near, it is solved less well.
    """
    spec = job_of(store)
    if not store.has_seed_cost:
        with stages.stage("loss", store.plan.blocks, "blocks"):
            _make_cost(store, executor, stages)
    design, budget = float(store.attributes["epsilon_design_per_km"]), spec.privacy.budget
    if budget == "certified":
        least = math.inf if method == CELL_PROGRAMS else beat_km  # they go on from it
        solve = partial(search_budgets, store, executor, design, stages.observer, least)
    else:
        solve = partial(solve_splits, store, executor, design, budget)
    if method != CELL_PROGRAMS:
        with stages.stage("seed"):
            chosen = solve()
        return _Solved(chosen, chosen.facts)
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
    return _Solved(chosen, {**chosen.facts, **facts}, records)


def _solve_records(store: MechanismStore, executor: Executor, stages: Stages) -> _Solved:
    """Solve one program over all records, and make their rows what is extended.

    Raises
    ------
    SolverError
        If the program cannot be solved, or its rows do not keep ε as they are stored.
    """
    grid, design = store.grid, float(store.attributes["epsilon_design_per_km"])
    with stages.stage("seed"):
        solved = solve_alone(store, executor, record_rows, design)
    rows = solved.rows.reshape(*grid.shape, store.outputs)
    chunks = store.plan.seed_chunk_shape
    store.create_seed_array(_RECORD_ROWS, ("x", "y", "output"), chunks, data=np.log(rows))
    corners = rows[:: grid.factor, :: grid.factor].reshape(grid.seeds, -1)
    facts = {RECORD_SCORES: {"name": _RECORD_ROWS, "padding": [0, 0]}, "solves": 1, "loss_km": solved.primal}
    return _Solved(Chosen(replace(solved, rows=corners), corners, {}, {}), facts, _RECORD_ROWS)


def record_rows(
    url: str, design: float, threads: int = 1, inverse_sums: InverseSums | None = None
) -> SeedMechanism:
    """Return the best rows of all records whose certificate by directions is within ε.

    Parameters
    ----------
    url
        The store.
    design
        ε in the plane that leaves room for storing, in 1/km.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.

    Raises
    ------
    SolverError
        See :func:`_solve_records`.
    """
    store = MechanismStore.open(url)
    grid, p = store.grid, store.metric_p
    reach = record_reach(grid.shape, p, store.outputs)
    # A store's rectangle is certified as a whole, records outside the region as well.
    lattice = lattice_of(store, 1, (0, 0))
    lattice = replace(lattice, kept=np.ones_like(lattice.kept))
    floor = float(store.attributes["job"]["privacy"]["min_probability"])
    # Where steps are wide, or all there are, all pairs keep hardly more than these do, and the certificate's
    # widest steps show it; what they are known to keep beforehand comes second.
    wide = reach > record_reach(grid.shape, p) or reach == min(grid.shape) - 1
    widest = RADII[-1] if wide else reach
    certified = math.inf
    for radius in dict.fromkeys((widest, reach)):
        solved = solve_records(
            lattice,
            LatticePromise(design / looseness(radius, grid.shape, p), p),
            reach,
            floor,
            gap=RECORD_GAP,
            threads=threads,
            inverse_sums=inverse_sums,
        )
        share = 0.0
        while share <= _LARGEST_SHARE:  # what the solver's tolerance leaves shows at the smallest entries
            rows = (1 - share) * solved.rows + share / store.outputs
            certified = _certified(store, rows, widest)
            if certified <= store.planar_limit():
                loss_km = float((lattice.cost.reshape(rows.shape) * rows).sum())
                return replace(solved, rows=rows, primal=loss_km)
            share = max(10 * share, _LEAST_SHARE)
    raise SolverError(f"the program over all records ends at {certified / design:.6g} of its ε")


def _certified(store: MechanismStore, rows: Array, radius: int) -> float:
    """Return what directions certify of rows of all records as they are stored, in 1/km.

    Parameters
    ----------
    store
        The store.
    rows
        M(y|x), float64 of shape (records, K).
    radius
        Largest coordinate of the steps.
    """
    grid = store.grid
    steps, every = steps_of(radius, grid.shape), (slice(0, grid.shape[0]), slice(0, grid.shape[1]))
    stored = rows.astype(np.float32).reshape(*grid.shape, -1)
    sizes = largest_steps(stored, every, steps, np.arange(store.outputs))
    by_step = dict(zip(steps, sizes, strict=True))
    return float(slopes(by_step, radius, grid.shape, sides_of(grid), store.metric_p)[0].max())


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
