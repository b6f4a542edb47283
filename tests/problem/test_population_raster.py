"""Priors from GeoTIFFs: people land on the records where they live, and none is lost."""

import math
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import shapely
from affine import Affine
from pyproj import Transformer

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem import population_raster
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.population_raster import read_population
from mdpext_dask.problem.projection import Projection
from tests.support.problems import JobMaker
from tests.support.refusals import refusal

LONLAT, UTM, MOLLWEIDE = "EPSG:4326", "EPSG:32633", "ESRI:54009"
PLANE = Projection(12.5, 41.9)
# Nine by nine records, half a kilometre apart.
GRID = Grid(-2.0, -2.0, 4, 4, 1.0, (2,))


def save(path: Path, values: Any, crs: str | None, transform: Affine | None, **profile: Any) -> Path:
    values = np.asarray(values)
    layers = values if values.ndim == 3 else values[None]
    options = {"driver": "GTiff", "crs": crs, "transform": transform, "dtype": layers.dtype, **profile}
    count, height, width = layers.shape
    with rasterio.open(path, "w", count=count, height=height, width=width, **options) as file:
        file.write(layers)
    return path


def pixels_around(crs: str, size: float, count: int, turned: float = 0.0) -> Affine:
    """Return the transform of `count` by `count` pixels of `size`, in the units of the crs, around PLANE."""
    east, north = Transformer.from_crs("OGC:CRS84", crs, always_xy=True).transform(12.5, 41.9)
    along, across = size * math.cos(math.radians(turned)), size * math.sin(math.radians(turned))
    a, b, d, e = along, across, across, -along
    return Affine(a, b, east - (a + b) * count / 2, d, e, north - (d + e) * count / 2)


def moved(transform: Affine, column: Any, row: Any) -> tuple[Any, Any]:
    """Return where in its crs a place of a raster is."""
    a, b, c, d, e, f = transform[:6]
    return a * column + b * row + c, d * column + e * row + f


def outlines(crs: str, transform: Affine, shape: tuple[int, int]) -> Any:
    """Return every pixel as a polygon in the plane, of shape `shape`."""
    rows, columns = (a.ravel() for a in np.indices((shape[0] + 1, shape[1] + 1)))
    east, north = moved(transform, columns, rows)
    lonlat = Transformer.from_crs(crs, "OGC:CRS84", always_xy=True).transform(east, north)
    corner = PLANE.to_plane(np.stack(lonlat, axis=-1)).reshape(shape[0] + 1, shape[1] + 1, 2)
    rings = [corner[:-1, :-1], corner[:-1, 1:], corner[1:, 1:], corner[1:, :-1]]
    return shapely.polygons(np.stack(rings, axis=2))


def by_area(grid: Grid, crs: str, transform: Affine, values: np.ndarray) -> np.ndarray:
    """Return what falls to each record if every pixel is shared out by area, exactly."""
    x, y = np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij")
    half, box = grid.spacing_km / 2, grid.box
    records = shapely.box(
        np.maximum(x - half, box.west_km), np.maximum(y - half, box.south_km),
        np.minimum(x + half, box.east_km), np.minimum(y + half, box.north_km),
    )  # fmt: skip
    mass = np.zeros(grid.shape)
    for pixel, value in zip(outlines(crs, transform, values.shape).ravel(), values.ravel(), strict=True):
        if value > 0:
            mass += value * shapely.area(shapely.intersection(records, pixel)) / pixel.area
    return mass


def refused(path: Path, grid: Grid = GRID) -> str:
    return refusal(lambda: read_population(path, grid, PLANE), kind=DataError).removeprefix(f"{path}: ")


