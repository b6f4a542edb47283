"""Extracts of OpenStreetMap: osmnx makes the same network of them, and every format holds the same."""

import bz2
import gzip
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyproj import Geod

from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.readers.roads import openstreetmap as osm
from mdpext_dask.readers.roads.network import Arcs, RoadNetwork
from mdpext_dask.readers.roads.read_network import read_roads
from tests.support.osm_files import ROAD, Ways, convert, osm_xml, write_osm
from tests.support.refusals import refusal
from tests.support.towns import ONE_WAY, STREETS, TOWN, _grid

pytest.importorskip("osmium")

JobMaker = Callable[..., dict[str, dict[str, Any]]]
_GEOD = Geod(ellps="WGS84")


NOT_ROADS: Ways = {
    200: ([2, 7], {"highway": "footway"}), 201: ([7, 8], {"highway": "service"}),
    202: ([8, 13], {**ROAD, "access": "private"}), 203: ([3, 8], {**ROAD, "motor_vehicle": "no"}),
    204: ([16, 17, 22, 21, 16], {"highway": "residential", "area": "yes"}),
    205: ([1, 25], {"route": "ferry", "duration": "00:20"}), 206: ([2, 8], {"building": "yes"}),
    207: ([9, 10], {"highway": "unclassified", "service": "driveway"}),
}  # fmt: skip


def _by_place(network: RoadNetwork) -> dict[tuple[float, float], int]:
    return {(round(lon, 7), round(lat, 7)): i for i, (lon, lat) in enumerate(network.lonlat.tolist())}


def _directed(network: RoadNetwork, order: Iterable[tuple[float, float]]) -> np.ndarray:
    """Return travel distances between places, in their order."""
    index = np.array([_by_place(network)[place] for place in order])
    return network.distances_to(index, directed=True)[index]


def _osmnx_on_ground(path: Path) -> Any:
    """Return osmnx's graph of a file, with lengths of geodesics in the place of great circles on a sphere."""
    osmnx = pytest.importorskip("osmnx")
    graph = osmnx.graph_from_xml(path, simplify=False, retain_all=True)
    graph.remove_nodes_from([node for node, edges in list(graph.degree()) if edges == 0])
    place = {node: (data["x"], data["y"]) for node, data in graph.nodes(data=True)}
    for u, v, data in graph.edges(data=True):
        data["length"] = _GEOD.line_length(*zip(place[u], place[v], strict=True))
    return osmnx.simplify_graph(graph)


def _assert_is(network: RoadNetwork, graph: Any) -> None:
    """Whether the network is osmnx's graph: nodes, total length, and all distances between nodes."""
    networkx = pytest.importorskip("networkx")
    places = {n: (round(d["x"], 7), round(d["y"], 7)) for n, d in graph.nodes(data=True)}
    assert set(_by_place(network)) == set(places.values())
    total = sum(length for *_, length in graph.edges(data="length"))
    assert network.length_km.sum() * 1000 == pytest.approx(total, rel=1e-9)
    found = _directed(network, places.values())
    lengths = dict(networkx.all_pairs_dijkstra_path_length(graph, weight="length"))
    expected = [[lengths[a].get(b, np.inf) / 1000 for b in places] for a in places]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- the same as osmnx -----------------------------------------------------------------------------


def test_town_is_what_osmnx_makes_of_it(tmp_path: Path) -> None:
    # osmnx takes every way of a file for a road, so it is given those that are.
    roads = write_osm(tmp_path / "roads.osm", TOWN, STREETS)
    everything = write_osm(tmp_path / "town.osm", TOWN, {**STREETS, **NOT_ROADS})
    network = osm.read_osm(everything)
    _assert_is(network, _osmnx_on_ground(roads))
    # The loop 3-8-9-4, the ring and the roundabout are there; their bends are not.
    stays = {3, 4, 13, 14, 18, 90, 91}
    goes = {2, 8, 9, 19, 20, 24}
    where = _by_place(network)
    assert all(TOWN[node] in where for node in stays)
    assert not any(TOWN[node] in where for node in goes)
    assert network.notes == (f"{everything}: ferries are left out, which are no roads: 1",)
    assert network.directions_known


