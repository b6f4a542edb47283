"""The auditors against mechanisms whose answers are known, and against every triple in fifty digits."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.auditors.methods import Sampling, sample_pairs
from mdpext_dask.auditors.pairs import sampled
from mdpext_dask.auditors.pairs.designs import LatticeDesign
from mdpext_dask.auditors.subject import Subject, plain_subject
from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.events import silent
from tests.support import known_answers as known

methods = pytest.mark.parametrize("method", known.METHODS)
sizes = pytest.mark.parametrize("size", known.SIZES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store whose rows tests may overwrite."""
    return known.make_store(tmp_path_factory.mktemp("six"))


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", known.EXPONENTS)
@pytest.mark.parametrize("make", known.FORMULAS, ids=lambda make: make.__name__)
def test_formulas(make: Callable[[float], known.Formula], p: float) -> None:
    known.check_formula(make, p)


# --- planted violations ---------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "size"), [*zip([(12, 0), (12, 3), (1, 3)], known.SIZES, strict=True)])
def test_a_violation_in_a_corner(record: tuple[int, int], size: float) -> None:
    known.check_planted(known.planted_beside(record, size), size)


@pytest.mark.parametrize(("east", "size"), [*zip(range(1, 6), known.SIZES[::-1] * 2, strict=False)])
def test_a_violation_anywhere_between_parts_and_bands(east: int, size: float) -> None:
    """With parts of four records and bands of two rows of cells, pairs lie within and across."""
    with known.cut_small():
        known.check_planted(known.planted_beside((east, east % 3), size, (6, 3)), size)


@sizes
def test_a_violation_on_a_seam_of_a_store(store: str, size: float) -> None:
    """Between records of two blocks."""
    known.check_planted_in_store(store, (2, 3), size)


@pytest.mark.parametrize(
    ("record", "axis"),
    [((4, 6), 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in [((1, 4), 1), ((0, 3), 1)])],
)
def test_a_violation_elsewhere_in_a_store(store: str, record: tuple[int, int], axis: int) -> None:
    """In corners, within blocks, and on the other seam."""
    known.check_planted_in_store(store, record, 1e-9, axis)


@sizes
def test_a_violation_between_far_records_only(size: float) -> None:
    known.check_planted(known.planted_afar(size), size)


@pytest.mark.parametrize(("size", "small"), [*((size, True) for size in known.SIZES), (1e-9, False)])
def test_a_violation_between_two_groups_of_records(size: float, small: bool) -> None:
    mechanism = known.planted_between_clusters(size)
    with known.cut_small() if small else contextlib.nullcontext():
        known.check_planted(mechanism, size, lattice=False)


# --- copies in few bits ---------------------------------------------------------------------------


@methods
@pytest.mark.parametrize("name", list(known.few_bits(np.ones((1, 1), dtype=np.float32))))
def test_copies_in_few_bits_are_caught(name: str, method: str) -> None:
    good, epsilon = known.good_copy()
    known.check_copy(known.few_bits(good.rows)[name], good.points, epsilon, method)


@methods
def test_what_they_are_copies_of_passes(method: str) -> None:
    known.check_good_copy(*known.good_copy(), method)


# --- every triple ---------------------------------------------------------------------------------

seeds = st.integers(0, 2**32 - 1)
exponents = st.sampled_from([1.0, 1.5, 2.0, math.inf])
dtypes = st.sampled_from([np.float32, np.float64])


@st.composite
def mechanisms(draw: st.DrawFn, *, lattice: bool | None = None, zeros: bool = True) -> known.Mechanism:
    """Small mechanisms of every kind."""
    on_lattice = draw(st.booleans()) if lattice is None else lattice
    side = st.integers(2, 4)
    return known.random_case(
        draw(seeds), (draw(side), draw(side)) if on_lattice else draw(st.integers(2, 11)),
        draw(st.integers(1, 4)), p=draw(exponents), dtype=draw(dtypes),
        roughness=draw(st.sampled_from([0.05, 0.7, 3.0])), same_place=not on_lattice and draw(st.booleans()),
        zeros=zeros and draw(st.booleans()), unusable=zeros and draw(st.integers(0, 4)) == 0,
    )  # fmt: skip


