"""Strata of the pairs of records that lie anywhere in the plane.

Near pairs are found by a tree of places, listed and counted; there are few enough of them. A pair is near if
the distance that all strata go by says so: the tree looks a little further. All others are far, and are drawn
by rejection from all pairs by the same distance, which is quick as most pairs are far. So every pair is in
one stratum, and what is drawn is what was counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.pairs.designs import (
    Design,
    Stratum,
    distances_km,
    geometric_cuts,
    offset_at,
    strata_between,
)
from mdpext_dask.errors import SpecError

# Pairs of places to list: some 50 MB while they are sorted.
_LISTED_PAIRS = 1_000_000
# Pairs of the first stratum for each place: on a lattice, its neighbours along both axes.
_NEIGHBOURS = 2
# Far pairs of so many records are counted one by one, in a few seconds.
_COUNTED_RECORDS = 10_000
# Share of all pairs that a far stratum needs if there are several, so that rejection is quick.
_LEAST_SHARE = 1 / 50
_PAIRS_AT_ONCE = 1_000_000
# By how much the tree looks further, relatively, and its radius is reduced while it would find too many.
_LARGEST_TREE_EXPONENT = 8.0
_FURTHER = 1 + 1e-9
_REDUCED = 0.9
# Places whose neighbours tell how far to look.
_PROBES = 64


@dataclass(frozen=True)
class _PointTables:
    """The records by places, and the near pairs of places by distance.

    Parameters
    ----------
    members
        Records, those of one place together, int64 of shape (N,).
    starts, sizes
        Where each place's records start in `members` and how many there are, int64 of shape (places,).
    first, second
        Near pairs of places, int64 of shape (pairs of places,); of a place with itself if it has several
        records.
    apart_km
        Their distances, ascending.
    until
        Pairs of records up to and with each, int64.
    """

    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    apart_km: NDArray[np.float64]
    until: NDArray[np.int64]


class PointsDesign(Design):
    """Pairs of records anywhere in the plane; several may be in the same place, at distance 0.

    Parameters
    ----------
    points_km
        The N ≥ 2 records, float64 of shape (N, 2), in km.
    p
        Exponent of the metric, in [1, ∞].
    near_km
        Upper ends of the near strata, ascending, in km; the pairs of places within the last of them are
        listed.
    far_km
        Distances between far strata, ascending and beyond the near ones, in km. With any, all pairs are
        looked at. A stratum that would be empty is left out.

    Raises
    ------
    SpecError
        If there are fewer than 2 records.
    """

    def __init__(
        self,
        points_km: NDArray[np.float64],
        p: float,
        near_km: Sequence[float] = (),
        far_km: Sequence[float] = (),
    ) -> None:
        if len(points_km) < 2:
            raise SpecError(f"--method: pairs are drawn from at least 2 records, got {len(points_km)}")
        # Adding 0 makes one number of 0 and -0, so that they are the same place.
        points = np.asarray(points_km, dtype=np.float64) + 0.0
        self._points, self._p, self._near_km = points, p, tuple(near_km)
        # No distance is larger than that of two corners of the rectangle around all records.
        edges_km = (*near_km, *far_km, float(distances_km(*np.ptp(points, axis=0), p=p)))
        every = len(points) * (len(points) - 1) // 2
        pairs = [int(n) for n in np.diff([0, *self._count_near(), *self._count_within(far_km), every])]
        self.strata = strata_between(edges_km, pairs)

    @classmethod
    def stratified(cls, points_km: NDArray[np.float64], p: float) -> "PointsDesign":
        """Return the design with strata by distance.

        Up to a million pairs of places are near. The first stratum holds all pairs in the same place and the
        nearest others, two for every place, as on a lattice; the edges after it are geometric, with factors
        of at least 2 if there is room. With up to 10^4 records those between far strata are so as well, where
        each stratum holds 2 % of all pairs; with more records, there is one far stratum.
        """
        one = cls(points_km, p)
        places = np.unique(one._points, axis=0)
        apart_km = _near_pairs(places, p, _reach(places, p))[2]
        if not len(apart_km):
            return one
        reach_km = float(apart_km[-1])
        first_km = float(apart_km[min(_NEIGHBOURS * len(places), len(apart_km)) - 1])
        near_km = [*geometric_cuts(first_km, reach_km), reach_km]
        if len(one._points) > _COUNTED_RECORDS:
            return cls(points_km, p, near_km)
        design = cls(points_km, p, near_km, geometric_cuts(reach_km, one.strata[-1].upper_km)[1:])
        design._join_small_strata()
        return design

    def draw(
        self, rng: np.random.Generator, stratum: int, n: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Draw pairs of a stratum; see :meth:`Design.draw`."""
        chosen = self.strata[stratum]
        if self._is_near(chosen):
            return self.near_pairs_at(stratum, rng.integers(0, chosen.pairs, n))
        # Pairs at distance 0 belong to the first stratum, and rounding does not put any beyond the last one.
        low = chosen.lower_km if stratum > 0 else -np.inf
        high = chosen.upper_km if stratum < len(self.strata) - 1 else np.inf
        share = chosen.pairs / sum(each.pairs for each in self.strata)
        found = [np.empty((2, 0), dtype=np.intp)]
        missing = n
        while missing > 0:
            tries = min(int(missing / share * 1.1) + 16, _PAIRS_AT_ONCE)
            first = rng.integers(0, len(self._points), tries)
            second = rng.integers(0, len(self._points) - 1, tries)
            second += second >= first
            apart = distances_km(*(self._points[first] - self._points[second]).T, p=self._p)
            good = np.flatnonzero((low < apart) & (apart <= high))[:missing]
            found.append(np.stack([first[good], second[good]]))
            missing -= len(good)
        first, second = np.concatenate(found, axis=1)
        return first, second

    def near_pairs_at(
        self, stratum: int, ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the pairs with these ranks, a one-to-one map of [0, pairs) to a near stratum.

        Parameters
        ----------
        stratum
            Which of `strata`; a near one.
        ranks
            Integers in [0, pairs), int64 of shape (n,).

        Returns
        -------
        first, second
            Record numbers, each of shape (n,).
        """
        tables = self._tables
        ranks = ranks + sum(nearer.pairs for nearer in self.strata[:stratum])
        entry = np.searchsorted(tables.until, ranks, side="right")
        rest = ranks - np.where(entry > 0, tables.until[entry - 1], 0)
        one, other = tables.first[entry], tables.second[entry]
        size = tables.sizes[one]
        # Within a place, pairs of different records only: those with an offset of at least 1.
        b, j = offset_at(np.where(one == other, rest + size, 0), size)
        first = np.where(one == other, j, rest % size)
        second = np.where(one == other, j + b, rest // size)
        return tables.members[tables.starts[one] + first], tables.members[tables.starts[other] + second]

    def _is_near(self, stratum: Stratum) -> bool:
        return bool(self._near_km) and stratum.upper_km <= self._near_km[-1]

    def _join_small_strata(self) -> None:
        """Join far strata until each holds its least share of all pairs, the last one perhaps less."""
        least = _LEAST_SHARE * sum(stratum.pairs for stratum in self.strata)
        strata = [stratum for stratum in self.strata if self._is_near(stratum)]
        far = self.strata[len(strata) :]
        for k, stratum in enumerate(far):
            joined = strata and not self._is_near(strata[-1])
            if joined and min(strata[-1].pairs, sum(further.pairs for further in far[k:])) < least:
                last = strata.pop()
                stratum = Stratum(last.lower_km, stratum.upper_km, last.pairs + stratum.pairs)
            strata.append(stratum)
        self.strata = tuple(strata)

    def _count_near(self) -> list[int]:
        """Return how many pairs of records lie within the upper end of each near stratum."""
        if not self._near_km:
            return []
        entries = np.searchsorted(self._tables.apart_km, self._near_km, side="right")
        return [int(self._tables.until[entry - 1]) if entry else 0 for entry in entries]

    @cached_property
    def _tables(self) -> _PointTables:
        places, of_record, sizes = np.unique(self._points, axis=0, return_inverse=True, return_counts=True)
        members = np.argsort(of_record.reshape(-1), kind="stable")
        first, second, apart = _near_pairs(places, self._p, self._near_km[-1])
        several = np.flatnonzero(sizes > 1)
        first, second = np.concatenate([several, first]), np.concatenate([several, second])
        pairs = np.where(
            first == second, sizes[first] * (sizes[first] - 1) // 2, sizes[first] * sizes[second]
        )
        return _PointTables(
            members=members,
            starts=np.cumsum(sizes) - sizes,
            sizes=sizes,
            first=first,
            second=second,
            apart_km=np.concatenate([np.zeros(len(several)), apart]),
            until=np.cumsum(pairs),
        )

    def _count_within(self, edges_km: Sequence[float]) -> list[int]:
        """Return how many pairs of records lie within each of these distances, by looking at every one."""
        counts = [0] * len(edges_km)
        if edges_km:
            for i, point in enumerate(self._points[:-1]):
                apart = distances_km(*(self._points[i + 1 :] - point).T, p=self._p)
                for k, edge in enumerate(edges_km):
                    counts[k] += int(np.count_nonzero(apart <= edge))
        return counts


def _near_pairs(
    places: NDArray[np.float64], p: float, reach_km: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the pairs of different places within a distance, by distance: two numbers and the distance."""
    from scipy.spatial import cKDTree

    pairs = cKDTree(places).query_pairs(reach_km * _FURTHER, p=_tree_exponent(p), output_type="ndarray")
    apart = distances_km(*(places[pairs[:, 0]] - places[pairs[:, 1]]).T, p=p)
    # The order in which the tree finds pairs is its own affair.
    order = np.lexsort((pairs[:, 1], pairs[:, 0], apart))
    order = order[: np.searchsorted(apart[order], reach_km, side="right")]
    return pairs[order, 0], pairs[order, 1], apart[order]


def _reach(places: NDArray[np.float64], p: float) -> float:
    """Return a distance, in km, within which there are up to `_LISTED_PAIRS` pairs of different places."""
    from scipy.spatial import cKDTree

    n = len(places)
    if n * (n - 1) // 2 <= _LISTED_PAIRS:
        return float(distances_km(*np.ptp(places, axis=0), p=p)) * _FURTHER
    # First what some places say, a little less so that it is seldom too much.
    neighbours = 0.8 * 2 * _LISTED_PAIRS / n
    some = min(n, int(16 * neighbours) + 2)
    probes = places[np.linspace(0, n - 1, _PROBES).astype(np.intp)]
    apart = [np.partition(distances_km(*(places - probe).T, p=p), some - 1)[:some] for probe in probes]
    reach = float(np.sort(np.concatenate(apart))[int(_PROBES * (neighbours + 1))])
    tree = cKDTree(places)
    while (int(tree.count_neighbors(tree, reach * _FURTHER, p=_tree_exponent(p))) - n) // 2 > _LISTED_PAIRS:
        reach *= _REDUCED
    return reach


def _tree_exponent(p: float) -> float:
    """Return an exponent with which the search tree finds all pairs within a distance, and maybe more.

    It raises distances to p as they are, which overflows and underflows; no distance is longer than that of
    p.
    """
    return p if p <= _LARGEST_TREE_EXPONENT else math.inf
