"""Rows of probabilities of any origin, brought into the one plain file that auditors read piece by piece.

Values are never rounded and never judged here: what a number may be is for the auditor to say.
"""

import os
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError, StoreError, first_line
from mdpext_dask.readers.point_chunks import check_numbers
from mdpext_dask.readers.tables import LONLAT, PLANAR, reading

# How much of a large file is held at a time.
PIECE_BYTES = 1 << 26
# From here on, float64 no longer tells neighbouring whole numbers apart.
_WHOLE_LIMIT = 2**53
# What NumPy, zipfile and Zarr raise about bytes that are not what they say, beside what every reader raises.
_OF_PARSERS = (
    LookupError, RuntimeError, MemoryError, TypeError, AttributeError, ArithmeticError, SyntaxError,
    tokenize.TokenError,
)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where the records are.

    Parameters
    ----------
    coordinates
        float64 of shape (N, 2): x and y in km, or lon and lat in degrees.
    planar
        Whether they are x and y in km.
    source
        What says so, to be named in errors.
    """

    coordinates: NDArray[np.float64]
    planar: bool
    source: str


def parsing(source: str, kind: str) -> AbstractContextManager[None]:
    """Turn what NumPy, zipfile or Zarr raise about a damaged file into one line; only for their calls.

    Raises
    ------
    DataError
        Instead.
    """
    return reading(source, kind, also=_OF_PARSERS)


def stored_dtype(dtype: np.dtype[Any], source: str) -> np.dtype[Any]:
    """Return the type, float32 or float64, in which numbers of a type are kept without rounding.

    Raises
    ------
    DataError
        If they are no real numbers, or of a type that has more digits than float64.
    """
    if dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize <= 2):
        return np.dtype(np.float32)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    if dtype.kind in "iu":
        return np.dtype(np.float64)
    raise DataError(f"{source}: holds {dtype}, not numbers that float64 can hold; save it as float64")


def check_exact(values: NDArray[Any], source: str) -> None:
    """Refuse whole numbers of 64 bits that float64 cannot tell apart.

    Parameters
    ----------
    values
        Whole numbers, of any shape, possibly already converted to float64.
    source
        What to name in the error.

    Raises
    ------
    DataError
        With the number.
    """
    if values.dtype.itemsize == 8:
        bad = (values >= _WHOLE_LIMIT) | (values <= -_WHOLE_LIMIT)
        if bad.any():
            raise DataError(f"{source}: holds the number {values[bad][0]}, which float64 cannot hold exactly")


def converted(values: NDArray[Any], dtype: np.dtype[Any], source: str) -> NDArray[Any]:
    """Return values in the type that :func:`stored_dtype` has given for theirs.

    Raises
    ------
    DataError
        If a number would be rounded.
    """
    if values.dtype.kind in "iu":
        check_exact(values, source)
    return np.ascontiguousarray(values, dtype=dtype)


def check_shape(shape: tuple[int, ...], source: str) -> tuple[int, int]:
    """Return the numbers of records and outputs of an array (records, outputs) or (x, y, outputs).

    Raises
    ------
    DataError
        If it is of another shape, or has fewer than two records or no output.
    """
    if len(shape) not in (2, 3):
        raise DataError(f"{source}: has the shape {shape}, but must be (records, outputs) or (x, y, outputs)")
    records, outputs = prod(shape[:-1]), shape[-1]
    if records < 2 or outputs < 1:
        found = f"{records} and {outputs}"
        raise DataError(f"{source}: at least 2 records and 1 output are needed, found {found}")
    return records, outputs


def rows_at_once(outputs: int, itemsize: int) -> int:
    """Return how many rows make a piece."""
    return max(1, PIECE_BYTES // (outputs * itemsize))


def without_places(source: str) -> SpecError:
    """Return the error for records of which nobody has said where they are."""
    return SpecError(
        f"{source}: says nothing of where its records are; give --points FILE, a CSV or Parquet file with "
        f"columns {','.join(PLANAR)} or {','.join(LONLAT)} (degrees) and a row for each record, in order"
    )


def check_count(points: Places, records: int, source: str) -> None:
    """Refuse points that are not as many as the records.

    Raises
    ------
    DataError
        With both numbers.
    """
    if len(points.coordinates) != records:
        raise DataError(
            f"{source}: {records} records, but {len(points.coordinates)} points in {points.source}"
        )


def check_places(places: Places, unit: str = "row", numbers: Sequence[int] | None = None) -> Places:
    """Return places as they are, if they can be.

    Parameters
    ----------
    places
        Coordinates of the records.
    unit, numbers
        What the file counts, and where each record is by that count; default: rows from 1.

    Raises
    ------
    DataError
        With the first record whose coordinates are not finite, or not degrees where they must be.
    """
    pair = PLANAR if places.planar else LONLAT
    numbers = range(1, len(places.coordinates) + 1) if numbers is None else numbers
    check_numbers(dict(zip(pair, places.coordinates.T, strict=True)), places.source, unit, numbers)
    return places


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong in writing to the scratch folder into one line.

    Raises
    ------
    StoreError
        If it is full, read-only or gone.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {first_line(error)}") from None


@contextmanager
def new_file(folder: Path) -> Iterator[Path]:
    """Make an empty ``.npy`` file in the scratch folder, and remove it again if filling it fails.

    Raises
    ------
    StoreError
        If the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="rows-", suffix=".npy", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def allocate(path: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a writable map of a new ``.npy`` file of rows.

    Raises
    ------
    StoreError
        If there is no room for it.
    """
    with writing(path.parent):
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):
            # A mapped file that meets a full disk later kills the process, without an error to catch.
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return rows


class RowWriter:
    """A ``.npy`` file of rows that grows; how many there will be need not be known.

    Parameters
    ----------
    path
        The file; what is in it is replaced.
    outputs
        Number K of outputs.
    dtype
        float32 or float64.
    """

    def __init__(self, path: Path, outputs: int, dtype: np.dtype[Any]) -> None:
        self.rows = 0
        self._outputs = outputs
        self._dtype = dtype
        self._file = path.open("wb")
        self._folder = path.parent
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failed write may be tried once more, and fail again, on closing.
        with writing(self._folder), self._file:
            if kind is None:
                end = self._file.tell()
                start = self._write_header()
                assert end == start + self.rows * self._outputs * self._dtype.itemsize

    def append(self, values: NDArray[Any]) -> None:
        """Write further rows, of shape (n, K) and the file's type.

        Raises
        ------
        StoreError
            If they cannot be written.
        """
        assert values.shape[1:] == (self._outputs,)
        assert values.dtype == self._dtype
        with writing(self._folder):
            self._file.write(np.ascontiguousarray(values).data)
        self.rows += len(values)

    def _write_header(self) -> int:
        # NumPy leaves room in a header for the number of rows to grow, so that it can be replaced in place.
        self._file.seek(0)
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.rows, self._outputs),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
