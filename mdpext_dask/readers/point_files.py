"""Points from files: CSV, Parquet, GeoJSON and GeoPackage, whole or a chunk at a time.

The suffix says which: ``.parquet``, ``.pq``, ``.geoparquet``; ``.geojson``, ``.json``; ``.geojsonl``,
``.geojsons``, ``.geojsonseq``, ``.ndjson``, ``.jsonl`` for a feature on each line; ``.gpkg``, which is only
read; anything else is CSV. CSV and GeoJSON may be compressed (``.gz``, ``.bz2``, ``.xz``, ``.zip``).
"""

from collections.abc import Iterator
from pathlib import Path

from mdpext_dask.errors import SpecError
from mdpext_dask.readers.point_chunks import BY_NAME, PointChunk, PointColumns, even_chunks, joined
from mdpext_dask.readers.point_geojson import collection_pieces, line_pieces
from mdpext_dask.readers.point_layers import layer_pieces
from mdpext_dask.readers.point_tables import csv_pieces, parquet_pieces

_FORMATS = {
    **dict.fromkeys((".parquet", ".pq", ".geoparquet"), "parquet"),
    **dict.fromkeys((".geojson", ".json"), "geojson"),
    ".gpkg": "geopackage",
    **dict.fromkeys((".geojsonl", ".geojsons", ".geojsonseq", ".ndjson", ".jsonl"), "geojson-lines"),
}
_READERS = {
    "csv": csv_pieces,
    "parquet": parquet_pieces,
    "geojson": collection_pieces,
    "geojson-lines": line_pieces,
    "geopackage": layer_pieces,
}
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zip")
# Names that nobody gives to a CSV file.
_OTHER_SUFFIXES = (".xlsx", ".xls", ".ods", ".shp", ".kml", ".kmz", ".gpx", ".feather", ".arrow")


def format_of(path: Path) -> str:
    """Return what a file's name says that it is: csv, parquet, geojson, geojson-lines or geopackage.

    Raises
    ------
    SpecError
        If it says that it is a spreadsheet, or one of the other formats that are not for points here.
    """
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED_SUFFIXES:
        suffix = Path(path.stem).suffix.lower()
    if suffix in _OTHER_SUFFIXES:
        raise SpecError(f"{path}: points are CSV, Parquet, GeoJSON or GeoPackage, not {suffix}")
    return _FORMATS.get(suffix, "csv")


def point_chunks(
    path: Path,
    *,
    weights: bool,
    extra: tuple[str, ...] = (),
    columns: PointColumns = BY_NAME,
    chunk_points: int = 200_000,
) -> Iterator[PointChunk]:
    """Yield the points of a file in chunks, in the order of the file; memory holds a few chunks.

    Parameters
    ----------
    path
        Table with columns lon,lat or x_km,y_km, or GeoJSON or a GeoPackage with points. Where both pairs are
        there, x_km,y_km count.
    weights
        Whether a column (or property) weight counts. Without one every weight is 1.
    extra
        Further columns (or properties) to return, as text.
    columns
        Which columns hold longitude and latitude, where their names do not say so.
    chunk_points
        Points in a chunk, at least 1; the last one has what is left.

    Raises
    ------
    DataError
        While iterating, with the first cell, row or feature that is wrong: columns are missing or there
        twice, a row is empty, a coordinate is not a finite number or out of range, a weight is negative; at
        the end, if there are no points, or all their weights are zero. The chunks before have been yielded
        by then.
    SpecError
        If `chunk_points` is not positive.
    """
    if chunk_points < 1:
        raise SpecError(f"chunk_points: must be at least 1, got {chunk_points}")
    pieces = _READERS[format_of(path)](path, weights=weights, extra=extra, columns=columns)
    return even_chunks(pieces, chunk_points, path)


def read_points(path: Path, *, weights: bool = True, columns: PointColumns = BY_NAME) -> PointChunk:
    """Read all points of a file; see :func:`point_chunks`."""
    return joined(list(point_chunks(path, weights=weights, columns=columns)))
