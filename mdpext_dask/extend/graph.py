"""The extension framework as an object: record sets, and operators that extend rows from one to the next.

A *node* is a named set of records. A *source* is a node whose rows M(·|x) are there from the start; every
other node gets its rows from its parents, by an *operator* on each edge, which covers some or all of the
node's records. Several edges may lead to a node (their parts merge in it), and a record may occur in
several nodes. :meth:`ExtensionGraph.run` extends; what comes out can be checked for A1, A2, A3 and global
metric differential privacy (:mod:`mdpext_dask.extend.graph_checks`).

What is handed on are rows: distributions, normalised at every node. For log-convex interpolation that changes
nothing. A rule that must carry *un-normalised* scores from level to level (McShane-Whitney) is another one
here; take all its levels in one step.
"""

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from mdpext_dask.errors import SpecError
from mdpext_dask.extend.graph_checks import Extended, Given
from mdpext_dask.extend.record_metrics import Record
from mdpext_dask.problem.grid import Array, Grid

# (parent's records, their rows (n, K), wanted records) -> rows of the wanted records (m, K).
EdgeOperator = Callable[[Sequence[Record], Array, Sequence[Record]], ArrayLike]
# (log rows of a cell's corners (2, 2, K), parts N) -> scores of its sub-cells' corners (N + 1, N + 1, K).
CellRefinement = Callable[[Array, int], Array]

# What dividing by their sum leaves of rows: the numbers' and the sum's own rounding.
_SUM_ROUNDING = 1e-12


class ExtensionGraph:
    """Nodes, directed edges and operators, built step by step.

    Examples
    --------
    >>> graph = ExtensionGraph()
    >>> graph.add_node("seed", ["a", "b"], rows=[[0.6, 0.4], [0.4, 0.6]])
    >>> graph.add_node("middle", ["m"])
    >>> graph.add_edge("seed", "middle", lambda records, rows, wanted: rows.mean(axis=0, keepdims=True))
    >>> graph.run().rows["middle"]
    array([[0.5, 0.5]])

    Parameters
    ----------
    target
        Records that the global mechanism must have a row for; without it, the records of all nodes.
    """

    def __init__(self, target: Iterable[Record] | None = None) -> None:
        self._target = None if target is None else _records(target, "the target")
        self._records: dict[str, tuple[Record, ...]] = {}
        self._rows: dict[str, Array] = {}
        # By child, then by parent.
        self._edges: dict[str, dict[str, tuple[EdgeOperator, tuple[Record, ...]]]] = {}

    def add_node(self, name: str, records: Iterable[Record], rows: ArrayLike | None = None) -> None:
        """Add a node.

        Parameters
        ----------
        name
            Its name.
        records
            Its n records, in order: any hashable identifiers, all different.
        rows
            For a source: M(·|x) of its records, float64 of shape (n, K), positive, each summing to 1.

        Raises
        ------
        SpecError
            If the name is taken, a record repeats or cannot be hashed, there is none, or rows are not
            distributions.
        """
        where = f"node {name!r}"
        if name in self._records:
            raise SpecError(f"{where}: there is one of that name already")
        listed = _records(records, where)
        if rows is not None:
            self._rows[name] = _distributions(rows, listed, where)
        self._records[name], self._edges[name] = listed, {}

    def add_edge(
        self, parent: str, child: str, operator: EdgeOperator, records: Iterable[Record] | None = None
    ) -> None:
        """Add an edge from one node to another.

        Parameters
        ----------
        parent, child
            Names of two nodes.
        operator
            Function of the parent's n records (a tuple), their rows (float64 of shape (n, K), read-only) and
            the m wanted records (a tuple); answers with rows of shape (m, K): positive, each summing to 1.
        records
            The child's records that the edge covers; all, if not given.

        Raises
        ------
        SpecError
            If a node is unknown, the edge is there already, or it covers a record that is not the child's.
        """
        where = _edge_name(parent, child)
        for name in (parent, child):
            if name not in self._records:
                raise SpecError(f"{where}: there is no node {name!r}")
        if parent in self._edges[child]:
            raise SpecError(f"{where}: there is one already; one edge may cover many records")
        known = self._records[child]
        covered = known if records is None else _records(records, where)
        foreign = set(covered) - set(known)
        if foreign:
            raise SpecError(f"{where}: covers {_some(foreign)}, which node {child!r} does not have")
        self._edges[child][parent] = operator, covered

    def validate(self) -> None:
        """Check that the graph can be run.

        Raises
        ------
        SpecError
            If there is no node, edges form a cycle, a source has no rows or another node has some, sources
            differ in their number of outputs, a record is covered by no edge, or a target record is in no
            node.
        """
        if not self._records:
            raise SpecError("the graph has no nodes")
        self._topological_order()
        outputs: dict[str, int] = {}
        for name, records in self._records.items():
            # An edge covers at least one record, so only sources are covered by nothing.
            covered = set().union(*(part for _, part in self._edges[name].values()))
            if covered:
                if name in self._rows:
                    raise SpecError(f"node {name!r}: has rows of its own, and an edge that gives it some")
                if missing := set(records) - covered:
                    raise SpecError(f"node {name!r}: no edge covers {_some(missing)}")
                continue
            if name not in self._rows:
                raise SpecError(f"node {name!r}: no edge leads to it, so it needs rows of its own")
            outputs[name] = self._rows[name].shape[1]
            first = next(iter(outputs))
            if outputs[name] != outputs[first]:
                raise SpecError(
                    f"node {name!r}: has {outputs[name]} outputs, node {first!r} has {outputs[first]}"
                )
        if missing := set(self._target or ()).difference(*self._records.values()):
            raise SpecError(f"the target has {_some(missing)}, which is in no node")

    def run(self) -> Extended:
        """Extend from the sources to all nodes, in topological order, each edge once.

        Raises
        ------
        SpecError
            If :meth:`validate` finds a fault, or an operator answers with something else than distributions
            of the right shape.
        """
        self.validate()
        order = self._topological_order()
        given: list[Given] = []
        rows: dict[str, Array] = {}
        successors: dict[str, tuple[str, ...]] = dict.fromkeys(order, ())
        for name in order:
            records = self._records[name]
            if name in self._rows:
                rows[name] = self._rows[name]
                given.append(Given(name, name, records, rows[name]))
                continue
            by_record: dict[Record, Array] = {}
            for parent, (operator, covered) in self._edges[name].items():
                successors[parent] += (name,)
                answer = operator(self._records[parent], rows[parent], covered)
                part = _distributions(answer, covered, _edge_name(parent, name), rows[parent].shape[1])
                given.append(Given(name, parent, covered, part))
                for record, row in zip(covered, part, strict=True):
                    by_record.setdefault(record, row)
            rows[name] = np.stack([by_record[record] for record in records])
            rows[name].setflags(write=False)
        everything = dict.fromkeys(record for name in order for record in self._records[name])
        return Extended(
            given=tuple(given),
            records=MappingProxyType({name: self._records[name] for name in order}),
            rows=MappingProxyType(rows),
            successors=MappingProxyType(successors),
            target=tuple(everything) if self._target is None else self._target,
        )

    def _topological_order(self) -> list[str]:
        """Return the nodes, parents before children and sources before all others."""
        try:
            return list(TopologicalSorter(self._edges).static_order())
        except CycleError as error:
            raise SpecError(f"edges form a cycle: {' -> '.join(error.args[1])}") from None


