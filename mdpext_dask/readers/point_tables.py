"""Points from CSV and Parquet tables, a piece at a time.

CSV is read by the parser of pandas, which is fast and says little about what it cannot read. Where it
stumbles, the file is read once more, cell by cell, to name line, column and text of the bad cell, or to
find that there is none.
"""

import json
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.point_chunks import (
    BY_NAME,
    PointChunk,
    PointColumns,
    Wanted,
    check_numbers,
    first_fault,
    wanted_columns,
)
from mdpext_dask.readers.reference_systems import DEGREES, check_wgs84
from mdpext_dask.readers.tables import LONLAT, PIECE_ROWS, UNREADABLE, check_columns, csv_file, parquet_file

# Since then pandas rounds correctly without being asked, and warns if it is.
_PANDAS_ROUNDS_CORRECTLY = (3, 1)
# How much of each column of a Parquet file is read at a time.
_BUFFER_BYTES = 1 << 16


def csv_pieces(
    path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Iterator[PointChunk]:
    """Yield the points of a CSV file, also a compressed one.

    Raises
    ------
    DataError
        With file, line, column and text of the first bad cell, or what else is wrong.
    """
    done, complete = 0, False
    # What is no file, such as a pipe, can be read only once.
    if path.is_file():
        with csv_file(path) as file:
            wanted = wanted_columns(file.names, path, weights=weights, extra=extra, columns=columns)
            done, complete = yield from _parsed_pieces(file.text, file.names, wanted)
    if complete:
        return
    first = 0
    with csv_file(path) as file:
        wanted = wanted_columns(file.names, path, weights=weights, extra=extra, columns=columns)
        for piece in file.pieces(PIECE_ROWS):
            values = {name: piece.numbers(called) for name, called in wanted.numbers.items()}
            check_numbers(values, path, "line", piece.lines, wanted.numbers, piece.text)
            chunk = wanted.chunk(values, {name: piece.text(name) for name in wanted.extra}, first)
            first += len(chunk)
            if first > done:
                yield chunk.part(max(len(chunk) - (first - done), 0), len(chunk))


def _parsed_pieces(
    text: IO[str], names: Sequence[str], wanted: Wanted
) -> Generator[PointChunk, None, tuple[int, bool]]:
    """Yield pieces up to the first that is not plainly right; return how many points, and whether all."""
    import pandas as pd

    done = 0
    numbers = {name: names.index(called) for name, called in wanted.numbers.items()}
    if set(wanted.extra) & set(wanted.numbers.values()):
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
            dtype={place: str for place in range(len(names)) if place not in numbers.values()},
            index_col=False,
            na_filter=False,
            # A blank line then is a row of text, and left to the careful way.
            skip_blank_lines=False,
            skipinitialspace=True,
            low_memory=False,
            chunksize=PIECE_ROWS,
            **options,
        ) as tables:
            while True:
                with warnings.catch_warnings():
                    # A row with more fields than the header would lose some of them with a warning only.
                    warnings.simplefilter("error", pd.errors.ParserWarning)
                    table = next(tables, None)
                if table is None:
                    return done, True
                columns = {name: table[place].to_numpy() for name, place in numbers.items()}
                if any(column.dtype.kind not in "iuf" for column in columns.values()):
                    return done, False
                values = {name: column.astype(np.float64) for name, column in columns.items()}
                if first_fault(values):
                    return done, False
                cells = {name: table[names.index(name)].tolist() for name in wanted.extra}
                yield wanted.chunk(values, cells, done)
                done += len(table)
    except (*UNREADABLE, pd.errors.ParserWarning):  # type: ignore[misc]
        return done, False


