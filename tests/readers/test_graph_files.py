"""Graphs of osmnx in GraphML files and GeoPackages: the same network, its gaps and systems seen to."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from pyproj import Geod

from mdpext_dask.readers.roads.csv_folder import write_folder
from mdpext_dask.readers.roads.graph_files import network_of
from mdpext_dask.readers.roads.network import RoadNetwork
from mdpext_dask.readers.roads.openstreetmap import read_osm
from mdpext_dask.readers.roads.read_network import read_roads
from tests.support.osm_files import write_osm
from tests.support.refusals import refusal
from tests.support.towns import STREETS, TOWN

osmnx = pytest.importorskip("osmnx")
networkx = pytest.importorskip("networkx")
pytest.importorskip("osmium")

_GEOD = Geod(ellps="WGS84")


def _table(network: RoadNetwork) -> tuple[list[tuple[float, float]], np.ndarray]:
    """Return the nodes in order of their places, and directed distances between them."""
    places = [(round(lon, 7), round(lat, 7)) for lon, lat in network.lonlat.tolist()]
    order = np.array(sorted(range(len(places)), key=places.__getitem__))
    return sorted(places), network.distances_to(order, directed=True)[order]


def _assert_same(one: RoadNetwork, other: RoadNetwork, rtol: float) -> None:
    places, distances = _table(one)
    others, table = _table(other)
    assert places == others
    np.testing.assert_allclose(distances, table, rtol=rtol)


@pytest.fixture
def graph(tmp_path: Path) -> Any:
    """Return osmnx's graph of a small town with one-way streets, bends, a roundabout and parallel streets."""
    # osmnx keeps isolated nodes, and drops islands in downloads.
    streets = {way: street for way, street in STREETS.items() if way != 110}
    return osmnx.graph_from_xml(write_osm(tmp_path / "town.osm", TOWN, streets))


def _saved(graph: Any, path: Path, **options: Any) -> RoadNetwork:
    save = osmnx.save_graphml if path.suffix == ".graphml" else osmnx.save_graph_geopackage
    save(graph, path, **options)
    return read_roads(str(path), None)


def test_every_file_of_a_graph_holds_the_same_network(graph: Any, tmp_path: Path) -> None:
    graphml = _saved(graph, tmp_path / "town.graphml")
    _assert_same(_saved(graph, tmp_path / "town.gpkg"), graphml, 1e-6)
    _assert_same(_saved(graph, tmp_path / "directed.gpkg", directed=True), graphml, 1e-6)
    # osmnx measures on a sphere, extracts are measured on the ellipsoid.
    whole = read_osm(tmp_path / "town.osm")
    assert graphml.length_km.sum() == pytest.approx(whole.length_km.sum(), rel=5e-3)
    _assert_same(whole, graphml, 5e-3)
    assert graphml.notes == ()
    assert graphml.directions_known


# From, to, metres, one way only. No two streets have the same ends, so that a simple graph holds them all.
_STREETS = [
    (1, 2, 850.0, False), (2, 3, 900.5, True), (3, 4, 1200.0, False), (4, 2, 1500.0, True),
    (4, 1, 2000, True),
]  # fmt: skip
_WAYS = {
    "directed.graphml": lambda graph, path: osmnx.save_graphml(graph, path),
    "simple.graphml": lambda graph, path: _write_text(networkx.DiGraph(graph), path),
    "multigraph.graphml": lambda graph, path: osmnx.save_graphml(osmnx.convert.to_undirected(graph), path),
    "graph.graphml": lambda graph, path: _write_text(
        networkx.Graph(osmnx.convert.to_undirected(graph)), path
    ),
    "streets.gpkg": lambda graph, path: osmnx.save_graph_geopackage(graph, path),
    "directed.gpkg": lambda graph, path: osmnx.save_graph_geopackage(graph, path, directed=True),
    "folder": lambda graph, path: path.mkdir() or write_folder(network_of(graph, "a graph"), path),
}


def _write_text(graph: Any, path: Path) -> None:
    """Write a graph with nodes that are called something, and attributes that nobody needs."""
    graph = networkx.relabel_nodes(graph, {node: f"node {node}" for node in graph})
    for *_, data in graph.edges(data=True):
        data.update({end: f"node {data[end]}" for end in ("from", "to") if end in data})
        data.update(maxspeed="[30", reversed="perhaps", osmid="one", geometry="LINE")
    for _, data in graph.nodes(data=True):
        data.update(street_count="many", elevation="high")
    networkx.write_graphml(graph, path)


def _few_streets(*, keep_directions: bool = True) -> Any:
    graph = networkx.MultiDiGraph(crs="epsg:4326")
    for node, place in enumerate([(12.0, 42.0), (12.01, 42.0), (12.02, 42.0), (12.01, 42.01)], start=1):
        graph.add_node(node, x=place[0], y=place[1])
    for u, v, metres, oneway in _STREETS:
        for ends in [(u, v)] if oneway else [(u, v), (v, u)]:
            graph.add_edge(*ends, osmid=u, length=metres, oneway=oneway and keep_directions)
    return graph


