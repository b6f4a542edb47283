"""Stages of a job: timed, told to an observer, their tasks run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mdpext_dask.cluster import Executor
from mdpext_dask.progress import Observer, StageFinished, StageStarted, TaskDone

T = TypeVar("T")


class Stages:
    """Times stages, tells the observer, and runs their tasks."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0) -> Iterator[None]:
        """Time a stage of `total` tasks."""
        self.observer(StageStarted(name, total))
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
        self.observer(StageFinished(name, self.seconds[name]))

    def gather(
        self,
        executor: Executor,
        name: str,
        function: Callable[..., T],
        arguments: list[tuple[Any, ...]],
    ) -> list[T]:
        """Run tasks and return their results in the order of the arguments."""
        results = dict(self.run(executor, name, function, arguments))
        return [results[position] for position in range(len(arguments))]

    def in_order(
        self,
        executor: Executor,
        name: str,
        function: Callable[..., T],
        arguments: list[tuple[Any, ...]],
    ) -> Iterator[T]:
        """Run tasks and yield their results in the order of the arguments; what comes early waits."""
        early: dict[int, T] = {}
        following = 0
        for position, result in self.run(executor, name, function, arguments):
            early[position] = result
            while following in early:
                yield early.pop(following)
                following += 1

    def run(
        self,
        executor: Executor,
        name: str,
        function: Callable[..., T],
        arguments: list[tuple[Any, ...]],
    ) -> Iterator[tuple[int, T]]:
        """Run tasks and yield (position, result) as they come in."""
        for position, result in executor.map(name, function, arguments):
            self.observer(TaskDone(name))
            yield position, result

    def total(self) -> float:
        """Seconds since the first stage."""
        return time.perf_counter() - self._started
