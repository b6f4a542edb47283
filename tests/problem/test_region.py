"""Regions: which cells are kept, that nothing else is stored, and that the promise holds across gaps."""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask import AuditReport, BoundRequest, audit, evaluate, open_mechanism
from mdpext_dask.auditors.certificate import certify_cells
from mdpext_dask.errors import DataError, GuaranteeViolation, IncompleteStoreError, MdpextError, StoreError
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import load_job, parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build, finalise, init, partition
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss, assemble_seed_cost, corner_costs
from mdpext_dask.problem.region import read_region
from mdpext_dask.seed.budget import axis_budgets
from mdpext_dask.seed.model import SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem
from mdpext_dask.store import receipts
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extended_block, rows_at, rows_of
from mdpext_dask.store.schema import as_read, cells_sha256
from tests.support.forged import edit
from tests.support.problems import JobMaker, all_records, all_rows, point_file, polygon_file, road_geometry
from tests.support.reference import audited_epsilon, steepest
from tests.support.refusals import refusal, refused
from tests.support.regions import _OUTPUTS, _U, CELL_KM, CELLS, PLANE, geojson, u_job

U_KEPT = np.ones(CELLS, dtype=bool)
U_KEPT[1:3, 1:] = False


@pytest.fixture(scope="module")
def built(u_store: Path) -> Path:
    return u_store


def shards(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in (path / "probability" / "c").rglob("*") if p.is_file()}


def noticed(path: Path, match: str) -> AuditReport:
    """Check that a spoilt store is refused, and return its audit, which fails as well."""
    refused(GuaranteeViolation, match, open_mechanism, path, verify=True)
    report = audit(str(path))
    assert not report.holds
    return report


def rewrite(path: Path, index: int, **changes: Any) -> None:
    """Change what the receipt of a block says."""
    edit(path / receipts.key_of(index), lambda receipt: receipt.update(changes))


# --- the guarantee --------------------------------------------------------------------------------


def neighbours_only(kept: np.ndarray, cell_km: float, outputs: np.ndarray, epsilon: float) -> np.ndarray:
    """Extend a seed whose budgets, half of ε, bind on the edges of kept cells alone: the published recipe."""
    grid = Grid(0, 0, *kept.shape, cell_km, (2,))
    inside = grid.vertices_of(kept)
    everything = slice(0, grid.cells_x), slice(0, grid.cells_y)
    loss = EuclideanLoss(outputs)
    cost = assemble_seed_cost(grid, corner_costs(grid, loss, inside / inside.sum(), everything))
    beta = epsilon / math.sqrt(2) / 2
    problem = SeedProblem(cost, grid.seeds_shape, *axis_budgets(grid, (beta, beta)), 1e-6)
    around = np.pad(kept, 1)
    loose = -math.log(1e-6)  # what follows from δ ≤ z ≤ 1 anyhow
    budget_x, budget_y = problem.budget_x.copy(), problem.budget_y.copy()
    budget_x[:, ~(around[1:-1, :-1] | around[1:-1, 1:])] = loose
    budget_y[:, ~(around[:-1, 1:-1] | around[1:, 1:-1])] = loose
    problem = dataclasses.replace(problem, budget_x=budget_x, budget_y=budget_y)
    rows = solve_seed_problem(problem, "highs", 1e-6).rows
    return extend_log_convex(np.log(rows).reshape(*grid.seeds_shape, -1), 2)


def test_constraints_on_kept_cells_alone_fail_across_the_gap_and_the_rectangle_does_not(built: Path) -> None:
    store = MechanismStore.open(str(built))
    assert np.array_equal(store.kept, U_KEPT)
    x, y, inside = store.read("x"), store.read("y"), store.read("inside")
    places = all_records(store.grid)[inside.ravel()]
    published = neighbours_only(U_KEPT, CELL_KM, np.array(_OUTPUTS, dtype=float), 1.0)
    assert steepest(published[inside], places) > 1.5  # although its budgets are halved
    ours = all_rows(store)
    over_all = audited_epsilon(ours, x, y, 2.0)
    assert steepest(ours[inside], places) <= over_all <= store.attributes["epsilon_certified"]
    assert store.attributes["epsilon_certified"] <= store.planar_limit() < 1


@pytest.mark.parametrize("p", [1.5, *(pytest.param(case, marks=pytest.mark.slow) for case in [1, 2, "inf"])])
def test_the_certificate_is_that_of_the_whole_rectangle(tmp_path: Path, p: float | str) -> None:
    """Also of fine cells between stored and skipped blocks, and of those no byte is stored of."""
    job = u_job(tmp_path, domain={"metric_p": p, "refine": [3]}, store={"block_cells": [1, 2]})
    summary = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert summary["blocks_skipped"] > 0
    store = MechanismStore.open(str(tmp_path / "s.zarr"))
    rows, x, y = all_rows(store), store.grid.x_km(), store.grid.y_km()
    epsilon, _, _, _ = certify_cells(rows, x, y, store.metric_p)
    assert summary["epsilon_certified"] == pytest.approx(epsilon, rel=1e-12)
    assert audited_epsilon(rows, x, y, store.metric_p) <= summary["epsilon_certified"]
    assert summary["boundary_mismatches"] == 0
    assert summary["boundary_rows_checked"] > 0


