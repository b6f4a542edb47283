"""Events of a run, and three ways to show them: a bar, plain lines, JSON lines."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StageStarted:
    """A stage begins; `total` tasks will follow (0 where it is one piece)."""

    stage: str
    total: int = 0


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
class Note:
    """Something the user should know."""

    text: str


Event = StageStarted | TaskDone | StageFinished | Note
Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Show nothing."""


def plain_lines(event: Event) -> None:
    """Print one line on standard error for every stage and note."""
    if isinstance(event, StageFinished):
        print(f"{event.stage}: {event.seconds:.2f} s", file=sys.stderr, flush=True)
    elif isinstance(event, Note):
        print(f"note: {event.text}", file=sys.stderr, flush=True)


def json_lines(event: Event) -> None:
    """Print every event as one line of JSON on standard error."""
    line = {"event": type(event).__name__, "time": time.time(), **asdict(event)}
    print(json.dumps(line), file=sys.stderr, flush=True)


class RichBar:
    """A progress bar on a terminal; use it as a context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "RichBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, StageStarted):
            self._tasks[event.stage] = self._progress.add_task(event.stage, total=event.total or 1)
        elif isinstance(event, TaskDone):
            self._progress.advance(self._tasks[event.stage])
        elif isinstance(event, StageFinished):
            task = self._tasks[event.stage]
            total = next(t.total for t in self._progress.tasks if t.id == task)
            self._progress.update(task, completed=total)
            self._progress.stop_task(task)
        else:
            self._progress.console.print(f"note: {event.text}")
