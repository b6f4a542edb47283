"""Damaged files: whatever happens to a valid one, its reader takes it or says in one line where it is wrong.

Bytes are flipped, cut and doubled; parts of what the files hold are dropped, doubled, renamed, moved and
turned into something else. Messages name the file, and none of them is one of Python's.
"""

import gzip
import io
import json
import math
import random
import re
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import zarr

from mdpext_dask.auditors.foreign.read import read_foreign
from mdpext_dask.errors import MdpextError
from mdpext_dask.evaluation.attackers.districts import read_districts
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss_file import read_problem
from mdpext_dask.problem.population_raster import read_population
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import read_region
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.roads.read_network import read_roads
from tests.support.osm_files import convert, write_osm
from tests.support.towns import STREETS, TOWN

geopandas = pytest.importorskip("geopandas")
osmnx = pytest.importorskip("osmnx")
pytest.importorskip("osmium")
pyarrow = pytest.importorskip("pyarrow")

FEW, MANY = 8, 720
# What Python and its libraries say of their own affairs, and a message that is nothing but a name.
LEAKS = re.compile(
    r"Traceback|' object |NoneType|invalid literal|could not convert|argument |not subscriptable|unhashable|"
    r"unexpected keyword|' codec can|sys\.|<class|[a-z]Error\b|out of range for|index \d+ is out|"
    r"list indices|dtype\(|\bint\(\)|float\(\)|(file|\.\w+): '\w*'$|unpack|truth value"
)
# Where in a file something is wrong, and what may be wrong with all of it.
WHERE = re.compile(
    r"\b(line|row|node|edge|feature|way|relation|column|layer|array|geometry|lon|lat|points_km|probability|graph|"
    r"polygon|pixel|band|x|y|x_km|y_km|prior|loss_km|output_xy_km|zarr\.json)s?\b|'n[01]'"
)
WHOLE = re.compile(
    r"save (it|the file) as|not a readable|holds no|is not (a|valid)|not an \.npz|must be a|not a GeoJSON|"
    r"where on Earth|coordinate reference system|lies elsewhere|not numbers|cannot be read|needs columns|"
    r"\brecords\b|\bshape\b|says of itself|is empty"
)
JUNK = [
    "", " ", "x", "NaN", "-1", "1e999", "12,5", "0x1F", "None", "[1, 2]", "{}", "1" * 5000, "\0", "\x1b[31m",
    "Li\u00e8ge", "999999999999999999999", "true", "91", "-181",
]  # fmt: skip
VALUES = [None, True, -1, 0.5, 1e300, 10**30, "x", "", [], {}, [1], {"a": [None]}, float("inf"), 181]
Chance = random.Random


class Kind(NamedTuple):
    """A format: how a valid file is made, what may happen to what it holds, and who reads it."""

    make: Callable[[Path], object]
    change: Callable[[Path, Chance], object]
    read: Callable[[Path], object]
    # What is damaged, where it is not the file that is read.
    part: str = ""


# --- what may happen -------------------------------------------------------------------------------


def change_bytes(path: Path, chance: Chance) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 5])):
        first = chance.randrange(len(data) + 1)
        last = min(len(data), first + chance.choice([1, 1, 4, 100]))
        some = chance.randbytes(last - first)
        data[first:last] = chance.choice([b"", data[first:last] * 2, some, b"\xff", b"\n\n", b","])
    path.write_bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data) + 1)])])


def change_table(path: Path, chance: Chance) -> None:
    packed = path.suffix == ".gz"
    text = (gzip.decompress if packed else bytes)(path.read_bytes()).decode()
    rows = [line.split(",") for line in text.splitlines()]
    row = chance.choice(rows)
    place = chance.randrange(len(row))
    match chance.randrange(8):
        case 0:
            rows.remove(row)
        case 1:
            rows.insert(chance.randrange(len(rows) + 1), list(row))
        case 2:
            rows.insert(chance.randrange(len(rows) + 1), [""] * chance.choice([1, len(row)]))
        case 3:
            rows[0][place % len(rows[0])] = chance.choice([*JUNK, *rows[0]])
        case 4:
            for other in rows:
                del other[place : place + 1]
        case _:
            row[place : place + chance.choice([0, 1, 1, 1])] = [chance.choice(JUNK)]
    mark = chance.choice([",", ",", ",", ",", ";", "\t"])
    text = "\n".join(mark.join(row) for row in rows)
    data = text.encode(chance.choice(["utf-8"] * 5 + ["latin-1", "utf-16"]), errors="replace")
    path.write_bytes(gzip.compress(data) if packed else data)


