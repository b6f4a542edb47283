"""Regions from shapefiles and GeoPackages: in whatever system, they are where they are on the ground."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from pyproj import Transformer

from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import Region, read_region
from tests.support.refusals import refusal

geopandas = pytest.importorskip("geopandas")
pytest.importorskip("pyogrio")

JobMaker = Callable[..., dict[str, dict[str, Any]]]
# A quadrangle in Manhattan with a hole.
_SHELL = [(-74.0, 40.72), (-73.95, 40.73), (-73.94, 40.78), (-73.99, 40.77), (-74.0, 40.72)]
_HOLE = [(-73.975, 40.745), (-73.965, 40.745), (-73.965, 40.755), (-73.975, 40.745)]
_PARK = shapely.Polygon(_SHELL, [_HOLE])


def _write(path: Path, *shapes: Any, crs: Any = "EPSG:4326", layer: str | None = None) -> Path:
    """Write shapes, given in degrees, in another system."""
    frame = geopandas.GeoDataFrame({"name": ["a"] * len(shapes)}, geometry=[*shapes], crs="EPSG:4326")
    frame = frame.to_crs(crs) if crs is not None else frame.set_crs(None, allow_override=True)
    frame.to_file(path, **{} if layer is None else {"layer": layer, "driver": "GPKG"})
    return path


def _zipped(path: Path) -> Path:
    packed = path.with_suffix(".zip")
    with zipfile.ZipFile(packed, "w") as archive:
        for part in path.parent.glob(path.stem + ".*"):
            if part != packed:
                archive.write(part, part.name)
    return packed


def _geojson(path: Path, shape: Any) -> Path:
    path.write_text(json.dumps(shape.__geo_interface__))
    return path


def _apart_km2(one: Region, other: Region) -> float:
    """Return the area of what only one of two regions holds, in the plane."""
    plane = Projection.centred_on(*one.box_degrees)
    left, right = (region._in_plane(plane) for region in (one, other))
    return float(shapely.symmetric_difference(left, right).area)


@pytest.mark.parametrize("crs", ["EPSG:4326", "EPSG:4269", "EPSG:32618", "EPSG:2263", "EPSG:3857"])
@pytest.mark.parametrize("kind", [".shp", ".zip", ".gpkg"])
def test_file_in_any_system_is_the_same_region(tmp_path: Path, crs: str, kind: str) -> None:
    """Degrees on two datums, UTM in metres, a state's plane in feet, Web Mercator."""
    expected = read_region(str(_geojson(tmp_path / "park.geojson", _PARK)))
    path = _write(tmp_path / f"park{'.gpkg' if kind == '.gpkg' else '.shp'}", _PARK, crs=crs)
    found = read_region(str(_zipped(path) if kind == ".zip" else path))
    assert shapely.area(expected.shape) > 0
    # A state plane's straight sides bulge by centimetres over a few kilometres; datums may differ by a metre.
    assert _apart_km2(expected, found) < 0.05
    assert found.notes == ()
    if crs == "EPSG:4326":
        assert shapely.equals(found.shape, expected.shape)


def test_sides_are_straight_in_their_own_system(tmp_path: Path) -> None:
    """Over 600 km along a parallel, straight in UTM is far from straight in degrees."""
    transform = Transformer.from_crs("EPSG:32633", "OGC:CRS84", always_xy=True).transform
    metres = shapely.box(200_000, 6_600_000, 800_000, 6_601_000)
    geopandas.GeoDataFrame(geometry=[metres], crs="EPSG:32633").to_file(tmp_path / "strip.gpkg")
    region = read_region(str(tmp_path / "strip.gpkg"))
    middle = transform(500_000, 6_600_500)
    corners = np.array([transform(*place) for place in metres.exterior.coords])
    assert shapely.contains_xy(region.shape, *middle)
    assert not shapely.contains_xy(shapely.Polygon(corners), *middle)


@pytest.mark.parametrize("crs", ["EPSG:4326", "EPSG:3460", "EPSG:3832"])
def test_file_across_the_antimeridian_is_the_same_region(tmp_path: Path, crs: str) -> None:
    """Taveuni, cut in degrees; in Fiji's own grid, and in one centred on the Pacific, it is whole."""
    west = shapely.Polygon([(179.9, -17.0), (180, -17.0), (180, -16.7), (179.9, -16.7), (179.9, -17.0)])
    east = shapely.Polygon([(-180, -17.0), (-179.9, -17.0), (-179.9, -16.7), (-180, -16.7), (-180, -17.0)])
    both = shapely.MultiPolygon([west, east])
    expected = read_region(str(_geojson(tmp_path / "cut.geojson", both)))
    assert expected.box_degrees == (179.9, -17.0, -179.9, -16.7)
    if crs == "EPSG:4326":
        path = _write(tmp_path / "taveuni.shp", both)
    else:
        transform = Transformer.from_crs("OGC:CRS84", crs, always_xy=True).transform
        ring = shapely.segmentize(shapely.box(179.9, -17.0, 180.1, -16.7), 0.01)
        whole = shapely.transform(ring, lambda xy: np.stack(transform(xy[:, 0], xy[:, 1]), axis=-1))
        path = tmp_path / "taveuni.gpkg"
        geopandas.GeoDataFrame(geometry=[whole], crs=crs).to_file(path)
    found = read_region(str(path))
    np.testing.assert_allclose(found.box_degrees, expected.box_degrees, atol=1e-5)
    assert _apart_km2(expected, found) < 0.02
    assert expected.shape.geom_type == "Polygon"  # nothing is left of the cut