@pytest.mark.parametrize("name", _WAYS)
def test_readers_of_one_graph_agree(tmp_path: Path, name: str) -> None:
    _WAYS[name](_few_streets(), tmp_path / name)
    network = read_roads(str(tmp_path / name), None)
    assert network.directions_known
    assert network.largest_connected_part(directed=True).nodes == 4
    _assert_same(network, network_of(_few_streets(), "a graph"), 1e-6)


@pytest.mark.parametrize("oneway", ["True", "1", "[True, False]", "False"])
def test_undirected_graphs_without_directions_say_so(tmp_path: Path, oneway: str) -> None:
    """Which end of an edge comes first means nothing there, unless it has attributes from and to."""
    graph = networkx.Graph(_few_streets())
    for *_, data in graph.edges(data=True):
        data["oneway"] = oneway
    networkx.write_graphml(graph, tmp_path / "a.graphml")
    network = read_roads(str(tmp_path / "a.graphml"), None)
    assert network.directions_known == (oneway == "False")
    assert network.largest_connected_part(directed=False).nodes == 4


@pytest.mark.parametrize("name", ["town.graphml", "town.gpkg", "directed.gpkg"])
def test_edges_without_a_length_get_that_of_their_line(graph: Any, tmp_path: Path, name: str) -> None:
    assert {"geometry" in data for *_, data in graph.edges(data=True)} == {True, False}
    for number, edge in enumerate(graph.edges(keys=True)):
        if number % 2 and name.endswith("ml"):
            del graph.edges[edge]["length"]
        else:
            graph.edges[edge]["length"] = math.nan
    network = _saved(graph, tmp_path / name, **({"directed": True} if name.startswith("directed") else {}))
    _assert_same(network, read_osm(tmp_path / "town.osm"), 1e-6)
    assert "have no length" in network.notes[0]
    assert f"{len(network.start)} edges" in network.notes[0]


@pytest.mark.parametrize("name", ["town.graphml", "town.gpkg"])
def test_projected_graphs_are_brought_back_to_degrees(graph: Any, tmp_path: Path, name: str) -> None:
    for edge in graph.edges(keys=True):
        graph.edges[edge]["length"] = math.nan
    network = _saved(osmnx.project_graph(graph, to_crs="EPSG:32633"), tmp_path / name)
    np.testing.assert_allclose(
        sorted(map(tuple, network.lonlat)),
        sorted((d["x"], d["y"]) for _, d in graph.nodes(data=True)),
        atol=1e-8,
    )
    _assert_same(network, read_osm(tmp_path / "town.osm"), 1e-6)


def test_geopackage_without_the_layers_is_refused_with_those_it_has(graph: Any, tmp_path: Path) -> None:
    path = tmp_path / "town.gpkg"
    osmnx.graph_to_gdfs(graph, edges=False)[["geometry"]].to_file(path, layer="places", driver="GPKG")
    refusal(lambda: read_roads(str(path), None), "needs the layers nodes and edges, found places")


@pytest.mark.parametrize("column", ["osmid", "u", "oneway"])
def test_geopackage_without_a_column_is_refused(graph: Any, tmp_path: Path, column: str) -> None:
    path = tmp_path / "town.gpkg"
    nodes, edges = osmnx.graph_to_gdfs(graph)
    nodes, edges = nodes.reset_index(), edges.reset_index()
    layers = {"nodes": nodes, "edges": edges[["u", "v", "length", "oneway", "geometry"]]}
    name = "nodes" if column == "osmid" else "edges"
    layers[name] = layers[name].drop(columns=[column])
    for layer, frame in layers.items():
        frame.to_file(path, layer=layer, driver="GPKG")
    refusal(lambda: read_roads(str(path), None), f"{name}: column {column} is missing")


@pytest.mark.parametrize("name", ["town.gpkg", "town.graphml"])
@pytest.mark.parametrize(
    "content", [b"", b"SQLite format 3\x00" + b"x" * 200, b"roads", b"<html></html>", b"<graphml>"]
)
def test_file_that_is_none_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refusal(lambda: read_roads(str(path), None), str(path))


@pytest.mark.parametrize(
    ("node", "edge", "named"),
    [
        ({"x": 291000.0, "y": 4640000.0}, {}, "node 1: lon"),  # a graph that was projected to metres
        ({"x": math.nan}, {}, "node 1: its coordinates must be finite"),
        ({"x": "east"}, {}, "node 1: x 'east' is not a number"),
        ({"y": "41,9"}, {}, "node 1: y '41,9' is not a number; looks like a decimal comma, write 41.9"),
        ({"x": [12.0]}, {}, "node 1: x '[12.0]' is not a number"), ({"x": True}, {}, "node 1: x 'True' is"),
        ({}, {"length": -5.0}, "edge 1 to 2: has the length -5 m"),
        ({}, {"length": math.inf}, "edge 1 to 2: has the length inf"),
        ({}, {"length": "long"}, "edge 1 to 2: length 'long' is"),
        ({}, {"length": [5.0]}, "1 to 2: length '[5.0]'"),
    ],
)  # fmt: skip
def test_bad_graph_is_refused(node: dict[str, Any], edge: dict[str, Any], named: str) -> None:
    graph = _few_streets()
    graph.nodes[next(iter(graph.nodes))].update(node)
    graph.edges[next(iter(graph.edges(keys=True)))].update(edge)
    refusal(lambda: network_of(graph, "Rome, Italy"), "Rome, Italy: ", named)


