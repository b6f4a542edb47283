"""A finished mechanism: look up rows, sample reported places, show it in a notebook."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from mdpext_dask.errors import (
    GuaranteeViolation,
    IncompleteStoreError,
    MdpextError,
    SpecError,
    StoreError,
    first_line,
)
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.problem.notebook_card import MOST_DOTS, MOST_READ, card, prior_in_squares, small_map
from mdpext_dask.runtime.integer_sampling import cumulative_weights, integer_weights
from mdpext_dask.runtime.location_sampler import Given, Numbers, OutsideRule, Places, Reporter
from mdpext_dask.runtime.signatures import Trusted
from mdpext_dask.sampling.local_weights import LocalWeights
from mdpext_dask.store import integrity, objects, schema
from mdpext_dask.store.mechanism_store import COMPLETE, DAMAGE, REFUSED, ROOT_KEY, MechanismStore
from mdpext_dask.store.remap import content_of, merge_columns, remap_of
from mdpext_dask.store.rows import by_chunks, local_rows_of, rows_at, rows_of
from mdpext_dask.store.signature import require_signed

__all__ = ["Mechanism", "OutsideRule", "check_finished", "open_mechanism"]

# Chunks of weights that are kept for single draws, in bytes, and at least; bytes of a weight.
_CACHE_BYTES, _LEAST_CHUNKS, _WEIGHT_BYTES = 64 * 2**20, 1, 8
# Weights that are looked up together; bounds the memory of a batch.
_BATCH_ELEMENTS = 4_000_000
# Attributes that change when a store is replaced or is no longer finished.
_IDENTITY = ("state", "fingerprint", "chunk_hashes", "mechanism_sha256")
_PROBABILITY = {"long_name": "probability of reporting the output", "units": "1"}


def open_mechanism(
    url: str | Path, *, verify: bool = False, remap: bool | None = None, trusted_key: Trusted | None = None
) -> "Mechanism":
    """Open a finished mechanism store.

    Parameters
    ----------
    url
        Local path or URL.
    verify
        Also look for any change since it was certified: :func:`mdpext_dask.store.integrity.verify`.
    remap
        Whether to report what the store's remap says instead of each output; default: where it has one. See
        :mod:`mdpext_dask.sampling.remap_store`.
    trusted_key
        Public key that must have signed the store: 64 hexadecimal digits, or a file; see
        :mod:`mdpext_dask.runtime.signatures`. It implies `verify`, without which a signature says nothing of
        the stored bytes.

    Raises
    ------
    StoreError
        If there is no mechanism store, `verify` cannot read all of it, or its remap is missing, damaged or
        made for other bytes.
    IncompleteStoreError
        If blocks or the certificate are missing.
    GuaranteeViolation
        If the certificate failed; if it, receipts or attributes are gone or do not belong together; if the
        region, the grid, the plane, the outputs or the promise have changed; if `verify` finds a change; or
        if the trusted key has not signed the store.
    """
    store = MechanismStore.open(str(url))
    check_finished(store, verify=verify or trusted_key is not None)
    if trusted_key is not None:
        require_signed(store, trusted_key)
    found = remap_of(store, remap)
    return Mechanism(store, None if found is None else found.table)


def check_finished(store: MechanismStore, *, verify: bool = False) -> None:
    """Refuse a store that must not be sampled.

    Certificate, receipts, description of the rows and attributes must belong together; with `verify`, all of
    the store, every shard included.

    Raises
    ------
    IncompleteStoreError
        If blocks or the certificate are missing.
    GuaranteeViolation
        If the certificate or the boundary check failed, or receipts or the certificate are gone or belong to
        something else.
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
    if verify:
        integrity.verify(store)
    else:
        integrity.require_evidence(store)


