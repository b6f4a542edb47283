"""Answers as a screen for people: what it is about, a few rows, and which commands come next."""

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.filesize import decimal
from rich.text import Text

from mdpext_dask.auditors.result import AuditReport, sentence, table
from mdpext_dask.cli.eta import readable_seconds
from mdpext_dask.errors import printable
from mdpext_dask.evaluation.words import LOSES, headline, highlights, metres
from mdpext_dask.evaluation.words import table as evaluation_table
from mdpext_dask.events import TOTAL
from mdpext_dask.files import is_standard_output
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED

Row = tuple[str, str]
GOOD, BAD, OPEN = "bold green", "bold red", "bold yellow"
# Texts are wrapped, but to no less than this many columns.
_LEAST_WIDTH = 24
# Rows of an audit that nobody needs who knows that it holds.
_ASIDES = ("method", "worst", "certificates", "of noise", "near ties", "sizes", "note")
_PROGRAM = "mdpext"
# A longer name is cut in titles.
_NAME_WIDTH = 40
# Worker counts whose times `plan` tells at a glance.
_WORKERS = "1", "2", "8", "32"


@dataclass(frozen=True)
class Screen:
    """A title, rows of labels and texts, and commands with what they do."""

    title: str
    style: str
    rows: Sequence[Row]
    commands: Sequence[Row] = ()

    def text(self, width: int) -> Text:
        """Return it for a terminal of a width; commands and words that are longer are left whole."""
        title = _wrapped(printable(self.title), width) if self.title else []
        lines = Text("\n").join(Text(line, self.style) for line in title)
        labels = [printable(label) for label, _ in self.rows] + ["next"] * bool(self.commands)
        indent = max(map(cell_len, labels), default=0) + 2
        for label, text in self.rows:
            style = BAD if label in (LOSES, "refused") else ""
            for number, line in enumerate(_wrapped(printable(text), width - indent)):
                lines.append("\n" if lines else "")
                lines.append(_padded("" if number else printable(label), indent), style="cyan")
                lines.append(line, style=style)
        most = max((cell_len(command) for command, _ in self.commands), default=0)
        for number, (command, does) in enumerate(self.commands):
            lines.append("\n")
            lines.append(_padded("" if number else "next", indent), style="cyan")
            lines.append(printable(command), style="bold")
            if does and indent + most + len(does) + 4 <= width:
                lines.append(f"{' ' * (most - cell_len(command))}  # {does}", style="dim")
        return lines


