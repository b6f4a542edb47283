"""The table of a comparison on a terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mdpext_dask.reports.compare.summary import CaseSummary
from mdpext_dask.reports.compare.tables import bound_sentence, cells, heading, notes_on

# Of a row's cells, which there is room for, and in few letters.
_COLUMNS = {0: "method", 2: "loss, km", 4: "over bound", 5: "seconds", 6: "ε audited", 7: "breaks ε", 8: "n"}


def show_tables(summaries: Sequence[CaseSummary], files: Sequence[Path]) -> None:
    """Print every case, and where the files are."""
    console = Console()
    for summary in summaries:
        table = Table(title=Text(heading(summary)), title_justify="left", pad_edge=False)
        for number, name in _COLUMNS.items():
            table.add_column(name, justify="right" if number else "left")
        for row in summary.rows:
            style = "bold" if row["default"] else "dim" if row["violation_ratio"] else None
            shown = cells(row)
            table.add_row(*(shown[number] for number in _COLUMNS), style=style)
        console.print(table)
        console.print(bound_sentence(summary), markup=False)
        for note in notes_on(summary):
            console.print(f"- {note}", markup=False)
        console.print()
    console.print("Written: " + ", ".join(map(str, files)), markup=False)
