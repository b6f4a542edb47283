"""An exported city: rows and draws from one file, with NumPy and the standard library alone."""

import hashlib
import itertools
import os
import warnings
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdpext_dask.errors import GuaranteeViolation, ImplausibleWarning, StoreError, first_line
from mdpext_dask.extend.noise import NoiseTables
from mdpext_dask.problem.grid import Array
from mdpext_dask.problem.plausible import AccuraciesSeen
from mdpext_dask.runtime import city_header, city_layout
from mdpext_dask.runtime.geodesic import PROJECTION_ERROR_KM, PlainProjection, PlaneFit
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick_rows
from mdpext_dask.runtime.location_sampler import Given, Numbers, Places, Reporter
from mdpext_dask.runtime.signatures import CITY, Trusted, require_signature, statement_of_city

SUFFIX = ".mdp"
# Of cumulative weights, twice the bytes of the rows; a city of 63,865 records and 100 outputs is 51 MB.
_CACHE_BYTES = 2**28
# A part of a tile is made by itself where it is at most one in so many records.
_FEW = 2
# Large parts of a header that say nothing to people.
_BULKY = {"grid", "plane_fit", "kept", "outputs", "remap", "sections", "rows_sha256"}


def is_city(path: str | Path) -> bool:
    """Whether a local path is that of an exported city, whole or damaged."""
    try:
        with Path(path).open("rb") as content:
            return content.read(len(city_layout.MAGIC)) == city_layout.MAGIC or Path(path).suffix == SUFFIX
    except OSError:
        return False


def open_city(
    path: str | Path,
    *,
    remap: bool | None = None,
    trusted_key: Trusted | None = None,
    cache_bytes: int = _CACHE_BYTES,
    verify: bool = False,
) -> "City":
    """Open a city that ``mdpext export`` has written.

    Parameters
    ----------
    path
        The file. It must stay as it is while the city is in use.
    remap
        Whether to report what the remap says instead of each output; default: where the city was exported
        with one.
    trusted_key
        Public key that must have signed the city: 64 hexadecimal digits, or a file; see
        :mod:`mdpext_dask.runtime.signatures`.
    cache_bytes
        How much of the city is kept in memory once it has been looked up.
    verify
        Whether to make all rows now, and compare them with their digests; default: those of a tile when it is
        first used.

    Raises
    ------
    StoreError
        If there is no such file, it is damaged, or has no remap that is asked for.
    GuaranteeViolation
        If a key is given that has not signed it.
    """
    content = CityFile(Path(path))
    if trusted_key is not None:
        content.require_signed(trusted_key)
    if remap and content.remap is None:
        raise StoreError(f"{path}: was exported without a remap; run mdpext remap and export it again")
    city = City(content, remap=remap is not False, cache_bytes=cache_bytes)
    if verify:
        for tile in range(len(content.tiles)):
            city._cumulative_rows(tile)
    return city