class Mechanism(Reporter):
    """A certified mechanism; made by :func:`open_mechanism`.

    A location is first moved to its nearest record, at most `max_quantisation_km` away. Locations outside
    the grid, anywhere on Earth, are moved to its border first, in a way that increases no distance between
    two of them. A location in the grid whose nearest record lies outside the region is reported from that
    record: the mechanism covers the whole rectangle, and rows that are not stored are extended from the seed.

    With a remap, another output may be reported instead of the one that is drawn. That is post-processing:
    the guarantee holds for any remap.

    When a store is replaced, refused or deleted while it is open, only rows that have been read already are
    used; reading any other is an error.

    Each draw is a release of its own, and n of them are n ε. For repeated reports there are sticky answers
    (`sticky`, :mod:`mdpext_dask.runtime.sticky`): with a key, a user's answer at a record is always the same;
    and ledgers (`budget`, :mod:`mdpext_dask.runtime.ledger`), which refuse releases beyond a limit.

    A mechanism from a loss file that does not say where on Earth its plane lies is *planar*: places and
    reports are x and y in km, and so is the distance of the promise.
    """

    def __init__(self, store: MechanismStore, remap: NDArray[np.intp] | None = None) -> None:
        self._store, self._rows = store, RowCache(store)
        super().__init__(
            Places(store.url, store.grid, store.kept, store.projection, store.metric_p),
            store.attributes,
            store.output_lonlat(),
            store.output_xy_km(),
            remap,
        )

    @property
    def url(self) -> str:
        """Where the store is: its path or URL."""
        return self._store.url

    @cached_property
    def content_sha256(self) -> str:
        """Digest of the certified bytes.

        Raises
        ------
        StoreError
            If the store does not say.
        """
        return content_of(self._store)

    @property
    def dataset(self) -> xr.Dataset:
        """The store as an xarray Dataset, loaded lazily.

        Its attributes are strings and numbers; those that begin with a bracket or a brace are JSON.

        Raises
        ------
        StoreError
            If what describes its arrays is damaged.
        """
        try:
            # Through the store's objects, with their checks of what is read.
            dataset: xr.Dataset = xr.open_zarr(self._store.objects, zarr_format=3)
        except DAMAGE as error:
            raise StoreError(f"{self.url}: is damaged: {first_line(error)}") from None
        # Older stores, too, can be written as netCDF, and have their CRS where rioxarray looks for it.
        dataset.attrs = schema.as_stored(dataset.attrs)
        return dataset.set_coords("spatial_ref") if "spatial_ref" in dataset else dataset

    def row(
        self, *, lon: Given = None, lat: Given = None, x_km: Given = None, y_km: Given = None
    ) -> xr.DataArray:
        """Return M(·|x) of the record nearest to a place, float64 over outputs, normalised to rounding.

        With a remap, these are the probabilities of the reports: 0 for outputs that are never reported.

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
            If the row cannot be read, or the store is no longer the one that was opened.
        """
        i, j = self.places.record(self.places.one(lon, lat, x_km, y_km), None)
        stored = rows_at(self._store, np.array([i]), np.array([j]))[0]
        require_same(self._store)
        # Whole numbers below 2^62, so that the weights of one report are added up exactly.
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
                "x": float(self.places.grid.x_km()[i]),
                "y": float(self.places.grid.y_km()[j]),
            },
            name="probability",
            attrs=_PROBABILITY,
        )

    def column(self, output: int, *, step: int = 1) -> xr.DataArray:
        """Return M(y|·) of one output over the records, float64, as stored; NaN where no row is stored.

        The whole store is read. With a remap, these are the probabilities that the output is reported.

        Parameters
        ----------
        output
            Which output, from 0.
        step
            Take every `step`-th record along both axes.

        Raises
        ------
        SpecError
            If there is no such output, or `step` is less than 1.
        """
        for name, value, least in (("output", output, 0), ("step", step, 1)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise SpecError(f"{name}: must be a whole number of at least {least}, got {value!r}")
        if output >= len(self._remap):
            raise SpecError(f"output: {output} is not one of 0 to {len(self._remap) - 1}")
        every = slice(None, None, step)
        x, y = self.places.grid.x_km()[::step], self.places.grid.y_km()[::step]
        total = np.zeros((len(x), len(y)))
        for source in np.flatnonzero(self._remap == output).tolist():
            total += self._store.read("probability", every, every, slice(source, source + 1))[..., 0]
        return xr.DataArray(
            total,
            dims=("x", "y"),
            coords={"x": x, "y": y, "output": int(output)},
            name="probability",
            attrs=_PROBABILITY,
        )

    def _cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        return self._rows.cumulative(i, j)

    def _draw_many(self, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
        return draw_many(self._store, records, numbers)

    def _repr_html_(self) -> str:
        """Return what notebooks show: the promise, the proof, the size; prior and outputs on a map."""
        if doubt := self._doubt():
            return card("Location mechanism that must not be sampled", [("refused", doubt)])
        store, attributes, grid = self._store, self._attributes, self.places.grid
        where = "in the plane of its file" if self.planar else "on the ground"
        loss, inside = attributes.get("loss_km"), attributes.get("records_inside", grid.records)
        rows = [
            ("store", store.url),
            ("promised", f"ε = {self.epsilon_per_km:g} per km {where}, metric p = {self.metric_p:g}"),
            ("certified", f"ε = {self.epsilon_certified:.6g} per km in the plane, over all pairs of records"),
            ("records", f"{' x '.join(map(str, grid.shape))}, {inside:,} in the region"),
            ("outputs", f"{store.outputs:,}{', remapped' if self.remapped else ''}"),
            ("to the nearest record", f"at most {1000 * self.max_quantisation_km:.3g} m"),
            *([] if loss is None else [("expected loss", f"{loss:.4g} km")]),
        ]
        picture = ""
        if grid.records <= MOST_READ:
            densities, step = prior_in_squares(np.asarray(store.read("prior"), dtype=np.float64), grid)
            outputs = self._output_xy_km[:MOST_DOTS]
            picture = small_map(grid.box, densities, step * grid.spacing_km, outputs)
        return card("Location mechanism", rows, picture)

    def __repr__(self) -> str:
        return f"<Mechanism {self._store.url}: {self._doubt() or self._summary()}>"

    def _doubt(self) -> str:
        """Return why the store, as it is by now, must not be sampled; empty if it may be."""
        try:
            check_finished(MechanismStore.open(self._store.url))
        except MdpextError as error:
            return str(error)
        return ""


def require_same(store: MechanismStore) -> None:
    """Refuse rows that have just been read if the store is no longer the one that was opened.

    A store that is replaced is first marked as unfinished, and as finished last. So if its attributes are now
    what they were when it was opened, rows that were read in between are those that were certified.

    Raises
    ------
    StoreError
        If it has been replaced, refused or deleted since it was opened, or is being worked on.
    """
    document = objects.get_json(store.objects, ROOT_KEY)
    found = document.get("attributes") if isinstance(document, Mapping) else None
    now, then = schema.as_read(found) if isinstance(found, Mapping) else {}, store.attributes
    if any(now.get(key) != then.get(key) for key in _IDENTITY):
        raise StoreError(
            f"{store.url}: is not the store any more that was opened: it has been replaced, refused or "
            "deleted, or a run is working on it; open it again"
        )


class RowCache:
    """Rows of single records; the chunks that were used last are kept.

    Rows that have been read stay as they were, whatever happens to the store; rows of another store in its
    place are refused. Threads may share a cache, and child processes.

    Parameters
    ----------
    store
        The store, with its seed.
    """

    def __init__(self, store: MechanismStore) -> None:
        self._store = store
        self._shape = store.grid.shape
        self._side_x, self._side_y, _ = store.array(schema.PROBABILITY).chunks
        chunks = _CACHE_BYTES // (self._side_x * self._side_y * store.outputs * _WEIGHT_BYTES)
        self._chunk = lru_cache(maxsize=max(chunks, _LEAST_CHUNKS))(self._read_chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCache, (self._store,)

    def cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        """Return the cumulative weights of the record (i, j), uint64 of shape (K,).

        Raises
        ------
        StoreError
            If its chunk cannot be read; see :func:`mdpext_dask.store.rows.rows_of` and :func:`require_same`.
        GuaranteeViolation
            If the row is damaged.
        """
        across, within_x = divmod(i, self._side_x)
        along, within_y = divmod(j, self._side_y)
        weights: NDArray[np.uint64] = self._chunk(across, along)[within_x, within_y]
        if not weights[-1]:  # damaged: says so
            return cumulative_weights(rows_at(self._store, np.array([i]), np.array([j]))[0])
        return weights

    def _read_chunk(self, across: int, along: int) -> NDArray[np.uint64]:
        """Return the cumulative weights of a chunk, uint64 of shape (records east, records north, K).

        Those of a damaged row are 0: it must not keep others from being used.
        """
        left, lower = across * self._side_x, along * self._side_y
        rows = rows_of(
            self._store,
            slice(left, min(left + self._side_x, self._shape[0])),
            slice(lower, min(lower + self._side_y, self._shape[1])),
        )
        require_same(self._store)
        weights = np.zeros(rows.shape, dtype=np.uint64)
        for index in np.ndindex(rows.shape[:2]):
            with contextlib.suppress(GuaranteeViolation):
                weights[index] = cumulative_weights(rows[index])
        return weights


def draw_many(store: MechanismStore, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
    """Draw one output for each of many records; every row is read once, and every chunk about once.

    Parameters
    ----------
    store
        The store, with its seed.
    records
        Flat indices of the records, int64 of shape (n,).
    numbers
        Gives the random numbers that are compared with the cumulative weights.

    Returns
    -------
    Output numbers, shape (n,).

    Raises
    ------
    StoreError
        If rows cannot be read; see :func:`mdpext_dask.store.rows.local_rows_of` and :func:`require_same`.
    GuaranteeViolation
        If a row is damaged.
    """
    outputs = np.empty(len(records), dtype=np.intp)
    distinct, which = np.unique(records, return_inverse=True)
    i, j = np.divmod(distinct, store.grid.shape[1])
    most = max(_BATCH_ELEMENTS // store.outputs, 1)
    groups = [
        rows[first : first + most] for rows in by_chunks(store, i, j) for first in range(0, len(rows), most)
    ]
    place = np.empty(len(distinct), dtype=np.intp)
    place[np.concatenate([which[:0], *groups])] = np.arange(len(distinct))
    # Draws in the order of the chunks of their rows.
    places = place[which]
    draws = np.argsort(places, kind="stable")
    places, first = places[draws], 0
    for rows in groups:
        found = LocalWeights.of(_local_rows_at(store, i[rows], j[rows]))
        start, end = np.searchsorted(places, (first, first + len(rows)))
        part, row = draws[start:end], places[start:end] - first
        outputs[part] = found.pick(row, numbers(part, found.cumulative[row, -1]))
        first += len(rows)
    # Once for all of them, before any draw is returned: a store that was replaced stays replaced.
    require_same(store)
    return outputs


def _local_rows_at(store: MechanismStore, i: NDArray[np.intp], j: NDArray[np.intp]) -> LocalRows:
    """Return the rows of n records of one chunk, with entries of shape (n, 1, columns)."""
    left, lower = int(i.min()), int(j.min())
    local = local_rows_of(store, slice(left, int(i.max()) + 1), slice(lower, int(j.max()) + 1))
    return replace(local, entries=local.entries[i - left, j - lower][:, None])
