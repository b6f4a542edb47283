"""An exported city: the bits of the store, wherever they come from, and nothing but numpy to read them."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask import Mechanism, ReleaseBudget, StickyKey, build, open_mechanism
from mdpext_dask.errors import DataError, GuaranteeViolation, IncompleteStoreError, SpecError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import init
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection, folded
from mdpext_dask.runtime import City, city_header, city_layout, open_city
from mdpext_dask.runtime.geodesic import PROJECTION_ERROR_KM, PlainProjection, PlaneFit, around
from mdpext_dask.sampling import export
from mdpext_dask.sampling.export import export_city
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import Remap, content_of, write_remap
from tests.support.answers import same_number
from tests.support.cities import rewritten
from tests.support.forged import flip_a_bit, shard_of
from tests.support.inside import call
from tests.support.loss_files import job as file_job
from tests.support.loss_files import write as write_problem
from tests.support.problems import all_rows
from tests.support.refusals import refusal, refused
from tests.support.regions import u_job

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

# A tile of the usual size would hold all of these cities.
SMALL_TILE_BYTES = 200

Stores = dict[str, str]
Cities = dict[str, Path]
MakeJob = Callable[..., dict[str, dict[str, object]]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, small_job: MakeJob) -> Stores:
    """Return finished stores: turned and remapped; with a region, of which most is not stored; planar."""
    folder = tmp_path_factory.mktemp("stores")
    write_problem(folder / "loss.npz", (9, 7))
    jobs = {
        "plain": small_job(domain={"rotation_deg": 29.0}, store={"block_cells": [2, 3]}),
        "region": u_job(folder),
        "planar": file_job(folder / "loss.npz", domain={"metric_p": 1.0, "refine": [2]}),
    }
    found = {}
    for name, job in jobs.items():
        found[name] = str(folder / f"{name}.zarr")
        build(parse_job(job), found[name])
    plain = MechanismStore.open(found["plain"], mode="r+")
    write_remap(plain, Remap(content_of(plain), [1, 1, 2, 4, 4, 4, 6, 7], 1.0, 0.9, [0, 3, 5]))
    return found


@pytest.fixture(scope="module")
def cities(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cities]:
    """Return what they are exported to, the plain one both ways."""
    folder = tmp_path_factory.mktemp("cities")
    found = {name: folder / f"{name}.mdp" for name in (*stores, "rows")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mdpext_dask.runtime.city_layout._TILE_BYTES", SMALL_TILE_BYTES)
        for name, path in found.items():
            export_city(stores.get(name, stores["plain"]), path, "rows" if name == "rows" else "auto")
        yield found


def mechanism_of(name: str, stores: Stores) -> Mechanism:
    return open_mechanism(stores.get(name, stores["plain"]))


def all_tiles(city: City) -> list[np.ndarray]:
    return [city._content.rows(tile) for tile in range(len(city._tiles))]


NAMES = ["plain", "rows", "region", "planar"]


# --- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_that_of_the_store_to_the_last_bit(name: str, stores: Stores, cities: Cities) -> None:
    store = MechanismStore.open(stores.get(name, stores["plain"]))
    city = open_city(cities[name])
    rows = all_rows(store)
    seen = np.zeros(store.grid.shape, dtype=int)
    tiles = all_tiles(city)
    assert len(tiles) > 1
    for tile, found in enumerate(tiles):
        x, y = city._tiles.records(tile)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.uint32), rows[x, y].view(np.uint32))
        seen[x, y] += 1
    assert (seen == 1).all()
    # And so are the weights that are drawn from.
    i, j = 5, 4
    assert np.array_equal(city._cumulative(i, j), np.cumsum(rows[i, j].astype(float) * 2.0**60).astype("u8"))


def test_packing(stores: Stores, cities: Cities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packings = {name: open_city(path).facts["packing"] for name, path in cities.items()}
    assert packings == {"plain": "seed", "rows": "rows", "region": "rows", "planar": "rows"}
    assert cities["plain"].stat().st_size < cities["rows"].stat().st_size
    # As for rows that are made otherwise: one bit of one of them is another.
    real = city_layout.extend_log_convex

    def other(scores: np.ndarray, factor: int) -> np.ndarray:
        rows = real(scores, factor)
        rows[-2, -2, -1] = np.nextafter(rows[-2, -2, -1], np.float32(1))
        return rows

    monkeypatch.setattr(city_layout, "extend_log_convex", other)
    assert export_city(stores["plain"], tmp_path / "c.mdp")["packing"] == "rows"
    assert (tmp_path / "c.mdp").read_bytes() == cities["rows"].read_bytes()
    message = refusal(lambda: export_city(stores["plain"], tmp_path / "d.mdp", "seed"), kind=SpecError)
    assert "not those that its seed extends to; use rows" in message
    assert not (tmp_path / "d.mdp").exists()


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_draws_are_the_store_s(name: str, stores: Stores, cities: Cities, monkeypatch: Any) -> None:
    """Draws are compared under one random number for all, so that they are a function of the record."""
    city, mechanism = open_city(cities[name]), mechanism_of(name, stores)
    rng = np.random.default_rng(5)
    if city.planar:
        places = rng.uniform((-4, 28), (8, 40), (300, 2))
    else:
        near = rng.uniform((-74.2, 40.6), (-73.7, 41.0), (250, 2))
        far = np.stack([rng.uniform(-180, 180, 50), rng.uniform(-90, 90, 50)], axis=-1)
        poles = [(0.0, 90.0), (0.0, -90.0), (180.0, 0.0), (-180.0, 0.0), (106.03, -40.78)]
        places = np.concatenate([near, far, poles])
    for word in (0, 2**59, 2**60 - 2**40, 7 * 2**58 + 12345):
        same_number(monkeypatch, word)
        for rule in ("nearest", "drop"):
            drawn, outside = city.sample_points(places, planar=city.planar, outside=rule)
            expected, was_outside = mechanism.sample_points(places, planar=city.planar, outside=rule)
            assert np.array_equal(drawn, expected)
            assert np.array_equal(outside, was_outside)
    for place in places[-60:]:
        keys = ("x_km", "y_km") if city.planar else ("lon", "lat")
        there = dict(zip(keys, place.tolist(), strict=True))
        assert np.array_equal(city.row(**there), mechanism.row(**there).values)
        assert np.array_equal(city.sample(**there), mechanism.sample(**there))
    assert 0 < outside.sum() < len(places)
    refused(DataError, "lie outside the", city.sample_points, places, planar=city.planar, outside="error")


@pytest.mark.parametrize("name", ["plain", "planar"])
def test_what_is_said_about_it(name: str, stores: Stores, cities: Cities) -> None:
    city, mechanism = open_city(cities[name]), mechanism_of(name, stores)
    shas = ("content_sha256", "mechanism_sha256")
    for key in ("epsilon_per_km", "epsilon_certified", "metric_p", "planar", *shas):
        assert getattr(city, key) == getattr(mechanism, key)
    extra = 0.0 if city.planar else PROJECTION_ERROR_KM
    assert city.max_quantisation_km == mechanism.max_quantisation_km + extra
    assert city.quantisation_km(2.0) == pytest.approx(mechanism.quantisation_km(2.0) + extra, rel=1e-12)
    assert np.array_equal(city.output_lonlat, mechanism.output_lonlat, equal_nan=True)
    assert np.array_equal(city.output_xy_km, mechanism.output_xy_km)
    certificate = Path(stores[name]) / "audit" / "certificate.json"
    assert city.facts["certificate_sha256"] == hashlib.sha256(certificate.read_bytes()).hexdigest()
    assert city.facts["fingerprint"] == MechanismStore.open(stores[name]).fingerprint
    assert "epsilon 1/km" in repr(city)
    if name == "plain":
        assert "OpenStreetMap" in city.facts["attribution"]


def move_an_output(header: dict[str, Any]) -> None:
    header["outputs"]["lon"][-1] += 1e-6


def turn(header: dict[str, Any]) -> None:
    header["projection"]["rotation_deg"] += 1


def other_metric(header: dict[str, Any]) -> None:
    side_km = header["quantisation_km"] / 2 ** (1 / header["metric_p"])
    header.update(metric_p=1.0, quantisation_km=2 * side_km)


OTHER_MEANINGS: list[Callable[[dict[str, Any]], object]] = [
    lambda header: header.update(epsilon_per_km=2.0), lambda header: header.update(epsilon_certified=0.25),
    other_metric, lambda header: header["grid"].update(south_km=header["grid"]["south_km"] + 300),
    lambda header: header["projection"].update(centre_lat=-33.9), turn, move_an_output,
]  # fmt: skip


@pytest.mark.parametrize("change", OTHER_MEANINGS)
def test_another_meaning_is_another_mechanism(change: Any, cities: Cities, tmp_path: Path) -> None:
    """A city with other terms is refused; one without a recorded identity has one of its own."""
    key, ledger = StickyKey(bytes(32)), ReleaseBudget(tmp_path / "ledger", 9)
    for copy, forget in ((tmp_path / "changed.mdp", False), (tmp_path / "older.mdp", True)):

        def other(header: dict[str, Any], _: list[bytes], *, forget: bool = forget) -> None:
            change(header)
            if forget:
                del header["mechanism_sha256"]

        rewritten(cities["rows"], copy, other)
    message = refusal(lambda: open_city(tmp_path / "changed.mdp"), kind=GuaranteeViolation)
    assert "are not those that it was finished with" in message
    one, another = open_city(cities["rows"]), open_city(tmp_path / "older.mdp")
    assert one.content_sha256 == another.content_sha256
    asked = {"user": "anna", "sticky": key, "budget": ledger}
    for city in (one, another, one):
        grid = city.places.grid
        for i in range(3):
            city.sample(x_km=grid.x_km()[i], y_km=grid.y_km()[4], **asked)
    assert ledger.spent("anna") == 6


@pytest.mark.parametrize("name", NAMES)
def test_identity_of_stores_and_cities_of_before(name: str, stores: Any, cities: Any, tmp_path: Path) -> None:
    rewritten(cities[name], tmp_path / "older.mdp", lambda header, _: header.pop("mechanism_sha256"))
    url = shutil.copytree(mechanism_of(name, stores).url, tmp_path / "older.zarr")
    root = json.loads((url / "zarr.json").read_text())
    recorded = root["attributes"].pop("mechanism_sha256")
    (url / "zarr.json").write_text(json.dumps(root))
    for older in (open_city(tmp_path / "older.mdp"), open_mechanism(url)):
        assert older.mechanism_sha256 == recorded == open_city(cities[name]).facts["mechanism_sha256"]
    # The attributes are compared with each other before there is an identity.
    for change, complaint in (
        ({"mechanism_sha256": "0" * 64}, "not those that it was finished with"),
        ({"mechanism_sha256": recorded, "epsilon_per_km": 0.5}, "epsilon_per_km"),
    ):
        document = {**root, "attributes": {**root["attributes"], **change}}
        (url / "zarr.json").write_text(json.dumps(document))
        assert complaint in refusal(lambda: open_mechanism(url), kind=GuaranteeViolation)
        refusal(lambda: export_city(str(url), tmp_path / "new.mdp"), kind=GuaranteeViolation)


def test_a_remap_comes_along(stores: Stores, cities: Cities) -> None:
    city, mechanism = open_city(cities["plain"], remap=True), open_mechanism(stores["plain"], remap=True)
    place = {"lon": -73.98, "lat": 40.75}
    assert np.array_equal(city.row(**place), mechanism.row(**place).values)
    assert np.array_equal(open_city(cities["plain"]).row(**place), city.row(**place))
    without = open_city(cities["plain"], remap=False)
    assert not np.array_equal(city.row(**place), without.row(**place))
    assert (city.remapped, without.remapped) == (True, False)
    message = refusal(lambda: open_city(cities["region"], remap=True), kind=StoreError)
    assert "without a remap; run mdpext remap and export it again" in message


def test_sticky_answers_are_those_of_the_store(stores: Stores, cities: Cities) -> None:
    key, mechanism = StickyKey(bytes(32)), open_mechanism(stores["plain"])
    for file in ("plain", "rows"):
        city = open_city(cities[file])
        for user in ("Anna", "Bert", "Cora"):
            asked = {"lon": -73.98, "lat": 40.75, "user": user, "sticky": key, "place_km": 1.5}
            assert np.array_equal(city.sample(**asked), mechanism.sample(**asked))


def test_what_is_kept_in_memory_changes_nothing(cities: Cities, monkeypatch: pytest.MonkeyPatch) -> None:
    same_number(monkeypatch, 3 * 2**57)
    places = np.random.default_rng(2).uniform((-74.1, 40.7), (-73.8, 40.9), (500, 2))
    for name in ("plain", "rows"):
        plenty, little = open_city(cities[name]), open_city(cities[name], cache_bytes=1)
        expected = plenty.sample_points(places)[0]
        assert len(plenty._cache) > 1
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _, city=little: city.sample_points(places)[0], range(8)):
                assert np.array_equal(found, expected)
        assert len(little._cache) == 1


@pytest.mark.parametrize("name", ["noise", "noise-between"])
def test_rows_of_noise_without_room_are_made_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is made once, to be compared with its digest; later rows of it are the same to the last bit."""
    same_number(monkeypatch, 3 * 2**57)
    path = Path(__file__).parent / "vectors" / f"{name}.mdp"
    plenty, little = open_city(path, verify=True), open_city(path, verify=True, cache_bytes=1)
    assert (len(plenty._cache), len(little._cache)) == (4, 1)
    for city in (plenty, little):
        monkeypatch.setattr(city._content, "rows", lambda tile: pytest.fail(f"makes tile {tile} again"))
    grid = plenty.places.grid
    for i, j in np.ndindex(grid.shape):
        assert np.array_equal(little._cumulative(i, j), plenty._cumulative(i, j))
    x_km, y_km = (
        np.random.default_rng(3).choice(grid.x_km(), 20),
        np.random.default_rng(4).choice(grid.y_km(), 20),
    )
    places = np.stack([x_km, y_km], axis=-1)
    found, expected = (city.sample_points(places, planar=True)[0] for city in (little, plenty))
    assert np.array_equal(found, expected)
    assert len(set(expected.tolist())) > 1


