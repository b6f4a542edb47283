"""Rows of the mechanism: the stored bytes, and where blocks are skipped, the bytes that would be stored.

What is certified and what is sampled is read through here, so the two are the same. A skipped block is
extended from the seed as a whole, as when its receipt was written, and refused if a single bit is another.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.store import receipts
from mdpext_dask.store.blocks import Block, Plan, common, relative
from mdpext_dask.store.extension import extended_block
from mdpext_dask.store.mechanism_store import MechanismStore

# Skipped blocks that a process keeps: what is asked for next is in one of these, or beside it.
_BLOCKS_KEPT = 2


def rows_of(store: MechanismStore, x: slice, y: slice) -> NDArray[np.float32]:
    """Return M(y|x) of a rectangle of records, float32 of shape (records east, records north, K).

    Parameters
    ----------
    store
        The store, with its seed.
    x, y
        Half-open ranges of fine rows.

    Raises
    ------
    StoreError
        If stored bytes or the seed are damaged, or a skipped block has no receipt or extends to other rows
        than when it was written.
    """
    rows: NDArray[np.float32] = store.read(PROBABILITY, x, y)
    for block in _skipped_blocks(store.plan, x, y):
        part_x, part_y = common(block.owned_x, x), common(block.owned_y, y)
        fine = _skipped_block(store, block)
        rows[relative(part_x, x.start), relative(part_y, y.start)] = fine[
            relative(part_x, block.owned_x.start), relative(part_y, block.owned_y.start)
        ]
    return rows


def rows_at(
    store: MechanismStore, i: NDArray[np.intp], j: NDArray[np.intp], damaged: float | None = None
) -> NDArray[np.float32]:
    """Return M(·|x) of n records, float32 of shape (n, K), reading every chunk once.

    Parameters
    ----------
    store
        The store, with its seed.
    i, j
        The records on the fine lattice, each of shape (n,).
    damaged
        What rows are filled with that cannot be read; without, that is an error.

    Raises
    ------
    StoreError
        As for :func:`rows_of`.
    """
    chunk_x, chunk_y, outputs = store.plan.chunk_shape
    rows = np.empty((len(i), outputs), dtype=np.float32)
    chunk = (i // chunk_x) * (store.grid.shape[1] // chunk_y + 1) + j // chunk_y
    side_x, side_y, _ = store.plan.shard_shape
    # Chunks of a block one after the other: if it is skipped, it is extended once.
    order = np.lexsort((chunk, j // side_y, i // side_x))
    starts = np.flatnonzero(np.diff(chunk[order], prepend=-1))
    for members in np.split(order, starts[1:]):
        left, lower = i[members].min(), j[members].min()
        across, along = slice(left, i[members].max() + 1), slice(lower, j[members].max() + 1)
        try:
            part = rows_of(store, across, along)
        except StoreError:
            if damaged is None:
                raise
            rows[members] = damaged
            continue
        rows[members] = part[i[members] - left, j[members] - lower]
    return rows


def _skipped_block(store: MechanismStore, block: Block) -> NDArray[np.float32]:
    """Return the closed rows of a skipped block: those that its receipt stands for, or none."""
    receipt = receipts.read_receipt(store.objects, block.index, store.plan.skipped)
    if receipt is None or receipt.rows_sha256 is None or receipt.seed_sha256 != store.seed_sha256():
        raise StoreError(f"{store.url}: block {block.index} has no receipt; run the job again")
    return _extended(store.url, block.index, receipt.rows_sha256)


@lru_cache(maxsize=_BLOCKS_KEPT)
def _extended(url: str, index: int, rows_sha256: str) -> NDArray[np.float32]:
    """Extend a block to the rows with this digest; what is kept is the same whatever happens to the store."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    fine = extended_block(store, block)
    if receipts.rows_sha256(fine, block) != rows_sha256:
        raise StoreError(
            f"{url}: block {index} does not extend to the rows that were certified; the seed or the receipt "
            "has changed, or this software is another"
        )
    return fine


def _skipped_blocks(plan: Plan, x: slice, y: slice) -> list[Block]:
    """Return the skipped blocks that own some of a rectangle of records."""
    if not plan.skipped:
        return []
    owners = {
        across * plan.blocks_shape[1] + along
        for across in range(plan.owner(x.start, 0), plan.owner(x.stop - 1, 0) + 1)
        for along in range(plan.owner(y.start, 1), plan.owner(y.stop - 1, 1) + 1)
    }
    return [plan[index] for index in sorted(owners & plan.skipped)]