def grid_tree(grid: Grid, refine_cell: CellRefinement, seed_scores: Array) -> ExtensionGraph:
    """Return the tree of all cells of a small grid, one node a cell and level, each with its four corners.

    Source cells are the sources. The successors of a cell of level r are its N_{r+1}² sub-cells. Records are
    the fine lattice's indices (i, j), and all of them are the target.

    Parameters
    ----------
    grid
        The grid; every fine cell becomes a node, so let it be small.
    refine_cell
        Function of the log rows of a cell's corners, float64 of shape (2, 2, K), east first, and of parts
        N; answers with scores at the corners of the N × N sub-cells, shape (N + 1, N + 1, K). Their
        normalised exponentials are the rows.
    seed_scores
        Log scores at the seeds, float64 of shape (seeds east, seeds north, K).

    Raises
    ------
    SpecError
        If the scores do not fit the grid or are not finite.
    """
    shape = seed_scores.shape
    if len(shape) != 3 or shape[:2] != grid.seeds_shape or shape[2] == 0:
        raise SpecError(f"seed scores have the shape {shape}; the grid has {grid.seeds_shape} seeds")
    if not np.isfinite(seed_scores).all():
        raise SpecError("seed scores are not all finite numbers")
    nx, ny = grid.shape
    graph = ExtensionGraph(target=[(i, j) for i in range(nx) for j in range(ny)])
    side = grid.factor
    parents = []
    for i in range(grid.cells_x):
        for j in range(grid.cells_y):
            scores = seed_scores[i : i + 2, j : j + 2].reshape(4, -1)
            parents.append((i * side, j * side))
            graph.add_node(_cell_name(0, parents[-1]), _corners(parents[-1], side), rows=_softmax(scores))
    for level, parts in enumerate(grid.refine):
        side //= parts
        cells = []
        for parent in parents:
            operator = _cell_operator(refine_cell, parts, parent, side)
            for i in range(parts):
                for j in range(parts):
                    cells.append((parent[0] + i * side, parent[1] + j * side))
                    name = _cell_name(level + 1, cells[-1])
                    graph.add_node(name, _corners(cells[-1], side))
                    graph.add_edge(_cell_name(level, parent), name, operator)
        parents = cells
    return graph


