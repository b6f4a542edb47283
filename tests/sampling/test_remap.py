"""The optimal remap: against brute force, on baselines, and beside a finished store."""

import itertools
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask import BoundRequest, audit, build, evaluate, open_mechanism
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, StoreAccessError, StoreError
from mdpext_dask.evaluation.baselines.noise import exponential_mechanism, planar_laplace, remapped
from mdpext_dask.evaluation.baselines.problem import Problem, strips
from mdpext_dask.evaluation.bound.kept import BOUND
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import init
from mdpext_dask.reports.page.thinned import Thinned, quantised
from mdpext_dask.runtime import open_city
from mdpext_dask.sampling.remap_store import remap_store
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import extra_shards, verify
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import TABLE, best_remap, has_remap, merge_columns, read_remap
from tests.support.baseline_checks import expected_loss, holds, problem_of, rows_of
from tests.support.forged import edit
from tests.support.inside import call
from tests.support.refusals import refused

Floats = NDArray[np.float64]


# --- the table ------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(0, 10**9), st.booleans())
def test_no_other_table_is_better(seed: int, ties: bool) -> None:
    """All 27 tables of three outputs, and random remaps between them."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 3, (3, 3)).astype(np.float64) if ties else rng.random((3, 3))
    table = best_remap(costs)

    def loss(of: tuple[int, ...]) -> float:
        return float(sum(costs[y, of[y]] for y in range(3)))

    best = loss(tuple(table.tolist()))
    assert best == min(loss(other) for other in itertools.product(range(3), repeat=3))
    assert best <= (rng.dirichlet(np.ones(3), 3) * costs).sum() + 1e-12
    assert best <= loss((0, 1, 2))
    # What costs as much as anything else is kept.
    kept = [y for y in range(3) if costs[y, y] == costs[y].min()]
    assert (table[kept] == kept).all()


@settings(max_examples=100)
@given(st.integers(0, 10**9), st.integers(1, 9))
def test_once_is_enough(seed: int, outputs: int) -> None:
    costs = np.random.default_rng(seed).random((outputs, outputs))
    table = best_remap(costs)
    again = np.zeros_like(costs)
    np.add.at(again, table, costs)  # what is reported as z costs what all that became z would
    reported = np.unique(table)
    assert (best_remap(again)[reported] == reported).all()


def test_columns_that_become_one_are_added_up() -> None:
    merged = merge_columns(np.array([[[1, 2, 4], [8, 16, 32]]], dtype=np.uint64), np.array([2, 1, 2]))
    assert (merged.tolist(), merged.dtype) == ([[[0, 2, 5], [0, 16, 40]]], np.uint64)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), laplace=st.booleans(), epsilon=st.sampled_from([0.1, 0.5, 2.0]))
def test_a_remap_of_a_baseline_never_loses(seed: int, laplace: bool, epsilon: float) -> None:
    problem = problem_of(np.random.default_rng(seed).uniform(-2, 4, (6, 2)), epsilon, seed=seed)
    method = planar_laplace if laplace else exponential_mechanism
    plain = rows_of(method, problem)
    mechanism = remapped(method, problem, 1000.0)
    assert mechanism.rows is not None
    rows = mechanism.rows(slice(0, problem.grid.shape[0]))
    before, after = expected_loss(problem, plain), expected_loss(problem, rows)
    assert after <= before * (1 + 1e-12)
    assert mechanism.facts["loss_km_before_remap"] == pytest.approx(before, rel=1e-12)
    if mechanism.facts["outputs_moved"] == 0:
        assert np.array_equal(rows, plain)
    # Brute force, output by output.
    costs = problem.loss.rows(problem.records_xy_km(slice(0, problem.grid.shape[0])))
    weighted = (plain * problem.prior[..., None]).reshape(-1, 6)
    best = sum(min(float(weighted[:, y] @ costs[:, z]) for z in range(6)) for y in range(6))
    assert after == pytest.approx(best, rel=1e-12)
    assert holds(rows, problem)


def test_strips_cover_all_columns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdpext_dask.evaluation.baselines.problem._STRIP_ELEMENTS", 31)
    problem = problem_of(np.zeros((3, 2)))
    covered = [i for east in strips(problem) for i in range(east.start, east.stop)]
    assert covered == list(range(problem.grid.shape[0]))
    assert len(strips(problem)) == 3


# --- a store --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose outputs lie so badly that some are better reported as others."""
    folder = tmp_path_factory.mktemp("remap")
    job: dict[str, dict[str, Any]] = {
        "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
        "privacy": {"epsilon_per_km": 0.1, "budget": "half"}, "outputs": {"count": 8}, "loss": {"tasks": 5},
        "cluster": {"kind": "inline"}, "store": {"block_cells": [2, 2]},
    }  # fmt: skip
    build(parse_job(job), str(folder / "m.zarr"))
    return folder / "m.zarr"


