"""Points from CSV and Parquet tables, a piece at a time.

CSV is read by the parser of pandas, which is fast and says little about what it cannot read. Where it
stumbles, the file is read once more, cell by cell, to name line, column and text of the bad cell, or to
find that there is none.
"""

import csv
import io
import json
import lzma
import math
import warnings
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.csv_tables import LONLAT
from mdpext_dask.readers.point_chunks import PointChunk, Wanted, as_text, first_fault, refuse, wanted_columns

if TYPE_CHECKING:
    import pandas as pd

# Rows that are read at a time; as chunks of other sizes are made of them, those sizes change nothing.
PIECE_ROWS = 100_000
BYTE_ORDER_MARKS_16 = (b"\xff\xfe", b"\xfe\xff")
# Since then pandas rounds correctly without being asked, and warns if it is.
_PANDAS_ROUNDS_CORRECTLY = (3, 1)
# How much of each column of a Parquet file is read at a time.
_BUFFER_BYTES = 1 << 16
_PARQUET_NEEDS = "Parquet files need pyarrow: install it with pip install 'mdpext-dask[files]'"
_OF_MACOS = ("__MACOSX/", ".DS_Store")
# A line behind the last one of a CSV file.
_END = "end"
_DEGREES = "OGC:CRS84"
_WGS84 = 4326
# What a broken file makes its readers raise.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    csv.Error,
    zlib.error,
    lzma.LZMAError,
    BadZipFile,
    RecursionError,
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


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a reader raises about a broken file into one line.

    Raises
    ------
    DataError
        Instead.
    """
    try:
        yield
    except DataError:  # which is a ValueError, and says what is wrong
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        if error.start == 0 and error.object[:2] in BYTE_ORDER_MARKS_16:
            raise DataError(f"{path}: is in UTF-16; save it as UTF-8") from None
        raise DataError(f"{path}: not a readable {kind}: {first_line(error)}") from None
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable {kind}: {first_line(error)}") from None


@contextmanager
def _csv_rows(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]], IO[str]]]:
    """Open a CSV file behind its header: yield names, lines with their numbers, and what is left of it."""
    with opened(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        rows = _rows(text, path)
        _, header = next(rows, (0, None))
        if header is None:
            raise DataError(f"{path}: is empty")
        yield [name.strip() for name in header], rows, text


def _rows(text: Iterable[str], path: Path) -> Iterator[tuple[int, list[str]]]:
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

    reader = csv.reader(lines(), skipinitialspace=True)
    line = 0
    for row in reader:
        if ended:
            if row != [_END]:
                raise DataError(
                    f"{path}: not a readable CSV file: the quote of line {line + 1} is not closed"
                )
            return
        line = reader.line_num
        yield line, row


def csv_pieces(path: Path, *, weights: bool, extra: Sequence[str]) -> Iterator[PointChunk]:
    """Yield the points of a CSV file, also a compressed one.

    Raises
    ------
    DataError
        With file, line, column and text of the first bad cell, or what else is wrong.
    """
    done = 0
    # What is no file, such as a pipe, can be read only once.
    if path.is_file():
        with reading(path, "CSV file"), _csv_rows(path) as (names, _, text):
            wanted = wanted_columns(names, path, weights=weights, extra=extra)
            done, complete = yield from _parsed_pieces(text, names, wanted)
            if complete:
                return
    with reading(path, "CSV file"), _csv_rows(path) as (names, rows, _):
        wanted = wanted_columns(names, path, weights=weights, extra=extra)
        for piece in _careful_pieces(rows, names, wanted, path):
            if (new := piece.first_row + len(piece) - done) > 0:
                yield piece.part(max(len(piece) - new, 0), len(piece))


def _parsed_pieces(
    text: IO[str], names: Sequence[str], wanted: Wanted
) -> Generator[PointChunk, None, tuple[int, bool]]:
    """Yield pieces up to the first that is not plainly right; return how many points, and whether all."""
    import pandas as pd

    done = 0
    numbers = {names.index(name): name for name in wanted.numbers}
    if set(wanted.extra) & set(wanted.numbers):
        return 0, False  # pandas reads a column as numbers or as text
    options: dict[str, Any] = {}
    if tuple(map(int, pd.__version__.split(".")[:2])) < _PANDAS_ROUNDS_CORRECTLY:
        options["float_precision"] = "round_trip"
    try:
        with pd.read_csv(
            text,
            header=None,
            names=list(range(len(names))),
            # Numbers as they come: told to expect them, pandas would take True for one.
            dtype={place: str for place in range(len(names)) if place not in numbers},
            index_col=False,
            na_filter=False,
            skipinitialspace=True,
            low_memory=False,
            chunksize=PIECE_ROWS,
            **options,
        ) as tables:
            while (table := _next_table(tables)) is not None:
                values = _numbers(table, numbers)
                if values is None or first_fault(values) is not None:
                    return done, False
                cells = {name: as_text(table[names.index(name)].tolist()) for name in wanted.extra}
                yield wanted.chunk(values, cells, done)
                done += len(table)
    except (*_UNREADABLE, pd.errors.ParserWarning):
        return done, False
    return done, True


def _next_table(tables: "Iterator[pd.DataFrame]") -> "pd.DataFrame | None":
    import pandas as pd

    with warnings.catch_warnings():
        # A row with more fields than the header would lose some of them with a warning only.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return next(tables, None)


def _numbers(table: "pd.DataFrame", places: dict[int, str]) -> dict[str, NDArray[np.float64]] | None:
    """Return columns of numbers by name, or None if one of them holds anything else."""
    columns = {name: table[place].to_numpy() for place, name in places.items()}
    if any(column.dtype.kind not in "iuf" for column in columns.values()):
        return None
    return {name: column.astype(np.float64) for name, column in columns.items()}


def _careful_pieces(
    rows: Iterator[tuple[int, list[str]]], names: Sequence[str], wanted: Wanted, path: Path
) -> Iterator[PointChunk]:
    """Yield pieces, every cell looked at. Blank lines are no rows, but they count as lines."""
    numbers = [names.index(name) for name in wanted.numbers]
    extra = [names.index(name) for name in wanted.extra]
    first = 0
    cells: list[list[str]] = []
    lines: list[int] = []

    def piece() -> PointChunk:
        values = {
            name: np.array([_number(row[place]) for row in cells])
            for name, place in zip(wanted.numbers, numbers, strict=True)
        }
        if fault := first_fault(values):
            row = cells[fault.row]
            shown = repr(row[names.index(fault.column)]) if fault.column else ""
            raise refuse(path, f"line {lines[fault.row]}", fault, shown)
        text = {names[place]: as_text([row[place] for row in cells]) for place in extra}
        return wanted.chunk(values, text, first)

    for line, row in rows:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) > len(names):
            # What is wrong before it is said first.
            if cells:
                piece()
            raise DataError(
                f"{path}: line {line}: a row has more fields than the header: {len(row)}, not {len(names)}"
            )
        cells.append(row + [""] * (len(names) - len(row)))
        lines.append(line)
        if len(cells) == PIECE_ROWS:
            yield piece()
            first += len(cells)
            cells, lines = [], []
    if cells:
        yield piece()


def _number(text: str) -> float:
    """Return a number, or not-a-number for what is none."""
    # Python reads 1_0 and the digits of other scripts as numbers, which no other reader of CSV does.
    if text.isascii() and "_" not in text:
        try:
            return float(text)
        except ValueError:
            pass
    return math.nan


def parquet_pieces(path: Path, *, weights: bool, extra: Sequence[str]) -> Iterator[PointChunk]:
    """Yield the points of a Parquet file: of columns of numbers, or of a GeoParquet file's points.

    Raises
    ------
    DataError
        With file, row (from 1), column and value of the first bad cell, or what else is wrong.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: {_PARQUET_NEEDS}") from None

    # Buffering ahead, which is the default, ends with the whole file in memory.
    with (
        reading(path, "Parquet file"),
        parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file,
    ):
        schema = file.schema_arrow
        names = list(map(str, schema.names))
        geometry = None if set(LONLAT) <= set(names) else _geometry_column(schema, path)
        known = names if geometry is None else [n for n in names if n != geometry] + list(LONLAT)
        wanted = wanted_columns(known, path, weights=weights, extra=extra)
        geometry = None if wanted.planar else geometry
        columns = [n for n in dict.fromkeys((*wanted.numbers, *wanted.extra)) if n in names]
        if geometry is not None:
            columns.append(geometry)
        first = 0
        for batch in file.iter_batches(batch_size=PIECE_ROWS, columns=columns, use_threads=False):
            values = {} if geometry is None else _places(batch.column(geometry), first, path)
            for name in wanted.numbers:
                if name not in values:
                    values[name] = _column_numbers(batch.column(name), name, first, path)
            if fault := first_fault(values):
                shown = f"{values[fault.column][fault.row]:g}" if fault.column else ""
                raise refuse(path, f"row {first + fault.row + 1}", fault, shown)
            text = {name: _column_text(batch.column(name), name, path) for name in wanted.extra}
            yield wanted.chunk(values, text, first)
            first += len(batch)


