"""Which pairs of records a sampled audit looks at: all alike, or as many near ones as far ones.

A design cuts the unordered pairs {x, x'}, x ≠ x', into *strata* by their distance d_p and draws from each
with equal probabilities, with replacement. The share of violations among all pairs is then Σ_h W_h μ_h, with
μ_h the expected value of a draw from stratum h and W_h the stratum's share of the pairs (Cochran 1977,
chapter 5). On a large lattice hardly any pair is a near one, so that a uniform sample misses them, and near
pairs are those that bind.

Every pair has to be in exactly one stratum, also where its distance is that of an edge but for rounding, and
what is drawn has to be what was counted. On a lattice both go by the same table of integers: for every
offset along one axis, the number of offsets along the other that lie within an edge. A draw is one
uniform integer below the number of pairs, and the table turns it into a pair, one to one.

For records anywhere, near pairs are found by a tree of places, listed and counted; there are few of them. A
pair is near if the distance that all strata go by says so: the tree looks a little further. All others are
far, and are drawn by rejection from all pairs by the same distance, which is quick as most pairs are far.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdpext_dask.auditors.pairs.tiles import lengths
from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Array

# Strata after the first one, at most; each is at least twice as wide as all before.
_FURTHER_STRATA = 11
_GROWTH = 2
# Of a stratum, in an audit: fewer say nothing.
_LEAST_PAIRS = 16
_INT64 = 2**63
# Pairs of places to list: some 50 MB while they are sorted.
_LISTED_PAIRS = 1_000_000
# Pairs of the first stratum for each place: on a lattice, its neighbours along both axes.
_NEIGHBOURS = 2
# Records up to which far pairs are counted one by one, in a few seconds.
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
# Records of pairs: two arrays of numbers, each of shape (n,); which one is first means nothing.
Pairs = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(frozen=True)
class Stratum:
    """The pairs of records at some distances.

    Parameters
    ----------
    lower_km, upper_km
        Distances in (lower_km, upper_km]; that of a design's first stratum may be 0 as well.
    pairs
        Their exact number, at least 1; may exceed 2^63.
    """

    lower_km: float
    upper_km: float
    pairs: int


class Design(ABC):
    """Strata, and how to draw from them."""

    strata: tuple[Stratum, ...]

    @abstractmethod
    def draw(self, rng: np.random.Generator, stratum: int, n: int) -> Pairs:
        """Draw pairs of a stratum, independently, each with the same probability.

        Parameters
        ----------
        rng
            Where randomness comes from.
        stratum
            Which of `strata`.
        n
            How many.
        """

    @property
    def weights(self) -> Array:
        """The shares W_h of all pairs that the strata hold, float64 of shape (H,)."""
        total = sum(stratum.pairs for stratum in self.strata)
        return np.array([stratum.pairs / total for stratum in self.strata])


@dataclass(frozen=True)
class _LatticeTables:
    """Which offsets (d, b) a stratum holds, d along the shorter axis and b ≥ 0 along the longer one.

    Parameters
    ----------
    offsets
        Stratum h holds offsets[d, h] ≤ b < offsets[d, h + 1], int64 of shape (shorter, H + 1).
    until
        Pairs of stratum h with an offset of at most d, of shape (shorter, H); Python ints where int64 would
        overflow.
    """

    offsets: NDArray[np.int64]
    until: NDArray[Any]


class LatticeDesign(Design):
    """Pairs of records of a lattice, whose record (i, j) has the number i ny + j.

    Parameters
    ----------
    shape
        Records (nx, ny) along both axes, at least 2 in all and at most 3·10^9 along each: products of two
        offsets are below 2^63 then.
    spacing_km
        Spacings (hx, hy), in km.
    p
        Exponent of the metric, in [1, ∞].
    cuts_km
        Distances between strata, ascending, in km; a stratum that would be empty is left out.
    """

    def __init__(
        self, shape: tuple[int, int], spacing_km: tuple[float, float], p: float, cuts_km: Sequence[float] = ()
    ) -> None:
        self._shape, self._spacing_km, self._p = shape, spacing_km, p
        diameter_km = _diameter_km(shape, spacing_km, p)
        self._edges_km = (*(cut for cut in cuts_km if cut < diameter_km), diameter_km)
        self.strata = strata_between(self._edges_km, [int(n) for n in self._tables.until[-1]])
        if len(self.strata) < len(self._edges_km):
            # Without the edge above an empty stratum, what is within the next edge is the same.
            self._edges_km = tuple(stratum.upper_km for stratum in self.strata)
            del self._tables

    @classmethod
    def stratified(cls, shape: tuple[int, int], spacing_km: tuple[float, float], p: float) -> "LatticeDesign":
        """Return the design with strata by distance.

        With equal spacings the first one holds the neighbours along both axes and diagonals, up to ‖(h,
        h)‖_p; otherwise h is the smaller spacing, and on a lattice of one line the first one ends at h. The
        edges after it are geometric up to the diameter: as many as there can be with factors of at least 2,
        but at most 12 strata in all.
        """
        along = [h for n, h in zip(shape, spacing_km, strict=True) if n > 1] or [1.0]
        first_km = distances_km(min(along), min(along) if len(along) == 2 else 0.0, p=p)
        return cls(shape, spacing_km, p, geometric_cuts(float(first_km), _diameter_km(shape, spacing_km, p)))

    def draw(self, rng: np.random.Generator, stratum: int, n: int) -> Pairs:
        """Draw pairs of a stratum; see :meth:`Design.draw`."""
        return self.pairs_at(stratum, uniform_below(rng, self.strata[stratum].pairs, n))

    def pairs_at(self, stratum: int, ranks: NDArray[Any]) -> Pairs:
        """Return the pairs with these ranks, a one-to-one map of [0, pairs) to the stratum.

        Parameters
        ----------
        stratum
            Which of `strata`.
        ranks
            Integers in [0, pairs), of shape (n,), int64 or Python ints.
        """
        shorter, longer = min(self._shape), max(self._shape)
        until = self._tables.until[:, stratum]
        d = np.searchsorted(until, ranks, side="right")
        rest = ranks - np.where(d > 0, until[d - 1], 0)
        # Where along the shorter axis, then where along the longer one and with which offset.
        a = (rest % (shorter - d)).astype(np.int64)
        rest = (rest // (shorter - d)).astype(np.int64)
        low, high = self._tables.offsets[d, stratum], self._tables.offsets[d, stratum + 1]
        forward = _pairs_below(high, longer) - _pairs_below(low, longer)
        back = rest >= forward
        # Offset 0 counts once, as a forward one.
        from_low = np.where(back, rest - forward + _pairs_below(np.maximum(low, 1), longer), 0)
        b, j = offset_at(np.where(back, from_low, rest + _pairs_below(low, longer)), longer)
        start, end = np.where(back, j + b, j), np.where(back, j, j + b)
        return self._numbers(a, start), self._numbers(a + d, end)

    def _numbers(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the numbers of records at a along the shorter axis and b along the longer one."""
        i, j = (a, b) if self._shape[0] <= self._shape[1] else (b, a)
        return (i * self._shape[1] + j).astype(np.intp)

    @cached_property
    def _tables(self) -> _LatticeTables:
        turned = self._shape[0] > self._shape[1]
        shorter, longer = sorted(self._shape)
        h_shorter, h_longer = reversed(self._spacing_km) if turned else self._spacing_km
        d = np.arange(shorter, dtype=np.int64)
        offsets = np.zeros((shorter, len(self._edges_km) + 1), dtype=np.int64)
        offsets[0, 0] = 1  # no record is a pair with itself
        offsets[:, -1] = longer
        across_km = np.asarray(d * h_shorter, dtype=np.float64)
        for k, edge in enumerate(self._edges_km[:-1], start=1):
            # Nothing lies further along an axis than the edge does.
            near = across_km[distances_km(across_km, 0, p=self._p) <= edge]
            most = min(longer, int(edge / h_longer) + 2)
            offsets[: len(near), k] = _count_within(edge, near, h_longer, self._p, most)
        # Rounding must not give a pair to two strata.
        offsets = np.maximum.accumulate(offsets, axis=1)
        below = _pairs_below(offsets, longer)
        along = np.diff(below)
        # Pairs of an offset d > 0 go forward or back; those with b = 0 are counted in `along` once.
        along[1:] += along[1:] - longer * np.diff(np.minimum(offsets[1:], 1))
        exact = along if math.prod(self._shape) ** 2 < 2 * _INT64 else along.astype(object)
        return _LatticeTables(offsets, np.cumsum(exact * (shorter - d)[:, None], axis=0))


