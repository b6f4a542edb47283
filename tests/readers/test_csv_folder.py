"""Road networks: what is read, which part is kept, and that distances are shortest distances."""

import gzip
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.errors import SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.readers.roads.network import ground_km
from mdpext_dask.readers.roads.read_network import RoadNetwork, points_path, read_roads
from tests.support.refusals import refusal

JobMaker = Callable[..., dict[str, dict[str, Any]]]
# From node, to node, length in km, one way only.
Edge = tuple[int, int, float, bool]


def _network(nodes: int, edges: Iterable[Edge]) -> RoadNetwork:
    start, end, length, oneway = zip(*edges, strict=True)
    lonlat = np.stack([12 + 0.01 * np.arange(nodes), np.full(nodes, 42.0)], axis=-1)
    return RoadNetwork(
        lonlat, np.array(start), np.array(end), np.array(length), np.array(oneway), True, "a test", nodes
    )


def _floyd_warshall(nodes: int, edges: Iterable[Edge], *, directed: bool) -> list[list[float]]:
    """Return distances between all nodes, by the definition."""
    distance = [[0.0 if a == b else math.inf for b in range(nodes)] for a in range(nodes)]
    for a, b, length, oneway in edges:
        distance[a][b] = min(distance[a][b], length)
        if not (directed and oneway):
            distance[b][a] = min(distance[b][a], length)
    for via in range(nodes):
        for a in range(nodes):
            for b in range(nodes):
                distance[a][b] = min(distance[a][b], distance[a][via] + distance[via][b])
    return distance


def _distances(network: RoadNetwork, *, directed: bool) -> list[list[float]]:
    table: list[list[float]] = network.distances_to(np.arange(network.nodes), directed=directed).tolist()
    return table


@st.composite
def _graphs(draw: st.DrawFn) -> tuple[int, list[Edge]]:
    nodes = draw(st.integers(2, 7))
    node = st.integers(0, nodes - 1)
    # Eighths of a kilometre are exact in float32; zero lengths, loops and parallel edges all occur.
    length = st.integers(0, 40).map(lambda eighths: eighths / 8)
    return nodes, draw(st.lists(st.tuples(node, node, length, st.booleans()), min_size=1, max_size=16))


def _folder(folder: Path, nodes: Iterable[str], edges: Iterable[str]) -> str:
    """Write the lines of both files, headers included."""
    folder.mkdir(exist_ok=True)
    for name, lines in (("nodes.csv.gz", nodes), ("edges.csv.gz", edges)):
        (folder / name).write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return str(folder)


_NODE_COLUMNS, _EDGE_COLUMNS = "id,lon,lat", "u,v,length_m,oneway"
_NODES = [_NODE_COLUMNS, "30,12.00,42.00", "10,12.01,42.00", "20,12.02,42.00"]
_EDGES = [_EDGE_COLUMNS, "30,10,800,0", "10,20,900.5,1"]


# --- distances -------------------------------------------------------------------------------------


def test_columns_follow_the_targets_also_where_they_repeat() -> None:
    network = _network(3, [(0, 1, 1.0, True), (1, 2, 2.0, True)])
    table = network.distances_to(np.array([2, 0, 2]), directed=True)
    assert (table.tolist(), table.dtype) == ([[3, 0, 3], [2, math.inf, 2], [0, math.inf, 0]], np.float32)


def test_many_targets_are_as_good_as_few() -> None:
    nodes = 40
    line = _network(nodes, [(i, i + 1, 0.5, False) for i in range(nodes - 1)])
    expected = [[0.5 * abs(a - b) for b in range(nodes)] for a in range(nodes)]
    assert _distances(line, directed=False) == expected


@pytest.mark.parametrize("directed", [False, True])
@given(graph=_graphs())
def test_distances_are_those_of_floyd_and_warshall(directed: bool, graph: tuple[int, list[Edge]]) -> None:
    expected = _floyd_warshall(*graph, directed=directed)
    assert _distances(_network(*graph), directed=directed) == expected


# --- the largest connected part --------------------------------------------------------------------


@pytest.mark.parametrize("directed", [False, True])
@given(graph=_graphs())
def test_largest_strongly_connected_part_is_kept(directed: bool, graph: tuple[int, list[Edge]]) -> None:
    nodes, _ = graph
    distance = _floyd_warshall(*graph, directed=directed)
    parts = [
        [b for b in range(nodes) if math.isfinite(distance[a][b]) and math.isfinite(distance[b][a])]
        for a in range(nodes)
    ]
    largest = max(map(len, parts))
    if largest < nodes / 2:
        refusal(lambda: _network(*graph).largest_connected_part(directed=directed), f"{largest} of {nodes}")
        return
    kept = _network(*graph).largest_connected_part(directed=directed)
    assert (kept.nodes, kept.nodes_read) == (largest, nodes)
    original = [round(float(lon - 12) * 100) for lon in kept.lonlat[:, 0]]
    assert original in parts
    # A shortest way between two of its nodes never leaves the part.
    assert _distances(kept, directed=directed) == [[distance[a][b] for b in original] for a in original]


# --- folders ---------------------------------------------------------------------------------------


def test_folder_is_read_as_it_stands(tmp_path: Path) -> None:
    network = read_roads(_folder(tmp_path, _NODES, _EDGES), None)
    assert (network.nodes, network.nodes_read, network.directions_known) == (3, 3, True)
    np.testing.assert_array_equal(network.lonlat, [(12, 42), (12.01, 42), (12.02, 42)])
    np.testing.assert_allclose(
        _distances(network, directed=False),
        [[0, 0.8, 1.7005], [0.8, 0, 0.9005], [1.7005, 0.9005, 0]],
        rtol=1e-6,
    )
    assert _distances(network, directed=True)[2] == [math.inf, math.inf, 0]


