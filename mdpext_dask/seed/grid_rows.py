"""Rows of a linear program on a grid: what couples the columns of neighbouring seeds for one output.

Every row touches the corners of one source cell and one output only, so the normal equations
Aᵀ diag(θ) A have the pattern of the grid: block-tridiagonal, for each output by itself. Two kinds are here:
edges, as the budgets of the seed LP give them, and general rows on cells, as linearised certificates do.

All arrays are by output, then by blocks (lines of seeds), then by position in a block.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.seed.block_tridiagonal import Array, Coupling, NormalMatrix, Stencil

# By kind of row, one array for each.
Groups = tuple[Array, ...]


class GridRows(Protocol):
    """Rows A z ≥ b of a program, for some outputs."""

    @property
    def limits(self) -> Groups:
        """b, in the shapes of A z."""
        ...

    def part(self, outputs: slice) -> "GridRows":
        """Return the rows of a range of outputs."""
        ...

    def forward(self, z: Array) -> Groups:
        """Return A z for z of shape (K, n, m)."""
        ...

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v, of shape (K, n, m)."""
        ...

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v for v ≥ 0: the size of what Aᵀ v adds up."""
        ...

    def normal(self, theta: Groups) -> NormalMatrix:
        """Return Aᵀ diag(θ) A."""
        ...


@dataclass(frozen=True)
class EdgeRows:
    """Rows g z_j − z_i ≥ 0 for neighbouring seeds, both ways.

    Parameters
    ----------
    between
        Growth g between neighbouring blocks, float64 of shape (2, K or 1, n - 1, m); index 0 of the first
        axis bounds the seed in the later block by the one in the earlier, index 1 the other way round.
    within
        The same inside a block, (2, K or 1, n, m - 1).
    """

    between: Array
    within: Array

    @cached_property
    def limits(self) -> Groups:
        """Zero for every row."""
        return np.zeros(()), np.zeros(())

    def part(self, outputs: slice) -> "EdgeRows":
        """Return the rows of a range of outputs."""
        return EdgeRows(*(g[:, outputs] if g.shape[1] > 1 else g for g in (self.between, self.within)))

    def forward(self, z: Array) -> Groups:
        """Return g z_j − z_i, of shapes (2, K, n - 1, m) and (2, K, n, m - 1)."""
        earlier, later, left, right = z[:, :-1], z[:, 1:], z[:, :, :-1], z[:, :, 1:]
        between, within = np.empty((2, *earlier.shape)), np.empty((2, *left.shape))
        for out, growth, low, high in (
            (between, self.between, earlier, later),
            (within, self.within, left, right),
        ):
            np.subtract(np.multiply(growth[0], low, out=out[0]), high, out=out[0])
            np.subtract(np.multiply(growth[1], high, out=out[1]), low, out=out[1])
        return between, within

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v."""
        return self._collected(v, -1)

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v."""
        return self._collected(v, 1)

    def _collected(self, v: Groups, sign: int) -> Array:
        between, within = v
        total = np.zeros((*within.shape[1:3], between.shape[3]))
        total[:, :-1] += self.between[0] * between[0] + sign * between[1]
        total[:, 1:] += self.between[1] * between[1] + sign * between[0]
        total[:, :, :-1] += self.within[0] * within[0] + sign * within[1]
        total[:, :, 1:] += self.within[1] * within[1] + sign * within[0]
        return total

    def normal(self, theta: Groups) -> Stencil:
        """Return Σ_e θ_e (g_e e_j − e_i)(g_e e_j − e_i)ᵀ."""
        between, within = theta
        main = np.zeros((*within.shape[1:3], between.shape[3]))
        b0, b1 = self.between[0] * between[0], self.between[1] * between[1]
        w0, w1 = self.within[0] * within[0], self.within[1] * within[1]
        main[:, :-1] += self.between[0] * b0 + between[1]
        main[:, 1:] += self.between[1] * b1 + between[0]
        main[:, :, :-1] += self.within[0] * w0 + within[1]
        main[:, :, 1:] += self.within[1] * w1 + within[0]
        return Stencil(main, -(w0 + w1), Coupling(-(b0 + b1)))


# Corners of a cell as offsets (block, position), and for every pair of them its place in the stencil.
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True)
class CellRows:
    """Rows Σ_c a_c z_c ≥ b over the four corners c of source cells, any number for each cell and output.

    Parameters
    ----------
    shape
        (K, n, m) of the columns.
    cell
        Cell of each row, as (output · (n − 1) + block) · (m − 1) + position, ascending, int64 of
        shape (R,).
    coefficient
        a, float64 of shape (R, 4), corners (block, position): (0, 0), (0, 1), (1, 0), (1, 1).
    limit
        b, float64 of shape (R,).
    """

    shape: tuple[int, int, int]
    cell: NDArray[np.int64]
    coefficient: Array
    limit: Array

    @property
    def limits(self) -> Groups:
        """The limits b."""
        return (self.limit,)

    def part(self, outputs: slice) -> "CellRows":
        """Return the rows of a range of outputs."""
        _, n, m = self.shape
        first, last, _ = outputs.indices(self.shape[0])
        per_output = (n - 1) * (m - 1)
        rows = slice(*np.searchsorted(self.cell, [first * per_output, last * per_output]))
        return CellRows(
            shape=(last - first, n, m),
            cell=self.cell[rows] - first * per_output,
            coefficient=self.coefficient[rows],
            limit=self.limit[rows],
        )

    @cached_property
    def _matrix(self) -> sparse.csr_array:
        outputs, n, m = self.shape
        output, place = np.divmod(self.cell, (n - 1) * (m - 1))
        block, position = np.divmod(place, m - 1)
        corner = (output * n + block) * m + position
        columns = corner[:, None] + np.array([b * m + p for b, p in _CORNERS])
        pointer = np.arange(0, 4 * len(corner) + 1, 4)
        return sparse.csr_array(
            (self.coefficient.ravel(), columns.ravel(), pointer), shape=(len(corner), outputs * n * m)
        )

    @cached_property
    def _absolute(self) -> sparse.csr_array:
        matrix = self._matrix
        return sparse.csr_array((np.abs(matrix.data), matrix.indices, matrix.indptr), shape=matrix.shape)

    @cached_property
    def _occupied(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Where the rows of each cell that has any begin, and which cells these are."""
        starts = np.flatnonzero(np.diff(self.cell, prepend=-1))
        return starts, self.cell[starts]

    def forward(self, z: Array) -> Groups:
        """Return A z, of shape (R,)."""
        return (self._matrix @ z.ravel(),)

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v."""
        return np.asarray(self._matrix.T @ v[0]).reshape(self.shape)

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v."""
        return np.asarray(self._absolute.T @ v[0]).reshape(self.shape)

    def normal(self, theta: Groups) -> Stencil:
        """Return Σ_r θ_r a_r a_rᵀ."""
        outputs, n, m = self.shape
        starts, cells = self._occupied

        def of_pair(first: int, second: int) -> Array:
            total = np.zeros((outputs, n - 1, m - 1))
            if len(starts):
                total.ravel()[cells] = np.add.reduceat(weighted[first] * self._corner[second], starts)
            return total

        weighted = [theta[0] * a for a in self._corner]
        main = np.zeros(self.shape)
        for corner, (b, p) in enumerate(_CORNERS):
            main[:, b : n - 1 + b, p : m - 1 + p] += of_pair(corner, corner)
        within = np.zeros((outputs, n, m - 1))
        within[:, :-1] += of_pair(0, 1)
        within[:, 1:] += of_pair(2, 3)
        straight = np.zeros((outputs, n - 1, m))
        straight[:, :, :-1] += of_pair(0, 2)
        straight[:, :, 1:] += of_pair(1, 3)
        return Stencil(main, within, Coupling(straight, of_pair(0, 3), of_pair(1, 2)))

    @cached_property
    def _corner(self) -> list[Array]:
        return [np.ascontiguousarray(a) for a in self.coefficient.T]
