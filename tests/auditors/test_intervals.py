"""Confidence intervals: they cover, whatever is observed, and are not much wider than they need be."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.auditors.pairs.intervals import mean_interval, stratified_interval

_NORMAL_95 = 1.959964
# Observations in [0, 1] with a given mean, as many as asked for.
Sampler = Callable[[np.random.Generator, float, int], NDArray[np.float64]]


def _zero_or_one(rng: np.random.Generator, mean: float, n: int) -> NDArray[np.float64]:
    return (rng.random(n) < mean).astype(np.float64)


def _clustered(rng: np.random.Generator, mean: float, n: int) -> NDArray[np.float64]:
    """Return mostly 0, and else the share of a pair's 100 outputs, a half on average."""
    return (rng.random(n) < 2 * mean) * rng.integers(0, 101, n) / 100


def _beta(rng: np.random.Generator, mean: float, n: int) -> NDArray[np.float64]:
    return rng.beta(0.2 * mean / (1 - mean), 0.2, n) if mean > 0 else np.zeros(n)


SAMPLERS: tuple[Sampler, ...] = (_zero_or_one, _clustered, _beta)


@pytest.mark.parametrize("n", [1, 7, 1000, 10**9])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_seeing_nothing_gives_the_exact_rule(n: int, confidence: float) -> None:
    upper = -math.expm1(math.log((1 - confidence) / 2) / n)
    assert mean_interval(0, n, confidence) == (0, pytest.approx(upper, rel=1e-8))
    lower, one = mean_interval(1, n, confidence)
    assert one == 1
    assert 1 - lower == pytest.approx(upper, rel=1e-6)
    # Outward: what may happen with the stated probability is inside.
    assert mean_interval(0, n, confidence)[1] > upper


def test_nothing_observed_says_nothing() -> None:
    assert mean_interval(0, 0, 0.95) == (0, 1)
    assert stratified_interval([0.3], [0], [1], 0.95) == (0, 1)
    lower, upper = stratified_interval([0.5, math.nan], [10_000, 0], [0.75, 0.25], 0.95)
    assert 0.35 < lower < 0.375
    assert 0.625 < upper < 0.65


@given(st.floats(0, 1), st.integers(1, 10**7), st.floats(0.01, 0.999))
@example(0.953125, 1, 0.5)
def test_the_ends_are_where_the_divergence_reaches_the_limit(mean: float, n: int, confidence: float) -> None:
    def divergence(mu: float) -> float:
        terms = [(a, b) for a, b in ((mean, mu), (1 - mean, 1 - mu)) if a > 0]
        return sum(math.inf if b <= 0 else a * (math.log(a) - math.log(b)) for a, b in terms)

    lower, upper = mean_interval(mean, n, confidence)
    limit = math.log(2 / (1 - confidence))
    assert lower <= mean <= upper
    for end, last in ((lower, 0), (upper, 1)):
        if end != last:
            # The first number beyond the limit, but for what logarithms of almost equal numbers lose.
            lost = 1e-6 * limit + n * 1e-15
            assert n * divergence(end) >= limit - lost
            assert n * divergence(math.nextafter(end, mean)) <= limit + lost


def test_one_stratum_is_a_mean() -> None:
    assert stratified_interval([0.2], [500], [1.0], 0.9) == mean_interval(0.2, 500, 0.9)


def test_seeing_nothing_costs_little_more_than_one_sample() -> None:
    """Strata of tiny weight add nothing; Bonferroni's intervals would take 1.7 times as much."""
    weights = 4.0 ** np.arange(12)
    weights /= weights.sum()
    lower, upper = stratified_interval(np.zeros(12), np.full(12, 10_000), weights, 0.95)
    alone = weights[-1] * mean_interval(0, 10_000, 0.95)[1]
    assert lower == 0
    assert alone < upper < 1.1 * alone


def test_violations_of_near_pairs_alone_are_seen() -> None:
    """Half of all near pairs are 1e-9 of all pairs: the lower end must not lose them."""
    weights = np.array([2e-9, 1e-6, 1e-3])
    weights = np.append(weights, 1 - weights.sum())
    lower, upper = stratified_interval([0.5, 0, 0, 0], np.full(4, 10_000), weights, 0.95)
    assert 0.9e-9 < lower < 1e-9
    assert upper < 5e-4


