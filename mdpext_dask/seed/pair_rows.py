"""Rows g z_j − z_i ≥ 0 for pairs of points of a lattice that are near each other, along any directions.

Budgets of the seed LP hold for edges; this is what (1) itself says about two records, where one growth
g = exp(ε d) serves all outputs and both ways. A pair that is to be left out takes a growth that binds
nothing.

A pair may reach over several lines of the lattice. With as many lines in a block, it lies in one block or in
two that follow each other, so the normal equations are block-tridiagonal as ever; only, their blocks are not
tridiagonal themselves.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mdpext_dask.seed.block_tridiagonal import Array, BlockTridiagonal
from mdpext_dask.seed.grid_rows import Groups

# From one point of a pair to the other: lines, and positions in a line.
Direction = tuple[int, int]
_Ends = tuple[tuple[slice, slice], tuple[slice, slice]]


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


def ends(direction: Direction) -> _Ends:
    """Return where in a lattice (lines, positions) the pairs of a direction begin, and where they end."""
    lines, positions = direction
    early, late = slice(None, -lines or None), slice(lines, None)
    low, high = slice(None, -abs(positions) or None), slice(abs(positions), None)
    return ((early, low), (late, high)) if positions >= 0 else ((early, high), (late, low))


@dataclass(frozen=True)
class PairRows:
    """Rows for all pairs along some directions, both ways.

    Parameters
    ----------
    shape
        Blocks n, lines in a block, positions in a line; z has the shape (K, n, lines · positions).
    growth
        g by direction, float64, each of the shape of the points where its pairs begin. No direction may
        reach over more lines than a block has.
    """

    shape: tuple[int, int, int]
    growth: dict[Direction, Array]

    @cached_property
    def limits(self) -> Groups:
        """Zero for every row."""
        return tuple(np.zeros(()) for _ in self.growth)

    def part(self, outputs: slice) -> "PairRows":  # noqa: ARG002 the rows are those of every output
        """Return the rows of a range of outputs."""
        return self

    def forward(self, z: Array) -> Groups:
        """Return g z_j − z_i, of shape (2, K, ...) for each direction."""
        lines, rows = _lines(z, self.shape), []
        for direction, growth in self.growth.items():
            first, second = (lines[:, *end] for end in ends(direction))
            both = np.empty((2, *first.shape))
            np.subtract(np.multiply(growth, first, out=both[0]), second, out=both[0])
            np.subtract(np.multiply(growth, second, out=both[1]), first, out=both[1])
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
        lines = _lines(total, self.shape)
        add = np.add if sign > 0 else np.subtract
        for (direction, growth), (up, down) in zip(self.growth.items(), v, strict=True):
            first, second = (lines[:, *end] for end in ends(direction))
            first += growth * up
            second += growth * down
            add(first, down, out=first)
            add(second, up, out=second)
        return total

    def normal(self, theta: Groups) -> "PairMatrix":
        """Return Σ θ (g e_j − e_i)(g e_j − e_i)ᵀ over all rows."""
        main, couplings = self._zeros(theta), {}
        lines = _lines(main, self.shape)
        for (direction, growth), (up, down) in zip(self.growth.items(), theta, strict=True):
            first, second = (lines[:, *end] for end in ends(direction))
            square = growth * growth
            first += square * up
            first += down
            second += square * down
            second += up
            couplings[direction] = -growth * (up + down)
        return PairMatrix(main, self.shape, couplings)

    def _zeros(self, groups: Groups) -> Array:
        blocks, lines, positions = self.shape
        return np.zeros((groups[0].shape[1], blocks, lines * positions))


class PairMatrix(NamedTuple):
    """Symmetric matrices of several outputs whose entries off the diagonal couple pairs.

    Parameters
    ----------
    main
        Diagonals, float64 of shape (K, n, lines · positions).
    shape
        As of :class:`PairRows`.
    couplings
        Entries by direction, float64 of shape (K, ...), the rest as of its growth.
    """

    main: Array
    shape: tuple[int, int, int]
    couplings: dict[Direction, Array]

    def times(self, vectors: Array) -> Array:
        """Return H v for all outputs, float64 of shape (K, n, lines · positions)."""
        total = self.main * vectors
        into, of = _lines(total, self.shape), _lines(np.ascontiguousarray(vectors), self.shape)
        for direction, coupling in self.couplings.items():
            first, second = ends(direction)
            into[:, *first] += coupling * of[:, *second]
            into[:, *second] += coupling * of[:, *first]
        return total

    def factorised(self) -> BlockTridiagonal:
        """Return the factorised matrices; raises as :class:`BlockTridiagonal` does."""
        return BlockTridiagonal(self)

    def scaled(self, scale: Array) -> "PairBlocks":
        """Return S H S for S = diag(H)^{-1/2}, given as (K, n, lines · positions)."""
        blocks, lines, positions = self.shape
        outputs, size = len(self.main), lines * positions
        within = np.zeros((outputs, blocks, lines, positions, lines, positions))
        between = np.zeros((outputs, blocks - 1, lines, positions, lines, positions))
        of = _lines(scale, self.shape)
        for direction, coupling in self.couplings.items():
            first, second = ends(direction)
            entries = coupling * of[:, *first] * of[:, *second]
            low, high = (np.arange(positions)[end[1]] for end in (first, second))
            for line in range(lines):
                blocks_on, other = divmod(line + direction[0], lines)
                here = entries[:, line::lines]
                target = (between if blocks_on else within)[:, : here.shape[1]]
                # An array of shape (positions, K, blocks): the indices that are arrays come first.
                target[:, :, line, low, other, high] = here
                if not blocks_on:
                    target[:, :, other, high, line, low] = here
        return PairBlocks(
            within.reshape(outputs, blocks, size, size),
            PairCouplings(between.reshape(outputs, blocks - 1, size, size)),
        )


class PairCouplings(NamedTuple):
    """Matrices E_i between neighbouring blocks.

    Parameters
    ----------
    dense
        float64 of shape (K, n - 1, m, m).
    """

    dense: Array

    def times(self, block: int, vectors: Array) -> Array:
        """Return E v of one block for all outputs, shape (K, m)."""
        return np.asarray((self.dense[:, block] @ vectors[..., None])[..., 0])

    def transposed_times(self, block: int, vectors: Array) -> Array:
        """Return Eᵀ v of one block for all outputs, shape (K, m)."""
        return np.asarray((vectors[:, None, :] @ self.dense[:, block])[:, 0])

    def after(self, block: int, matrices: Array, outputs: slice = slice(None)) -> Array:
        """Return M E of one block for matrices M of some outputs, shape (K, m, m)."""
        return np.asarray(matrices @ self.dense[outputs, block])


class PairBlocks(NamedTuple):
    """Matrices of several outputs with a unit diagonal.

    Parameters
    ----------
    within
        Blocks without their diagonals, float64 of shape (K, n, m, m).
    between
        Couplings of neighbouring blocks.
    """

    within: Array
    between: PairCouplings

    def off_diagonal(self, block: int) -> Array:
        """Return one block for all outputs without its diagonal, shape (K, m, m)."""
        return self.within[:, block].copy()


def _lines(values: Array, shape: tuple[int, int, int]) -> Array:
    """Return a view by lines and positions of values by blocks."""
    blocks, lines, positions = shape
    return values.reshape(len(values), blocks * lines, positions)
