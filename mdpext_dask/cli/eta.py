"""What is left of a job: counted tasks, measured rates, and the plan corrected by what has happened."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mdpext_dask.events import (
    TOTAL,
    ClusterReady,
    Event,
    Planned,
    StageFailed,
    StageFinished,
    StageStarted,
    TaskDone,
)

# A rate is that of the last so many seconds, or of half the stage if that is longer: blocks that an earlier
# run has left cost next to nothing, and say nothing of the others.
_WINDOW_SECONDS, _WINDOW_SHARE = 30.0, 0.5
# Moments that are kept of a stage; of more, every second one is dropped.
_MOMENTS = 512
# What stages have taken counts against the plan as if so much of the job had been done as planned before:
# a stage of a second must not change what is thought of an hour.
_FAITH = 0.1
# What took, or takes, less than that says nothing of the rest.
_LEAST_SECONDS = 1e-9
# From how many seconds on a unit is used, its size, and the smaller one that goes with it.
_UNITS = (
    (172_800, 86_400, "d", 3600, "h"),
    (3600, 3600, "h", 60, "min"),
    (60, 60, "min", 1, "s"),
)
_RATES, _LEAST_RATE = ((1, "s"), (60, "min"), (3600, "h")), 0.1
# Stages that differ from the plan by less than this share of a job, or so many seconds, are not worth a word.
_NOTABLE_SHARE, _NOTABLE_SECONDS, _NAMED = 0.1, 0.1, 3


@dataclass
class _Stage:
    """A stage as it goes: tasks, and the moments at which so many of them were done."""

    total: int
    unit: str
    began: float
    done: int = 0
    seconds: float | None = None
    failed: bool = False
    moments: list[tuple[float, int]] = field(default_factory=list)

    def count(self, now: float) -> None:
        self.done += 1
        self.moments.append((now, self.done))
        if len(self.moments) > _MOMENTS:
            self.moments = self.moments[1::2]

    def passed(self, now: float) -> float:
        """Return the seconds that it took, or has taken so far."""
        return max(now - self.began, 0.0) if self.seconds is None else self.seconds

    def rate(self, now: float) -> float | None:
        """Return tasks per second, of late while it goes on; None before the first is done."""
        passed = self.passed(now)
        if not self.done or passed < _LEAST_SECONDS:
            return None
        if self.seconds is not None:
            return self.done / passed
        since = self.began + passed - max(_WINDOW_SECONDS, _WINDOW_SHARE * passed)
        before = [moment for moment in self.moments if moment[0] <= since]
        then, done = before[-1] if before else (self.began, 0)
        end = self.began + passed
        # A window without any task says no more than that the rate is low.
        short = self.done <= done or end - then < _LEAST_SECONDS
        return self.done / passed if short else (self.done - done) / (end - then)


class Forecast:
    """Follows the events of a job and says what is left.

    With P planned seconds in all, of which the finished stages should have taken p and have taken a, what is
    to come is thought to take (P/10 + a) / (P/10 + p) of its plan. The stage that runs is judged by its own
    rate as soon as every worker can have finished a task.

    Parameters
    ----------
    clock
        Seconds of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._stages: dict[str, _Stage] = {}
        self._planned: dict[str, float] = {}
        self._workers = 1

    def __call__(self, event: Event) -> None:
        """Take note of an event; one of a stage that is not known is none of ours."""
        if isinstance(event, StageStarted):
            # Anew, at the end: a stage may be done twice.
            self._stages.pop(event.stage, None)
            self._stages[event.stage] = _Stage(max(event.total, 0), event.unit, self._clock())
        elif isinstance(event, TaskDone):
            if event.stage in self._stages:
                self._stages[event.stage].count(self._clock())
        elif isinstance(event, StageFinished | StageFailed):
            if event.stage in self._stages:
                stage = self._stages[event.stage]
                stage.seconds, stage.failed = event.seconds, isinstance(event, StageFailed)
        elif isinstance(event, ClusterReady):
            self._workers = max(event.workers, 1)
        elif isinstance(event, Planned):
            self._planned = {name: max(seconds, 0.0) for name, seconds in event.seconds.items()}

    @property
    def planned(self) -> Mapping[str, float]:
        """Planned seconds by stage, with the total; empty without a plan."""
        return self._planned

    @property
    def running(self) -> list[str]:
        """Names of the stages that go on, outer ones first."""
        return [name for name, stage in self._stages.items() if stage.seconds is None]

    @property
    def failed(self) -> set[str]:
        """Names of the stages that were given up."""
        return {name for name, stage in self._stages.items() if stage.failed}

    def known(self, stage: str) -> bool:
        """Whether a stage has begun."""
        return stage in self._stages

    def passed(self) -> float:
        """Return the seconds since the beginning."""
        return max(self._clock() - self._began, 0.0)

    def stage_passed(self, stage: str) -> float:
        """Return the seconds that a stage took, or has taken so far."""
        return self._stages[stage].passed(self._clock())

    def counts(self, stage: str) -> tuple[int, int, str]:
        """Return how many tasks of a stage are done, of how many, and what they are called."""
        found = self._stages[stage]
        return found.done, found.total, found.unit

    def rate(self, stage: str) -> float | None:
        """Return tasks per second, of late while the stage goes on; None if none is done."""
        return self._stages[stage].rate(self._clock())

    def stage_left(self, stage: str) -> float | None:
        """Return the seconds that a stage will go on; None where nobody can know."""
        found, now = self._stages[stage], self._clock()
        if found.seconds is not None:
            return 0.0
        rate = found.rate(now)
        if found.total and found.done >= found.total:
            return 0.0
        counted = (found.total - found.done) / rate if found.total and rate else None
        if counted is not None and found.done >= self._workers:
            return counted
        if stage in self._planned:
            return max(self._planned[stage] * self._correction() - found.passed(now), 0.0)
        return counted

    def left(self) -> float | None:
        """Return the seconds that the whole job will go on; None without a plan."""
        if not self._planned:
            return None
        order = [name for name in self._planned if name != TOTAL]
        begun = [position for position, name in enumerate(order) if name in self._stages]
        # Those before the last that has begun are over: done now, or by an earlier run.
        ahead = order[max(begun, default=-1) + 1 :]
        current = sum(self.stage_left(name) or 0.0 for name in self.running if name in self._planned)
        return current + self._correction() * sum(self._planned[name] for name in ahead)

    def _correction(self) -> float:
        """Return what a planned second takes, by the stages that are done."""
        whole = self._planned.get(TOTAL, 0.0) or sum(self._planned.values())
        done = [
            (stage.seconds, self._planned[name])
            for name, stage in self._stages.items()
            if stage.seconds is not None and name in self._planned
        ]
        took, should = (sum(column) for column in zip(*done, strict=True)) if done else (0.0, 0.0)
        if whole < _LEAST_SECONDS:
            return 1.0
        return (_FAITH * whole + took) / (_FAITH * whole + should)


