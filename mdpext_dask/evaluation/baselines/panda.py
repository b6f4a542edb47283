"""PAnDA: perturbation via anchor-based distributed approximation.

R. Liu, C. Qiu, "PAnDA: rethinking metric differential privacy optimization at scale with anchor-based
approximation", CCS 2025, arXiv 2509.08720; the numbers are those of its public artifact.

Users draw anchors, each record with a probability that decays with its distance from them. A server solves
the linear program over the anchors of all users, with every budget lowered by a safety margin ξ. A record
that is no anchor uses the row of its nearest one. The promise is probabilistic, (ε, δ)-PmDP: ξ is the least
for which, given the anchors of two records, the bound for the records themselves fails with probability δ at
most.

What is taken differently, because here every record needs a row and anchors are known when rows are compared:

- Users are drawn as the prior says until the server's program is as large as it may be, and a record's anchor
  is the nearest of all of them, not of its own user's only. Where the artifact's 50 users do not
  all fit, because records lie dense, all probabilities but that of a user's own record are scaled down.
- The probability δ is over the records that have two given anchors, all equally likely: a budget is ε times
  the distance that all but a share δ of the pairs of their records have at least. That is ε d(anchors) − ξ
  with the least margin ξ. So of all pairs of records a share δ at most breaks the bound, and that can be
  counted.
- That users tell the server their anchors costs privacy of its own, which the authors deduct from ε. Rows do
  not show it, so nothing is deducted here: the loss is a lower bound of theirs.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.evaluation.baselines import pair_rows
from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices
from mdpext_dask.evaluation.baselines.lp import costs
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem

# Probability that a user's own record is an anchor; and that one beyond the range is.
_AT_HOME, _FAR = 0.95, 1e-4
# The range, as a share of the largest distance; λ of the decay, in 1/km.
_RANGE, _LAMBDA = 1 / 30, 0.5
# Share δ of pairs of records that may break the bound. The artifact has 1e-7: on a lattice, where
# neighbouring anchors have neighbouring records, that leaves no more than ε h between them.
_DELTA = 0.05
_MOST_ANCHORS, _LEAST_USERS = 400, 50
# Records of an anchor that margins are computed with, at most.
_RECORDS_OF_ANCHOR = 24
# Two ways as long as each other, but for rounding.
_TIE = 1e-9
# A program takes so much of the time that is left.
_SHARE_OF_TIME = 0.25

Decay = Callable[[Array], Array]


def panda_exponential(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make PAnDA-e: anchors with probability 0.95 exp(−0.4 λ d), λ = 0.5 per km.

    Raises
    ------
    SolverError
        If the server's program is not solved in time.
    """
    return _panda(problem, seconds, lambda d: np.exp(-0.4 * _LAMBDA * d))


