"""Planar Laplace noise on a lattice finer than the outputs, remapped for prior and loss, with a floor."""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.noise import epsilon_within, euclidean_epsilon
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Guarantee, Problem
from mdpext_dask.extend.noise import MOST_CELLS, Kernel, NoiseLattice
from mdpext_dask.extend.noise_remap import Posterior, best_outputs
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss, TravelLoss
from mdpext_dask.row_limits import SMALLEST_PROBABILITY

# ε R up to which noise is followed while the remap is chosen, and the steps in which less is tried.
_FURTHEST, _LEAST, _STEP = 26.0, 8.0, 0.5
# What the floor may cost, relative to the loss.
_FLOOR_COST = 0.002
# The least floor: what the sampler can use, and room for storing it.
_LEAST_FLOOR = SMALLEST_PROBABILITY * (1 + 1e-4)
# Loss rows that are held at a time.
MOST_MOMENTS = 200_000_000


@dataclass(frozen=True)
class FineNoise:
    """Noise, its remap, and the floor of its rows.

    Parameters
    ----------
    kernel
        The noise.
    reported
        r: the output of every cell, of the lattice's shape.
    floor
        f.
    facts
        What else is worth telling: ``epsilon_used_per_km``, ``noise_cell_km``, ``noise_radius_km``,
        ``floor``, ``outputs_reported``.
    """

    kernel: Kernel
    reported: NDArray[np.intp]
    floor: float
    facts: dict[str, Any]


def choose_noise(
    problem: Problem, epsilon_per_km: float, deadline: float = math.inf, rounding: float = 0.0
) -> FineNoise:
    """Choose noise cells, the output of each, and the floor.

    See :mod:`mdpext_dask.extend.noise` for the mechanism and why it keeps ε, and
    :mod:`mdpext_dask.extend.noise_remap` for the remap. The floor f is the largest that costs at most
    0.2 % of the loss; the radius of the noise follows from it.

    Parameters
    ----------
    problem
        The problem.
    epsilon_per_km
        ε to keep for distances d_2, in 1/km.
    deadline
        When to give up, by :func:`time.perf_counter`.
    rounding
        What storing rows may change of their logarithms.

    Raises
    ------
    SolverError
        If it would take too long or too much memory, or rounding takes too much of ε.
    """
    epsilon = epsilon_per_km
    x_km, y_km = problem.grid.x_km(), problem.grid.y_km()
    if np.count_nonzero(problem.prior) * problem.outputs > MOST_MOMENTS:
        raise SolverError("fine noise: losses of all records and outputs do not fit into memory")

    lattice = cells_of(problem.grid, epsilon)
    if math.prod(lattice.shape) > MOST_CELLS:
        raise SolverError(f"fine noise: {math.prod(lattice.shape):.0e} cells of noise; epsilon is too small")
    kernel = Kernel.of(lattice, epsilon, _threshold(lattice, _FURTHEST))
    posterior = Posterior(
        lattice,
        problem.prior,
        lambda i, j: problem.loss.rows(np.stack([np.full(len(j), x_km[i]), y_km[j]], axis=-1)),
        problem.outputs,
    )
    metric = isinstance(problem.loss, EuclideanLoss | TravelLoss)
    reported, loss_km = best_outputs(
        kernel,
        posterior,
        problem.output_xy_km,
        (lambda y: problem.loss.rows(problem.output_xy_km[[y]])[0]) if metric else None,
    )
    if time.perf_counter() > deadline:
        raise SolverError("fine noise: the remap could not be chosen in time")

    beyond = lattice.beyond_km()
    anywhere_km = float(posterior.moments.sum()) / problem.outputs / float(posterior.mass.sum())
    for scaled in np.arange(_LEAST, _FURTHEST + _STEP / 2, _STEP):
        radius, threshold = scaled / epsilon, _threshold(lattice, scaled)
        most = int(np.bincount(reported[beyond <= radius + lattice.cell_km]).max())
        # The true V is 2 π / ε² less its tail; cut short, it is no less than this.
        share = problem.outputs * threshold * most * epsilon**2 / 5
        if share * anywhere_km <= _FLOOR_COST * loss_km:
            break
    used = epsilon_within(problem, epsilon, Kernel.of(lattice, epsilon, threshold).log_error + rounding)
    kernel = Kernel.of(lattice, used, threshold)
    ratio = threshold * most / float(kernel.totals.min())
    # More is never a breach: what is added is the same for all records.
    floor = max(ratio / (1 + problem.outputs * ratio), _LEAST_FLOOR)
    facts = {
        "epsilon_used_per_km": used,
        "noise_cell_km": lattice.cell_km,
        "noise_radius_km": float(radius),
        "floor": floor,
        "outputs_reported": len(np.unique(reported)),
    }
    return FineNoise(kernel, reported, floor, facts)


def cells_of(grid: Grid, epsilon_per_km: float) -> NoiseLattice:
    """Return the cells of noise around a grid, as far as noise is followed."""
    return NoiseLattice.around(grid, epsilon_per_km, _FURTHEST / epsilon_per_km)


def laplace_fine(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return planar Laplace noise on a fine lattice, every cell of which is remapped to its best output.

    Parameters
    ----------
    problem
        The problem.
    seconds
        How long it may take.

    Raises
    ------
    SolverError
        See :func:`choose_noise`.
    """
    deadline = time.perf_counter() + seconds
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    noise, every = choose_noise(problem, epsilon, deadline), slice(None)

    def rows(east: slice) -> Array:
        if time.perf_counter() > deadline:
            raise SolverError("fine noise: not all rows could be made in time")
        return noise.kernel.rows((east, every), noise.reported, problem.outputs, noise.floor)

    return BaselineMechanism(
        rows=rows,
        guarantee=Guarantee.EPSILON,
        note="Epsilon for all pairs: noise in the plane keeps it, and remapping cells is post-processing.",
        facts=noise.facts,
    )


def _threshold(lattice: NoiseLattice, scaled: float) -> float:
    """Return τ, in km², such that cells are followed to ε R = `scaled`."""
    return math.exp(-scaled) * lattice.cell_km**2
