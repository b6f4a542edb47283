"""Points as they come out of files, and what holds for them whatever the file.

Columns (of a CSV or Parquet table) or members (of GeoJSON) are ``lon`` and ``lat`` in degrees, or ``x_km``
and ``y_km``, and ``weight`` where weights are asked for and are there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import first_outside
from mdpext_dask.readers.tables import LONLAT, PLANAR, check_columns

WEIGHT = "weight"


@dataclass(frozen=True)
class PointChunk:
    """Points of a file that follow each other in it.

    Parameters
    ----------
    coordinates
        float64 of shape (n, 2): lon and lat in degrees, or x and y in km.
    planar
        Whether the coordinates are x and y in km; the same for all chunks of a file.
    weight
        float64 of shape (n,), ≥ 0; ones where the file has no weights or none are asked for.
    extra
        Further columns by name: text, dtype object, of shape (n,); "" where a cell is empty or null.
    first_row
        Number of the first point in the file, from 0.
    """

    coordinates: NDArray[np.float64]
    planar: bool
    weight: NDArray[np.float64]
    extra: dict[str, NDArray[np.object_]]
    first_row: int

    def __len__(self) -> int:
        return len(self.coordinates)

    def part(self, first: int, last: int) -> "PointChunk":
        """Return the points from `first` up to, not including, `last`."""
        return replace(
            self,
            coordinates=self.coordinates[first:last],
            weight=self.weight[first:last],
            extra={name: text[first:last] for name, text in self.extra.items()},
            first_row=self.first_row + first,
        )


@dataclass(frozen=True)
class Wanted:
    """Which columns of a file are read.

    Parameters
    ----------
    pair
        The names of the coordinates.
    weighted
        Whether there is a column of weights, and it is wanted.
    extra
        Further columns.
    """

    pair: tuple[str, str]
    weighted: bool
    extra: tuple[str, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns of numbers."""
        return (*self.pair, WEIGHT) if self.weighted else self.pair

    def chunk(
        self, values: Mapping[str, NDArray[np.float64]], text: Mapping[str, Sequence[Any]], first_row: int
    ) -> PointChunk:
        """Return a chunk from columns of numbers and of text."""
        coordinates = np.stack([values[name] for name in self.pair], axis=-1)
        weight = values[WEIGHT] if self.weighted else np.ones(len(coordinates))
        # As objects, so that one long cell does not make all of them long.
        extra = {name: np.empty(len(coordinates), dtype=object) for name in self.extra}
        for name, cells in extra.items():
            cells[:] = text[name]
        return PointChunk(coordinates, self.pair == PLANAR, weight, extra, first_row)


def wanted_columns(names: Sequence[str], path: Path, *, weights: bool, extra: Sequence[str]) -> Wanted:
    """Find the columns to read by their names.

    Raises
    ------
    DataError
        If one is missing, or is there twice.
    """
    pair = next((pair for pair in (PLANAR, LONLAT) if set(pair) <= set(names)), None)
    if pair is None:
        raise DataError(f"{path}: needs columns lon,lat (degrees) or x_km,y_km; found {', '.join(names)}")
    wanted = Wanted(pair, weights and WEIGHT in names, tuple(extra))
    check_columns(names, (*wanted.numbers, *extra), path)
    return wanted


def first_fault(values: Mapping[str, NDArray[np.float64]]) -> tuple[int, str, str] | None:
    """Return what is wrong with the first row that may not be, if there is one.

    Parameters
    ----------
    values
        Columns of numbers by name, float64 of shape (n,); NaN for what is no number, or missing.

    Returns
    -------
    The row, the column ("" if it is both coordinates) and the complaint.
    """
    bad = [(~np.isfinite(column), name, "is not a finite number") for name, column in values.items()]
    if WEIGHT in values:
        bad.append((values[WEIGHT] < 0, WEIGHT, "is negative"))
    faults = [(int(np.argmax(rows)), name, complaint) for rows, name, complaint in bad if rows.any()]
    if set(LONLAT) <= set(values) and (
        outside := first_outside(np.stack([values[name] for name in LONLAT], axis=-1))
    ):
        faults.append((outside[0], "", outside[1]))
    return min(faults, key=itemgetter(0), default=None)


def check_numbers(
    values: Mapping[str, NDArray[np.float64]],
    source: object,
    unit: str,
    numbers: Sequence[int],
    text: Callable[[str], Sequence[str]] | None = None,
) -> None:
    """Refuse the first row with a fault; see :func:`first_fault`.

    Parameters
    ----------
    values
        Columns of numbers by name.
    source
        What to name in the error.
    unit, numbers
        What the file counts, such as "line", and where each row is by that count.
    text
        From a column to its cells as the file has them; default: the numbers.

    Raises
    ------
    DataError
        With source, row, column and what stands there.
    """
    if fault := first_fault(values):
        row, name, complaint = fault
        if name:
            cell = f"{values[name][row]:g}" if text is None else repr(text(name)[row])
            complaint = f"{name} {cell} {complaint}"
        raise DataError(f"{source}: {unit} {numbers[row]}: {complaint}")


def even_chunks(pieces: Iterable[PointChunk], size: int, path: Path) -> Iterator[PointChunk]:
    """Yield the same points in chunks of `size`, the last one shorter, and check them as a whole.

    Raises
    ------
    DataError
        At the end: if there were no points, or all their weights are zero.
    """
    waiting: list[PointChunk] = []
    heavy = False
    for piece in filter(len, pieces):
        heavy |= bool(piece.weight.any())
        waiting.append(piece)
        while (held := sum(map(len, waiting))) >= size:
            whole = joined(waiting)
            yield whole.part(0, size)
            waiting = [whole.part(size, held)]
    if not waiting:
        raise DataError(f"{path}: holds no rows")
    if not heavy:
        raise DataError(f"{path}: all weights are zero")
    if rest := joined(waiting):
        yield rest


def joined(chunks: Sequence[PointChunk]) -> PointChunk:
    """Return chunks that follow each other, at least one, as one."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[0],
        coordinates=np.concatenate([chunk.coordinates for chunk in chunks]),
        weight=np.concatenate([chunk.weight for chunk in chunks]),
        extra={name: np.concatenate([c.extra[name] for c in chunks]) for name in chunks[0].extra},
    )
