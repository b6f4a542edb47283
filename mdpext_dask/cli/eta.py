"""What is left of a job: counted work items, measured rates, and the plan corrected by what has happened."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mdpext_dask import events

# A rate covers the last 30 s, or the last half of the stage if that is longer: blocks of an earlier run are
# skipped at once and say nothing about the others.
_WINDOW_SECONDS, _WINDOW_SHARE = 30.0, 0.5
# Moments kept of a stage; of more, every second one is dropped.
_MOMENTS = 512
# Finished stages correct the plan as if this share of the job had gone as planned before: a stage of a second
# must not change the estimate of an hour.
_FAITH = 0.1
# A duration below this says nothing about the rest.
_LEAST_SECONDS = 1e-9
# A unit is used from this number of seconds on; then its size, its name, and those of the smaller unit.
_UNITS = ((172_800, 86_400, "d", 3600, "h"), (3600, 3600, "h", 60, "min"), (60, 60, "min", 1, "s"))
_RATES, _LEAST_RATE = ((1, "s"), (60, "min"), (3600, "h")), 0.1
# Stages are named if they differ from the plan by this share of the job, and by this time; at most three.
_NOTABLE_SHARE, _NOTABLE_SECONDS, _NAMED = 0.1, 0.1, 3


@dataclass(frozen=True)
class StageProgress:
    """How far a stage is.

    Parameters
    ----------
    done, total, unit
        Work items done, their number (0 if it is not known), and what they are called.
    passed
        Time that the stage took, or has taken so far, in s.
    rate
        Work items per second, recently while the stage runs; None before the first is done.
    left
        Time until it ends, in s; None if there is no way to know, as when it has taken longer than planned.
    planned
        Time that it should take in all, in s; None without a plan.
    running, failed
        Whether it still runs, and whether it was given up.
    """

    done: int
    total: int
    unit: str
    passed: float
    rate: float | None
    left: float | None
    planned: float | None
    running: bool
    failed: bool

    @property
    def overtaken(self) -> str:
        """What is said of a stage that has taken longer than planned and still runs; else nothing."""
        if not self.running or self.planned is None or self.passed <= self.planned:
            return ""
        return f"longer than planned: {readable_seconds(self.passed)} so far"


@dataclass
class _Stage:
    """What has happened in a stage: items done, and when; `seconds` is None while it runs."""

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
        return max(now - self.began, 0.0) if self.seconds is None else self.seconds

    def rate(self, now: float) -> float | None:
        passed = self.passed(now)
        if not self.done or passed < _LEAST_SECONDS:
            return None
        then, done = self.began, 0
        if self.seconds is None:
            since = self.began + passed - max(_WINDOW_SECONDS, _WINDOW_SHARE * passed)
            before = [moment for moment in self.moments if moment[0] <= since]
            # A window without any item says only that the rate is low.
            if before and before[-1][1] < self.done:
                then, done = before[-1]
        return (self.done - done) / (self.began + passed - then)


class Forecast:
    """Follows the events of a job and estimates what is left.

    With P planned seconds in all, of which the finished stages should have taken p and took a, the rest
    is estimated at (P/10 + a) / (P/10 + p) of its plan. A running stage is judged by its own rate as soon as
    every worker can have finished an item. What it takes longer than planned, so far or by that rate, counts
    in p and a at once.

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

    def __call__(self, event: events.Event) -> None:
        """Take note of an event; those of unknown stages are ignored."""
        stage = self._stages.get(getattr(event, "stage", ""))
        if isinstance(event, events.StageStarted):
            # A stage may run twice; it moves to the end.
            self._stages.pop(event.stage, None)
            self._stages[event.stage] = _Stage(max(event.total, 0), event.unit, self._clock())
        elif isinstance(event, events.TaskDone) and stage:
            stage.count(self._clock())
        elif isinstance(event, events.StageFinished | events.StageFailed) and stage:
            stage.seconds, stage.failed = event.seconds, isinstance(event, events.StageFailed)
        elif isinstance(event, events.ClusterReady):
            self._workers = max(event.workers, 1)
        elif isinstance(event, events.Planned):
            self._planned = {name: max(seconds, 0.0) for name, seconds in event.seconds.items()}

    @property
    def stages(self) -> list[str]:
        """Names of the stages that have begun, in this order."""
        return list(self._stages)

    def passed(self) -> float:
        """Return the seconds since the beginning."""
        return max(self._clock() - self._began, 0.0)

    def stage(self, name: str) -> StageProgress | None:
        """Return how far a stage is, or None if it has not begun."""
        stage, planned = self._stages.get(name), self._planned.get(name)
        if stage is None:
            return None
        now, running = self._clock(), stage.seconds is None
        passed, rate = stage.passed(now), stage.rate(now)
        left = (stage.total - stage.done) / rate if stage.total and rate else None
        if not running or (stage.total and stage.done >= stage.total):
            left = 0.0
        elif planned is not None and (left is None or stage.done < self._workers):
            left = planned * self._correction() - passed
            left = left if left > 0 else None
        return StageProgress(
            stage.done, stage.total, stage.unit, passed, rate, left, planned, running, stage.failed
        )

    def left(self) -> float | None:
        """Return the seconds until the whole job ends; None without a plan, or where a stage has left it."""
        if not self._planned:
            return None
        order = [name for name in self._planned if name != events.TOTAL]
        begun = [position for position, name in enumerate(order) if name in self._stages]
        # Those before the last that has begun are over: done now, or by an earlier run.
        ahead = order[max(begun, default=-1) + 1 :]
        current = 0.0
        for name in self._stages:
            stage = self.stage(name) if name in self._planned else None
            if stage is not None and stage.left is None:
                return None
            current += stage.left or 0.0 if stage else 0.0
        return current + self._correction() * sum(self._planned[name] for name in ahead)

    @property
    def planned(self) -> float | None:
        """How long the whole job should take, in s; None without a plan."""
        return (self._planned.get(events.TOTAL) or sum(self._planned.values())) if self._planned else None

    def _correction(self) -> float:
        """Return what a planned second takes, judged by the finished stages, and by one that takes longer."""
        whole, now = self.planned or 0.0, self._clock()
        if whole < _LEAST_SECONDS:
            return 1.0
        took = should = 0.0
        for name, stage in self._stages.items():
            if name not in self._planned:
                continue
            planned, seconds = self._planned[name], stage.seconds
            if seconds is None:
                rate, ahead = stage.rate(now), max(stage.total - stage.done, 0)
                seconds = stage.passed(now)
                if rate and ahead and stage.done >= self._workers:
                    seconds += ahead / rate
                if seconds <= planned:
                    continue
            took, should = took + seconds, should + planned
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
    text = f"took {readable_seconds(seconds.get(events.TOTAL, 0.0))}"
    if not planned:
        return text
    text += f"; the plan said {readable_seconds(planned.get(events.TOTAL, 0.0))}"
    names = [name for name in {**planned, **seconds} if name != events.TOTAL]
    more = {name: seconds.get(name, 0.0) - planned.get(name, 0.0) for name in names}
    notable = max(_NOTABLE_SHARE * seconds.get(events.TOTAL, 0.0), _NOTABLE_SECONDS)
    worst = sorted((n for n in names if abs(more[n]) >= notable), key=lambda n: -abs(more[n]))[:_NAMED]
    said = [f"{n} {readable_seconds(abs(more[n]))} {'more' if more[n] > 0 else 'less'}" for n in worst]
    return f"{text} ({', '.join(said)})" if said else text
