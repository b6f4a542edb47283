"""Passes over the blocks of a store: what attackers' measures are added up from."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.store.mechanism_store import MechanismStore

T = TypeVar("T")
# Probabilities that a task looks at, at most, but for one block: of fewer, starting it is most of the work.
NUMBERS_OF_TASK = 2**19


@dataclass(frozen=True)
class Passes:
    """Runs passes over a store.

    Parameters
    ----------
    store, executor, stages
        The store, where tasks run, and who is told of their stages.
    """

    store: MechanismStore
    executor: Executor
    stages: Stages

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Which blocks a task looks at, one after the other: many only where they are small.

        They depend on the store alone, so that sums are the same wherever tasks run.
        """
        groups: list[tuple[int, ...]] = []
        room = 0
        for block in self.store.plan:
            size = math.prod(block.owned_shape) * self.store.outputs
            if not groups or size > room:
                groups.append(())
                room = NUMBERS_OF_TASK
            groups[-1] += (block.index,)
            room -= size
        return groups

    def each(self, stage: str, function: Callable[..., T], rest: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """Run a stage and yield its tasks' results in order; `rest` is what they take after the URL."""
        tasks = [(self.store.url, *arguments) for arguments in rest]
        with self.stages.stage(stage, len(tasks)):
            yield from self.stages.in_order(self.executor, stage, function, tasks)

    def summed(
        self, stage: str, function: Callable[..., NDArray[np.float64]], rest: Iterable[tuple[Any, ...]]
    ) -> NDArray[np.float64]:
        """Run a stage and return the sum of its tasks' results, added in their order; see :meth:`each`."""
        return np.asarray(sum(self.each(stage, function, rest), start=np.zeros(())))
