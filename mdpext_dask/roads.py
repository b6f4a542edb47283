"""Road networks: read, check, keep the largest connected part, travel distances.

Sources: the built-in network of Manhattan, a folder with two CSV files, a GraphML file saved by
osmnx, or a place name that osmnx downloads. Map data © OpenStreetMap contributors (ODbL).
"""

import importlib
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from mdpext_dask.errors import DataError, SpecError, first_line
from mdpext_dask.spec import BUILTIN_PREFIX, ROAD_FILES
from mdpext_dask.tables import check_degrees, complain_where, integers, numbers, read_csv

_BUILTIN_NETWORKS = ("manhattan",)
_BUILTIN_POINTS = {"manhattan-trips": ("manhattan", "trip_origins.csv.gz")}
# Less than this share of the nodes in one connected part means that the input is broken.
_LEAST_CONNECTED_SHARE = 0.5
_TREES_AT_ONCE = 16
# No road is longer than the way round the Earth.
_LONGEST_KM = 40_100.0


@dataclass(frozen=True)
class RoadNetwork:
    """A road network as arrays.

    Parameters
    ----------
    lonlat
        Nodes, float64 of shape (n, 2), degrees.
    start, end
        Edges by node index, int64 of shape (m,).
    length_km
        Edge lengths, float64 of shape (m,), ≥ 0.
    oneway
        Whether an edge can only be travelled from start to end, bool of shape (m,).
    directions_known
        False where the source lost the directions of its streets.
    source
        Where it comes from, for messages.
    nodes_read
        Number of nodes before the largest connected part was kept.
    """

    lonlat: NDArray[np.float64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    length_km: NDArray[np.float64]
    oneway: NDArray[np.bool_]
    directions_known: bool
    source: str
    nodes_read: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.lonlat)

    def arcs(self, *, directed: bool) -> sparse.csr_array:
        """Return the arc lengths in km as an (n, n) sparse matrix, the shortest of parallel edges."""
        both = np.ones_like(self.oneway) if not directed else ~self.oneway
        start = np.concatenate([self.start, self.end[both]])
        end = np.concatenate([self.end, self.start[both]])
        length = np.concatenate([self.length_km, self.length_km[both]])
        # Sparse constructors add duplicates up; parallel edges must take their minimum instead.
        order = np.lexsort((length, end, start))
        start, end, length = start[order], end[order], length[order]
        first = np.ones(len(start), dtype=bool)
        first[1:] = (start[1:] != start[:-1]) | (end[1:] != end[:-1])
        shape = (self.nodes, self.nodes)
        return sparse.csr_array((length[first], (start[first], end[first])), shape=shape)

    def largest_connected_part(self, *, directed: bool) -> "RoadNetwork":
        """Return the largest (strongly, if directed) connected part.

        Raises
        ------
        DataError
            If it holds less than half of the nodes.
        """
        count, label = csgraph.connected_components(
            self.arcs(directed=directed), directed=directed, connection="strong"
        )
        sizes = np.bincount(label, minlength=count)
        keep = label == int(np.argmax(sizes))
        kept = int(keep.sum())
        if kept < _LEAST_CONNECTED_SHARE * self.nodes:
            raise DataError(
                f"{self.source}: the road network falls apart: its largest connected part holds "
                f"{kept} of {self.nodes} nodes; at least half is needed"
            )
        index = np.cumsum(keep) - 1
        edges = keep[self.start] & keep[self.end]
        return RoadNetwork(
            lonlat=self.lonlat[keep],
            start=index[self.start[edges]],
            end=index[self.end[edges]],
            length_km=self.length_km[edges],
            oneway=self.oneway[edges],
            directions_known=self.directions_known,
            source=self.source,
            nodes_read=self.nodes_read,
        )

    def distances_to(self, targets: NDArray[np.intp], *, directed: bool) -> NDArray[np.float32]:
        """Return road distances from every node to each target, float32 of shape (n, t), in km.

        One shortest-path tree per distinct target, by Dijkstra's algorithm on the reversed arcs.
        """
        distinct, inverse = np.unique(targets, return_inverse=True)
        reversed_arcs = self.arcs(directed=directed).T.tocsr()
        table = np.empty((self.nodes, len(distinct)), dtype=np.float32)
        for first in range(0, len(distinct), _TREES_AT_ONCE):
            part = slice(first, first + _TREES_AT_ONCE)
            table[:, part] = csgraph.dijkstra(reversed_arcs, indices=distinct[part]).T
        return table[:, inverse]

    @cached_property
    def box_degrees(self) -> tuple[float, float, float, float]:
        """West, south, east, north of the nodes, in degrees."""
        west, south = self.lonlat.min(axis=0)
        east, north = self.lonlat.max(axis=0)
        return float(west), float(south), float(east), float(north)


