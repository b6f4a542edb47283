"""What auditors read: rows of a mechanism and where its records are, from a store or from plain arrays.

A source is a small description that travels with a work item, which opens what it describes. Records are
numbered from 0: in a store along the fine lattice, i · (records north) + j, elsewhere as the rows of the
array. A source is cut into *parts*, records that lie close to each other.
"""

import contextlib
import itertools
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign.row_files import writing
from mdpext_dask.auditors.pairs.tiles import cut_in_halves
from mdpext_dask.errors import StoreError
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.row_limits import LARGEST_TOTAL, SMALLEST_PROBABILITY
from mdpext_dask.store.blocks import FLOAT32, FLOAT64
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at, rows_of

# Size of a part in float64, of which a work item holds a few copies, and its records, at most.
_PART_BYTES = 8 * 2**20
_PART_RECORDS = 2**14
_LARGEST_FLOAT = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class Range:
    """Which numbers make a row that a sampler can use.

    Parameters
    ----------
    least
        Smallest entry.
    largest_total
        Largest sum of a row.
    """

    least: float
    largest_total: float


# Stores: integer weights of 64 bits (PROOF.md, section 1). Plain arrays: a distribution once it is divided by
# its total; an output may be impossible.
SAMPLER_RANGE = Range(SMALLEST_PROBABILITY, LARGEST_TOTAL)
ANY_RANGE = Range(0.0, _LARGEST_FLOAT)
# Stands for the logarithm of 0: the difference of two is 0, of one and any other log more than this.
IMPOSSIBLE_LOG = -1e12
INFINITE_DIFFERENCE = 1e11