class CityFile:
    """The file of a city: the header is read at once, rows when they are asked for.

    It stays open and is read by position, so that threads may share it.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    StoreError
        If there is none, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._handle)
        try:
            file_bytes = os.fstat(self._handle).st_size
            self.header, start = city_layout.read_header(self._read, file_bytes, path)
            sizes = [start, *(size for size, _ in self.header["sections"])]
            self._offsets = list(itertools.accumulate(sizes))
            if excess := file_bytes - self._offsets[-1]:
                wrong = f"has {excess} bytes too many" if excess > 0 else f"is cut short by {-excess} bytes"
                raise StoreError(f"{path}: {wrong}; export it again")
            self._parse()
        except ValueError as error:
            raise StoreError(
                f"{path}: its header is not one that mdpext export writes: {first_line(error)}"
            ) from None

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._handle, size, offset)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _parse(self) -> None:
        header = self.header
        self.grid = city_header.grid_of(header)
        self.metric_p = float(header["metric_p"])
        shape = self.grid.cells_x, self.grid.cells_y
        self.kept = np.ones(shape, dtype=bool)
        if header["kept"] is not None:
            bits = np.frombuffer(bytes.fromhex(header["kept"]), dtype=np.uint8)
            self.kept = np.unpackbits(bits, count=shape[0] * shape[1]).astype(bool).reshape(shape)
        self.projection: PlainProjection | None = None
        if header["projection"] is not None:
            fit = None if header["plane_fit"] is None else PlaneFit.from_json(header["plane_fit"])
            self.projection = PlainProjection(**header["projection"], fit=fit)
        columns = [np.array(header["outputs"][name], dtype=np.float64) for name in ("lon", "lat", "x", "y")]
        self.output_lonlat, self.output_xy_km = np.stack(columns[:2], -1), np.stack(columns[2:], -1)
        self.outputs = len(self.output_xy_km)
        self.remap = None if header["remap"] is None else np.array(header["remap"], dtype=np.intp)
        self.tiles = city_layout.Tiles(self.grid, tuple(header["tile_cells"]))

    def require_signed(self, trusted: Trusted) -> str:
        """Return the public key of its signature; see :func:`require_signature` for what is refused."""
        statement = statement_of_city(self.header)
        return require_signature(self.header.get("signature"), CITY, statement, trusted, str(self.path))

    def rows(self, tile: int) -> NDArray[np.float32]:
        """Return the rows of a tile, as they were certified, float32 of shape (east, north, K).

        Raises
        ------
        StoreError
            If they are not what was exported.
        """
        x, y = self.tiles.records(tile)
        if self.header["packing"] == city_header.SEED:
            rows = self.tiles.extended(self._scores, tile)
        elif self.noise is not None:
            rows = self.noise.stored_rows(x, y)
        else:
            packed = self.section(tile)
            try:
                rows = city_layout.unpack_rows(packed, (x.stop - x.start, y.stop - y.start, self.outputs))
            except ValueError:
                raise StoreError(f"{self.path}: tile {tile} is damaged; export it again") from None
        if city_layout.rows_sha256(rows) != self.header["rows_sha256"][tile]:
            other = "" if self.noise is not None else ", with --packing rows"
            raise StoreError(
                f"{self.path}: tile {tile} does not give the rows that were certified: it is damaged, or "
                f"this processor computes otherwise; export it again{other}"
            )
        return rows

    @cached_property
    def _scores(self) -> Array:
        """Log scores of the seed, float64 of shape (seeds east, seeds north, K)."""
        packed = self.section(0)
        try:
            return city_layout.unpack_scores(packed, (*self.grid.seeds_shape, self.outputs))
        except ValueError:
            raise StoreError(f"{self.path}: the seed's scores are damaged; export it again") from None

    @cached_property
    def noise(self) -> NoiseTables | None:
        """The tables of noise that rows follow from, if they do.

        Raises
        ------
        StoreError
            If they are damaged.
        """
        lattice = city_header.noise_lattice_of(self.header, self.grid)
        if lattice is None:
            return None
        try:
            tables = (
                city_layout.unpack_table(self.section(number), *kind)
                for number, kind in enumerate(lattice.tables)
            )
            return NoiseTables.checked(lattice, tables, self.outputs, float(self.header["noise"]["floor"]))
        except ValueError:
            raise StoreError(f"{self.path}: its tables of noise are damaged; export it again") from None

    def section(self, number: int) -> bytes:
        """Return the bytes of a section.

        Raises
        ------
        StoreError
            If they are not those of the header's digest.
        """
        size, digest = self.header["sections"][number]
        content = self._read(size, self._offsets[number])
        if hashlib.sha256(content).hexdigest() != digest:
            raise StoreError(f"{self.path}: section {number} is damaged; export it again")
        return content


class City(Reporter):
    """A certified mechanism from a file; made by :func:`open_city`.

    It samples as :class:`mdpext_dask.sampling.mechanism.Mechanism` does, from the same bits by the same
    code; see there for places outside, and for what n draws add up to. Threads may share it, and so may
    processes after a fork.
    """

    def __init__(self, content: CityFile, *, remap: bool, cache_bytes: int) -> None:
        self._content, self._tiles = content, content.tiles
        # Replaced as a whole and never changed, so that threads need no lock, and a fork finds none held.
        self._cache: dict[int, NDArray[np.uint64]] = {}
        # Tiles whose rows have been compared with their digest.
        self._sound: frozenset[int] = frozenset()
        self._room = cache_bytes
        places = Places(str(content.path), content.grid, content.kept, content.projection, content.metric_p)
        table = content.remap if remap else None
        super().__init__(places, content.header, content.output_lonlat, content.output_xy_km, table)

    @property
    def facts(self) -> dict[str, Any]:
        """What was promised, proved and exported: ε, digests, versions, the licence of the map data."""
        return {key: value for key, value in self._content.header.items() if key not in _BULKY}

    @property
    def max_quantisation_km(self) -> float:
        """Largest distance ρ, in km, from a location in the grid to its record: the store's, and 2 mm.

        The projection with NumPy alone may differ by these 2 mm from the store's: where the two disagree, a
        place is moved to a record that is the nearest but for that. Two locations at distance d are told
        apart no better than at ε (d + 2 ρ).
        """
        return super().max_quantisation_km + (0.0 if self.planar else PROJECTION_ERROR_KM)

    @property
    def content_sha256(self) -> str:
        """Digest of the certified bytes."""
        return str(self._content.header["content_sha256"])

    def row(self, lon: Given = None, lat: Given = None, *, x_km: Given = None, y_km: Given = None) -> Array:
        """Return M(·|x) of the record nearest to a place, float64 of shape (K,), normalised to rounding.

        With a remap, these are the probabilities of the reports: 0 for outputs that are never reported.

        Parameters
        ----------
        lon, lat
            The place in degrees; or
        x_km, y_km
            in the plane, in km; the only way where the city is planar.

        Raises
        ------
        SpecError
            If the place is not given in one of these ways.
        StoreError
            If its tile is damaged.
        """
        cumulative = self._cumulative(*self.places.record(self.places.one(lon, lat, x_km, y_km), None))
        # Whole numbers below 2^62, so that the weights of one report are added up exactly.
        weights = np.zeros(len(cumulative), dtype=np.uint64)
        np.add.at(weights, self._remap, np.diff(cumulative, prepend=np.uint64(0)))
        probability = weights.astype(np.float64)
        return np.asarray(probability / probability.sum())

    def sample_many(
        self, coordinates: Array, *, planar: bool = False, accuracy_m: ArrayLike | None = None
    ) -> Array:
        """Return one reported place for each of many, float64 of shape (n, 2); see :meth:`sample_points`.

        How many of them lie outside is said by a warning, an :class:`mdpext_dask.errors.ImplausibleWarning`;
        so is how many are known less well than 1/ε, by `accuracy_m`, in m, of shape (n,), NaN where unknown.
        """
        if accuracy_m is not None:
            seen = AccuraciesSeen(self.epsilon_per_km)
            seen.add(accuracy_m, len(coordinates))
            if said := seen.said():
                warnings.warn(said, ImplausibleWarning, stacklevel=2)
        drawn, outside = self.sample_points(coordinates, planar=planar)
        if outside.any():
            said = f"{outside.sum()} of {len(outside)} places lie outside; reported from the nearest records"
            warnings.warn(said, ImplausibleWarning, stacklevel=2)
        return self._reported[drawn]

    def _cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        tile = self._tiles.of_records(i, j)
        if noise := self._singly(tile, 1):
            return cumulative_weights(noise.stored_rows(slice(i, i + 1), slice(j, j + 1))[0, 0])
        return np.asarray(self._cumulative_rows(tile)[self._within(tile, i, j)])

    def _draw_many(self, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
        i, j = np.divmod(records, self.places.grid.shape[1])
        tile = self._tiles.of_records(i, j)
        # Tile by tile; numbers of 16 bits are sorted in two passes.
        small = np.uint16 if len(self._tiles) <= 2**16 else np.int64
        order = np.argsort(tile.astype(small), kind="stable")
        starts = np.flatnonzero(np.diff(tile[order], prepend=-1))
        outputs = np.empty(len(records), dtype=np.intp)
        for part in np.split(order, starts[1:]) if len(order) else ():
            number = int(tile[part[0]])
            if self._singly(number, len(part)):
                different, which = np.unique(records[part], return_inverse=True)
                pairs = np.stack(np.divmod(different, self.places.grid.shape[1]), -1).tolist()
                cumulative = np.stack([self._cumulative(*pair) for pair in pairs])
            else:
                which, cumulative = self._within(number, i[part], j[part]), self._cumulative_rows(number)
            outputs[part] = pick_rows(cumulative, which, numbers(part, cumulative[which, -1]))
        return outputs

    def _within(self, tile: int, i: Any, j: Any) -> Any:
        """Return where records (i, j), numbers or arrays, stand among those of their tile."""
        x, y = self._tiles.records(tile)
        return (i - x.start) * (y.stop - y.start) + (j - y.start)

    def _singly(self, tile: int, count: int) -> NoiseTables | None:
        """Return what to make `count` rows of a tile from, where the whole tile need not be made.

        Rows of noise take little more time one by one. So a city that is larger than the room for it makes a
        whole tile once, to compare it with its digest, and not again whenever somebody is there.
        """
        if tile not in self._sound or tile in self._cache:
            return None
        x, y = self._tiles.records(tile)
        few = _FEW * count <= (x.stop - x.start) * (y.stop - y.start)
        return self._content.noise if few else None

    def _cumulative_rows(self, tile: int) -> NDArray[np.uint64]:
        """Return the cumulative weights of a tile's records, uint64 of shape (records, K)."""
        found = self._cache.get(tile)
        if found is not None:
            return found
        rows = self._content.rows(tile)
        try:
            made = cumulative_weights(rows.reshape(-1, rows.shape[2]))
        except GuaranteeViolation as error:
            raise GuaranteeViolation(f"{self._content.path}: {error}") from None
        cache = {**self._cache, tile: made}
        held = sum(array.nbytes for array in cache.values())
        for oldest in list(cache)[:-1]:
            if held <= self._room:
                break
            held -= cache.pop(oldest).nbytes
        self._cache, self._sound = cache, self._sound | {tile}
        return made

    def __repr__(self) -> str:
        return f"<City {self._content.path}: {self._summary()}>"