@st.composite
def _random_ways(draw: st.DrawFn) -> Ways:
    """Return ways over a lattice of 4 x 3: rings, self-crossings, doubled pieces and one-ways all occur."""
    node = st.integers(1, 12)
    tags = st.sampled_from([ROAD, ONE_WAY, {**ROAD, "oneway": "-1"}, {**ROAD, "junction": "roundabout"}])
    ways = draw(st.lists(st.tuples(st.lists(node, min_size=2, max_size=7), tags), min_size=1, max_size=6))
    return {100 + number: way for number, way in enumerate(ways)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=_random_ways())
def test_distances_are_those_of_the_graph_before_nodes_were_taken_out(tmp_path: Path, ways: Ways) -> None:
    """Between nodes that stay, whatever the ways; and those of osmnx stay all."""
    networkx = pytest.importorskip("networkx")
    osmnx = pytest.importorskip("osmnx")
    path = write_osm(tmp_path / "random.osm", _grid(4, 3), ways)
    graph = osmnx.graph_from_xml(path, simplify=False, retain_all=True)
    graph.remove_nodes_from([n for n in list(graph) if graph.degree(n) == 0])
    place = {n: (round(d["x"], 7), round(d["y"], 7)) for n, d in graph.nodes(data=True)}
    endpoints = {place[n] for n in graph if osmnx.simplification._is_endpoint(graph, n, None, None)}
    if not endpoints:  # rings, and nodes that are named twice: some of these are read, and none has to be
        return
    network = osm.read_osm(path)
    assert endpoints <= set(_by_place(network))
    for u, v, data in graph.edges(data=True):
        data["length"] = _GEOD.line_length(*zip(place[u], place[v], strict=True)) / 1000
    kept = {n: place[n] for n in graph if place[n] in _by_place(network)}
    lengths = {a: networkx.single_source_dijkstra_path_length(graph, a, weight="length") for a in kept}
    expected = [[lengths[a].get(b, np.inf) for b in kept] for a in kept]
    np.testing.assert_allclose(_directed(network, kept.values()), expected, rtol=1e-6, atol=1e-9)


def test_filter_is_that_of_osmnx() -> None:
    overpass = pytest.importorskip("osmnx")._overpass
    told = dict(re.findall(r'\["(\w+)"!~"([^"]*)"\]', overpass._get_network_filter("drive")))
    highway = re.findall(r'\["highway"!~"([^"]*)"\]', overpass._get_network_filter("drive"))
    assert {**told, "highway": highway[0]} == osm.EXCLUDED


@pytest.mark.parametrize(
    ("expected", "tags"),
    [
        (True, {"highway": "motorway"}), (True, {"highway": "living_street"}),
        (True, {"highway": "motorway_link", "access": "permissive"}),
        (True, {"highway": "residential", "access": "no"}),  # osmnx's filter refuses what is private only
        (False, {"highway": "residential", "motorcar": "no"}), (False, {"highway": "track"}),
        (False, {"highway": "pedestrian"}), (False, {"highway": "construction"}), (False, {}),
        (False, {"railway": "rail"}),
    ],
)  # fmt: skip
def test_roads_are_told_from_what_is_none(expected: bool, tags: dict[str, str]) -> None:
    assert osm.is_drivable(tags) == expected


@pytest.mark.parametrize(
    ("expected", "tags"),
    [
        (0, {}), (0, {"oneway": "no"}), (1, {"oneway": "yes"}), (1, {"oneway": "1"}), (-1, {"oneway": "-1"}),
        (-1, {"oneway": "reverse"}), (0, {"oneway": "reversible"}), (0, {"oneway": "alternating"}),
        (1, {"junction": "roundabout"}), (1, {"junction": "circular"}),
        (-1, {"junction": "roundabout", "oneway": "-1"}), (0, {"junction": "circular", "oneway": "no"}),
        (1, {"highway": "motorway"}), (0, {"highway": "motorway", "oneway": "no"}),
        (0, {"highway": "motorway", "oneway": "reversible"}), (0, {"highway": "motorway_link"}),
        (1, {"highway": "motorway", "oneway": "unheard of"}),
    ],
)  # fmt: skip
def test_directions_are_read_from_the_tags(expected: int, tags: dict[str, str]) -> None:
    assert osm.direction({"highway": "residential", **tags}) == expected


