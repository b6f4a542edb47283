"""What an extension graph gives, and whether it keeps metric differential privacy.

Write P(v, w) for: every record x of node v and every other record x' of node w satisfy

    |log M_v(y|x) − log M_w(y|x')| ≤ ε d(x, x')        for every output y.                          (1)

**Global mDP** is P(v, w) for all nodes, v = w included, and one row for every record, wherever it occurs.

- **A1** For every node u, P(v, w) for all v, w among u and its successors.
- **A2** A record that is given several times, in several nodes or by several edges, has one row.
- **A3** For all nodes u ≠ w with P(u, w), every successor v of u has P(v, w).

**Theorem.** If P(v, w) for all sources v, w, then global mDP ⇔ A1 ∧ A2 ∧ A3. GRAPH.md beside this module
proves it. The checks here decide each statement by itself, over all pairs, so they are for small graphs.

A log ratio counts as a violation when it exceeds its bound by more than ``rounding``, which is there for
float64 arithmetic alone and is part of every answer: log(2/3) − log(1/3) is above log 2 there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import GuaranteeViolation, SpecError
from mdpext_dask.extend.record_metrics import Metric, Record, distance_table

# Two logarithms of numbers in [5e-324, 1], their difference, and a bound: far below this together.
ROUNDING = 1e-12
_SHOWN = 5


@dataclass(frozen=True)
class Violation:
    """Two rows that are further apart than they may be.

    Parameters
    ----------
    nodes
        The nodes v and w.
    records
        x of v and x' of w; the same record twice where A2 fails.
    output
        Index of the output with the largest excess.
    log_ratio
        |log M_v(y|x) − log M_w(y|x')|.
    bound
        ε d(x, x'); 0 for a record given twice.
    via
        A1: the node u whose successors are looked at. A3: the node u that is extended to v. A2: where the two
        rows come from, the parents of v and w, or v and w themselves where they are sources.
    """

    nodes: tuple[str, str]
    records: tuple[Record, Record]
    output: int
    log_ratio: float
    bound: float
    via: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """Answer of one check.

    Parameters
    ----------
    name
        Which statement.
    epsilon
        ε, in 1 over the unit of distances; nothing for A2, which has none.
    rounding
        What a log ratio was allowed to exceed its bound by.
    tolerance
        What the logs of two rows of one record were allowed to differ by; nothing means bit for bit.
    violations
        Number of pairs of nodes (A2: of records) at fault.
    witnesses
        The worst violation of each of the worst few of them, worst first.
    """

    name: str
    epsilon: float | None
    rounding: float
    tolerance: float | None
    violations: int
    witnesses: tuple[Violation, ...]

    @property
    def holds(self) -> bool:
        """Whether the statement is true, up to `rounding` and, where it was given, `tolerance`."""
        return self.violations == 0

    def __str__(self) -> str:
        """Return one line that names the worst witness, and any tolerance."""
        within = f" within {self.tolerance:g} for a record given twice" if self.tolerance else ""
        if self.holds:
            return f"{self.name} holds{within}"
        worst = self.witnesses[0]
        return (
            f"{self.name} fails{within}: record {worst.records[0]!r} of node {worst.nodes[0]!r} and "
            f"record {worst.records[1]!r} of node {worst.nodes[1]!r} have a log ratio of "
            f"{worst.log_ratio:.6g} at output {worst.output}, above {worst.bound:.6g}"
        )


@dataclass(frozen=True, eq=False)
class Given:
    """Rows that a node got at once.

    Parameters
    ----------
    node
        The node.
    giver
        The parent whose edge gave them, or the node itself where it is a source.
    records
        n records of the node.
    rows
        Their rows, float64 of shape (n, K), read-only.
    """

    node: str
    giver: str
    records: tuple[Record, ...]
    rows: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Extended:
    """An extension graph with all rows. Nothing in it can be changed.

    Parameters
    ----------
    given
        What every source and every edge gave, in the order in which it was made.
    records
        Records of every node, nodes in topological order, sources first.
    rows
        M_v, float64 of shape (n, K), read-only, of every node; a record that several edges give has the row
        of the first of them.
    successors
        Successors of every node.
    target
        Records of the global mechanism.
    """

    given: tuple[Given, ...]
    records: Mapping[str, tuple[Record, ...]]
    rows: Mapping[str, NDArray[np.float64]]
    successors: Mapping[str, tuple[str, ...]]
    target: tuple[Record, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Nodes whose rows were there from the start."""
        return tuple(part.node for part in self.given if part.giver == part.node)

    def checks(
        self,
        metric: Metric | Callable[[Record, Record], float],
        epsilon: float,
        *,
        rounding: float = ROUNDING,
        tolerance: float | None = None,
    ) -> "Checks":
        """Return the checks of this graph for a metric and an ε; see :class:`Checks`."""
        return Checks(self, metric, epsilon, rounding, tolerance)

    def agreement(self, *, tolerance: float | None = None) -> Check:
        """Return whether a record has the same row wherever it is given (A2).

        Parameters
        ----------
        tolerance
            What logs of two such rows may differ by; nothing: bit for bit.

        Raises
        ------
        SpecError
            If the tolerance is negative or not a finite number.
        """
        _check_not_negative("tolerance", tolerance)
        copies: dict[Record, list[tuple[Given, NDArray[np.float64]]]] = {}
        for part in self.given:
            for record, row in zip(part.records, part.rows, strict=True):
                copies.setdefault(record, []).append((part, row))
        found = []
        for record, several in copies.items():
            rows = np.stack([row for _, row in several])
            low, high = rows.min(axis=0), rows.max(axis=0)
            # Logarithms of neighbouring numbers may round to the same; rows that differ must still show.
            spread = np.maximum(np.log(high) - np.log(low), (high > low) * np.finfo(float).tiny)
            output = int(spread.argmax())
            if spread[output] > (tolerance or 0.0):
                pair = [several[place(rows[:, output])][0] for place in (np.argmax, np.argmin)]
                first, second = sorted(pair, key=self.given.index)
                nodes, givers = (first.node, second.node), (first.giver, second.giver)
                found.append(Violation(nodes, (record, record), output, float(spread[output]), 0.0, givers))
        return Check("A2", None, 0.0, tolerance, len(found), _worst(found))

    def mechanism(self, *, tolerance: float | None = None) -> Mapping[Record, NDArray[np.float64]]:
        """Return the global mechanism: the row M(·|x), float64 of shape (K,), of every target record.

        Parameters
        ----------
        tolerance
            See :meth:`agreement`; the row given first is taken.

        Raises
        ------
        GuaranteeViolation
            If a record has several rows (A2 fails): there is no mechanism then.
        """
        agreement = self.agreement(tolerance=tolerance)
        if not agreement.holds:
            worst = agreement.witnesses[0]
            raise GuaranteeViolation(
                f"no mechanism: record {worst.records[0]!r} has two distributions, from {worst.via[0]!r} in "
                f"node {worst.nodes[0]!r} and from {worst.via[1]!r} in node {worst.nodes[1]!r}, with a log "
                f"ratio of {worst.log_ratio:.6g} at output {worst.output}",
                worst=vars(worst),
            )
        first: dict[Record, NDArray[np.float64]] = {}
        for part in self.given:
            for record, row in zip(part.records, part.rows, strict=True):
                first.setdefault(record, row)
        return MappingProxyType({record: first[record] for record in self.target})


@dataclass(frozen=True, eq=False)
class Checks:
    """Statements about an extended graph, for one metric and ε; each method decides one of them.

    Parameters
    ----------
    extended
        The graph and its rows.
    metric
        d(x, x'): a :class:`mdpext_dask.extend.record_metrics.Metric` or any function of two records.
    epsilon
        ε > 0, in 1 over the unit of distances.
    rounding
        What a log ratio may exceed its bound by, for float64's sake alone.
    tolerance
        What logs of two rows of one record may differ by; nothing: bit for bit.

    Raises
    ------
    SpecError
        If ε, `rounding` or `tolerance` is out of range, or the metric is none.
    """

    extended: Extended
    metric: Metric | Callable[[Record, Record], float]
    epsilon: float
    rounding: float = ROUNDING
    tolerance: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and the metric."""
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise SpecError(f"epsilon must be a positive number, got {self.epsilon}")
        _check_not_negative("rounding", self.rounding)
        _check_not_negative("tolerance", self.tolerance)
        _ = self._bound

    @cached_property
    def _names(self) -> list[str]:
        return list(self.extended.records)

    @cached_property
    def _numbers(self) -> dict[Record, int]:
        every = (record for records in self.extended.records.values() for record in records)
        return {record: number for number, record in enumerate(dict.fromkeys(every))}

    @cached_property
    def _index(self) -> list[NDArray[np.intp]]:
        return [np.array([self._numbers[x] for x in records]) for records in self.extended.records.values()]

    @cached_property
    def _logs(self) -> list[NDArray[np.float64]]:
        return [np.log(rows) for rows in self.extended.rows.values()]

    @cached_property
    def _bound(self) -> NDArray[np.float64]:
        return self.epsilon * distance_table(self.metric, list(self._numbers))

    def sources_hold(self) -> Check:
        """Return whether P(v, w) for all sources v, w: the premise of the theorem."""
        places = [self._names.index(name) for name in self.extended.sources]
        return self._pairs("mDP of the sources", ((v, w, ()) for v in places for w in places))

    def a1(self) -> Check:
        """Return whether P(v, w) for all v, w among a node and its successors, for every node (A1).

        Successors count whole, also where the edge covers only a part of them: two records of a node with
        two parents, one from each, are a pair that some A1 has to see.
        """
        families = (((u, *successors), (self._names[u],)) for u, successors in self._successors())
        return self._pairs("A1", ((v, w, via) for family, via in families for v in family for w in family))

    def a2(self) -> Check:
        """Return whether a record has one row (A2); see :meth:`Extended.agreement`."""
        return self.extended.agreement(tolerance=self.tolerance)

    def a3(self) -> Check:
        """Return whether P(u, w), u ≠ w, is passed on to every successor v of u: P(v, w) (A3)."""
        claims = (
            (v, int(w), (self._names[u],))
            for u, successors in self._successors()
            for w in np.flatnonzero(self._excess[u] <= self.rounding)
            if w != u
            for v in successors
        )
        return self._pairs("A3", claims)

    def global_mdp(self) -> Check:
        """Return whether (1) holds for all records of all nodes, and every record has one row."""
        everywhere = range(len(self._names))
        pairs = self._pairs("global mDP", ((v, w, ()) for v in everywhere for w in everywhere))
        agreement = self.a2()
        violations = pairs.violations + agreement.violations
        witnesses = _worst([*pairs.witnesses, *agreement.witnesses])
        return Check(pairs.name, self.epsilon, self.rounding, self.tolerance, violations, witnesses)

    def _successors(self) -> Iterable[tuple[int, list[int]]]:
        for u, name in enumerate(self._names):
            yield u, [self._names.index(successor) for successor in self.extended.successors[name]]

    @cached_property
    def _excess(self) -> NDArray[np.float64]:
        """Largest |log M_v − log M_w| − ε d by pair of nodes, shape (nodes, nodes); symmetric."""
        logs, index = np.concatenate(self._logs), np.concatenate(self._index)
        starts = np.cumsum([0, *map(len, self._index[:-1])])
        excess = np.full((len(self._names), len(self._names)), -math.inf)
        for place, (own_index, own_logs) in enumerate(zip(self._index, self._logs, strict=True)):
            for record, row in zip(own_index, own_logs, strict=True):
                over = np.abs(logs - row).max(axis=1) - self._bound[record, index]
                over[index == record] = -math.inf  # x = x' is the business of A2
                np.maximum(excess[place], np.maximum.reduceat(over, starts), out=excess[place])
        return excess

    def _pairs(self, name: str, claims: Iterable[tuple[int, int, tuple[str, ...]]]) -> Check:
        """Decide P(v, w) for triples of v, w and why they are looked at."""
        failing = self._excess > self.rounding
        at_fault: dict[tuple[int, int], tuple[int, int, tuple[str, ...]]] = {}
        for v, w, via in claims:
            if failing[v, w]:
                at_fault.setdefault((min(v, w), max(v, w)), (v, w, via))
        worst = sorted(at_fault.values(), key=lambda claim: -self._excess[claim[:2]])[:_SHOWN]
        witnesses = _worst(self._violation(*claim) for claim in worst)
        return Check(name, self.epsilon, self.rounding, None, len(at_fault), witnesses)

    def _violation(self, v: int, w: int, via: tuple[str, ...]) -> Violation:
        index = self._index[v][:, None], self._index[w]
        ratio = np.abs(self._logs[v][:, None] - self._logs[w])
        over = np.where(index[0] == index[1], -math.inf, ratio.max(axis=-1) - self._bound[index])
        first, second = map(int, np.unravel_index(over.argmax(), over.shape))
        output = int(ratio[first, second].argmax())
        nodes = self._names[v], self._names[w]
        records = self.extended.records[nodes[0]][first], self.extended.records[nodes[1]][second]
        log_ratio, bound = float(ratio[first, second, output]), float(self._bound[index][first, second])
        return Violation(nodes, records, output, log_ratio, bound, via)


def _check_not_negative(name: str, number: float | None) -> None:
    if number is not None and not (number >= 0 and math.isfinite(number)):
        raise SpecError(f"{name} must be a number that is not negative, got {number}")


def _worst(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    return tuple(sorted(violations, key=lambda found: found.bound - found.log_ratio)[:_SHOWN])
