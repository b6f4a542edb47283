"""What many independent releases of one place give away: a posterior from many reports.

After reports y_1, ..., y_n of a record that stays where it is, the posterior is ∝ π(x) Π_i M(y_i|x). There
are K^n sequences, so people are drawn from the prior, reports from their rows, and means over them stated
with their errors; each posterior is that over all records, without anything left out but what comes to less
than 1e-9. Sticky reports (the same answer again) stay where one release is.

Tasks work block by block: what they answer with has the size of people times lengths.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from mdpext_dask.evaluation.attackers import geometric_median as medians
from mdpext_dask.evaluation.attackers.best_guesses import nearest_records
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.requests import TRUTH, AttackRequest
from mdpext_dask.evaluation.attackers.tallies import columns_of
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
# Additions of log M that a curve may take, and the fewest people that a mean is worth stating of.
MOST_ADDITIONS, LEAST_VICTIMS = 2 * 10**10, 10
CONFIDENCE = 0.95
# What is left out of a posterior where guesses are judged, by all groups of blocks together.
_NEGLIGIBLE = 1e-9
# Numbers by group, person and length that the client keeps to tell which groups are negligible, 128 MB.
_MOST_KEPT = 2**24
# Good enough next to the error of the draw.
_GOOD_GAP = 2e-3
_STEPS = (1, 2, 3, 5)
# Records whose posteriors are computed together, and numbers of posteriors at once: they fit into a cache.
_SLAB, _AT_ONCE = 4096, 2**15
# An own stream for every person, so that draws do not depend on which blocks go together.
_STREAM_VICTIMS, _STREAM_REPORTS = 11, 12


def lengths_up_to(releases: int) -> tuple[int, ...]:
    """Return the lengths of sequences to look at: 1, 2, 3, 5, 10, 20, 30, ... and the longest."""
    found = {step * 10**decade for decade in range(len(str(releases))) for step in _STEPS}
    return tuple(sorted({length for length in found if length < releases} | {releases}))


def draw_groups(masses: Array, victims: int, random_seed: int) -> list[list[tuple[int, float]]]:
    """Draw people by groups of blocks.

    Parameters
    ----------
    masses
        Σ π of every group, float64 of shape (groups,).
    victims, random_seed
        How many; for the draw.

    Returns
    -------
    By group, who is in it: a number from 0, and how much of the group's prior lies before them.
    """
    sums = np.cumsum(masses)
    drawn = np.random.default_rng([random_seed, _STREAM_VICTIMS]).random(victims) * sums[-1]
    group = np.minimum(np.searchsorted(sums, drawn, side="right"), np.flatnonzero(masses)[-1])
    found: list[list[tuple[int, float]]] = [[] for _ in masses]
    for victim, (index, at) in enumerate(zip(group.tolist(), drawn.tolist(), strict=True)):
        found[index].append((victim, at - float(sums[index] - masses[index])))
    return found


def draw_reports(
    url: str, group: tuple[int, ...], victims: Sequence[tuple[int, float]], releases: int, random_seed: int
) -> NDArray[np.int32]:
    """Draw the reports of the people in some blocks, int32 of shape (people, releases).

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    reports = np.zeros((len(victims), releases), dtype=np.int32)
    people = _People.concatenated(_with_prior(MechanismStore.open(url), group))
    sums = np.cumsum(people.prior)
    for row, (victim, at) in zip(reports, victims, strict=True):
        record = min(int(np.searchsorted(sums, at, side="right")), len(sums) - 1)
        draws = np.random.default_rng([random_seed, _STREAM_REPORTS, victim]).random(releases)
        until = np.cumsum(people.rows[record])
        row[:] = np.minimum(np.searchsorted(until, draws * until[-1], side="right"), len(until) - 1)
    return reports


@dataclass(frozen=True)
class _People:
    """Records with π > 0: where, seen from the corner of the grid, (n, 2) in km; π; M of shape (n, K)."""

    places_km: Array
    prior: Array
    rows: Array

    @classmethod
    def concatenated(cls, parts: Iterable["_People"]) -> "_People":
        fields = zip(*((part.places_km, part.prior, part.rows) for part in parts), strict=True)
        return cls(*map(np.concatenate, fields))


def _with_prior(store: MechanismStore, group: Sequence[int]) -> Iterator[_People]:
    for column in columns_of(store, group):
        used = column.beliefs[TRUTH] > 0
        places = column.places_km(store.grid.spacing_km)
        yield _People(places[used], column.beliefs[TRUTH][used], column.rows[used])


