"""Points from files: the same from every format, in chunks of any size, and what is wrong is named."""

import bz2
import gzip
import json
import lzma
import os
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import geopandas
import numpy as np
import pyarrow as pa
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.readers import point_geojson, point_tables, tables
from mdpext_dask.readers.point_chunks import PointChunk, PointColumns
from mdpext_dask.readers.point_files import format_of, point_chunks, read_points
from tests.support.refusals import refusal as refusal_of

Rows = list[tuple[float, float, float]]
LONS, LATS, WEIGHTS = st.floats(-180, 180), st.floats(-90, 90), st.floats(1e-9, 1e9)


def feature(lon: Any, lat: Any, **properties: Any) -> dict[str, Any]:
    geometry = {"type": "Point", "coordinates": [lon, lat]}
    return {"type": "Feature", "properties": properties, "geometry": geometry}


def collection(*features: Any, **members: Any) -> str:
    return json.dumps({"type": "FeatureCollection", **members, "features": list(features)})


def save_csv(path: Path, rows: Rows) -> None:
    path.write_text("weight,lon,lat\n" + "".join(f"{w!r},{a!r},{b!r}\n" for a, b, w in rows))


def save_parquet(path: Path, rows: Rows) -> None:
    lon, lat, weight = zip(*rows, strict=True)
    parquet.write_table(pa.table({"lat": lat, "weight": weight, "lon": lon}), path, row_group_size=3)


def save_geoparquet(path: Path, rows: Rows) -> None:
    frame(rows).to_parquet(path)


def save_geoarrow(path: Path, rows: Rows) -> None:
    frame(rows).to_parquet(path, geometry_encoding="geoarrow", schema_version="1.1.0")


def frame(rows: Rows, crs: Any = "EPSG:4326") -> Any:
    lon, lat, weight = zip(*rows, strict=True)
    return geopandas.GeoDataFrame({"weight": weight}, geometry=shapely.points(lon, lat), crs=crs)


def save_geojson(path: Path, rows: Rows) -> None:
    path.write_text(collection(*(feature(a, b, weight=w) for a, b, w in rows)))


def save_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(feature(a, b, weight=w)) + "\n" for a, b, w in rows))


FORMATS: dict[str, Callable[[Path, Rows], None]] = {
    "p.csv": save_csv, "p.parquet": save_parquet, "p.pq": save_geoarrow, "p.geoparquet": save_geoparquet,
    "p.geojson": save_geojson, "p.geojsonl": save_lines,
    "p.gpkg": lambda path, rows: frame(rows).to_file(path, layer="points", driver="GPKG"),
}  # fmt: skip


def refusal(path: Path, *, weights: bool = True, **options: Any) -> str:
    """Return what a refusal says after the name of the file."""
    message = refusal_of(lambda: list(point_chunks(path, weights=weights, **options)))
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def refused(path: Path, content: str | bytes, **options: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return refusal(path, **options)


def refused_table(path: Path, table: pa.Table, **options: Any) -> str:
    parquet.write_table(table, path)
    return refusal(path, **options)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (point_tables, point_geojson):
        monkeypatch.setattr(module, "PIECE_ROWS", 3)


# --- the same points from every format -------------------------------------------------------------


@given(rows=st.lists(st.tuples(LONS, LATS, WEIGHTS), min_size=1, max_size=8), data=st.data())
def test_formats_agree(tmp_path_factory: pytest.TempPathFactory, rows: Rows, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(FORMATS)))
    path = tmp_path_factory.getbasetemp() / name
    FORMATS[name](path, rows)
    points = read_points(path)
    expected = np.array(rows)
    # As bytes, so that a zero keeps its sign.
    assert points.coordinates.tobytes() == np.ascontiguousarray(expected[:, :2]).tobytes()
    assert points.weight.tobytes() == np.ascontiguousarray(expected[:, 2]).tobytes()
    assert not points.planar
    np.testing.assert_array_equal(read_points(path, weights=False).weight, np.ones(len(rows)))


