"""Quantiles of weighted numbers: exactly, of numbers in memory; and from tallies that tasks make and add up.

The q-quantile of numbers v with weights w is the least of them up to which the weights come to a share q of
all: min { v : Σ_{v' ≤ v} w' ≥ q Σ w' }. For q = 0 that is the least number, for q = 1 the largest, of those
with a positive weight.
"""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# Shares that quantiles are given for.
SHARES = ("0", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99", "1")
# Bins of a tally: every power of two is cut into this many, so any two tallies add up.
BINS_PER_OCTAVE = 1024
_SHIFT = 52 - int(math.log2(BINS_PER_OCTAVE))
# What is below the first is in one bin with 0; what is above the last, in one with infinity.
_LEAST, _MOST = 2.0**-20, 2.0**40
# The bits of a positive float64 ascend with it: first the exponent, then the fraction.
_BASE = int(np.float64(_LEAST).view(np.int64)) >> _SHIFT
_BINS = (int(np.float64(_MOST).view(np.int64)) >> _SHIFT) - _BASE + 2


def weighted_quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], shares: Iterable[str] = SHARES
) -> dict[str, float]:
    """Return quantiles by their definition, comparing sums of weights without any rounding.

    Parameters
    ----------
    values
        v, float64 of shape (n,).
    weights
        w > 0, float64 of shape (n,).
    shares
        q, as decimal numbers from ``"0"`` to ``"1"``.

    Returns
    -------
    By q, the quantile.
    """
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    sums = np.cumsum(weights)
    # Sums of n numbers one after the other are off by less.
    error = float(sums[-1]) * len(sums) * np.finfo(float).eps
    found = {}
    for share in shares:
        wanted = float(share) * float(sums[-1])
        first, last = (int(np.searchsorted(sums, wanted + shift)) for shift in (-error, error))
        first, last = min(first, len(sums) - 1), min(last, len(sums) - 1)
        if first < last:
            first = _first_to_reach(weights, Fraction(share), first, last)
        found[share] = float(values[first])
    return found


def _first_to_reach(weights: NDArray[np.float64], share: Fraction, first: int, last: int) -> int:
    """Return the first position, from `first` to `last`, up to which weights come to a share of all."""
    wanted = share * exact_sum(weights)
    while first < last:
        middle = (first + last) // 2
        if exact_sum(weights[: middle + 1]) >= wanted:
            last = middle
        else:
            first = middle + 1
    return first


def exact_sum(numbers: NDArray[np.float64]) -> Fraction:
    """Return a sum of finite numbers without any rounding: what is left of it, rounded, again and again."""
    parts: list[float] = []
    while True:
        rest = math.fsum(itertools.chain(numbers.tolist(), (-part for part in parts)))
        if rest == 0:
            return sum(map(Fraction, parts), Fraction(0))
        parts.append(rest)


class Tally:
    """Weights of numbers v ≥ 0 by bins, each at most 1/1024 of its lower end wide."""

    def __init__(self) -> None:
        self._weight = np.zeros(_BINS)
        self._least, self._most = math.inf, -math.inf

    def add(self, values: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        """Add finite numbers v ≥ 0 with weights, both float64 of shape (n,), n ≥ 1."""
        least, most = float(values.min()), float(values.max())
        lowest, highest = _bin_of(np.array([least, most])).tolist()
        counts = np.bincount(_bin_of(values) - lowest, weights, highest - lowest + 1)
        self._weight[lowest : highest + 1] += counts
        self._least, self._most = min(self._least, least), max(self._most, most)

    def merge(self, other: "Tally") -> None:
        """Add what another tally holds."""
        self._weight += other._weight
        self._least, self._most = min(self._least, other._least), max(self._most, other._most)

    def __getstate__(self) -> tuple[NDArray[np.int64], NDArray[np.float64], float, float]:
        """Return the bins that hold anything, which are few: small enough to be sent."""
        position = np.flatnonzero(self._weight)
        return position, self._weight[position], self._least, self._most

    def __setstate__(self, state: tuple[NDArray[np.int64], NDArray[np.float64], float, float]) -> None:
        position, weight, self._least, self._most = state
        self._weight = np.zeros(_BINS)
        self._weight[position] = weight

    def quantiles(self, shares: Iterable[str] = SHARES) -> tuple[dict[str, float], float]:
        """Return quantiles, each at most so much too large, and how much that is.

        Parameters
        ----------
        shares
            q, as decimal numbers from ``"0"`` to ``"1"``; those two come without any error.

        Returns
        -------
        quantiles
            By q, the upper end of the bin that the quantile is in.
        resolution
            The width of the widest of these bins.
        """
        sums, found, resolution = np.cumsum(self._weight), {}, 0.0
        last = int(np.flatnonzero(self._weight)[-1])
        for share in shares:
            if float(share) in (0, 1):
                found[share] = self._most if float(share) else self._least
                continue
            position = min(int(np.searchsorted(sums, float(share) * sums[-1])), last)
            lower, upper = max(_lower_end(position), self._least), min(_lower_end(position + 1), self._most)
            found[share], resolution = upper, max(resolution, upper - lower)
        return found, resolution


def _bin_of(values: NDArray[np.float64]) -> NDArray[np.int64]:
    bits = np.clip(values, 0, _MOST).view(np.int64) >> _SHIFT
    return np.asarray(np.maximum(bits - (_BASE - 1), 0))


def _lower_end(position: int) -> float:
    if position == 0:
        return 0.0
    return float(np.int64((position - 1 + _BASE) << _SHIFT).view(np.float64))