# --- junctions -------------------------------------------------------------------------------------


def _both(*edges: tuple[int, int, float]) -> list[tuple[int, int, float]]:
    return [*edges, *((b, a, length) for a, b, length in edges)]


_RING = [(2, 3, 1.0), (3, 4, 1.0), (4, 2, 1.0)]


@pytest.mark.parametrize(
    ("edges", "names", "joined", "rings"),
    [
        pytest.param(
            _both(*((i, i + 1, 1.0) for i in range(20))), [0, 20], _both((0, 20, 20)), 0, id="many pieces"
        ),
        pytest.param([(0, 1, 1), (1, 2, 2), (2, 3, 4)], [0, 3], [(0, 3, 7)], 0, id="one way"),
        pytest.param(
            [*_both((0, 1, 1)), (1, 2, 2), (2, 3, 2)],
            [0, 1, 3], [*_both((0, 1, 1)), (1, 3, 4)], 0, id="where a one-way road begins is a node",
        ),
        pytest.param(
            [*_both((0, 1, 1)), (1, 2, 1), (2, 3, 1), (3, 1, 1)],
            [0, 1], [*_both((0, 1, 1)), (1, 1, 3)], 0, id="a ring at the end is a loop",
        ),
        pytest.param(
            [*_both((0, 1, 1)), *_RING], [0, 1], _both((0, 1, 1)), 1, id="a ring that meets no road"
        ),
        pytest.param(
            _both((0, 1, 1), *_RING), [0, 1], _both((0, 1, 1)), 1, id="a two-way ring that meets no road"
        ),
        pytest.param(
            [(0, 1, 3), (0, 1, 1), (1, 2, 1), (1, 2, 5)], [0, 2], [(0, 2, 2)], 0, id="the shortest counts"
        ),
        pytest.param(_both((0, 1, 0), (1, 2, 0)), [0, 2], _both((0, 2, 0)), 0, id="no length"),
        pytest.param(
            [(0, 1, 1), (1, 2, 2), (2, 1, 4), (1, 0, 8)], [0, 2], [(0, 2, 3), (2, 0, 12)], 0,
            id="longer in one direction",
        ),
    ],
)  # fmt: skip
def test_pieces_are_joined_at_junctions(
    edges: list[tuple[int, int, float]], names: list[int], joined: list[tuple[int, int, float]], rings: int
) -> None:
    start, end, length = map(np.array, zip(*edges, strict=True))
    kept, arcs, found_rings = osm.join_at_junctions(Arcs(start, end, length.astype(float)), end.max() + 1)
    found = zip(kept[arcs.start].tolist(), kept[arcs.end].tolist(), arcs.length_km.tolist(), strict=True)
    assert (kept.tolist(), set(found), found_rings) == (names, set(joined), rings)


# --- formats ---------------------------------------------------------------------------------------


def _assert_same(one: RoadNetwork, other: RoadNetwork) -> None:
    for name in ("lonlat", "start", "end", "length_km", "oneway"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.fixture
def town(tmp_path: Path) -> Path:
    return write_osm(tmp_path / "town.osm", TOWN, {**STREETS, **NOT_ROADS})


@pytest.mark.parametrize("suffix", [".osm.bz2", ".osm.gz", ".osm.pbf", ".pbf"])
def test_every_format_holds_the_same_network(town: Path, suffix: str) -> None:
    same = town.with_name("same" + suffix)
    packers = {".osm.bz2": bz2.compress, ".osm.gz": gzip.compress}
    if suffix in packers:
        same.write_bytes(packers[suffix](town.read_bytes()))
    else:
        convert(town, same)
    _assert_same(read_roads(str(same), None), osm.read_osm(town))


def test_every_way_to_find_places_finds_the_same(town: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = osm.read_osm(town)
    ordered = convert(town, town.with_name("sorted.osm.pbf"), says_sorted=True)
    called = []
    by_table = osm._places_by_table
    monkeypatch.setattr(osm, "_places_by_table", lambda *a: called.append(1) or by_table(*a))
    _assert_same(osm.read_osm(ordered), expected)
    assert called == [1]
    monkeypatch.setattr(osm, "_LARGEST_WITH_TABLE", 0)
    _assert_same(osm.read_osm(ordered), expected)  # by a set of ids
    assert called == [1]


def test_order_in_a_file_does_not_matter(tmp_path: Path) -> None:
    lines = osm_xml(TOWN, STREETS).splitlines()
    first = next(i for i, line in enumerate(lines) if "<way" in line)
    backwards = [*lines[:2], *lines[first:-1], *lines[first - 1 : 1 : -1], lines[-1]]
    shuffled = tmp_path / "shuffled.osm"
    shuffled.write_text("\n".join(backwards))
    _assert_same(osm.read_osm(shuffled), osm.read_osm(write_osm(tmp_path / "town.osm", TOWN, STREETS)))


@pytest.mark.parametrize("suffix", [".osm", ".osm.pbf", ".osm.bz2", ".osm.gz"])
@pytest.mark.parametrize("damage", ["empty", "cut", "nonsense"])
def test_damaged_file_is_one_clear_line(town: Path, suffix: str, damage: str) -> None:
    path = convert(town, town.with_name("damaged" + suffix))
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "nonsense": b"roads" * 99}[damage])
    refusal(lambda: read_roads(str(path), None), str(path))


