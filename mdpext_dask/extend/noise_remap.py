"""The best output for every noise cell: Bayesian remapping of noise, before cells are merged into outputs.

A noisy place in cell c gives a posterior over records, ∝ π(x) I_c(x); the best report for c is the output of
least G[c, y] = Σ_x π(x) I_c(x) c(x, y). That is post-processing, so any table keeps ε, and approximations
here cost loss only: all records of a cell are given the mean of their masses, and their own losses.

Where the loss is a distance, of roads or of places, outputs that cannot be the best are left out: with
c(x, y) ≥ c(y0, y) − c(x, y0), G[c, y] ≥ m_c c(y0, y) − G[c, y0] for m_c = Σ_x π(x) I_c(x); so no output with
c(y0, y) > 2 G[c, y0] / m_c is better than y0.

Chatzikokolakis, ElSalamouny & Palamidessi, "Efficient utility improvement for location privacy" (PoPETs
2017), who remap what is reported; cells are finer than that.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from mdpext_dask.extend.noise import Kernel, NoiseLattice
from mdpext_dask.problem.grid import Array

# Cells to a side of a block: of one block, the same outputs are candidates.
_BLOCK = 16
# A bound that is computed with rounding must not leave out what is exactly as good.
_ROUNDING = 1 + 1e-9


class Posterior:
    """What noise cells know of the records: the prior and its losses, by the cells that the records lie in.

    Parameters
    ----------
    lattice
        The noise cells.
    prior
        π, float64 of the grid's shape.
    losses
        Returns c(x, ·) of some records, from lattice column i and an array of j: float64 of shape (n, K).
    outputs
        K.
    """

    def __init__(
        self,
        lattice: NoiseLattice,
        prior: Array,
        losses: Callable[[int, NDArray[np.intp]], Array],
        outputs: int,
    ) -> None:
        cells = [np.array([lattice.cell_of(step) for step in range(side)]) for side in lattice.grid.shape]
        i, j = np.nonzero(prior)
        width = int(cells[1][-1]) + 1
        flat = cells[0][i] * width + cells[1][j]
        used, place = np.unique(flat, return_inverse=True)
        self.cell_x, self.cell_y = np.divmod(used, width)
        self.mass: Array = np.bincount(place, prior[i, j]).astype(np.float64)
        self.moments = np.zeros((len(used), outputs))
        for column in np.unique(i):
            members = np.flatnonzero(i == column)
            # In order of j, so those of one cell follow one another.
            cell, first = np.unique(place[members], return_index=True)
            weighted = losses(int(column), j[members]) * prior[column, j[members], None]
            self.moments[cell] += np.add.reduceat(weighted, first, axis=0)


def best_outputs(
    kernel: Kernel, posterior: Posterior, output_xy_km: Array, between: Callable[[int], Array] | None
) -> tuple[NDArray[np.intp], float]:
    """Return the output of every noise cell, of the lattice's shape, and the expected loss in km.

    Cells that no record with a prior reaches go to the nearest output.

    Parameters
    ----------
    kernel
        The noise.
    posterior
        Of these cells.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    between
        Returns c(y0, ·) in km, shape (K,), if the loss is a distance; then candidates are chosen by it.
    """
    lattice = kernel.lattice
    x_km, y_km = lattice.middles_km()
    places = np.stack(np.meshgrid(x_km, y_km, indexing="ij"), axis=-1)
    reported = np.asarray(KDTree(output_xy_km).query(places)[1], dtype=np.intp)
    table = kernel.masses.mean(axis=(0, 1))
    total, reach = float(table.sum()), 2 * lattice.reach
    table = np.pad(table, 1)  # cells that are out of reach weigh nothing
    lost = 0.0
    for west in range(0, len(x_km), _BLOCK):
        for south in range(0, len(y_km), _BLOCK):
            block = slice(west, west + _BLOCK), slice(south, south + _BLOCK)
            x, y = np.arange(len(x_km))[block[0]], np.arange(len(y_km))[block[1]]
            near = np.flatnonzero(
                (posterior.cell_x >= x[0] - reach)
                & (posterior.cell_x <= x[-1])
                & (posterior.cell_y >= y[0] - reach)
                & (posterior.cell_y <= y[-1])
            )
            if not len(near):
                continue
            across, along = (
                np.clip(axis[:, None] - cells[near], -1, reach + 1) + 1
                for axis, cells in ((x, posterior.cell_x), (y, posterior.cell_y))
            )
            weights = table[across[:, None], along].reshape(-1, len(near))
            reached = weights.any(axis=1)
            if not reached.any():
                continue
            best, least = _best_of_block(
                weights[reached], posterior.mass[near], posterior.moments[near], between
            )
            view = reported[block].reshape(-1)
            view[reached] = best
            reported[block] = view.reshape(len(x), len(y))
            lost += float(least.sum())
    return reported, lost / total


def _best_of_block(
    weights: Array, mass: Array, moments: Array, between: Callable[[int], Array] | None
) -> tuple[NDArray[np.intp], Array]:
    """Return the best output of every cell, and its G; see the module.

    Parameters
    ----------
    weights
        I_c at the places of the prior, float64 of shape (cells, places).
    mass, moments
        The prior there, (places,), and times its losses, (places, K).
    between
        See :func:`best_outputs`.
    """
    candidates = np.arange(moments.shape[1])
    if between is not None:
        middle = int((weights.sum(axis=0) @ moments).argmin())
        furthest = float((2 * (weights @ moments[:, middle]) / (weights @ mass)).max())
        candidates = np.flatnonzero(between(middle) <= furthest * _ROUNDING)
    costs = weights @ moments[:, candidates]
    best = costs.argmin(axis=1)
    return candidates[best], costs[np.arange(len(best)), best]
