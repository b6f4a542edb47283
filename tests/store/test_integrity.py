"""Tamper evidence: what is changed, missing or too much in a finished store is told apart and named."""

import itertools
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask import audit, build
from mdpext_dask.auditors.certificate import certify_block
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, MdpextError, SpecError, StoreError
from mdpext_dask.events import Event, Note
from mdpext_dask.job.spec import fingerprint_of, parse_job
from mdpext_dask.pipeline.run import finalise, init, partition
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.files import sample_file
from mdpext_dask.sampling.mechanism import check_finished, open_mechanism
from mdpext_dask.store import objects, receipts, schema
from mdpext_dask.store.integrity import (
    CERTIFICATE,
    ShardDamage,
    damage_of_block,
    extra_shards,
    ranges_of,
    require_all_blocks,
)
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.commands import parse
from tests.support.forged import edit, rehash
from tests.support.refusals import refused
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def built(u_store: Path) -> Path:
    return u_store


@pytest.fixture
def small(tmp_path: Path, small_job: Job) -> Path:
    build(parse_job(small_job()), str(tmp_path / "s.zarr"))
    return tmp_path / "s.zarr"


def opened(path: Path) -> MechanismStore:
    return MechanismStore.open(str(path))


def shard(path: Path, index: int) -> str:
    store = opened(path)
    return store.shard_keys(store.plan[index])[0]


def refusal(path: Path | str) -> Any:
    return refused(GuaranteeViolation, "", open_mechanism, path, verify=True)


def put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


# --- shards ---------------------------------------------------------------------------------------


def test_a_finished_store_has_no_damage(built: Path) -> None:
    store = opened(built)
    assert not any(damage_of_block(store, block.index) for block in store.plan)
    assert extra_shards(store) == ()
    open_mechanism(built, verify=True)


@pytest.mark.parametrize(
    "harm", ["a bit", "truncated", "emptied", "garbage", "another's", "gone", "a folder in its place"]
)
def test_one_shard_is_named_by_what_happened_to_it(finished: Path, harm: str) -> None:
    key = shard(finished, 3)
    file, extra = finished / key, ()
    content = file.read_bytes()
    file.unlink()
    changed = {
        "a bit": content[:-1] + bytes([content[-1] ^ 1]), "truncated": content[:-7], "emptied": b"",
        "garbage": b"garbage", "another's": (finished / shard(finished, 4)).read_bytes(),
    }  # fmt: skip
    if harm in changed:
        file.write_bytes(changed[harm])
    elif harm == "a folder in its place":
        put(file / "0", content)
        extra = (f"{key}/0",)
    kind = "changed" if harm in changed else "missing"
    assert damage_of_block(opened(finished), 3) == ShardDamage(**{kind: (key,)})
    assert extra_shards(opened(finished)) == extra
    error = refusal(finished)
    assert "block 3 (records 0..1 x 6..7) has changed since it was certified" in str(error)
    assert f"{kind} shards: {key}" in str(error)
    expected = {"changed": (), "missing": (), kind: (key,), "extra": extra}
    assert error.worst == {"blocks": [3], **expected, "attributes": []}


def test_all_kinds_at_once_and_only_five_of_each_in_the_message(finished: Path) -> None:
    store = opened(finished)
    stored = [block.index for block in store.plan if block.index not in store.plan.skipped]
    keys = [shard(finished, index) for index in stored]
    for key in keys[:7]:
        (finished / key).write_bytes(b"changed")
    (finished / keys[8]).unlink()
    stray = [f"probability/c/7/7/{n}" for n in range(6)]
    for key in stray:
        put(finished / key, b"extra")
    error = refusal(finished)
    assert (error.worst["changed"], error.worst["missing"]) == (tuple(keys[:7]), (keys[8],))
    assert (error.worst["extra"], error.worst["blocks"]) == (tuple(stray), [*stored[:7], stored[8]])
    assert f"changed shards: {', '.join(keys[:5])} and 2 more; missing shards: {keys[8]};" in str(error)
    assert f"extra shards: {', '.join(stray[:5])} and 1 more" in str(error)


