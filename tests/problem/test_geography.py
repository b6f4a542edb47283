"""Anywhere on Earth: at the equator and at 75 degrees, on both hemispheres, across the antimeridian.

The promise is ε times the distance on the ground. It is checked against geodesics on WGS 84 for all pairs of
records of whole small mechanisms.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask import audit, build, open_mechanism
from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.grid import Box
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import read_region
from mdpext_dask.readers.longitudes import arc
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.anywhere import lattice, lattice_folder, wrapped
from tests.support.problems import (
    JobMaker,
    all_records,
    all_rows,
    ground_km,
    point_file,
    polygon_file,
    road_geometry,
)
from tests.support.refusals import refusal

# PROJ takes a place within 1e-10 radians of the centre for the centre itself.
_SNAP_KM = 2e-6


# --- distances ------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    lon=st.one_of(st.sampled_from([179.95, -179.95, 180.0, -180.0, 0.0]), st.floats(-180, 180)),
    lat=st.one_of(st.sampled_from([0.0, 40.0, -40.0, 60.0, -60.0, 75.0, -75.0]), st.floats(-80, 80)),
    size=st.tuples(st.floats(0.01, 4), st.floats(0.01, 2)),
    ends=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_planar_distance_is_ground_distance_but_for_the_charged_distortion(
    lon: float, lat: float, size: tuple[float, float], ends: tuple[float, float, float, float]
) -> None:
    """For two places of a box in degrees, wherever it is; and never less by more than that either."""
    west, east = wrapped(np.array([lon - size[0] / 2, lon + size[0] / 2])).tolist()
    south, north = lat - size[1] / 2, lat + size[1] / 2
    plane = Projection.centred_on(west, south, east, north)
    assert -180 <= plane.centre_lon <= 180
    u, v = np.array(ends[:2]), np.array(ends[2:])
    places = np.stack([wrapped(lon + (u - 0.5) * size[0]), south + v * size[1]], axis=-1)
    xy = plane.to_plane(places)
    distortion = plane.distortion(max(float(np.hypot(*xy.T).max()), 0.1))
    planar, ground = float(np.linalg.norm(xy[0] - xy[1])), float(ground_km(places[0], places[1]))
    assert planar <= (1 + distortion) * ground + _SNAP_KM
    # Azimuthal equidistant: along the radius true, across it longer, never shorter on a sphere; nearly here.
    assert planar >= (1 - distortion) * ground - _SNAP_KM
    # And back, in [-180, 180].
    back = plane.to_degrees(xy)
    assert np.all(np.abs(back[:, 0]) <= 180)
    assert np.all(ground_km(back, places) <= _SNAP_KM)


@pytest.mark.parametrize("lat", [-75.0, 0.0, 60.0, 75.0])
@pytest.mark.parametrize("lon", [179.999, -179.999, 12.5])
def test_box_around_a_network_is_as_wide_as_the_network(lon: float, lat: float) -> None:
    network = lattice(lon, lat)
    west, south, east, north = network.box_degrees
    box = Box.around(Projection.centred_on(west, south, east, north).to_plane(network.lonlat))
    assert 7.9 < box.width_km < 8.6
    assert 7.9 < box.height_km < 8.6
    assert (west > east) == (abs(lon) > 179)
    assert np.hypot((box.west_km + box.east_km) / 2, (box.south_km + box.north_km) / 2) < 0.3


# --- whole jobs -----------------------------------------------------------------------------------


_PLACES = {
    "taveuni": (179.99, -16.85), "chukotka": (-179.99, 66.5), "equator": (36.8, 0.0),
    "svalbard": (15.6, 75.0), "antarctica": (-67.5, -75.0),
}  # fmt: skip


def _job(small_job: JobMaker, roads: str, **domain: Any) -> dict[str, dict[str, Any]]:
    section = {"roads": roads, "cell_km": 3.0, "refine": [3], **domain}
    return small_job(domain=section, outputs={"count": 6}, loss={"tasks": 4})


def _assert_promise_holds_on_the_ground(store: MechanismStore) -> float:
    """Check |log ratio| ≤ ε · geodesic for all pairs of records and all outputs; return the largest share."""
    assert store.projection is not None
    rows = all_rows(store).reshape(-1, store.plan.outputs).astype(float)
    logs = np.log(rows / rows.sum(axis=1, keepdims=True))
    lonlat = store.projection.to_degrees(all_records(store.grid))
    assert np.all(np.abs(lonlat[:, 0]) <= 180)
    one, other = np.triu_indices(len(lonlat), 1)
    ground = ground_km(lonlat[one], lonlat[other])
    ratio = np.abs(logs[one] - logs[other]).max(axis=1)
    epsilon = float(store.attributes["epsilon_per_km"])
    # A part in a billion for the rounding of logarithms here; what was certified is exact.
    assert np.all(ratio <= epsilon * ground * (1 + 1e-9))
    return float(np.max(ratio / (epsilon * ground)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_job: JobMaker) -> Callable[[str], str]:
    """Return a function from a place to its finished store, built when it is first asked for."""

    @cache
    def make(place: str) -> str:
        folder = tmp_path_factory.mktemp(place)
        url = str(folder / "out.zarr")
        roads = lattice_folder(folder / "roads", *_PLACES[place])
        assert build(parse_job(_job(small_job, roads)), url)["state"] == "complete"
        return url

    return make


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place in ("taveuni", "svalbard") else pytest.mark.slow)
        for place in _PLACES
    ],
)
def test_whole_job_keeps_its_promise_on_the_ground(built: Callable[[str], str], place: str) -> None:
    lon, lat = _PLACES[place]
    url = built(place)
    store = MechanismStore.open(url)
    assert store.grid.cells_x == store.grid.cells_y == 3
    # Nearly all of ε is used, so that a promise a tenth too large would be seen.
    assert _assert_promise_holds_on_the_ground(store) > 0.8
    mechanism = open_mechanism(url)
    reported = mechanism.sample(lon=lon, lat=lat, n=20)
    assert np.all(np.abs(reported[:, 0]) <= 180)
    assert np.all(ground_km(reported, np.array([lon, lat])) < 8)
    outputs = mechanism.output_lonlat
    west, east = arc(outputs[:, 0], outputs[:, 0])
    assert (west > east) == (abs(lon) > 179)
    assert mechanism.places.grid.box.contains(mechanism.places.many(outputs, planar=False)).all()


def test_both_sides_of_the_antimeridian_are_one_place(built: Callable[[str], str]) -> None:
    url = built("taveuni")
    assert audit(url).holds
    mechanism = open_mechanism(url)
    np.testing.assert_array_equal(*(mechanism.row(lon=lon, lat=-16.85) for lon in (180.0, -180.0)))
    near = np.array([[179.999, -16.85], [-179.999, -16.85], [179.96, -16.85], [-179.98, -16.85]])
    drawn, outside = mechanism.sample_points(near)
    assert not outside.any()
    assert np.all((drawn >= 0) & (drawn < 6))


@pytest.mark.parametrize("centre", [(179.99, -16.85), (-179.99, 66.5)])
def test_regions_across_the_antimeridian(tmp_path: Path, small_job: Any, centre: tuple[float, float]) -> None:
    lon, lat = centre
    roads = lattice_folder(tmp_path / "roads", lon, lat)
    half = 3.2 / (111.3 * np.cos(np.radians(lat)))
    west, east = (float(v) for v in wrapped(np.array([lon - half, lon + half])))
    bbox = [west, lat - 0.028, east, lat + 0.028]
    assert west > east
    boxed = road_geometry(_job(small_job, roads, bbox=bbox))
    assert 7 * 7 == len(boxed.nodes_inside) < boxed.network.nodes
    assert boxed.grid.cells_x == boxed.grid.cells_y == 3
    assert set(np.sign(boxed.network.lonlat[boxed.nodes_inside][:, 0])) >= {-1, 1}
    # The same box as polygons, cut at the antimeridian, and half of it as one polygon.
    south, north = bbox[1], bbox[3]
    sides = (west, 180.0), (-180.0, east)
    rings = [[[w, south], [e, south], [e, north], [w, north], [w, south]] for w, e in sides]
    path = tmp_path / "region.geojson"
    path.write_text(json.dumps({"type": "MultiPolygon", "coordinates": [[ring] for ring in rings]}))
    assert read_region(str(path)).box_degrees == tuple(bbox)
    framed = road_geometry(_job(small_job, roads, region=str(path)))
    assert framed.kept.all()
    assert (framed.projection, framed.grid.cells_x) == (boxed.projection, boxed.grid.cells_x)
    whole = road_geometry(_job(small_job, roads, region=str(path), bbox=bbox))
    assert not any("of the region lies outside" in note for note in whole.notes)
    polygon_file(path, rings[0])
    # A wider box does not make a region wider, nor does one that ends where it begins.
    half_region = read_region(str(path)).within((west - 0.1, south - 0.1, east, north))
    np.testing.assert_allclose(half_region.box_degrees, (west, south, 180.0, north))
    turned = road_geometry(_job(small_job, roads, region=str(path), rotation_deg="auto", cell_km=2.0))
    assert max(turned.grid.box.width_km, turned.grid.box.height_km) < 9


def test_polygons_are_cut_by_a_box_across_the_antimeridian(tmp_path: Path) -> None:
    box = 179.0, -18.0, -179.0, -16.0
    ring = [[-180, -60], [180, -60], [180, 75], [-180, 75], [-180, -60]]
    part = read_region(polygon_file(tmp_path / "world.geojson", ring)).within(box)
    assert (part.box_degrees, part.shape.geom_type, part.shape.area) == (box, "Polygon", pytest.approx(4.0))
    ring = [[170, -18], [171, -18], [171, -17], [170, -17], [170, -18]]
    away = read_region(polygon_file(tmp_path / "away.geojson", ring))
    refusal(lambda: away.within(box), "lies outside domain.bbox", kind=DataError)


def test_points_across_the_antimeridian_are_a_prior(tmp_path: Path, small_job: JobMaker) -> None:
    roads = lattice_folder(tmp_path / "roads", 179.99, -16.85)
    places = [(179.98, -16.85, 1), (-179.99, -16.85, 3)]
    points = point_file(tmp_path / "points.csv", "lon,lat,weight", places)
    domain = build_domain(parse_job({**_job(small_job, roads), "prior": {"kind": "file", "file": points}}))
    x = domain.grid.x_km()
    weights = domain.prior.sum(axis=1)
    assert sorted(weights[weights > 0].tolist()) == [0.25, 0.75]
    # The heavier one lies some three kilometres to the east.
    assert 1 < x[np.argmax(weights)] - x[np.flatnonzero(weights)].min() < 5


@pytest.mark.parametrize(
    ("bbox", "named"),
    [
        ([13.0, 41.0, 12.0, 42.0], "359 degrees wide"),
        ([181.0, -17.0, 182.0, -16.0], "must be [west, south, east, north]"),
        ([179.0, -17.0, -179.0, -17.0], "must be [west, south, east, north]"),
        ([0.0, 80.0, 90.0, 90.0], "must be [west, south, east, north]"),
    ],
)
def test_boxes_that_are_none_are_refused(small_job: JobMaker, bbox: list[float], named: str) -> None:
    refusal(lambda: parse_job(small_job(domain={"bbox": bbox})), "domain.bbox", named, kind=SpecError)


# --- poles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lat", [90.0, *(pytest.param(case, marks=pytest.mark.slow) for case in [89.0, -89.0])]
)
def test_job_around_a_pole_keeps_its_promise_too(tmp_path: Path, small_job: JobMaker, lat: float) -> None:
    """Around a pole the box in degrees goes almost all the way round, yet the plane's centre is near."""
    url = str(tmp_path / "out.zarr")
    build(parse_job(_job(small_job, lattice_folder(tmp_path / "roads", 25.0, lat))), url)
    assert _assert_promise_holds_on_the_ground(MechanismStore.open(url)) > 0.8


def test_region_of_a_whole_continent_around_a_pole_is_refused(tmp_path: Path, small_job: JobMaker) -> None:
    ring = [[-180, -90], [180, -90], [180, -65], [-180, -65], [-180, -90]]
    region = polygon_file(tmp_path / "antarctica.geojson", ring)
    job = _job(small_job, lattice_folder(tmp_path / "roads", -67.5, -75.0), region=region)
    message = refusal(lambda: road_geometry(job))
    assert "plane" in message or "distorts" in message
