"""The linearised certificate: its normals, its derivatives, and what a step within reach gains."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.auditors.certificate import steepest_slopes
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.pipeline.refine import vectors_above
from mdpext_dask.seed.budget import dual_exponent, vector_norm
from mdpext_dask.seed.cuts import CertificateVectors, Limit, fan, improve
from mdpext_dask.seed.model import raised_to_floor
from tests.support.reference import softmax

EXPONENTS = st.one_of(st.just(1.0), st.just(math.inf), st.floats(1.01, 50))


@settings(max_examples=200)
@given(
    q=EXPONENTS,
    turn=st.floats(0.001, 3),
    vector=st.tuples(st.floats(-2, 2), st.floats(-2, 2)).filter(lambda v: max(map(abs, v)) > 1e-3),
    other=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_normals_support_the_ball(
    q: float, turn: float, vector: tuple[float, float], other: tuple[float, float]
) -> None:
    normals = fan(np.array([vector]), turn, q)[0]
    p = dual_exponent(q)
    for normal in normals:
        assert vector_norm(*normal, p) == pytest.approx(1, rel=1e-9)
        assert normal @ np.array(other) <= vector_norm(*other, q) * (1 + 1e-9) + 1e-12
    # One of them is the vector's own.
    assert max(normals @ np.array(vector)) == pytest.approx(vector_norm(*vector, q), rel=1e-6)


def smooth_rows(rng: np.random.Generator, shape: tuple[int, int], outputs: int) -> np.ndarray:
    """Make seed rows whose scores change slowly from seed to seed."""
    slope = rng.normal(size=(2, outputs))
    x, y = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    scores = 0.4 * (x[..., None] * slope[0] + y[..., None] * slope[1])
    return softmax(scores + 0.1 * rng.normal(size=scores.shape))


def all_vectors(rows: np.ndarray, factor: int, side: float, p: float) -> CertificateVectors:
    return vectors_above(
        steepest_slopes(extend_log_convex(np.log(rows), factor), side, factor, p), 0.0, factor,
        dual_exponent(p),
    )  # fmt: skip


def largest_norm(rows: np.ndarray, factor: int, side: float, p: float) -> float:
    vectors = all_vectors(rows, factor, side, p).vector
    return max(vector_norm(*v, dual_exponent(p)) for v in vectors)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
@pytest.mark.parametrize(("shape", "factor"), [((4, 5), 1), ((5, 3), 1), ((4, 3), 2)])
def test_a_small_step_gains_and_keeps_epsilon(p: float, shape: tuple[int, int], factor: int) -> None:
    rng = np.random.default_rng(3)
    rows, side = smooth_rows(rng, shape, 6), 0.5
    cost = rng.exponential(size=rows.shape)
    epsilon = largest_norm(rows, factor, side, p)
    reach = 0.02
    limit, vectors = Limit(epsilon, dual_exponent(p), side * factor), all_vectors(rows, factor, side, p)
    better = improve(rows, cost, vectors, limit, reach, 1e-6)
    np.testing.assert_allclose(better.sum(axis=-1), 1, rtol=1e-12)
    assert better.min() >= 1e-6 * (1 - 1e-12)
    assert np.abs(np.log(better / rows)).max() <= reach * (1 + 1e-3)
    # All costs would let it gain more if nothing bound; the bound is kept up to what linearising leaves out.
    assert 0.001 < 1 - (cost * better).sum() / (cost * rows).sum() < 2 * reach
    over = largest_norm(better, factor, side, p) / epsilon - 1
    assert over < (0.2 * reach if factor == 1 else 2 * reach)


def test_rows_that_break_epsilon_are_led_back() -> None:
    rng = np.random.default_rng(4)
    rows, side = smooth_rows(rng, (4, 4), 5), 0.5
    epsilon = 0.97 * largest_norm(rows, 1, side, 2.0)
    cost = rng.exponential(size=rows.shape)
    better = improve(rows, cost, all_vectors(rows, 1, side, 2.0), Limit(epsilon, 2.0, side), 0.1, 1e-6)
    assert largest_norm(better, 1, side, 2.0) < epsilon * 1.005


def test_no_entry_falls_below_the_floor() -> None:
    rng = np.random.default_rng(5)
    rows, side = smooth_rows(rng, (3, 4), 8), 0.5
    floor = 0.12
    rows = raised_to_floor(rows, floor)
    assert rows.min() == pytest.approx(floor, rel=1e-12)
    cost, vectors = rng.exponential(size=rows.shape), all_vectors(rows, 1, side, 2.0)
    better = improve(rows, cost, vectors, Limit(10.0, 2.0, side), 0.1, floor)
    assert better.min() >= floor * (1 - 1e-12)
    np.testing.assert_allclose(better.sum(axis=-1), 1, rtol=1e-12)


def test_a_start_that_breaks_every_row_is_no_crash() -> None:
    rng = np.random.default_rng(6)
    rows, side = smooth_rows(rng, (3, 3), 4), 0.5
    steepest = all_vectors(rows, 1, side, 2.0)
    largest = int(np.hypot(*steepest.vector.T).argmax())
    only = CertificateVectors(
        *(part[largest : largest + 1] for part in (steepest.vector, steepest.cell, steepest.place))
    )
    epsilon = 0.9 * float(np.hypot(*only.vector[0]))
    better = improve(rows, rng.exponential(size=rows.shape), only, Limit(epsilon, 2.0, side), 0.2, 1e-6)
    assert np.isfinite(better).all()
    assert (better != rows).any()