def _column_numbers(column: Any, name: str, first: int, path: Path) -> NDArray[np.float64]:
    """Return a column of numbers as float64.

    Raises
    ------
    DataError
        If it holds anything else, nothing in a row, or a whole number that float64 cannot hold.
    """
    import pyarrow as pa
    from pyarrow import types

    kind = column.type
    if not (types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind)):
        raise DataError(f"{path}: column {name} holds {kind}, not numbers")
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{path}: row {first + row + 1}: {name} is missing")
    try:
        cast = column.cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: column {name}: {first_line(error)}") from None
    return np.asarray(cast.to_numpy(zero_copy_only=False), dtype=np.float64)


def _column_text(column: Any, name: str, path: Path) -> NDArray[np.object_]:
    """Return a column as text, "" where there is nothing."""
    import pyarrow as pa

    try:
        text = column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError(f"{path}: column {name} holds {column.type}, which is no text") from None
    return as_text(text.fill_null("").to_pylist())


def _geometry_column(schema: Any, path: Path) -> str | None:
    """Return the name of a GeoParquet file's column of places, or None if it is no such file.

    Raises
    ------
    DataError
        If its places are not in degrees on WGS 84.
    """
    text = (schema.metadata or {}).get(b"geo")
    if text is None:
        return None
    try:
        document = json.loads(text)
        name = document["primary_column"]
        crs = document["columns"][name].get("crs", _DEGREES)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: says that it is GeoParquet, but not what its geometry is") from None
    if name not in schema.names:
        raise DataError(f"{path}: its geometry, column {name}, is missing")
    check_degrees_crs(crs, path)
    return str(name)