def panda_power_law(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make PAnDA-p: anchors with probability 0.95 / (1 + 0.75 d^λ), λ = 0.5.

    Raises
    ------
    SolverError
        If the server's program is not solved in time.
    """
    return _panda(problem, seconds, lambda d: 1 / (1 + 0.75 * d**_LAMBDA))


def panda_logistic(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make PAnDA-l: anchors with probability 0.95 · 2 / (1 + exp(0.8 λ d)), λ = 0.5 per km.

    Raises
    ------
    SolverError
        If the server's program is not solved in time.
    """
    return _panda(problem, seconds, lambda d: 2 / (1 + np.exp(0.8 * _LAMBDA * d)))


def _panda(problem: Problem, seconds: float, decay: Decay) -> BaselineMechanism:
    grid, outputs = problem.grid, problem.outputs
    xy = problem.records_xy_km(slice(None))
    most = min(_MOST_ANCHORS, pair_rows.largest_size(outputs, _SHARE_OF_TIME * seconds))
    anchor, users = _draw_anchors(problem, xy, decay, most)
    what = f"PAnDA's program over {len(anchor)} anchors"
    pair_rows.check_size(what, len(anchor), outputs, seconds)
    distance, nearest = _nearest(problem, xy, xy[anchor])
    cost = np.zeros((len(anchor), outputs))
    np.add.at(cost, nearest, costs(problem))
    kept_km = _kept_distances(problem, xy, nearest, len(anchor))
    program = pair_rows.PairProgram(
        cost, pair_rows.budgets(problem.epsilon_per_km, kept_km), problem.min_probability
    )
    solution = pair_rows.solve_pairs(program, _not_implied(program.budget), seconds, what)
    margin = problem.epsilon_per_km * (problem.distances_km(xy[anchor], xy[anchor]) - kept_km)
    apart = ~np.eye(len(anchor), dtype=bool)
    shape = nearest.reshape(grid.shape)
    note = (
        f"(ε, δ)-PmDP with δ = {_DELTA:g}: of the pairs of records with two given anchors, all equally "
        "likely, a share δ at most may exceed ε; what users' anchors tell the server is not deducted."
    )
    if np.bincount(nearest).max() > _RECORDS_OF_ANCHOR:
        note += f" Margins are estimated with {_RECORDS_OF_ANCHOR} records of each anchor."
    return BaselineMechanism(
        rows=lambda east: solution.rows[shape[east]],
        guarantee=Guarantee.PROBABILISTIC,
        note=note,
        facts={
            "users": users,
            "anchors": len(anchor),
            "delta": _DELTA,
            "mean_margin": float(margin[apart].mean()) if apart.any() else 0.0,
            "largest_margin": float(margin[apart].max(initial=0.0)),
            "farthest_anchor_km": float(distance.max()),
        }
        | solution.facts(),
    )


def _draw_anchors(problem: Problem, xy_km: Array, decay: Decay, most: int) -> tuple[Indices, int]:
    """Return the anchors of as many users as have `most` of them together, and how many users that is.

    Users are records, each at most once, drawn by the prior; a user's anchors are drawn independently.
    """
    generator = np.random.default_rng(problem.random_seed)
    records = len(xy_km)
    range_km = _RANGE * float(problem.distances_km(xy_km[:1], xy_km[-1:])[0, 0])

    def probability(user: int) -> Array:
        distance = problem.distances_km(xy_km[user : user + 1], xy_km)[0]
        return np.asarray(_AT_HOME * np.where(distance < range_km, decay(distance), _FAR))

    # A user in the middle has most anchors; one of them is its own record.
    middle = problem.grid.shape[0] // 2 * problem.grid.shape[1] + problem.grid.shape[1] // 2
    others = float(probability(middle).sum()) - _AT_HOME
    room = max(most / min(_LEAST_USERS, records) - 1, 0.0)
    thinning = min(1.0, room / others) if others else 1.0
    with np.errstate(divide="ignore"):
        arrival = generator.exponential(size=records) / problem.prior.ravel()
    chosen: NDArray[np.bool_] = np.zeros(records, dtype=bool)
    users = 0
    for user in np.argsort(arrival, kind="stable"):
        chance = thinning * probability(user)
        chance[user] = _AT_HOME
        drawn = generator.random(records) < chance
        if (chosen | drawn).sum() > most:
            break
        chosen |= drawn
        users += 1
    if not chosen.any():
        chosen[middle] = True
    return np.flatnonzero(chosen), users


def _nearest(problem: Problem, xy_km: Array, anchor_xy_km: Array) -> tuple[Array, Indices]:
    """Return distance in km and index of each record's nearest anchor, the first of several, shape (N,)."""
    step = max(2_000_000 // len(anchor_xy_km), 1)
    distance, nearest = [], []
    for first in range(0, len(xy_km), step):
        apart = problem.distances_km(xy_km[first : first + step], anchor_xy_km)
        nearest.append(apart.argmin(axis=1))
        distance.append(apart.min(axis=1))
    return np.concatenate(distance), np.concatenate(nearest)


def _kept_distances(problem: Problem, xy_km: Array, nearest: Indices, anchors: int) -> Array:
    """Return the distance that all but a share δ of the pairs of records of two anchors have at least.

    Of anchors with many records, some evenly spaced ones stand for all.

    Returns
    -------
    float64 of shape (A, A), in km; 0 on the diagonal.
    """
    order = np.argsort(nearest, kind="stable")
    cells = [
        cell[np.linspace(0, len(cell) - 1, min(len(cell), _RECORDS_OF_ANCHOR)).astype(np.intp)]
        for cell in np.split(order, np.searchsorted(nearest[order], np.arange(1, anchors)))
    ]
    starts = np.cumsum([0, *(len(cell) for cell in cells)])
    members = xy_km[np.concatenate(cells)]
    kept = np.zeros((anchors, anchors))
    for a, cell in enumerate(cells):
        distance = problem.distances_km(xy_km[cell], members[starts[a] :])
        for b in range(a + 1, anchors):
            pairs = distance[:, starts[b] - starts[a] : starts[b + 1] - starts[a]].ravel()
            allowed = math.floor(_DELTA * len(pairs))
            kept[a, b] = kept[b, a] = np.partition(pairs, allowed)[allowed]
    return kept


def _not_implied(budget: Array) -> tuple[Indices, Indices]:
    """Return the pairs whose budget is less than that of any way over a third record."""
    way = np.full_like(budget, np.inf)
    for third in range(len(budget)):
        over = budget[:, third, None] + budget[third]
        over[third], over[:, third] = np.inf, np.inf
        np.minimum(way, over, out=way)
    first, second = np.nonzero(np.triu(budget < way * (1 - _TIE), 1))
    return first, second
