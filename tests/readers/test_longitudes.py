"""Longitudes go round: the smallest box is found by brute force as well."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import arc, between, east_of
from tests.support.anywhere import wrapped

_lon = st.integers(-180, 179).map(float)


def _smallest(lon: list[float]) -> float:
    """Return the width of the smallest box that holds all places, trying each of them as its west side."""
    return min(max((other - west) % 360 for other in lon) for west in lon)


@given(lon=st.lists(_lon, min_size=1, max_size=8))
def test_the_smallest_box_is_found(lon: list[float]) -> None:
    places = np.array(lon)
    west, east = arc(places, places)
    assert between(places, west, east).all()
    width = east_of(west, east) - west
    # Where all places lie within half a turn of longitudes nothing is smaller.
    assert width == _smallest(lon)


@given(lon=st.lists(st.floats(-180, 180), min_size=1, max_size=8))
def test_within_half_a_turn_it_is_the_least_and_the_largest(lon: list[float]) -> None:
    assume(max(lon) - min(lon) <= 180)
    assert arc(np.array(lon), np.array(lon)) == (min(lon), max(lon))


@pytest.mark.parametrize(
    ("west", "east", "expected"),
    [
        ([177.0, -180.0], [180.0, -178.0], (177.0, -178.0)),
        ([177.0, -180.0, 170.0], [180.0, -178.0, 171.0], (170.0, -178.0)), ([179.0], [181.0], (179.0, 181.0)),
        ([179.0, -179.5], [181.5, -179.0], (179.0, -178.5)), ([-180.0], [180.0], (-180.0, 180.0)),
        ([-180.0, 0.0], [0.0, 180.0], (-180.0, 180.0)), ([-10.0, 5.0], [0.0, 6.0], (-10.0, 6.0)),
    ],
)  # fmt: skip
def test_of_arcs_as_well(west: list[float], east: list[float], expected: tuple[float, float]) -> None:
    assert arc(west, east) == expected


@given(lon=st.floats(-720, 720))
def test_wrapped_longitudes_are_the_same_places(lon: float) -> None:
    [again] = wrapped(np.array([lon]))
    assert -180 <= again <= 180
    assert (again - lon) / 360 == pytest.approx(round((again - lon) / 360), abs=1e-9)
    if abs(lon) <= 180:
        assert again == lon


@pytest.mark.parametrize(
    ("box", "centre"),
    [
        ((177.0, -20.0, -178.0, -15.0), (179.5, -17.5)), ((178.0, -20.0, -177.0, -15.0), (-179.5, -17.5)),
        ((179.0, 60.0, -179.0, 62.0), (180.0, 61.0)), ((179.5, 0.0, 181.5, 2.0), (-179.5, 1.0)),
        ((12.0, 41.5, 13.0, 42.0), (12.5, 41.75)),
    ],
)  # fmt: skip
def test_centre_of_box_is_in_it(box: tuple[float, float, float, float], centre: tuple[float, float]) -> None:
    assert Projection.centred_on(*box) == Projection(*centre)
