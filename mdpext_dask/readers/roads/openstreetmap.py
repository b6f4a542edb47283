"""Extracts of OpenStreetMap: .osm.pbf, .osm, .osm.bz2 and .osm.gz, read by osmium.

Ways are read first and nodes after them, so that of all nodes only those of drivable ways are kept: some 50
bytes for each. Roads go on where a file's border cuts them only as far as their nodes are in the file.

*Which ways.* Those of osmnx's network type "drive", so that an extract and a download give the same roads:
public ways with a ``highway`` tag, but no service roads, no tracks and paths, no areas, nothing that is
private or closed to motor vehicles, and nothing that is planned or gone. Patterns match anywhere in a value,
as those of Overpass do, which osmnx asks (https://wiki.openstreetmap.org/wiki/Overpass_API/Overpass_QL).

*In which direction.* As https://wiki.openstreetmap.org/wiki/Key:oneway says, also where osmnx does not follow
it: motorways and circular junctions are one way unless they say otherwise. Reversible lanes can be driven
either way, though not at the same time.

*Which nodes.* Most nodes only give a road its shape. Those are taken out, and the pieces of road between
junctions and dead ends become one, with their lengths added up; distances between the nodes that stay are the
same as before. Which nodes stay is osmnx's rule: G. Boeing (2025), "Topological graph simplification
solutions to the street intersection miscount problem", Transactions in GIS 29 (3), e70037.
"""

import re
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import FULL_TURN, HALF_TURN, Degrees, as_swapped, east_of
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.roads.network import Arcs, RoadNetwork, assemble, ground_km
from mdpext_dask.readers.tables import reading

SUFFIXES = (".osm.pbf", ".osm", ".osm.bz2", ".osm.gz", ".pbf")
# A table of the places of all nodes takes 16 bytes for each, about twice what its file takes; a set of ids
# may take 1.6 GB, whatever the file. Smaller files get the table, which is faster.
_LARGEST_WITH_TABLE = 800_000_000
# What sorted files say of themselves; in others a table would not find what it holds.
_SORTED = "Type_then_ID"
# Key -> what its value must not hold.
EXCLUDED = {
    "highway": (
        "abandoned|bridleway|bus_guideway|construction|corridor|cycleway|elevator|escalator|footway|no|path|"
        "pedestrian|planned|platform|proposed|raceway|razed|rest_area|service|services|steps|track"
    ),
    "area": "yes",
    "access": "private",
    "motor_vehicle": "no",
    "motorcar": "no",
    "service": "alley|driveway|emergency_access|parking|parking_aisle|private",
}
_EXCLUDED = tuple((key, re.compile(pattern)) for key, pattern in EXCLUDED.items())
_FORWARD = frozenset({"yes", "true", "1", "F"})
_BACKWARD = frozenset({"-1", "reverse", "T"})
_BOTH = frozenset({"no", "false", "0", "reversible", "alternating"})
_CIRCULAR = frozenset({"roundabout", "circular"})
_NONE = -1


@dataclass(frozen=True)
class _Ways:
    """Drivable ways, and their nodes one way after the other: `count` says how many of `refs` are a way's."""

    ids: NDArray[np.int64]
    refs: NDArray[np.int64]
    count: NDArray[np.int64]
    direction: NDArray[np.int64]

    def only(self, keep: NDArray[np.bool_]) -> "_Ways":
        """Return some of the ways."""
        refs = self.refs[np.repeat(keep, self.count)]
        return _Ways(self.ids[keep], refs, self.count[keep], self.direction[keep])


