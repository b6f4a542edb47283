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
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices
from mdpext_dask.evaluation.baselines.lp import costs
from mdpext_dask.evaluation.baselines.pair_rows import budgets
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem
from mdpext_dask.seed.budget import log_ratio_error
from mdpext_dask.seed.highs import solve_linear_program

# Free entries in all, and records for each output: the linear program takes some ten seconds.
_MOST_FREE, _MOST_RECORDS = 4_000, 500
# Numbers of records times outputs that are held at once, several times.
_MOST_ENTRIES = 50_000_000
# log Y stays within this.
_LARGEST_WEIGHT = 10.0
# Free records of an output are compared with so many of their nearest at first.
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
        facts={"r": radius, "records_with_free_entries": len(np.unique(free.record))} | facts,
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
    """The free entries, ordered by output, nearest records first.

    Parameters
    ----------
    problem
        The problem.
    xy_km
        Records, float64 of shape (N, 2), in km.
    fixed
        E, float64 of shape (N, K).
    record, output
        Record and output of each free entry, shape (n,): r of each output.
    low, high
        What the fixed entries allow, in log units, shape (n,), rounded inward.
    """

    problem: Problem
    xy_km: Array
    fixed: Array
    record: Indices
    output: Indices
    low: Array
    high: Array

    @classmethod
    def nearest(cls, problem: Problem, xy_km: Array, distance_km: Array, fixed: Array, r: int) -> "_Free":
        """Free the r records nearest to each output."""
        near = np.argsort(distance_km, axis=0, kind="stable")[:r]
        low, high = [], []
        for output, records in enumerate(near.T):
            others = np.ones(len(xy_km), dtype=bool)
            others[records] = False
            bounds = _bounds(problem, xy_km[records], xy_km[others], np.log(fixed[others, output]))
            low.append(bounds[0])
            high.append(bounds[1])
        return cls(
            problem=problem,
            xy_km=xy_km,
            fixed=fixed,
            record=near.T.ravel(),
            output=np.repeat(np.arange(near.shape[1]), r),
            low=np.concatenate(low),
            high=np.concatenate(high),
        )

    @property
    def _base(self) -> Array:
        return np.asarray(self.fixed[self.record, self.output])

    def _pairs(self) -> list[tuple[slice, Array]]:
        """Return, for each output, its free entries and the budgets between their records."""
        count = self.fixed.shape[1]
        r = len(self.record) // count
        found = []
        for output in range(count):
            part = slice(output * r, (output + 1) * r)
            place = self.xy_km[self.record[part]]
            distance = self.problem.distances_km(place, place)
            found.append((part, budgets(self.problem.epsilon_per_km, distance)))
        return found

    def optimise(self, cost: Array, deadline: float) -> tuple[Array, dict[str, float | int]]:
        """Return all rows with the free entries at their best, and what is worth telling.

        Raises
        ------
        SolverError
            If it is not solved in time, or not well enough.
        """
        pairs, base = self._pairs(), self._base
        entries = len(base)
        records, row = np.unique(self.record, return_inverse=True)
        # Entries are scaled by K, so that they are about 1.
        scale = float(self.fixed.shape[1])
        weight = cost[self.record, self.output]
        # An entry that is free alone in its row has no choice.
        alone = np.bincount(row)[row] == 1
        lower = np.where(alone, base, np.maximum(np.exp(self.low), self.problem.min_probability))
        upper = np.where(alone, base, np.minimum(np.exp(self.high), 1.0))
        sums = sparse.csr_array((np.ones(entries), (row, np.arange(entries))), shape=(len(records), entries))
        total = sums @ base
        chosen = _nearest_pairs(pairs, _NEAR)
        # What follows from δ ≤ z ≤ 1 is left out: its huge coefficient would only do harm.
        chosen = _kept(chosen, chosen[2] < -math.log(self.problem.min_probability))
        rounds = iterations = 0
        while True:
            rounds += 1
            risen, fallen, budget = chosen
            growth = np.exp(budget)
            index = np.arange(len(risen))
            matrix = sparse.csr_array(
                (
                    np.concatenate([np.ones(len(risen)), -growth]),
                    (np.concatenate([index, index]), np.concatenate([risen, fallen])),
                ),
                shape=(len(risen), entries),
            )
            rows_low = np.concatenate([np.full(len(risen), -np.inf), scale * total])
            rows_high = np.concatenate([np.zeros(len(risen)), scale * total])
            solve = partial(
                solve_linear_program,
                f"COPT's linear program ({entries} free entries)",
                cost=weight / (float(np.abs(weight).max()) or 1.0),
                bounds=(scale * lower, scale * upper),
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
            z = np.clip(found / scale, lower, upper)
            # Fixed entries are never touched, so what solver and clipping leave over goes to the free ones.
            z *= (total / (sums @ z))[row]
            broken = _broken(pairs, np.log(z))
            if not len(broken[0]):
                break
            if rounds == _ROUNDS:
                raise SolverError(f"COPT: rows are still broken after {_ROUNDS} rounds")
            chosen = _joined([chosen, broken])
        rows = self._repair(z, pairs)
        return rows, {
            "variables": entries,
            "constraints": len(chosen[0]) + len(records),
            "rounds": rounds,
            "iterations": iterations,
            "loss_of_decay_km": float((cost * self.fixed).sum()),
        }

    def _repair(self, z: Array, pairs: list[tuple[slice, Array]]) -> Array:
        """Return all rows, (1 − t) z + t E with the least t that keeps everything for certain."""
        base, allowance = self._base, log_ratio_error(self.fixed.shape[1])
        share = 0.0
        while share <= _LARGEST_SHARE:
            mixed = (1 - share) * z + share * base
            logs = np.log(mixed)
            excess = max(
                float(
                    (logs[part, None] - logs[part] - budget)[~np.eye(len(budget), dtype=bool)].max(
                        initial=-np.inf
                    )
                )
                for part, budget in pairs
            )
            excess = max(excess, float((logs - self.high).max()), float((self.low - logs).max()))
            if excess + allowance <= 0:
                rows = self.fixed.copy()
                rows[self.record, self.output] = mixed
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


_Rows = tuple[NDArray[np.intp], NDArray[np.intp], Array]


def _nearest_pairs(pairs: list[tuple[slice, Array]], count: int) -> _Rows:
    """Return the rows between every free entry and its nearest of the same output: risen, fallen, budget."""
    found = []
    for part, budget in pairs:
        near = np.argsort(budget, axis=1, kind="stable")[:, 1 : count + 1]
        risen = np.repeat(np.arange(len(budget)), near.shape[1])
        fallen = near.ravel()
        both = np.unique(
            np.concatenate([np.stack([risen, fallen]), np.stack([fallen, risen])], axis=1), axis=1
        )
        found.append((both[0] + part.start, both[1] + part.start, budget[both[0], both[1]]))
    return _joined(found)


def _broken(pairs: list[tuple[slice, Array]], logs: Array) -> _Rows:
    """Return the rows that are broken."""
    found = []
    for part, budget in pairs:
        excess = logs[part, None] - logs[part] - budget
        risen, fallen = np.nonzero(excess > _BROKEN)
        found.append((risen + part.start, fallen + part.start, budget[risen, fallen]))
    return _joined(found)


def _kept(rows: _Rows, which: NDArray[np.bool_]) -> _Rows:
    """Return some of the rows."""
    return rows[0][which], rows[1][which], rows[2][which]


def _joined(found: list[_Rows]) -> _Rows:
    risen, fallen, budget = (np.concatenate(part) for part in zip(*found, strict=True))
    return risen, fallen, budget
