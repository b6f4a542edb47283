"""Designs of sampled audits: strata partition all pairs, and a draw is any pair of its stratum alike."""

import itertools
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from mdpext_dask.auditors.pairs import designs
from mdpext_dask.errors import SpecError
from tests.support.reference import distance
from tests.support.refusals import refused

EXPONENTS = (1, 1.5, 2, math.inf)
# How often the test of uniform draws fails for uniform draws; its seeds are fixed.
_FALSE_ALARM = 1e-3
_PLACES: dict[str, NDArray[np.float64]] = {
    "scattered": np.random.default_rng(1).normal(size=(25, 2)),
    "collinear": np.arange(12)[:, None] * np.array([0.3, 0.1]),
    "lattice": np.array(list(itertools.product(range(5), range(4)))) * 0.1,
    "duplicates": np.repeat([[0.0, -0.0], [-0.0, 0.0], [3, 4], [3, 5], [1, 1]], [1, 2, 4, 1, 3], axis=0),
    "one place": np.ones((5, 2)), "two": np.array([[0, 0], [0, 2.5]]), "two in one place": np.zeros((2, 2)),
}  # fmt: skip


def lattice_points(shape: tuple[int, int], spacing_km: tuple[float, float]) -> NDArray[np.float64]:
    return np.array(list(itertools.product(range(shape[0]), range(shape[1])))) * np.array(spacing_km)


def pairs_of(first: NDArray[np.intp], second: NDArray[np.intp]) -> list[tuple[int, int]]:
    return [(min(a, b), max(a, b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]


def is_within(stratum: designs.Stratum, apart: float, is_first: bool) -> bool:
    """Tell whether a distance lies in a stratum, but for rounding."""
    low = -1 if is_first else stratum.lower_km * (1 - 1e-12)
    return low < apart <= stratum.upper_km * (1 + 1e-12)


def strata_of(design: designs.Design, places: NDArray[np.float64], p: float) -> list[list[tuple[int, int]]]:
    """Return the pairs of every stratum, by brute force with the package's distances."""
    strata: list[list[tuple[int, int]]] = [[] for _ in design.strata]
    ends = [stratum.upper_km for stratum in design.strata[:-1]]
    for a, b in itertools.combinations(range(len(places)), 2):
        apart = designs.distances_km(*(places[a] - places[b]), p=p)
        strata[int(np.searchsorted(ends, apart))].append((a, b))
    return strata


def surprise(drawn: list[tuple[int, int]], population: list[tuple[int, int]]) -> float:
    """Return the p-value of Pearson's chi-square test that all pairs are as likely."""
    counts = Counter(drawn)
    assert set(counts) <= set(population)
    if len(population) == 1:
        return 1.0
    expected = len(drawn) / len(population)
    statistic = sum((counts[pair] - expected) ** 2 / expected for pair in population)
    return float(chi2.sf(statistic, len(population) - 1))


def check_lattice(
    design: designs.LatticeDesign, shape: tuple[int, int], spacing: tuple[float, float], p: float
) -> None:
    """Check that ranks are all pairs, once each, and that strata hold the distances that they say."""
    places = lattice_points(shape, spacing)
    found: list[tuple[int, int]] = []
    assert design.strata[0].lower_km == 0
    assert all(a.upper_km == b.lower_km for a, b in itertools.pairwise(design.strata))
    for h, stratum in enumerate(design.strata):
        assert stratum.pairs > 0
        pairs = pairs_of(*design.pairs_at(h, np.arange(stratum.pairs)))
        assert all(is_within(stratum, distance(places[a], places[b], p), h == 0) for a, b in pairs)
        found += pairs
    assert sorted(found) == list(itertools.combinations(range(len(places)), 2))
    assert design.weights.sum() == pytest.approx(1)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda shape: math.prod(shape) > 1),
    st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)) | st.just((0.1, 0.1)),
    st.sampled_from(EXPONENTS),
    st.lists(st.floats(0.01, 100), max_size=6, unique=True).map(sorted),
)
def test_strata(shape: tuple[int, int], spacing: tuple[float, float], p: float, cuts: list[float]) -> None:
    check_lattice(designs.LatticeDesign(shape, spacing, p, cuts), shape, spacing, p)
    check_lattice(designs.LatticeDesign.stratified(shape, spacing, p), shape, spacing, p)
    assert len(designs.LatticeDesign(shape, spacing, p).strata) == 1


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("h", [0.1, 0.3, 1 / 7])
def test_the_first_stratum_of_a_lattice_holds_its_neighbours(p: float, h: float) -> None:
    """Also where rounding sets diagonal neighbours apart from ‖(h, h)‖_p; for p = 1 two steps as well."""
    design = designs.LatticeDesign.stratified((20, 30), (h, h), p)
    steps = {frozenset(np.abs(np.subtract(divmod(a, 30), divmod(b, 30))).tolist())
             for a, b in pairs_of(*design.pairs_at(0, np.arange(design.strata[0].pairs)))}  # fmt: skip
    neighbours = {frozenset({0, 1}), frozenset({1})}
    assert steps == (neighbours | {frozenset({0, 2})} if p == 1 else neighbours)
    upper = [stratum.upper_km for stratum in design.strata]
    assert all(high / low >= 2 for low, high in itertools.pairwise(upper))


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((5, 4), (0.1, 0.1)),
        ((4, 7), (1, 0.3)),
        *((shape, (2, 2)) for shape in [(1, 9), (9, 1), (1, 2), (2, 1)]),
    ],
)
def test_lattice_draws_are_uniform(shape: tuple[int, int], spacing: tuple[float, float], p: float) -> None:
    rng = np.random.default_rng(7)
    for make in (designs.LatticeDesign, designs.LatticeDesign.stratified):
        design = make(shape, spacing, p)
        for h, stratum in enumerate(design.strata):
            population = pairs_of(*design.pairs_at(h, np.arange(stratum.pairs)))
            assert surprise(pairs_of(*design.draw(rng, h, 30 * stratum.pairs)), population) > _FALSE_ALARM


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("name", _PLACES)
def test_strata_of_points_partition_their_pairs(name: str, p: float) -> None:
    rng, places = np.random.default_rng(8), _PLACES[name]
    for design in (designs.PointsDesign(places, p), designs.PointsDesign.stratified(places, p)):
        check_points(design, places, p, rng)