def test_a_violation_in_a_skipped_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharpen the extension of cells in the gap only: nothing of them is stored, all of them is certified."""
    path = tmp_path / "s.zarr"
    init(parse_job(u_job(tmp_path)), str(path))

    def sharpened(store: MechanismStore, block: Any) -> LocalRows:
        rows = extended_block(store, block)
        if block.index == 8:  # cell (1, 3)
            rows.entries[1, 1] = np.array([0.96, 0.01, 0.01, 0.01, 0.01])
        return rows

    monkeypatch.setattr("mdpext_dask.pipeline.tasks.extended_block", sharpened)
    monkeypatch.setattr("mdpext_dask.store.rows.extended_block", sharpened)
    partition(str(path), 0, MechanismStore.open(str(path)).plan.blocks)
    with pytest.raises(GuaranteeViolation, match="worst triple") as error:
        finalise(str(path))
    assert [3, 7] in (error.value.worst["record"], error.value.worst["record_prime"])


# --- what is stored -------------------------------------------------------------------------------


def test_skipped_blocks_take_no_disk(built: Path) -> None:
    store = MechanismStore.open(str(built))
    plan = store.plan
    expected = {key for block in plan if block.index not in plan.skipped for key in store.shard_keys(block)}
    assert shards(built) == expected
    assert plan.skipped == {4 * across + along + across for across in (1, 2) for along in range(1, 5)}
    for index in plan.skipped:
        receipt = receipts.read_receipt(store.objects, index, plan.skipped)
        assert receipt is not None
        assert (receipt.shards, bool(receipt.sides), bool(receipt.rows_sha256)) == ({}, True, True)
    kept = sum(math.prod(b.owned_shape) for b in plan if b.index not in plan.skipped)
    assert plan.store_bytes == kept * plan.outputs * 4


def test_plan_and_summary_say_what_is_kept_and_what_is_not(built: Path, tmp_path: Path) -> None:
    planned = plan_job(parse_job(u_job(tmp_path)))
    store = MechanismStore.open(str(built))
    summary = summarise(store)
    expected = {
        "records": 9 * 11, "records_inside": int(store.read("inside").sum()), "source_cells": 20,
        "source_cells_kept": 12, "blocks": 20, "blocks_skipped": 8, "rotation_deg": 0.0,
    }  # fmt: skip
    for found in (planned, summary):
        assert found.items() >= expected.items()
    assert planned["store_bytes"] == store.plan.store_bytes
    assert summary["blocks_done"] == 20
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_bytes_are_those_of_a_store_that_skips_nothing(built: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.zarr"
    summary = build(parse_job(u_job(tmp_path, store={"block_cells": [9, 9]})), str(whole))
    assert summary["blocks_skipped"] == 0
    complete = MechanismStore.open(str(whole)).read("probability")
    store = MechanismStore.open(str(built))
    assert np.array_equal(all_rows(store), complete)
    stored = store.read("probability")
    skipped = np.isnan(stored).all(axis=-1)
    assert np.array_equal(stored[~skipped], complete[~skipped])
    assert np.isnan(stored[skipped]).all()
    # Any part of it is the same.
    rng = np.random.default_rng(0)
    for _ in range(40):
        x, y = (slice(*sorted(rng.choice(n + 1, 2, replace=False))) for n in complete.shape[:2])
        assert np.array_equal(rows_of(store, x, y), complete[x, y])
    attributes = MechanismStore.open(str(whole)).attributes
    assert store.attributes["loss_km"] == pytest.approx(attributes["loss_km"], rel=1e-12)
    assert (
        evaluate(str(built), bound=BoundRequest(seconds=0), attacks=None)["loss_km"]
        == store.attributes["loss_km"]
    )
    assert store.attributes["epsilon_certified"] == attributes["epsilon_certified"]


@pytest.mark.parametrize(
    "method",
    [
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in [pytest.param("mcshane-whitney", marks=pytest.mark.slow), "cell-lp"]
        )
    ],
)
def test_other_extensions_skip_blocks_as_well(tmp_path: Path, method: str) -> None:
    """Scores that depend on budgets, a mechanism tempered as a whole: more than the seed's rows is read."""
    found = []
    for cells in (1, 9):
        job = u_job(tmp_path, store={"block_cells": [cells, cells]}, privacy={"budget": "certified"})
        job["extension"] = {"method": method, "sweeps": 1}
        job["seed"] = {"refine_rounds": 0}
        path = tmp_path / f"{cells}.zarr"
        assert build(parse_job(job), str(path))["state"] == "complete"
        assert audit(str(path)).holds
        found.append(all_rows(MechanismStore.open(str(path))))
    assert np.array_equal(*found)
    assert len(MechanismStore.open(str(tmp_path / "1.zarr")).plan.skipped) == 8


