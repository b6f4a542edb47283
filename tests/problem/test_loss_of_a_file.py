"""Mechanisms from a loss file, from the job to the reported place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask import BoundRequest, Mechanism, audit, build, evaluate, load_job, open_mechanism
from mdpext_dask.errors import GuaranteeViolation, SpecError, StoreError
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import init
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.loss import EuclideanLoss, TableLoss, corner_costs
from mdpext_dask.problem.projection import Projection
from mdpext_dask.sampling.files import sample_file
from mdpext_dask.store.loss import StoredTable, read_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.forged import attribute
from tests.support.inside import Capture, call
from tests.support.loss_files import job, write
from tests.support.reference import audited_epsilon
from tests.support.refusals import refusal

PROJECT = Path(__file__).resolve().parents[2]


def expected_loss(store: Path, problem: dict[str, Any]) -> float:
    """Return Σ π(x) M(y|x) c(x, y) by its definition, in float64, from the stored probabilities."""
    probability = MechanismStore.open(str(store)).read("probability").astype(np.float64)
    probability /= probability.sum(axis=-1, keepdims=True)
    prior, loss = problem["prior"] / problem["prior"].sum(), problem["loss_km"].astype(np.float64)
    return float((prior[..., None] * probability * loss).sum())


# --- what is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "refine", "budget"),
    [
        *(((5, 9), [2, 2], budget) for budget in ("half", "bound", "certified")),
        ((3, 3), [1], "bound"), ((3, 3), [2], "half"), ((7, 5), [1], "certified"),
    ],
)  # fmt: skip
def test_expected_loss(tmp_path: Path, shape: tuple[int, int], refine: list[int], budget: str) -> None:
    problem = write(tmp_path / "loss.npz", shape)
    path = tmp_path / "m.zarr"
    spec = parse_job(job(tmp_path / "loss.npz", domain={"refine": refine}, privacy={"budget": budget}))
    summary = build(spec, str(path))
    assert (summary["state"], summary["records"], summary["outputs"]) == ("complete", shape[0] * shape[1], 4)
    assert summary["loss_km"] == pytest.approx(expected_loss(path, problem), rel=1e-12)
    assert evaluate(str(path), bound=BoundRequest(seconds=0), attacks=None)["loss_km"] == summary["loss_km"]
    assert audit(str(path)).holds
    dataset = open_mechanism(path, verify=True).dataset
    found = audited_epsilon(dataset.probability.values, problem["x_km"], problem["y_km"], 2)
    assert found <= summary["epsilon_certified"] <= 1


@given(
    shape=st.tuples(st.integers(2, 6), st.integers(2, 6)), outputs=st.integers(1, 5),
    spacing=st.floats(0.05, 20), corner=st.tuples(st.floats(-100, 100), st.floats(-100, 5000)),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_table_of_euclidean_distances_is_the_euclidean_loss(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int],
    outputs: int,
    spacing: float,
    corner: tuple[float, float],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x, y = (low + spacing * np.arange(n) for low, n in zip(corner, shape, strict=True))
    places = rng.uniform((x[0], y[0]), (x[-1], y[-1]), (outputs, 2))
    euclidean = EuclideanLoss(places)
    records = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    file = tmp_path_factory.getbasetemp() / "euclidean.npz"
    table = euclidean.rows(records).reshape(*shape, outputs)
    np.savez(file, x_km=x, y_km=y, output_xy_km=places, loss_km=table)
    domain = build_domain(parse_job(job(file, domain={"refine": [1]})))
    assert isinstance(domain.loss, TableLoss)
    order = rng.permutation(len(records))[: rng.integers(1, len(records) + 1)]
    np.testing.assert_allclose(domain.loss.rows(records[order]), euclidean.rows(records[order]), rtol=1e-12)
    whole = slice(0, shape[0] - 1), slice(0, shape[1] - 1)
    costs = [corner_costs(domain.grid, loss, domain.prior, whole) for loss in (domain.loss, euclidean)]
    np.testing.assert_allclose(costs[0], costs[1], rtol=1e-9, atol=1e-12 * spacing)


@pytest.mark.slow
def test_bytes_do_not_depend_on_where_the_tasks_run(tmp_path: Path, any_cluster: ClusterSection) -> None:
    write(tmp_path / "loss.npz", (9, 13))
    probability = []
    for name, cluster in (("a", any_cluster.model_dump()), ("b", {"kind": "inline"})):
        blocks = {"block_cells": [2, 3]} if name == "a" else {}
        build(parse_job(job(tmp_path / "loss.npz", cluster=cluster, store=blocks)), str(tmp_path / name))
        probability.append(MechanismStore.open(str(tmp_path / name)).read("probability"))
    assert np.array_equal(*probability)


# --- what is stored --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished store without a centre."""
    folder = tmp_path_factory.mktemp("planar")
    write(folder / "loss.npz", (9, 7))
    build(parse_job(job(folder / "loss.npz")), str(folder / "m.zarr"))
    return folder / "m.zarr"