@given(st.data())
def test_points_may_be_cut_anywhere(data: st.DataObject) -> None:
    """Near strata, far ones, none: also at distances that occur."""
    coordinate = st.integers(0, 3).map(float) | st.floats(-5, 5)
    places = np.array(data.draw(st.lists(st.tuples(coordinate, coordinate), min_size=2, max_size=9)))
    p = data.draw(st.sampled_from(EXPONENTS))
    cuts = sorted(data.draw(st.lists(st.sampled_from([1, 2]) | st.floats(0.1, 9), max_size=4, unique=True)))
    near = data.draw(st.integers(0, len(cuts)))
    design = designs.PointsDesign(places, p, cuts[:near], cuts[near:])
    assert [len(pairs) for pairs in strata_of(design, places, p)] == [s.pairs for s in design.strata]
    rng = np.random.default_rng(0)
    for h, pairs in enumerate(strata_of(design, places, p)):
        assert set(pairs_of(*design.draw(rng, h, 20))) <= set(pairs)


def test_points_with_far_strata_and_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many records: only some near pairs are listed."""
    monkeypatch.setattr(designs, "_LISTED_PAIRS", 300)
    rng = np.random.default_rng(9)
    places = np.concatenate([rng.random((60, 2)), rng.random((10, 2)).repeat(4, axis=0)])
    several = designs.PointsDesign.stratified(places, 2)
    check_points(several, places, 2, rng)
    total = sum(stratum.pairs for stratum in several.strata)
    assert len(several.strata) >= 4
    assert several.strata[-1].pairs >= total / 50
    monkeypatch.setattr(designs, "_COUNTED_RECORDS", 50)
    one = designs.PointsDesign.stratified(places, 2)
    check_points(one, places, 2, rng)
    assert len(one.strata) < len(several.strata)


def check_points(
    design: designs.PointsDesign, places: NDArray[np.float64], p: float, rng: np.random.Generator
) -> None:
    populations = strata_of(design, places, p)
    assert design.strata[0].lower_km == 0
    assert all(a.upper_km == b.lower_km for a, b in itertools.pairwise(design.strata))
    for h, (stratum, population) in enumerate(zip(design.strata, populations, strict=True)):
        assert stratum.pairs == len(population) > 0
        assert all(is_within(stratum, distance(places[a], places[b], p), h == 0) for a, b in population)
        assert surprise(pairs_of(*design.draw(rng, h, 20 * stratum.pairs)), population) > _FALSE_ALARM


def _by_offset(rng: np.random.Generator, n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Draw an offset first, all alike, and then where it lies: far pairs come too often."""
    d = rng.integers(1, 12, n)
    first = (rng.random(n) * (12 - d)).astype(np.intp)
    return first, first + d


