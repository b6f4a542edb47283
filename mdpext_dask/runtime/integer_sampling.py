"""Exact sampling from stored rows, with NumPy alone.

A stored float32 probability of at least 2^-36 is an integer multiple of 2^-60, so a row *is* a list of
integer weights. A uniform integer below their total, drawn by rejection from the operating system's
cryptographic generator, picks an output with exactly the certified probability: no floating-point sum,
no seed, no approximation.

:func:`cumulative_weights` prepares rows; :func:`sample_cumulative` draws from one of them, :func:`pick_rows`
from many.

**What the time of a draw tells.** The output is found by comparing the number drawn with all K cumulative
weights (or in as many steps as K has binary digits), so the count of operations depends neither on the output
nor on the row. How often a number is rejected depends on fresh random bits and on the row's total T: with the
probability 1/16 + 15/16 (1 − T / 2^60), and totals of stored rows are 2^60 to about one part in a million.
(Rejecting as little as possible, 2^64 mod T numbers, would reject 1/16 of them for one half of all rows, and
next to none for the other half.) What is not hidden: one division of 64-bit integers, whose time depends on
the operands on older processors; which memory is touched, and so what is in a cache afterwards; and whether
the chunk of a row had been read before, which depends on the place.
"""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, GuaranteeViolation
from mdpext_dask.row_limits import LARGEST_TOTAL, SMALLEST_PROBABILITY
from mdpext_dask.runtime.random_bits import Words, system_words

_WEIGHT_UNIT = 2.0**60
_LARGEST_WORD = np.uint64(2**64 - 1)
# Totals around 1 that differ by less than one part in 2^6 fit equally often into 2^64.
_SLACK_BITS = np.uint64(6)
# Most comparisons at once; bounds the memory of many draws from one row.
_COMPARED_AT_ONCE = 4_000_000


def integer_weights(
    rows: NDArray[np.float32], counts: NDArray[np.integer] | None = None
) -> NDArray[np.uint64]:
    """Return the rows times 2^60, exactly, as uint64 of the same shape.

    Parameters
    ----------
    rows
        float32 of shape (..., K) in either byte order, contiguous or not.
    counts
        How many outputs each column stands for, shape (K,); default: one.

    Raises
    ------
    DataError
        If they are not float32: nothing else has been certified.
    GuaranteeViolation
        If an entry or a row's total could not have passed the certificate.
    """
    if rows.dtype.kind != "f" or rows.dtype.itemsize != 4:
        raise DataError(f"rows: must be float32, as they were certified, got {rows.dtype}")
    wide = rows.astype(np.float64)
    if not rows.size:
        if rows.ndim and not rows.shape[-1]:
            raise DataError("rows: must have at least one output")
        return wide.astype(np.uint64)
    totals = wide.sum(axis=-1) if counts is None else wide @ counts.astype(np.float64)
    # Written so that NaN fails.
    if not (wide.min() >= SMALLEST_PROBABILITY and totals.max() <= LARGEST_TOTAL):
        raise GuaranteeViolation(
            "a stored row is damaged (an entry is not a number or below 2^-36, or the total is above 2); "
            "run the audit"
        )
    return (wide * _WEIGHT_UNIT).astype(np.uint64)


def cumulative_weights(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return the sums of the weights of the first 1, 2, ..., K outputs, uint64 of the same shape.

    Raises
    ------
    DataError, GuaranteeViolation
        As for :func:`integer_weights`.
    """
    return np.cumsum(integer_weights(rows), axis=-1, dtype=np.uint64)


def sample_cumulative(
    cumulative: NDArray[np.uint64], n: int, *, entropy_for_tests: Words | None = None
) -> NDArray[np.intp]:
    """Draw `n` outputs, independently, from the cumulative weights of one row, uint64 of shape (K,)."""
    below = uniform_below(np.full(n, cumulative[-1]), entropy_for_tests=entropy_for_tests)
    step = max(_COMPARED_AT_ONCE // len(cumulative), 1)
    if n <= step:
        return pick(cumulative, below)
    return np.concatenate([pick(cumulative, below[k : k + step]) for k in range(0, n, step)])


def pick(cumulative: NDArray[np.uint64], below: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the first output whose cumulative weight exceeds the number, by comparing with all of them.

    Parameters
    ----------
    cumulative
        Cumulative weights, uint64 of shape (n, K), or (K,) for all numbers.
    below
        Numbers below the rows' totals, uint64 of shape (n,).
    """
    return np.asarray((cumulative <= below[:, None]).sum(axis=1), dtype=np.intp)


def pick_rows(
    cumulative: NDArray[np.uint64], which: NDArray[np.intp], below: NDArray[np.uint64]
) -> NDArray[np.intp]:
    """Return what :func:`pick` does for the rows `which`, without copies, in the same steps for every output.

    Parameters
    ----------
    cumulative
        Cumulative weights of all rows, uint64 of shape (rows, K).
    which
        A row for every number, shape (n,).
    below
        Numbers below these rows' totals, uint64 of shape (n,).
    """
    outputs = cumulative.shape[1]
    flat, start = np.ascontiguousarray(cumulative).reshape(-1), which * outputs - 1
    # How many cumulative weights are known not to exceed the number; the last one, the total, always does.
    passed = np.zeros(len(which), dtype=np.intp)
    for bit in reversed(range(outputs.bit_length())):
        probe = np.minimum(passed + (1 << bit), outputs)
        passed += (flat[start + probe] <= below).astype(np.intp) << bit
    return passed


def uniform_below(
    limits: NDArray[np.uint64], *, entropy_for_tests: Words | None = None
) -> NDArray[np.uint64]:
    """Return uniform integers in [0, limit) for every limit from 1 to 2^63, exactly, by rejection."""
    words = entropy_for_tests or system_words
    ends = acceptance(limits)
    accepted = words(len(limits))
    pending = np.flatnonzero(accepted >= ends)
    while len(pending):
        draws = words(len(pending))
        accepted[pending] = draws
        pending = pending[draws >= ends[pending]]
    return np.asarray(accepted % limits, dtype=np.uint64)


def acceptance(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the multiple of each limit below which a uniform 64-bit number is accepted.

    Modulo the limit, a uniform number below any multiple of it is uniform. This multiple is
    ⌊(2^64 − 1) / (T + ⌊T / 64⌋)⌋ T: 15 T for all totals T between 0.985 · 2^60 and 1.05 · 2^60.
    """
    copies = _LARGEST_WORD // (limits + (limits >> _SLACK_BITS))
    return np.asarray(limits * copies, dtype=np.uint64)
