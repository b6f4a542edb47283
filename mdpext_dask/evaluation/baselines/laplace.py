"""The planar Laplace mechanism: the true place plus noise of density ε²/2π · e^{−ε r}.

Andrés, Bordenabe, Chatzikokolakis & Palamidessi, "Geo-indistinguishability: differential privacy for
location-based systems" (CCS 2013).
"""

import math
import time

import numpy as np

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Guarantee, Problem
from mdpext_dask.evaluation.baselines.rounding import LARGEST_LOG, corners_xy_km, epsilon_within
from mdpext_dask.evaluation.baselines.sectors import Cells, masses, voronoi_cells
from mdpext_dask.problem.loss import TravelLoss

# Records on which masses are tried before the rows are promised.
_TRIED = 300
# Their largest error may be exceeded elsewhere, by no more than this; and none is claimed to be smaller.
_MARGIN, _LEAST_ERROR = 10, 1e-10
# Places that are drawn of the continuous mechanism, and how many together.
_DRAWS, _DRAWS_AT_ONCE = 200_000, 20_000


def euclidean_epsilon(epsilon_per_km: float, p: float) -> float:
    """Return the ε of noise, in 1/km, that tells places apart by no more than the given ε times d_p.

    Noise of ε keeps ε d_2. For p ≤ 2, d_2 ≤ d_p. For p > 2, by Hölder's inequality, d_2 ≤ 2^{1/2 − 1/p} d_p,
    with equality on diagonals.
    """
    if p <= 2:
        return epsilon_per_km
    return math.nextafter(epsilon_per_km / 2 ** (0.5 - (0.0 if math.isinf(p) else 1 / p)), 0)


def planar_laplace(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the planar Laplace mechanism that reports the output nearest to the noisy place.

    M(y|x) = ∫ over the Voronoi cell of y of ε²/2π · e^{−ε ‖z − x‖} dz. Noisy places keep ε d_2, since
    densities at z differ by a factor of at most e^{ε |‖z − x‖ − ‖z − x'‖|}, and the nearest output is
    post-processing. Masses are computed to a relative error r, which is bounded for every entry as it is
    computed, and paid for: the noise is that of a lesser ε, see
    :func:`mdpext_dask.evaluation.baselines.rounding.epsilon_within`.

    Parameters
    ----------
    problem
        The problem.
    seconds
        How long making all rows may take.

    Raises
    ------
    SolverError
        If float64 cannot hold the least probabilities, cells are too small or too thin for their masses to be
        computed well, or it would take too long. The rows raise it as well, where an entry turns out worse
        than was to be expected from the records that were tried.
    """
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    corners = corners_xy_km(problem)
    everything = np.concatenate([corners, problem.output_xy_km])
    extent = float(np.hypot(*np.ptp(everything, axis=0)))
    cells = voronoi_cells(problem.output_xy_km, epsilon, extent)
    generator = np.random.default_rng(problem.random_seed)
    i, j = (generator.integers(0, side, _TRIED) for side in problem.grid.shape)
    tried = np.stack([problem.grid.x_km()[i], problem.grid.y_km()[j]], axis=-1)
    started = time.perf_counter()
    _checked_masses(cells, epsilon, corners, math.inf)
    worst = float(masses(cells, epsilon, tried)[1].max())
    expected = (time.perf_counter() - started) * problem.grid.records / len(tried)
    if expected > seconds:
        raise SolverError(
            f"planar Laplace: would take about {expected:.0f} s, more than the {seconds:.0f} s that it may"
        )
    error = max(_MARGIN * worst, _LEAST_ERROR)
    used = epsilon_within(problem, epsilon, error)

    def rows(east: slice) -> Array:
        mass = _checked_masses(cells, used, problem.records_xy_km(east), error)
        mass /= mass.sum(axis=1, keepdims=True)
        return mass.reshape(-1, problem.grid.shape[1], problem.outputs)

    return BaselineMechanism(
        rows=rows,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs: noise in the plane keeps it, and the nearest output is post-processing.",
        facts={"epsilon_used_per_km": used, "integration_error": error},
    )


def continuous_laplace(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the expected loss of planar Laplace noise that is reported at the nearest road node.

    It reports from all nodes of the network, a far larger set than the outputs of the other methods, so the
    comparison is not on equal terms. Its expected loss Σ_x π(x) E[c(x, node)] is estimated with
    draws from a seeded generator: this is an evaluation, and nothing that is drawn is ever released. The
    radius of the noise has the density ε² r e^{−ε r}, a Gamma distribution of shape 2.

    Parameters
    ----------
    problem
        The problem, with a travel-distance loss.
    seconds
        When to stop drawing.

    Raises
    ------
    SolverError
        If the problem has no road nodes, or there was no time for any draws.
    """
    loss = problem.loss
    if not isinstance(loss, TravelLoss):
        raise SolverError("continuous planar Laplace: only a travel-distance loss knows of road nodes")
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    generator = np.random.default_rng(problem.random_seed)
    x, y = problem.grid.x_km(), problem.grid.y_km()
    prior = problem.prior.ravel() / problem.prior.sum()
    started, losses = time.perf_counter(), []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        if time.perf_counter() - started > seconds:
            break
        i, j = np.divmod(generator.choice(prior.size, _DRAWS_AT_ONCE, p=prior), len(y))
        radius = generator.gamma(2.0, 1 / epsilon, _DRAWS_AT_ONCE)
        angle = generator.uniform(0, 2 * np.pi, _DRAWS_AT_ONCE)
        places = np.stack([x[i], y[j]], axis=-1)
        noisy = places + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        losses.append(loss.between(places, noisy))
    if not losses:
        raise SolverError(f"continuous planar Laplace: no draws within {seconds:g} s")
    drawn = np.concatenate(losses)
    return BaselineMechanism(
        rows=None,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs, but it reports any road node, not one of the outputs.",
        sampled_loss_km=float(drawn.mean()),
        sampled_standard_error=float(drawn.std(ddof=1) / math.sqrt(len(drawn))),
        facts={"draws": len(drawn), "places_reported": len(loss.node_xy_km)},
    )


def _checked_masses(cells: Cells, epsilon: float, xy_km: Array, most: float) -> Array:
    """Return masses that are all known to a relative error; see :func:`planar_laplace` for what is raised."""
    mass, error = masses(cells, epsilon, xy_km)
    reported = np.isin(np.arange(cells.count), np.concatenate([cells.left, cells.right]))
    if not (mass[:, reported] > math.exp(-LARGEST_LOG)).all():
        raise SolverError(
            "planar Laplace: probabilities are below what float64 holds; epsilon times the extent of the "
            "domain must be at most about 690"
        )
    if not error.max() <= most:
        raise SolverError(
            f"planar Laplace: the cell of an output is too small or too thin; its probability is known to "
            f"{error.max():.1g} only, relative to it"
        )
    return mass
