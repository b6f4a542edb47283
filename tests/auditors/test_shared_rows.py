"""Rows that blocks share: extended anew from the seed they are, bit for bit, what the store says they are."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from mdpext_dask.auditors.shared_rows import RowMismatch, check_shared_rows
from mdpext_dask.errors import StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.sampling.mechanism import open_mechanism
from mdpext_dask.store import receipts
from mdpext_dask.store.integrity import CERTIFICATE
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.forged import edit, rehash
from tests.support.refusals import refused
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]
_OWN = "mdpext_dask.extend.log_convex:LogConvex"


def checked(path: Path) -> dict[int, tuple[RowMismatch, ...]]:
    """Check all blocks; return the mismatches of those that have some."""
    plan = MechanismStore.open(str(path)).plan
    found = {}
    for block in plan:
        report = check_shared_rows(str(path), block.index)
        east, north = block.closed_shape
        assert report.rows_checked == 2 * (east + north) - 4
        assert report.mismatches == tuple(sorted(set(report.mismatches)))
        if report.mismatches:
            found[block.index] = report.mismatches
    return found


@pytest.fixture(scope="module")
def built(u_store: Path) -> Path:
    return u_store


def edit_receipt(path: Path, index: int, **changes: Any) -> None:
    edit(path / receipts.key_of(index), lambda receipt: receipt.update(changes))


def rewrite(path: Path, i: int, j: int) -> None:
    """Change the last bit of a stored probability, and every hash that names its shard."""
    array = zarr.open_array(str(path / "probability"), mode="r+")
    array[i, j, 0] = np.nextafter(array[i, j, 0], np.float32(0))
    digest = rehash(path)
    edit(path / CERTIFICATE, lambda report: report.update(content_sha256=digest))
    open_mechanism(path, verify=True)


def rows(record: tuple[int, int], owner: int) -> tuple[RowMismatch, ...]:
    return (RowMismatch(record, owner, "row"),)


# --- good stores ----------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        _OWN, pytest.param("cell-lp", marks=pytest.mark.slow),
        pytest.param("log-convex", marks=pytest.mark.slow),
        pytest.param("mcshane-whitney", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def of_every_method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of each method, with blocks that are skipped."""
    folder = tmp_path_factory.mktemp("method")
    job = u_job(folder, privacy={"budget": "certified"})
    job["extension"], job["seed"] = {"method": request.param, "sweeps": 1}, {"refine_rounds": 0}
    build(parse_job(job), str(folder / "s.zarr"))
    return folder / "s.zarr"


def test_good_stores_of_every_method_agree_also_with_skipped_blocks(of_every_method: Path) -> None:
    assert len(MechanismStore.open(str(of_every_method)).plan.skipped) == 8
    assert checked(of_every_method) == {}


@pytest.mark.parametrize(
    ("domain", "block_cells"),
    [({}, [2, 3]),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in [
         ({"rotation_deg": 30.0}, [2, 2]), ({"metric_p": 1.5}, [3, 2]), ({}, [99, 99]),
         ({"metric_p": 1}, [1, 4]), ({"metric_p": "inf"}, [2, 2]), ({"refine": [1]}, [1, 1])
     ])],
)  # fmt: skip
def test_good_stores(tmp_path: Path, small_job: Job, domain: dict[str, Any], block_cells: list[int]) -> None:
    build(parse_job(small_job(domain=domain, store={"block_cells": block_cells})), str(tmp_path / "s.zarr"))
    assert checked(tmp_path / "s.zarr") == {}


# --- stored rows ----------------------------------------------------------------------------------


def test_a_shared_row_changed_with_its_hashes_is_found_by_all_its_blocks(finished: Path) -> None:
    """Block 16, the fourth of the first of its column, owns record (6, 2), which it shares with three."""
    rewrite(finished, 6, 2)
    assert checked(finished) == dict.fromkeys((10, 11, 15, 16), rows((6, 2), 16))


