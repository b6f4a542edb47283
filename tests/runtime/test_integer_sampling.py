"""The sampler: exactly the stored probabilities, nothing else."""

import math
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats

from mdpext_dask.errors import DataError, GuaranteeViolation
from mdpext_dask.runtime import integer_sampling
from mdpext_dask.runtime.integer_sampling import (
    acceptance,
    integer_weights,
    pick,
    pick_rows,
    sample_outputs,
    sample_row,
    uniform_below,
)
from mdpext_dask.runtime.random_bits import Words, words_for_tests

stored = st.floats(2.0**-36, 1.0, width=32)
rows = st.lists(stored, min_size=1, max_size=50).filter(lambda row: sum(row) <= 2)


def words_from(*numbers: int) -> Words:
    """Return a source that answers with these numbers, in this order."""
    left: Iterator[int] = iter(numbers)
    return lambda n: np.array([next(left) for _ in range(n)], dtype=np.uint64)


@given(rows)
def test_weights_are_the_stored_bytes_exactly(row: list[float]) -> None:
    values = np.array([row], dtype=np.float32)
    weights = integer_weights(values)[0]
    assert [int(w) for w in weights] == [Fraction(float(v)) * 2**60 for v in values[0]]


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, -math.inf, 1.6, 2.0**-37, 1e-40, 1e-45])
def test_damaged_rows_are_refused(value: float) -> None:
    row = np.array([0.5, value, 0.25], dtype=np.float32)
    for order in (row, row[::-1], row.astype(">f4")):
        with pytest.raises(GuaranteeViolation, match="damaged"):
            sample_outputs(np.stack([np.full(3, 0.25, np.float32), order]))
        with pytest.raises(GuaranteeViolation, match="damaged"):
            sample_row(order, 1)


@given(rows, st.integers(0, 2**64 - 1))
def test_every_byte_order_and_layout_is_the_same_row(row: list[float], word: int) -> None:
    little = np.array(row, dtype="<f4")
    strided = np.zeros((2, 2 * len(row) + 1), dtype="<f4")
    strided[0, 1::2] = little
    alike = [little, little.astype(">f4"), strided[0, 1::2], np.asfortranarray(strided[:1, 1::2])[0]]
    frozen = little.copy()
    frozen.flags.writeable = False
    drawn = {int(sample_row(one, 1, entropy_for_tests=words_from(word, 0))[0]) for one in [*alike, frozen]}
    drawn |= {
        int(sample_outputs(one[None], entropy_for_tests=words_from(word, 0))[0]) for one in [*alike, frozen]
    }
    assert len(drawn) == 1


@pytest.mark.parametrize("dtype", ["f2", "f8", ">f8", "i4", "u4", "u8", "c8", "?", "S4", "O"])
def test_what_was_not_certified_is_refused(dtype: str) -> None:
    with pytest.raises(DataError, match="must be float32"):
        sample_row(np.ones(1).astype(dtype), 1)


def test_rows_without_outputs_are_refused_and_no_rows_are_none() -> None:
    with pytest.raises(DataError, match="at least one output"):
        sample_outputs(np.zeros((3, 0), dtype=np.float32))
    assert sample_outputs(np.zeros((0, 3), dtype=np.float32)).shape == (0,)


@pytest.mark.parametrize("big", ["<f4", ">f4"])
def test_every_word_of_a_tiny_row_maps_to_its_output(monkeypatch: pytest.MonkeyPatch, big: str) -> None:
    """All numbers below the total, and the rejection zone: each output gets exactly its weight of them."""
    monkeypatch.setattr(integer_sampling, "_WEIGHT_UNIT", 16.0)
    row = np.array([0.25, 0.5, 0.0625], dtype=big)  # weights 4, 8, 1
    end = int(acceptance(np.array([13], np.uint64))[0])
    assert end % 13 == 0
    # The first and the last copy of 0..12 that are accepted, whole.
    for first in (0, end - 13):
        words = [first + k for k in range(13)]
        counts = np.bincount(sample_row(row, 13, entropy_for_tests=words_from(*words)), minlength=3)
        assert counts.tolist() == [4, 8, 1]
        together = sample_outputs(np.tile(row, (13, 1)), entropy_for_tests=words_from(*words))
        assert np.bincount(together).tolist() == [4, 8, 1]
    # What follows is thrown away, and the next number taken.
    for word in (end, end + 1, 2**64 - 1):
        assert sample_row(row, 1, entropy_for_tests=words_from(word, 12))[0] == 2


