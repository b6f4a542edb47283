"""Every triple (x, x', y): the exact audit.

Two rounds of tasks. The first compares the records of each part with each other, and says what a part holds
at most; that gives the steepest near pair, which rules out most pairs of parts for the second. A task reads
its parts from the mechanism and keeps the last few, so memory is bounded whatever the number of records.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdpext_dask.auditors.findings import Finding
from mdpext_dask.auditors.pairs.compare import Part, Tally, compare_parts, load_part
from mdpext_dask.auditors.pairs.tiles import BOUNDS_AT_ONCE, TILE, Level, box_distance, largest_differences
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.source import Source
from mdpext_dask.store.blocks import FLOAT64

# Parts that a worker keeps in memory, by their size, but never less than two.
_KEPT_BYTES = 128 * 2**20
# Parts that are compared with one by a task at most.
_PARTNERS = 8
# Arrays of what pairs of tiles hold at most, while they are told apart.
_BOUNDS = 3
# Numbers of a record, and of a pair of tiles, whatever the outputs; measured.
_NUMBERS = 20


@dataclass(frozen=True)
class PartSummary:
    """What the first round says of a part.

    Parameters
    ----------
    index
        The part.
    level
        All its usable records as one set; None if there are none.
    error
        What a difference of two ℓ may be off by.
    tally
        Of pairs within the part.
    usable, unusable
        Numbers of records.
    findings
        What is wrong with rows.
    """

    index: int
    level: Level | None
    error: float
    tally: Tally
    usable: int
    unusable: int
    findings: tuple[Finding, ...]


def compare_within(source: Source, index: int, promise: Promise, prune: bool = True) -> PartSummary:
    """Compare the records of a part with each other.

    Parameters
    ----------
    source
        The mechanism.
    index
        The part.
    promise
        What is audited.
    prune
        See :func:`mdpext_dask.auditors.pairs.compare.compare_parts`.
    """
    part, unusable, findings = _kept_part(source, index)
    if part is None:
        return PartSummary(index, None, 0.0, Tally(), 0, unusable, tuple(findings))
    return PartSummary(
        index=index,
        level=part.tiles.levels[0],
        error=part.error,
        tally=compare_parts(part, part, promise, prune=prune),
        usable=len(part.records),
        unusable=unusable,
        findings=tuple(findings),
    )


def compare_between(
    source: Source, index: int, partners: Sequence[int], promise: Promise, slope: float, prune: bool = True
) -> Tally:
    """Compare the records of a part with those of others.

    Parameters
    ----------
    source
        The mechanism.
    index, partners
        The part, and the others.
    promise
        What is audited.
    slope
        |log ratio| / distance, in 1/km, of the steepest triple that is known.
    prune
        See :func:`mdpext_dask.auditors.pairs.compare.compare_parts`.
    """
    tally = Tally(slope=slope)
    first = _kept_part(source, index)[0]
    for partner in partners:
        second = _kept_part(source, partner)[0]
        if first is not None and second is not None:
            tally.add(compare_parts(first, second, promise, tally.slope, prune=prune))
    return tally


def parts_to_compare(
    summaries: Sequence[PartSummary], promise: Promise, slope: float, *, prune: bool = True
) -> list[tuple[int, tuple[int, ...]]]:
    """Return which parts have to be compared with which others, near ones first, in portions for tasks.

    Parameters
    ----------
    summaries
        Of all parts.
    promise
        What is audited.
    slope
        |log ratio| / distance, in 1/km, of the steepest triple within a part.
    prune
        Whether parts whose bounds say that nothing is to be found are left out.
    """
    filled = [summary for summary in summaries if summary.level is not None]
    if len(filled) < 2:
        return []
    sets = Level(
        *(
            np.concatenate([getattr(summary.level, name) for summary in filled])
            for name in ("low", "high", "least", "most")
        )
    )
    error = max(summary.error for summary in filled)
    reach = min(promise.kept_per_km, slope)
    index = np.array([summary.index for summary in filled])
    portions: list[tuple[float, int, tuple[int, ...]]] = []
    for position in range(len(filled) - 1):
        others = np.arange(position + 1, len(filled))
        here = np.full(len(others), position)
        apart = box_distance(sets, sets, here, others, promise.metric_p, promise.plane_error_km)
        if prune:
            differences = largest_differences(sets, sets, here, others).max(axis=1) + error
            wanted = differences > reach * apart
            others, apart = others[wanted], apart[wanted]
        others = others[np.argsort(apart, kind="stable")]
        apart = np.sort(apart)
        portions += [
            (
                float(apart[start]),
                int(index[position]),
                tuple(index[others[start : start + _PARTNERS]].tolist()),
            )
            for start in range(0, len(others), _PARTNERS)
        ]
    return [(part, partners) for _, part, partners in sorted(portions)]


def pairs_of(records: int) -> int:
    """Return the number of unordered pairs of records."""
    return records * (records - 1) // 2


def peak_bytes(source: Source) -> int:
    """Return the predicted peak of what a task allocates, in bytes.

    Parts that are kept: rows as they are read, and ℓ. One that is being read: its rows twice, ℓ while it is
    put in order. Bounds of pairs of tiles, and tables of a pair of tiles.
    """
    entries = source.largest_part * source.outputs
    part = entries * (source.item_bytes + FLOAT64)
    kept = min(max(_KEPT_BYTES, 2 * part), source.parts * part)
    reading = entries * (2 * source.item_bytes + 3 * FLOAT64)
    tiles = math.ceil(source.largest_part / TILE)
    bounds = _BOUNDS * FLOAT64 * min(tiles**2 * source.outputs // 2, BOUNDS_AT_ONCE)
    numbers = _NUMBERS * FLOAT64 * (source.largest_part + tiles**2)
    return int(max(kept - part + reading, kept + bounds) + numbers + 8 * TILE**2 * FLOAT64)


class _Parts:
    """The parts of one audit that a process has read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a worker may have several threads
        self._token = ""
        self._kept: OrderedDict[int, tuple[Part | None, int, list[Finding]]] = OrderedDict()

    def get(self, source: Source, index: int) -> tuple[Part | None, int, list[Finding]]:
        with self._lock:
            if source.token != self._token:
                self._kept.clear()
                self._token = source.token
            if index not in self._kept:
                each = source.largest_part * source.outputs * (source.item_bytes + FLOAT64)
                while len(self._kept) >= max(_KEPT_BYTES // each, 2):
                    self._kept.popitem(last=False)
                self._kept[index] = load_part(source, index)
            self._kept.move_to_end(index)
            return self._kept[index]

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()


_parts = _Parts()


def forget() -> None:
    """Let go of what this process keeps of the last audit."""
    _parts.forget()


def _kept_part(source: Source, index: int) -> tuple[Part | None, int, list[Finding]]:
    return _parts.get(source, index)