@pytest.mark.parametrize("name", ["9/9/0", "0/0/1", "00/0/0", "0/0", "x", "0/9/0/deep/er", "5/0/0"])
def test_objects_that_belong_to_no_block_are_seen(finished: Path, name: str) -> None:
    key = f"probability/c/{name}"
    if name == "0/0":  # a file where there was a folder
        shutil.rmtree(finished / key)
    put(finished / key, b"something")
    assert extra_shards(opened(finished)) == (key,)
    error = refusal(finished)
    assert error.worst["extra"] == (key,)
    assert f"extra shards: {key}" in str(error)
    assert error.worst["blocks"] == ([0] if name == "0/0" else [])


def test_what_a_killed_write_leaves_is_no_shard(finished: Path) -> None:
    (finished / f"{shard(finished, 0)}.abc.partial").write_bytes(b"half a shard")
    assert extra_shards(opened(finished)) == ()
    open_mechanism(finished, verify=True)


def test_a_shard_of_a_skipped_block_is_extra_whatever_its_receipt_says(finished: Path) -> None:
    index = min(opened(finished).plan.skipped)
    key = shard(finished, index)
    put(finished / key, (finished / shard(finished, 0)).read_bytes())
    assert damage_of_block(opened(finished), index) == ShardDamage(extra=(key,))
    shards = {key: receipts.shard_sha256(opened(finished).objects, key)}
    edit(finished / receipts.key_of(index), lambda receipt: receipt.update(shards=shards))
    assert damage_of_block(opened(finished), index) == ShardDamage(extra=(key,))
    assert refusal(finished).worst["blocks"] == [index]
    (finished / receipts.key_of(index)).unlink()
    assert damage_of_block(opened(finished), index).extra


@pytest.mark.parametrize("harm", ["gone", "damaged", "another block's", "no text"])
def test_without_a_receipt_shards_are_extra_or_missing(finished: Path, harm: str) -> None:
    receipt, key = finished / receipts.key_of(2), shard(finished, 2)
    {
        "gone": receipt.unlink,
        "damaged": lambda: receipt.write_text(receipt.read_text()[:50]),
        "no text": lambda: edit(receipt, lambda content: content.update(shards={key: 7})),
        "another block's": lambda: shutil.copy(finished / receipts.key_of(3), receipt),
    }[harm]()
    assert damage_of_block(opened(finished), 2) == ShardDamage(extra=(key,))
    assert "no receipt of blocks: 2" in str(refusal(finished))
    (finished / key).unlink()
    assert damage_of_block(opened(finished), 2) == ShardDamage(missing=(key,))


def test_a_receipt_that_names_another_shard_than_its_own(finished: Path) -> None:
    key, other = shard(finished, 0), shard(finished, 3)
    edit(finished / receipts.key_of(0), lambda receipt: receipt.update(shards={other: "0" * 64}))
    assert damage_of_block(opened(finished), 0) == ShardDamage(extra=(key,))
    assert "chunk_hashes" in refusal(finished).worst["attributes"]


def test_the_certificate_has_the_same_shards_changed(finished: Path) -> None:
    store = opened(finished)
    (finished / shard(finished, 0)).write_bytes(b"changed")
    (finished / shard(finished, 3)).unlink()
    (finished / receipts.key_of(4)).unlink()
    skipped = min(store.plan.skipped)
    put(finished / shard(finished, skipped), b"extra")
    for block in store.plan:
        damage = certify_block(str(finished), block.index, 2.0, 1.0).damage
        assert damage == damage_of_block(store, block.index)
        assert bool(damage) == (block.index in (0, 3, 4, skipped))


