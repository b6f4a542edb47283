"""Places by name: downloaded once, through osmnx's own code, kept with where they come from, then offline."""

import json
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import SpecError
from mdpext_dask.events import Note
from mdpext_dask.job.spec import files_of, load_job, parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.region import read_region
from mdpext_dask.readers.roads import downloads
from mdpext_dask.readers.roads.downloads import digests, outline_of_place, roads_of_place
from mdpext_dask.readers.roads.read_network import read_roads
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.map_server import MapServer, serving
from tests.support.osm_files import ROAD
from tests.support.refusals import refusal
from tests.support.towns import _grid

osmnx = pytest.importorskip("osmnx")
urllib3 = pytest.importorskip("urllib3")

JobMaker = Callable[..., dict[str, dict[str, Any]]]
PLACE = "Rome, Italy"
_NODES = _grid(5, 5)
_WAYS = {
    **{10 + row: ([1 + 5 * row + column for column in range(5)], ROAD) for row in range(5)},
    **{20 + column: ([1 + 5 * row + column for row in range(5)], ROAD) for column in range(5)},
}


def _ring(west: float, south: float, east: float, north: float) -> list[list[float]]:
    return [[west, south], [east, south], [east, north], [west, north], [west, south]]


# All but the eastern and the northern street.
_OUTLINE = {"type": "Polygon", "coordinates": [_ring(11.99, 41.99, 12.035, 42.035)]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDPEXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@contextmanager
def _serving(server: MapServer) -> Iterator[None]:
    """Serve canned answers, at osmnx's level of HTTP; nothing else is asked."""
    getaddrinfo = socket.getaddrinfo
    with serving(server) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(osmnx.settings, "nominatim_url", address + "/nominatim/")
        patch.setattr(osmnx.settings, "overpass_url", address + "/api")
        patch.setattr("time.sleep", lambda _: None)  # a pause out of politeness
        try:
            yield
        finally:
            socket.getaddrinfo = getaddrinfo  # which osmnx replaces


@pytest.fixture
def server(cache: Path) -> Iterator[MapServer]:
    assert cache
    server = MapServer(_OUTLINE, _NODES, _WAYS)
    with _serving(server):
        yield server


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with the roads and the outline of the place, to be copied."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with _serving(MapServer(_OUTLINE, _NODES, _WAYS)), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDPEXT_CACHE", str(folder))
        roads_of_place(PLACE)
    return folder


def _entry(cache: Path, kind: str) -> Path:
    [folder] = (cache / kind).iterdir()
    return folder


def _job(small_job: JobMaker, **domain: Any) -> dict[str, dict[str, Any]]:
    section = {"roads": None, "place": PLACE, "cell_km": 2.0, "refine": [1], **domain}
    return small_job(domain=section, outputs={"count": 4}, loss={"tasks": 3})


# --- downloading ----------------------------------------------------------------------------------


def test_place_is_downloaded_once_and_kept(server: MapServer, cache: Path) -> None:
    network = roads_of_place(PLACE)
    # Nothing of osmnx's own is left in the working folder.
    assert [path.name for path in cache.parent.iterdir()] == ["cache"]
    graph = osmnx.graph_from_place(PLACE, network_type="drive")
    assert {tuple(np.round(p, 7)) for p in network.lonlat.tolist()} == {
        (round(d["x"], 7), round(d["y"], 7)) for _, d in graph.nodes(data=True)
    }
    assert network.length_km.sum() * 1000 == pytest.approx(sum(d for *_, d in graph.edges(data="length")))
    assert network.source == PLACE
    assert network.directions_known
    asked = len(server.asked)
    again = read_roads(None, PLACE)
    assert len(server.asked) == asked
    for name in ("lonlat", "start", "end", "length_km", "oneway"):
        np.testing.assert_array_equal(getattr(again, name), getattr(network, name))
    assert list(cache.rglob(".*")) == []


def test_provenance_says_where_it_comes_from(server: MapServer, cache: Path) -> None:
    network = roads_of_place(PLACE)
    folder = _entry(cache, "roads")
    assert folder.name.startswith("rome-italy-")
    facts = json.loads((folder / "provenance.json").read_text())
    expected = {
        "place": PLACE, "geocoder": osmnx.settings.nominatim_url, "server": osmnx.settings.overpass_url,
        "nodes": network.nodes, "edges": len(network.start),
    }  # fmt: skip
    assert facts.items() >= expected.items()
    assert facts["geocoder_answer"].items() >= {"display_name": "Rome, Italy, Earth", "osm_id": 41485}.items()
    assert facts["software"]["osmnx"] == osmnx.__version__
    assert "OpenStreetMap" in facts["attribution"]
    assert "ODbL" in facts["licence"]
    assert set(facts["sha256"]) == {"nodes.csv.gz", "edges.csv.gz"}
    assert facts["downloaded"].endswith("+00:00")
    assert facts["downloaded"][:10] in network.notes[0]
    outline = json.loads((_entry(cache, "outlines") / "provenance.json").read_text())
    assert facts["outline_sha256"] == outline["sha256"]["outline.geojson"]
    assert server.asked.count("/nominatim/search") == 1


