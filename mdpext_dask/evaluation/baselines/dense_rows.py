"""Rows between any two records, as the structured interior-point method takes them.

All records form one block, and the normal matrix of an output is a dense one, whatever rows that output has:
for a thousand records or so that costs less than finding an order of them in which it would be sparse.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from mdpext_dask.seed.block_tridiagonal import FIRST_SHIFT, LARGEST_SHIFT
from mdpext_dask.seed.grid_rows import Groups

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# Half of the terms that a reduced cost may have by what is allowed for its rounding.
_TERMS = 64


@dataclass(frozen=True)
class Triples:
    """Some rows z_ik ≤ exp(b_ij) z_jk.

    Parameters
    ----------
    output, risen, fallen
        k, i and j, integers of shape (R,).
    """

    output: Indices
    risen: Indices
    fallen: Indices

    @classmethod
    def of_pairs(cls, first: Indices, second: Indices, outputs: int) -> "Triples":
        """Return the rows of pairs, both ways, for all outputs."""
        risen, fallen = np.concatenate([first, second]), np.concatenate([second, first])
        return cls(
            np.repeat(np.arange(outputs), len(risen)), np.tile(risen, outputs), np.tile(fallen, outputs)
        )

    def __len__(self) -> int:
        return len(self.output)

    def joined(self, other: "Triples") -> "Triples":
        """Return what is in either, ordered by output, and once."""
        mine, others = (np.stack([t.output, t.risen, t.fallen], axis=1, dtype=np.intp) for t in (self, other))
        return Triples(*np.unique(np.concatenate([mine, others]), axis=0).T)

    def kept(self, which: NDArray[np.bool_]) -> "Triples":
        """Return some of them."""
        return Triples(self.output[which], self.risen[which], self.fallen[which])


@dataclass(frozen=True)
class PairRows:
    """Rows g z_jk − z_ik ≥ 0 as the interior-point method takes them: one block, of all records.

    Parameters
    ----------
    shape
        (K, 1, N) of the columns.
    triples
        The rows, ordered by output.
    growth
        g, float64 of shape (R,).
    """

    shape: tuple[int, int, int]
    triples: Triples
    growth: Array

    @property
    def limits(self) -> Groups:
        """Zero for every row."""
        return (np.zeros(()),)

    def part(self, outputs: slice) -> "PairRows":
        """Return the rows of a range of outputs."""
        first, last, _ = outputs.indices(self.shape[0])
        rows = slice(*np.searchsorted(self.triples.output, [first, last]))
        triples = self.triples
        return PairRows(
            shape=(last - first, *self.shape[1:]),
            triples=Triples(triples.output[rows] - first, triples.risen[rows], triples.fallen[rows]),
            growth=self.growth[rows],
        )

    @cached_property
    def _risen(self) -> Indices:
        return np.asarray(self.triples.output * self.shape[2] + self.triples.risen)

    @cached_property
    def _fallen(self) -> Indices:
        return np.asarray(self.triples.output * self.shape[2] + self.triples.fallen)

    @cached_property
    def _entry(self) -> Indices:
        """Place of each row's product of two columns in the lower triangles of all matrices."""
        n, t = self.shape[2], self.triples
        return np.asarray((t.output * n + np.maximum(t.risen, t.fallen)) * n + np.minimum(t.risen, t.fallen))

    def forward(self, z: Array) -> Groups:
        """Return g z_jk − z_ik, of shape (R,)."""
        flat = z.ravel()
        return (self.growth * flat[self._fallen] - flat[self._risen],)

    def transposed(self, v: Groups) -> Array:
        """Return Aᵀ v."""
        return self._collected(self.growth * v[0], -v[0])

    def magnitude(self, v: Groups) -> Array:
        """Return |A|ᵀ v, as many times as sums have more terms than bounds allow rounding for.

        A sum of n numbers is off by less than n units of the sum of their absolute values; see
        :func:`mdpext_dask.seed.model.dual_bound_of` for what is allowed.
        """
        return self._collected(self.growth * v[0], v[0]) * max(self._most_rows / _TERMS, 1.0)

    @cached_property
    def _most_rows(self) -> int:
        """How many rows an entry is in, at most."""
        entries = np.concatenate([self._risen, self._fallen])
        return int(np.bincount(entries).max(initial=0))

    def _collected(self, at_fallen: Array, at_risen: Array) -> Array:
        size = int(np.prod(self.shape))
        # Of no rows at all, NumPy counts in whole numbers.
        total = np.bincount(self._fallen, at_fallen, size).astype(np.float64)
        total += np.bincount(self._risen, at_risen, size)
        return np.asarray(total.reshape(self.shape))

    def normal(self, theta: Groups) -> "DenseMatrices":
        """Return Σ_r θ_r (g e_j − e_i)(g e_j − e_i)ᵀ."""
        outputs, _, n = self.shape
        product = self.growth * theta[0]
        lower: Array = np.asarray(np.bincount(self._entry, -product, outputs * n * n), dtype=np.float64)
        main = self._collected(self.growth * product, theta[0])
        return DenseMatrices(main, lower.reshape(outputs, n, n))