def test_file_without_roads_is_one_clear_line(tmp_path: Path) -> None:
    path = write_osm(tmp_path / "paths.osm", TOWN, NOT_ROADS)
    refusal(lambda: osm.read_osm(path), "no drivable roads")


# --- what is messy ---------------------------------------------------------------------------------


def test_roads_end_where_the_extract_is_cut(tmp_path: Path) -> None:
    """Nodes 3 and 7 are not in the file: what leads there and on is not bridged."""
    nodes = {node: place for node, place in _grid(5, 1).items() if node != 3}
    path = write_osm(tmp_path / "cut.osm", nodes, {1: ([1, 2, 3, 4, 5], ROAD), 2: ([2, 7], ROAD)})
    network = osm.read_osm(path)
    assert set(_by_place(network)) == {nodes[n] for n in (1, 2, 4, 5)}
    assert network.notes == (f"{path}: nodes of its roads that are not in the file: 2; the roads end there",)
    assert np.isinf(_directed(network, [nodes[1], nodes[4]])[0, 1])


def test_extract_without_any_node_is_one_clear_line(tmp_path: Path) -> None:
    path = write_osm(tmp_path / "ways.osm", {}, {1: ([1, 2], ROAD)})
    refusal(lambda: osm.read_osm(path), "none of the 2 nodes")


def test_of_ways_that_are_there_twice_the_last_counts(tmp_path: Path) -> None:
    nodes = _grid(3, 1)
    text = osm_xml(nodes, {1: ([1, 2, 3], ROAD)}).replace(
        "</osm>", osm_xml({}, {1: ([1, 2], ROAD)}).split("\n", 2)[2]
    )
    path = tmp_path / "twice.osm"
    path.write_text(text)
    network = osm.read_osm(path)
    assert set(_by_place(network)) == {nodes[1], nodes[2]}
    assert network.notes == (f"{path}: ways that are there more than once: 1; the last one of each counts",)


@pytest.mark.parametrize("says_sorted", [True, False])
def test_of_nodes_that_are_there_twice_the_first_counts(tmp_path: Path, says_sorted: bool) -> None:
    nodes = _grid(2, 1)
    text = osm_xml(nodes, {1: ([1, 2], ROAD)})
    line = next(line for line in text.splitlines() if 'id="2"' in line)
    path = tmp_path / "twice.osm"
    path.write_text(text.replace(line, line + "\n" + line.replace("12.0100000", "12.0300000")))
    network = osm.read_osm(convert(path, tmp_path / "twice.osm.pbf", says_sorted=says_sorted))
    assert set(_by_place(network)) == set(nodes.values())


def test_nodes_that_were_never_uploaded_have_negative_ids(tmp_path: Path) -> None:
    nodes = {-1: (12.0, 42.0), -2: (12.01, 42.0)}
    network = osm.read_osm(write_osm(tmp_path / "josm.osm", nodes, {-7: ([-1, -2], ROAD)}))
    assert set(_by_place(network)) == set(nodes.values())


