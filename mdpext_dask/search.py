"""Budgets that the certificate decides.

Solve with budgets that are too generous; extend; take the certificate of every source cell and output; lower
the budgets of the cells that exceed ε; repeat. At the end temper the seed, z^α / Σ z^α, with the largest α
for which the certificate passes on the bytes that will be stored. Tempering the seed tempers the whole
mechanism, since scores are interpolated linearly.

Where to start matters more than anything after it. Budgets that follow the direction from each output to each
edge are right for a mechanism that decays radially, as it does on dense seeds; on coarse ones the same budget
for both axes is better; often their geometric mean is best. So a few rounds are made from each, and the
search goes on from whichever promises the least loss. The closed-form budgets of bound (2) compete at the
end, so the result is never worse than theirs.

A round runs block by block on the workers and never needs the mechanism in memory. Whatever comes out, the
certificate of the finished store decides (PROOF.md, section 2).
"""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.audit.certificate import certify_source_cells
from mdpext_dask.budget import (
    bound_budgets,
    candidate_splits,
    direction_budgets,
    even_split,
    half_budgets,
    tighten,
)
from mdpext_dask.cluster import Executor
from mdpext_dask.errors import SolverError, StoreError
from mdpext_dask.evaluate.loss import expected_loss
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.progress import Note, Observer
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.seed.solve import GAP
from mdpext_dask.store import MechanismStore
from mdpext_dask.tasks import solve_seed

Budgets = tuple[NDArray[np.float64], NDArray[np.float64]]

# Starts: how far budgets follow the direction, as an exponent against the even split; and the share of ε.
_STARTS = (0.0, 0.5, 1.0)
_START_SHARE = 0.9
_ROUNDS_EACH, _ROUNDS_MORE = 2, 8
# A round is solved this well, and is the last when no cell exceeds ε by more than this factor.
_SEARCH_GAP = 1e-5
_CLOSE_ENOUGH = 1.005
# Tempering aims this far below ε and is content with so much of it.
_AIM, _CONTENT = 1 - 1e-5, 0.998
_TEMPERINGS = 25


@dataclass(frozen=True)
class Round:
    """One round of the search.

    Parameters
    ----------
    start
        Exponent of the direction in the start it belongs to.
    loss_km
        Expected loss of the extended mechanism, before tempering, in km.
    epsilon_certified
        Its certificate, in 1/km.
    failing_share
        Share of (source cell, output) above ε.
    seconds
        How long solving and certifying took.
    """

    start: float
    loss_km: float
    epsilon_certified: float
    failing_share: float
    seconds: float


@dataclass(frozen=True)
class _Tried:
    """A seed, how it was budgeted, and what the mechanism extended from it is like."""

    seed: SeedMechanism
    budgets: Budgets
    norms: NDArray[np.float64]
    loss_km: float

    @property
    def epsilon(self) -> float:
        return float(self.norms.max())


def try_block(url: str, index: int) -> tuple[NDArray[np.float64], float]:
    """Extend a block from the scores under trial, to the bytes that would be stored, without storing it.

    Returns
    -------
    norms
        Certificate of each source cell and output, in 1/km, float64 of shape (cells east, cells north, K).
    loss_km
        The block's part of the expected loss, in km.

    Raises
    ------
    StoreError
        If the scores cannot be read.
    """
    store = MechanismStore.open(url)
    block, grid = store.plan[index], store.grid
    scores = store.read_scores(block, "trial_score")
    if not np.isfinite(scores).all():
        raise StoreError(f"{url}: the scores under trial are damaged; run the job again")
    fine = extend_log_convex(scores, grid.factor)
    norms = certify_source_cells(fine, grid.spacing_km, grid.factor, store.metric_p)
    east, north = block.owned_shape
    return norms, expected_loss(store, block, fine[:east, :north])


