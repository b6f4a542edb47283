"""Budgets: exponents, the normaliser bound, and what it promises."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import SpecError
from mdpext_dask.seed import budget
from tests.support.reference import SEEDS, interpolate, softmax
from tests.support.refusals import refused

EXPONENTS = (1.0, 1.0001, 1.5, 2.0, 4.0, math.inf)


@pytest.mark.parametrize(("p", "q"), [(1, math.inf), (2, 2), (math.inf, 1), (4, 4 / 3), (1.5, 3)])
def test_dual_exponents(p: float, q: float) -> None:
    assert budget.dual_exponent(p) == pytest.approx(q)


@pytest.mark.parametrize("q", [1.0, 1.5, 2.0, 3.0, 1e4, math.inf])
@given(a=st.floats(-1e3, 1e3), b=st.floats(-1e3, 1e3))
def test_vector_norm_is_the_norm(q: float, a: float, b: float) -> None:
    largest = max(abs(a), abs(b), 1e-300)
    expected = largest * float(np.linalg.norm([a / largest, b / largest], ord=q))
    assert budget.vector_norm(a, b, q) == pytest.approx(expected, rel=1e-12, abs=1e-290)


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 7.0])
def test_every_split_has_the_dual_norm_epsilon(p: float, epsilon: float) -> None:
    for split in [budget.even_split(epsilon, p), *budget.candidate_splits(epsilon, p)]:
        assert budget.vector_norm(*split, budget.dual_exponent(p)) == pytest.approx(epsilon, rel=1e-12)


def test_the_published_splits_are_tried_and_the_even_one() -> None:
    splits = budget.candidate_splits(2.0, 2.0)
    assert [s[0] for s in splits] == pytest.approx([2 / math.sqrt(2), 0.4, 0.8, 1.2, 1.6])
    assert splits[2][1] == pytest.approx(math.sqrt(4 - 0.64))
    assert budget.candidate_splits(2.0, 1.0) == [(2.0, 2.0)]
    assert [sum(s) for s in budget.candidate_splits(2.0, math.inf)] == pytest.approx([2.0] * 5)


def test_excess_by_hand() -> None:
    # At an edge nothing drifts across: (cosh d - 1) / sinh d = tanh(d / 2).
    assert budget.normaliser_excess(1.0, 0.0) == pytest.approx(math.tanh(0.5))
    assert budget.normaliser_excess(2, 1) == pytest.approx((math.cosh(2) - 1 / math.cosh(0.5)) / math.sinh(2))
    # Never worse than the factor 2 of the published recipe; nothing to pay on dense seeds.
    assert budget.normaliser_excess(1e-3, 5.0) == 1.0
    assert budget.normaliser_excess(700.0, 700.0) == pytest.approx(1.0)
    assert budget.normaliser_excess(1e-8, 0.0) < 1e-8
    assert budget.normaliser_excess(0.0, 0.0) == 0.0


@settings(max_examples=100)
@given(
    delta=st.tuples(st.floats(0.01, 6), st.floats(0.01, 6)), outputs=st.integers(2, 6), seed=SEEDS,
    concentrated=st.booleans(),
)  # fmt: skip
def test_no_cell_is_steeper(delta: tuple[float, float], outputs: int, seed: int, concentrated: bool) -> None:
    """Random normalised corners within the budgets: the slope inside never exceeds bound (2)."""
    rng = np.random.default_rng(seed)
    corners = rng.normal(size=(2, 2, outputs)) * (5 if concentrated else 1)
    corners = np.log(softmax(corners))
    # Bring the corners within the budgets, on all four sides, by flattening.
    for _ in range(200):
        change_x = np.abs(np.diff(corners, axis=0)).max() / delta[0]
        worst = max(change_x, np.abs(np.diff(corners, axis=1)).max() / delta[1])
        if worst <= 1:
            break
        corners = np.log(softmax(corners / worst))
    else:
        return
    step = 1e-5
    for s, t in rng.uniform(step, 1 - step, size=(20, 2)):
        ahead = np.log(softmax(interpolate(corners, s + step, t)))
        slope = np.abs(ahead - np.log(softmax(interpolate(corners, s - step, t)))).max() / (2 * step)
        assert slope <= delta[0] * (1 + budget.normaliser_excess(*delta)) * (1 + 1e-6)


@pytest.mark.parametrize("p", EXPONENTS)
@given(epsilon=st.floats(0.01, 20), cell=st.floats(0.01, 20), pick=st.integers(0, 4))
def test_bound_budgets_keep_the_split_and_beat_half(p: float, epsilon: float, cell: float, pick: int) -> None:
    splits = budget.candidate_splits(epsilon, p)
    budgets = budget.bound_budgets(splits[pick % len(splits)], cell)
    for axis in (0, 1):
        beta, other = budgets.beta[axis], budgets.beta[1 - axis]
        assert (beta * (1 + budget.normaliser_excess(beta * cell, other * cell))) <= budgets.split[axis]
        assert beta >= budgets.split[axis] / 2 * (1 - 1e-6)


def test_bound_budgets_are_the_largest() -> None:
    more = budget.bound_budgets((0.7, 0.7), 1.67).beta[0] * (1 + 1e-6)
    assert more * (1 + budget.normaliser_excess(more * 1.67, more * 1.67)) > 0.7


def test_dense_seeds_waste_nothing() -> None:
    assert 0.9999 < budget.bound_budgets((1.0, 1.0), 1e-4).beta[0] < 1
    assert budget.normaliser_excess(1e-4, 1e-4) == pytest.approx(1e-4 / 8 + 1e-4 / 2, rel=1e-3)


def test_distortion_and_rounding_are_charged() -> None:
    assert budget.planar_epsilon(1.0, 0.01) * 1.01 <= 1.0
    assert budget.planar_epsilon(1.0, 0.01) == pytest.approx(1 / 1.01)
    assert 1 - 1e-5 < budget.design_epsilon(1.0, 0.04, 64, 2.0) < 1
    refused(SpecError, "resolution of stored probabilities", budget.design_epsilon, 1e-3, 1e-4, 64, 2.0)
