"""Many symmetric positive definite block-tridiagonal systems at once.

Points on a few lines of a lattice (of the seeds: on one line) form a block of size m; the blocks follow each
other. Rows of a program couple pairs of points in one block or in two that follow each other, and so do the
normal equations of one output. Several outputs are handled together, block by block, so that every step is
one batched call of LAPACK or BLAS.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from mdpext_dask.seed.model import Array

T = TypeVar("T")
# From one point of a pair to the other: lines, and positions in a line.
Direction = tuple[int, int]
_Ends = tuple[tuple[slice, slice], tuple[slice, slice]]

# Outputs whose rows of the inverse are worked on together, at most: small enough for the processor's cache.
_CHUNK = 8
# Relative to the unit diagonal of the scaled matrices: what is added when a factorisation fails.
FIRST_SHIFT, LARGEST_SHIFT = 1e-14, 1e-6


def ends(direction: Direction) -> _Ends:
    """Return where in a lattice (lines, positions) the pairs of a direction begin, and where they end."""
    lines, positions = direction
    early, late = slice(None, -lines or None), slice(lines, None)
    low, high = slice(None, -abs(positions) or None), slice(abs(positions), None)
    return ((early, low), (late, high)) if positions >= 0 else ((early, high), (late, low))


def by_lines(values: Array, shape: tuple[int, int, int]) -> Array:
    """Return a view by lines and positions, (K, n · lines, positions), of values by blocks."""
    blocks, lines, positions = shape
    return values.reshape(len(values), blocks * lines, positions)


class Factorised(Protocol):
    """Factorised matrices H_k of several outputs k."""

    def solve(self, right: Array) -> Array:
        """Return H_k^{-1} r_k for all outputs, float64 of shape (K, n, m)."""
        ...

    def inverse_sum(self) -> Array:
        """Return the upper triangle of Σ_k H_k^{-1}, float64 of shape (n m, n m)."""
        ...


class NormalMatrix(Protocol):
    """Symmetric positive definite matrices of several outputs, in whatever pattern their rows leave."""

    @property
    def main(self) -> Array:
        """Diagonals, float64 of shape (K, n, m): n blocks of size m; may be added to in place."""
        ...

    def times(self, vectors: Array) -> Array:
        """Return H v for all outputs, float64 of shape (K, n, m)."""
        ...

    def factorised(self) -> Factorised:
        """Return the factorised matrices.

        Raises
        ------
        numpy.linalg.LinAlgError
            If one stays indefinite up to the largest shift.
        """
        ...


class LatticeMatrix(NamedTuple):
    """Symmetric block-tridiagonal matrices of several outputs, whose entries off the diagonal couple pairs.

    Parameters
    ----------
    main
        Diagonals, float64 of shape (K, n, lines · positions); may be added to in place.
    shape
        Blocks n, lines in a block, positions in a line.
    couplings
        Entries by direction, float64 of shape (K, ...), the rest that of the points where its pairs begin. No
        direction reaches over more lines than a block has.
    """

    main: Array
    shape: tuple[int, int, int]
    couplings: dict[Direction, Array]

    def times(self, vectors: Array) -> Array:
        """Return H v for all outputs, float64 of shape (K, n, m)."""
        total = self.main * vectors
        into, of = by_lines(total, self.shape), by_lines(np.ascontiguousarray(vectors), self.shape)
        for direction, coupling in self.couplings.items():
            first, second = ends(direction)
            into[:, *first] += coupling * of[:, *second]
            into[:, *second] += coupling * of[:, *first]
        return total

    def scaled(self, scale: Array) -> "_TridiagonalBlocks | _DenseBlocks":
        """Return S H S for S = diag(H)^{-1/2}, given as (K, n, m); its diagonal is taken to be one."""
        of, entries = by_lines(scale, self.shape), {}
        for direction, coupling in self.couplings.items():
            first, second = (of[:, *end] for end in ends(direction))
            # The order of the factors decides bits of the seed.
            entries[direction] = coupling * first * second if direction[0] else coupling * second * first
        if self.shape[1] == 1 and all(abs(positions) <= 1 for _, positions in entries):
            diagonals = entries.get((1, 1)), entries.get((1, -1))
            return _TridiagonalBlocks(entries[0, 1], entries[1, 0], *diagonals)
        return _DenseBlocks.of(entries, self.shape)

    def factorised(self) -> "BlockTridiagonal":
        """Return the factorised matrices; see :class:`NormalMatrix`."""
        return BlockTridiagonal(self)


class _TridiagonalBlocks(NamedTuple):
    """Matrices of several outputs with a unit diagonal, all of whose blocks are tridiagonal.

    Parameters
    ----------
    within
        Entries of neighbours inside a block, float64 of shape (K, n, m - 1).
    straight, rising, falling
        Of the matrices E_i between block i (rows) and block i + 1 (columns): E[a, a] of shape (K, n - 1, m),
        E[a, a + 1] and E[a + 1, a] of shape (K, n - 1, m - 1); None where they are zero.
    """

    within: Array
    straight: Array
    rising: Array | None
    falling: Array | None

    def off_diagonal(self, block: int) -> Array:
        """Return one block for all outputs without its diagonal, shape (K, m, m)."""
        size = self.straight.shape[-1]
        dense = np.zeros((len(self.within), size, size))
        above, below = np.arange(size - 1), np.arange(1, size)
        dense[:, below, above] = dense[:, above, below] = self.within[:, block]
        return dense

    def times(self, block: int, vectors: Array) -> Array:
        """Return E v of one block for all outputs, shape (K, m)."""
        product: Array = self.straight[:, block] * vectors
        if self.rising is not None and self.falling is not None:
            product[:, :-1] += self.rising[:, block] * vectors[:, 1:]
            product[:, 1:] += self.falling[:, block] * vectors[:, :-1]
        return product

    def transposed_times(self, block: int, vectors: Array) -> Array:
        """Return Eᵀ v of one block for all outputs, shape (K, m)."""
        return self._replace(rising=self.falling, falling=self.rising).times(block, vectors)

    def after(self, block: int, matrices: Array, outputs: slice = slice(None)) -> Array:
        """Return M E of one block for matrices M of some outputs, shape (K, m, m)."""
        product: Array = matrices * self.straight[outputs, block, None, :]
        if self.rising is not None and self.falling is not None:
            product[:, :, 1:] += matrices[:, :, :-1] * self.rising[outputs, block, None, :]
            product[:, :, :-1] += matrices[:, :, 1:] * self.falling[outputs, block, None, :]
        return product


class _DenseBlocks(NamedTuple):
    """The same with any blocks.

    Parameters
    ----------
    within
        Blocks without their diagonals, float64 of shape (K, n, m, m).
    between
        Matrices E_i, shape (K, n - 1, m, m).
    """

    within: Array
    between: Array

    @staticmethod
    def of(entries: dict[Direction, Array], shape: tuple[int, int, int]) -> "_DenseBlocks":
        """Return the blocks with these entries by direction."""
        blocks, lines, positions = shape
        outputs, size = len(next(iter(entries.values()))), lines * positions
        within = np.zeros((outputs, blocks, lines, positions, lines, positions))
        between = np.zeros((outputs, blocks - 1, lines, positions, lines, positions))
        for direction, values in entries.items():
            low, high = (np.arange(positions)[end[1]] for end in ends(direction))
            for line in range(lines):
                blocks_on, other = divmod(line + direction[0], lines)
                here = values[:, line::lines]
                target = (between if blocks_on else within)[:, : here.shape[1]]
                # An array of shape (positions, K, blocks): the indices that are arrays come first.
                target[:, :, line, low, other, high] = here
                if not blocks_on:
                    target[:, :, other, high, line, low] = here
        shapes = (outputs, blocks, size, size), (outputs, blocks - 1, size, size)
        return _DenseBlocks(within.reshape(shapes[0]), between.reshape(shapes[1]))

    def off_diagonal(self, block: int) -> Array:
        """Return one block for all outputs without its diagonal, shape (K, m, m)."""
        return self.within[:, block].copy()

    def times(self, block: int, vectors: Array) -> Array:
        """Return E v of one block for all outputs, shape (K, m)."""
        return np.asarray((self.between[:, block] @ vectors[..., None])[..., 0])

    def transposed_times(self, block: int, vectors: Array) -> Array:
        """Return Eᵀ v of one block for all outputs, shape (K, m)."""
        return np.asarray((vectors[:, None, :] @ self.between[:, block])[:, 0])

    def after(self, block: int, matrices: Array, outputs: slice = slice(None)) -> Array:
        """Return M E of one block for matrices M of some outputs, shape (K, m, m)."""
        return np.asarray(matrices @ self.between[outputs, block])


def first_that_factorises(factorise: Callable[[float], T]) -> tuple[T, float]:
    """Return what comes of the least shift of a unit diagonal with which factorising succeeds, and the shift.

    Raises
    ------
    numpy.linalg.LinAlgError
        If none does, up to the largest.
    """
    shift = 0.0
    while True:
        try:
            return factorise(shift), shift
        except np.linalg.LinAlgError:
            shift = max(FIRST_SHIFT, 10 * shift)
            if not shift <= LARGEST_SHIFT:
                raise


class BlockTridiagonal:
    """Factorised matrices H_k of several outputs k.

    Parameters
    ----------
    matrix
        The matrices, with positive diagonals.

    Raises
    ------
    numpy.linalg.LinAlgError
        If a matrix stays indefinite up to the largest shift of its scaled diagonal.
    """

    def __init__(self, matrix: LatticeMatrix) -> None:
        self.outputs, self.blocks, self.size = matrix.main.shape
        # Scaled to a unit diagonal: the entries of an interior-point iteration span twenty decades.
        self._scale = 1 / np.sqrt(matrix.main)
        self._unit = matrix.scaled(self._scale)
        self._inverse, self.shift = first_that_factorises(self._factorise)

    def _factorise(self, shift: float) -> Array:
        """Block Cholesky: S_i = D_i − E_{i-1}ᵀ S_{i-1}^{-1} E_{i-1}, S_i = L_i L_iᵀ; S_i^{-1} is kept.

        The Schur complement is formed from L^{-1} E, not from an inverse: near the end of the iteration the
        difference to rounding errors of an explicit inverse is what decides convergence.
        """
        m = self.size
        shape = (self.blocks, self.outputs, m, m)
        inverse = np.empty(shape)
        lower_inverse = np.empty(shape[1:])
        diagonal = np.arange(m)
        for i in range(self.blocks):
            block = self._unit.off_diagonal(i)
            block[:, diagonal, diagonal] = 1.0 + shift
            if i:
                coupled = self._unit.after(i - 1, lower_inverse)
                block -= coupled.transpose(0, 2, 1) @ coupled
            lower_inverse = np.linalg.inv(np.linalg.cholesky(block))
            np.matmul(lower_inverse.transpose(0, 2, 1), lower_inverse, out=inverse[i])
        return inverse

    def solve(self, right: Array) -> Array:
        """Return H_k^{-1} r_k for all outputs, float64 of shape (K, n, m)."""
        unit = self._unit
        forward = right * self._scale
        for i in range(1, self.blocks):
            forward[:, i] -= unit.transposed_times(i - 1, self._apply(i - 1, forward[:, i - 1]))
        solution = np.empty_like(forward)
        solution[:, -1] = self._apply(self.blocks - 1, forward[:, -1])
        for i in range(self.blocks - 2, -1, -1):
            solution[:, i] = self._apply(i, forward[:, i] - unit.times(i, solution[:, i + 1]))
        solution *= self._scale
        return solution

    def _apply(self, block: int, vectors: Array) -> Array:
        return np.asarray((self._inverse[block] @ vectors[..., None])[..., 0])

    def inverse_sum(self) -> Array:
        """Return the upper triangle of Σ_k H_k^{-1}, by blocks, float64 of shape (n m, n m).

        With G = H^{-1} and T_i = −S_i^{-1} E_i, rows come from the last block to the first:
        G_{i,j} = T_i G_{i+1,j} for j > i, and G_{i,i} = S_i^{-1} + G_{i,i+1} T_iᵀ. Inverses are added up as
        they come; never more than a few outputs' rows are held.
        """
        m, end = self.size, self.blocks * self.size
        total = np.zeros((end, end))
        chunks = -(-self.outputs // _CHUNK)
        cuts = [self.outputs * c // chunks for c in range(chunks + 1)]
        flat = (min(_CHUNK, self.outputs), m * end)
        # Two buffers in turn: fresh memory for every row of blocks would cost as much as the product.
        buffers = np.empty(flat), np.empty(flat)
        for start, stop in itertools.pairwise(cuts):
            chunk = slice(start, stop)
            # Scaled back at once, block by block, so that what is added up is H^{-1} itself.
            scale = self._scale[chunk]
            outputs = len(scale)
            rows = self._inverse[-1, chunk] * scale[:, -1, :, None] * scale[:, -1, None, :]
            total[-m:, -m:] += rows.sum(axis=0)
            for i in range(self.blocks - 2, -1, -1):
                step = self._unit.after(i, self._inverse[i, chunk], chunk)
                step *= scale[:, i, :, None]
                step /= -scale[:, i + 1, None, :]
                width = end - i * m
                longer = buffers[i % 2].reshape(-1)[: outputs * m * width].reshape(outputs, m, width)
                np.matmul(step, rows, out=longer[:, :, m:])
                corner = longer[:, :, m : 2 * m] @ step.transpose(0, 2, 1)
                here = self._inverse[i, chunk] * scale[:, i, :, None]
                np.add(here * scale[:, i, None, :], corner, out=longer[:, :, :m])
                rows = longer
                total[i * m : (i + 1) * m, i * m :] += rows.sum(axis=0)
        return total
