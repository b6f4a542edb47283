"""What no mechanism can beat: a lower bound on the loss of every mechanism that keeps a store's promise.

The records split into s² interleaved lattices. A mechanism that keeps the promise keeps it on each of them,
so the bounds of all lattices add up to one that is certified. A random part of the lattices estimates that
sum, without being a bound itself. The smaller the stride s, the larger the lattices, and the better it gets.

Within a time limit, what fits is measured, not predicted: first how fast this machine is now, then how long
the lattices of one stride took. Each lattice of stride s is four of stride 2 s, whose bounds stand for it
until it has one of its own, so whenever the time is up, the sum of what there is is certified.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import psutil

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, SpecError
from mdpext_dask.evaluation.bound import lattices
from mdpext_dask.evaluation.bound.lattice_program import reach_of
from mdpext_dask.evaluation.bound.seed_dual import seed_dual_bound
from mdpext_dask.events import TaskDone
from mdpext_dask.seed.record_program import predicted_bytes, predicted_seconds
from mdpext_dask.store.mechanism_store import MechanismStore

SECONDS = 60.0
# Offsets that a standard error needs: a pilot and two more.
LEAST_PART = 3
# How many lattices a part should have where the stride is chosen.
_GOOD_PART = 16
# Seconds that the lattices of a task take together at least, and tasks left for each worker.
_TASK_SECONDS, _TASKS_EACH = 1.0, 4
# Records along the longer side of a lattice that is worth solving where there is hardly any time.
_LEAST_SIDE = 4
# What threads of one program are good for, next to programs side by side.
_THREADS_USE = 0.8
# How much of the memory that is there programs may take.
_MEMORY_SHARE = 0.8
_ROUNDING = 4 * sys.float_info.epsilon
# Shares of the time: what is kept for answers on their way; until when losses without privacy are added up;
# how large a program may be by which speed is measured, and how long it may take.
_ON_THE_WAY, _FREE, _PROBE, _PROBE_LIMIT = 0.05, 0.5, 0.02, 0.1
# No machine is faster than the one that predictions were fitted on by more.
_LEAST_PACE = 0.1
# Shares of what is left that the first stride, a finer one, and a part of the lattices should take at most.
_FIRST, _FINER, _PART = 0.4, 0.9, 0.7
_LATTICES = "lattices"
# What is said about a bound.
FACTS = (
    "lower_bound_km", "lower_bound_certified", "lower_bound_standard_error_km", "lower_bound_certified_km",
    "lower_bound_source", "lower_bound_stride", "offsets_used", "offsets_total", "lower_bound_offsets", "gap",
    "lower_bound_seconds",
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
        What is proved in any case, in km: offsets that were left out count with the lattices of a coarser
        stride, or with what is lost without any privacy.
    stride
        Steps between records of one lattice: the finest one.
    offsets
        The offsets of that stride whose programs were solved.
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
    offsets: tuple[lattices.Offset, ...]
    offsets_total: int
    source: str
    seconds: float

    @property
    def certified(self) -> bool:
        """Whether the bound is proved."""
        return self.standard_error_km is None

    @property
    def offsets_used(self) -> int:
        """How many programs were solved."""
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
        ones, for all offsets; or if no stride has the time for that, a fine one for a part of them.
    offsets
        How many offsets to draw, without replacement; default: all of them, if that fits.
    random_seed
        For the draw.

    Raises
    ------
    SpecError
        If the time is negative.
    """

    seconds: float = SECONDS
    stride: int | None = None
    offsets: int | None = None
    random_seed: int = 0

    def __post_init__(self) -> None:
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
    started, crew = time.monotonic(), _Crew.of(executor)
    _check(store, crew, request)
    dual = seed_dual_bound(store)
    seconds = math.inf if request.stride is not None else request.seconds
    search = _Search(store, executor, stages, crew, started + seconds * (1 - _ON_THE_WAY))
    if request.stride is not None:
        total = _count(request.stride, store.grid.shape)
        count = min(request.offsets or total, total)
        free_km = search.free_km() if count < total else 0.0
        state = _part(search, request.stride, count, free_km, request.random_seed)
    else:
        free_km = search.free_km()
        search.measure()
        stride = search.finest(_FIRST, _powers(store)) if request.offsets is None else None
        if stride is not None:
            state = _ever_finer(search, stride, free_km)
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


