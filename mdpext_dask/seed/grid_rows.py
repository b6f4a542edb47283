"""Rows of a linear program on a grid: what couples the columns of nearby points for one output.

The normal equations Aᵀ diag(θ) A are block-tridiagonal, for each output by itself. Two kinds are here: pairs
of points, as the budgets of the seed LP and (1) itself give them, and general rows on the four corners of
cells, as linearised certificates do.

All arrays are by output, then by blocks (lines of seeds), then by position in a block.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.seed.block_tridiagonal import Direction, LatticeMatrix, NormalMatrix, by_lines, ends
from mdpext_dask.seed.model import Array

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


def directions(reach: int) -> tuple[Direction, ...]:
    """Return all directions that reach over at most so many lines and positions, no two the same way.

    Of two opposite ones, one is enough. 1 reaches the eight neighbours, 2 the knight's moves as well.
    """
    return tuple(
        (lines, positions)
        for lines in range(reach + 1)
        for positions in range(-reach if lines else 1, reach + 1)
        if math.gcd(lines, positions) == 1
    )


@dataclass(frozen=True)
class PairRows:
    """Rows g z_j − z_i ≥ 0 for all pairs along some directions, both ways.

    Budgets of the seed LP are for edges, between neighbours on a line and on the next one. Pairs of records,
    which (1) is about, may reach over several lines; with as many lines in a block, they lie in one block or
    in two that follow each other. A pair that is to be left out takes a growth that binds nothing.

    Parameters
    ----------
    shape
        Blocks n, lines in a block, positions in a line; z has the shape (K, n, lines · positions).
    growth
        g by direction, float64 of shape (2, K or 1, ...), the rest that of the points where its pairs begin.
        Index 0 bounds the point where a pair ends by the one where it begins, index 1 the other way round. No
        direction may reach over more lines than a block has.
    """

    shape: tuple[int, int, int]
    growth: dict[Direction, Array]

    @cached_property
    def limits(self) -> Groups:
        """Zero for every row."""
        return tuple(np.zeros(()) for _ in self.growth)

    def part(self, outputs: slice) -> "PairRows":
        """Return the rows of a range of outputs."""
        growth = {d: g[:, outputs] if g.shape[1] > 1 else g for d, g in self.growth.items()}
        return PairRows(self.shape, growth)

    def forward(self, z: Array) -> Groups:
        """Return g z_j − z_i, of shape (2, K, ...) for each direction."""
        lines, rows = by_lines(z, self.shape), []
        for direction, growth in self.growth.items():
            first, second = (lines[:, *end] for end in ends(direction))
            both = np.empty((2, *first.shape))
            np.subtract(np.multiply(growth[0], first, out=both[0]), second, out=both[0])
            np.subtract(np.multiply(growth[1], second, out=both[1]), first, out=both[1])
            rows.append(both)
        return tuple(rows)

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v."""
        return self._collected(v, -1)

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v."""
        return self._collected(v, 1)

    def _collected(self, v: Groups, sign: int) -> Array:
        total = self._zeros(v)
        lines = by_lines(total, self.shape)
        for (direction, growth), (up, down) in zip(self.growth.items(), v, strict=True):
            first, second = (lines[:, *end] for end in ends(direction))
            first += growth[0] * up + sign * down
            second += growth[1] * down + sign * up
        return total

    def normal(self, theta: Groups) -> LatticeMatrix:
        """Return Σ θ (g e_j − e_i)(g e_j − e_i)ᵀ over all rows."""
        main, couplings = self._zeros(theta), {}
        lines = by_lines(main, self.shape)
        for (direction, growth), (up, down) in zip(self.growth.items(), theta, strict=True):
            first, second = (lines[:, *end] for end in ends(direction))
            grown_up, grown_down = growth[0] * up, growth[1] * down
            first += growth[0] * grown_up + down
            second += growth[1] * grown_down + up
            couplings[direction] = -(grown_up + grown_down)
        # Pairs on a line first: the order of sums decides bits.
        return LatticeMatrix(main, self.shape, dict(sorted(couplings.items())))

    def _zeros(self, groups: Groups) -> Array:
        blocks, lines, positions = self.shape
        return np.zeros((groups[0].shape[1], blocks, lines * positions))


# Corners of a cell as offsets (block, position).
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
        cell = self.cell[rows] - first * per_output
        return CellRows((last - first, n, m), cell, self.coefficient[rows], self.limit[rows])

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
        return abs(self._matrix)

    def forward(self, z: Array) -> Groups:
        """Return A z, of shape (R,)."""
        return (self._matrix @ z.ravel(),)

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v."""
        return np.asarray(self._matrix.T @ v[0]).reshape(self.shape)

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v."""
        return np.asarray(self._absolute.T @ v[0]).reshape(self.shape)

    def normal(self, theta: Groups) -> LatticeMatrix:
        """Return Σ_r θ_r a_r a_rᵀ."""
        outputs, n, m = self.shape
        # Where the rows of each cell that has any begin, and which cells these are.
        starts = np.flatnonzero(np.diff(self.cell, prepend=-1))
        cells = self.cell[starts]

        def of_pair(first: int, second: int) -> Array:
            total = np.zeros((outputs, n - 1, m - 1))
            if len(starts):
                total.ravel()[cells] = np.add.reduceat(weighted[first] * self._corner[second], starts)
            return total

        weighted = [theta[0] * a for a in self._corner]
        main = np.zeros(self.shape)
        for corner, (b, p) in enumerate(_CORNERS):
            main[:, b : n - 1 + b, p : m - 1 + p] += of_pair(corner, corner)
        within, straight = np.zeros((outputs, n, m - 1)), np.zeros((outputs, n - 1, m))
        within[:, :-1] += of_pair(0, 1)
        within[:, 1:] += of_pair(2, 3)
        straight[:, :, :-1] += of_pair(0, 2)
        straight[:, :, 1:] += of_pair(1, 3)
        couplings = {(0, 1): within, (1, 0): straight, (1, 1): of_pair(0, 3), (1, -1): of_pair(1, 2)}
        return LatticeMatrix(main, (n, 1, m), couplings)

    @cached_property
    def _corner(self) -> list[Array]:
        return [np.ascontiguousarray(a) for a in self.coefficient.T]
