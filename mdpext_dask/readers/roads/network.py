"""A road network as arrays: its largest connected part, and travel distances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import Degrees, arc, first_outside

# Less than this share of the nodes in one connected part means that the input is broken.
_LEAST_CONNECTED_SHARE = 0.5
_TREES_AT_ONCE = 16
# Edges may be a metre and one per cent shorter than the line between their ends: metres are rounded, places
# too, and lengths on a sphere are half a per cent off. Of 160,000 edges of London none is that short.
_ROUNDED_KM, _ROUNDED_SHARE = 0.001, 0.01
# Ends of a street round a block may be 4 m apart, so what is not far longer than that counts for nothing.
_LONGER, _LEAST_LONG_KM = 100.0, 5.0
# Lengths by the metres on the ground, where they may be kilometres, or miles.
_LOOK_LIKE_KM = (1e-4, 1e-2)
# No road is longer than the way round the Earth.
_LONGEST_KM = 40_100.0


@dataclass(frozen=True)
class Arcs:
    """Roads between nodes, each in one direction.

    Parameters
    ----------
    start, end
        Node indices, int64 of shape (m,).
    length_km
        float64 of shape (m,).
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    length_km: NDArray[np.float64]

    def shortest(self) -> "Arcs":
        """Return them in order of start and end, the shortest of parallel ones only."""
        order = np.lexsort((self.length_km, self.end, self.start))
        start, end = self.start[order], self.end[order]
        first = np.ones(len(start), dtype=bool)
        first[1:] = (start[1:] != start[:-1]) | (end[1:] != end[:-1])
        return Arcs(start[first], end[first], self.length_km[order][first])


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
    notes
        What a user should know of how it was read.
    """

    lonlat: NDArray[np.float64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    length_km: NDArray[np.float64]
    oneway: NDArray[np.bool_]
    directions_known: bool
    source: str
    nodes_read: int
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.lonlat)

    def arcs(self, *, directed: bool) -> sparse.csr_array:
        """Return the arc lengths in km as an (n, n) sparse matrix, the shortest of parallel edges."""
        both = ~self.oneway if directed else np.ones_like(self.oneway)
        arcs = Arcs(
            np.concatenate([self.start, self.end[both]]),
            np.concatenate([self.end, self.start[both]]),
            np.concatenate([self.length_km, self.length_km[both]]),
        ).shortest()  # sparse constructors would add parallel edges up
        return sparse.csr_array((arcs.length_km, (arcs.start, arcs.end)), shape=(self.nodes, self.nodes))

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
        return replace(
            self,
            lonlat=self.lonlat[keep],
            start=index[self.start[edges]],
            end=index[self.end[edges]],
            length_km=self.length_km[edges],
            oneway=self.oneway[edges],
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
    def box_degrees(self) -> Degrees:
        """West, south, east, north of the nodes, in degrees; west > east across the antimeridian."""
        west, east = arc(self.lonlat[:, 0], self.lonlat[:, 0])
        return west, float(self.lonlat[:, 1].min()), east, float(self.lonlat[:, 1].max())


def assemble(
    ids: NDArray[Any],
    lonlat: NDArray[np.float64],
    ends: Sequence[NDArray[Any]],
    length_km: NDArray[np.float64],
    oneway: NDArray[np.bool_],
    source: str,
    *,
    directions_known: bool = True,
    notes: tuple[str, ...] = (),
) -> RoadNetwork:
    """Turn node ids into indices and check what no reader can check alone.

    Parameters
    ----------
    ids, lonlat
        Nodes, int64, or text as object, of shape (n,), and their places, float64 of shape (n, 2), in degrees.
    ends, length_km, oneway
        Edges: the ids of where they start and end, of shape (m,) each; float64 and bool of shape (m,).
    source, directions_known, notes
        As in :class:`RoadNetwork`.

    Raises
    ------
    DataError
        If it is empty, an id is there twice or not at all, or a place or a length cannot be; if most lengths
        are shorter than the line between their ends, or far longer.
    """
    if len(ids) == 0 or len(length_km) == 0:
        raise DataError(f"{source}: the road network is empty")
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    duplicate = ordered[1:] == ordered[:-1]
    if duplicate.any():
        raise DataError(f"{source}: node id {ordered[1:][duplicate][0]} occurs more than once")
    nowhere = ~np.isfinite(lonlat).all(axis=1)
    if nowhere.any():
        raise DataError(f"{source}: node {ids[np.argmax(nowhere)]}: its coordinates must be finite numbers")
    if outside := first_outside(lonlat):
        raise DataError(f"{source}: node {ids[outside[0]]}: {outside[1]}")
    bad = ~((length_km >= 0) & (length_km <= _LONGEST_KM))
    if bad.any():
        row = int(np.argmax(bad))
        edge = f"edge {ends[0][row]} to {ends[1][row]}"
        raise DataError(
            f"{source}: {edge}: has the length {length_km[row] * 1000:g} m; it must be from 0 to "
            f"{_LONGEST_KM * 1000:g} m"
        )
    indices = []
    for end in ends:
        position = np.minimum(np.searchsorted(ordered, end), len(ordered) - 1)
        unknown = ordered[position] != end
        if unknown.any():
            raise DataError(f"{source}: an edge names node {end[unknown][0]}, which is not there")
        indices.append(order[position])
    start, end = indices
    notes += _doubtful_lengths(lonlat, (start, end), length_km, ends, source)
    return RoadNetwork(lonlat, start, end, length_km, oneway, directions_known, source, len(ids), notes)


def _doubtful_lengths(
    lonlat: NDArray[np.float64],
    indices: tuple[NDArray[np.int64], NDArray[np.int64]],
    length_km: NDArray[np.float64],
    ends: Sequence[NDArray[Any]],
    source: str,
) -> tuple[str, ...]:
    """Return notes on edges whose lengths do not fit the places of their ends.

    Raises
    ------
    DataError
        If most do not.
    """
    line_km = ground_km(*(lonlat[index] for index in indices))
    apart = line_km > 0
    wrong = {
        "shorter than": length_km < line_km * (1 - _ROUNDED_SHARE) - _ROUNDED_KM,
        f"over {_LONGER:g} times as long as": apart
        & (length_km > np.maximum(_LONGER * line_km, _LEAST_LONG_KM)),
    }
    notes = []
    for what, rows in wrong.items():
        if not rows.any():
            continue
        row, ratio = int(np.argmax(rows)), float(np.median(length_km[rows] / line_km[rows]))
        unit = "; are they in km?" if _LOOK_LIKE_KM[0] < ratio < _LOOK_LIKE_KM[1] else ""
        edge = f"edge {ends[0][row]} to {ends[1][row]}"
        found = (
            f"{source}: {rows.sum():,} of {len(rows):,} edges are {what} the line between the ends ({edge}: "
            f"{length_km[row] * 1000:.4g} m for {line_km[row] * 1000:.4g} m); lengths must be in metres{unit}"
        )
        if 2 * rows.sum() > apart.sum():
            raise DataError(found)
        notes.append(found)
    return tuple(notes)


def ground_km(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths of the geodesics on WGS 84 between pairs of places.

    Parameters
    ----------
    one, other
        lon and lat in degrees, float64 of shape (n, 2).

    Returns
    -------
    float64 of shape (n,), in km.
    """
    from pyproj import Geod

    _, _, metres = Geod(ellps="WGS84").inv(one[:, 0], one[:, 1], other[:, 0], other[:, 1])
    return np.asarray(metres, dtype=np.float64) / 1000
