"""The sampler: exactly the stored probabilities, nothing else."""

import math
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
    cumulative_weights,
    integer_weights,
    pick,
    pick_rows,
    sample_cumulative,
    uniform_below,
)
from mdpext_dask.runtime.random_bits import Words, words_for_tests
from tests.support.refusals import refused

Floats = NDArray[np.float64]
Stored = NDArray[np.float32]
Drawn = NDArray[np.intp]

stored = st.floats(2.0**-36, 1.0, width=32)
rows = st.lists(stored, min_size=1, max_size=50).filter(lambda row: sum(row) <= 2)


def words_from(*numbers: int) -> Words:
    """Return a source that answers with these numbers, in this order."""
    left: Iterator[int] = iter(numbers)
    return lambda n: np.array([next(left) for _ in range(n)], dtype=np.uint64)


def from_row(row: Stored, n: int, words: Words | None = None) -> Drawn:
    """Draw from one stored row, as a single place does."""
    return sample_cumulative(cumulative_weights(row), n, entropy_for_tests=words)


def from_rows(rows: Stored, words: Words | None = None) -> Drawn:
    """Draw once from every stored row, as a batch of places does."""
    cumulative = cumulative_weights(rows)
    below = uniform_below(cumulative[:, -1], entropy_for_tests=words)
    return pick_rows(cumulative, np.arange(len(rows)), below)


@given(rows)
def test_weights_are_the_stored_bytes_exactly(row: list[float]) -> None:
    values = np.array([row], dtype=np.float32)
    weights = integer_weights(values)[0]
    assert [int(w) for w in weights] == [Fraction(float(v)) * 2**60 for v in values[0]]


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, -math.inf, 1.6, 2.0**-37, 1e-40, 1e-45])
def test_damaged_rows_are_refused(value: float) -> None:
    row = np.array([0.5, value, 0.25], dtype=np.float32)
    for order in (row, row[::-1], row.astype(">f4")):
        for damaged in (order, np.stack([np.full(3, 0.25, np.float32), order])):
            refused(GuaranteeViolation, "damaged", cumulative_weights, damaged)


@given(rows, st.integers(0, 2**64 - 1))
def test_every_byte_order_and_layout_is_the_same_row(row: list[float], word: int) -> None:
    little = np.array(row, dtype="<f4")
    strided = np.zeros((2, 2 * len(row) + 1), dtype="<f4")
    strided[0, 1::2] = little
    frozen = little.copy()
    frozen.flags.writeable = False
    alike = [little, little.astype(">f4"), strided[0, 1::2], np.asfortranarray(strided[:1, 1::2])[0], frozen]
    drawn = {int(from_row(one, 1, words_from(word, 0))[0]) for one in alike}
    drawn |= {int(from_rows(one[None], words_from(word, 0))[0]) for one in alike}
    assert len(drawn) == 1


@pytest.mark.parametrize("dtype", ["f2", "f8", ">f8", "i4", "u4", "u8", "c8", "?", "S4", "O"])
def test_what_was_not_certified_is_refused(dtype: str) -> None:
    refused(DataError, "must be float32", cumulative_weights, np.ones(1).astype(dtype))


def test_rows_without_outputs_are_refused_and_no_rows_are_none() -> None:
    refused(DataError, "at least one output", cumulative_weights, np.zeros((3, 0), dtype=np.float32))
    assert from_rows(np.zeros((0, 3), dtype=np.float32)).shape == (0,)


