"""Rotated grids: the least rectangle is found, distances stay what they are, the pipeline does not mind."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyproj import CRS, Transformer

from mdpext_dask import audit, open_mechanism
from mdpext_dask.errors import GuaranteeViolation, SpecError
from mdpext_dask.job.spec import load_job, parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.grid import least_rectangle_deg
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.roads.read_network import read_roads
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.loss_files import job as loss_file_job
from tests.support.problems import (
    JobMaker,
    all_records,
    all_rows,
    ground_km,
    point_file,
    polygon_file,
    road_folder,
    road_geometry,
)
from tests.support.reference import audited_epsilon
from tests.support.refusals import refusal, refused

PLANE = Projection(-73.97, 40.78)
angles = st.floats(-180, 180)
places = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=8)


def area_at(xy: np.ndarray, degrees: float) -> float:
    """Return the area of the rectangle around points whose sides have a direction, by definition."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return float(np.ptp(c * xy[:, 0] + s * xy[:, 1]) * np.ptp(-s * xy[:, 0] + c * xy[:, 1]))


def at(degrees: float) -> Projection:
    """Return the plane turned by an angle."""
    return dataclasses.replace(PLANE, rotation_deg=degrees)


@pytest.fixture
def slanted(tmp_path: Path) -> str:
    """Return a thin rectangle, nearly 16 km by 2 km, its long side 30° from the east."""
    ring = np.array([(-8, -1), (8, -1), (8, 1), (-8, 1), (-8, -1)], dtype=float) * 0.99
    return polygon_file(tmp_path / "slanted.geojson", at(30.0).to_degrees(ring))


# --- the plane ------------------------------------------------------------------------------------


@given(angle=angles, places=places)
def test_turning_changes_no_distance(angle: float, places: list[tuple[float, float]]) -> None:
    xy = np.array(places)
    np.testing.assert_allclose(at(angle).to_plane(at(angle).to_degrees(xy)), xy, rtol=0, atol=2e-6)
    flat, turned = (plane.to_plane(PLANE.to_degrees(xy)) for plane in (PLANE, at(angle)))
    for of in (flat, turned):
        of -= of[0]
    np.testing.assert_allclose(np.hypot(*turned.T), np.hypot(*flat.T), rtol=1e-12, atol=1e-12)
    steps = (np.hypot(*(of[1:] - of[:-1]).T) for of in (turned, flat))
    np.testing.assert_allclose(*steps, rtol=1e-7, atol=1e-12)
    # The distortion is the same to the bit.
    assert at(angle).distortion(25.0) == PLANE.distortion(25.0)


def test_it_is_turned_counter_clockwise_or_not_at_all() -> None:
    """The first axis of a plane turned by 90° points to the north."""
    north = np.array([(-73.97, 40.9)])
    [[x, y]] = at(90.0).to_plane(north)
    assert x == pytest.approx(13.3, abs=0.1)
    assert y == pytest.approx(0, abs=1e-9)
    [[x, y]] = at(30.0).to_plane(north)
    assert math.degrees(math.atan2(y, x)) == pytest.approx(60)
    # Not turned, it is the same to the bit.
    lonlat = np.random.default_rng(0).uniform((-74.2, 40.5), (-73.7, 41), (50, 2))
    x, y = PLANE._proj(*lonlat.T)
    assert np.array_equal(Projection(-73.97, 40.78, 0.0).to_plane(lonlat), np.stack([x, y], axis=-1))


@pytest.mark.parametrize("angle", [30.0, -77.5, 180.0])
def test_other_software_reads_the_turned_plane_from_its_wkt(angle: float) -> None:
    turned = at(angle)
    mapping = turned.grid_mapping()
    plane = CRS.from_wkt(mapping["crs_wkt"])
    lonlat = np.random.default_rng(0).uniform((-74.2, 40.5), (-73.7, 41), (20, 2))
    x, y = Transformer.from_crs(plane.geodetic_crs, plane, always_xy=True).transform(*lonlat.T)
    np.testing.assert_allclose(np.stack([x, y], axis=-1), turned.to_plane(lonlat), rtol=0, atol=1e-6)
    assert "grid_mapping_name" not in mapping  # CF has none for it
    assert mapping["rotation_deg"] == angle
    json.dumps(mapping, allow_nan=False)


