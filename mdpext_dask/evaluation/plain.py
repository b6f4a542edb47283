"""What the plain thing loses beside a store: planar Laplace noise, reported at the nearest output."""

import math
from typing import Any

import numpy as np
from scipy.spatial import KDTree
from scipy.special import gammaincinv

from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon, plain_laplace
from mdpext_dask.evaluation.baselines.problem import Array, Problem
from mdpext_dask.evaluation.words import NORMAL_95, metres, plain_advice
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extension_of_store

# For a map: noisy places in all, of a record at least and at most, and how many are looked at together.
_POINTS, _FEWEST, _MOST, _AT_ONCE = 1_000_000, 100, 1000, 200_000
# Turning by it, no place lies in the shade of another.
_GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))


def plain_facts(store: MechanismStore, loss_km: float) -> dict[str, Any]:
    """Return what the plain thing loses with the outputs, the prior and the ε of a store, as plain JSON.

    Parameters
    ----------
    store
        The store.
    loss_km
        Its own loss, in km.

    Returns
    -------
    What :func:`~mdpext_dask.evaluation.baselines.noise.plain_laplace` returns, `over_plain`, how much more
    the store loses, relative to that (None if that is nothing), `plain_advice`, what to set in the job so
    that it does not lose more (None where it does not, or nothing helps), and `plain_in_words`.
    """
    plain_km, error_km = plain_laplace(Problem.of_store(store))
    half, over = NORMAL_95 * error_km, loss_km / plain_km - 1 if plain_km > 0 else None
    said = f"planar Laplace noise at the nearest output loses {metres(plain_km)} (± {metres(half)})"
    budget = store.attributes["job"]["privacy"]["budget"]
    advice = plain_advice(extension_of_store(store).method, budget, loss_km, plain_km, half)
    if over is not None:
        said += f"; this mechanism {abs(over):.1%} {'more' if over > 0 else 'less'}"
        said += "" if advice is None else f": {advice} loses less"
    return {
        "plain_loss_km": plain_km,
        "plain_standard_error_km": error_km,
        "over_plain": over,
        "plain_advice": advice,
        "plain_in_words": said,
    }


def plain_expected_km(problem: Problem) -> Array:
    """Return what the plain thing loses at each record, for a map.

    The mean over noisy places that are spread evenly by the noise's own measure: the k-th of n has the radius
    that (k + ½) / n of all noise stays within, and is turned by the golden angle from the one before.

    Parameters
    ----------
    problem
        The problem.

    Returns
    -------
    float64 of the grid's shape, in km; NaN where nobody is. Of more than 10,000 records with a prior, so many
    are drawn by a seeded generator, and the others are NaN as well.
    """
    expected, generator = np.full(problem.grid.shape, np.nan), np.random.default_rng(problem.random_seed)
    used = np.flatnonzero(problem.prior.ravel())
    if len(used) > _POINTS // _FEWEST:
        used = np.sort(generator.choice(used, _POINTS // _FEWEST, replace=False))
    count = min(_POINTS // len(used), _MOST)
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    radius = gammaincinv(2.0, (np.arange(count) + 0.5) / count) / epsilon
    nearest = KDTree(problem.output_xy_km)
    x, y = problem.grid.x_km(), problem.grid.y_km()
    for first in range(0, len(used), step := max(_AT_ONCE // count, 1)):
        own = used[first : first + step]
        i, j = np.divmod(own, len(y))
        places = np.repeat(np.stack([x[i], y[j]], axis=-1), count, axis=0)
        # Each record's are turned by an angle of its own, so that neighbours do not err alike.
        angle = (_GOLDEN_ANGLE * np.arange(count) + generator.uniform(0, 2 * np.pi, (len(own), 1))).ravel()
        noise = np.tile(radius, len(own))[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        losses = problem.loss.pairs(places, np.asarray(nearest.query(places + noise)[1], dtype=np.intp))
        expected.flat[own] = losses.reshape(-1, count).mean(axis=1)
    return expected
