"""Noise that is known beforehand: the exponential mechanism and planar Laplace, with and without a remap.

An exponential mechanism or a planar Laplace uses all of ε between some pairs of records, up to differences
smaller than rounding. So their formulas are used for a lesser ε, which pays for what float64 does to them.

McSherry & Talwar, "Mechanism design via differential privacy" (FOCS 2007); with a metric, Chatzikokolakis,
Andrés, Bordenabe & Palamidessi, "Broadening the scope of differential privacy using metrics" (PETS 2013).
Andrés, Bordenabe, Chatzikokolakis & Palamidessi, "Geo-indistinguishability: differential privacy for
location-based systems" (CCS 2013).
"""

import math
import time
from collections.abc import Callable

import numpy as np
from scipy.spatial import KDTree

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import (
    Array,
    BaselineMechanism,
    Guarantee,
    Method,
    Problem,
    RowsOf,
    weighted_strips,
)
from mdpext_dask.evaluation.baselines.sectors import Cells, masses, voronoi_cells
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import TravelLoss
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, log_ratio_error
from mdpext_dask.store.remap import best_remap, merge_columns

# Of a product and an exponential, relative to the result; more than any library's.
_EXPONENTIAL_ERROR = 1e-14
# Sums of up to K probabilities and their division, in units of 2^-53 for each term.
_SUM_ERROR_PER_OUTPUT = 2.0**-52
# -log of the smallest probability that is surely a normal number of float64, whatever a row is divided by.
_LARGEST_LOG = 700.0
# Records on which masses are tried before the rows are promised.
_TRIED = 300
# Their largest error may be exceeded elsewhere, by no more than this; and none is claimed to be smaller.
_MARGIN, _LEAST_ERROR = 10, 1e-10
# Places that are drawn of the continuous mechanism, and how many together.
_DRAWS, _DRAWS_AT_ONCE = 200_000, 20_000
# And of it with the nearest output, for a standard error of about a quarter of a per cent. Columns of a loss
# table are read once for all that are drawn together.
_PLAIN_DRAWS = 100_000, 50_000


def exponential_mechanism(problem: Problem, seconds: float) -> BaselineMechanism:  # noqa: ARG001 takes none
    """Return the exponential mechanism for d_p on the problem's outputs.

    With w_y(x) = exp(−ε d_p(x, y) / 2), the triangle inequality gives w_y(x) ≤ e^{ε d_p(x, x') / 2} w_y(x'),
    for every output, hence also for their sum Z, the other way round:
    M(y|x) / M(y|x') = w_y(x) / w_y(x') · Z(x') / Z(x) ≤ e^{ε d_p(x, x')}. The bound is all but reached where
    an output lies on one side of two records and all likelier ones on the other; so rounding is paid for,
    see :func:`epsilon_within`.

    Raises
    ------
    SolverError
        If float64 cannot hold the least probabilities, or rounding takes too much of ε.
    """
    epsilon = problem.epsilon_per_km
    # d_p(x, y) is convex in x, so it is largest at a corner.
    furthest = float(problem.distances_km(_corners_xy_km(problem), problem.output_xy_km).max())
    # No row has a nearest output closer than 0, nor a total of more than K times its largest entry.
    if epsilon / 2 * furthest + np.log(problem.outputs) > _LARGEST_LOG:
        raise SolverError(
            f"exponential mechanism: probabilities down to exp(-{epsilon / 2 * furthest:.0f}) are below what "
            "float64 holds; epsilon times the extent of the domain must be at most about 1,400"
        )
    log_error = epsilon / 2 * furthest * (NORM_RELATIVE_ERROR + _EXPONENTIAL_ERROR) + _EXPONENTIAL_ERROR
    used = epsilon_within(problem.grid, problem.outputs, epsilon, log_error)

    def rows(east: slice) -> Array:
        distance = problem.distances_km(problem.records_xy_km(east), problem.output_xy_km)
        # A factor that a row has in common is divided out again; this one makes its largest entry 1.
        distance -= distance.min(axis=1, keepdims=True)
        weights = np.exp(distance * (-used / 2))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights.reshape(-1, problem.grid.shape[1], problem.outputs)

    return BaselineMechanism(
        rows=rows,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs, by the triangle inequality: half of it for scores, half for totals.",
        facts={"epsilon_used_per_km": used},
    )


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
    :func:`epsilon_within`.

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
    corners = _corners_xy_km(problem)
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
    used = epsilon_within(problem.grid, problem.outputs, epsilon, error)

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
    draws from a seeded generator: this is an evaluation, and nothing that is drawn is ever released.

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
    generator = np.random.default_rng(problem.random_seed)
    drawn = drawn_losses(problem, generator, loss.between, (_DRAWS, _DRAWS_AT_ONCE), seconds)
    if not len(drawn):
        raise SolverError(f"continuous planar Laplace: no draws within {seconds:g} s")
    loss_km, error = mean_and_error(drawn)
    return BaselineMechanism(
        rows=None,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs, but it reports any road node, not one of the outputs.",
        sampled_loss_km=loss_km,
        sampled_standard_error=error,
        facts={"draws": len(drawn), "places_reported": len(loss.node_xy_km)},
    )