@dataclass(frozen=True)
class Source(ABC):
    """Rows of a mechanism by record number.

    Parameters
    ----------
    records, outputs
        Numbers N and K.
    item_bytes
        Bytes of a probability as it is read.
    range
        Which rows can be used.
    lattice_shape
        Numbers of records along both axes, where they are on a lattice.
    token
        Of one audit: what a worker keeps of a source is not used by another, for which it may have changed.
    """

    records: int
    outputs: int
    item_bytes: int
    range: Range
    lattice_shape: tuple[int, int] | None
    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of parts."""

    @property
    @abstractmethod
    def largest_part(self) -> int:
        """Number of records of the largest part."""

    @abstractmethod
    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a part, shape (n,), and their rows, float of shape (n, K).

        Rows that cannot be read are NaN.
        """

    @abstractmethod
    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows of any n records, float of shape (n, K); NaN as in :meth:`part`."""

    @abstractmethod
    def records_of_cell(self, i: int, j: int) -> NDArray[np.intp]:
        """Return the four records of a fine cell of a lattice, by its lower left one, shape (4,)."""

    @abstractmethod
    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return where records are in the plane, float64 of shape (n, 2), in km."""

    def places(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return where records are as the promise measures it, float64 of shape (n, 2); here in the plane."""
        return self.xy_km(records)

    def name_of(self, record: int) -> Any:
        """Return how to name a record to people; here its number."""
        return record

    @abstractmethod
    def lonlat(self, records: NDArray[np.intp]) -> NDArray[np.float64] | None:
        """Return where records are, lon and lat in degrees, float64 of shape (n, 2), if that is known."""

    def describe(self, pair: NDArray[np.intp], output: int) -> dict[str, Any]:  # noqa: ARG002 of some sources
        """Return where two records and an output are in degrees, as far as that is known."""
        lonlat = self.lonlat(pair)
        names = "x_lonlat", "x_prime_lonlat"
        return {} if lonlat is None else dict(zip(names, lonlat.tolist(), strict=True))


@dataclass(frozen=True)
class LatticeSource(Source):
    """Records that are those of a grid."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The grid."""

    @property
    @abstractmethod
    def projection(self) -> Projection | None:
        """From degrees to the plane, if there is such a projection."""

    @abstractmethod
    def output_places(self) -> Mapping[str, NDArray[np.float64]]:
        """Return places of outputs, each float64 of shape (K, 2), by the name they have in a result."""

    def records_of_cell(self, i: int, j: int) -> NDArray[np.intp]:
        """Return records of the fine lattice."""
        first = i * self.grid.shape[1] + j + np.arange(2)
        return np.concatenate([first, first + self.grid.shape[1]])

    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the grid, from which the sampler looks up records."""
        grid = self.grid
        i, j = np.divmod(records, grid.shape[1])
        x, y = grid.west_km + i * grid.spacing_km, grid.south_km + j * grid.spacing_km
        return np.stack([x, y], axis=-1)

    def name_of(self, record: int) -> Any:
        """Return (i, j) on the fine lattice."""
        return list(divmod(record, self.grid.shape[1]))

    def lonlat(self, records: NDArray[np.intp]) -> NDArray[np.float64] | None:
        """Return degrees where there is a projection."""
        return None if self.projection is None else self.projection.to_degrees(self.xy_km(records))

    def describe(self, pair: NDArray[np.intp], output: int) -> dict[str, Any]:
        """Return degrees, and the output's place, as far as it is not damaged."""
        found = super().describe(pair, output)
        for key, places in self.output_places().items():
            if np.isfinite(places[output]).all():
                found[key] = places[output].tolist()
        return found


@dataclass(frozen=True)
class StoreSource(LatticeSource):
    """All rows of the rectangle of a mechanism store, stored or not, as the sampler reads them.

    Parameters
    ----------
    url
        The store.
    """

    url: str

    @classmethod
    def of(cls, store: MechanismStore) -> "StoreSource":
        """Describe a store."""
        grid = store.grid
        return cls(grid.records, store.outputs, FLOAT32, SAMPLER_RANGE, grid.shape, store.url)

    @property
    def store(self) -> MechanismStore:
        """The store, opened once in a process for an audit."""
        return _store(self.url, self.token)

    @property
    def grid(self) -> Grid:
        """The store's grid."""
        return self.store.grid

    @property
    def projection(self) -> Projection | None:
        """The store's projection."""
        return self.store.projection

    @property
    def parts(self) -> int:
        """Pieces of what blocks own."""
        return len(_pieces(self.url, self.token))

    @property
    def largest_part(self) -> int:
        """Records of a piece at most."""
        pieces = _pieces(self.url, self.token)
        return max(int(x.stop - x.start) * int(y.stop - y.start) for x, y in pieces)

    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a piece of a block, and their rows."""
        store = self.store
        x, y = _pieces(self.url, self.token)[index]
        records = store.grid.record_numbers(x, y)
        try:
            rows = rows_of(store, x, y)
        except StoreError:
            # Bytes that cannot be decoded are nothing that a sampler could keep a promise with.
            rows = np.full((len(records), store.outputs), np.nan, dtype=np.float32)
        return records, rows.reshape(len(records), -1)

    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows, chunk by chunk."""
        i, j = np.divmod(records, self.store.grid.shape[1])
        return rows_at(self.store, i, j, damaged=np.nan)

    def output_places(self) -> Mapping[str, NDArray[np.float64]]:
        """Return what the store's arrays say, as far as they are not damaged."""
        return {
            "output_xy_km": coordinates_of_outputs(self.store, "output_x", "output_y"),
            "output_lonlat": coordinates_of_outputs(self.store, "output_lon", "output_lat"),
        }


@dataclass(frozen=True)
class ArraySource(Source):
    """Rows in a ``.npy`` file, records anywhere in the plane; made by :meth:`of`.

    Parameters
    ----------
    path
        Rows, float of shape (N, K).
    folder
        Where :meth:`of` has left the points, the records in the order of the parts, and the lattice.
    starts
        Where parts begin in that order, and N.
    on_ground
        Whether the promise is for distance on the ground.
    projection
        Of the plane, where that is known and what is audited is the plane.
    """

    path: Path
    folder: Path
    starts: tuple[int, ...]
    on_ground: bool
    projection: Projection | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        xy_km: NDArray[np.float64],
        folder: Path,
        lonlat: NDArray[np.float64] | None = None,
        lattice: NDArray[np.intp] | None = None,
    ) -> "ArraySource":
        """Cut records into parts.

        Parameters
        ----------
        path
            Rows, float of shape (N, K), as :func:`numpy.save` writes them.
        xy_km
            Their points, float64 of shape (N, 2), in km.
        folder
            A folder of the caller's, for as long as the source is used.
        lonlat
            Where the promise is for distance on the ground: lon and lat, float64 of shape (N, 2), in degrees.
        lattice
            Record numbers along both axes, if they are on a lattice; it is cut across its longer axis.
        """
        rows = np.load(path, mmap_mode="r")
        order, starts = cut_in_halves(xy_km, _part_records(rows.shape[1]))
        arrays = {"points": xy_km, "order": order}
        shape: tuple[int, int] | None = None
        if lonlat is not None:
            arrays["places"] = lonlat
        if lattice is not None:
            arrays["lattice"] = lattice if len(lattice) >= lattice.shape[1] else lattice.T
            shape = arrays["lattice"].shape
        with writing(folder):
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
        records, outputs = rows.shape
        where = path, folder, tuple(starts.tolist()), lonlat is not None
        return cls(records, outputs, rows.dtype.itemsize, ANY_RANGE, shape, *where)

    @property
    def parts(self) -> int:
        """Halves of halves, small enough for a work item."""
        return len(self.starts) - 1

    @property
    def largest_part(self) -> int:
        """They differ by one at most."""
        return int(np.diff(self.starts).max())

    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a part, and their rows."""
        records = np.array(self._saved("order")[self.starts[index] : self.starts[index + 1]])
        return records, self.rows(records)

    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows from the file."""
        return np.asarray(_array(self.path, self.token)[records])

    def lattice_rows(self, first: int, last: int) -> NDArray[np.intp]:
        """Return record numbers of the lattice, from one line along its first axis up to another."""
        return np.array(self._saved("lattice")[first : last + 1])

    def records_of_cell(self, i: int, j: int) -> NDArray[np.intp]:
        """Return records of the lattice."""
        return self.lattice_rows(i, i + 1)[:, j : j + 2].ravel()

    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the file."""
        return np.asarray(self._saved("points")[records])

    def places(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the plane, or lon and lat in degrees."""
        return np.asarray(self._saved("places" if self.on_ground else "points")[records])

    def lonlat(self, records: NDArray[np.intp]) -> NDArray[np.float64] | None:
        """Return degrees where records were given by them, or there is a projection."""
        if self.projection is not None:
            return self.projection.to_degrees(self.xy_km(records))
        return self.places(records) if self.on_ground else None

    def _saved(self, name: str) -> NDArray[Any]:
        return _array(self.folder / f"{name}.npy", self.token)


