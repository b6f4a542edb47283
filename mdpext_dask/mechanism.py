"""A finished mechanism: look up rows, sample reported places."""

from pathlib import Path
from typing import Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from mdpext_dask import integrity, objects
from mdpext_dask.errors import DataError, GuaranteeViolation, IncompleteStoreError, SpecError
from mdpext_dask.remap import merge_columns, read_remap
from mdpext_dask.rows import rows_at
from mdpext_dask.sampler import integer_weights, sample_outputs, sample_row
from mdpext_dask.store import COMPLETE, REFUSED, MechanismStore
from mdpext_dask.tables import check_degrees

# Probabilities that are looked up together; bounds the memory of a batch.
_BATCH_ELEMENTS = 4_000_000
# What a batch does with points outside the grid, or outside the region.
OutsideRule = Literal["nearest", "drop", "error"]


def open_mechanism(url: str | Path, *, verify: bool = False, remap: bool = False) -> "Mechanism":
    """Open a finished mechanism store.

    Parameters
    ----------
    url
        Local path or URL.
    verify
        Also look for whatever has changed since it was certified: :func:`mdpext_dask.integrity.verify`.
    remap
        Report what the store's remap says instead of each output; see :mod:`mdpext_dask.remapping`.

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


class Mechanism:
    """A certified mechanism; made by :func:`open_mechanism`.

    A location is first moved to its nearest record, at most `max_quantisation_km` away. Locations outside
    the grid, anywhere on Earth, are moved to its border first, in a way that increases no distance between
    two of them. Locations in the grid whose nearest record lies outside the region are reported from that
    record all the same: the mechanism covers the whole rectangle, and what is not stored of it is extended
    from the seed.

    With a remap, another output may be reported instead of one that is drawn. That is post-processing: the
    guarantee stays what it is, whatever the remap says.

    A mechanism from a loss file that does not say where on Earth its plane lies is *planar*: places and
    reports are x and y in km, and so is the distance of the promise.
    """

    def __init__(self, store: MechanismStore, remap: NDArray[np.intp] | None = None) -> None:
        self._store = store
        self._grid, self._kept = store.grid, store.kept
        self._projection = store.projection
        self._remap = np.arange(store.outputs) if remap is None else remap
        self._output_lonlat = np.stack([store.read("output_lon"), store.read("output_lat")], axis=-1)
        self._output_xy_km = np.stack([store.read("output_x"), store.read("output_y")], axis=-1)

    @property
    def epsilon_per_km(self) -> float:
        """Promised ε, in 1/km, for distance on the ground; of a planar mechanism, in the plane."""
        return float(self._store.attributes["epsilon_per_km"])

    @property
    def epsilon_certified(self) -> float:
        """Certified ε, in 1/km, for distance in the plane."""
        return float(self._store.attributes["epsilon_certified"])

    @property
    def metric_p(self) -> float:
        """Exponent of the metric."""
        return self._store.metric_p

    @property
    def max_quantisation_km(self) -> float:
        """Largest distance ρ = ‖(h/2, h/2)‖_p, in km, from a location in the grid to its record.

        Two locations at distance d are told apart no better than at ε (d + 2 ρ).
        """
        return float(self._store.attributes["quantisation_km"])

    @property
    def output_lonlat(self) -> NDArray[np.float64]:
        """Outputs, lon and lat in degrees, float64 of shape (K, 2); not-a-number where it is planar."""
        return self._output_lonlat.copy()

    @property
    def output_xy_km(self) -> NDArray[np.float64]:
        """Outputs in the plane, x and y in km, float64 of shape (K, 2)."""
        return self._output_xy_km.copy()

    @property
    def planar(self) -> bool:
        """Whether places and reports are x and y in km, with no longitude and latitude."""
        return self._projection is None

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
        """
        point = self._one_point(lon, lat, x_km, y_km)
        i, j, _ = self._grid.nearest_records(point)
        stored = rows_at(self._store, i, j)[0]
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
                "x": float(self._grid.x_km()[i[0]]),
                "y": float(self._grid.y_km()[j[0]]),
            },
            name="probability",
            attrs={"long_name": "probability of reporting the output", "units": "1"},
        )

    def sample(
        self,
        *,
        lon: float | None = None,
        lat: float | None = None,
        x_km: float | None = None,
        y_km: float | None = None,
        n: int = 1,
    ) -> NDArray[np.float64]:
        """Return `n` independent reported places for one true place, shape (n, 2).

        They are lon and lat in degrees; of a planar mechanism, x and y in km. Every one of them is a
        release of its own: n of them together are n ε, not ε.

        Raises
        ------
        SpecError
            If `n` is not a positive whole number, or the place is not given in one way.
        """
        if not isinstance(n, int) or n < 1:
            raise SpecError(f"n: must be a whole number of at least 1, got {n!r}")
        i, j, _ = self._grid.nearest_records(self._one_point(lon, lat, x_km, y_km))
        reported = self._output_xy_km if self.planar else self._output_lonlat
        return np.asarray(reported[self._remap[sample_row(rows_at(self._store, i, j)[0], n)]])

    def holds_degrees(self, coordinates: NDArray[np.float64]) -> bool:
        """Whether all of these numbers, shape (n, 2), are places in the grid if they are lon and lat."""
        if self._projection is None or not (np.abs(coordinates) <= (180, 90)).all():
            return False
        return bool(self._grid.box.contains(self._projection.to_plane(coordinates)).all())

    def sample_points(
        self,
        coordinates: NDArray[np.float64],
        *,
        planar: bool = False,
        outside: OutsideRule = "nearest",
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Draw one output for each of many places.

        Parameters
        ----------
        coordinates
            float64 of shape (n, 2): lon and lat in degrees, or x and y in km.
        planar
            Whether they are x and y.
        outside
            Rule for places outside the grid, or whose nearest record lies outside the region: ``"nearest"``
            reports from the nearest record of the whole grid (the guarantee still holds), ``"drop"`` gives -1
            (which reveals that the place is outside), ``"error"`` refuses the batch.

        Returns
        -------
        outputs
            Output numbers, shape (n,); -1 where dropped.
        was_outside
            Which places lie outside, bool of shape (n,).

        Raises
        ------
        DataError
            If a place is outside and the rule is ``"error"``, or a coordinate is not finite.
        SpecError
            If places are in degrees and the mechanism is planar.
        """
        if not np.isfinite(coordinates).all():
            raise DataError("points: coordinates must be finite numbers")
        if not planar:
            check_degrees(coordinates, "points")
        xy = coordinates if planar else self._in_plane(coordinates)
        i, j, inside = self._grid.nearest_records(xy)
        inside &= self._grid.are_vertices_of(self._kept, i, j)
        if outside == "error" and not inside.all():
            place = "grid" if self._kept.all() else "region"
            raise DataError(
                f"points: {int((~inside).sum())} of {len(inside)} lie outside the {place}, the first in "
                f"row {int(np.argmin(inside)) + 1}; allow it with --outside nearest or drop"
            )
        outputs = np.full(len(xy), -1, dtype=np.intp)
        wanted = np.flatnonzero(inside) if outside == "drop" else np.arange(len(xy))
        # In the order of the records, so that a chunk is read once and not once a point.
        wanted = wanted[np.lexsort((j[wanted], i[wanted]))]
        batch = max(_BATCH_ELEMENTS // len(self._output_lonlat), 1)
        for first in range(0, len(wanted), batch):
            part = wanted[first : first + batch]
            outputs[part] = self._remap[sample_outputs(rows_at(self._store, i[part], j[part]))]
        return outputs, ~inside

    def _in_plane(self, lonlat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Project places anywhere on Earth so that no distance grows beyond what ε was charged for.

        For p = 2 distances are those on the ground, so far places are moved to where the distortion is
        charged; for other p they are those of the plane.
        """
        if self._projection is None:
            raise SpecError(
                f"lon, lat: {self._store.url} is planar, its loss file has no centre_lon, centre_lat; give "
                "x_km, y_km"
            )
        if self.metric_p == 2:
            return self._projection.to_disc(lonlat, self._grid.box.radius_km)
        xy = self._projection.to_plane(lonlat)
        if not np.isfinite(xy).all():
            raise DataError("points: a place on the other side of the Earth has no place in the plane")
        return xy

    def _one_point(
        self, lon: float | None, lat: float | None, x_km: float | None, y_km: float | None
    ) -> NDArray[np.float64]:
        degrees, plane = (lon, lat), (x_km, y_km)
        if plane == (None, None) and None not in degrees:
            point = np.array([degrees], dtype=np.float64)
            if not (np.abs(point) <= (180, 90)).all():
                raise SpecError(f"lon, lat: must be degrees, got {lon}, {lat}")
            return self._in_plane(point)
        if degrees == (None, None) and None not in plane:
            point = np.array([plane], dtype=np.float64)
            if not np.isfinite(point).all():
                raise SpecError(f"x_km, y_km: must be finite, got {x_km}, {y_km}")
            return point
        raise SpecError("a place is given either by lon and lat or by x_km and y_km")

    def __repr__(self) -> str:
        rows, columns = self._grid.shape
        return (
            f"<Mechanism {self._store.url}: {rows} x {columns} records, {len(self._output_lonlat)} "
            f"outputs, epsilon {self.epsilon_per_km:g}/km (certified {self.epsilon_certified:.6g})>"
        )
