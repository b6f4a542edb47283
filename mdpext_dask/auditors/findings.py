"""What is wrong with single rows, before any two are compared."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from mdpext_dask.auditors.source import Range
from mdpext_dask.job.spec import json_number
from mdpext_dask.problem.grid import Array

# Rows that are distributions but for rounding (of float32, or of text) add up to 1 this closely.
_TOTAL_ERROR = 1e-6
# The least positive number.
_TINY = 5e-324

# Kinds of findings: about entries of rows, and about their totals.
NOT_FINITE, NEGATIVE = "entries that are not finite", "negative entries"
TOO_SMALL, IMPOSSIBLE = "entries that are too small for the sampler", "entries that are zero"
TOO_MUCH = "rows with a total above what the sampler can hold"
EMPTY, NOT_ONE = "rows of zeros", "rows that do not add up to 1"


@dataclass(frozen=True)
class Finding:
    """Something that rows of a mechanism should not have.

    Parameters
    ----------
    kind
        What.
    count
        How often.
    first_record
        Smallest number of a record that has it.
    extreme
        The worst value: the entry that is smallest, or the total that is furthest from 1.
    refutes
        Whether a row with it is no distribution to keep a promise with.
    """

    kind: str
    count: int
    first_record: int
    extreme: Annotated[float, BeforeValidator(lambda value: np.nan if value is None else value)]
    refutes: bool

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; NaN as null."""
        extreme = None if np.isnan(self.extreme) else json_number(self.extreme)
        return {**self.__dict__, "extreme": extreme}


def inspect_rows(
    records: NDArray[np.intp], rows: NDArray[np.floating], usable: Range, *, normalised: bool
) -> tuple[NDArray[np.bool_], list[Finding]]:
    """Return which rows can be used, bool of shape (n,), and what is wrong with rows.

    Parameters
    ----------
    records
        Record numbers, shape (n,).
    rows
        Rows, float of shape (n, K).
    usable
        What the sampler can use.
    normalised
        Whether rows must add up to 1; what divides by the total does not mind.
    """
    wide = rows.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = wide.sum(axis=1)
        off = (np.abs(total - 1) > _TOTAL_ERROR) & normalised
        # As nearly always. Written so that NaN fails; in float32 the least number would be 0.
        if float(rows.min()) >= max(usable.least, _TINY) and total.max() <= usable.largest_total:
            good = np.ones(len(rows), dtype=bool)
            return good, [_finding(NOT_ONE, off, total, records)] if off.any() else []
        finite = np.isfinite(wide)
        checks = [
            (NOT_FINITE, ~finite, wide),
            (NEGATIVE, finite & (wide < 0), wide),
            (TOO_SMALL, finite & (wide >= 0) & (wide < usable.least), wide),
        ]
        sound = ~np.any([bad.any(axis=1) for _, bad, _ in checks], axis=0)
        too_much, empty = sound & ~(total <= usable.largest_total), sound & (total == 0)
        good = sound & ~too_much & ~empty
        impossible = good[:, None] & (wide == 0)
    checks += [(TOO_MUCH, too_much, total), (EMPTY, empty, total), (NOT_ONE, good & off, total)]
    checks.append((IMPOSSIBLE, impossible, wide))
    return good, [_finding(kind, bad, values, records) for kind, bad, values in checks if bad.any()]


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding of each kind."""
    by_kind: dict[str, Finding] = {}
    for new in findings:
        old = by_kind.get(new.kind)
        if old is not None:
            further = max(old.extreme, new.extreme, key=lambda value: _severity(new.kind, value))
            first = min(old.first_record, new.first_record)
            new = Finding(new.kind, old.count + new.count, first, further, new.refutes)
        by_kind[new.kind] = new
    return tuple(by_kind.values())


def _severity(kind: str, value: float) -> float:
    if np.isnan(value):
        return np.inf
    return abs(value - 1) if kind in (TOO_MUCH, EMPTY, NOT_ONE) else -value


def _finding(kind: str, bad: NDArray[np.bool_], values: Array, records: NDArray[np.intp]) -> Finding:
    """Return a finding about entries of rows, arrays of shape (n, K), or totals, arrays of shape (n,)."""
    extreme = max(values[bad].tolist(), key=lambda value: _severity(kind, value))
    first = records[bad.reshape(len(records), -1).any(axis=1)].min()
    return Finding(kind, int(bad.sum()), int(first), extreme, refutes=kind != IMPOSSIBLE)
