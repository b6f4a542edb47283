"""Reading CSV tables so that a bad cell is named, not guessed at."""

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Points:
    """Points of a file.

    Parameters
    ----------
    coordinates
        float64 of shape (n, 2): lon and lat in degrees, or x and y in km.
    planar
        Whether the coordinates are x and y in km.
    weight
        float64 of shape (n,), ≥ 0, not all zero; ones where the file has no weights.
    """

    coordinates: NDArray[np.float64]
    planar: bool
    weight: NDArray[np.float64]


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


def read_points(path: Path, *, weights: bool = True) -> Points:
    """Read points from a CSV file with columns lon,lat or x_km,y_km and, if wanted, weight.

    Raises
    ------
    DataError
        If columns are missing, a cell is not a number, a coordinate is out of range, or the weights
        are negative or all zero.
    """
    table = read_csv(path)
    planar = all(name in table.columns for name in PLANAR)
    if not planar and not all(name in table.columns for name in LONLAT):
        raise DataError(
            f"{path}: needs columns lon,lat (degrees) or x_km,y_km; "
            f"found {', '.join(map(str, table.columns))}"
        )
    first, second = PLANAR if planar else LONLAT
    coordinates = np.stack([numbers(table, first, path), numbers(table, second, path)], axis=-1)
    if not planar:
        check_degrees(coordinates, path, lines=table.index.to_numpy() + _FIRST_LINE)
    weight = np.ones(len(table))
    if weights and "weight" in table.columns:
        weight = numbers(table, "weight", path)
        complain_where(weight < 0, table, "weight", path, "is negative")
        if not weight.any():
            raise DataError(f"{path}: all weights are zero")
    return Points(coordinates=coordinates, planar=planar, weight=weight)


def check_degrees(
    lonlat: NDArray[np.float64], source: object, lines: NDArray[np.int64] | None = None
) -> None:
    """Refuse coordinates that cannot be longitudes and latitudes in degrees.

    Parameters
    ----------
    lonlat
        float64 of shape (n, 2).
    source
        What to name in the error.
    lines
        Line numbers of the points in a file; without, they are counted from 1.

    Raises
    ------
    DataError
        With the first offending point.
    """
    outside = ~((np.abs(lonlat[:, 0]) <= 180) & (np.abs(lonlat[:, 1]) <= 90))
    if outside.any():
        row = int(np.argmax(outside))
        lon, lat = lonlat[row]
        where = f"row {row + 1}" if lines is None else f"line {lines[row]}"
        raise DataError(
            f"{source}: {where}: lon {lon:g}, lat {lat:g} is out of range; coordinates must be degrees"
        )


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
