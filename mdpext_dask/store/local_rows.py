"""Rows that are local: the entries of near outputs, and the one number that all others have.

Noise puts the same probability f, to the last bit, on every output that is far from a record. The array of
such a mechanism has f as its fill value, and chunks of far outputs are not stored. What is worked out of
rows need not look at far outputs one by one: one column stands for all of them. Where all outputs are near,
as in a mechanism that is no noise, rows are what they always were.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import ROOT_KEY, MechanismStore
from mdpext_dask.store.schema import PROBABILITY


@dataclass(frozen=True)
class LocalRows:
    """Rows of a rectangle of records.

    Parameters
    ----------
    entries
        M(y|x) of n outputs, float of shape (records east, records north, n); the last column may stand for
        more than one.
    outputs
        Which outputs, shape (n,): near ones in order, and the first of those that the last column stands for.
    copies
        How many outputs the last column stands for.
    """

    entries: NDArray[np.floating]
    outputs: NDArray[np.intp]
    copies: int = 1

    @classmethod
    def of(cls, rows: NDArray[np.float32], floor: float | None) -> "LocalRows":
        """Tell near from far outputs; without a floor, all are near.

        Parameters
        ----------
        rows
            M(y|x), float32 of shape (records east, records north, K).
        floor
            What far outputs have, and what is read where nothing is stored. A row of nothing else has been
            lost, and is NaN here.
        """
        outputs = np.arange(rows.shape[-1])
        if floor is None:
            return cls(rows, outputs)
        near = np.zeros(len(outputs), dtype=bool)
        lost = np.zeros(rows.shape[:2], dtype=bool)
        for line, gone in zip(rows, lost, strict=True):  # line by line, as truth values are as many as rows
            above = line != floor
            near |= above.any(axis=0)
            gone[:] = ~above.any(axis=1)
        far = np.flatnonzero(~near)
        copies = max(len(far), 1)
        if copies > 1:
            outputs = np.append(np.flatnonzero(near), far[0])
            rows = rows[..., outputs]
        if lost.any():
            rows = np.where(lost[..., None], np.float32(np.nan), rows)
        return cls(rows, outputs, copies)

    @property
    def total_outputs(self) -> int:
        """Number K of outputs, near and far."""
        return len(self.outputs) + self.copies - 1

    @property
    def counts(self) -> NDArray[np.intp]:
        """How many outputs each column stands for, shape (n,)."""
        counts = np.ones(len(self.outputs), dtype=np.intp)
        counts[-1] = self.copies
        return counts

    def columns_of(self, outputs: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the column of each of some outputs."""
        columns = np.full(self.total_outputs, len(self.outputs) - 1)
        columns[self.outputs] = np.arange(len(self.outputs))
        return np.asarray(columns[outputs])

    def dense(self) -> NDArray[Any]:
        """Return the rows of all outputs, of shape (records east, records north, K)."""
        if self.copies == 1:
            return self.entries
        return self.entries[..., self.columns_of(np.arange(self.total_outputs))]


def floor_of(store: MechanismStore) -> float | None:
    """Return what outputs far from a record have, which is not stored; None where all rows are whole."""
    fill = float(store.array(PROBABILITY).fill_value)
    return None if math.isnan(fill) else fill


def keep_floor(store: MechanismStore, floor: float) -> None:
    """Say what outputs far from a record have, before any block is written.

    Raises
    ------
    StoreError
        If the store refuses the write.
    """
    key = f"{PROBABILITY}/{ROOT_KEY}"
    description: Any = objects.get_json(store.objects, key)
    objects.put_json(store.objects, key, {**description, "fill_value": float(np.float32(floor))})
    store.update()  # opens the array as it is now
