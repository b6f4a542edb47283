"""What other mechanisms with the same promise lose on the same problem, where that is quick to find out."""

import math
from typing import Any

import numpy as np
from scipy.spatial import KDTree

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon, exponential_mechanism
from mdpext_dask.evaluation.baselines.problem import Problem, strips

# Numbers of a mechanism's rows beyond which making them takes longer than a report should.
_MOST_NUMBERS = 200_000_000
_DRAWS, _DRAWS_AT_ONCE = 20_000, 4_000


def exponential_loss(problem: Problem) -> float | None:
    """Return UL of the exponential mechanism, in km, from all of its rows; None if they are too many.

    It is the one of :func:`mdpext_dask.evaluation.baselines.noise.exponential_mechanism`.
    """
    if problem.grid.records * problem.outputs > _MOST_NUMBERS:
        return None
    try:
        made = exponential_mechanism(problem, math.inf)
    except SolverError:
        return None
    assert made.rows is not None  # it reports outputs
    total = 0.0
    for strip in strips(problem):
        prior = problem.prior[strip].ravel()
        used = np.flatnonzero(prior)
        if not len(used):
            continue
        rows = made.rows(strip).reshape(-1, problem.outputs)[used]
        loss = problem.loss.rows(problem.records_xy_km(strip)[used])
        total += float(prior[used] @ (rows * loss).sum(axis=1))
    return total


def laplace_loss(problem: Problem, random_seed: int = 0) -> tuple[float, float]:
    """Return UL of planar Laplace noise that is reported at the nearest output, and its standard error.

    Both are in km, and estimated from draws of a seeded generator: this is an evaluation, and nothing that is
    drawn is ever released. The radius of the noise has the density ε² r e^{−ε r}, a Gamma distribution of
    shape 2 (Andrés, Bordenabe, Chatzikokolakis & Palamidessi, CCS 2013).
    """
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    generator = np.random.default_rng(random_seed)
    x, y = problem.grid.x_km(), problem.grid.y_km()
    prior = problem.prior.ravel() / problem.prior.sum()
    nearest = KDTree(problem.output_xy_km)
    losses = []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        i, j = np.divmod(generator.choice(prior.size, _DRAWS_AT_ONCE, p=prior), len(y))
        radius = generator.gamma(2.0, 1 / epsilon, _DRAWS_AT_ONCE)
        angle = generator.uniform(0, 2 * np.pi, _DRAWS_AT_ONCE)
        places = np.stack([x[i], y[j]], axis=-1)
        noisy = places + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        reported = nearest.query(noisy)[1]
        losses.append(problem.loss.rows(places)[np.arange(_DRAWS_AT_ONCE), reported])
    drawn = np.concatenate(losses)
    return float(drawn.mean()), float(drawn.std(ddof=1) / math.sqrt(len(drawn)))


def others(problem: Problem) -> list[dict[str, Any]]:
    """Return what other mechanisms lose: `name`, `loss_km`, `error_km` (None where nothing is estimated)."""
    found = []
    exponential = exponential_loss(problem)
    if exponential is not None:
        found.append({"name": "exponential mechanism", "loss_km": exponential, "error_km": None})
    loss, error = laplace_loss(problem)
    found.append({"name": "planar Laplace noise, nearest output", "loss_km": loss, "error_km": error})
    return found