def test_behind_a_url(tmp_path: Path) -> None:
    url = "memory://bucket/tampered.zarr"
    build(parse_job(u_job(tmp_path)), url)
    store = MechanismStore.open(url, mode="r+")
    key = store.shard_keys(store.plan[0])[0]
    objects.put_bytes(store.objects, key, b"changed")
    objects.put_bytes(store.objects, "probability/c/9/9/0", b"extra")
    worst = refusal(url).worst
    assert (worst["changed"], worst["extra"]) == ((key,), ("probability/c/9/9/0",))
    MechanismStore.clear(url)


# --- evidence -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of the same promise on the same grid, with other rows."""
    folder = tmp_path_factory.mktemp("other")
    build(parse_job(u_job(folder, privacy={"min_probability": 1e-3})), str(folder / "u.zarr"))
    return folder / "u.zarr"


def said(**changes: Any) -> Callable[[Path, Path], None]:
    """Return what changes the attributes of a store."""
    return lambda path, _: edit(path / "zarr.json", lambda root: root["attributes"].update(changes))


def described(**changes: Any) -> Callable[[Path, Path], None]:
    """Return what changes the description of the rows."""
    return lambda path, _: edit(path / "probability/zarr.json", lambda array: array.update(changes))


def taken(*names: str) -> Callable[[Path, Path], None]:
    """Return what takes parts from another store."""

    def take(path: Path, other: Path) -> None:
        for name in names:
            shutil.rmtree(path / name)
            shutil.copytree(other / name, path / name)

    return take


def rewritten(path: Path, _: Path) -> None:
    """Write a store anew as users of xarray do."""
    dataset = open_mechanism(path).dataset.load()
    for variable in dataset.variables.values():
        variable.encoding = {}
    shutil.rmtree(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.to_zarr(path, zarr_format=3)


# What is wrong with a store that says that it is complete, and what is said of it.
BAD = {
    "epsilon": (said(epsilon_per_km=0.5), "epsilon_per_km"),
    "metric": (said(metric_p=1.0), "metric_p"),
    "certified": (said(epsilon_certified=0.5), "epsilon_certified"),
    "another's receipts": (taken("receipts"), "has lost the receipts of 20 of 20 blocks"),
    "another's receipts and seed": (taken("receipts", "seed"), "chunk_hashes"),
    "another's certificate": (taken("audit"), "audit/certificate.json"),
    "a receipt is gone": (
        lambda path, _: (path / receipts.key_of(3)).unlink(),
        "has lost the receipts of 1 of 20 blocks",
    ),
    "receipts and certificate are gone": (
        lambda path, _: [shutil.rmtree(path / name) for name in ("receipts", "audit")],
        "has lost the receipts of 20 of 20 blocks and its certificate",
    ),
    "the certificate is gone": (lambda path, _: shutil.rmtree(path / "audit"), "has lost its certificate"),
    "the seed is gone": (lambda path, _: shutil.rmtree(path / "seed"), "has lost the receipts"),
    "rewritten": (rewritten, "has lost the receipts of 20 of 20 blocks and its certificate"),
    "chunks": (
        described(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [4, 4, 5]}}),
        "chunk_hashes",
    ),
    "fill value": (described(fill_value=0.25), "chunk_hashes"),
    "dtype": (described(data_type="float64"), "chunk_hashes"),
}


@pytest.mark.parametrize("harm", BAD)
def test_without_evidence_nothing_is_sampled(finished: Path, other: Path, tmp_path: Path, harm: str) -> None:
    change, complaint = BAD[harm]
    before = open_mechanism(finished)
    change(finished, other)
    points = tmp_path / "p.csv"
    points.write_text("x_km,y_km\n0,0\n")
    for use in (
        lambda: open_mechanism(finished),
        lambda: sample_file(str(finished), points, tmp_path / "o.csv"),
        lambda: check_finished(opened(finished)),
    ):
        with pytest.raises(GuaranteeViolation, match=re.escape(complaint)) as caught:
            use()
        assert f"mdpext audit {finished}" in str(caught.value)
    refused(MdpextError, "", lambda: export_city(str(finished), tmp_path / "c.mdp"))
    assert complaint in repr(before)
    assert "must not be sampled" in before._repr_html_()
    assert not list(tmp_path.glob("[oc].*"))