# --- where people land -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crs", "size"), [(LONLAT, 0.001), (UTM, 100.0), (MOLLWEIDE, 100.0)], ids=["degrees", "utm", "mollweide"]
)
def test_small_pixels_count_at_the_record_around_them(tmp_path: Path, crs: str, size: float) -> None:
    transform = pixels_around(crs, size, 60)
    values = np.random.default_rng(1).integers(0, 50, (60, 60)).astype(np.float32)
    # Only pixels wholly within the square of one record, so that sums by hand are exact.
    owner, pixels = np.full(values.shape, -1), outlines(crs, transform, values.shape)
    x, y = (a.ravel() for a in np.meshgrid(GRID.x_km(), GRID.y_km(), indexing="ij"))
    tree = shapely.STRtree(shapely.box(x - 0.25, y - 0.25, x + 0.25, y + 0.25))
    pixel, square = tree.query(pixels.ravel(), predicate="within")
    owner.ravel()[pixel] = square
    inside = shapely.within(pixels, shapely.box(*vars(GRID.box).values()))
    values[(owner < 0) | ~inside] = 0
    assert (values > 0).sum() > 500
    found = read_population(save(tmp_path / "p.tif", values, crs, transform), GRID, PLANE)
    expected = np.bincount(owner[values > 0], weights=values[values > 0], minlength=GRID.records)
    np.testing.assert_allclose(found.mass.ravel(), expected, rtol=1e-12)
    assert found.outside == 0


@pytest.mark.parametrize(
    ("crs", "size", "turned"),
    [(LONLAT, 0.02, 0), (UTM, 1700.0, 0), (MOLLWEIDE, 1000.0, 0), (UTM, 900.0, 30), (LONLAT, 0.006, 0)],
)
def test_large_pixels_leave_no_holes(tmp_path: Path, crs: str, size: float, turned: float) -> None:
    count = 8
    transform = pixels_around(crs, size, count, turned)
    values = np.random.default_rng(2).uniform(50, 100, (count, count))
    found = read_population(save(tmp_path / "p.tif", values, crs, transform), GRID, PLANE)
    expected = by_area(GRID, crs, transform, values)
    assert (found.mass > 0)[expected > 0].all()
    assert not found.mass[expected == 0].any()
    # Of n points along a record, a record has n or n + 1; n is 8 at least.
    np.testing.assert_allclose(found.mass, expected, rtol=0.3, atol=0.05 * expected.max())
    assert found.mass.sum() == pytest.approx(expected.sum(), rel=0.02)


@pytest.mark.parametrize("size", [90.0, 500.0, 3000.0])
@pytest.mark.parametrize("turned", [0, 12])
def test_nobody_is_lost(tmp_path: Path, size: float, turned: float) -> None:
    count = max(2, round(6000 / size))
    values = np.random.default_rng(3).uniform(0, 9, (count, count))
    path = save(tmp_path / "p.tif", values, UTM, pixels_around(UTM, size, count, turned))
    # All of the raster is within reach of this grid, so all of its pixels are read.
    grid = Grid(-12.0, -12.0, 6, 6, 4.0, (2,))
    found = read_population(path, grid, PLANE)
    assert (found.mass.sum(), found.outside) == (pytest.approx(values.sum(), rel=1e-12), 0)
    assert not found.covered
    small = read_population(path, GRID, PLANE)
    assert 0 < small.mass.sum() + small.outside <= values.sum() * (1 + 1e-12)


def test_a_turned_grid_is_where_it_says(tmp_path: Path) -> None:
    """One pixel with people: they are at the records around it, wherever the axes point to."""
    values = np.zeros((80, 80))
    values[20, 47] = 7.0
    transform = pixels_around(UTM, 100.0, 80)
    path = save(tmp_path / "p.tif", values, UTM, transform)
    east, north = moved(transform, 47.5, 20.5)
    lonlat = Transformer.from_crs(UTM, "OGC:CRS84", always_xy=True).transform(east, north)
    for degrees in (0.0, 33.0):
        plane = Projection(12.5, 41.9, degrees)
        i, j, inside = GRID.nearest_records(plane.to_plane(np.array([lonlat])))
        assert inside.all()
        mass = read_population(path, GRID, plane).mass
        assert np.argmax(mass) == i[0] * GRID.shape[1] + j[0]
        assert mass.sum() == pytest.approx(7.0)