def allocate(pairs: int, strata: Sequence[Stratum]) -> tuple[int, ...]:
    """Return how many pairs to draw from each stratum: equal shares, so that near pairs are not missed.

    Pairs are drawn with replacement everywhere, from small strata too: their observations are independent
    then, as the intervals need, at the price of drawing a pair more than once.

    Parameters
    ----------
    pairs
        How many in all, at least 1; with so few that a share is below 16, it is exceeded.
    strata
        The strata.
    """
    if len(strata) == 1:
        return (pairs,)
    share, left = divmod(pairs, len(strata))
    return tuple(max(_LEAST_PAIRS, share + (h < left)) for h in range(len(strata)))


def distances_km(east: ArrayLike, north: ArrayLike, *, p: float) -> Array:
    """Return ‖(east, north)‖_p of offsets in km that broadcast, float64; the one that all strata go by."""
    x, y = (np.array(axis, dtype=np.float64) for axis in np.broadcast_arrays(east, north))
    return np.asarray(lengths(x, y, p))


def geometric_cuts(first_km: float, last_km: float) -> list[float]:
    """Return cuts from `first_km` to below `last_km` with equal ratios, at least 2 if they can be."""
    if first_km <= 0 or last_km <= first_km:
        return []
    ratio = last_km / first_km
    further = min(_FURTHER_STRATA, max(1, math.floor(math.log(ratio, _GROWTH))))
    return [first_km * ratio ** (k / further) for k in range(further)]


