"""Reported places into files: CSV, Parquet and GeoJSON, a chunk at a time.

The suffix says which, as for points that are read (:mod:`mdpext_dask.readers.point_files`). All of them hold
the same: the row of the input, from 0, the number of the output, and where that is. Outputs are few, so what
is written of each of them is put into words once; numbers are written so that reading gives the same bits.
Nothing of the input is written but the user's name, where that is asked for: no bounds, no times, no names
of files.
"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
# Fast, and within a few percent of what the best would give.
_GZIP_LEVEL = 4

# Writes some reports: rows of the input, from 0, and numbers of the outputs, each of shape (n,), and who they
# are of: n names, or None.
Write = Callable[[NDArray[np.intp], NDArray[np.intp], Sequence[str] | None], Any]


def check_report_file(path: Path, *, planar: bool) -> None:
    """Refuse a name that stands for a format in which reports cannot be written.

    Parameters
    ----------
    path
        Where reports shall go.
    planar
        Whether they are x and y in km.

    Raises
    ------
    SpecError
        If GeoJSON, which knows degrees only, is asked for places without any, or an archive, or the library
        that writes the format is missing.
    """
    kind = format_of(path)
    if kind.startswith("geojson") and planar:
        raise SpecError(f"{path}: GeoJSON is in degrees, and this mechanism is planar; write CSV or Parquet")
    if path.suffix.lower() == ".zip":
        raise SpecError(f"{path}: reports are not written into archives; write .gz, .bz2 or .xz")
    if kind == "parquet":
        import_optional("pyarrow", f"{path}: a Parquet file")


@contextmanager
def reports_into(
    file: IO[bytes], path: Path, places: NDArray[np.float64], *, planar: bool, user_column: str | None = None
) -> Iterator[Write]:
    """Give a function that writes reports, in the format that a name stands for.

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
        What the column of users is called, if there is one.
    """
    kind = format_of(path)
    columns = PLANAR if planar else LONLAT
    if kind == "parquet":
        with _parquet(file, places, columns, user_column) as write:
            yield write
        return
    if kind == "csv":
        user = [] if user_column is None else [_cell(user_column)]
        head, tail = ",".join([ROW, *user, OUTPUT, *columns]) + "\n", ""
        words = _csv_words(places)
    else:
        lines = kind == "geojson-lines"
        head, tail = ("", "") if lines else ('{"type":"FeatureCollection","features":[\n', "\n]}\n")
        words = _feature_words(places, user_column, lines=lines)
    with _packed(file, path) as stream:
        stream.write(head.encode())
        yield lambda *reports: stream.write(words.of(*reports))
        stream.write(tail.encode())


@dataclass
class _Words:
    """How a text format says a report: before the row, after it, and between reports.

    Parameters
    ----------
    before, between
        The same for every report.
    user
        Puts a name into words.
    after
        What is said of each output.
    """

    before: str
    between: str
    user: Callable[[str], str]
    after: list[str]
    started: bool = False

    def of(self, rows: NDArray[np.intp], outputs: NDArray[np.intp], users: Sequence[str] | None) -> bytes:
        """Return some reports as text."""
        before, after = self.before, self.after
        numbered = zip(rows.tolist(), outputs.tolist(), strict=True)
        if users is None:
            reports = [f"{before}{row}{after[k]}" for row, k in numbered]
        else:
            named = zip(numbered, map(self.user, users), strict=True)
            reports = [f"{before}{row}{user}{after[k]}" for (row, k), user in named]
        start = self.between if self.started and reports else ""
        self.started |= bool(reports)
        return (start + self.between.join(reports)).encode()


def _csv_words(places: NDArray[np.float64]) -> _Words:
    after = [f",{k},{a!r},{b!r}\n" for k, (a, b) in enumerate(places.tolist())]
    return _Words("", "", lambda name: f",{_cell(name)}", after)


def _feature_words(places: NDArray[np.float64], user_column: str | None, *, lines: bool) -> _Words:
    key, end = json.dumps(user_column), "\n" if lines else ""
    after = [
        f',"output":{k}}},"geometry":{{"type":"Point","coordinates":[{a!r},{b!r}]}}}}{end}'
        for k, (a, b) in enumerate(places.tolist())
    ]
    before = '{"type":"Feature","properties":{"row":'
    return _Words(before, "" if lines else ",\n", lambda name: f",{key}:{json.dumps(name)}", after)


def _cell(text: str) -> str:
    """Return a cell of a CSV file: in quotes where it needs them."""
    needs = any(mark in text for mark in ',"\r\n') or text != text.strip()
    return '"' + text.replace('"', '""') + '"' if needs else text


@contextmanager
def _packed(file: IO[bytes], path: Path) -> Iterator[Any]:
    """Give a stream that compresses as the suffix says, without noting a name or a time."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
            yield packed
    elif suffix == ".bz2":
        with bz2.BZ2File(file, "wb") as packed:
            yield packed
    elif suffix == ".xz":
        with lzma.LZMAFile(file, "wb") as packed:
            yield packed
    else:
        yield file


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
            named = [] if users is None else [pa.array(users, pa.string())]
            where = places[outputs]
            arrays = [
                pa.array(rows, pa.int64()),
                *named,
                pa.array(outputs.astype(np.int32)),
                *(pa.array(where[:, axis]) for axis in (0, 1)),
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))

        yield write
