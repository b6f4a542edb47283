"""Planar Laplace noise on a lattice finer than the outputs, remapped for prior and loss, with a floor."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.noise import epsilon_within, euclidean_epsilon
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Guarantee, Problem
from mdpext_dask.extend.noise import Kernel, NoiseLattice
from mdpext_dask.extend.noise_remap import Remap, Tile, tile_cells, tile_count
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import Loss
from mdpext_dask.row_limits import SMALLEST_PROBABILITY

# ε R up to which noise may be followed, and the steps in which less is tried.
_FURTHEST, _LEAST, _STEP = 26.0, 8.0, 0.5
# ε R up to which posteriors are followed. Noise goes further with a probability of 2e-6; cells that are so
# far from every record report the output nearest to them.
_POSTERIOR = 16.0
# What the floor may cost, relative to the loss.
_FLOOR_COST = 0.002
# The least floor: what the sampler can use, and room for storing it.
_LEAST_FLOOR = SMALLEST_PROBABILITY * (1 + 1e-4)


@dataclass(frozen=True)
class FineNoise:
    """Noise, its remap, and the floor of its rows.

    Parameters
    ----------
    kernel
        The noise.
    reported
        r: the output of every cell, int32 of the lattice's shape.
    floor
        f.
    facts
        What else is worth telling: ``epsilon_used_per_km``, ``noise_cell_km``, ``noise_radius_km``,
        ``floor``, ``outputs_reported``.
    """

    kernel: Kernel
    reported: NDArray[np.int32]
    floor: float
    facts: dict[str, Any]


def choose_noise(
    grid: Grid,
    outputs: int,
    epsilon_per_km: float,
    tiles_of: Callable[[NoiseLattice], Iterable[Tile]],
    rounding: float = 0.0,
) -> FineNoise:
    """Choose noise cells, the output of each, and the floor.

    See :mod:`mdpext_dask.extend.noise` for the mechanism and why it keeps ε, and
    :mod:`mdpext_dask.extend.noise_remap` for the remap. The floor f is the largest that costs at most
    0.2 % of the loss; the radius of the noise follows from it.

    Parameters
    ----------
    grid, outputs
        The records, and K.
    epsilon_per_km
        ε to keep for distances d_2, in 1/km.
    tiles_of
        Returns the tiles of :func:`remap_of`, in their order.
    rounding
        What storing rows may change of their logarithms.

    Raises
    ------
    SolverError
        If there are too many cells, or rounding takes too much of ε.
    """
    epsilon = epsilon_per_km
    lattice = cells_of(grid, epsilon)
    if lattice.excess is not None:
        raise SolverError(f"fine noise: there would be {lattice.excess}")
    reported = np.empty(lattice.shape, dtype=np.int32)
    lost = anywhere_km = 0.0
    for index, tile in enumerate(tiles_of(lattice)):
        reported[tile_cells(lattice, index)] = tile.reported
        lost, anywhere_km = lost + tile.lost, anywhere_km + tile.anywhere_km
    loss_km = lost / float(posterior_masses(lattice, epsilon).sum())

    scales = np.arange(_LEAST, _FURTHEST + _STEP / 2, _STEP)
    most = _most_cells(lattice, reported, outputs, scales / epsilon + lattice.cell_km)
    # The true V is 2 π / ε² less its tail; cut short, it is no less than this.
    shares = outputs * np.array([_threshold(lattice, scaled) for scaled in scales]) * most * epsilon**2 / 5
    cheap = np.flatnonzero(shares * anywhere_km <= _FLOOR_COST * loss_km)
    chosen = int(cheap[0]) if len(cheap) else len(scales) - 1
    threshold = _threshold(lattice, scales[chosen])
    log_error = Kernel.of(lattice, epsilon, threshold).log_error + rounding
    used = epsilon_within(grid, outputs, epsilon, log_error)
    kernel = Kernel.of(lattice, used, threshold)
    # Those that are counted where the store is certified; the estimate above may be a few less.
    collected = np.bincount(reported[kernel.reached], minlength=outputs).max()
    ratio = threshold * float(collected) / float(kernel.totals.min())
    # More is never a breach: what is added is the same for all records.
    floor = max(ratio / (1 + outputs * ratio), _LEAST_FLOOR)
    facts = {
        "epsilon_used_per_km": used,
        "noise_cell_km": lattice.cell_km,
        "noise_radius_km": float(scales[chosen] / epsilon),
        "floor": floor,
        "outputs_reported": len(np.unique(reported)),
    }
    return FineNoise(kernel, reported, floor, facts)


def _most_cells(
    lattice: NoiseLattice, reported: NDArray[np.int32], outputs: int, within_km: Array
) -> NDArray[np.intp]:
    """Return N: the most cells that one output collects no further from the records than each distance.

    Parameters
    ----------
    lattice, reported, outputs
        The cells, r, and K.
    within_km
        Distances, increasing, of shape (n,), in km.
    """
    counts = np.zeros((len(within_km) + 1, outputs), dtype=np.intp)
    x_km, y_km = lattice.middles_km()
    for x, row in zip(x_km, reported, strict=True):
        places = np.stack([np.full(len(y_km), x), y_km], axis=-1)
        step = np.searchsorted(within_km, lattice.grid.box.distance_km(places))
        counts += np.bincount(step * outputs + row, minlength=counts.size).reshape(counts.shape)
    return np.asarray(counts[:-1].cumsum(axis=0).max(axis=1))


def cells_of(grid: Grid, epsilon_per_km: float) -> NoiseLattice:
    """Return the cells of noise around a grid, as far as noise is followed."""
    return NoiseLattice.around(grid, epsilon_per_km, _FURTHEST / epsilon_per_km)


def posterior_reach(lattice: NoiseLattice, epsilon_per_km: float) -> int:
    """Return how many cells away from a record its noise is followed in posteriors."""
    return min(math.ceil(_POSTERIOR / epsilon_per_km / lattice.cell_km) + 1, lattice.reach)


def posterior_masses(lattice: NoiseLattice, epsilon_per_km: float) -> Array:
    """Return the masses that posteriors are made of: the mean of those of all records in a cell, in km²."""
    near = replace(lattice, reach=posterior_reach(lattice, epsilon_per_km))
    return np.asarray(
        Kernel.of(near, epsilon_per_km, _threshold(lattice, _POSTERIOR)).masses.mean(axis=(0, 1))
    )


def remap_of(lattice: NoiseLattice, epsilon_per_km: float, loss: Loss, output_xy_km: Array) -> Remap:
    """Return the remap of noise, see :class:`~mdpext_dask.extend.noise_remap.Remap`."""
    return Remap(lattice, posterior_masses(lattice, epsilon_per_km), loss, output_xy_km)


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
        If it would take too long; see also :func:`choose_noise`.
    """
    deadline = time.perf_counter() + seconds
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)

    def tiles(lattice: NoiseLattice) -> Iterable[Tile]:
        remap = remap_of(lattice, epsilon, problem.loss, problem.output_xy_km)
        for index in range(tile_count(lattice)):
            if time.perf_counter() > deadline:
                raise SolverError("fine noise: the remap could not be chosen in time")
            yield remap.tile(tile_cells(lattice, index), lambda east, north: problem.prior[east, north])

    noise, every = choose_noise(problem.grid, problem.outputs, epsilon, tiles), slice(None)

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
