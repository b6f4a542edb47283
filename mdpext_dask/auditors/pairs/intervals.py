"""Confidence intervals for shares, valid for any number of observations and however they are distributed.

Observations are independent and lie in [0, 1], such as the share of a pair's outputs that break the
promise. Nothing is approximated by a normal distribution: coverage is at least what is stated even when no
violation has been seen, which is the usual case.

Both intervals rest on one inequality (Hoeffding 1963, Theorem 1 and its proof): as e^{tx} is convex in x, the
mean μ of a variable X in [0, 1] determines

    log E e^{tX} ≤ log(1 − μ + μ e^t)  for every t,  with equality when X is 0 or 1.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array

# Of the probability to fail, what the separate intervals of all strata may use up.
_SEPARATE_SHARE = 1 / 5
# Ends are moved outward by what float64 may have lost: of a bound on a log probability, and of a sum.
_LOG_ERROR = 1e-9
_SUM_ERROR = 1e-12
# The search for the exponent λ: points on a logarithmic scale, then around the best of them, and again; for
# each, that many halvings for the multiplier.
_EXPONENTS = 17
_ROUNDS = 5
_HALVINGS = 40
# What W / n must be, of the largest, for a stratum to take part in the search.
_LEAST_STEP = 1e-100
# λ W / n where both ends of the scale are: exponentials are linear there, or as large as float64 can hold.
_LEAST_RATE = 1e-6
_LARGEST_RATE = 700.0


def mean_interval(mean: float, n: int, confidence: float) -> tuple[float, float]:
    """Return the Chernoff–Hoeffding interval {μ : n KL(mean ‖ μ) ≤ log(2 / (1 − confidence))}.

    KL(a ‖ μ) = a log(a / μ) + (1 − a) log((1 − a) / (1 − μ)). By Hoeffding (1963, Theorem 1) the mean lies on
    either side of the interval with probability at most (1 − confidence) / 2. Where nothing but 0 has been
    seen, it is [0, 1 − ((1 − confidence) / 2)^{1/n}].

    Parameters
    ----------
    mean
        Mean of the observations, in [0, 1].
    n
        Number of independent observations in [0, 1]; 0 gives [0, 1].
    confidence
        Least probability that the interval holds the mean, in (0, 1).

    Returns
    -------
    lower, upper
        The ends, in [0, 1], rounded outward.
    """
    return _separate_interval(mean, n, _log_odds(1 - confidence))


def stratified_interval(
    means: Sequence[float] | Array,
    ns: Sequence[int] | NDArray[np.int64],
    weights: Sequence[float] | Array,
    confidence: float,
) -> tuple[float, float]:
    """Return an interval for Σ_h W_h μ_h from independent samples of every stratum h.

    With one stratum it is the :func:`mean_interval`. Otherwise, of the probability to fail, δ = 1 −
    confidence, a fifth goes into a box B of separate intervals for every μ_h and δ' = 4δ/5 into a bound on
    the estimate θ = Σ_h W_h m_h as a whole, where m_h is the mean of n_h observations. The ends are the
    extremes of Σ_h W_h μ_h over

        {μ ∈ B : F(λ, μ) ≥ −log(2 / δ') for every λ},
        F(λ, μ) = λ θ + Σ_h n_h log(1 − μ_h + μ_h exp(−λ W_h / n_h)).

    Proof that it covers: let μ be the true means and λ ≥ 0. By independence and the inequality that this
    module begins with, P(θ ≤ t) ≤ e^{λt} E e^{−λθ} ≤ exp F(λ, μ) at θ = t. So P(θ ≤ t) ≤ e^{−I(t)} with I(t)
    = −inf_{λ≥0} F, which does not increase with t: {I(θ) > c} is the union of the events {θ ≤ t} over all t
    with I(t) > c, which grow with t, and has a probability of at most e^{−c}. With c = log(2/δ') that is
    δ'/2; λ ≤ 0 bounds P(θ ≥ t) in the same way, and the box fails with probability δ/5 by Bonferroni's
    inequality (Berger and Boos 1994 bound nuisance means in this way). The upper end needs λ ≥ 0 only, the
    lower one λ ≤ 0: fewer constraints make an interval larger, never invalid. For the same reason any λ will
    do, and for each λ any multiplier of the constraint (weak duality), so that a poor search makes it wider
    only.

    Its width is that of a normal approximation times sqrt(2 log(2/δ')) / z where the samples are large, which
    no interval per stratum attains. Where nothing but 0 has been seen, strata of small weight add next to
    nothing: the upper end is the largest Σ_h W_h μ_h of which the samples would show nothing with probability
    δ'/2.

    Parameters
    ----------
    means
        m_h in [0, 1], of shape (H,); of no consequence where n_h = 0.
    ns
        Numbers n_h ≥ 0 of independent observations in [0, 1], of shape (H,).
    weights
        W_h ≥ 0, of shape (H,); shares that add up to 1, usually.
    confidence
        Least probability that the interval holds Σ_h W_h μ_h, in (0, 1).

    Returns
    -------
    lower, upper
        The ends, in [0, Σ_h W_h], rounded outward.
    """
    m, n, w = (np.asarray(values, dtype=np.float64) for values in (means, ns, weights))
    m = np.where(n > 0, m, 0.0)
    failure = 1 - confidence
    if len(m) == 1:
        ends = _separate_interval(float(m[0]), int(n[0]), _log_odds(failure))
        return float(w[0] * ends[0]), float(w[0] * ends[1])
    separate = _log_odds(failure * _SEPARATE_SHARE / len(m))
    box = np.array([_separate_interval(float(a), int(k), separate) for a, k in zip(m, n, strict=True)])
    joint = _log_odds(failure * (1 - _SEPARATE_SHARE))
    # Strata without observations, or with next to no weight, say nothing about the estimate.
    steps = np.divide(w, n, out=np.zeros_like(w), where=n > 0)
    seen = steps > _LEAST_STEP * steps.max()
    lower, upper = (float(np.sum(w * ends)) for ends in box.T)
    if seen.any():
        unseen = float(np.sum(w[~seen]))
        sample = m[seen], n[seen], w[seen], box[seen]
        lower = max(lower, _joint_end(*sample, joint, sign=-1))
        upper = min(upper, _joint_end(*sample, joint, sign=1) + unseen)
    return max(0.0, lower * (1 - _SUM_ERROR)), min(float(np.sum(w)), upper * (1 + _SUM_ERROR))


def _log_odds(failure: float) -> float:
    """Return log(2 / failure): what n KL may be when either side may fail with half the probability."""
    return math.log(2 / failure) * (1 + _LOG_ERROR)


def _separate_interval(mean: float, n: int, limit: float) -> tuple[float, float]:
    """Return {μ : n KL(mean ‖ μ) ≤ limit}."""
    if n == 0:
        return 0.0, 1.0
    lower = 0.0 if mean == 0 else _first_beyond(mean, 0.0, mean, limit / n)
    upper = 1.0 if mean == 1 else _first_beyond(mean, 1.0, mean, limit / n)
    return lower, upper


def _first_beyond(mean: float, beyond: float, within: float, limit: float) -> float:
    """Return the number closest to `within` with KL(mean ‖ ·) > limit, by bisection to adjacent numbers.

    KL grows away from the mean and is infinite at `beyond`.
    """
    while True:
        middle = (beyond + within) / 2
        if middle in (beyond, within):
            return beyond
        if _divergence(mean, middle) > limit:
            beyond = middle
        else:
            within = middle


def _divergence(mean: float, mu: float) -> float:
    """Return KL(mean ‖ mu) for mu in (0, 1)."""
    return _term(mean, mu, mu - mean) + _term(1 - mean, 1 - mu, mean - mu)


def _term(a: float, b: float, apart: float) -> float:
    """Return a log(a / b) for b = a + apart, to full accuracy where they are close as well as where not."""
    if a == 0:
        return 0.0
    if b == 0:
        return math.inf
    return -a * math.log1p(apart / a) if 2 * abs(apart) < a else a * (math.log(a) - math.log(b))


def _joint_end(m: Array, n: Array, w: Array, box: Array, limit: float, sign: int) -> float:
    """Return the largest (sign 1) or smallest (sign -1) Σ W μ over the box and F(λ, μ) ≥ −limit.

    It is that for the best λ found, of this sign. For one λ the constraint is a convex one, and its extreme
    quasi-convex in λ: the search goes to the best of some λ and then looks between its neighbours.
    """
    step = w / n
    estimate = float(np.sum(w * m))
    # Downward, exp(−λ W / n) must not overflow; upward, it may vanish.
    largest = _LARGEST_RATE / (step.min() if sign > 0 else step.max())
    exponents = np.linspace(math.log(_LEAST_RATE / step.max()), math.log(largest), _EXPONENTS)
    best = math.inf
    for _ in range(_ROUNDS):
        ends = _dual_ends(sign * np.exp(exponents), n, w, box, limit, estimate, sign)
        place = int(np.argmin(ends))
        best = min(best, float(ends[place]))
        around = exponents[max(place - 1, 0)], exponents[min(place + 1, _EXPONENTS - 1)]
        exponents = np.linspace(*around, _EXPONENTS)
    # The means themselves satisfy every constraint (Jensen's inequality).
    return sign * max(best, sign * estimate)


def _dual_ends(
    rates: Array, n: Array, w: Array, box: Array, limit: float, estimate: float, sign: int
) -> Array:
    """Return an upper bound on sign Σ W μ over the box and F(λ, μ) ≥ −limit, for every λ of `rates`.

    For any ν ≥ 0 it is max_μ {sign Σ W μ + ν F(λ, μ)} + ν limit, the Lagrangian. With β = exp(−λ W / n) − 1,
    F = λ θ + Σ n log(1 + β μ), the maximum is at μ = −sign ν n / W − 1 / β, cut off at the box; the best ν,
    where the constraint is tight, is found by bisection.
    """
    step = w / n
    beta = np.expm1(-rates[:, None] * step)
    few, many = np.zeros(len(rates)), np.max(step * (1 + 1 / np.abs(beta)), axis=1)

    def at(nu: Array) -> tuple[Array, Array]:
        mu = np.clip(-sign * nu[:, None] / step - 1 / beta, box[:, 0], box[:, 1])
        with np.errstate(divide="ignore"):  # β = −1 and μ = 1: the constraint is broken infinitely
            slack = limit + rates * estimate + np.sum(n * np.log1p(beta * mu), axis=1)
        return mu, slack

    for _ in range(_HALVINGS):
        nu = (few + many) / 2
        broken = at(nu)[1] < 0
        few, many = np.where(broken, nu, few), np.where(broken, many, nu)
    # Of the two sides, the one that keeps the constraint, so that its slack is finite.
    mu, slack = at(many)
    return np.asarray(sign * np.sum(w * mu, axis=1) + many * slack)
