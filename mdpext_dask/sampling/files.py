"""Obfuscating a file of locations, a chunk at a time."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.files import check_new, whole_file
from mdpext_dask.problem.grid import Array
from mdpext_dask.problem.plausible import AccuraciesSeen, PointsSeen
from mdpext_dask.readers.point_chunks import BY_NAME, PointChunk, PointColumns
from mdpext_dask.readers.point_files import format_of, point_chunks
from mdpext_dask.readers.tables import shown
from mdpext_dask.runtime.ledger import ReleaseBudget
from mdpext_dask.runtime.signatures import Trusted, public_key_of
from mdpext_dask.runtime.sticky import StickyKey
from mdpext_dask.sampling.mechanism import OutsideRule, open_mechanism
from mdpext_dask.sampling.report_files import RESERVED, check_report_file, marked, reports_into
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import ROOT_KEY

# Points that are in memory together. Each such batch may read all of the store.
CHUNK_POINTS = 1_000_000
_STANDARD_INPUT = Path("/dev/stdin")


@dataclass(frozen=True)
class Users:
    """The users whose points a file holds.

    Parameters
    ----------
    column
        Column or property with their names.
    keep
        Whether their names are written into the output; otherwise it does not say whose a report is. In CSV
        an apostrophe is put before names that a spreadsheet would take for formulas.
    sticky_key
        File with a key, for answers that repeat; see :mod:`mdpext_dask.runtime.sticky`.
    ledger, release_limit
        File that counts releases, and refuses more than the limit for each user; see
        :mod:`mdpext_dask.runtime.ledger`. An existing ledger has its limit in it.

    Raises
    ------
    SpecError
        If one of these needs another that is missing.
    """

    column: str | None = None
    keep: bool = False
    sticky_key: Path | None = None
    ledger: Path | None = None
    release_limit: int | None = None

    def __post_init__(self) -> None:
        if self.release_limit is not None and self.ledger is None:
            raise SpecError("--release-limit: needs --ledger, a file in which releases are counted")
        options = {"--sticky-key": self.sticky_key, "--ledger": self.ledger, "--keep-users": self.keep}
        given = [option for option, value in options.items() if value]
        if self.column is None:
            if given:
                raise SpecError(f"{given[0]}: needs --user-column, which says whose a point is")
        elif not given:
            raise SpecError(f"--user-column: goes with one of {', '.join(options)}")
        elif self.column in RESERVED:
            raise SpecError(f"--user-column: {self.column} is the name of another column of the output")


_NOBODY = Users()


def sample_file(
    store: str,
    points: Path,
    output: Path,
    outside: str | None = None,
    *,
    remap: bool | None = None,
    users: Users = _NOBODY,
    columns: PointColumns = BY_NAME,
    place_km: float | None = None,
    accuracy_column: str | None = None,
    trusted_key: Trusted | None = None,
    chunk_points: int = CHUNK_POINTS,
    verify: bool = False,
    overwrite: bool = False,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Draw one reported place for every point of a file, and write them in the same order.

    Files are CSV, Parquet or GeoJSON, as their names say, and points also GeoPackages; see
    :mod:`mdpext_dask.readers.point_files` and :mod:`mdpext_dask.sampling.report_files`. A report is the row
    of the input, from 0, the output, and lon, lat (x_km, y_km where the mechanism is planar). Nothing else of
    the input is copied, except names of users on request, since any other column may give the place away.
    Points keep their order: shuffle them first if the order says something about places. The output is
    written whole or not at all, and temporary files hold only reports.

    Parameters
    ----------
    store
        A finished mechanism store.
    points
        Points with lon and lat or x_km and y_km; the latter where the mechanism is planar. ``-`` is standard
        input, as CSV.
    output
        Where the reports go. ``-`` is standard output, as CSV.
    outside
        Rule for points outside the grid or the region; see
        :meth:`mdpext_dask.runtime.location_sampler.Reporter.sample_points`. With ``"error"`` nothing is
        written if there is one. By default it is ``"nearest"``, and nothing is written if all points lie
        outside.
    remap
        Whether to report what the store's remap says; default: where it has one. See
        :func:`mdpext_dask.sampling.mechanism.open_mechanism`.
    columns
        Which columns of the points hold longitude and latitude, where their names do not say so.
    place_km
        Side of coarse places, in km; see :meth:`mdpext_dask.runtime.location_sampler.Reporter.sample`.
    accuracy_column
        Column or property that says how well a point is known, in m; a note says how many are known less well
        than 1/ε. Cells may be empty.
    trusted_key
        Public key that must have signed the store; see :func:`mdpext_dask.sampling.mechanism.open_mechanism`.
    chunk_points
        Points that are in memory together.
    verify
        Whether to compare all shards with their receipts before the first draw; see
        :func:`mdpext_dask.sampling.mechanism.open_mechanism`.
    overwrite
        Whether the output may be there already, and is replaced.
    observer
        Is told what looks wrong about the points.

    Raises
    ------
    SpecError, DataError
        If the rule is unknown, the points cannot be read, are hardly those that were meant, or the output
        cannot be written.
    BudgetExceeded
        If a user would have more releases than the ledger allows; then nothing is written or charged.
    StoreError
        If the store or the ledger cannot be used.
    GuaranteeViolation
        If the store is refused, or is not what was certified.
    """
    started = time.perf_counter()
    if outside is not None and outside not in get_args(OutsideRule):
        raise SpecError(f"--outside: must be {', '.join(get_args(OutsideRule))}, got {outside!r}")
    if str(points) == "-":
        points = _STANDARD_INPUT
    _check_target(output, store, (points, users.sticky_key, users.ledger))
    check_new(output, overwrite=overwrite)
    _check_order(store, points)
    mechanism = open_mechanism(store, verify=verify, remap=remap, trusted_key=trusted_key)
    check_report_file(output, planar=mechanism.planar)
    quantisation_km = mechanism.quantisation_km(place_km)
    sticky = None if users.sticky_key is None else StickyKey.read(users.sticky_key)
    ledger = None if users.ledger is None else ReleaseBudget(users.ledger, users.release_limit)
    places = mechanism.output_xy_km if mechanism.planar else mechanism.output_lonlat
    extra = tuple(dict.fromkeys(name for name in (users.column, accuracy_column) if name is not None))
    # Whose places these are, if the file says so and the caller does not.
    columns = replace(columns, users=users.column is None)
    grid, projection = mechanism.places.grid, mechanism.places.projection
    area = "grid" if mechanism.places.all_kept else "region"
    counts, seen, releases = _Counts(), PointsSeen(grid, projection), _Releases()
    accuracies = AccuraciesSeen(mechanism.epsilon_per_km)
    with (
        whole_file(output) as file,
        reports_into(file, output, places, mechanism.planar, users.column if users.keep else None) as write,
        # Ends first: what has not been charged is not released.
        contextlib.nullcontext() if ledger is None else ledger.batch() as budget,
    ):
        for chunk in point_chunks(
            points, weights=False, extra=extra, columns=columns, chunk_points=chunk_points
        ):
            if mechanism.planar and not chunk.planar:
                raise DataError(
                    f"{points}: has columns lon,lat, but {store} is planar, its loss file has no "
                    "centre_lon, centre_lat; use x_km,y_km"
                )
            names = _names(chunk, users.column, points)
            if accuracy_column is not None:
                accuracies.add(_accuracies(chunk, accuracy_column, points), len(chunk))
            xy_km = mechanism.places.many(chunk.coordinates, planar=chunk.planar)
            outputs, was_outside = mechanism.sample_places(
                xy_km,
                # A place outside is refused below, with its number in the file and not in the chunk.
                outside="drop" if outside == "drop" else "nearest",
                users=None if sticky is None and budget is None else names,
                sticky=sticky,
                budget=budget,
                place_km=place_km,
            )
            first, planar = chunk.first_row, chunk.planar
            seen.add(chunk.coordinates, xy_km, was_outside, planar=planar, first_row=first)
            if counts.first_outside is None and was_outside.any():
                counts.first_outside = first + int(np.argmax(was_outside)) + 1
            # Also one of an earlier chunk, whose points looked like degrees.
            if outside == "error" and counts.first_outside and not (seen.all_degrees or seen.all_swapped):
                raise DataError(
                    f"{points}: point {counts.first_outside} lies outside the grid or the region; allow it "
                    "with --outside nearest or drop"
                )
            if users.column is None:
                releases.add({name: cells for name, cells in chunk.extra.items() if name != accuracy_column})
            kept = np.flatnonzero(outputs >= 0)
            counts.reports += len(kept)
            named = [names[k] for k in kept.tolist()] if users.keep else None
            if named is not None and format_of(output) == "csv":
                counts.marked += sum(marked(name) != name for name in named)
            write(first + kept, outputs[kept], named)
        if seen.all_degrees:
            raise DataError(f"{points}: x_km,y_km look like degrees; name the columns lon,lat")
        if seen.all_swapped:
            raise DataError(f"{points}: longitude and latitude look swapped; check what the columns hold")
        if seen.all_outside and outside is None:
            raise DataError(
                f"{points}: {seen.said(area)}; check the columns and the store, or report from the nearest "
                "records with --outside nearest"
            )
    notes = seen.notes(str(points), area) + releases.notes(str(points))
    if said := accuracies.said():
        notes += (f"{points}: {said}",)
    for note in notes:
        observer(Note(note))
    return {
        "points": counts.reports,
        "outside": seen.outside,
        "dropped": seen.count - counts.reports,
        "outside_rule": outside or "nearest",
        "notes": list(notes),
        "remap": mechanism.remapped,
        # Names that begin like a formula; in CSV an apostrophe stands before them.
        **({"users_marked": counts.marked} if users.keep else {}),
        "verified": verify or trusted_key is not None,
        "max_quantisation_km": quantisation_km,
        "signed_by": None if trusted_key is None else public_key_of(trusted_key),
        "key_id": None if sticky is None else sticky.key_id,
        "release_limit": None if ledger is None else ledger.limit,
        # Most that a user's releases of one place can add up to, those before this file included.
        "composed_epsilon_per_km": None if ledger is None else ledger.most_epsilon(mechanism.epsilon_per_km),
        "seconds": time.perf_counter() - started,
    }