def test_the_way_it_is_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).integers(0, 3, (40, 40)).astype(np.int16)
    path = save(tmp_path / "p.tif", values, UTM, pixels_around(UTM, 200.0, 40))
    whole = read_population(path, GRID, PLANE)
    for at_once in (7, 100, 1001):
        monkeypatch.setattr(population_raster, "_AT_ONCE", at_once)
        parts = read_population(path, GRID, PLANE)
        np.testing.assert_allclose(parts.mass, whole.mass, rtol=1e-12)
        assert parts.outside == pytest.approx(whole.outside, rel=1e-12)


def test_only_what_is_around_the_grid_is_read(tmp_path: Path) -> None:
    count = 6000
    path = tmp_path / "country.tif"
    transform = pixels_around(UTM, 100.0, count)
    options = {"crs": UTM, "transform": transform, "dtype": "float32", "tiled": True, "sparse_ok": True}
    with rasterio.open(path, "w", driver="GTiff", count=1, height=count, width=count, **options) as file:
        file.write(np.ones((60, 60), np.float32), 1, window=((2970, 3030), (2970, 3030)))
        # Where it is not looked at, there may be anything.
        file.write(np.full((9, 9), -1, np.float32), 1, window=((0, 9), (0, 9)))
    tracemalloc.start()
    found = read_population(path, GRID, PLANE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * count**2 / 10
    # 4 km x 4 km of pixels of 100 m, but for the two systems' scales.
    assert found.mass.sum() == pytest.approx(1600, rel=0.01)
    assert found.covered


# --- what is not there, and what cannot be ---------------------------------------------------------


def test_no_data_is_nobody(tmp_path: Path) -> None:
    transform = pixels_around(UTM, 1000.0, 6)
    values = np.full((6, 6), 2.0, np.float32)
    plain = read_population(save(tmp_path / "a.tif", values, UTM, transform), GRID, PLANE).mass
    values[0, :] = values[2, 2] = -200
    emptied = np.where(values < 0, 0, values)
    expected = read_population(save(tmp_path / "b.tif", emptied, UTM, transform), GRID, PLANE).mass
    assert not np.array_equal(plain, expected)
    found = read_population(save(tmp_path / "c.tif", values, UTM, transform, nodata=-200), GRID, PLANE)
    np.testing.assert_array_equal(found.mass, expected)
    values[values < 0] = np.nan
    for name, nodata in (("d.tif", None), ("e.tif", math.nan)):
        path = save(tmp_path / name, values, UTM, transform, nodata=nodata)
        np.testing.assert_array_equal(read_population(path, GRID, PLANE).mass, expected)


def test_values_may_be_scaled(tmp_path: Path) -> None:
    path = save(tmp_path / "p.tif", np.full((6, 6), 3, np.uint8), UTM, pixels_around(UTM, 1000.0, 6))
    plain = read_population(path, GRID, PLANE).mass
    with rasterio.open(path, "r+") as file:
        file.scales, file.offsets = (0.5,), (0.25,)
    np.testing.assert_allclose(read_population(path, GRID, PLANE).mass, plain * (1.75 / 3), rtol=1e-12)


@pytest.mark.parametrize("bad", [-1.0, -1e-30, math.inf, -math.inf])
def test_negative_people_are_refused(tmp_path: Path, bad: float) -> None:
    values = np.ones((6, 6))
    values[2, 4] = bad
    message = refused(save(tmp_path / "p.tif", values, UTM, pixels_around(UTM, 1000.0, 6)))
    assert message.startswith(f"row 3, column 5: {bad:g} is no number of people")


GOOD = pixels_around(UTM, 1000.0, 6)


@pytest.mark.parametrize(
    ("values", "crs", "transform", "words"),
    [
        (np.ones((2, 6, 6)), UTM, GOOD, "has 2 bands"), (np.ones((6, 6)), None, GOOD, "where on Earth"),
        (np.ones((6, 6)), UTM, None, "where on Earth"), (np.zeros((6, 6)), UTM, GOOD, "nobody in the grid"),
        (np.ones((6, 6), np.complex64), UTM, GOOD, "holds complex64"),
        (np.ones((6, 6)), UTM, Affine(*GOOD[:2], GOOD.c + 50_000, *GOOD[3:6]), "lies elsewhere"),
        (np.ones((6, 6)), "EPSG:32733", GOOD, "lies elsewhere"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_bad_rasters(tmp_path: Path, values: np.ndarray, crs: str | None, transform: Any, words: str) -> None:
    assert words in refused(save(tmp_path / "p.tif", values, crs, transform))


def test_files_that_are_no_rasters_and_pixels_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "p.tif"
    assert refused(path) == "no such file"
    assert refused(tmp_path) == "is no file"
    path.write_text("lon,lat\n1,2\n")
    assert "not a readable GeoTIFF" in refused(path)
    save(path, np.random.default_rng(0).random((300, 300)), UTM, pixels_around(UTM, 100.0, 300))
    path.write_bytes(path.read_bytes()[:300_000])
    assert "not a readable GeoTIFF" in refused(path)
    save(path, np.ones((6, 6)), UTM, pixels_around(UTM, 100_000.0, 6))
    assert "are too large for records" in refused(path, Grid(-2.0, -2.0, 2, 2, 2.0, (200,)))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rasterio", None)
    said = "needs rasterio: install it with pip install 'mdpext-dask"
    refusal(lambda: read_population(tmp_path / "p.tif", GRID, PLANE), said, kind=SpecError)


# --- as the prior of a job -------------------------------------------------------------------------


def test_a_raster_is_the_prior_of_a_job(tmp_path: Path, small_job: JobMaker) -> None:
    values = np.random.default_rng(5).integers(0, 1000, (30, 30)).astype(np.float32)
    # Manhattan, but for its north.
    transform = Affine(1000.0, 0, 575_000, 0, -1000.0, 4_522_000)
    path = save(tmp_path / "people.tif", values, "EPSG:32618", transform)
    domain = build_domain(parse_job(small_job(prior={"kind": "raster", "file": str(path)})))
    found = read_population(path, domain.grid, domain.projection)
    np.testing.assert_allclose(domain.prior, found.mass / found.mass.sum(), rtol=1e-12)
    assert domain.prior.sum() == pytest.approx(1)
    said = re.match(r"([\d,.]+) of the population of .*, ([\d,.]+) in pixels at", domain.notes[0])
    people = [float(number.replace(",", "")) for number in said.groups()]
    assert people == pytest.approx([found.mass.sum(), found.outside], abs=0.06)
    assert "does not cover all of the grid" in domain.notes[1]


def test_a_grid_may_lie_across_the_antimeridian(tmp_path: Path) -> None:
    size = 0.05
    transform = Affine(size, 0, -180.0, 0, -size, -17.0)
    path = save(tmp_path / "p.tif", np.ones((40, 7200), np.float32), LONLAT, transform)
    plane, grid = Projection(180.0, -18.0), Grid(-20.0, -20.0, 8, 8, 5.0, (2,))
    found = read_population(path, grid, plane)
    east, north = plane.to_plane(np.array([[180.0, -18.0 + size], [180.0 - size, -18.0]])).T
    pixel = abs(north[0]) * abs(east[1])
    assert found.mass.sum() == pytest.approx(40**2 / pixel, rel=0.01)
    assert found.mass[:8].sum() == pytest.approx(found.mass[9:].sum(), rel=0.01)
    assert (found.mass > 0).all()


def _world(path: Path, west: float, north: float) -> Path:
    """Save people all around the Earth, south of a latitude, in pixels of a tenth of a degree."""
    values = np.random.default_rng(0).uniform(size=(100, 3600)).astype(np.float32)
    # The same people, wherever the raster begins.
    values = np.roll(values, -round((west + 180) * 10), axis=1)
    return save(path, values, LONLAT, Affine(0.1, 0, west, 0, -0.1, north))


@pytest.mark.parametrize(
    ("lon", "lat"), [(0.02, 51.5), (-70.0, -17.0), (180.0, -17.0), (179.97, 75.0), (-179.98, 75.0)]
)
def test_longitudes_may_count_from_anywhere(tmp_path: Path, lon: float, lat: float) -> None:
    """A raster from 0 to 360 degrees says the same as one from -180 to 180, on both sides of either seam."""
    grid, plane = Grid(-9.0, -9.0, 6, 6, 3.0, (2,)), Projection(lon, lat)
    north = math.floor(lat) + 6.0
    one, other = (
        read_population(_world(tmp_path / f"{west}.tif", west, north), grid, plane) for west in (-180.0, 0.0)
    )
    assert (one.covered, other.covered) == (True, True)
    np.testing.assert_allclose(other.mass, one.mass, rtol=0.02)
    assert (one.mass > 0).all()
    assert other.mass.sum() == pytest.approx(one.mass.sum(), rel=1e-3)


def test_no_more_than_both_ends_of_a_seam_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _world(tmp_path / "people.tif", -180.0, -14.0)
    seen = []
    read = population_raster._Raster._read

    def noted(self: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        seen.append((rows[1] - rows[0]) * (columns[1] - columns[0]))
        return read(self, rows, columns)

    monkeypatch.setattr(population_raster._Raster, "_read", noted)
    read_population(path, GRID, Projection(180.0, -17.0))
    assert len(seen) == 2
    assert sum(seen) < 100


@pytest.mark.parametrize("lat", [89.99, -89.99])
def test_a_pole_may_be_in_the_grid(tmp_path: Path, lat: float) -> None:
    """People around it, each row of a raster in degrees a ring, are all there."""
    path = _world(tmp_path / "people.tif", -180.0, 90.0 if lat > 0 else -80.0)
    plane = Projection(10.0, lat)
    grid = Grid(-4.0, -4.0, 4, 4, 2.0, (2,))
    found = read_population(path, grid, plane)
    assert found.covered
    assert (found.mass > 0).all()
    i, j, _ = grid.nearest_records(plane.to_plane(np.array([[0.0, math.copysign(90, lat)]])))
    # The ends of 3,600 pixels come together there.
    assert np.unravel_index(found.mass.argmax(), found.mass.shape) == (i[0], j[0])


@pytest.mark.parametrize("lon", [12.5, 180.0])
def test_pixels_as_large_as_the_earth_are_refused(tmp_path: Path, lon: float) -> None:
    path = save(tmp_path / "people.tif", [[1e9]], LONLAT, Affine(360, 0, -180, 0, -180, 90))
    with pytest.raises(DataError, match="pixels are too large"):
        read_population(path, GRID, Projection(lon, 41.9))


def test_only_the_file_itself_counts(tmp_path: Path) -> None:
    """What GDAL finds in files beside it is no part of a job's identity."""
    path = save(tmp_path / "people.tif", np.ones((40, 40)), LONLAT, pixels_around(LONLAT, 0.005, 40))
    alone = read_population(path, GRID, PLANE).mass
    elsewhere = "<PAMDataset><GeoTransform>12.0, 0.01, 0.0, 42.3, 0.0, -0.01</GeoTransform></PAMDataset>"
    (tmp_path / "people.tif.aux.xml").write_text(elsewhere)
    np.testing.assert_array_equal(read_population(path, GRID, PLANE).mass, alone)
