"""Outputs from files, from the prior and from all road nodes, and whole jobs with them."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import geopandas
import numpy as np
import pytest
import rasterio
import shapely
from affine import Affine

from mdpext_dask import build, open_mechanism
from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import JobSpec, files_of, load_job, parse_job, with_overrides
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import TravelLoss
from mdpext_dask.problem.outputs import centres_of, output_count
from mdpext_dask.reports.compare.answers import Case
from mdpext_dask.reports.compare.protocol import compare
from tests.support.problems import all_records, point_file, road_folder, write_toml
from tests.support.refusals import refusal

# Six by five road nodes, a kilometre apart or so, and one street that is one place with another's end.
EAST, NORTH = 12.5 + 0.012 * np.arange(6), 41.9 + 0.009 * np.arange(5)
# Places inside, one of them twice as heavy; and one outside.
PLACES = [(12.51, 41.91, 1.0), (12.53, 41.92, 2.0), (12.55, 41.93, 0.0)]
OUTSIDE = (13.5, 41.91, 1.0)


Make = Callable[..., JobSpec]


@pytest.fixture
def roads(tmp_path: Path) -> str:
    nodes = [(6 * j + i, x, y) for j, y in enumerate(NORTH) for i, x in enumerate(EAST)]
    nodes.append((99, *nodes[0][1:]))  # the place of another
    edges = [(6 * j + i, 6 * j + i + 1, 1000, 0) for j in range(5) for i in range(5)]
    edges += [(6 * j + i, 6 * j + i + 6, 1000, 0) for j in range(4) for i in range(6)] + [(0, 99, 10, 0)]
    return road_folder(tmp_path / "roads", nodes, edges)


@pytest.fixture
def job(roads: str) -> Make:
    def make(**sections: dict[str, Any]) -> JobSpec:
        document: dict[str, dict[str, Any]] = {
            "domain": {"roads": roads, "cell_km": 1.5, "refine": [2]},
            "privacy": {"epsilon_per_km": 1.0, "budget": "bound"}, "extension": {"method": "log-convex"},
            "outputs": {"count": 4}, "loss": {"tasks": 3}, "cluster": {"kind": "inline"},
        }  # fmt: skip
        for name, keys in sections.items():
            document[name] = keys if name == "outputs" else {**document.get(name, {}), **keys}
        return parse_job(document)

    return make


def save_places(path: Path, rows: list[tuple[float, float, float]]) -> str:
    lon, lat, weight = zip(*rows, strict=True)
    if path.suffix == ".csv":
        return point_file(path, "lon,lat,weight", rows)
    frame = geopandas.GeoDataFrame({"weight": weight}, geometry=shapely.points(lon, lat), crs=4326)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        path.write_text(frame.to_json(drop_id=True))
    return str(path)


# --- from files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.parquet", "p.geojson", "p.geojson.gz"])
def test_a_job_takes_points_from_every_format(tmp_path: Path, job: Make, name: str) -> None:
    def domain(file: str) -> Domain:
        outputs, prior = {"choose": "file", "file": file}, {"kind": "file", "file": file}
        return build_domain(job(outputs=outputs, prior=prior, loss={"tasks_file": file}))

    expected = domain(save_places(tmp_path / "p.csv", PLACES))
    path = Path(save_places(tmp_path / name.removesuffix(".gz"), PLACES))
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    found = domain(str(tmp_path / name))
    np.testing.assert_array_equal(found.output_xy_km, expected.output_xy_km)
    np.testing.assert_array_equal(found.prior, expected.prior)
    assert isinstance(found.loss, TravelLoss)
    assert isinstance(expected.loss, TravelLoss)
    np.testing.assert_array_equal(found.loss.task_weight, expected.loss.task_weight)
    np.testing.assert_array_equal(found.loss.task_distance_km, expected.loss.task_distance_km)


def test_points_outside_are_an_error_or_dropped(tmp_path: Path, job: Make) -> None:
    file = save_places(tmp_path / "p.geojson", [PLACES[0], OUTSIDE, *PLACES[1:]])
    outputs = {"choose": "file", "file": file}
    first = f"{file}: 1 of 4 points lie outside the grid (the furthest, point 2, by "
    message = refusal(lambda: build_domain(job(outputs=outputs)), first, 'outputs.outside = "drop"')
    assert refusal(lambda: plan_job(job(outputs=outputs))) == message
    spec = job(outputs={**outputs, "outside": "drop"})
    domain = build_domain(spec)
    np.testing.assert_allclose(domain.output_lonlat, [place[:2] for place in PLACES], rtol=1e-9)
    assert any(f"{file}: 1 of 4 points lie outside the grid" in note for note in domain.notes)
    assert output_count(spec, build_geometry(spec)) == plan_job(spec)["outputs"] == 3
    # Of places outside, two may be the same; of those inside, not.
    save_places(tmp_path / "p.geojson", [OUTSIDE, OUTSIDE, PLACES[0]])
    assert build_domain(spec).outputs == 1
    for places, complaint in (
        ([OUTSIDE], "all 1 points lie outside"),
        ([PLACES[0], PLACES[0]], "same place, those of rows 1 and 2"),
        ([PLACES[1], OUTSIDE, PLACES[0], PLACES[2], PLACES[0]], "same place, those of rows 3 and 5"),
    ):
        save_places(tmp_path / "p.geojson", places)
        refusal(lambda: build_domain(spec), complaint, kind=DataError)


# --- all road nodes --------------------------------------------------------------------------------


def test_all_road_nodes_are_all_places_with_one(job: Make) -> None:
    spec = job(outputs={"choose": "all-road-nodes"})
    domain = build_domain(spec)
    assert domain.outputs == output_count(spec, build_geometry(spec)) == plan_job(spec)["outputs"] == 30
    expected = sorted((x, y) for x in EAST for y in NORTH)
    np.testing.assert_allclose(sorted(map(tuple, domain.output_lonlat.round(9))), expected, rtol=1e-9)
    bbox = [EAST[1] - 1e-3, NORTH[1] - 1e-3, EAST[4] + 1e-3, NORTH[3] + 1e-3]
    spec = job(domain={"bbox": bbox, "cell_km": 1.0}, outputs={"choose": "all-road-nodes"})
    assert build_domain(spec).outputs == 12


def test_too_many_road_nodes_are_counted(job: Make) -> None:
    spec = job(outputs={"choose": "all-road-nodes", "limit": 29})
    for action in (build_domain, plan_job):
        expected = "holds 30 road nodes, more than 29; raise outputs.limit"
        refusal(partial(action, spec), expected, kind=DataError)
    assert build_domain(with_overrides(spec, ["outputs.limit=30"])).outputs == 30


def test_many_road_nodes_are_for_noise(monkeypatch: pytest.MonkeyPatch, job: Make) -> None:
    monkeypatch.setattr("mdpext_dask.problem.outputs.MOST_ROAD_NODES", 29)
    refusal(
        lambda: build_domain(job(outputs={"choose": "all-road-nodes"})),
        'extension.method = "noise"', 'choose = "auto"',
    )  # fmt: skip
    assert build_domain(noisy(job, 1.0, choose="all-road-nodes")).outputs == 30


# --- thinned road nodes ----------------------------------------------------------------------------


def noisy(job: Make, epsilon: float, **outputs: Any) -> JobSpec:
    privacy = {"epsilon_per_km": epsilon, "budget": "certified"}
    return job(privacy=privacy, extension={"method": "noise"}, outputs=outputs)


def test_no_choice_means_auto_and_a_count_road_nodes(job: Make) -> None:
    assert job(outputs={}).outputs.choose == job(outputs={"limit": 3}).outputs.choose == "auto"
    counted = job(outputs={"count": 4})
    assert counted == job(outputs={"count": 4, "choose": "road-nodes"})
    assert counted.fingerprint() == job(outputs={"count": 4, "choose": "road-nodes"}).fingerprint()
    # As jobs are stored, and read again.
    for spec in (counted, job(outputs={})):
        assert parse_job(spec.canonical()) == spec
    assert job(outputs={}).replace(outputs={"count": 4}) == counted
    assert counted.replace(outputs={"choose": "auto"}) == job(outputs={})
    assert with_overrides(counted, ["outputs.choose=auto", "outputs.limit=5"]).outputs.limit == 5
    for choose in ("auto", "seeds"):
        message = f'count does not go with choose = "{choose}"'
        refusal(lambda choose=choose: job(outputs={"choose": choose, "count": 4}), message, kind=SpecError)


@pytest.mark.parametrize("loss", ["travel", "euclidean"])
def test_thinned_outputs_are_as_near_as_epsilon_needs(job: Make, loss: str) -> None:
    counts = []
    for epsilon in (0.05, 0.2, 0.5, 9.0):
        spec = with_overrides(noisy(job, epsilon), [f"loss.kind={loss}"])
        geometry = build_geometry(spec)
        domain, planned = build_domain(spec), plan_job(spec)
        counts.append(domain.outputs)
        assert domain.outputs == planned["outputs"] == output_count(spec, geometry)
        (note,) = (note for note in domain.notes if note.startswith("outputs:"))
        assert note in planned["notes"]
        assert f"{domain.outputs} of 30 road nodes" in note
        away = np.hypot(*(geometry.node_xy_km[:, None] - domain.output_xy_km).transpose(2, 0, 1)).min(axis=1)
        assert away.mean() <= 0.15 / epsilon
        assert (away == 0).sum() >= domain.outputs
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 30)


def test_thinned_outputs_are_as_many_as_the_method_bears(monkeypatch: pytest.MonkeyPatch, job: Make) -> None:
    for most in (1, 7, 30):
        assert 0.5 * most <= build_domain(noisy(job, 9.0, limit=most)).outputs <= most
    monkeypatch.setattr("mdpext_dask.problem.outputs.LEAST_OUTPUTS", 5)
    monkeypatch.setattr("mdpext_dask.problem.outputs.MOST_SEED_ENTRIES", 1)
    spec = job(privacy={"epsilon_per_km": 9.0}, outputs={})
    assert build_domain(spec).outputs <= 5
    assert any("at most 5" in note and '"noise"' in note for note in plan_job(spec)["notes"])
    assert build_domain(with_overrides(spec, ["outputs.limit=20"])).outputs > 10


def test_thinned_outputs_stay_in_the_region(tmp_path: Path, job: Make) -> None:
    region = tmp_path / "region.geojson"
    corner = shapely.box(EAST[0], NORTH[0], EAST[2], NORTH[2])
    region.write_text(json.dumps(shapely.geometry.mapping(corner)))
    domain = build_domain(job(domain={"region": str(region), "cell_km": 1.0}, outputs={}))
    assert domain.outputs > 1
    assert domain.grid.lie_in(domain.kept, domain.output_xy_km).all()


# --- from the prior --------------------------------------------------------------------------------


def test_centres_of_the_prior_are_means_of_records(job: Make) -> None:
    spec = job(outputs={"choose": "prior", "count": 5})
    domain = build_domain(spec)
    assert domain.outputs == output_count(spec, build_geometry(spec)) == plan_job(spec)["outputs"] == 5
    xy, prior = all_records(domain.grid), domain.prior.ravel()
    nearest = np.argmin(((xy[:, None] - domain.output_xy_km) ** 2).sum(axis=2), axis=1)
    means = [np.average(xy[nearest == k], axis=0, weights=prior[nearest == k]) for k in range(5)]
    np.testing.assert_allclose(means, domain.output_xy_km, atol=1e-12)
    # Travel ends at the road node that is nearest to each.
    assert isinstance(domain.loss, TravelLoss)
    away = ((domain.loss.node_xy_km - domain.output_xy_km[:, None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(away[np.arange(5), domain.loss.output_node], away.min(axis=1))


def test_another_seed_begins_elsewhere(job: Make) -> None:
    def centres(seed: int) -> bytes:
        outputs = {"choose": "prior", "count": 7, "random_seed": seed}
        return build_domain(job(outputs=outputs)).output_xy_km.tobytes()

    assert centres(3) == centres(3)
    assert len({centres(seed) for seed in range(6)}) > 1


def test_no_more_centres_than_records(tmp_path: Path, job: Make) -> None:
    prior = {"kind": "file", "file": save_places(tmp_path / "p.csv", PLACES)}
    # The third has no weight.
    spec = job(outputs={"choose": "prior", "count": 3}, prior=prior)
    expected = "outputs.count: 3 are wanted, but only 2 records have any prior"
    assert refusal(lambda: build_domain(spec)) == expected
    assert build_domain(with_overrides(spec, ["outputs.count=2"])).outputs == 2
    many = with_overrides(spec, ["outputs.count=1000"])
    for action in (build_domain, plan_job):
        refusal(partial(action, many), "the box holds only", kind=DataError)


def test_centres_stay_where_the_region_is(tmp_path: Path, job: Make) -> None:
    region = tmp_path / "region.geojson"
    corner = shapely.box(EAST[0], NORTH[0], EAST[2], NORTH[2])
    region.write_text(json.dumps(shapely.geometry.mapping(corner)))
    spec = job(domain={"region": str(region), "cell_km": 1.0}, outputs={"choose": "prior", "count": 3})
    domain = build_domain(spec)
    assert domain.grid.lie_in(domain.kept, domain.output_xy_km).all()


def test_of_very_many_records_neighbours_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(-3.0, 2.0, 5, 3, 1.0, (20,))
    x, y = np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij")
    prior = np.exp(-((x - 1) ** 2) - 3 * (y - 3) ** 2) + 0.2 * np.exp(-8 * (x + 2) ** 2 - 8 * (y - 4.5) ** 2)
    prior[:, ::7] = 0
    prior /= prior.sum()
    xy = np.stack([x[prior > 0], y[prior > 0]], axis=-1)

    def cost(centres: np.ndarray) -> float:
        return float((prior[prior > 0] * ((xy[:, None] - centres) ** 2).sum(axis=2).min(axis=1)).sum())

    exact = min(cost(centres_of(prior, grid, 6, seed)) for seed in range(5))
    monkeypatch.setattr("mdpext_dask.problem.outputs._MOST_PLACES", 500)
    merged = min(cost(centres_of(prior, grid, 6, seed)) for seed in range(5))
    assert exact <= merged * 1.01 <= exact * 1.03
    # One centre is the mean of all records however they are taken together.
    mean = centres_of(prior, grid, 1, 0)
    np.testing.assert_allclose(mean[0], np.average(xy, axis=0, weights=prior[prior > 0]), rtol=1e-12)


# --- what goes together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"choose": "prior"}, 'choose = "prior" needs count'),
        ({"choose": "all-road-nodes", "count": 3}, 'count does not go with choose = "all-road-nodes"'),
        ({"choose": "seeds", "limit": 3}, 'limit goes with choose = "auto" or "all-road-nodes" only'),
        ({"count": 3, "outside": "drop"}, 'outside = "drop" goes with choose = "file" only'),
        ({"choose": "prior", "count": 3, "file": "x"}, 'file goes with choose = "file"'),
        ({"choose": "all-road-nodes", "limit": 0}, "outputs.limit"),
        ({"choose": "file", "file": "x", "outside": "move"}, "outputs.outside"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_go_together(job: Make, outputs: dict[str, Any], words: str) -> None:
    refusal(lambda: job(outputs=outputs), words, kind=SpecError)


def test_overrides_drop_what_a_choice_makes_meaningless(job: Make) -> None:
    spec = job(outputs={"choose": "file", "file": "/p.csv", "outside": "drop"})
    spec = with_overrides(spec, ["outputs.choose=all-road-nodes", "outputs.limit=7"])
    assert spec.outputs.model_dump() == {
        "choose": "all-road-nodes", "count": None, "random_seed": 0, "file": None, "outside": "error",
        "limit": 7, "lon_column": None, "lat_column": None,
    }  # fmt: skip
    spec = with_overrides(spec, ["outputs.choose=prior", "outputs.count=3"])
    assert (spec.outputs.limit, spec.outputs.count) == (None, 3)
    for choose, count in (("road-nodes", 3), ("seeds", None)):
        spec = with_overrides(spec, [f"outputs.choose={choose}"])
        assert spec.outputs.count == count
    spec = with_overrides(spec, ["prior.kind=raster", "prior.file=/p.tif"])
    assert with_overrides(spec, ["prior.kind=file"]).prior.file == "/p.tif"
    assert with_overrides(spec, ["prior.kind=uniform"]).prior.file is None


def test_a_raster_enters_the_fingerprint_by_its_content(tmp_path: Path, job: Make) -> None:
    prints = []
    for name, content in (("a.tif", b"people"), ("b.tif", b"people"), ("c.tif", b"others")):
        (tmp_path / name).write_bytes(content)
        spec = job(prior={"kind": "raster", "file": str(tmp_path / name)})
        prints.append(spec.fingerprint())
        # What is handed to other machines is found in the same way.
        assert files_of(spec)["prior.file"] == str(tmp_path / name)
    assert prints[0] == prints[1] != prints[2]


# --- whole jobs ------------------------------------------------------------------------------------


def save_raster(path: Path) -> str:
    values = np.random.default_rng(0).integers(0, 9, (40, 60)).astype(np.float32)
    transform = Affine(0.0015, 0, 12.49, 0, -0.0015, 41.95)
    options = {"driver": "GTiff", "crs": 4326, "transform": transform, "dtype": "float32", "nodata": 0}
    with rasterio.open(path, "w", count=1, height=40, width=60, **options) as file:
        file.write(values[None])
    return str(path)


@pytest.fixture(
    params=[
        "file",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("prior", "all-road-nodes", "auto")),
    ]
)
def choice(request: pytest.FixtureRequest, tmp_path: Path, job: Make) -> JobSpec:
    outputs: dict[str, Any] = {"choose": request.param}
    prior: dict[str, Any] = {"kind": "uniform"}
    if request.param == "file":
        file = save_places(tmp_path / "places.geojson", [*PLACES, OUTSIDE])
        outputs |= {"file": file, "outside": "drop"}
        prior = {"kind": "file", "file": save_places(tmp_path / "prior.parquet", PLACES)}
    elif request.param == "prior":
        outputs["count"] = 4
        prior = {"kind": "raster", "file": save_raster(tmp_path / "people.tif")}
    return job(outputs=outputs, prior=prior)


def test_a_whole_job(tmp_path: Path, choice: JobSpec) -> None:
    """From a job file through plan and run to reports, with the promise kept."""
    path = tmp_path / "job.toml"
    sections = choice.canonical().items()
    write_toml(path, {name: {k: v for k, v in keys.items() if v is not None} for name, keys in sections})
    spec = load_job(path)
    assert spec.fingerprint() == choice.fingerprint()
    store = tmp_path / "m.zarr"
    summary = build(spec, str(store))
    domain = build_domain(spec)
    assert summary["epsilon_certified"] <= spec.privacy.epsilon_per_km
    mechanism = open_mechanism(str(store))
    np.testing.assert_array_equal(mechanism.output_xy_km, domain.output_xy_km)
    assert len(mechanism.output_xy_km) == plan_job(spec)["outputs"]
    drawn, outside = mechanism.sample_points(np.array([place[:2] for place in PLACES]))
    assert not outside.any()
    assert ((drawn >= 0) & (drawn < domain.outputs)).all()


def test_repetitions_of_a_comparison(tmp_path: Path, choice: JobSpec) -> None:
    """Drawn outputs are drawn anew, k-means begins elsewhere, what is given stays."""
    case = Case("the job", choice, ("em",), "ours")
    first, second = (build_domain(case.repetition(k)).output_xy_km for k in range(2))
    given = choice.outputs.choose in ("file", "all-road-nodes", "auto")
    assert np.array_equal(first, second) == given
    euclidean = Case("the job", with_overrides(choice, ["loss.kind=euclidean"]), ("em",), "ours")
    assert case.draws
    assert euclidean.draws != given
    if choice.outputs.choose != "prior":
        return
    (summary,) = compare(choice, tmp_path / "compared", methods=["em"], repeats=1, bound_seconds=0)
    assert summary.problem["outputs"] == build_domain(choice).outputs