@dataclass
class _Counts:
    """What has been written so far, and the first point that lies outside, by its number from 1."""

    reports: int = 0
    marked: int = 0
    first_outside: int | None = None


@dataclass
class _Releases:
    """How often each user is in a file whose column of users nobody has named."""

    column: str = ""
    of_user: Counter[str] = field(default_factory=Counter)

    def add(self, extra: Mapping[str, NDArray[np.object_]]) -> None:
        import pandas as pd

        for self.column, names in extra.items():
            # A third of the time that a Counter takes by itself.
            codes, found = pd.factorize(names)
            self.of_user.update(dict(zip(found.tolist(), np.bincount(codes).tolist(), strict=True)))

    def notes(self, source: str) -> tuple[str, ...]:
        del self.of_user[""]
        user, most = max(self.of_user.items(), key=itemgetter(1), default=("", 0))
        if most <= 1:
            return ()
        return (
            f"{source}: every row is a release of its own: {shown(user)} appears {most:,} times in column "
            f"{self.column}; see --user-column with --sticky-key or --ledger",
        )


def _names(chunk: PointChunk, column: str | None, points: Path) -> list[str]:
    """Return whose points these are; none without a column of users."""
    names: list[str] = [] if column is None else chunk.extra[column].tolist()
    if "" in names:
        number = chunk.first_row + names.index("") + 1
        raise DataError(f"{points}: point {number}: {column} is empty")
    return names


