"""Events of a run. Whatever shows or records them is an observer; how they are shown is not said here.

Stages come one after the other, or one within another. A task may belong to no stage that was announced: a
search makes tasks of its own, whose number nobody knows before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# The stages of a job in their order ("cells" where there are cell programs), and the name of the whole.
STAGES = ("domain", "loss", "seed", "cells", "extend", "boundary", "audit", "evaluate")
TOTAL = "total"


@dataclass(frozen=True)
class StageStarted:
    """A stage begins; `total` tasks will follow (0 where it is one piece), called `unit` in the plural."""

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
    """A stage has been given up after `seconds`; what stopped it follows as an error."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class Note:
    """Something the user should know."""

    text: str


@dataclass(frozen=True)
class ClusterReady:
    """There are `workers` workers now, to be watched at the address `dashboard`, if anywhere."""

    workers: int
    dashboard: str | None = None


@dataclass(frozen=True)
class Planned:
    """How long the stages of a job should take, in s, in their order; `total` is all of it."""

    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobFinished:
    """A job has ended: what its stages took over all runs, and what was planned, in s, each with `total`."""

    seconds: Mapping[str, float]
    planned: Mapping[str, float] | None = None


Event = StageStarted | TaskDone | StageFinished | StageFailed | Note | ClusterReady | Planned | JobFinished
Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Show nothing."""
