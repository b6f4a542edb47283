"""Mechanisms in CSV and Parquet tables: a row for each record, a column for each output.

Columns ``x_km`` and ``y_km``, or ``lon`` and ``lat`` by any of their names, say where the records are.
Columns named ``record``, ``id`` or ``index``, and a first column without a name, are labels, not outputs.
Every other column is an output, in the order of the table.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign import row_files
from mdpext_dask.auditors.foreign.row_files import Places
from mdpext_dask.errors import DataError
from mdpext_dask.readers.tables import (
    LONLAT,
    PLANAR,
    CsvFile,
    csv_file,
    decimal_hint,
    find_column,
    number,
    parquet_file,
    shown,
)

CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.bz2", ".csv.xz")
PARQUET_SUFFIXES = (".parquet", ".pq")
_LABELS = ("record", "id", "index")
_PANDAS_INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: 0")
# Names that look like coordinates -> what those are called. They would be taken for outputs.
_LOOK_ALIKE = {
    "x": "x_km", "y": "y_km", "x_m": "x_km", "y_m": "y_km", "lng": "lon", "long": "lon", "longitude": "lon",
    "latitude": "lat", **{name: name for name in (*PLANAR, *LONLAT)},
}  # fmt: skip
# How much of each column of a Parquet file is read at a time.
_BUFFER_BYTES = 1 << 13


@dataclass(frozen=True)
class _Columns:
    """What the columns of a table are, by position.

    With a file of points the table's own coordinates are not read, and without one no numbers of records.
    """

    outputs: list[int]
    coordinates: list[int]
    planar: bool
    record: int | None


# Rows of a table: outputs (n, K), coordinates (n, 2), record numbers (n,), and their lines or rows (n,).
_Piece = tuple[NDArray[Any], NDArray[np.float64], NDArray[np.float64], Sequence[int]]


def read_csv(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a CSV file into a ``.npy`` file of float64.

    An empty cell is kept as NaN; a row of empty cells is refused, but for blank lines at the end.

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
    with csv_file(path, source, strict=True) as file:
        # Outputs that are only counted are what pandas calls columns without names.
        counted = [[str(first + k) for k in range(len(file.names))] for first in (0, 1)]
        if file.names not in counted and all(number(name) is not None for name in file.names):
            raise DataError(
                f"{source}: the first line holds numbers, not names of columns; put a line 0,1,2,... above it"
            )
        columns = _roles(file.names, points, source)
        pieces = _csv_pieces(file, columns)
        return _collect(pieces, columns, np.dtype(np.float64), source, folder, points, unit="line")


def read_parquet(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a Parquet file into a ``.npy`` file of float32 or float64; missing ones as NaN.

    Memory holds a piece of rows and a page of each column, which is what Parquet unpacks at once.
    Parameters and errors are those of :func:`read_csv`; whole numbers that float64 cannot hold are refused
    too.
    """
    with parquet_file(path, source, _BUFFER_BYTES) as file:
        schema = file.schema_arrow
        names = list(map(str, schema.names))
        columns = _roles(names, points, source)
        kinds = [
            row_files.stored_dtype(_plain_dtype(schema.types[place], names[place], source), source)
            for place in columns.outputs
        ]
        # Known from the end of the file, before anything is converted.
        records, _ = row_files.check_shape((file.metadata.num_rows, len(columns.outputs)), source)
        if points is not None:
            row_files.check_count(points, records, source)
        dtype = np.result_type(*kinds)
        pieces = _parquet_pieces(file, columns, dtype, source)
        return _collect(pieces, columns, dtype, source, folder, points, unit="row")


def _roles(names: Sequence[str], points: Places | None, source: str) -> _Columns:
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
    pairs = [[find_column(names, name, source) for name in pair] for pair in (PLANAR, LONLAT)]
    found = [pair for pair in pairs if None not in pair]
    apart = {name for pair in found for name in pair}
    apart |= {name for name in names if name.casefold() in ("", *_LABELS) or _PANDAS_INDEX.fullmatch(name)}
    outputs = [place for place, name in enumerate(names) if name not in apart]
    for name in (names[place] for place in outputs):
        for pair in (PLANAR, LONLAT):
            if name in pair:
                raise DataError(f"{source}: column {name} needs {pair[1 - pair.index(name)]} beside it")
        if meant := _LOOK_ALIKE.get(name.casefold()):
            raise DataError(
                f"{source}: column {name} looks like a coordinate; call it {meant} if it is one in km or "
                "degrees, or something else if it is an output"
            )
    if not outputs:
        raise DataError(f"{source}: no column is an output; found {', '.join(names)}")
    if points is None and not found:
        raise row_files.without_places(source)
    record = next((place for place, name in enumerate(names) if name.casefold() == _LABELS[0]), None)
    return _Columns(
        outputs=outputs,
        coordinates=[names.index(name) for name in found[0] if name is not None] if points is None else [],
        planar=pairs[0] in found,
        record=None if points is None else record,
    )