@pytest.mark.parametrize("pair", [("lng", "lat"), ("Longitude", "LATITUDE"), ("Long", "Lat"), ("LON", "lat")])
@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.pq"])
def test_columns_may_be_called_otherwise(tmp_path: Path, name: str, pair: tuple[str, str]) -> None:
    table = pa.table({pair[1]: [2.5, 5], "Weight": [3, 6], "x": [0, 0], pair[0]: [1.0, 4]})
    save_table(tmp_path / name, table)
    points = read_points(tmp_path / name)
    assert (points.coordinates.tolist(), points.weight.tolist()) == ([[1, 2.5], [4, 5]], [3, 6])
    named = read_points(tmp_path / name, columns=PointColumns("x", pair[1]))
    assert named.coordinates.tolist() == [[0, 2.5], [0, 5]]
    other = read_points(tmp_path / name, columns=PointColumns(lat="x"))
    assert other.coordinates.tolist() == [[1, 0], [4, 0]]
    message = refusal(tmp_path / name, columns=PointColumns("north"))
    assert message.startswith("column north is missing; found ")


def save_table(path: Path, table: pa.Table) -> None:
    (csv.write_csv if path.suffix == ".csv" else parquet.write_table)(table, path)


def test_named_columns_count_for_more_than_the_plane(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("x_km,y_km,a,b\n1,2,3,x\n")
    message = refusal(tmp_path / "p.csv", columns=PointColumns("a", "b"))
    assert message == "line 2: b 'x' is not a finite number"
    save_geojson(tmp_path / "p.geojson", [(1, 2, 3)])
    assert "leave out the columns a, b" in refusal(tmp_path / "p.geojson", columns=PointColumns("a", "b"))


def test_weights_are_not_read_where_they_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("lon,lat,weight\n180,90,heavy\n-180,-90,\n")
    assert read_points(tmp_path / "p.csv", weights=False).weight.tolist() == [1, 1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 100])
@pytest.mark.usefixtures("small_pieces")
def test_the_size_of_chunks_changes_nothing(tmp_path: Path, name: str, size: int) -> None:
    rows = [(float(k), -float(k), k + 0.5) for k in range(8)]
    FORMATS[name](tmp_path / name, rows)
    chunks = list(point_chunks(tmp_path / name, weights=True, extra=("weight",), chunk_points=size))
    assert [len(chunk) for chunk in chunks] == [min(size, 8 - k) for k in range(0, 8, size)]
    assert [chunk.first_row for chunk in chunks] == list(range(0, 8, size))
    np.testing.assert_array_equal(np.concatenate([c.coordinates for c in chunks]), np.array(rows)[:, :2])
    assert np.concatenate([c.weight for c in chunks]).tolist() == [row[2] for row in rows]
    assert np.concatenate([c.extra["weight"] for c in chunks]).tolist() == [str(row[2]) for row in rows]


def test_no_chunk_is_empty(tmp_path: Path) -> None:
    save_csv(tmp_path / "p.csv", [(1, 2, 3)])
    path = tmp_path / "p.csv"
    refusal_of(lambda: point_chunks(path, weights=True, chunk_points=0), "at least 1", kind=SpecError)


@pytest.mark.parametrize("pack", [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("name", ["p.csv", "p.geojson", "p.geojsonl"])
def test_text_may_be_packed(tmp_path: Path, name: str, pack: tuple[str, Callable[[bytes], bytes]]) -> None:
    rows: Rows = [(1.25, 2, 3), (-4, 5.5, 6)]
    FORMATS[name](tmp_path / name, rows)
    packed = tmp_path / f"{name}{pack[0]}"
    packed.write_bytes(pack[1]((tmp_path / name).read_bytes()))
    np.testing.assert_array_equal(read_points(packed).coordinates, np.array(rows)[:, :2])
    content = packed.read_bytes()
    for damaged in (content[:-12], content[:20] + bytes(8) + content[28:], (tmp_path / name).read_bytes()):
        assert "not a readable" in refused(packed, damaged)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "csv"), ("a", "csv"), ("a.txt", "csv"), ("a.geojson.csv", "csv"), ("a.gz", "csv"),
        ("A.PARQUET", "parquet"), ("a.GeoJSON", "geojson"), ("a.json.gz", "geojson"),
        ("a.ndjson", "geojson-lines"), ("a.geojsons.xz", "geojson-lines"),
    ],
)  # fmt: skip
def test_the_suffix_says_what_a_file_is(name: str, kind: str) -> None:
    assert format_of(Path(name)) == kind