@dataclass
class Posteriors:
    """Posteriors of all people and lengths, summed up over some records; arrays have the shape (V, C).

    With a = log π(x) + Σ_i log M(y_i|x):

    Parameters
    ----------
    peak
        The largest a.
    peak_xy_km
        Where it is first, of shape (V, C, 2), as seen from the corner of the grid, in km.
    mass
        Σ exp(a − peak).
    centre_km
        Σ exp(a − peak) x, of shape (V, C, 2), in km.
    spread
        Σ exp(a − peak) (a − peak).
    """

    peak: Array
    peak_xy_km: Array
    mass: Array
    centre_km: Array
    spread: Array

    @classmethod
    def nothing(cls, victims: int, lengths: int) -> "Posteriors":
        """Return the sums over no records."""
        none, nowhere = np.zeros((2, victims, lengths)), np.zeros((2, victims, lengths, 2))
        return cls(np.full(none[0].shape, -np.inf), nowhere[0], none[0], nowhere[1], none[1])

    def add(self, other: "Posteriors", victims: slice = slice(None)) -> None:
        """Add sums over other records, which come after; of some people only, if that is said."""
        peak = np.maximum(self.peak[victims], other.peak)
        later = other.peak > self.peak[victims]
        mine, theirs = _lowered(self.peak[victims], peak), _lowered(other.peak, peak)
        # exp(a − new peak) (a − new peak) = exp(shift) exp(a − peak) ((a − peak) + shift)
        spread = np.exp(mine) * (self.spread[victims] + mine * self.mass[victims])
        spread += np.exp(theirs) * (other.spread + theirs * other.mass)
        self.spread[victims] = spread
        self.mass[victims] = np.exp(mine) * self.mass[victims] + np.exp(theirs) * other.mass
        centre = np.exp(mine)[..., None] * self.centre_km[victims]
        self.centre_km[victims] = centre + np.exp(theirs)[..., None] * other.centre_km
        self.peak_xy_km[victims] = np.where(later[..., None], other.peak_xy_km, self.peak_xy_km[victims])
        self.peak[victims] = peak

    def log_total(self) -> Array:
        """Return log Σ exp(a)."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.peak + np.log(self.mass))

    def mean_km(self) -> Array:
        """Return the posterior means, of shape (V, C, 2), as seen from the corner of the grid, in km."""
        return np.asarray(self.centre_km / self.mass[..., None])

    def vulnerability(self) -> Array:
        """Return the largest posterior of a record."""
        return np.asarray(1 / self.mass)

    def entropy_bits(self) -> Array:
        """Return the entropies −Σ p log2 p, where log p = (a − peak) − log mass."""
        nats = np.log(self.mass) - self.spread / self.mass
        return np.asarray(np.maximum(nats, 0.0) / math.log(2))


def _lowered(peak: Array, to: Array) -> Array:
    """Return peak − to; of no records, something finite that nothing comes of."""
    return np.where(np.isfinite(peak), peak - np.where(np.isfinite(to), to, 0.0), 0.0)


def observe_blocks(
    url: str, group: tuple[int, ...], reports: NDArray[np.int32], lengths: tuple[int, ...]
) -> Posteriors:
    """Return the sums over the records that some blocks own.

    Parameters
    ----------
    url, group
        Which blocks of which store.
    reports
        Reports of all people, int32 of shape (V, releases).
    lengths
        How many of them to look at, ascending, C of them.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    found = Posteriors.nothing(len(reports), len(lengths))
    all_lengths = np.full(len(reports), len(lengths))
    for slab in _slabs(MechanismStore.open(url), group):
        for victims, logs in _log_posteriors(slab, reports, lengths, all_lengths):
            at = logs.argmax(axis=2)
            peak = np.take_along_axis(logs, at[..., None], axis=2)[..., 0]
            logs -= peak[..., None]
            share = np.exp(logs)
            centre = np.stack([(share * axis).sum(axis=2) for axis in slab.places_km.T], axis=-1)
            mass, spread = share.sum(axis=2), (share * logs).sum(axis=2)
            found.add(Posteriors(peak, slab.places_km[at], mass, centre, spread), victims)
    return found


