"""Street graphs of osmnx: GraphML files, GeoPackages, and graphs as they are in memory.

Lengths are what the graph says. Where it says none, they are those of geodesics along the edge's line, or
from end to end where it has none.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.reference_systems import DEGREES, to_degrees
from mdpext_dask.readers.roads.network import RoadNetwork, assemble, ground_km
from mdpext_dask.readers.tables import check_columns
from mdpext_dask.readers.vector_files import Layer, read_layers


def read_graphml(path: Path) -> RoadNetwork:
    """Read a GraphML file as osmnx saves it.

    Raises
    ------
    DataError
        If it is none.
    SpecError
        If osmnx is not installed.
    """
    osmnx = import_optional("osmnx", f"domain.roads: {path}")
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
    nodes, arcs = list(graph.nodes(data=True)), list(graph.edges(data=True))
    try:
        ids = np.array([int(str(node)) for node, _ in nodes], dtype=np.int64)
        ends = np.array([(int(str(u)), int(str(v))) for u, v, _ in arcs], dtype=np.int64).reshape(-1, 2)
        xy = np.array([(_number(data["x"]), _number(data["y"])) for _, data in nodes]).reshape(-1, 2)
        metres = np.array([_number(data.get("length")) for *_, data in arcs], dtype=np.float64)
    except (KeyError, ValueError, OverflowError) as error:
        raise DataError(f"{source}: not a street network as osmnx makes it: {error}") from None
    crs = graph.graph.get("crs", DEGREES)
    lines = [data.get("geometry") for *_, data in arcs]
    oneway = np.ones(len(arcs), dtype=bool)
    return _network(ids, to_degrees(xy, crs, source), ends.T, metres, lines, crs, oneway, source)


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

    layers = {layer.name: layer for layer in read_layers(path, "domain.roads")}
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
    lengths = edges.fields.get("length", np.full(len(edges.shapes), np.nan))
    try:
        metres = np.array([_number(value) for value in lengths.tolist()], dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: edges: a length is not a number: {error}") from None
    said = edges.fields["oneway"].tolist()
    # Of a street joined of several ways, osmnx keeps a list of what they say.
    oneway = np.array([not undirected or s is True or s == 1 or "true" in str(s).lower() for s in said], bool)
    ids, *ends = (
        _integers(layer, name, path) for layer, name in ((nodes, "osmid"), (edges, begin), (edges, end))
    )
    lonlat = to_degrees(xy, nodes.crs, str(path))
    return _network(ids, lonlat, np.stack(ends), metres, list(edges.shapes), edges.crs, oneway, str(path))


def _network(
    ids: NDArray[np.int64],
    lonlat: NDArray[np.float64],
    ends: NDArray[np.int64],
    metres: NDArray[np.float64],
    lines: list[Any],
    crs: Any,
    oneway: NDArray[np.bool_],
    source: str,
) -> RoadNetwork:
    length_km = metres / 1000
    unknown = np.flatnonzero(np.isnan(length_km)).tolist()
    # Ends that are not there are for `assemble` to complain of.
    where = dict(zip(ids.tolist(), lonlat, strict=True)) if unknown else {}
    for row in unknown:
        pieces = [to_degrees(piece, crs, source) for piece in _pieces(lines[row])]
        places = [where[end] for end in ends[:, row].tolist() if end in where]
        if not pieces and len(places) == 2:
            pieces = [np.stack(places)]
        length_km[row] = sum(float(ground_km(piece[:-1], piece[1:]).sum()) for piece in pieces)
    note = f"{source}: {len(unknown)} edges have no length and got that of their line on the ground"
    return assemble(ids, lonlat, list(ends), length_km, oneway, source, notes=(note,) if unknown else ())


def _pieces(line: Any) -> list[NDArray[np.float64]]:
    """Return what a line runs through, float64 of shape (n, 2) each; nothing of what is no line."""
    import shapely

    parts = shapely.get_parts(line)
    lines = parts[shapely.get_type_id(parts) == shapely.GeometryType.LINESTRING]
    return [shapely.get_coordinates(part) for part in lines if not part.is_empty]


def _number(value: Any) -> float:
    """Return a number as a graph has it; NaN where it has none."""
    if value is None:
        return np.nan
    if not isinstance(value, str | int | float | np.number):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _integers(layer: Layer, name: str, path: Path) -> NDArray[np.int64]:
    column = layer.fields[name]
    if column.dtype.kind == "O":
        column = column.astype(str)  # so that what is missing is no number
    with contextlib.suppress(ValueError, OverflowError):
        whole = column.astype(np.int64)
        if column.dtype.kind != "f" or np.array_equal(whole, column):
            return whole
    raise DataError(f"{path}: {layer.name}: {name} must be whole numbers")
