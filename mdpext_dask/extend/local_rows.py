"""Rows that are local: the entries of near outputs, and the one number that all others have.

Noise puts the same probability f, to the last bit, on every output that is far from a record. What is worked
out of rows need not look at far outputs one by one: one column stands for all of them. Where all outputs are
near, as in a mechanism that is no noise, rows are what they always were.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    def of(
        cls,
        rows: NDArray[np.float32],
        floor: float | None = None,
        outputs: NDArray[np.intp] | None = None,
        total: int | None = None,
    ) -> "LocalRows":
        """Tell near from far outputs; without a floor, all are near.

        Parameters
        ----------
        rows
            M(y|x), float32 of shape (records east, records north, n).
        floor
            What far outputs have, and what is read where nothing is stored. A row of nothing else has been
            lost, and is NaN here.
        outputs, total
            Which of how many outputs these are, in order, where those that are not among them have the floor
            everywhere. Default: all.
        """
        if outputs is None:
            outputs = np.arange(rows.shape[-1])
        total = total or len(outputs)
        if floor is None:
            return cls(rows, outputs)
        near = np.zeros(len(outputs), dtype=bool)
        lost = np.zeros(rows.shape[:2], dtype=bool)
        for line, gone in zip(rows, lost, strict=True):  # line by line, as truth values are as many as rows
            above = line != floor
            near |= above.any(axis=0)
            gone[:] = ~above.any(axis=1)
        found = cls.floor(rows.shape[:2], outputs[near], floor, total)
        columns = found.columns_of(outputs[near])
        for line, out in zip(rows, found.entries, strict=True):
            out[:, columns] = line[:, near]
        found.entries[lost] = np.nan
        return found

    @classmethod
    def floor(cls, records: tuple[int, int], near: NDArray[np.intp], floor: float, total: int) -> "LocalRows":
        """Return rows of nothing but the floor, to write near outputs into.

        Parameters
        ----------
        records
            Records to the east and to the north.
        near
            Outputs that have a column of their own, in order.
        floor, total
            What entries are, and number K of outputs.
        """
        is_far = np.ones(total, dtype=bool)
        is_far[near] = False
        far = np.flatnonzero(is_far)
        # Fewer than two keep their places.
        outputs = np.append(near, far[0]) if len(far) > 1 else np.arange(total)
        entries = np.full((*records, len(outputs)), floor, dtype=np.float32)
        return cls(entries, outputs, max(len(far), 1))

    @property
    def total_outputs(self) -> int:
        """Number K of outputs, near and far."""
        return len(self.outputs) + self.copies - 1

    @property
    def near(self) -> NDArray[np.intp]:
        """Outputs that have a column of their own, in order."""
        return self.outputs if self.copies == 1 else self.outputs[:-1]

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

    def part(self, x: slice, y: slice | NDArray[np.intp]) -> "LocalRows":
        """Return the rows of some of the records, counted from the first to the east and to the north."""
        return replace(self, entries=self.entries[x, y])

    def of_outputs(self, outputs: NDArray[np.intp]) -> NDArray[Any]:
        """Return M(y|x) of some outputs, near or far; where their columns follow each other, a view."""
        columns = self.columns_of(outputs)
        if len(columns) and np.array_equal(columns, np.arange(len(columns)) + columns[0]):
            return self.entries[..., columns[0] : columns[-1] + 1]
        return self.entries[..., columns]

    def dense(self) -> NDArray[Any]:
        """Return the rows of all outputs, of shape (records east, records north, K)."""
        return self.of_outputs(np.arange(self.total_outputs))
