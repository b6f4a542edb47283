"""From the nodes that draw roads to the junctions that join them.

Most nodes of OpenStreetMap only give a road its shape. Those are taken out, and the pieces of road between
junctions and dead ends become one, with their lengths added up; distances between the nodes that stay are the
same as before. Which nodes stay is osmnx's rule: G. Boeing (2025), "Topological graph simplification
solutions to the street intersection miscount problem", Transactions in GIS 29 (3), e70037.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

_NONE = -1


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
