"""The bytes of an exported city.

    8 bytes    "mdpcity" and a line feed
    4 bytes    version of the format, little-endian
    4 bytes    length of the header in bytes, little-endian
    32 bytes   SHA-256 of the 16 bytes before and of the header
    header     JSON: what is promised and proved, the grid, the plane, and where the sections are
    sections   one after the other, to the last byte of the file

Records are cut into *tiles* of whole source cells, each with the SHA-256 of its rows as float32,
little-endian, in the order (x, y, output). Either the only section is the seed's log scores, float64,
compressed, and a tile is extended from the corners of its cells, as when the store was made; or the sections
are tables of noise, compressed: the outputs of its cells, int32, and their masses and totals, float64, from
which rows follow as in the store; or every tile is a section with its rows. In all cases, rows are used only
if their digest is the one in the header.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError, newer_format
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime import city_header

MAGIC, VERSION = b"mdpcity\n", 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = hashlib.sha256().digest_size
# 400,000 outputs, or 200,000 tiles (of rows of 15 GB at least), stay below; a browser may end where a larger
# one is parsed.
_LARGEST_HEADER = 2**25
# The least bytes, at twice the time of the usual 6.
_LEVEL = 9
# What `exponential` is made for; beyond, the same bytes would be other rows on other machines.
_LARGEST_SCORE = 700.0
# Differences of this order along both axes are smallest for rows that are smooth between seeds.
_ORDER = 2
# Rows of a tile, in bytes; the first draw in a tile waits for all of it.
_TILE_BYTES = 256 * 2**10


def encode(header: Mapping[str, Any]) -> bytes:
    """Return everything before the sections; whether it can be read is for :func:`read_header` to say."""
    content = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, len(content))
    return prefix + hashlib.sha256(prefix + content).digest() + content


def read_header(read: Callable[[int, int], bytes], file_bytes: int, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, every field checked, and where the sections begin.

    Parameters
    ----------
    read
        Returns at most so many bytes of the file, from an offset on.
    file_bytes
        Size of the file.
    path
        What to name in errors.

    Raises
    ------
    StoreError
        If the file is no exported city, one of a newer version, or damaged.
    ValueError
        If its header is whole, and not one of an exported city.
    """
    start = _PREFIX.size + _DIGEST_BYTES
    prefix = read(start, 0)
    if not prefix.startswith(MAGIC):
        raise StoreError(f"{path}: not a city made by mdpext export")
    if len(prefix) < start:
        raise StoreError(f"{path}: is cut short; export it again")
    _, version, length = _PREFIX.unpack(prefix[: _PREFIX.size])
    if version > VERSION:
        raise newer_format(path, "city", version, VERSION)
    if version < VERSION:  # there has been none
        raise StoreError(f"{path}: is damaged: there is no city format {version}; export it again")
    if length > _LARGEST_HEADER:
        raise StoreError(f"{path}: its header is damaged, or too large: {length:,} bytes")
    content = read(length, start) if length <= file_bytes else b""
    if hashlib.sha256(prefix[: _PREFIX.size] + content).digest() != prefix[_PREFIX.size :]:
        raise StoreError(f"{path}: its header is damaged; export it again")
    return city_header.parsed(content), start + length


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
        self._factor, self._cells, self._ends = grid.factor, cells, (grid.cells_x, grid.cells_y)
        self.shape = math.ceil(grid.cells_x / cells[0]), math.ceil(grid.cells_y / cells[1])

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]

    def _cells_of(self, tile: int) -> tuple[slice, slice]:
        parts = zip(divmod(tile, self.shape[1]), self._cells, self._ends, strict=True)
        x, y = (slice(at * size, min((at + 1) * size, end)) for at, size, end in parts)
        return x, y

    def records(self, tile: int) -> tuple[slice, slice]:
        """Return the records of a tile."""
        parts, f = zip(self._cells_of(tile), self._ends, strict=True), self._factor
        x, y = (slice(part.start * f, part.stop * f + (part.stop == end)) for part, end in parts)
        return x, y

    def of_records(self, i: Any, j: Any) -> Any:
        """Return the tiles of records (i, j): numbers, or arrays of one shape."""
        x, y = (record // (size * self._factor) for record, size in zip((i, j), self._cells, strict=True))
        # Where the last tile is a full one, the border would be in another.
        return (x - (x == self.shape[0])) * self.shape[1] + y - (y == self.shape[1])

    def extended(self, scores: NDArray[np.float64], tile: int) -> NDArray[np.float32]:
        """Return the rows of a tile, extended from the corners of its cells.

        Parameters
        ----------
        scores
            Log scores of the seed, float64 of shape (seeds east, seeds north, K).
        tile
            Its number.

        Returns
        -------
        float32 of shape (records east, records north, K).
        """
        across, along = self._cells_of(tile)
        x, y = self.records(tile)
        corners = scores[across.start : across.stop + 1, along.start : along.stop + 1]
        return extend_log_convex(corners, self._factor)[: x.stop - x.start, : y.stop - y.start]


def rows_sha256(rows: NDArray[np.float32]) -> str:
    """Return the SHA-256 (hex) of rows."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<f4").data).hexdigest()


def pack_table(table: NDArray[Any]) -> bytes:
    """Compress a table, float64 or int32, without loss."""
    return _compressed(np.ascontiguousarray(table, dtype=table.dtype.newbyteorder("<")))


def unpack_table(packed: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return what :func:`pack_table` was given, of this dtype and shape.

    Raises
    ------
    ValueError
        If the bytes do not hold it.
    """
    return _decompressed(packed, np.dtype(dtype).newbyteorder("<").str, shape).astype(dtype, copy=False)


def unpack_scores(packed: bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return log scores of a seed, float64 of this shape.

    Raises
    ------
    ValueError
        If the bytes do not hold them, or one is not a number from -700 to 700.
    """
    scores: NDArray[np.float64] = unpack_table(packed, "float64", shape)
    # Written so that NaN fails.
    if not (np.abs(scores) <= _LARGEST_SCORE).all():
        raise ValueError("a score is out of range")
    return scores


def pack_rows(rows: NDArray[np.float32]) -> bytes:
    """Compress a tile without loss.

    The bit patterns are taken as whole numbers modulo 2^32 and replaced by their second differences along
    both axes: rows are smooth, so these are small.

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
    return _compressed(((signed << 1) ^ (signed >> 31)).astype("<u4"))


def unpack_rows(packed: bytes, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Return what :func:`pack_rows` was given, of the shape (records east, records north, K).

    Raises
    ------
    ValueError
        If the bytes do not hold it.
    """
    east, north, outputs = shape
    folded = _decompressed(packed, "<u4", (outputs, east, north))
    bits = (folded >> 1) ^ (0 - (folded & 1))
    for axis in (2, 1):
        for _ in range(_ORDER):
            bits = np.cumsum(bits, axis=axis, dtype="<u4")
    return np.ascontiguousarray(np.moveaxis(bits, 0, 2)).view("<f4").astype(np.float32, copy=False)


def _compressed(values: NDArray[Any]) -> bytes:
    """Compress all first bytes, all second bytes and so on."""
    return zlib.compress(values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize).T.tobytes(), _LEVEL)


def _decompressed(packed: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return what :func:`_compressed` was given; anything else than so many bytes is a ValueError."""
    width = np.dtype(dtype).itemsize
    size, stream = width * math.prod(shape), zlib.decompressobj()
    try:
        content = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(content) != size or not stream.eof or stream.unused_data:
        raise ValueError("holds another number of bytes")
    planes = np.frombuffer(content, dtype=np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