def test_kept_place_needs_no_network(server: MapServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("there is no network")

    before = roads_of_place(PLACE)
    asked = len(server.asked)
    # Not the socket itself: requests would leave it open.
    monkeypatch.setattr("urllib3.util.connection.create_connection", refuse)
    told = "domain.place", "Elsewhere", "could not be downloaded", "domain.roads"
    refusal(lambda: roads_of_place("Elsewhere"), *told)
    assert len(list((cache / "roads").iterdir())) == 1  # nothing half done is left
    monkeypatch.setitem(sys.modules, "osmnx", None)
    assert roads_of_place(PLACE).nodes == before.nodes
    assert read_region("place", PLACE).box_degrees == (11.99, 41.99, 12.035, 42.035)
    refusal(lambda: roads_of_place("Elsewhere"), "needs osmnx", kind=SpecError)
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (OSError("there is no network"), "127.0.0.1 cannot be reached"),
        (socket.gaierror(-2, "Name or service not known"), "127.0.0.1 cannot be reached"),
        (TimeoutError("timed out"), "127.0.0.1 has not answered in time"),
        (urllib3.exceptions.SSLError("self-signed"), "no secure connection to 127.0.0.1"),
    ],
)
@pytest.mark.usefixtures("server", "cache")
def test_without_a_connection_it_says_so_in_few_words(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, why: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr("urllib3.util.connection.create_connection", fail)
    said = refusal(lambda: roads_of_place("Elsewhere"))
    assert said == (
        f"domain.place: 'Elsewhere' could not be downloaded ({why}); offline, give domain.roads a folder or "
        "file instead"
    )


@pytest.mark.parametrize(
    ("place", "answer", "told"),
    [
        ("Nowhere at all", {}, "Nowhere"),
        (PLACE, {"status": 400}, "could not be downloaded"),
        # Overpass then sends what it has, with a remark, which osmnx takes for all there is.
        (PLACE, {"remark": {"remark": "runtime error: Query timed out"}}, "Query timed out"),
        (PLACE, {"outline": {"type": "Point", "coordinates": [12.0, 42.0]}}, "Polygon"),
    ],
)
def test_failed_download(
    server: MapServer, cache: Path, monkeypatch: Any, place: str, answer: Any, told: str
) -> None:
    monkeypatch.setattr(osmnx.settings, "use_cache", True)
    with monkeypatch.context() as patch:
        for name, value in answer.items():
            patch.setattr(server, name, value)
        refusal(lambda: roads_of_place(place), "domain.place", place, "domain.roads", told)
    assert osmnx.settings.use_cache  # osmnx got its own cache back
    assert not [path for path in (cache / "roads").rglob("*") if path.is_file()]
    shutil.rmtree(cache)
    assert roads_of_place(PLACE).nodes > 0


def test_place_across_the_antimeridian_is_refused_with_a_way_out(server: MapServer) -> None:
    server.outline = {
        "type": "MultiPolygon",
        "coordinates": [[_ring(179.0, -17.0, 180.0, -16.0)], [_ring(-180.0, -17.0, -179.0, -16.0)]],
    }
    refusal(lambda: roads_of_place("Fiji"), "antimeridian", "domain.roads an extract")
    # Its outline is as good as any.
    assert read_region("place:Fiji").box_degrees == (179.0, -17.0, -179.0, -16.0)


@pytest.mark.parametrize("place", ["Αθήνα", "../../etc", "a" * 300, "Москва / Moscow"])
def test_any_name_has_a_folder_in_the_cache(server: MapServer, cache: Path, place: str) -> None:
    outline_of_place(place, "domain.region")
    folder = _entry(cache, "outlines")
    assert folder.resolve().parent == (cache / "outlines").resolve()
    assert json.loads((folder / "provenance.json").read_text())["place"] == place
    assert server.asked == ["/nominatim/search"]


def test_runs_at_the_same_time_end_with_one_download(server: MapServer, cache: Path) -> None:
    barrier, found = threading.Barrier(2), []

    def wait(*arguments: Any) -> dict[str, Any]:
        facts = downloads._download_outline(*arguments)
        barrier.wait(timeout=30)  # both have downloaded before either puts it in its place
        return facts

    def run() -> None:
        found.append(downloads._kept("outlines", PLACE, "domain.region", wait))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 2
    assert [folder for folder, _ in found] == [_entry(cache, "outlines")] * 2
    assert found[0] == found[1]


# --- what may be wrong with the cache --------------------------------------------------------------


def _rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "nodes.csv.gz").write_bytes(b""), "nodes.csv.gz has changed"),
        (lambda f: (f / "edges.csv.gz").unlink(), "edges.csv.gz is missing"),
        (lambda f: (f / "provenance.json").unlink(), "provenance.json is missing"),
        (
            _rewrite("provenance.json", lambda text: text.replace("Rome, It", "Rome, At")),
            "is of something else",
        ),
        (_rewrite("provenance.json", lambda text: text.replace("sha256", "sha")), "cannot be read"),
        *((_rewrite("provenance.json", lambda _, t=t: t), "cannot be read") for t in ("{", "[]", "{}")),
    ],
)
def test_damage_names_folder(kept: Path, cache: Path, damage: Callable[[Path], object], named: str) -> None:
    shutil.copytree(kept, cache)
    roads_of_place(PLACE)
    folder = _entry(cache, "roads")
    damage(folder)
    refusal(lambda: roads_of_place(PLACE), "domain.place", PLACE, named, f"delete {folder}")
    assert digests(PLACE, None) == {}


