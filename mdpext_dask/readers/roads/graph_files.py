"""Street graphs of osmnx: GraphML files, GeoPackages, and graphs as they are in memory.

Lengths are what the graph says. Where it says none, they are those of geodesics along the edge's line, or
from end to end where it has none.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.optional_libraries import import_osm
from mdpext_dask.readers.reference_systems import DEGREES, to_degrees
from mdpext_dask.readers.roads.network import RoadNetwork, assemble, ground_km
from mdpext_dask.readers.vector_layers import Layer, layer_names, read_layer

_LAYERS = ("nodes", "edges")


def read_graphml(path: Path) -> RoadNetwork:
    """Read a GraphML file as osmnx saves it.

    Raises
    ------
    DataError
        If it is none.
    SpecError
        If osmnx is not installed.
    """
    osmnx = import_osm("osmnx", f"domain.roads: {path}")
    try:
        graph = osmnx.load_graphml(path)
    except Exception as error:  # whatever the XML and type parsers raise, the file is at fault
        raise DataError(f"{path}: not a GraphML file as osmnx saves it: {first_line(error)}") from None
    return network_of(graph, str(path))


def network_of(graph: Any, source: str) -> RoadNetwork:
    """Take nodes and edges from a graph of osmnx; every arc there stands for one direction.

    Raises
    ------
    DataError
        If it is not a street network.
    """
    try:
        ids = np.fromiter((int(node) for node in graph.nodes), np.int64)
        xy = np.array([(data["x"], data["y"]) for _, data in graph.nodes(data=True)], float).reshape(-1, 2)
        arcs = list(graph.edges(data=True))
        ends = np.array([(u, v) for u, v, _ in arcs], dtype=np.int64).reshape(-1, 2)
        metres = np.array([_number(data.get("length")) for *_, data in arcs], float)
        lines = [data.get("geometry") for *_, data in arcs]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{source}: not a street network as osmnx makes it: {error}") from None
    crs = graph.graph.get("crs", DEGREES)
    return _network(
        ids,
        to_degrees(xy, crs, source),
        (ends[:, 0], ends[:, 1]),
        metres,
        lines,
        crs,
        np.ones(len(arcs), dtype=bool),
        source,
    )


def read_geopackage(path: Path) -> RoadNetwork:
    """Read a GeoPackage as osmnx saves it, directed or not: layers nodes (osmid) and edges (u, v, length).

    Raises
    ------
    DataError
        If it is none.
    SpecError
        If pyogrio is not installed.
    """
    names = layer_names(path, "domain.roads")
    if not set(_LAYERS) <= set(names):
        raise DataError(
            f"{path}: not a GeoPackage as osmnx saves it: needs the layers nodes and edges, found "
            f"{', '.join(names) or 'none'}"
        )
    nodes, edges = (read_layer(path, name, "domain.roads") for name in _LAYERS)
    # Undirected, a row is a street, said to lead from one end to the other; directed, it is one direction.
    undirected = {"from", "to"} <= set(edges.fields)
    begin, end = ("from", "to") if undirected else ("u", "v")
    ids = _integers(nodes, "osmid", path)
    xy = np.array([_place(point, path) for point in nodes.shapes])
    lengths = edges.fields.get("length", np.full(len(edges.shapes), np.nan))
    try:
        metres = np.array([_number(value) for value in lengths.tolist()], float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: edges: a length is not a number: {error}") from None
    oneway = [not undirected or _is_true(value) for value in _column(edges, "oneway", path).tolist()]
    return _network(
        ids,
        to_degrees(xy.reshape(-1, 2), _crs_of(nodes, path), str(path)),
        (_integers(edges, begin, path), _integers(edges, end, path)),
        metres,
        list(edges.shapes),
        _crs_of(edges, path),
        np.array(oneway, dtype=bool),
        str(path),
    )


def _network(
    ids: NDArray[np.int64],
    lonlat: NDArray[np.float64],
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    metres: NDArray[np.float64],
    lines: list[Any],
    crs: Any,
    oneway: NDArray[np.bool_],
    source: str,
) -> RoadNetwork:
    length_km = metres / 1000
    unknown = np.flatnonzero(np.isnan(length_km))
    notes: tuple[str, ...] = ()
    if len(unknown):
        # Ends that are not there are for `assemble` to complain of.
        where = dict(zip(ids.tolist(), lonlat, strict=True))
        for row in unknown.tolist():
            pieces = _pieces(lines[row])
            if pieces:
                pieces = [to_degrees(piece, crs, source) for piece in pieces]
            elif all(int(end[row]) in where for end in ends):
                pieces = [np.stack([where[int(end[row])] for end in ends])]
            length_km[row] = sum(float(ground_km(places[:-1], places[1:]).sum()) for places in pieces)
        notes = (f"{source}: {len(unknown)} edges have no length and got that of their line on the ground",)
    return assemble(
        ids=ids,
        lonlat=lonlat,
        ends=ends,
        length_km=length_km,
        oneway=oneway,
        directions_known=True,
        source=source,
        notes=notes,
    )


def _pieces(line: Any) -> list[NDArray[np.float64]]:
    """Return what a line runs through, float64 of shape (n, 2) each; nothing of what is no line."""
    parts = [] if line is None else getattr(line, "geoms", [line])
    return [
        np.asarray(part.coords, dtype=np.float64)[:, :2]
        for part in parts
        if part.geom_type == "LineString" and not part.is_empty
    ]


def _place(point: Any, path: Path) -> tuple[float, float]:
    if point is None or point.is_empty:
        return np.nan, np.nan
    if point.geom_type != "Point":
        raise DataError(f"{path}: nodes: a geometry is a {point.geom_type}, not a Point")
    return point.x, point.y


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def _is_true(value: Any) -> bool:
    """Whether a street is one way; of one joined of several ways, osmnx keeps a list of what they say."""
    return value is True or value == 1 or "true" in str(value).lower()


def _crs_of(layer: Layer, path: Path) -> Any:
    if layer.crs is None:
        raise DataError(f"{path}: {layer.name}: has no coordinate reference system")
    return layer.crs


def _column(layer: Layer, name: str, path: Path) -> NDArray[Any]:
    if name not in layer.fields:
        raise DataError(
            f"{path}: {layer.name}: column {name} is missing; found {', '.join(layer.fields) or 'none'}"
        )
    return layer.fields[name]


def _integers(layer: Layer, name: str, path: Path) -> NDArray[np.int64]:
    column = _column(layer, name, path)
    try:
        whole = column.astype(np.int64)
    except (TypeError, ValueError):
        raise DataError(f"{path}: {layer.name}: {name} must be whole numbers") from None
    if column.dtype.kind == "f" and not np.array_equal(whole, column):
        raise DataError(f"{path}: {layer.name}: {name} must be whole numbers")
    return whole