def coordinates_of_outputs(store: MechanismStore, first: str, second: str) -> NDArray[np.float64]:
    """Return two arrays of a store about its outputs, float64 of shape (K, 2); NaN where one is damaged."""
    found = np.full((store.outputs, 2), np.nan)
    for column, name in zip(found.T, (first, second), strict=True):
        with contextlib.suppress(StoreError):
            values = store.read(name)
            if values.shape == column.shape and values.dtype.kind == "f":
                column[:] = values
    return found


@lru_cache(maxsize=2)
def _store(url: str, token: str) -> MechanismStore:  # noqa: ARG001 part of the cache's key
    return MechanismStore.open(url)


@lru_cache(maxsize=2)
def _pieces(url: str, token: str) -> list[tuple[slice, slice]]:
    """Return ranges of fine rows, each within what one block owns, and small enough for a work item."""
    store = _store(url, token)
    side = math.isqrt(_part_records(store.outputs))
    return [
        (x, y) for block in store.plan for x in _cut(block.owned_x, side) for y in _cut(block.owned_y, side)
    ]


def _cut(part: slice, most: int) -> list[slice]:
    """Cut a range into equal ones of at most `most` numbers."""
    length = part.stop - part.start
    pieces = math.ceil(length / most)
    ends = [part.start + length * piece // pieces for piece in range(pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _part_records(outputs: int) -> int:
    return min(max(_PART_BYTES // (FLOAT64 * outputs), 2), _PART_RECORDS)


@lru_cache(maxsize=8)
def _array(path: Path, token: str) -> NDArray[Any]:  # noqa: ARG001 part of the cache's key
    array: NDArray[Any] = np.load(path, mmap_mode="r")
    return array
