"""CSV and Parquet files as tables: unpacked, read a piece at a time, bad cells named by file and line.

No other module opens either to read; what columns mean is for the callers to say.
"""

import csv
import io
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, MdpextError, first_line
from mdpext_dask.readers.optional_libraries import import_optional

LONLAT, PLANAR = ("lon", "lat"), ("x_km", "y_km")
# Rows that are read at a time; as chunks of other sizes are made of them, those sizes change nothing.
PIECE_ROWS = 100_000
BYTE_ORDER_MARKS_16 = (b"\xff\xfe", b"\xfe\xff")
_OF_MACOS = ("__MACOSX/", ".DS_Store")
# A line behind the last one of a CSV file.
_END = "end"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# What a broken file makes its readers raise.
UNREADABLE: tuple[type[Exception], ...] = (
    OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, lzma.LZMAError, BadZipFile,
)  # fmt: skip


@contextmanager
def reading(source: object, kind: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever a reader raises about a broken file into one line.

    Parameters
    ----------
    source
        The file, to be named.
    kind
        What it is not if it cannot be read, such as "CSV file".
    also
        Further errors that the library called inside raises about broken files.

    Raises
    ------
    DataError
        Instead; errors of this package pass.
    """
    try:
        yield
    except MdpextError:
        raise
    except UNREADABLE + also as error:
        # Zarr's own, of a folder that is there, has no number of the operating system's.
        if isinstance(error, FileNotFoundError) and error.errno is not None:
            raise DataError(f"{source}: no such file") from None
        begins = error.object[:2] if isinstance(error, UnicodeDecodeError) and error.start == 0 else b""
        if begins in BYTE_ORDER_MARKS_16:
            raise DataError(f"{source}: is in UTF-16; save it as UTF-8") from None
        raise DataError(f"{source}: not a readable {kind}: {first_line(error)}") from None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked as its suffix says (.gz, .bz2, .xz, .zip)."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    with path.open("rb") as packed:
        kind = infer_compression(path.name)
        if kind is None:
            yield packed
        elif kind == "zip":
            with ZipFile(packed) as archive, _only_member(archive, path) as stream:
                yield stream
        else:
            with compr[kind](packed, mode="r") as stream:
                yield stream


def _only_member(archive: ZipFile, path: Path) -> IO[bytes]:
    """Open the one file of an archive; what macOS adds to it does not count."""
    files = [m for m in archive.infolist() if not (m.is_dir() or m.filename.startswith(_OF_MACOS))]
    if len(files) != 1:
        raise DataError(f"{path}: holds {len(files)} files; must hold one")
    try:
        return archive.open(files[0])
    except RuntimeError as error:  # a password, or a compression that Python does not know
        raise DataError(f"{path}: cannot be unpacked: {first_line(error)}") from None


# --- CSV ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvFile:
    """A CSV file that is open behind its header.

    Parameters
    ----------
    source
        What to name in errors.
    names
        The columns.
    rows
        The rows that are left, each with the number of the line that it ends in.
    text
        The lines that are left, for another parser.
    """

    source: object
    names: list[str]
    rows: Iterator[tuple[int, list[str]]]
    text: IO[str]

    def pieces(self, size: int = PIECE_ROWS) -> "Iterator[CsvPiece]":
        """Yield the rows, `size` at a time, the last piece shorter. Blank lines are skipped, but counted.

        Raises
        ------
        DataError
            If a row has more fields than the header; the rows before it have been yielded.
        """
        piece = CsvPiece(self)
        for line, row in self.rows:
            if not any(map(str.strip, row)):
                continue
            if len(row) > len(self.names):
                yield piece
                raise DataError(
                    f"{self.source}: line {line}: a row has more fields than the header: {len(row)}, not "
                    f"{len(self.names)}"
                )
            piece.cells.append(row + [""] * (len(self.names) - len(row)))
            piece.lines.append(line)
            if len(piece.cells) == size:
                yield piece
                piece = CsvPiece(self)
        yield piece


@dataclass(frozen=True)
class CsvPiece:
    """Rows of a CSV file as text: their cells, one for each column, and their line numbers."""

    file: CsvFile
    cells: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def text(self, name: str) -> list[str]:
        """Return a column as it stands."""
        place = self.file.names.index(name)
        return [row[place] for row in self.cells]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as float64; what is no number is NaN."""
        return np.array([number(cell) for cell in self.text(name)], dtype=np.float64)

    def finite(self, name: str) -> NDArray[np.float64]:
        """Return a column as finite float64.

        Raises
        ------
        DataError
            If a cell is not a finite number; line and text are named.
        """
        values = self.numbers(name)
        self.refuse_where(~np.isfinite(values), name, "is not a finite number")
        return values

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return a column as int64, without the detour through floats that would round long ids.

        Raises
        ------
        DataError
            If a cell is not a whole number; line and text are named.
        """
        cells = [cell.strip() for cell in self.text(name)]
        bad = np.array([_WHOLE.fullmatch(cell) is None for cell in cells], dtype=bool)
        self.refuse_where(bad, name, "is not a whole number of at most 18 digits")
        return np.array([int(cell) for cell in cells], dtype=np.int64)

    def refuse_where(self, bad: NDArray[np.bool_], name: str, complaint: str) -> None:
        """Name the first bad cell of a column, if there is one.

        Raises
        ------
        DataError
            With file, line, column and text.
        """
        if bad.any():
            row = int(np.argmax(bad))
            where = f"{self.file.source}: line {self.lines[row]}"
            raise DataError(f"{where}: {name} {self.text(name)[row]!r} {complaint}")


@contextmanager
def csv_file(path: Path, source: object = None, *, strict: bool = False) -> Iterator[CsvFile]:
    """Open a CSV file, also a compressed one, behind its header.

    Parameters
    ----------
    path
        The file.
    source
        What to name in errors; default: the path.
    strict
        Whether to refuse text beside quotes, such as ``"0.5"6``.

    Raises
    ------
    DataError
        If it cannot be read, also later, or is empty.
    """
    source = path if source is None else source
    with (
        reading(source, "CSV file"),
        opened(path) as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text,
    ):
        rows = _rows(text, source, strict)
        header = next((row for _, row in rows if row), None)
        if header is None:
            raise DataError(f"{source}: is empty")
        yield CsvFile(source, [name.strip() for name in header], rows, text)


def _rows(text: Iterable[str], source: object, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield rows with the number of the line that each ends in.

    Raises
    ------
    DataError
        At the end, if a quote is still open: all the lines behind it are in one cell.
    """
    ended = False

    def lines() -> Iterator[str]:
        nonlocal ended
        yield from text
        ended = True
        yield _END

    reader = csv.reader(lines(), skipinitialspace=True, strict=strict)
    line = 0
    for row in reader:
        if ended:
            if row != [_END]:
                raise DataError(
                    f"{source}: not a readable CSV file: the quote of line {line + 1} is not closed"
                )
            return
        line = reader.line_num
        yield line, row


def number(text: str) -> float | None:
    """Return a number, also NaN or infinity; None for text that is none."""
    # Python reads 1_0 and the digits of other scripts as numbers, which no other reader of CSV does.
    if text.isascii() and "_" not in text:
        try:
            return float(text)
        except ValueError:
            pass
    return None


def check_columns(names: Sequence[str], wanted: Iterable[str], source: object) -> None:
    """Refuse a table that lacks a column, or has it twice.

    Raises
    ------
    DataError
        With the column.
    """
    for name in wanted:
        if name not in names:
            raise DataError(f"{source}: column {name} is missing; found {', '.join(names) or 'none'}")
        if list(names).count(name) > 1:
            raise DataError(f"{source}: two columns have the name {name}")


def read_csv(path: Path, required: Sequence[str]) -> CsvPiece:
    """Read a whole CSV file.

    Raises
    ------
    DataError
        If it cannot be read, has no rows, or lacks a required column.
    """
    with csv_file(path) as file:
        check_columns(file.names, required, path)
        [table] = file.pieces(size=sys.maxsize)
    if not table.lines:
        raise DataError(f"{path}: holds no rows")
    return table


# --- Parquet --------------------------------------------------------------------------------------


@contextmanager
def parquet_file(path: Path, source: object, buffer_bytes: int) -> Iterator[Any]:
    """Open a Parquet file, to be read in batches of rows.

    Parameters
    ----------
    path
        The file.
    source
        What to name in errors.
    buffer_bytes
        How much of each column is read at a time.

    Raises
    ------
    DataError
        If it cannot be read, also later.
    SpecError
        If pyarrow is not installed.
    """
    pyarrow = import_optional("pyarrow", f"{source}: a Parquet file")
    from pyarrow import parquet

    # Buffering ahead, which is the default, ends with the whole file in memory.
    with (
        reading(source, "Parquet file", also=(pyarrow.ArrowException,)),
        parquet.ParquetFile(path, pre_buffer=False, buffer_size=buffer_bytes) as file,
    ):
        yield file