def test_places_in_the_plane(tmp_path: Path) -> None:
    # In the plane lon and lat beside x and y do not count, whatever they are.
    (tmp_path / "p.csv").write_text("x_km,y_km,lon,lat\n-1000.5,2,x,\n3,4,,y\n")
    table = pa.table({"x_km": [-1000.5, 3], "y_km": [2, 4], "lon": ["x", ""], "lat": [None, 500]})
    parquet.write_table(table, tmp_path / "p.parquet")
    for name in ("p.csv", "p.parquet"):
        points = read_points(tmp_path / name)
        assert points.planar
        assert points.coordinates.tolist() == [[-1000.5, 2], [3, 4]]


def test_text_of_further_columns(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('lon,lat,user,n\n1,2,"a, ""b""",007\n3,4,,NA\n5,6\n')
    chunk = only(point_chunks(tmp_path / "p.csv", weights=False, extra=("user", "n", "lat")))
    assert {name: text.tolist() for name, text in chunk.extra.items()} == {
        "user": ['a, "b"', "", ""], "n": ["007", "NA", ""], "lat": ["2", "4", "6"],
    }  # fmt: skip
    table = pa.table({"lon": [1, 3], "lat": [2, 4], "user": ["a", None], "n": [7, None], "b": [True, False]})
    table = table.set_column(2, "user", table["user"].dictionary_encode())
    parquet.write_table(table, tmp_path / "p.parquet")
    chunk = only(point_chunks(tmp_path / "p.parquet", weights=False, extra=("user", "n", "b")))
    assert {name: text.tolist() for name, text in chunk.extra.items()} == {
        "user": ["a", ""], "n": ["7", ""], "b": ["true", "false"],
    }  # fmt: skip
    text = collection(feature(1, 2, user="ä", n=7, b=True), feature(3, 4, user=None, n=1.5, b=[1]))
    (tmp_path / "p.geojson").write_text(text)
    chunk = only(point_chunks(tmp_path / "p.geojson", weights=False, extra=("user", "n", "b")))
    assert {name: text.tolist() for name, text in chunk.extra.items()} == {
        "user": ["ä", ""], "n": ["7", "1.5"], "b": ["true", "[1]"],
    }  # fmt: skip


def only(chunks: Iterator[PointChunk]) -> PointChunk:
    (chunk,) = chunks
    return chunk


def test_a_number_may_come_with_more_than_it_needs(tmp_path: Path) -> None:
    text = collection({**feature(1, 2.5), "id": 3}, crs={"type": "name", "properties": {"name": "EPSG:4326"}})
    (tmp_path / "p.geojson").write_text("\ufeff" + text.replace("2.5]", "2.5, 700.25]"))
    assert read_points(tmp_path / "p.geojson").coordinates.tolist() == [[1, 2.5]]
    line = json.dumps(feature(1, 2.5))
    (tmp_path / "p.geojsons").write_bytes(b"\x1e" + line.encode() + b"\r\n\x1e" + line.encode() + b"\n\n")
    assert read_points(tmp_path / "p.geojsons").coordinates.tolist() == [[1, 2.5]] * 2
    (tmp_path / "p.csv").write_bytes(b'\xef\xbb\xbf"lon","lat" ,\r\n"1", 2.5,\r\n 3,"4.5" ,\r\n\r\n')
    assert read_points(tmp_path / "p.csv").coordinates.tolist() == [[1, 2.5], [3, 4.5]]


# --- what is wrong is named ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"), ("lon,lat\n", "holds no rows"), ("lon,lat\n\n \n", "holds no rows"),
        ("lon,lat\n1,2\n3,x\n", "line 3: lat 'x' is not a finite number"),
        ("lon,lat\n1,2\n'12,5',4\n", "line 3: a row has more fields"),
        ('lon,lat\n1,2\n"12,5",4\n', "line 3: lon '12,5' is not a finite number; looks like a decimal comma, "
         "write 12.5"),
        ("lon,lat\n12,5,41,9\n", "the header: 4, not 2; are these decimal commas?"),
        ("id\tlon\tlat\n1\t2\t3\n", "line 1: looks tab separated; save it with commas"),
        ("name,long,LNG,lat\n", "which column is lon? Found long, LNG; call the right one lon"),
        ("lon,lat\n1,2\n1,2,3\n", "line 3: a row has more fields than the header: 3, not 2"),
        ("lon,lat,lon\n1,2,3\n", "two columns have the name lon"),
        ("lon,lat\nTrue,1\n", "line 2: lon 'True' is not a finite number"),
        ('lon,lat,n\n1,2,"a\nb"\n1,,c\n', "line 4: lat '' is not a finite number"),
        ('lon,lat\n1,2\n"1,2\nend\n', "the quote of line 3 is not closed"),
        ('"lon,lat\n1,2', "quote of line 1"),
        ("lon,lat\n1,91\n", "line 2: lon 1, lat 91 is out of"),
        ("lon,lat,weight\n1,2,0\n", "all weights are zero"),
        ("lon,lat,weight\n1,2,-0.5\n1,x,2\n", "line 2: weight '-0.5' is negative"),
        ("lon,lat\n1,2\n".encode("utf-16"), "is in UTF-16; save it as UTF-8"),
        ("lon,lat\n1,2\n".encode("utf-16-be").join([b"\xfe\xff", b""]), "is in UTF-16"),
        (b"lon,lat,name\n1,2,x\n3,4,Li\xe8ge\n", "line 3: is not UTF-8: holds the byte 0xe8, as Latin-1"),
        ("lon,lat\n".encode("utf-16-le"), "line 1: is not text, or in UTF-16"),
        ("lat,x_km\n1,2\n", "needs columns lon,lat (degrees) or x_km,y_km; found lat, x_km"),
        ("\n lon;lat\n1;2\n", "line 2: looks semicolon separated"),
        ("lon,lat\n1,2\n3\n", "line 3: lat '' is not"),
        ("lon,lat\n0,0\n180.5,0\n", "line 3: lon 180.5, lat 0 is"), ("lon,lat\n-181,0\n", "lon -181, lat 0"),
        ("lon,lat\n0,-91\n", "lat -91 is"), ("lon,lat\n500000,4600000\n", "coordinates must be degrees"),
    ],
)  # fmt: skip
def test_csv_that_cannot_be(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refused(tmp_path / "p.csv", content)


@pytest.mark.parametrize("text", ["north", "NaN", "nan", "inf", "-Infinity", "", "1e999", "0x1F", "1_0"])
@pytest.mark.parametrize("column", ["lon", "lat", "weight"])
def test_cell_that_is_no_finite_number_is_named(tmp_path: Path, column: str, text: str) -> None:
    row = ",".join({"lon": "1", "lat": "2", "weight": "3", column: f'"{text}"'}.values())
    message = refused(tmp_path / "p.csv", f"lon,lat,weight\n1,2,3\n{row}\n1,2,3\n")
    assert message == f"line 3: {column} {text!r} is not a finite number"


@given(values=st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1, max_size=20))
def test_large_integers_stay_exact(tmp_path_factory: pytest.TempPathFactory, values: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "ids.csv"
    path.write_text("id\n" + "".join(f"{value}\n" for value in values))
    assert tables.read_csv(path, ("id",)).integers("id").tolist() == values


@pytest.mark.parametrize("text", ["1.0", "1e3", "one", "nan", "", "1 2", "--1", "99999999999999999999"])
def test_first_cell_that_is_no_whole_number_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids.csv"
    path.write_text(f"id,more\n1,x\n{text},x\nworse,x\n")
    refusal_of(lambda: tables.read_csv(path, ("id",)).integers("id"), f"{path}: line 3: id {text!r} is not a")


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("name", "empty", "fatal"),
    [
        ("p.csv", "", False), ("p.csv", "  ", False), ("p.csv", ",,", True), ("p.csv", ' , "",', True),
        ("p.geojsonl", "", False), ("p.geojsonl", "\x1e", False),
    ],
)  # fmt: skip
def test_no_row_is_skipped(
    tmp_path: Path, monkeypatch: Any, name: str, empty: str, fatal: bool, pieces: int
) -> None:
    """In the midst it may be a point that was lost, and those behind it would get other numbers."""
    for module in (point_tables, point_geojson):
        monkeypatch.setattr(module, "PIECE_ROWS", pieces)
    FORMATS[name](tmp_path / name, [(1, 2, 3), (4, 5, 6), (7, 8, 9)])
    lines = (tmp_path / name).read_text().splitlines()
    for number in range(len(lines) - 2, len(lines)):
        torn = [*lines[:number], empty, empty, *lines[number:]]
        assert refused(tmp_path / name, "\n".join(torn)).startswith(f"line {number + 1}: is empty; take it")
    last = "\n".join([*lines, empty, empty])
    if fatal:
        assert refused(tmp_path / name, last).startswith(f"line {len(lines) + 1}: is empty; take it out")
    else:
        (tmp_path / name).write_text(last)
        assert len(read_points(tmp_path / name)) == 3


