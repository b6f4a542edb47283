"""Rows of the mechanism: the stored bytes, and where blocks are skipped, the bytes that would be stored.

What is certified and what is sampled is read through here, so the two are the same.
"""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.blocks import extended_block
from mdpext_dask.partition import Block, Plan
from mdpext_dask.store import MechanismStore


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
        If stored bytes or the seed are damaged.
    """
    rows = store.read_probability(x, y)
    plan = store.plan
    for block in _skipped_blocks(plan, x, y):
        part_x, part_y = _common(block.owned_x, x), _common(block.owned_y, y)
        cells = plan.part(part_x, part_y)
        fine = extended_block(store, cells)
        rows[_from(part_x, x.start), _from(part_y, y.start)] = fine[
            _from(part_x, cells.closed_x.start), _from(part_y, cells.closed_y.start)
        ]
    return rows


def _skipped_blocks(plan: Plan, x: slice, y: slice) -> list[Block]:
    """Return the skipped blocks that own some of a rectangle of records."""
    if not plan.skipped:
        return []
    cells = plan.part(x, y)
    across, along = plan.block_cells
    owners = {
        plan.block_of(a, b)
        for a in (*range(cells.cells_x.start, cells.cells_x.stop, across), cells.cells_x.stop - 1)
        for b in (*range(cells.cells_y.start, cells.cells_y.stop, along), cells.cells_y.stop - 1)
    }
    return [plan[index] for index in sorted(owners & plan.skipped)]


def _common(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _from(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)
