"""An exported city: look up rows, sample reported places, with numpy and the standard library alone."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import GuaranteeViolation, StoreError
from mdpext_dask.runtime.city_file import CityFile
from mdpext_dask.runtime.geodesic import PROJECTION_ERROR_KM
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick_rows
from mdpext_dask.runtime.location_sampler import Numbers, Reporter
from mdpext_dask.runtime.nearest_record import Places

# Of cumulative weights, twice the bytes of the rows; a city of 63,865 records and 100 outputs is 51 MB.
_CACHE_BYTES = 2**28


def open_city(path: str | Path, *, remap: bool = False, cache_bytes: int = _CACHE_BYTES) -> "City":
    """Open a city that ``mdpext export`` has written.

    Parameters
    ----------
    path
        The file. It must stay as it is while the city is in use.
    remap
        Report what the remap says instead of each output; it must have been exported with one.
    cache_bytes
        How much of the city is kept in memory once it has been looked up.

    Raises
    ------
    StoreError
        If there is no such file, it is damaged, or has no remap.
    """
    content = CityFile(Path(path))
    if remap and content.remap is None:
        raise StoreError(f"{path}: was exported without a remap; run mdpext remap and export it again")
    return City(content, remap=remap, cache_bytes=cache_bytes)


class City(Reporter):
    """A certified mechanism from a file; made by :func:`open_city`.

    It samples as :class:`mdpext_dask.sampling.mechanism.Mechanism` does, from the same bits by the same
    code; see there for what happens to places outside, and what n draws add up to. Threads may share it, and
    so may processes after a fork.
    """

    def __init__(self, content: CityFile, *, remap: bool, cache_bytes: int) -> None:
        self._content, self._tiles = content, content.tiles
        # Replaced as a whole and never changed, so that threads need no lock, and a fork finds none held.
        self._cache: dict[int, NDArray[np.uint64]] = {}
        self._room = cache_bytes
        grid, kept, projection = content.grid, content.kept, content.projection
        super().__init__(
            Places(str(content.path), grid, kept, projection, content.metric_p),
            content.output_lonlat,
            content.output_xy_km,
            content.remap if remap else None,
        )

    # --- what it promises -------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """What was promised, proved and exported: ε, digests, versions, the licence of the map data."""
        return self._content.facts()

    @property
    def epsilon_per_km(self) -> float:
        """Promised ε, in 1/km, for distance on the ground; of a planar city, in the plane."""
        return float(self._content.header["epsilon_per_km"])

    @property
    def epsilon_certified(self) -> float:
        """Certified ε, in 1/km, for distance in the plane."""
        return float(self._content.header["epsilon_certified"])

    @property
    def max_quantisation_km(self) -> float:
        """Largest distance ρ, in km, from a location in the grid to its record: the store's, and 2 mm.

        These two are what the projection with numpy alone may differ by from the store's: where the two
        disagree, a place is moved to a record that is the nearest but for that. Two locations at distance d
        are told apart no better than at ε (d + 2 ρ).
        """
        rho = float(self._content.header["quantisation_km"])
        return rho if self.planar else rho + PROJECTION_ERROR_KM

    @property
    def content_sha256(self) -> str:
        """Digest of the certified bytes: what a sticky answer takes for the identity of the mechanism."""
        return str(self._content.header["content_sha256"])

    # --- sampling ---------------------------------------------------------------------------------

    def row(
        self,
        lon: float | None = None,
        lat: float | None = None,
        *,
        x_km: float | None = None,
        y_km: float | None = None,
    ) -> NDArray[np.float64]:
        """Return M(·|x) of the record nearest to a place, float64 of shape (K,), normalised to rounding.

        With a remap, it is what is reported in the end: 0 for outputs that never are.

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
        cumulative = self._cumulative(*self._places.record(self._places.one(lon, lat, x_km, y_km), None))
        # Whole numbers below 2^62, so that what becomes one output is added up exactly.
        weights = np.zeros(len(cumulative), dtype=np.uint64)
        np.add.at(weights, self._remap, np.diff(cumulative, prepend=np.uint64(0)))
        probability = weights.astype(np.float64)
        return np.asarray(probability / probability.sum())

    def sample_many(self, coordinates: NDArray[np.float64], *, planar: bool = False) -> NDArray[np.float64]:
        """Return one reported place for each of many, float64 of shape (n, 2); see :meth:`sample_points`."""
        reported = self._output_xy_km if self.planar else self._output_lonlat
        return np.asarray(reported[self.sample_points(coordinates, planar=planar)[0]])

    def _cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        tile = self._tiles.of_records(i, j)
        x, y = self._tiles.records(tile)
        within = (i - x.start) * (y.stop - y.start) + (j - y.start)
        return np.asarray(self._cumulative_rows(tile)[within])

    def _draw_many(self, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
        i, j = np.divmod(records, self._places.grid.shape[1])
        tile = self._tiles.of_records(i, j)
        # Tile by tile; numbers of 16 bits are sorted in two passes.
        small = np.uint16 if len(self._tiles) <= 2**16 else np.int64
        order = np.argsort(tile.astype(small), kind="stable")
        starts = np.flatnonzero(np.diff(tile[order], prepend=-1))
        outputs = np.empty(len(records), dtype=np.intp)
        for part in np.split(order, starts[1:]) if len(order) else ():
            number = int(tile[part[0]])
            x, y = self._tiles.records(number)
            which = (i[part] - x.start) * (y.stop - y.start) + (j[part] - y.start)
            cumulative = self._cumulative_rows(number)
            outputs[part] = pick_rows(cumulative, which, numbers(part, cumulative[which, -1]))
        return outputs

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
        self._cache = cache
        return made

    def __repr__(self) -> str:
        rows, columns = self._places.grid.shape
        return (
            f"<City {self._content.path}: {rows} x {columns} records, {len(self._remap)} outputs, "
            f"epsilon {self.epsilon_per_km:g}/km (certified {self.epsilon_certified:.6g})>"
        )
