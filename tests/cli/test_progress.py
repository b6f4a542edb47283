"""Progress: what is left is estimated right, and shown without harm wherever it goes."""

import io
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from mdpext_dask.cli.console import observed
from mdpext_dask.cli.eta import Forecast, StageProgress, compared, readable_rate, readable_seconds
from mdpext_dask.cli.progress import JsonLines, PlainLines, RichBar
from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages, observe_cluster
from mdpext_dask.events import (
    ClusterReady,
    Event,
    JobFinished,
    Note,
    Observer,
    Planned,
    StageFailed,
    StageFinished,
    StageStarted,
    TaskDone,
)
from tests.support.refusals import refused

STAGES = ("domain", "loss", "seed", "extend", "audit")


@dataclass
class Clock:
    """Goes when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


BarOf = Callable[[int], tuple[RichBar, Console]]


def tell(observer: Observer, *events: Event) -> None:
    for event in events:
        observer(event)


def stage_of(forecast: Forecast, name: str) -> StageProgress:
    found = forecast.stage(name)
    assert found is not None
    return found


# --- what is left ---------------------------------------------------------------------------------


def test_what_is_left_in_a_case_by_hand(clock: Clock) -> None:
    forecast = Forecast(clock)
    plan = {"domain": 10.0, "seed": 20.0, "extend": 60.0, "audit": 10.0, "total": 100.0}
    tell(forecast, Planned(plan), ClusterReady(2))
    assert forecast.left() == pytest.approx(100)
    forecast(StageStarted("domain"))
    clock.now = 4.0
    # 6 s of the domain, and 90 s more.
    assert forecast.left() == pytest.approx(96)
    clock.now = 20.0
    forecast(StageFinished("domain", 20.0))
    # The finished stage took twice its plan: (100/10 + 20) / (100/10 + 10) = 1.5.
    assert forecast.left() == pytest.approx(1.5 * 90)
    forecast(StageStarted("seed"))
    clock.now = 30.0
    assert stage_of(forecast, "seed").left == pytest.approx(1.5 * 20 - 10)
    assert forecast.left() == pytest.approx(1.5 * 90 - 10)
    clock.now = 40.0
    # 40 s instead of 30 s: (10 + 40) / (10 + 30).
    tell(forecast, StageFinished("seed", 20.0), StageStarted("extend", 10))
    assert forecast.left() == pytest.approx(1.25 * 70)
    clock.now = 43.0
    forecast(TaskDone("extend"))
    # Of two workers one has said nothing yet, so the plan is the better guess.
    assert stage_of(forecast, "extend").left == pytest.approx(1.25 * 60 - 3)
    clock.now = 44.0
    forecast(TaskDone("extend"))
    # Two tasks in four seconds; eight are left.
    assert stage_of(forecast, "extend").rate == pytest.approx(0.5)
    assert stage_of(forecast, "extend").left == pytest.approx(16)
    assert forecast.left() == pytest.approx(16 + 1.25 * 10)


def test_a_plan_that_is_overtaken_is_no_estimate_any_more(clock: Clock, bar_of: "BarOf") -> None:
    bar, console = bar_of(100)
    forecast, file = Forecast(clock), io.StringIO()
    lines, machine = PlainLines(file, clock), JsonLines(told := io.StringIO(), clock)
    plan = Planned({"domain": 1.0, "seed": 20.0, "extend": 10.0, "total": 31.0})
    with bar:
        for observer in (forecast, bar, lines, machine):
            tell(observer, plan, StageStarted("domain"), StageFinished("domain", 1.0), StageStarted("seed"))
        clock.now = 19.0
        assert forecast.left() == pytest.approx(1 + 10)
        clock.now = 360.0
        assert stage_of(forecast, "seed").left is None
        assert forecast.left() is None
        *_, seed, job = drawn(bar, console)
        assert seed.endswith("longer than planned: 6 min so far")
        assert job == "whole job: 6 min so far, longer than the 31 s planned"
        for observer in (lines, machine):
            observer(TaskDone("seed"))
        said = "seed: 1 tasks, 0.17/min, longer than planned: 6 min so far"
        assert file.getvalue().splitlines()[-1] == said
        # Until it is told again, a tenth of the time must have passed.
        for clock.now, more in ((390.0, 0), (400.0, 1)):
            before = len(file.getvalue().splitlines())
            lines(Note("round 2"))
            assert len(file.getvalue().splitlines()) == before + 1 + more
        clock.now = 360.0
        last = json.loads(told.getvalue().splitlines()[-1])
        assert (last["overtaken"], last["seconds_left"], last["job_seconds_left"]) == (True, None, None)
        # What comes is judged by what has been seen, while the stage still runs: (3.1 + 361) / (3.1 + 21).
        forecast(StageStarted("extend"))
        assert stage_of(forecast, "extend").left == pytest.approx(10 * 364.1 / 24.1)


def test_a_rate_below_the_plan_s_corrects_what_comes(clock: Clock) -> None:
    forecast = Forecast(clock)
    tell(forecast, Planned({"extend": 10.0, "audit": 10.0, "total": 20.0}), StageStarted("extend", 10))
    clock.now = 8.0
    tell(forecast, TaskDone("extend"), TaskDone("extend"))
    # Two in eight seconds: 40 s for all instead of 10, so (2 + 40) / (2 + 10) for the audit.
    assert stage_of(forecast, "extend").left == pytest.approx(32)
    assert not stage_of(forecast, "extend").overtaken
    assert forecast.left() == pytest.approx(32 + 3.5 * 10)


def test_the_rate_is_that_of_late(clock: Clock) -> None:
    forecast = Forecast(clock)
    forecast(StageStarted("extend", 1000))
    for _ in range(500):  # receipts of an earlier run
        clock.now += 0.01
        forecast(TaskDone("extend"))
    for _ in range(100):
        clock.now += 1.0
        forecast(TaskDone("extend"))
    assert stage_of(forecast, "extend").rate == pytest.approx(1, rel=0.05)
    assert stage_of(forecast, "extend").left == pytest.approx(400, rel=0.05)


def test_tasks_that_take_longer_than_any_window_have_a_rate(clock: Clock) -> None:
    forecast = Forecast(clock)
    forecast(StageStarted("extend", 5))
    clock.now = 100.0
    forecast(TaskDone("extend"))
    clock.now = 180.0
    assert stage_of(forecast, "extend").rate == pytest.approx(1 / 180)


def test_what_the_plan_says_and_what_nobody_can_know(clock: Clock) -> None:
    forecast = Forecast(clock)
    tell(forecast, StageStarted("extend", 4), TaskDone("extend"), StageStarted("seed"))
    assert (forecast.left(), stage_of(forecast, "seed").left) == (None, None)
    assert stage_of(forecast, "extend").rate is None  # no time has passed
    # Stages of an earlier run are not waited for.
    tell(forecast := Forecast(clock), Planned({"domain": 5.0, "seed": 1000.0, "extend": 60.0, "audit": 10.0}))
    tell(forecast, StageStarted("extend", 10))
    assert forecast.left() == pytest.approx(70)


def test_many_tasks_need_little_memory(clock: Clock) -> None:
    forecast = Forecast(clock)
    forecast(StageStarted("extend", 100_000))
    for _ in range(50_000):
        clock.now += 0.01
        forecast(TaskDone("extend"))
    assert len(forecast._stages["extend"].moments) <= 512
    assert stage_of(forecast, "extend").left == pytest.approx(500, rel=0.01)


numbers = st.floats(0, 1e12)
stage = st.sampled_from((*STAGES, "unheard of"))
events = st.one_of(
    st.builds(StageStarted, stage, st.integers(0, 5)), st.builds(TaskDone, stage),
    st.builds(StageFinished, stage, numbers), st.builds(StageFailed, stage, numbers),
    st.builds(Note, st.text()),
    st.builds(ClusterReady, st.integers(0, 5), st.none() | st.just("http://127.0.0.1:8787/status")),
    st.builds(Planned, st.dictionaries(stage | st.just("total"), numbers)),
    st.builds(JobFinished, st.dictionaries(stage, numbers), st.none() | st.dictionaries(stage, numbers)),
)  # fmt: skip


@given(st.lists(st.tuples(events, st.floats(-1, 1e6)), max_size=30))
@example([(Planned({"total": 5e-324}), 0.0)])
@example([(StageStarted("domain", 0), 0.0), (TaskDone("domain"), 5e-324)])
def test_estimates_are_finite_and_no_order_of_events_breaks_them(told: list[tuple[Event, float]]) -> None:
    clock, terminal, lines = Clock(), io.StringIO(), io.StringIO()
    forecast = Forecast(clock)
    bar = RichBar(Console(file=terminal, force_terminal=True, width=80), clock, auto_refresh=False)
    plain, machine = PlainLines(lines, clock), JsonLines(lines, clock)
    with bar:
        for event, seconds in told:
            for observer in (forecast, bar, plain, machine):
                observer(event)
            clock.now += seconds  # a clock may be set back
            estimates = [forecast.left()]
            for name in forecast.stages:
                estimates += [stage_of(forecast, name).left, stage_of(forecast, name).rate]
            assert all(one is None or (math.isfinite(one) and one >= 0) for one in estimates)
        bar.refresh()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (0.42, "0.42 s"), (9.96, "10 s"), (43.4, "43 s"), (59.7, "1 min"), (310, "5 min 10 s"),
     (12_000, "3 h 20 min"), (172_799, "47 h 59 min"), (187_200, "2 d 4 h"), (1e12, "11574074 d 1 h")],
)  # fmt: skip
def test_times_as_people_say_them(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.5, "1234/s"), (99.7, "100/s"), (35, "35/s"), (0.42, "0.42/s"), (0.05, "3/min"), (5e-4, "1.8/h")],
)
def test_rates_as_people_say_them(rate: float, text: str) -> None:
    assert readable_rate(rate) == text


def test_what_differed_from_the_plan_is_named() -> None:
    seconds = {"seed": 30.0, "extend": 12.0, "audit": 1.0, "total": 43.0}
    planned = {"seed": 20.0, "extend": 18.0, "audit": 1.0, "total": 39.0}
    told = "took 43 s; the plan said 39 s (seed 10 s more, extend 6.0 s less)"
    assert (compared(seconds, planned), compared(seconds, seconds)) == (told, "took 43 s; the plan said 43 s")
    assert compared(seconds, None) == "took 43 s"


# --- lines ----------------------------------------------------------------------------------------


def test_plain_lines_come_by_time(clock: Clock) -> None:
    file = io.StringIO()
    lines = PlainLines(file, clock)
    tell(lines, ClusterReady(2, "http://127.0.0.1:8787/status"), Planned({"extend": 15.0, "total": 15.0}))
    # Bad input is found in the first stage, and told in one line, which is not from here.
    tell(lines, StageStarted("domain"), StageFailed("domain", 1.0))
    lines(StageStarted("extend", 480, "blocks"))
    for _ in range(480):
        clock.now += 1 / 32
        lines(TaskDone("extend"))
    tell(lines, TaskDone("seed"), StageFinished("extend", 15.0), Note("done [soon]"))
    tell(lines, StageStarted("seed"), StageFailed("seed", 2.0))
    tell(lines, JobFinished({"extend": 15.0, "total": 15.0}, {"extend": 15.0, "total": 15.0}))
    assert file.getvalue().splitlines() == [
        "cluster: 2 workers, dashboard at http://127.0.0.1:8787/status", "extend: begins, 480 blocks",
        "extend: 320 of 480 blocks, 32/s, 5.0 s left, 5.0 s to the end", "extend: 15.00 s (15.00 s planned)",
        "note: done [soon]", "seed: begins", "seed: given up after 2.00 s", "took 15 s; the plan said 15 s",
    ]  # fmt: skip


def test_diaries_and_short_stages_are_for_those_who_ask(clock: Clock) -> None:
    told: dict[bool, list[str]] = {}
    for verbose in (False, True):
        lines = PlainLines(file := io.StringIO(), clock, verbose=verbose)
        tell(lines, ClusterReady(2), StageStarted("domain"), StageFinished("domain", 0.1))
        for seconds in (0.2, 3.0):
            tell(lines, StageStarted("seed", 2), Note("round 1", diary=True), StageFinished("seed", seconds))
        tell(lines, Note("know this"), JobFinished({"total": 16.0}))
        told[verbose] = file.getvalue().splitlines()
    assert told[False] == ["seed: begins, 2 tasks", "seed: 3.00 s", "note: know this"]
    assert told[True] == [
        "cluster: 2 workers", "domain: 0.10 s", "seed: begins, 2 tasks", "note: round 1", "seed: 0.20 s",
        "seed: begins, 2 tasks", "note: round 1", "seed: 3.00 s", "note: know this", "took 16 s",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_log_of_a_day_is_not_long(clock: Clock) -> None:
    file = io.StringIO()
    lines = PlainLines(file, clock)
    lines(StageStarted("extend", 86_400))
    for _ in range(86_400):
        clock.now += 1
        lines(TaskDone("extend"))
    assert 20 < len(file.getvalue().splitlines()) < 250


def test_every_event_is_a_line_of_json(clock: Clock) -> None:
    file = io.StringIO()
    lines = JsonLines(file, clock)
    tell(lines, Planned({"extend": 8.0, "audit": 2.0, "total": 10.0}), StageStarted("extend", 4, "blocks"))
    clock.now = 2.0
    tell(lines, TaskDone("extend"), TaskDone("unheard of"), StageFinished("extend", 2.0), Note("a\nb"))
    told = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [one["event"] for one in told] == [
        "Planned", "StageStarted", "TaskDone", "TaskDone", "StageFinished", "Note"
    ]  # fmt: skip
    assert told[0]["job_seconds_left"] == pytest.approx(10)
    started = {"stage": "extend", "total": 4, "unit": "blocks", "done": 0, "rate": None}
    assert told[1].items() >= started.items()
    assert told[2].items() >= {"done": 1, "total": 4, "rate": 0.5, "seconds_left": 6.0}.items()
    assert told[2]["job_seconds_left"] == pytest.approx(8)
    assert told[3].items() >= {"done": None, "total": None, "seconds_left": None}.items()
    assert told[4].items() >= {"seconds": 2.0, "seconds_left": 0.0}.items()
    assert all("time" in one for one in told)


# --- bars -----------------------------------------------------------------------------------------


@pytest.fixture
def bar_of(clock: Clock) -> BarOf:
    def make(width: int) -> tuple[RichBar, Console]:
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=width, record=True, color_system=None)
        return RichBar(console, clock, auto_refresh=False), console

    return make


def drawn(bar: RichBar, console: Console) -> list[str]:
    """Return the lines of one drawing."""
    bar.refresh()
    console.export_text()  # and what has been recorded until now is gone
    bar.refresh()
    return [line.rstrip() for line in console.export_text().splitlines() if line.strip()]


def test_bars_by_stage_and_what_is_left(clock: Clock, bar_of: BarOf) -> None:
    bar, console = bar_of(100)
    with bar:
        tell(bar, Planned({"domain": 1.0, "extend": 10.0, "audit": 5.0, "total": 16.0}))
        tell(bar, StageStarted("domain"))
        clock.now = 1.0
        tell(bar, StageFinished("domain", 1.0), StageStarted("extend", 100, "blocks"))
        clock.now = 3.0
        tell(bar, *[TaskDone("extend")] * 20, TaskDone("unheard of"))
        domain, extend, job = drawn(bar, console)
        assert domain.split() == ["domain", "━" * 24, "1.0", "s", "(1.0", "s", "planned)"]
        assert extend.split()[-5:] == ["20/100", "10/s", "8.0", "s", "left"]
        assert job == "whole job: 3.0 s so far, about 13 s left"
        tell(bar, JobFinished({"total": 16.0}, {"total": 16.0}))
        assert not any("whole job" in line for line in drawn(bar, console))


@pytest.mark.parametrize(("verbose", "fails"), [(False, False), (True, False), (False, True)])
def test_bars_leave_the_screen_to_the_answer(verbose: bool, fails: bool, clock: Clock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    bar = RichBar(console, clock, verbose=verbose, auto_refresh=False)

    def work() -> None:
        with bar:
            tell(bar, StageStarted("seed"), Note("round 1", diary=True), StageFinished("seed", 1.0))
            if fails:
                raise KeyboardInterrupt

    if fails:
        refused(KeyboardInterrupt, "", work)
    else:
        work()
    written = console.file.getvalue()
    # What is drawn last is taken back: the cursor goes up and the line is erased.
    assert written.endswith("\x1b[1A\x1b[2K") == (not verbose and not fails)
    assert ("round 1" in written) == verbose


@pytest.mark.parametrize("width", [8, 20, 40, 60, 200])
def test_bars_fit_any_width(width: int, clock: Clock, bar_of: BarOf) -> None:
    bar, console = bar_of(width)
    with bar:
        tell(bar, Planned({"extend": 10.0, "total": 10.0}))
        tell(bar, StageStarted("extend", 100_000), TaskDone("extend"))
        clock.now = 100.0
        lines = drawn(bar, console)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("extend"[: min(width, 6) - 4])


def test_a_stage_that_fails_leaves_a_terminal_as_it_was(clock: Clock, bar_of: BarOf) -> None:
    bar, console = bar_of(100)
    stages = Stages(bar)

    def fail() -> None:
        with bar, stages.stage("seed"):
            clock.now = 2.0
            raise KeyboardInterrupt

    refused(KeyboardInterrupt, "", fail)
    written = console.file.getvalue()
    assert "given up after 0.0" in written
    assert written.endswith("\n") or written.endswith("\x1b[?25h")
    hide, show = "\x1b[?25l", "\x1b[?25h"
    # Whenever it is hidden, it is shown at once: nobody who is killed can do so later.
    assert written.count(hide) == 1
    assert written.index(show) - written.index(hide) == len(hide)


def test_notes_are_shown_as_they_are(bar_of: BarOf) -> None:
    bar, console = bar_of(100)
    with bar:
        tell(bar, Note('no [cluster] kind = "inline" [/bold]'), ClusterReady(2, "http://here:1/status"))
    text = console.export_text()
    assert 'note: no [cluster] kind = "inline" [/bold]' in text
    assert "cluster: 2 workers, dashboard at http://here:1/status" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("style", "file", "terminal", "expected"),
    [("auto", Terminal, "xterm", RichBar), ("auto", Terminal, "dumb", PlainLines),
     ("auto", io.StringIO, "xterm", PlainLines), ("plain", Terminal, "xterm", PlainLines),
     ("json", Terminal, "xterm", JsonLines)],
)  # fmt: skip
def test_bars_are_for_terminals(
    style: str, file: type, terminal: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", file())
    monkeypatch.setattr("mdpext_dask.cli.console._noted", lambda observer: observer)
    monkeypatch.setenv("TERM", terminal)
    with observed(style) as observer:
        assert isinstance(observer, expected)


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    with observed("auto") as observer:
        tell(observer, StageStarted("extend", 2), TaskDone("extend"), StageFinished("extend", 1.0))
    assert "extend" in file.getvalue()
    assert not any(f"\x1b[{code}" in file.getvalue() for code in ("3", "9", "1;3", "38"))


def test_a_stage_that_raises_has_failed() -> None:
    told: list[Event] = []
    stages = Stages(told.append)
    with pytest.raises(ZeroDivisionError), stages.stage("seed"):
        raise ZeroDivisionError
    assert [type(event) for event in told] == [StageStarted, StageFailed]
    assert "seed" not in stages.seconds


def test_tasks_within_a_stage_are_counted() -> None:
    told: list[Event] = []
    observe_cluster(InlineExecutor(), told.append)
    assert told == [ClusterReady(1, None)]
    told.clear()
    stages = Stages(told.append)
    with stages.stage("square", 3, "numbers"):
        assert stages.gather(InlineExecutor(), "square", lambda n: n * n, [(1,), (2,), (3,)]) == [1, 4, 9]
    assert [type(event) for event, _ in itertools.groupby(told)] == [StageStarted, TaskDone, StageFinished]
