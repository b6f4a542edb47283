"""What is audited: the rows of a mechanism, and what they promise."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.city import CitySource, projection_of
from mdpext_dask.auditors.exact import Undecided, log_ratio, probability_ratio
from mdpext_dask.auditors.findings import inspect_rows
from mdpext_dask.auditors.foreign.read import check_exists, check_known, read_foreign
from mdpext_dask.auditors.foreign.row_files import writing
from mdpext_dask.auditors.pairs.compare import Triple
from mdpext_dask.auditors.promise import Promise, ground_distance_km
from mdpext_dask.auditors.result import NOT_PROVED, VIOLATED
from mdpext_dask.auditors.source import INFINITE_DIFFERENCE, ArraySource, Source, StoreSource
from mdpext_dask.errors import DataError, GuaranteeViolation, SpecError
from mdpext_dask.extend.record_metrics import PlanarMetric
from mdpext_dask.files import scratch_in
from mdpext_dask.job.spec import json_number
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import arc
from mdpext_dask.readers.point_chunks import BY_NAME, PointColumns
from mdpext_dask.runtime.city import CityFile, is_city
from mdpext_dask.runtime.signatures import Trusted
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, ROOT_KEY, MechanismStore
from mdpext_dask.store.signature import require_signed

_LARGEST_KM = 1e9


def is_store(url: str) -> bool:
    """Whether there is a mechanism store of ours, whole or damaged, or nothing where one should be."""
    if not objects.is_remote(url):
        path = Path(objects.absolute(url))
        if not path.is_dir():
            return not path.exists() and path.suffix == ".zarr"
    content = objects.get_json(objects.open_objects(url, read_only=True), ROOT_KEY)
    attributes = content.get("attributes") if isinstance(content, dict) else None
    return isinstance(attributes, dict) and "fingerprint" in attributes


@dataclass(frozen=True)
class Subject:
    """A mechanism and its promise.

    Parameters
    ----------
    name
        What to call it.
    source
        Its rows.
    promise
        What is audited, in terms of the source's places.
    promised
        What was promised: of stores with a place on Earth, for the ground, while their plane is audited.
    store
        The store, if it is one of ours, with its receipts.
    city
        The city, if it is one.
    notes
        What people must know besides.
    states_promise
        Whether it says itself what it promises, as stores and cities do.
    signed_by
        The trusted public key that has signed it, if that was asked for.
    own_limit_per_km
        ε that it says itself to keep in its plane, in 1/km, whatever it is audited for.
    """

    name: str
    source: Source
    promise: Promise
    promised: Promise
    store: MechanismStore | None = None
    city: CityFile | None = None
    notes: tuple[str, ...] = ()
    states_promise: bool = True
    signed_by: str | None = None
    own_limit_per_km: float | None = None

    @property
    def own_metric_p(self) -> float | None:
        """Exponent of the metric of a store or a city."""
        whole = self.store or self.city
        return None if whole is None else whole.metric_p

    def describe(self, triple: Triple | None) -> dict[str, Any]:
        """Return a triple as values, its log ratio computed anew from the exact rows; of none, nothing."""
        if triple is None:
            return {}
        pair = np.array([triple.record, triple.record_prime])
        xy_km = self.source.xy_km(pair)
        ratio = self._ratio(triple)
        size = math.inf if ratio is None else float(log_ratio(ratio)) if ratio != 1 else 0.0
        if self.promise.distortion is None:
            distance = PlanarMetric(dict(enumerate(xy_km.tolist())), self.promise.metric_p)(0, 1)
        else:
            distance = ground_distance_km(*self.source.places(pair))
        bound = self.promise.epsilon_per_km * distance
        return {
            "x": xy_km[0].tolist(),
            "x_prime": xy_km[1].tolist(),
            "record": self.source.name_of(triple.record),
            "record_prime": self.source.name_of(triple.record_prime),
            "output": triple.output,
            "log_ratio": json_number(size),
            "bound": bound,
            "distance_km": distance,
            **self.source.describe(pair, triple.output),
        }

    def verdict_on_pairs(self, worst: Sequence[Triple]) -> str:
        """Return what it means that triples are too steep for the plane that is audited.

        Of a store for the ground, the plane is charged for stretching: what exceeds it by less breaks no
        promise.
        """
        same = self.promised == self.promise or self.promised.tolerance > 0
        return VIOLATED if same or any(map(self.breaks, worst)) else NOT_PROVED

    def breaks(self, triple: Triple) -> bool:
        """Return whether a triple breaks what was promised, as a fact."""
        ratio = self._ratio(triple)
        pair = np.array([triple.record, triple.record_prime])
        if ratio is None:
            # Possible from one record only, if rows can be used at all.
            rows = self.source.rows(pair)
            return bool(inspect_rows(pair, rows, self.source.range, normalised=False)[0].all())
        # Of a store for the ground, what is audited is the plane.
        places = self.source.places(pair) if self.promised.distortion is None else self.source.lonlat(pair)
        assert places is not None  # or else nothing is promised for the ground
        try:
            return self.promised.is_broken(ratio, places)
        except Undecided:
            return False

    def _ratio(self, triple: Triple) -> Fraction | None:
        """Return M(y|x) / M(y|x'), also of rows that the sampler would refuse; None where it is none."""
        first, second = rows = self.source.rows(np.array([triple.record, triple.record_prime]))
        if not (np.isfinite(rows).all() and (rows >= 0).all() and rows.any(axis=1).all()):
            return None
        ours, theirs = float(first[triple.output]), float(second[triple.output])
        if ours and theirs:
            return probability_ratio(first, second, triple.output)
        return Fraction(1) if ours == theirs else None


@contextlib.contextmanager
def subject_of(
    given: str | NDArray[np.floating],
    points: str | Path | NDArray[np.float64] | None,
    epsilon_per_km: float | None,
    metric_p: float | None,
    tolerance: float,
    trusted_key: Trusted | None,
    columns: PointColumns = BY_NAME,
) -> Iterator[Subject]:
    """Yield what is to be audited, for as long as it is: of a store or city its own promise, or another.

    Raises
    ------
    IncompleteStoreError, StoreError, DataError, SpecError, GuaranteeViolation
        See :func:`~mdpext_dask.auditors.audit.audit`.
    """
    asked = epsilon_per_km, metric_p, tolerance
    if isinstance(given, str) and is_store(given):
        if points is not None:
            raise SpecError("--points: a mechanism store knows where its records are")
        store = MechanismStore.open(given)
        if store.state == COMPLETE and not store.read_receipts():
            if trusted_key is not None:
                raise GuaranteeViolation(
                    f"{store.url}: its receipts are gone: nothing shows that its bytes were signed"
                )
            with rewritten_subject(store, *asked) as found:
                yield found
            return
        found = store_subject(store, *asked)
        require_all_blocks(store)
        yield found if trusted_key is None else replace(found, signed_by=require_signed(store, trusted_key))
        return
    if isinstance(given, str):
        check_exists(given)
        if is_city(given):
            if points is not None:
                raise SpecError("--points: a city knows where its records are")
            city = CityFile(Path(objects.absolute(given)))
            signed_by = None if trusted_key is None else city.require_signed(trusted_key)
            yield replace(city_subject(city, *asked), signed_by=signed_by)
            return
    if trusted_key is not None:
        raise SpecError("--trusted-key: only mechanism stores and cities are signed")
    if isinstance(given, str):
        check_known(given)
    if epsilon_per_km is None:
        raise SpecError("--epsilon-per-km: a plain array does not say what it promises")
    p = 2.0 if metric_p is None else metric_p
    with plain_subject(given, points, epsilon_per_km, p, tolerance, columns) as found:
        yield found


def store_subject(
    store: MechanismStore,
    epsilon_per_km: float | None = None,
    metric_p: float | None = None,
    tolerance: float = 0.0,
) -> Subject:
    """Return what is to be audited of a store: its own promise, or another."""
    asked = epsilon_per_km, metric_p, tolerance
    promises = _promises_of(_own(store), asked, store.grid.box.radius_km, store.projection)
    return Subject(store.url, StoreSource.of(store), *promises, store, own_limit_per_km=store.planar_limit())


def city_subject(
    city: CityFile, epsilon_per_km: float | None = None, metric_p: float | None = None, tolerance: float = 0.0
) -> Subject:
    """Return what is to be audited of an exported city: its own promise, or another."""
    own, asked = (float(city.header["epsilon_per_km"]), city.metric_p), (epsilon_per_km, metric_p, tolerance)
    where = city.grid.box.radius_km, projection_of(city)
    limit = _promises_of(own, (None, None, 0.0), *where)[0].epsilon_per_km
    promises = _promises_of(own, asked, *where)
    return Subject(str(city.path), CitySource.of(city), *promises, city=city, own_limit_per_km=limit)


def _own(store: MechanismStore) -> tuple[float, float]:
    return float(store.attributes["epsilon_per_km"]), store.metric_p


def _promises_of(
    own: tuple[float, float],
    asked: tuple[float | None, float | None, float],
    radius_km: float,
    projection: Projection | None,
) -> tuple[Promise, Promise]:
    """Return what is to be audited in the plane of a mechanism, and what is promised by that.

    Parameters
    ----------
    own
        ε in 1/km and p that the mechanism promises.
    asked
        ε, p and the tolerance to audit it for; None where they are its own.
    radius_km
        Of the disc around the centre that holds its records.
    projection
        Its plane.
    """
    epsilon, p = (mine if other is None else other for mine, other in zip(own, asked[:2], strict=True))
    distortion = 0.0 if projection is None else projection.distortion(radius_km)
    # For other p the metric is that of the plane; less than was promised is audited all the same.
    promised = Promise(epsilon, p, asked[2], None if projection is None or p != 2 else distortion)
    audited = Promise(planar_epsilon(epsilon, distortion), p, asked[2])
    _check_extent(radius_km, audited)
    return audited, promised


@contextlib.contextmanager
def rewritten_subject(
    store: MechanismStore,
    epsilon_per_km: float | None = None,
    metric_p: float | None = None,
    tolerance: float = 0.0,
) -> Iterator[Subject]:
    """Bring the rows of a store that has lost its receipts into a form for work items, as a plain array.

    It may have been written anew by other software, in any chunks, or in part. Its records are where its own
    coordinates say, and what it promises is what its attributes say. Nothing of it is taken for granted, and
    rows that were never stored are missing.
    """
    with scratch_in(Path(tempfile.gettempdir()), "mdpext-audit-") as folder:
        found = read_foreign(store.url, None, folder)
        if not found.planar:
            raise DataError(f"{store.url}: the coordinates x and y of its records, in km, are missing")
        radius_km = float(np.hypot(*found.coordinates.T).max())
        asked = epsilon_per_km, metric_p, tolerance
        audited, promised = _promises_of(_own(store), asked, radius_km, store.projection)
        source = ArraySource.of(found.rows, found.coordinates, folder, lattice=found.lattice)
        note = (
            "its receipts are gone: audited as a plain array, for what its attributes promise; nothing shows "
            "that these are the rows that were certified, and they cannot be sampled with this package"
        )
        yield Subject(
            store.url, replace(source, projection=store.projection), audited, promised, notes=(note,)
        )


@contextlib.contextmanager
def plain_subject(
    subject: str | Path | NDArray[np.floating],
    points: str | Path | NDArray[np.float64] | None,
    epsilon_per_km: float,
    metric_p: float,
    tolerance: float,
    columns: PointColumns = BY_NAME,
) -> Iterator[Subject]:
    """Bring a plain array into a form that work items can read, for as long as it is audited."""
    with scratch_in(Path(tempfile.gettempdir()), "mdpext-audit-") as folder:
        name = str(subject)
        if isinstance(subject, np.ndarray):
            name = "array in memory"
            if subject.dtype.hasobject or np.ma.isMaskedArray(subject):
                raise DataError(f"{name}: must be a plain array of numbers")
            with writing(folder):
                np.save(folder / "given.npy", subject, allow_pickle=False)
            subject = folder / "given.npy"
        if isinstance(points, np.ndarray):
            points = _points_file(points, folder)
        found = read_foreign(str(subject), None if points is None else Path(points), folder, columns)
        xy_km, distortion = found.coordinates, None
        if not found.planar:
            lon, lat = found.coordinates.T
            west, east = arc(lon, lon)
            projection = Projection.centred_on(west, float(lat.min()), east, float(lat.max()))
            xy_km = projection.to_plane(found.coordinates)
            if metric_p == 2:  # for other p the metric is that of the plane
                try:
                    distortion = projection.distortion(float(np.hypot(*xy_km.T).max()))
                except SpecError as error:
                    raise SpecError(f"{name}: {error}; give x_km,y_km in a plane of your choice") from None
        promise = Promise(epsilon_per_km, metric_p, tolerance, distortion)
        _check_extent(float(np.abs(xy_km).max()), promise)
        lonlat = None if distortion is None else found.coordinates
        source = ArraySource.of(found.rows, xy_km, folder, lonlat, found.lattice)
        yield Subject(name, source, promise, promise, states_promise=False)


def _check_extent(furthest_km: float, promise: Promise) -> None:
    """Refuse numbers for which float64 has no squares, or no difference larger than any bound."""
    if furthest_km > _LARGEST_KM:
        raise SpecError(f"--points: {furthest_km:g} km is no coordinate of a place")
    if not 4 * furthest_km * promise.epsilon_per_km + promise.tolerance < INFINITE_DIFFERENCE:
        raise SpecError(
            f"--epsilon-per-km: {promise.epsilon_per_km:g}/km with a tolerance of {promise.tolerance:g} "
            "promises nothing at these distances"
        )


def _points_file(points: NDArray[np.float64], folder: Path) -> Path:
    if points.ndim != 2 or points.shape[1] != 2:
        raise SpecError(f"--points: must have the shape (N, 2), x and y in km, got {points.shape}")
    path = folder / "points.csv"
    lines = [f"{x!r},{y!r}" for x, y in points.astype(np.float64).tolist()]
    path.write_text("\n".join(["x_km,y_km", *lines, ""]))
    return path