def plain_laplace(problem: Problem) -> tuple[float, float]:
    """Return what planar Laplace noise loses that is reported at the nearest output, without optimisation.

    It is :func:`planar_laplace`, estimated with draws of a seeded generator, always the same: this is an
    evaluation, and nothing that is drawn is ever released. Time and memory grow with the records no more
    than reading their prior does.

    Returns
    -------
    Its expected loss and the standard error of that, in km.
    """
    nearest, generator = KDTree(problem.output_xy_km), np.random.default_rng(problem.random_seed)

    def losses(places: Array, noisy: Array) -> Array:
        return problem.loss.pairs(places, np.asarray(nearest.query(noisy)[1], dtype=np.intp))

    return mean_and_error(drawn_losses(problem, generator, losses, _PLAIN_DRAWS))


def drawn_losses(
    problem: Problem,
    generator: np.random.Generator,
    loss_of: Callable[[Array, Array], Array],
    draws: tuple[int, int],
    seconds: float = math.inf,
) -> Array:
    """Return losses of records drawn by the prior and of planar Laplace noise around them, in km.

    Parameters
    ----------
    problem, generator
        What is drawn for, and from.
    loss_of
        From records and noisy places, each of shape (n, 2), in km, to losses of shape (n,), in km.
    draws
        How many in all, and how many together.
    seconds
        After so long, no more are drawn.
    """
    started, (count, at_once) = time.perf_counter(), draws
    losses = [np.empty(0)]
    for _ in range(count // at_once):
        if time.perf_counter() - started > seconds:
            break
        losses.append(loss_of(*noisy_places(problem, generator, at_once)))
    return np.concatenate(losses)


def mean_and_error(drawn: Array) -> tuple[float, float]:
    """Return the mean of numbers, and its standard error."""
    return float(drawn.mean()), float(drawn.std(ddof=1) / math.sqrt(len(drawn)))


def noisy_places(problem: Problem, generator: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Return records drawn by the prior, and planar Laplace noise around them: shape (count, 2), in km.

    The radius of the noise has the density ε² r e^{−ε r}, a Gamma distribution of shape 2.
    """
    x, y = problem.grid.x_km(), problem.grid.y_km()
    prior = problem.prior.ravel() / problem.prior.sum()
    i, j = np.divmod(generator.choice(prior.size, count, p=prior), len(y))
    radius = generator.gamma(2.0, 1 / euclidean_epsilon(problem.epsilon_per_km, problem.metric_p), count)
    angle = generator.uniform(0, 2 * np.pi, count)
    places = np.stack([x[i], y[j]], axis=-1)
    return places, places + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _checked_masses(cells: Cells, epsilon: float, xy_km: Array, most: float) -> Array:
    """Return masses that are all known to a relative error; see :func:`planar_laplace` for what is raised."""
    mass, error = masses(cells, epsilon, xy_km)
    reported = np.isin(np.arange(cells.count), np.concatenate([cells.left, cells.right]))
    if not (mass[:, reported] > math.exp(-_LARGEST_LOG)).all():
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


# --- rounding -------------------------------------------------------------------------------------


def epsilon_within(grid: Grid, outputs: int, epsilon_per_km: float, log_error: float) -> float:
    """Return the ε' for a formula whose rows are computed with errors, so that they keep ε all the same.

    Rows are divided by their totals when they are used. If every entry is within a factor e^{±r} of what it
    stands for, then so is a total, and a log ratio of two records is off by at most 4 r, and by what adding
    up some outputs takes. For a distance d ≥ h, ε' d + 4 r ≤ ε d if ε' ≤ ε − 4 r / h. What an audit in
    float64 may be off by is set aside as well, so that it need not decide ties in more digits.

    Parameters
    ----------
    grid, outputs
        Records, and K.
    epsilon_per_km
        ε to keep, in 1/km.
    log_error
        r: what the logarithm of an entry may be off by, but for a factor that a row has in common.

    Raises
    ------
    SolverError
        If that takes half of ε or more.
    """
    steps = np.concatenate([np.diff(grid.x_km()), np.diff(grid.y_km())])
    spacing = float(steps.min()) * (1 - NORM_RELATIVE_ERROR)  # no two records are closer, for any p
    sums = 4 * outputs * _SUM_ERROR_PER_OUTPUT
    audit = 2 * log_ratio_error(outputs, _LARGEST_LOG)
    kept = epsilon_per_km * (1 - 2 * NORM_RELATIVE_ERROR)
    kept -= (4 * log_error + sums + audit) / spacing
    if not kept > epsilon_per_km / 2:
        raise SolverError(
            f"epsilon of {epsilon_per_km:g}/km over a spacing of {grid.spacing_km:g} km is lost in "
            "rounding; use larger cells or less refinement"
        )
    return float(kept)


def _corners_xy_km(problem: Problem) -> Array:
    """Return the four corners of the rectangle of records, float64 of shape (4, 2), in km."""
    x, y = problem.grid.x_km(), problem.grid.y_km()
    return np.array([(a, b) for a in (x[0], x[-1]) for b in (y[0], y[-1])])


# --- remaps ---------------------------------------------------------------------------------------


def em_remap(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the exponential mechanism with its optimal remap; see :func:`remapped`."""
    return remapped(exponential_mechanism, problem, seconds)


def laplace_remap(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the planar Laplace mechanism with its optimal remap; see :func:`remapped`."""
    return remapped(planar_laplace, problem, seconds)


def remapped(method: Method, problem: Problem, seconds: float) -> BaselineMechanism:
    """Return what a method makes, followed by the optimal remap for the problem's prior and loss.

    Post-processing keeps what the method promises. Outputs that are never reported have columns of
    zeros, the same for every record.

    Parameters
    ----------
    method
        The method; must make rows.
    problem
        The problem.
    seconds
        How long both may take together.

    Raises
    ------
    SolverError
        If the method fails or has no rows, or there was not enough time.
    """
    deadline = time.perf_counter() + seconds
    mechanism = method(problem, seconds)
    rows = mechanism.rows
    if rows is None:
        raise SolverError("remap: the method has no rows over the outputs")
    costs = _remap_costs(problem, rows, deadline)
    table = best_remap(costs)
    own = np.arange(problem.outputs)
    return BaselineMechanism(
        rows=lambda east: merge_columns(rows(east), table),
        guarantee=mechanism.guarantee,
        note=f"{mechanism.note} The remap is post-processing.",
        facts={
            **mechanism.facts,
            "loss_km_before_remap": float(costs[own, own].sum()),
            "outputs_moved": int((table != own).sum()),
            "outputs_reported": len(np.unique(table)),
        },
    )


def _remap_costs(problem: Problem, rows: RowsOf, deadline: float) -> Array:
    """Return G[y, y'] = Σ_x π(x) M(y|x) c(x, y'), float64 of shape (K, K), in km, strip by strip.

    Parameters
    ----------
    problem
        The problem.
    rows
        M.
    deadline
        When to give up, by :func:`time.perf_counter`.

    Raises
    ------
    SolverError
        If the deadline passes.
    """
    costs = np.zeros((problem.outputs, problem.outputs))
    for prior, probability, loss in weighted_strips(problem, rows):
        if time.perf_counter() > deadline:
            raise SolverError("remap: not all records could be gone through in time")
        costs += (probability * prior[:, None]).T @ loss
    return costs
