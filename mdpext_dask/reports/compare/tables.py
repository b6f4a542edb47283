"""Results on the terminal and as files: every answer as CSV, one table as Markdown and HTML."""

import html
import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from mdpext_dask.errors import StoreError, first_line, printable
from mdpext_dask.files import rendered
from mdpext_dask.job.sections import NOISE
from mdpext_dask.reports.compare.answers import ITSELF
from mdpext_dask.reports.compare.figure import comparison_of
from mdpext_dask.reports.compare.summary import NORMAL_95, CaseSummary
from mdpext_dask.sampling.report_files import marked

# The plain thing, by its name in the table of methods.
_PLAIN = "laplace"
PICTURE = "utility-time.png"
# Bounds that differ by less than this share are the same.
_SAME = 1e-6
# Columns of the single answers; everything else stays in the answer's file.
_COLUMNS = (
    "case", "method", "repetition", "completed", "reason", "loss_km", "sampled_standard_error_km", "seconds",
    "epsilon_audited", "violation_ratio", "verdict", "guarantee", "audit_seconds", "lower_bound_km",
    "expected_km", "stride",
)  # fmt: skip
HEADER = (
    "method", "family", "loss, km", "to the default", "above the bound", "seconds", "ε audited, 1/km",
    "triples that break ε", "repetitions",
)  # fmt: skip
# Which of a row's cells fit on a terminal, under short names.
_ON_SCREEN = {
    0: "method", 2: "loss, km", 4: "over bound", 5: "seconds", 6: "ε audited", 7: "breaks ε", 8: "n",
}  # fmt: skip


