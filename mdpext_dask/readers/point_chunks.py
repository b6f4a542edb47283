"""Points as they come out of files, and what holds for them whatever the file.

Columns (of a CSV or Parquet table) or members (of GeoJSON) are ``lon`` and ``lat`` in degrees, or ``x_km``
and ``y_km``, and ``weight`` where weights are asked for and are there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.readers.csv_tables import LONLAT, PLANAR

WEIGHT = "weight"


@dataclass(frozen=True)
class Points:
    """Points of a file.

    Parameters
    ----------
    coordinates
        float64 of shape (n, 2): lon and lat in degrees, or x and y in km.
    planar
        Whether the coordinates are x and y in km.
    weight
        float64 of shape (n,), ≥ 0, not all zero; ones where the file has no weights.
    """

    coordinates: NDArray[np.float64]
    planar: bool
    weight: NDArray[np.float64]


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
    def planar(self) -> bool:
        """Whether the coordinates are x and y in km."""
        return self.pair == PLANAR

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns of numbers."""
        return (*self.pair, WEIGHT) if self.weighted else self.pair

    def chunk(
        self,
        values: Mapping[str, NDArray[np.float64]],
        extra: dict[str, NDArray[np.object_]],
        first_row: int,
    ) -> PointChunk:
        """Return a chunk from columns of numbers and of text."""
        coordinates = np.stack([values[name] for name in self.pair], axis=-1)
        weight = values[WEIGHT] if self.weighted else np.ones(len(coordinates))
        return PointChunk(coordinates, self.planar, weight, extra, first_row)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a row: its number in a chunk, and the column, empty if it is both coordinates."""

    row: int
    column: str
    complaint: str


def wanted_columns(names: Sequence[str], path: Path, *, weights: bool, extra: Sequence[str]) -> Wanted:
    """Find the columns to read by their names.

    Raises
    ------
    DataError
        If one is missing, or is there twice.
    """
    pair = next((pair for pair in (PLANAR, LONLAT) if set(pair) <= set(names)), None)
    if pair is None:
        raise DataError(
            f"{path}: needs columns lon,lat (degrees) or x_km,y_km; found {', '.join(map(str, names))}"
        )
    for name in extra:
        if name not in names:
            raise DataError(f"{path}: column {name} is missing; found {', '.join(map(str, names))}")
    wanted = Wanted(pair, weights and WEIGHT in names, tuple(extra))
    for name in (*wanted.numbers, *extra):
        if list(names).count(name) > 1:
            raise DataError(f"{path}: two columns have the name {name}")
    return wanted


def first_fault(values: Mapping[str, NDArray[np.float64]]) -> Fault | None:
    """Return what is wrong with the first row that may not be, if there is one.

    Parameters
    ----------
    values
        Columns of numbers by name, float64 of shape (n,); what is no number, or missing, as not-a-number.
    """
    faults = []
    for name, column in values.items():
        for bad, complaint in (
            (~np.isfinite(column), "is not a finite number"),
            ((column < 0) & (name == WEIGHT), "is negative"),
        ):
            if bad.any():
                faults.append(Fault(int(np.argmax(bad)), name, complaint))
    if set(LONLAT) <= set(values):
        lon, lat = (values[name] for name in LONLAT)
        # Without a number there is no range; that is said above.
        outside = (np.abs(lon) > 180) | (np.abs(lat) > 90)
        outside &= np.isfinite(lon) & np.isfinite(lat)
        if outside.any():
            row = int(np.argmax(outside))
            complaint = f"lon {lon[row]:g}, lat {lat[row]:g} is out of range; coordinates must be degrees"
            faults.append(Fault(row, "", complaint))
    return min(faults, key=lambda fault: fault.row, default=None)


def refuse(path: Path, where: str, fault: Fault, shown: str) -> DataError:
    """Return the error for a fault; `where` names the row, `shown` is what is in the cell."""
    what = f"{fault.column} {shown} {fault.complaint}" if fault.column else fault.complaint
    return DataError(f"{path}: {where}: {what}")


def even_chunks(pieces: Iterable[PointChunk], size: int, path: Path) -> Iterator[PointChunk]:
    """Yield the same points in chunks of `size`, the last one shorter, and check them as a whole.

    Raises
    ------
    DataError
        At the end: if there were no points, or all their weights are zero.
    """
    waiting: list[PointChunk] = []
    held, anything, heavy = 0, False, False
    for piece in pieces:
        anything |= len(piece) > 0
        heavy |= bool(piece.weight.any())
        waiting.append(piece)
        held += len(piece)
        while held >= size:
            whole = _joined(waiting)
            yield whole.part(0, size)
            rest = whole.part(size, held)
            waiting, held = [rest], len(rest)
    if not anything:
        raise DataError(f"{path}: holds no rows")
    if not heavy:
        raise DataError(f"{path}: all weights are zero")
    if held:
        yield _joined(waiting)


def _joined(chunks: Sequence[PointChunk]) -> PointChunk:
    chunks = [chunk for chunk in chunks if len(chunk)] or list(chunks[:1])
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[0],
        coordinates=np.concatenate([chunk.coordinates for chunk in chunks]),
        weight=np.concatenate([chunk.weight for chunk in chunks]),
        extra={name: np.concatenate([c.extra[name] for c in chunks]) for name in chunks[0].extra},
    )


def all_points(chunks: Iterable[PointChunk]) -> Points:
    """Return the points of a whole file; `chunks` are those of :func:`even_chunks`, so at least one."""
    listed = list(chunks)
    return Points(
        coordinates=np.concatenate([chunk.coordinates for chunk in listed]),
        planar=listed[0].planar,
        weight=np.concatenate([chunk.weight for chunk in listed]),
    )


def as_text(cells: Sequence[Any]) -> NDArray[np.object_]:
    """Return cells of text as an array of objects, which one long cell does not make long throughout."""
    text = np.empty(len(cells), dtype=object)
    text[:] = cells
    return text
