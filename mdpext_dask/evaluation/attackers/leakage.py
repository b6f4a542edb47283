"""What a report tells: vulnerability, leakage, entropy; in bits, from tallies.

G. Smith, "On the foundations of quantitative information flow" (FoSSaCS 2009); M. S. Alvim,
K. Chatzikokolakis, C. Palamidessi, G. Smith, "Measuring information leakage using generalized gain functions"
(CSF 2012); C. E. Shannon, "A mathematical theory of communication" (1948).
"""

import math
from typing import Any

import numpy as np

from mdpext_dask.evaluation.attackers.requests import TRUTH
from mdpext_dask.evaluation.attackers.tallies import Tally
from mdpext_dask.store.remap import best_remap


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
    alone, guessed = float(tally.alone[0]), math.fsum(tally.guess[0])
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
        "error_under_loss_km": misled_loss_km(tally, _only(tally, TRUTH)),
        "prior_error_under_loss_km": float(tally.costs[TRUTH].sum(axis=0).min()),
    }


def misled_loss_km(tally: Tally, shares: tuple[float, ...]) -> float:
    """Return the loss of a remap that is the best under a belief, as it is under π, in km.

    Parameters
    ----------
    tally
        With `costs`.
    shares
        The belief: see :class:`mdpext_dask.evaluation.attackers.requests.Attacker`.
    """
    table = best_remap(sum((s * tally.costs[p] for p, s in enumerate(shares) if s), np.zeros(())))
    return float(tally.costs[TRUTH][np.arange(len(table)), table].sum())


def misled(tally: Tally, position: int) -> dict[str, Any]:
    """Return how well an attacker does at guessing the record in one try; see `tally.guess_joint`.

    Returns
    -------
    - `vulnerability`: Σ_y π(x̂_y) M(y|x̂_y) for x̂_y, the record that he believes in most after y.
    """
    return {"vulnerability": math.fsum(tally.guess_joint[position])}


def _only(tally: Tally, prior: int) -> tuple[float, ...]:
    return tuple(float(p == prior) for p in range(len(tally.prior)))
