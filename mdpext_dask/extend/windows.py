"""Windows of a lattice of records, and rows of noise over which those of windows are laid.

Windows of one turn lie so far apart that no step of the certificate goes from one to another: each may change
while the others do. What lies between them is inside windows of the next turns, which begin half a period
further along one axis or both.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.local_rows import LocalRows

# Of half a period along both axes, turn by turn.
_SHIFTS = ((0, 0), (1, 1), (0, 1), (1, 0))


@dataclass(frozen=True)
class Windows:
    """How a lattice is cut into windows, turn by turn.

    Parameters
    ----------
    shape
        Records to the east and to the north.
    side
        Records along a side of a window; of a lattice that is no larger, all of them.
    gap
        Records between two windows.
    turns
        How many turns there are.
    """

    shape: tuple[int, int]
    side: int
    gap: int
    turns: int

    def of(self, turn: int) -> list[tuple[slice, slice]]:
        """Return the windows of a turn, as half-open ranges of records; their order numbers them."""
        return list(itertools.product(self._ranges(0, turn), self._ranges(1, turn)))

    def count(self, turn: int) -> int:
        """Return how many windows a turn has."""
        return len(self._ranges(0, turn)) * len(self._ranges(1, turn))

    def touching(self, turn: int, x: slice, y: slice) -> Iterator[tuple[int, slice, slice]]:
        """Yield the windows of a turn that have records in a rectangle, by number."""
        across, along = (self._ranges(axis, turn) for axis in (0, 1))
        for i, j in itertools.product(_meeting(across, x), _meeting(along, y)):
            yield i * len(along) + j, across[i], along[j]

    def _ranges(self, axis: int, turn: int) -> list[slice]:
        records, period = self.shape[axis], self.side + self.gap
        if records <= self.side:
            return [slice(0, records)]
        begin = -(period // 2) * _SHIFTS[turn % len(_SHIFTS)][axis]
        return [
            slice(max(first, 0), min(first + self.side, records))
            for first in range(begin, records, period)
            if first + self.side > 0
        ]


@dataclass(frozen=True)
class WindowRows:
    """Rows of a window.

    Parameters
    ----------
    x, y
        Its records, as half-open ranges of the whole lattice.
    outputs
        Outputs that have other probabilities than before, shape (n,), in order.
    rows
        M of these, float32 of shape (records east, records north, n).
    """

    x: slice
    y: slice
    outputs: NDArray[np.intp]
    rows: NDArray[np.float32]

    def packed(self) -> NDArray[np.float32]:
        """Return one array, float32 of shape (1 + records, n): the outputs' numbers, and the rows."""
        records, outputs = self.rows.shape[0] * self.rows.shape[1], len(self.outputs)
        return np.vstack([self.outputs.astype(np.float32), self.rows.reshape(records, outputs)])

    @classmethod
    def unpacked(cls, x: slice, y: slice, packed: NDArray[np.float32], total: int) -> "WindowRows":
        """Return the rows of a window from :meth:`packed`.

        Parameters
        ----------
        x, y
            The window.
        packed
            What was stored.
        total
            Number K of outputs.

        Raises
        ------
        ValueError
            If that is no window of theirs.
        """
        records = x.stop - x.start, y.stop - y.start
        if packed.dtype != np.float32 or packed.ndim != 2 or len(packed) != 1 + records[0] * records[1]:
            raise ValueError("it has not the shape of the window")
        outputs = packed[0].astype(np.intp) if np.isfinite(packed).all() else np.array([-1])
        known = outputs.size == 0 or bool(outputs[0] >= 0 and outputs[-1] < total)
        if not (known and (np.diff(outputs) > 0).all() and (packed[1:] > 0).all()):
            raise ValueError("its outputs or probabilities are damaged")
        return cls(x, y, outputs, packed[1:].reshape(*records, len(outputs)))


def laid_over(rows: LocalRows, x: slice, y: slice, windows: Iterable[WindowRows]) -> LocalRows:
    """Return rows with those of windows in their places.

    Parameters
    ----------
    rows
        Rows of a rectangle of records; the last window in the order given counts.
    x, y
        The rectangle.
    windows
        Windows that have records in it.
    """
    windows = list(windows)
    if not windows:
        return rows
    near = np.unique(np.concatenate([rows.near, *(window.outputs for window in windows)]))
    floor = float(rows.entries[0, 0, -1]) if rows.copies > 1 else 0.0  # where none is far, nothing has it
    found = LocalRows.floor(rows.entries.shape[:2], near, floor, rows.total_outputs)
    found.entries[..., found.columns_of(rows.near)] = rows.entries[..., : len(rows.near)]
    for window in windows:
        (here_x, there_x), (here_y, there_y) = _overlap(window.x, x), _overlap(window.y, y)
        found.entries[there_x, there_y][..., found.columns_of(window.outputs)] = window.rows[here_x, here_y]
    return found


def _meeting(ranges: list[slice], part: slice) -> list[int]:
    return [k for k, one in enumerate(ranges) if one.start < part.stop and part.start < one.stop]


def _overlap(one: slice, other: slice) -> tuple[slice, slice]:
    """Return the common part of two half-open ranges, counted from the start of each."""
    first, last = max(one.start, other.start), min(one.stop, other.stop)
    return slice(first - one.start, last - one.start), slice(first - other.start, last - other.start)