def test_a_forked_child_goes_on_and_draws_its_own(cities: Cities) -> None:
    code = """
import os, sys
from mdpext_dask.runtime import open_city
city = open_city(sys.argv[1])
place = {"lon": -73.98, "lat": 40.75, "n": 300}
city.sample(**place)
child = os.fork()
print(city.sample(**place).tolist(), flush=True)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-c", code, cities["rows"]]
    one, other = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert one != other


# --- packing ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, 6)] * 3), st.booleans())
def test_packed_rows_come_back_to_the_last_bit(seed: int, shape: tuple[int, int, int], wild: bool) -> None:
    rng = np.random.default_rng(seed)
    if wild:  # any bits at all, not-a-number included
        rows = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    else:
        rows = rng.dirichlet(np.ones(shape[2]), shape[:2]).astype(np.float32)
    packed = city_layout.pack_rows(rows)
    back = city_layout.unpack_rows(packed, shape)
    assert back.shape == shape
    assert np.array_equal(back.view(np.uint32), rows.view(np.uint32))
    for wrong in ((shape[0] + 1, *shape[1:]), (*shape[:2], 2 * shape[2])):
        refused(ValueError, "", city_layout.unpack_rows, packed, wrong)
    refused(ValueError, "", city_layout.unpack_rows, packed + b"x", shape)
    scores = rng.integers(0, 2**64, shape, dtype=np.uint64).view(np.float64)
    again = city_layout.unpack_table(city_layout.pack_table(scores), "float64", shape)
    assert np.array_equal(again.view(np.uint64), scores.view(np.uint64))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_tiles_cut_the_records(cells_x: int, cells_y: int, factor: int, east: int, north: int) -> None:
    grid = Grid(0.0, 0.0, cells_x, cells_y, 1.0, (factor,))
    tiles = city_layout.Tiles(grid, (min(east, cells_x), min(north, cells_y)))
    owner = np.full(grid.shape, -1)
    for tile in range(len(tiles)):
        x, y = tiles.records(tile)
        assert (owner[x, y] == -1).all()
        owner[x, y] = tile
    i, j = (axis.ravel() for axis in np.indices(grid.shape))
    assert np.array_equal(tiles.of_records(i, j), owner.ravel())
    assert tiles.of_records(int(i[-1]), int(j[-1])) == len(tiles) - 1


# --- the projection --------------------------------------------------------------------------------

_RADIUS_KM = 40.0
longitudes, latitudes = st.floats(-180, 180), st.floats(-90, 90)
# PROJ takes what is a millimetre from the equator or a meridian for that, which tells near the antipode.
centres = st.tuples(longitudes, latitudes).map(lambda place: (round(place[0], 6), round(place[1], 6)))


def compare(centre: tuple[float, float], places: np.ndarray, rotation_deg: float = 0.0) -> None:
    """Hold both projections against each other."""
    theirs = Projection(*centre, rotation_deg)
    ours = PlainProjection(*centre, rotation_deg)
    xy, found = theirs.to_plane(places), ours.to_plane(places)
    for p in (1.0, 2.0, np.inf):
        there, here = (np.clip(folded(at, _RADIUS_KM, p), -_RADIUS_KM, _RADIUS_KM) for at in (xy, found))
        assert np.hypot(*(here - there).T).max() <= PROJECTION_ERROR_KM
    away = np.hypot(*xy.T)
    solved = np.isfinite(found).all(axis=1)
    assert (away[~solved] > 19_900).all()
    difference = np.hypot(*(found - xy).T)
    assert (difference[away < 19_000] <= PROJECTION_ERROR_KM).all()
    assert (difference[solved & (away < 19_900)] <= 1.2e-5).all()


@given(centres, st.lists(st.tuples(longitudes, latitudes), min_size=1, max_size=20))
@example((0.0, 90.0), [(0.0, 90.0), (10.0, 89.9), (0.0, -90.0), (77.0, 0.0)])
@example((12.5, -90.0), [(12.5, -90.0), (0.0, 90.0), (-167.5, -89.999)])
@example((0.0, 0.0), [(0.0, 0.0), (180.0, 0.0), (-180.0, 0.0), (179.5, 0.0), (179.0, 0.3), (90.0, 0.0)])
@example((12.5, 41.9), [(12.5, 41.9), (-167.5, -41.9), (-167.4, -41.9), (-167.5, -41.0), (12.5, 90.0)])
@example((179.99, 10.0), [(-179.99, 10.0), (180.0, 10.1), (-180.0, 9.9)])
@settings(max_examples=100)
def test_projection_is_within_2_mm(centre: tuple[float, float], places: list[tuple[float, float]]) -> None:
    compare(centre, np.array(places))


@given(centres, st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 0.3, 3.0]))
def test_projection_at_centre_and_antipode(centre: tuple[float, float], seed: int, degrees: float) -> None:
    rng = np.random.default_rng(seed)
    for there in (centre, (centre[0] + 180, -centre[1])):
        places = np.array(there) + rng.uniform(-degrees, degrees, (40, 2))
        places = np.stack([around(places[:, 0]), np.clip(places[:, 1], -90, 90)], axis=-1)
        compare(centre, places, rotation_deg=33.0)


@given(
    centres.filter(lambda place: abs(place[1]) <= 80), st.floats(0.01, 3.0), st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, -41.0]),
)  # fmt: skip
@settings(max_examples=10)
def test_polynomials_match_plane(centre: tuple[float, float], half: float, seed: int, turned: float) -> None:
    lon, lat = centre
    projection = Projection(lon, lat)

    def plane(east: np.ndarray, lat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = projection.to_plane(np.stack([lon + east, lat], axis=-1)).T
        return x, y

    fit = PlaneFit.of(plane, half / np.cos(np.deg2rad(lat)), lat, half)
    assert fit is not None
    assert PlaneFit.from_json(json.loads(json.dumps(dataclasses.asdict(fit)))) == fit
    rng = np.random.default_rng(seed)
    east, there = rng.uniform(-1, 1, 200) * fit.half_lon, lat + rng.uniform(-1, 1, 200) * half
    x, y = fit.many(east, there)
    truth = np.stack(plane(east, there))
    assert np.hypot(*(np.stack([x, y]) - truth)).max() <= PROJECTION_ERROR_KM / 10
    for k in range(20):
        assert fit.at(float(east[k]), float(there[k])) == (x[k], y[k])
    assert fit.covers(east, there).all()
    assert not fit.covers(fit.half_lon * 1.001, lat)
    assert not fit.covers(0.0, lat - half * 1.001)
    # As a projection: places in the box and outside it, many and one, turned or not.
    ours = PlainProjection(lon, lat, turned, fit=fit)
    places = np.stack([around(lon + 1.5 * east), lat + 1.5 * (there - lat)], axis=-1)
    theirs = dataclasses.replace(projection, rotation_deg=turned).to_plane(places)
    found = ours.to_plane(places)
    assert np.hypot(*(found - theirs).T).max() <= PROJECTION_ERROR_KM
    for k in range(20):
        assert ours.point_to_plane(*places[k].tolist()) == tuple(found[k])


def test_there_are_no_polynomials_around_a_pole_or_for_half_a_continent() -> None:
    def never(*_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError

    assert PlaneFit.of(never, 10.0, 89.0, 1.5) is None
    assert PlaneFit.of(never, 30.0, 40.0, 1.5) is None
    # Not good enough with the terms there may be.
    assert PlaneFit.of(lambda east, lat: (np.abs(east), lat), 1.0, 0.0, 1.0) is None


# --- files that are not what was exported ----------------------------------------------------------


def use(path: Path) -> None:
    all_tiles(open_city(path))


@pytest.mark.parametrize("name", ["plain", "rows"])
def test_a_damaged_bit_is_noticed_wherever_it_is(name: str, cities: Cities, tmp_path: Path) -> None:
    content = cities[name].read_bytes()
    rng = np.random.default_rng(4)
    copy = tmp_path / "copy.mdp"
    city = open_city(cities[name])
    # All of what comes before the header, each section's first and last byte, and some in between.
    offsets = np.array(city._content._offsets)
    places = {*range(48), *offsets[:-1], *(offsets[1:] - 1), *rng.integers(0, len(content), 60).tolist()}
    for place in sorted(map(int, places)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        copy.write_bytes(damaged)
        assert refusal(lambda: use(copy), kind=StoreError).startswith(f"{copy}: "), place


def test_a_processor_that_differs_is_noticed(cities: Cities, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is whole, and what is made of it has one bit that was not certified."""
    original = city_layout.extend_log_convex

    def otherwise(scores: NDArray[np.float64], factor: int) -> NDArray[np.float32]:
        rows = original(scores, factor)
        rows[0, 0, 0] = np.nextafter(rows[0, 0, 0], np.float32(0))
        return rows

    city = open_city(cities["plain"])
    assert city.facts["packing"] == city_header.SEED
    monkeypatch.setattr(city_layout, "extend_log_convex", otherwise)
    x, y = city.places.grid.x_km()[1], city.places.grid.y_km()[1]
    message = refusal(lambda: city.sample(x_km=float(x), y_km=float(y)), kind=StoreError)
    assert "does not give the rows that were certified" in message


