"""Progress as lines for logs, as JSON for programs, and as bars on a terminal.

A line for programs is one JSON object with `event` (the name of a class in :mod:`mdpext_dask.events`),
`time` (seconds since 1970), the fields of the event, and

- in events of a stage: `done` and `total` work items (0 where their number is not known), `rate` in items
  per second, `seconds_left` of the stage, and `overtaken`, whether it has taken longer than planned so far;
- everywhere: `job_seconds_left`.

What is not known is null.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from mdpext_dask import events
from mdpext_dask.cli.eta import Forecast, StageProgress, compared, readable_rate, readable_seconds
from mdpext_dask.errors import printable

# A running stage is reported after 10 s, then ever more rarely: the log of a day must not be long.
_FIRST_SECONDS, _LAST_SECONDS, _SHARE = 10.0, 600.0, 0.1
# A shorter stage, in s, is told of to those who want to know everything.
_MOMENT = 1.0
# A narrower terminal gets the figures without bars.
_WIDTH_OF_BARS = 70


class _Lines:
    """Prints one line at a time.

    Parameters
    ----------
    file
        Where to; default: standard error, as it is when something is printed.
    clock
        Seconds of any origin.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._forecast = file, Forecast(clock)
        self._next: dict[str, float] = {}
        self._announced: set[str] = set()

    def _print(self, line: str) -> None:
        """Print a line; a log on a full disk does not stop the work."""
        try:
            print(printable(line), file=self._file or sys.stderr, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            return


class PlainLines(_Lines):
    """Prints a line when a stage begins, now and then while it runs, and when it ends.

    The beginning of the first stage is not printed: it finds bad input, and then there is one line only.

    Parameters
    ----------
    file
        Where to; default: standard error, as it is when something is printed.
    clock
        Seconds of any origin.
    verbose
        Whether notes of a diary are printed as well, and stages that begin again, or end within a second.
    """

    def __init__(
        self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic, *, verbose: bool = True
    ) -> None:
        super().__init__(file, clock)
        self._verbose = verbose

    def __call__(self, event: events.Event) -> None:
        """Print an event."""
        self._forecast(event)
        stage = self._forecast.stage(getattr(event, "stage", ""))
        if isinstance(event, events.StageStarted):
            if self._next and (self._verbose or event.stage not in self._next):
                of = f", {event.total} {event.unit}" if event.total else ""
                self._print(f"{event.stage}: begins{of}")
                self._announced.add(event.stage)
            self._next[event.stage] = _FIRST_SECONDS
        elif isinstance(event, events.TaskDone):
            if stage and stage.passed >= self._next[event.stage]:
                self._print_stage(event.stage, stage)
        elif isinstance(event, events.StageFinished):
            planned = "" if stage is None or stage.planned is None else f" ({stage.planned:.2f} s planned)"
            if self._verbose or event.seconds >= _MOMENT:
                self._print(f"{event.stage}: {event.seconds:.2f} s{planned}")
        elif isinstance(event, events.StageFailed):
            if event.stage in self._announced:
                self._print(f"{event.stage}: given up after {event.seconds:.2f} s")
        else:
            if message := _message(event, verbose=self._verbose):
                self._print(message)
            # A stage may have notes alone, for long.
            for name in self._forecast.stages:
                running = self._forecast.stage(name)
                if running and running.overtaken and running.passed >= self._next[name]:
                    self._print_stage(name, running)

    def _print_stage(self, name: str, stage: StageProgress) -> None:
        self._next[name] = stage.passed + min(max(_FIRST_SECONDS, _SHARE * stage.passed), _LAST_SECONDS)
        of, job_left = f" of {stage.total}" if stage.total else "", self._forecast.left()
        parts = [
            f"{stage.done}{of} {stage.unit}" if stage.done or stage.total else "",
            readable_rate(stage.rate) if stage.rate is not None else "",
            stage.overtaken,
            f"{readable_seconds(stage.left)} left" if stage.left else "",
            f"{readable_seconds(job_left)} to the end" if job_left else "",
        ]
        self._print(f"{name}: {', '.join(filter(None, parts))}")


class JsonLines(_Lines):
    """Prints every event as one line of JSON; see the text of this module."""

    def __call__(self, event: events.Event) -> None:
        """Print an event."""
        self._forecast(event)
        line: dict[str, Any] = {"event": type(event).__name__, "time": time.time(), **asdict(event)}
        if name := getattr(event, "stage", None):
            stage = self._forecast.stage(name)
            line |= {key: getattr(stage, key, None) for key in ("done", "total", "rate")}
            line |= {"seconds_left": stage and stage.left, "overtaken": bool(stage and stage.overtaken)}
        line["job_seconds_left"] = self._forecast.left()
        self._print(json.dumps(line, allow_nan=False))


class RichBar(Live):
    """Progress on a terminal: a bar for each stage, and below them what is left of the whole job.

    Parameters
    ----------
    console
        Where to; default: standard error.
    clock
        Seconds of any origin.
    verbose
        Whether notes of a diary are shown as well, and the bars stay when all has gone well.
    auto_refresh
        Whether it is drawn several times a second by itself.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        verbose: bool = True,
        auto_refresh: bool = True,
    ) -> None:
        self._verbose = verbose
        self._forecast, self._finished = Forecast(clock), False
        self._changing = threading.Lock()  # bars are drawn from another thread
        # What Dask and others write to standard output belongs there.
        super().__init__(
            console=console or Console(stderr=True),
            auto_refresh=auto_refresh,
            redirect_stdout=False,
            get_renderable=self._drawn,
        )

    def __enter__(self) -> "RichBar":
        super().__enter__()
        # A process that is killed cannot bring a hidden cursor back.
        self.console.show_cursor(True)
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        # Then the answer has the screen to itself.
        self.transient = kind is None and not self._verbose
        super().__exit__(kind, *error)

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        with self._changing:
            self._forecast(event)
            self._finished |= isinstance(event, events.JobFinished)
        if message := _message(event, verbose=self._verbose):
            # As plain text: a name in brackets is no markup.
            self.console.print(Text(printable(message)), soft_wrap=True)

    def _drawn(self) -> RenderableType:
        with self._changing:
            stages = [(name, self._forecast.stage(name)) for name in self._forecast.stages]
            left, passed, planned = self._forecast.left(), self._forecast.passed(), self._forecast.planned
        bars = self.console.width >= _WIDTH_OF_BARS
        # On a narrow terminal the names keep their width.
        table = Table.grid(Column(no_wrap=True), padding=(0, 1))
        for name, stage in stages:
            if stage is not None:
                count = f"{stage.done}/{stage.total}" if stage.total else ""
                rate = "" if stage.rate is None else readable_rate(stage.rate)
                table.add_row(
                    Text(printable(name)),
                    *([_bar(stage)] if bars else []),
                    Text(count, style="progress.download", no_wrap=True),
                    Text(rate, style="progress.data.speed", no_wrap=True),
                    Text(_time(stage), style="progress.remaining", no_wrap=True),
                )
        if planned is None or self._finished:
            return table
        # Once a stage has taken longer than planned, nobody knows.
        rest = f"longer than the {readable_seconds(planned)} planned"
        if left is not None:
            rest = f"about {readable_seconds(left)} left"
        elif passed <= planned:
            rest = "longer than planned"
        job = f"whole job: {readable_seconds(passed)} so far, {rest}"
        return Group(table, Text(job, no_wrap=True, overflow="ellipsis"))


def _bar(stage: StageProgress) -> ProgressBar:
    if stage.running:  # without a total it pulses
        return ProgressBar(stage.total or None, stage.done, width=24)
    return ProgressBar(1, stage.done / max(stage.total, 1) if stage.failed else 1, width=24)


def _time(stage: StageProgress) -> str:
    passed = readable_seconds(stage.passed)
    if stage.failed:
        return f"given up after {passed}"
    if not stage.running:
        return passed if stage.planned is None else f"{passed} ({readable_seconds(stage.planned)} planned)"
    left = f"{readable_seconds(stage.left)} left" if stage.left else ""
    return ", ".join(filter(None, [stage.overtaken, left])) or passed


def _message(event: events.Event, *, verbose: bool) -> str:
    """Return what an event of no stage says: nothing of a single worker without a dashboard."""
    if isinstance(event, events.Note):
        return f"note: {event.text}" if verbose or not event.diary else ""
    if isinstance(event, events.JobFinished) and verbose:
        return compared(event.seconds, event.planned)
    if isinstance(event, events.ClusterReady) and (event.dashboard or (verbose and event.workers > 1)):
        watch = f", dashboard at {event.dashboard}" if event.dashboard else ""
        return f"cluster: {event.workers} worker{'s' if event.workers != 1 else ''}{watch}"
    return ""