def test_a_row_of_one_side_is_found_by_both_neighbours(finished: Path) -> None:
    rewrite(finished, 6, 1)  # between blocks 10 and 15, owned by the latter
    assert checked(finished) == dict.fromkeys((10, 15), rows((6, 1), 15))
    rewrite(finished, 1, 4)  # between blocks 1 and 2, owned by the latter
    found = checked(finished)
    assert {index: found[index] for index in (1, 2)} == dict.fromkeys((1, 2), rows((1, 4), 2))


@pytest.mark.parametrize(
    ("record", "owner"),
    [
        ((0, 0), 0),
        ((8, 0), 15),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [((8, 10), 19), ((0, 5), 2)]),
    ],
)
def test_an_outer_row_is_found_by_its_block(finished: Path, record: tuple[int, int], owner: int) -> None:
    rewrite(finished, *record)
    assert checked(finished) == {owner: rows(record, owner)}


def test_a_row_inside_a_block_is_none_of_its_business(finished: Path) -> None:
    rewrite(finished, 1, 1)
    assert checked(finished) == {}


@pytest.mark.parametrize("harm", ["gone", "truncated", "emptied"])
def test_a_shard_that_cannot_be_read_is_a_mismatch_of_all_its_rows(finished: Path, harm: str) -> None:
    store = MechanismStore.open(str(finished))
    file = finished / store.shard_keys(store.plan[16])[0]
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-50] if harm == "truncated" else b"")
    found = checked(finished)
    # It owns records (6, 2), (6, 3), (7, 2) and (7, 3), the last of which is inside.
    assert found[16] == rows((6, 2), 16) + rows((6, 3), 16) + rows((7, 2), 16)
    assert (found[15], found[10]) == (rows((6, 2), 16) + rows((7, 2), 16), rows((6, 2), 16))
    assert set(found) == {10, 11, 15, 16}


# --- receipts -------------------------------------------------------------------------------------


def test_an_edited_digest_is_found_by_both_blocks_of_the_side(finished: Path) -> None:
    store = MechanismStore.open(str(finished))
    receipt = receipts.read_receipt(store.objects, 0, store.plan.skipped)
    assert receipt is not None
    digests = receipt.row_digests("east")
    digests[1] = "0" * 16
    edit_receipt(finished, 0, sides={**receipt.sides, "east": "".join(digests)})
    mismatch = (RowMismatch((2, 1), 0, "receipt"),)
    assert checked(finished) == {0: mismatch, 5: mismatch}
    open_mechanism(finished, verify=True)  # no shard has changed


@pytest.mark.parametrize(
    "harm",
    [
        "gone",
        "of another seed",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ["damaged", "no sides", "no text"]),
    ],
)
def test_an_empty_receipt_is_a_mismatch_of_all_its_records(finished: Path, harm: str) -> None:
    # At the west of the grid, north of 1, south of 3, west of a skipped 7.
    file = finished / receipts.key_of(2)
    if harm == "gone":
        file.unlink()
    elif harm == "damaged":
        file.write_text(file.read_text()[:60])
    else:
        changes = {"of another seed": {"seed_sha256": "0"}, "no sides": {"sides": {}}}
        edit_receipt(finished, 2, **changes.get(harm, {"sides": {"east": 5, "north": None, "south": [1]}}))
    found = checked(finished)
    sides = {1: [(0, 4), (1, 4), (2, 4)], 3: [(0, 6), (1, 6), (2, 6)], 7: [(2, 4), (2, 5), (2, 6)]}
    sides[2] = sorted({record for side in sides.values() for record in side})
    assert found == {i: tuple(RowMismatch(record, 2, "receipt") for record in sides[i]) for i in sides}


def test_a_skipped_block_without_its_receipt_says_nothing_of_its_rows_either(finished: Path) -> None:
    skipped = min(MechanismStore.open(str(finished)).plan.skipped)
    assert skipped == 6
    (finished / receipts.key_of(skipped)).unlink()
    own = check_shared_rows(str(finished), skipped).mismatches
    assert set(rows((2, 2), 6)) | {RowMismatch((2, 2), 6, "receipt")} <= set(own)
    # West of it, block 1 shares records (2, 2), (2, 3) and (2, 4) with it; the last is another's.
    assert check_shared_rows(str(finished), 1).mismatches == tuple(
        sorted({RowMismatch((2, j), 6, "receipt") for j in (2, 3, 4)} | {*rows((2, 2), 6), *rows((2, 3), 6)})
    )


