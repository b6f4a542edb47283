"""Receipts: the only sign that a block is done.

A receipt is written after the shards of its block and has their SHA-256, which tells a finished block from a
killed write or a byte that was changed later. It also has digests of the rows that the block shares with its
neighbours.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import with_config
from zarr.abc.store import Store

from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.store import objects
from mdpext_dask.store.blocks import Block, Plan

PREFIX = "receipts/"
_ROW_DIGEST_BYTES = 8
# The side on which a neighbour shares the records of a side.
OPPOSITE = {"east": "west", "west": "east", "north": "south", "south": "north"}


@with_config(objects.STORED)
@dataclass(frozen=True)
class Receipt:
    """The record of a block that a task has written.

    Parameters
    ----------
    block
        Index of the block.
    seed_sha256
        Digest of the seed that it was extended from.
    shards
        SHA-256 (hex) of each shard of the block, by key; none if the plan skips the block.
    sides
        For each side of the closed block, the digests of its records in order, hex, 16 digits each.
        Neighbours are compared by them before a store is complete; nothing depends on them afterwards.
    fallbacks
        Rows for which a local program fell back to its reference.
    seconds
        Time the task took.
    peak_bytes
        Peak of what the task allocated, if it was measured.
    worker
        The process and its machine.
    rows_sha256
        If the plan skips the block, :func:`rows_sha256` of the rows that would have been stored; they must be
        the same whenever they are extended again. None if they are stored.
    """

    block: int
    seed_sha256: str
    shards: dict[str, str]
    sides: dict[str, str]
    fallbacks: int
    seconds: float
    peak_bytes: int | None
    worker: str
    rows_sha256: str | None = None

    def row_digests(self, side: str) -> list[str]:
        """Return the digests of the records on one side in lattice order; empty if there are none."""
        return split_digests(self.sides.get(side, ""))


def key_of(block: int) -> str:
    """Return the key of a block's receipt."""
    return f"{PREFIX}{block:08d}.json"


def write_receipt(store: Store, receipt: Receipt) -> None:
    """Write a receipt as one small object."""
    objects.put_json(store, key_of(receipt.block), asdict(receipt))


def read_receipt(store: Store, block: int, skipped: Container[int]) -> Receipt | None:
    """Return a block's receipt, or None if it is missing or damaged.

    Whether the plan skips a block, so that it has no shards, is never decided by its receipt.
    """
    return _checked(objects.get_json(store, key_of(block), Receipt), block, skipped)


def read_receipts(store: Store, planned: int, skipped: Container[int]) -> dict[int, Receipt]:
    """Return all undamaged receipts, by block.

    Parameters
    ----------
    store
        The objects.
    planned
        Number of blocks of the plan, all of which are requested if a store cannot be listed.
    skipped
        The blocks that the plan skips.
    """
    keys = objects.list_keys_if_possible(store, PREFIX)
    if keys is None:
        blocks = list(range(planned))
    else:
        stems = [key.removeprefix(PREFIX).removesuffix(".json") for key in keys]
        numbers = [int(stem) for stem in stems if stem.isdecimal() and stem.isascii()]
        blocks = [number for number in numbers if number < planned]
    contents = objects.get_many_json(store, [key_of(block) for block in blocks], Receipt)
    found = (_checked(content, block, skipped) for content, block in zip(contents, blocks, strict=True))
    return {receipt.block: receipt for receipt in found if receipt is not None}


def sweep(store: Store, planned: int) -> None:
    """Delete what lies among the receipts and belongs to none of the plan's `planned` blocks."""
    known = {f"{PREFIX}zarr.json", *(key_of(block) for block in range(planned))}
    objects.delete_keys(store, [key for key in objects.list_keys(store, PREFIX) if key not in known])


def void(store: Store, blocks: Iterable[int]) -> None:
    """Delete the receipts of blocks, so that they are done again."""
    objects.delete_keys(store, [key_of(block) for block in blocks])


