"""A whole job: the same bytes everywhere, resumable, refused when it does not hold."""

import dataclasses
import errno
import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from mdpext_dask import audit, open_mechanism
from mdpext_dask.cli.submit.files import check_store
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, StoreError
from mdpext_dask.events import Event, StageFinished, TaskDone
from mdpext_dask.extend.choose import operator_of
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline import run, tasks
from mdpext_dask.pipeline.resume import create
from mdpext_dask.pipeline.run import build, finalise, init, partition
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.seed.budget import axis_budgets
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.integrity import CERTIFICATE
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extended_block, extension_arrays
from mdpext_dask.store.schema import as_read, as_stored
from tests.support.forged import edit, shard_of
from tests.support.reference import audited_epsilon
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]


def make(job: dict[str, Any], path: Path, **arguments: Any) -> dict[str, Any]:
    return build(parse_job(job), str(path), **arguments)


def bytes_of(path: Path) -> np.ndarray:
    return MechanismStore.open(str(path)).read("probability")


def does_not_verify(path: Path, says: str) -> None:
    refused(GuaranteeViolation, says, open_mechanism, path, verify=True)


def spoil(path: Path, i: int, j: int, output: int, factor: float) -> None:
    """Change one stored probability through Zarr, as someone outside would."""
    array = zarr.open_array(str(path / "probability"), mode="r+")
    array[i, j, output] = np.float32(array[i, j, output] * factor)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    """Return a store that must not be changed."""
    path = tmp_path_factory.mktemp("run") / "small.zarr"
    make(small_job(), path)
    return path


# --- the result -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "budget"),
    [
        (1.5, "bound"),
        (2, "half"),
        ("inf", "bound"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, "half"), (2, "bound"), (4, "half"), ("inf", "half")]
        ),
    ],
)
def test_the_store_is_private_for_all_pairs(path: Path, small_job: Job, p: float | str, budget: str) -> None:
    """Brute force over all pairs of stored rows, certificate above it, promise above the certificate."""
    job = small_job(domain={"refine": [2], "metric_p": p}, privacy={"budget": budget, "epsilon_per_km": 0.7})
    summary = make(job, path)
    data = xr.open_zarr(path)
    exact = audited_epsilon(data.probability.values, data.x.values, data.y.values, float(summary["metric_p"]))
    assert exact <= summary["epsilon_certified"] <= summary["epsilon_planar_per_km"] < 0.7
    assert summary["state"] == "complete"


def test_the_summary_has_every_key_that_programs_rely_on(finished: Path) -> None:
    summary = summarise(MechanismStore.open(str(finished)))
    keys = {
        "store", "state", "records", "outputs", "seeds", "source_cells", "blocks", "blocks_done",
        "epsilon_per_km", "epsilon_certified", "metric_p", "method", "budget", "loss_km", "seed_primal",
        "seed_dual", "seed_gap", "seed_solves", "boundary_rows_checked", "boundary_mismatches",
        "fallbacks", "fingerprint", "seconds", "peak_bytes_per_task",
    }  # fmt: skip
    assert keys <= set(summary)
    stages = {"domain", "loss", "seed", "extend", "boundary", "audit", "evaluate", "total"}
    assert set(summary["seconds"]) == stages
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["records"], summary["blocks_done"]) == (13 * 29, summary["blocks"])


def test_half_tries_the_published_splits_and_keeps_the_best(path: Path, small_job: Job) -> None:
    summary = make(small_job(privacy={"budget": "half"}), path)
    assert summary["seed_solves"] == 5
    tried = MechanismStore.open(str(path)).seed_attributes["tried"]
    assert summary["seed_primal"] == min(entry["primal_km"] for entry in tried)