@given(st.integers(1, 2**61))
def test_what_is_accepted_is_a_whole_number_of_copies_and_nearly_all(limit: int) -> None:
    end = int(acceptance(np.array([limit], dtype=np.uint64))[0])
    copies, rest = divmod(end, limit)
    assert rest == 0
    assert copies == (2**64 - 1) // (limit + limit // 64)
    assert end <= 2**64 - 1
    # A multiple less than could be, and a part in 64 of each: at least six of eight are accepted.
    assert end >= 2**64 * 3 // 4


def test_how_often_numbers_are_rejected_says_nothing_of_the_row() -> None:
    """Totals of stored rows lie around 1 within 1e-6: one number of 16 is rejected for all of them."""
    totals = np.array([2**60 - 2**40, 2**60 - 1, 2**60, 2**60 + 1, 2**60 + 2**40], dtype=np.uint64)
    rejected = [1 - Fraction(int(end), 2**64) for end in acceptance(totals)]
    assert all(abs(share - Fraction(1, 16)) < Fraction(1, 10**6) for share in rejected)


def test_rejection_leaves_no_bias() -> None:
    """With a limit of 3/4 of 2^62 five copies fit; numbers from the incomplete one are thrown away."""
    limit = np.array([3 * 2**60], dtype=np.uint64)
    end = 5 * 3 * 2**60
    assert acceptance(limit).tolist() == [end]
    assert uniform_below(limit, entropy_for_tests=words_from(end, 2**64 - 1, end - 1)).tolist() == [
        3 * 2**60 - 1
    ]
    assert uniform_below(limit, entropy_for_tests=words_from(end + 5, 7)).tolist() == [7]


def test_uniform_below_stays_below_and_reaches_everything() -> None:
    limits = np.repeat(np.arange(1, 6, dtype=np.uint64), 400)
    draws = uniform_below(limits)
    assert (draws < limits).all()
    for limit in range(1, 6):
        assert set(draws[limits == limit].tolist()) == set(range(limit))


@given(st.lists(st.lists(st.integers(1, 2**50), min_size=5, max_size=5), min_size=1, max_size=4), st.data())
def test_both_searches_find_the_first_weight_above(weights: list[list[int]], data: st.DataObject) -> None:
    cumulative = np.cumsum(np.array(weights, dtype=np.uint64), axis=1)
    which = np.array(data.draw(st.lists(st.integers(0, len(weights) - 1), min_size=1)), dtype=np.intp)
    below = []
    for row in cumulative[which].tolist():
        edges = [0, *row[:-1], *(weight - 1 for weight in row)]
        below.append(data.draw(st.sampled_from(edges) | st.integers(0, row[-1] - 1)))
    numbers = np.array(below, dtype=np.uint64)
    expected = [
        next(k for k, weight in enumerate(row) if weight > number)
        for row, number in zip(cumulative[which].tolist(), below, strict=True)
    ]
    assert pick_rows(cumulative, which, numbers).tolist() == expected
    assert pick(cumulative[which], numbers).tolist() == expected


@pytest.mark.parametrize("outputs", range(1, 18))
def test_the_short_search_goes_through_any_number_of_outputs(outputs: int) -> None:
    cumulative = np.arange(1, outputs + 1, dtype=np.uint64)[None]
    numbers = np.arange(outputs, dtype=np.uint64)
    found = pick_rows(cumulative, np.zeros(outputs, dtype=np.intp), numbers)
    assert found.tolist() == list(range(outputs))


def test_many_draws_from_one_row_are_compared_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.array([0.5, 0.25, 0.25], dtype=np.float32)
    whole = sample_row(row, 1000, entropy_for_tests=words_for_tests(5))
    monkeypatch.setattr(integer_sampling, "_COMPARED_AT_ONCE", 100)
    assert np.array_equal(sample_row(row, 1000, entropy_for_tests=words_for_tests(5)), whole)


# --- frequencies ----------------------------------------------------------------------------------

# How often the test below fails though nothing is wrong, and passes though a distribution is 1 % wrong.
FALSE_ALARM = MISSED = 1e-6
RIGHT = np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)


