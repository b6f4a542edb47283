"""What auditors read: rows of a mechanism and where its records are, from a store or from plain arrays.

A source is a small description that travels with a task; the task opens what it describes. Records are
numbered from 0: in a store along the fine lattice, i · (records north) + j, elsewhere as the rows of the
array. A source is cut into *parts*, records that lie close to each other.
"""

import itertools
import math
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign.row_files import writing
from mdpext_dask.errors import StoreError
from mdpext_dask.row_limits import LARGEST_TOTAL, SMALLEST_PROBABILITY
from mdpext_dask.store.blocks import FLOAT32, FLOAT64
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at, rows_of

# Of a part, in float64, and records: what a task holds a few times over, and tables of pairs of its tiles.
_PART_BYTES = 8 * 2**20
_PART_RECORDS = 2**16
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


# Ours: integer weights of 64 bits (PROOF.md, section 1). Anybody's: a distribution once it is divided by its
# total; an output may be impossible.
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
    token
        Of one audit: what a worker keeps of a source is not used by another, for which it may have changed.
    """

    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)

    @property
    @abstractmethod
    def records(self) -> int:
        """Number N of records."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number K of outputs."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of parts."""

    @property
    @abstractmethod
    def largest_part(self) -> int:
        """Number of records of the largest part."""

    @property
    @abstractmethod
    def range(self) -> Range:
        """Which rows can be used."""

    @property
    @abstractmethod
    def item_bytes(self) -> int:
        """Bytes of a probability as it is read."""

    @abstractmethod
    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a part, shape (n,), and their rows, float of shape (n, K).

        Rows that cannot be read are not-a-number.
        """

    @abstractmethod
    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows of any n records, float of shape (n, K); not-a-number as in :meth:`part`."""

    @abstractmethod
    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return where records are in the plane, float64 of shape (n, 2), in km."""

    def places(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return where records are as the promise measures it, float64 of shape (n, 2); here in the plane."""
        return self.xy_km(records)

    def name_of(self, record: int) -> Any:
        """Return how to name a record to people; here its number."""
        return record

    def describe(self, pair: NDArray[np.intp], output: int) -> dict[str, Any]:  # noqa: ARG002 of some sources
        """Return where two records and an output are in degrees, as far as that is known."""
        return {}


@dataclass(frozen=True)
class StoreSource(Source):
    """All rows of the rectangle of a mechanism store, stored or not, as the sampler reads them.

    Parameters
    ----------
    url
        The store.
    """

    url: str

    @property
    def store(self) -> MechanismStore:
        """The store, opened once in a process for an audit."""
        return _store(self.url, self.token)

    @property
    def records(self) -> int:
        """Records of the fine lattice."""
        return self.store.grid.records

    @property
    def outputs(self) -> int:
        """Outputs of the store."""
        return self.store.outputs

    @property
    def parts(self) -> int:
        """Pieces of what blocks own."""
        return len(_pieces(self.url, self.token))

    @property
    def largest_part(self) -> int:
        """Records of a piece at most."""
        pieces = _pieces(self.url, self.token)
        return max(int(x.stop - x.start) * int(y.stop - y.start) for x, y in pieces)

    @property
    def range(self) -> Range:
        """What the sampler's integers can hold."""
        return SAMPLER_RANGE

    @property
    def item_bytes(self) -> int:
        """Those of float32."""
        return FLOAT32

    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a piece of a block, and their rows."""
        store = self.store
        x, y = _pieces(self.url, self.token)[index]
        i, j = (np.arange(part.start, part.stop) for part in (x, y))
        records = (i[:, None] * store.grid.shape[1] + j).ravel()
        try:
            rows = rows_of(store, x, y)
        except StoreError:
            # Bytes that cannot be decoded are nothing that a sampler could keep a promise with.
            rows = np.full((len(i), len(j), store.outputs), np.nan, dtype=np.float32)
        return records, rows.reshape(len(records), -1)

    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows, chunk by chunk."""
        i, j = np.divmod(records, self.store.grid.shape[1])
        return rows_at(self.store, i, j, damaged=np.nan)

    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the grid, from which the sampler looks up records."""
        x, y = _axes(self.url, self.token)
        i, j = np.divmod(records, len(y))
        return np.stack([x[i], y[j]], axis=-1)

    def name_of(self, record: int) -> Any:
        """Return (i, j) on the fine lattice."""
        return list(divmod(record, self.store.grid.shape[1]))

    def describe(self, pair: NDArray[np.intp], output: int) -> dict[str, Any]:
        """Return degrees where there is a projection, and the output's place, as far as it is not damaged."""
        store = self.store
        found = {}
        if store.projection is not None:
            lonlat = store.projection.to_degrees(self.xy_km(pair))
            found = {"x_lonlat": lonlat[0].tolist(), "x_prime_lonlat": lonlat[1].tolist()}
        for key, names in (
            ("output_xy_km", ("output_x", "output_y")),
            ("output_lonlat", ("output_lon", "output_lat")),
        ):
            try:
                place = [float(store.read(name)[output]) for name in names]
            except (StoreError, IndexError, TypeError):
                continue
            if np.isfinite(place).all():
                found[key] = place
        return found


@dataclass(frozen=True)
class ArraySource(Source):
    """Rows in a ``.npy`` file, records anywhere in the plane; made by :meth:`of`.

    Parameters
    ----------
    path
        Rows, float of shape (N, K).
    folder
        Where :meth:`of` has left the points, and the records in the order of the parts.
    starts
        Where parts begin in that order, and N.
    on_ground
        Whether the promise is for distance on the ground.
    """

    path: Path
    folder: Path
    starts: tuple[int, ...]
    on_ground: bool = False

    @classmethod
    def of(
        cls, path: Path, xy_km: NDArray[np.float64], folder: Path, lonlat: NDArray[np.float64] | None = None
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
        """
        from mdpext_dask.auditors.pairs.tiles import cut_in_halves

        rows = np.load(path, mmap_mode="r")
        most = _part_records(rows.shape[1])
        order, starts = cut_in_halves(xy_km, most)
        with writing(folder):
            np.save(folder / "points.npy", xy_km)
            np.save(folder / "order.npy", order)
            if lonlat is not None:
                np.save(folder / "places.npy", lonlat)
        return cls(path, folder, tuple(starts.tolist()), on_ground=lonlat is not None)

    @property
    def records(self) -> int:
        """Rows of the array."""
        return self.starts[-1]

    @property
    def outputs(self) -> int:
        """Columns of the array."""
        return int(_array(self.path, self.token).shape[1])

    @property
    def parts(self) -> int:
        """Halves of halves, small enough for a task."""
        return len(self.starts) - 1

    @property
    def largest_part(self) -> int:
        """They differ by one at most."""
        return int(np.diff(self.starts).max())

    @property
    def range(self) -> Range:
        """Any distribution."""
        return ANY_RANGE

    @property
    def item_bytes(self) -> int:
        """Those of the array's numbers."""
        return int(_array(self.path, self.token).dtype.itemsize)

    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a part, and their rows."""
        order = _array(self.folder / "order.npy", self.token)
        records = np.array(order[self.starts[index] : self.starts[index + 1]])
        return records, self.rows(records)

    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows from the file."""
        return np.asarray(_array(self.path, self.token)[records])

    def xy_km(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the file."""
        return np.asarray(_array(self.folder / "points.npy", self.token)[records])

    def places(self, records: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return points of the plane, or lon and lat in degrees."""
        name = "places.npy" if self.on_ground else "points.npy"
        return np.asarray(_array(self.folder / name, self.token)[records])

    def describe(self, pair: NDArray[np.intp], output: int) -> dict[str, Any]:  # noqa: ARG002 it is anywhere
        """Return degrees where records were given by them."""
        if not self.on_ground:
            return {}
        lonlat = self.places(pair)
        return {"x_lonlat": lonlat[0].tolist(), "x_prime_lonlat": lonlat[1].tolist()}


@lru_cache(maxsize=2)
def _store(url: str, token: str) -> MechanismStore:  # noqa: ARG001 part of the cache's key
    return MechanismStore.open(url)


@lru_cache(maxsize=2)
def _pieces(url: str, token: str) -> list[tuple[slice, slice]]:
    """Return ranges of fine rows, each within what one block owns, and small enough for a task."""
    store = _store(url, token)
    side = math.isqrt(_part_records(store.outputs))
    return [
        (x, y) for block in store.plan for x in _cut(block.owned_x, side) for y in _cut(block.owned_y, side)
    ]


def _cut(part: slice, most: int) -> list[slice]:
    """Cut a range into equal ones of at most so many."""
    length = part.stop - part.start
    pieces = math.ceil(length / most)
    ends = [part.start + length * piece // pieces for piece in range(pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _part_records(outputs: int) -> int:
    return min(max(_PART_BYTES // (FLOAT64 * outputs), 2), _PART_RECORDS)


@lru_cache(maxsize=2)
def _axes(url: str, token: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    grid = _store(url, token).grid
    return grid.x_km(), grid.y_km()


@lru_cache(maxsize=8)
def _array(path: Path, token: str) -> NDArray[np.floating]:  # noqa: ARG001 part of the cache's key
    array: NDArray[np.floating] = np.load(path, mmap_mode="r")
    return array
