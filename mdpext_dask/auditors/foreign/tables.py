"""Mechanisms in CSV and Parquet tables: a row for each record, a column for each output.

Columns ``x_km`` and ``y_km``, or ``lon`` and ``lat``, say where the records are. Columns named ``record``,
``id`` or ``index``, and a first column without a name, are labels, not outputs. Every other column is an
output, in the order of the table.
"""

import bz2
import csv
import gzip
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign.row_files import (
    Places,
    RowWriter,
    check_count,
    check_exact,
    check_places,
    check_shape,
    new_file,
    reading,
    rows_at_once,
    stored_dtype,
    without_places,
)
from mdpext_dask.errors import DataError
from mdpext_dask.readers.csv_tables import LONLAT, PLANAR

# Suffix of a CSV file -> how it is opened as text.
_OPENERS: dict[str, Callable[..., IO[Any]]] = {
    ".csv": open, ".csv.gz": gzip.open, ".csv.bz2": bz2.open, ".csv.xz": lzma.open,
}  # fmt: skip
CSV_SUFFIXES = tuple(_OPENERS)
PARQUET_SUFFIXES = (".parquet", ".pq")
_RECORD = "record"
_LABELS = (_RECORD, "id", "index")
_PANDAS_INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: 0")
# Taken for outputs, these would end as a riddle about probabilities that do not sum to 1.
_LOOK_ALIKE = {
    "x": "x_km", "y": "y_km", "x_m": "x_km", "y_m": "y_km", "lng": "lon", "long": "lon", "longitude": "lon",
    "latitude": "lat", **{name: name for name in (*PLANAR, *LONLAT)},
}  # fmt: skip
_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE)
_TEXT_SHOWN = 40
# How much of each column of a Parquet file is read at a time.
_BUFFER_BYTES = 1 << 13


@dataclass(frozen=True)
class _Columns:
    """What the columns of a table are, by position."""

    outputs: list[int]
    coordinates: list[int]
    planar: bool
    record: int | None


@dataclass(frozen=True)
class _Piece:
    """Some rows of a table: outputs (n, K), coordinates (n, 2), record numbers and line numbers (n,)."""

    outputs: NDArray[Any]
    coordinates: NDArray[np.float64]
    record: NDArray[np.float64]
    lines: NDArray[np.int64]


