"""Reading CSV tables so that a bad cell is named, not guessed at."""

import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line

if TYPE_CHECKING:
    import pandas as pd

LONLAT = ("lon", "lat")
PLANAR = ("x_km", "y_km")
_FIRST_LINE = 2  # line 1 is the header


def read_csv(path: Path, required: Sequence[str] = ()) -> "pd.DataFrame":
    """Read a CSV file (also compressed) with every cell as text.

    Raises
    ------
    DataError
        If it cannot be read, is empty, or lacks a required column.
    """
    import pandas as pd  # workers read no tables, and need not wait for it

    try:
        with warnings.catch_warnings():
            # A row with more fields than the header would lose some of them with a warning only.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                dtype=str,
                index_col=False,
                keep_default_na=False,
                na_filter=False,
                skipinitialspace=True,
                skip_blank_lines=False,
            )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: not a readable CSV file: {first_line(error)}") from None
    except pd.errors.ParserWarning:
        raise DataError(f"{path}: a row has more fields than the header") from None
    # Blank lines are no rows, but they count as lines: the index keeps their numbers.
    table = table[(table != "").any(axis=1)]
    missing = [name for name in required if name not in table.columns]
    if missing:
        raise DataError(f"{path}: column {missing[0]} is missing; found {', '.join(map(str, table.columns))}")
    if table.empty:
        raise DataError(f"{path}: holds no rows")
    return table


def numbers(table: "pd.DataFrame", column: str, path: Path) -> NDArray[np.float64]:
    """Return a column as finite float64.

    Raises
    ------
    DataError
        If a cell is not a finite number; line and text are named.
    """
    import pandas as pd

    values = pd.to_numeric(table[column], errors="coerce").to_numpy(np.float64)
    complain_where(~np.isfinite(values), table, column, path, "is not a finite number")
    return values


def integers(table: "pd.DataFrame", column: str, path: Path) -> NDArray[np.int64]:
    """Return a column as int64, without the detour through floats that would round long ids.

    Raises
    ------
    DataError
        If a cell is not a whole number; line and text are named.
    """
    text = table[column].str.strip()
    whole = text.str.fullmatch(r"[+-]?[0-9]{1,18}").to_numpy(bool)
    complain_where(~whole, table, column, path, "is not a whole number of at most 18 digits")
    return text.to_numpy(str).astype(np.int64)


def complain_where(
    bad: NDArray[np.bool_], table: "pd.DataFrame", column: str, path: Path, complaint: str
) -> None:
    """Name the first bad cell of a column, if there is one.

    Raises
    ------
    DataError
        With file, line, column and text.
    """
    if bad.any():
        row = int(np.argmax(bad))
        line = table.index[row] + _FIRST_LINE
        raise DataError(f"{path}: line {line}: {column} {table[column].iloc[row]!r} {complaint}")
