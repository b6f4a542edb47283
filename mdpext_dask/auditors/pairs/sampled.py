"""Pairs of records drawn at random: an estimate of how many triples break a promise, with its error.

Each work item draws a batch of pairs from every stratum of a design, reads the rows it needs chunk by chunk,
and compares them for all outputs. The share of outputs that break the promise for one pair is a number in
[0, 1]; its mean over all pairs is the violation ratio.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.findings import Finding, inspect_rows
from mdpext_dask.auditors.pairs.compare import Counts, Triple, logs_of
from mdpext_dask.auditors.pairs.designs import Design, LatticeDesign, PointsDesign, allocate
from mdpext_dask.auditors.promise import Pair, Promise, judge, may_break
from mdpext_dask.auditors.source import ANY_RANGE, INFINITE_DIFFERENCE, LatticeSource, Source, StoreSource
from mdpext_dask.problem.grid import Array
from mdpext_dask.store.blocks import FLOAT64

UNIFORM, STRATIFIED = DESIGNS = ("uniform", "stratified")
# |log ratio| / bound of triples; what is beyond the last edge breaks the promise, or nearly.
RATIO_EDGES = tuple((np.arange(21) / 20).tolist())
# Bytes of the pairs that a work item compares together, and its pairs, at most.
_BATCH_BYTES = 32 * 2**20
_BATCH_PAIRS = 100_000
# Tables of pairs and outputs that are held at once, small ones where there are many strata; and numbers of a
# pair. Measured.
_TABLES = {UNIFORM: 4.5, STRATIFIED: 1.0}
_PAIR_BYTES = 200
# Of a design of points: the points, lists of near pairs, and building them, for each record. Measured.
_POINT_BYTES, _NEAR_BYTES, _TREE_BYTES = 16, 30 * 2**20, 500


@dataclass
class StratumTally(Counts):
    """What the pairs drawn from one stratum have shown; what is drawn often is recomputed once in a batch.

    Parameters
    ----------
    pairs
        How many were drawn.
    unusable
        Pairs with a row that cannot be used; all their triples count as violations.
    worst
        The steepest triple.
    histogram
        Triples by |log ratio| / bound, between :data:`RATIO_EDGES` and beyond.
    findings
        What is wrong with rows that a batch has read, for all strata with the first one; a row counts once
        for every batch.
    blocks
        Blocks of a store whose rows a batch has read, likewise.
    """

    pairs: int = 0
    unusable: int = 0
    worst: Triple | None = None
    histogram: list[int] = field(default_factory=lambda: [0] * len(RATIO_EDGES))
    findings: list[Finding] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    def add(self, other: "StratumTally") -> None:
        """Take in what another has shown."""
        self.add_counts(other)
        self.pairs += other.pairs
        self.unusable += other.unusable
        self.worst = max(filter(None, (self.worst, other.worst)), default=None)
        self.histogram = [mine + theirs for mine, theirs in zip(self.histogram, other.histogram, strict=True)]
        self.findings += other.findings
        self.blocks |= other.blocks

    def count_ratios(self, differences: Array, bounds: Array, times: NDArray[np.intp]) -> None:
        """Count triples by |log ratio| / bound; `times` says how often each pair was drawn."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.nan_to_num(differences / bounds, nan=0.0, posinf=math.inf)
        bins = np.maximum(np.searchsorted(RATIO_EDGES, ratios, side="left") - 1, 0)
        weights = np.broadcast_to(times[:, None], bins.shape)
        counts = np.bincount(bins.ravel(), weights=weights.ravel(), minlength=len(RATIO_EDGES))
        self.histogram = [mine + int(more) for mine, more in zip(self.histogram, counts, strict=True)]


@lru_cache(maxsize=2)
def design_of(source: Source, kind: str, p: float) -> Design:
    """Return how to draw pairs of a source's records; built once in a process."""
    if isinstance(source, LatticeSource):
        grid = source.grid
        lattice = grid.shape, (grid.spacing_km, grid.spacing_km), p
        return LatticeDesign(*lattice) if kind == UNIFORM else LatticeDesign.stratified(*lattice)
    points = source.xy_km(np.arange(source.records))
    return PointsDesign(points, p) if kind == UNIFORM else PointsDesign.stratified(points, p)