@pytest.fixture(scope="module")
def mechanism(planar: Path) -> Mechanism:
    return open_mechanism(planar)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_table_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    loss = np.random.default_rng(1).random((5, 9, 4)).astype(dtype)
    write(tmp_path / "loss.npz", (5, 9), loss_km=loss)
    # Chunks of two records, and a cache of two chunks.
    record = 4 * loss.itemsize
    monkeypatch.setattr("mdpext_dask.store.schema._PLANE_CHUNK_BYTES", 2 * record)
    monkeypatch.setattr("mdpext_dask.store.loss.CACHE_BYTES", 4 * record)
    init(parse_job(job(tmp_path / "loss.npz")), str(tmp_path / "m.zarr"))
    store = MechanismStore.open(str(tmp_path / "m.zarr"))
    array = store.array("problem/loss")
    assert (array.dtype, array.chunks) == (np.dtype(dtype), (1, 2, 4))
    table = StoredTable(store)
    assert table.shape == loss.shape
    for i, first, last in ((0, 0, 9), (4, 3, 4), (2, 1, 6), (2, 8, 9)):
        np.testing.assert_array_equal(table[i, first:last], loss[i, first:last])
    read: list[Any] = []
    monkeypatch.setattr(store, "read", lambda _, *index: read.append(index) or array[index])
    table[3, 2:5]
    assert read == [(slice(3, 4), slice(2, 4)), (slice(3, 4), slice(4, 6))]


def test_another_table_is_another_problem(tmp_path: Path) -> None:
    digests = set()
    for name, scale in (("a", 1), ("b", 2), ("c", 1)):
        rng = np.random.default_rng(3)
        write(tmp_path / f"{name}.npz", (3, 3), loss_km=scale * rng.random((3, 3, 4)))
        init(parse_job(job(tmp_path / f"{name}.npz")), str(tmp_path / name))
        digests.add(MechanismStore.open(str(tmp_path / name)).problem_sha256)
    assert len(digests) == 2
    with pytest.raises(StoreError, match=r"differs in loss\.file"):
        init(parse_job(job(tmp_path / "b.npz")), str(tmp_path / "a"))


def test_a_planar_store_opens_in_xarray_without_a_projection(planar: Path, mechanism: Mechanism) -> None:
    dataset = mechanism.dataset
    assert "spatial_ref" not in dataset
    assert "grid_mapping" not in dataset.probability.attrs
    assert np.isnan(dataset.output_lon).all()
    assert np.isfinite(dataset.output_x).all()
    assert json.loads(dataset.attrs["projection"]) == {"centre_lon": None, "centre_lat": None}
    assert json.loads(dataset.attrs["job"])["outputs"]["choose"] == "loss-file"
    assert dataset.attrs["distortion"] == 0
    store = MechanismStore.open(str(planar))
    assert store.projection is None
    assert store.planar_limit() == store.attributes["epsilon_planar_per_km"] <= 1
    assert isinstance(read_loss(store), TableLoss)


def test_a_centre_that_is_taken_away_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "loss.npz", (3, 3), y_km=np.arange(3) / 2, x_km=np.arange(3) / 2,
          output_xy_km=np.eye(2), loss_km=np.ones((3, 3, 2)), centre_lon=12.5, centre_lat=41.9)  # fmt: skip
    path = tmp_path / "m.zarr"
    build(parse_job(job(tmp_path / "loss.npz")), str(path))
    open_mechanism(path, verify=True)
    attribute(path, projection={"centre_lon": None, "centre_lat": None})
    with pytest.raises(GuaranteeViolation, match="projection"):
        open_mechanism(path, verify=True)


