"""What no mechanism can beat: a lower bound on the loss of every mechanism that keeps a store's promise.

The records split into s² interleaved lattices, and each lattice into windows. A mechanism that keeps the
promise keeps it on each of these parts, so their bounds add up to one that is certified. A random part of the
lattices estimates that sum, without being a bound itself. The smaller the stride s, the larger the windows,
and the more outputs are told apart, the better it gets (:mod:`mdpext_dask.evaluation.bound.levels`).

Within a time limit, what fits is measured, not predicted: first how fast this machine is now, then how long
the parts of one level took (:mod:`mdpext_dask.evaluation.bound.search`). Each part of a finer level is a
union of parts of the one before, whose bounds stand for it until it has one of its own, so whenever the time
is up, the sum of what there is is certified.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, SpecError
from mdpext_dask.evaluation.bound import lattices
from mdpext_dask.evaluation.bound.lattices import Found, Level, Offset, Part
from mdpext_dask.evaluation.bound.levels import Levels
from mdpext_dask.evaluation.bound.search import FINER, LEAST_PART, ON_THE_WAY, Crew, Search, count_of, memory
from mdpext_dask.evaluation.bound.seed_dual import seed_dual_bound
from mdpext_dask.store.mechanism_store import MechanismStore

SECONDS = 60.0
_ROUNDING = 4 * sys.float_info.epsilon
# Shares of what is left that the first level should take at most.
_FIRST = 0.25
_LATTICES = "lattices"
# What is said about a bound.
FACTS = (
    "lower_bound_km", "lower_bound_certified", "lower_bound_standard_error_km", "lower_bound_certified_km",
    "lower_bound_source", "lower_bound_stride", "offsets_used", "offsets_total", "lower_bound_offsets", "gap",
    "lower_bound_seconds", "lower_bound_window", "lower_bound_outputs",
)  # fmt: skip


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on the loss of every mechanism that keeps a promise, or an estimate of one.

    Parameters
    ----------
    lower_bound_km
        The bound, in km; with a standard error, an unbiased estimate of what all offsets together would
        prove.
    standard_error_km
        Standard error of the estimate, in km; None for what is certified.
    certified_km
        What is proved in any case, in km: parts that were left out count with those of a coarser level, or
        with what is lost without any privacy.
    stride
        Steps between records of one lattice: the finest one.
    window
        Records of a window to the east and to the north at most; None for lattices in one piece.
    outputs
        Outputs that a program tells apart at most; None for all.
    offsets
        The offsets of that stride whose programs were all solved.
    offsets_total
        How many there are.
    source
        ``"lattices"`` or ``"seed dual"``: what gave the bound.
    seconds
        How long it took.
    """

    lower_bound_km: float
    standard_error_km: float | None
    certified_km: float
    stride: int
    window: tuple[int, int] | None
    outputs: int | None
    offsets: tuple[Offset, ...]
    offsets_total: int
    source: str
    seconds: float

    @property
    def certified(self) -> bool:
        """Whether the bound is proved."""
        return self.standard_error_km is None

    @property
    def offsets_used(self) -> int:
        """How many lattices were solved."""
        return len(self.offsets)

    @property
    def whole(self) -> bool:
        """Whether all of them were."""
        return self.offsets_used == self.offsets_total


@dataclass(frozen=True)
class BoundRequest:
    """What to spend on a lower bound.

    Parameters
    ----------
    seconds
        How long it may take, kept by measuring; 0 without a stride for no bound.
    stride
        Steps between records of a lattice, however long it takes; default: a coarse one, and then ever finer
        ones, for all offsets; or if no stride has the time for that, a fine one for a part of them. Windows
        and outputs are chosen with it.
    offsets
        How many offsets to draw, without replacement; default: all of them, if that fits.
    random_seed
        For the draw.
    window
        With a stride, records along a side of a window; default: lattices in one piece, with all outputs.

    Raises
    ------
    SpecError
        If the time is negative, or there is a window without a stride.
    """

    seconds: float = SECONDS
    stride: int | None = None
    offsets: int | None = None
    random_seed: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.stride is None or self.window < 1):
            raise SpecError(f"--window: takes a --stride, and at least one record, got {self.window}")
        if not self.seconds >= 0:
            raise SpecError(f"--bound-seconds: must be at least 0, got {self.seconds:g}")