def test_points_and_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gpkg"
    _write(path, _PARK, layer="park")
    _write(path, shapely.Point(-73.97, 40.75), shapely.Point(-73.96, 40.75), layer="trees")
    region = read_region(str(path))
    assert shapely.equals(region.shape, shapely.union_all([_PARK]))
    assert region.notes == (f"{path}: points and lines do not count; 2 left out",)


def test_several_layers_of_polygons_are_refused_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "two.gpkg"
    _write(path, _PARK, layer="park")
    _write(path, _PARK, layer="city")
    refusal(lambda: read_region(str(path)), "several layers hold polygons", "park", "city")


def test_shapefile_that_does_not_say_its_system_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "park.shp", _PARK, crs="EPSG:32618")
    path.with_suffix(".prj").unlink()
    refusal(lambda: read_region(str(path)), "coordinate reference system", ".prj")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: p.parent, "does not exist"), (lambda p: p.write_bytes(b""), "cannot be read"),
        (lambda p: p.write_bytes(b"no map" * 50), "cannot be read"), (lambda p: p.mkdir(), "does not exist"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "suffix", [".zip", *(pytest.param(case, marks=pytest.mark.slow) for case in [".shp", ".gpkg"])]
)
def test_bad_file(tmp_path: Path, small_job: Any, make: Callable[..., Any], named: str, suffix: str) -> None:
    path = tmp_path / f"region{suffix}"
    make(path)
    message = refusal(lambda: build_geometry(parse_job(small_job(domain={"region": str(path)}))))
    assert message.startswith("domain.region")
    assert named in message


def test_shapefile_enters_the_identity_with_its_projection(tmp_path: Path, small_job: JobMaker) -> None:
    path = _write(tmp_path / "park.shp", _PARK, crs="EPSG:32618")
    spec = parse_job(small_job(domain={"region": str(path)}))
    before = spec.fingerprint()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for part in tmp_path.glob("park.*"):
        shutil.copy(part, moved)
    assert parse_job(small_job(domain={"region": str(moved / "park.shp")})).fingerprint() == before
    prj = path.with_suffix(".prj")
    prj.write_text(prj.read_text().replace("-75.0", "-69.0"))
    assert spec.fingerprint() != before


@pytest.mark.parametrize("suffixes", [(".SHP", ".PRJ"), (".shp", ".PRJ")])
def test_so_it_does_in_capitals(tmp_path: Path, small_job: JobMaker, suffixes: tuple[str, str]) -> None:
    path = _write(tmp_path / "park.shp", _PARK, crs="EPSG:32618")
    shp, prj = (path.with_suffix(suffix.lower()).rename(path.with_suffix(suffix)) for suffix in suffixes)
    spec = parse_job(small_job(domain={"region": str(shp)}))
    before, place = spec.fingerprint(), read_region(str(shp)).box_degrees
    prj.write_text(prj.read_text().replace("-75.0", "-69.0"))
    assert read_region(str(shp)).box_degrees != place
    assert spec.fingerprint() != before


@pytest.mark.parametrize(
    ("shape", "crs", "words"),
    [
        (shapely.Point(-73.97, 40.75), 4326, "holds no polygons"),
        (shapely.Polygon([(-74, 40.7), (-73.9, 40.8), (-73.9, 40.7), (-74, 40.8)]), 4326, "is broken: Self"),
        (shapely.box(3e5, 4e6, 4e5, 5e6), 4326, "not on the Earth"),  # metres, said to be degrees
        # In degrees it would be a strip that leaves out the pole.
        (shapely.Point(0, 0).buffer(50_000), 3413, "around a pole"),
    ],
)
def test_what_is_no_region_is_refused(tmp_path: Path, shape: Any, crs: int, words: str) -> None:
    geopandas.GeoDataFrame(geometry=[shape], crs=crs).to_file(tmp_path / "a.gpkg")
    refusal(lambda: read_region(str(tmp_path / "a.gpkg")), words)