def test_what_cannot_be_read_of_a_cache_has_no_digest(kept: Path, cache: Path) -> None:
    """Going on with a store asks for digests, and needs none."""
    shutil.copytree(kept, cache)
    table = _entry(cache, "roads") / "nodes.csv.gz"
    table.unlink()
    table.mkdir()
    refusal(lambda: roads_of_place(PLACE), "cannot be used")
    assert digests(PLACE, None) == {}


def test_deleted_download_is_downloaded_anew(server: MapServer, kept: Path, cache: Path) -> None:
    shutil.copytree(kept, cache)
    before = roads_of_place(PLACE)
    assert not server.asked
    shutil.rmtree(_entry(cache, "roads"))
    assert roads_of_place(PLACE).nodes == before.nodes
    assert "/api/interpreter" in server.asked
    assert "/nominatim/search" not in server.asked  # the outline is still there


def test_cache_that_cannot_be_written_is_one_line(server: MapServer, cache: Path) -> None:
    cache.write_text("a file")
    refusal(lambda: roads_of_place(PLACE), "the cache in")
    assert not server.asked


def test_without_the_variable_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("MDPEXT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert downloads._folder("roads", PLACE).name.startswith("rome-italy-")
    assert "mdpext" in str(downloads._folder("roads", PLACE))


# --- regions and jobs ------------------------------------------------------------------------------


def test_region_is_the_outline_of_a_place(server: MapServer, small_job: JobMaker, tmp_path: Path) -> None:
    own = parse_job(_job(small_job, region="place"))
    assert (files_of(own), own.identity()["domain"]["region"]) == ({}, "place")
    assert build_geometry(own).notes
    other = parse_job(small_job(domain={"region": "place:Midtown"}))
    assert other.identity()["domain"]["region"] == "place:Midtown"
    ring = [[-74.0, 40.72], [-73.94, 40.72], [-73.94, 40.8], [-74.0, 40.72]]
    server.outline = {"type": "Polygon", "coordinates": [ring]}
    geometry = build_geometry(other)
    assert not geometry.kept.all()
    assert geometry.downloads.keys() == {"domain.region"}
    # A job file's folder does not enter the name.
    (tmp_path / "job.toml").write_text(
        '[domain]\nplace = "Rome, Italy"\nregion = "place"\ncell_km = 1.0\nrefine = [1]\n'
        "[privacy]\nepsilon_per_km = 1.0\n[outputs]\ncount = 3\n"
    )
    assert load_job(tmp_path / "job.toml").domain.region == "place"
    assert load_job(tmp_path / "job.toml", ["domain.region=place:Midtown"]).domain.region == "place:Midtown"


def test_region_of_no_place_is_refused(small_job: JobMaker) -> None:
    job = small_job(domain={"region": "place"})
    refusal(lambda: parse_job(job), 'region = "place"', '"place:NAME"', kind=SpecError)


def test_another_download_is_told(server: MapServer, cache: Path, small_job: Any, tmp_path: Path) -> None:
    spec = parse_job(_job(small_job))
    told: list[Any] = []
    build(spec, str(tmp_path / "out.zarr"), observer=told.append)
    store = MechanismStore.open(str(tmp_path / "out.zarr"))
    assert store.attributes["downloads"] == digests(PLACE, None) != {}
    assert store.attributes["fingerprint"] == spec.fingerprint()

    def notes(action: Callable[[Any], object]) -> list[str]:
        told.clear()
        action(told.append)
        return [event.text for event in told if isinstance(event, Note) and "another download" in event.text]

    def again(observer: Any) -> object:
        return build(spec, str(tmp_path / "out.zarr"), observer=observer)

    assert notes(again) == []
    before = (tmp_path / "out.zarr" / "zarr.json").read_bytes()
    server.nodes = {**_NODES, 1: (12.003, 42.0)}
    shutil.rmtree(_entry(cache, "roads"))
    assert notes(again) == []  # with nothing in the cache there is nothing to compare
    build_domain(spec)
    assert ["domain.place" in note for note in notes(again)] == [True]
    # The store is as it was: its tables are its own.
    assert (tmp_path / "out.zarr" / "zarr.json").read_bytes() == before
    build(spec, str(tmp_path / "out.zarr"), overwrite=True)
    assert notes(again) == []