def judge_posteriors(
    url: str,
    group: tuple[int, ...],
    reports: NDArray[np.int32],
    lengths: tuple[int, ...],
    log_total: Array,
    guesses_km: Array,
    needed: NDArray[np.intp],
) -> Array:
    """Return what the records that some blocks own add to Σ_x p(x) ‖x − g‖ and its derivatives.

    Parameters
    ----------
    url, group, reports, lengths
        See :func:`observe_blocks`.
    log_total
        log Σ exp(a) over all records, float64 of shape (V, C).
    guesses_km
        g, float64 of shape (G, V, C, 2), as seen from the corner of the grid, in km.
    needed
        By person, with how many of the lengths, the first ones, the blocks' share is not next to nothing.

    Returns
    -------
    Slopes, float64 of shape (G, V, C, 7).
    """
    total = np.zeros((*guesses_km.shape[:-1], medians.SLOPE_NUMBERS))
    if not needed.any():
        return total
    for slab in _slabs(MechanismStore.open(url), group):
        for victims, logs in _log_posteriors(slab, reports, lengths, needed):
            some = logs.shape[1]
            share = np.exp(logs - log_total[victims, :some, None])
            for g, guess in enumerate(guesses_km[:, victims, :some]):
                east, north = (slab.places_km[:, axis] - guess[..., axis, None] for axis in (0, 1))
                total[g, victims, :some] += medians.slope_at(east, north, share)
    return total


@dataclass(frozen=True)
class _Slab:
    """Some records: where, seen from the corner of the grid, (n, 2) in km; log π; log M of shape (K, n)."""

    places_km: Array
    log_prior: Array
    log_rows: Array

    @classmethod
    def of(cls, columns: list[_People]) -> "_Slab":
        people = _People.concatenated(columns)
        return cls(people.places_km, np.log(people.prior), np.ascontiguousarray(np.log(people.rows).T))


def _slabs(store: MechanismStore, group: tuple[int, ...]) -> Iterator[_Slab]:
    held: list[_People] = []
    records = 0
    for column in _with_prior(store, group):
        if held and records + len(column.prior) > _SLAB:
            yield _Slab.of(held)
            held, records = [], 0
        held.append(column)
        records += len(column.prior)
    if records:
        yield _Slab.of(held)


