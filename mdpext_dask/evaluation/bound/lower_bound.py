"""What no mechanism can beat: a lower bound on the loss of every mechanism that keeps a store's promise.

The records split into s² interleaved lattices. A mechanism that keeps the promise keeps it on each of them,
so the bounds of all lattices add up to one that is certified. A random part of the lattices estimates that
sum, without being a bound itself. The smaller the stride s, the larger the lattices, and the better it gets.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, SpecError
from mdpext_dask.evaluation.bound import lattices
from mdpext_dask.evaluation.bound.seed_dual import seed_dual_bound
from mdpext_dask.events import TaskDone
from mdpext_dask.store.mechanism_store import MechanismStore

SECONDS = 60.0
# Offsets that a standard error needs: a pilot and two more.
LEAST_PART = 3
# How many lattices a part should have where the stride is chosen.
_GOOD_PART = 16
# Seconds that the lattices of a task take together at least, and tasks left for each worker.
_TASK_SECONDS, _TASKS_EACH = 1.0, 4
# What threads of one program are good for, next to programs side by side.
_THREADS_USE = 0.8
# How much of the memory that is there programs may take.
_MEMORY_SHARE = 0.8
_ROUNDING = 4 * sys.float_info.epsilon
# What is said about a bound.
_FACTS = (
    "lower_bound_km", "lower_bound_certified", "lower_bound_standard_error_km", "lower_bound_certified_km",
    "lower_bound_source", "lower_bound_stride", "offsets_used", "offsets_total", "lower_bound_offsets", "gap",
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
        What is proved in any case, in km: offsets that were left out count with what is lost without any
        privacy.
    stride
        Steps between records of one lattice.
    offsets
        The offsets whose programs were solved.
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
        How long programs may be predicted to take; 0 without a stride for no bound.
    stride
        Steps between records of a lattice; default: the finest whose programs fit into the time, for all
        offsets, or if there is none, for a part.
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
        return dict.fromkeys(_FACTS)
    found = lower_bound(store, executor, stages, request)
    # The loss is a sum of this many numbers, none negative.
    rounding = (store.grid.records + store.outputs) * sys.float_info.epsilon
    if loss_km * (1 + rounding) < found.certified_km:
        raise GuaranteeViolation(
            f"{store.url}: its loss of {loss_km:.6g} km is less than the {found.certified_km:.6g} km that "
            "every mechanism with its promise loses; rows, prior or tables of the loss are damaged: audit it"
        )
    if not found.certified and found.lower_bound_km > loss_km:
        # The loss itself tells that the estimate is too high; what is proved is not.
        found = replace(found, lower_bound_km=found.certified_km, standard_error_km=None)
    value = found.lower_bound_km
    facts = (
        value, found.certified, found.standard_error_km, found.certified_km, found.source, found.stride,
        found.offsets_used, found.offsets_total,
        None if found.whole else [list(offset) for offset in found.offsets],
        loss_km / value - 1 if value > 0 else None,
    )  # fmt: skip
    return dict(zip(_FACTS, facts, strict=True))


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
    started = time.perf_counter()
    stride, count = _choose(store, executor, request)
    every = lattices.offsets_of(stride, store.grid.shape)
    # In the order in which they are drawn: the first has a part of its own in the estimate.
    drawn = list(range(len(every)))
    if count < len(every):
        drawn = np.random.default_rng(request.random_seed).permutation(len(every))[:count].tolist()
    at = sorted(drawn)
    used = [every[i] for i in at]
    with stages.stage("bound", len(used), "lattices"):
        found = dict(zip(at, _solve(store, executor, stages, stride, used), strict=True))
        bounds, shares = ([found[i][part] for i in drawn] for part in (0, 1))
        error: float | None = None
        if count == len(every):
            value = certified = math.fsum(bounds) * (1 - _ROUNDING)
        else:
            value, error = estimate(bounds, shares, len(every))
            certified = _certified(store, executor, stride, used, bounds)
        dual, source = seed_dual_bound(store), "lattices"
        if dual is not None and dual >= value:
            value, error, source = dual, None, "seed dual"
    seconds = time.perf_counter() - started
    certified = max(certified, dual or 0.0)
    return LowerBound(value, error, certified, stride, tuple(used), len(every), source, seconds)


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


def _solve(
    store: MechanismStore, executor: Executor, stages: Stages, stride: int, offsets: list[lattices.Offset]
) -> list[tuple[float, float]]:
    """Return bound and share of each lattice, in order."""
    if _one_by_one(len(offsets), executor):
        found = []
        for offset in offsets:
            found.append(solve_alone(store, executor, lattices.bound_alone, stride, offset))
            stages.observer(TaskDone("bound"))
        return found
    (largest, _), *_ = lattices.shapes_of(store.grid.shape, stride)
    seconds = lattices.predicted_seconds(largest, store.outputs, store.metric_p)
    most = max(len(offsets) // (_TASKS_EACH * executor.workers), 1)
    size = min(max(math.ceil(_TASK_SECONDS / seconds), 1), most)
    tasks = [(store.url, stride, offsets[first : first + size]) for first in range(0, len(offsets), size)]
    results: dict[int, list[tuple[float, float]]] = {}
    for position, result in executor.map("bound", lattices.bound_lattices, tasks):
        results[position] = result
        for _ in result:
            stages.observer(TaskDone("bound"))
    return [one for position in range(len(tasks)) for one in results[position]]


def _certified(
    store: MechanismStore,
    executor: Executor,
    stride: int,
    used: list[lattices.Offset],
    bounds: Sequence[float],
) -> float:
    """Return the sum of the bounds that were found, and of what the other lattices lose in any case."""
    blocks = [(store.url, index, stride) for index in range(store.plan.blocks)]
    found = dict(executor.map("bound", lattices.free_losses, blocks))
    free = np.sum([found[position] for position in range(len(blocks))], axis=0)
    free[tuple(np.transpose(used))] = 0.0
    rounding = (len(blocks) + 1) * sys.float_info.epsilon
    return math.fsum([*bounds, math.fsum(free.ravel()) * (1 - rounding)]) * (1 - _ROUNDING)


def _choose(store: MechanismStore, executor: Executor, request: BoundRequest) -> tuple[int, int]:
    """Return the stride, and how many offsets to solve."""
    shape, offsets = store.grid.shape, request.offsets
    there = int(_MEMORY_SHARE * psutil.virtual_memory().total)
    if request.stride is not None:
        if not 1 <= request.stride <= max(shape):
            raise SpecError(
                f"--stride: must be between 1 and {max(shape)} for this grid, got {request.stride}"
            )
        total = _count(request.stride, shape)
        _, needed = _needs(store, executor, request.stride, offsets or total)
        if needed > there:
            raise SpecError(
                f"--stride: programs of every {request.stride}. record need {needed / 2**30:,.1f} GiB of "
                f"memory at once, but there are {there / 2**30:,.1f} GiB; use a larger one"
            )
        return request.stride, _checked(offsets, total)
    _checked(offsets, store.grid.records)
    for wanted in (offsets,) if offsets else (None, _GOOD_PART, LEAST_PART):
        for stride in range(1, max(shape) + 1):
            total = _count(stride, shape)
            count = total if wanted is None else min(wanted, total)
            seconds, needed = _needs(store, executor, stride, count)
            if seconds > request.seconds or needed > there:
                continue
            if offsets is None and count < total:  # as many as there is time for
                count = max(count, min(int(request.seconds / (seconds / count)), total))
            return stride, count
    # Not even three lattices of single records.
    return max(shape), _checked(offsets or LEAST_PART, store.grid.records)


def _count(stride: int, shape: tuple[int, int]) -> int:
    """Return how many lattices there are."""
    return min(stride, shape[0]) * min(stride, shape[1])


def _checked(offsets: int | None, total: int) -> int:
    if offsets is None:
        return total
    if offsets < LEAST_PART:
        raise SpecError(f"--offsets: an estimate with a standard error takes {LEAST_PART}, got {offsets}")
    return min(offsets, total)


def _one_by_one(offsets: int, executor: Executor) -> bool:
    """Whether every lattice gets all workers or threads, rather than each worker a lattice."""
    return offsets < executor.workers or executor.workers < executor.threads


def _needs(store: MechanismStore, executor: Executor, stride: int, count: int) -> tuple[float, int]:
    """Return about how many seconds the programs of `count` offsets take, and how many bytes at once."""
    size = store.outputs, store.metric_p
    shapes = list(lattices.shapes_of(store.grid.shape, stride))
    largest, total = shapes[0][0], sum(many for _, many in shapes)
    work = sum(many * lattices.predicted_seconds(shape, *size) for shape, many in shapes) * count / total
    at_once = executor.workers if executor.on_this_machine else 1
    if _one_by_one(count, executor):
        return work / max(_THREADS_USE * executor.threads, 1.0), lattices.predicted_bytes(largest, *size)
    seconds = max(work / executor.workers, lattices.predicted_seconds(largest, *size))
    return seconds, lattices.predicted_bytes(largest, *size) * min(at_once, count)
