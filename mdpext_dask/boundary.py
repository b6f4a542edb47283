"""Boundary cross-check (requirement A2): a record that two blocks share has one distribution.

Both blocks compute the rows on their common side; receipts carry digests of them, which are compared
bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mdpext_dask.partition import Plan
from mdpext_dask.receipts import Receipt

# The side on which a neighbour shares the records of a side.
OPPOSITE = {"east": "west", "west": "east", "north": "south", "south": "north"}


@dataclass(frozen=True)
class Mismatch:
    """A shared record for which two blocks computed different distributions.

    Parameters
    ----------
    record
        Its position (i, j) on the fine lattice.
    blocks
        The two blocks.
    """

    record: tuple[int, int]
    blocks: tuple[int, int]


@dataclass(frozen=True)
class BoundaryReport:
    """Outcome of the cross-check.

    Parameters
    ----------
    rows_checked
        Number of compared rows; a record shared by four blocks counts once for each pair.
    mismatches
        The records that differ.
    """

    rows_checked: int
    mismatches: tuple[Mismatch, ...]


def check_boundaries(plan: Plan, receipts: Mapping[int, Receipt]) -> BoundaryReport:
    """Compare the digests of all shared rows.

    Parameters
    ----------
    plan
        The plan.
    receipts
        One receipt for every block.
    """
    checked = 0
    mismatches = []
    for block in plan:
        for side, neighbour in block.neighbours.items():
            mine = receipts[block.index].row_digests(side)
            theirs = receipts[neighbour].row_digests(OPPOSITE[side])
            expected = block.closed_shape[1 if side == "east" else 0]
            checked += expected
            for position in range(expected):
                pair = mine[position : position + 1], theirs[position : position + 1]
                if pair[0] != pair[1] or not pair[0]:
                    record = (
                        (block.closed_x.stop - 1, block.closed_y.start + position)
                        if side == "east"
                        else (block.closed_x.start + position, block.closed_y.stop - 1)
                    )
                    mismatches.append(Mismatch(record=record, blocks=(block.index, neighbour)))
    return BoundaryReport(rows_checked=checked, mismatches=tuple(mismatches))
