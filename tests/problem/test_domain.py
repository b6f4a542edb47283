"""From a job to a problem: outputs, prior and tasks are what the job says, or it is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mdpext_dask
from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss, TravelLoss
from mdpext_dask.problem.outputs import output_count
from mdpext_dask.problem.projection import Projection
from tests.support.problems import JobMaker, point_file, road_folder, road_geometry
from tests.support.refusals import refusal

Build = Callable[..., Domain]
# Six nodes: a square of about 8 km, with one node in its middle and an island of one.
_SQUARE = {
    1: (12.0, 42.0), 2: (12.1, 42.0), 3: (12.0, 42.07), 4: (12.1, 42.07), 5: (12.05, 42.035),
    6: (12.02, 42.05),
}  # fmt: skip
_NODES = [(node, *place) for node, place in _SQUARE.items()]
_STREETS = [
    (1, 2, 8300, 0), (2, 4, 7800, 0), (4, 3, 8300, 0), (3, 1, 7800, 1), (1, 5, 5700, 0), (5, 4, 5700, 0),
]  # fmt: skip
_BBOX = [-74.0, 40.72, -73.94, 40.8]


@pytest.fixture
def build(small_job: JobMaker) -> Build:
    """Return a function from sections of a small job to its domain."""
    return lambda **sections: build_domain(parse_job(small_job(**sections)))


@pytest.fixture
def square(tmp_path: Path) -> dict[str, Any]:
    """Return a domain section for the hand-made network: 2 x 2 cells, or nearly so, of 5 km."""
    return {"roads": road_folder(tmp_path / "square", _NODES, _STREETS), "cell_km": 5.0, "refine": [2]}


def _prior_by_hand(grid: Grid, xy_km: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the share of the weight whose nearest record is each record, by brute force."""
    x, y = np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij")
    prior = np.zeros(grid.shape)
    for (east, north), w in zip(xy_km, weight, strict=True):
        prior[np.unravel_index(np.argmin(np.hypot(x - east, y - north)), grid.shape)] += w
    return prior / weight.sum()


def _file(path: str) -> dict[str, Any]:
    return {"choose": "file", "file": path, "count": None}


def _travel(domain: Domain) -> TravelLoss:
    assert isinstance(domain.loss, TravelLoss)
    return domain.loss


# --- the grid --------------------------------------------------------------------------------------


def test_grid_starts_at_the_networks_south_west_corner(small_job: JobMaker) -> None:
    found = road_geometry(small_job())
    west, south, east, north = found.network.box_degrees
    assert found.projection == Projection((west + east) / 2, (south + north) / 2)
    assert (found.grid.west_km, found.grid.south_km) == tuple(found.node_xy_km.min(axis=0))
    assert found.grid.box.contains(found.node_xy_km).all()
    assert (found.grid.refine, found.grid.cell_km) == ((2, 2), 3.0)


@pytest.mark.parametrize("rotation", [0.0, 30.0])
def test_box_in_degrees_is_covered_and_says_which_nodes_count(small_job: JobMaker, rotation: float) -> None:
    west, south, east, north = _BBOX
    found = road_geometry(small_job(domain={"bbox": _BBOX, "cell_km": 2.0, "rotation_deg": rotation}))
    assert (found.projection.centre_lon, found.projection.centre_lat) == pytest.approx((-73.97, 40.76))
    places = np.random.default_rng(1).uniform((west, south), (east, north), (1000, 2))
    # Parallels bulge to the south here, so the southern border reaches lowest in its middle.
    places[::4, 1], places[1::4, 1], places[2::4, 0] = south, north, west
    places[:3] = ((west + east) / 2, south), (west, north), (east, north)
    assert found.grid.box.contains(found.projection.to_plane(places)).all()
    # Not much more than the box is covered: less than a cell a side.
    if rotation == 0:
        assert found.grid.box.width_km < 2.0 + (east - west) * 111.33 * np.cos(np.deg2rad(south))
        assert found.grid.box.height_km < 2.0 + (north - south) * 111.7
    inside = [west <= lon <= east and south <= lat <= north for lon, lat in found.network.lonlat]
    assert found.nodes_inside.tolist() == np.flatnonzero(inside).tolist()
    assert 8 < len(found.nodes_inside) < found.network.nodes


def test_box_away_from_the_network_is_refused(small_job: JobMaker) -> None:
    spec = parse_job(small_job(domain={"bbox": [12.0, 41.0, 12.5, 41.5]}))
    parts = "domain.bbox", "no road within reach", "12.0", "-74.0179"
    for action in (build_geometry, build_domain):
        refusal(partial(action, spec), *parts, kind=DataError)