def test_node_ids_beyond_floats_are_told_apart(tmp_path: Path) -> None:
    first, second = 2**53, 2**53 + 1
    folder = _folder(
        tmp_path,
        [_NODE_COLUMNS, f"{second},12.01,42", f"{first},12.0,42", "7,12.02,42"],
        [_EDGE_COLUMNS, f"{first},7,2000,1", f"{second},7,3000,1"],
    )
    table = read_roads(folder, None).distances_to(np.array([2]), directed=True)
    assert table[:, 0].tolist() == pytest.approx([3.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("nodes", "edges", "named"),
    [
        (["id,lon", "1,12"], _EDGES, ["nodes.csv.gz", "column lat is missing"]),
        (["osmid,lon,lat", "1,12,42"], _EDGES, ["nodes.csv.gz", "column id is missing"]),
        (_NODES, ["u,v,length,oneway", "30,10,800,0"], ["edges.csv.gz", "column length_m is missing"]),
        (_NODES, ["u,v,length_m", "30,10,800"], ["edges.csv.gz", "column oneway is missing"]),
        ([_NODE_COLUMNS], _EDGES, ["nodes.csv.gz", "no rows"]),
        (_NODES, [_EDGE_COLUMNS], ["edges.csv.gz", "no rows"]),
        ([*_NODES, "20,12.5,42"], _EDGES, ["20", "more than once"]),
        ([*_NODES, "40,east,42"], _EDGES, ["nodes.csv.gz: line 5: lon 'east'"]),
        ([*_NODES, "40,12,nan"], _EDGES, ["nodes.csv.gz: line 5: lat 'nan'"]),
        ([*_NODES, "4.5,12,42"], _EDGES, ["nodes.csv.gz: line 5: id '4.5'"]),
        ([*_NODES, "40,291000,4640000"], _EDGES, ["291000", "degrees"]),
        ([*_NODES, "40,12,-90.5"], _EDGES, ["-90.5", "degrees"]),
        (_NODES, [*_EDGES, "30,20,-1,0"], ["edges.csv.gz: line 4: length_m '-1' is negative"]),
        (_NODES, [*_EDGES, "30,20,nan,0"], ["edges.csv.gz: line 4: length_m 'nan'"]),
        (_NODES, [*_EDGES, "30,20,inf,0"], ["edges.csv.gz: line 4: length_m 'inf'"]),
        (_NODES, [*_EDGES, "30,20,,0"], ["edges.csv.gz: line 4: length_m ''"]),
        (_NODES, [*_EDGES, "30,20,5,yes"], ["edges.csv.gz: line 4: oneway 'yes'"]),
        (_NODES, [*_EDGES, "30,20,5,2"], ["edges.csv.gz", "oneway", "neither 0 nor 1"]),
        (_NODES, [*_EDGES, "30,99,5,0"], ["99", "not there"]),
        (_NODES, [*_EDGES, "5,30,5,0"], ["5", "not there"]),
    ],
)
def test_bad_folder_is_refused(tmp_path: Path, nodes: list[str], edges: list[str], named: list[str]) -> None:
    folder = _folder(tmp_path, nodes, edges)
    refusal(lambda: read_roads(folder, None), folder, *named)


@pytest.mark.parametrize("name", ["none", "none.graphml", "none.csv"])
def test_roads_that_do_not_exist_are_refused(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    refusal(lambda: read_roads(path, None), "domain.roads", f"{path} does not exist")
    refusal(lambda: read_roads(str(tmp_path), None), "nodes.csv.gz: no such file")


def test_file_of_another_kind_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "roads.shp"
    path.write_bytes(b"")
    told = "domain.roads", str(path), "builtin:manhattan", "nodes.csv.gz", ".graphml"
    refusal(lambda: read_roads(str(path), None), *told, kind=SpecError)


# --- what is built in ------------------------------------------------------------------------------


def test_built_in_network_is_whole() -> None:
    network = read_roads("builtin:manhattan", None)
    assert network.nodes == network.largest_connected_part(directed=False).nodes == 4197
    assert not network.directions_known
    west, south, east, north = network.box_degrees
    assert -74.03 < west < east < -73.90
    assert 40.69 < south < north < 40.89
    # Lengths come from a sphere: up to half a per cent and a metre of rounding below a straight line.
    shortest = ground_km(network.lonlat[network.start], network.lonlat[network.end])
    assert np.all(network.length_km >= shortest * 0.995 - 0.001)


def test_what_is_not_built_in_is_refused_with_what_is() -> None:
    told = "domain.roads: builtin:atlantis is not built in; known: builtin:manhattan"
    refusal(lambda: read_roads("builtin:atlantis", None), told, kind=SpecError)
    told = "prior.file: builtin:atlantis is not built in; known: builtin:manhattan-trips"
    refusal(lambda: points_path("builtin:atlantis", "prior.file"), told, kind=SpecError)


@pytest.mark.parametrize("build", [build_geometry, build_domain])
def test_built_in_network_has_no_directions(small_job: JobMaker, build: Callable[..., object]) -> None:
    spec = parse_job(small_job(loss={"kind": "travel", "directed": True}))
    refusal(lambda: build(spec), "loss.directed", "builtin:manhattan", kind=SpecError)


def test_directions_do_not_matter_to_euclidean_loss(small_job: JobMaker) -> None:
    spec = parse_job(small_job(loss={"kind": "euclidean", "directed": True}))
    assert build_geometry(spec).network.nodes == 4197