def _cell_operator(
    refine_cell: CellRefinement, parts: int, corner: tuple[int, int], side: int
) -> EdgeOperator:
    """Return the operator from a cell, given by its lower left corner, to sub-cells of this side."""
    steps = range(parts + 1)
    place: dict[Record, tuple[int, int]] = {
        (corner[0] + i * side, corner[1] + j * side): (i, j) for i in steps for j in steps
    }

    def extend(records: Sequence[Record], rows: Array, wanted: Sequence[Record]) -> Array:
        corners = np.stack([np.log(row) for row in rows]).reshape(2, 2, -1)
        fine = np.asarray(refine_cell(corners, parts))
        expected = (parts + 1, parts + 1, rows.shape[1])
        if fine.shape != expected or not np.isfinite(fine).all():
            raise SpecError(
                f"the cell at {corner}: refining it gave scores of the shape {fine.shape}, where finite ones "
                f"of the shape {expected} are needed"
            )
        answer = _softmax(np.stack([fine[place[record]] for record in wanted]))
        before = dict(zip(records, zip(corners.reshape(rows.shape), rows, strict=True), strict=True))
        for number, record in enumerate(wanted):
            # exp(log p) is not p in float64: scores that are still the parent's keep the parent's row.
            if record in before and np.array_equal(fine[place[record]], before[record][0]):
                answer[number] = before[record][1]
        return answer

    return extend


def _corners(corner: tuple[int, int], side: int) -> list[Record]:
    i, j = corner
    return [(i, j), (i, j + side), (i + side, j), (i + side, j + side)]


def _cell_name(level: int, corner: tuple[int, int]) -> str:
    return f"level {level}, cell at {corner}"


def _softmax(scores: Array) -> Array:
    # Row by row: a row's bits must not depend on how many others are computed with it.
    weights = [np.exp(row - row.max()) for row in scores]
    return np.stack([weight / weight.sum() for weight in weights])


def _records(records: Iterable[Record], where: str) -> tuple[Record, ...]:
    listed = tuple(records)
    if not listed:
        raise SpecError(f"{where}: has no records")
    seen: set[Record] = set()
    for record in listed:
        try:
            repeated = record in seen
        except TypeError:
            raise SpecError(f"{where}: {record!r} cannot be hashed, so it cannot be a record") from None
        if repeated:
            raise SpecError(f"{where}: has the record {record!r} twice")
        seen.add(record)
    return listed


def _distributions(
    rows: ArrayLike, records: tuple[Record, ...], where: str, outputs: int | None = None
) -> Array:
    """Return a read-only copy of rows that are one distribution for each record."""
    try:
        copy = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(f"{where}: rows are not an array of numbers") from None
    outputs = outputs or (copy.shape[-1] if copy.ndim else 0) or 1
    if copy.shape != (len(records), outputs):
        raise SpecError(f"{where}: rows have the shape {copy.shape} instead of {(len(records), outputs)}")
    with np.errstate(invalid="ignore", over="ignore"):
        totals = copy.sum(axis=1)
    for wrong, what in (
        (~np.isfinite(copy).all(axis=1), "holds numbers that are not finite"),
        (~(copy > 0).all(axis=1), "holds probabilities that are not positive"),
        (~(np.abs(totals - 1) <= _SUM_ROUNDING), "does not sum to 1; divide it by its sum in float64"),
    ):
        if wrong.any():
            raise SpecError(f"{where}: the row of record {records[int(wrong.argmax())]!r} {what}")
    copy.setflags(write=False)
    return copy


def _edge_name(parent: str, child: str) -> str:
    return f"edge {parent!r} -> {child!r}"


def _some(records: set[Record]) -> str:
    shown = sorted(map(repr, records))
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"the record{'s' if len(shown) > 1 else ''} {', '.join(shown[:3])}{more}"
