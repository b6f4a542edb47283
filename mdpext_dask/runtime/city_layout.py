"""The bytes of an exported city.

    8 bytes    "mdpcity" and a line feed
    4 bytes    version of the format, little-endian
    4 bytes    length of the header in bytes, little-endian
    32 bytes   SHA-256 of the 16 bytes before and of the header
    header     JSON: what is promised and proved, the grid, the plane, and where the sections are
    sections   one after the other, to the last byte of the file

Records are cut into *tiles* of whole source cells, each with the SHA-256 of its rows as float32,
little-endian, in the order (x, y, output). Either the sections are the seed's log scores, float64,
compressed, and a tile is extended from the corners of its cells, as when the store was made; or every tile
is a section with its rows. Both ways the rows must have the digest noted, or they are not used.
"""

import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.problem.grid import Grid

MAGIC, VERSION = b"mdpcity\n", 1
# How the rows are kept.
SEED, ROWS = "seed", "rows"
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = hashlib.sha256().digest_size
# A header has a digest for every tile: the largest city of a million tiles stays below.
_LARGEST_HEADER = 2**28
# Best at compressing what is left of rows, at twice the time of the usual 6.
_LEVEL = 9
# Differences of this order along both axes are smallest for rows that are smooth between seeds.
_ORDER = 2
# Rows of a tile, in bytes; a place that is asked for the first time waits for its tile.
_TILE_BYTES = 256 * 2**10


def encode(header: Mapping[str, Any]) -> bytes:
    """Return everything before the sections."""
    content = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, len(content))
    return prefix + hashlib.sha256(prefix + content).digest() + content


def read_header(handle: int, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of an open file, and where the sections begin.

    Raises
    ------
    StoreError
        If the file is no exported city, one of another version, or damaged.
    """
    start = _PREFIX.size + _DIGEST_BYTES
    prefix = os.pread(handle, start, 0)
    if not prefix.startswith(MAGIC):
        raise StoreError(f"{path}: not a city made by mdpext export")
    if len(prefix) < start:
        raise StoreError(f"{path}: is cut short; export it again")
    _, version, length = _PREFIX.unpack(prefix[: _PREFIX.size])
    if version != VERSION:
        raise StoreError(f"{path}: has format {version}, this software reads {VERSION}; export it again")
    content = os.pread(handle, length, start) if length <= _LARGEST_HEADER else b""
    if hashlib.sha256(prefix[: _PREFIX.size] + content).digest() != prefix[_PREFIX.size :]:
        raise StoreError(f"{path}: its header is damaged; export it again")
    header: dict[str, Any] = json.loads(content)
    return header, start + length


def tile_cells(grid: Grid, outputs: int) -> tuple[int, int]:
    """Return how many source cells a tile has to the east and to the north."""
    cell_bytes = 4 * outputs * grid.factor**2
    side = max(int(math.sqrt(_TILE_BYTES / cell_bytes)), 1)
    return min(side, grid.cells_x), min(side, grid.cells_y)


class Tiles:
    """How records are cut into tiles: each owns the fine rows of its cells, the last ones the border too.

    Parameters
    ----------
    grid
        The grid.
    cells
        Source cells of a full tile, to the east and to the north.
    """

    def __init__(self, grid: Grid, cells: tuple[int, int]) -> None:
        self._grid, self._cells = grid, cells
        self.shape = math.ceil(grid.cells_x / cells[0]), math.ceil(grid.cells_y / cells[1])

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]

    def cells(self, tile: int) -> tuple[slice, slice]:
        """Return the source cells of a tile."""
        ends = self._grid.cells_x, self._grid.cells_y
        position = divmod(tile, self.shape[1])
        first = [at * size for at, size in zip(position, self._cells, strict=True)]
        stop = [min(at + size, end) for at, size, end in zip(first, self._cells, ends, strict=True)]
        return slice(first[0], stop[0]), slice(first[1], stop[1])

    def records(self, tile: int) -> tuple[slice, slice]:
        """Return the records of a tile."""
        factor, ends = self._grid.factor, (self._grid.cells_x, self._grid.cells_y)
        x, y = (
            slice(part.start * factor, part.stop * factor + (part.stop == end))
            for part, end in zip(self.cells(tile), ends, strict=True)
        )
        return x, y

    def of_records(self, i: Any, j: Any) -> Any:
        """Return the tiles of records (i, j): numbers, or arrays of one shape."""
        position = []
        for record, size, count in zip((i, j), self._cells, self.shape, strict=True):
            at = record // (size * self._grid.factor)
            position.append(min(at, count - 1) if isinstance(at, int) else np.minimum(at, count - 1))
        return position[0] * self.shape[1] + position[1]


def rows_sha256(rows: NDArray[np.float32]) -> str:
    """Return the SHA-256 (hex) of rows."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<f4").data).hexdigest()


def pack_scores(scores: NDArray[np.float64]) -> bytes:
    """Compress log scores without loss: all first bytes, all second bytes and so on."""
    planes = np.ascontiguousarray(scores, dtype="<f8").reshape(-1).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(np.ascontiguousarray(planes).tobytes(), _LEVEL)


def unpack_scores(packed: bytes, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return what :func:`pack_scores` was given, float64 of this shape.

    Raises
    ------
    ValueError
        If that is not what the bytes hold.
    """
    planes = np.frombuffer(inflate(packed, 8 * math.prod(shape)), dtype=np.uint8)
    scores = np.ascontiguousarray(planes.reshape(8, -1).T).view("<f8").reshape(shape)
    return scores.astype(np.float64, copy=False)


def pack_rows(rows: NDArray[np.float32]) -> bytes:
    """Compress a tile without loss.

    The bit patterns are taken as whole numbers modulo 2^32 and replaced by their second differences along
    both axes: rows are smooth, so these are small. Then all first bytes, all second bytes and so on are
    compressed.

    Parameters
    ----------
    rows
        float32 of shape (records east, records north, K).
    """
    bits = np.ascontiguousarray(np.moveaxis(rows, 2, 0), dtype="<f4").view("<u4")
    for axis in (1, 2):
        for _ in range(_ORDER):
            bits = np.diff(bits, axis=axis, prepend=bits.dtype.type(0))
    # Small negative numbers become small ones: 0, -1, 1, -2 are 0, 1, 2, 3.
    signed = bits.view("<i4")
    folded = ((signed << 1) ^ (signed >> 31)).astype("<u4")
    planes = folded.reshape(-1).view(np.uint8).reshape(-1, 4).T
    return zlib.compress(np.ascontiguousarray(planes).tobytes(), _LEVEL)


def unpack_rows(packed: bytes, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Return what :func:`pack_rows` was given, of the shape (records east, records north, K).

    Raises
    ------
    ValueError
        If that is not what the bytes hold.
    """
    east, north, outputs = shape
    planes = np.frombuffer(inflate(packed, 4 * east * north * outputs), dtype=np.uint8)
    folded = np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4")
    bits = ((folded >> 1) ^ (0 - (folded & 1))).reshape(outputs, east, north)
    for axis in (2, 1):
        for _ in range(_ORDER):
            bits = np.cumsum(bits, axis=axis, dtype="<u4")
    return np.ascontiguousarray(np.moveaxis(bits, 0, 2)).view("<f4").astype(np.float32, copy=False)


def inflate(packed: bytes, size: int) -> bytes:
    """Return the `size` bytes that were compressed.

    Raises
    ------
    ValueError
        If they are another number, or damaged.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(content) != size or not stream.eof or stream.unused_data:
        raise ValueError("holds another number of bytes")
    return content
