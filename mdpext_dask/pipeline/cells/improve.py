"""Improving rows level by level: sweeps of cell programs over ever finer lattices.

The seed, tempered to leave something of ε, is interpolated to the lattice of the first level, which is the
same mechanism. A sweep re-optimises points on lines, then points inside cells
(:mod:`mdpext_dask.pipeline.cells.lattice`); lines move from sweep to sweep, so that every point but the
corners of the rectangle takes its turn inside. The result is interpolated to the next level, and so on to
the records.

A sweep begins from a mechanism whose certificate holds, and is accepted only if that of its result does, on
the very rows that extend from it. On the finest lattice that is so by the programs' own constraints. On
coarser ones the log-normaliser between the points is charged as it was before
(:mod:`mdpext_dask.pipeline.cells.sweep`); where the certificate finds that it has grown too much, the
sweep is made again with what it has become, and where that is not enough, with the cells in question left as
they were. So no step can end without a mechanism within ε, and none has more loss, as the programs see it.

How much of ε the seed may use, and how far points on lines may go, is searched on the first level. At the
end, where budgets are certified, the last level is begun from planar noise as well
(:mod:`mdpext_dask.pipeline.cells.noise`).
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import sorted_out
from mdpext_dask.errors import SolverError, StoreError
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.spec import json_number
from mdpext_dask.pipeline.axis_budgets import Chosen
from mdpext_dask.pipeline.cells import tasks
from mdpext_dask.pipeline.cells.lattice import Box, Lines, boxes_of
from mdpext_dask.pipeline.cells.noise import noise_within
from mdpext_dask.pipeline.cells.tasks import COSTS, LatticeArray, Level, State, Sweep
from mdpext_dask.pipeline.trials import AIM, Trials, tempered
from mdpext_dask.row_limits import SMALLEST_PROBABILITY
from mdpext_dask.seed.model import raised_to_floor
from mdpext_dask.store.blocks import FLOAT32
from mdpext_dask.store.mechanism_store import DAMAGED_CONTENT, MechanismStore
from mdpext_dask.store.schema import RECORD_SCORES, sha256_of

# Steps between the lines of a sweep, and how they are moved from one to the next, in halves of that.
PATCH = 4
_OFFSETS = ((0, 0), (1, 1), (1, 0), (0, 1))
# Of ε: what is set aside, how much of that the programs' margins and rounding may use up over all sweeps of a
# level, and how much by one.
_RESERVE, _LOOSE, _MARGIN = 1e-4, 5e-5, 1e-6
# Above ε by this factor although nothing has moved: the reference cannot be what it was.
_DAMAGED = 1.001
# A level is left when sweeps with all offsets have gained less than this share of the loss.
_NOTHING_LEFT = 1e-3
# Keeps probabilities off the least that can be stored.
_OFF_THE_LEAST = 1e-4
# Of a level, as many times the sweeps of the next one.
MORE_SWEEPS = 2
# How far points on lines may go, as a share of ε times the spacing: what is tried, and by how many sweeps
# it is judged.
_TUBES, TRIAL_SWEEPS = (math.inf, 0.15), 3
# Of ε: what seeds may use at most, so that programs are left something everywhere.
_SEED_USES = 0.95
# Attribute of the seed group: where an interrupted call goes on.
PROGRESS = "cells_progress"
# How many patches a box should have at least, and at most where there are more than a few boxes: a task costs
# what some dozens of programs do. And the most bytes that extend from one box.
BOX_PATCHES, _FEW_BOXES, _MOST_PATCHES, _BOX_BYTES = 128, 8, 1000, 4 * 2**20
_TEMPERINGS = 20


class CellPrograms:
    """Improves the mechanism that extends from seed rows; goes on where an earlier call was interrupted.

    Parameters
    ----------
    store
        The store.
    executor
        Where programs are solved.
    design
        ε in the plane that leaves room for storing, in 1/km.
    sweeps
        Sweeps of the finest level; a coarser one gets twice as many as the next.
    observer
        Called with a note for every sweep.
    """

    def __init__(
        self, store: MechanismStore, executor: Executor, design: float, sweeps: int, observer: Observer
    ) -> None:
        self._store, self._executor, self._observer = store, executor, observer
        self._finest_sweeps = sweeps
        # Storing adds to what programs keep, and to the certificate of what they begin with: twice what is
        # set aside for it.
        self._target = (1 - _RESERVE) * (2 * design - store.planar_limit())
        self._ready: set[str] = set()
        privacy = store.attributes["job"]["privacy"]
        self._budget, least = privacy["budget"], float(privacy["min_probability"])
        self._floor = max(least, SMALLEST_PROBABILITY * (1 + _OFF_THE_LEAST))
        self._parts = [n for n in store.grid.refine if n > 1] or [1]
        self._numbers = itertools.count()

    def run(self, candidates: Sequence[Callable[[], Chosen]]) -> tuple[int, str, dict[str, Any]]:
        """Go through all levels.

        Parameters
        ----------
        candidates
            Seeds to choose from, in the order of what they use of ε; made when they are called.

        Returns
        -------
        candidate
            Which of the seeds they began from.
        name
            Name of the array in the seed group with log probabilities of all records.
        facts
            What to note about them, for the attributes of the seed.

        Raises
        ------
        SolverError
            If no tempering brings the seeds within ε.
        """
        started = time.perf_counter()
        store, grid = self._store, self._store.grid
        self._create(COSTS, grid.shape, tuple(f * grid.factor for f in store.plan.block_cells))
        self._map(tasks.write_costs, [(store.url, index) for index in range(store.plan.blocks)])
        state = self._resumed(len(candidates)) or self._search_split(candidates)
        state = self._sweeps(state, self._sweeps_of(state.level))
        while state.level < len(self._parts):
            before, state = state, self._begin(state)
            self._save(state, instead_of=before)
            state = self._sweeps(state, self._sweeps_of(state.level))
        state = self._from_noise(state)
        name = state.scores.name
        others = {other for other in store.seed_arrays() if other.startswith("cells_")} - {name}
        store.delete_seed_arrays(*others)
        facts = {
            "tube": None if math.isinf(state.tube) else state.tube,
            "tried": list(state.tried),
            "sweeps": [asdict(sweep) for sweep in state.sweeps],
            "seconds": time.perf_counter() - started,
        }
        where = {"name": name, "padding": list(state.scores.padding)}
        fallbacks = sum(e * n for sweep in state.sweeps for *_, e, n in sweep.fallbacks)
        attributes = {RECORD_SCORES: where, "fallbacks": fallbacks, "cells": facts, PROGRESS: None}
        attributes["loss_km"] = state.loss_km
        return state.candidate, name, attributes

    # --- levels -----------------------------------------------------------------------------------

    def _level(self, number: int) -> Level:
        """Return a level's lattice; its costs are there afterwards."""
        grid, done = self._store.grid, math.prod(self._parts[:number])
        rest = grid.factor // done
        shape = grid.cells_x * done + 1, grid.cells_y * done + 1
        if rest == 1:
            return Level(shape, rest, COSTS)
        level = Level(shape, rest, LatticeArray(f"cells_cost_{number}"))
        if level.cost.name not in self._ready:
            self._create(level.cost, shape, 2 * (self._side(level),))
            boxes = self._unmoved(level)
            self._map(tasks.write_level_costs, [(self._store.url, box, level) for box in boxes])
        return level

    def _sweeps_of(self, number: int) -> int:
        """Return how many sweeps a level gets: where they cost less and reach further, more."""
        return int(self._finest_sweeps * MORE_SWEEPS ** (len(self._parts) - number))

    def _begin(self, state: State) -> State:
        """Interpolate a state to the next level."""
        level, parts = self._level(state.level + 1), self._parts[state.level]
        scores, boxes = self._new_array(level), self._unmoved(level)
        self._map(tasks.begin_level, [(self._store.url, box, parts, state.scores, scores) for box in boxes])
        return replace(state, level=state.level + 1, scores=scores)

    def _search_split(self, candidates: Sequence[Callable[[], Chosen]]) -> State:
        """Try seeds, then tubes with the best of them, on the first level; return the best."""
        tried: list[dict[str, Any]] = []

        def first_sweeps(candidate: int, tube: float) -> State:
            seeds = self._seeds_within(candidates[candidate]().rows)
            state = self._begin(State(candidate, tube, (), 0, seeds, math.inf, ()))
            state = self._sweeps(state, min(self._sweeps_of(1), TRIAL_SWEEPS), save=False)
            self._forget(seeds)
            tried.append({"candidate": candidate, "tube": json_number(tube), "loss_km": state.loss_km})
            return state

        best = first_sweeps(0, _TUBES[0])
        for candidate in range(1, len(candidates)):
            best = self._better(best, first_sweeps(candidate, _TUBES[0]))
        for tube in _TUBES[1:]:
            best = self._better(best, first_sweeps(best.candidate, tube))
        best = replace(best, tried=tuple(tried))
        self._save(best)
        return best

    def _better(self, first: State, second: State) -> State:
        """Return the state with less loss, and forget the other."""
        worse, better = (first, second) if second.loss_km < first.loss_km else (second, first)
        self._forget(worse.scores)
        return better

    def _sweeps(self, state: State, sweeps: int, *, save: bool = True) -> State:
        """Sweep over the state's level until it has had so many sweeps, or nothing is gained any more."""
        level = self._level(state.level)
        for turn in range(sum(sweep.level == state.level for sweep in state.sweeps), sweeps):
            losses = [s.loss_km for s in state.sweeps if s.level == state.level]
            earlier = losses[: -len(_OFFSETS)]
            # The last sweeps, one with each offset, have gained next to nothing.
            if earlier and min(losses) > (1 - _NOTHING_LEFT) * min(earlier):
                break
            swept = self._one_sweep(state, level, _OFFSETS[turn % len(_OFFSETS)])
            self._observer(Note(_told(swept, turn + 1), diary=True))
            # Coarse levels price points by interpolation, so a sweep may lose; then it has not been made.
            better = swept.loss_km < state.loss_km
            before, state = (state, swept) if better else (swept, replace(state, sweeps=swept.sweeps))
            if save:
                self._save(state, instead_of=before)
            else:
                self._forget(before.scores)
        return state

    def _seeds_within(self, rows: NDArray[np.float64]) -> LatticeArray:
        """Write seeds, tempered until their mechanism leaves something of ε, and return where."""
        trials = Trials(self._store, self._executor)
        alpha, goal = 1.0, _SEED_USES * self._target
        try:
            for _ in range(_TEMPERINGS):
                seeds = tempered(rows, alpha)
                epsilon = trials.run(seeds).epsilon
                if epsilon <= goal:
                    break
                alpha *= goal / epsilon * AIM
            else:
                raise SolverError(f"no tempering brings the seeds' certificate within {goal:.4g}/km")
        finally:
            trials.clear()
        array = LatticeArray(f"cells_{next(self._numbers)}")
        seeds = raised_to_floor(seeds, self._floor)
        scores = tasks.normalised(np.log(seeds)).reshape(*self._store.grid.seeds_shape, -1)
        self._store.write_seed_arrays({array.name: scores})
        return array

    def _from_noise(self, state: State) -> State:
        """Begin the last level from planar noise as well, and return the state with less loss."""
        if self._budget != "certified":
            return state
        rows = noise_within(Problem.of_store(self._store), (1 - _MARGIN) * self._target, self._floor)
        if rows is None:
            return state
        level = self._level(state.level)
        scores = self._new_array(level)
        for box in self._unmoved(level):
            across, along = box.part()
            part = rows(across)[:, along]
            scores.write(self._store, box, tasks.normalised(np.log(part)))
        other = replace(state, scores=scores, loss_km=math.inf, sweeps=())
        # It has had no sweeps on coarser levels.
        sweeps = MORE_SWEEPS * self._sweeps_of(state.level)
        for turn in range(1, sweeps + 1):
            before, other = other.loss_km, self._sweeps(other, turn, save=False)
            # Sweeps gain less and less, so what the others cannot make up for is lost.
            if other.loss_km - (sweeps - turn) * (before - other.loss_km) > state.loss_km:
                break
        tried = {"candidate": "planar noise", "tube": json_number(state.tube), "loss_km": other.loss_km}
        if other.loss_km < state.loss_km:
            other = replace(other, tried=(*state.tried, tried))
            self._save(other, instead_of=state)
            return other
        self._forget(other.scores)
        return replace(state, tried=(*state.tried, tried))

    # --- progress ---------------------------------------------------------------------------------

    def _save(self, state: State, instead_of: State | None = None) -> None:
        """Note a state, and only then forget the one before."""
        digest = sha256_of(self._store.array(f"seed/{state.scores.name}"))
        noted = replace(state, sha256=digest, next=next(self._numbers))
        self._store.note_seed({PROGRESS: noted.as_json()})
        if instead_of is not None:
            self._forget(instead_of.scores)

    def _resumed(self, candidates: int) -> State | None:
        """Return what an interrupted call has come to, if it is still what it was."""
        try:
            state = State.from_json(self._store.seed_attributes.get(PROGRESS))
        except ValidationError:
            return None
        if not (state.candidate in range(candidates) and 1 <= state.level <= len(self._parts)):
            return None
        level = self._level(state.level)
        padded = tuple(n + pad for n, pad in zip(level.shape, state.scores.padding, strict=True))
        try:
            array = self._store.array(f"seed/{state.scores.name}")
            if array.shape[:2] != padded or sha256_of(array) != state.sha256:
                return None
        except DAMAGED_CONTENT:
            return None
        self._numbers = itertools.count(state.next + 1)
        return state

    # --- sweeps -----------------------------------------------------------------------------------

    def _one_sweep(self, state: State, level: Level, offset: tuple[int, int]) -> State:
        """Make one sweep; again, with less freedom, until the certificate of its result holds."""
        started = time.perf_counter()
        lines = _lines(level.shape, offset)
        padding = lines[0].padding, lines[1].padding
        allowed = self._target * self._store.grid.spacing_km * level.rest
        sides = self._new_array(level, padding)
        task = Sweep(
            level=level,
            lines=lines,
            reference=state.scores,
            sides=sides,
            result=sides,
            drift=(state.scores,) if level.rest > 1 else (),
            frozen=None,
            tube=state.tube * allowed,
            allowed=allowed,
            # Over all sweeps of a level, and both components of a vector, half of what is left for it.
            margin=min(_MARGIN, _LOOSE / 4 / self._sweeps_of(state.level)),
            floor=self._floor,
            target=(1 + _LOOSE) * self._target,
        )
        boxes = boxes_of(lines, self._side(level))
        frozen = np.zeros(level.shape, dtype=bool)
        for tries in itertools.count(1):
            task = replace(task, result=self._new_array(level, padding))
            arguments = [(self._store.url, task, box) for box in boxes]
            swept, verdicts = (
                self._map(tasks.solve_sides, arguments),
                self._map(tasks.solve_insides, arguments),
            )
            swept += [verdict.swept for verdict in verdicts]
            above = np.zeros((level.shape[0] - 1, level.shape[1] - 1), dtype=bool)
            for box, verdict in zip(boxes, verdicts, strict=True):
                east, north = verdict.above.shape
                above[box.x[0] : box.x[0] + east, box.y[0] : box.y[0] + north] = verdict.above
            # Where nothing may move there is nothing to mend: that is the reference, which is within ε.
            # Not the cells whose four corners are frozen.
            above &= ~(frozen[:-1, :-1] & frozen[1:, :-1] & frozen[:-1, 1:] & frozen[1:, 1:])
            if not above.any():
                if not max(verdict.worst for verdict in verdicts) <= _DAMAGED * task.target:
                    raise StoreError(f"{self._store.url}: scores of records are damaged; use --overwrite")
                break
            if tries == 1 and level.rest > 1:
                # What the normaliser has become is what it is likely to become again.
                task = replace(task, drift=(state.scores, task.result))
                continue
            self._forget(task.result, but=task.drift)
            frozen = _with_cells(frozen, above, task.lines)
            task = replace(task, frozen=self._write_frozen(frozen))
        for array in (sides, *task.drift):
            self._forget(array, but=(state.scores, task.result))
        done = tasks.Improved(
            level=state.level,
            loss_km=sum(v.loss_km for v in verdicts),
            tries=tries,
            frozen_share=float(frozen.mean()),
            programs=sum(s.programs for s in swept),
            by_highs=sum(s.by_highs for s in swept),
            fallbacks=tuple(patch for s in swept for patch in s.fallbacks),
            seconds=time.perf_counter() - started,
        )
        return replace(state, scores=task.result, loss_km=done.loss_km, sweeps=(*state.sweeps, done))

    def _write_frozen(self, frozen: NDArray[np.bool_]) -> str:
        name = "cells_frozen"
        chunk = 2 * self._store.plan.seed_chunk_shape[0]
        self._store.create_seed_array(name, ("x", "y"), (chunk, chunk), fill_value=True, data=frozen)
        return name

    # --- arrays -----------------------------------------------------------------------------------

    def _side(self, level: Level) -> int:
        """Return the side of a box: whole patches, so that lines are borders."""
        across, along = (max((n - 1) / PATCH, 1) for n in level.shape)
        patches = math.sqrt(across * along / box_count(across * along))
        largest = math.sqrt(_BOX_BYTES / (FLOAT32 * self._store.outputs)) / (level.rest * PATCH)
        return PATCH * max(math.ceil(min(patches, largest)), 1)

    def _unmoved(self, level: Level) -> list[Box]:
        """Return the boxes of arrays without padding."""
        return boxes_of(_lines(level.shape, (0, 0)), self._side(level))

    def _new_array(self, level: Level, padding: tuple[int, int] = (0, 0)) -> LatticeArray:
        array = LatticeArray(f"cells_{next(self._numbers)}", padding)
        self._create(array, level.shape, 2 * (self._side(level),))
        return array

    def _create(self, array: LatticeArray, shape: tuple[int, int], chunk: tuple[int, ...]) -> None:
        padded = tuple(n + pad for n, pad in zip(shape, array.padding, strict=True))
        outputs = self._store.outputs
        dimensions = tuple(f"{array.name}_{axis}" for axis in range(3))
        self._store.create_seed_array(
            array.name,
            dimensions,
            (*chunk, outputs),
            shape=(*padded, outputs),
            dtype=np.float64,
            compressors=None,  # numbers in the making, read as often as written
        )
        self._ready.add(array.name)

    def _forget(self, array: LatticeArray, but: Sequence[LatticeArray] = ()) -> None:
        if array not in but:
            self._store.delete_seed_arrays(array.name)

    def _map(self, function: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Run tasks and return their results in order."""
        return list(sorted_out(self._executor.map("cells", function, arguments)))


def box_count(patches: float) -> float:
    """Return into about how many boxes a lattice with so many patches is cut."""
    return min(max(patches / BOX_PATCHES, 1), max(_FEW_BOXES, patches / _MOST_PATCHES))


def _lines(shape: tuple[int, int], offset: tuple[int, int]) -> tuple[Lines, Lines]:
    """Return the lines of a lattice, moved so many half patches to the east and to the north."""
    across, along = (Lines(n - 1, PATCH, PATCH // 2 * moved) for n, moved in zip(shape, offset, strict=True))
    return across, along


def _with_cells(
    frozen: NDArray[np.bool_], above: NDArray[np.bool_], lines: tuple[Lines, Lines]
) -> NDArray[np.bool_]:
    """Return the points that stay, and with them the cells of lines, sides included, that hold one above."""
    frozen = frozen.copy()
    across, along = (itertools.pairwise(axis.bounds()) for axis in lines)
    for (left, right), (low, high) in itertools.product(across, along):
        if above[left:right, low:high].any():
            frozen[left : right + 1, low : high + 1] = True
    return frozen


def _told(state: State, turn: int) -> str:
    done = state.sweeps[-1]
    again = f", {done.tries} tries" if done.tries > 1 else ""
    return (
        f"cells: level {done.level}, sweep {turn}: loss {done.loss_km:.4f} km, "
        f"{done.programs} programs{again}"
    )