def test_the_store_opens_in_xarray_with_units_and_coordinates(finished: Path) -> None:
    import matplotlib as mpl
    from pyproj import CRS

    mpl.use("Agg")
    dataset = xr.open_zarr(finished)
    assert dataset.probability.dims == ("x", "y", "output")
    assert dataset.x.attrs["units"] == dataset.y.attrs["units"] == "km"
    assert {"output_lon", "output_lat", "output_x", "output_y"} <= set(dataset.coords)
    assert CRS.from_cf(dataset.spatial_ref.attrs).coordinate_operation.method_name == "Azimuthal Equidistant"
    assert float(dataset.prior.sum()) == pytest.approx(1)
    assert dataset.inside.all()
    assert float(dataset.probability.sum("output").max()) == pytest.approx(1, abs=1e-6)
    dataset.probability.sel(output=3).plot()
    assert dataset.attrs["state"] == "complete"
    assert {"fingerprint", "job", "software", "format_version", "chunk_hashes"} <= set(dataset.attrs)
    assert json.loads(dataset.attrs["job"]) == MechanismStore.open(str(finished)).attributes["job"]


def test_the_store_can_be_written_as_net_cdf_and_mapped(finished: Path, tmp_path: Path) -> None:
    """With the format that SciPy writes, which holds least."""
    for number, dataset in enumerate((xr.open_zarr(finished), open_mechanism(finished).dataset)):
        # Where rioxarray looks for the CRS: a coordinate of the name in `grid_mapping`, with a WKT.
        for name in ("prior", "inside", "probability"):
            mapping = dataset[name].coords[dataset[name].attrs["grid_mapping"]]
            assert "Azimuthal Equidistant" in mapping.attrs["crs_wkt"]
        dataset.to_netcdf(tmp_path / f"{number}.nc", engine="scipy")
        with xr.open_dataset(tmp_path / f"{number}.nc", engine="scipy") as read:
            xr.testing.assert_equal(read, dataset.load())
            assert {key: read.attrs[key] for key in dataset.attrs} == dataset.attrs
            assert "spatial_ref" in read.prior.coords


def test_opening_without_consolidated_metadata_warns_of_nothing(finished: Path) -> None:
    """Zarr warns of what it finds in a group and cannot place; here, a warning is an error."""
    xr.testing.assert_identical(xr.open_zarr(finished, consolidated=False), xr.open_zarr(finished))
    members = dict(zarr.open_group(str(finished), mode="r", use_consolidated=False).members())
    assert {"receipts", "audit", "remap", "probability"} <= set(members)


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block_cells",
    [[2, 3], *(pytest.param(case, marks=pytest.mark.slow) for case in [[1, 1], [3, 2], [99, 99]])],
)
def test_block_shapes_change_nothing(path: Path, small_job: Job, built: Path, block_cells: list[int]) -> None:
    summary = make(small_job(store={"block_cells": block_cells}), path)
    assert np.array_equal(bytes_of(path), bytes_of(built))
    assert summary["boundary_mismatches"] == 0


def test_in_pieces_without_dask_it_is_the_same(path: Path, small_job: Job, built: Path) -> None:
    planned = init(parse_job(small_job()), str(path))
    assert (planned["state"], planned["blocks_done"]) == ("planned", 0)
    blocks = planned["blocks"]
    assert refused(IncompleteStoreError, "", finalise, str(path)).missing == tuple(range(blocks))
    partition(str(path), blocks - 1, blocks)
    under_way = summarise(MechanismStore.open(str(path)))
    assert (under_way["state"], under_way["blocks_done"]) == ("extending", 1)
    refused(IncompleteStoreError, "blocks are missing", open_mechanism, path)
    partition(str(path), 0, blocks)
    assert finalise(str(path)) == summarise(MechanismStore.open(str(path)))
    assert np.array_equal(bytes_of(path), bytes_of(built))
    refused(StoreError, "there are no blocks", partition, str(path), 0, blocks + 1)


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        "seed",
        "extend",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ["domain", "loss", "boundary", "audit"]),
    ],
)
def test_interrupted_at_any_stage_it_resumes(path: Path, small_job: Job, built: Path, after: str) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, StageFinished) and event.stage == after:
            raise KeyboardInterrupt

    refused(KeyboardInterrupt, "", lambda: make(small_job(), path, observer=interrupt))
    assert make(small_job(), path)["state"] == "complete"
    assert np.array_equal(bytes_of(path), bytes_of(built))


