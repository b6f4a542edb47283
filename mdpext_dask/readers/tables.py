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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, MdpextError, first_line
from mdpext_dask.readers.optional_libraries import import_optional

LONLAT, PLANAR = ("lon", "lat"), ("x_km", "y_km")
# What else columns may be called, in any case.
_SYNONYMS = {"lon": ("lon", "lng", "long", "longitude"), "lat": ("lat", "latitude")}
# Rows that are read at a time; as chunks of other sizes are made of them, those sizes change nothing.
PIECE_ROWS = 100_000
BYTE_ORDER_MARKS_16 = (b"\xff\xfe", b"\xfe\xff")
_OF_MACOS = ("__MACOSX/", ".DS_Store")
# Between fields, where they are not commas.
_SEPARATORS = {";": "semicolon", "\t": "tab"}
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
# A line behind the last one of a CSV file.
_END = "end"
_SHOWN = 40
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
        if isinstance(error, UnicodeDecodeError):
            raise not_utf8(source, error) from None
        complaint = first_line(error)
        if isinstance(error, zlib.error):
            complaint = "its compressed data are damaged"
        elif "pickled" in complaint:
            complaint = "holds objects of Python, not numbers"
        elif isinstance(error, TypeError | AttributeError) or _OF_PYTHON.search(complaint):
            complaint = "what it says of itself is damaged"
        raise DataError(f"{source}: not a readable {kind}: {complaint}") from None


# Words of a library's own code, which say nothing of a file.
_OF_PYTHON = re.compile(r"<class|__\w+__|unexpected keyword|object has no|argument of type|out of range$")


def not_utf8(place: object, error: UnicodeDecodeError) -> DataError:
    """Return the error for text that is in another encoding; `place` is a file, or a line of one."""
    if error.start == 0 and error.object[:2] in BYTE_ORDER_MARKS_16:
        return DataError(f"{place}: is in UTF-16; save it as UTF-8")
    byte = error.object[error.start]
    return DataError(
        f"{place}: is not UTF-8: holds the byte 0x{byte:02x}, as Latin-1 or Windows-1252 would; save the "
        "file as UTF-8"
    )


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
        The rows that are left, each with the number of the line that it ends in; none of them is empty.
    text
        The lines that are left, for another parser.
    """

    source: object
    names: list[str]
    rows: Iterator[tuple[int, list[str]]]
    text: IO[str]

    def pieces(self, size: int = PIECE_ROWS) -> "Iterator[CsvPiece]":
        """Yield the rows, `size` at a time, the last piece shorter.

        Raises
        ------
        DataError
            If a row has more fields than the header; the rows before it have been yielded.
        """
        piece = CsvPiece(self)
        for line, row in self.rows:
            if len(row) > len(self.names):
                yield piece
                raise DataError(
                    f"{self.source}: line {line}: a row has more fields than the header: {len(row)}, not "
                    f"{len(self.names)}{_comma_hint(row)}"
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
            where, cell = f"{self.file.source}: line {self.lines[row]}", self.text(name)[row]
            raise DataError(f"{where}: {name} {shown(cell)} {complaint}{decimal_hint(cell)}")


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
        try:
            line, header = next(((line, row) for line, row in rows if any(map(str.strip, row))), (0, []))
            if not header:
                raise DataError(f"{source}: is empty")
            names = [name.strip() for name in header]
            _check_separator(names, f"{source}: line {line}")
            yield CsvFile(source, names, _filled(rows, source), text)
        except UnicodeDecodeError as error:
            raise not_utf8(_line_of(error, path, source), error) from None


def _line_of(error: UnicodeDecodeError, path: Path, source: object) -> str:
    """Return the source with the line that is not UTF-8, if it can be read again."""
    if path.is_file() and error.object[:2] not in BYTE_ORDER_MARKS_16:
        with opened(path) as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return f"{source}: line {number}"
    return str(source)


def _check_separator(names: Sequence[str], where: str) -> None:
    """Refuse a header whose fields lie between other marks than commas.

    Raises
    ------
    DataError
        With what they lie between.
    """
    if any("\0" in name for name in names):
        raise DataError(f"{where}: is not text, or in UTF-16; save it as CSV in UTF-8")
    for mark, called in _SEPARATORS.items():
        if len(names) == 1 and mark in names[0]:
            raise DataError(f"{where}: looks {called} separated; save it with commas between the columns")


def _filled(rows: Iterator[tuple[int, list[str]]], source: object) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a file but for blank lines at its end.

    Raises
    ------
    DataError
        If another row has nothing in it: skipping it would renumber those behind it.
    """
    blank = None
    for line, row in rows:
        empty = not any(map(str.strip, row))
        if empty and len(row) <= 1:
            blank = line if blank is None else blank
        elif empty or blank is not None:
            raise empty_row(source, line if blank is None else blank)
        else:
            yield line, row


def empty_row(source: object, line: int) -> DataError:
    """Return the error for a row without anything in it."""
    return DataError(
        f"{source}: line {line}: is empty; take it out, or put in what is missing (only blank lines at the "
        "end are skipped, so that no row is lost or renumbered)"
    )


def shown(text: str) -> str:
    """Return a cell for a message, cut where it is long."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def decimal_hint(text: str) -> str:
    """Return what to do about a number with a decimal comma; "" of other text."""
    found = _DECIMAL_COMMA.fullmatch(text.strip())
    return f"; looks like a decimal comma, write {text.strip().replace(',', '.')}" if found else ""


def _comma_hint(row: Sequence[str]) -> str:
    """Return what may split numbers into several fields, if all fields are whole numbers."""
    whole = all(re.fullmatch(r"[+-]?[0-9]+", cell.strip()) for cell in row)
    return "; are these decimal commas? Write 12.5, not 12,5" if whole else ""


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


def find_column(names: Sequence[str], wanted: str, source: object) -> str | None:
    """Return the column that is meant by a name: of just that name, or the only one called alike.

    Parameters
    ----------
    names
        The columns of a table.
    wanted
        A name; ``lon`` and ``lat`` may also be written out, or ``lng``, ``long``, and every name in any case.
    source
        What to name in the error.

    Returns
    -------
    The name as the table has it; None if there is none.

    Raises
    ------
    DataError
        If several may be meant.
    """
    exact = [name for name in names if name == wanted]
    alike = _SYNONYMS.get(wanted, (wanted,))
    found = exact or [name for name in names if name.casefold() in alike]
    if len(found) > 1:
        if len(set(found)) == 1:
            raise DataError(f"{source}: two columns have the name {found[0]}")
        raise DataError(
            f"{source}: which column is {wanted}? Found {', '.join(found)}; call the right one {wanted}"
        )
    return found[0] if found else None


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
        found = {find_column(file.names, name, path): name for name in required}
        file = replace(file, names=[found.get(name, name) for name in file.names])
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