@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_table_is_one_error(planar: Path, lost: bool) -> None:
    store = MechanismStore.open(str(planar))
    chunk = planar / "problem" / "loss" / "c" / "3" / "0" / "0"
    content = chunk.read_bytes()
    try:
        chunk.unlink() if lost else chunk.write_bytes(content[: len(content) // 2])
        with pytest.raises(StoreError, match="problem/loss"):
            StoredTable(store)[3, 0:5]
    finally:
        chunk.write_bytes(content)


# --- with a centre ---------------------------------------------------------------------------------


def test_with_a_centre_degrees_work_and_distortion_is_charged(tmp_path: Path) -> None:
    x = np.arange(-10, 10.5, 2.5)
    outputs = np.array([(-5.0, 0.0), (0.0, 3.3), (7.0, -7.0)])
    loss = EuclideanLoss(outputs).rows(np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1).reshape(-1, 2))
    arrays = {"x_km": x, "y_km": x, "output_xy_km": outputs, "loss_km": loss.reshape(9, 9, 3)}
    np.savez(tmp_path / "loss.npz", **arrays, centre_lon=12.5, centre_lat=41.9)
    summary = build(parse_job(job(tmp_path / "loss.npz")), str(tmp_path / "m.zarr"))
    projection = Projection(12.5, 41.9)
    assert summary["distortion"] == projection.distortion(np.hypot(10, 10)) > 0
    assert summary["epsilon_planar_per_km"] < 1
    mechanism = open_mechanism(tmp_path / "m.zarr", verify=True)
    assert not mechanism.planar
    np.testing.assert_allclose(mechanism.output_lonlat, projection.to_degrees(outputs), rtol=1e-12)
    [lonlat] = projection.to_degrees(np.array([[2.4, -4.9]]))
    by_degrees, by_km = mechanism.row(lon=lonlat[0], lat=lonlat[1]), mechanism.row(x_km=2.4, y_km=-4.9)
    assert np.array_equal(by_degrees.values, by_km.values)
    draw = mechanism.sample(x_km=0.0, y_km=0.0)
    assert (np.abs(mechanism.output_lonlat - draw[0]).sum(axis=1) == 0).any()
    assert "spatial_ref" in mechanism.dataset


# --- planar points ---------------------------------------------------------------------------------


def test_planar_rows_and_samples_and_no_degrees(mechanism: Mechanism) -> None:
    assert mechanism.planar
    row = mechanism.row(x_km=0.1, y_km=31.2)
    assert (float(row.x), float(row.y)) == (0.0, 31.0)
    np.testing.assert_array_equal(np.stack([row.output_x, row.output_y], axis=-1), mechanism.output_xy_km)
    draws = mechanism.sample(x_km=0.1, y_km=31.2, n=200)
    assert draws.shape == (200, 2)
    assert set(map(tuple, draws)) <= set(map(tuple, mechanism.output_xy_km))
    assert np.isnan(mechanism.output_lonlat).all()
    for action in (
        lambda: mechanism.row(lon=12.5, lat=41.9), lambda: mechanism.sample(lon=12.5, lat=41.9, n=3),
        lambda: mechanism.sample_points(np.array([[12.5, 41.9]])),
    ):  # fmt: skip
        refusal(action, "lon, lat", "planar", "x_km, y_km", kind=SpecError)


def test_a_file_of_planar_points(planar: Path, mechanism: Mechanism, tmp_path: Path) -> None:
    points, out = tmp_path / "p.csv", tmp_path / "o.csv"
    points.write_text("who,x_km,y_km\nAnna,0.1,31.2\nBert,-1,30\nCora,100,100\n")
    answer = sample_file(str(planar), points, out)
    assert (answer["points"], answer["outside"]) == (3, 1)
    written = pd.read_csv(out)
    assert list(written.columns) == ["row", "output", "x_km", "y_km"]
    expected = mechanism.output_xy_km[written["output"]]
    np.testing.assert_allclose(written[["x_km", "y_km"]], expected, rtol=1e-15)
    points.write_text("lon,lat\n12.5,41.9\n")
    parts = "p.csv: has columns lon,lat, but ", "m.zarr is planar", "use x_km,y_km"
    refusal(lambda: sample_file(str(planar), points, tmp_path / "none.csv"), *parts)
    assert not (tmp_path / "none.csv").exists()
    # All of them outside, but nobody can say that they look like degrees here.
    points.write_text("x_km,y_km\n12.5,41.9\n")
    refusal(
        lambda: sample_file(str(planar), points, out, overwrite=True),
        "all 1 points lie outside",
        "--outside nearest",
    )
    assert sample_file(str(planar), points, out, "nearest", overwrite=True)["outside"] == 1


# --- the command line ------------------------------------------------------------------------------


def test_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    (tmp_path / "here").mkdir()
    problem = write(tmp_path / "here" / "mine.npz", (5, 9))
    monkeypatch.chdir(tmp_path / "here")
    fixed = PROJECT / "workflows" / "rome-20km-fixed.toml"
    overrides = [
        "loss.file=mine.npz", "loss.kind=file", "domain.refine=[4]", "privacy.epsilon_per_km=0.5",
        "cluster.kind=inline", "privacy.budget=bound",
    ]  # fmt: skip
    options = [part for override in overrides for part in ("--set", override)]
    planned = call(capfd, "plan", fixed, *options)
    summary = call(capfd, "run", fixed, *options)
    for key, value in {"records": 45, "outputs": 4, "seeds": 6, "source_cells": 2}.items():
        assert planned[key] == summary[key] == value
    assert planned["road_nodes"] == 0
    assert summary["epsilon_per_km"] == 0.5
    assert summary["loss_km"] == pytest.approx(expected_loss(Path("rome-20km.zarr"), problem), rel=1e-12)
    assert call(capfd, "audit", "rome-20km.zarr")["holds"] is True
    assert call(capfd, "evaluate", "rome-20km.zarr", "--bound-seconds=0")["loss_km"] == summary["loss_km"]
    Path("p.csv").write_text("lon,lat\n12.5,41.9\n")
    refused = call(capfd, "sample", "rome-20km.zarr", "p.csv", "-o", "o.csv", code=2)
    assert "x_km,y_km" in refused["message"]
    Path("p.csv").write_text("x_km,y_km\n-1.9,30.1\n")
    assert call(capfd, "sample", "rome-20km.zarr", "p.csv", "-o", "o.csv")["points"] == 1
    # The demo, turned into the same problem by overrides alone.
    demo = PROJECT / "workflows" / "manhattan-published.toml"
    assert call(capfd, "plan", demo, *options) == planned


def test_a_loss_file_that_is_not_there_is_one_line(tmp_path: Path, capfd: Capture) -> None:
    fixed = PROJECT / "workflows" / "rome-20km-fixed.toml"
    for command in ("plan", "run"):
        refused = call(capfd, command, fixed, "--set", f"loss.file={tmp_path}/none.npz", code=2)
        assert refused["message"] == f"loss.file: {tmp_path}/none.npz: no such file"


def test_the_readmes_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = (PROJECT / "docs" / "inputs.md").read_text().partition("## A loss of your own\n")[2]
    script, text = (section.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml"))
    exec(script, {})
    Path("job.toml").write_text(text)
    planned = plan_job(load_job("job.toml"))
    assert (planned["records"], planned["outputs"]) == (41 * 41, 50)


# --- the fixed problem -----------------------------------------------------------------------------


def test_the_fixed_problem_of_rome(tmp_path: Path, fixed_problem: Callable[[str], Path]) -> None:
    job_file = PROJECT / "workflows" / "rome-20km-fixed.toml"
    overrides = [f"loss.file={fixed_problem('rome-20km')}", "cluster.kind=inline"]
    planned = plan_job(load_job(job_file, overrides))
    assert (planned["records"], planned["outputs"], planned["seeds"]) == (2401, 100, 625)
    # Published with the problem: 13 x 13 seeds, closed-form budgets.
    coarse = load_job(job_file, [*overrides, "domain.refine=[4]", "privacy.budget=bound"])
    summary = build(coarse, str(tmp_path / "m.zarr"))
    assert (summary["records"], summary["seeds"]) == (2401, 169)
    assert summary["loss_km"] == pytest.approx(2.203, rel=2e-3)


@pytest.mark.parametrize(("refine", "side"), [(2, 49), (4, 97)])
def test_the_square_of_rome_from_roads(city_roads: Callable[[str], Path], refine: int, side: int) -> None:
    job_file = PROJECT / "workflows" / "rome-20km.toml"
    spec = load_job(job_file, [f"domain.roads={city_roads('rome')}", f"domain.refine=[{refine}]"])
    planned = plan_job(spec)
    assert (planned["records"], planned["cells"], planned["outputs"]) == (side**2, [24, 24], 100)