def _log_posteriors(
    slab: _Slab, reports: NDArray[np.int32], lengths: tuple[int, ...], needed: NDArray[np.intp]
) -> Iterator[tuple[slice, Array]]:
    """Yield some people, and log π + Σ log M of shape (people, lengths, n), one report after the other.

    Of the lengths, the first ones that any of these people need.
    """
    step = max(_AT_ONCE // (len(slab.log_prior) * len(lengths)), 1)
    for first in range(0, len(reports), step):
        victims = slice(first, min(first + step, len(reports)))
        some = int(needed[victims].max())
        if some == 0:
            continue
        seen = reports[victims]
        sums = np.repeat(slab.log_prior[None], len(seen), axis=0)
        logs = np.empty((len(seen), some, len(slab.log_prior)))
        done = 0
        for position, length in enumerate(lengths[:some]):
            for release in range(done, length):
                sums += slab.log_rows[seen[:, release]]
            logs[:, position] = sums
            done = length
        yield victims, logs


# --- the curve ------------------------------------------------------------------------------------


def measure_releases(
    passes: Passes,
    request: AttackRequest,
    group_prior: Array,
    records: int,
    found: dict[str, Any],
    missing: dict[str, str],
) -> dict[str, Any] | None:
    """Return the curve of independent releases; what one release tells is known without any draw."""
    if request.releases == 0:
        return None
    victims = victims_for(request, records)
    if victims < min(LEAST_VICTIMS, request.victims):
        missing["releases"] = (
            f"{records} records with a prior: there is time for {victims} people only; ask for fewer releases"
        )
        return None
    curve = release_curve(passes, request, group_prior, victims)
    once = {
        "inference_error_km": found["inference_error_km"],
        "inference_error_lower_km": found["inference_error_lower_km"],
        "vulnerability": found["vulnerability"],
        "entropy_bits": found["conditional_entropy_bits"],
    }
    for entry in curve:
        entry["exact"] = entry["releases"] == 1
    curve[0] |= {**dict.fromkeys((key for key in curve[0] if "half_width" in key), 0.0), **once}
    return {
        "victims": victims,
        "confidence": CONFIDENCE,
        "random_seed": request.random_seed,
        "curve": curve,
        "sticky": once,
    }


def victims_for(request: AttackRequest, records: int) -> int:
    """Return how many people there is time for, of those asked for."""
    return min(request.victims, MOST_ADDITIONS // max(records * request.releases, 1))


def release_curve(
    passes: Passes, request: AttackRequest, group_prior: Array, victims: int
) -> list[dict[str, Any]]:
    """Return what n independent releases of one record give away, for some n.

    Every mean is over `victims` people drawn from the prior, with a half-width from Student's t: the interval
    is that of a normal approximation, of the draw of people and reports alone.

    Parameters
    ----------
    passes
        Over the store.
    request
        Lengths, and the random seed.
    group_prior
        Σ π of each group of blocks, float64 of shape (groups,).
    victims
        How many people to draw, at least 2.

    Returns
    -------
    For every n: `releases`; `inference_error_km`, the expected distance to the attacker's guess under his
    posterior, for the best guess found; `inference_error_lower_km`, a bound from below for the same draws;
    `vulnerability`, the largest posterior; `entropy_bits` of the posterior; and the half-widths of 95 %.
    """
    lengths = lengths_up_to(request.releases)
    reports = _reports(passes, request, group_prior, victims)
    total, parts = _observe(passes, reports, lengths)
    error, lower = _errors(passes, reports, lengths, total, parts)
    measured = {
        "inference_error": (error, "_km"),
        "inference_error_lower": (lower, "_km"),
        "vulnerability": (total.vulnerability(), ""),
        "entropy": (total.entropy_bits(), "_bits"),
    }
    quantile = float(stdtrit(victims - 1, (1 + CONFIDENCE) / 2))
    curve = []
    for position, length in enumerate(lengths):
        entry: dict[str, Any] = {"releases": length}
        for name, (values, unit) in measured.items():
            column = values[:, position]
            entry[f"{name}{unit}"] = float(column.mean())
            entry[f"{name}_half_width{unit}"] = quantile * float(column.std(ddof=1)) / math.sqrt(victims)
        curve.append(entry)
    return curve


def _reports(passes: Passes, request: AttackRequest, group_prior: Array, victims: int) -> NDArray[np.int32]:
    """Return reports of all people, int32 of shape (V, releases)."""
    releases, seed = request.releases, request.random_seed
    drawn = draw_groups(group_prior, victims, seed)
    groups = [(group, people) for group, people in zip(passes.groups, drawn, strict=True) if people]
    reports = np.zeros((victims, releases), dtype=np.int32)
    parts = passes.each("draws", draw_reports, ((group, people, releases, seed) for group, people in groups))
    for (_, people), part in zip(groups, parts, strict=True):
        reports[[victim for victim, _ in people]] = part
    return reports


def _observe(
    passes: Passes, reports: NDArray[np.int32], lengths: tuple[int, ...]
) -> tuple[Posteriors, Array | None]:
    """Return sums over all records, and log Σ exp(a) by group, person and length, if they are few."""
    shape = len(passes.groups), len(reports), len(lengths)
    parts = np.empty(shape) if math.prod(shape) <= _MOST_KEPT else None
    total = Posteriors.nothing(len(reports), len(lengths))
    arguments = ((group, reports, lengths) for group in passes.groups)
    for index, found in enumerate(passes.each("releases", observe_blocks, arguments)):
        total.add(found)
        if parts is not None:
            parts[index] = found.log_total()
    return total, parts


def _errors(
    passes: Passes,
    reports: NDArray[np.int32],
    lengths: tuple[int, ...],
    total: Posteriors,
    parts: Array | None,
) -> tuple[Array, Array]:
    """Return expected distances to the best guesses found, and bounds from below, of shape (V, C), in km."""
    grid, groups, log_total = passes.store.grid, passes.groups, total.log_total()
    needed = np.full((len(groups), len(reports)), len(lengths))
    if parts is not None:
        held = parts - log_total >= math.log(_NEGLIGIBLE / len(groups))
        # With how many of the lengths, up to the last one that the group has a part in.
        needed = np.where(held.any(axis=2), len(lengths) - held[..., ::-1].argmax(axis=2), 0)

    def judge(guesses: Array) -> Array:
        arguments = (
            (group, reports, lengths, log_total, guesses, some)
            for group, some in zip(groups, needed, strict=True)
        )
        return passes.summed("guesses", judge_posteriors, arguments)

    def bound(slope: Array) -> Array:
        # What is left out of a posterior can tilt it no more than it weighs.
        least = medians.lower_bound(slope, 1.0, grid.records) - 2 * _NEGLIGIBLE * slope[..., medians.COST]
        return np.asarray(np.maximum(least, 0.0))

    guesses = np.stack([total.mean_km(), total.peak_xy_km])
    weight = np.ones(log_total.shape)
    _, cost, lower = medians.descend(judge, guesses, partial(nearest_records, grid), bound, weight, _GOOD_GAP)
    return cost, lower