@pytest.fixture(scope="module")
def remapped_once(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = shutil.copytree(built, tmp_path_factory.mktemp("once") / "m.zarr")
    return path, remap_store(str(path))


@pytest.fixture
def copy(remapped_once: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return shutil.copytree(remapped_once[0], tmp_path / "copy.zarr")


def test_the_table_is_that_of_the_stored_rows(remapped_once: tuple[Path, dict[str, Any]]) -> None:
    path, answer = remapped_once
    store = MechanismStore.open(str(path))
    problem = Problem.of_store(store)
    rows = store.read("probability").astype(np.float64)
    rows /= rows.sum(axis=-1, keepdims=True)
    weighted = (rows * problem.prior[..., None]).reshape(-1, problem.outputs)
    costs = weighted.T @ problem.loss.rows(problem.records_xy_km(slice(0, problem.grid.shape[0])))
    remap = read_remap(store)
    assert np.array_equal(remap.table, best_remap(costs))
    assert answer["moved"] == (remap.table != np.arange(8)).sum() > 0
    assert answer["outputs_reported"] == len(set(remap.output)) == 8 - len(remap.no_longer_reported)
    assert set(remap.no_longer_reported) == set(range(8)) - set(remap.output)
    assert set(answer) == {
        "store", "loss_km", "remapped_loss_km", "moved", "outputs_reported", "seconds"
    }  # fmt: skip
    assert (
        answer["loss_km"]
        == remap.loss_km
        == pytest.approx(
            evaluate(str(path), bound=BoundRequest(seconds=0), attacks=None)["loss_km"], rel=1e-12
        )
    )
    assert answer["remapped_loss_km"] < answer["loss_km"]
    after = expected_loss(problem, merge_columns(rows, remap.table))
    assert answer["remapped_loss_km"] == remap.remapped_loss_km == pytest.approx(after, rel=1e-12)


def test_remapped_rows_keep_epsilon(remapped_once: tuple[Path, dict[str, Any]]) -> None:
    store = MechanismStore.open(str(remapped_once[0]))
    rows = store.read("probability").astype(np.float64)
    problem = Problem.of_store(store)
    assert holds(merge_columns(rows, read_remap(store).table), problem)


def test_nothing_certified_has_changed(built: Path, copy: Path) -> None:
    files = {file.relative_to(built) for file in built.rglob("*") if file.is_file()}
    assert all((built / file).read_bytes() == (copy / file).read_bytes() for file in files)
    added = {file.relative_to(copy) for file in copy.rglob("*") if file.is_file()} - files
    assert added - {Path(BOUND)} == {Path(TABLE)}
    store = MechanismStore.open(str(copy))
    verify(store)
    assert extra_shards(store) == ()
    assert audit(copy).holds
    assert open_mechanism(copy, verify=True, remap=True).dataset.probability.shape[2] == 8


def test_the_same_table_from_two_processes(remapped_once: tuple[Path, dict[str, Any]], copy: Path) -> None:
    before = (copy / TABLE).read_bytes()
    (copy / TABLE).unlink()
    cluster = {"kind": "local", "workers": 2}
    store = MechanismStore.open(str(copy), mode="r+")
    store.update(job={**store.attributes["job"], "cluster": cluster})
    answer = remap_store(str(copy))
    assert (copy / TABLE).read_bytes() == before
    assert answer["remapped_loss_km"] == remapped_once[1]["remapped_loss_km"]


def test_what_is_drawn_is_reported_through_the_table(remapped_once: tuple[Path, dict[str, Any]]) -> None:
    path = remapped_once[0]
    plain, mechanism = open_mechanism(path, remap=False), open_mechanism(path)
    table = read_remap(MechanismStore.open(str(path))).table
    place = {"lon": -73.98, "lat": 40.75}
    row = mechanism.row(**place).values
    assert np.allclose(row, merge_columns(plain.row(**place).values, table), rtol=1e-14, atol=0)
    assert (row > 0).sum() == len(np.unique(table))
    draws = 20_000
    reports = mechanism.sample(**place, n=draws)
    counts = np.array([(reports == lonlat).all(axis=1).sum() for lonlat in mechanism.output_lonlat])
    # Six standard deviations of a binomial count.
    assert (np.abs(counts - draws * row) <= 6 * np.sqrt(draws * row * (1 - row)) + 1).all()
    assert (counts[row == 0] == 0).all()
    outputs, _ = mechanism.sample_points(np.tile([[-73.98, 40.75]], (draws, 1)))
    counts = np.bincount(outputs, minlength=8)
    assert (np.abs(counts - draws * row) <= 6 * np.sqrt(draws * row * (1 - row)) + 1).all()
    dropped, outside = mechanism.sample_points(np.array([[-70.0, 40.75]]), outside="drop")
    assert outside.all()
    assert dropped.tolist() == [-1]


def damage_entries(entries: list[Any]) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.update(output=entries)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (damage_entries([0, 1, 2, 3, 4, 5, 6, 8]), "is damaged"),
        (damage_entries([0, 1, 2, 3, 4, 5, 6, -1]), "is damaged"),
        (damage_entries([0, 1, 2, 3, 4, 5, 6, True]), "is damaged"),
        (damage_entries([0, 1, 2, 3, 4, 5, 6, 1.0]), "is damaged"),
        (damage_entries([0, 1, 2, 3, 4, 5, 6]), "is damaged"),
        (lambda document: document.update(output="01234567"), "is damaged"),
        (lambda document: document.update(loss_km=None), "is damaged"),
        (lambda document: document.update(more=1), "is damaged"),
        (lambda document: document.pop("output"), "is damaged"),
        (lambda document: document.update(content_sha256="0" * 64), "made for other bytes"),
    ],
)
def test_bad_table(copy: Path, change: Callable[[dict[str, Any]], object], complaint: str) -> None:
    edit(copy / TABLE, change)
    for remap in (True, None):
        refused(StoreError, complaint, open_mechanism, copy, remap=remap)
    open_mechanism(copy, remap=False)  # without it, nothing is amiss