def change_json(path: Path, chance: Chance) -> None:
    """Change one value somewhere, or the key that it has."""
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    document = json.loads(lines[number])
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in items:
            places.append((value, key))
            walk(item)

    walk(document)
    holder, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(JUNK)] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), holder[key])
        case _:
            holder[key] = chance.choice(VALUES)
    lines[number] = json.dumps(document)
    path.write_text("\n".join(lines))


def change_json_whole(path: Path, chance: Chance) -> None:
    """Change one value of a document that is written over several lines."""
    path.write_text(json.dumps(json.loads(path.read_text())))
    change_json(path, chance)


def change_xml(path: Path, chance: Chance) -> None:
    tree = ElementTree.parse(path)
    element = chance.choice([*tree.getroot().iter()])
    parents = {child: parent for parent in tree.getroot().iter() for child in parent}
    attribute = chance.choice([*element.attrib, "k"])
    words = [word for word in JUNK if word.isprintable()]
    match chance.randrange(7):
        case 0 if element in parents:
            parents[element].remove(element)
        case 1 if element in parents:
            parents[element].append(element)
        case 2:
            element.tag = chance.choice(["node", "edge", "graph", "way", "nd", "data", "key", "x"])
        case 3:
            element.attrib.pop(attribute, None)
        case 4:
            element.set("k", chance.choice(words))
        case 5:
            element.text = chance.choice(words)
        case _:
            element.set(attribute, chance.choice([*words, *map(str, range(5))]))
    tree.write(path)


def change_parquet(path: Path, chance: Chance) -> None:
    from pyarrow import parquet

    table = parquet.read_table(path)
    place = chance.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place).to_pylist()
    match chance.randrange(5):
        case 0:
            table = table.drop_columns([name])
        case 1:
            names = list(table.column_names)
            names[place] = chance.choice([*JUNK, *names])
            table = table.rename_columns(names)
        case 2:
            table = table.append_column(name, table.column(place))
        case 3:
            column[chance.randrange(len(column))] = None
            table = table.set_column(place, name, pyarrow.array(column))
        case _:
            new = chance.choice([None, True, "x", 2**62, float("nan"), [1.0], {"x": 1.0, "y": 2.0}, b"\x01"])
            table = table.set_column(place, name, pyarrow.array([new] * len(column)))
    parquet.write_table(table, path)