# --- the rectangle --------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    points=st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=4, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_direction_has_a_smaller_rectangle(points: list[tuple[float, float]], seed: int) -> None:
    xy = np.array(points) + np.random.default_rng(seed).normal(scale=0.1, size=(len(points), 2))
    found = least_rectangle_deg(xy)
    assert -45 <= found < 45
    scanned = min(area_at(xy, degrees) for degrees in np.linspace(-45, 45, 3601))
    assert area_at(xy, found) <= scanned * (1 + 1e-6)


@pytest.mark.parametrize("degrees", [-44.0, -10.0, 0.0, 30.0, 44.9])
@pytest.mark.parametrize("sides", [(16, 2), (2, 16), (5, 5)])
def test_a_rectangle_is_its_own_least_rectangle(degrees: float, sides: tuple[float, float]) -> None:
    a = math.radians(degrees)
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * sides
    xy = corners @ np.array([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) + (3, -7)
    assert least_rectangle_deg(xy) == pytest.approx(degrees, abs=1e-9)


def test_points_without_a_rectangle() -> None:
    for xy in ([(0, 0), (1, 1), (2, 2)], [(0, 0), (0, 0), (0, 0)], [(1, 2), (3, 4)], [(1, 2)]):
        assert least_rectangle_deg(np.array(xy, dtype=float)) == 0.0


# --- the grid -------------------------------------------------------------------------------------


def test_a_slanted_island_needs_far_fewer_cells(small_job: JobMaker, slanted: str) -> None:
    domain = {"region": slanted, "cell_km": 1.0}
    flat = plan_job(parse_job(small_job(domain=domain)))
    auto = plan_job(parse_job(small_job(domain={**domain, "rotation_deg": "auto"})))
    given = plan_job(parse_job(small_job(domain={**domain, "rotation_deg": 30.0})))
    assert auto["rotation_deg"] == pytest.approx(30, abs=0.1)
    assert given["rotation_deg"] == 30.0
    assert auto["source_cells"] == given["source_cells"] == 16 * 2
    assert flat["source_cells"] > 4 * auto["source_cells"]
    assert auto["source_cells_kept"] == auto["source_cells"]
    assert flat["records"] > 3.5 * auto["records"]


def test_auto_without_a_region_fits_the_road_nodes(small_job: JobMaker) -> None:
    flat, auto = (road_geometry(small_job(domain={"cell_km": 1.0, "rotation_deg": r})) for r in (0.0, "auto"))
    xy = flat.node_xy_km
    found = auto.projection.rotation_deg
    assert -45 <= found < 45
    scanned = min(area_at(xy, degrees) for degrees in np.linspace(-45, 45, 9001))
    assert area_at(xy, found) <= scanned * (1 + 1e-6)
    assert abs(found) > 20  # the streets of Manhattan
    assert auto.grid.source_cells < 0.65 * flat.grid.source_cells
    assert auto.grid.box.contains(auto.node_xy_km).all()
    assert (auto.grid.west_km, auto.grid.south_km) == tuple(auto.node_xy_km.min(axis=0))
    assert len(auto.nodes_inside) == auto.network.nodes


def test_auto_in_a_box_fits_what_lies_in_it(small_job: JobMaker, slanted: str) -> None:
    bbox = [-74.0, 40.72, -73.94, 40.8]
    geometry = road_geometry(small_job(domain={"bbox": bbox, "cell_km": 1.0, "rotation_deg": "auto"}))
    nodes = geometry.node_xy_km[geometry.nodes_inside]
    assert (geometry.grid.west_km, geometry.grid.south_km) == tuple(nodes.min(axis=0))
    assert (nodes.max(axis=0) <= (geometry.grid.box.east_km, geometry.grid.box.north_km)).all()
    domain = {"bbox": bbox, "cell_km": 1.0, "rotation_deg": "auto", "region": slanted}
    part = road_geometry(small_job(domain=domain))
    assert part.projection.rotation_deg == pytest.approx(30, abs=5)
    assert part.grid.source_cells < 40


# --- the pipeline ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("turned") / "m.zarr"
    job = {
        "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2], "rotation_deg": "auto"},
        "privacy": {"epsilon_per_km": 1.0}, "outputs": {"count": 6}, "loss": {"kind": "euclidean"},
        "seed": {"refine_rounds": 1}, "cluster": {"kind": "inline"},
    }  # fmt: skip
    assert build(parse_job(job), str(path))["state"] == "complete"
    return path


def test_a_turned_store_keeps_its_promise_on_the_ground(turned: Path) -> None:
    store = MechanismStore.open(str(turned))
    assert audit(str(turned)).holds
    grid, projection = store.grid, store.projection
    assert projection is not None
    assert abs(projection.rotation_deg) > 20
    rows = all_rows(store)
    exact = audited_epsilon(rows, grid.x_km(), grid.y_km(), 2.0)
    assert exact <= store.attributes["epsilon_certified"] <= store.planar_limit()
    # Pair by pair, by the distance on the ground.
    lonlat = projection.to_degrees(all_records(store.grid))
    logs = np.log(rows.reshape(len(lonlat), -1).astype(float))
    a, b = np.triu_indices(len(lonlat), 1)
    assert (np.abs(logs[a] - logs[b]).max(axis=1) <= ground_km(lonlat[a], lonlat[b]) + 1e-6).all()


def test_outputs_and_places_are_where_they_should_be(turned: Path) -> None:
    mechanism, network = open_mechanism(turned, verify=True), read_roads("builtin:manhattan", None)
    apart = np.abs(mechanism.output_lonlat[:, None] - network.lonlat[None]).max(axis=-1)
    assert apart.min(axis=1).max() < 1e-9
    drawn = mechanism.sample(lon=-73.98, lat=40.75, n=50)
    assert (np.abs(drawn[:, None] - mechanism.output_lonlat[None]).max(axis=-1).min(axis=1) == 0).all()
    # The nearest record on the ground is the one whose row is read.
    store = MechanismStore.open(str(turned))
    assert store.projection is not None
    row = mechanism.row(lon=-73.98, lat=40.75)
    lonlat = store.projection.to_degrees(xy := all_records(store.grid))
    nearest = int(np.argmin(ground_km(lonlat, np.array([-73.98, 40.75]))))
    assert (float(row.x), float(row.y)) == tuple(xy[nearest])
    inside, outside = np.array([[-73.98, 40.75]]), np.array([[-73.80, 40.90]])
    assert mechanism.sample_points(inside)[1].tolist() == [False]
    assert mechanism.sample_points(outside)[1].tolist() == [True]


def test_the_store_says_that_it_is_turned(turned: Path) -> None:
    dataset = xr.open_zarr(turned)
    projection = json.loads(dataset.attrs["projection"])
    rotation = projection["rotation_deg"]
    assert dataset.spatial_ref.attrs["rotation_deg"] == rotation
    assert "east = x cos(rotation_deg)" in dataset.spatial_ref.attrs["comment"]
    for axis in (dataset.x, dataset.y):
        assert "standard_name" not in axis.attrs  # projection_x_coordinate is that of the plane as it was
        assert "coordinate" in axis.attrs["long_name"]
    plane = CRS.from_wkt(dataset.spatial_ref.attrs["crs_wkt"])
    back = Transformer.from_crs(plane, plane.geodetic_crs, always_xy=True)
    lon, lat = back.transform(dataset.output_x.values, dataset.output_y.values)
    np.testing.assert_allclose(lon, dataset.output_lon, rtol=0, atol=1e-8)
    np.testing.assert_allclose(lat, dataset.output_lat, rtol=0, atol=1e-8)
    # By hand, as the comment says.
    a, x, y = math.radians(rotation), dataset.output_x.values, dataset.output_y.values
    centre = projection["centre_lon"], projection["centre_lat"]
    flat = Projection(*centre).to_plane(np.stack([lon, lat], axis=-1))
    east, north = x * math.cos(a) - y * math.sin(a), x * math.sin(a) + y * math.cos(a)
    np.testing.assert_allclose(np.stack([east, north], axis=-1), flat, atol=1e-6)


def test_the_rotation_is_part_of_the_problem(tmp_path: Path, small_job: JobMaker) -> None:
    paths = {angle: str(tmp_path / f"{angle}.zarr") for angle in (0.0, 30.0, 180.0)}
    for angle, path in paths.items():
        init(parse_job(small_job(domain={"rotation_deg": angle})), path)
    assert len({MechanismStore.open(path).problem_sha256 for path in paths.values()}) == 3
    build(parse_job(small_job(domain={"rotation_deg": 30.0})), paths[30.0])
    store = MechanismStore.open(paths[30.0], mode="r+")
    store.update(projection={**store.attributes["projection"], "rotation_deg": 31.0})
    refused(GuaranteeViolation, "projection", lambda: open_mechanism(paths[30.0], verify=True))
    assert "projection" in audit(paths[30.0]).changed


@pytest.mark.slow
def test_a_turned_region(tmp_path: Path, small_job: JobMaker, slanted: str) -> None:
    """Half of the slanted island in the grid that fits it, and blocks that are skipped."""
    a, b, c, d, _ = json.loads(Path(slanted).read_text())["coordinates"][0]
    polygon_file(Path(slanted), [a, b, c, a])
    domain = {"region": slanted, "rotation_deg": "auto", "cell_km": 0.5, "refine": [2]}
    job = small_job(domain=domain, loss={"kind": "euclidean"}, store={"block_cells": [2, 2]})
    summary = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert summary["state"] == "complete"
    assert 0 < summary["blocks_skipped"] < summary["blocks"]
    assert summary["rotation_deg"] == pytest.approx(30, abs=8)
    mechanism = open_mechanism(tmp_path / "s.zarr", verify=True)
    lonlat = np.array([[(p + q) / 2 for p, q in zip(a, c, strict=True)], d])
    assert mechanism.sample_points(lonlat)[1].tolist() == [False, True]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 181, -200.0, "30", "automatic", "", True, [30], {"a": 1}]
)
def test_what_is_no_angle_is_one_line(small_job: JobMaker, value: Any) -> None:
    expected = "domain.rotation_deg: must be a number of degrees from -180 to 180"
    job = small_job(domain={"rotation_deg": value})
    refusal(lambda: parse_job(job), expected, repr(value), kind=SpecError)


