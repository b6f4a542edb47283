"""The projection: it comes back, and its distortion bounds what happens to ground distances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyproj import CRS, Transformer

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Box
from mdpext_dask.problem.projection import Projection, folded
from tests.support.problems import WGS84, ground_km

# PROJ takes a place within 1e-10 radians of the centre, 0.6 mm, for the centre itself.
_SNAP_DEGREES, _SNAP_KM = 1e-8, 2e-6


def _square(side_km: float) -> tuple[float, float, float, float]:
    return -side_km / 2, -side_km / 2, side_km / 2, side_km / 2


@given(lon=st.floats(-180, 180), lat=st.floats(-75, 75), bearing=st.floats(-180, 180), km=st.floats(0, 200))
def test_distance_and_bearing_from_centre_are_true(lon: float, lat: float, bearing: float, km: float) -> None:
    end_lon, end_lat, _ = WGS84.fwd(lon, lat, bearing, km * 1000)
    [[x, y]] = Projection(lon, lat).to_plane(np.array([(end_lon, end_lat)]))
    angle = np.deg2rad(bearing)
    np.testing.assert_allclose([x, y], [km * np.sin(angle), km * np.cos(angle)], rtol=0, atol=1e-5)


def test_centre_is_the_middle_of_the_box() -> None:
    projection = Projection.centred_on(12.0, 41.5, 13.0, 42.0)
    assert projection == Projection(12.5, 41.75)
    np.testing.assert_allclose(projection.to_plane(np.array([(12.5, 41.75)])), [(0, 0)], atol=1e-9)


@pytest.mark.parametrize("side_km", [5.0, 300.0, 1500.0])
@pytest.mark.parametrize("lat", [-70.0, 0.0, 42.0])
def test_no_pair_is_stretched_by_more_than_the_distortion(lat: float, side_km: float) -> None:
    projection = Projection(12.5, lat)
    box = _square(side_km)
    distortion = projection.distortion(Box(*box).radius_km)
    generator = np.random.default_rng(7)
    one = generator.uniform(-side_km / 2, side_km / 2, (4000, 2))
    # Half of the pairs are anywhere, half are close together, a third of all lie on the border.
    other = generator.uniform(-side_km / 2, side_km / 2, (4000, 2))
    other[::2] = one[::2] + generator.uniform(-side_km / 50, side_km / 50, (2000, 2))
    one[::3, 0] = side_km / 2
    other[::3, 0] = side_km / 2
    other = np.clip(other, -side_km / 2, side_km / 2)
    planar = np.linalg.norm(one - other, axis=1)
    ground = ground_km(projection.to_degrees(one), projection.to_degrees(other))
    far = ground > 0.01
    assert far.sum() > 3900
    assert np.max(planar[far] / ground[far]) <= 1 + distortion


@pytest.mark.parametrize("lat", [-60.0, 0.0, 42.0])
def test_distortion_is_hardly_larger_than_what_occurs(lat: float) -> None:
    projection = Projection(12.5, lat)
    distortion = projection.distortion(Box(*_square(300.0)).radius_km)
    # Across the radius, in a corner: where an azimuthal equidistant projection stretches most.
    ends = np.array([(150.0, 149.0), (149.0, 150.0)])
    degrees = projection.to_degrees(ends)
    stretching = float(np.sqrt(2) / ground_km(degrees[:1], degrees[1:])[0]) - 1
    assert 0.75 * distortion < stretching <= distortion


def test_distortion_of_a_city_is_parts_in_a_million_and_grows_with_the_box() -> None:
    sides = (10, 20, 100, 400, 1000, 2000)
    values = [Projection(12.5, 42.0).distortion(Box(*_square(side)).radius_km) for side in sides]
    assert values == sorted(values)
    assert 1e-7 <= values[1] < 1e-5
    assert values[-1] <= 0.02


@pytest.mark.parametrize("side_km", [3200.0, 6000.0])
@pytest.mark.parametrize("lat", [-42.0, 0.0, 60.0])
def test_box_that_distorts_by_more_than_two_per_cent_is_refused(lat: float, side_km: float) -> None:
    with pytest.raises(SpecError, match=r"distorts|too large") as caught:
        Projection(12.5, lat).distortion(Box(*_square(side_km)).radius_km)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("lon", "lat"), [(12.5218, 41.8773), (-73.9675, -40.78545), (0.0, 0.0)])
def test_grid_mapping_describes_the_same_projection(lon: float, lat: float) -> None:
    projection = Projection(lon, lat)
    crs = CRS.from_cf(projection.grid_mapping())
    assert crs.is_projected
    assert {axis.unit_name for axis in crs.axis_info} == {"kilometre"}
    places = np.array([(lon, lat), (lon + 0.3, lat - 0.2), (lon - 0.4, lat + 0.1)])
    assert crs.geodetic_crs is not None
    transformer = Transformer.from_crs(crs.geodetic_crs, crs, always_xy=True)
    x, y = transformer.transform(places[:, 0], places[:, 1])
    np.testing.assert_allclose(np.stack([x, y], axis=-1), projection.to_plane(places), rtol=0, atol=1e-9)


def test_grid_mapping_without_the_text_still_names_method_and_centre() -> None:
    expected = {
        "grid_mapping_name": "azimuthal_equidistant", "latitude_of_projection_origin": 41.75,
        "longitude_of_projection_origin": 12.5, "false_easting": 0, "false_northing": 0,
    }  # fmt: skip
    assert Projection(12.5, 41.75).grid_mapping().items() >= expected.items()


_anywhere = st.tuples(st.floats(-180, 180), st.floats(-90, 90))


@settings(max_examples=100)
@given(
    one=_anywhere,
    step=st.tuples(st.floats(0, 360), st.floats(1e-3, 200)),
    radius=st.sampled_from([10.0, 60.0, 500.0]),
)
def test_moving_earth_into_a_disc(one: tuple[float, float], step: tuple[float, float], radius: float) -> None:
    """Near, far, across the line of sight, at the antipode: never more than the charged distortion."""
    projection = Projection(-73.97, 40.78)
    lon, lat, _ = WGS84.fwd(*one, step[0], step[1] * 1000)
    planar = folded(projection.to_plane(np.array([one, (lon, lat)])), radius, 2.0)
    assert np.hypot(*planar.T).max() <= radius * (1 + 1e-12)
    apart = float(np.linalg.norm(planar[0] - planar[1]))
    assert apart <= (1 + projection.distortion(radius)) * step[1] + _SNAP_KM


def test_places_in_the_disc_stay_and_the_antipode_is_somewhere() -> None:
    projection = Projection(12.5, 42.0)
    xy = np.random.default_rng(0).uniform(-30, 30, size=(50, 2))
    antipode = projection.to_plane(np.array([[-167.5, -42.0], [-167.5, -41.999]]))
    for p in (1.0, 2.0, 3.0, np.inf):
        assert np.array_equal(folded(xy, 43.0, p), xy)
        for nowhere in (antipode, np.array([[np.inf, -np.inf], [np.nan, 3.0]])):
            assert np.array_equal(folded(nowhere, 20.0, p), np.zeros((2, 2)))


# Around the disc and the edges of the square, and far beyond any place on Earth.
_coordinate = st.floats(-20_100, 20_100) | st.floats(-30, 30) | st.floats(-1e150, 1e150)
_step = st.floats(-1, 1).map(lambda u: 500 * u**3)


@settings(max_examples=300)
@given(
    place=st.tuples(_coordinate, _coordinate), step=st.tuples(_step, _step),
    p=st.sampled_from([1.0, 1.2, 2.0, 3.0, np.inf]), radius=st.sampled_from([5.0, 60.0, 2200.0]),
)  # fmt: skip
def test_folding(place: tuple[float, float], step: tuple[float, float], p: float, radius: float) -> None:
    """Whatever the metric, in the plane; for p = 2 also on the ground, as above."""
    pair = np.array([place, np.add(place, step)])
    one, other = folded(pair, radius, p)
    assert np.linalg.norm(one - other, p) <= np.linalg.norm(pair[0] - pair[1], p) * (1 + 1e-9) + 1e-9
    for before, after in zip(pair, (one, other), strict=True):
        assert np.array_equal(before, after) or np.linalg.norm(before) > radius * (1 - 1e-9)
