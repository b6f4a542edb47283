"""Many symmetric positive definite block-tridiagonal systems at once.

Seeds on one line of the grid form a block of size m; the lines follow each other. Within a block the matrix
is tridiagonal, and neighbouring blocks are coupled by a diagonal matrix: the pattern that the edges of a grid
leave in the normal equations of one output. All outputs are handled together, block by block, so that every
step is one batched call of LAPACK or BLAS.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Maps a function over a few arguments, perhaps on threads; results in order.
Mapper = Callable[[Callable[[Sequence[int]], Array], Iterable[Sequence[int]]], Iterable[Array]]

# Outputs whose rows of the inverse are worked on together: small enough for the processor's cache.
_CHUNK = 8
# The sum over outputs is made in this many parts, always the same, so that threads do not decide bits.
_PARTS = 4
# Relative to the unit diagonal of the scaled matrices: what is added when a factorisation fails.
FIRST_SHIFT, LARGEST_SHIFT = 1e-14, 1e-6


class BlockTridiagonal:
    """Factorised matrices H_k of all outputs k.

    Parameters
    ----------
    main
        Diagonals, float64 of shape (K, n, m), positive: n blocks of size m.
    within
        Couplings of neighbours inside a block, shape (K, n, m - 1).
    between
        Couplings of the same position in neighbouring blocks, shape (K, n - 1, m).

    Raises
    ------
    numpy.linalg.LinAlgError
        If a matrix stays indefinite up to the largest shift of its scaled diagonal.
    """

    def __init__(
        self,
        main: Array,
        within: Array,
        between: Array,
    ) -> None:
        self.outputs, self.blocks, self.size = main.shape
        # Scaled to a unit diagonal: the entries of an interior-point iteration span twenty decades.
        self._scale = 1 / np.sqrt(main)
        self._within = within * self._scale[:, :, 1:] * self._scale[:, :, :-1]
        self._between = between * self._scale[:, 1:] * self._scale[:, :-1]
        self.shift = 0.0
        while True:
            try:
                self._factorise()
            except np.linalg.LinAlgError:
                self.shift = max(FIRST_SHIFT, 10 * self.shift)
                if not self.shift <= LARGEST_SHIFT:
                    raise
            else:
                break

    def _factorise(self) -> None:
        """Block Cholesky: S_i = D_i − E_i S_{i-1}^{-1} E_i, S_i = L_i L_iᵀ; L_i^{-1} and S_i^{-1} are kept.

        The Schur complement is formed from L^{-1} E, not from an inverse: near the end of the iteration the
        difference to rounding errors of an explicit inverse is what decides convergence.
        """
        m = self.size
        shape = (self.blocks, self.outputs, m, m)
        self._inverse = np.empty(shape)
        lower_inverse = np.empty(shape[1:])
        diagonal, above, below = np.arange(m), np.arange(m - 1), np.arange(1, m)
        for i in range(self.blocks):
            block = np.zeros(shape[1:])
            block[:, diagonal, diagonal] = 1.0 + self.shift
            block[:, below, above] = block[:, above, below] = self._within[:, i]
            if i:
                coupled = lower_inverse * self._between[:, i - 1][:, None, :]
                block -= coupled.transpose(0, 2, 1) @ coupled
            lower_inverse = np.linalg.inv(np.linalg.cholesky(block))
            self._inverse[i] = lower_inverse.transpose(0, 2, 1) @ lower_inverse

    def solve(self, right: Array) -> Array:
        """Return H_k^{-1} r_k for all outputs, float64 of shape (K, n, m)."""
        forward = right * self._scale
        for i in range(1, self.blocks):
            forward[:, i] -= self._between[:, i - 1] * self._apply(i - 1, forward[:, i - 1])
        solution = np.empty_like(forward)
        solution[:, -1] = self._apply(self.blocks - 1, forward[:, -1])
        for i in range(self.blocks - 2, -1, -1):
            solution[:, i] = self._apply(i, forward[:, i] - self._between[:, i] * solution[:, i + 1])
        solution *= self._scale
        return solution

    def _apply(self, block: int, vectors: Array) -> Array:
        return np.asarray((self._inverse[block] @ vectors[..., None])[..., 0])

    def inverse_sum(self, mapper: Mapper = map) -> Array:
        """Return Σ_k H_k^{-1}, dense, float64 of shape (n m, n m).

        With G = H^{-1} and T_i = −S_i^{-1} E_i, rows come from the last block to the first:
        G_{i,j} = T_i G_{i+1,j} for j > i, and G_{i,i} = S_i^{-1} + G_{i,i+1} T_iᵀ. Inverses are added up as
        they come; never more than a few outputs' rows are held.
        """
        starts = range(0, self.outputs, _CHUNK)
        parts = [starts[part::_PARTS] for part in range(_PARTS)]
        total = sum(mapper(self._partial_sum, [part for part in parts if len(part)]))
        upper = np.triu(np.asarray(total))
        return np.asarray(upper + np.triu(upper, 1).T)

    def _partial_sum(self, starts: Sequence[int]) -> Array:
        m, end = self.size, self.blocks * self.size
        total = np.zeros((end, end))
        for start in starts:
            chunk = slice(start, min(start + _CHUNK, self.outputs))
            # Scaled back at once, block by block, so that what is added up is H^{-1} itself.
            scale = self._scale[chunk]
            rows = self._inverse[-1, chunk] * scale[:, -1, :, None] * scale[:, -1, None, :]
            total[-m:, -m:] += rows.sum(axis=0)
            for i in range(self.blocks - 2, -1, -1):
                here = self._inverse[i, chunk] * scale[:, i, :, None]
                step = here * -(self._between[chunk, i] / scale[:, i + 1])[:, None, :]
                longer = np.empty((len(scale), m, end - i * m))
                np.matmul(step, rows, out=longer[:, :, m:])
                corner = longer[:, :, m : 2 * m] @ step.transpose(0, 2, 1)
                np.add(here * scale[:, i, None, :], corner, out=longer[:, :, :m])
                rows = longer
                total[i * m : (i + 1) * m, i * m :] += rows.sum(axis=0)
        return total