def test_a_box_with_latitudes_first_is_told_its_order(small_job: JobMaker) -> None:
    west, south, east, north = _BBOX
    spec = parse_job(small_job(domain={"bbox": [south, west, north, east]}))
    parts = "the order is west, south, east, north", str([west, south, east, north])
    refusal(lambda: build_geometry(spec), *parts, kind=DataError)


def test_more_outputs_than_records_are_told(small_job: JobMaker) -> None:
    job = small_job(domain={"cell_km": 6.0, "refine": [2]}, outputs={"count": 60}, loss={"kind": "euclidean"})
    domain = build_domain(parse_job(job))
    assert domain.grid.records < 60
    assert any(f"60 for {domain.grid.records} records" in note for note in domain.notes)


# --- the network -----------------------------------------------------------------------------------


def test_dropped_part_of_the_network_is_reported(build: Build, square: dict[str, Any]) -> None:
    domain = build(domain=square, outputs={"count": 5})
    assert any("5 of 6 nodes" in note for note in domain.notes)
    assert len(_travel(domain).node_xy_km) == 5
    assert build().notes == ()


def test_part_that_streets_lead_back_to_is_kept_if_directed(build: Build, tmp_path: Path) -> None:
    # Node 3 can be left but not reached.
    streets = [street for street in _STREETS if street[:2] != (4, 3)]
    roads = road_folder(tmp_path / "square", _NODES, streets)
    section = {"roads": roads, "cell_km": 5.0}
    free = build(domain=section, outputs={"count": 4}, loss={"tasks": 4})
    bound = build(domain=section, outputs={"count": 4}, loss={"tasks": 4, "directed": True})
    assert any("5 of 6" in note for note in free.notes)
    assert any("4 of 6" in note for note in bound.notes)
    assert np.isfinite(_travel(bound).task_distance_km).all()
    roads = road_folder(tmp_path / "broken", _NODES, [(1, 2, 8300, 0), (3, 4, 8300, 0)])
    job = partial(build, domain={"roads": roads}, outputs={"count": 1})
    refusal(job, "2 of 6 nodes", roads, kind=DataError)


# --- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bbox", [None, _BBOX])
def test_outputs_are_distinct_road_nodes_in_the_box(small_job: JobMaker, bbox: list[float] | None) -> None:
    spec = parse_job(small_job(domain={"bbox": bbox}, outputs={"count": 200}))
    geometry = build_geometry(spec)
    domain = build_domain(spec, geometry)
    assert domain.outputs == output_count(spec, geometry) == 200
    assert len(np.unique(domain.output_xy_km, axis=0)) == 200
    assert domain.grid.box.contains(domain.output_xy_km).all()
    allowed = {tuple(place) for place in geometry.node_xy_km[geometry.nodes_inside]}
    assert all(tuple(place) in allowed for place in domain.output_xy_km)
    loss = _travel(domain)
    np.testing.assert_array_equal(loss.node_xy_km[loss.output_node], domain.output_xy_km)
    nodes = {tuple(place) for place in np.round(geometry.network.lonlat, 9)}
    assert all(tuple(place) in nodes for place in np.round(domain.output_lonlat, 9))


def test_all_road_nodes_of_the_box_may_be_outputs_or_tasks(build: Build, square: dict[str, Any]) -> None:
    half = {**square, "bbox": [11.99, 41.98, 12.06, 42.08], "cell_km": 2.0}
    for domain, nodes in ((square, 5), (half, 3)):
        assert build(domain=domain, outputs={"count": nodes}, loss={"tasks": nodes}).outputs == nodes
        for key, sections in (
            ("outputs.count", {"outputs": {"count": nodes + 1}, "loss": {"tasks": nodes}}),
            ("loss.tasks", {"outputs": {"count": nodes}, "loss": {"tasks": nodes + 1}}),
        ):
            job = partial(build, domain=domain, **sections)
            refusal(job, key, str(nodes + 1), f"only {nodes} road nodes", kind=DataError)


