"""Street graphs of osmnx: GraphML files, GeoPackages, and graphs as they are in memory.

Lengths are what the graph says. Where it says none, they are those of geodesics along the edge's line, or
from end to end where it has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.reference_systems import DEGREES, to_degrees
from mdpext_dask.readers.roads.network import RoadNetwork, assemble, ground_km
from mdpext_dask.readers.tables import check_columns, decimal_hint, number, shown
from mdpext_dask.readers.vector_files import Layer, read_layers

_ENDS = ("source", "target")
# What is read of a GeoPackage.
_FIELDS = ("osmid", "u", "v", "from", "to", "length", "oneway")
_ONE_WAY = frozenset({"true", "1", "1.0", "yes"})
_BOTH_WAYS = frozenset({"false", "0", "0.0", "no", "none", "nan", "<na>", ""})


@dataclass(frozen=True)
class _Edge:
    """An edge as a graph has it: where it ends, its attributes, and whether it is for one direction."""

    start: Any
    end: Any
    data: Mapping[str, Any]
    directed: bool


def read_graphml(path: Path) -> RoadNetwork:
    """Read a GraphML file, directed or not, as osmnx and networkx save it.

    Of a directed graph every edge is one direction of a street. Of an undirected one it is a street, one way
    where its attribute ``oneway`` says so: from its attribute ``from`` to ``to``, as osmnx has it. Other
    attributes than these, ``x``, ``y``, ``length``, ``crs`` and, where there is no length, ``geometry``
    may be anything.

    Raises
    ------
    DataError
        With the node or edge, its attribute and what is wrong with it.
    """
    if not path.is_file():
        raise DataError(f"{path}: must be a file")
    try:
        nodes, edges, crs = _parsed(path)
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
        raise DataError(f"{path}: not a readable GraphML file: {first_line(error)}") from None
    return _street_network(nodes, edges, crs, str(path))


def network_of(graph: Any, source: str) -> RoadNetwork:
    """Take nodes and edges from a graph of osmnx; every arc there stands for one direction.

    Raises
    ------
    DataError
        If it is not a street network.
    """
    edges = [_Edge(u, v, data, True) for u, v, data in graph.edges(data=True)]
    return _street_network(list(graph.nodes(data=True)), edges, graph.graph.get("crs", DEGREES), source)


def _parsed(path: Path) -> tuple[list[tuple[str, dict[str, str]]], list[_Edge], str]:
    """Return nodes, edges and reference system of a GraphML file, attributes as text.

    Raises
    ------
    DataError
        If it is no GraphML, or holds more than one graph of nodes and edges.
    """
    nodes: list[tuple[str, dict[str, str]]] = []
    edges: list[_Edge] = []
    names: dict[str, str] = {}
    # Attributes of what is being read, and what they are where nothing is said.
    held: dict[str, dict[str, str]] = {"graph": {}, "node": {}, "edge": {}}
    defaults: dict[str, dict[str, str]] = {"graph": {}, "node": {}, "edge": {}}
    open_tags: list[Any] = []
    graph, kind = None, None
    # Entities without end are refused by expat, and those of other files never read.
    for event, element in ElementTree.iterparse(path, ("start", "end")):  # noqa: S314
        tag = element.tag.rpartition("}")[2]
        if event == "start":
            if not open_tags and tag != "graphml":
                raise DataError(f"{path}: not a GraphML file: begins with <{tag}>")
            open_tags.append(tag)
            if tag == "graph":
                if graph is not None:
                    raise DataError(f"{path}: holds more than one graph; leave the one of the streets")
                graph, kind = element, element.get("edgedefault")
                if kind not in ("directed", "undirected"):
                    raise DataError(f"{path}: graph: edgedefault must be directed or undirected")
            elif tag == "hyperedge":
                raise DataError(f"{path}: holds a hyperedge, which is no street")
            continue
        open_tags.pop()
        if tag == "key":
            name = names[element.get("id", "")] = element.get("attr.name", element.get("id", ""))
            default = next((child.text or "" for child in element if child.tag.endswith("default")), None)
            for of, known in defaults.items():
                if default is not None and element.get("for", "all") in (of, "all"):
                    known[name] = default
        elif tag == "data" and open_tags[-1:] and open_tags[-1] in held:
            held[open_tags[-1]][names.get(element.get("key", ""), "")] = element.text or ""
        elif tag in ("node", "edge") and graph is not None:
            data, held[tag] = {**defaults[tag], **held[tag]}, {}
            if tag == "node":
                nodes.append((_attribute(element, "id", f"{path}: node {len(nodes) + 1}"), data))
            else:
                start, end = (_attribute(element, name, f"{path}: edge {len(edges) + 1}") for name in _ENDS)
                directed = element.get("directed", str(kind == "directed")).lower() in ("true", "1")
                edges.append(_Edge(start, end, data, directed))
            graph.clear()  # what has been read, so that memory does not hold the tree
    if graph is None:
        raise DataError(f"{path}: not a GraphML file: holds no graph")
    return nodes, edges, {**defaults["graph"], **held["graph"]}.get("crs", DEGREES)


def _attribute(element: Any, name: str, where: str) -> str:
    value: str | None = element.get(name)
    if value is None:
        raise DataError(f"{where}: has no {name}")
    return value


def _street_network(
    nodes: Sequence[tuple[Any, Mapping[str, Any]]], edges: Sequence[_Edge], crs: Any, source: str
) -> RoadNetwork:
    """Return the network of nodes and edges with the attributes that osmnx gives them."""
    ids = np.array([node for node, _ in nodes], dtype=object)
    places = [[_number(data, name, f"{source}: node {node}") for name in "xy"] for node, data in nodes]
    metres, oneway, known = np.empty(len(edges)), np.ones(len(edges), dtype=bool), True
    ends = np.empty((2, len(edges)), dtype=object)
    for row, edge in enumerate(edges):
        where = f"{source}: edge {edge.start} to {edge.end}"
        metres[row] = _number(edge.data, "length", where) if "length" in edge.data else np.nan
        ends[:, row] = edge.start, edge.end
        if not edge.directed:
            oneway[row] = _is_true(edge.data.get("oneway"), where)
            if oneway[row] and {"from", "to"} <= set(edge.data):
                ends[:, row] = way = edge.data["from"], edge.data["to"]
                if {*way} != {edge.start, edge.end}:
                    raise DataError(f"{where}: is one way from {way[0]} to {way[1]}, which are not its ends")
            elif oneway[row]:
                known = False
    lonlat = to_degrees(np.array(places, dtype=np.float64).reshape(-1, 2), crs, source)
    lines = [edge.data.get("geometry") for edge in edges]
    return _network(ids, lonlat, ends, metres, lines, crs, oneway, source, directions_known=known)


def read_geopackage(path: Path) -> RoadNetwork:
    """Read a GeoPackage as osmnx saves it, directed or not: layers nodes (osmid) and edges (u, v, length).

    Raises
    ------
    DataError
        If it is none.
    SpecError
        If pyogrio is not installed.
    """
    import shapely

    layers = {layer.name: layer for layer in read_layers(path, "domain.roads", _FIELDS)}
    if not {"nodes", "edges"} <= set(layers):
        raise DataError(
            f"{path}: not a GeoPackage as osmnx saves it: needs the layers nodes and edges, found "
            f"{', '.join(layers) or 'none'}"
        )
    nodes, edges = layers["nodes"], layers["edges"]
    # Undirected, a row is a street, said to lead from one end to the other; directed, it is one direction.
    undirected = {"from", "to"} <= set(edges.fields)
    begin, end = ("from", "to") if undirected else ("u", "v")
    for layer, names in ((nodes, ("osmid",)), (edges, (begin, end, "oneway"))):
        check_columns(list(layer.fields), names, f"{path}: {layer.name}")
        if layer.crs is None:
            raise DataError(f"{path}: {layer.name}: has no coordinate reference system")
    other = shapely.get_type_id(nodes.shapes) > shapely.GeometryType.POINT
    if other.any():
        raise DataError(f"{path}: nodes: a geometry is a {nodes.shapes[other][0].geom_type}, not a Point")
    xy = np.stack([shapely.get_x(nodes.shapes), shapely.get_y(nodes.shapes)], axis=-1)
    oneway = np.ones(len(edges.shapes), dtype=bool)
    metres = np.full(len(edges.shapes), np.nan)
    for row, length in enumerate(edges.fields["length"].tolist() if "length" in edges.fields else ()):
        metres[row] = _number({"length": length}, "length", f"{path}: edges: feature {row + 1}")
    for row, value in enumerate(edges.fields["oneway"].tolist() if undirected else ()):
        oneway[row] = _is_true(value, f"{path}: edges: feature {row + 1}")
    ids, *ends = (
        _integers(layer, name, path) for layer, name in ((nodes, "osmid"), (edges, begin), (edges, end))
    )
    lonlat = to_degrees(xy, nodes.crs, str(path))
    return _network(ids, lonlat, np.stack(ends), metres, list(edges.shapes), edges.crs, oneway, str(path))


def _network(
    ids: NDArray[Any],
    lonlat: NDArray[np.float64],
    ends: NDArray[Any],
    metres: NDArray[np.float64],
    lines: list[Any],
    crs: Any,
    oneway: NDArray[np.bool_],
    source: str,
    *,
    directions_known: bool = True,
) -> RoadNetwork:
    length_km = metres / 1000
    unknown = np.flatnonzero(np.isnan(length_km)).tolist()
    # Ends that are not there are for `assemble` to complain of.
    where = dict(zip(ids.tolist(), lonlat, strict=True)) if unknown else {}
    for row in unknown:
        begin, end = ends[:, row].tolist()
        pieces = [
            to_degrees(piece, crs, source)
            for piece in _pieces(lines[row], f"{source}: edge {begin} to {end}")
        ]
        places = [where[end] for end in (begin, end) if end in where]
        if not pieces and len(places) == 2:
            pieces = [np.stack(places)]
        length_km[row] = sum(float(ground_km(piece[:-1], piece[1:]).sum()) for piece in pieces)
    notes = [f"{source}: {len(unknown)} edges have no length and got that of their line on the ground"]
    return assemble(
        ids,
        lonlat,
        list(ends),
        length_km,
        oneway,
        source,
        directions_known=directions_known,
        notes=tuple(notes) if unknown else (),
    )


def _pieces(line: Any, where: str) -> list[NDArray[np.float64]]:
    """Return what a line, Shapely's or as text, runs through, float64 of shape (n, 2) each.

    Nothing of what is no line.

    Raises
    ------
    DataError
        If it is text that is no geometry.
    """
    import shapely

    if isinstance(line, str):
        try:
            line = shapely.from_wkt(line)
        except (shapely.errors.ShapelyError, ValueError):
            raise DataError(f"{where}: geometry {shown(line)} is not well-known text") from None
    parts = shapely.get_parts(line)
    lines = parts[shapely.get_type_id(parts) == shapely.GeometryType.LINESTRING]
    return [shapely.get_coordinates(part) for part in lines if not part.is_empty]


def _number(data: Mapping[str, Any], name: str, where: str) -> float:
    """Return an attribute as a number, which may be text; NaN where it is empty.

    Raises
    ------
    DataError
        If it is missing, or no number.
    """
    if name not in data:
        raise DataError(f"{where}: has no attribute {name}; found {', '.join(data) or 'none'}")
    value = data[name]
    if value is None:
        return np.nan
    found = number(value) if isinstance(value, str) else value
    if not isinstance(found, int | float | np.number) or isinstance(found, bool):
        raise DataError(f"{where}: {name} {shown(str(value))} is not a number{decimal_hint(str(value))}")
    return float(found)


def _is_true(value: Any, where: str) -> bool:
    """Whether a street is one way; of one joined of several ways, osmnx keeps a list of what they say.

    Raises
    ------
    DataError
        If that cannot be told.
    """
    said = {word.strip(" '\"").lower() for word in str(value).strip(" []").split(",")}
    if said <= _ONE_WAY | _BOTH_WAYS:
        return bool(said & _ONE_WAY)
    raise DataError(f"{where}: oneway {shown(str(value))} is neither true nor false")


def _integers(layer: Layer, name: str, path: Path) -> NDArray[np.int64]:
    column = layer.fields[name]
    cells = column.tolist()
    whole = np.zeros(len(cells), dtype=np.int64)
    for row, cell in enumerate(cells):
        try:
            whole[row] = int(cell)
            if isinstance(cell, float) and cell != whole[row]:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"{path}: {layer.name}: feature {row + 1}: {name} must be whole numbers, found "
                f"{shown(str(cell))}"
            ) from None
    return whole