GOOD = feature(1, 2)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "holds no rows"), ([GOOD, {**GOOD, "geometry": None}], "feature 2: its geometry is missing"),
        ([GOOD, {**GOOD, "geometry": {"type": "LineString", "coordinates": [[1, 2], [3, 4]]}}],
         'feature 2: its geometry must be a Point, found "LineString"'),
        ([feature("1", 2)], 'feature 1: the coordinates must be [lon, lat], found ["1", 2]'),
        ([GOOD, feature(1, None)], "feature 2: the coordinates"),
        ([feature(True, 2)], "feature 1: the coord"),
        ([{**GOOD, "geometry": {"type": "Point", "coordinates": []}}], "feature 1: the coordinates"),
        ([GOOD, feature(181, 2)], "feature 2: lon 181, lat 2 is out of range"),
        ([GOOD, 5], "feature 2: is not"),
        ([feature(1, 2, weight=0)], "all weights are zero"), ([{"type": "Feature"}], "geometry is missing"),
        ([feature(1, 2, weight=1), feature(1, 2, weight=-1)], "feature 2: weight -1 is negative"),
        ([feature(1, 2, weight=1), feature(1, 2, weight="3")], 'feature 2: weight "3" is not a finite'),
        ([feature(1, 2, weight=1), feature(1, 2, weight=None)], "feature 2: weight null is not a"),
        ([feature(1, 2, weight=1), GOOD], "feature 2: has no weight, but"),
        ([GOOD, feature(1, 2, weight=1)], "feature 2: has a weight, but"),
        ([GOOD, {**GOOD, "properties": [1]}], "feature 2: its properties are not an object"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["p.geojson", "p.ndjson"])