def show_tables(summaries: Sequence[CaseSummary], files: Sequence[Path], *, verbose: bool = True) -> None:
    """Print the table of every case, and the names of the files.

    Parameters
    ----------
    summaries, files
        What :func:`write_results` has written, and where.
    verbose
        Whether all notes are printed; else those who have not finished are named in one line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for summary in summaries:
        console.print(Text(printable(heading(summary)), style="bold"))
        table = Table(box=None, pad_edge=False, header_style="cyan")
        for number, name in _ON_SCREEN.items():
            table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
        unfinished = [row for row in summary.rows if not verbose and row["loss_km"] is None]
        for row in summary.rows:
            if row in unfinished:
                continue
            style = "bold" if row["default"] else "dim" if row["violation_ratio"] else None
            shown = cells(row)
            table.add_row(*(Text(printable(shown[number])) for number in _ON_SCREEN), style=style)
        console.print(table)
        console.print(Text(printable(bound_sentence(summary))))
        if (worse := beaten(summary)) is not None:
            console.print(Text(printable(worse), style="bold red"))
        if unfinished:
            titles = ", ".join(row["title"] for row in unfinished)
            console.print(Text(printable(f"Without a result: {titles} (-v says why).")))
        for note in notes_on(summary) if verbose else ():
            console.print(Text(printable(f"- {note}")))
        console.print()
    folders = dict.fromkeys(str(file.parent) for file in files)
    names = ", ".join(file.name for file in files)
    console.print(Text(printable(f"Written to {', '.join(folders)}: {names}")))


def write_results(folder: Path, summaries: Sequence[CaseSummary]) -> list[Path]:
    """Write everything; return the files.

    Parameters
    ----------
    folder
        Where they go; existing files are replaced.
    summaries
        All cases.

    Raises
    ------
    StoreError
        If the folder cannot be written.
    """
    answers = pd.DataFrame([one for summary in summaries for one in summary.answers])
    rows = pd.DataFrame([row for summary in summaries for row in summary.rows])
    answers, texts = answers.reindex(columns=list(_COLUMNS)), "\n".join(map(_markdown, summaries))
    try:
        picture = _draw(summaries, folder / PICTURE)
        for name, table in (("answers.csv", answers), ("table.csv", rows)):
            table.map(_cell).rename(columns=_cell).to_csv(folder / name, index=False)
        (folder / "table.md").write_text(texts, encoding="utf-8")
        (folder / "table.html").write_text(_page(summaries, picture), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(as_json(summaries), indent=1), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {first_line(error)}") from None
    names = ["table.md", "table.html", "table.csv", "answers.csv", "results.json"]
    return [folder / name for name in [*names, *([PICTURE] if picture else [])]]


def _draw(summaries: Sequence[CaseSummary], path: Path) -> bool:
    """Draw the cases that have any loss; return whether there was one, and matplotlib to draw it."""
    drawn = [summary for summary in summaries if any(row["loss_km"] is not None for row in summary.rows)]
    if not drawn:
        return False
    try:
        content = rendered(lambda: comparison_of(drawn), path.suffix)
    except ImportError:
        return False
    path.write_bytes(content)
    return True


def as_json(summaries: Sequence[CaseSummary]) -> dict[str, Any]:
    """Return all cases as one document; of several, `problem` is a list."""
    problems = [{"case": summary.name, **summary.problem} for summary in summaries]
    return {
        "problem": problems[0] if len(problems) == 1 else problems,
        "rows": [row for summary in summaries for row in summary.rows],
    }


def _cell(value: Any) -> Any:
    """Return a cell of a CSV file: a text is shown, and no formula."""
    return marked(printable(value)) if isinstance(value, str) else value


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as people read it; see :data:`HEADER`."""
    broken = row["violation_ratio"]
    return (
        row["title"],
        row["family"],
        with_error(row["loss_km"], row["loss_standard_error"]),
        with_error(row["loss_to_default"], row["loss_to_default_standard_error"]),
        _shown(row["gap"], lambda gap: f"{gap:+.1%}"),
        _shown(row["seconds"], lambda seconds: f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"),
        _shown(row["epsilon_audited"], lambda audited: f"{float(audited):.4g}"),
        _shown(
            broken,
            lambda ratio: "none" if ratio == 0 else f"{ratio:.2%}" if ratio >= 1e-4 else f"{ratio:.1e}",
        ),
        str(row["repeats"]),
    )


def with_error(value: float | None, standard_error: float | None) -> str:
    """Return a mean and half its 95 % interval, if there is one."""
    if value is None:
        return "-"
    return f"{value:.3f}" + ("" if standard_error is None else f" ± {NORMAL_95 * standard_error:.3f}")


def heading(summary: CaseSummary) -> str:
    """Return the heading of a case: its name and size."""
    problem = summary.problem
    size = (
        f"{problem['records']:,} records, {problem['outputs']} outputs, {problem['seeds']} seeds of "
        f"{problem['cell_km']:g} km, ε = {problem['epsilon_per_km']:g}/km"
    )
    case = "" if summary.name == ITSELF else f", {summary.name}"
    return f"{problem['name']}{case}: {size}"


def bound_sentence(summary: CaseSummary) -> str:
    """Return the lower bound in one sentence."""
    problem = summary.problem
    if problem["lower_bound_km"] is None:
        why = problem["lower_bound_reason"]
        return f"No lower bound: {why}." if why else "No lower bound was asked for."
    shown = with_error(problem["lower_bound_km"], problem["lower_bound_standard_error"])
    sentence = f"No mechanism on these outputs that keeps ε can lose less than {shown} km (certified)."
    expected = problem["lower_bound_expected_km"]
    if expected <= problem["lower_bound_km"] * (1 + _SAME):
        return sentence
    return (
        f"{sentence} There was time for a part of the lattices only; all of them would make it about "
        f"{expected:.3f} km."
    )


def _shown(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def _markdown(summary: CaseSummary) -> str:
    lines = [f"## {heading(summary)}", "", bound_sentence(summary), ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in summary.rows:
        name, *others = cells(row)
        name = f"**{name}**" if row["default"] else name
        cell = (text.replace("|", "\\|") for text in (name, *others))
        lines.append("| " + " | ".join(cell) + " |")
    notes = notes_on(summary)
    return "\n".join(map(printable, [*lines, "", *(f"- {note}" for note in notes), ""]))


def beaten(summary: CaseSummary) -> str | None:
    """Return in words that the default loses more than plain noise at the nearest output, if it does."""
    plain = next((row for row in summary.rows if row["method"] == _PLAIN), None)
    default = next((row for row in summary.rows if row["default"]), None)
    if plain is None or default is None or plain["loss_km"] is None or default["loss_km"] is None:
        return None
    if default is plain or default["loss_km"] <= plain["loss_km"]:
        return None
    more = default["loss_km"] / plain["loss_km"] - 1 if plain["loss_km"] > 0 else math.inf
    return (
        f"{default['title']} loses {more:.1%} more than the plain thing, planar noise at the nearest output: "
        f'set extension.method = "{NOISE}", or leave it out.'
    )


def notes_on(summary: CaseSummary) -> list[str]:
    """Return why rows are incomplete, and the notes of methods that do not keep ε."""
    notes = [f"{row['title']}: {row['reason']}." for row in summary.rows if row["reason"]]
    kept = ("epsilon", "holds")
    apart = [row for row in summary.rows if row["note"] and (row["guarantee"], row["verdict"]) != kept]
    return notes + [f"{row['title']} (promises {row['guarantee']}): {row['note']}" for row in apart]


def _page(summaries: Sequence[CaseSummary], picture: bool) -> str:
    parts = []
    for summary in summaries:
        rows = []
        for row in summary.rows:
            kinds = [k for k, on in (("default", row["default"]), ("broken", row["violation_ratio"])) if on]
            name, family, *numbers = map(_escaped, cells(row))
            tail = "".join(f'<td class="number">{number}</td>' for number in numbers)
            rows.append(f'<tr class="{" ".join(kinds)}"><td>{name}</td><td>{family}</td>{tail}</tr>')
        notes = "".join(f"<li>{_escaped(note)}</li>" for note in notes_on(summary))
        head = "".join(f"<th>{_escaped(name)}</th>" for name in HEADER)
        parts.append(
            f"<h2>{_escaped(heading(summary))}</h2><p>{_escaped(bound_sentence(summary))}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table><ul>{notes}</ul>"
        )
    image = f'<img src="{PICTURE}" alt="Loss against the time that it took, by method">' if picture else ""
    page = resources.files(__package__).joinpath("results.html").read_text(encoding="utf-8")
    return Template(page).substitute(image=image, tables="".join(parts))
