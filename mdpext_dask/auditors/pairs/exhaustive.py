"""Every triple (x, x', y): the exact audit.

Two rounds of work items. The first compares the records of each part with each other and returns bounds of
the part; the steepest near pair that it finds rules out most pairs of parts for the second. A work item reads
its parts from the mechanism and keeps the last few, so memory does not grow with the number of records.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mdpext_dask.auditors.findings import Finding
from mdpext_dask.auditors.pairs.compare import Comparison, Part, Tally, load_part
from mdpext_dask.auditors.pairs.tiles import BOUNDS_AT_ONCE, TILE, Level, box_distance, largest_differences
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.source import Source
from mdpext_dask.store.blocks import FLOAT64

# Parts that a worker keeps in memory, by their size, but never less than two.
_KEPT_BYTES = 128 * 2**20
# Parts that a work item compares with one part, at most.
_PARTNERS = 8
# Arrays of what pairs of tiles hold at most, while they are told apart.
_BOUNDS = 3
# Numbers of a record, and of a pair of tiles, whatever the outputs; measured.
_NUMBERS = 20
# Numbers of a record that is kept, beside its row and ℓ: record number, point, place, position.
_KEPT_NUMBERS = 6


@dataclass(frozen=True)
class PartSummary:
    """What the first round says of a part.

    Parameters
    ----------
    index
        The part.
    findings
        What is wrong with rows.
    usable
        Number of usable records.
    level
        All of them as one set; None if there are none.
    error
        What a difference of two ℓ may be off by.
    tally
        Of pairs within the part.
    """

    index: int
    findings: list[Finding]
    usable: int = 0
    level: Level | None = None
    error: float = 0.0
    tally: Tally = field(default_factory=Tally)


def compare_within(source: Source, index: int, promise: Promise) -> PartSummary:
    """Compare the records of a part with each other.

    Parameters
    ----------
    source
        The mechanism.
    index
        The part.
    promise
        What is audited.
    """
    part, findings = _kept_part(source, index)
    if part is None:
        return PartSummary(index, findings)
    tally = Comparison(part, part, promise, 0.0).run()
    return PartSummary(index, findings, len(part.records), part.tiles.levels[0], part.error, tally)


def compare_between(
    source: Source, index: int, partners: Sequence[int], promise: Promise, slope: float
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
    """
    tally = Tally(slope=slope)
    first = _kept_part(source, index)[0]
    for partner in partners:
        second = _kept_part(source, partner)[0]
        if first is not None and second is not None:
            tally.add(Comparison(first, second, promise, tally.slope).run())
    return tally


def parts_to_compare(
    summaries: Sequence[PartSummary], promise: Promise, slope: float
) -> list[tuple[int, tuple[int, ...]]]:
    """Return which parts have to be compared with which others, near ones first, in portions for work items.

    Parameters
    ----------
    summaries
        Of all parts.
    promise
        What is audited.
    slope
        |log ratio| / distance, in 1/km, of the steepest triple within a part.
    """
    filled = [summary for summary in summaries if summary.level is not None]
    if len(filled) < 2:
        return []
    names = "low", "high", "least", "most"
    sets = Level(*(np.concatenate([getattr(each.level, name) for each in filled]) for name in names))
    error = max(summary.error for summary in filled)
    reach = min(promise.kept_per_km, slope)
    index = np.array([summary.index for summary in filled])
    portions: list[tuple[float, int, tuple[int, ...]]] = []
    for position in range(len(filled) - 1):
        others = np.arange(position + 1, len(filled))
        here = np.full(len(others), position)
        apart = box_distance(sets, sets, here, others, promise.metric_p, promise.plane_error_km)
        differences = largest_differences(sets, sets, here, others).max(axis=1) + error
        wanted = differences > reach * apart
        others, apart = others[wanted], apart[wanted]
        order = np.argsort(apart, kind="stable")
        others, apart = index[others[order]], apart[order]
        for start in range(0, len(others), _PARTNERS):
            partners = tuple(others[start : start + _PARTNERS].tolist())
            portions.append((float(apart[start]), int(index[position]), partners))
    return [(part, partners) for _, part, partners in sorted(portions)]


def pairs_of(records: int) -> int:
    """Return the number of unordered pairs of records."""
    return records * (records - 1) // 2


def peak_bytes(source: Source) -> int:
    """Return the predicted peak of what a work item allocates, in bytes.

    Parts that are kept: rows as they are read, ℓ, and where records are. One that is being read: its rows,
    and ℓ while it is put in order. Bounds of pairs of tiles, and tables of a pair of tiles.
    """
    entries = source.largest_part * source.outputs
    part = _bytes_of_part(source)
    kept = min(max(_KEPT_BYTES, 2 * part), source.parts * part)
    reading = entries * (source.item_bytes + 3 * FLOAT64)
    tiles = math.ceil(source.largest_part / TILE)
    bounds = _BOUNDS * FLOAT64 * min(tiles**2 * source.outputs // 2, BOUNDS_AT_ONCE)
    numbers = _NUMBERS * FLOAT64 * (source.largest_part + tiles**2)
    return int(max(kept - part + reading, kept + bounds) + numbers + 8 * TILE**2 * FLOAT64)


def _bytes_of_part(source: Source) -> int:
    """Return what the largest part that is kept takes, in bytes."""
    row = source.outputs * (source.item_bytes + FLOAT64) + _KEPT_NUMBERS * FLOAT64
    return source.largest_part * row


# The parts of one audit that this process has read last; a worker may have several threads.
_kept: OrderedDict[tuple[str, int], tuple[Part | None, list[Finding]]] = OrderedDict()
_lock = threading.Lock()


def forget() -> None:
    """Let go of what this process keeps of the last audit."""
    with _lock:
        _kept.clear()


def _kept_part(source: Source, index: int) -> tuple[Part | None, list[Finding]]:
    key = source.token, index
    with _lock:
        if key not in _kept:
            if any(token != source.token for token, _ in _kept):
                _kept.clear()
            while len(_kept) >= max(_KEPT_BYTES // _bytes_of_part(source), 2):
                _kept.popitem(last=False)
            _kept[key] = load_part(source, index)
        _kept.move_to_end(key)
        return _kept[key]
