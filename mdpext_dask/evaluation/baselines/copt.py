"""COPT, or ConstOPT: linear programs that are small because most entries are fixed to an exponential decay.

J. Imola, S. Kasiviswanathan, S. White, A. Aggarwal, N. Teissier, "Balancing utility and scalability in
metric differential privacy", UAI 2022. In later comparisons (the artifact of R. Liu, C. Qiu,
arXiv 2509.08720, with r = 38; similar in C. Qiu et al., arXiv 2407.13725) it reads: for each output v the r
records nearest to it are free, under rows of the linear program among themselves; every other entry is
Y_v exp(−ε d(x, v)) with Y_v ≥ 0 to be found; rows sum to 1.

That recipe is made for outputs that are the records themselves. Here K outputs are far fewer than N records,
and it cannot be followed to the letter:

- A record that is near no output has no free entry: Σ_v Y_v exp(−ε d(x, v)) = 1 would have to hold at N − r K
  records or more with K unknowns. So these rows are normalised, which costs as much as the decay itself: the
  decay is ε / 2, and E(x, v) = Y_v exp(−ε d(x, v) / 2) / Σ_w Y_w exp(−ε d(x, w) / 2) is ε-mDP for any Y.
- Nothing ties a free entry to the fixed ones around it, so the recipe breaks ε at the rim of the r records.
  With a decay of the whole ε it could not be tied either: a fixed record straight behind a free one leaves it
  no choice but the decay. Here every free entry keeps ε with all fixed ones, which a decay of ε / 2 allows.

So: Y is found first, as what makes the loss of E least, starting from the exponential mechanism (Y = 1); then
the free entries, by the linear program. But for the floor δ neither step makes the loss larger. The rows are
ε-mDP for all pairs.
"""

import math
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import sparse
from scipy.optimize import minimize

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices
from mdpext_dask.evaluation.baselines.lp import costs
from mdpext_dask.evaluation.baselines.pair_rows import budgets
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem
from mdpext_dask.seed.budget import log_ratio_error
from mdpext_dask.seed.highs import rows_of_two, solve_linear_program

# Free entries in all, and records for each output: the linear program takes some ten seconds.
_MOST_FREE, _MOST_RECORDS = 4_000, 500
# Numbers of records times outputs that are held at once, several times.
_MOST_ENTRIES = 50_000_000
# log Y stays within this.
_LARGEST_WEIGHT = 10.0
# Free records of an output are first compared with this many of their nearest.
_NEAR = 12
_ROUNDS = 30
# Broken by less, in log units, is left to the repair.
_BROKEN = 1e-5
_LARGEST_SHARE = 1e-2
_AT_ONCE = 4_000_000


