"""Progress on a terminal: a bar for every stage, and below them what is left of the whole job."""

import time
from collections.abc import Callable, Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from mdpext_dask.cli.eta import Forecast, compared, readable_rate, readable_seconds
from mdpext_dask.cli.progress_lines import cluster_told
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

_REFRESH_PER_SECOND = 4
# On anything narrower the bar itself gives way to the figures.
_WIDTH_OF_BARS = 70


class RichBar:
    """Progress on a terminal; use it as a context manager.

    Parameters
    ----------
    console
        Where to; default: standard error.
    clock
        Seconds of any origin.
    auto_refresh
        Whether it is drawn several times a second by itself.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        auto_refresh: bool = True,
    ) -> None:
        console = console or Console(stderr=True)
        self._forecast = Forecast(clock)
        # What Dask and others may write to standard output meanwhile is for whoever reads that.
        self._progress = _Bars(
            *_columns(self._forecast, bars=console.width >= _WIDTH_OF_BARS),
            console=console,
            auto_refresh=auto_refresh,
            refresh_per_second=_REFRESH_PER_SECOND,
            get_time=clock,
            redirect_stdout=False,
        )
        self._progress.forecast = self._forecast
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "RichBar":
        self._progress.start()
        # Whoever is killed cannot bring a hidden cursor back.
        self._progress.console.show_cursor(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def refresh(self) -> None:
        """Draw once more."""
        self._progress.refresh()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self._forecast(event)
        if isinstance(event, StageStarted):
            if event.stage in self._tasks:
                self._progress.remove_task(self._tasks[event.stage])
            self._tasks[event.stage] = self._progress.add_task(event.stage, total=event.total or None)
        elif isinstance(event, TaskDone):
            # Tasks that a search makes for itself belong to no bar.
            if event.stage in self._tasks:
                self._progress.advance(self._tasks[event.stage])
        elif isinstance(event, StageFinished | StageFailed):
            if event.stage in self._tasks:
                self._end(self._tasks[event.stage], failed=isinstance(event, StageFailed))
        elif isinstance(event, ClusterReady):
            self._say(cluster_told(event))
        elif isinstance(event, JobFinished):
            self._progress.forecast = None  # nothing is left to be said below the bars
            self._say(compared(event.seconds, event.planned))
        elif isinstance(event, Note):
            self._say(f"note: {event.text}")

    def _end(self, task: TaskID, *, failed: bool) -> None:
        if failed:
            # A bar that runs to and fro would go on doing so.
            total = self._progress.tasks[self._progress.task_ids.index(task)].total
            self._progress.update(task, total=total or 1)
        else:
            self._progress.update(task, total=1, completed=1)
        self._progress.stop_task(task)

    def _say(self, text: str) -> None:
        if text:
            # As it is: a name in brackets is no markup.
            self._progress.console.print(Text(text), soft_wrap=True)


class _Bars(Progress):
    """Bars, and a line below them."""

    forecast: Forecast | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.forecast is not None and (told := _told_of_job(self.forecast)):
            yield Text(told, no_wrap=True, overflow="ellipsis")


class _Told(ProgressColumn):
    """Text that is made anew whenever it is drawn."""

    def __init__(self, tell: Callable[[str], str], style: str) -> None:
        super().__init__()
        self._tell, self._style = tell, style

    def render(self, task: Task) -> Text:
        return Text(self._tell(task.description), style=self._style, no_wrap=True)


def _columns(forecast: Forecast, *, bars: bool) -> list[ProgressColumn]:
    def count(stage: str) -> str:
        done, total, _ = forecast.counts(stage)
        return f"{done}/{total}" if total else ""

    def rate(stage: str) -> str:
        found = forecast.rate(stage)
        return "" if found is None else readable_rate(found)

    def left(stage: str) -> str:
        if stage in forecast.failed:
            return f"given up after {readable_seconds(forecast.stage_passed(stage))}"
        passed = readable_seconds(forecast.stage_passed(stage))
        if stage not in forecast.running:
            planned = forecast.planned.get(stage)
            return passed if planned is None else f"{passed} ({readable_seconds(planned)} planned)"
        # Where the plan has run out nobody knows any more.
        seconds = forecast.stage_left(stage)
        return f"{readable_seconds(seconds)} left" if seconds else passed

    return [
        TextColumn("{task.description}", markup=False),
        *([BarColumn(bar_width=24)] if bars else []),
        _Told(count, "progress.download"),
        _Told(rate, "progress.data.speed"),
        _Told(left, "progress.remaining"),
    ]


def _told_of_job(forecast: Forecast) -> str:
    """Return what is left of the whole job, where there is a plan."""
    left = forecast.left()
    if left is None:
        return ""
    passed = readable_seconds(forecast.passed())
    return f"whole job: {passed} so far, about {readable_seconds(left)} left"
