"""All pairs of records of two parts, those apart that cannot matter: the kernel of the exhaustive audit.

Everything is float64 with the error of logarithms, totals and distances bounded, so that "kept" and "broken"
are facts; what lies between is decided by :func:`mdpext_dask.auditors.promise.judge`, and counted.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.findings import Finding, inspect_rows
from mdpext_dask.auditors.pairs.tiles import (
    LENGTH_ERROR,
    TILE,
    Tiles,
    box_distance,
    largest_differences,
    pairs_to_look_at,
    tiles_of,
)
from mdpext_dask.auditors.promise import Pair, Promise, judge
from mdpext_dask.auditors.source import ANY_RANGE, IMPOSSIBLE_LOG, INFINITE_DIFFERENCE, Source
from mdpext_dask.problem.grid import Array
from mdpext_dask.seed.budget import log_ratio_error

# By how much violations exceed: bounds of |log ratio| / bound.
SIZE_EDGES = (1.0, 1 + 1e-9, 1 + 1e-6, 1.001, 1.01, 1.1, 1.25, 1.5, 2.0, 4.0, math.inf)
# Worst triples that are kept, one of each pair of tiles.
_WORST = 10
# Pairs of tiles whose bounds are looked at together.
_TILE_PAIRS = 4096


@dataclass(frozen=True)
class Part:
    """Usable records of a part, in the order of their tiles.

    Parameters
    ----------
    records
        Record numbers, shape (n,).
    xy_km
        Their points, float64 of shape (n, 2), in km.
    places
        As the promise measures them: the same, or lon and lat in degrees.
    rows
        Their rows, float of shape (n, K).
    logs
        ℓ, float64 of shape (K, n): of one output at all records one after the other.
    tiles
        How they are cut.
    error
        What a difference of two ℓ may be off by.
    """

    records: NDArray[np.intp]
    xy_km: Array
    places: Array
    rows: NDArray[np.floating]
    logs: Array
    tiles: Tiles
    error: float


@dataclass(frozen=True, order=True)
class Triple:
    """Two records and an output, ordered by |log ratio| / distance; those that break the promise come last.

    Parameters
    ----------
    broken
        Whether it is known to break the promise, but for a tolerance.
    slope
        |ℓ(y|x) − ℓ(y|x')| / ‖x − x'‖_p in the plane, in 1/km; may be infinite.
    record, record_prime, output
        x, x' and y.
    """

    broken: bool
    slope: float
    record: int
    record_prime: int
    output: int


@dataclass
class Counts:
    """How many triples were found to be what.

    Parameters
    ----------
    violations
        Triples that break the promise.
    hidden
        Triples that break it but for the tolerance.
    recomputed
        Triples that float64 could not decide.
    undecided
        Of those, triples that nothing could decide.
    """

    violations: int = 0
    hidden: int = 0
    recomputed: int = 0
    undecided: int = 0

    def add_counts(self, other: "Counts") -> None:
        """Add those of another."""
        self.violations += other.violations
        self.hidden += other.hidden
        self.recomputed += other.recomputed
        self.undecided += other.undecided


@dataclass
class Tally(Counts):
    """What comparing pairs has found.

    Parameters
    ----------
    slope
        Largest |log ratio| / distance in the plane, in 1/km, as computed.
    slope_above
        No pair has a larger one: the same, rounded outward.
    compared
        Triples whose ratio was computed; the others are kept by the bounds of their tiles.
    sizes
        Violations by :data:`SIZE_EDGES`.
    worst
        The steepest triples, one of each pair of tiles.
    """

    slope: float = 0.0
    slope_above: float = 0.0
    compared: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(SIZE_EDGES) - 1))
    worst: list[Triple] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take in what another has found."""
        self.add_counts(other)
        self.slope = max(self.slope, other.slope)
        self.slope_above = max(self.slope_above, other.slope_above)
        self.compared += other.compared
        self.sizes = [mine + theirs for mine, theirs in zip(self.sizes, other.sizes, strict=True)]
        self.worst = heapq.nlargest(_WORST, self.worst + other.worst)

    def note(self, triple: Triple) -> None:
        """Keep a triple if it is one of the worst."""
        self.slope = max(self.slope, triple.slope)
        self.worst = heapq.nlargest(_WORST, [*self.worst, triple])

    def add_violations(self, differences: Array, bounds: Array, which: NDArray[np.bool_]) -> None:
        """Count violations, also by size.

        Parameters
        ----------
        differences, bounds
            |log ratios| and their bounds without a tolerance, float64 of any one shape.
        which
            Which of them are violations, bool of that shape.
        """
        count = int(np.count_nonzero(which))
        self.violations += count
        for position, edge in enumerate(SIZE_EDGES[1:-1]):
            if not count:
                return
            beyond = int(np.count_nonzero((differences >= edge * bounds) & which))
            self.sizes[position] += count - beyond
            count = beyond
        self.sizes[-1] += count


def load_part(source: Source, index: int) -> tuple[Part | None, list[Finding]]:
    """Read a part of a mechanism; return its usable records, if there are any, and what is wrong with rows.

    Parameters
    ----------
    source
        The mechanism.
    index
        The part.
    """
    records, rows = source.part(index)
    good, findings = inspect_rows(records, rows, source.range, normalised=source.range == ANY_RANGE)
    if not good.all():
        records, rows = records[good], rows[good]
    if not len(records):
        return None, findings
    xy_km = source.xy_km(records)
    logs, error = logs_of(rows)
    tiles = tiles_of(xy_km, logs, TILE)
    order = tiles.order
    records, xy_km, rows = records[order], xy_km[order], rows[order]
    logs = np.ascontiguousarray(logs[order].T)
    return Part(records, xy_km, source.places(records), rows, logs, tiles, error), findings


def logs_of(rows: NDArray[np.floating]) -> tuple[Array, float]:
    """Return ℓ of usable rows, float64 of shape (n, K), and what a difference of two may be off by.

    Where an entry is 0, ℓ is :data:`IMPOSSIBLE_LOG`.
    """
    wide = rows.astype(np.float64)
    total = wide.sum(axis=1, keepdims=True)
    zero = wide == 0
    wide[zero] = 1.0
    least, largest_total = float(wide.min()), float(total.max())
    np.log(wide, out=wide)
    wide -= np.log(total)
    wide[zero] = IMPOSSIBLE_LOG
    largest_log = max(-math.log(least), abs(math.log(largest_total)), abs(math.log(float(total.min()))))
    return wide, log_ratio_error(rows.shape[1], largest_log)


class Comparison:
    """Comparing all records of two parts for all outputs; a part with itself, each pair once.

    Parameters
    ----------
    first, second
        The parts; the same object for pairs within a part.
    promise
        What is audited.
    slope
        |log ratio| / distance, in 1/km, of a triple that is known already.
    """

    def __init__(self, first: Part, second: Part, promise: Promise, slope: float) -> None:
        self._first, self._second = first, second
        self._same = first is second
        self._promise, self._p = promise, promise.metric_p
        self._error = max(first.error, second.error)
        self._known = slope
        self._tally = Tally()
        self._table, self._scratch, self._apart = (np.empty(TILE * TILE) for _ in range(3))

    @property
    def _slope(self) -> float:
        """Slope up to which a pair is of no interest: it breaks nothing, and is not the steepest."""
        return min(self._promise.kept_per_km, max(self._known, self._tally.slope))

    def run(self) -> Tally:
        """Compare."""
        every = np.arange(len(self._first.logs))
        if self._same:
            # What is near is steep, and then rules out much of what is far.
            for tile in range(len(self._first.tiles.starts) - 1):
                self._compare_tiles(tile, tile, every)
        for tile, tile_prime, active in self._tile_pairs():
            self._compare_tiles(tile, tile_prime, active)
        return self._tally

    def _tile_pairs(self) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
        """Yield pairs of different tiles, near ones first, with the outputs that matter."""
        first, second = self._first.tiles, self._second.tiles
        errors = self._error, self._promise.plane_error_km
        wanted = pairs_to_look_at(first, second, self._p, self._slope, errors, same=self._same)
        if self._same:
            different = wanted[0] != wanted[1]
            wanted = wanted[0][different], wanted[1][different]
        levels = first.levels[-1], second.levels[-1]
        apart = box_distance(*levels, *wanted, self._p, errors[1])
        order = np.argsort(apart, kind="stable")
        for start in range(0, len(order), _TILE_PAIRS):
            some = order[start : start + _TILE_PAIRS]
            a, b = wanted[0][some], wanted[1][some]
            differences = largest_differences(*levels, a, b) + self._error
            for position in range(len(some)):
                active = np.flatnonzero(differences[position] > self._slope * apart[some[position]])
                if len(active):
                    yield int(a[position]), int(b[position]), active

    def _compare_tiles(self, tile: int, tile_prime: int, active: NDArray[np.intp]) -> None:
        rows = slice(*self._first.tiles.starts[tile : tile + 2].tolist())
        columns = slice(*self._second.tiles.starts[tile_prime : tile_prime + 2].tolist())
        shape = rows.stop - rows.start, columns.stop - columns.start
        differences, scratch, apart = (
            buffer[: shape[0] * shape[1]].reshape(shape)
            for buffer in (self._table, self._scratch, self._apart)
        )
        x, y = self._first.xy_km[rows].T
        x_prime, y_prime = self._second.xy_km[columns].T
        np.subtract(x[:, None], x_prime, out=differences)
        np.subtract(y[:, None], y_prime, out=scratch)
        self._promise.apart_km(differences, scratch, out=apart)
        pairs = apart.size
        if self._same and tile == tile_prime:
            np.fill_diagonal(apart, math.inf)  # a record is no pair
            pairs = shape[0] * (shape[0] - 1) // 2
        if not apart.all():
            self._compare_duplicates(rows, columns, apart)
            apart[apart == 0] = math.inf
        largest_of(self._first.logs[:, rows], self._second.logs[:, columns], active, differences, scratch)
        self._tally.compared += pairs * len(active)
        # Rounded outward, so that a pair that is passed over here is kept.
        np.add(differences, self._error, out=scratch)
        scratch /= apart
        where = int(scratch.argmax())
        above = float(scratch.flat[where]) * (1 + 2 * LENGTH_ERROR)
        self._tally.slope_above = max(self._tally.slope_above, above)
        slope = float(differences.flat[where] / apart.flat[where])
        self._tally.slope = max(self._tally.slope, slope)
        steepest = None
        if above > self._promise.kept_per_km:
            within = self._same and tile == tile_prime
            steepest = self._count(rows, columns, active, apart, scratch, within=within)
        # Where nothing is any distance apart, the largest is of a record with itself.
        if steepest is None and math.isfinite(apart.flat[where]):
            i, j = divmod(where, shape[1])
            i, j = i + rows.start, j + columns.start
            output = int(active[np.abs(self._first.logs[active, i] - self._second.logs[active, j]).argmax()])
            steepest = self._triple(slope, i, j, output, broken=False)
        if steepest is not None:
            self._tally.note(steepest)

    def _count(
        self,
        rows: slice,
        columns: slice,
        active: NDArray[np.intp],
        apart: Array,
        scratch: Array,
        *,
        within: bool,
    ) -> Triple | None:
        """Count triples that break the promise, one output after the other, and return the steepest of them.

        What float64 decides is only counted; the rest, hardly ever any, is taken out and judged.
        """
        promise, error, tally = self._promise, self._error, self._tally
        kept_km = promise.kept_per_km * apart * (1 - LENGTH_ERROR) - error
        broken_km = promise.broken_per_km * promise.furthest_km(apart) + error
        if within:
            # Each pair once.
            kept_km[np.tril_indices(len(kept_km))] = broken_km[np.tril_indices(len(kept_km))] = math.inf
        found: list[Triple | None] = [None]
        for output in active.tolist():
            logs, logs_prime = self._first.logs[output, rows], self._second.logs[output, columns]
            np.abs(np.subtract(logs[:, None], logs_prime, out=scratch), out=scratch)
            doubtful = scratch > kept_km
            if not doubtful.any():
                continue
            violates = scratch > broken_km + promise.tolerance
            if violates.any():
                tally.add_violations(scratch, promise.epsilon_per_km * apart, violates)
            breaks = violates
            if promise.tolerance:
                hidden = (scratch > broken_km) & (scratch <= kept_km + promise.tolerance)
                tally.hidden += int(np.count_nonzero(hidden))
                breaks = violates | hidden
            if breaks.any():
                slopes = np.where(breaks, scratch, 0.0) / apart
                i, j = divmod(int(slopes.argmax()), slopes.shape[1])
                steepest = float(slopes[i, j])
                found.append(self._triple(steepest, i + rows.start, j + columns.start, output, broken=True))
            doubtful &= ~breaks
            if doubtful.any():
                east, north = np.nonzero(doubtful)
                positions = east + rows.start, north + columns.start
                outputs = np.full(len(east), output)
                found.append(self._judge(*positions, outputs, scratch[doubtful], apart[doubtful]))
        return max(filter(None, found), default=None)

    def _judge(
        self,
        i: NDArray[np.intp],
        j: NDArray[np.intp],
        outputs: NDArray[np.intp],
        differences: Array,
        apart: Array,
    ) -> Triple | None:
        """Count those of some triples that break the promise, and return the steepest, tolerated or not.

        Parameters
        ----------
        i, j
            Positions of the records in both parts, shape (n,).
        outputs
            y, shape (n,).
        differences, apart
            |ℓ(y|x) − ℓ(y|x')| and distances in km, float64 of shape (n,).
        """

        def pair_of(position: int) -> Pair:
            first, second = int(i[position]), int(j[position])
            places = np.stack([self._first.places[first], self._second.places[second]])
            return self._first.rows[first], self._second.rows[second], places

        found = judge(differences, apart, self._error, self._promise, pair_of, outputs)
        self._tally.add_counts(Counts(0, int(found.hidden.sum()), found.recomputed, found.undecided))
        self._tally.add_violations(differences, self._promise.epsilon_per_km * apart, found.violates)
        broken = np.flatnonzero(found.violates | found.hidden)
        if not len(broken):
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.where(apart[broken] > 0, differences[broken] / apart[broken], math.inf)
        steepest = int(broken[slopes.argmax()])
        return self._triple(
            float(slopes.max()), int(i[steepest]), int(j[steepest]), int(outputs[steepest]), broken=True
        )

    def _compare_duplicates(self, rows: slice, columns: slice, apart: Array) -> None:
        """Compare records at one and the same place: whatever differs there is infinitely steep."""
        # By rows: what differs in its last bit only may have the same logarithm.
        both = np.concatenate([self._first.rows[rows], self._second.rows[columns]])
        kinds = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
        differ = (apart == 0) & (kinds[: len(apart), None] != kinds[len(apart) :])
        if self._same and rows == columns:
            differ &= np.tri(len(apart), k=-1, dtype=bool).T  # each pair once
        i, j = np.nonzero(differ)
        outputs = len(self._first.logs)
        at_once = max(TILE**2 // outputs, 1)
        for start in range(0, len(i), at_once):
            first = i[start : start + at_once] + rows.start
            second = j[start : start + at_once] + columns.start
            differences = np.abs(self._first.logs[:, first] - self._second.logs[:, second])
            triples = np.tile(first, outputs), np.tile(second, outputs)
            numbers = np.repeat(np.arange(outputs), len(first))
            broken = self._judge(*triples, numbers, differences.ravel(), np.zeros(len(numbers)))
            if (self._first.xy_km[first] != self._second.xy_km[second]).any():
                # Next to each other rather than in one place: they keep the promise, and no more is known.
                self._tally.slope_above = max(self._tally.slope_above, self._promise.epsilon_per_km)
            if broken is not None:
                self._tally.slope_above = math.inf
                self._tally.note(broken)

    def _triple(self, slope: float, i: int, j: int, output: int, *, broken: bool) -> Triple:
        difference = abs(float(self._first.logs[output, i] - self._second.logs[output, j]))
        records = int(self._first.records[i]), int(self._second.records[j])
        return Triple(broken, math.inf if difference > INFINITE_DIFFERENCE else slope, *records, output)


def largest_of(logs: Array, logs_prime: Array, outputs: NDArray[np.intp], out: Array, scratch: Array) -> None:
    """Write max_y |ℓ(y|x) − ℓ(y|x')| of all pairs: for each y three passes over a table in the cache.

    Parameters
    ----------
    logs, logs_prime
        ℓ, float64 of shapes (K, n) and (K, m).
    outputs
        Which y, at least one.
    out, scratch
        float64 of shape (n, m).
    """
    first, *others = outputs.tolist()
    np.subtract(logs[first][:, None], logs_prime[first], out=out)
    np.abs(out, out=out)
    for output in others:
        np.subtract(logs[output][:, None], logs_prime[output], out=scratch)
        np.abs(scratch, out=scratch)
        np.maximum(out, scratch, out=out)
