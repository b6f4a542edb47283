"""Requirement A2 in a finished store: a record that blocks share has one distribution.

A block is extended anew from the stored seed, and every record on its outline is compared, bit for bit, with
what is stored of it, be it the block's own or a neighbour's; then the digests of its sides with those in its
receipt and in its neighbours'. Nothing is taken for granted but the seed, so bytes that were changed along
with the hashes that name them are found as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.store import receipts
from mdpext_dask.store.blocks import Block, Plan, common, relative
from mdpext_dask.store.mechanism_store import DAMAGED_CONTENT, MechanismStore
from mdpext_dask.store.receipts import OPPOSITE
from mdpext_dask.store.rows import extended_block, rows_of

_Record = tuple[int, int]


@dataclass(frozen=True, order=True)
class RowMismatch:
    """What a store says of a record on a block's outline, and the block's extension does not.

    Parameters
    ----------
    record
        Its position (i, j) on the fine lattice.
    block
        The block that says so: the one that owns the stored row, or whose receipt it is.
    said_by
        ``"row"``, the stored bytes, or for a block that the plan skips, those that its receipt stands for;
        ``"receipt"``, the digest in the receipt.
    """

    record: _Record
    block: int
    said_by: Literal["row", "receipt"]


@dataclass(frozen=True)
class SharedRows:
    """Outcome of the check of one block.

    Parameters
    ----------
    rows_checked
        Records on its outline; each is compared once with the row that is stored, in this block or another.
    mismatches
        What differs, in the order of the records; none if all of it agrees.
    """

    rows_checked: int
    mismatches: tuple[RowMismatch, ...]


def check_shared_rows(url: str, index: int) -> SharedRows:
    """Extend a block anew and compare its sides with the store; a work item.

    What cannot be read of rows and receipts (shards that are gone or cannot be decoded, receipts that are
    gone, damaged or of another seed) is a mismatch of every record it should say something of. Where the seed
    was changed, blocks whose sides depend on the change have mismatches; where its digest was, all of them.

    It takes what extending the block takes, in time and memory (`Plan.peak_bytes`); beside a skipped block,
    also to extend that, as looking up a row of it does.

    Parameters
    ----------
    url
        The store; its seed must be there.
    index
        The block, stored or skipped.

    Raises
    ------
    IndexError
        If the plan has no such block.
    StoreError
        If there is nothing to compare with: the store cannot be opened, its job was changed, or its seed is
        missing or cannot be read.
    GuaranteeViolation
        If the cells of the region have changed.
    SpecError
        If an operator of the user's own cannot be imported or fails.
    """
    store = MechanismStore.open(url)
    plan, seed = store.plan, store.seed_sha256()
    block = plan[index]
    fine = extended_block(store, block)
    digests = receipts.digest_sides(fine, block)
    outline = [
        (x, y, fine.part(relative(x, block.closed_x.start), relative(y, block.closed_y.start)).dense().copy())
        for x, y in _outline(block)
    ]
    del fine  # what is stored is read without it
    mismatches = {
        RowMismatch(record, owner.index, "row")
        for x, y, rows in outline
        for owner in owners(plan, block)
        for record in _differing(store, owner, x, y, rows)
    }
    for side, text in digests.items():
        expected = receipts.split_digests(text)
        for said_by, said_of in ((index, side), (_beyond(plan, index, side), OPPOSITE[side])):
            receipt = receipts.read_receipt(store.objects, said_by, plan.skipped)
            said = receipt.row_digests(said_of) if receipt and receipt.seed_sha256 == seed else []
            mismatches |= {
                RowMismatch(record, said_by, "receipt")
                for position, record in enumerate(block.records(side))
                if said[position : position + 1] != expected[position : position + 1]
            }
    rows_checked = sum(rows.shape[0] * rows.shape[1] for _, _, rows in outline)
    return SharedRows(rows_checked, tuple(sorted(mismatches)))


def _outline(block: Block) -> list[tuple[slice, slice]]:
    """Return the records on a closed block's sides as rectangles of fine rows, each record in one of them."""
    x, y = block.closed_x, block.closed_y
    between = slice(x.start + 1, x.stop - 1)
    west, east, south, north = (slice(at, at + 1) for at in (x.start, x.stop - 1, y.start, y.stop - 1))
    sides = [(west, y), (east, y), (between, south), (between, north)]
    return [(part_x, part_y) for part_x, part_y in sides if part_x.start < part_x.stop]


def owners(plan: Plan, block: Block) -> list[Block]:
    """Return the blocks that own the records of a closed block: itself, and those beyond its far sides."""
    found = [block, *(plan[neighbour] for neighbour in block.neighbours.values())]
    if len(block.neighbours) == 2:  # east and north
        found.append(plan[plan[block.neighbours["east"]].neighbours["north"]])
    return found


def _beyond(plan: Plan, index: int, side: str) -> int:
    """Return the neighbour on one side of a block that has one there."""
    step = {"east": plan.blocks_shape[1], "north": 1}
    return index + step[side] if side in step else index - step[OPPOSITE[side]]


def _differing(
    store: MechanismStore, owner: Block, x: slice, y: slice, rows: NDArray[np.float32]
) -> Iterator[_Record]:
    """Yield records of a rectangle that one block owns and whose stored rows are not these, bit for bit."""
    part_x, part_y = common(x, owner.owned_x), common(y, owner.owned_y)
    if part_x.start >= part_x.stop or part_y.start >= part_y.stop:
        return
    expected = rows[relative(part_x, x.start), relative(part_y, y.start)]
    differs = np.ones(expected.shape[:2], dtype=bool)
    try:
        stored = rows_of(store, part_x, part_y)
    except DAMAGED_CONTENT:
        stored = None
    if stored is not None and stored.shape == expected.shape and stored.dtype == expected.dtype:
        # As bits: 0 is not -0, and NaN is what it is.
        differs = (stored.view(np.uint32) != expected.view(np.uint32)).any(axis=-1)
    for i, j in np.argwhere(differs).tolist():
        yield part_x.start + i, part_y.start + j
