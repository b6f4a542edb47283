"""A finished mechanism: look up rows, sample reported places."""

from functools import cached_property
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError
from mdpext_dask.runtime.integer_sampling import integer_weights
from mdpext_dask.runtime.location_sampler import Numbers, OutsideRule, Reporter
from mdpext_dask.runtime.nearest_record import Places
from mdpext_dask.sampling.row_cache import RowCache, draw_many, require_same
from mdpext_dask.sampling.show import card_of, column_of
from mdpext_dask.store import integrity, objects
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, MechanismStore
from mdpext_dask.store.remap import content_of, merge_columns, read_remap
from mdpext_dask.store.rows import rows_at

__all__ = ["Mechanism", "OutsideRule", "check_finished", "open_mechanism"]


def open_mechanism(url: str | Path, *, verify: bool = False, remap: bool = False) -> "Mechanism":
    """Open a finished mechanism store.

    Parameters
    ----------
    url
        Local path or URL.
    verify
        Also look for whatever has changed since it was certified: :func:`mdpext_dask.store.integrity.verify`.
    remap
        Report what the store's remap says instead of each output; see
        :mod:`mdpext_dask.sampling.remap_store`.

    Raises
    ------
    StoreError
        If there is no mechanism store, `verify` cannot read all of it, or its remap is missing, damaged or
        made for other bytes.
    IncompleteStoreError
        If blocks or the certificate are missing.
    GuaranteeViolation
        If the certificate failed, the cells of the region have changed, or `verify` finds a change.
    """
    store = MechanismStore.open(str(url))
    check_finished(store)
    if verify:
        integrity.verify(store)
    return Mechanism(store, read_remap(store).table if remap else None)


def check_finished(store: MechanismStore) -> None:
    """Refuse a store that must not be sampled.

    Raises
    ------
    IncompleteStoreError
        If blocks or the certificate are missing.
    GuaranteeViolation
        If the certificate or the boundary check failed.
    """
    if store.state == REFUSED:
        raise GuaranteeViolation(
            f"{store.url}: refused: its certificate or boundary check failed; it must not be sampled"
        )
    if store.state != COMPLETE:
        done = store.read_receipts()
        missing = [index for index in range(store.plan.blocks) if index not in done]
        raise IncompleteStoreError(
            f"{store.url}: is {store.state}, not complete: {len(missing)} of {store.plan.blocks} blocks are "
            "missing; run the job again",
            missing=missing,
        )