def test_a_network_of_rings_alone_is_empty(tmp_path: Path) -> None:
    path = write_osm(tmp_path / "ring.osm", _grid(2, 2), {1: ([1, 2, 4, 3, 1], ONE_WAY)})
    refusal(lambda: osm.read_osm(path), "empty")


def test_an_island_is_left_out_and_told(small_job: JobMaker, tmp_path: Path) -> None:
    nodes = {**_grid(3, 3), 90: (12.1, 42.1), 91: (12.11, 42.1)}
    streets: Ways = {
        **{row: ([3 * row + c for c in (1, 2, 3)], ROAD) for row in range(3)},
        **{10 + column: ([column + r for r in (1, 4, 7)], ROAD) for column in range(3)},
    }
    ways = {**streets, 20: ([90, 91], ROAD), 21: ([9, 90], {"route": "ferry"})}
    path = write_osm(tmp_path / "island.osm", nodes, ways)
    domain = build_domain(
        parse_job(small_job(domain={"roads": str(path), "cell_km": 1.0, "refine": [1]}, outputs={"count": 5}))
    )
    notes = "; ".join(domain.notes)
    assert "ferries are left out, which are no roads: 1" in notes
    assert "5 of 7 nodes" in notes  # corners are bends, of which nothing is left


# --- a box -----------------------------------------------------------------------------------------


def test_only_roads_that_touch_the_box_are_read(tmp_path: Path) -> None:
    nodes = _grid(6, 2)
    ways: Ways = {1: ([1, 2, 3], ROAD), 2: ([3, 4, 5, 6], ROAD), 3: ([7, 8], ROAD), 4: ([11, 12], ROAD)}
    path = write_osm(tmp_path / "country.osm", nodes, ways)
    network = osm.read_osm(path, (12.0, 41.999, 12.015, 42.001))
    assert set(_by_place(network)) == {nodes[1], nodes[3]}
    assert network.notes == (f"{path}: 3 of 4 roads do not touch domain.bbox and were not read",)
    # A road that crosses the box has no node in it.
    assert osm.read_osm(path, (12.022, 41.999, 12.028, 42.001)).nodes == 2
    refusal(lambda: osm.read_osm(path, (13.0, 41.0, 13.1, 42.0)), "no road within reach")


def test_a_jobs_box_reaches_the_reader(small_job: JobMaker, tmp_path: Path) -> None:
    path = write_osm(tmp_path / "town.osm", TOWN, STREETS)
    section = {"roads": str(path), "bbox": [12.0, 42.0, 12.04, 42.04], "cell_km": 1.0, "refine": [1]}
    geometry = build_geometry(parse_job(small_job(domain=section, outputs={"count": 4})))
    assert geometry.network.lonlat.max() < 42.1
    assert any("do not touch domain.bbox" in note for note in geometry.notes)


# --- the antimeridian ------------------------------------------------------------------------------


def test_roads_go_on_across_the_antimeridian(tmp_path: Path) -> None:
    """OpenStreetMap cuts a road there: nodes 2 and 3 are one place."""
    nodes = {
        1: (179.99, -16.8), 2: (180.0, -16.8), 3: (-180.0, -16.8), 4: (-179.99, -16.8), 5: (-179.99, -16.7),
    }  # fmt: skip
    ways: Ways = {1: ([1, 2], ROAD), 2: ([3, 4], ROAD), 3: ([4, 5], ROAD)}
    path = write_osm(tmp_path / "taveuni.osm", nodes, ways)
    network = osm.read_osm(path)
    assert network.notes == (f"{path}: nodes that were joined across the antimeridian: 1",)
    assert set(_by_place(network)) == {nodes[1], nodes[5]}
    east_km = _GEOD.line_length([179.99, 180.01], [-16.8, -16.8]) / 1000
    north_km = _GEOD.line_length([-179.99, -179.99], [-16.8, -16.7]) / 1000
    assert _directed(network, [nodes[1], nodes[5]])[0, 1] == pytest.approx(east_km + north_km, rel=1e-6)
    assert network.box_degrees == (179.99, -16.8, -179.99, -16.7)
    # And a box across it takes what lies on both sides.
    assert osm.read_osm(path, (179.995, -16.81, -179.995, -16.79)).nodes == 2
    assert osm.read_osm(path, (-179.999, -16.79, -179.0, -16.71)).nodes == 2