def test_features_that_cannot_be(tmp_path: Path, name: str, features: list[Any], words: str) -> None:
    lines = "\n".join(map(json.dumps, features))
    assert words in refused(tmp_path / name, collection(*features) if name == "p.geojson" else lines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a readable GeoJSON file"), ("[1, 2]", "must be a FeatureCollection, found the type null"),
        (json.dumps(GOOD), 'must be a FeatureCollection, found the type "Feature"'),
        (collection(GOOD)[:-3], "not a readable GeoJSON file: somewhere after feature"),
        (collection(GOOD).replace("2]", "NaN]"), "somewhere after feature 0: lexical error: invalid char"),
        (collection(GOOD).replace("2]", "1e999]"), "overflow"), (collection(GOOD) + "x", "trailing garbage"),
        (collection(GOOD).encode("utf-16"), "is in UTF-16"),
        ('{"a":' * 5000, "objects in objects without end"),
        (b'{"type": "\xff"}', "not a readable GeoJSON file: somewhere after feature 0: is not UTF-8"),
        (collection(GOOD, crs={"type": "name", "properties": {"name": "EPSG:32633"}}), "has the crs WGS 84"),
        (collection(GOOD, crs={"type": "name", "properties": {"name": "nowhere"}}), "system is not known"),
        (collection(GOOD, crs={"type": "link"}), "system is not known"),
        (collection(GOOD, crs=None), "unknown"),
    ],
)  # fmt: skip
def test_geojson_that_cannot_be(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refused(tmp_path / "p.geojson", content)


@pytest.mark.parametrize("name", ["EPSG:4326", "urn:ogc:def:crs:OGC:1.3:CRS84", "OGC:CRS84"])
def test_degrees_may_be_named(tmp_path: Path, name: str) -> None:
    document = collection(GOOD, crs={"type": "name", "properties": {"name": name}})
    (tmp_path / "p.geojson").write_text(document)
    assert read_points(tmp_path / "p.geojson").coordinates.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"type": "Feature"', "line 2: not JSON"), ("NaN", "line 2: not JSON: NaN is no number"),
        ("[" * 100_000, "line 2: not JSON"), ("1" * 5000, "line 2: not JSON"),
        (json.dumps(GOOD).replace("2]", "1e999]"), "feature 2: lat inf is not a finite number"),
        (json.dumps(GOOD).replace("2]", "1" * 400 + "]"), "feature 2: lat inf is not a finite number"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be(tmp_path: Path, line: str, words: str) -> None:
    assert words in refused(tmp_path / "p.geojsonl", f"{json.dumps(GOOD)}\n{line}\n")
    assert "is in UTF-16" in refused(tmp_path / "p.geojsonl", json.dumps(GOOD).encode("utf-16"))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"lon": [1.0], "northing": [2.0]}, "(degrees) or x_km,y_km; found lon, northing"),
        ({"lon": [1.0, None], "lat": [2, 3]}, "row 2: lon is missing"),
        ({"lon": ["1"], "lat": [2]}, "holds string"), ({"lon": [True], "lat": [2]}, "holds bool"),
        ({"lon": [1.0, np.nan], "lat": [2, 3]}, "row 2: lon nan is not a finite number"),
        ({"x_km": [1, 2], "y_km": [3, np.inf]}, "row 2: y_km inf is not a finite number"),
        ({"lon": [1, 2], "lat": [3, -90.5]}, "row 2: lon 2, lat -90.5 is out of range"),
        ({"lon": [1, 2], "lat": [3, 4], "weight": [1, -2]}, "row 2: weight -2 is negative"),
        ({"lon": [1, 2], "lat": [3, 4], "weight": [0, 0]}, "all weights are zero"),
        ({"x_km": [1, 2**60 + 1], "y_km": [3, 4]}, "column x_km"),
        ({"x_km": [None], "y_km": [1]}, "holds null"),
        ({"x_km": np.zeros(0), "y_km": np.zeros(0)}, "holds no rows"),
    ],
)  # fmt: skip
def test_parquet_that_cannot_be(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    assert words in refused_table(tmp_path / "p.parquet", pa.table(columns))


@pytest.mark.usefixtures("small_pieces")
def test_rows_are_counted_through_the_whole_file(tmp_path: Path) -> None:
    rows = [(1.0, 2.0, 1.0)] * 10 + [(1.0, 99.0, 1.0)]
    for name, where in (("p.csv", "line 12"), ("p.parquet", "row 11"), ("p.geojsonl", "feature 11")):
        FORMATS[name](tmp_path / name, rows)
        assert refusal(tmp_path / name).startswith(f"{where}: lon 1, lat 99")


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (shapely.Point(1, 99), "row 2: lon 1, lat 99 is out of range"),
        (None, "row 2: its geometry is missing"),
        (shapely.Point(), "row 2: its geometry is missing"),
        (shapely.LineString([(0, 0), (1, 1)]), "is a LineString, not a Point"),
    ],
)  # fmt: skip
def test_geoparquet_that_cannot_be(tmp_path: Path, geometry: Any, words: str) -> None:
    table = geopandas.GeoDataFrame({"n": [1, 2]}, geometry=[shapely.Point(1, 2), geometry], crs=4326)
    table.to_parquet(tmp_path / "p.parquet")
    assert words in refusal(tmp_path / "p.parquet")