def read_osm(path: Path, box: Degrees | None = None) -> RoadNetwork:
    """Read the drivable roads of an extract, joined at junctions.

    Parameters
    ----------
    path
        The file.
    box
        West, south, east, north in degrees: only ways that touch it count; default: all.

    Raises
    ------
    DataError
        If it cannot be read, or holds no drivable road.
    SpecError
        If osmium is not installed.
    """
    osmium = import_optional("osmium", f"domain.roads: {path}")
    # What osmium's parsers raise arrives as one of these.
    with reading(path, "OpenStreetMap file", also=(RuntimeError, OverflowError, osmium.InvalidLocationError)):
        ways, ferries = _read_ways(osmium, path)
        last = _last_versions(ways.ids)
        ways = ways.only(last)
        if len(ways.refs) == 0:
            raise DataError(f"{path}: holds no drivable roads")
        ids, refs = np.unique(ways.refs, return_inverse=True)
        lonlat = _read_places(osmium, path, ids)
    there = np.asarray(np.isfinite(lonlat[:, 0]), dtype=bool)
    if not there.any():
        raise DataError(f"{path}: none of the {len(ids)} nodes of its roads is in the file")
    refs, welded = _weld(lonlat, refs)
    ways = replace(ways, refs=refs)
    again, clipped, roads = int(np.sum(~last)), 0, len(ways.ids)
    if box is not None:
        ways = ways.only(_touching(ways, lonlat, box))
        clipped = roads - len(ways.ids)
        if clipped == roads:
            hint = as_swapped(box, lonlat[there])
            raise DataError(f"domain.bbox: no road within reach: no road of {path} touches {list(box)}{hint}")
    missing = int(np.sum(~there[np.unique(ways.refs)]))
    kept, arcs, rings = join_at_junctions(_arcs(ways, lonlat, there), len(ids))
    notes = {
        f"ways that are there more than once: {again}; the last one of each counts": again,
        f"ferries are left out, which are no roads: {ferries}": ferries,
        f"nodes that were joined across the antimeridian: {welded}": welded,
        f"{clipped} of {roads} roads do not touch domain.bbox and were not read": clipped,
        f"nodes of its roads that are not in the file: {missing}; the roads end there": missing,
        f"closed rings that no other road meets are left out: {rings}": rings,
    }
    ids, lonlat, oneway = ids[kept], lonlat[kept], np.ones(len(arcs.start), dtype=bool)
    told = tuple(f"{path}: {note}" for note, count in notes.items() if count)
    return assemble(
        ids, lonlat, (ids[arcs.start], ids[arcs.end]), arcs.length_km, oneway, str(path), notes=told
    )


def _arcs(ways: _Ways, lonlat: NDArray[np.float64], there: NDArray[np.bool_]) -> Arcs:
    """Return the pieces of ways between nodes that follow each other, by position in `lonlat`."""
    begin, end = ways.refs[:-1], ways.refs[1:]
    way = np.repeat(np.arange(len(ways.ids)), ways.count)
    # A node that is named twice in a row is named once.
    piece = (way[:-1] == way[1:]) & there[begin] & there[end] & (begin != end)
    begin, end, towards = begin[piece], end[piece], ways.direction[way[:-1][piece]]
    length = ground_km(lonlat[begin], lonlat[end])
    forward, backward = towards >= 0, towards <= 0
    return Arcs(
        np.concatenate([begin[forward], end[backward]]),
        np.concatenate([end[forward], begin[backward]]),
        np.concatenate([length[forward], length[backward]]),
    )


def _read_ways(osmium: Any, path: Path) -> tuple[_Ways, int]:
    """Return the drivable ways of a file, their nodes by id, and how many ferries there are."""
    ids, refs, count, towards, ferries = array("q"), array("q"), array("q"), array("q"), 0
    ways = osmium.FileProcessor(path, osmium.osm.WAY)
    for way in ways.with_filter(osmium.filter.KeyFilter("highway", "route")):
        if not way.visible:  # deleted, in files with history
            continue
        if is_drivable(way.tags):
            nodes = [node.ref for node in way.nodes]
            ids.append(way.id)
            refs.extend(nodes)
            count.append(len(nodes))
            towards.append(direction(way.tags))
        else:
            ferries += way.tags.get("route") == "ferry"
    return _Ways(*(np.array(column, dtype=np.int64) for column in (ids, refs, count, towards))), ferries


