"""Decisions beyond float64: right on both sides of a tie that float64 cannot see."""

import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.auditors import exact
from mdpext_dask.seed.budget import vector_norm
from tests.support.known_answers import float_above, float_below
from tests.support.refusals import refused

EXPONENTS = (1.0, 1.1, 1.5, 2.0, 3.0, math.inf)


def at(x: float, y: float) -> tuple[Fraction, Fraction]:
    return Fraction(x), Fraction(y)


@pytest.mark.parametrize("p", EXPONENTS)
def test_the_two_floats_around_a_logarithm_are_told_apart(p: float) -> None:
    """Whatever the ratio, as ε at distance 1 the float above its logarithm keeps and the one below breaks."""
    for numerator, denominator in ((3, 2), (2, 3), *itertools.product((3, 7, 2**20 + 1), (1, 5, 2**20))):
        ratio = Fraction(numerator, denominator)
        with localcontext(prec=60):
            exactly = abs((Decimal(numerator) / Decimal(denominator)).ln())
        assert not exact.pair_exceeds(ratio, at(0, -1), p, float_above(exactly))
        assert exact.pair_exceeds(ratio, at(1, 0), p, float_below(exactly))


def test_a_distance_that_is_no_float_is_not_rounded() -> None:
    """√2 km: ε = ln 2 / √2 to the last bit, on both sides."""
    with localcontext(prec=60):
        exactly = Decimal(2).ln() / Decimal(2).sqrt()
    assert not exact.pair_exceeds(Fraction(2), at(1, 1), 2.0, float_above(exactly))
    assert exact.pair_exceeds(Fraction(2), at(1, 1), 2.0, float_below(exactly))


def test_equal_probabilities_keep_anything_and_unequal_ones_nothing_at_one_place() -> None:
    tiny = Fraction(1) + Fraction(1, 2**60)
    assert not exact.pair_exceeds(Fraction(1), at(0, 0), 2.0, 1.0)
    assert exact.pair_exceeds(tiny, at(0, 0), 2.0, 1.0)
    assert not exact.pair_exceeds(tiny, at(0, 0), 2.0, 1.0, tolerance=1e-17)
    assert exact.pair_exceeds(tiny, at(0, 0), 2.0, 1.0, tolerance=1e-19)


@given(
    numerator=st.integers(1, 2**40), denominator=st.integers(1, 2**40), x=st.floats(-100, 100),
    y=st.floats(-100, 100), p=st.sampled_from(EXPONENTS), epsilon=st.floats(0.01, 10),
)  # fmt: skip
def test_like_floats(numerator: int, denominator: int, x: float, y: float, p: float, epsilon: float) -> None:
    difference = abs(math.log(numerator / denominator))
    bound = epsilon * vector_norm(x, y, p)
    if abs(difference - bound) > 1e-9 * max(bound, 1):
        ratio = Fraction(numerator, denominator)
        assert exact.pair_exceeds(ratio, at(x, y), p, epsilon) == (difference > bound)


@given(x=st.floats(-1e3, 1e3), y=st.floats(-1e3, 1e3), p=st.sampled_from(EXPONENTS))
def test_norms_are_those_of_float64(x: float, y: float, p: float) -> None:
    assert float(exact.norm(at(x, y), p)) == pytest.approx(vector_norm(x, y, p), rel=1e-13)


def test_ratios_divide_by_the_exact_totals() -> None:
    first, second = np.array([0.1, 0.7], dtype=np.float32), np.array([0.3, 0.3], dtype=np.float32)
    ratio = exact.probability_ratio(first, second, 0)
    exactly = Fraction(float(first[0])) / (Fraction(float(first[0])) + Fraction(float(first[1]))) * 2
    assert ratio == exactly
    assert float(exact.log_ratio(ratio)) == pytest.approx(abs(math.log(0.125 * 2)), rel=1e-6)


def test_a_cell_with_outputs_that_are_impossible() -> None:
    rows = np.full((2, 2, 2), 0.5)
    rows[..., 0] = 0.0
    unit = np.array([0.0, 1.0])
    assert not exact.cell_exceeds(rows, unit, unit, 0, 2.0, 1.0)
    rows[0, 1, 0] = 0.5
    assert exact.cell_exceeds(rows, unit, unit, 0, 2.0, 1e9)


def test_what_no_digits_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few digits allowed, the nearest float to a logarithm cannot be told from it."""
    monkeypatch.setattr(exact, "_DIGITS", 12)
    monkeypatch.setattr(exact, "_MOST_DIGITS", 12)
    refused(exact.Undecided, "", lambda: exact.pair_exceeds(Fraction(3, 2), at(1, 0), 2.0, math.log(1.5)))
