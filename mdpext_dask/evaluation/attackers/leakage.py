"""What a report tells: vulnerability, leakage and entropy from tallies; and the rank of the true record.

G. Smith, "On the foundations of quantitative information flow" (FoSSaCS 2009); M. S. Alvim,
K. Chatzikokolakis, C. Palamidessi, G. Smith, "Measuring information leakage using generalized gain functions"
(CSF 2012); C. E. Shannon, "A mathematical theory of communication" (1948).

The rank of x after y is 1 + the number of records with π(x') M(y|x') above π(x) M(y|x); of records that are
equally likely (the same float64), each has the mean of the places that they take. Its expectation is how many
places are looked at before the right one: J. L. Massey, "Guessing and entropy" (ISIT 1994).
"""

import math

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.requests import TRUTH
from mdpext_dask.evaluation.attackers.tallies import Tally, columns_of
from mdpext_dask.evaluation.quantiles import SHARES, weighted_quantiles
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import best_remap

Array = NDArray[np.float64]
# Ranks of so many records times outputs are found by sorting; a task sorts so many of them, 16 MB.
MOST_SORTED, _SORTED_AT_ONCE = 2**24, 2**21


def leakage(tally: Tally) -> dict[str, float]:
    """Return vulnerability, leakage and entropy of a mechanism.

    Returns
    -------
    - `prior_vulnerability`: max_x π(x), the chance to guess the record in one try without a report;
    - `vulnerability`: V = Σ_y max_x π(x) M(y|x), the same with it (Bayes vulnerability);
    - `leakage_bits`: log2 of their ratio, at least 0 (min-entropy leakage);
    - `capacity_bits`: log2 Σ_y max_x M(y|x), the largest leakage under any prior (min-capacity);
    - `prior_entropy_bits`: H(X) = −Σ_x π(x) log2 π(x);
    - `conditional_entropy_bits`: H(X|Y) = H(X) − I(X; Y);
    - `mutual_information_bits`: I(X; Y) = Σ_x π(x) Σ_y M(y|x) log2 (M(y|x) / Σ_x' π(x') M(y|x')).
    """
    alone, guessed = tally.alone, math.fsum(tally.guess[0])
    reported = tally.reported[TRUTH]
    reported = reported[reported > 0]
    information = tally.joint_bits - math.fsum(reported * np.log2(reported))
    # Neither is negative; differences of sums may be, by rounding.
    information = max(information, 0.0)
    return {
        "prior_vulnerability": alone,
        "vulnerability": guessed,
        "leakage_bits": max(math.log2(guessed / alone), 0.0),
        "capacity_bits": max(math.log2(math.fsum(tally.likeliest)), 0.0),
        "prior_entropy_bits": tally.self_bits,
        "conditional_entropy_bits": max(tally.self_bits - information, 0.0),
        "mutual_information_bits": information,
    }


def losses_of_guesses(tally: Tally) -> dict[str, float]:
    """Return what an attacker loses who guesses outputs, under the job's loss.

    His best guess after y is what the optimal remap reports in its place, so he loses what a user with that
    remap does: Chatzikokolakis, ElSalamouny, Palamidessi, PoPETs 2017. Needs `costs`.

    Returns
    -------
    - `error_under_loss_km`: Σ_y min_y' Σ_x π(x) M(y|x) c(x, y'), the Bayes risk;
    - `prior_error_under_loss_km`: min_y' Σ_x π(x) c(x, y'), without a report.
    """
    return {
        "error_under_loss_km": misled_loss_km(tally, tally.costs[TRUTH]),
        "prior_error_under_loss_km": float(tally.costs[TRUTH].sum(axis=0).min()),
    }


def misled_loss_km(tally: Tally, costs_km: Array) -> float:
    """Return the loss under π of the remap that is best for what somebody believes that it costs, in km.

    Parameters
    ----------
    tally
        With `costs`.
    costs_km
        Σ_x p(x) M(y|x) c(x, y') under his belief p, float64 of shape (K, K), in km.
    """
    table = best_remap(costs_km)
    return float(tally.costs[TRUTH][np.arange(len(table)), table].sum())


# --- ranks ----------------------------------------------------------------------------------------


def exact_ranks(passes: Passes, records: int) -> dict[str, object]:
    """Return what is said of ranks, from all records; `records` says how many have π > 0."""
    outputs = passes.store.outputs
    # Ranges of outputs, each as large as a task can sort.
    size = max(min(_SORTED_AT_ONCE // max(records, 1), outputs), 1)
    ranges = ((first, min(first + size, outputs), records) for first in range(0, outputs, size))
    return sorted_ranks(passes.summed("ranks", rank_outputs, ranges))


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
    for column in columns_of(store, range(store.plan.blocks)):
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
        "rank_quantiles": weighted_quantiles(ranks, weights),
        "rank_quantiles_resolution": 0.0,
        "rank_mean": float((ranks * weights).sum() / weights.sum()),
        "rank_mean_resolution": 0.0,
    }


def counted_ranks(tally: Tally) -> dict[str, object]:
    """Return what is said of ranks, from counts by classes of π M: none is too small.

    Of a record, all that is known is its class: all records of higher classes are before it, and those of the
    same class may be.
    """
    counts, masses = tally.by_class
    upwards = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    held = np.nonzero(masses)
    most, weights = upwards[held], masses[held]
    least = most - counts[held] + 1
    upper, lower = (weighted_quantiles(ranks, weights) for ranks in (most, least))
    total = float(weights.sum())
    return {
        "rank_quantiles": upper,
        "rank_quantiles_resolution": max(upper[share] - lower[share] for share in SHARES),
        "rank_mean": float((most * weights).sum() / total),
        "rank_mean_resolution": float(((most - least) * weights).sum() / total),
    }
