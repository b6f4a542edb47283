"""What is audited: the rows of a mechanism, and what they promise."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import Place
from mdpext_dask.auditors.exact import Undecided
from mdpext_dask.auditors.findings import inspect_rows
from mdpext_dask.auditors.foreign.read import ForeignMechanism, read_foreign
from mdpext_dask.auditors.foreign.row_files import writing
from mdpext_dask.auditors.pairs.compare import Triple
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.result import NOT_PROVED, VIOLATED, AuditReport, exact_ratio
from mdpext_dask.auditors.source import INFINITE_DIFFERENCE, ArraySource, Source, StoreSource
from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.files import scratch_in
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.longitudes import arc
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.store import objects
from mdpext_dask.store.hierarchy import ROOT_KEY
from mdpext_dask.store.integrity import FINISHED, ShardDamage, extra_shards, inconsistencies
from mdpext_dask.store.loss import is_problem_of
from mdpext_dask.store.mechanism_store import MechanismStore

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
    planar
        Whether what was promised is about distance in the plane.
    store
        The store, if it is one of ours.
    lattice_file
        Where a plain array's lattice is, if it is one.
    """

    name: str
    source: Source
    promise: Promise
    promised: Promise
    planar: bool
    store: MechanismStore | None = None
    lattice_file: Path | None = None

    @property
    def limit_per_km(self) -> float:
        """What ε in a report is compared with, in 1/km: on the ground, the promise itself."""
        return self.promise.epsilon_per_km

    def lattice(self) -> NDArray[np.intp]:
        """Return an array's record numbers along both axes, the one with more lines first."""
        found: NDArray[np.intp] = np.load(self.lattice_file, mmap_mode="r")  # type: ignore[arg-type]
        return found

    @property
    def lattice_shape(self) -> tuple[int, int]:
        """Records to the east and to the north, where they are on a lattice."""
        if self.store is not None:
            return self.store.grid.shape
        across, along = self.lattice().shape
        return across, along

    def records_of_cell(self, place: Place) -> NDArray[np.intp]:
        """Return the four records of a fine cell, shape (4,)."""
        if self.store is not None:
            first = place.i * self.lattice_shape[1] + place.j
            return np.array(
                [first, first + 1, first + self.lattice_shape[1], first + self.lattice_shape[1] + 1]
            )
        return np.array(self.lattice()[place.i : place.i + 2, place.j : place.j + 2]).ravel()

    def breaks(self, triple: Triple) -> bool:
        """Return whether a triple breaks what was promised, as a fact."""
        ratio = exact_ratio(self.source, triple)
        pair = np.array([triple.record, triple.record_prime])
        if ratio is None:
            # Possible from one record only, if rows can be used at all.
            return bool(
                inspect_rows(pair, self.source.rows(pair), self.source.range, normalised=False)[0].all()
            )
        places = self.source.places(pair)
        if self.store is not None and self.promised.distortion is not None:
            projection = self.store.projection
            assert projection is not None  # or else nothing is promised for the ground
            places = projection.to_degrees(self.source.xy_km(pair))
        try:
            return self.promised.is_broken(ratio, places)
        except Undecided:
            return False

    def report(self, method: str, verdict: str, epsilon: float, seconds: float, **more: Any) -> AuditReport:
        """Return a report about it."""
        details = {**more.pop("details", {}), "planar": self.planar}
        return AuditReport(
            subject=self.name,
            method=method,
            verdict=verdict,
            epsilon_per_km=self.promised.epsilon_per_km,
            epsilon_planar_per_km=self.promise.kept_per_km,
            limit_per_km=self.limit_per_km,
            epsilon=epsilon,
            metric_p=self.promise.metric_p,
            tolerance=self.promise.tolerance,
            records=self.source.records,
            outputs=self.source.outputs,
            seconds=seconds,
            details=details,
            **more,
        )


