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

import time
from dataclasses import asdict, dataclass, replace
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
from mdpext_dask.errors import SolverError
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
    """
    store = MechanismStore.open(url)
    block, grid = store.plan[index], store.grid
    fine = extend_log_convex(store.read_scores(block), grid.factor)
    norms = certify_source_cells(fine, grid.spacing_km, grid.factor, store.metric_p)
    east, north = block.owned_shape
    return norms, expected_loss(store, block, fine[:east, :north])


def tempered(rows: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return z^α / Σ z^α, over the last axis."""
    power: NDArray[np.float64] = rows**alpha
    return power / np.add.reduce(power, axis=-1, keepdims=True)


def search_budgets(
    store: MechanismStore, executor: Executor, design_epsilon: float, observer: Observer
) -> tuple[SeedMechanism, dict[str, Any]]:
    """Find certified budgets; return the tempered seed and what to note about it.

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

    Raises
    ------
    SolverError
        If a seed LP cannot be solved, or no tempering passes the certificate.
    """
    return _Search(store, executor, observer).run(design_epsilon)


class _Search:
    def __init__(self, store: MechanismStore, executor: Executor, observer: Observer) -> None:
        self._store, self._executor, self._observer = store, executor, observer
        self._limit = store.planar_limit()
        self._rounds: list[Round] = []

    def run(self, design_epsilon: float) -> tuple[SeedMechanism, dict[str, Any]]:
        """Search from every start, finish the most promising one, and keep the better of it and bound (2)."""
        store, p = self._store, self._store.metric_p
        even = even_split(design_epsilon, p)
        beta = bound_budgets(even, store.grid.cell_km).beta
        closed_form = self._try_budgets(self._axis_budgets(beta), start=None)
        # For p = 1 every axis may use all of ε, so there is nothing to share out: all starts are the same.
        starts = _STARTS[:1] if p == 1 else _STARTS
        begun = {start: self._rounds_from(start, self._start(start), _ROUNDS_EACH) for start in starts}
        promised = {start: self._promise(tried) for start, tried in begun.items()}
        best = min(promised, key=lambda s: promised[s])
        start: float | None = best
        tried = begun[best]
        if not self._done(tried):
            budgets = tighten(tried.budgets, tried.norms, self._limit)
            tried = self._rounds_from(best, budgets, _ROUNDS_MORE)
        alpha, rows, loss_km = self._temper(tried)
        if closed_form.epsilon <= self._limit and closed_form.loss_km <= loss_km:
            self._note("the closed-form budgets are kept")
            start, alpha, rows, tried = None, 1.0, closed_form.seed.rows, closed_form
        # What the store says about budgets are those of the seed that is kept.
        store.write_budgets(tried.budgets)
        return replace(tried.seed, rows=rows), {
            "start": start,
            "tempering": alpha,
            "solves": len(self._rounds) + 1,
            "rounds": [asdict(r) for r in self._rounds],
        }

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
        for number in range(rounds):
            tried = self._try_budgets(budgets, start)
            if self._done(tried) or number == rounds - 1:
                break
            budgets = tighten(tried.budgets, tried.norms, self._limit)
        return tried

    def _done(self, tried: _Tried) -> bool:
        return _CONTENT * self._limit <= tried.epsilon <= _CLOSE_ENOUGH * self._limit

    def _try_budgets(self, budgets: Budgets, start: float | None) -> _Tried:
        """Solve the seed LP for budgets and certify what extends from it."""
        started = time.perf_counter()
        self._store.write_budgets(budgets)
        ((_, seed),) = self._executor.map("seed", solve_seed, [(self._store.url, None, _SEARCH_GAP)])
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
        store.write_scores(rows)
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
        alpha = min(1.0, self._limit / tried.epsilon)
        return self._try_rows(tempered(tried.seed.rows, alpha))[1]

    def _temper(self, tried: _Tried) -> tuple[float, NDArray[np.float64], float]:
        """Return (nearly) the largest α ≤ 1 that passes the certificate, the tempered rows and their loss."""
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
        if best is None:
            raise SolverError(f"no tempering brings a certificate of {epsilon:.4g}/km within {limit:.4g}/km")
        return best

    def _note(self, text: str) -> None:
        self._observer(Note(f"budgets: {text}"))


def solve_splits(
    store: MechanismStore, executor: Executor, design_epsilon: float, kind: str
) -> tuple[SeedMechanism, dict[str, Any]]:
    """Solve the seed LP under one budget for each axis, and return the best seed and what to note about it.

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
    return solved[best], {
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
    }