# --- the seed and the job ---------------------------------------------------------------------------


def test_a_changed_seed_is_found_where_it_matters(finished: Path) -> None:
    array = zarr.open_array(str(finished / "seed" / "score"), mode="r+")
    array[1, 1, 0] = array[1, 1, 0] - 1e-3
    found = checked(finished)
    # The corner of four blocks is record (2, 2); the last of them is skipped, and extended anew by all four.
    assert set(found) == {0, 1, 5, 6}
    assert {m.said_by for m in found[0]} == {"row", "receipt"}
    assert {m.record for m in found[0]} == {(2, 1), (1, 2), (2, 2)}


def test_another_digest_of_the_seed_makes_all_receipts_those_of_another(finished: Path) -> None:
    zarr.open_group(str(finished / "seed"), mode="r+").attrs["sha256"] = "0"
    assert set(checked(finished)) == set(range(20))


@pytest.mark.parametrize("lost", ["chunk", "array", "group", "attributes", "description"])
def test_a_seed_that_is_lost_is_one_error(finished: Path, lost: str) -> None:
    seed = finished / "seed"
    if lost == "attributes":
        zarr.open_group(str(seed), mode="r+").attrs.clear()
        (seed / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    elif lost == "description":
        (seed / "score" / "zarr.json").write_text("{")
    else:
        shutil.rmtree({"chunk": seed / "score" / "c", "array": seed / "score", "group": seed}[lost])
    refused(StoreError, "", check_shared_rows, str(finished), 0)


@pytest.mark.parametrize("harm", ["smaller", "flat", "lost", "gone", "where", "who knows where"])
def test_a_seed_that_makes_no_sense_is_one_error(of_every_method: Path, tmp_path: Path, harm: str) -> None:
    path = shutil.copytree(of_every_method, tmp_path / "copy.zarr")
    group = zarr.open_group(str(path / "seed"), mode="r+")
    where = dict(group.attrs.get("record_scores", {}))
    # What is extended from, besides scores where there is more.
    more = [name for name in ("extension_x", "extension_exponent") if name in group]
    name = where.get("name") or [*more, "score"][0]
    values = group[name][...]
    if harm == "smaller":
        group.create_array(name, data=values[..., :1, :1] if values.ndim > 1 else values[:0], overwrite=True)
    elif harm == "flat":
        group.create_array(name, data=np.append(values, 0.5), overwrite=True)
    elif harm == "lost":
        shutil.rmtree(path / "seed" / name / "c")
    elif harm == "gone":
        del group[name]
    else:
        group.attrs["record_scores"] = {"name": name} if harm == "where" else 7
    refused(StoreError, "", check_shared_rows, str(path), 0)


def test_a_job_that_was_changed_extends_nothing(finished: Path) -> None:
    store = MechanismStore.open(str(finished), mode="r+")
    job = store.attributes["job"]
    job["extension"]["method"] = "smuggled:Mean"
    store.update(job=job)
    refused(StoreError, "its job has changed", check_shared_rows, str(finished), 0)


def test_what_there_is_nothing_to_compare_with(tmp_path: Path, finished: Path, small_job: Job) -> None:
    refused(StoreError, "no such store", check_shared_rows, str(tmp_path / "none.zarr"), 0)
    refused(IndexError, "block 20", check_shared_rows, str(finished), 20)
    init(parse_job(small_job(store={"block_cells": [2, 3]})), str(tmp_path / "s.zarr"))
    # Nothing is extended yet: no row, no receipt.
    found = check_shared_rows(str(tmp_path / "s.zarr"), 0)
    assert {m.said_by for m in found.mismatches} == {"row", "receipt"}
