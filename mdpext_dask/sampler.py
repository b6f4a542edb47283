"""Exact sampling from stored rows.

A stored float32 probability of at least 2^-36 is an integer multiple of 2^-60, so a row *is* a list of
integer weights. A uniform integer below their total, drawn by rejection from the operating system's
cryptographic generator, picks an output with exactly the certified probability: no floating-point sum,
no seed, no approximation.
"""

import os

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.sections import LARGEST_TOTAL, SMALLEST_PROBABILITY

_WEIGHT_UNIT = 2.0**60
_DRAW_BYTES = 8


def integer_weights(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return the rows times 2^60, exactly, as uint64 of the same shape.

    Raises
    ------
    GuaranteeViolation
        If an entry or a row's total is not one that the certificate could have passed.
    """
    wide = rows.astype(np.float64)
    # Written so that not-a-number fails.
    if not (rows.min() >= SMALLEST_PROBABILITY and wide.sum(axis=-1).max() <= LARGEST_TOTAL):
        raise GuaranteeViolation(
            "a stored row is damaged (an entry is not a number or below 2^-36, or the total is above 2); "
            "run the audit"
        )
    return (wide * _WEIGHT_UNIT).astype(np.uint64)


def sample_outputs(rows: NDArray[np.float32]) -> NDArray[np.intp]:
    """Draw one output for every row, independently.

    Parameters
    ----------
    rows
        Stored rows, float32 of shape (n, K).

    Returns
    -------
    Output numbers, shape (n,).

    Raises
    ------
    GuaranteeViolation
        If a row is damaged.
    """
    cumulative = np.cumsum(integer_weights(rows), axis=1, dtype=np.uint64)
    below = uniform_below(cumulative[:, -1])
    # The output is the first whose cumulative weight exceeds the draw.
    return np.asarray((cumulative <= below[:, None]).sum(axis=1), dtype=np.intp)


def sample_row(row: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Draw `n` outputs, independently, from one stored row of shape (K,); otherwise as sample_outputs."""
    cumulative = np.cumsum(integer_weights(row[None])[0], dtype=np.uint64)
    below = uniform_below(np.full(n, cumulative[-1]))
    return np.searchsorted(cumulative, below, side="right")


def uniform_below(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return uniform integers in [0, limit) for every limit ≥ 1, exactly, by rejection."""
    # Draws from the top, incomplete copy of [0, limit) are rejected: 2^64 mod limit of them.
    incomplete = (np.uint64(0) - limits) % limits
    accepted = np.zeros(limits.shape, dtype=np.uint64)
    pending = np.arange(len(limits))
    while len(pending):
        draws = np.frombuffer(os.urandom(_DRAW_BYTES * len(pending)), dtype=np.uint64)
        good = draws >= incomplete[pending]
        accepted[pending[good]] = draws[good] % limits[pending[good]]
        pending = pending[~good]
    return accepted
