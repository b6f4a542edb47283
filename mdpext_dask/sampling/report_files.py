"""Reported places into files: CSV, Parquet and GeoJSON, a chunk at a time.

The suffix says which, as for points that are read (:mod:`mdpext_dask.readers.point_files`). A report is the
row of the input, from 0, the number of the output, and where that is. Outputs are few, so the text of each is
made once; numbers are written so that reading gives the same bits. Of the input only the user's name is
written, and only on request: no bounds, no times, no names of files. In CSV, no name is a formula.
"""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.point_files import format_of
from mdpext_dask.readers.tables import LONLAT, PLANAR

ROW, OUTPUT = "row", "output"
# What a column of users must not be called.
RESERVED = (ROW, OUTPUT, *LONLAT, *PLANAR)
# The last four are the same signs in full width, which some spreadsheets read alike.
_LIKE_A_FORMULA = ("'", "=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_PLAIN_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
# Fast, and within a few percent of the best.
_GZIP_LEVEL = 4
# Streams that compress, without a name or a time.
_PACKERS: dict[str, Callable[[IO[bytes]], AbstractContextManager[Any]]] = {
    ".gz": lambda file: gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0),
    ".bz2": partial(bz2.open, mode="wb"),
    ".xz": partial(lzma.open, mode="wb"),
}

# Writes some reports: rows of the input, from 0, and numbers of the outputs, each of shape (n,), and whose
# they are: n names, or None.
Write = Callable[[NDArray[np.intp], NDArray[np.intp], Sequence[str] | None], Any]


def check_report_file(path: Path, *, planar: bool) -> None:
    """Refuse a file whose suffix says a format in which reports cannot be written.

    Parameters
    ----------
    path
        Where reports shall go.
    planar
        Whether they are x and y in km.

    Raises
    ------
    SpecError
        If it is GeoJSON, which is in degrees, and the mechanism is planar; if it is an archive; or if the
        library that writes the format is missing.
    """
    try:
        kind = format_of(path)
    except SpecError:
        kind = "geopackage"
    if kind == "geopackage":
        raise SpecError(f"{path}: reports are CSV, Parquet or GeoJSON, not {path.suffix.lower()}")
    if kind.startswith("geojson") and planar:
        raise SpecError(f"{path}: GeoJSON is in degrees, and this mechanism is planar; write CSV or Parquet")
    if path.suffix.lower() == ".zip":
        raise SpecError(f"{path}: reports are not written into archives; write .gz, .bz2 or .xz")
    if kind == "parquet":
        import_optional("pyarrow", f"{path}: a Parquet file")


@contextmanager
def reports_into(
    file: IO[bytes], path: Path, places: NDArray[np.float64], planar: bool, user_column: str | None = None
) -> Iterator[Write]:
    """Give a function that writes reports, in the format that the suffix of a name says.

    Parameters
    ----------
    file
        Where the bytes go.
    path
        The name.
    places
        Where the outputs are, float64 of shape (K, 2): lon and lat in degrees, or x and y in km.
    planar
        Whether they are x and y.
    user_column
        Name of the column of users, if there is one.
    """
    kind = format_of(path)
    columns = PLANAR if planar else LONLAT
    if kind == "parquet":
        with _parquet(file, places, columns, user_column) as write:
            yield write
    else:
        form = _csv(places, columns, user_column) if kind == "csv" else _geojson(places, kind, user_column)
        pack = _PACKERS.get(path.suffix.lower(), nullcontext)
        with pack(file) as stream:
            yield from _text(stream, form)


@dataclass(frozen=True)
class _Form:
    """A text format.

    Parameters
    ----------
    head, before, between, tail
        Texts before all reports, before the row of each, between reports, and after all.
    user
        Puts a name into words.
    after
        For each output, the rest of a report of it.
    """

    head: str
    before: str
    between: str
    tail: str
    user: Callable[[str], str]
    after: list[str]


def _csv(places: NDArray[np.float64], columns: Sequence[str], user_column: str | None) -> _Form:
    user = [] if user_column is None else [_cell(user_column)]
    head = ",".join([ROW, *user, OUTPUT, *columns]) + "\n"
    after = [f",{k},{a!r},{b!r}\n" for k, (a, b) in enumerate(places.tolist())]
    return _Form(head, "", "", "", lambda name: f",{_cell(name)}", after)


def _geojson(places: NDArray[np.float64], kind: str, user_column: str | None) -> _Form:
    head, between, end, tail = '{"type":"FeatureCollection","features":[\n', ",\n", "", "\n]}\n"
    if kind == "geojson-lines":
        head, between, end, tail = "", "", "\n", ""
    after = [
        f',"output":{k}}},"geometry":{{"type":"Point","coordinates":[{a!r},{b!r}]}}}}{end}'
        for k, (a, b) in enumerate(places.tolist())
    ]
    before, key = '{"type":"Feature","properties":{"row":', json.dumps(user_column)
    return _Form(head, before, between, tail, lambda name: f",{key}:{json.dumps(name)}", after)


def marked(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula when it opens a CSV file.

    An apostrophe goes before what begins like a formula, and before what begins with one, so that no two
    texts become one. Plain numbers, also those with a sign, stay what they are.
    """
    like = any(part.startswith(_LIKE_A_FORMULA) for part in (text, text.lstrip()))
    return f"'{text}" if like and not _PLAIN_NUMBER.fullmatch(text) else text


def _cell(text: str) -> str:
    """Return a cell of a CSV file: in quotes where it needs them, and never a formula."""
    text = marked(text)
    needs = any(mark in text for mark in ',"\r\n') or text != text.strip()
    return '"' + text.replace('"', '""') + '"' if needs else text


def _text(stream: Any, form: _Form) -> Iterator[Write]:
    started = False

    def write(rows: NDArray[np.intp], outputs: NDArray[np.intp], users: Sequence[str] | None) -> None:
        nonlocal started
        named = repeat("", len(rows)) if users is None else map(form.user, users)
        numbered = zip(rows.tolist(), named, outputs.tolist(), strict=True)
        reports = [f"{form.before}{row}{user}{form.after[k]}" for row, user, k in numbered]
        start = form.between if started and reports else ""
        started |= bool(reports)
        stream.write((start + form.between.join(reports)).encode())

    stream.write(form.head.encode())
    yield write
    stream.write(form.tail.encode())


@contextmanager
def _parquet(
    file: IO[bytes], places: NDArray[np.float64], columns: Sequence[str], user_column: str | None
) -> Iterator[Write]:
    import pyarrow as pa
    from pyarrow import parquet

    user = [] if user_column is None else [(user_column, pa.string())]
    fields = [(ROW, pa.int64()), *user, (OUTPUT, pa.int32()), *((name, pa.float64()) for name in columns)]
    schema = pa.schema(fields)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def write(rows: NDArray[np.intp], outputs: NDArray[np.intp], users: Sequence[str] | None) -> None:
            values = [rows, *([] if users is None else [users]), outputs, *places[outputs].T]
            arrays = [pa.array(value, field.type) for value, field in zip(values, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))

        yield write
