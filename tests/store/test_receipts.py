"""Boundary cross-check: every shared record is compared; a single different bit is named."""

import dataclasses

import numpy as np
import pytest

from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.blocks import Plan
from mdpext_dask.store.receipts import Mismatch, Receipt, check_boundaries, digest_sides
from tests.support.reference import softmax

PLAN = Plan.of(Grid(0, 0, 5, 4, 1.0, (3,)), 4, (2, 3))


def receipts(spoil: tuple[int, int, int] | None = None) -> dict[int, Receipt]:
    """Compute every block from one seed; `spoil` names a block and a row of it to change by one bit."""
    scores = np.log(softmax(np.random.default_rng(0).normal(size=(6, 5, 4))))
    made = {}
    for block in PLAN:
        a, b = block.cells_x, block.cells_y
        fine = extend_log_convex(scores[a.start : a.stop + 1, b.start : b.stop + 1], 3)
        if spoil is not None and spoil[0] == block.index:
            fine[spoil[1], spoil[2], 2] = np.nextafter(fine[spoil[1], spoil[2], 2], np.float32(1))
        made[block.index] = Receipt(
            block=block.index, seed_sha256="s", shards={"k": "h"},
            sides=digest_sides(LocalRows.of(fine), block),
            fallbacks=0, seconds=0.0, peak_bytes=None, worker="w",
        )  # fmt: skip
    return made


def test_blocks_of_one_seed_agree_on_all_shared_records() -> None:
    report = check_boundaries(PLAN, receipts())
    # Blocks of 2, 2, 1 by 3, 1 cells: two seams of 13 records each way split 10 + 4, one seam across.
    assert (report.rows_checked, report.mismatches) == (2 * (10 + 4) + (7 + 7 + 4), ())


@pytest.mark.parametrize(
    ("spoil", "record", "blocks"),
    [((0, 6, 4), (6, 4), (0, 2)), ((1, 2, 0), (2, 9), (0, 1)), ((2, 0, 5), (6, 5), (0, 2))],
)
def test_changed_bit(spoil: tuple[int, int, int], record: tuple[int, int], blocks: tuple[int, int]) -> None:
    report = check_boundaries(PLAN, receipts(spoil))
    assert Mismatch(record=record, blocks=blocks) in report.mismatches
    assert len(report.mismatches) == 1


def test_a_changed_bit_inside_a_block_is_none_of_its_business() -> None:
    assert check_boundaries(PLAN, receipts((0, 2, 2))).mismatches == ()


def test_a_receipt_that_lacks_digests_is_a_mismatch() -> None:
    made = receipts()
    made[0] = dataclasses.replace(made[0], sides={**made[0].sides, "east": ""})
    assert len(check_boundaries(PLAN, made).mismatches) == 10