def read_roads(roads: str | None, place: str | None) -> RoadNetwork:
    """Read the network that a job names; exactly one of the arguments is given.

    Raises
    ------
    DataError
        If the source cannot be read or does not hold a road network.
    SpecError
        If the source is of a kind that is not known, or needs an extra that is not installed.
    """
    if place is not None:
        return _download_place(place)
    assert roads is not None  # the job file's validation sees to it
    if roads.startswith(BUILTIN_PREFIX):
        return _read_builtin(roads)
    path = Path(roads)
    if path.is_dir():
        return _read_folder(path, directions_known=True)
    if path.suffix == ".graphml":
        if not path.is_file():
            raise DataError(f"domain.roads: {path} does not exist")
        return _read_graphml(path)
    if not path.exists():
        raise DataError(f"domain.roads: {path} does not exist")
    raise SpecError(
        f"domain.roads: {path}: must be builtin:manhattan, a folder with nodes.csv.gz and "
        "edges.csv.gz, or a .graphml file"
    )


def points_path(name: str, key: str) -> Path:
    """Return the path of a points file, which may be a built-in one such as builtin:manhattan-trips.

    Raises
    ------
    SpecError
        If there is no built-in file of that name.
    """
    if not name.startswith(BUILTIN_PREFIX):
        return Path(name)
    builtin = name.removeprefix(BUILTIN_PREFIX)
    if builtin not in _BUILTIN_POINTS:
        known = ", ".join(BUILTIN_PREFIX + known for known in _BUILTIN_POINTS)
        raise SpecError(f"{key}: {name} is not built in; known: {known}")
    return _data_folder().joinpath(*_BUILTIN_POINTS[builtin])


def _data_folder() -> Path:
    return Path(str(resources.files("mdpext_dask") / "data"))


def _read_builtin(roads: str) -> RoadNetwork:
    name = roads.removeprefix(BUILTIN_PREFIX)
    if name not in _BUILTIN_NETWORKS:
        known = ", ".join(BUILTIN_PREFIX + known for known in _BUILTIN_NETWORKS)
        raise SpecError(f"domain.roads: {roads} is not built in; known: {known}")
    return _read_folder(_data_folder() / name, directions_known=False)


def _read_folder(folder: Path, *, directions_known: bool) -> RoadNetwork:
    """Read nodes.csv.gz (id, lon, lat) and edges.csv.gz (u, v, length_m, oneway)."""
    nodes_path, edges_path = (folder / name for name in ROAD_FILES)
    nodes = read_csv(nodes_path, required=("id", "lon", "lat"))
    edges = read_csv(edges_path, required=("u", "v", "length_m", "oneway"))

    ids = integers(nodes, "id", nodes_path)
    lonlat = np.stack([numbers(nodes, c, nodes_path) for c in ("lon", "lat")], axis=-1)
    length_m = numbers(edges, "length_m", edges_path)
    complain_where(length_m < 0, edges, "length_m", edges_path, "is negative")
    oneway = integers(edges, "oneway", edges_path)
    complain_where(~np.isin(oneway, (0, 1)), edges, "oneway", edges_path, "is neither 0 nor 1")
    return _assemble(
        ids=ids,
        lonlat=lonlat,
        ends=(integers(edges, "u", edges_path), integers(edges, "v", edges_path)),
        length_km=length_m / 1000,
        oneway=oneway == 1,
        directions_known=directions_known,
        source=str(folder),
    )


