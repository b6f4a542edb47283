"""Local rows as they are stored: chunks along the outputs, of which those of far outputs alone are not there.

The array of a mechanism of noise has the floor as its fill value. Reading and writing rows takes the chunks
that hold a near output, and no others.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from mdpext_dask.errors import StoreError, first_line
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.store import objects
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import DAMAGE, ROOT_KEY, MechanismStore
from mdpext_dask.store.schema import PROBABILITY

# How Zarr writes the index of a shard, if not told otherwise: where each chunk starts and how long it is, as
# numbers of 8 bytes, and a checksum; this number where there is no chunk.
_USUAL_INDEX = (
    "end", ["bytes", "crc32c"], {"name": "default", "configuration": {"separator": "/"}},
)  # fmt: skip
_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4
_NO_CHUNK = np.uint64(2**64 - 1)


def floor_of(store: MechanismStore) -> float | None:
    """Return what outputs far from a record have, which is not stored; None where all rows are whole."""
    fill = float(store.array(PROBABILITY).fill_value)
    return None if math.isnan(fill) else fill


def keep_floor(store: MechanismStore, floor: float) -> None:
    """Say what outputs far from a record have, before any block is written.

    Raises
    ------
    StoreError
        If the store refuses the write.
    """
    key = f"{PROBABILITY}/{ROOT_KEY}"
    description: Any = objects.get_json(store.objects, key)
    objects.put_json(store.objects, key, {**description, "fill_value": float(np.float32(floor))})
    store.update()  # opens the array as it is now


def stored_chunks(store: MechanismStore, x: slice, y: slice) -> NDArray[np.bool_]:
    """Return which chunks along the outputs have to be read for a rectangle, bool of shape (n,).

    The others are not stored for any of its records, and so they are nothing but the floor. They are read off
    the shards' indices; that an index is sound is checked when Zarr reads a chunk by it, and a record without
    a chunk is lost. All have to be read where there is no floor, or where shards are not laid out as this
    package does it: Zarr alone decides then.

    Parameters
    ----------
    store
        The store.
    x, y
        Half-open ranges of fine rows.

    Raises
    ------
    StoreError
        If an index cannot be read.
    """
    array = store.array(PROBABILITY)
    shards, chunks = array.shards, array.chunks
    number = -(-array.shape[2] // chunks[2])
    usual = shards is not None and shards[2] >= array.shape[2] and _has_usual_index(array)
    if number == 1 or floor_of(store) is None or not usual:
        return np.ones(number, dtype=bool)
    assert shards is not None
    found = np.zeros(number, dtype=bool)
    per_shard = tuple(side // chunk for side, chunk in zip(shards, chunks, strict=True))
    size = math.prod(per_shard) * _ENTRY_BYTES + _CHECKSUM_BYTES
    for i in range(x.start // shards[0], -(-x.stop // shards[0])):
        for j in range(y.start // shards[1], -(-y.stop // shards[1])):
            index = objects.get_bytes(store.objects, f"{PROBABILITY}/c/{i}/{j}/0", end=size)
            if index is None:
                continue
            if len(index) != size:
                raise StoreError(f"{store.url}: {PROBABILITY}/c/{i}/{j}/0 is damaged: it has no whole index")
            starts = np.frombuffer(index[:-_CHECKSUM_BYTES], dtype="<u8").reshape(*per_shard, 2)[..., 0]
            part = (
                slice(max(side.start - at * shard, 0) // chunk, -(-(side.stop - at * shard) // chunk))
                for side, at, shard, chunk in zip((x, y), (i, j), shards, chunks, strict=False)
            )
            found |= (starts[tuple(part)] != _NO_CHUNK).any(axis=(0, 1))[:number]
    return found


def _has_usual_index(array: "zarr.Array[Any]") -> bool:
    """Whether indices are where this package has them, and keys what it calls shards."""
    description: Any = array.metadata.to_dict()
    settings = description["codecs"][0].get("configuration", {})
    names = [codec["name"] for codec in settings.get("index_codecs", [])]
    return (settings.get("index_location"), names, description["chunk_key_encoding"]) == _USUAL_INDEX


def read_chunks(store: MechanismStore, x: slice, y: slice, chunks: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return M(y|x) of the outputs of some chunks, float32 of shape (records east, records north, n).

    Raises
    ------
    StoreError
        If stored bytes are damaged.
    """
    parts = list(_runs(chunks, store))
    if len(parts) == 1:
        return store.read(PROBABILITY, x, y, slice(*parts[0]))
    rows = np.empty(
        (x.stop - x.start, y.stop - y.start, sum(last - first for first, last in parts)), dtype=np.float32
    )
    done = 0
    for first, last in parts:
        rows[..., done : done + last - first] = store.read(PROBABILITY, x, y, slice(first, last))
        done += last - first
    return rows


def outputs_of(store: MechanismStore, chunks: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the outputs of some chunks along the outputs, in order."""
    return np.concatenate([np.arange(0), *(np.arange(*part) for part in _runs(chunks, store))])


def chunks_of(store: MechanismStore, outputs: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return which chunks along the outputs hold one of some outputs."""
    array = store.array(PROBABILITY)
    found = np.zeros(-(-array.shape[2] // array.chunks[2]), dtype=bool)
    found[outputs // array.chunks[2]] = True
    return found


def _runs(chunks: NDArray[np.bool_], store: MechanismStore) -> Iterator[tuple[int, int]]:
    """Yield the ranges of outputs that chunks which follow each other cover."""
    array = store.array(PROBABILITY)
    edges = np.flatnonzero(np.diff(chunks, prepend=False, append=False)) * array.chunks[2]
    for first, last in edges.reshape(-1, 2).tolist():
        yield first, min(last, array.shape[2])


def encode_block(store: MechanismStore, block: Block, rows: LocalRows) -> dict[str, bytes]:
    """Return the bytes of the shards with the rows that a block owns, by key.

    Chunks of nothing but the floor are not in them.

    Parameters
    ----------
    store, block
        Which block of which store.
    rows
        The rows of the closed block.

    Raises
    ------
    StoreError
        If the description of the array is damaged, or the rows are not whole shards.
    """
    keys = store.shard_keys(block)
    east, north = block.owned_shape
    scratch, description = MemoryStore(), f"{PROBABILITY}/{ROOT_KEY}"
    objects.put_bytes(scratch, description, objects.get_bytes(store.objects, description) or b"")
    owned = rows.part(slice(east), slice(north))
    try:
        array = zarr.open_array(scratch, path=PROBABILITY, mode="r+")
        for first, last in _runs(chunks_of(store, owned.near), store):
            array[block.owned_x, block.owned_y, first:last] = owned.of_outputs(np.arange(first, last))
    except DAMAGE as error:
        raise StoreError(f"{store.url}: block {block.index}: {first_line(error)}") from None
    found = ((key, objects.get_bytes(scratch, key)) for key in keys)
    shards = {key: shard for key, shard in found if shard is not None}
    if len(shards) < len(keys):
        raise StoreError(f"{store.url}: block {block.index}: its rows are not whole shards")
    return shards