def test_a_changed_shard_is_noticed_before_the_first_draw_if_asked(finished: Path, tmp_path: Path) -> None:
    (finished / shard(finished, 0)).write_bytes(b"changed")
    (tmp_path / "p.csv").write_text("x_km,y_km\n3,2\n")
    for verify in (False, True):
        output = tmp_path / f"{verify}.csv"
        with pytest.raises(GuaranteeViolation, match="changed shards") if verify else nullcontext():
            assert not sample_file(str(finished), tmp_path / "p.csv", output, verify=verify)["verified"]
        assert output.exists() != verify


def test_what_has_lost_its_receipts_can_be_proved_afresh(small: Path, other: Path) -> None:
    """And is judged by its rows: what breaks the promise is found, and the store is left as it is."""
    proved = audit(str(small))
    rewritten(small, other)
    notes: list[Event] = []
    again = audit(str(small), observer=notes.append)
    assert (again.verdict, again.method, again.epsilon) == (proved.verdict, "certificate", proved.epsilon)
    assert (again.epsilon_per_km, again.limit_per_km) == (proved.epsilon_per_km, proved.limit_per_km)
    assert all(again.worst[key] == proved.worst[key] for key in ("x_lonlat", "log_ratio"))
    assert again.details["receipts_compared"] is None
    assert "receipts are gone" in again.details["notes"][0]
    assert any(isinstance(event, Note) and "receipts are gone" in event.text for event in notes)
    write(small, "probability", lambda rows: rows.__setitem__((4, 1), rows[4, 1][::-1].copy()))
    assert audit(str(small)).verdict == audit(str(small), "exhaustive").verdict == "violated"
    assert opened(small).state == "complete"
    refused(SpecError, "with their receipts", lambda: audit(str(small), "boundary"))


# --- everything else ------------------------------------------------------------------------------


def write(path: Path, name: str, change: Callable[[np.ndarray], object]) -> None:
    array = zarr.open_array(str(path / name), mode="r+")
    values = array[...]
    change(values)
    array[...] = values


def turned_round(path: Path) -> None:
    """Have the outputs in another order, in degrees and in the plane."""
    for name in ("output_x", "output_y", "output_lon", "output_lat"):
        write(path, name, lambda values: values.__setitem__(slice(None), values[::-1].copy()))


@pytest.mark.parametrize("harm", ["prior", "prior lost", "outputs", "grid", "problem_sha256", "kind of loss"])
def test_another_problem_than_the_store_was_made_for_is_noticed(finished: Path, harm: str) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    group = finished / "problem" / "zarr.json"
    {
        "prior": lambda: write(finished, "prior", lambda prior: np.multiply(prior, 1 + 1e-9, out=prior)),
        "prior lost": lambda: shutil.rmtree(finished / "prior" / "c"),
        "outputs": lambda: turned_round(finished),
        "grid": lambda: store.update(grid={**store.attributes["grid"], "refine": [1, 2]}),
        "problem_sha256": lambda: store.update(problem_sha256="0" * 64),
        "kind of loss": lambda: edit(group, lambda content: content["attributes"].update(loss="travel")),
    }[harm]()
    assert "problem_sha256" in refusal(finished).worst["attributes"]


def test_changed_tables_of_the_loss_are_noticed(small: Path) -> None:
    open_mechanism(small, verify=True)
    for table in ("node_xy", "task_distance", "task_weight", "output_node"):
        before = opened(small).read(f"problem/{table}")
        write(small, f"problem/{table}", lambda values: values.__setitem__(0, values[1] + 1))
        assert refusal(small).worst["attributes"] == ["problem_sha256"], table
        write(small, f"problem/{table}", lambda values, before=before: np.copyto(values, before))
    open_mechanism(small, verify=True)