@given(st.data())
def test_the_joint_interval_is_inside_bonferronis(data: st.DataObject) -> None:
    """At the level that the joint one leaves to the strata, and it holds the estimate."""
    strata = data.draw(st.integers(2, 8))
    means = data.draw(st.lists(st.floats(0, 1), min_size=strata, max_size=strata))
    ns = data.draw(st.lists(st.integers(0, 10**6), min_size=strata, max_size=strata))
    weights = np.array(data.draw(st.lists(st.floats(1e-9, 1), min_size=strata, max_size=strata)))
    weights /= weights.sum()
    lower, upper = stratified_interval(means, ns, weights, 0.95)
    estimate = float(np.where(np.array(ns) > 0, means, 0) @ weights)
    unseen = float(weights[np.array(ns) == 0].sum())
    assert lower <= estimate * (1 + 1e-9)
    assert upper >= (estimate + unseen) * (1 - 1e-9)
    each = [mean_interval(m, n, 1 - 0.05 / 5 / strata) for m, n in zip(means, ns, strict=True)]
    assert lower >= sum(w * low for w, (low, _) in zip(weights, each, strict=True)) * (1 - 1e-9)
    assert upper <= sum(w * high for w, (_, high) in zip(weights, each, strict=True)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_extremes_are_those_of_a_search_among_means(seed: int) -> None:
    """Means that the data do not refute, found by trying them out, are not cut off."""
    rng = np.random.default_rng(seed)
    n, w = rng.integers(5, 200, 3), rng.dirichlet(np.ones(3))
    m = rng.random(3) ** 3
    lower, upper = stratified_interval(m, n, w, 0.9)
    box = np.array([mean_interval(a, int(k), 1 - 0.1 / 5 / 3) for a, k in zip(m, n, strict=True)])
    mu = rng.uniform(box[:, 0], box[:, 1], (20_000, 3))
    kept = np.full(len(mu), True)
    for rate in np.geomspace(1e-1, 1e4, 250):
        for signed in (rate, -rate):
            with np.errstate(over="ignore"):
                bound = signed * (w @ m) + np.log1p(mu * np.expm1(-signed * w / n)) @ n
            kept &= bound >= -math.log(2 / (0.1 * 4 / 5))
    values = mu[kept] @ w
    # These λ are not quite the best, so that means just outside are kept as well.
    assert lower <= values.min() + 1e-3 * (upper - lower)
    assert values.max() <= upper + 1e-3 * (upper - lower)
    # And not by far: a random search comes close in three dimensions.
    assert values.max() - values.min() > 0.8 * (upper - lower)


@pytest.mark.parametrize("mean", [0, 0.001, 0.03, 0.4])
@pytest.mark.parametrize("n", [30, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_means_are_covered(sampler: Sampler, n: int, mean: float) -> None:
    rng = np.random.default_rng(n)
    runs = 500
    missed = 0
    for _ in range(runs):
        lower, upper = mean_interval(float(sampler(rng, mean, n).mean()), n, 0.9)
        missed += not lower <= mean <= upper
    assert missed <= _most_misses(runs, 0.1)


@pytest.mark.parametrize(
    "means",
    [
        pytest.param((0, 0, 0, 0, 0), marks=pytest.mark.slow),
        pytest.param((0.3, 0, 0, 0, 0), marks=pytest.mark.slow),
        (0.4, 0.1, 0.01, 0.001, 0.0002),
        pytest.param((0.45, 0.4, 0.3, 0.2, 0.1), marks=pytest.mark.slow),
    ],
    ids=["zero", "near", "rare", "often"],
)
@pytest.mark.parametrize(
    "sampler", [SAMPLERS[0], *(pytest.param(sampler, marks=pytest.mark.slow) for sampler in SAMPLERS[1:])]
)
def test_stratified_means_are_covered(sampler: Sampler, means: tuple[float, ...]) -> None:
    if not any(means) and sampler is not _zero_or_one:
        pytest.skip("nothing but 0, whatever the sampler")
    rng = np.random.default_rng(5)
    weights, ns = np.array([0.001, 0.01, 0.1, 0.3, 0.589]), (40, 100, 100, 200, 150)
    truth, runs, missed = float(weights @ means), 100, 0
    for _ in range(runs):
        seen = [sampler(rng, mean, n).mean() for mean, n in zip(means, ns, strict=True)]
        lower, upper = stratified_interval(seen, ns, weights, 0.9)
        missed += not lower <= truth <= upper
    assert missed <= _most_misses(runs, 0.1)


def test_coverage_that_is_short_would_be_noticed() -> None:
    """The normal approximation misses a rare share far more often than it says."""
    rng = np.random.default_rng(3)
    missed, runs, n, mean = 0, 500, 300, 0.003
    for _ in range(runs):
        seen = _zero_or_one(rng, mean, n).mean()
        missed += abs(seen - mean) > 1.645 * math.sqrt(seen * (1 - seen) / n)
    assert missed > _most_misses(runs, 0.1)


@pytest.mark.parametrize("mean", [0.02, 0.2, 0.5])
def test_a_mean_is_at_most_half_again_as_wide_as_the_normal_approximation(mean: float) -> None:
    """sqrt(2 log 40) / 1.96 = 1.386 for large samples."""
    lower, upper = mean_interval(mean, 20_000, 0.95)
    normal = 2 * _NORMAL_95 * math.sqrt(mean * (1 - mean) / 20_000)
    assert 1.38 * normal < upper - lower < 1.5 * normal


@pytest.mark.parametrize("strata", [2, 5, 14])
def test_strata_are_at_most_half_again_as_wide_as_the_normal_approximation(strata: int) -> None:
    """sqrt(2 log 50) / 1.96 = 1.427 for large samples, however many strata: Bonferroni's grow with them."""
    weights = np.full(strata, 1 / strata)
    means, ns = np.linspace(0.1, 0.6, strata), np.full(strata, 10_000)
    lower, upper = stratified_interval(means, ns, weights, 0.95)
    normal = 2 * _NORMAL_95 * math.sqrt(float(np.sum(weights**2 * means * (1 - means) / ns)))
    assert 1.42 * normal < upper - lower < 1.5 * normal


def _most_misses(runs: int, failure: float) -> int:
    """Return how many misses a valid interval exceeds with a probability of about 1e-4 at most."""
    return math.floor(runs * failure + 3.8 * math.sqrt(runs * failure * (1 - failure)))
