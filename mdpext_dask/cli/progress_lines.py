"""Progress as lines: for logs, and for programs.

A line for programs is one JSON object with `event` (the name of a class in :mod:`mdpext_dask.events`),
`time` (seconds since 1970), the fields of the event, and

- in events of a stage: `done` and `total` tasks (0 where their number is not known), `rate` in tasks per
  second, and `seconds_left` of the stage;
- everywhere: `job_seconds_left`.

What nobody can know is null.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from mdpext_dask.cli.eta import Forecast, compared, readable_rate, readable_seconds
from mdpext_dask.events import (
    ClusterReady,
    Event,
    JobFinished,
    Note,
    StageFailed,
    StageFinished,
    StageStarted,
    TaskDone,
)

# A stage that goes on is heard of after this time, then ever more rarely: a log of a day need not be long.
_FIRST_SECONDS, _LAST_SECONDS, _SHARE = 10.0, 600.0, 0.1


class PlainLines:
    """Prints a line when a stage begins, now and then while it goes on, and when it ends.

    Of the first stage only what comes after its beginning: bad input, which is found in it, is one line.

    Parameters
    ----------
    file
        Where to; default: standard error, as it is when something is printed.
    clock
        Seconds of any origin.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._forecast = Forecast(clock)
        self._next: dict[str, float] = {}
        self._announced: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        forecast = self._forecast
        forecast(event)
        if isinstance(event, StageStarted):
            if self._next:
                of = f", {event.total} {event.unit}" if event.total else ""
                self._print(f"{event.stage}: begins{of}")
                self._announced.add(event.stage)
            self._next[event.stage] = _FIRST_SECONDS
        elif isinstance(event, TaskDone):
            if forecast.known(event.stage) and forecast.stage_passed(event.stage) >= self._next[event.stage]:
                self._tell(event.stage)
        elif isinstance(event, StageFinished):
            planned = forecast.planned.get(event.stage)
            expected = "" if planned is None else f" ({planned:.2f} s planned)"
            self._print(f"{event.stage}: {event.seconds:.2f} s{expected}")
        elif isinstance(event, StageFailed) and event.stage in self._announced:
            self._print(f"{event.stage}: given up after {event.seconds:.2f} s")
        elif isinstance(event, ClusterReady):
            if told := cluster_told(event):
                self._print(told)
        elif isinstance(event, JobFinished):
            self._print(compared(event.seconds, event.planned))
        elif isinstance(event, Note):
            self._print(f"note: {event.text}")

    def _tell(self, stage: str) -> None:
        passed = self._forecast.stage_passed(stage)
        self._next[stage] = passed + min(max(_FIRST_SECONDS, _SHARE * passed), _LAST_SECONDS)
        done, total, unit = self._forecast.counts(stage)
        parts = [f"{done} of {total} {unit}" if total else f"{done} {unit}"]
        rate, left = self._forecast.rate(stage), self._forecast.stage_left(stage)
        if rate is not None:
            parts.append(readable_rate(rate))
        if left:
            parts.append(f"{readable_seconds(left)} left")
        job_left = self._forecast.left()
        if job_left:
            parts.append(f"{readable_seconds(job_left)} to the end")
        self._print(f"{stage}: {', '.join(parts)}")

    def _print(self, line: str) -> None:
        _log(line, self._file)


class JsonLines:
    """Prints every event as one line of JSON; see the text of this module.

    Parameters
    ----------
    file
        Where to; default: standard error, as it is when something is printed.
    clock
        Seconds of any origin.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._forecast = Forecast(clock)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        forecast = self._forecast
        forecast(event)
        line = {"event": type(event).__name__, "time": time.time(), **asdict(event)}
        stage = getattr(event, "stage", None)
        if stage is not None:
            known = forecast.known(stage)
            done, total, _ = forecast.counts(stage) if known else (None, None, "")
            line |= {
                "done": done,
                "total": total,
                "rate": forecast.rate(stage) if known else None,
                "seconds_left": forecast.stage_left(stage) if known else None,
            }
        line["job_seconds_left"] = forecast.left()
        _log(json.dumps(line, allow_nan=False), self._file)


def _log(line: str, file: TextIO | None) -> None:
    """Print a line; a log that cannot be written any more is no reason to stop the work."""
    try:
        print(line, file=file or sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def cluster_told(event: ClusterReady) -> str:
    """Return what to say about workers; nothing about a single one that cannot be watched."""
    if event.dashboard is None and event.workers <= 1:
        return ""
    watch = "" if event.dashboard is None else f", dashboard at {event.dashboard}"
    return f"cluster: {event.workers} worker{'s' if event.workers != 1 else ''}{watch}"
