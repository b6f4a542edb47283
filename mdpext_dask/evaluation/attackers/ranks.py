"""Where the true record stands in the list of all, likeliest first, that whoever sees a report makes.

The rank of x after y is 1 + the number of records with π(x') M(y|x') above π(x) M(y|x); of records that are
equally likely (the same float64), each has the mean of the places that they take. Its expectation is how many
places are looked at before the right one: J. L. Massey, "Guessing and entropy" (ISIT 1994).
"""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.evaluation.attackers.requests import TRUTH
from mdpext_dask.evaluation.attackers.tallies import Tally, columns_of
from mdpext_dask.evaluation.quantiles import weighted_quantiles
from mdpext_dask.evaluation.spread import SHARES
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
# Ranks of so many records times outputs are found by sorting; a task sorts so many of them, 16 MB.
MOST_SORTED, _SORTED_AT_ONCE = 2**24, 2**21


def output_groups(records: int, outputs: int) -> list[tuple[int, int]]:
    """Return half-open ranges of outputs, each as large as a task can sort."""
    size = max(min(_SORTED_AT_ONCE // max(records, 1), outputs), 1)
    return [(first, min(first + size, outputs)) for first in range(0, outputs, size)]


def rank_outputs(url: str, first: int, last: int, records: int) -> Array:
    """Return how likely each rank is after some outputs.

    Parameters
    ----------
    url
        The store; all of it is read.
    first, last
        Half-open range of outputs.
    records
        How many records have π > 0.

    Returns
    -------
    Σ π M by twice the rank, float64 of shape (2 · records + 1,).

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    joint = np.empty((last - first, records))
    at = 0
    for block in store.plan:
        for column in columns_of(store, block, 1):
            prior = column.beliefs[TRUTH]
            joint[:, at : at + len(prior)] = (prior[:, None] * column.rows[:, first:last]).T
            at += len(prior)
    found = np.zeros(2 * records + 1)
    for values in joint:
        found += rank_masses(values)
    return found


def rank_masses(joint: Array) -> Array:
    """Return Σ π M by twice the rank for one output, from π M of all records, float64 of shape (N,)."""
    values, counts = np.unique(joint, return_counts=True)
    # Ascending: above a value are all of a higher one.
    above = len(joint) - np.cumsum(counts)
    masses = np.bincount(2 * above + counts + 1, values * counts, 2 * len(joint) + 1)
    return np.asarray(masses, dtype=np.float64)


def sorted_ranks(masses: Array) -> dict[str, object]:
    """Return what is said of ranks, from Σ π M by twice the rank."""
    held = np.flatnonzero(masses)
    ranks, weights = held / 2, masses[held]
    return {
        "rank_quantiles": weighted_quantiles(ranks, weights, SHARES),
        "rank_quantiles_resolution": 0.0,
        "rank_mean": float((ranks * weights).sum() / weights.sum()),
        "rank_mean_resolution": 0.0,
    }


def counted_ranks(tally: Tally) -> dict[str, object]:
    """Return what is said of ranks, from counts by classes of π M: none is too small.

    Of a record, all that is known is its class: all records of higher classes are before it, and those of the
    same class may be.
    """
    upwards = np.cumsum(tally.counts[:, ::-1], axis=1)[:, ::-1]
    held = np.nonzero(tally.masses)
    most, weights = upwards[held], tally.masses[held]
    least = most - tally.counts[held] + 1
    upper, lower = (weighted_quantiles(ranks, weights, SHARES) for ranks in (most, least))
    total = float(weights.sum())
    return {
        "rank_quantiles": upper,
        "rank_quantiles_resolution": max(upper[share] - lower[share] for share in SHARES),
        "rank_mean": float((most * weights).sum() / total),
        "rank_mean_resolution": float(((most - least) * weights).sum() / total),
    }