def limits(mechanism: known.Mechanism) -> list[float]:
    """Return values of ε beside which some triples lie as close as floats can be."""
    slopes = [triple.slope for triple in mechanism.triples if triple.slope.is_finite() and triple.slope]
    if not slopes:
        return [1.0]
    some = {slopes[0], slopes[len(slopes) // 20], slopes[len(slopes) // 2]}
    return [beside(slope) for slope in sorted(some) for beside in (known.float_below, known.float_above)]


@settings(max_examples=15)
@given(
    mechanism=mechanisms(), part=st.sampled_from([16, 96, 10**6]), tile=st.sampled_from([2, 4, 128]),
    tolerance=st.sampled_from([0.0, 0.0, 1e-3, 0.5]),
)  # fmt: skip
def test_every_triple_counts(mechanism: known.Mechanism, part: int, tile: int, tolerance: float) -> None:
    """Whatever rows and records are like, however they are cut: the answer is that of all triples."""
    with known.cut_small(part=part, tile=tile):
        for epsilon in limits(mechanism):
            known.check_all_pairs(mechanism, epsilon, tolerance)
        steep = [triple for triple in mechanism.triples if triple.apart and triple.slope.is_finite()]
        for triple in [triple for triple in steep if triple.slope][:1]:
            half = float(triple.slope) / 2
            for beside in (known.float_below, known.float_above):
                known.check_all_pairs(mechanism, half, beside(triple.excess(half)))


@given(mechanism=mechanisms(lattice=True), band=st.sampled_from([16, 300, 10**6]), strip=st.integers(1, 20))
def test_every_cell_counts(mechanism: known.Mechanism, band: int, strip: int) -> None:
    """The certificate is what its definition says in fifty digits, however the lattice is cut."""
    if not mechanism.usable.all():
        assert known.ask(mechanism, "certificate", 1.0).epsilon == math.inf
        return
    norms = [norm for norm, _, _ in mechanism.cells if norm.is_finite() and norm]
    with known.cut_small(band=band, strip=strip):
        for norm in {*norms[:1], *norms[len(norms) // 2 :][:1]}:
            known.check_cells(mechanism, known.float_below(norm))
            known.check_cells(mechanism, known.float_above(norm))


@settings(max_examples=15)
@given(mechanism=mechanisms(), kind=st.sampled_from(["uniform", "stratified"]))
def test_a_sample_of_everything_sees_everything(mechanism: known.Mechanism, kind: str) -> None:
    for epsilon in limits(mechanism)[-2:]:
        known.check_sample(mechanism, epsilon, pairs=2500, random_seed=1, design=kind)


def test_bounds_of_parts_that_are_attained() -> None:
    for part in (16, 32, 10**6):
        with known.cut_small(part=part):
            known.check_ties(known.four_on_a_line(), tuple(range(6)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@methods
def test_a_row_of_zeros_is_refused_and_an_impossible_output_is_named(method: str, dtype: Any) -> None:
    points = np.array([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
    rows = np.full((4, 2), 0.5, dtype=dtype)
    rows[2] = 0, 1
    how = known.how_sampled(method, 500)
    report = known.ask(known.Mechanism(rows, points), method, 1.0, **how)
    assert report.verdict == "violated"
    assert [finding.kind for finding in report.findings] == ["entries that are zero"]
    rows[2] = 0
    report = known.ask(known.Mechanism(rows, points), method, 1.0, **how)
    assert not report.holds
    assert report.epsilon == math.inf
    assert [finding.kind for finding in report.findings] == ["rows of zeros"]


def test_a_record_is_no_pair_with_itself() -> None:
    """Not even where there is nothing else to be named as the worst."""
    points = np.array([(1.0, 1.0)] * 3)
    report = known.ask(known.Mechanism(np.full((3, 2), 0.5), points), "exhaustive", 1.0)
    assert (report.verdict, report.worst) == ("holds", {})
    with known.cut_small(part=16):
        report = known.ask(known.Mechanism(np.full((3, 2), 0.5), points * [[1], [2], [3]]), "exhaustive", 1.0)
    for triple in report.details["worst_triples"]:
        assert triple["record"] != triple["record_prime"]


@pytest.mark.parametrize("tolerance", [0.0, 0.2])
@pytest.mark.parametrize("method", ["exhaustive", "sampled"])
def test_what_differs_in_one_place_keeps_no_epsilon(method: str, tolerance: float) -> None:
    """Even if it differs in the last bit only, of which logarithms know nothing, and even if it is hidden."""
    rows = np.array([[1e-6, 1 - 1e-6], [math.nextafter(1e-6, 1), 1 - 1e-6], [1e-6, 1 - 1e-6]])
    assert math.log(rows[0, 0]) == math.log(rows[1, 0])
    mechanism = known.Mechanism(rows, np.array([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)]))
    report = known.ask(mechanism, method, 1.0, tolerance, **known.how_sampled(method, 50))
    assert report.epsilon == math.inf
    assert {report.worst["record"], report.worst["record_prime"]} == {0, 1}
    assert (report.violations > 0) == (not tolerance)
    assert (report.details["hidden_violations"] > 0) == (tolerance > 0)


@pytest.mark.parametrize("method", ["exhaustive", "sampled"])
def test_rows_in_one_place_that_differ_in_their_totals_only_are_alike(method: str) -> None:
    """Their logarithms are not, in their last digits."""
    row = np.array([0.8715994, 0.1284006], dtype=np.float32)
    rows = np.stack([row, 2 * row, row])
    mechanism = known.Mechanism(rows, np.array([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)]))
    report = known.ask(mechanism, method, 1.0, **known.how_sampled(method, 50))
    assert report.violations == 0
    assert report.epsilon < 1e-10


# --- samples --------------------------------------------------------------------------------------

RUNS = 100
# Of intervals that miss, at 95 %: more than 11 of 100 are as unlikely as 1 in 200.
MISSES = 11


@pytest.fixture(params=["lattice", "points"])
def rough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> known.Mechanism:
    """Return a mechanism with 400 records whose near pairs are steep; pairs of a lattice as of a store's."""
    rng = np.random.default_rng(11)
    shape, step = (20, 20), 0.5
    points = np.stack(np.meshgrid(*(np.arange(n) * step for n in shape), indexing="ij"), -1).reshape(-1, 2)
    if request.param == "lattice":
        lattice = shape, (step, step), 2.0
        designs = {"uniform": LatticeDesign(*lattice), "stratified": LatticeDesign.stratified(*lattice)}
        monkeypatch.setattr(sampled, "design_of", lambda _source, kind, _p: designs[kind])
    if request.param == "points":
        points = rng.uniform(0, 10, size=points.shape)
    scores = np.cumsum(rng.normal(scale=0.2, size=(len(points), 5)), axis=0) * 0.1
    rows = np.exp(scores + rng.normal(scale=0.2, size=scores.shape))
    return known.Mechanism(rows / rows.sum(axis=1, keepdims=True), points)


def slopes_of(mechanism: known.Mechanism) -> NDArray[np.float64]:
    """Return |log ratio| / distance of all triples in float64, in order."""
    logs = np.log(mechanism.rows / mechanism.rows.sum(axis=1, keepdims=True))
    first, second = np.triu_indices(len(logs), 1)
    apart = np.hypot(*(mechanism.points[first] - mechanism.points[second]).T)
    return np.sort((np.abs(logs[first] - logs[second]) / apart[:, None]).ravel())


def drawn(subject: Subject, **how: Any) -> Any:
    return sample_pairs(subject, Sampling(**how), InlineExecutor(), Stages(silent))


@pytest.mark.parametrize(
    ("design", "ratio"),
    [
        ("stratified", 0.05),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("uniform", 0.0), ("uniform", 0.05), ("stratified", 1e-4)]
        ),
    ],
)
def test_the_interval_covers_the_violation_ratio(rough: known.Mechanism, design: str, ratio: float) -> None:
    """Of 100 intervals at 95 % no more miss than chance allows, and they say something."""
    slopes = slopes_of(rough)
    beyond = round(ratio * len(slopes))
    epsilon = float(slopes[-1 - beyond]) * (1 + 1e-9)
    exact = beyond / len(slopes)
    assert known.ask(rough, "exhaustive", epsilon).violations == beyond
    misses, estimates, width = 0, [], 0.0
    with plain_subject(rough.rows, rough.points, epsilon, 2.0, 0.0) as subject:
        # Where nothing is to be found, all runs are alike.
        for seed in range(RUNS if ratio else 10):
            report = drawn(subject, pairs=600, design=design, random_seed=seed)
            low, high = report.details["violation_ratio_interval"]
            misses += not low <= exact <= high
            estimates.append(report.violation_ratio)
            width = max(width, high - low)
    assert misses <= MISSES
    assert width < 0.1
    # A mean of 100 estimates: within five of its own standard errors, and exact if there is nothing.
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) <= 5 * error + 1e-15


def test_a_seed_decides_all_draws(rough: known.Mechanism) -> None:
    with plain_subject(rough.rows, rough.points, 1.0, 2.0, 0.0) as subject:
        first, again, other = (drawn(subject, pairs=500, random_seed=seed) for seed in (1, 1, 2))
        unasked = [drawn(subject, pairs=500).details["random_seed"] for _ in range(2)]
    assert first.details["strata"] == again.details["strata"]
    assert {**first.as_json(), "seconds": 0} == {**again.as_json(), "seconds": 0}
    assert first.details["strata"] != other.details["strata"]
    assert unasked[0] != unasked[1]


def test_it_draws_as_many_pairs_as_it_is_told(rough: known.Mechanism) -> None:
    """Or 16 from every stratum, if that is more."""
    with plain_subject(rough.rows, rough.points, 1e-3, 2.0, 0.0) as subject:
        for pairs, design in ((1, "uniform"), (17, "uniform"), (17, "stratified"), (1000, "stratified")):
            report = drawn(subject, pairs=pairs, random_seed=0, design=design)
            strata = [stratum["pairs_drawn"] for stratum in report.details["strata"]]
            expected = pairs if design == "uniform" else max(pairs, 16 * len(strata))
            assert report.details["pairs"] == sum(strata) == expected
            assert (report.triples_checked, report.details["stopped"]) == (expected * 5, "all pairs drawn")