def _wrapped(text: str, width: int) -> list[str]:
    width = max(width, _LEAST_WIDTH)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def plainly(value: Any) -> str:
    """Return a value of a JSON document as a text for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plainly(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plainly, value)) or "none"
    return "-" if value is None else str(value)


def called(*words: str) -> str:
    """Return a command line of ours as it can be typed here: as this process itself was called."""
    this, found = Path(sys.argv[0]), shutil.which(_PROGRAM)
    if this.suffix == ".py":
        program = "python -m mdpext_dask"
    else:
        here = this.name == _PROGRAM and (found is None or not this.exists() or not this.samefile(found))
        program = shlex.quote(sys.argv[0]) if here else _PROGRAM
    return " ".join([program, *words])


def near(place: str) -> str:
    """Return a path or URL as it can be typed here: short where it lies below the working folder."""
    path = Path(place)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        place = os.fspath(path.relative_to(Path.cwd()))
    return shlex.quote(place)


def _title_of(place: str) -> str:
    """Return the last part of a path or URL, cut if it is long."""
    name = place.rstrip("/").rpartition("/")[2] or place
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"


# --- stores ---------------------------------------------------------------------------------------


def store_screen(summary: Mapping[str, Any]) -> Screen:
    """Return what :func:`mdpext_dask.pipeline.summary.summarise` says of a store, at a glance."""
    store, promised = near(summary["store"]), summary["epsilon_per_km"]
    named = _title_of(summary["store"])
    rows = [("promised", f"ε = {promised:g}/km{_metric(summary['metric_p'])}")]
    if summary["epsilon_certified"] is not None:
        rows.append(("certified", _certified(summary)))
    if summary["state"] == COMPLETE:
        return _finished(summary, named, store, rows)
    rows += [
        ("seed", "is solved" if summary["seed_solved"] else "is not solved yet"),
        ("blocks", f"{summary['blocks_done']:,} of {summary['blocks']:,} are done"),
        *_at_work(summary),
        ("store", store),
    ]
    again = (called("run", "JOB.toml"), "goes on where it stopped")
    if summary["state"] == REFUSED:
        worst = (called("audit", store), "names what breaks the promise")
        return Screen(f"{named} is refused: it does not keep its promise", BAD, rows, [worst])
    commands = [again]
    if summary["next"]:
        piece = summary["next"].removeprefix("mdpext ").replace(shlex.quote(summary["store"]), store)
        commands.insert(0, (called(piece), "the next piece; or all of them:"))
    return Screen(f"{named} is not finished", OPEN, rows, commands)


def _finished(summary: Mapping[str, Any], named: str, store: str, rows: list[Row]) -> Screen:
    if summary["loss_km"] is not None:
        rows += headline(summary)
    if summary["remap"]:
        rows.append(("remap", "is used: reports are better than that, at the same ε"))
    if summary["receipts"] != "all":
        rows.append(("receipts", summary["receipts"]))
    if summary["refusal"]:
        rows.append(("refused", summary["refusal"]))
    rows += _at_work(summary)
    total = summary["seconds"].get(TOTAL)
    took = "" if total is None else f", made in {readable_seconds(total)}"
    rows.append(("store", f"{store}: {summary['method']}, {summary['outputs']:,} outputs{took}"))
    audit = (called("audit", store), "prove it again")
    if summary["refusal"]:
        return Screen(f"{named} is complete, but not to be used as it is", BAD, rows, [audit])
    commands = [
        audit,
        (called("show", store), "look at it"),
        (called("sample", store, "POINTS.csv", "-o", "OUT.csv"), "draw reports"),
    ]
    return Screen(f"{named} is complete and proved", GOOD, rows, commands)


def _metric(p: Any) -> str:
    return "" if float(p) == 2 else f", in the metric d_{p:g}" if p != "inf" else ", in the metric d_inf"


def _certified(summary: Mapping[str, Any]) -> str:
    epsilon = f"ε = {float(summary['epsilon_certified']):.6g}/km"
    if summary["state"] != COMPLETE or summary["refusal"]:
        return f"{epsilon} by the last certificate, which does not count"
    return f"{epsilon}, proved for all pairs of {summary['records']:,} places"


def _at_work(summary: Mapping[str, Any]) -> list[Row]:
    running = summary["running"]
    return [("running", f"process {running['pid']} on {running['host']} is at work on it")] if running else []


# --- other answers --------------------------------------------------------------------------------


def plan_screen(planned: Mapping[str, Any], job: str) -> Screen:
    """Return a plan, as :func:`mdpext_dask.pipeline.plan.plan_job` makes it, at a glance.

    Parameters
    ----------
    planned
        The plan.
    job
        Name of the job's file.
    """
    by_workers = planned["seconds_by_workers"]
    times = {workers: readable_seconds(by_workers[workers][TOTAL]) for workers in _WORKERS}
    stages = {name: each for name, each in by_workers[_WORKERS[0]].items() if name != TOTAL}
    longest = max(stages, key=lambda name: stages[name])
    inside = planned["records_inside"]
    region = "" if inside == planned["records"] else f", {inside:,} of them in the region"
    worker = planned["peak_bytes_per_task"] + planned["table_bytes_per_worker"]
    memory = f"{decimal(planned['client_bytes'])} here, {decimal(worker)} in each worker"
    beside = f", {decimal(planned['work_bytes'])} more while it is made" if planned["work_bytes"] else ""
    rows = [
        ("places", f"{planned['records']:,} records that are told apart{region}"),
        ("reports", f"{planned['outputs']:,} outputs, one of which is reported"),
        ("method", planned["method"]),
        ("work", f"{planned['tasks']:,} work items, {planned['blocks']:,} blocks"),
        ("memory", f"{memory}; {decimal(planned['seed_bytes'])} for the seed"),
        ("disk", f"{decimal(planned['store_bytes'])} before compression{beside}"),
        ("time", f"about {_alternatives(times)}; {longest} takes longest"),
    ]
    if planned["refused"] is not None:
        return Screen(f"{job} does not fit this machine", BAD, rows)
    return Screen(f"{job} can run here", GOOD, rows, [(called("run", shlex.quote(job)), "builds it")])


def _alternatives(times: Mapping[str, str]) -> str:
    if len(set(times.values())) == 1:
        return f"{next(iter(times.values()))} with any number of workers"
    parts = [f"{time} with {workers}" for workers, time in times.items()]
    return ", ".join([f"{parts[0]} worker", *parts[1:]])


def audit_screen(report: AuditReport, subject: str) -> Screen:
    """Return the result of an audit at a glance; of one that fails, all that it says.

    Parameters
    ----------
    report
        The result.
    subject
        What was audited, as it was given.
    """
    rows = [row for row in table(report)[1:] if not report.passed or row[0] not in _ASIDES]
    rows = [(label, text.replace(f"{report.subject}: ", f"{subject}: ", 1)) for label, text in rows]
    style = GOOD if report.holds else BAD if report.holds is False else OPEN
    commands = []
    if report.holds and Path(subject).suffix == ".zarr":
        commands = [(called("show", shlex.quote(subject)), "look at it")]
    # Of one that fails, the line of error has the sentence.
    title = sentence(report) if report.passed else f"{_title_of(subject)}: {report.verdict}"
    return Screen(title, style, rows, commands)


def audit_details(report: AuditReport) -> Screen:
    """Return all that is to be said of an audit."""
    return Screen("", "", table(report))


def evaluation_details(result: dict[str, Any]) -> Screen:
    """Return all that is to be said of an evaluation."""
    return Screen("", "", evaluation_table(result))


def blocks_screen(done: Mapping[str, Any]) -> Screen:
    """Return which blocks :func:`mdpext_dask.pipeline.run.partition` has done."""
    store = near(done["store"])
    rows = [("blocks", f"{done['blocks']:,} in all"), ("took", readable_seconds(done["seconds"]))]
    first, last = done["first"], done["last"] - 1
    which = f"block {first} is done" if first == last else f"blocks {first} to {last} are done"
    return Screen(f"{store}: {which}", GOOD, rows, [(called("status", store), "says what is left")])


def remap_screen(done: Mapping[str, Any]) -> Screen:
    """Return what :func:`mdpext_dask.sampling.remap_store.remap_store` has done."""
    store, before, after = near(done["store"]), done["loss_km"], done["remapped_loss_km"]
    less = f", {1 - after / before:.1%} less" if before > 0 else ""
    rows = [
        ("error", f"{metres(after)} instead of {metres(before)}{less}, at the same ε"),
        ("moved", f"{done['moved']:,} outputs are reported elsewhere"),
    ]
    undo = (called("remap", store, "--remove"), "takes it back")
    return Screen(f"{store} is used with its remap from now on", GOOD, rows, [undo])


def sample_screen(done: Mapping[str, Any], output: Path) -> Screen:
    """Return what :func:`mdpext_dask.sampling.files.sample_file` has drawn, and into which file."""
    file = "standard output" if is_standard_output(output) else str(output)
    record = f"each point is moved to its record first, at most {metres(done['max_quantisation_km'])} away"
    rows = [("places", record)]
    if done["outside"]:
        dropped = f"; {done['dropped']:,} points are left out" if done["dropped"] else ""
        rows.append(("outside", f"{done['outside']:,} points, treated as {done['outside_rule']}{dropped}"))
    if done["remap"]:
        rows.append(("remap", "is used"))
    if done["composed_epsilon_per_km"] is not None:
        most = f"up to ε = {done['composed_epsilon_per_km']:.6g}/km for one user, by the ledger"
        rows.append(("so far", most))
    sticky = done["key_id"] is not None
    cost = (
        "the same answer at the same place costs nothing again" if sticky else "several of one place add up"
    )
    rows.append(("cost", f"every report costs the promised ε; {cost}"))
    points = f"{done['points']:,} point{'s' if done['points'] != 1 else ''}"
    return Screen(f"{points} reported: {file}", GOOD, rows)


def export_screen(done: Mapping[str, Any]) -> Screen:
    """Return what :func:`mdpext_dask.sampling.export.export_city` has written."""
    ratio = f"{done['ratio']:.3g} times smaller than its rows" if done["ratio"] > 1 else "no smaller"
    rows = [
        ("promised", f"ε = {done['epsilon_per_km']:g}/km"),
        ("holds", f"{done['records']:,} places and {done['outputs']:,} outputs, packed as {done['packing']}"),
        ("size", f"{decimal(done['bytes'])}, {ratio}"),
        ("use", "mdpext_dask.runtime.open_city draws from it, with NumPy alone"),
    ]
    return Screen(
        f"{done['file']} is written", GOOD, rows, [(called("audit", near(done["file"])), "prove it")]
    )


def report_screen(done: Mapping[str, Any]) -> Screen:
    """Return what :func:`mdpext_dask.reports.report.report` has written."""
    rows = [("verdict", done["verdict"]), ("has", ", ".join(done["sections"]))]
    title = f"{done['file']} is written ({decimal(done['bytes'])}); open it in a browser"
    return Screen(title, GOOD if done["holds"] else BAD, rows)


def page_screen(done: Mapping[str, Any]) -> Screen:
    """Return what :func:`mdpext_dask.reports.show.show` has opened."""
    made = "is up to date" if done["reused"] else "is written"
    rows = [("verdict", done["verdict"]), ("page", done["said"])]
    return Screen(f"{near(done['file'])} {made}", GOOD if done["holds"] else BAD, rows)


def evaluation_screen(result: dict[str, Any], store: str) -> Screen:
    """Return what an evaluation has found at a glance.

    Parameters
    ----------
    result
        What :func:`mdpext_dask.evaluation.evaluate.evaluate` returns.
    store
        The store, as it was given.
    """
    report = [(called("show", shlex.quote(store)), "look at it")]
    if result["state"] == REFUSED:
        refused = ("refused", "its audit failed: what follows is about a mechanism that keeps no promise")
        return Screen(f"{_title_of(store)} is refused", BAD, [refused, *highlights(result)])
    return Screen(
        f"What {_title_of(store)} costs, and what attackers learn", "bold", highlights(result), report
    )