@pytest.mark.parametrize("rotation", [30, "auto"])
def test_what_may_not_be_turned(small_job: JobMaker, rotation: float | str) -> None:
    """Distances that are taken along the axes, and the grid of a loss file."""
    for p in (1, 1.5, 4, "inf"):
        job = small_job(domain={"rotation_deg": rotation, "metric_p": p})
        refusal(lambda job=job: parse_job(job), "domain.rotation_deg", "metric_p = 2 only", kind=SpecError)
        assert parse_job(small_job(domain={"rotation_deg": 0, "metric_p": p})).domain.rotation_deg == 0
    job = loss_file_job(Path("l.npz"), domain={"rotation_deg": rotation})
    refusal(lambda: parse_job(job), "domain.rotation_deg: does not go with loss.kind", kind=SpecError)


def test_turning_to_a_loss_file_drops_region_and_rotation(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[domain]\nroads = "builtin:manhattan"\ncell_km = 3\nrefine = [2]\nregion = "r.geojson"\n'
        'rotation_deg = "auto"\n[privacy]\nepsilon_per_km = 1\n[outputs]\ncount = 3\n'
    )
    assert load_job(job).domain.region == str(tmp_path / "r.geojson")
    assert load_job(job).domain.rotation_deg == "auto"
    domain = load_job(job, ["loss.kind=file", "loss.file=l.npz"]).domain
    assert (domain.region, domain.rotation_deg) == (None, 0.0)
    assert load_job(job, ["domain.rotation_deg=15"]).domain.rotation_deg == 15.0


def test_planar_outputs_are_in_the_turned_plane(small_job: JobMaker, tmp_path: Path) -> None:
    """x_km and y_km are those of the grid, so they turn with it."""
    points = point_file(tmp_path / "o.csv", "x_km,y_km", [(2, 0), (0, 3)])
    job = small_job(domain={"rotation_deg": 30.0}, loss={"kind": "euclidean"})
    job["outputs"] = {"choose": "file", "file": points}
    domain = build_domain(parse_job(job))
    assert domain.projection is not None
    flat = dataclasses.replace(domain.projection, rotation_deg=0.0).to_plane(domain.output_lonlat)
    np.testing.assert_allclose(np.degrees(np.arctan2(flat[:, 1], flat[:, 0])), [30, 120], atol=1e-6)


def test_roads_on_one_line_are_refused(small_job: JobMaker, tmp_path: Path) -> None:
    nodes = [(n, -73.9, 40 + n / 10) for n in range(4)]
    roads = road_folder(tmp_path / "line", nodes, [(n, n + 1, 11100, 0) for n in range(3)])
    domain = {"roads": roads, "rotation_deg": "auto"}
    refusal(lambda: road_geometry(small_job(domain=domain)), "larger than the box", kind=SpecError)