def _assemble(
    *,
    ids: NDArray[np.int64],
    lonlat: NDArray[np.float64],
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    length_km: NDArray[np.float64],
    oneway: NDArray[np.bool_],
    directions_known: bool,
    source: str,
) -> RoadNetwork:
    """Turn node ids into indices and check what no reader can check alone."""
    if len(ids) == 0 or len(length_km) == 0:
        raise DataError(f"{source}: the road network is empty")
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    duplicate = ordered[1:] == ordered[:-1]
    if duplicate.any():
        raise DataError(f"{source}: node id {ordered[1:][duplicate][0]} occurs more than once")
    if not np.isfinite(lonlat).all():
        raise DataError(f"{source}: node coordinates must be finite numbers")
    check_degrees(lonlat, source)
    bad = ~((length_km >= 0) & (length_km <= _LONGEST_KM))
    if bad.any():
        raise DataError(f"{source}: an edge has the length {length_km[bad][0] * 1000:g} m")
    indices = []
    for end in ends:
        position = np.minimum(np.searchsorted(ordered, end), len(ordered) - 1)
        unknown = ordered[position] != end
        if unknown.any():
            raise DataError(f"{source}: an edge names node {end[unknown][0]}, which is not there")
        indices.append(order[position])
    return RoadNetwork(
        lonlat=lonlat,
        start=indices[0],
        end=indices[1],
        length_km=length_km,
        oneway=oneway,
        directions_known=directions_known,
        source=source,
        nodes_read=len(ids),
    )


def _import_osmnx(purpose: str) -> Any:
    # Importing osmnx costs seconds and hundreds of megabytes, so only those who need it pay.
    try:
        return importlib.import_module("osmnx")
    except ImportError:
        raise SpecError(f"{purpose} needs osmnx: install it with pip install 'mdpext-dask[osm]'") from None


def _read_graphml(path: Path) -> RoadNetwork:
    osmnx = _import_osmnx(f"domain.roads: {path}")
    try:
        graph = osmnx.load_graphml(path)
    except Exception as error:  # whatever the XML and type parsers raise, the file is at fault
        raise DataError(f"{path}: not a GraphML file as osmnx saves it: {first_line(error)}") from None
    return _from_osmnx(graph, str(path))


def _download_place(place: str) -> RoadNetwork:
    osmnx = _import_osmnx(f"domain.place: {place!r}")
    try:
        graph = osmnx.graph_from_place(place, network_type="drive")
    except Exception as error:  # network, geocoder and parser failures have no common base
        raise DataError(
            f"domain.place: {place!r} could not be downloaded ({first_line(error)}); "
            "offline, give domain.roads a folder or file instead"
        ) from None
    return _from_osmnx(graph, place)


def _from_osmnx(graph: Any, source: str) -> RoadNetwork:
    """Take nodes and edges from an osmnx graph; every arc there stands for one direction."""
    try:
        ids = np.fromiter((int(node) for node in graph.nodes), np.int64)
        lonlat = np.array([(data["x"], data["y"]) for _, data in graph.nodes(data=True)], float)
        arcs = list(graph.edges(data="length", default=np.nan))
        ends = np.array([(u, v) for u, v, _ in arcs], dtype=np.int64).reshape(-1, 2)
        length_km = np.array([float(length) for *_, length in arcs]) / 1000
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{source}: not a street network as osmnx makes it: {error}") from None
    return _assemble(
        ids=ids,
        lonlat=lonlat.reshape(-1, 2),
        ends=(ends[:, 0], ends[:, 1]),
        length_km=length_km,
        oneway=np.ones(len(arcs), dtype=bool),
        directions_known=True,
        source=source,
    )