def test_it_opens_in_xarray(built: Path) -> None:
    dataset = xr.open_zarr(built)
    inside = dataset.inside.values
    assert np.array_equal(inside, MechanismStore.open(str(built)).grid.vertices_of(U_KEPT))
    assert np.array_equal(dataset.kept.values, U_KEPT)
    assert dataset.kept.dims == ("cell_x", "cell_y")
    assert not dataset.prior.values[~inside].any()
    assert float(dataset.prior.sum()) == pytest.approx(1)
    # Of what belongs to kept cells, only the sides that skipped blocks own are not stored.
    missing = inside & np.isnan(dataset.probability.values).any(axis=-1)
    expected = {*((2, j) for j in range(2, 11)), *((i, 2) for i in range(2, 6))}
    assert set(map(tuple, np.argwhere(missing).tolist())) == expected


@pytest.mark.slow
def test_every_executor_makes_the_same(built: Path, tmp_path: Path, any_cluster: ClusterSection) -> None:
    spec = parse_job(u_job(tmp_path)).model_copy(update={"cluster": any_cluster})
    build(spec, str(tmp_path / "s.zarr"))
    assert shards(tmp_path / "s.zarr") == shards(built)
    for shard in shards(built):
        assert (tmp_path / "s.zarr" / shard).read_bytes() == (built / shard).read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")
def test_certified_budgets_and_a_url(tmp_path: Path) -> None:
    url, job = "memory://bucket/u.zarr", u_job(tmp_path, privacy={"budget": "certified"})
    summary = build(parse_job({**job, "seed": {"refine_rounds": 1}}), url)
    assert (summary["state"], summary["blocks_skipped"]) == ("complete", 8)
    assert audit(url).holds
    assert open_mechanism(url, verify=True).sample(x_km=0, y_km=2, n=3).shape == (3, 2)
    MechanismStore.clear(url)


# --- interruptions and harm -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "harm",
    [
        "stray shard",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["receipt gone", "receipt damaged", "receipt claims shards"]
        ),
    ],
)
def test_harm_done_to_an_unfinished_skipped_block_is_mended(built: Path, tmp_path: Path, harm: str) -> None:
    path, job = tmp_path / "s.zarr", u_job(tmp_path)
    blocks = init(parse_job(job), str(path))["blocks"]
    partition(str(path), 0, blocks)
    store = MechanismStore.open(str(path), mode="r+")
    index = min(store.plan.skipped)
    receipt = path / receipts.key_of(index)
    if harm == "stray shard":
        shard = path / store.shard_keys(store.plan[index])[0]
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_bytes(b"something")
    else:
        if harm == "receipt gone":
            receipt.unlink()
        elif harm == "receipt damaged":
            receipt.write_text(receipt.read_text()[:40])
        else:
            rewrite(path, index, shards={"a": "b"})
        with pytest.raises(IncompleteStoreError) as error:
            finalise(str(path))
        assert error.value.missing == (index,)
    assert build(parse_job(job), str(path))["state"] == "complete"
    assert shards(path) == shards(built)
    open_mechanism(path, verify=True)


def test_a_receipt_cannot_make_a_stored_block_a_skipped_one(tmp_path: Path) -> None:
    path, job = tmp_path / "s.zarr", u_job(tmp_path)
    init(parse_job(job), str(path))
    partition(str(path), 0, 1)
    rewrite(path, 0, shards={}, rows_sha256="0" * 64)
    assert MechanismStore.open(str(path)).read_receipts() == {}
    partition(str(path), 0, 1)
    assert list(MechanismStore.open(str(path)).read_receipts()) == [0]


def flip(path: Path, name: str, index: tuple[int, int]) -> None:
    array = zarr.open_array(str(path / name), mode="r+")
    array[index] = not array[index]


@pytest.mark.parametrize("index", [(3, 3), (0, 0)])
def test_records_that_change_sides_are_noticed(finished: Path, index: tuple[int, int]) -> None:
    flip(finished, "inside", index)
    assert noticed(finished, "inside").changed == ("inside",)


@pytest.mark.parametrize("harm", ["one more", "one less", "chunk lost", "array lost"])
def test_cells_that_change_sides_are_noticed_whatever_is_done_with_store(finished: Path, harm: str) -> None:
    if harm.startswith("one"):
        flip(finished, "kept", (1, 2) if harm == "one more" else (0, 2))
    else:
        shutil.rmtree(finished / "kept" / ("c" if harm == "chunk lost" else ""))
    for action in (open_mechanism, partial(open_mechanism, verify=True), audit):
        refused(GuaranteeViolation, "the cells of its region have changed", action, str(finished))


def test_cells_that_change_sides_with_all_that_says_so_are_noticed(finished: Path) -> None:
    """The array, its digest, the records, shard and receipt: the digest of the certified bytes stays."""
    store = MechanismStore.open(str(finished), mode="r+")
    kept = store.kept.copy()
    kept[0, 4] = False
    for name, values in (("kept", kept), ("inside", store.grid.vertices_of(kept))):
        zarr.open_array(str(finished / name), mode="r+")[...] = values
    inside = store.grid.count_vertices_of(kept)
    store.update(kept_sha256=cells_sha256(kept), source_cells_kept=int(kept.sum()), records_inside=inside)
    index = 4
    for key in store.shard_keys(store.plan[index]):
        (finished / key).unlink()
    rows = receipts.rows_sha256(extended_block(store, store.plan[index]), store.plan[index])
    rewrite(finished, index, shards={}, rows_sha256=rows)
    assert index in MechanismStore.open(str(finished)).plan.skipped
    assert noticed(finished, "chunk_hashes").changed == ("chunk_hashes", "problem_sha256")