def test_geometry_that_cannot_be_read(tmp_path: Path) -> None:
    frame([(1, 2, 3), (4, 5, 6)]).to_parquet(tmp_path / "p.parquet")
    table = parquet.read_table(tmp_path / "p.parquet")
    place = table.schema.get_field_index("geometry")
    for cells, words in (
        ([b"\x01\x01\x00", table["geometry"][1].as_py()], "row 1: its geometry is what cannot be read"),
        ([[1.0, 2.0], [3.0]], "its geometry is list<element: double>, which is no Point"),
        ([{"a": 1.0}, {"a": 2.0}], "which is no Point"),
    ):
        changed = table.set_column(place, "geometry", pa.array(cells))
        assert words in refused_table(tmp_path / "p.parquet", changed)


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (shapely.Point(1, 99), "feature 2: lon 1, lat 99 is out of range"),
        (None, "feature 2: its geometry is missing"),
        (shapely.LineString([(0, 0), (1, 1)]), "feature 2: its geometry is a LineString, not a Point"),
    ],
)
def test_geopackages_that_cannot_be(tmp_path: Path, geometry: Any, words: str) -> None:
    table = geopandas.GeoDataFrame({"n": [1, 2]}, geometry=[shapely.Point(1, 2), geometry], crs=4326)
    table.to_file(tmp_path / "p.gpkg", driver="GPKG")
    assert words in refusal(tmp_path / "p.gpkg")
    frame([(1, 2, 3)]).to_file(tmp_path / "p.gpkg", layer="more", driver="GPKG")
    assert refusal(tmp_path / "p.gpkg").startswith("must have one layer, found p, more;")


