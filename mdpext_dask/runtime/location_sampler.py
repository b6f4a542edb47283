"""From a true place to a reported one, wherever rows are read from, with NumPy alone.

A location is first moved to its nearest record. Locations outside the grid, anywhere on Earth, are moved to
its border first, in a way that increases no distance between two of them (PROOF.md, section 3).
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import (
    BudgetExceeded,
    DataError,
    GuaranteeViolation,
    ImplausibleWarning,
    SpecError,
    as_number,
    first_line,
    shown,
)
from mdpext_dask.problem.grid import Array, Grid, coarse_radius_km, coarse_steps
from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.problem.plausible import doubt_on_accuracy, doubt_on_place
from mdpext_dask.problem.projection import Projection, folded
from mdpext_dask.readers.longitudes import check_degrees
from mdpext_dask.runtime.integer_sampling import pick, sample_cumulative, uniform_below
from mdpext_dask.runtime.random_bits import Words
from mdpext_dask.runtime.sticky import StickyKey, encoded_users, release_tags, sticky_below, whole_number

if TYPE_CHECKING:
    from mdpext_dask.runtime.ledger import Charges, HeldLedger

# A coordinate that may be left out.
Given = float | None
# What a batch does with points outside the grid, or outside the region.
OutsideRule = Literal["nearest", "drop", "error"]
# From the positions of some of the draws, shape (n,), and the totals of their rows, uint64 of shape (n,): a
# number below each total.
Numbers = Callable[[NDArray[np.intp], NDArray[np.uint64]], NDArray[np.uint64]]

# Attribute of stores and entry of cities with the identity of the mechanism.
_IDENTITY = "mechanism_sha256"
_MANY = "many places at once, for which there is sample_points"
# Share of the disc's radius up to which rounding cannot decide whether a place is moved into the disc.
_WELL_INSIDE = 0.999
# What the two columns of a table may be called, in lower case: where places are in degrees, and in km.
_COLUMNS = ((("lon", "lng", "long", "longitude"), ("lat", "latitude")), (("x_km",), ("y_km",)))


class Places:
    """The plane and the lattice of a mechanism.

    Parameters
    ----------
    source
        What to name in errors.
    grid
        The records.
    kept
        Source cells of the region, bool of shape (cells_x, cells_y).
    projection
        From degrees to the plane; None where places are x and y only.
    metric_p
        Exponent of the metric.
    """

    def __init__(
        self, source: str, grid: Grid, kept: NDArray[np.bool_], projection: Projection | None, metric_p: float
    ) -> None:
        self.source, self.metric_p = source, metric_p
        self.grid, self.projection = grid, projection
        self.kept, self.all_kept = kept, bool(kept.all())

    def one(
        self, lon: float | None, lat: float | None, x_km: float | None, y_km: float | None
    ) -> tuple[float, float]:
        """Return one place in the plane, x and y in km; not finite next to the antipode.

        Raises
        ------
        SpecError
            If it is not given in exactly one way, by numbers in range.
        """
        if x_km is None and y_km is None and lon is not None and lat is not None:
            east, north = as_number(lon), as_number(lat)
            if not (abs(east) <= 180 and abs(north) <= 90):
                raise SpecError(f"lon, lat: must be degrees, got {_one_each(lon, lat)}")
            return self._on_earth.point_to_plane(east, north)
        if lon is None and lat is None and x_km is not None and y_km is not None:
            x, y = as_number(x_km), as_number(y_km)
            if not (math.isfinite(x) and math.isfinite(y)):
                raise SpecError(f"x_km, y_km: must be finite, got {_one_each(x_km, y_km)}")
            return x, y
        many = f"; got {_MANY}" if any(map(_is_many, (lon, lat, x_km, y_km))) else ""
        raise SpecError(f"a place is given either by lon and lat or by x_km and y_km{many}")

    def many(self, coordinates: NDArray[Any], *, planar: bool) -> NDArray[np.float64]:
        """Return places in the plane, float64 of shape (n, 2), in km; not finite next to the antipode.

        Parameters
        ----------
        coordinates
            Numbers of shape (n, 2): lon and lat in degrees, or x and y in km.
        planar
            Whether they are x and y.

        Raises
        ------
        DataError
            If they are not finite numbers, two for each place, in range.
        SpecError
            If they are degrees and the mechanism is planar, or columns of a table in another order.
        """
        _check_columns(coordinates, planar=planar)
        try:
            found = np.asarray(coordinates)
        except ValueError as error:
            raise DataError(f"points: coordinates must be numbers: {first_line(error)}") from None
        # Numbers in texts are not taken for numbers.
        if found.dtype.kind not in "fiu" or found.shape[1:] != (2,):
            given = _what_it_is(coordinates, found, "x_km, y_km" if planar else "lon, lat")
            raise DataError(f"points: coordinates must be numbers, two for each place, got {given}")
        if not np.isfinite(found).all():
            raise DataError("points: coordinates must be finite numbers")
        places = found.astype(np.float64, copy=False)
        if planar:
            return places
        check_degrees(places, "points")
        return self._on_earth.to_plane(places)

    def record(self, xy_km: tuple[float, float], place_km: float | None) -> tuple[int, int]:
        """Return the record (i, j) to report one place from; see :meth:`records`."""
        # Where nothing is moved, in a tenth of the time.
        if not math.hypot(*xy_km) < _WELL_INSIDE * self.grid.box.radius_km:
            xy_km = tuple(self._folded(np.array([xy_km]))[0].tolist())
        return self.grid.record_at(*xy_km, self._steps(place_km))

    def records(self, xy_km: Array, place_km: float | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the flat indices of the records to report from, and whether the nearest is in the region.

        Parameters
        ----------
        xy_km
            Places, float64 of shape (n, 2), in km, from :meth:`many`; anywhere, also where the plane has no
            place.
        place_km
            Side of coarse places, in km; None where places are not made coarse.

        Raises
        ------
        SpecError
            If that is not a positive number.
        """
        near, inside = self._folded(xy_km), self.grid.box.contains(xy_km)
        i, j, _ = self.grid.nearest_records(near)
        if not self.all_kept:
            inside &= self.grid.are_vertices_of(self.kept, i, j)
        if place_km is not None:
            i, j = self.grid.coarse_records(near, self._steps(place_km))
        return np.asarray(i * self.grid.shape[1] + j, dtype=np.int64), inside

    def quantisation_km(self, place_km: float | None) -> float:
        """Return the largest distance a place in the grid is moved, in km."""
        return coarse_radius_km(self._steps(place_km), self.grid.spacing_km, self.metric_p)

    def doubt(self, xy_km: tuple[float, float], lon: float | None, lat: float | None) -> str:
        """Return what looks wrong about a place; "" if its nearest record is in the region.

        Parameters
        ----------
        xy_km
            The place, from :meth:`one`.
        lon, lat
            The same in degrees, if it was given so.
        """
        grid, (x, y) = self.grid, xy_km
        box, factor = grid.box, grid.factor
        # First what most places are, in a hundredth of the time.
        if box.west_km <= x <= box.east_km and box.south_km <= y <= box.north_km:
            if self.all_kept:
                return ""
            i, j = grid.record_at(x, y)
            # The cells that the record is a vertex of, as in `are_vertices_of`.
            across = slice(max(-(-i // factor) - 1, 0), i // factor + 1)
            along = slice(max(-(-j // factor) - 1, 0), j // factor + 1)
            if self.kept[across, along].any():
                return ""
        xy = np.array([xy_km])
        if self.records(xy, None)[1][0]:
            return ""
        lonlat = None if lon is None else np.array([[lon, lat]], dtype=np.float64)
        return doubt_on_place(xy, lonlat, self.grid, self.projection)

    @property
    def _on_earth(self) -> Projection:
        if self.projection is None:
            what = f"{self.source} is planar, its loss file has no centre_lon, centre_lat"
            raise SpecError(f"lon, lat: {what}; give x_km, y_km")
        return self.projection

    def _folded(self, xy_km: NDArray[np.float64]) -> NDArray[np.float64]:
        """Move places, however they were given, so that no distance grows beyond what ε was charged for."""
        if self.projection is None:
            return xy_km
        return folded(xy_km, self.grid.box.radius_km, self.metric_p)

    def _steps(self, place_km: float | None) -> int:
        return 1 if place_km is None else coarse_steps(place_km, self.grid.spacing_km)


class Reporter(ABC):
    """Samples from rows; a subclass says where they are.

    Parameters
    ----------
    places
        From places to records.
    attributes
        What is promised and proved: ``epsilon_per_km``, ``epsilon_certified``, ``metric_p`` and
        ``quantisation_km``; and ``mechanism_sha256``, which older stores and cities do not have.
    output_lonlat, output_xy_km
        Where the outputs are, float64 of shape (K, 2).
    remap
        What is reported instead of each output, shape (K,); without, the output itself.

    Raises
    ------
    GuaranteeViolation
        If the identity is not the one that was written when the mechanism was finished.
    """

    def __init__(
        self,
        places: Places,
        attributes: Mapping[str, Any],
        output_lonlat: Array,
        output_xy_km: Array,
        remap: NDArray[np.intp] | None,
    ) -> None:
        self.places, self._attributes = places, attributes
        self._output_lonlat, self._output_xy_km = output_lonlat, output_xy_km
        self._reported = output_xy_km if self.planar else output_lonlat
        self.remapped = remap is not None
        self._remap = np.arange(len(output_xy_km)) if remap is None else remap
        recorded = attributes.get(_IDENTITY)
        if recorded is not None and recorded != self.mechanism_sha256:
            raise GuaranteeViolation(
                f"{places.source}: its grid, plane, outputs or promise are not those that it was finished "
                "with; restore it, or make it anew (mdpext run --overwrite, mdpext export)"
            )

    @property
    @abstractmethod
    def content_sha256(self) -> str:
        """Digest of the certified bytes."""

    @cached_property
    def mechanism_sha256(self) -> str:
        """Identity of the mechanism, which sticky answers and ledgers go by; a remap is no part of it."""
        return mechanism_sha256(
            self.content_sha256,
            self._attributes,
            (self.places.grid, self.places.projection),
            self.places.kept,
            (self._output_xy_km, self._output_lonlat),
        )

    @abstractmethod
    def _cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        """Return the cumulative weights of the record (i, j), uint64 of shape (K,)."""

    @abstractmethod
    def _draw_many(self, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
        """Draw one output for each of many records, given by flat indices, shape (n,)."""

    @property
    def epsilon_per_km(self) -> float:
        """Promised ε, in 1/km, for distance on the ground; of a planar mechanism, in the plane."""
        return float(self._attributes["epsilon_per_km"])

    @property
    def epsilon_certified(self) -> float:
        """Certified ε, in 1/km, for distance in the plane."""
        return float(self._attributes["epsilon_certified"])

    @property
    def max_quantisation_km(self) -> float:
        """Largest distance ρ = ‖(h/2, h/2)‖_p, in km, from a location in the grid to its record.

        Two locations at distance d are told apart no better than at ε (d + 2 ρ).
        """
        return float(self._attributes["quantisation_km"])

    @property
    def metric_p(self) -> float:
        """Exponent of the metric."""
        return self.places.metric_p

    def quantisation_km(self, place_km: float | None = None) -> float:
        """Return ρ', in km: :attr:`max_quantisation_km` where places are first made coarse.

        Parameters
        ----------
        place_km
            As for :meth:`sample`; without, places are not made coarse.

        Raises
        ------
        SpecError
            If it is not a positive number.
        """
        finest = self.places.quantisation_km(None)
        # What ρ has on top of that, such as the error of another projection, ρ' has too.
        return self.places.quantisation_km(place_km) + max(self.max_quantisation_km - finest, 0.0)

    @property
    def output_lonlat(self) -> Array:
        """Outputs, lon and lat in degrees, float64 of shape (K, 2); NaN where the mechanism is planar."""
        return self._output_lonlat.copy()

    @property
    def output_xy_km(self) -> Array:
        """Outputs in the plane, x and y in km, float64 of shape (K, 2)."""
        return self._output_xy_km.copy()

    @property
    def planar(self) -> bool:
        """Whether places and reports are x and y in km, with no longitude and latitude."""
        return self.places.projection is None

    def sample(
        self,
        lon: float | None = None,
        lat: float | None = None,
        *,
        x_km: float | None = None,
        y_km: float | None = None,
        n: int = 1,
        user: str | None = None,
        sticky: StickyKey | None = None,
        budget: "Charges | None" = None,
        place_km: float | None = None,
        accuracy_m: float | None = None,
        entropy_for_tests: Words | None = None,
    ) -> Array:
        """Return `n` independent reported places for one true place, float64 of shape (n, 2).

        They are lon and lat in degrees; of a planar mechanism, x and y in km. Each is a release of its own:
        n of them together are n ε, not ε.

        Parameters
        ----------
        lon, lat, x_km, y_km
            The place, as for :meth:`row`.
        n
            How many; with `sticky` there is one answer.
        user
            Whose place it is, for `sticky` and `budget`.
        sticky
            Key for answers that repeat.
        budget
            Ledger that is charged before anything is drawn.
        place_km
            Side, in km, of coarse places, to which places are moved first, so that a place that wobbles stays
            one place unless it crosses a border. :meth:`quantisation_km` says what that costs.
        accuracy_m
            How well the place is known, in m, as devices say; a warning tells if it is worse than 1/ε.
        entropy_for_tests
            Random bits that can be predicted, for tests only.

        Raises
        ------
        SpecError
            If `n` is not a whole number from 1 to 10^9, the place is not given in one way, `accuracy_m` is no
            distance, or arguments exclude each other.
        BudgetExceeded
            If the user has too few releases left.
        StoreError
            If the row cannot be read, or the ledger cannot be written.
        """
        n = whole_number("n", n)
        if sticky is not None and n > 1:
            raise SpecError("n: a sticky answer is always the same one")
        users = _named(None if user is None else [user], 1, sticky, budget)
        place = self.places.one(lon, lat, x_km, y_km)
        if doubt := self.places.doubt(place, lon, lat):
            warnings.warn(f"{doubt}; reported from the nearest record", ImplausibleWarning, stacklevel=2)
        if accuracy_m is not None and (doubt := doubt_on_accuracy(accuracy_m, self.epsilon_per_km)):
            warnings.warn(doubt, ImplausibleWarning, stacklevel=2)
        i, j = self.places.record(place, place_km)
        cumulative = self._cumulative(i, j)
        record = np.array([i * self.places.grid.shape[1] + j])
        if not self._charge(users * n, record.repeat(n), sticky, budget).all():
            raise BudgetExceeded(f"user: has too few releases left for {n} more; nothing is released")
        if sticky is None:
            drawn = sample_cumulative(cumulative, n, entropy_for_tests=entropy_for_tests)
        else:
            below = sticky_below(sticky, self.mechanism_sha256, users, record, cumulative[-1:])
            drawn = pick(cumulative, below)
        return np.asarray(self._reported[self._remap[drawn]])

    def sample_points(
        self,
        coordinates: Array,
        *,
        planar: bool = False,
        outside: OutsideRule = "nearest",
        users: Sequence[str] | None = None,
        sticky: StickyKey | None = None,
        budget: "Charges | HeldLedger | None" = None,
        place_km: float | None = None,
        entropy_for_tests: Words | None = None,
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
            reports from the nearest record of the whole grid (the guarantee holds), ``"drop"`` gives -1
            (which reveals that the place is outside), ``"error"`` refuses the batch.
        users
            Whose places they are, n names, for `sticky` and `budget`.
        sticky, budget, place_km, entropy_for_tests
            As for :meth:`sample`. The batch is charged before anything is drawn, as a whole or not at all;
            by a ledger that is held, every place by itself.

        Returns
        -------
        outputs
            Output numbers, shape (n,); -1 where dropped, and where a held ledger refuses.
        was_outside
            Which places lie outside, bool of shape (n,).

        Raises
        ------
        DataError
            If a place is outside and the rule is ``"error"``, or coordinates are not finite numbers, two for
            each place.
        SpecError
            If the rule is unknown, places are in degrees and the mechanism is planar, or arguments exclude
            each other.
        BudgetExceeded
            If a user has too few releases left.
        StoreError
            If rows cannot be read, or the ledger cannot be written.
        """
        if outside not in get_args(OutsideRule):
            raise SpecError(f"outside: must be {', '.join(get_args(OutsideRule))}, got {outside!r}")
        return self.sample_places(
            self.places.many(coordinates, planar=planar),
            outside=outside,
            users=users,
            sticky=sticky,
            budget=budget,
            place_km=place_km,
            entropy_for_tests=entropy_for_tests,
        )

    def sample_places(
        self,
        xy_km: Array,
        *,
        outside: OutsideRule = "nearest",
        users: Sequence[str] | None = None,
        sticky: StickyKey | None = None,
        budget: "Charges | HeldLedger | None" = None,
        place_km: float | None = None,
        entropy_for_tests: Words | None = None,
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Draw one output for each of many places that :meth:`Places.many` has put into the plane.

        For callers who need to know where places are as well: the rest is as for :meth:`sample_points`.
        """
        xy = xy_km
        names = _named(users, len(xy), sticky, budget)
        records, inside = self.places.records(xy, place_km)
        if outside == "error" and not inside.all():
            place = "grid" if self.places.all_kept else "region"
            raise DataError(
                f"points: {int((~inside).sum())} of {len(inside)} lie outside the {place}, the first in "
                f"row {int(np.argmin(inside)) + 1}; allow it with --outside nearest or drop"
            )
        wanted = np.flatnonzero(inside) if outside == "drop" else np.arange(len(xy))
        records = records[wanted]
        names = [names[k] for k in wanted.tolist()] if names else []
        charged = self._charge(names, records, sticky, budget)
        if not charged.all():
            wanted, records = wanted[charged], records[charged]
            names = [name for name, paid in zip(names, charged.tolist(), strict=True) if paid]

        def numbers(part: NDArray[np.intp], totals: NDArray[np.uint64]) -> NDArray[np.uint64]:
            if sticky is None:
                return uniform_below(totals, entropy_for_tests=entropy_for_tests)
            some = [names[k] for k in part.tolist()]
            return sticky_below(sticky, self.mechanism_sha256, some, records[part], totals)

        outputs = np.full(len(xy), -1, dtype=np.intp)
        outputs[wanted] = self._remap[self._draw_many(records, numbers)]
        return outputs, ~inside

    def _charge(
        self,
        users: list[str],
        records: NDArray[np.int64],
        sticky: StickyKey | None,
        budget: "Charges | HeldLedger | None",
    ) -> NDArray[np.bool_]:
        """Charge for the records, and return which of them may be released."""
        if budget is not None and len(records):
            tags = None if sticky is None else release_tags(sticky, self.mechanism_sha256, users, records)
            if hasattr(budget, "charge_each"):
                return budget.charge_each(users, self.epsilon_per_km, tags)
            budget.charge_many(users, self.epsilon_per_km, tags)
        return np.ones(len(records), dtype=np.bool_)

    def _summary(self) -> str:
        rows, columns = self.places.grid.shape
        return (
            f"{rows} x {columns} records, {len(self._remap)} outputs{', remapped' if self.remapped else ''}, "
            f"epsilon {self.epsilon_per_km:g}/km (certified {self.epsilon_certified:.6g})"
        )


def _check_columns(table: Any, *, planar: bool) -> None:
    """Refuse tables and columns whose names say that they hold something else than longitude and latitude.

    Raises
    ------
    SpecError
        With the names.
    """
    names = getattr(table, "columns", None)
    beside = names is None and isinstance(table, list | tuple) and len(table) == len(_COLUMNS)
    if beside:  # two places, or two columns
        names = [getattr(part, "name", None) for part in table]
    if names is None or len(names) != len(_COLUMNS):
        return
    said = [name.casefold() if isinstance(name, str) else "" for name in names]
    wanted = _COLUMNS[planar]
    known = {column for pair in _COLUMNS for alike in pair for column in alike}
    if any(name in known and (beside or name not in alike) for name, alike in zip(said, wanted, strict=True)):
        first, second = (alike[0] for alike in wanted)
        given = ", ".join(map(str, names))
        raise SpecError(
            f"points: are columns {given}; give a table of two columns, {first} and then {second}"
        )


def _is_many(value: object) -> bool:
    """Whether an argument is a column, an array or a table."""
    return hasattr(value, "__len__") and not isinstance(value, str)


def _one_each(first: object, second: object) -> str:
    """Return what was given for the two coordinates of one place, in words."""
    return _MANY if _is_many(first) or _is_many(second) else f"{shown(first)}, {shown(second)}"


def _what_it_is(given: object, found: NDArray[Any], columns: str) -> str:
    """Return what was given for many places, in words: its columns, or its type and shape."""
    names = getattr(given, "columns", None)
    if names is not None and found.shape[1:] != (2,):
        return f"a table with columns {', '.join(map(str, names))}; give the two of the place, {columns}"
    hint = f"; give an array of shape (n, 2), or a table of {columns}" if found.ndim == 1 else ""
    return f"{found.dtype}{found.shape}{hint}"


def _named(users: Sequence[str] | None, points: int, sticky: StickyKey | None, budget: object) -> list[str]:
    """Return the users of points; none without a key or a ledger.

    Raises
    ------
    SpecError
        If they are missing, not needed, not as many as points, or no texts.
    """
    if sticky is None and budget is None:
        if users is not None:
            raise SpecError("user: goes with a sticky key or a release budget")
        return []
    if users is None:
        raise SpecError("user: is needed with a sticky key or a release budget")
    if isinstance(users, str) or len(users) != points:
        raise SpecError(f"users: must be {points}, one for each point, got {len(users)}")
    names = list(users)
    encoded_users(names)
    return names