def const_opt(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make the mechanism.

    Raises
    ------
    SolverError
        If there are too many entries, or it is not solved in time.
    """
    deadline = time.monotonic() + seconds
    grid, outputs = problem.grid, problem.outputs
    if grid.records * outputs > _MOST_ENTRIES:
        raise SolverError(
            f"COPT: {grid.records:,} records x {outputs} outputs are {grid.records * outputs:.1e} entries; "
            f"at most {_MOST_ENTRIES:.0e} are held in memory"
        )
    xy = problem.records_xy_km(slice(None))
    distance = problem.distances_km(xy, problem.output_xy_km)
    cost = costs(problem)
    fixed = _decaying(problem, distance, cost)
    radius = min(grid.records, _MOST_RECORDS, max(_MOST_FREE // outputs, 1))
    free = _Free.nearest(problem, xy, distance, fixed, radius)
    found, facts = free.optimise(cost, deadline)
    rows = found.reshape(*grid.shape, outputs)
    return BaselineMechanism(
        rows=lambda east: rows[east],
        guarantee=Guarantee.EPSILON,
        note=(
            "Kept between all pairs, unlike in the recipe: far entries decay with ε/2 and are normalised, "
            "and near ones keep ε with them."
        ),
        facts={"r": radius, "records_with_free_entries": np.unique(free.record).size} | facts,
    )


def _decaying(problem: Problem, distance_km: Array, cost: Array) -> Array:
    """Return E for the weights Y that make its loss least, float64 of shape (N, K), at least δ.

    Mixing with the uniform row keeps ε and makes room for the floor.
    """
    outputs = problem.outputs
    decay = -0.5 * problem.epsilon_per_km * (1 - 1e-12) * distance_km
    scale = float(cost.sum()) or 1.0

    def rows(weight: Array) -> Array:
        score = decay + weight
        score -= score.max(axis=1, keepdims=True)
        np.exp(score, out=score)
        score /= score.sum(axis=1, keepdims=True)
        return score

    def loss(weight: Array) -> tuple[float, Array]:
        of_rows = rows(weight)
        terms = cost * of_rows
        by_record = terms.sum(axis=1)
        return float(by_record.sum()) / scale, (terms.sum(axis=0) - by_record @ of_rows) / scale

    found = minimize(
        loss,
        np.zeros(outputs),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)] * outputs,
    )
    share = problem.min_probability * outputs
    return np.asarray((1 - share) * rows(found.x) + share / outputs)


@dataclass(frozen=True)
class _Free:
    """The free entries: r of each output.

    Parameters
    ----------
    fixed
        E, float64 of shape (N, K).
    record
        Record of each free entry, shape (K, r), nearest first.
    budget
        Budgets between the records of an output, in log units, float64 of shape (K, r, r).
    low, high
        What the fixed entries allow, in log units, float64 of shape (K, r), rounded inward.
    min_probability
        Floor δ.
    """

    fixed: Array
    record: Indices
    budget: Array
    low: Array
    high: Array
    min_probability: float

    @classmethod
    def nearest(cls, problem: Problem, xy_km: Array, distance_km: Array, fixed: Array, r: int) -> "_Free":
        """Free the r records nearest to each output."""
        near = np.argsort(distance_km, axis=0, kind="stable")[:r].T
        bounds, pairs = [], []
        for output, records in enumerate(near):
            others = np.ones(len(xy_km), dtype=bool)
            others[records] = False
            place = xy_km[records]
            bounds.append(_bounds(problem, place, xy_km[others], np.log(fixed[others, output])))
            pairs.append(budgets(problem.epsilon_per_km, problem.distances_km(place, place)))
        low, high = np.array(bounds).swapaxes(0, 1)
        return cls(fixed, near, np.array(pairs), low, high, problem.min_probability)

    @property
    def _base(self) -> Array:
        return np.asarray(self.fixed[self.record, np.arange(len(self.record))[:, None]])

    def _excess(self, z: Array) -> Array:
        """Return log z_i − log z_j − b_ij of two free entries of an output, float64 of shape (K, r, r)."""
        logs = np.log(z)
        return np.asarray(logs[:, :, None] - logs[:, None] - self.budget)

    def _nearest_pairs(self) -> Indices:
        """Return the rows between every free entry and its nearest, both ways: indices into (K, r, r)."""
        near = np.argsort(self.budget, axis=2, kind="stable")[:, :, 1 : _NEAR + 1]
        chosen = np.zeros(self.budget.shape, dtype=bool)
        np.put_along_axis(chosen, near, True, axis=2)
        chosen |= chosen.swapaxes(1, 2)
        # What follows from δ ≤ z ≤ 1 is left out: its huge coefficient would only do harm.
        return np.flatnonzero(chosen & (self.budget < -math.log(self.min_probability)))

    def optimise(self, cost: Array, deadline: float) -> tuple[Array, dict[str, float | int]]:
        """Return all rows with the free entries at their best, and what is worth telling.

        Raises
        ------
        SolverError
            If it is not solved in time, or not well enough.
        """
        (outputs, r), base = self.record.shape, self._base
        entries = base.size
        records, row = np.unique(self.record.ravel(), return_inverse=True)
        # Entries are scaled by K, so that they are about 1.
        scale = float(outputs)
        weight = cost[self.record, np.arange(outputs)[:, None]]
        # An entry that is free alone in its row has no choice.
        alone = (np.bincount(row)[row] == 1).reshape(base.shape)
        lower = np.where(alone, base, np.maximum(np.exp(self.low), self.min_probability))
        upper = np.where(alone, base, np.minimum(np.exp(self.high), 1.0))
        sums = sparse.csr_array((np.ones(entries), (row, np.arange(entries))), shape=(len(records), entries))
        total = sums @ base.ravel()
        chosen = self._nearest_pairs()
        rounds = iterations = 0
        while True:
            rounds += 1
            risen, fallen = chosen // r, chosen // (r * r) * r + chosen % r
            growth = np.exp(self.budget.ravel()[chosen])
            matrix = rows_of_two((risen, np.ones(len(chosen))), (fallen, -growth), entries)
            rows_low = np.concatenate([np.full(len(chosen), -np.inf), scale * total])
            rows_high = np.concatenate([np.zeros(len(chosen)), scale * total])
            solve = partial(
                solve_linear_program,
                f"COPT's linear program ({entries} free entries)",
                cost=weight.ravel() / (float(np.abs(weight).max()) or 1.0),
                bounds=(scale * lower.ravel(), scale * upper.ravel()),
                matrix=sparse.csr_array(sparse.vstack([matrix, sums])),
                row_bounds=(rows_low, rows_high),
            )
            try:
                found, _, steps = solve(seconds=deadline - time.monotonic())
            except SolverError:
                # Where bounds are narrow the interior point may end without a verdict; a vertex can be had.
                if (left := deadline - time.monotonic()) <= 0:
                    raise
                found, _, steps = solve(simplex=True, seconds=left)
            iterations += steps
            z = np.clip(found.reshape(base.shape) / scale, lower, upper)
            # Fixed entries are never touched, so what solver and clipping leave over goes to the free ones.
            z *= (total / (sums @ z.ravel()))[row].reshape(base.shape)
            broken = np.flatnonzero(self._excess(z) > _BROKEN)
            if not len(broken):
                break
            if rounds == _ROUNDS:
                raise SolverError(f"COPT: rows are still broken after {_ROUNDS} rounds")
            chosen = np.concatenate([chosen, broken])
        rows = self._repair(z)
        return rows, {
            "variables": entries,
            "constraints": len(chosen) + len(records),
            "rounds": rounds,
            "iterations": iterations,
            "loss_of_decay_km": float((cost * self.fixed).sum()),
        }

    def _repair(self, z: Array) -> Array:
        """Return all rows, (1 − t) z + t E with the least t that keeps everything for certain."""
        (outputs, r), base = self.record.shape, self._base
        allowance, pairs = log_ratio_error(outputs), ~np.eye(r, dtype=bool)
        share = 0.0
        while share <= _LARGEST_SHARE:
            mixed = (1 - share) * z + share * base
            logs = np.log(mixed)
            excess = float(self._excess(mixed)[:, pairs].max(initial=-np.inf))
            excess = max(excess, float((logs - self.high).max()), float((self.low - logs).max()))
            if excess + allowance <= 0:
                rows = self.fixed.copy()
                rows[self.record, np.arange(outputs)[:, None]] = mixed
                return rows
            share = max(2 * share, 1e-9)
        raise SolverError("COPT's solution breaks its rows beyond repair")


def _bounds(problem: Problem, free_xy_km: Array, fixed_xy_km: Array, logs: Array) -> tuple[Array, Array]:
    """Return the largest log f − ε d and the least log f + ε d over the fixed records, of shape (r,)."""
    if not len(logs):
        return np.full(len(free_xy_km), -np.inf), np.full(len(free_xy_km), np.inf)
    low, high = [], []
    for first in range(0, len(free_xy_km), max(_AT_ONCE // len(logs), 1)):
        part = free_xy_km[first : first + max(_AT_ONCE // len(logs), 1)]
        budget = budgets(problem.epsilon_per_km, problem.distances_km(part, fixed_xy_km))
        low.append((logs - budget).max(axis=1))
        high.append((logs + budget).min(axis=1))
    return np.concatenate(low), np.concatenate(high)
