"""Events of a run; observers show or record them.

Stages follow each other, or lie within one another. A task may belong to a stage that was not announced: a
search makes tasks of its own, whose number is not known before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# The stages of a job in their order ("cells" where there are cell programs), and the name of the whole.
STAGES = ("domain", "loss", "seed", "cells", "extend", "boundary", "audit", "evaluate")
TOTAL = "total"


@dataclass(frozen=True)
class StageStarted:
    """A stage begins; `total` tasks follow (0 if it has none), called `unit` in the plural."""

    stage: str
    total: int = 0
    unit: str = "tasks"


@dataclass(frozen=True)
class TaskDone:
    """One task of a stage is done."""

    stage: str


@dataclass(frozen=True)
class StageFinished:
    """A stage has ended after `seconds`."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class StageFailed:
    """A stage has failed after `seconds`; the error follows."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class Note:
    """Something the user should know; of a diary, what only those want to know who look over its shoulder."""

    text: str
    diary: bool = False


@dataclass(frozen=True)
class ClusterReady:
    """There are `workers` workers now; `dashboard` is the address of their pages, if they have any."""

    workers: int
    dashboard: str | None = None


@dataclass(frozen=True)
class Planned:
    """Predicted times of the stages of a job, in s, in their order, with `total`."""

    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobFinished:
    """A job has ended: times of its stages over all runs, and predicted ones, in s, each with `total`."""

    seconds: Mapping[str, float]
    planned: Mapping[str, float] | None = None


Event = StageStarted | TaskDone | StageFinished | StageFailed | Note | ClusterReady | Planned | JobFinished
Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Show nothing."""
