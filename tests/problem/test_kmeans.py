"""Weighted k-means: a minimum that no pass improves, the best of all where there are few points."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import DataError
from mdpext_dask.problem import kmeans
from mdpext_dask.problem.kmeans import weighted_centres

Array = np.ndarray


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def spread(xy: Array, weight: Array, centres: Array) -> float:
    """Return Σ_i w_i min_k ‖x_i − c_k‖², which k-means makes small."""
    return float(weight @ ((xy[:, None] - centres) ** 2).sum(axis=2).min(axis=1))


def cost_of(xy: Array, weight: Array, label: tuple[int, ...]) -> float:
    """Return the cost of an assignment with the best centres for it."""
    total = 0.0
    for k in set(label):
        part = np.array(label) == k
        centre = np.average(xy[part], axis=0, weights=weight[part])
        total += float((weight[part] * ((xy[part] - centre) ** 2).sum(axis=1)).sum())
    return total


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> tuple[Array, Array, int]:
    """Draw distinct places on a small lattice, which has many ties, their weights and a count."""
    places = draw(st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=most, unique=True))
    weight = draw(st.lists(st.integers(1, 9), min_size=len(places), max_size=len(places)))
    return np.array(places, float), np.array(weight, float), draw(st.integers(1, len(places)))


@given(problem=problems())
def test_the_best_of_several_starts_is_the_best_of_all_assignments(problem: tuple[Array, Array, int]) -> None:
    xy, weight, count = problem
    count = min(count, 3)
    best = min(cost_of(xy, weight, label) for label in itertools.product(range(count), repeat=len(xy)))
    found = [spread(xy, weight, weighted_centres(xy, weight, count, generator(k))) for k in range(25)]
    assert min(found) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert all(cost >= best - 1e-9 for cost in found)


@given(problem=problems(most=12), seed=st.integers(0, 5))
@settings(max_examples=100)
def test_each_centre_is_mean_of_what_is_nearest_to_it(problem: tuple[Array, Array, int], seed: int) -> None:
    xy, weight, count = problem
    centres = weighted_centres(xy, weight, count, generator(seed))
    assert centres.shape == (count, 2)
    assert len(np.unique(centres, axis=0)) == count
    square = ((xy[:, None] - centres) ** 2).sum(axis=2)
    for k in range(count):
        # Those on the border between two centres may belong to either.
        near = square[:, k] <= square.min(axis=1) + 1e-9
        surely = near & (square <= square[:, [k]] + 1e-9).sum(axis=1).__eq__(1)
        assert near.any()
        options = [surely | np.isin(np.arange(len(xy)), some) for some in subsets(near & ~surely)]
        means = [np.average(xy[o], axis=0, weights=weight[o]) for o in options if o.any()]
        assert np.abs(np.array(means) - centres[k]).max(axis=1).min() < 1e-9


def subsets(flags: Array) -> list[tuple[int, ...]]:
    indices = np.flatnonzero(flags).tolist()
    return [c for n in range(len(indices) + 1) for c in itertools.combinations(indices, n)]


def test_every_pass_makes_it_better(monkeypatch: pytest.MonkeyPatch) -> None:
    xy, weight = generator(1).normal(size=(500, 2)), generator(2).exponential(size=500)
    costs = []
    for passes in range(1, 30):
        monkeypatch.setattr(kmeans, "_MOST_PASSES", passes)
        costs.append(spread(xy, weight, weighted_centres(xy, weight, 12, generator())))
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[5] > costs[-1]
    assert costs[-1] == costs[-2]


def test_weights_count_by_their_ratios_only() -> None:
    xy, weight = generator(3).normal(size=(200, 2)), generator(4).integers(1, 100, 200).astype(float)
    plain = weighted_centres(xy, weight, 7, generator(5))
    for factor in (2.0**-300, 2.0**40):
        np.testing.assert_array_equal(weighted_centres(xy, weight * factor, 7, generator(5)), plain)
    np.testing.assert_allclose(weighted_centres(xy, weight / 3, 7, generator(5)), plain, rtol=1e-12)


def test_of_equally_near_centres_the_first_gets_a_point() -> None:
    xy = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    nearest, square = kmeans._assigned(xy, np.array([[2.0, 0.0], [0.0, 0.0]]))
    assert nearest.tolist() == [1, 0, 0]
    assert square.tolist() == [0, 1, 0]


def test_one_centre_is_the_mean_and_all_points_are_their_own() -> None:
    xy, weight = np.array([[0.0, 0.0], [4.0, 8.0], [1.0, 1.0]]), np.array([3.0, 1.0, 4.0])
    np.testing.assert_allclose(weighted_centres(xy, weight, 1, generator()), [[1.0, 1.5]])
    for seed in range(5):
        found = weighted_centres(xy, weight, 3, generator(seed))
        np.testing.assert_array_equal(found, [[0, 0], [1, 1], [4, 8]])
    # Also with weights that differ by all there is.
    line = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    found = weighted_centres(line, np.array([1e300, 1e-300, 1e-308, 1.0]), 4, generator())
    np.testing.assert_array_equal(found, line)
    with pytest.raises(DataError, match="4 centres are wanted of 3 places"):
        weighted_centres(xy, weight, 4, generator())


def test_a_centre_that_has_lost_its_points_gets_the_dearest() -> None:
    nearest, weight = np.array([0, 0, 0, 2]), np.array([1.0, 5.0, 1.0, 100.0])
    square = np.array([1.0, 2.0, 3.0, 50.0])
    # The last point costs most, but it is all that its centre has.
    left = kmeans._fill_empty(nearest, square, weight, 4)
    assert nearest.tolist() == [0, 1, 3, 2]
    assert left.tolist() == [1.0, 0.0, 0.0, 50.0]


def test_the_same_bits_whatever_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    xy, weight = generator(9).normal(size=(1000, 2)), generator(10).exponential(size=1000)
    whole = weighted_centres(xy, weight, 20, generator(11))
    monkeypatch.setattr(kmeans, "_AT_ONCE", 777)
    assert weighted_centres(xy, weight, 20, generator(11)).tobytes() == whole.tobytes()