def readable_seconds(seconds: float) -> str:
    """Return a time as people say it: ``0.42 s``, ``43 s``, ``5 min 10 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.{2 if seconds < 1 else 1}f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    _, size, unit, part_size, part = next(row for row in _UNITS if whole >= row[0])
    count, rest = whole // size, whole % size // part_size
    return f"{count} {unit} {rest} {part}" if rest else f"{count} {unit}"


def readable_rate(rate: float) -> str:
    """Return a rate as people say it: ``35/s``, ``0.42/s``, ``3.1/min``, ``2.5/h``."""
    size, unit = next((row for row in _RATES if rate * row[0] >= _LEAST_RATE), _RATES[-1])
    value = rate * size
    return f"{value:.0f}/{unit}" if value >= 9.95 else f"{value:.2g}/{unit}"


def compared(seconds: Mapping[str, float], planned: Mapping[str, float] | None) -> str:
    """Return how long a job took, against the plan, with the stages that differed most from it.

    Parameters
    ----------
    seconds, planned
        By stage, with the total, in s.
    """
    text = f"took {readable_seconds(seconds.get(TOTAL, 0.0))}"
    if not planned:
        return text
    text += f"; the plan said {readable_seconds(planned.get(TOTAL, 0.0))}"
    names = [name for name in {**planned, **seconds} if name != TOTAL]
    more = {name: seconds.get(name, 0.0) - planned.get(name, 0.0) for name in names}
    notable = max(_NOTABLE_SHARE * seconds.get(TOTAL, 0.0), _NOTABLE_SECONDS)
    worst = sorted((n for n in names if abs(more[n]) >= notable), key=lambda n: -abs(more[n]))[:_NAMED]
    said = [f"{n} {readable_seconds(abs(more[n]))} {'more' if more[n] > 0 else 'less'}" for n in worst]
    return f"{text} ({', '.join(said)})" if said else text