def _last_versions(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which ways are the last ones with their id."""
    _, last = np.unique(ids[::-1], return_index=True)
    keep = np.zeros(len(ids), dtype=bool)
    keep[len(ids) - 1 - last] = True
    return keep


def _read_places(osmium: Any, path: Path, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return lon and lat of nodes, float64 of shape (n, 2), NaN where they are not in the file.

    Of a node that is there more than once, the first one counts.
    """
    header = osmium.io.Reader(path, osmium.osm.NOTHING).header()
    size = path.stat().st_size
    if ids[0] > 0 and size <= _LARGEST_WITH_TABLE and header.get("sorting") == _SORTED:
        return _places_by_table(osmium, path, ids)
    nodes = osmium.FileProcessor(path, osmium.osm.NODE)
    filtered = ids[0] > 0 and size > _LARGEST_WITH_TABLE
    if filtered:
        nodes = nodes.with_filter(osmium.filter.IdFilter(iter(ids.tolist())))
    wanted = set() if filtered else set(ids.tolist())
    found, lon, lat = array("q"), array("d"), array("d")
    for node in nodes:
        if filtered or node.id in wanted:
            place = node.location
            if place.valid():
                found.append(node.id)
                lon.append(place.lon)
                lat.append(place.lat)
    identifier, first = np.unique(np.array(found, dtype=np.int64), return_index=True)
    lonlat = np.full((len(ids), 2), np.nan)
    lonlat[np.searchsorted(ids, identifier)] = np.stack([lon, lat], axis=-1)[first]
    return lonlat


def _places_by_table(osmium: Any, path: Path, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    table = osmium.index.create_map("sparse_mem_array")
    osmium.apply(osmium.io.Reader(path, osmium.osm.NODE), osmium.NodeLocationsForWays(table))
    lonlat = np.full((len(ids), 2), np.nan)
    for row, identifier in enumerate(ids.tolist()):
        try:
            place = table.get(identifier)
        except KeyError:
            continue
        if place.valid():
            lonlat[row] = place.lon, place.lat
    return lonlat


def _weld(lonlat: NDArray[np.float64], refs: NDArray[np.intp]) -> tuple[NDArray[np.intp], int]:
    """Name one node of two at the same latitude of which one is at 180 and the other at -180 degrees.

    Roads of OpenStreetMap end at the antimeridian, and go on from another node on its other side.
    """
    west, east = (np.flatnonzero(lonlat[:, 0] == side) for side in (-HALF_TURN, HALF_TURN))
    _, in_west, in_east = np.intersect1d(lonlat[west, 1], lonlat[east, 1], return_indices=True)
    becomes = np.arange(len(lonlat))
    becomes[west[in_west]] = east[in_east]
    return becomes[refs], len(in_west)


def _touching(ways: _Ways, lonlat: NDArray[np.float64], box: Degrees) -> NDArray[np.bool_]:
    """Return of which ways a piece may touch a box."""
    west, south, east, north = box
    half = (east_of(west, east) - west) / 2
    # From the middle of the box, so that nothing near it goes round the Earth.
    x = (lonlat[:, 0] - (west + half) + HALF_TURN) % FULL_TURN - HALF_TURN
    place = np.stack([x, lonlat[:, 1]], axis=-1)[ways.refs]
    low, high = np.minimum(place[:-1], place[1:]), np.maximum(place[:-1], place[1:])
    way = np.repeat(np.arange(len(ways.ids)), ways.count)
    # NaN, where a node is missing, touches nothing.
    near = (low[:, 0] <= half) & (high[:, 0] >= -half) & (low[:, 1] <= north) & (high[:, 1] >= south)
    near &= (way[:-1] == way[1:]) & (high[:, 0] - low[:, 0] <= HALF_TURN)
    touch = np.zeros(len(ways.ids), dtype=bool)
    touch[way[:-1][near]] = True
    return touch


# --- which ways, and in which direction ------------------------------------------------------------


def is_drivable(tags: Any) -> bool:
    """Whether a way is a public road that cars may use."""
    if tags.get("highway") is None:
        return False
    values = ((tags.get(key), pattern) for key, pattern in _EXCLUDED)
    return not any(value is not None and pattern.search(value) for value, pattern in values)


def direction(tags: Any) -> int:
    """Return 1 for a way that can only be travelled in the order of its nodes, -1 against it, 0 both ways."""
    oneway = tags.get("oneway")
    if oneway in _FORWARD:
        return 1
    if oneway in _BACKWARD:
        return -1
    implied = tags.get("junction") in _CIRCULAR or tags.get("highway") == "motorway"
    return 1 if implied and oneway not in _BOTH else 0


# --- from nodes that draw roads to junctions that join them ----------------------------------------


def join_at_junctions(arcs: Arcs, nodes: int) -> tuple[NDArray[np.int64], Arcs, int]:
    """Return the nodes that stay, the arcs between them, and how many closed rings were left out.

    A node goes where a road just passes: it has two neighbours, and either one arc in and one out or both of
    each, as osmnx has it. Where parallel arcs hide that a one-way road begins at a node, it stays, which
    osmnx does not always see. A ring that no other road meets has no node that could stay, and is left out.

    Parameters
    ----------
    arcs
        Between nodes 0 .. `nodes` - 1; parallel ones count each in the rule.
    nodes
        How many nodes there are.

    Returns
    -------
    kept
        Indices of the nodes that stay, int64 of shape (k,), rising; those without arcs do not.
    joined
        Arcs between them, by position in `kept`.
    rings
        Number of closed rings left out.
    """
    passes, arcs = _passed_through(arcs, nodes)
    follows = _continuations(arcs, passes, nodes)
    end, length = arcs.end.copy(), arcs.length_km.copy()
    begins = ~passes[arcs.start]
    # Each round joins every arc with what its continuation has become: lengths double.
    while np.any(follows[begins] != _NONE):
        on = np.flatnonzero(follows != _NONE)
        ahead = follows[on]
        length[on] += length[ahead]
        end[on] = end[ahead]
        follows[on] = follows[ahead]
    joined = Arcs(arcs.start[begins], end[begins], length[begins])
    kept = np.unique(np.concatenate([joined.start, joined.end]))
    where = np.empty(nodes, dtype=np.int64)
    where[kept] = np.arange(len(kept))
    rings = _count_rings(arcs, passes, nodes)
    return kept, Arcs(where[joined.start], where[joined.end], joined.length_km), rings


def _passed_through(arcs: Arcs, nodes: int) -> tuple[NDArray[np.bool_], Arcs]:
    """Return which nodes a road just passes, bool of shape (nodes,), and the arcs without parallel ones."""
    loops = arcs.start == arcs.end
    leaving = np.bincount(arcs.start, minlength=nodes)
    entering = np.bincount(arcs.end, minlength=nodes)
    one, other = np.sort(np.stack([arcs.start[~loops], arcs.end[~loops]]), axis=0)
    pairs = np.stack(np.divmod(np.unique(one * nodes + other), nodes))
    neighbours = np.bincount(pairs.ravel(), minlength=nodes)
    passes = (leaving > 0) & (entering > 0) & (neighbours == 2) & np.isin(leaving + entering, (2, 4))
    passes[arcs.start[loops]] = False
    arcs = arcs.shortest()
    leaving = np.bincount(arcs.start, minlength=nodes)
    entering = np.bincount(arcs.end, minlength=nodes)
    return passes & (leaving == entering), arcs


def _continuations(arcs: Arcs, passes: NDArray[np.bool_], nodes: int) -> NDArray[np.int64]:
    """Return which arc goes on where an arc ends at a node that its road passes, int64 of shape (m,)."""
    first = np.searchsorted(arcs.start, np.arange(nodes))
    follows = np.full(len(arcs.start), _NONE, dtype=np.int64)
    on = np.flatnonzero(passes[arcs.end])
    option = first[arcs.end[on]]
    # Of the two ways out of such a node, one leads back.
    follows[on] = option + (arcs.end[option] == arcs.start[on])
    return follows


def _count_rings(arcs: Arcs, passes: NDArray[np.bool_], nodes: int) -> int:
    ones = np.ones(len(arcs.start), dtype=np.int8)
    graph = sparse.coo_array((ones, (arcs.start, arcs.end)), shape=(nodes, nodes))
    _, label = csgraph.connected_components(graph, directed=False)
    used = np.zeros(nodes, dtype=bool)
    used[arcs.start] = used[arcs.end] = True
    return len(np.setdiff1d(label[used], label[used & ~passes]))