def shard_sha256(store: Store, key: str) -> str | None:
    """Return the SHA-256 (hex) of an object, or None if it is missing."""
    value = objects.get_bytes(store, key)
    return None if value is None else hashlib.sha256(value).hexdigest()


def digest_sides(fine: LocalRows, block: Block) -> dict[str, str]:
    """Return digests of the closed block's sides that it shares with neighbours.

    Parameters
    ----------
    fine
        Rows of the closed block.
    block
        Which block it is.
    """
    every, first, last = slice(None), slice(1), slice(-1, None)
    shared = {
        "west": (block.cells_x.start > 0, first, every),
        "south": (block.cells_y.start > 0, every, first),
        "east": ("east" in block.neighbours, last, every),
        "north": ("north" in block.neighbours, every, last),
    }
    return {side: _digest_rows(fine.part(x, y)) for side, (used, x, y) in shared.items() if used}


def split_digests(side: str) -> list[str]:
    """Return the digests of a side's records one by one."""
    digits = 2 * _ROW_DIGEST_BYTES
    return [side[start : start + digits] for start in range(0, len(side), digits)]


def digest_of(receipts: Mapping[int, Receipt], description: bytes) -> str:
    """Return one SHA-256 (hex) over an array's description, the hashes of its shards and of skipped rows."""
    digest = hashlib.sha256(description)
    for block, receipt in sorted(receipts.items()):
        for key, sha256 in sorted(receipt.shards.items()):
            digest.update(f"{key} {sha256}\n".encode())
        if receipt.rows_sha256 is not None:
            digest.update(f"{block} {receipt.rows_sha256}\n".encode())
    return digest.hexdigest()


def rows_sha256(fine: LocalRows, block: Block) -> str:
    """Return the SHA-256 (hex) of the rows of all outputs that a block owns, given the closed block."""
    east, north = block.owned_shape
    digest = hashlib.sha256()
    for line in range(east):  # line by line, as near outputs may be few
        digest.update(np.ascontiguousarray(fine.part(slice(line, line + 1), slice(north)).dense()).data)
    return digest.hexdigest()


def _digest_rows(fine: LocalRows) -> str:
    rows = fine.dense().reshape(-1, fine.total_outputs)
    return "".join(hashlib.blake2b(row.tobytes(), digest_size=_ROW_DIGEST_BYTES).hexdigest() for row in rows)


def _checked(receipt: Receipt | None, block: int, skipped: Container[int]) -> Receipt | None:
    """Return a receipt if it is the block's, and has shards or the digest of its rows as the plan has it."""
    if receipt is None or receipt.block != block:
        return None
    skips = block in skipped
    return receipt if bool(receipt.shards) != skips and (receipt.rows_sha256 is not None) == skips else None


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
class BoundaryCheck:
    """Result of the cross-check.

    Parameters
    ----------
    rows_checked
        Number of compared rows; a record shared by four blocks counts once for each pair.
    mismatches
        The records that differ.
    """

    rows_checked: int
    mismatches: tuple[Mismatch, ...]


def check_boundaries(plan: Plan, receipts: Mapping[int, Receipt]) -> BoundaryCheck:
    """Compare the digests of all shared rows.

    Parameters
    ----------
    plan
        The plan.
    receipts
        One receipt for every block.
    """
    checked, mismatches = 0, []
    for block in plan:
        for side, neighbour in block.neighbours.items():
            mine = receipts[block.index].row_digests(side)
            theirs = receipts[neighbour].row_digests(OPPOSITE[side])
            records = block.records(side)
            checked += len(records)
            for position, record in enumerate(records):
                pair = mine[position : position + 1], theirs[position : position + 1]
                if pair[0] != pair[1] or not pair[0]:
                    mismatches.append(Mismatch(record, (block.index, neighbour)))
    return BoundaryCheck(checked, tuple(mismatches))