def test_other_lengths_and_versions_are_noticed(cities: Cities, tmp_path: Path) -> None:
    content = cities["rows"].read_bytes()
    copy = tmp_path / "copy.mdp"
    start = 48 + int.from_bytes(content[12:16], "little")
    for length in (0, 4, 8, 20, 47, 48, 100, start - 1, start, start + 1, len(content) - 1):
        copy.write_bytes(content[:length])
        message = refusal(lambda: open_city(copy), kind=StoreError)
        assert message.startswith(f"{copy}: ")
    assert "cut short by 1 bytes" in message
    for other, complaint in (
        (content + b"\0", "has 1 bytes too many"),
        (
            content[:8] + (2).to_bytes(4, "little") + content[12:],
            "has city format 2, newer than 1, the newest that is read here; upgrade mdpext-dask",
        ),
        (content[:8] + bytes(4) + content[12:], "is damaged: there is no city format 0"),
        (b"lon,lat\n1,2\n", "not a city made by mdpext export"),
    ):
        copy.write_bytes(other)
        assert complaint in refusal(lambda: open_city(copy), kind=StoreError)
    for path, complaint in ((tmp_path / "none.mdp", "No such file"), (tmp_path, "Is a directory")):
        assert f"cannot be read: {complaint}" in refusal(lambda path=path: open_city(path), kind=StoreError)


