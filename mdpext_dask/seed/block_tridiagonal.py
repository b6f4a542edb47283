"""Many symmetric positive definite block-tridiagonal systems at once.

Seeds on one line of the grid form a block of size m; the lines follow each other. Within a block the matrix
is tridiagonal, and so is what couples neighbouring blocks: the pattern that edges (and, with the diagonals of
the coupling, cells) of a grid leave in the normal equations of one output. Several outputs are handled
together, block by block, so that every step is one batched call of LAPACK or BLAS.
"""

import itertools
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Outputs whose rows of the inverse are worked on together, at most: small enough for the processor's cache.
_CHUNK = 8
# Relative to the unit diagonal of the scaled matrices: what is added when a factorisation fails.
FIRST_SHIFT, LARGEST_SHIFT = 1e-14, 1e-6


class Couplings(Protocol):
    """Matrices E_i between the positions of block i (rows) and those of block i + 1 (columns)."""

    def times(self, block: int, vectors: Array) -> Array:
        """Return E v of one block for all outputs, shape (K, m)."""
        ...

    def transposed_times(self, block: int, vectors: Array) -> Array:
        """Return Eᵀ v of one block for all outputs, shape (K, m)."""
        ...

    def after(self, block: int, matrices: Array, outputs: slice = ...) -> Array:
        """Return M E of one block for matrices M of some outputs, shape (K, m, m)."""
        ...


class UnitBlocks(Protocol):
    """Block-tridiagonal matrices of several outputs with a unit diagonal."""

    @property
    def between(self) -> Couplings:
        """Couplings of neighbouring blocks."""
        ...

    def off_diagonal(self, block: int) -> Array:
        """Return one block for all outputs without its diagonal, shape (K, m, m)."""
        ...


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


class GridMatrix(NormalMatrix, Protocol):
    """Such matrices that are block-tridiagonal."""

    def scaled(self, scale: Array) -> UnitBlocks:
        """Return S H S for S = diag(H)^{-1/2}, given as (K, n, m)."""
        ...


class Coupling(NamedTuple):
    """Tridiagonal matrices E_i between positions of block i (rows) and of block i + 1 (columns).

    Parameters
    ----------
    straight
        E[a, a], float64 of shape (K, n - 1, m).
    rising, falling
        E[a, a + 1] and E[a + 1, a], shape (K, n - 1, m - 1); None where they are zero.
    """

    straight: Array
    rising: Array | None = None
    falling: Array | None = None

    def times(self, block: int, vectors: Array) -> Array:
        """Return E v of one block for all outputs, shape (K, m)."""
        product: Array = self.straight[:, block] * vectors
        if self.rising is not None and self.falling is not None:
            product[:, :-1] += self.rising[:, block] * vectors[:, 1:]
            product[:, 1:] += self.falling[:, block] * vectors[:, :-1]
        return product

    def transposed_times(self, block: int, vectors: Array) -> Array:
        """Return Eᵀ v of one block for all outputs, shape (K, m)."""
        return self._transposed().times(block, vectors)

    def after(self, block: int, matrices: Array, outputs: slice = slice(None)) -> Array:
        """Return M E of one block for matrices M of some outputs, shape (K, m, m)."""
        product: Array = matrices * self.straight[outputs, block, None, :]
        if self.rising is not None and self.falling is not None:
            product[:, :, 1:] += matrices[:, :, :-1] * self.rising[outputs, block, None, :]
            product[:, :, :-1] += matrices[:, :, 1:] * self.falling[outputs, block, None, :]
        return product

    def scaled(self, scale: Array) -> "Coupling":
        """Return S E S for diagonal matrices S, given as (K, n, m)."""
        here, there = scale[:, :-1], scale[:, 1:]
        if self.rising is None or self.falling is None:
            return Coupling(self.straight * here * there)
        return Coupling(
            self.straight * here * there,
            self.rising * here[:, :, :-1] * there[:, :, 1:],
            self.falling * here[:, :, 1:] * there[:, :, :-1],
        )

    def _transposed(self) -> "Coupling":
        return Coupling(self.straight, self.falling, self.rising)


