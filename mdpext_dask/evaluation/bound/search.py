"""Solving parts of a problem until a deadline, and knowing how fast that goes."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.lp_placement import solve_alone
from mdpext_dask.compute.stages import Stages
from mdpext_dask.evaluation.bound import lattices
from mdpext_dask.evaluation.bound.lattices import Found, Level, Offset, Part
from mdpext_dask.evaluation.bound.levels import Levels
from mdpext_dask.events import TaskDone
from mdpext_dask.store.mechanism_store import MechanismStore

# Offsets that a standard error needs: a pilot and two more.
LEAST_PART = 3
# How many lattices a part should have where the stride is chosen.
_GOOD_PART = 16
# Seconds that the parts of a task take together at least, and tasks left for each worker.
_TASK_SECONDS, _TASKS_EACH = 1.0, 4
# What threads of one program are good for, next to programs side by side.
_THREADS_USE = 0.8
# How much of the memory that is there programs may take.
_MEMORY_SHARE = 0.8
# Shares of the time: what is kept for answers on their way; until when losses without privacy are added up;
# how large a program may be by which speed is measured, and how long it may take.
ON_THE_WAY, _FREE, _PROBE, _PROBE_LIMIT = 0.05, 0.5, 0.02, 0.1
# No machine is faster than the one that predictions were fitted on by more.
_LEAST_PACE = 0.1
# Shares of what is left that a better level and a part of the lattices should take at most.
FINER, _PART = 0.9, 0.7


class Crew(NamedTuple):
    """Who solves: workers, threads of a task that is alone, and whether they are on this machine."""

    workers: int
    threads: int
    here: bool

    @classmethod
    def of(cls, executor: Executor) -> "Crew":
        """Return the workers of an executor as they are now: asking for them is a request each time."""
        return cls(executor.workers, executor.threads, executor.on_this_machine)

    def one_by_one(self, offsets: int) -> bool:
        """Whether every lattice gets all workers or threads, rather than each worker a lattice."""
        return offsets < self.workers or self.workers < self.threads


class Search:
    """Solves parts of a store's problem until a deadline, and knows how fast that goes.

    Parameters
    ----------
    store, executor, stages
        Of :func:`lower_bound`.
    levels
        Of the store.
    crew
        Of the executor.
    deadline
        In s of :func:`time.monotonic`.
    """

    def __init__(
        self,
        store: MechanismStore,
        levels: Levels,
        executor: Executor,
        stages: Stages,
        crew: Crew,
        deadline: float,
    ) -> None:
        self.store, self.levels, self.executor, self.stages, self.crew = store, levels, executor, stages, crew
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
        store, workers, levels = self.store, self.crew.workers, self.levels
        threads = self.crew.threads if workers == 1 else 1
        use = max(_THREADS_USE * threads, 1.0)
        for stride in range(1, max(store.grid.shape) + 1):
            probe = levels.probe(stride)
            predicted = levels.largest(probe) / use
            if predicted <= _PROBE * self.whole:
                break
        started, limit = time.monotonic(), self._limit(_PROBE_LIMIT * self.whole)
        part = Part((0, 0), levels.heaviest(stride))
        tasks = [(store.url, probe, part, limit, threads)] * workers
        timed = [seconds for _, seconds in self.executor.map("bound", lattices.time_part, tasks)]
        took, task = (max(each) for each in zip(*timed, strict=True))
        # Where even that is not done in its time, it is not known how much slower it is.
        slow = 2.0 if task >= limit.seconds else 1.0
        self.pace = max(slow * took / predicted, _LEAST_PACE)
        # Tasks and answers take some time on their way; more than that is not kept for them.
        way = time.monotonic() - started - task
        self.deadline -= min(max(way - ON_THE_WAY * self.whole, 0.0), _PROBE_LIMIT * self.whole)

    def first(self, share: float) -> Level | None:
        """Return the best level all of whose parts fit into a share of what is left."""
        seconds = share * self.left
        for level in sorted(self.levels.every, key=self.levels.quality, reverse=True):
            if self.fits(level, count_of(level.stride, self.store.grid.shape), seconds):
                return level
        return None

    def after(self, level: Level) -> Level | None:
        """Return which better level that refines another promises most; None if there is no time for a part.

        Where there is the time for some of its parts only, so much of its gain counts.
        """
        levels, seconds = self.levels, FINER * self.left
        reached, best, most = levels.quality(level), None, 0.0
        for one in levels.every:
            gain = levels.quality(one) - reached
            if gain <= most or not one.refines(level) or self.pace * levels.largest(one) > seconds:
                continue
            count = count_of(one.stride, self.store.grid.shape)
            gain *= min(seconds / (self.pace * self.seconds(one, count)), 1.0)
            if gain > most and self.bytes(one, count) <= memory():
                best, most = one, gain
        return best

    def part(self, offsets: int | None) -> tuple[Level, int]:
        """Return a level of which a good part fits into the time, and how many lattices to solve at most."""
        shape, seconds, levels = self.store.grid.shape, _PART * self.left, self.levels
        # Of one or two lattices nothing would be left if they take longer.
        several = [
            level for level in levels.every if count_of(level.stride, shape) >= LEAST_PART
        ] or levels.every
        ordered = sorted(several, key=levels.quality, reverse=True)
        for wanted in (offsets,) if offsets else (_GOOD_PART, LEAST_PART):
            for level in ordered:
                total = count_of(level.stride, shape)
                count = min(wanted, total)
                if self.fits(level, count, seconds):
                    return level, count if offsets else total
        # Not even three small lattices: the time will be up.
        level = min(several, key=lambda level: levels.seconds(level, 1))
        return level, min(offsets or LEAST_PART, count_of(level.stride, shape))

    def batch(self, level: Level, before: int, count: int) -> int:
        """Return how many of `count` lattices to solve next, after some: all, if there is no hurry."""
        if math.isinf(self.whole):
            return count - before
        size = min(max(before, LEAST_PART, self.crew.workers), count - before)
        seconds = FINER * self.left
        while before and size and not self.fits(level, size, seconds):
            size //= 2
        return size

    def fits(self, level: Level, count: int, seconds: float) -> bool:
        """Whether so many lattices fit into a time, as fast as it goes now, and into the memory."""
        return self.pace * self.seconds(level, count) <= seconds and self.bytes(level, count) <= memory()

    def seconds(self, level: Level, count: int) -> float:
        """Return about how many seconds the programs of so many lattices take."""
        levels, crew = self.levels, self.crew
        work = levels.seconds(level, count)
        if crew.one_by_one(count * len(levels.windows(level))):
            return work / max(_THREADS_USE * crew.threads, 1.0)
        return max(work / crew.workers, levels.largest(level))

    def bytes(self, level: Level, count: int) -> int:
        """Return about how many bytes they take at once on a machine."""
        parts = count * len(self.levels.windows(level))
        at_once = self.crew.workers if self.crew.here and not self.crew.one_by_one(parts) else 1
        return self.levels.bytes(level) * min(at_once, parts)

    def _limit(self, seconds: float) -> lattices.Limit:
        """Return a limit for tasks that are handed out now."""
        return lattices.Limit(seconds, time.monotonic() + seconds if self.crew.here else None)

    def free_km(self) -> float:
        """Return what is lost without any privacy at least, in km, of the blocks that there is time for."""
        store, limit = self.store, self._limit(_FREE * self.left)
        blocks = [(store.url, index, limit) for index in range(store.plan.blocks)]
        return math.fsum(part for _, part in self.executor.map("bound", lattices.free_loss, blocks))

    def solve(self, level: Level, offsets: Sequence[Offset]) -> dict[Part, Found]:
        """Return what is proved about the parts of lattices, those that there was no time for left out."""
        store, executor, started = self.store, self.executor, time.monotonic()
        parts = self.levels.parts(level, offsets)
        results: dict[Part, Found] = {}

        def take(some: Sequence[Part], found: Sequence[Found | None]) -> None:
            for part, one in zip(some, found, strict=True):
                if one is not None:
                    results[part] = one
                    self.stages.observer(TaskDone("bound"))

        with self.stages.stage("bound", len(parts), "lattices"):
            if self.crew.one_by_one(len(parts)):
                for part in parts:
                    left = self.left
                    if left <= 0:
                        break
                    which = level, part, self._limit(left)
                    take([part], [solve_alone(store, executor, lattices.bound_alone, *which)])
            else:
                limit, size = self._limit(self.left), self._at_once(level, len(parts))
                several = [parts[first : first + size] for first in range(0, len(parts), size)]
                tasks = [(store.url, level, some, limit) for some in several]
                for position, found in executor.map("bound", lattices.bound_parts, tasks):
                    take(several[position], found)
                    if self.left < -ON_THE_WAY * self.whole:
                        break  # the tasks that are left would only say that the time is up
        if len(results) == len(parts) and all(one.finished for one in results.values()):
            self.pace = (time.monotonic() - started) / self.seconds(level, len(offsets))
        return results

    def done(self, level: Level, offsets: Sequence[Offset], found: Mapping[Part, Found]) -> list[Offset]:
        """Return the offsets all of whose parts were solved."""
        windows = self.levels.windows(level)
        return [
            offset
            for offset in offsets
            if all((one := found.get(Part(window, offset))) and one.finished for window in windows)
        ]

    def _at_once(self, level: Level, count: int) -> int:
        """Return how many parts a task solves."""
        each = self.pace * self.levels.seconds(level, 1) / max(len(self.levels.windows(level)), 1)
        most = max(count // (_TASKS_EACH * self.crew.workers), 1)
        return min(max(math.ceil(_TASK_SECONDS / each), 1), most)


def memory() -> int:
    """Return how many bytes programs may take on a machine like this one."""
    return int(_MEMORY_SHARE * psutil.virtual_memory().total)


def count_of(stride: int, shape: tuple[int, int]) -> int:
    """Return how many lattices there are."""
    return min(stride, shape[0]) * min(stride, shape[1])