def _by_neighbour(rng: np.random.Generator, n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Draw a record and then one of the others within 3: those at the ends have fewer."""
    first = rng.integers(0, 12, n)
    low, high = np.maximum(first - 3, 0), np.minimum(first + 3, 11)
    second = low + (rng.random(n) * (high - low)).astype(np.intp)
    return first, second + (second >= first)


@pytest.mark.parametrize(("wrong", "cut"), [(_by_offset, 11), (_by_neighbour, 3)])
def test_wrong_draws_would_be_noticed(
    wrong: Callable[[np.random.Generator, int], tuple[NDArray[np.intp], NDArray[np.intp]]], cut: int
) -> None:
    design = designs.LatticeDesign((12, 1), (1, 1), 2, [cut])
    population = pairs_of(*design.pairs_at(0, np.arange(design.strata[0].pairs)))
    n = 30 * len(population)
    rng = np.random.default_rng(10)
    assert surprise(pairs_of(*design.draw(rng, 0, n)), population) > _FALSE_ALARM
    assert surprise(pairs_of(*wrong(rng, n)), population) < _FALSE_ALARM


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_a_billion_records_take_little_time_and_memory(p: float) -> None:
    n = 31_623
    rng = np.random.default_rng(11)
    start = time.process_time()
    design = designs.LatticeDesign.stratified((n, n), (0.01, 0.01), p)
    drawn = [design.draw(rng, h, 10_000) for h in range(len(design.strata))]
    assert time.process_time() - start < 2
    assert sum(stratum.pairs for stratum in design.strata) == n**2 * (n**2 - 1) // 2
    assert 8 <= len(design.strata) <= 14
    for h, (stratum, (first, second)) in enumerate(zip(design.strata, drawn, strict=True)):
        offsets = np.array(divmod(first, n)) - np.array(divmod(second, n))
        apart = np.linalg.norm(offsets * 0.01, ord=p, axis=0)
        assert all(is_within(stratum, distance_km, h == 0) for distance_km in apart.tolist())
    tracemalloc.start()
    designs.LatticeDesign.stratified((n, n), (0.01, 0.01), p)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


def test_more_pairs_than_int64_counts() -> None:
    shape = (90_000, 100_000)
    design = designs.LatticeDesign(shape, (1, 1), 2, [1.5])
    n = math.prod(shape)
    axes, diagonals = 2 * n - sum(shape), 2 * (shape[0] - 1) * (shape[1] - 1)
    total = n * (n - 1) // 2
    assert total > 2**63
    assert [stratum.pairs for stratum in design.strata] == [axes + diagonals, total - axes - diagonals]
    rng = np.random.default_rng(12)
    for h in range(2):
        first, second = design.draw(rng, h, 2000)
        apart = np.hypot(*(np.array(divmod(first, shape[1])) - np.array(divmod(second, shape[1]))))
        assert ((apart < 1.5) == (h == 0)).all()
        assert apart.min() > 0
    # Uniform pairs of a long side lie a third of it apart.
    assert np.abs(first % shape[1] - second % shape[1]).mean() == pytest.approx(shape[1] / 3, rel=0.1)


def test_ranks_are_the_same_whether_or_not_they_need_more_than_int64(monkeypatch: pytest.MonkeyPatch) -> None:
    small = designs.LatticeDesign.stratified((7, 5), (1, 1), 2)
    expected = [small.pairs_at(h, np.arange(s.pairs)) for h, s in enumerate(small.strata)]
    monkeypatch.setattr(designs, "_INT64", 1)
    large = designs.LatticeDesign.stratified((7, 5), (1, 1), 2)
    for h, stratum in enumerate(large.strata):
        ranks = np.array(range(stratum.pairs), dtype=object)
        np.testing.assert_array_equal(large.pairs_at(h, ranks), expected[h])


@pytest.mark.parametrize("limit", [1, 5, 2**63, 2**63 + 1, 3 * 2**70])
def test_large_integers_are_uniform(limit: int) -> None:
    drawn = [int(number) for number in designs.uniform_below(np.random.default_rng(13), limit, 4000)]
    assert 0 <= min(drawn) <= max(drawn) < limit
    parts = min(limit, 5)
    counts = Counter(number * parts // limit for number in drawn)
    statistic = sum((counts[k] - 4000 / parts) ** 2 / (4000 / parts) for k in range(parts))
    assert chi2.sf(statistic, max(1, parts - 1)) > _FALSE_ALARM


def test_offsets_are_exact_where_square_roots_are_not() -> None:
    n = 3_000_000_000
    last = n * (n + 1) // 2 - 1
    b, j = designs.offset_at(np.array([0, n - 1, n, last - 1, last]), n)
    assert b.tolist() == [0, 0, 1, n - 2, n - 1]
    assert j.tolist() == [0, n - 1, 0, 1, 0]


@pytest.mark.parametrize("kind", [pytest.param("even", marks=pytest.mark.slow), "clustered"])
def test_a_hundred_thousand_points_take_little_time_and_memory(kind: str) -> None:
    rng = np.random.default_rng(14)
    places = rng.random((100_000, 2)) * 30
    if kind == "clustered":
        places[:50_000] = rng.normal(size=(50_000, 2)) * 1e-3
        places[50_000:60_000] = places[60_000]
    start = time.process_time()
    design = designs.PointsDesign.stratified(places, 2)
    assert time.process_time() - start < 10
    assert sum(stratum.pairs for stratum in design.strata) == 100_000 * 99_999 // 2
    assert len(design.strata) >= 2
    for h, stratum in enumerate(design.strata):
        first, second = design.draw(rng, h, 2000)
        apart = np.linalg.norm(places[first] - places[second], axis=1)
        assert all(is_within(stratum, distance_km, h == 0) for distance_km in apart.tolist())


def test_shares_are_equal_and_never_too_small() -> None:
    strata = [designs.Stratum(k, k + 1, 10**k) for k in range(3)]
    assert designs.allocate(1000, strata) == (334, 333, 333)
    assert designs.allocate(10, strata) == (16, 16, 16)
    assert designs.allocate(10, strata[:1]) == (10,)


def test_one_record_has_no_pairs() -> None:
    refused(SpecError, "at least 2", designs.PointsDesign, np.zeros((1, 2)), 2)