def _csv_pieces(file: CsvFile, columns: _Columns) -> Iterator[_Piece]:
    """Parse rows, a piece at a time; whatever nothing reads may be any text."""
    rows, outputs = _csv_rows(file, columns), len(columns.outputs)
    # Python's numbers take four times the space of NumPy's.
    while piece := list(islice(rows, row_files.rows_at_once(outputs + 2, 32))):
        values, record, lines = zip(*piece, strict=True)
        table = np.array(values)
        yield table[:, :outputs], table[:, outputs:].copy(), np.array(record, np.float64), lines


def _csv_rows(file: CsvFile, columns: _Columns) -> Iterator[tuple[list[float], float | None, int]]:
    """Yield outputs and coordinates of each row, its number of a record and its line."""
    wanted = [*columns.outputs, *columns.coordinates]
    names = [file.names[place] for place in wanted]
    everything = names == file.names
    for line, row in file.rows:
        if len(row) != len(file.names):
            raise DataError(
                f"{file.source}: line {line}: {len(row)} fields, but the header has {len(file.names)}"
            )
        cells = row if everything else [row[place] for place in wanted]
        record = None if columns.record is None else number(row[columns.record])
        yield _parsed(cells, names, f"{file.source}: line {line}"), record, line


def _parsed(cells: Sequence[str], names: Sequence[str], where: str) -> list[float]:
    """Return the numbers of a row, NaN where a cell is empty."""
    text = "".join(cells)
    if text.isascii() and "_" not in text:  # as `number` does, a whole row at once
        try:
            return list(map(float, cells))
        except ValueError:
            pass
    values = []
    for name, cell in zip(names, cells, strict=True):
        value = number(cell) if cell.strip() else np.nan
        if value is None:
            raise DataError(f"{where}: {name} {shown(cell)} is not a number{decimal_hint(cell)}")
        values.append(value)
    return values


def _parquet_pieces(file: Any, columns: _Columns, dtype: np.dtype[Any], source: str) -> Iterator[_Piece]:
    first, size = 1, row_files.rows_at_once(len(file.schema_arrow.names), 8)
    for batch in file.iter_batches(batch_size=size, use_threads=False):
        outputs = np.empty((len(batch), len(columns.outputs)), dtype)
        coordinates = np.empty((len(batch), len(columns.coordinates)))
        for table, places in ((outputs, columns.outputs), (coordinates, columns.coordinates)):
            for k, place in enumerate(places):
                table[:, k] = _column(batch, place, source)
        record = np.full(len(batch), np.nan)
        # Text is no record number, and is found out of order only where the order matters.
        if columns.record is not None and _is_numeric(batch.column(columns.record).type):
            record[:] = _column(batch, columns.record, source)
        yield outputs, coordinates, record, range(first, first + len(batch))
        first += len(batch)


def _collect(
    pieces: Iterator[_Piece],
    columns: _Columns,
    dtype: np.dtype[Any],
    source: str,
    folder: Path,
    points: Places | None,
    unit: str,
) -> tuple[Path, Places]:
    """Write pieces as they come, and hold together what says where the records are."""
    coordinates: list[NDArray[np.float64]] = []
    numbers: list[int] = []
    start = 0.0
    with row_files.new_file(folder) as path:
        with row_files.RowWriter(path, len(columns.outputs), dtype) as writer:
            for outputs, places, record, where in pieces:
                if points is None:
                    coordinates.append(places)
                    numbers += where
                elif columns.record is not None:
                    start = start if writer.rows else float(record[0] == 1)
                    _check_order(record, start + writer.rows, where, unit, source)
                writer.append(outputs)
        if writer.rows == 0:
            raise DataError(f"{source}: holds no rows")
        row_files.check_shape((writer.rows, len(columns.outputs)), source)
        if points is not None:
            row_files.check_count(points, writer.rows, source)
            return path, points
        found = Places(np.concatenate(coordinates), columns.planar, source)
        return path, row_files.check_places(found, unit, numbers)


def _check_order(
    record: NDArray[np.float64], first: float, where: Sequence[int], unit: str, source: str
) -> None:
    """Refuse record numbers that do not count up: a file of points would be laid beside other records."""
    expected = first + np.arange(len(record))
    wrong = record != expected
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{source}: {unit} {where[row]}: record {record[row]:g} where {expected[row]:g} should be; to be "
            "laid beside a file of points, the rows must be in the order of the records"
        )


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


def _column(batch: Any, place: int, source: str) -> NDArray[Any]:
    """Return a column of numbers; missing ones as NaN."""
    import pyarrow as pa

    column, name = batch.column(place), batch.schema.names[place]
    dtype = _plain_dtype(column.type, name, source)
    if dtype.kind == "b":
        column = column.cast(pa.uint8())
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    if dtype.kind in "iu":
        row_files.check_exact(values, f"{source}: column {name}")
    return values