def test_geopackages_may_be_in_any_system(tmp_path: Path) -> None:
    frame([(15.5, 42.25, 3)]).to_crs(32633).to_file(tmp_path / "p.gpkg", driver="GPKG")
    np.testing.assert_allclose(read_points(tmp_path / "p.gpkg").coordinates, [[15.5, 42.25]], atol=1e-9)


def test_places_in_other_systems_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    frame([(1, 2, 3)], crs=32633).to_parquet(path)
    assert "has the crs WGS 84 / UTM zone 33N; coordinates must be degrees" in refusal(path)
    frame([(1, 2, 3)], crs=None).to_parquet(path)
    assert "has the crs unknown" in refusal(path)
    named = '{"primary_column": "a", "columns": {"a": 1}}'
    for geo in ("{}", "{", "[1]", '{"primary_column": [], "columns": {}}', named):
        table = pa.table({"a": [1]}).replace_schema_metadata({b"geo": geo.encode()})
        assert "says that it is GeoParquet, but not" in refused_table(path, table)


def test_further_columns_must_be_there(tmp_path: Path) -> None:
    for name in ("p.csv", "p.parquet"):
        FORMATS[name](tmp_path / name, [(1, 2, 3)])
        assert refusal(tmp_path / name, extra=("user",)).startswith("column user is missing; found ")
    message = refused(tmp_path / "p.geojson", collection(feature(1, 2, user=1), GOOD), extra=("user",))
    assert message == "feature 2: has no property user; found none"
    table = pa.table({"lon": [1], "lat": [2], "user": [[1, 2]]})
    assert "column user holds list" in refused_table(tmp_path / "p.parquet", table, extra=("user",))


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.geojson", "p.geojsonl"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path / name) == "no such file"
    (tmp_path / name).mkdir()
    assert refusal(tmp_path / name)
    (tmp_path / name).rmdir()
    assert refused(tmp_path / name, bytes(range(256)))


# --- fast and careful ------------------------------------------------------------------------------

CELLS = st.one_of(
    st.floats(-90, 90).map(repr),
    st.sampled_from(
        ["1", "-0", "+7", " 2", "3 ", "4.", ".5", "1e1", "1E-400", "", " ", "x", "nan", "inf", "True", "0x1F",
         "1_0", "1e999", "-1", '"5"', '"6" ', "91", "181", "99999999999999999999",
         "1 2", "\u0661", "NA", "1,2", "'1'"]
    ),
)  # fmt: skip


def outcome(path: Path) -> Any:
    try:
        chunks = list(point_chunks(path, weights=True, extra=("n",)))
    except DataError as error:
        return str(error)
    return [(c.coordinates.tolist(), c.weight.tolist(), c.extra["n"].tolist()) for c in chunks]