class Mechanism(Reporter):
    """A certified mechanism; made by :func:`open_mechanism`.

    A location is first moved to its nearest record, at most `max_quantisation_km` away. Locations outside
    the grid, anywhere on Earth, are moved to its border first, in a way that increases no distance between
    two of them. Locations in the grid whose nearest record lies outside the region are reported from that
    record all the same: the mechanism covers the whole rectangle, and what is not stored of it is extended
    from the seed.

    With a remap, another output may be reported instead of one that is drawn. That is post-processing: the
    guarantee stays what it is, whatever the remap says.

    A store that is replaced, refused or deleted while it is open gives no rows any more but those that have
    been read; there is an error that says so.

    Every draw is a release of its own, and n of them are n ε. Two things help those who report again and
    again: with a key (`sticky`) a user's answer at a record is always the same
    (:mod:`mdpext_dask.runtime.sticky`), and a ledger (`budget`) refuses what exceeds a number of releases
    (:mod:`mdpext_dask.runtime.ledger`).

    A mechanism from a loss file that does not say where on Earth its plane lies is *planar*: places and
    reports are x and y in km, and so is the distance of the promise.
    """

    def __init__(self, store: MechanismStore, remap: NDArray[np.intp] | None = None) -> None:
        self._store, self._rows = store, RowCache(store)
        super().__init__(
            Places(store.url, store.grid, store.kept, store.projection, store.metric_p),
            np.stack([store.read("output_lon"), store.read("output_lat")], axis=-1),
            store.output_xy_km(),
            remap,
        )

    @property
    def url(self) -> str:
        """Where the store is: its path or URL."""
        return self._store.url

    @property
    def epsilon_per_km(self) -> float:
        """Promised ε, in 1/km, for distance on the ground; of a planar mechanism, in the plane."""
        return float(self._store.attributes["epsilon_per_km"])

    @property
    def epsilon_certified(self) -> float:
        """Certified ε, in 1/km, for distance in the plane."""
        return float(self._store.attributes["epsilon_certified"])

    @property
    def max_quantisation_km(self) -> float:
        """Largest distance ρ = ‖(h/2, h/2)‖_p, in km, from a location in the grid to its record.

        Two locations at distance d are told apart no better than at ε (d + 2 ρ).
        """
        return float(self._store.attributes["quantisation_km"])

    @cached_property
    def content_sha256(self) -> str:
        """Digest of the certified bytes: what a sticky answer takes for the identity of the mechanism.

        Raises
        ------
        StoreError
            If the store does not say.
        """
        return content_of(self._store)

    @property
    def dataset(self) -> xr.Dataset:
        """The store as an xarray Dataset, loaded lazily."""
        remote = objects.is_remote(self._store.url)
        store = self._store.objects if remote else self._store.url
        dataset: xr.Dataset = xr.open_zarr(store, zarr_format=3)
        return dataset

    def row(
        self,
        *,
        lon: float | None = None,
        lat: float | None = None,
        x_km: float | None = None,
        y_km: float | None = None,
    ) -> xr.DataArray:
        """Return M(·|x) of the record nearest to a place, float64 over outputs, normalised to rounding.

        With a remap, it is what is reported in the end: 0 for outputs that never are.

        Parameters
        ----------
        lon, lat
            The place in degrees; or
        x_km, y_km
            in the plane, in km; the only way where the mechanism is planar.

        Raises
        ------
        SpecError
            If the place is not given in one of these ways.
        StoreError
            If the row cannot be read, or the store is not the one any more that was opened.
        """
        i, j = self._places.record(self._places.one(lon, lat, x_km, y_km), None)
        stored = rows_at(self._store, np.array([i]), np.array([j]))[0]
        require_same(self._store)
        # Whole numbers below 2^62, so that what becomes one output is added up exactly.
        weights = merge_columns(integer_weights(stored), self._remap).astype(np.float64)
        return xr.DataArray(
            weights / weights.sum(),
            dims="output",
            coords={
                "output": np.arange(len(weights)),
                "output_lon": ("output", self._output_lonlat[:, 0]),
                "output_lat": ("output", self._output_lonlat[:, 1]),
                "output_x": ("output", self._output_xy_km[:, 0]),
                "output_y": ("output", self._output_xy_km[:, 1]),
                "x": float(self._places.grid.x_km()[i]),
                "y": float(self._places.grid.y_km()[j]),
            },
            name="probability",
            attrs={"long_name": "probability of reporting the output", "units": "1"},
        )

    def column(self, output: int, *, step: int = 1) -> xr.DataArray:
        """Return M(y|·) of one output over the records, float64, as stored; not-a-number where none is.

        The whole store is read. With a remap, it is how likely the output is reported in the end.

        Parameters
        ----------
        output
            Which output, from 0.
        step
            Leaves out all records but every `step`-th along both axes.

        Raises
        ------
        SpecError
            If there is no such output, or `step` is less than 1.
        """
        return column_of(self._store, self._remap, output, step)

    def _cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        return self._rows.cumulative(i, j)

    def _draw_many(self, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
        return draw_many(self._store, records, numbers)

    def _repr_html_(self) -> str:
        """Return what notebooks show: the promise, the proof, the size; prior and outputs on a map."""
        return card_of(self._store)

    def __repr__(self) -> str:
        rows, columns = self._places.grid.shape
        return (
            f"<Mechanism {self._store.url}: {rows} x {columns} records, {len(self._output_lonlat)} "
            f"outputs, epsilon {self.epsilon_per_km:g}/km (certified {self.epsilon_certified:.6g})>"
        )