class _Crew(NamedTuple):
    """Who solves: workers, threads of a task that is alone, and whether they are on this machine."""

    workers: int
    threads: int
    here: bool

    @classmethod
    def of(cls, executor: Executor) -> "_Crew":
        """Return the workers of an executor as they are now: asking for them is a request each time."""
        return cls(executor.workers, executor.threads, executor.on_this_machine)

    def one_by_one(self, offsets: int) -> bool:
        """Whether every lattice gets all workers or threads, rather than each worker a lattice."""
        return offsets < self.workers or self.workers < self.threads


class _Search:
    """Solves lattices of a store until a deadline, and knows how fast that goes.

    Parameters
    ----------
    store, executor, stages
        Of :func:`lower_bound`.
    crew
        Of the executor.
    deadline
        In s of :func:`time.monotonic`.
    """

    def __init__(
        self, store: MechanismStore, executor: Executor, stages: Stages, crew: _Crew, deadline: float
    ) -> None:
        self.store, self.executor, self.stages, self.crew = store, executor, stages, crew
        self.deadline = deadline
        self.whole = self.left
        # Seconds that a predicted one takes.
        self.pace = 1.0

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    def measure(self) -> None:
        """Measure how fast programs are solved now, with all workers at it."""
        store, workers = self.store, self.crew.workers
        size = store.outputs, reach_of(store.metric_p)
        threads = self.crew.threads if workers == 1 else 1
        use = max(_THREADS_USE * threads, 1.0)
        for stride in range(1, max(max(store.grid.shape) // _LEAST_SIDE, 1) + 1):
            (shape, _), *_ = lattices.shapes_of(store.grid.shape, stride)
            predicted = predicted_seconds(shape, *size) / use
            if predicted <= _PROBE * self.whole:
                break
        started, limit = time.monotonic(), self._limit(_PROBE_LIMIT * self.whole)
        tasks = [(store.url, stride, limit, threads)] * workers
        timed = [seconds for _, seconds in self.executor.map("bound", lattices.time_lattice, tasks)]
        took, task = (max(each) for each in zip(*timed, strict=True))
        # Where even that is not done in its time, it is not known how much slower it is.
        slow = 2.0 if task >= limit.seconds else 1.0
        self.pace = max(slow * took / predicted, _LEAST_PACE)
        # Tasks and answers take some time on their way; more than that is not kept for them.
        way = time.monotonic() - started - task
        self.deadline -= min(max(way - _ON_THE_WAY * self.whole, 0.0), _PROBE_LIMIT * self.whole)

    def finest(self, share: float, strides: Sequence[int]) -> int | None:
        """Return the finest of some strides all of whose lattices fit into a share of what is left."""
        seconds = share * self.left
        for stride in strides:
            if self.fits(stride, _count(stride, self.store.grid.shape), seconds):
                return stride
        return None

    def part(self, offsets: int | None) -> tuple[int, int]:
        """Return a stride of which a good part fits into the time, and how many lattices to solve at most."""
        shape, seconds = self.store.grid.shape, _PART * self.left
        for wanted in (offsets,) if offsets else (_GOOD_PART, LEAST_PART):
            for stride in range(1, max(shape) + 1):
                total = _count(stride, shape)
                count = min(wanted, total)
                # Of one or two lattices nothing would be left if they take longer.
                if count >= LEAST_PART and self.fits(stride, count, seconds):
                    return stride, count if offsets else total
        # Not even three small lattices: the time will be up.
        stride = max(max(shape) // _LEAST_SIDE, 1)
        return stride, min(offsets or LEAST_PART, _count(stride, shape))

    def batch(self, stride: int, before: int, count: int) -> int:
        """Return how many of `count` lattices to solve next, after some: all, if there is no hurry."""
        if math.isinf(self.whole):
            return count - before
        size = min(max(before, LEAST_PART, self.crew.workers), count - before)
        seconds = _FINER * self.left
        while before and size and not self.fits(stride, size, seconds):
            size //= 2
        return size

    def fits(self, stride: int, count: int, seconds: float) -> bool:
        """Whether so many lattices fit into a time, as fast as it goes now, and into the memory."""
        predicted, needed = _needs(self.store, self.crew, stride, count)
        return self.pace * predicted <= seconds and needed <= _memory()

    def _limit(self, seconds: float) -> lattices.Limit:
        """Return a limit for tasks that are handed out now."""
        return lattices.Limit(seconds, time.monotonic() + seconds if self.crew.here else None)

    def free_km(self) -> float:
        """Return what is lost without any privacy at least, in km, of the blocks that there is time for."""
        store, limit = self.store, self._limit(_FREE * self.left)
        blocks = [(store.url, index, limit) for index in range(store.plan.blocks)]
        return math.fsum(part for _, part in self.executor.map("bound", lattices.free_loss, blocks))

    def solve(self, stride: int, offsets: Sequence[lattices.Offset]) -> dict[lattices.Offset, lattices.Found]:
        """Return what is proved about lattices, those that there was no time for left out."""
        store, executor, started = self.store, self.executor, time.monotonic()
        results: dict[lattices.Offset, lattices.Found] = {}

        def take(some: Sequence[lattices.Offset], found: Sequence[lattices.Found | None]) -> None:
            for offset, one in zip(some, found, strict=True):
                if one is not None:
                    results[offset] = one
                    self.stages.observer(TaskDone("bound"))

        with self.stages.stage("bound", len(offsets), "lattices"):
            if self.crew.one_by_one(len(offsets)):
                for offset in offsets:
                    left = self.left
                    if left <= 0:
                        break
                    which = stride, offset, self._limit(left)
                    take([offset], [solve_alone(store, executor, lattices.bound_alone, *which)])
            else:
                limit, size = self._limit(self.left), self._at_once(stride, len(offsets))
                parts = [offsets[first : first + size] for first in range(0, len(offsets), size)]
                tasks = [(store.url, stride, part, limit) for part in parts]
                for position, several in executor.map("bound", lattices.bound_lattices, tasks):
                    take(parts[position], several)
                    if self.left < -_ON_THE_WAY * self.whole:
                        break  # the tasks that are left would only say that the time is up
        if len(results) == len(offsets) and all(one.finished for one in results.values()):
            predicted, _ = _needs(store, self.crew, stride, len(offsets))
            self.pace = (time.monotonic() - started) / predicted
        return results

    def _at_once(self, stride: int, count: int) -> int:
        """Return how many lattices a task solves."""
        (largest, _), *_ = lattices.shapes_of(self.store.grid.shape, stride)
        each = self.pace * predicted_seconds(largest, self.store.outputs, reach_of(self.store.metric_p))
        most = max(count // (_TASKS_EACH * self.crew.workers), 1)
        return min(max(math.ceil(_TASK_SECONDS / each), 1), most)


def _ever_finer(search: _Search, stride: int, free_km: float) -> LowerBound:
    """Solve all lattices of a stride, a power of two, then those of finer ones, until the time is up."""
    shape, total = search.store.grid.shape, free_km
    # What stands in the total for each lattice until it is solved, rounded up.
    stands: dict[lattices.Offset, float] = {}
    while True:
        offsets = lattices.offsets_of(stride, shape)
        found = search.solve(stride, offsets)
        total += _gain(found, stands)
        done = tuple(offset for offset in offsets if offset in found and found[offset].finished)
        if stride == 1 or len(done) < len(offsets):
            break
        # The finest that can be had whole; or as much as there is time for of the next.
        finer = search.finest(_FINER, _powers(search.store, stride // 2)) or stride // 2
        if not search.fits(finer, 1, _FINER * search.left):
            break
        parts: dict[lattices.Offset, list[float]] = {}
        for (a, b), one in found.items():
            value = max(one.bound_km, stands.get((a, b), one.free_km))
            parts.setdefault((a % finer, b % finer), []).append(value)
        stands = {offset: math.fsum(values) * (1 + _ROUNDING) for offset, values in parts.items()}
        stride = finer
    total *= 1 - 8 * _ROUNDING  # levels are few
    return LowerBound(total, None, total, stride, done, len(offsets), _LATTICES, 0.0)


def _part(search: _Search, stride: int, count: int, free_km: float, random_seed: int) -> LowerBound:
    """Solve lattices of a stride, all or some that are drawn at random, for an estimate.

    Within a time limit they are solved in batches, each as large as all before, in the order in which they
    were drawn. The estimate is from whole batches: of the last one, the lattices that are done when the time
    is up are no random part, for quick ones are more likely among them.
    """
    every = lattices.offsets_of(stride, search.store.grid.shape)
    # In the order in which they are drawn: the first has a part of its own in the estimate.
    drawn = every
    if count < len(every):
        order = np.random.default_rng(random_seed).permutation(len(every))[:count]
        drawn = [every[i] for i in order.tolist()]
    found: dict[lattices.Offset, lattices.Found] = {}
    whole = 0
    while whole < count:
        batch = sorted(drawn[whole : whole + search.batch(stride, whole, count)])
        found |= search.solve(stride, batch) if batch else {}
        if not batch or not all(offset in found and found[offset].finished for offset in batch):
            break
        whole += len(batch)
    certified = free_km + _gain(found, {})
    if len(found) == len(every):
        certified = max(certified, math.fsum(one.bound_km for one in found.values()))
    certified *= 1 - _ROUNDING
    if LEAST_PART <= whole < len(every):
        used = drawn[:whole]
        bounds, shares = ([found[offset][part] for offset in used] for part in (0, 1))
        value, error = estimate(bounds, shares, len(every))
        return LowerBound(value, error, certified, stride, tuple(sorted(used)), len(every), _LATTICES, 0.0)
    done = tuple(offset for offset in sorted(found) if found[offset].finished)
    return LowerBound(certified, None, certified, stride, done, len(every), _LATTICES, 0.0)


def _gain(found: Mapping[lattices.Offset, lattices.Found], stands: Mapping[lattices.Offset, float]) -> float:
    """Return by how much lattices raise a total in which other numbers, or free losses, stand for them."""
    more = (one.bound_km - stands.get(offset, one.free_km) for offset, one in found.items())
    return math.fsum(max(part, 0.0) for part in more)


def _powers(store: MechanismStore, most: int | None = None) -> list[int]:
    """Return the powers of two that are strides of lattices with more than one record, the finest first."""
    most = max(max(store.grid.shape) // 2, 1) if most is None else most
    return [1 << power for power in range(most.bit_length())]


def _check(store: MechanismStore, crew: _Crew, request: BoundRequest) -> None:
    """Refuse a stride or a number of offsets that cannot be.

    Raises
    ------
    SpecError
        If so.
    """
    shape, offsets = store.grid.shape, request.offsets
    if offsets is not None and offsets < LEAST_PART:
        raise SpecError(f"--offsets: an estimate with a standard error takes {LEAST_PART}, got {offsets}")
    if request.stride is None:
        return
    if not 1 <= request.stride <= max(shape):
        raise SpecError(f"--stride: must be between 1 and {max(shape)} for this grid, got {request.stride}")
    _, needed = _needs(store, crew, request.stride, offsets or _count(request.stride, shape))
    if needed > _memory():
        raise SpecError(
            f"--stride: programs of every {request.stride}. record need {needed / 2**30:,.1f} GiB of "
            f"memory at once, but there are {_memory() / 2**30:,.1f} GiB; use a larger one"
        )


def _memory() -> int:
    return int(_MEMORY_SHARE * psutil.virtual_memory().total)


def _count(stride: int, shape: tuple[int, int]) -> int:
    """Return how many lattices there are."""
    return min(stride, shape[0]) * min(stride, shape[1])


def _needs(store: MechanismStore, crew: _Crew, stride: int, count: int) -> tuple[float, int]:
    """Return about how many seconds the programs of `count` offsets take, and how many bytes at once."""
    size = store.outputs, reach_of(store.metric_p)
    shapes = list(lattices.shapes_of(store.grid.shape, stride))
    largest, total = shapes[0][0], sum(many for _, many in shapes)
    work = sum(many * predicted_seconds(shape, *size) for shape, many in shapes) * count / total
    at_once = crew.workers if crew.here else 1
    if crew.one_by_one(count):
        return work / max(_THREADS_USE * crew.threads, 1.0), predicted_bytes(largest, *size)
    seconds = max(work / crew.workers, predicted_seconds(largest, *size))
    return seconds, predicted_bytes(largest, *size) * min(at_once, count)