def test_valid_receipts_are_not_redone(path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, TaskDone) and event.stage == "extend":
            done.append(1)
            if len(done) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(small_job(store={"block_cells": [1, 2]}), path, observer=interrupt)
    calls: list[int] = []
    original = tasks.extended_block
    monkeypatch.setattr(tasks, "extended_block", lambda *a: (calls.append(1), original(*a))[1])
    summary = make(small_job(store={"block_cells": [1, 2]}), path)
    assert len(calls) == summary["blocks"] - 3


# --- what must be refused -------------------------------------------------------------------------


def test_five_percent_at_city_spacing_fail_and_the_triple_is_named(path: Path, small_job: Job) -> None:
    make(small_job(domain={"cell_km": 3.0, "refine": [60]}, outputs={"count": 4}), path)
    spoil(path, 77, 123, 2, 1.05)
    report = audit(str(path))
    assert report.epsilon > report.epsilon_planar_per_km
    assert report.violations >= 1
    assert report.worst["output"] == 2
    assert [77, 123] in (report.worst["record"], report.worst["record_prime"])
    assert report.worst["log_ratio"] > report.worst["bound"]


@pytest.mark.parametrize(
    "p", [2, *(pytest.param(case, marks=pytest.mark.slow) for case in [1, 1.0001, "inf"])]
)
def test_a_large_change_fails_it_for_every_metric(path: Path, small_job: Job, p: float | str) -> None:
    make(small_job(domain={"metric_p": p}), path)
    spoil(path, 7, 11, 3, 8)
    report = audit(str(path))
    assert report.holds is False
    assert report.epsilon > report.epsilon_planar_per_km
    assert report.violations >= 1
    assert report.worst["output"] == 3
    assert [7, 11] in (report.worst["record"], report.worst["record_prime"])
    assert report.worst["log_ratio"] > report.worst["bound"]
    json.dumps(report.as_json(), allow_nan=False)
    assert MechanismStore.open(str(path)).state == "refused"


@pytest.mark.parametrize(
    "lost",
    [
        "seed/score",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["seed/cost", "prior", "problem/task_distance"]
        ),
    ],
)
def test_lost_chunks_never_read_as_zeros(path: Path, small_job: Job, finished: Path, lost: str) -> None:
    init(parse_job(small_job()), str(path))
    shutil.rmtree(path / lost / "c")
    tasks.cached_loss.cache_clear()
    if lost.startswith("seed"):  # what is lost is made again
        assert make(small_job(), path)["state"] == "complete"
        assert np.array_equal(bytes_of(path), bytes_of(finished))
    else:
        refused(StoreError, "damaged", make, small_job(), path)


def test_running_again_mends_a_refused_store(finished: Path, small_job: Job) -> None:
    good = bytes_of(finished)
    spoil(finished, 7, 11, 3, 8)
    found = audit(str(finished)).as_json()["epsilon_certified"]
    # The audit leaves no old figure behind.
    assert MechanismStore.open(str(finished)).attributes["epsilon_certified"] == found
    assert make(small_job(), finished)["state"] == "complete"
    assert np.array_equal(bytes_of(finished), good)


def sharpened(store: MechanismStore, block: Block) -> LocalRows:
    """Extend with a rule that sharpens the scores."""
    rows = extended_block(store, block).dense().astype(float) ** 3
    return LocalRows.of((rows / rows.sum(axis=-1, keepdims=True)).astype(np.float32))