def store_subject(
    store: MechanismStore,
    epsilon_per_km: float | None = None,
    metric_p: float | None = None,
    tolerance: float = 0.0,
) -> Subject:
    """Return what is to be audited of a store: its own promise, or another."""
    projection = store.projection
    p = store.metric_p if metric_p is None else metric_p
    distortion = 0.0 if projection is None else projection.distortion(store.grid.box.radius_km)
    epsilon = float(store.attributes["epsilon_per_km"]) if epsilon_per_km is None else epsilon_per_km
    # For other p the metric is that of the plane; less than was promised is audited all the same.
    planar = projection is None or p != 2
    promised = Promise(epsilon, p, tolerance, None if planar else distortion)
    audited = Promise(planar_epsilon(epsilon, distortion), p, tolerance)
    _check_extent(np.array(store.grid.box.radius_km), audited)
    return Subject(store.url, StoreSource(store.url), audited, promised, planar, store)


def damage_of(subject: Subject, parts: Sequence[ShardDamage], certified: float | None) -> ShardDamage:
    """Return what is wrong with a store besides its rows.

    Parameters
    ----------
    subject
        What is audited; of an array, nothing is known.
    parts
        What is wrong with its blocks.
    certified
        What its certificate has just been found to be, if it has.
    """
    store = subject.store
    if store is None:
        return ShardDamage()
    own = subject.promise.metric_p == store.metric_p
    changed = inconsistencies(store, certified if own else None)
    if store.state in FINISHED and not is_problem_of(store):
        changed.append("problem_sha256")
    damage = ShardDamage.joined([*parts, ShardDamage(changed=tuple(changed), extra=extra_shards(store))])
    return ShardDamage(
        *(tuple(dict.fromkeys(keys)) for keys in (damage.changed, damage.missing, damage.extra))
    )


def verdict_on_pairs(subject: Subject, worst: Sequence[Triple]) -> str:
    """Return what it means that triples are too steep for the plane that is audited.

    Of a store for the ground, the plane is charged for stretching: what exceeds it by less breaks no promise.
    """
    same = subject.promised == subject.promise or subject.promised.tolerance > 0
    return VIOLATED if same or any(map(subject.breaks, worst)) else NOT_PROVED


@contextlib.contextmanager
def plain_subject(
    subject: str | Path | NDArray[np.floating],
    points: str | Path | NDArray[np.float64] | None,
    epsilon_per_km: float,
    metric_p: float,
    tolerance: float,
) -> Iterator[Subject]:
    """Bring a plain array into a form that tasks can read, for as long as it is audited."""
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
        found = read_foreign(str(subject), None if points is None else Path(points), folder)
        xy_km, distortion = found.coordinates, None
        if not found.planar:
            projection = _projection_of(found)
            xy_km = projection.to_plane(found.coordinates)
            # For other p the metric is that of the plane.
            distortion = _distortion_of(projection, xy_km, name) if metric_p == 2 else None
        promise = Promise(epsilon_per_km, metric_p, tolerance, distortion)
        _check_extent(xy_km, promise)
        source = ArraySource.of(found.rows, xy_km, folder, None if distortion is None else found.coordinates)
        lattice_file = None
        if found.lattice is not None:
            lattice_file = folder / "lattice.npy"
            # Bands are cut across the first axis.
            longer = len(found.lattice) >= found.lattice.shape[1]
            with writing(folder):
                np.save(lattice_file, found.lattice if longer else found.lattice.T)
        yield Subject(name, source, promise, promise, distortion is None, lattice_file=lattice_file)


def _check_extent(xy_km: NDArray[np.float64], promise: Promise) -> None:
    """Refuse numbers for which float64 has no squares, or no difference larger than any bound."""
    furthest = float(np.abs(xy_km).max())
    if furthest > _LARGEST_KM:
        raise SpecError(f"--points: {furthest:g} km is no coordinate of a place")
    if not 4 * furthest * promise.epsilon_per_km + promise.tolerance < INFINITE_DIFFERENCE:
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


def _projection_of(found: ForeignMechanism) -> Projection:
    lon, lat = found.coordinates.T
    west, east = arc(lon, lon)
    return Projection.centred_on(west, float(lat.min()), east, float(lat.max()))


def _distortion_of(projection: Projection, xy_km: NDArray[np.float64], source: str) -> float:
    try:
        return projection.distortion(float(np.hypot(*xy_km.T).max()))
    except SpecError as error:
        raise SpecError(f"{source}: {error}; give x_km,y_km in a plane of your choice") from None
