"""Names of users in CSV are no formulas when a spreadsheet opens the file, and stay apart."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from mdpext_dask.sampling.report_files import marked, reports_into

FORMULAS = [
    "=1+1", "=cmd|'/c calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\n=1", "\uff1d1+1", "-",
    "\uff0b1", "+", "-x", "'=1", "'anna", "+44 20 79", "-1e5", "=",
]  # fmt: skip
HARMLESS = ["anna", "7", "-7", "+44207946", "-1.5", "a=b", "a-b", "O'Neill", " anna", "", "ε", "100%", "#1"]


def test_what_begins_like_a_formula_is_marked_and_nothing_else() -> None:
    assert [marked(name) for name in HARMLESS] == HARMLESS
    assert [marked(name) for name in FORMULAS] == [f"'{name}" for name in FORMULAS]
    both = [*FORMULAS, *HARMLESS, *(f"'{name}" for name in FORMULAS)]
    assert len({marked(name) for name in both}) == len(set(both))


@pytest.mark.parametrize("column", ["user", "=1+1"])
def test_files_hold_marked_names(column: str) -> None:
    file, names = io.BytesIO(), [*FORMULAS, *HARMLESS]
    numbers, places = np.arange(len(names)), np.array([[1.0, 2.0]])
    with reports_into(file, Path("out.csv"), places, False, column) as write:
        write(numbers, np.zeros_like(numbers), names)
    head, *rows = csv.reader(io.StringIO(file.getvalue().decode(), newline=""))
    assert head[1] == marked(column)
    assert [row[1] for row in rows] == [marked(name) for name in names]