def change_layers(path: Path, chance: Chance) -> None:
    """Change cells, columns and tables of a GeoPackage, behind the back of GDAL."""
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA writable_schema = ON")
        base.execute("DELETE FROM sqlite_master WHERE type = 'trigger'")
    base.close()
    base = sqlite3.connect(path)
    tables = [name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    own = [name for name in tables if not name.startswith(("rtree", "sqlite", "gpkg"))]
    table = chance.choice([*own, *own, *own, "gpkg_contents", "gpkg_geometry_columns"])
    column = chance.choice([row[1] for row in base.execute(f'PRAGMA table_info("{table}")')])
    try:
        match chance.randrange(5):
            case 0:
                base.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            case 1:
                base.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "other"')
            case 2:
                base.execute(f'DELETE FROM "{table}" WHERE rowid = 1')
            case _:
                value = chance.choice([None, "x", "", -1, 0.5, 10**18, b"\x00", "12,5"])
                base.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid <= 2', (value,))
        base.commit()
    except sqlite3.Error:
        base.rollback()
    base.close()


def change_arrays(path: Path, chance: Chance) -> None:
    with np.load(path) as archive:
        arrays = dict(archive)
    name = chance.choice([*arrays])
    match chance.randrange(4):
        case 0:
            del arrays[name]
        case 1:
            arrays[chance.choice(["x", "lon", "weights", name.upper()])] = arrays.pop(name)
        case 2:
            kind = chance.choice(["U8", "?", "i8", "f2", "c16", "datetime64[s]"])
            with warnings.catch_warnings(action="ignore"):
                arrays[name] = arrays[name].astype(kind)
        case _:
            with np.errstate(all="ignore"):
                shapes = [arrays[name][:1], arrays[name].ravel(), arrays[name][None], arrays[name] * np.nan]
                arrays[name] = chance.choice([*shapes, np.zeros(0), np.float64(3), -arrays[name]])
    np.savez(path, **arrays)


def change_rows(path: Path, chance: Chance) -> None:
    rows = np.load(path)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        rows = chance.choice(
            [rows[:1], rows.ravel(), rows[None], rows.T[:2], rows * np.nan, rows.astype("U8"), rows > 0,
             rows.astype("c16"), rows.astype(">f8"), np.zeros(0), np.asfortranarray(rows), rows.astype("f2"),
             rows.view([("a", "f8")])]
        )  # fmt: skip
    np.save(path, rows)


def change_raster(path: Path, chance: Chance) -> None:
    import rasterio

    with rasterio.open(path) as file:
        values, profile = file.read(), dict(file.profile)
    match chance.randrange(6):
        case 0:
            values[0, 1, 1] = chance.choice([np.nan, np.inf, -1.0, 1e300])
        case 1:
            values = np.concatenate([values, values])
        case 2:
            profile["crs"] = chance.choice([None, 3857, 4978, 32633])
        case 3:
            profile["dtype"] = chance.choice(["uint8", "complex64", "int16", "float32"])
        case 4:
            size = chance.choice([0.0, 1e-12, -0.1, 1e9, math.inf])
            profile["transform"] = rasterio.Affine(size, 0, 12.0, 0, -size, 42.5)
        case _:
            profile["nodata"] = chance.choice([0.0, 1.0, float("nan")])
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        profile["count"] = len(values)
        with rasterio.open(path, "w", **profile) as file:
            file.write(values.astype(profile["dtype"]))


# --- valid files -----------------------------------------------------------------------------------

POINTS = [(12.1, 42.1, 1.0, "a"), (12.2, 42.3, 2.5, "b"), (12.4, 42.2, 3.0, "c")]
SQUARE = [[12.0, 42.0], [12.5, 42.0], [12.5, 42.5], [12.0, 42.5], [12.0, 42.0]]
PLACE: Any = SimpleNamespace(grid=Grid(-9.0, -9.0, 6, 6, 3.0, (2,)), projection=Projection(12.2, 42.2))


def frame() -> Any:
    import shapely

    lon, lat, weight, user = zip(*POINTS, strict=True)
    return geopandas.GeoDataFrame(
        {"weight": weight, "user": user}, geometry=shapely.points(lon, lat), crs=4326
    )


def table_text() -> str:
    return "lon,lat,weight,user\n" + "".join(",".join(map(str, point)) + "\n" for point in POINTS)


def features(path: Path, geometries: list[Any], *, lines: bool = False) -> None:
    listed = [
        {"type": "Feature", "properties": {"weight": 1.5, "name": f"n{k}"}, "geometry": geometry}
        for k, geometry in enumerate(geometries)
    ]
    whole = [json.dumps({"type": "FeatureCollection", "features": listed})]
    path.write_text("\n".join(map(json.dumps, listed) if lines else whole))


PLACES = [{"type": "Point", "coordinates": point[:2]} for point in POINTS]
AREAS = [
    {"type": "Polygon", "coordinates": [SQUARE]},
    {"type": "MultiPolygon", "coordinates": [[[[x + 1, y] for x, y in SQUARE]]]},
]


def town_of(path: Path) -> Any:
    return osmnx.graph_from_xml(write_osm(path.with_name("town.osm"), TOWN, STREETS))


def folder(path: Path) -> None:
    path.mkdir(exist_ok=True)
    nodes = "id,lon,lat\n1,12,42\n2,12.01,42\n3,12.02,42\n"
    edges = "u,v,length_m,oneway\n1,2,900,0\n2,3,900.5,1\n3,1,1800,0\n"
    for name, text in (("nodes.csv.gz", nodes), ("edges.csv.gz", edges)):
        (path / name).write_bytes(gzip.compress(text.encode()))


ROWS = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])


def rows_text() -> str:
    rows = (f"{k},{k + 0.5},{a},{b},{c}\n" for k, (a, b, c) in enumerate(ROWS))
    return "x_km,y_km,a,b,c\n" + "".join(rows)


def loss(path: Path) -> None:
    x = np.arange(3.0)
    outputs = np.array([[0.5, 0.5], [1.5, 1.0]])
    np.savez(path, x_km=x, y_km=x, output_xy_km=outputs, loss_km=np.ones((3, 3, 2)), prior=np.ones((3, 3)))


def raster(path: Path) -> None:
    import rasterio

    where = rasterio.Affine(0.05, 0, 12.0, 0, -0.05, 42.45)
    with rasterio.open(
        path, "w", driver="GTiff", width=8, height=10, count=1, dtype="float64", crs=4326, transform=where
    ) as file:
        file.write(np.arange(80.0).reshape(1, 10, 8))


def town_in_pbf(path: Path) -> None:
    convert(write_osm(path.with_name("town.osm"), TOWN, STREETS), path)


def areas(path: Path) -> None:
    import shapely

    shapes = [shapely.Polygon(SQUARE), shapely.Polygon([(x + 1, y) for x, y in SQUARE])]
    geopandas.GeoDataFrame({"name": ["a", "b"]}, geometry=shapes, crs=4326).to_file(path)


def rows_in_zarr(path: Path) -> None:
    group = zarr.create_group(path, overwrite=True)
    for name, values in (("probability", ROWS), ("x_km", ROWS[:, 0]), ("y_km", ROWS[:, 1])):
        group.create_array(name, data=values)