def read_csv(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a CSV file into a ``.npy`` file of float64.

    An empty cell is kept as not-a-number. Blank lines are no rows, but they count as lines.

    Parameters
    ----------
    path
        The file, also compressed with gzip, bzip2 or xz.
    source
        What to name in errors.
    folder
        Where the new file goes.
    points
        Where the records are, if it does not come from the table.

    Raises
    ------
    DataError
        If the file cannot be read, its columns are not clear, or a cell is text that is no number.
    SpecError
        If nothing says where the records are.
    """
    opener = next(opener for suffix, opener in _OPENERS.items() if path.name.lower().endswith(suffix))
    with reading(source, "CSV file"), opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, skipinitialspace=True, strict=True)
        header = next((row for row in lines if row), None)
        if header is None:
            raise DataError(f"{source}: is empty")
        names = [name.strip() for name in header]
        _check_header(names, source)
        columns = _roles(names, source)
        pieces = _csv_pieces(lines, names, columns, points is not None, source)
        return _collect(pieces, columns, np.dtype(np.float64), source, folder, points)


def read_parquet(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a Parquet file into a ``.npy`` file of float32 or float64; missing ones as NaN.

    Memory holds a piece of rows and a page of each column, which is what Parquet unpacks at once.
    Parameters and errors are those of :func:`read_csv`; whole numbers that float64 cannot hold are refused
    too.
    """
    with reading(source, "Parquet file"), _parquet(path) as file:
        schema = file.schema_arrow
        columns = _roles(list(map(str, schema.names)), source)
        kinds = [
            stored_dtype(_plain_dtype(schema.types[c], schema.names[c], source), source)
            for c in columns.outputs
        ]
        # Known from the end of the file, before anything is converted.
        records, _ = check_shape((file.metadata.num_rows, len(columns.outputs)), source)
        if points is not None:
            check_count(points, records, source)
        dtype = np.result_type(*kinds)
        pieces = _parquet_pieces(file, columns, points is not None, dtype, source)
        # Records of a table without lines are counted in rows.
        return _collect(pieces, columns, dtype, source, folder, points, numbered_lines=False)


def _roles(names: Sequence[str], source: str) -> _Columns:
    """Tell outputs, coordinates and labels apart by their names.

    Raises
    ------
    DataError
        If a name is there twice, is missing, or looks like that of a coordinate, or there are no outputs.
    """
    for place, name in enumerate(names):
        if name in names[:place]:
            raise DataError(f"{source}: two columns have the name {name!r}")
        if not name and place:
            raise DataError(f"{source}: column {place + 1} has no name")
    found = [pair for pair in (PLANAR, LONLAT) if set(pair) <= set(names)]
    places = {name for pair in found for name in pair}
    labels = {
        name for name in names if not name or name.casefold() in _LABELS or _PANDAS_INDEX.fullmatch(name)
    }
    outputs = [place for place, name in enumerate(names) if name not in places | labels]
    for place in outputs:
        name = names[place]
        if name in (*PLANAR, *LONLAT):
            pair = PLANAR if name in PLANAR else LONLAT
            raise DataError(f"{source}: column {name} needs {pair[1 - pair.index(name)]} beside it")
        if meant := _LOOK_ALIKE.get(name.casefold()):
            raise DataError(
                f"{source}: column {name} looks like a coordinate; call it {meant} if it is one in km or "
                "degrees, or something else if it is an output"
            )
    if not outputs:
        raise DataError(f"{source}: no column is an output; found {', '.join(names)}")
    return _Columns(
        outputs=outputs,
        coordinates=[names.index(name) for name in found[0]] if found else [],
        planar=bool(found) and found[0] == PLANAR,
        record=next((place for place, name in enumerate(names) if name.casefold() == _RECORD), None),
    )


def _check_header(names: Sequence[str], source: str) -> None:
    """Refuse a first line that is a record: it would be lost without a word."""
    # Outputs that are only counted are what pandas calls columns without names.
    if all(map(_NUMBER.fullmatch, names)) and not any(
        list(names) == [str(first + k) for k in range(len(names))] for first in (0, 1)
    ):
        raise DataError(
            f"{source}: the first line holds numbers, not names of columns; put a line 0,1,2,... above it"
        )


def _csv_pieces(
    lines: Any, names: Sequence[str], columns: _Columns, have_points: bool, source: str
) -> Iterator[_Piece]:
    """Parse rows, a piece at a time; whatever nothing reads may be any text."""
    outputs = len(columns.outputs)
    wanted = [*columns.outputs, *([] if have_points else columns.coordinates)]
    everything = wanted == list(range(len(names)))
    size = rows_at_once(len(wanted) + 2, 8)
    values, record, numbers = np.empty((size, len(wanted))), np.empty(size), np.empty(size, np.int64)
    filled = 0

    def piece() -> _Piece:
        part = values[:filled]
        return _Piece(part[:, :outputs], part[:, outputs:].copy(), record[:filled], numbers[:filled].copy())

    for row in lines:
        if not row or (len(row) == 1 and len(names) > 1 and not row[0].strip()):
            continue
        line = lines.line_num
        if len(row) != len(names):
            raise DataError(f"{source}: line {line}: {len(row)} fields, but the header has {len(names)}")
        cells = row if everything else [row[place] for place in wanted]
        values[filled] = _parsed(cells, wanted, names, f"{source}: line {line}")
        numbers[filled] = line
        if columns.record is not None:
            record[filled] = _number_or_nan(row[columns.record])
        filled += 1
        if filled == size:
            yield piece()
            filled = 0
    if filled:
        yield piece()


def _parsed(cells: Sequence[str], wanted: Sequence[int], names: Sequence[str], where: str) -> list[float]:
    """Return the numbers of a row."""
    text = "".join(cells)
    # Python reads 1_0 and the digits of other scripts as numbers, which no other reader of CSV does.
    if text.isascii() and "_" not in text:
        try:
            return list(map(float, cells))
        except ValueError:
            pass
    for place, cell in zip(wanted, cells, strict=True):
        if cell.strip() and not _NUMBER.fullmatch(cell.strip()):
            shown = cell if len(cell) <= _TEXT_SHOWN else cell[:_TEXT_SHOWN] + "..."
            raise DataError(f"{where}: {names[place]} {shown!r} is not a number")
    return [float(cell) if cell.strip() else np.nan for cell in cells]


def _number_or_nan(text: str) -> float:
    return float(text) if _NUMBER.fullmatch(text.strip()) else np.nan


def _parquet_pieces(
    file: Any, columns: _Columns, have_points: bool, dtype: np.dtype[Any], source: str
) -> Iterator[_Piece]:
    names = list(map(str, file.schema_arrow.names))
    size = rows_at_once(len(names), 8)
    first = 1
    for batch in file.iter_batches(batch_size=size, use_threads=False):
        rows = len(batch)
        outputs = np.empty((rows, len(columns.outputs)), dtype)
        for k, place in enumerate(columns.outputs):
            outputs[:, k] = _column(batch.column(place), names[place], source)
        places = [] if have_points else columns.coordinates
        coordinates = np.empty((rows, len(places)))
        for axis, place in enumerate(places):
            coordinates[:, axis] = _column(batch.column(place), names[place], source)
        record = np.full(rows, np.nan)
        # Text is no record number, and is found out of order only where the order matters.
        if columns.record is not None and _is_numeric(batch.column(columns.record).type):
            record[:] = _column(batch.column(columns.record), _RECORD, source)
        yield _Piece(outputs, coordinates, record, np.arange(first, first + rows))
        first += rows


def _collect(
    pieces: Iterator[_Piece],
    columns: _Columns,
    dtype: np.dtype[Any],
    source: str,
    folder: Path,
    points: Places | None,
    *,
    numbered_lines: bool = True,
) -> tuple[Path, Places]:
    """Write pieces as they come, and hold together what says where the records are."""
    if points is None and not columns.coordinates:
        raise without_places(source)
    coordinates, lines = [np.empty((0, 2))], [np.empty(0, np.int64)]
    start = 0.0
    with new_file(folder) as path:
        with RowWriter(path, len(columns.outputs), dtype) as writer:
            for piece in pieces:
                if points is None:
                    coordinates.append(piece.coordinates)
                    lines.append(piece.lines)
                elif columns.record is not None:
                    start = float(piece.record[0]) if writer.rows == 0 else start
                    _check_order(piece, start, writer.rows, numbered_lines, source)
                writer.append(piece.outputs)
        if writer.rows == 0:
            raise DataError(f"{source}: holds no rows")
        check_shape((writer.rows, len(columns.outputs)), source)
        if points is not None:
            check_count(points, writer.rows, source)
            return path, points
        places = Places(np.concatenate(coordinates), columns.planar, source)
        return path, check_places(places, np.concatenate(lines) if numbered_lines else None)


def _check_order(piece: _Piece, start: float, before: int, numbered_lines: bool, source: str) -> None:
    """Refuse record numbers that do not count up: a file of points would be laid beside other records."""
    expected = (start if start in (0, 1) else 0) + before + np.arange(len(piece.record))
    wrong = piece.record != expected
    if wrong.any():
        row = int(np.argmax(wrong))
        where = f"{'line' if numbered_lines else 'row'} {piece.lines[row]}"
        raise DataError(
            f"{source}: {where}: record {piece.record[row]:g} where {expected[row]:g} should be; to be laid "
            "beside a file of points, the rows must be in the order of the records"
        )


def _parquet(path: Path) -> Any:
    """Open a Parquet file."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: Parquet files need pyarrow: install it with pip install 'mdpext-dask[files]'"
        ) from None
    # Buffering ahead, which is the default, ends with the whole file in memory.
    return parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_integer(kind))


def _plain_dtype(kind: Any, name: str, source: str) -> np.dtype[Any]:
    """Return the NumPy type of a column of numbers."""
    from pyarrow import types

    if not _is_numeric(kind) and not types.is_boolean(kind):
        raise DataError(f"{source}: column {name} holds {kind}, not numbers")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def _column(column: Any, name: str, source: str) -> NDArray[Any]:
    """Return a column of numbers; missing ones as not-a-number."""
    import pyarrow as pa

    whole = _plain_dtype(column.type, name, source).kind in "iu"
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    if whole:
        check_exact(values, f"{source}: column {name}")
    return values