def check_degrees_crs(crs: Any, path: Path) -> None:
    """Refuse a coordinate reference system other than degrees on WGS 84.

    Parameters
    ----------
    crs
        Anything that pyproj understands, such as PROJJSON; None if it is not known.

    Raises
    ------
    DataError
        If it is another one, or not known.
    """
    from pyproj import CRS
    from pyproj.exceptions import CRSError

    if crs is not None:
        try:
            found = CRS.from_user_input(crs)
        except CRSError:
            raise DataError(f"{path}: has a crs that is not known: {str(crs)[:80]}") from None
        if found.equals(CRS.from_user_input(_DEGREES), ignore_axis_order=True) or found.to_epsg() == _WGS84:
            return
    raise DataError(
        f"{path}: has the crs {'unknown' if crs is None else found.name}; coordinates must be degrees on "
        "WGS 84 (EPSG:4326)"
    )


def _places(column: Any, first: int, path: Path) -> dict[str, NDArray[np.float64]]:
    """Return lon and lat of a GeoParquet column of points, in well-known binary or as x and y.

    Raises
    ------
    DataError
        With the first row that holds anything else.
    """
    import pyarrow as pa
    import shapely

    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(column.type) and {"x", "y"} <= {field.name for field in column.type}:
        x, y = (column.field(name).to_numpy(zero_copy_only=False).astype(float) for name in ("x", "y"))
        missing |= ~np.isfinite(x) | ~np.isfinite(y)
    elif not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(f"{path}: its geometry is {str(column.type)[:80]}, which is no Point")
    else:
        shapes = shapely.from_wkb(column.to_numpy(zero_copy_only=False), on_invalid="ignore")
        other = ~missing & (shapely.get_type_id(shapes) != shapely.GeometryType.POINT)
        if other.any():
            row = int(np.argmax(other))
            what = "what cannot be read" if shapes[row] is None else f"a {shapes[row].geom_type}"
            raise DataError(f"{path}: row {first + row + 1}: its geometry is {what}, not a Point")
        missing |= shapely.is_empty(shapes)
        shapes[missing] = None
        x, y = shapely.get_x(shapes), shapely.get_y(shapes)
    if missing.any():
        raise DataError(f"{path}: row {first + int(np.argmax(missing)) + 1}: its geometry is missing")
    return dict(zip(LONLAT, (x, y), strict=True))
