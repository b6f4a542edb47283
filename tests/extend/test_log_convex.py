"""Log-convex extension: the closed form, its level-by-level equal, and the same bits everywhere."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.extend.normalise import exponential
from tests.support.reference import SEEDS, interpolate, softmax


def seeds(rng: np.random.Generator, shape: tuple[int, int], outputs: int) -> NDArray[np.float64]:
    return np.log(softmax(rng.normal(scale=3, size=(*shape, outputs))))


def refine_once(scores: NDArray[np.float64], parts: int) -> NDArray[np.float64]:
    """Interpolate log scores of a lattice to the next finer one."""
    nx, ny = scores.shape[0] - 1, scores.shape[1] - 1
    fine = np.empty((nx * parts + 1, ny * parts + 1, scores.shape[2]))
    for i, j in np.ndindex(fine.shape[:2]):
        a, b = min(i // parts, nx - 1), min(j // parts, ny - 1)
        corners = scores[a : a + 2, b : b + 2]
        fine[i, j] = interpolate(corners, (i - a * parts) / parts, (j - b * parts) / parts)
    return fine


@given(
    shape=st.tuples(st.integers(2, 4), st.integers(2, 4)), outputs=st.integers(1, 9),
    factor=st.integers(1, 12), seed=SEEDS,
)  # fmt: skip
def test_closed_form(shape: tuple[int, int], outputs: int, factor: int, seed: int) -> None:
    scores = seeds(np.random.default_rng(seed), shape, outputs)
    expected = softmax(refine_once(scores, factor))
    got = extend_log_convex(scores, factor)
    assert (got.dtype, got.shape) == (np.float32, expected.shape)
    # Half a unit in the last place of float32, and a little for the float64 arithmetic.
    assert np.abs(got / expected - 1).max() <= 2.0**-24 + 1e-12


@pytest.mark.parametrize("refine", [(2, 3, 4), (4, 3, 2), (24,), (2, 2, 2, 3)])
def test_levels_and_normalising_at_every_level_change_nothing(refine: tuple[int, ...]) -> None:
    scores = seeds(np.random.default_rng(7), (3, 2), 5)
    unnormalised, normalised = scores, scores
    for parts in refine:
        unnormalised = refine_once(unnormalised, parts)
        normalised = np.log(softmax(refine_once(normalised, parts)))
    got = extend_log_convex(scores, math.prod(refine))
    assert np.abs(got / softmax(unnormalised) - 1).max() < 1e-7
    assert np.abs(got / np.exp(normalised) - 1).max() < 1e-7


def test_the_normaliser_is_at_most_one_so_the_floor_holds() -> None:
    rows = softmax(np.random.default_rng(11).normal(scale=4, size=(3, 3, 7)))
    floor = rows.min()
    assert extend_log_convex(np.log(rows), 8).min() >= floor * (1 - 2.0**-23)


@given(st.floats(-700, 700))
def test_exponential_is_accurate(x: float) -> None:
    got = float(exponential(np.array([x]))[0])
    # exp is not rational; the reference is the exponential of the standard library, good to 1 unit.
    assert abs(Fraction(got) - Fraction(math.exp(x))) <= 5 * Fraction(math.ulp(math.exp(x)))


def test_exponential_is_the_same_at_every_position_and_length() -> None:
    x = np.random.default_rng(0).uniform(-50, 5, 1003)
    whole = exponential(x)
    for length in (1, 2, 3, 7, 8, 9, 64, 1003):
        for start in (0, 1, 5):
            assert np.array_equal(exponential(x[start : start + length]), whole[start : start + length])
    assert exponential(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]