def _accuracies(chunk: PointChunk, column: str, points: Path) -> Array:
    """Return how well points are known, in m, float64 of shape (n,); NaN where a cell is empty."""
    found = np.full(len(chunk), np.nan)
    for k, cell in enumerate(chunk.extra[column].tolist()):
        if cell.strip():
            try:
                found[k] = float(cell)
            except ValueError:
                found[k] = -1.0
            if not (math.isnan(found[k]) or 0 <= found[k] < math.inf):  # tables write NaN for none
                raise DataError(
                    f"{points}: point {chunk.first_row + k + 1}: {column} must be a number of metres from 0, "
                    f"got {shown(cell)}"
                )
    return found


def _check_order(store: str, points: Path) -> None:
    """Refuse a store and points that have changed places, and points that are a store."""
    if (points / ROOT_KEY).is_file():
        swapped = not objects.is_remote(store) and objects.local_path(store).is_file()
        what = (
            f"the store comes before the points: mdpext sample {points} {store}" if swapped else "give a file"
        )
        raise SpecError(f"{points}: is a store, where points are expected; {what}")


def _check_target(output: Path, store: str, inputs: tuple[Path | None, ...]) -> None:
    """Refuse to write into the store, or over what is read."""
    target = output.resolve()
    if not objects.is_remote(store) and objects.local_path(store).resolve() in (target, *target.parents):
        raise SpecError(f"{output}: lies inside the store")
    for path in filter(None, inputs):
        # A new ledger has a name and no file yet.
        if path.resolve() == target or (target.is_file() and path.exists() and target.samefile(path)):
            raise SpecError(f"{output}: is {path} itself, which would be lost")