def batch_pairs(outputs: int) -> int:
    """Return how many pairs a work item draws at most; see :func:`peak_bytes`."""
    return min(max(_BATCH_BYTES // (2 * outputs * FLOAT64), 1), _BATCH_PAIRS)


def peak_bytes(source: Source, kind: str, pairs: int) -> int:
    """Return the predicted peak of what a work item allocates, in bytes.

    Rows of both records of every pair as they are read, ℓ, and two tables of the pairs; and for records on no
    lattice the design: their points, and for strata a search tree and lists of near pairs.

    Parameters
    ----------
    source
        The mechanism.
    kind
        One of :data:`DESIGNS`.
    pairs
        How many pairs it draws.
    """
    rows = min(2 * pairs, source.records) * source.outputs * (source.item_bytes + FLOAT64)
    tables = pairs * (_TABLES[kind] * source.outputs * FLOAT64 + (_PAIR_BYTES if kind == UNIFORM else 0))
    batch = int(rows + tables)
    if isinstance(source, LatticeSource):
        return batch
    points = _POINT_BYTES * source.records
    if kind == UNIFORM:
        return batch + points
    return max(batch + points + _NEAR_BYTES, _NEAR_BYTES + _TREE_BYTES * source.records)


def sample_batch(
    source: Source, promise: Promise, kind: str, seed: int, batch: int, pairs: int
) -> list[StratumTally]:
    """Draw and compare a batch of pairs; return what each stratum shows.

    Parameters
    ----------
    source
        The mechanism.
    promise
        What is audited.
    kind
        One of :data:`DESIGNS`.
    seed, batch
        Seeds of the draws, which depend on nothing else.
    pairs
        How many to draw.
    """
    design = design_of(source, kind, promise.metric_p)
    drawn = [
        design.draw(np.random.default_rng([seed, batch, stratum]), stratum, count)
        for stratum, count in enumerate(allocate(pairs, design.strata))
    ]
    # Every row is read once, whichever strata need it.
    records = np.unique(np.concatenate([numbers for both in drawn for numbers in both]))
    rows = source.rows(records)
    good, findings = inspect_rows(records, rows, source.range, normalised=source.range == ANY_RANGE)
    logs, error = np.zeros(rows.shape), 0.0
    if good.all():
        logs, error = logs_of(rows)
    elif good.any():
        logs[good], error = logs_of(rows[good])
    read = _Rows(records, rows, good, logs, error, source.xy_km(records))
    tallies = [_compare(read, source, promise, first, second) for first, second in drawn]
    tallies[0].findings = findings
    if isinstance(source, StoreSource):
        tallies[0].blocks = source.store.plan.blocks_of(*np.divmod(records, source.store.grid.shape[1]))
    return tallies


def estimate(tallies: Sequence[StratumTally], weights: Array, outputs: int) -> tuple[float, list[float]]:
    """Return the estimated violation ratio, and means of the strata.

    Parameters
    ----------
    tallies
        Of all strata; every batch draws from each.
    weights
        Shares of the strata of all pairs, float64 of shape (strata,).
    outputs
        Number K of outputs.
    """
    means = [tally.violations / (tally.pairs * outputs) for tally in tallies]
    shares = weights.tolist()
    return sum(mean * share for mean, share in zip(means, shares, strict=True)) / sum(shares), means


class _Rows(NamedTuple):
    """Rows that a batch needs, with ℓ of those that can be used."""

    records: NDArray[np.intp]
    rows: NDArray[np.floating]
    good: NDArray[np.bool_]
    logs: Array
    error: float
    xy_km: Array


def _compare(
    batch: _Rows, source: Source, promise: Promise, first: NDArray[np.intp], second: NDArray[np.intp]
) -> StratumTally:
    """Compare pairs of records for all outputs."""
    tally = StratumTally(pairs=len(first))
    here, there = (np.searchsorted(batch.records, numbers) for numbers in (first, second))
    sound = batch.good[here] & batch.good[there]
    # A row that cannot be used keeps no promise at all.
    unusable = int((~sound).sum())
    tally.unusable += unusable
    tally.violations += unusable * source.outputs
    if unusable:
        position = int(np.argmin(sound))
        tally.worst = Triple(True, math.inf, int(first[position]), int(second[position]), 0)
        here, there = here[sound], there[sound]
    if not len(here):
        return tally
    # What is drawn often is compared once.
    codes, times = np.unique(
        np.minimum(here, there) * len(batch.records) + np.maximum(here, there), return_counts=True
    )
    here, there = np.divmod(codes, len(batch.records))
    differences = batch.logs[here]
    differences -= batch.logs[there]
    np.abs(differences, out=differences)
    dx, dy = (batch.xy_km[here] - batch.xy_km[there]).T.copy()
    apart = promise.apart_km(dx, dy)[:, None]
    tally.count_ratios(differences, promise.epsilon_per_km * apart, times)

    pair, output = np.nonzero(may_break(differences, apart, batch.error, promise))

    def pair_of(position: int) -> Pair:
        both = np.array([here[pair[position]], there[pair[position]]])
        return batch.rows[both[0]], batch.rows[both[1]], source.places(batch.records[both])

    found = judge(differences[pair, output], apart[pair, 0], batch.error, promise, pair_of, output)
    violations, hidden = (int(times[pair[some]].sum()) for some in (found.violates, found.hidden))
    tally.add_counts(Counts(violations, hidden, found.recomputed, found.undecided))
    breaks = found.violates | found.hidden
    broken = bool(breaks.any())
    if broken:
        pair, output = pair[breaks], output[breaks]
    else:
        pair, output = np.arange(len(here)), differences.argmax(axis=1)
    steep, apart = differences[pair, output], apart[pair, 0]
    # In one and the same place whatever differs is infinitely steep, even if it does in its last bit only.
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(apart > 0, steep / apart, math.inf if broken else 0.0)
    slopes[steep > INFINITE_DIFFERENCE] = math.inf
    position = int(slopes.argmax())
    records = int(batch.records[here[pair[position]]]), int(batch.records[there[pair[position]]])
    worst = Triple(broken, float(slopes[position]), *records, int(output[position]))
    tally.worst = max(filter(None, (tally.worst, worst)))
    return tally