@pytest.mark.parametrize("content", ["", "not JSON", "[1, 2]", "null", "3", '{"output": ', "[" * 200_000])
def test_a_table_that_is_none_is_one_line(copy: Path, content: str) -> None:
    (copy / TABLE).write_text(content)
    refused(StoreError, r"is damaged; run mdpext remap", open_mechanism, copy, remap=True)
    remap_store(str(copy))
    open_mechanism(copy, remap=True)


def test_a_table_of_another_store_is_refused(copy: Path, built: Path) -> None:
    refused(StoreError, "has no remap; run mdpext remap", open_mechanism, built, remap=True)
    store = MechanismStore.open(str(copy), mode="r+")
    store.update(chunk_hashes={**store.attributes["chunk_hashes"], "digest": "f" * 64})
    with pytest.raises(StoreError, match="made for other bytes"):
        read_remap(MechanismStore.open(str(copy)))
    for _ in range(2):
        for use in (lambda: open_mechanism(copy, remap=True), lambda: remap_store(str(copy))):
            refused(GuaranteeViolation, "chunk_hashes has changed", use)
        edit(copy / "zarr.json", lambda root: root["attributes"].update(chunk_hashes=None))


def test_stores_that_are_not_finished_are_refused(built: Path, copy: Path, tmp_path: Path) -> None:
    edit(copy / "zarr.json", lambda root: root["attributes"].update(state="refused"))
    refused(GuaranteeViolation, "must not be sampled", remap_store, str(copy))
    refused(StoreError, "no such store", remap_store, str(tmp_path / "nothing.zarr"))
    init(parse_job(MechanismStore.open(str(built)).attributes["job"]), str(tmp_path / "begun.zarr"))
    refused(IncompleteStoreError, "not complete", remap_store, str(tmp_path / "begun.zarr"))