@pytest.mark.parametrize("order", ["<f4", ">f4"])
def test_every_word_of_a_tiny_row_maps_to_its_output(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """All numbers below the total, and the rejection zone: each output gets exactly its weight of them."""
    monkeypatch.setattr(integer_sampling, "_WEIGHT_UNIT", 16.0)
    row = np.array([0.25, 0.5, 0.0625], dtype=order)  # weights 4, 8, 1
    end = int(acceptance(np.array([13], np.uint64))[0])
    assert end % 13 == 0
    # The first and the last copy of 0..12 that are accepted, whole.
    for first in (0, end - 13):
        words = range(first, first + 13)
        assert np.bincount(from_row(row, 13, words_from(*words))).tolist() == [4, 8, 1]
        assert np.bincount(from_rows(np.tile(row, (13, 1)), words_from(*words))).tolist() == [4, 8, 1]
    # What follows is thrown away, and the next number taken.
    for word in (end, end + 1, 2**64 - 1):
        assert from_row(row, 1, words_from(word, 12))[0] == 2


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
    for words, expected in (((end, 2**64 - 1, end - 1), 3 * 2**60 - 1), ((end + 5, 7), 7)):
        assert uniform_below(limit, entropy_for_tests=words_from(*words)).tolist() == [expected]


def test_uniform_below_stays_below_and_reaches_everything() -> None:
    limits = np.repeat(np.arange(1, 6, dtype=np.uint64), 400)
    draws = uniform_below(limits)
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
    numbers = np.arange(outputs, dtype=np.uint64)
    found = pick_rows(numbers[None] + np.uint64(1), np.zeros(outputs, dtype=np.intp), numbers)
    assert found.tolist() == list(range(outputs))


def test_many_draws_from_one_row_are_compared_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.array([0.5, 0.25, 0.25], dtype=np.float32)
    whole = from_row(row, 1000, words_for_tests(5))
    monkeypatch.setattr(integer_sampling, "_COMPARED_AT_ONCE", 100)
    assert np.array_equal(from_row(row, 1000, words_for_tests(5)), whole)


# --- frequencies ----------------------------------------------------------------------------------

# How often the test below fails though nothing is wrong, and passes though a distribution is 1 % wrong.
FALSE_ALARM = MISSED = 1e-6
RIGHT = np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)


def draws_needed(right: Floats, wrong: Floats, alarm: float = FALSE_ALARM, missed: float = MISSED) -> int:
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


def right_and_wrong(row: Stored) -> tuple[Floats, Floats]:
    """Return the probabilities of a row of four outputs, and others that are 1 % wrong."""
    right = row.astype(float) / row.astype(float).sum()
    wrong = right * [1.01, 0.99, 1.01, 0.99]
    return right, wrong / wrong.sum()


def statistic(counts: NDArray[np.integer[Any]], probabilities: Floats) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_frequencies_pass_on_the_right_distribution_and_fail_on_one_that_is_1_percent_wrong() -> None:
    right, wrong = right_and_wrong(RIGHT)
    # Either may be the one that is drawn from.
    draws = max(draws_needed(right, wrong), draws_needed(wrong, right))
    threshold = stats.chi2.isf(FALSE_ALARM, len(right) - 1)
    for drawn in (from_row(RIGHT, draws), from_rows(np.broadcast_to(RIGHT, (draws, 4)))):
        counts = np.bincount(drawn, minlength=4)
        assert statistic(counts, right) <= threshold < statistic(counts, wrong)


def _shifted(cumulative: NDArray[np.uint64], below: NDArray[np.uint64]) -> Drawn:
    return np.minimum(pick(cumulative, below + (cumulative[..., -1] >> np.uint64(8))), 3)


def _next_one(cumulative: NDArray[np.uint64], below: NDArray[np.uint64]) -> Drawn:
    # In units so coarse that numbers are often equal to a cumulative weight, and then it is the one before.
    unit = np.uint64(2**52)
    return np.asarray((cumulative // unit < (below // unit)[:, None]).sum(axis=1), dtype=np.intp)


def _all_accepted(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.full_like(limits, 2**64 - 1)


def _too_few_accepted(limits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return acceptance(limits) - (limits >> np.uint64(1))


@pytest.mark.parametrize("mutant", [_shifted, _next_one, _all_accepted, _too_few_accepted])
def test_biased_samplers_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """Mistakes that a sampler could have: the same test, as many draws, and it fails."""
    row = np.array([0.9, 0.6, 0.3, 0.01], dtype=np.float32)
    right, wrong = right_and_wrong(row)
    draws, threshold = draws_needed(right, wrong), stats.chi2.isf(FALSE_ALARM, 3)
    assert statistic(np.bincount(from_row(row, draws), minlength=4), right) <= threshold
    monkeypatch.setattr(integer_sampling, "acceptance" if "accepted" in mutant.__name__ else "pick", mutant)
    assert statistic(np.bincount(from_row(row, draws), minlength=4), right) > threshold