def test_sections_that_somebody_else_has_made_are_refused_politely(cities: Cities, tmp_path: Path) -> None:
    """Digests of sections that are right do not make the rows those that were certified."""
    copy = tmp_path / "copy.mdp"
    for name, change, complaint in (
        ("rows", lambda _, sections: sections.reverse(), "tile 0 "),
        ("rows", lambda _, sections: sections.append(sections.pop()[:-1]), "is damaged"),
        ("plain", lambda _, sections: sections.append(sections.pop()[:-1]), "the seed's scores are damaged"),
    ):
        rewritten(cities[name], copy, change)
        assert complaint in refusal(lambda: use(copy), kind=StoreError)


def test_scores_that_no_seed_has_are_refused(cities: Cities, tmp_path: Path) -> None:
    """What a processor makes of them is its own affair: digests of their rows would be right on some."""
    city, copy = open_city(cities["plain"]), tmp_path / "copy.mdp"
    for wrong in (np.nan, np.inf, -701.0, 1e300):
        scores = city._content._scores.copy()
        scores[0, 0, 0] = wrong

        def spoil(_: dict[str, Any], sections: list[bytes], scores: np.ndarray = scores) -> None:
            sections[0] = city_layout.pack_table(scores)

        rewritten(cities["plain"], copy, spoil)
        assert "the seed's scores are damaged" in refusal(lambda: use(copy), kind=StoreError)


