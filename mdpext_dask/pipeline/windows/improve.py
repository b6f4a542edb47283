"""Lowering the loss of noise by programs of windows, turn by turn.

It begins with noise of a little less than ε, and every turn may use a little more of it than the one before:
so what is there is inside of what programs of the next turn allow, and the last one uses all of what the
certificate by directions can prove. A turn ends where it gains too little to go on. Every state keeps ε: what
was done before a run was killed is done when it goes on, and the bytes do not depend on who solves what.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from mdpext_dask.auditors.directions import looseness
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon
from mdpext_dask.events import Note
from mdpext_dask.pipeline.noise_stage import find_noise, noise_loss, tables_sha256
from mdpext_dask.pipeline.windows.sizes import windows_of_job
from mdpext_dask.pipeline.windows.tasks import Turn, improve_window
from mdpext_dask.store.local_chunks import keep_floor
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import job_of, window_name
from mdpext_dask.store.schema import RECORD_SCORES, START_TABLES, WINDOW, seed_sha256, sha256_of

# What a turn has to gain, of the loss, for another one; and what it leaves of ε to the next.
_ENOUGH, _MARGIN = 1e-3, 1e-3
# A program ends where three steps gain less than this share of what all have: earlier where further turns get
# some of what is left.
_SETTLED, _SETTLED_IN_TURNS = 5e-3, 2e-2


@dataclass(frozen=True)
class WindowSeed:
    """What programs of windows have come to, written but for what makes it the seed.

    Parameters
    ----------
    names
        Arrays of the seed group that rows follow from.
    where
        How windows lie, and what they are laid over.
    floor
        What outputs far from a record have.
    facts
        What to note about it.
    """

    names: tuple[str, ...]
    where: dict[str, Any]
    floor: float
    facts: dict[str, Any]

    def write(self, store: MechanismStore) -> None:
        """Make it the store's seed."""
        keep_floor(store, self.floor)
        arrays = sha256_of(*(store.array(f"seed/{name}") for name in self.names))
        digest = seed_sha256(arrays, self.where)
        store.note_seed(
            {"sha256": digest, "extension": list(self.names), RECORD_SCORES: self.where, **self.facts}
        )
        # Windows of a run before that lay otherwise.
        windows = {name for name in store.seed_arrays() if name.startswith(f"{WINDOW}_")}
        store.delete_seed_arrays(*sorted(windows - set(self.names)))


def improve_noise(store: MechanismStore, executor: Executor, stages: Stages) -> WindowSeed:
    """Make noise, and lower its loss by programs of windows.

    Raises
    ------
    SolverError
        If the noise cannot be made, see :func:`mdpext_dask.pipeline.noise_stage.find_noise`.
    """
    grid, p = store.grid, store.metric_p
    windows = windows_of_job(job_of(store), grid, store.outputs)
    settled = _SETTLED if windows.turns == 1 else _SETTLED_IN_TURNS
    loose = looseness(windows.gap, grid.shape, p)
    design, limit = float(store.attributes["epsilon_design_per_km"]) / loose, store.planar_limit() / loose
    start = euclidean_epsilon(design * (1 - _MARGIN * windows.turns), p)
    noise = find_noise(store, executor, stages, START_TABLES, start)
    sha256 = tables_sha256(store, noise)
    start_km = loss_km = noise_loss(store, noise, executor, stages, START_TABLES)
    names, failed, solved, done = [*START_TABLES], 0, 0, 0
    for turn in range(windows.turns):
        share = 1 - _MARGIN * (windows.turns - 1 - turn)
        of_turn = Turn(replace(windows, turns=turn), sha256, share * design, share * limit, settled)
        with_prior = [
            (number, x, y)
            for number, (x, y) in enumerate(windows.of(turn))
            if store.read("prior", x, y).any()
        ]
        with stages.stage("seed", len(with_prior), "windows"):
            work = [(store.url, of_turn, *window) for window in with_prior]
            outcomes = stages.gather(executor, "seed", improve_window, work)
        gained_km = math.fsum(outcome.gain_km for outcome in outcomes)
        names += [window_name(turn, number) for number, *_ in with_prior]
        failed, solved = failed + sum(outcome.failed for outcome in outcomes), solved + len(outcomes)
        loss_km, done = loss_km - gained_km, turn + 1
        stages.observer(Note(f"windows: turn {done}: {len(outcomes)} programs, {loss_km:.5g} km", diary=True))
        for (_, x, y), outcome in zip(with_prior, outcomes, strict=True):
            if outcome.failed:
                said = f"the program of records {x.start}:{x.stop} x {y.start}:{y.stop} has failed"
                stages.observer(Note(f"windows: turn {done}: {said}; its rows stay", diary=True))
        if gained_km < _ENOUGH * loss_km:
            break
    where = {"name": WINDOW, "side": windows.side, "gap": windows.gap, "turns": done, "start": sha256}
    facts = {
        "loss_km": loss_km,
        "start_km": start_km,
        "solves": solved,
        "fallbacks": failed,
        "noise": noise.facts,
    }
    return WindowSeed(tuple(names), where, noise.floor, facts)