_KEYS = (
    '<key id="x" for="node" attr.name="x"/><key id="y" for="node" attr.name="y"><default>42</default></key>'
)
_NODE = '<node id="{}"><data key="x">12.0{}</data></node>'


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ('{}<edge source="a" target="b"/></graph>', ""),
        ('{}<edge source="a" target="b"/></graph><graph/>', "more than one graph"),
        ("", "mismatched tag: line"),
        ('</graph><graph edgedefault="both"/>', "more than one"), ("<hyperedge/></graph>", "hyperedge"),
        ('{}<edge source="a" target="c"/></graph>', "an edge names node c, which"),
        ('{}<edge source="a"/></graph>', "edge 1: has no target"), ("{}</graph>", "is empty"),
        ("{}<node/></graph>", "node 3: has no id"),
        ('{}<node id="c"/></graph>', "node c: has no attribute x; found y"),
    ],
)  # fmt: skip
def test_graphml_of_other_programs(tmp_path: Path, graph: str, said: str) -> None:
    path = tmp_path / "a.graphml"
    graph = '<graph edgedefault="directed">' + graph.format(_NODE.format("a", 1) + _NODE.format("b", 2))
    path.write_text(f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{_KEYS}{graph}</graphml>')
    if said:
        refusal(lambda: read_roads(str(path), None), str(path), said)
    else:
        np.testing.assert_array_equal(read_roads(str(path), None).lonlat, [(12.01, 42), (12.02, 42)])


def test_graph_without_streets_is_refused() -> None:
    refusal(lambda: network_of(networkx.MultiDiGraph(), "Rome, Italy"), "empty")


def test_ids_that_are_no_numbers_are_refused(graph: Any, tmp_path: Path) -> None:
    path = tmp_path / "town.gpkg"
    nodes, edges = osmnx.graph_to_gdfs(graph)
    nodes = nodes.reset_index()
    nodes["osmid"] = [f"node {number}" for number in nodes["osmid"]]
    nodes.to_file(path, layer="nodes", driver="GPKG")
    edges.reset_index()[["u", "v", "length", "oneway", "geometry"]].to_file(
        path, layer="edges", driver="GPKG"
    )
    refusal(lambda: read_roads(str(path), None), "osmid must be whole numbers")


def _geopackage(path: Path, nodes: list[Any], lines: list[Any], ends: list[int]) -> str:
    """Write a GeoPackage of edges without lengths, as people make them elsewhere."""
    geopandas = pytest.importorskip("geopandas")
    ids = range(len(nodes))
    for layer, columns, shapes in (
        ("nodes", {"osmid": ids}, nodes),
        ("edges", {"u": ids[: len(ends)], "v": ends, "oneway": [False] * len(ends)}, lines),
    ):
        frame = geopandas.GeoDataFrame(columns, geometry=shapes, crs="EPSG:4326")
        frame.to_file(path, layer=layer, driver="GPKG")
    return str(path)


_CORNERS = [shapely.Point(12.0, 42.0), shapely.Point(12.01, 42.0), shapely.Point(12.02, 42.0)]
_DETOUR = [(12.0, 42.0), (12.005, 42.01), (12.01, 42.0)]


@pytest.mark.parametrize(
    ("line", "along"),
    [
        (shapely.MultiLineString([_DETOUR]), _DETOUR),
        (shapely.LineString(), [_DETOUR[0], _DETOUR[2]]),
        (None, [_DETOUR[0], _DETOUR[2]]),
    ],
)
def test_lines_as_other_programs_write_them(tmp_path: Path, line: Any, along: list[Any]) -> None:
    path = _geopackage(tmp_path / "a.gpkg", _CORNERS[:2], [line], [1])
    assert read_roads(path, None).length_km[0] * 1000 == pytest.approx(
        _GEOD.line_length(*zip(*along, strict=True))
    )


def test_nodes_that_are_no_points_are_refused(tmp_path: Path) -> None:
    nodes = [shapely.MultiPoint([corner]) for corner in _CORNERS]
    path = _geopackage(tmp_path / "a.gpkg", nodes, [shapely.LineString(_DETOUR)] * 2, [1, 2])
    refusal(lambda: read_roads(path, None), "nodes: a geometry is a MultiPoint, not a Point")


def test_an_edge_to_nowhere_is_named_where_it_has_no_length_either(tmp_path: Path) -> None:
    path = _geopackage(tmp_path / "a.gpkg", _CORNERS, [None, None], [1, 7])
    refusal(lambda: read_roads(path, None), "names node 7")
