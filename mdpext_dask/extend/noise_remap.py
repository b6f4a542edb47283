"""The best output for every noise cell: Bayesian remapping of noise, before cells are merged into outputs.

A noisy place in cell c gives a posterior over records, ∝ π(x) I_c(x); the best report for c is the output of
least G[c, y] = Σ_x π(x) I_c(x) c(x, y). That is post-processing, so any table keeps ε, and approximations
here cost loss only: all records of a cell are given the mean of their masses, and their own losses.

Where the loss is a distance, of roads or of places, outputs that cannot be the best are left out: with
c(x, y) ≥ c(y0, y) − c(x, y0), G[c, y] ≥ m_c c(y0, y) − G[c, y0] for m_c = Σ_x π(x) I_c(x); so no output with
c(y0, y) > (G[c, y0] + G[c, y1]) / m_c is better than y1. For y0 and y1 among the outputs in the middle of the
posteriors that leaves outputs some 1/ε away. The bound needs the losses of a few outputs, so those of outputs
far away are never computed. Of losses that are no distance, all outputs are compared.

Work is cut into tiles of cells, which need nothing of each other: only the records that the noise takes into
a tile, and the outputs that may be best there. The tiles are the lattice's, and so is the order of sums, so
the table is the same to the last bit wherever tiles are worked on.

Chatzikokolakis, ElSalamouny & Palamidessi, "Efficient utility improvement for location privacy" (PoPETs
2017), who remap what is reported; cells are finer than that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from mdpext_dask.errors import SolverError
from mdpext_dask.extend.noise import NoiseLattice
from mdpext_dask.problem.grid import Array
from mdpext_dask.problem.loss import Loss
from mdpext_dask.seed.solve import one_blas_thread

# Cells to a side of a tile, and of a block in it: of one block, the same outputs are candidates.
TILE, BLOCK = 128, 16
# Losses that a tile holds at most, but for a few outputs, and those that are computed at a time.
MOST_MOMENTS, AT_A_TIME = 200_000_000, 2**21
# A bound that is computed with rounding must not leave out what is exactly as good.
_ROUNDING = 1 + 1e-9
# Of so many cells, the posterior of one says which outputs y0 and y1 are sought among.
_TRIED = 17

# Reads the prior of some lattice columns and rows of records.
PriorOf = Callable[[slice, slice], Array]


class Tile(NamedTuple):
    """What is found of one tile of cells.

    Parameters
    ----------
    reported
        The output of every cell, int32 of shape (cells east, cells north).
    lost
        Σ_c min_y G[c, y], in km times the unit of masses.
    anywhere_km
        About Σ_x π(x) Σ_y c(x, y) / K of the records in its cells, in km.
    """

    reported: NDArray[np.int32]
    lost: float
    anywhere_km: float


@dataclass(frozen=True)
class Remap:
    """Which output is the best for a noise cell.

    Parameters
    ----------
    lattice
        The cells.
    masses
        I by the offset between the cells of noise and record, float64 of shape (2 n + 1, 2 n + 1) with
        n ≤ lattice.reach.
    loss
        The loss.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    """

    lattice: NoiseLattice
    masses: Array
    loss: Loss
    output_xy_km: Array

    @cached_property
    def _padded(self) -> Array:
        """The masses with so many zeros around them that a block may be looked up as a whole."""
        return np.pad(self.masses, BLOCK)

    @cached_property
    def _squared_radius(self) -> int:
        """Square of how far noise goes, in cells."""
        offsets = np.argwhere(self.masses) - len(self.masses) // 2
        return int((offsets**2).sum(axis=1).max(initial=0))

    @cached_property
    def _is_distance(self) -> bool:
        return self.loss.from_output(0) is not None

    @cached_property
    def _tree(self) -> KDTree:
        return KDTree(self.output_xy_km)

    def tile(self, part: tuple[slice, slice], prior_of: PriorOf) -> Tile:
        """Return the best outputs of a tile; cells that no record with a prior reaches get the nearest one.

        Parameters
        ----------
        part
            Its cells, as :func:`tile_cells` has them; or fewer.
        prior_of
            Reads the prior.

        Raises
        ------
        SolverError
            If the losses that a file has for it are too many to be held.
        """
        places = _Places(self, part, prior_of)
        reported = np.full([axis.stop - axis.start for axis in part], -1, dtype=np.int32)
        lost = anywhere_km = 0.0
        with one_blas_thread():
            for west in range(0, reported.shape[0], BLOCK):
                for south in range(0, reported.shape[1], BLOCK):
                    block = reported[west : west + BLOCK, south : south + BLOCK]
                    first = part[0].start + west, part[1].start + south
                    least, anywhere = self._fill(block, first, places)
                    lost, anywhere_km = lost + least, anywhere_km + anywhere
        x_km, y_km = (axis[cells] for axis, cells in zip(self.lattice.middles_km(), part, strict=True))
        i, j = np.nonzero(reported < 0)
        reported[i, j] = self._tree.query(np.stack([x_km[i], y_km[j]], axis=-1))[1]
        return Tile(reported, lost, anywhere_km)

    def _fill(
        self, block: NDArray[np.int32], first: tuple[int, int], places: "_Places"
    ) -> tuple[float, float]:
        """Write the best outputs of a block of cells from `first` on; return what is summed of a tile."""
        away = [
            np.maximum(np.maximum(start - cells, cells - (start + side - 1)), 0)
            for start, side, cells in zip(first, block.shape, places.cells, strict=True)
        ]
        within = np.maximum(*away) <= len(self.masses) // 2
        near = np.flatnonzero(within & (away[0] ** 2 + away[1] ** 2 <= self._squared_radius))
        if not len(near):
            return 0.0, 0.0
        own = (away[0][near] == 0) & (away[1][near] == 0)
        width, middle = len(self._padded), len(self._padded) // 2
        x, y = (np.arange(start, start + side) for start, side in zip(first, block.shape, strict=True))
        cell = ((x[:, None] + middle) * width + y + middle).ravel()
        weights = self._padded.ravel()[cell[:, None] - (places.cells[0] * width + places.cells[1])[near]]
        mass = weights @ places.mass[near]
        reached = np.flatnonzero(mass > 0)
        if not len(reached):
            return 0.0, 0.0
        weights, mass = weights[reached], mass[reached]
        candidates, anywhere_km = self._candidates(weights, mass, near, own, places)
        best, least, everywhere = np.zeros(len(reached), dtype=np.intp), np.full(len(reached), np.inf), 0.0
        for start in range(0, len(candidates), places.held):
            some = candidates[start : start + places.held]
            moments = places.moments(some, near)
            everywhere += float(moments[:, own].sum())
            costs = weights @ moments.T
            one = costs.argmin(axis=1)
            cost = costs[np.arange(len(one)), one]
            lower = cost < least
            best[lower], least[lower] = some[one[lower]], cost[lower]
        i, j = np.divmod(reached, block.shape[1])
        block[i, j] = best
        return float(least.sum()), everywhere / len(candidates) if anywhere_km is None else anywhere_km

    def _candidates(
        self, weights: Array, mass: Array, near: NDArray[np.intp], own: NDArray[np.bool_], places: "_Places"
    ) -> tuple[NDArray[np.intp], float | None]:
        """Return the outputs that may be the best of some cell, and what a tile sums; see the module.

        Parameters
        ----------
        weights, mass
            I_c of the places, float64 of shape (cells, near), and m_c.
        near, own, places
            Which places, and which of these are in the block.

        Raises
        ------
        SolverError
            If the losses that a file has for a tile are too many to be held.
        """
        if not self._is_distance:
            if len(self.output_xy_km) > places.held:  # a table would be read again for every part
                raise SolverError(
                    f"noise: a tile takes losses between {len(places.mass):,} places and "
                    f"{len(self.output_xy_km):,} outputs from a file, more than {MOST_MOMENTS:.0e} numbers; "
                    "use fewer outputs or less refinement"
                )
            return np.arange(len(self.output_xy_km)), None
        tried = slice(None, None, _TRIED)
        middles = (weights[tried] * places.mass[near]) @ places.xy_km[near] / mass[tried, None]
        tries = np.unique(self._tree.query(middles)[1])
        moments = places.moments(tries, near)
        mean_km = weights @ moments.T / mass[:, None]
        furthest = (mean_km + mean_km.min(axis=1, keepdims=True)).max(axis=0)
        central = int(furthest.argmin())
        from_central = self.loss.from_output(int(tries[central]))
        assert from_central is not None  # it is a distance
        # Between |a − b| and a + b lies c(x, y), with a = c(x, y0) and b = c(y0, y); halfway, the larger.
        here = float(places.mass[near][own].sum())
        anywhere_km = float(np.maximum(moments[central, own].sum(), here * from_central).mean())
        return np.flatnonzero(from_central <= furthest[central] * _ROUNDING), anywhere_km


class _Places:
    """The records whose noise comes into a tile, those of a cell as one place, and their losses.

    Attributes
    ----------
    cells
        Cells of the places to the east and to the north, each of shape (places,).
    mass
        Their prior, float64 of shape (places,).
    xy_km
        Where they are, float64 of shape (places, 2), in km.
    held
        Of how many outputs the losses are held at most.
    """

    def __init__(self, remap: Remap, part: tuple[slice, slice], prior_of: PriorOf) -> None:
        lattice, reach = remap.lattice, len(remap.masses) // 2
        across, along = (
            _records_between(lattice, axis.start - reach, axis.stop + reach, side)
            for axis, side in zip(part, lattice.grid.shape, strict=True)
        )
        prior = prior_of(across, along)
        i, j = np.nonzero(prior)
        self._prior: Array = prior[i, j]
        record = i + across.start, j + along.start
        x, y = (each * lattice.per_record // lattice.per_cell + lattice.reach for each in record)
        order = np.lexsort((y, x))
        i, j, x, y = record[0][order], record[1][order], x[order], y[order]
        self._prior = self._prior[order]
        changes = (np.diff(x) != 0) | (np.diff(y) != 0)
        self._first = np.flatnonzero(np.concatenate([[True], changes])[: len(x)])
        self.cells = x[self._first], y[self._first]
        self.mass = self._sums(self._prior[None])[0]
        # No fewer than those that are tried for a block.
        self.held = max(MOST_MOMENTS // max(len(self.mass), 1), -(-(BLOCK**2) // _TRIED))
        x_km, y_km = lattice.middles_km()
        self.xy_km = np.stack([x_km[self.cells[0]], y_km[self.cells[1]]], axis=-1)
        self._records_km = np.stack([lattice.grid.x_km()[i], lattice.grid.y_km()[j]], axis=-1)
        self._loss = remap.loss
        # Rows of the moments that are known, with room for as many more, and which row is an output's.
        self._moments: Array = np.empty((0, len(self.mass)))
        self._row = np.full(len(remap.output_xy_km), -1)
        self._known = 0

    def _sums(self, values: Array) -> Array:
        """Add up what is given of records, shape (k, n), by their places."""
        if len(self._first) == values.shape[1]:  # every record is a place of its own
            return values
        return np.asarray(np.add.reduceat(values, self._first, axis=1))

    @cached_property
    def _columns(self) -> Callable[[NDArray[np.intp]], Array]:
        return self._loss.columns(self._records_km)

    def moments(self, outputs: NDArray[np.intp], near: NDArray[np.intp]) -> Array:
        """Return Σ π(x) c(x, y) over the records of some places, float64 of shape (outputs, places), in km.

        Of :attr:`held` outputs at most; those of outputs before are found again where they are needed.
        """
        missing = outputs[self._row[outputs] < 0]
        if self._known + len(missing) > self.held:
            self._row[:], self._known, missing = -1, 0, outputs
        known = self._known + len(missing)
        if known > len(self._moments):
            grown = np.empty((min(2 * known, self.held), len(self.mass)))
            grown[: self._known] = self._moments[: self._known]
            self._moments = grown
        step = max(AT_A_TIME // len(self._prior), 1)
        for start in range(0, len(missing), step):
            part = missing[start : start + step]
            rows = np.arange(self._known, self._known + len(part))
            self._moments[rows] = self._sums(self._columns(part) * self._prior)
            self._row[part] = rows
            self._known += len(part)
        return np.asarray(self._moments[self._row[outputs][:, None], near])


def tile_count(lattice: NoiseLattice) -> int:
    """Return how many tiles cover the cells."""
    return math.prod(-(-side // TILE) for side in lattice.shape)


def tile_cells(lattice: NoiseLattice, index: int) -> tuple[slice, slice]:
    """Return the cells of a tile; those to the north come first."""
    place = divmod(index, -(-lattice.shape[1] // TILE))
    across, along = (
        slice(number * TILE, min((number + 1) * TILE, side))
        for number, side in zip(place, lattice.shape, strict=True)
    )
    return across, along


def _records_between(lattice: NoiseLattice, first: int, stop: int, side: int) -> slice:
    """Return those of `side` records along an axis whose cells are from `first` on and before `stop`."""
    low, high = (
        min(max(-(-(cell - lattice.reach) * lattice.per_cell // lattice.per_record), 0), side)
        for cell in (first, stop)
    )
    return slice(low, high)