def bound_facts(
    store: MechanismStore, executor: Executor, stages: Stages, loss_km: float, request: BoundRequest
) -> dict[str, Any]:
    """Return what ``evaluate`` says about a mechanism's loss and the best that any could do.

    Raises
    ------
    SpecError
        See :func:`lower_bound`.
    GuaranteeViolation
        If the loss is less than any mechanism's that keeps the promise.
    """
    if request.seconds == 0 and request.stride is None:
        return dict.fromkeys(FACTS)
    found = lower_bound(store, executor, stages, request)
    # The loss is a sum of this many numbers, none negative.
    rounding = (store.grid.records + store.outputs) * sys.float_info.epsilon
    if loss_km * (1 + rounding) < found.certified_km:
        raise GuaranteeViolation(
            f"{store.url}: its loss of {loss_km:.6g} km is less than the {found.certified_km:.6g} km that "
            "every mechanism with its promise loses; rows, prior or tables of the loss are damaged: audit it"
        )
    if not found.certified and not found.certified_km < found.lower_bound_km <= loss_km:
        # The loss itself tells that the estimate is too high, or what is proved that it is too low.
        found = replace(found, lower_bound_km=found.certified_km, standard_error_km=None)
    value = found.lower_bound_km
    facts = (
        value, found.certified, found.standard_error_km, found.certified_km, found.source, found.stride,
        found.offsets_used, found.offsets_total,
        None if found.whole else [list(offset) for offset in found.offsets],
        loss_km / value - 1 if value > 0 else None, found.seconds,
        None if found.window is None else list(found.window), found.outputs,
    )  # fmt: skip
    return dict(zip(FACTS, facts, strict=True))


def lower_bound(
    store: MechanismStore, executor: Executor, stages: Stages, request: BoundRequest
) -> LowerBound:
    """Bound the loss of every mechanism that keeps the promise of a store from below.

    Parameters
    ----------
    store
        The store; prior, loss and grid are enough.
    executor
        Where programs are solved.
    stages
        The run's stages; this one is ``"bound"``.
    request
        What to spend.

    Raises
    ------
    SpecError
        If there is no such stride or number of offsets, or programs that large do not fit into the memory.
    """
    started, crew = time.monotonic(), Crew.of(executor)
    levels = Levels(store)
    seconds = math.inf if request.stride is not None else request.seconds
    search = Search(store, levels, executor, stages, crew, started + seconds * (1 - ON_THE_WAY))
    level = _asked(search, request)
    dual = seed_dual_bound(store)
    if level is not None:
        total = count_of(level.stride, store.grid.shape)
        count = min(request.offsets or total, total)
        free_km = search.free_km() if count < total else 0.0
        state = _part(search, level, count, free_km, request.random_seed)
    else:
        free_km = search.free_km()
        search.measure()
        if request.offsets is None:
            level = search.first(_FIRST) or search.first(FINER)
        if level is not None:
            state = _ever_finer(search, level, free_km)
        else:
            state = _part(search, *search.part(request.offsets), free_km, request.random_seed)
    if dual is not None and dual >= state.lower_bound_km:
        state = replace(state, lower_bound_km=dual, standard_error_km=None, source="seed dual")
    certified = max(state.certified_km, dual or 0.0)
    return replace(state, certified_km=certified, seconds=time.monotonic() - started)


def estimate(bounds: Sequence[float], shares: Sequence[float], total: int) -> tuple[float, float]:
    """Return an unbiased estimate of the sum of all bounds, and its standard error.

    Lattices differ in how much of the prior they hold, and their bounds with it. So the first offset that is
    drawn is a pilot, whose bound over its share r tells what to expect; the others are a simple random
    sample, without replacement, of the rest, and correct it. With Y = b − r π,

        b_1 + r (1 − π_1) + (N − 1) mean(Y),

    a difference estimator (Cochran, Sampling Techniques, 3rd edition, section 7.3): r is a number once the
    pilot is drawn, so for every pilot, and hence altogether, its mean is the sum of all bounds, and
    (N − 1)² (1 − n / (N − 1)) var(Y) / n for the n others is without bias what it varies by.

    Parameters
    ----------
    bounds
        b of the offsets in the order in which they were drawn, in km.
    shares
        Their shares π of the prior, which all add up to 1.
    total
        N: how many offsets there are.
    """
    ratio = bounds[0] / shares[0] if shares[0] > 0 else 0.0
    rest = np.array(bounds[1:]) - ratio * np.array(shares[1:])
    others, n = total - 1, len(rest)
    value = bounds[0] + ratio * (1 - shares[0]) + others * float(rest.mean())
    variance = others**2 * (1 - n / others) * float(rest.var(ddof=1)) / n
    return value, math.sqrt(max(variance, 0.0))


