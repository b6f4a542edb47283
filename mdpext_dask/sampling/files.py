"""Obfuscating a file of locations, a chunk at a time."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.files import whole_file
from mdpext_dask.readers.point_chunks import PointChunk
from mdpext_dask.readers.point_files import point_chunks
from mdpext_dask.runtime.ledger import Charges, ReleaseBudget
from mdpext_dask.runtime.sticky import StickyKey
from mdpext_dask.sampling.mechanism import Mechanism, OutsideRule, open_mechanism
from mdpext_dask.sampling.report_files import RESERVED, check_report_file, reports_into
from mdpext_dask.store import objects

# Points that are in memory together.
CHUNK_POINTS = 200_000


@dataclass(frozen=True)
class Users:
    """Whose points a file holds, and what that changes.

    Parameters
    ----------
    column
        Column or property with their names.
    keep
        Whether their names go into the output; otherwise nothing tells there whose a report is.
    sticky_key
        File with a key, for answers that repeat; see :mod:`mdpext_dask.runtime.sticky`.
    ledger, release_limit
        File that counts releases, and refuses more than the limit for each user; see
        :mod:`mdpext_dask.runtime.ledger`. A ledger that is there knows its limit.

    Raises
    ------
    SpecError
        If these do not go together.
    """

    column: str | None = None
    keep: bool = False
    sticky_key: Path | None = None
    ledger: Path | None = None
    release_limit: int | None = None

    def __post_init__(self) -> None:
        if self.release_limit is not None and self.ledger is None:
            raise SpecError("--release-limit: needs --ledger, a file in which releases are counted")
        needs = {
            "--sticky-key": self.sticky_key is not None,
            "--ledger": self.ledger is not None,
            "--keep-users": self.keep,
        }
        if self.column is None:
            for option, given in needs.items():
                if given:
                    raise SpecError(f"{option}: needs --user-column, which says whose a point is")
        elif not any(needs.values()):
            raise SpecError(f"--user-column: goes with one of {', '.join(needs)}")
        elif self.column in RESERVED:
            raise SpecError(f"--user-column: {self.column} is the name of another column of the output")


_NOBODY = Users()


def sample_file(
    store: str,
    points: Path,
    output: Path,
    outside: str = "nearest",
    *,
    remap: bool = False,
    users: Users = _NOBODY,
    place_km: float | None = None,
    chunk_points: int = CHUNK_POINTS,
) -> dict[str, Any]:
    """Draw one reported place for every point of a file, and write them in the same order.

    Files are CSV, Parquet or GeoJSON, as their names say; see :mod:`mdpext_dask.readers.point_files` and
    :mod:`mdpext_dask.sampling.report_files`. The output says the row of the input, from 0, the output, and
    lon, lat (x_km, y_km where the mechanism is planar); nothing else of the input is carried over unless it
    is asked for, since any other column may give the place away. Points keep their order, which is worth a
    thought where the order itself tells something. The output is written whole or not at all, and what waits
    in temporary files are reports only.

    Parameters
    ----------
    store
        A finished mechanism store.
    points
        Points with lon and lat or x_km and y_km; the latter where the mechanism is planar.
    output
        Where the reports go.
    outside
        Rule for points outside the grid or the region; see
        :meth:`mdpext_dask.runtime.location_sampler.Reporter.sample_points`. With ``"error"`` nothing is
        written if there is one.
    remap
        Whether to report what the store's remap says; see
        :func:`mdpext_dask.sampling.mechanism.open_mechanism`.
    users
        Whose points they are.
    place_km
        Side of coarse places, in km; see :meth:`mdpext_dask.runtime.location_sampler.Reporter.sample`.
    chunk_points
        Points that are in memory together.

    Raises
    ------
    SpecError, DataError
        If the rule is not known, the points cannot be read, or the output cannot be written.
    BudgetExceeded
        If a user would have more releases than the ledger allows; then nothing is written or charged.
    StoreError
        If the store or the ledger cannot be used.
    """
    started = time.perf_counter()
    if outside not in get_args(OutsideRule):
        raise SpecError(f"--outside: must be {', '.join(get_args(OutsideRule))}, got {outside!r}")
    _check_target(output, store, (points, users.sticky_key, users.ledger))
    mechanism = open_mechanism(store, remap=remap)
    check_report_file(output, planar=mechanism.planar)
    quantisation_km = mechanism.quantisation_km(place_km)
    sticky = None if users.sticky_key is None else StickyKey.read(users.sticky_key)
    ledger = None if users.ledger is None else ReleaseBudget(users.ledger, users.release_limit)
    places = mechanism.output_xy_km if mechanism.planar else mechanism.output_lonlat
    counted = _Counted()
    with (
        whole_file(output) as file,
        reports_into(
            file,
            output,
            places,
            planar=mechanism.planar,
            user_column=users.column if users.keep else None,
        ) as write,
        # Ends first: what has not been charged is not released.
        contextlib.nullcontext() if ledger is None else ledger.batch() as budget,
    ):
        drawing = _Drawing(
            mechanism, store, points, cast(OutsideRule, outside), users.column, sticky, budget, place_km
        )
        for rows, outputs, names in drawing.reports(chunk_points, counted):
            write(rows, outputs, names if users.keep else None)
        if counted.degrees_for_km:
            raise DataError(f"{points}: x_km,y_km look like degrees; name the columns lon,lat")
        if counted.swapped:
            raise DataError(f"{points}: longitude and latitude look swapped; check what the columns hold")
    return {
        "points": counted.reports,
        "outside": counted.outside,
        "dropped": counted.points - counted.reports,
        "outside_rule": outside,
        "remap": remap,
        "max_quantisation_km": quantisation_km,
        "key_id": None if sticky is None else sticky.key_id,
        "release_limit": None if ledger is None else ledger.limit,
        # What a user's releases of one place may add up to, at most, those before this file among them.
        "composed_epsilon_per_km": None if ledger is None else ledger.most_epsilon(mechanism.epsilon_per_km),
        "seconds": time.perf_counter() - started,
    }


@dataclass
class _Counted:
    """What has been seen so far."""

    points: int = 0
    reports: int = 0
    outside: int = 0
    # Number in the file, from 1, of the first that lies outside.
    first_outside: int | None = None
    # Whether all points so far lie outside, and would lie inside if they were degrees.
    degrees_for_km: bool = True
    # The same, if first and second coordinates changed places.
    swapped: bool = True


@dataclass(frozen=True)
class _Drawing:
    """How points are drawn for."""

    mechanism: Mechanism
    store: str
    points: Path
    outside: OutsideRule
    user_column: str | None
    sticky: StickyKey | None
    budget: Charges | None
    place_km: float | None

    def reports(
        self, chunk_points: int, counted: _Counted
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp], list[str]]]:
        """Yield rows of the input, outputs, and names of the users if there are any, and count."""
        extra = () if self.user_column is None else (self.user_column,)
        for chunk in point_chunks(self.points, weights=False, extra=extra, chunk_points=chunk_points):
            if self.mechanism.planar and not chunk.planar:
                raise DataError(
                    f"{self.points}: has columns lon,lat, but {self.store} is planar, its loss file has no "
                    "centre_lon, centre_lat; use x_km,y_km"
                )
            names = self._names(chunk)
            outputs = self._drawn(chunk, names, counted)
            kept = np.flatnonzero(outputs >= 0)
            counted.reports += len(kept)
            yield chunk.first_row + kept, outputs[kept], [names[k] for k in kept.tolist()] if names else []

    def _names(self, chunk: PointChunk) -> list[str]:
        if self.user_column is None:
            return []
        names: list[str] = chunk.extra[self.user_column].tolist()
        if "" in names:
            number = chunk.first_row + names.index("") + 1
            raise DataError(f"{self.points}: point {number}: {self.user_column} is empty")
        return names

    def _drawn(self, chunk: PointChunk, names: list[str], counted: _Counted) -> NDArray[np.intp]:
        """Return the outputs drawn for a chunk, -1 where dropped."""
        named = self.sticky is not None or self.budget is not None
        outputs, was_outside = self.mechanism.sample_points(
            chunk.coordinates,
            planar=chunk.planar,
            # A place outside is refused below, with its number in the file and not in the chunk.
            outside="drop" if self.outside == "drop" else "nearest",
            users=names if named else None,
            sticky=self.sticky,
            budget=self.budget,
            place_km=self.place_km,
        )
        counted.points += len(chunk)
        counted.outside += int(was_outside.sum())
        if counted.first_outside is None and was_outside.any():
            counted.first_outside = chunk.first_row + int(np.argmax(was_outside)) + 1
        counted.degrees_for_km = (
            counted.degrees_for_km
            and chunk.planar
            and bool(was_outside.all())
            and self.mechanism.places.holds_degrees(chunk.coordinates)
        )
        counted.swapped = (
            counted.swapped
            and bool(was_outside.all())
            and self.mechanism.places.holds_swapped(chunk.coordinates)
        )
        mistaken = counted.degrees_for_km or counted.swapped
        # Of an earlier chunk, perhaps, whose points looked like degrees.
        if self.outside == "error" and counted.first_outside and not mistaken:
            raise DataError(
                f"{self.points}: point {counted.first_outside} lies outside the grid or the region; allow it "
                "with --outside nearest or drop"
            )
        return outputs


def _check_target(output: Path, store: str, inputs: tuple[Path | None, ...]) -> None:
    """Refuse to write into the store, or over what is read."""
    target = output.resolve()
    if not objects.is_remote(store) and objects.local_path(store).resolve() in (target, *target.parents):
        raise SpecError(f"{output}: lies inside the store")
    for path in inputs:
        if path is None:
            continue
        # A ledger that is yet to be made has a name only.
        if path.resolve() == target or (target.is_file() and path.exists() and target.samefile(path)):
            raise SpecError(f"{output}: is {path} itself, which would be lost")
