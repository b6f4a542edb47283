"""Many small symmetric positive definite systems at once.

A matrix is a dictionary from (i, j), i ≥ j, to an array with that entry of every system: entries outside
the band are not there. Loops run over entries, arrays over systems, so everything is elementwise in a fixed
order: the same bits on every machine, and for systems of a few unknowns faster than a call of LAPACK for
each.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = dict[tuple[int, int], NDArray[np.float64]]
# A pivot is at least this share of the diagonal entry it comes from: what rounding may have eaten up.
_LEAST_PIVOT = 1e-14


def factorised(matrix: Matrix, size: int, band: int) -> Matrix:
    """Return L with L Lᵀ = matrix; on the diagonal, the reciprocals of its entries.

    Parameters
    ----------
    matrix
        The lower triangle.
    size
        Unknowns n.
    band
        Entries with i − j > band are zero.
    """
    factor: Matrix = {}
    for j in range(size):
        pivot = matrix[j, j].copy()
        for k in range(max(0, j - band), j):
            pivot -= factor[j, k] ** 2
        np.maximum(pivot, _LEAST_PIVOT * matrix[j, j], out=pivot)
        factor[j, j] = 1 / np.sqrt(pivot)
        for i in range(j + 1, min(size, j + band + 1)):
            entry = matrix[i, j].copy() if (i, j) in matrix else np.zeros_like(pivot)
            for k in range(max(0, i - band), j):
                entry -= factor[i, k] * factor[j, k]
            entry *= factor[j, j]
            factor[i, j] = entry
    return factor


def forward(
    factor: Matrix, band: int, right: Sequence[NDArray[np.float64]], first: int = 0
) -> list[NDArray[np.float64]]:
    """Solve L x = right for the unknowns from `first` on; `right` begins there, and is zero before."""
    x: list[NDArray[np.float64]] = []
    for i, entry in enumerate(right, start=first):
        value = entry.copy()
        for k in range(max(first, i - band), i):
            value -= factor[i, k] * x[k - first]
        value *= factor[i, i]
        x.append(value)
    return x


def solved(factor: Matrix, band: int, right: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Solve L Lᵀ x = right."""
    x = forward(factor, band, right)
    size = len(x)
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, min(size, i + band + 1)):
            x[i] -= factor[k, i] * x[k]
        x[i] *= factor[i, i]
    return x