def _ever_finer(search: Search, level: Level, free_km: float) -> LowerBound:
    """Solve all parts of a level, then those of better ones that refine it, until the time is up."""
    total = free_km
    # What stands in the total for each part until it is solved, rounded up.
    stands: dict[Part, float] = {}
    while True:
        offsets = lattices.offsets_of(level.stride, search.store.grid.shape)
        found = search.solve(level, offsets)
        total += _gain(found, stands)
        done = search.done(level, offsets, found)
        if len(done) < len(offsets):
            break
        finer = search.after(level)
        if finer is None:
            break
        several: dict[Part, list[float]] = {}
        for part, one in found.items():
            value = max(one.bound_km, stands.get(part, one.free_km))
            several.setdefault(finer.part_with(part, level), []).append(value)
        stands = {part: math.fsum(values) * (1 + _ROUNDING) for part, values in several.items()}
        level = finer
    total *= 1 - 8 * _ROUNDING  # levels are few
    return _outcome(search, level, total, None, total, done)


def _part(search: Search, level: Level, count: int, free_km: float, random_seed: int) -> LowerBound:
    """Solve lattices of a stride, all or some that are drawn at random, for an estimate.

    Within a time limit they are solved in batches, each as large as all before, in the order in which they
    were drawn. The estimate is from whole batches: of the last one, the lattices that are done when the time
    is up are no random part, for quick ones are more likely among them.
    """
    every = lattices.offsets_of(level.stride, search.store.grid.shape)
    # In the order in which they are drawn: the first has a part of its own in the estimate.
    drawn = every
    if count < len(every):
        order = np.random.default_rng(random_seed).permutation(len(every))[:count]
        drawn = [every[i] for i in order.tolist()]
    found: dict[Part, Found] = {}
    whole = 0
    while whole < count:
        batch = sorted(drawn[whole : whole + search.batch(level, whole, count)])
        found |= search.solve(level, batch) if batch else {}
        if not batch or len(search.done(level, batch, found)) < len(batch):
            break
        whole += len(batch)
    certified = free_km + _gain(found, {})
    if len(search.done(level, every, found)) == len(every):
        certified = max(certified, math.fsum(one.bound_km for one in found.values()))
    certified *= 1 - _ROUNDING
    if LEAST_PART <= whole < len(every):
        used = drawn[:whole]
        parts: dict[Offset, list[Found]] = {offset: [] for offset in used}
        for part, one in found.items():
            parts.get(part.offset, []).append(one)
        bounds, shares = (
            [math.fsum(one[field] for one in parts[offset]) for offset in used] for field in (0, 1)
        )
        value, error = estimate(bounds, shares, len(every))
        return _outcome(search, level, value, error, certified, sorted(used))
    return _outcome(search, level, certified, None, certified, search.done(level, every, found))


def _outcome(
    search: Search,
    level: Level,
    value: float,
    error: float | None,
    certified: float,
    offsets: Sequence[Offset],
) -> LowerBound:
    """Return what is said about a bound of a level and some of its offsets."""
    shape = search.store.grid.shape
    east, north = (math.ceil(n / count) for n, count in zip(shape, level.windows, strict=True))
    window = None if level.windows == (1, 1) else (east, north)
    used, total = tuple(offsets), count_of(level.stride, shape)
    return LowerBound(
        value, error, certified, level.stride, window, level.columns, used, total, _LATTICES, 0.0
    )


def _gain(found: Mapping[Part, Found], stands: Mapping[Part, float]) -> float:
    """Return by how much parts raise a total in which other numbers, or free losses, stand for them."""
    more = (one.bound_km - stands.get(part, one.free_km) for part, one in found.items())
    return math.fsum(max(value, 0.0) for value in more)


def _asked(search: Search, request: BoundRequest) -> Level | None:
    """Return the level of a request with a stride; None for one that leaves it open.

    Raises
    ------
    SpecError
        If there cannot be such a stride or number of offsets.
    """
    shape, offsets, stride, levels = search.store.grid.shape, request.offsets, request.stride, search.levels
    if offsets is not None and offsets < LEAST_PART:
        raise SpecError(f"--offsets: an estimate with a standard error takes {LEAST_PART}, got {offsets}")
    if stride is None:
        return None
    if not 1 <= stride <= max(shape):
        raise SpecError(f"--stride: must be between 1 and {max(shape)} for this grid, got {stride}")
    if request.window is not None and request.window < stride:
        raise SpecError(f"--window: must be at least the stride, {stride}, got {request.window}")
    level = levels.whole(stride) if request.window is None else levels.of_window(stride, request.window)
    needed = search.bytes(level, offsets or count_of(stride, shape))
    if needed > memory():
        raise SpecError(
            f"--stride: programs of every {stride}. record need {needed / 2**30:,.1f} GiB of "
            f"memory at once, but there are {memory() / 2**30:,.1f} GiB; use a larger one, or --window"
        )
    return level
