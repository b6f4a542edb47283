"""Budgets that the certificate decides.

Solve with budgets that are too generous; extend; take the certificate of every source cell and output; lower
the budgets of the cells that exceed ε; repeat. At the end temper the seed, z^α / Σ z^α, with the largest α
for which the certificate passes on the bytes that will be stored. Tempering the seed tempers the whole
mechanism where scores are interpolated linearly; for other operators the scores of all records are multiplied
by α. By default one round is enough, and refining (:mod:`mdpext_dask.pipeline.refine`) does the rest, better
and faster.

Where to start matters. Budgets that follow the direction from each output to each edge are right for a
mechanism that decays radially, as it does on dense seeds; on coarse ones the same budget for both axes may be
better, or the geometric mean of the two. So a round or two are made from each, and the search goes on from
whichever promises the least loss; with so many seeds that every program takes long, from the direction alone.
The closed-form budgets of bound (2) compete at the end, so the result is never worse than theirs.

Nothing needs the mechanism in memory, and whatever comes out, the certificate of the finished store decides
(PROOF.md, section 2).
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.errors import SolverError
from mdpext_dask.events import Note, Observer
from mdpext_dask.extend.choose import closed_form
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.axis_budgets import LARGE_GAP, Chosen
from mdpext_dask.pipeline.refine import refine
from mdpext_dask.pipeline.tasks import solve_seed
from mdpext_dask.pipeline.trials import CONTENT, Trial, Trials, told
from mdpext_dask.seed.budget import axis_budgets, direction_budgets, even_split, many_seeds, tighten
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.seed.solve import GAP
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import job_of

Budgets = tuple[NDArray[np.float64], NDArray[np.float64]]

# Starts: how far budgets follow the direction, as an exponent against the even split; and the share of ε.
_STARTS, _FEW_STARTS = (0.0, 0.5, 1.0), (1.0,)
_START_SHARE = 0.9
_ROUNDS_EACH, _ROUNDS_MORE = 2, 8
# A round is solved this well, and is the last when no cell exceeds ε by more than this factor.
_SEARCH_GAP = 1e-5
_CLOSE_ENOUGH = 1.005
# Refining wants no more than a start near ε, if it may make so many rounds, or take so many times a program's
# time.
_ROUNDS_BEFORE_REFINING, ENOUGH_REFINING = 1, 8
# Refining ends within ε at about the loss of a round that exceeds it: at most so many times that of what
# competes, or it is not begun.
_HOPELESS = 1.02


@dataclass(frozen=True)
class _Tried:
    """A seed, how it was budgeted, and what the mechanism extended from it is like."""

    seed: SeedMechanism
    budgets: Budgets
    trial: Trial

    @property
    def epsilon(self) -> float:
        return self.trial.epsilon


@dataclass(frozen=True)
class _Found:
    """A mechanism within ε: where it comes from, and what was tempered or refined to get there."""

    source: str
    tried: _Tried
    trial: Trial


def search_budgets(
    store: MechanismStore,
    executor: Executor,
    design_epsilon: float,
    observer: Observer,
    beat_km: float = math.inf,
) -> Chosen:
    """Find certified budgets.

    Parameters
    ----------
    store
        The store, with its seed cost.
    executor
        Where the LPs are solved and the blocks tried.
    design_epsilon
        ε, in 1/km, for the closed-form budgets that compete.
    observer
        Called with a note for every round.
    beat_km
        Loss of what competes, in km. Where budgets that are too generous lose more, refining is left out.

    Returns
    -------
    The best seed. Its facts hold `rounds`: exponent of the direction in the start that a round belongs to,
    loss in km and certificate in 1/km before tempering, the share of (source cell, output) above ε, seconds;
    and `refinements`, see :func:`mdpext_dask.pipeline.refine.refine`.

    Raises
    ------
    SolverError
        If neither the search nor the closed form ends within ε.
    """
    search = _Search(Trials(store, executor), job_of(store), observer, beat_km)
    try:
        return search.run(design_epsilon)
    finally:
        search.trials.clear()


class _Search:
    def __init__(self, trials: Trials, job: JobSpec, observer: Observer, beat_km: float) -> None:
        self.trials, self._store, self._limit = trials, trials.store, trials.limit
        self._observer, self._limits, self._beat_km = observer, job.seed, beat_km
        # Refining linearises the certificate of interpolated scores.
        self._refines = bool(job.seed.refine_rounds) and isinstance(trials.operator, LogConvex)
        # Budgets beyond log(1/δ) follow from δ ≤ z ≤ 1.
        self._loosest = -math.log(job.privacy.min_probability)
        self._rounds: list[dict[str, Any]] = []
        self._solves, self._slowest = 0, float(np.finfo(float).tiny)
        self._large = many_seeds(self._store.grid.seeds)

    def run(self, design_epsilon: float) -> Chosen:
        """Search from every start, refine the most promising one, and keep the best of all."""
        found: list[_Found] = []
        refinements: list[dict[str, Any]] = []
        try:
            found += self._closed_form(design_epsilon)
            start, tried = self._search()
            reached = self.trials.temper(tried.trial)
            found += [_Found(f"direction {start:g}", tried, reached)] if reached else []
            if self._refines and not self._unbounded(tried) and not self._beaten():
                reached, refinements = refine(self.trials, tried.trial.rows, self._limits, self._observer)
                found += [_Found("refined", tried, reached)] if reached else []
        except SolverError as error:
            if not found:
                raise
            self._note(f"the search ended early: {error}")
        if not found:
            raise SolverError(f"no tempering brings the certificate within {self._limit:.4g}/km")
        best = min(found, key=lambda one: one.trial.loss_km)
        # What the store says about budgets are those of the program whose solution is kept or was refined.
        self._store.write_budgets(best.tried.budgets)
        facts = {
            "source": best.source,
            "tempering": best.trial.alpha,
            "loss_km": best.trial.loss_km,
            "tempered_primal_km": float((self._store.read_seed_cost() * best.trial.corner_rows).sum()),
            "solves": self._solves + len(refinements),
            "rounds": self._rounds,
            "refinements": refinements,
        }
        return Chosen(best.tried.seed, best.trial.rows, best.trial.extension, facts)

    @property
    def _refining(self) -> bool:
        """Whether refining will go far enough to begin from the first start that promises well."""
        if not self._refines:
            return False
        seconds = self._limits.refine_seconds
        programs = math.inf if seconds is None else seconds / self._slowest
        return min(self._limits.refine_rounds, programs) >= ENOUGH_REFINING

    def _closed_form(self, design_epsilon: float) -> list[_Found]:
        """Return the budgets by what the operator promises, if they hold: they compete, or help out."""
        split = even_split(design_epsilon, self._store.metric_p)
        promised = closed_form(self.trials.operator, split, self._store.grid.cell_km)
        if promised is None:
            return []
        budgets = axis_budgets(self._store.grid, promised.beta, self._store.outputs)
        tried = self._try_budgets(budgets, start=None)
        return [_Found("bound", tried, tried.trial)] if tried.epsilon <= self._limit else []

    def _search(self) -> tuple[float, _Tried]:
        """Make a few rounds from every start and, unless refining follows, more from the most promising."""
        rounds = _ROUNDS_BEFORE_REFINING if self._refining else _ROUNDS_EACH
        begun = {start: self._rounds_from(start, self._start(start), rounds) for start in self._starts()}
        promised = {start: self.trials.promise(tried.trial) for start, tried in begun.items()}
        best = min(promised, key=lambda start: promised[start])
        tried = begun[best]
        if not self._refining and not self._done(tried):
            lowered = tighten(tried.budgets, tried.trial.norms, self._limit)
            tried = self._rounds_from(best, lowered, _ROUNDS_MORE)
        return best, tried

    def _starts(self) -> tuple[float, ...]:
        if self._store.metric_p == 1:
            # Every axis may use all of ε, so there is nothing to share out: all starts are the same.
            return _STARTS[:1]
        return _FEW_STARTS if self._large else _STARTS

    def _start(self, exponent: float) -> Budgets:
        """Return budgets direction^e · even^(1 − e), for the share of ε to start with."""
        store, epsilon = self._store, _START_SHARE * self._limit
        even = axis_budgets(store.grid, even_split(epsilon, store.metric_p), store.outputs)
        outputs = store.output_xy_km()
        radial = direction_budgets(store.grid, outputs, epsilon, store.metric_p)
        east, north = (r**exponent * e ** (1 - exponent) for r, e in zip(radial, even, strict=True))
        return east, north

    def _rounds_from(self, start: float, budgets: Budgets, rounds: int) -> _Tried:
        """Solve and tighten; return the round with a certificate nearest to ε, for the loss hardly moves."""
        best: _Tried | None = None
        for _ in range(rounds):
            try:
                tried = self._try_budgets(budgets, start)
            except SolverError:
                if best is None:
                    raise
                break
            if best is None or self._distance(tried) < self._distance(best):
                best = tried
            if self._done(tried):
                break
            budgets = tighten(tried.budgets, tried.trial.norms, self._limit)
        assert best is not None  # there is at least one round
        return best

    def _distance(self, tried: _Tried) -> float:
        return abs(math.log(tried.epsilon / self._limit))

    def _done(self, tried: _Tried) -> bool:
        """Whether ε is used, or could not be used by any budgets."""
        used = CONTENT * self._limit <= tried.epsilon <= _CLOSE_ENOUGH * self._limit
        return used or self._unbounded(tried)

    def _beaten(self) -> bool:
        """Whether what competes loses so much less than every round that refining will not make up for it."""
        return bool(min(one["loss_km"] for one in self._rounds) > _HOPELESS * self._beat_km)

    def _unbounded(self, tried: _Tried) -> bool:
        """Whether no budget binds and ε is kept all the same: there is nothing to gain."""
        binding = min(float(b.min(initial=np.inf)) for b in tried.budgets) < self._loosest
        return not binding and tried.epsilon <= self._limit

    def _try_budgets(self, budgets: Budgets, start: float | None) -> _Tried:
        """Solve the seed LP for budgets and certify what extends from it."""
        started = time.perf_counter()
        self._store.write_budgets(budgets)
        closest = GAP if start is None else _SEARCH_GAP
        gap = LARGE_GAP if self._large else closest
        seed = solve_alone(self._store, self.trials.executor, solve_seed, None, gap)
        self._solves += 1
        self._slowest = max(self._slowest, time.perf_counter() - started)
        tried = _Tried(seed, budgets, self.trials.run(seed.rows, budgets))
        if start is not None:
            measures = tried.trial.measures(self._limit)
            self._rounds.append({"start": start, **measures, "seconds": time.perf_counter() - started})
            self._note(f"round {len(self._rounds)} (direction {start:g}): {told(measures)}")
        return tried

    def _note(self, text: str) -> None:
        self._observer(Note(f"budgets: {text}", diary=True))