@pytest.mark.parametrize(
    ("key", "changed"), [("job", "job"), pytest.param("identity", "fingerprint", marks=pytest.mark.slow)]
)
def test_an_edited_job_imports_nothing(
    finished: Path, tmp_path: Path, monkeypatch: Any, key: str, changed: str
) -> None:
    (tmp_path / "smuggled.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    store = MechanismStore.open(str(finished), mode="r+")
    edited = {name: copy.deepcopy(store.attributes[name]) for name in {"job", key}}
    for table in edited.values():
        table["extension"]["method"] = "smuggled:Mean"
    before = open_mechanism(finished)
    store.update(**edited)
    refusal(lambda: before.row(x_km=0.0, y_km=2.0), "its job has changed", kind=StoreError)
    refusal(lambda: open_mechanism(finished), changed, kind=GuaranteeViolation)
    assert changed in noticed(finished, changed).changed


def test_another_seed_for_the_skipped_blocks_is_noticed(finished: Path) -> None:
    """Nothing of them is stored but the seed; swapped with its digests, it is not what was certified."""
    store = MechanismStore.open(str(finished), mode="r+")
    before = open_mechanism(finished)
    seed = zarr.open_array(str(finished / "seed" / "score"), mode="r+")
    seed[...] = seed[...] * 0.999
    digest = hashlib.sha256(np.ascontiguousarray(seed[...]).tobytes()).hexdigest()
    zarr.open_group(str(finished / "seed"), mode="r+").attrs["sha256"] = digest
    for index in range(store.plan.blocks):
        rewrite(finished, index, seed_sha256=digest)
    refused(StoreError, "does not extend to the rows that were certified", before.row, x_km=0.0, y_km=2.0)
    refused(GuaranteeViolation, "chunk_hashes", open_mechanism, finished)
    report = noticed(finished, "chunk_hashes")
    assert "chunk_hashes" in report.changed
    assert report.epsilon == math.inf


@pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")
def test_extension_that_is_not_same_again_is_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of a solver might answer: rows that nobody has certified are never sampled."""

    def another(store: MechanismStore, block: Any) -> LocalRows:
        rows = extended_block(store, block)
        rows.entries[0, 0, 0] = np.nextafter(rows.entries[0, 0, 0], np.float32(1))
        return rows

    monkeypatch.setattr("mdpext_dask.store.rows.extended_block", another)
    with pytest.raises(StoreError, match="does not extend to the rows that were certified"):
        open_mechanism(finished).sample(x_km=0.0, y_km=2.0)
    open_mechanism(finished).sample(x_km=3.0, y_km=2.0)  # stored
    report = audit(str(finished))
    assert not report.holds
    assert set(MechanismStore.open(str(finished)).plan.skipped) <= set(report.blocks_at_fault)


def test_a_shard_where_there_should_be_none_is_noticed(finished: Path) -> None:
    store = MechanismStore.open(str(finished))
    index = min(store.plan.skipped)
    block = store.plan[index]
    array = zarr.open_array(str(finished / "probability"), mode="r+")
    array[block.owned_x, block.owned_y] = np.float32(0.2)
    report = noticed(finished, f"block {index}")
    assert (report.blocks_at_fault, set(report.extra)) == ((index,), set(store.shard_keys(block)))


def test_a_seed_that_is_lost_is_one_error(finished: Path) -> None:
    shutil.rmtree(finished / "seed" / "score" / "c")
    mechanism = open_mechanism(finished)
    refused(StoreError, "the seed's scores or budgets are damaged", mechanism.row, x_km=0.0, y_km=2.0)
    report = audit(str(finished))
    assert not report.holds
    assert report.as_json()["epsilon_certified"] == "inf"


def test_stores_of_before_regions_are_read_as_whole(tmp_path: Path, small_job: JobMaker) -> None:
    path = tmp_path / "s.zarr"
    before = build(parse_job(small_job()), str(path))
    shutil.rmtree(path / "kept")
    document = json.loads((path / "zarr.json").read_text())
    document.pop("consolidated_metadata", None)
    attributes = as_read(document["attributes"])
    for key in ("kept_sha256", "source_cells_kept", "records_inside"):
        del attributes[key]
    del attributes["projection"]["rotation_deg"]
    (path / "zarr.json").write_text(json.dumps({**document, "attributes": attributes}))
    assert audit(str(path)).holds
    open_mechanism(path, verify=True)
    after = summarise(MechanismStore.open(str(path)))
    assert (after, after["records_inside"], after["blocks_skipped"]) == (before, after["records"], 0)


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")
def test_rows_of_skipped_records_come_from_the_seed(built: Path) -> None:
    store, mechanism = MechanismStore.open(str(built)), open_mechanism(built)
    x, y, rows = store.grid.x_km(), store.grid.y_km(), all_rows(store)
    i, j = (index.ravel() for index in np.indices(store.grid.shape))
    assert np.array_equal(rows_at(store, i, j), rows[i, j])
    row = mechanism.row(x_km=x[4], y_km=y[7])
    wide = rows[4, 7].astype(float)
    np.testing.assert_allclose(row.values, wide / wide.sum(), rtol=1e-12)
    draws = mechanism.sample(x_km=x[4], y_km=y[7], n=20_000)
    counts = np.array([(draws == place).all(axis=1).sum() for place in mechanism.output_lonlat])
    expected = 20_000 * row.values
    assert (np.abs(counts - expected) <= 6 * np.sqrt(expected) + 1).all()


def test_two_places_in_the_gap_are_told_apart_by_no_more_than_epsilon(tmp_path: Path) -> None:
    """Moved to the nearest kept record, places beside the middle would be four kilometres apart."""
    path = tmp_path / "s.zarr"
    build(parse_job(u_job(tmp_path, domain={"refine": [8]})), str(path))
    store, mechanism = MechanismStore.open(str(path)), open_mechanism(path)
    x, y = store.grid.x_km(), store.grid.y_km()
    middle = len(x) // 2

    def apart(steps: int) -> float:
        rows = [np.log(mechanism.row(x_km=x[middle + d], y_km=y[-4]).values) for d in (-steps, steps)]
        return float(np.abs(rows[0] - rows[1]).max())

    allowed = mechanism.epsilon_certified * (x[middle + 1] - x[middle - 1])
    assert not store.read("inside")[middle - 7 : middle + 8, -4].any()
    assert apart(1) <= allowed
    assert apart(8) > 2 * allowed  # what they would be told apart by


def test_places_outside_the_region_follow_the_stated_rule(built: Path) -> None:
    mechanism = open_mechanism(built)
    # In an arm; on its border, nearest to a record of it; in the gap; outside the grid.
    places = np.array([(-3.0, 4.0), (-1.6, 4.0), (0.0, 3.0), (90.0, 3.0)])
    drawn, outside = mechanism.sample_points(places, planar=True)
    assert outside.tolist() == [False, False, True, True]
    assert (drawn >= 0).all()
    dropped, _ = mechanism.sample_points(places, planar=True, outside="drop")
    assert (dropped == -1).tolist() == outside.tolist()
    with pytest.raises(DataError, match="2 of 4 lie outside the region, the first in row 3"):
        mechanism.sample_points(places, planar=True, outside="error")


# --- prior, outputs, tasks ------------------------------------------------------------------------


@pytest.fixture
def island(tmp_path: Path) -> str:
    """Return a triangle in the middle of Manhattan."""
    return geojson(tmp_path / "island.geojson", [(-3, -3), (3, -3), (0, 3), (-3, -3)])


def test_outputs_tasks_and_prior_are_of_the_region(small_job: JobMaker, island: str) -> None:
    job = small_job(domain={"region": island, "cell_km": 1.0})
    domain, geometry = build_domain(parse_job(job)), road_geometry(job)
    west, south = domain.grid.west_km, domain.grid.south_km
    for xy in (domain.output_xy_km, geometry.node_xy_km[geometry.nodes_inside]):
        cells = np.floor((xy - (west, south)) / 1.0).astype(int)
        assert domain.kept[cells[:, 0], cells[:, 1]].all()
    assert not domain.kept.all()
    assert domain.prior.sum() == pytest.approx(1)
    assert not domain.prior[~domain.grid.vertices_of(domain.kept)].any()
    assert not any("prior" in note for note in domain.notes)  # nodes outside do not count to begin with
    # The box is the region's, not the network's.
    assert domain.grid.box.width_km < 8
    assert domain.grid.box.height_km < 8
    # As many outputs as asked for, of the nodes inside.
    many = parse_job(small_job(domain={"region": island, "cell_km": 1.0}, outputs={"count": 4000}))
    refusal(lambda: build_domain(many), "the region holds only", kind=DataError)


def test_outputs_may_be_the_corners_of_kept_cells(small_job: JobMaker, island: str) -> None:
    job = small_job(domain={"region": island, "cell_km": 2.0}, loss={"kind": "euclidean"})
    job["outputs"] = {"choose": "seeds"}
    domain = build_domain(parse_job(job))
    corners = np.argwhere(domain.kept)[:, None] + list(itertools.product((0, 1), (0, 1)))
    expected = 2.0 * corners.reshape(-1, 2) + (domain.grid.west_km, domain.grid.south_km)
    assert set(map(tuple, domain.output_xy_km.round(9))) == set(map(tuple, expected.round(9)))
    assert plan_job(parse_job(job))["outputs"] == domain.outputs


def test_prior_outside_is_dropped_and_said_so(tmp_path: Path) -> None:
    file = point_file(tmp_path / "prior.csv", "x_km,y_km,weight", [(-3, 0, 3), (3, 0, 1), (0, 3, 6)])
    outputs = point_file(tmp_path / "o.csv", "x_km,y_km", [(0, 3), (3, 0)])
    spec = parse_job(u_job(tmp_path, prior={"kind": "file", "file": file}, outputs={"file": outputs}))
    domain = build_domain(spec)
    assert sorted(domain.prior[domain.prior > 0]) == pytest.approx([0.25, 0.75])
    assert domain.outputs == 2  # which may lie in the gap
    assert "60.00% of the prior lies outside the region and was left out" in domain.notes
    point_file(tmp_path / "prior.csv", "x_km,y_km", [(0, 3)])
    refusal(lambda: build_domain(spec), "all of the prior lies outside the region", kind=DataError)


# --- the box --------------------------------------------------------------------------------------


def test_the_box_of_the_job_stays_the_box(small_job: JobMaker, island: str) -> None:
    bbox = [-74.0, 40.74, -73.95, 40.8]
    without = road_geometry(small_job(domain={"bbox": bbox, "cell_km": 1.0}))
    found = road_geometry(small_job(domain={"bbox": bbox, "cell_km": 1.0, "region": island}))
    assert (found.grid, found.projection) == (without.grid, without.projection)
    assert 0 < found.kept.sum() < found.kept.size
    assert set(found.nodes_inside) < set(without.nodes_inside)
    assert any("lies outside domain.bbox" in note for note in found.notes)


def test_a_region_away_from_box_or_roads_or_too_small(small_job: Any, island: str, tmp_path: Path) -> None:
    sea = geojson(tmp_path / "sea.geojson", [(100, 0), (110, 0), (110, 10), (100, 0)])
    for domain, complaint in (
        ({"bbox": [-74.02, 40.70, -74.0, 40.72], "region": island}, "lies outside domain.bbox"),
        ({"region": sea}, "no road within reach"),
        ({"region": island, "cell_km": 9.0}, "larger than the box"),
    ):
        spec = parse_job(small_job(domain=domain))
        refusal(lambda spec=spec: build_geometry(spec), complaint, kind=MdpextError)


# --- loss files -----------------------------------------------------------------------------------


def loss_job(folder: Path, **arrays: Any) -> dict[str, dict[str, Any]]:
    x, y = np.arange(9.0) - 4, np.arange(11.0) - 5
    outputs = np.array(_OUTPUTS, dtype=float) - (4, 5)
    east, north = np.meshgrid(x, y, indexing="ij")
    loss = np.hypot(east[..., None] - outputs[:, 0], north[..., None] - outputs[:, 1])
    np.savez(folder / "l.npz", x_km=x, y_km=y, output_xy_km=outputs, loss_km=loss, **arrays)
    # The arms' sides keep off the cells beyond by a hundred metres, the rest by fifty.
    ring = [(np.clip(a, 0.05, 7.95), np.clip(b, 0.05, 9.95)) for a, b in _U]
    region = geojson(folder / "u.geojson", ring, centre=(4, 5))
    return {
        "domain": {"refine": [2], "region": region}, "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
        "loss": {"kind": "file", "file": str(folder / "l.npz")}, "store": {"block_cells": [1, 1]},
        "cluster": {"kind": "inline"},
    }  # fmt: skip


CENTRE = {"centre_lon": PLANE.centre_lon, "centre_lat": PLANE.centre_lat}


@pytest.mark.slow
def test_a_region_on_the_grid_of_a_loss_file(tmp_path: Path, built: Path) -> None:
    path, job = tmp_path / "s.zarr", loss_job(tmp_path, **CENTRE)
    summary = build(parse_job(job), str(path))
    assert np.array_equal(MechanismStore.open(str(path)).kept, U_KEPT)
    assert summary["blocks_skipped"] == 8
    assert len(shards(path)) == len(shards(built))
    expected = MechanismStore.open(str(built)).attributes["loss_km"]
    assert summary["loss_km"] == pytest.approx(expected, rel=1e-3)
    assert audit(str(path)).holds
    job["domain"]["region"] = geojson(tmp_path / "b.geojson", [(20, 0), (30, 0), (30, 10), (20, 0)])
    refusal(lambda: build_geometry(parse_job(job)), "lies outside the grid", kind=DataError)
    nowhere = parse_job(loss_job(tmp_path))
    refusal(lambda: build_geometry(nowhere), "has no centre_lon, centre_lat", kind=DataError)


# --- the file -------------------------------------------------------------------------------------

_SQUARE = [[-74.0, 40.7], [-73.9, 40.7], [-73.9, 40.8], [-74.0, 40.8], [-74.0, 40.7]]
_HOLE = [[-73.98, 40.72], [-73.92, 40.72], [-73.92, 40.78], [-73.98, 40.78], [-73.98, 40.72]]
_OTHER = [[a + 0.3, b] for a, b in _SQUARE]


def polygon(*rings: Any) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def feature(geometry: Any) -> dict[str, Any]:
    return {"type": "Feature", "properties": None, "geometry": geometry}


_COLLECTION = {
    "type": "GeometryCollection", "geometries": [polygon(_OTHER), {"type": "Point", "coordinates": [0, 0]}],
}  # fmt: skip
_FEATURES = [feature(None), feature(polygon(_SQUARE)), feature(polygon(_HOLE)), feature(_COLLECTION)]
_CRS84 = {"type": "name", "properties": {"name": "urn:ogc:def:crs:OGC:1.3:CRS84"}}


@pytest.mark.parametrize(
    ("document", "area", "skipped"),
    [
        (polygon(_SQUARE), 0.01, 0), (polygon(_SQUARE[::-1]), 0.01, 0),
        (polygon(_SQUARE, _HOLE), 0.01 - 0.0036, 0),
        ({"type": "MultiPolygon", "coordinates": [[_SQUARE, _HOLE], [_OTHER], []]}, 0.02 - 0.0036, 0),
        (feature(polygon(_SQUARE)), 0.01, 0), ({"type": "FeatureCollection", "features": _FEATURES}, 0.02, 1),
        (polygon([[*place, 12.5] for place in _SQUARE]), 0.01, 0),
        ({**polygon(_SQUARE), "crs": _CRS84}, 0.01, 0),
    ],
)  # fmt: skip
def test_polygons_of_every_kind(tmp_path: Path, document: dict[str, Any], area: float, skipped: int) -> None:
    path = tmp_path / "r.geojson"
    path.write_text(json.dumps(document), encoding="utf-8-sig")
    region = read_region(str(path))
    assert (region.shape.area, len(region.notes)) == (pytest.approx(area), skipped)


def rectangle(lon: float, lat: float) -> dict[str, Any]:
    return polygon([[-lon, -lat], [lon, -lat], [lon, lat], [-lon, lat], [-lon, -lat]])


_BAD: dict[str, list[Any]] = {
    "not a GeoJSON file": ["", "lon,lat\n1,2\n", "[" * 100_000],
    "holds no polygons|without end": ['{"type":"GeometryCollection","geometries":[' * 400 + "]}" * 400],
    "has the type None": ["[1, 2]", "null", {"type": "FeatureCollection", "features": [7]}],
    r'a type must be a name, got \["Polygon"\]': [{"type": ["Polygon"]}],
    "a type must be a name": [{"type": {"a": 1}}, {"type": 7}],
    "has the type 'Topology'": [{"type": "Topology"}],
    "features must be a list": [{"type": "FeatureCollection"}],
    "holds no polygons": [
        {"type": "FeatureCollection", "features": []}, polygon(), {"type": "Point", "coordinates": [0, 0]}
    ],
    "list of rings": [{"type": "MultiPolygon", "coordinates": [3]}],
    "not closed": [polygon(_SQUARE[:-1])],
    "at least 4 positions": [polygon(_SQUARE[:2] + _SQUARE[:1]), polygon(7)],
    "must be degrees": [
        polygon([[500000, 4500000]] * 4), polygon([[-74, 40], [-73, 91], [-73, 40], [-74, 40]])
    ],
    r"must be \[lon, lat\], got \[\"a\", 40": [polygon([["a", 40], [-73, 40], [-73, 41], ["a", 40]])],
    r"must be \[lon, lat\]": [polygon([at] * 4) for at in ([True, 40], [-74], [math.nan, 40], [10**400, 2])],
    "broken: Self-intersection": [polygon([[-74, 40], [-73, 41], [-73, 40], [-74, 41], [-74, 40]])],
    "broken": [polygon([[-74, 40], [-73, 41], [-72, 42], [-74, 40]])],
    "broken: Hole lies outside shell": [polygon(_SQUARE, _OTHER)],
    "has a crs of its own": [{**polygon(), "crs": {"name": "EPSG:2263"}}],
    "plane|too large": [rectangle(180, 80)],
    "must be cut there": [polygon([[-179, 1], [179, 1], [179, 2], [-179, 2], [-179, 1]])],
    "too large for one plane": [rectangle(180, 90), rectangle(60, 50)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        # By default, one for each complaint.
        pytest.param(one, complaint, marks=pytest.mark.slow if number else ())
        for complaint, many in _BAD.items()
        for number, one in enumerate(many)
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, small_job: JobMaker, document: Any, complaint: str) -> None:
    path = tmp_path / "bad.geojson"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    spec = parse_job(small_job(domain={"region": str(path)}))
    message = refusal(lambda: build_geometry(spec))
    assert message.startswith("domain")
    assert re.search(complaint, message), message


def test_files_that_cannot_be_read(tmp_path: Path, small_job: JobMaker) -> None:
    latin = tmp_path / "latin.geojson"
    latin.write_bytes(b'{"type": "\xe9"}')
    for name, complaint in (
        (tmp_path / "none.geojson", "does not exist"),
        (tmp_path, "cannot be read"),
        ("builtin:manhattan", "no built-in regions"),
        (latin, "is not UTF-8"),
    ):
        spec = parse_job(small_job(domain={"region": str(name)}))
        refusal(lambda spec=spec: build_geometry(spec), complaint, kind=DataError)


def test_the_content_of_the_region_is_part_of_the_job(small_job: JobMaker, island: str) -> None:
    spec = parse_job(small_job(domain={"region": island}))
    before = spec.fingerprint()
    moved = Path(island).with_name("moved.geojson")
    shutil.copy(island, moved)
    assert parse_job(small_job(domain={"region": str(moved)})).fingerprint() == before
    Path(island).write_text(Path(island).read_text() + " ")
    assert spec.fingerprint() != before


def test_the_readmes_example(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "docs" / "inputs.md").read_text(encoding="utf-8")
    section = readme.split("## Regions and rotated grids")[1].split("## ")[0]
    region, job = (section.split(f"```{kind}\n")[1].split("```")[0] for kind in ("json", "toml"))
    (tmp_path / "quarter.geojson").write_text(region)
    (tmp_path / "job.toml").write_text(job)
    quick = ["cluster.kind=inline", "privacy.budget=bound", "loss.kind=euclidean"]
    summary = build(load_job(tmp_path / "job.toml", quick), str(tmp_path / "m.zarr"))
    assert summary["state"] == "complete"
    assert summary["source_cells_kept"] < summary["source_cells"]
    assert abs(summary["rotation_deg"]) > 20


# --- cells ----------------------------------------------------------------------------------------


@st.composite
def stars(draw: st.DrawFn) -> list[list[tuple[float, float]]]:
    """Star-shaped rings around the origin, in km, and sometimes a hole."""
    radii = draw(st.lists(st.floats(0.5, 9), min_size=3, max_size=12))
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    shell = [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
    rings = [[*shell, shell[0]]]
    if draw(st.booleans()):
        hole = [(0.4 * x, 0.4 * y) for x, y in shell]
        rings.append([*hole, hole[0]])
    return rings


@given(
    rings=stars(), cell_km=st.floats(0.6, 4), cells=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    corner=st.tuples(st.floats(-9, 3), st.floats(-9, 3)), rotation=st.sampled_from([0.0, 29.0, -80.0]),
)  # fmt: skip
@settings(max_examples=80)
def test_kept_cells_are_those_that_meet_the_region(
    tmp_path_factory: pytest.TempPathFactory,
    rings: list[list[tuple[float, float]]],
    cell_km: float,
    cells: tuple[int, int],
    corner: tuple[float, float],
    rotation: float,
) -> None:
    """Cell by cell, with Shapely; and any place of the region in the grid lies in a kept cell."""
    region = read_region(geojson(tmp_path_factory.getbasetemp() / "star.geojson", *rings))
    projection = dataclasses.replace(PLANE, rotation_deg=rotation)
    grid = Grid(*corner, *cells, cell_km, (2,))
    kept = region.cells(grid, projection)
    degrees = [PLANE.to_degrees(np.array(ring)) for ring in rings]
    along = np.linspace(0, 1, 200, endpoint=False)[:, None]
    dense = [np.concatenate([a + along * (b - a) for a, b in itertools.pairwise(ring)]) for ring in degrees]
    shell, *holes = map(projection.to_plane, dense)
    shape = shapely.Polygon(shell, holes)
    a, b = np.indices(cells)
    west, south = corner[0] + a * cell_km, corner[1] + b * cell_km
    squares = shapely.box(west, south, west + cell_km, south + cell_km)
    meets, wider, narrower = (shapely.intersects(shape.buffer(r), squares) for r in (0, 5e-5, -5e-5))
    # Within centimetres of touching, how sides are cut into pieces decides.
    assert ((wider != narrower) | (kept == meets)).all()
    places = np.random.default_rng(0).uniform(-9, 9, (300, 2))
    held = shapely.contains_xy(shape.buffer(-1e-4), places) & grid.box.contains(places)
    assert grid.lie_in(kept, places[held]).all()


@given(
    cells=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    factor=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_vertices_of_cells_by_hand(cells: tuple[int, int], factor: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = Grid(-1.0, 2.0, *cells, 1.5, (factor,))
    chosen = rng.random(cells) < 0.4
    expected = np.zeros(grid.shape, dtype=bool)
    for a, b in np.argwhere(chosen):
        expected[a * factor : (a + 1) * factor + 1, b * factor : (b + 1) * factor + 1] = True
    assert np.array_equal(grid.vertices_of(chosen), expected)
    assert grid.count_vertices_of(chosen) == expected.sum()
    i, j = (index.ravel() for index in np.indices(grid.shape))
    assert np.array_equal(grid.are_vertices_of(chosen, i, j), expected.ravel())
    places = np.stack([grid.x_km()[i], grid.y_km()[j]], axis=-1)
    assert np.array_equal(grid.lie_in(chosen, places), expected.ravel())
    assert not grid.lie_in(np.ones(cells, dtype=bool), np.array([(-1.1, 2.5), (-0.5, 99)])).any()


def test_a_touching_cell_is_kept(tmp_path: Path) -> None:
    """A region that ends on a side of a cell, to the bit, keeps the cell beyond."""
    ring = [(-74.0, 40.7), (-73.9, 40.7), (-73.9, 40.8), (-74.0, 40.7)]
    region = read_region(polygon_file(tmp_path / "r.geojson", ring))
    outline = region.outline_km(PLANE)
    west = float(outline[:, 0].min())
    grid = Grid(west - 1, float(outline[:, 1].min()), 1, 8, 1.0, (1,))
    assert grid.box.east_km == west
    assert region.cells(grid, PLANE).any()
    assert not region.cells(dataclasses.replace(grid, west_km=west - 1.001), PLANE).any()


def test_the_problem_is_another_for_another_region(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    init(parse_job(u_job(tmp_path)), str(path))
    region = geojson(tmp_path / "o.geojson", [(-4, -5), (4, -5), (4, 5), (-4, -5)])
    other = u_job(tmp_path, domain={"region": region})
    refused(StoreError, r"domain\.region", lambda: init(parse_job(other), str(path)))
    before = MechanismStore.open(str(path)).problem_sha256
    init(parse_job(other), str(path), overwrite=True)
    assert MechanismStore.open(str(path)).problem_sha256 != before
    MechanismStore.clear(str(path))