def draws_needed(
    right: NDArray[np.float64], wrong: NDArray[np.float64], alarm: float = FALSE_ALARM, missed: float = MISSED
) -> int:
    """Return how many draws tell two distributions apart by chi-square at these two error rates.

    If `right` is what is tested and `wrong` what is drawn from, the statistic of n draws has, for many draws,
    the noncentral chi-square distribution with K − 1 degrees of freedom and the noncentrality
    n Σ (wrong − right)² / right.
    """
    degrees = len(right) - 1
    threshold = stats.chi2.isf(alarm, degrees)
    each = float(((wrong - right) ** 2 / right).sum())
    # By the lower tail: it is the small one.
    needed = optimize.brentq(lambda nc: np.log(stats.ncx2.cdf(threshold, degrees, nc) / missed), 1.0, 400.0)
    return math.ceil(needed / each)


def one_percent_wrong(right: NDArray[np.float64]) -> NDArray[np.float64]:
    wrong = right * [1.01, 0.99, 1.01, 0.99]
    return np.asarray(wrong / wrong.sum())


def statistic(counts: NDArray[np.integer[Any]], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_so_many_draws_are_needed_and_are_enough() -> None:
    """Both error rates, set to 5 %, are those of 4,000 repetitions, to five standard deviations."""
    right = RIGHT.astype(float) / RIGHT.astype(float).sum()
    wrong = one_percent_wrong(right)
    draws, repeats = draws_needed(right, wrong, 0.05, 0.05), 4000
    threshold, rng = stats.chi2.isf(0.05, 3), np.random.default_rng(7)
    alarms, misses = (
        np.mean(
            [(statistic(counts, right) > threshold) == alarm for counts in rng.multinomial(draws, p, repeats)]
        )
        for p, alarm in ((right, True), (wrong, False))
    )
    allowed = 5 * math.sqrt(0.05 * 0.95 / repeats)
    assert abs(alarms - 0.05) < allowed
    assert abs(misses - 0.05) < allowed


def test_frequencies_pass_on_the_right_distribution_and_fail_on_one_that_is_1_percent_wrong() -> None:
    right = RIGHT.astype(float) / RIGHT.astype(float).sum()
    wrong = one_percent_wrong(right)
    # Either may be the one that is drawn from.
    draws = max(draws_needed(right, wrong), draws_needed(wrong, right))
    threshold = stats.chi2.isf(FALSE_ALARM, len(right) - 1)
    counts = np.bincount(sample_row(RIGHT, draws), minlength=4)
    assert statistic(counts, right) <= threshold
    assert statistic(counts, wrong) > threshold
    rows_alike = np.broadcast_to(RIGHT, (draws, 4))
    counts = np.bincount(sample_outputs(rows_alike), minlength=4)
    assert statistic(counts, right) <= threshold
    assert statistic(counts, wrong) > threshold


def _shifted(cumulative: NDArray[np.uint64], below: NDArray[np.uint64]) -> NDArray[np.intp]:
    return np.minimum(pick(cumulative, below + (cumulative[..., -1] >> np.uint64(8))), 3)


def _next_one(cumulative: NDArray[np.uint64], below: NDArray[np.uint64]) -> NDArray[np.intp]:
    # In units so coarse that numbers are often equal to a cumulative weight, and then it is the one before.
    unit = np.uint64(2**52)
    return np.asarray((cumulative // unit < (below // unit)[:, None]).sum(axis=1), dtype=np.intp)


def _all_accepted(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.full_like(limits, 2**64 - 1)


def _too_few_accepted(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return acceptance(limits) - (limits >> np.uint64(1))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("pick", _shifted),
        ("pick", _next_one),
        ("acceptance", _all_accepted),
        ("acceptance", _too_few_accepted),
    ],
)
def test_biased_samplers_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, mutant: object) -> None:
    """Mistakes that a sampler could have: the same test, as many draws, and it fails."""
    row = np.array([0.9, 0.6, 0.3, 0.01], dtype=np.float32)
    right = row.astype(float) / row.astype(float).sum()
    draws = draws_needed(right, one_percent_wrong(right))
    threshold = stats.chi2.isf(FALSE_ALARM, 3)
    assert statistic(np.bincount(sample_row(row, draws), minlength=4), right) <= threshold
    monkeypatch.setattr(integer_sampling, name, mutant)
    assert statistic(np.bincount(sample_row(row, draws), minlength=4), right) > threshold


# --- what it needs --------------------------------------------------------------------------------


def test_the_sampler_needs_numpy_and_little_else() -> None:
    heavy = "{'pydantic', 'zarr', 'scipy', 'dask', 'pandas', 'xarray', 'pyproj', 'typer', 'cryptography'}"
    code = (
        "import sys, mdpext_dask.runtime.integer_sampling; "
        f"assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