def test_rows_that_no_certificate_could_pass_are_never_drawn(cities: Cities, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mdp"

    def spoil(header: dict[str, Any], sections: list[bytes]) -> None:
        rows = city._content.rows(0).copy()
        rows[0, 0, 0] = 0.0
        sections[0] = city_layout.pack_rows(rows)
        header["rows_sha256"][0] = city_layout.rows_sha256(rows)

    city = open_city(cities["rows"])
    rewritten(cities["rows"], copy, spoil)
    x, y = city.places.grid.x_km()[1], city.places.grid.y_km()[1]
    message = refusal(lambda: open_city(copy).sample(x_km=float(x), y_km=float(y)), kind=GuaranteeViolation)
    assert message.startswith(f"{copy}: a stored row is damaged")


# --- exporting -------------------------------------------------------------------------------------


def test_what_must_not_be_sampled_is_not_exported(stores: Stores, small_job: MakeJob, tmp_path: Path) -> None:
    target = tmp_path / "city.mdp"
    unfinished = str(tmp_path / "unfinished.zarr")
    init(parse_job(small_job()), unfinished)
    refusal(lambda: export_city(unfinished, target), kind=IncompleteStoreError)
    copy = Path(shutil.copytree(stores["plain"], tmp_path / "copy.zarr"))
    flip_a_bit(shard_of(copy))
    message = refusal(lambda: export_city(str(copy), target), kind=GuaranteeViolation)
    assert "has changed since it was certified" in message
    root = copy / "zarr.json"
    root.write_text(root.read_text().replace('"complete"', '"refused"'))
    assert "refused" in refusal(lambda: export_city(str(copy), target), kind=GuaranteeViolation)
    refusal(lambda: export_city(str(tmp_path / "none.zarr"), target), kind=StoreError)
    assert not target.exists()


def test_replaced_store_is_refused(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the one would go out under the certificate of the other."""
    target, copy = tmp_path / "city.mdp", Path(shutil.copytree(stores["plain"], tmp_path / "copy.zarr"))
    root, verify = copy / "zarr.json", export.integrity.verify

    def verified(store: MechanismStore) -> None:
        verify(store)
        root.write_text(root.read_text().replace('"complete"', '"extending"'))

    monkeypatch.setattr(export.integrity, "verify", verified)
    message = refusal(lambda: export_city(str(copy), target), kind=StoreError)
    assert "is not the store any more that was opened" in message
    assert not target.exists()


def test_where_and_how_it_cannot_be_exported(stores: Stores, tmp_path: Path) -> None:
    store = stores["planar"]
    for kind, path, packing, complaint in (
        (SpecError, Path(store) / "c.mdp", "auto", "lies inside the store"),
        (SpecError, tmp_path / "c.mdp", "zip", "--packing: must be auto, seed, noise or rows"),
        (DataError, tmp_path / "missing" / "c.mdp", "auto", "cannot be written"),
    ):
        assert complaint in refusal(lambda path=path, how=packing: export_city(store, path, how), kind=kind)
    assert list(tmp_path.iterdir()) == []


def test_the_command(stores: Stores, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "city.mdp"
    answer = call(capfd, "export", stores["plain"], "-o", path)
    raw = 4 * answer["records"] * answer["outputs"]
    assert answer["bytes"] == path.stat().st_size
    assert (answer["bytes_raw"], answer["packing"], answer["remap"]) == (raw, "seed", True)
    assert answer["ratio"] == pytest.approx(raw / answer["bytes"])
    assert open_city(path).epsilon_certified == answer["epsilon_certified"]


# --- without anything else -------------------------------------------------------------------------

_ALONE = """
import importlib.abc, sys
ALLOWED = {"numpy", "mdpext_dask"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import mdpext_dask.runtime.ledger
from mdpext_dask.runtime import open_city
import numpy as np
city = open_city(sys.argv[1])
for lon, lat in ((-73.98, 40.75), (12.5, 41.9), (106.03, -40.78), (0.0, 90.0)):
    assert city.sample(lon, lat).shape == (1, 2)
    assert abs(city.row(lon, lat).sum() - 1) < 1e-12
drawn, outside = city.sample_points(np.array([[-73.98, 40.75], [0.0, 0.0]] * 2000), outside="drop")
assert (drawn >= 0).sum() == 2000 == outside.sum()
loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - ALLOWED
# What starts with an underscore comes with an installation, or a compiled module.
print(sorted(name for name in loaded if not name.startswith("_")))
"""


@pytest.mark.parametrize("name", ["plain", "rows"])
def test_numpy_is_all_that_is_needed(name: str, cities: Cities) -> None:
    _run_alone(sys.executable, cities[name])


def _run_alone(python: str | Path, city: Path) -> None:
    command = [python, "-c", _ALONE, city]
    done = subprocess.run(command, cwd=city.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_environment_with_numpy_alone(cities: Cities, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    quiet = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*quiet, "numpy"], check=True)
    subprocess.run([*quiet, "--no-deps", root], check=True)
    _run_alone(python, cities["plain"])