def test_the_problem_of_stores_of_before_regions(tmp_path: Path, small_job: Job) -> None:
    """Their digest has neither the plane nor the cells."""
    path = tmp_path / "s.zarr"
    build(parse_job(small_job(loss={"kind": "euclidean"})), str(path))
    store = MechanismStore.open(str(path), mode="r+")
    outputs = store.output_xy_km()
    store.update(problem_sha256=schema.problem_sha256(store.grid, (outputs, store.read("prior"))))
    open_mechanism(path, verify=True)
    write(path, "prior", lambda prior: prior.__setitem__((0, 0), 0.5))
    assert "problem_sha256" in refusal(path).worst["attributes"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("probability", "fill_value", 0.5), ("probability", "data_type", "float64"),
        ("probability", "attributes", {"scale_factor": 2.0}),
        ("output_lon", "attributes", {"add_offset": 1.0}), ("output_x", "shape", [4]),
        ("seed", "attributes", {}), ("elsewhere", "node_type", "group"),
    ],
)  # fmt: skip
def test_changed_descriptions_are_noticed(finished: Path, name: str, key: str, value: object) -> None:
    """Readers such as xarray go by the root's copies: it would show other numbers than are sampled."""

    def change(root: dict[str, Any]) -> None:
        root["consolidated_metadata"]["metadata"].setdefault(name, {})[key] = value

    edit(finished / "zarr.json", change)
    assert refusal(finished).worst["attributes"] == [f"{name}/zarr.json"]
    assert audit(str(finished)).changed == (f"{name}/zarr.json",)


def test_other_outputs_or_cells_are_noticed(finished: Path) -> None:
    lost = finished / "output_lat" / "zarr.json"
    content = lost.read_bytes()
    edit(lost, lambda array: array.update(shape=[4]))
    assert refusal(finished).worst["attributes"] == ["projection", "output_lat/zarr.json"]
    lost.write_bytes(content)
    write(finished, "output", lambda numbers: numbers.__setitem__(0, 7))
    assert refusal(finished).worst["attributes"] == ["output"]
    for axis in ("cells_x", "cells_y"):
        store = MechanismStore.open(str(finished), mode="r+")
        store.update(grid={**store.attributes["grid"], axis: 3})
        assert "the cells of its region have changed" in str(refusal(finished))


@pytest.mark.parametrize("name", ["x", "output_lat", "prior", "inside", "seed/score", "output"])
def test_a_unit_changed_in_the_description_of_an_array_is_noticed(finished: Path, name: str) -> None:
    edit(finished / name / "zarr.json", lambda array: array["attributes"].update(units="m"))
    assert refusal(finished).worst["attributes"] == [f"{name}/zarr.json"]


@pytest.mark.parametrize(
    ("key", "value", "noticed"),
    [
        ("units", {"distance": "km", "epsilon": "1/m"}, "units"), ("chunk_hashes", None, "chunk_hashes"),
        ("chunk_hashes", "abc", "chunk_hashes"), ("kept_sha256", "0" * 64, "cells of its region"),
        ("block_cells", [2, 1], "no receipt|not whole shards|chunk_hashes"),
        ("block_cells", [1], "block_cells"), ("block_cells", [0, 1], "block_cells"),
        ("block_cells", "11", "block_cells"),
    ],
)  # fmt: skip
def test_other_attributes_are_noticed(finished: Path, key: str, value: object, noticed: str) -> None:
    edit(finished / "zarr.json", lambda root: root["attributes"].update({key: value}))
    refused(MdpextError, noticed, open_mechanism, finished, verify=True)


@pytest.mark.parametrize(
    ("key", "value"), [("holds", False), ("metric_p", 1.0), ("epsilon_per_km", 2.0), ("holds", None)]
)
def test_a_certificate_of_something_else_is_none(finished: Path, key: str, value: object) -> None:
    edit(finished / CERTIFICATE, lambda report: report.update({key: value}))
    assert refusal(finished).worst["attributes"] == ["epsilon_certified"]