def districts(path: Path) -> object:
    return read_districts(PLACE, path, "name")


def beside_points(path: Path) -> object:
    points = path.with_name("points.csv")
    points.write_text("x_km,y_km\n0,0\n1,0\n0,2\n")
    return read_foreign(str(path), points, path.parent / "scratch")


def with_weights(path: Path) -> object:
    return read_points(path)


def roads(path: Path) -> object:
    return read_roads(str(path), None)


def foreign(path: Path) -> object:
    return read_foreign(str(path), None, path.parent / "scratch")


def as_parquet(text: str, path: Path) -> None:
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(io.BytesIO(text.encode())), path)


KINDS = {
    "points.csv": Kind(lambda path: path.write_text(table_text()), change_table, with_weights),
    "points.parquet": Kind(lambda path: as_parquet(table_text(), path), change_parquet, with_weights),
    "places.geoparquet": Kind(lambda path: frame().to_parquet(path), change_parquet, with_weights),
    "points.geojson": Kind(lambda path: features(path, PLACES), change_json, with_weights),
    "points.geojsonl": Kind(lambda path: features(path, PLACES, lines=True), change_json, with_weights),
    "points.gpkg": Kind(lambda path: frame().to_file(path, driver="GPKG"), change_layers, with_weights),
    "nodes": Kind(folder, change_table, roads, "nodes.csv.gz"),
    "edges": Kind(folder, change_table, roads, "edges.csv.gz"),
    "town.osm": Kind(lambda path: write_osm(path, TOWN, STREETS), change_xml, roads),
    "roads.graphml": Kind(lambda path: osmnx.save_graphml(town_of(path), path), change_xml, roads),
    "streets.graphml": Kind(
        lambda path: osmnx.save_graphml(osmnx.convert.to_undirected(town_of(path)), path), change_xml, roads
    ),
    "roads.gpkg": Kind(lambda path: osmnx.save_graph_geopackage(town_of(path), path), change_layers, roads),
    "region.geojson": Kind(
        lambda path: features(path, AREAS), change_json, lambda path: read_region(str(path))
    ),
    "districts.geojson": Kind(lambda path: features(path, AREAS), change_json, districts),
    "rows.csv": Kind(lambda path: path.write_text(rows_text()), change_table, foreign),
    "rows.parquet": Kind(lambda path: as_parquet(rows_text(), path), change_parquet, foreign),
    "rows.npz": Kind(
        lambda path: np.savez(path, probability=ROWS, points_km=ROWS[:, :2]), change_arrays, foreign
    ),
    "rows.npy": Kind(lambda path: np.save(path, ROWS), change_rows, beside_points),
    "rows.zarr": Kind(rows_in_zarr, change_json_whole, foreign, "probability/zarr.json"),
    "chunks.zarr": Kind(rows_in_zarr, change_bytes, foreign, "probability/c/0/0"),
    "root.zarr": Kind(rows_in_zarr, change_json_whole, foreign, "zarr.json"),
    "people.tif": Kind(
        raster, change_raster, lambda path: read_population(path, PLACE.grid, PLACE.projection)
    ),
    "town.osm.pbf": Kind(town_in_pbf, change_bytes, roads),
    "areas.shp": Kind(areas, change_bytes, lambda path: read_region(str(path))),
    "names.shp": Kind(areas, change_bytes, districts, "names.dbf"),
    "index.shp": Kind(areas, change_bytes, districts, "index.shx"),
    "where.shp": Kind(areas, change_bytes, districts, "where.prj"),
    "loss.npz": Kind(loss, change_arrays, lambda path: read_problem(str(path)).read_loss()),
}


@pytest.mark.parametrize("tries", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_damaged_files_are_read_or_refused_in_a_line_with_their_name(
    tmp_path: Path, name: str, tries: int
) -> None:
    kind, path = KINDS[name], tmp_path / name
    kind.make(path)
    kind.read(path)
    part = path / kind.part if path.is_dir() or not kind.part else path.with_name(kind.part)
    valid = part.read_bytes()
    refused = 0
    for seed in range(tries):
        chance = Chance(f"{name} {seed}")
        part.write_bytes(valid)
        (change_bytes if chance.random() < 0.4 else kind.change)(part, chance)
        try:
            kind.read(path)
        except MdpextError as error:
            message, refused = str(error), refused + 1
            rest = message.replace(str(path), "")
            assert WHERE.search(rest) or WHOLE.search(rest), (seed, message)
            assert str(path) in message, (seed, message)
            assert message.isprintable(), (seed, message)
            assert not LEAKS.search(message.replace(str(tmp_path), "")), (seed, message)
        except Exception as error:
            raise AssertionError(f"{seed}: {type(error).__name__}: {error}") from error
    assert refused > tries / 10
