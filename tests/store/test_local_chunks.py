"""Chunks of local rows: those that are not stored are never read, and rows are the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.store import blocks, objects, receipts
from mdpext_dask.store.local_chunks import floor_of, read_chunks, stored_chunks
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extended_block, local_rows_of, rows_of
from tests.support.forged import edit
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]
OUTPUTS = 3


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of noise with chunks of three of its 40 outputs."""
    path = tmp_path_factory.mktemp("chunks") / "s.zarr"
    job = small_job(
        privacy={"epsilon_per_km": 4.0, "budget": "certified"}, extension={"method": "noise"},
        outputs={"count": 40}, store={"block_cells": [1, 2]},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_CHUNK_OUTPUTS", OUTPUTS)
        build(parse_job(job), str(path))
    return path


def whole(store: MechanismStore) -> Any:
    return store.read("probability")


def rectangle(shape: tuple[int, int], data: st.DataObject) -> tuple[slice, slice]:
    parts = []
    for side in shape:
        first = data.draw(st.integers(0, side - 1))
        parts.append(slice(first, data.draw(st.integers(first + 1, side))))
    return parts[0], parts[1]


@settings(max_examples=12)
@given(st.data())
def test_rows_are_those_of_all_chunks(built: Path, data: st.DataObject) -> None:
    store = MechanismStore.open(str(built))
    x, y = rectangle(store.grid.shape, data)
    rows, floor = whole(store)[x, y], floor_of(store)
    assert np.array_equal(rows_of(store, x, y), rows)
    local = local_rows_of(store, x, y)
    near = np.flatnonzero((rows != np.float32(floor)).any(axis=(0, 1)))
    assert list(local.near) == list(near if local.copies > 1 else range(rows.shape[2]))
    chunks = stored_chunks(store, x, y)
    assert set(near // OUTPUTS) <= set(np.flatnonzero(chunks))
    assert read_chunks(store, x, y, chunks).shape[2] <= OUTPUTS * chunks.sum()


def test_chunks_of_far_outputs_are_neither_written_nor_read(built: Path) -> None:
    store = MechanismStore.open(str(built))
    first = slice(0, 1), slice(0, 1)
    assert 0 < stored_chunks(store, *first).sum() < 10 < len(stored_chunks(store, *first))
    every = sum(int(stored_chunks(store, *_place(block)).sum()) for block in store.plan)
    assert every < store.plan.blocks * len(stored_chunks(store, *first))


def _place(block: blocks.Block) -> tuple[slice, slice]:
    return block.owned_x, block.owned_y


def test_shards_are_as_zarr_writes_them_from_all_rows(built: Path, tmp_path: Path) -> None:
    store = MechanismStore.open(str(built))
    copy = zarr.create_array(
        str(tmp_path / "copy"), shape=store.array("probability").shape, dtype="float32",
        chunks=store.array("probability").chunks, shards=store.array("probability").shards,
        fill_value=floor_of(store), compressors=store.array("probability").compressors,
    )  # fmt: skip
    copy[...] = whole(store)
    for block in store.plan:
        for key in store.shard_keys(block):
            assert objects.get_bytes(store.objects, key) == (tmp_path / "copy" / key[12:]).read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        "checksum",
        "gone",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ["offset", "empty index", "too short"]),
    ],
)
def test_a_spoilt_index_is_never_the_floor(built: Path, tmp_path: Path, spoil: str) -> None:
    copy = MechanismStore.open(str(shutil.copytree(built, tmp_path / "copy.zarr")))
    block = copy.plan[1]
    shard = Path(copy.url) / copy.shard_keys(block)[0]
    content = bytearray(shard.read_bytes())
    chunks = [shard // chunk for shard, chunk in zip(copy.plan.shard_shape[:2], _chunks(copy), strict=False)]
    size = 16 * chunks[0] * chunks[1] * -(-40 // OUTPUTS) + 4
    match spoil:
        case "checksum":
            content[-1] ^= 1
        case "offset":
            content[-size] ^= 1
        case "empty index":
            content[-size:-4] = b"\xff" * (size - 4)
        case "too short":
            content = content[-size + 1 :]
    if spoil == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content)
    try:
        found = rows_of(MechanismStore.open(copy.url), block.owned_x, block.owned_y)
    except StoreError:
        pass
    else:
        assert np.isnan(found).any()
    report = audit(copy.url)
    assert not report.holds
    assert 1 in report.blocks_at_fault


def _chunks(store: MechanismStore) -> tuple[int, ...]:
    return tuple(store.array("probability").chunks)


def test_skipped_blocks_among_stored_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CHUNK_OUTPUTS", 2)
    job = u_job(tmp_path, privacy={"epsilon_per_km": 8.0, "budget": "certified"}, domain={"refine": [4]})
    job["extension"] = {"method": "noise"}
    path = tmp_path / "s.zarr"
    build(parse_job(job), str(path))
    store = MechanismStore.open(str(path))
    assert store.plan.skipped
    rows = rows_of(store, *(slice(0, side) for side in store.grid.shape))
    for block in store.plan:
        fine = extended_block(store, block)
        assert np.array_equal(rows[block.closed_x, block.closed_y], fine.dense())
        receipt = receipts.read_receipt(store.objects, block.index, store.plan.skipped)
        assert receipt is not None
        if block.index in store.plan.skipped:
            assert receipt.rows_sha256 == receipts.rows_sha256(fine, block)
    assert np.array_equal(rows_of(store, slice(3, 14), slice(2, 9)), rows[3:14, 2:9])


def test_shards_under_other_keys_are_what_zarr_reads(built: Path, tmp_path: Path) -> None:
    """What is left under the usual keys says nothing then."""
    copy = MechanismStore.open(str(shutil.copytree(built, tmp_path / "copy.zarr")))
    before = whole(copy)
    for block in copy.plan:
        for key in copy.shard_keys(block):
            shard = tmp_path / "copy.zarr" / key
            shutil.copy(
                shard, tmp_path / "copy.zarr" / "probability" / key[len("probability/") :].replace("/", ".")
            )
            content, size = bytearray(shard.read_bytes()), 4 + 16
            content[-size:-4] = b"\xff" * 16  # one chunk less
            shard.write_bytes(content)
    separator = {"name": "default", "configuration": {"separator": "."}}
    edit(
        tmp_path / "copy.zarr" / "probability" / "zarr.json",
        lambda it: it.update(chunk_key_encoding=separator),
    )
    other = MechanismStore.open(copy.url)
    for block in other.plan:
        assert np.array_equal(rows_of(other, *_place(block)), before[_place(block)])
    assert np.array_equal(rows_of(other, slice(0, 1), slice(0, 1)), before[:1, :1])


def test_without_a_floor_lost_chunks_are_lost(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a store whose method was left open, where programs have won."""
    monkeypatch.setattr(blocks, "_CHUNK_OUTPUTS", OUTPUTS)
    path = tmp_path / "s.zarr"
    job = small_job(privacy={"budget": "certified"}, domain={"refine": [1]})
    job["extension"] = {}
    assert build(parse_job(job), str(path))["method"] == "records"
    store = MechanismStore.open(str(path))
    assert floor_of(store) is None
    every = [slice(0, side) for side in store.grid.shape]
    assert np.array_equal(rows_of(store, every[0], every[1]), whole(store))
    block = store.plan[0]
    (path / store.shard_keys(block)[0]).unlink()
    lost = rows_of(MechanismStore.open(str(path)), *_place(block))
    assert lost.shape[2] == store.outputs
    assert np.isnan(lost[0, 0]).all()  # at a border a block has further shards
    assert not audit(str(path)).holds


def test_far_outputs_of_skipped_blocks_have_the_floor_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rectangle is read, and whatever fill value a changed store has."""
    monkeypatch.setattr(blocks, "_CHUNK_OUTPUTS", 1)
    job = u_job(tmp_path, privacy={"epsilon_per_km": 8.0, "budget": "certified"}, domain={"refine": [4]})
    job["extension"] = {"method": "noise"}
    path = tmp_path / "s.zarr"
    build(parse_job(job), str(path))
    floor = floor_of(MechanismStore.open(str(path)))
    assert floor is not None
    edit(path / "probability" / "zarr.json", lambda it: it.update(fill_value=1000 * floor))
    store = MechanismStore.open(str(path))
    for index in store.plan.skipped:
        block = store.plan[index]
        fine = extended_block(store, block).dense()
        east, north = block.owned_shape
        assert np.array_equal(rows_of(store, *_place(block)), fine[:east, :north])
        one = (slice(part.start, part.start + 1) for part in _place(block))
        assert np.array_equal(rows_of(store, *one)[0, 0], fine[0, 0])