@dataclass(frozen=True)
class DenseMatrices:
    """Normal matrices of some outputs.

    Parameters
    ----------
    main
        Diagonals, float64 of shape (K, 1, N).
    lower
        What is below them, float64 of shape (K, N, N).
    """

    main: Array
    lower: Array

    def times(self, vectors: Array) -> Array:
        """Return H v for all outputs."""
        product = np.empty_like(vectors)
        for k, lower in enumerate(self.lower):
            v = vectors[k, 0]
            product[k, 0] = lower @ v + v @ lower
        product += self.main * vectors
        return product

    def factorised(self) -> "DenseFactors":
        """Return the factorised matrices.

        Raises
        ------
        numpy.linalg.LinAlgError
            If one is not positive definite even when shifted.
        """
        return DenseFactors(self)


class DenseFactors:
    """Cholesky factors of the matrices, scaled to a unit diagonal.

    Parameters
    ----------
    matrices
        The matrices.

    Raises
    ------
    numpy.linalg.LinAlgError
        If one stays indefinite up to the largest shift of its diagonal.
    """

    def __init__(self, matrices: DenseMatrices) -> None:
        self._scale = 1 / np.sqrt(matrices.main[:, 0])
        self._factor = [
            _cholesky(lower * scale[:, None] * scale)
            for lower, scale in zip(matrices.lower, self._scale, strict=True)
        ]

    def solve(self, right: Array) -> Array:
        """Return H_k^{-1} r_k for all outputs, float64 of shape (K, 1, N)."""
        solution = np.empty(right.shape)
        for k, (factor, scale) in enumerate(zip(self._factor, self._scale, strict=True)):
            solution[k, 0] = scale * lapack.dpotrs(factor, scale * right[k, 0], lower=1)[0]
        return solution

    def inverse_sum(self) -> Array:
        """Return the upper triangle of Σ_k H_k^{-1}, float64 of shape (N, N)."""
        size = self._scale.shape[1]
        total = np.zeros((size, size))
        for factor, scale in zip(self._factor, self._scale, strict=True):
            inverse = lapack.dpotri(factor, lower=1)[0].T
            inverse *= scale
            inverse *= scale[:, None]
            total += inverse
        return total


def _cholesky(lower: Array) -> Array:
    """Return the factor of a matrix with unit diagonal, given what is below it."""
    shift = 0.0
    while True:
        np.fill_diagonal(lower, 1.0 + shift)
        factor, info = lapack.dpotrf(lower, lower=1, clean=1)
        if not info:
            return np.asarray(factor)
        shift = max(FIRST_SHIFT, 10 * shift)
        if shift > LARGEST_SHIFT:
            raise np.linalg.LinAlgError("not positive definite")