def test_a_promise_for_another_metric_with_all_its_digests_is_not_what_was_certified(finished: Path) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    job, identity = store.attributes["job"], store.attributes["identity"]
    for table in (job, identity):
        table["domain"]["metric_p"] = 1.0
    facts = {"job": job, "identity": identity, "fingerprint": fingerprint_of(identity)}
    store.update(**facts, metric_p=1.0, quantisation_km=store.grid.spacing_km)
    assert refusal(finished).worst["attributes"] == ["epsilon_certified", CERTIFICATE]


@pytest.mark.parametrize("harm", ["truncated", "another document", "another type", "no node"])
@pytest.mark.parametrize(
    "name", ["", "x", "kept", "inside", "output_lon", "probability", "seed", "seed/score"]
)
def test_damaged_descriptions_are_one_error(finished: Path, name: str, harm: str) -> None:
    file = finished / name / "zarr.json"
    if harm == "another type":
        edit(file, lambda document: document.update(data_type="abc", node_type=3))
    else:
        truncated = file.read_text()[:300]
        file.write_text({"truncated": truncated, "another document": "[1, 2]", "no node": "{}"}[harm])
    said = "damaged|missing|changed|cannot be read|not a mechanism store"
    refused((StoreError, GuaranteeViolation), said, open_mechanism, finished, verify=True)


def test_who_rewrites_everything_consistently_is_not_noticed(small: Path) -> None:
    """Nothing is signed: this is where what `verify` can notice ends."""
    path = small
    write(path, "probability", lambda rows: rows.__setitem__((4, 1), rows[4, 1][::-1].copy()))
    digest = rehash(path)
    assert refusal(path).worst["attributes"] == [CERTIFICATE]
    edit(path / CERTIFICATE, lambda report: report.update(content_sha256=digest))
    open_mechanism(path, verify=True)
    assert not audit(str(path)).holds  # the certificate, made anew, is not fooled


@pytest.mark.parametrize("fault", [TypeError, AttributeError])
def test_a_bug_is_not_damage(finished: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]) -> None:
    """A seed that looks damaged is solved again, which would hide the fault."""

    def fails(*_: object) -> str:
        raise fault("a fault of the program")

    monkeypatch.setattr(schema, "sha256_of", fails)
    refused(fault, "", opened(finished).has_seed)


@pytest.mark.parametrize("names", [5, [1], None, "score", {"score": 1}])
def test_a_seed_whose_arrays_are_not_named_is_none(finished: Path, names: object) -> None:
    opened(finished).has_seed()
    edit(finished / "seed" / "zarr.json", lambda document: document["attributes"].update(extension=names))
    assert not opened(finished).has_seed()


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_those_of_the_blocks(blocks: set[int]) -> None:
    ranges = ranges_of(sorted(blocks))
    ends = [tuple(map(int, text.split(":"))) for text in ranges]
    assert [index for first, last in ends for index in range(first, last)] == sorted(blocks)
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ends))


def test_missing_blocks_are_named_by_ranges(tmp_path: Path, small_job: Job) -> None:
    path = tmp_path / "a store.zarr"
    job = small_job(store={"block_cells": [1, 1]})
    said: list[Any] = []
    planned = init(parse_job(job), str(path), observer=said.append)
    assert planned["seed_solved"]
    assert planned["next"] == f"mdpext partition '{path}' --range 0:21"
    assert (
        Note(f"the seed is solved; 21 blocks are left, in parts of any size: {planned['next']}", diary=True)
        in said
    )
    partition(str(path), 2, 4)
    store = MechanismStore.open(str(path))
    complaint = "19 of 21 blocks are missing, in 2 ranges: 0:2, 4:21; run the job again, or mdpext partition "
    complaint += ".*a store.zarr' --range 0:2 and so on$"
    refused(IncompleteStoreError, complaint, require_all_blocks, store)
    partition(str(path), 0, 21)
    assert summarise(store)["next"] == f"mdpext finalise '{path}'"
    assert finalise(str(path))["next"] is None
    assert parse(planned["next"])["blocks"] == "0:21"