class Stencil(NamedTuple):
    """Symmetric block-tridiagonal matrices of several outputs.

    Parameters
    ----------
    main
        Diagonals, float64 of shape (K, n, m): n blocks of size m.
    within
        Couplings of neighbours inside a block, shape (K, n, m - 1).
    between
        Couplings of neighbouring blocks.
    """

    main: Array
    within: Array
    between: Coupling

    def times(self, vectors: Array) -> Array:
        """Return H v for all outputs, float64 of shape (K, n, m)."""
        total: Array = self.main * vectors
        total[:, :, :-1] += self.within * vectors[:, :, 1:]
        total[:, :, 1:] += self.within * vectors[:, :, :-1]
        straight, rising, falling = self.between
        total[:, :-1] += straight * vectors[:, 1:]
        total[:, 1:] += straight * vectors[:, :-1]
        if rising is not None and falling is not None:
            total[:, :-1, :-1] += rising * vectors[:, 1:, 1:]
            total[:, 1:, 1:] += rising * vectors[:, :-1, :-1]
            total[:, :-1, 1:] += falling * vectors[:, 1:, :-1]
            total[:, 1:, :-1] += falling * vectors[:, :-1, 1:]
        return total

    def factorised(self) -> "BlockTridiagonal":
        """Return the factorised matrices; raises as :class:`BlockTridiagonal` does."""
        return BlockTridiagonal(self)

    def scaled(self, scale: Array) -> "Stencil":
        """Return S H S for S = diag(H)^{-1/2}, given as (K, n, m); its diagonal is taken to be one."""
        within = self.within * scale[:, :, 1:] * scale[:, :, :-1]
        return Stencil(np.ones_like(self.main), within, self.between.scaled(scale))

    def off_diagonal(self, block: int) -> Array:
        """Return one block for all outputs without its diagonal, shape (K, m, m)."""
        outputs, _, size = self.main.shape
        dense = np.zeros((outputs, size, size))
        above, below = np.arange(size - 1), np.arange(1, size)
        dense[:, below, above] = dense[:, above, below] = self.within[:, block]
        return dense


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

    def __init__(self, matrix: GridMatrix) -> None:
        self.outputs, self.blocks, self.size = matrix.main.shape
        # Scaled to a unit diagonal: the entries of an interior-point iteration span twenty decades.
        self._scale = 1 / np.sqrt(matrix.main)
        unit = matrix.scaled(self._scale)
        self._between = unit.between
        self.shift = 0.0
        while True:
            try:
                self._factorise(unit)
            except np.linalg.LinAlgError:
                self.shift = max(FIRST_SHIFT, 10 * self.shift)
                if not self.shift <= LARGEST_SHIFT:
                    raise
            else:
                break

    def _factorise(self, unit: UnitBlocks) -> None:
        """Block Cholesky: S_i = D_i − E_{i-1}ᵀ S_{i-1}^{-1} E_{i-1}, S_i = L_i L_iᵀ; S_i^{-1} is kept.

        The Schur complement is formed from L^{-1} E, not from an inverse: near the end of the iteration the
        difference to rounding errors of an explicit inverse is what decides convergence.
        """
        m = self.size
        shape = (self.blocks, self.outputs, m, m)
        self._inverse = np.empty(shape)
        lower_inverse = np.empty(shape[1:])
        diagonal = np.arange(m)
        for i in range(self.blocks):
            block = unit.off_diagonal(i)
            block[:, diagonal, diagonal] = 1.0 + self.shift
            if i:
                coupled = self._between.after(i - 1, lower_inverse)
                block -= coupled.transpose(0, 2, 1) @ coupled
            lower_inverse = np.linalg.inv(np.linalg.cholesky(block))
            np.matmul(lower_inverse.transpose(0, 2, 1), lower_inverse, out=self._inverse[i])

    def solve(self, right: Array) -> Array:
        """Return H_k^{-1} r_k for all outputs, float64 of shape (K, n, m)."""
        between = self._between
        forward = right * self._scale
        for i in range(1, self.blocks):
            forward[:, i] -= between.transposed_times(i - 1, self._apply(i - 1, forward[:, i - 1]))
        solution = np.empty_like(forward)
        solution[:, -1] = self._apply(self.blocks - 1, forward[:, -1])
        for i in range(self.blocks - 2, -1, -1):
            solution[:, i] = self._apply(i, forward[:, i] - between.times(i, solution[:, i + 1]))
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
                step = self._between.after(i, self._inverse[i, chunk], chunk)
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