def tempered(rows: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return z^α / Σ z^α, over the last axis."""
    power: NDArray[np.float64] = rows**alpha
    return power / np.add.reduce(power, axis=-1, keepdims=True)


def search_budgets(
    store: MechanismStore, executor: Executor, design_epsilon: float, observer: Observer
) -> tuple[SeedMechanism, NDArray[np.float64], dict[str, Any]]:
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
        Is told of every round.

    Returns
    -------
    seed
        The LP of the budgets that are kept, as it was solved.
    rows
        Its rows after tempering, float64 of shape (J, K).
    facts
        What to note about it.

    Raises
    ------
    SolverError
        If neither the search nor the closed form ends within ε.
    """
    found = _Search(store, executor, observer).run(design_epsilon)
    store.delete_trial()
    return found


class _Search:
    def __init__(self, store: MechanismStore, executor: Executor, observer: Observer) -> None:
        self._store, self._executor, self._observer = store, executor, observer
        self._limit = store.planar_limit()
        # Budgets beyond log(1/δ) follow from δ ≤ z ≤ 1.
        self._loosest = -math.log(float(store.attributes["job"]["privacy"]["min_probability"]))
        self._rounds: list[Round] = []

    def run(self, design_epsilon: float) -> tuple[SeedMechanism, NDArray[np.float64], dict[str, Any]]:
        """Search from every start, finish the most promising one, and keep the better of it and bound (2)."""
        store, p = self._store, self._store.metric_p
        beta = bound_budgets(even_split(design_epsilon, p), store.grid.cell_km).beta
        closed_form = self._try_budgets(self._axis_budgets(beta), start=None)
        kept, rows = closed_form, closed_form.seed.rows
        start, alpha, loss_km = (
            None,
            1.0,
            closed_form.loss_km if closed_form.epsilon <= self._limit else np.inf,
        )
        try:
            best, tried = self._search()
            reached = self._temper(tried)
        except SolverError as error:
            if loss_km == np.inf:
                raise
            self._note(f"the search ended early: {error}")
        else:
            if reached is not None and reached[2] < loss_km:
                kept, start, (alpha, rows, loss_km) = tried, best, reached
        if loss_km == np.inf:
            raise SolverError(f"no tempering brings the certificate within {self._limit:.4g}/km")
        # What the store says about budgets are those of the seed that is kept.
        store.write_budgets(kept.budgets)
        return (
            kept.seed,
            rows,
            {
                "start": start,
                "tempering": alpha,
                "tempered_primal_km": float((store.read_seed_cost() * rows).sum()),
                "solves": len(self._rounds) + 1,
                "rounds": [asdict(r) for r in self._rounds],
            },
        )

    def _search(self) -> tuple[float, _Tried]:
        """Make a few rounds from every start and more from the most promising one."""
        # For p = 1 every axis may use all of ε, so there is nothing to share out: all starts are the same.
        starts = _STARTS[:1] if self._store.metric_p == 1 else _STARTS
        begun = {start: self._rounds_from(start, self._start(start), _ROUNDS_EACH) for start in starts}
        promised = {start: self._promise(tried) for start, tried in begun.items()}
        best = min(promised, key=lambda start: promised[start])
        tried = begun[best]
        if not self._done(tried):
            tried = self._rounds_from(best, tighten(tried.budgets, tried.norms, self._limit), _ROUNDS_MORE)
        return best, tried

    def _axis_budgets(self, beta: tuple[float, float]) -> Budgets:
        grid, outputs = self._store.grid, self._store.outputs
        seeds_x, seeds_y = grid.seeds_shape
        return (
            np.full((2, seeds_x - 1, seeds_y, outputs), beta[0] * grid.cell_km),
            np.full((2, seeds_x, seeds_y - 1, outputs), beta[1] * grid.cell_km),
        )

    def _start(self, exponent: float) -> Budgets:
        """Return budgets direction^e · even^(1 − e), for the share of ε to start with."""
        store, epsilon = self._store, _START_SHARE * self._limit
        even = self._axis_budgets(even_split(epsilon, store.metric_p))
        outputs = np.stack([store.read("output_x"), store.read("output_y")], axis=-1)
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
            budgets = tighten(tried.budgets, tried.norms, self._limit)
        assert best is not None  # there is at least one round
        return best

    def _distance(self, tried: _Tried) -> float:
        return abs(math.log(tried.epsilon / self._limit))

    def _done(self, tried: _Tried) -> bool:
        """Whether ε is used, or could not be used by any budgets: none of them binds."""
        binding = min(float(b.min(initial=np.inf)) for b in tried.budgets) < self._loosest
        used = _CONTENT * self._limit <= tried.epsilon <= _CLOSE_ENOUGH * self._limit
        return used or (not binding and tried.epsilon <= self._limit)

    def _try_budgets(self, budgets: Budgets, start: float | None) -> _Tried:
        """Solve the seed LP for budgets and certify what extends from it."""
        started = time.perf_counter()
        self._store.write_budgets(budgets)
        gap = GAP if start is None else _SEARCH_GAP
        ((_, seed),) = self._executor.map("seed", solve_seed, [(self._store.url, None, gap)])
        norms, loss_km = self._try_rows(seed.rows)
        tried = _Tried(seed, budgets, norms, loss_km)
        if start is not None:
            failing = float((norms > self._limit).mean())
            seconds = time.perf_counter() - started
            self._rounds.append(Round(start, loss_km, tried.epsilon, failing, seconds))
            self._note(
                f"round {len(self._rounds)} (direction {start:g}): loss {loss_km:.4f} km, certificate "
                f"{tried.epsilon:.4f}/km, {failing:.2%} of cells above"
            )
        return tried

    def _try_rows(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return norms by source cell and output, and the expected loss in km, for seed rows (J, K)."""
        store, plan, grid = self._store, self._store.plan, self._store.grid
        store.write_trial(rows)
        norms = np.empty((grid.cells_x, grid.cells_y, plan.outputs))
        losses = np.empty(plan.blocks)
        arguments = [(store.url, index) for index in range(plan.blocks)]
        for index, (part, loss_km) in self._executor.map("search", try_block, arguments):
            block = plan[index]
            norms[block.cells_x, block.cells_y] = part
            losses[index] = loss_km
        return norms, float(losses.sum())

    def _promise(self, tried: _Tried) -> float:
        """Return about the loss, in km, that is left when a seed is tempered to ε."""
        if tried.epsilon <= self._limit:
            return tried.loss_km
        alpha = self._limit / tried.epsilon
        return self._try_rows(tempered(tried.seed.rows, alpha))[1]

    def _temper(self, tried: _Tried) -> tuple[float, NDArray[np.float64], float] | None:
        """Return nearly the largest α ≤ 1 that passes the certificate, the tempered rows and their loss."""
        limit, epsilon = self._limit, tried.epsilon
        if epsilon <= limit:
            return 1.0, tried.seed.rows, tried.loss_km
        # Between an α that passes and one that fails, guided by slopes that are nearly proportional to α.
        passing, failing = 0.0, 1.0
        best: tuple[float, NDArray[np.float64], float] | None = None
        for _ in range(_TEMPERINGS):
            alpha = failing * _AIM * limit / epsilon
            if not passing < alpha < failing:
                alpha = (passing + failing) / 2
            rows = tempered(tried.seed.rows, alpha)
            norms, loss_km = self._try_rows(rows)
            reached = float(norms.max())
            if reached > limit:
                failing, epsilon = alpha, reached
                continue
            passing, best = alpha, (alpha, rows, loss_km)
            if reached >= _CONTENT * limit:
                break
        return best

    def _note(self, text: str) -> None:
        self._observer(Note(f"budgets: {text}"))


def solve_splits(
    store: MechanismStore, executor: Executor, design_epsilon: float, kind: str
) -> tuple[SeedMechanism, NDArray[np.float64], dict[str, Any]]:
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
    p = store.metric_p
    if kind == "half":
        candidates = [half_budgets(split) for split in candidate_splits(design_epsilon, p)]
    else:
        candidates = [bound_budgets(even_split(design_epsilon, p), store.grid.cell_km)]
    solved = dict(executor.map("seed", solve_seed, [(store.url, c.beta, GAP) for c in candidates]))
    best = min(sorted(solved), key=lambda position: solved[position].primal)
    return (
        solved[best],
        solved[best].rows,
        {
            "beta_per_km": list(candidates[best].beta),
            "split_per_km": list(candidates[best].split),
            "solves": len(candidates),
            "tried": [
                {
                    "split_per_km": list(candidate.split),
                    "primal_km": solved[position].primal,
                    "dual_km": solved[position].dual,
                }
                for position, candidate in enumerate(candidates)
            ],
        },
    )
