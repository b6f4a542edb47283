"""Places that stand for many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import KDTree

from mdpext_dask.problem.thinning import along_a_curve, thinned


@given(
    st.lists(st.tuples(*[st.floats(-50, 50, allow_subnormal=False)] * 2), min_size=1, max_size=60),
    st.floats(0, 30),
    st.integers(1, 70),
)
def test_limits_are_kept(places: list[tuple[float, float]], distance_km: float, most: int) -> None:
    xy = np.array(places)
    kept, mean_km = thinned(xy, distance_km, most)
    assert 1 <= len(kept) <= most
    assert (np.diff(kept) > 0).all()
    # The nearest may be nearer than the one of the same square.
    assert KDTree(xy[kept]).query(xy)[0].mean() <= mean_km * (1 + 1e-9) + 1e-9
    # Places within centimetres of each other are one; others are all there if they may be.
    if most >= len(xy):
        assert mean_km <= max(distance_km, 1e-3)


def test_the_dense_middle_gets_more_than_squares_of_one_size_would_give_it() -> None:
    generator = np.random.default_rng(3)
    xy = np.concatenate([generator.normal(0, 1, (4000, 2)), generator.uniform(-20, 20, (400, 2))])
    kept, mean_km = thinned(xy, 0.0, 200)
    assert 150 <= len(kept) <= 200
    cells = np.unique(np.floor(xy / 2.7), axis=0, return_index=True)[1]
    assert len(cells) >= 200
    assert mean_km < 0.8 * KDTree(xy[cells]).query(xy)[0].mean()


@pytest.mark.slow
def test_many_places_take_little_time_and_hold_the_distance() -> None:
    xy = np.random.default_rng(0).uniform(0, 40, (200_000, 2))
    kept, mean_km = thinned(xy, 0.3, 100_000)
    assert mean_km == pytest.approx(0.3, rel=0.3)
    assert len(kept) < 5_000


@given(st.lists(st.tuples(*[st.floats(-50, 50, allow_subnormal=False)] * 2), min_size=1, max_size=60))
def test_a_curve_goes_through_all_places_once(places: list[tuple[float, float]]) -> None:
    assert sorted(along_a_curve(np.array(places)).tolist()) == list(range(len(places)))


def test_neighbours_on_a_curve_are_near_each_other() -> None:
    xy = np.random.default_rng(0).uniform(0, 30, (4096, 2))
    along = np.linalg.norm(np.diff(xy[along_a_curve(xy)], axis=0), axis=1)
    assert along.mean() < 0.1 * np.linalg.norm(np.diff(xy, axis=0), axis=1).mean()
    # A portion of so many is in a small part of the plane.
    portion = xy[along_a_curve(xy)][:256]
    assert np.ptp(portion, axis=0).max() <= 30 / 2
