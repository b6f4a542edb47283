"""Rows of noise for many records at once, near outputs alone, with the bits that single records have.

Neighbouring records see nearly the same cells. For a patch of records, the masses of all cells around it are
one matrix W (cells x records), 0 where a cell is out of a record's reach; the outputs of these cells are a
matrix with one 1 in each column (outputs x cells), and what outputs collect is their product. Sums run over
cells in the lattice's order, as in :meth:`mdpext_dask.extend.noise.Kernel.rows`, and a product with 1 or a
sum with 0 changes no bit. W is the same for all patches that begin alike in their cells, so patches begin at
multiples of a side that is a multiple of records to a cell.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.noise import NoiseLattice, NoiseTables
from mdpext_dask.problem.grid import Array

# Records along a side of a patch, about, and cells; and the largest W, in numbers.
_RECORDS, _CELLS, _MOST = 8, 16, 2**23


@dataclass(frozen=True)
class Patch:
    """Rows of a rectangle of records.

    Parameters
    ----------
    x, y
        The records, as half-open ranges of the whole grid.
    near
        Outputs that are more than the floor somewhere, shape (n,), in order.
    rows
        M of these, float64 of shape (records east, records north, n); all others have the floor.
    """

    x: slice
    y: slice
    near: NDArray[np.intp]
    rows: Array

    def within(self, x: slice, y: slice) -> tuple[slice, slice]:
        """Return the ranges of its records among those of a rectangle around it."""
        return slice(self.x.start - x.start, self.x.stop - x.start), slice(
            self.y.start - y.start, self.y.stop - y.start
        )


def side_of(lattice: NoiseLattice) -> int:
    """Return the records along a side of a patch; 0 if W would be too large, and records are made singly."""
    side = lattice.per_cell * math.ceil(_RECORDS / lattice.per_cell)
    if lattice.per_record > 1:
        side = max(min(_RECORDS, _CELLS // lattice.per_record), 1)
    return side if matrix_numbers(lattice, side) <= _MOST else 0


def matrix_numbers(lattice: NoiseLattice, side: int) -> int:
    """Return how many numbers W has at most, for patches of so many records along a side."""
    return ((2 * lattice.reach + 1 + lattice.cell_of(max(side - 1, 0))) * side) ** 2


def _span(seen: NDArray[np.bool_]) -> tuple[int, int]:
    """Return where true values begin and end; a position where there are none."""
    found = np.flatnonzero(seen)
    return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 1)


class NoisePatches:
    """Makes rows of noise from its tables, a patch at a time.

    Parameters
    ----------
    tables
        The tables.
    """

    def __init__(self, tables: NoiseTables) -> None:
        self.tables, masses = tables, tables.kernel.masses
        self._side = side_of(tables.kernel.lattice)
        # Beyond these, all masses are 0.
        self._window = [_span(np.asarray(masses.any(axis=axes))) for axes in ((0, 1, 3), (0, 1, 2))]

    @cached_property
    def _masses(self) -> Array:
        """W: float64 of shape (cells east, cells north, side, side), for records that begin a cell."""
        kernel, side = self.tables.kernel, self._side
        phases = kernel.lattice.per_cell
        (left, right), (lower, upper) = self._window
        cells = self._cell(side - 1)
        found = np.zeros((right - left + cells, upper - lower + cells, side, side))
        for i in range(side):
            for j in range(side):
                x, y = self._cell(i), self._cell(j)
                part = found[x : x + right - left, y : y + upper - lower, i, j]
                part[:] = kernel.masses[i % phases, j % phases, left:right, lower:upper]
        return found

    def _cell(self, record: int) -> int:
        return self.tables.kernel.lattice.cell_of(record)

    def of(self, x: slice, y: slice) -> Iterator[Patch]:
        """Yield the rows of a rectangle of records."""
        if not self._side:
            every = np.arange(self.tables.outputs)
            for i, line in zip(range(x.start, x.stop), self.tables.lines(x, y), strict=True):
                yield Patch(slice(i, i + 1), y, every, line[None])
            return
        for across in self._parts(x):
            for along in self._parts(y):
                yield self._patch(across, along)

    def _parts(self, part: slice) -> Iterator[slice]:
        first = part.start
        while first < part.stop:
            last = min((first // self._side + 1) * self._side, part.stop)
            yield slice(first, last)
            first = last

    def _patch(self, x: slice, y: slice) -> Patch:
        tables, side = self.tables, self._side
        kernel, phases = tables.kernel, tables.kernel.lattice.per_cell
        cells, within = [], []
        for part, (first, last) in zip((x, y), self._window, strict=True):
            start, stop = part.start % side, part.start % side + part.stop - part.start
            begin, end = self._cell(start), self._cell(stop - 1) + last - first
            within.append((slice(begin, end), slice(start, stop)))
            origin = self._cell(part.start - start) + first
            cells.append(slice(origin + begin, origin + end))
        masses = self._masses[within[0][0], within[1][0], within[0][1], within[1][1]]
        outputs = tables.reported[cells[0], cells[1]].ravel()
        found = np.zeros(tables.outputs, dtype=bool)
        found[outputs] = True
        near = np.flatnonzero(found)
        number = np.empty(tables.outputs, dtype=np.int32)
        number[near] = np.arange(len(near))
        counted = len(outputs)
        one = csc_array(
            (np.ones(counted), number[outputs], np.arange(counted + 1, dtype=np.int32)),
            shape=(len(near), counted),
        )
        sums = np.asarray(one @ masses.reshape(counted, -1)).reshape(len(near), *masses.shape[2:])
        scale = (1 - tables.outputs * tables.floor) / kernel.totals
        i, j = (np.arange(part.start, part.stop) % phases for part in (x, y))
        sums *= scale[np.ix_(i, j)]
        sums += tables.floor
        return Patch(x, y, near, np.ascontiguousarray(np.moveaxis(sums, 0, -1)))

    def _near(self, x: slice, y: slice) -> NDArray[np.intp]:
        """Return the outputs that some patch of :meth:`of` may have, in order."""
        cells = []
        for part, (first, last) in zip((x, y), self._window, strict=True):
            cells.append(slice(self._cell(part.start) + first, self._cell(part.stop - 1) + last))
        return np.unique(self.tables.reported[cells[0], cells[1]])

    def local_rows(self, x: slice, y: slice) -> LocalRows:
        """Return the rows of a rectangle of records as they are stored, in float32."""
        tables, records = self.tables, (x.stop - x.start, y.stop - y.start)
        if not self._side:
            return LocalRows.of(tables.stored_rows(x, y))
        rows = LocalRows.floor(records, self._near(x, y), tables.floor, tables.outputs)
        for patch in self.of(x, y):
            columns = rows.columns_of(patch.near)
            for line, made in zip(rows.entries[patch.within(x, y)], patch.rows, strict=True):
                # One by one, in a third of the time.
                for row, entries in zip(line, made, strict=True):
                    row[columns] = entries
        return rows

    def stored_rows(self, x: slice, y: slice) -> NDArray[np.float32]:
        """Return M(y|x) as it is stored, float32 of shape (records east, records north, K)."""
        return self.local_rows(x, y).dense()