def test_not_private_is_never_complete(path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate refuses the store."""
    monkeypatch.setattr(tasks, "extended_block", sharpened)
    worst = refused(GuaranteeViolation, "worst triple", make, small_job(), path).worst
    assert worst["log_ratio"] > worst["bound"]
    assert MechanismStore.open(str(path)).state == "refused"
    refused(GuaranteeViolation, "", open_mechanism, path)
    refused(GuaranteeViolation, "", make, small_job(), path)
    # Once the rule is mended, so is the store.
    monkeypatch.undo()
    assert make(small_job(), path)["state"] == "complete"


def test_disagreeing_blocks_are_refused(path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task computes its west side with another last bit, as faulty hardware would."""
    original = tasks.extended_block
    calls: list[int] = []

    def faulty(store: MechanismStore, block: Block) -> LocalRows:
        rows = original(store, block)
        fine = rows.dense()
        calls.append(1)
        if len(calls) == 1:
            fine[-1, 3, 0] = np.nextafter(fine[-1, 3, 0], np.float32(0))
        return rows

    monkeypatch.setattr(tasks, "extended_block", faulty)
    job = small_job(store={"block_cells": [1, 9]})
    error = refused(GuaranteeViolation, r"disagree on record \(\d+, 3\)", make, job, path)
    assert error.worst["blocks"] == [0, 1]
    assert MechanismStore.open(str(path)).state == "refused"
    # The two blocks are done again; the hardware is well now.
    assert make(job, path)["state"] == "complete"


@pytest.mark.parametrize("harm", [pytest.param("gone", marks=pytest.mark.slow), "truncated"])
def test_finalising_over_damaged_shards_refuses(path: Path, small_job: Job, harm: str) -> None:
    job = small_job(store={"block_cells": [1, 2]})
    partition(str(path), 0, init(parse_job(job), str(path))["blocks"])
    shard = shard_of(path, 1)
    shard.unlink() if harm == "gone" else shard.write_bytes(shard.read_bytes()[:-50])
    refused(GuaranteeViolation, r"bytes (changed|missing)", finalise, str(path))
    assert MechanismStore.open(str(path)).state == "refused"
    assert make(job, path)["state"] == "complete"


def test_a_complete_store_that_has_lost_a_receipt_is_mended_in_pieces(finished: Path, small_job: Job) -> None:
    receipt = finished / receipts.key_of(0)
    receipt.unlink()
    said = r"1 of \d+ blocks are missing, in 1 range: 0:1; run the job again, or .* partition .* --range 0:1$"
    refused(IncompleteStoreError, said, finalise, str(finished))
    assert not check_store(parse_job(small_job()), str(finished), lambda _: None)
    partition(str(finished), 0, init(parse_job(small_job()), str(finished))["blocks"])
    assert receipt.exists()
    assert finalise(str(finished))["state"] == "complete"
    open_mechanism(finished, verify=True)


def test_what_is_finalised_is_there(path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that was there before another job's took its place."""
    url, at_work = str(path), run.at_work
    init(parse_job(small_job()), url)
    partition(url, 0, MechanismStore.open(url).plan.blocks)

    def after_another(*arguments: Any) -> Any:
        monkeypatch.setattr(run, "at_work", at_work)
        blocks = init(parse_job(small_job(privacy={"epsilon_per_km": 0.5})), url, overwrite=True)["blocks"]
        partition(url, 0, blocks)
        return at_work(*arguments)

    monkeypatch.setattr(run, "at_work", after_another)
    assert finalise(url)["epsilon_per_km"] == 0.5
    assert MechanismStore.open(url).attributes["epsilon_certified"] <= 0.5
    open_mechanism(url, verify=True)


def test_a_complete_store_is_not_rewritten_by_a_task(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes written after the certificate would be bytes without one."""
    partition(str(finished), 0, 1)  # intact: nothing to do
    shard_of(finished, 0).unlink()
    monkeypatch.setattr(tasks, "extended_block", sharpened)
    refused(StoreError, "complete", partition, str(finished), 0, 1)


@pytest.mark.parametrize("name", ["x", "y"])
def test_coordinates_that_are_not_the_grid_s_do_not_pass(finished: Path, name: str) -> None:
    """Stretching the stored lattice must not make a store look more private than it is."""
    honest = audit(str(finished)).epsilon
    array = zarr.open_array(str(finished / name), mode="r+")
    array[:] = 3 * array[:]
    report = audit(str(finished))
    assert not report.holds
    assert name in report.changed
    assert report.epsilon == honest


@pytest.mark.parametrize(
    ("key", "value"), [("epsilon_planar_per_km", 2.9), ("epsilon_per_km", 2.9), ("metric_p", 1.0)]
)
def test_a_promise_edited_in_the_attributes_is_seen(finished: Path, key: str, value: float) -> None:
    spoil(finished, 7, 11, 3, 8)
    MechanismStore.open(str(finished), mode="r+").update(**{key: value})
    assert not audit(str(finished)).holds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantisation_km", 0.001), ("epsilon_certified", 0.1), ("epsilon_certified", 7.0),
        ("epsilon_certified", None), ("epsilon_planar_per_km", 0.5), ("distortion", 0.01),
        ("records_inside", 7), ("source_cells_kept", 7),
    ],
)  # fmt: skip
def test_figures_edited_in_the_attributes_are_seen(finished: Path, key: str, value: float | None) -> None:
    MechanismStore.open(str(finished), mode="r+").update(**{key: value})
    does_not_verify(finished, key)
    assert audit(str(finished)).changed == (key,)


@pytest.mark.parametrize("epsilon", [0.1, 7.0, None])
def test_a_certificate_edited_along_with_its_figure_is_seen(finished: Path, epsilon: float | None) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    report = {**objects.get_json(store.objects, CERTIFICATE), "epsilon_certified": epsilon}
    objects.put_json(store.objects, CERTIFICATE, report)
    store.update(epsilon_certified=epsilon)
    if epsilon != 0.1:  # above the limit, or none at all
        refused(GuaranteeViolation, "epsilon_certified", open_mechanism, finished, verify=True)
    assert "epsilon_certified" in audit(str(finished)).changed


def test_a_job_that_is_not_the_store_s_is_seen(finished: Path) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    honest = store.attributes["job"]
    # Neither where it runs nor what it is called is part of it.
    store.update(job={**honest, "cluster": {**honest["cluster"], "workers": 3}, "job": {"name": "other"}})
    assert open_mechanism(finished, verify=True)
    for section, key, value in (
        ("extension", "method", "sys:exit"),
        ("privacy", "budget", "half"),
        ("domain", "roads", "/elsewhere"),
        ("domain", "region", "/some.geojson"),
        ("seed", "unheard", 1),
    ):
        store.update(job={**honest, section: {**honest[section], key: value}})
        refused(GuaranteeViolation, r": job has changed", open_mechanism, finished, verify=True)
    store.update(job={k: v for k, v in honest.items() if k != "seed"})
    does_not_verify(finished, r": job has changed")


def test_edited_jobs_import_nothing(tmp_path: Path, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smuggled.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path, spec = tmp_path / "s.zarr", parse_job(small_job())
    blocks = init(spec, str(path))["blocks"]
    store = MechanismStore.open(str(path), mode="r+")
    job = store.attributes["job"]
    job["extension"]["method"] = "smuggled:Mean"
    store.update(job=job)
    for attempt in (lambda: partition(str(path), 0, blocks), lambda: build(spec, str(path))):
        refused(StoreError, "its job has changed since it was made; use --overwrite", attempt)
    assert build(spec, str(path), overwrite=True)["state"] == "complete"


def test_rows_of_corners_that_are_not_their_scores_are_seen(finished: Path) -> None:
    array = zarr.open_array(str(finished / "seed" / "probability"), mode="r+")
    array[1, 2, 3] = array[1, 2, 3] * 1.01
    does_not_verify(finished, "seed/probability")
    assert audit(str(finished)).changed == ("seed/probability",)


def test_the_description_of_the_array_is_part_of_what_was_certified(finished: Path) -> None:
    description = finished / "probability" / "zarr.json"
    document = json.loads(description.read_text())
    document["attributes"]["units"] = "%"
    description.write_text(json.dumps(document))
    does_not_verify(finished, "chunk_hashes")


@pytest.mark.parametrize("stored", [as_stored, dict])  # as now, and as older versions did
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("projection", {key: value}) for key, value in (
            ("rotation_deg", "x"), ("rotation_deg", None), ("centre_lon", None), ("tilt", 3.0)
        )),
        *(("grid", {key: value}) for key, value in (("refine", "22"), ("cells_x", 2.5), ("cell_km", -1))),
        ("grid", None), ("job", {"extension": "log-convex"}), ("identity", {"privacy": 3}),
        ("metric_p", "two"), ("epsilon_per_km", "1"),
    ],
)  # fmt: skip
def test_attributes_that_make_no_sense_are_one_error(
    finished: Path, name: str, change: Any, stored: Callable[..., dict[str, Any]]
) -> None:
    document = json.loads((finished / "zarr.json").read_text())
    held = as_read(document["attributes"])
    held[name] = {**held[name], **change} if isinstance(change, dict) else change
    if change is None:
        del held[name]
    (finished / "zarr.json").write_text(json.dumps({**document, "attributes": stored(held)}))
    says = (
        f"{name} missing" if change is None else f"not a mechanism store: {name} in its attributes is damaged"
    )
    for reads in (audit, open_mechanism):
        refused(StoreError, says, reads, str(finished))


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_attributes_gone_before_a_change_are_one_error(finished: Path, content: str | None) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    (finished / "zarr.json").unlink()
    if content is not None:
        (finished / "zarr.json").write_text(content)
    said = "is gone or damaged; was this store deleted or replaced"
    refused(StoreError, said, store.update, state="extending")


def test_file_system_refusals_name_the_place(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MechanismStore.open(str(finished), mode="r+").objects

    async def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("get", "set", "exists", "is_empty", "delete"):
        monkeypatch.setattr(type(store), name, refuse)
    for ask in (
        lambda: objects.get_bytes(store, "a"),
        lambda: objects.get_many_json(store, ["a"]),
        lambda: objects.put_bytes(store, "a", b""),
        lambda: objects.exists(store, "a"),
        lambda: objects.is_empty(store),
        lambda: objects.delete_keys(store, ["a"]),
    ):
        refused(StoreError, r"copy\.zarr: .* cannot be \w+: .*Input/output error$", ask)


def test_an_array_that_somebody_has_taken_away(finished: Path) -> None:
    with pytest.raises(StoreError, match="seed/trial_score is missing; is another run at work"):
        MechanismStore.open(str(finished)).read("seed/trial_score")


def test_receipts_rewritten_to_match_changed_bytes_are_seen(finished: Path) -> None:
    spoil(finished, 7, 11, 3, 1.001)
    store = MechanismStore.open(str(finished), mode="r+")
    for block, receipt in store.read_receipts().items():
        shards = {key: receipts.shard_sha256(store.objects, key) or "" for key in receipt.shards}
        receipts.write_receipt(store.objects, dataclasses.replace(receipt, block=block, shards=shards))
    does_not_verify(finished, "chunk_hashes")
    assert "chunk_hashes" in audit(str(finished)).changed


def test_a_read_only_store_is_audited_all_the_same(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("read-only")

    monkeypatch.setattr(objects, "put_json", refuse)
    assert audit(str(finished)).holds


@pytest.mark.slow
def test_a_store_in_memory_behind_a_url(small_job: Job) -> None:
    """The same code serves object stores: everything goes through Zarr's store interface."""
    url = "memory://bucket/small.zarr"
    assert build(parse_job(small_job()), url)["state"] == "complete"
    assert audit(url).holds
    assert open_mechanism(url, verify=True).sample(lon=-73.98, lat=40.75, n=2).shape == (2, 2)
    assert build(parse_job(small_job()), url, overwrite=True)["state"] == "complete"


def test_another_job_at_the_same_place_is_refused_and_named(finished: Path, small_job: Job) -> None:
    other = small_job(privacy={"epsilon_per_km": 0.5}, outputs={"random_seed": 4})
    before = bytes_of(finished)
    message = str(refused(StoreError, r"privacy\.epsilon_per_km", make, other, finished))
    assert "outputs.random_seed" in message
    assert np.array_equal(bytes_of(finished), before)
    assert make(other, finished, overwrite=True)["epsilon_per_km"] == 0.5


def test_overwriting_never_deletes_what_is_not_a_store(tmp_path: Path, small_job: Job) -> None:
    folder = tmp_path / "photographs"
    folder.mkdir()
    (folder / "me.jpg").write_text("precious")
    refused(StoreError, "not a mechanism store", make, small_job(), folder, overwrite=True)
    assert (folder / "me.jpg").read_text() == "precious"


def test_a_half_created_store_is_created_anew(finished: Path, small_job: Job) -> None:
    MechanismStore.open(str(finished), mode="r+").update(state="creating")
    shutil.rmtree(finished / "problem")
    assert make(small_job(), finished)["state"] == "complete"


def test_a_newer_format_is_refused(finished: Path) -> None:
    def make_newer(root: dict[str, Any]) -> None:
        root["attributes"].update(format_version=99)
        del root["attributes"]["job"]  # whatever else has become of it

    edit(finished / "zarr.json", make_newer)
    said = rf"{re.escape(str(finished))}: has store format 99, newer than 3, .*; upgrade mdpext-dask$"
    refused(StoreError, said, open_mechanism, finished)


def test_a_seed_solved_anew_voids_the_receipts(finished: Path) -> None:
    """Receipts name the seed they were made from."""
    store = MechanismStore.open(str(finished), mode="r+")
    store._root["seed"].attrs["sha256"] = "another"
    assert MechanismStore.open(str(finished)).read_receipts() == {}


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "cell_km", "refine", "outputs"),
    [
        ("log-convex", 2.0, [4, 6], 60), ("log-convex", 1.0, [2, 3], 300), ("mcshane-whitney", 0.5, [8], 20),
        ("mcshane-whitney", 2.0, [4, 6], 60), ("cell-lp", 1.0, [2, 3], 300), ("cell-lp", 0.5, [8], 20),
    ],
)  # fmt: skip
def test_a_task_needs_the_memory_that_the_plan_says(
    path: Path, small_job: Job, cell_km: float, refine: list[int], outputs: int, method: str
) -> None:
    job = small_job(
        domain={"cell_km": cell_km, "refine": refine}, outputs={"count": outputs}, loss={"kind": "euclidean"},
        store={"block_cells": [4, 5]}, extension={"method": method},
    )  # fmt: skip
    write_seed_without_solving(parse_job(job), path)
    store = MechanismStore.open(str(path))
    tasks.extend_block(str(path), 0)  # imports and caches are not the task's
    objects.delete_keys(MechanismStore.open(str(path), mode="r+").objects, [receipts.key_of(0)])
    tracemalloc.start()
    tasks.extend_block(str(path), 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Chunks of scores are unpacked side by side or one after the other, as it happens.
    least = 0.3 if method == "cell-lp" else 0.7
    assert least <= peak / store.plan.peak_bytes(method) <= 1.3


def write_seed_without_solving(spec: JobSpec, path: Path) -> None:
    """Create a store whose seed is random: memory does not depend on what the seed says."""
    domain = build_domain(spec)
    store = create(spec, str(path), domain)
    rows = np.random.default_rng(0).dirichlet(np.ones(domain.outputs), size=domain.grid.seeds)
    rows = np.maximum(rows, 1e-6)
    budgets = axis_budgets(domain.grid, (1.0, 1.0))
    extension = extension_arrays(operator_of(spec.extension), budgets, exponent=1.0)
    facts: dict[str, Any] = {}
    records = None
    if spec.extension.method == "cell-lp":
        records = "records"
        scores = np.log(np.full((*domain.grid.shape, domain.outputs), 1 / domain.outputs))
        chunks = (*store.plan.shard_shape[:2], domain.outputs)
        store.create_seed_array(records, ("x", "y", "output"), chunks, data=scores)
        facts = {"record_scores": {"name": records, "padding": [0, 0]}}
    store.write_seed(SeedMechanism(rows, 1.0, 1.0, "none", 0), facts, rows, extension, records)