def test_a_server_that_denies_what_is_not_there_has_no_remap(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = objects.exists
    for transient in (False, True):

        def denied(store: Any, key: str, transient: bool = transient) -> bool:
            if key == TABLE:
                raise StoreAccessError("403", transient=transient)
            return exists(store, key)

        monkeypatch.setattr(objects, "exists", denied)
        with pytest.raises(StoreAccessError) if transient else nullcontext():
            assert not open_mechanism(copy).remapped


def test_a_lost_shard_or_table_is_told(copy: Path) -> None:
    store = MechanismStore.open(str(copy), mode="r+")
    before = (copy / TABLE).read_bytes()
    objects.delete_keys(store.objects, store.shard_keys(store.plan[0]))
    refused(StoreError, "", remap_store, str(copy))
    assert (copy / TABLE).read_bytes() == before


# --- the command line -----------------------------------------------------------------------------


def test_the_commands(built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = shutil.copytree(built, tmp_path / "m.zarr")
    points, reports = tmp_path / "points.csv", tmp_path / "reports.csv"
    points.write_text("lon,lat\n" + "-73.98,40.75\n" * 200)
    answer = call(capfd, "sample", path, points, "-o", reports, "--remap", code=2)
    assert answer["error"] == "StoreError"
    assert "has no remap; run mdpext remap" in answer["message"]
    assert not reports.exists()
    answer = call(capfd, "remap", path, "--progress", "plain")
    assert answer["remapped_loss_km"] < answer["loss_km"]
    assert call(capfd, "sample", path, points, "-o", reports, "--remap")["remap"] is True
    reported = set(read_remap(MechanismStore.open(str(path))).output)
    assert set(pd.read_csv(reports)["output"]) <= reported
    assert call(capfd, "status", path)["state"] == "complete"
    call(capfd, "remap", tmp_path / "nothing.zarr", code=2)


USES = ("sample", "export", "open_mechanism", "report", "status", "evaluate")


def remap_in(use: str, path: Path, folder: Path, capture: pytest.CaptureFixture[str], *asked: str) -> bool:
    """Return whether a use of a store reports through its remap, as its answer says and as it does."""
    target = folder / f"{use}{''.join(asked)}.{ {'export': 'mdp', 'report': 'html'}.get(use, 'csv') }"
    wanted = {(): None, ("--remap",): True, ("--no-remap",): False}[asked]
    if use == "open_mechanism":
        mechanism = open_mechanism(path, remap=wanted)
        row = mechanism.row(lon=-73.98, lat=40.75).values
        assert (row == 0).any() == mechanism.remapped == ("remapped" in repr(mechanism))
        return mechanism.remapped
    if use == "evaluate":
        answer = call(capture, use, path, "--bound-seconds", 0, "--no-attacks")
        return answer["remapped_loss_km"] is not None
    if use == "status":
        return bool(call(capture, use, path)["remap"])
    if use == "report":
        said = bool(call(capture, use, path, "-o", target, "--bound-seconds", 0)["remap"])
        assert ('id="remap"' in target.read_text()) == said
        return said
    if use == "export":
        said = bool(call(capture, use, path, "-o", target, *asked)["remap"])
        assert open_city(target).remapped == said
        assert not open_city(target, remap=False).remapped
        return said
    points = folder / "points.csv"
    points.write_text("lon,lat\n" + "-73.98,40.75\n" * 300)
    said = bool(call(capture, use, path, points, "-o", target, *asked)["remap"])
    reported = set(pd.read_csv(target)["output"])
    dropped = set(range(8)) - set(best_of(path))
    assert not said or not reported & dropped
    return said


def best_of(path: Path) -> list[int]:
    """Return the table of a store; the identity if it has none."""
    store = MechanismStore.open(str(path))
    return read_remap(store).output if has_remap(store) else list(range(8))


@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=pytest.mark.slow if use == "report" else ()) for use in USES]
)
def test_a_store_is_used_everywhere_as_it_says(
    use: str, built: Path, remapped_once: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = remapped_once[0]
    assert not remap_in(use, built, tmp_path, capfd)
    (tmp_path / "with").mkdir()
    assert remap_in(use, path, tmp_path / "with", capfd)
    if use in ("sample", "export", "open_mechanism"):
        assert remap_in(use, path, tmp_path, capfd, "--remap")
        assert not remap_in(use, path, tmp_path, capfd, "--no-remap")


def test_a_remap_can_be_taken_out_and_identity_is_the_same(
    built: Path, copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, with_it = open_mechanism(built), open_mechanism(copy)
    assert (before.remapped, with_it.remapped) == (False, True)
    assert before.mechanism_sha256 == with_it.mechanism_sha256
    assert call(capfd, "remap", copy, "--remove")["removed"] is True
    assert not open_mechanism(copy).remapped
    assert call(capfd, "remap", copy, "--remove")["removed"] is False
    files = [{file.relative_to(path) for file in path.rglob("*") if file.is_file()} for path in (built, copy)]
    assert files[0] ^ files[1] <= {Path(BOUND)}


def test_the_page_shows_what_is_reported(remapped_once: tuple[Path, dict[str, Any]]) -> None:
    """Zero where an output is never reported; rows that cannot be used stay unknown."""
    store = MechanismStore.open(str(remapped_once[0]))
    table = read_remap(store).table
    plain, merged = Thinned.of(store), Thinned.of(store, table)
    plain_rows, merged_rows = plain.rows.toarray(), merged.rows.toarray()
    assert np.allclose(merged_rows, merge_columns(plain_rows, table), rtol=1e-15, atol=0)
    codes, _, _ = quantised(merged_rows)
    assert ((codes == 0) == (merged_rows == 0)).all()
    assert (codes == 0).any()
