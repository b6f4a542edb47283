"""Refining a seed: a sequence of linear programs with the certificate itself as the constraint.

Each round linearises the certificate around the last mechanism, solves for a better one within reach ρ of it
(:mod:`mdpext_dask.seed.cuts`), and certifies what extends from that. Rounds may overshoot ε a little, since
the next one leads back; ρ shrinks from round to round, and overshooting with it. Every round's mechanism is
tempered to ε and certified, and the best of these is kept, so refining never makes a mechanism worse.

Tempering is also what every round is measured by: the loss of a mechanism that exceeds ε says nothing.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import CORNERS, Slopes, norm_rank, rank_of_norm
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.errors import SolverError
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.sections import SeedSection
from mdpext_dask.pipeline.trials import AIM, Trial, Trials, read_rows, read_slopes, tempered, told
from mdpext_dask.seed.budget import dual_exponent
from mdpext_dask.seed.cuts import CertificateVectors, Limit, improve
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.seed.solve import one_blas_thread
from mdpext_dask.store.mechanism_store import MechanismStore

# How far log z may go in the first round, at most and as a share of ε h_0, and in the last one.
_FIRST_REACH, _FIRST_SHARE, _LAST_REACH = 0.3, 0.75, 0.002
# So many rounds have time for the first reach.
_MANY_ROUNDS = 10
# At a reach of this share of ε h_0 or less: when both tempering costs and a round gains less than this
# share of the loss, nothing is left to gain.
_SMALL_SHARE, _NOTHING_LEFT = 0.1, 1e-3
# Mechanisms further above ε than this are not worth tempering.
_NEAR = 1.15


def improve_seed(
    url: str, reach: float, threads: int = 1, inverse_sums: InverseSums | None = None
) -> NDArray[np.float64]:
    """Solve the program linearised around the rows under trial; return better rows, (J, K).

    Parameters
    ----------
    url
        The store, in which the last trial has left its certificate vectors.
    reach
        ρ.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.
    """
    store = MechanismStore.open(url)
    grid, q = store.grid, dual_exponent(store.metric_p)
    limit = Limit(AIM * store.planar_limit(), q, grid.cell_km)
    rows = read_rows(store)
    cost = store.read_seed_cost().reshape(rows.shape)
    near = vectors_above(read_slopes(store), limit.threshold(reach) * limit.epsilon, grid.factor, q)
    floor = float(store.attributes["job"]["privacy"]["min_probability"])
    with one_blas_thread():
        improved = improve(rows, cost, near, limit, reach, floor, threads=threads, inverse_sums=inverse_sums)
    return improved.reshape(grid.seeds, -1)


def vectors_above(slopes: Slopes, least: float, factor: int, q: float) -> CertificateVectors:
    """Return the certificate vectors with a q-norm above `least`, in 1/km, each place once."""
    east, north = (np.abs(slopes.vector[..., axis].astype(np.float64)) for axis in (0, 1))
    above = norm_rank(east, north, q) > rank_of_norm(least, q)
    # The worst place may be a corner, which is there already.
    inside = (slopes.worst % factor != 0).any(axis=-1)
    above[..., -1] &= inside
    i, j, output, place = np.nonzero(above)
    position = np.array([*CORNERS, (0, 0)], dtype=np.float64)[place]
    worst = place == len(CORNERS)
    position[worst] = slopes.worst[i[worst], j[worst], output[worst]] / factor
    return CertificateVectors(
        vector=slopes.vector[i, j, output, place].astype(np.float64),
        cell=np.stack([i, j, output], axis=-1),
        place=position,
    )


def refine(
    trials: Trials, start: NDArray[np.float64], limits: SeedSection, observer: Observer
) -> tuple[Trial | None, list[dict[str, Any]]]:
    """Refine seed rows.

    Parameters
    ----------
    trials
        Of the store, with its seed cost, and the executor where programs are solved and blocks tried.
    start
        Rows to begin with, float64 of shape (J, K).
    limits
        How many rounds, and how many seconds, at most.
    observer
        Called with a note for every round.

    Returns
    -------
    best
        The best tempered mechanism of any round; None if there was none.
    rounds
        Of every round: its reach ρ, loss in km and certificate in 1/km before tempering, the share of (source
        cell, output) above ε, the loss after tempering (None where that was not worth trying), seconds.
    """
    began = time.perf_counter()
    rounds: list[dict[str, Any]] = []
    best: Trial | None = None
    allowed = trials.limit * trials.store.grid.cell_km
    reach = min(_FIRST_REACH, _FIRST_SHARE * allowed)
    # With few rounds there is no time to be led back from large steps.
    short = max(0.0, 1 - _rounds_left(limits, 0, 0.0) / _MANY_ROUNDS)
    reach *= (_LAST_REACH / reach) ** short
    trial = trials.run(start, slopes=True)
    # A step within reach leads a side's difference back by at most twice the reach; half of that is likely.
    within_reach = (1 + reach / allowed) * trials.limit
    if trial.epsilon > within_reach:
        trial = trials.run(tempered(start, within_reach / trial.epsilon), slopes=True)
    while (left := _rounds_left(limits, len(rounds), time.perf_counter() - began)) >= 1:
        if rounds:
            # So that the last round is a small one, whatever stops it.
            reach *= (_LAST_REACH / reach) ** (1 / left)
        started = time.perf_counter()
        previous = best
        try:
            rows = solve_alone(trials.store, trials.executor, improve_seed, reach)
        except SolverError as error:
            observer(Note(f"refining ended early: {error}", diary=True))
            break
        trial = trials.run(rows, slopes=True)
        reached = None
        last = _rounds_left(limits, len(rounds) + 1, time.perf_counter() - began) < 1
        near = trial.epsilon <= _NEAR * trials.limit or last
        if near and (best is None or trial.loss_km < best.loss_km):
            reached = trials.temper(trial)
            if reached is not None and (best is None or reached.loss_km < best.loss_km):
                best = reached
            # Tempering has left other rows in the store; the certificate vectors are still these rows'.
            trials.write(rows)
        measures, loss_km = trial.measures(trials.limit), None if reached is None else reached.loss_km
        seconds = time.perf_counter() - started
        rounds.append({"reach": reach, **measures, "tempered_loss_km": loss_km, "seconds": seconds})
        after = "" if loss_km is None else f"; tempered {loss_km:.4f} km"
        observer(Note(f"refining, round {len(rounds)}: {told(measures)}{after}", diary=True))
        if reach <= _SMALL_SHARE * allowed and best and previous:
            # Neither does tempering cost much nor has the last round gained much.
            cheap = best.loss_km <= (1 + _NOTHING_LEFT) * trial.loss_km
            if cheap and best.loss_km >= (1 - _NOTHING_LEFT) * previous.loss_km:
                break
    return best, rounds


def _rounds_left(limits: SeedSection, done: int, seconds: float) -> float:
    """Return how many rounds there will be, judging by those that were made; below 1 to stop."""
    left = float(limits.refine_rounds - done)
    if limits.refine_seconds is None or not done:
        return left
    return min(left, (limits.refine_seconds - seconds) * done / seconds)