def test_outputs_of_a_file_are_kept_as_they_are(build: Build, tmp_path: Path) -> None:
    places = [(-73.97, 40.78), (-74.0, 40.72), (-73.95, 40.82)]
    domain = build(outputs=_file(point_file(tmp_path / "outputs.csv", "lon,lat", places)))
    np.testing.assert_allclose(domain.output_lonlat, places, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(domain.output_xy_km, domain.projection.to_plane(np.array(places)))
    loss = _travel(domain)
    for place, node in zip(domain.output_xy_km, loss.output_node, strict=True):
        assert node == np.argmin(np.linalg.norm(loss.node_xy_km - place, axis=1))
    places = [(0.0, 0.0), (-2.5, 3.25)]  # or in kilometres
    domain = build(outputs=_file(point_file(tmp_path / "outputs.csv", "x_km,y_km", places)))
    np.testing.assert_array_equal(domain.output_xy_km, places)
    np.testing.assert_allclose(domain.projection.to_plane(domain.output_lonlat), places, atol=1e-9)


@pytest.mark.parametrize("header", ["a,b", "LNG,b", "lon,Latitude"])
def test_columns_of_files_may_have_any_name(build: Build, tmp_path: Path, header: str) -> None:
    """Those that the job names, or else those whose names say it."""
    places = [(-73.97, 40.78), (-74.0, 40.72), (-73.95, 40.82)]
    names = header.split(",")
    outputs, prior, tasks = (
        {
            f"{before}{key}_column": name
            for key, name in zip(("lon", "lat"), names, strict=True)
            if name in "ab"
        }
        for before in ("", "", "tasks_")
    )
    found = []
    named = ("named.csv", header, (outputs, prior, tasks))
    for name, columns, keys in (("plain.csv", "lon,lat", ({}, {}, {})), named):
        file = point_file(tmp_path / name, columns, places)
        sections = {"outputs": {**_file(file), **keys[0]}, "prior": {"kind": "file", "file": file, **keys[1]}}
        found.append(build(**sections, loss={"tasks_file": file, **keys[2]}))
    one, other = found
    np.testing.assert_array_equal(one.output_lonlat, other.output_lonlat)
    np.testing.assert_array_equal(one.prior, other.prior)
    np.testing.assert_array_equal(_travel(one).task_distance_km, _travel(other).task_distance_km)


def test_output_outside_the_grid_or_twice_is_refused(build: Build, tmp_path: Path) -> None:
    for columns, places in (
        ("lon,lat", [(-73.97, 40.78), (-73.5, 40.78)]), ("lon,lat", [(-73.97, 40.78), (12.5, 41.9)]),
        ("x_km,y_km", [(0, 0), (400, 0)]),
    ):  # fmt: skip
        file = point_file(tmp_path / "outputs.csv", columns, places)
        parts = "outputs.file", file, "1 of 2", "point 2", "outside the grid"
        refusal(partial(build, outputs=_file(file)), *parts, kind=DataError)
    point_file(tmp_path / "outputs.csv", "x_km,y_km", [(0, 0), (1, 1), (0, 0)])
    refusal(lambda: build(outputs=_file(file)), "outputs.file", "same place", kind=DataError)


def test_outputs_may_be_the_corners(small_job: JobMaker) -> None:
    spec = parse_job(small_job(outputs={"choose": "seeds", "count": None}))
    geometry = build_geometry(spec)
    domain = build_domain(spec, geometry)
    assert np.array_equal(domain.output_xy_km, domain.grid.seeds_xy_km())
    assert domain.outputs == output_count(spec, geometry) == domain.grid.seeds


def test_floor_is_checked_where_the_job_does_not_say_how_many_outputs(build: Build, tmp_path: Path) -> None:
    file = point_file(tmp_path / "outputs.csv", "x_km,y_km", [(0, 0), (1, 1)])
    for outputs in ({"choose": "seeds", "count": None}, _file(file)):
        job = partial(build, outputs=outputs, privacy={"min_probability": 0.5})
        refusal(job, "privacy.min_probability", kind=SpecError)
    assert build(outputs=_file(file), privacy={"min_probability": 0.49}).outputs == 2


# --- the prior -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bbox", [None, _BBOX])
def test_road_nodes_count_at_their_nearest_record(small_job: JobMaker, bbox: list[float] | None) -> None:
    spec = parse_job(small_job(domain={"bbox": bbox}))
    geometry = build_geometry(spec)
    nodes = geometry.node_xy_km[geometry.nodes_inside]
    expected = _prior_by_hand(geometry.grid, nodes, np.ones(len(nodes)))
    np.testing.assert_allclose(build_domain(spec, geometry).prior, expected, rtol=0, atol=1e-12)


def test_trips_prior_counts_trips_at_their_nearest_record(build: Build) -> None:
    path = Path(mdpext_dask.__file__).parent / "readers" / "data" / "manhattan" / "trip_origins.csv.gz"
    trips = pd.read_csv(path)
    domain = build(prior={"kind": "file", "file": "builtin:manhattan-trips"})
    places = domain.projection.to_plane(trips[["lon", "lat"]].to_numpy())
    expected = _prior_by_hand(domain.grid, places, trips["weight"].to_numpy())
    np.testing.assert_allclose(domain.prior, expected, rtol=0, atol=1e-12)
    assert domain.notes == ()
    assert not np.allclose(domain.prior, build().prior)
    uniform = build(prior={"kind": "uniform"}).prior
    np.testing.assert_array_equal(uniform, np.full(domain.grid.shape, 1 / domain.grid.records))


def test_weights_of_a_file_land_on_the_nearest_record(build: Build, tmp_path: Path) -> None:
    grid = build().grid
    x, y, step = grid.x_km(), grid.y_km(), grid.spacing_km
    places = [
        (x[3], y[4], 2.0), (x[3] + 0.4 * step, y[4] - 0.4 * step, 1.0), (x[3] + 0.6 * step, y[4], 4.0),
        (x[7], y[20] + 0.1 * step, 0.0), (x[9], y[20] + 0.1 * step, 1.0),
    ]  # fmt: skip
    file = point_file(tmp_path / "prior.csv", "x_km,y_km,weight", places)
    domain = build(prior={"kind": "file", "file": file})
    expected = np.zeros(grid.shape)
    expected[3, 4], expected[4, 4], expected[9, 20] = 3 / 8, 4 / 8, 1 / 8
    np.testing.assert_array_equal(domain.prior, expected)
    assert domain.notes == ()


def test_places_of_a_file_without_weights_count_alike(build: Build, tmp_path: Path) -> None:
    domain = build()
    records = np.array([(domain.grid.x_km()[i], domain.grid.y_km()[j]) for i, j in ((1, 1), (5, 9), (5, 9))])
    file = point_file(tmp_path / "prior.csv", "lon,lat", domain.projection.to_degrees(records))
    prior = build(prior={"kind": "file", "file": file}).prior
    assert (prior[1, 1], prior[5, 9]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert np.count_nonzero(prior) == 2
    # Weights whose sum is no float.
    places = [(-73.98, 40.75, 1e308), (-73.95, 40.80, 1e308)]
    file = point_file(tmp_path / "prior.csv", "lon,lat,weight", places)
    prior = build(prior={"kind": "file", "file": file}).prior
    assert sorted(prior[prior > 0]) == pytest.approx([0.5, 0.5])


def test_prior_points_outside_are_left_out_and_reported(build: Build, tmp_path: Path) -> None:
    grid = build().grid
    places = [(grid.x_km()[2], grid.y_km()[2], 1.0), (400, 0, 50.0), (0, -99.5, 50.0)]
    file = point_file(tmp_path / "prior.csv", "x_km,y_km,weight", places)
    domain = build(prior={"kind": "file", "file": file})
    assert domain.prior[2, 2] == 1
    note, alone = domain.notes
    assert alone.startswith("prior: all of it is at one record")
    assert note.startswith(
        f"prior.file: {file}: 2 of 3 points lie outside the grid (the furthest, point 2, by "
    )


def test_prior_without_weight_inside_or_unknown_is_refused(build: Build, tmp_path: Path) -> None:
    prior = {"kind": "file", "file": str(tmp_path / "prior.csv")}
    for places in ([(400, 0, 1), (500, 0, 1)], [(0, 0, 0), (500, 0, 1)]):
        file = point_file(tmp_path / "prior.csv", "x_km,y_km,weight", places)
        refusal(lambda: build(prior=prior), "prior.file", file, kind=DataError)
    job = partial(build, prior={**prior, "file": "builtin:rome-trips"})
    refusal(job, "prior.file", "builtin:manhattan-trips", kind=SpecError)


def test_missing_points_file_is_refused(build: Build, tmp_path: Path) -> None:
    file = str(tmp_path / "none.csv")
    for sections in (
        {"outputs": _file(file)}, {"prior": {"kind": "file", "file": file}}, {"loss": {"tasks_file": file}},
    ):  # fmt: skip
        refusal(partial(build, **sections), file, kind=DataError)


# --- the loss --------------------------------------------------------------------------------------


def test_euclidean_loss_is_distance_to_the_outputs(build: Build) -> None:
    domain = build(loss={"kind": "euclidean"})
    assert isinstance(domain.loss, EuclideanLoss)
    [row] = domain.loss.rows(np.array([(0.5, -0.25)]))
    expected = [np.hypot(x - 0.5, y + 0.25) for x, y in domain.output_xy_km]
    np.testing.assert_allclose(row, expected, rtol=1e-14)


def test_tasks_are_distinct_road_nodes_of_equal_weight(build: Build, square: dict[str, Any]) -> None:
    loss = _travel(build(loss={"tasks": 50}))
    assert loss.task_weight.tolist() == [1 / 50] * 50
    assert (loss.task_distance_km == 0).any(axis=0).all()
    # As many tasks as nodes: every node is one.
    for seed in range(5):
        loss = _travel(build(domain=square, outputs={"count": 2}, loss={"tasks": 5, "random_seed": seed}))
        assert (loss.task_distance_km == 0).sum(axis=0).tolist() == [1] * 5
        assert (loss.task_distance_km == 0).sum(axis=1).tolist() == [1] * 5


def test_tasks_are_drawn_from_the_box_only(small_job: JobMaker) -> None:
    spec = parse_job(small_job(domain={"bbox": _BBOX}, loss={"tasks": 100}))
    geometry = road_geometry(small_job(domain={"bbox": _BBOX}))
    loss = _travel(build_domain(spec, geometry))
    assert (loss.task_distance_km[geometry.nodes_inside] == 0).any(axis=0).all()


@pytest.mark.parametrize("directed", [False, True])
def test_tasks_of_a_file(build: Build, square: Any, tmp_path: Path, directed: bool) -> None:
    # Beside nodes 1 and 5; node 3 reaches node 1 directly, but not the other way round.
    tasks = [(12.001, 42.001, 1.0), (12.049, 42.034, 3.0)]
    file = point_file(tmp_path / "tasks.csv", "lon,lat,weight", tasks)
    domain = build(domain=square, outputs={"count": 5}, loss={"tasks_file": file, "directed": directed})
    loss = _travel(domain)
    assert loss.task_weight.tolist() == [0.25, 0.75]
    to_node_1 = [0, 8.3, 7.8, 11.4, 5.7]
    to_node_5 = [5.7, 13.5, 13.5, 5.7, 0]
    np.testing.assert_allclose(loss.task_distance_km, np.transpose([to_node_1, to_node_5]), rtol=1e-6)

    [row] = loss.rows(domain.projection.to_plane(np.array([_SQUARE[4]])))
    by_output = {
        tuple(np.round(place, 6)): 0.25 * abs(11.4 - a) + 0.75 * abs(5.7 - b)
        for place, a, b in zip((_SQUARE[node] for node in (1, 2, 3, 4, 5)), to_node_1, to_node_5, strict=True)
    }
    expected = [by_output[tuple(place)] for place in np.round(domain.output_lonlat, 6)]
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_travel_follows_one_way_streets(build: Build, square: dict[str, Any], tmp_path: Path) -> None:
    file = point_file(tmp_path / "tasks.csv", "lon,lat", [_SQUARE[3]])
    # From node 1 the street to node 3 is closed: by nodes 5 and 4 instead.
    for directed, expected in ((False, [7.8, 16.1, 0, 8.3, 13.5]), (True, [19.7, 16.1, 0, 8.3, 14.0])):
        loss = {"tasks_file": file, "directed": directed}
        found = _travel(build(domain=square, outputs={"count": 2}, loss=loss))
        np.testing.assert_allclose(found.task_distance_km[:, 0], expected, rtol=1e-6)


def test_tasks_outside_the_grid_are_refused(build: Build, tmp_path: Path) -> None:
    file = point_file(tmp_path / "tasks.csv", "lon,lat", [(-73.97, 40.78), (12.5, 41.9), (0, 0)])
    parts = "loss.tasks_file", file, "2 of 3", "outside the grid"
    refusal(lambda: build(loss={"tasks_file": file}), *parts, kind=DataError)


# --- what is drawn ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_random_seed_draws_one_thing(build: Build) -> None:
    def drawn(**sections: dict[str, Any]) -> list[bytes]:
        domain = build(**sections)
        assert np.array_equal(domain.prior, build().prior)
        return [domain.output_xy_km.tobytes(), _travel(domain).task_distance_km.tobytes()]

    outputs, tasks = drawn()
    assert drawn() == [outputs, tasks]
    other, same = drawn(outputs={"random_seed": 1})
    assert (other != outputs, same) == (True, tasks)
    for loss in ({"random_seed": 1}, {"tasks": 9}):
        same, other = drawn(loss=loss)
        assert (same, other != tasks) == (outputs, True)


def test_outputs_and_tasks_of_the_same_seed_are_different_draws(build: Build) -> None:
    loss = _travel(build(outputs={"count": 20, "random_seed": 4}, loss={"tasks": 20, "random_seed": 4}))
    at_outputs = loss.task_distance_km[loss.output_node] == 0
    assert at_outputs.any(axis=0).sum() < 10