def uniform_below(rng: np.random.Generator, limit: int, n: int) -> NDArray[Any]:
    """Return n uniform integers in [0, limit), exactly: int64, or Python ints where they would overflow."""
    if limit <= _INT64:
        return rng.integers(0, limit, n, dtype=np.int64)
    bits = (limit - 1).bit_length()
    size = -(-bits // 8)
    drawn: list[int] = []
    while len(drawn) < n:
        candidate = int.from_bytes(rng.bytes(size), "little") >> (8 * size - bits)
        if candidate < limit:
            drawn.append(candidate)
    return np.array(drawn, dtype=object)


def offset_at(
    ranks: NDArray[np.int64], n: NDArray[np.int64] | int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs (j, j + b) of n numbers with these ranks, ordered by b ≥ 0 and then by j.

    Parameters
    ----------
    ranks
        Integers in [0, n (n + 1) / 2), int64 of shape (m,).
    n
        How many numbers, one for all or int64 of shape (m,); at most 3·10^9.

    Returns
    -------
    b, j
        Offsets and smaller numbers, int64 of shape (m,).
    """
    last = np.broadcast_to(np.asarray(n, dtype=np.int64) - 1, ranks.shape).copy()
    b = np.zeros(ranks.shape, dtype=np.int64)
    # The last b with no more than `ranks` pairs before it, by bisection: exact, as a square root is not.
    while (b < last).any():
        middle = b + (last - b + 1) // 2
        enough = _pairs_below(middle, n) <= ranks
        b, last = np.where(enough, middle, b), np.where(enough, last, middle - 1)
    return b, ranks - _pairs_below(b, n)


def _diameter_km(shape: tuple[int, int], spacing_km: tuple[float, float], p: float) -> float:
    return float(distances_km(*((n - 1) * h for n, h in zip(shape, spacing_km, strict=True)), p=p))


def _pairs_below(b: NDArray[np.int64], n: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return the number Σ_{c<b} (n − c) of pairs (j, j + c) of n numbers, 0 ≤ c < b."""
    return b * n - b * (b - 1) // 2


def _count_within(
    edge_km: float, across_km: Array, spacing_km: float, p: float, most: int
) -> NDArray[np.int64]:
    """Return how many of the offsets b = 0..most-1 lie within an edge, by bisection.

    Parameters
    ----------
    edge_km
        Largest distance, in km.
    across_km
        Offsets along the other axis, float64 of shape (n,), in km.
    spacing_km
        Of the axis of b, in km.
    p
        Exponent of the metric.
    most
        How many to look at.

    Returns
    -------
    int64 of shape (n,).
    """
    count = np.zeros(len(across_km), dtype=np.int64)
    limit = np.full(len(across_km), most, dtype=np.int64)
    while (count < limit).any():
        middle = (count + limit) // 2
        within = distances_km(across_km, middle * spacing_km, p=p) <= edge_km
        # Where the search has ended, `middle` is the count and must not move it.
        count = np.where(within & (count < limit), middle + 1, count)
        limit = np.where(within, limit, middle)
    return count


def strata_between(edges_km: Sequence[float], pairs: Sequence[int]) -> tuple[Stratum, ...]:
    """Return the strata up to these edges with these numbers of pairs, without empty ones."""
    kept = [(edge, n) for edge, n in zip(edges_km, pairs, strict=True) if n]
    lower = (0.0, *(edge for edge, _ in kept[:-1]))
    return tuple(Stratum(low, high, n) for low, (high, n) in zip(lower, kept, strict=True))


# --- records anywhere -----------------------------------------------------------------------------


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
        Pairs of records before each of them, and all, int64 of shape (pairs of places + 1,).
    """

    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    apart_km: Array
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
        self, points_km: Array, p: float, near_km: Sequence[float] = (), far_km: Sequence[float] = ()
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
    def stratified(cls, points_km: Array, p: float) -> "PointsDesign":
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

    def draw(self, rng: np.random.Generator, stratum: int, n: int) -> Pairs:
        """Draw pairs of a stratum; see :meth:`Design.draw`."""
        chosen = self.strata[stratum]
        if self._is_near(chosen):
            return self._near_pairs_at(stratum, rng.integers(0, chosen.pairs, n))
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

    def _near_pairs_at(self, stratum: int, ranks: NDArray[np.int64]) -> Pairs:
        """Return the pairs with these ranks, a one-to-one map of [0, pairs) to a near stratum."""
        tables = self._tables
        ranks = ranks + sum(nearer.pairs for nearer in self.strata[:stratum])
        entry = np.searchsorted(tables.until, ranks, side="right") - 1
        rest = ranks - tables.until[entry]
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
        return [int(pairs) for pairs in self._tables.until[entries]]

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
        starts, until = np.cumsum(sizes) - sizes, np.concatenate([[0], np.cumsum(pairs)])
        apart = np.concatenate([np.zeros(len(several)), apart])
        return _PointTables(members, starts, sizes, first, second, apart, until)

    def _count_within(self, edges_km: Sequence[float]) -> list[int]:
        """Return how many pairs of records lie within each of these distances, by looking at every one."""
        counts = np.zeros(len(edges_km), dtype=np.int64)
        for i, point in enumerate(self._points[:-1] if edges_km else ()):
            apart = distances_km(*(self._points[i + 1 :] - point).T, p=self._p)
            counts += np.count_nonzero(apart[:, None] <= np.array(edges_km), axis=0)
        return [int(count) for count in counts]


def _near_pairs(
    places: Array, p: float, reach_km: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Return the pairs of different places within a distance, by distance: two numbers and the distance."""
    from scipy.spatial import cKDTree

    pairs = cKDTree(places).query_pairs(reach_km * _FURTHER, p=_tree_exponent(p), output_type="ndarray")
    apart = distances_km(*(places[pairs[:, 0]] - places[pairs[:, 1]]).T, p=p)
    # The order in which the tree finds pairs is its own affair.
    order = np.lexsort((pairs[:, 1], pairs[:, 0], apart))
    order = order[: np.searchsorted(apart[order], reach_km, side="right")]
    return pairs[order, 0], pairs[order, 1], apart[order]


def _reach(places: Array, p: float) -> float:
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
