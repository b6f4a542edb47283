"""Telling triples that break a promise from those that keep it: in float64 if that is sure, else exactly."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.exact import Undecided, probability_ratio
from mdpext_dask.auditors.pairs.tiles import LENGTH_ERROR
from mdpext_dask.auditors.promise import Promise

# Two rows, float of shape (K,), and two places as the promise measures them, float64 of shape (2, 2).
Pair = tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.float64]]


@dataclass(frozen=True)
class Verdicts:
    """What some triples do.

    Parameters
    ----------
    violates
        Which break the promise, tolerance included, bool of shape (n,).
    hidden
        Which would break it without the tolerance only, bool of shape (n,).
    recomputed
        How many float64 could not decide.
    undecided
        How many of those nothing could decide; they are in neither array.
    """

    violates: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    recomputed: int
    undecided: int


def may_break(
    differences: NDArray[np.float64], apart_km: NDArray[np.float64], error: float, promise: Promise
) -> NDArray[np.bool_]:
    """Return which triples are not sure to keep the promise without any tolerance.

    Parameters
    ----------
    differences
        |ℓ(y|x) − ℓ(y|x')|, float64.
    apart_km
        Distance in the plane as :meth:`mdpext_dask.auditors.promise.Promise.apart_km` gives it, of a shape
        that broadcasts.
    error
        What the differences may be off by.
    promise
        What is audited.
    """
    return np.asarray(differences + error > promise.kept_per_km * apart_km * (1 - LENGTH_ERROR))


def judge(
    differences: NDArray[np.float64],
    apart_km: NDArray[np.float64],
    error: float,
    promise: Promise,
    pair_of: Callable[[int], Pair],
    outputs: NDArray[np.intp],
) -> Verdicts:
    """Decide triples one by one.

    Parameters
    ----------
    differences, apart_km, error, promise
        As for :func:`may_break`, arrays of shape (n,).
    pair_of
        Rows and places of the triple at a position.
    outputs
        y of each, shape (n,).
    """
    tolerance = promise.tolerance
    broken = promise.broken_per_km * promise.furthest_km(apart_km)
    kept = promise.kept_per_km * apart_km * (1 - LENGTH_ERROR)
    breaks = differences - error > broken
    violates = differences - error > broken + tolerance
    hidden = breaks & (differences + error <= kept + tolerance)
    unsure = np.flatnonzero((differences + error > kept) & ~violates & ~hidden)
    undecided = 0
    for position in unsure.tolist():
        pair, output = pair_of(position), int(outputs[position])
        try:
            violates[position] = _is_broken(pair, output, promise, tolerant=True)
            if tolerance and not violates[position]:
                hidden[position] = _is_broken(pair, output, promise, tolerant=False)
        except Undecided:
            undecided += 1
    return Verdicts(violates, hidden, len(unsure), undecided)


def _is_broken(pair: Pair, output: int, promise: Promise, *, tolerant: bool) -> bool:
    first, second, places = pair
    if not first[output] or not second[output]:
        # Impossible from one of them only; from both, it never happens.
        return bool(first[output] != second[output])
    return promise.is_broken(probability_ratio(first, second, output), places, tolerant=tolerant)
