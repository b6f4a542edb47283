"""Points as they come out of files, and what holds for them whatever the file.

Columns (of a CSV or Parquet table) or members (of GeoJSON) are ``lon`` and ``lat`` in degrees, or ``x_km``
and ``y_km``, and ``weight`` where weights are asked for and are there. Names count in any case, ``lon`` and
``lat`` also written out, and others where the caller names them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import first_outside
from mdpext_dask.readers.tables import LONLAT, PLANAR, check_columns, decimal_hint, find_column, shown

WEIGHT = "weight"
# What columns with users are called, in lower case and without what is no letter.
_USERS = frozenset(
    f"{who}{what}"
    for who in ("user", "person", "participant", "subscriber", "customer", "client", "driver", "device", "u")
    for what in ("", "id", "name")
) - {"u"}
_NO_LETTERS = re.compile("[^a-z]")


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
    numbers
        From ``lon`` and ``lat``, or ``x_km`` and ``y_km``, and ``weight`` where it is wanted and there, to
        what the file calls them.
    extra
        Further columns, read as text.
    """

    numbers: Mapping[str, str]
    extra: tuple[str, ...]

    @property
    def planar(self) -> bool:
        """Whether the coordinates are x and y in km."""
        return set(PLANAR) <= set(self.numbers)

    def chunk(
        self, values: Mapping[str, NDArray[np.float64]], text: Mapping[str, Sequence[Any]], first_row: int
    ) -> PointChunk:
        """Return a chunk from columns of numbers, by the names they have here, and of text."""
        coordinates = np.stack([values[name] for name in (PLANAR if self.planar else LONLAT)], axis=-1)
        weight = values[WEIGHT] if WEIGHT in self.numbers else np.ones(len(coordinates))
        # As objects, so that one long cell does not make all of them long.
        extra = {name: np.empty(len(coordinates), dtype=object) for name in self.extra}
        for name, cells in extra.items():
            cells[:] = text[name]
        return PointChunk(coordinates, self.planar, weight, extra, first_row)


@dataclass(frozen=True)
class PointColumns:
    """What a user says of the columns of a file of points.

    Parameters
    ----------
    lon, lat
        Columns with longitude and latitude in degrees; default: those whose names say so.
    users
        Whether to read a column with users too, if there is one whose name says so.
    """

    lon: str | None = None
    lat: str | None = None
    users: bool = False

    @property
    def given(self) -> dict[str, str]:
        """From ``lon`` and ``lat`` to the columns that are named."""
        return {name: given for name, given in (("lon", self.lon), ("lat", self.lat)) if given is not None}

    def users_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the column of users among columns, if it is asked for and one is called so."""
        known = (name for name in names if _NO_LETTERS.sub("", name.casefold()) in _USERS)
        return tuple(islice(known, int(self.users)))

    def refuse(self, path: Path) -> None:
        """Refuse named columns of a file without any.

        Raises
        ------
        DataError
            If there are some.
        """
        if self.given:
            named = ", ".join(self.given.values())
            raise DataError(f"{path}: its geometries say where points are; leave out the columns {named}")


BY_NAME = PointColumns()


def wanted_columns(
    names: Sequence[str], path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Wanted:
    """Find the columns to read by their names.

    Raises
    ------
    DataError
        If one is missing, is there twice, or several may be meant.
    """
    given = columns.given
    check_columns(names, given.values(), path)
    for pair in (LONLAT,) if given else (PLANAR, LONLAT):
        found = {name: given.get(name) or find_column(names, name, path) for name in pair}
        if None not in found.values():
            break
    else:
        raise DataError(
            f"{path}: needs columns lon,lat (degrees) or x_km,y_km; found {', '.join(names) or 'none'}; "
            "rename them, or name those with degrees: lon_column and lat_column in a job, --lon-column and "
            "--lat-column for sample"
        )
    if weights:
        found[WEIGHT] = find_column(names, WEIGHT, path)
    check_columns(names, extra, path)
    extra = (*extra, *columns.users_in(names))
    return Wanted({name: called for name, called in found.items() if called is not None}, tuple(extra))


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
    called: Mapping[str, str] = MappingProxyType({}),
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
    called
        What the file calls the columns; default: the same.
    text
        From a column of the file to its cells as it has them; default: the numbers.

    Raises
    ------
    DataError
        With source, row, column and what stands there.
    """
    if fault := first_fault(values):
        row, name, complaint = fault
        if name:
            there = called.get(name, name)
            cell = f"{values[name][row]:g}" if text is None else text(there)[row]
            hint = "" if text is None else decimal_hint(cell)
            complaint = f"{there} {cell if text is None else shown(cell)} {complaint}{hint}"
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
