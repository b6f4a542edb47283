"""The street map of a page: the road network as lines, coarse enough to be sent and looked at."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.reports.page.maps import Frame, points_png
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import ROADS

# Ends of lines are moved to a lattice of this step, in a map's own units; of more lines to one of twice the
# step, and so on: streets that fall together are drawn once.
_FINEST_STEP, MOST_LINES = 0.25, 60_000
# Of more, thin lines show the same.
_MANY_LINES = 20_000
# Roads beyond this are not read: a page is of a city.
_MOST_ROADS = 5_000_000

Point = tuple[int, int]


def streets_of(store: MechanismStore, frame: Frame) -> dict[str, Any]:
    """Return the streets of a store for its maps.

    Parameters
    ----------
    store
        The store.
    frame
        What the maps show.

    Returns
    -------
    `path`, lines as an SVG path in steps of a lattice, `step`, that step in the map's units, and `dense`,
    whether they are so many that they should be thin; or, where the store does not hold which nodes are
    connected, `nodes`, a picture of them. Path and picture are None where there are no roads. `words` says
    which it is.
    """
    lines = _lines_km(store)
    if lines is not None:
        found, step = snapped(frame.place(lines.reshape(-1, 2)).reshape(-1, 4))
        words = "The streets are the road network, drawn from the store itself."
        dense = len(found) > _MANY_LINES
        return {"path": path_of(found), "step": step, "dense": dense, "nodes": None, "words": words}
    nodes = _nodes_png(store, frame)
    words = (
        "The problem has no road network that could be drawn."
        if nodes is None
        else "Grey are the road nodes: the store does not hold the roads between them; made again, it does."
    )
    return {"path": None, "step": None, "dense": False, "nodes": nodes, "words": words}


def _lines_km(store: MechanismStore) -> NDArray[np.float64] | None:
    """Return both ends of each road, float64 of shape (m, 2, 2), in km; None where they cannot be had."""
    try:
        array = store.array(f"problem/{ROADS}")
        if array.shape[1:] != (2, 2) or not 0 < array.shape[0] <= _MOST_ROADS:
            return None
        ends = np.asarray(store.read(f"problem/{ROADS}"), dtype=np.float64)
    except StoreError:
        return None
    ends = ends[np.isfinite(ends).all(axis=(1, 2))]
    return ends if len(ends) else None


def _nodes_png(store: MechanismStore, frame: Frame) -> str | None:
    if store.problem_attributes.get("loss") != "travel":
        return None
    nodes = np.asarray(store.read("problem/node_xy"), dtype=np.float64)
    return points_png(nodes[np.isfinite(nodes).all(axis=1)], frame.box)


def snapped(lines: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
    """Return lines between points of a lattice, each once, and the step of the lattice.

    Parameters
    ----------
    lines
        float64 of shape (m, 4): x and y of one end, x and y of the other, in a map's units.

    Returns
    -------
    int64 of shape (n, 4), n ≤ :data:`MOST_LINES`, in steps; and the step.
    """
    step = _FINEST_STEP
    while True:
        ends = np.rint(lines / step).astype(np.int64)
        turned = (ends[:, 0] > ends[:, 2]) | ((ends[:, 0] == ends[:, 2]) & (ends[:, 1] > ends[:, 3]))
        ends = np.where(turned[:, None], ends[:, [2, 3, 0, 1]], ends)
        ends = np.unique(ends[(ends[:, :2] != ends[:, 2:]).any(axis=1)], axis=0)
        if len(ends) <= MOST_LINES:
            return ends, step
        step *= 2


def path_of(lines: NDArray[np.int64]) -> str:
    """Return lines of whole numbers, int64 of shape (n, 4), as an SVG path that draws each of them once."""
    parts = []
    for walk in _walks(lines):
        steps = np.diff(np.array(walk), axis=0).ravel().tolist()
        parts.append(f"M{walk[0][0]} {walk[0][1]}l" + " ".join(map(str, steps)).replace(" -", "-"))
    return "".join(parts)


def _walks(lines: NDArray[np.int64]) -> Iterator[list[Point]]:
    """Yield walks that use each line once; from ends of an odd number of lines first: fewer walks."""
    left: dict[Point, set[Point]] = defaultdict(set)
    for a, b, c, d in lines.tolist():
        left[a, b].add((c, d))
        left[c, d].add((a, b))
    for start in sorted(left, key=lambda at: len(left[at]) % 2 == 0):
        while left[start]:
            walk = [start]
            while left[walk[-1]]:
                here = walk[-1]
                there = min(left[here])  # always the same
                left[here].remove(there)
                left[there].remove(here)
                walk.append(there)
            yield walk