def parquet_pieces(
    path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Iterator[PointChunk]:
    """Yield the points of a Parquet file: of columns of numbers, or of a GeoParquet file's points.

    Raises
    ------
    DataError
        With file, row (from 1), column and value of the first bad cell, or what else is wrong.
    """
    with parquet_file(path, path, _BUFFER_BYTES) as file:
        schema = file.schema_arrow
        names = list(map(str, schema.names))
        # Its geometry counts where no two columns are called lon and lat, whatever else is like them.
        geometry = None if columns.given or set(LONLAT) <= set(names) else _geometry_column(schema, path)
        known = (
            names if geometry is None else [n for n in names if n not in (geometry, *LONLAT)] + list(LONLAT)
        )
        if not all(_is_plain(schema.types[names.index(name)]) for name in columns.users_in(names)):
            columns = replace(columns, users=False)
        wanted = wanted_columns(known, path, weights=weights, extra=extra, columns=columns)
        geometry = None if wanted.planar else geometry
        read = [n for n in dict.fromkeys((*wanted.numbers.values(), *wanted.extra)) if n in names]
        if geometry is not None:
            read.append(geometry)
        first = 0
        for batch in file.iter_batches(batch_size=PIECE_ROWS, columns=read, use_threads=False):
            values = {} if geometry is None else _places(batch.column(geometry), first, path)
            for name, called in wanted.numbers.items():
                if name not in values:
                    values[name] = _numbers(batch.column(called), called, first, path)
            check_numbers(values, path, "row", range(first + 1, first + len(batch) + 1), wanted.numbers)
            text = {name: _text(batch.column(name), name, path) for name in wanted.extra}
            yield wanted.chunk(values, text, first)
            first += len(batch)


def _numbers(column: Any, name: str, first: int, path: Path) -> NDArray[np.float64]:
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
        row = int(np.argmax(_nulls(column)))
        raise DataError(f"{path}: row {first + row + 1}: {name} is missing")
    try:
        cast = column.cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: column {name}: {first_line(error)}") from None
    return np.asarray(cast, dtype=np.float64)


def _is_plain(kind: Any) -> bool:
    """Whether a column of this type is text, or whole numbers."""
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind))


def _nulls(column: Any) -> NDArray[np.bool_]:
    return np.array(column.is_null(), dtype=bool)


def _text(column: Any, name: str, path: Path) -> list[str]:
    """Return a column as text, "" where there is nothing."""
    import pyarrow as pa

    try:
        cells: list[str] = column.cast(pa.string()).fill_null("").to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError(f"{path}: column {name} holds {column.type}, which is no text") from None
    return cells


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
    except ValueError:
        document = None
    match document:
        case {"primary_column": str(name), "columns": dict(columns)} if isinstance(columns.get(name), dict):
            if name not in schema.names:
                raise DataError(f"{path}: its geometry, column {name}, is missing")
            check_columns(schema.names, (name,), path)
            check_wgs84(columns[name].get("crs", DEGREES), path)
            return name
    raise DataError(f"{path}: says that it is GeoParquet, but not what its geometry is")


def _places(column: Any, first: int, path: Path) -> dict[str, NDArray[np.float64]]:
    """Return lon and lat of a GeoParquet column of points, in well-known binary or as x and y.

    Raises
    ------
    DataError
        With the first row that holds anything else.
    """
    import pyarrow as pa
    import shapely

    def geometry_is(bad: NDArray[np.bool_], what: str) -> DataError:
        return DataError(f"{path}: row {first + int(np.argmax(bad)) + 1}: its geometry is {what}")

    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    missing = _nulls(column)
    if pa.types.is_struct(column.type) and {"x", "y"} <= {field.name for field in column.type}:
        x, y = (np.array(column.field(name), dtype=np.float64) for name in ("x", "y"))
        missing |= ~np.isfinite(x) | ~np.isfinite(y)
    elif not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(f"{path}: its geometry is {str(column.type)[:80]}, which is no Point")
    else:
        shapes = shapely.from_wkb(np.array(column, dtype=object), on_invalid="ignore")
        other = ~missing & (shapely.get_type_id(shapes) != shapely.GeometryType.POINT)
        if other.any():
            shape = shapes[np.argmax(other)]
            what = "what cannot be read" if shape is None else f"a {shape.geom_type}"
            raise geometry_is(other, f"{what}, not a Point")
        missing |= shapely.is_empty(shapes)
        shapes[missing] = None
        x, y = shapely.get_x(shapes), shapely.get_y(shapes)
    if missing.any():
        raise geometry_is(missing, "missing")
    return dict(zip(LONLAT, (x, y), strict=True))
