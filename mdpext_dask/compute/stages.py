"""Stages of a job: their times, their events, their tasks."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from mdpext_dask import events
from mdpext_dask.compute.executor import Executor
from mdpext_dask.store import locks, objects

T = TypeVar("T")


class Stages:
    """Times stages, tells the observer, and runs their tasks.

    Parameters
    ----------
    observer
        Gets the events.
    guard
        Called at every stage and result; raises if the run must stop.

    Attributes
    ----------
    seconds
        Times of finished stages, by name, in s.
    expected
        Predicted times for a number of workers, by name and in total, once they are known.
    """

    def __init__(self, observer: events.Observer, guard: Callable[[], None] = lambda: None) -> None:
        self.observer = observer
        self._guard = guard
        self.seconds: dict[str, float] = {}
        self.expected: Callable[[int], dict[str, float]] | None = None
        self._started = time.perf_counter()

    def check(self) -> None:
        """Raise if the run must stop."""
        self._guard()

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0, unit: str = "tasks") -> Iterator[None]:
        """Time a stage of `total` tasks, which are called `unit` in the plural."""
        self._guard()
        self.observer(events.StageStarted(name, total, unit))
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            self.observer(events.StageFailed(name, time.perf_counter() - started))
            raise
        took = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + took  # some come more than once
        self.observer(events.StageFinished(name, took))

    def gather(
        self, executor: Executor, name: str, function: Callable[..., T], arguments: list[tuple[Any, ...]]
    ) -> list[T]:
        """Run tasks and return their results in the order of the arguments."""
        return list(self.in_order(executor, name, function, arguments))

    def in_order(
        self, executor: Executor, name: str, function: Callable[..., T], arguments: list[tuple[Any, ...]]
    ) -> Iterator[T]:
        """Run tasks and yield their results in the order of the arguments."""
        yield from sorted_out(self.run(executor, name, function, arguments))

    def run(
        self, executor: Executor, name: str, function: Callable[..., T], arguments: list[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Run tasks and yield (position, result) as they come in."""
        for position, result in executor.map(name, function, arguments):
            self._guard()
            self.observer(events.TaskDone(name))
            yield position, result

    def total(self) -> float:
        """Seconds since the first stage."""
        return time.perf_counter() - self._started


def sorted_out(results: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Yield results that come with their positions, in any order, by position."""
    early: dict[int, T] = {}
    following = 0
    for position, result in results:
        early[position] = result
        while following in early:
            yield early.pop(following)
            following += 1


def observe_cluster(executor: Executor, observer: events.Observer) -> None:
    """Tell an observer of the workers and their dashboard."""
    observer(events.ClusterReady(executor.workers, executor.dashboard))


@contextlib.contextmanager
def at_work(url: str, observer: events.Observer) -> Iterator[Stages]:
    """Hold the lock of the store at `url`, whether the store exists yet or not.

    Raises
    ------
    StoreError
        If another run is at work on it, or it cannot be written.
    """
    objects.check_place(url)
    with locks.hold(url, lambda text: observer(events.Note(text))) as lock:
        yield Stages(observer, lock.require)