@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS), max_size=5))
@settings(max_examples=100)
def test_fast_equals_careful(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]) -> None:
    path = tmp_path_factory.getbasetemp() / "both.csv"
    path.write_text("lon,lat,n,weight\n" + "".join(",".join(row) + "\n" for row in rows))
    fast = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_tables, "_parsed_pieces", lambda *_: nothing())
        assert outcome(path) == fast


def nothing() -> Iterator[Any]:
    return (0, False)
    yield


@pytest.mark.usefixtures("small_pieces")
def test_where_the_fast_way_ends_the_careful_way_goes_on(tmp_path: Path) -> None:
    lines = [f"{k},{k}" for k in range(20)]
    lines[11] = '"11" ,11'  # which pandas takes for text
    (tmp_path / "p.csv").write_text("lon,lat\n" + "\n".join(lines))
    for size in (1, 2, 5, 100):
        chunks = list(point_chunks(tmp_path / "p.csv", weights=False, chunk_points=size))
        assert np.concatenate([c.coordinates for c in chunks])[:, 0].tolist() == list(range(20))
        assert [c.first_row for c in chunks] == list(range(0, 20, size))


def test_plain_files_are_read_the_fast_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Iterator[tables.CsvPiece]:
        raise AssertionError("read cell by cell")

    monkeypatch.setattr(tables.CsvFile, "pieces", never)
    (tmp_path / "p.csv").write_text("id,Lon,latitude,WEIGHT\na,1,2.5,1\nb,3,-4e-1,0\n")
    assert read_points(tmp_path / "p.csv").coordinates.tolist() == [[1, 2.5], [3, -0.4]]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("lon,lat\n1,2\n3,4\n",))
    writer.start()
    try:
        assert read_points(pipe).coordinates.tolist() == [[1, 2], [3, 4]]
    finally:
        writer.join(timeout=10)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["p.csv", *(pytest.param(case, marks=pytest.mark.slow) for case in ["p.geojson", "p.geojsonl"])]
)
def test_memory_is_independent_of_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (point_tables, point_geojson):
        monkeypatch.setattr(module, "PIECE_ROWS", 1000)

    def peak(count: int) -> int:
        FORMATS[name](tmp_path / name, [(k / count, 1 / (k + 3), 1.0) for k in range(count)])
        tracemalloc.start()
        try:
            sizes = [len(c) for c in point_chunks(tmp_path / name, weights=True, chunk_points=1000)]
            assert sizes == [1000] * (count // 1000)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1000)  # imports are not what is measured
    assert peak(8000) < 1.5 * peak(2000) + (1 << 20)


def test_arrow_holds_no_more_than_a_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_tables, "PIECE_ROWS", 1000)
    rows = np.random.default_rng(0).random((2, 400_000))
    table = pa.table({"lon": rows[0], "lat": rows[1]})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=20_000, use_dictionary=False)
    del table
    before = pa.total_allocated_bytes()
    most = 0
    for chunk in point_chunks(tmp_path / "p.parquet", weights=True, chunk_points=1000):
        assert len(chunk) == 1000
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < rows.nbytes / 4


@pytest.mark.parametrize("name", ["p.xlsx", "p.SHP", "p.kml.gz"])
def test_what_is_named_a_spreadsheet_is_not_taken_for_csv(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("lon,lat\n1,2\n")
    refusal_of(
        lambda: read_points(tmp_path / name), "are CSV, Parquet, GeoJSON or GeoPackage, not", kind=SpecError
    )


def test_an_archive_holds_one_file(tmp_path: Path) -> None:
    """Of two, neither is skipped in silence."""
    path = tmp_path / "points.csv.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/", "")
        archive.writestr("folder/a.csv", "lon,lat\n1,2\n")
        archive.writestr("__MACOSX/folder/._a.csv", "Mac")
    assert read_points(path).coordinates.tolist() == [[1.0, 2.0]]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b.csv", "lon,lat\n3,4\n")
    assert refusal(path) == "holds 2 files; must hold one"


def test_an_archive_with_a_password_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.csv.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "lon,lat\n1,2\n")
    packed = bytearray(path.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(header) + flags] |= 1
    path.write_bytes(packed)
    message = refusal(path)
    assert "cannot be unpacked: " in message
    assert "password" in message
