"""Reading CSV tables so that a bad cell is named, not guessed at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mdpext_dask.errors import DataError

LONLAT = ("lon", "lat")
PLANAR = ("x_km", "y_km")


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


def read_csv(path: Path, required: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV file (also compressed) with every cell as text.

    Raises
    ------
    DataError
        If it cannot be read, is empty, or lacks a required column.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: not a readable CSV file: {_first_line(error)}") from None
    missing = [name for name in required if name not in table.columns]
    if missing:
        raise DataError(f"{path}: column {missing[0]} is missing; found {', '.join(map(str, table.columns))}")
    if table.empty:
        raise DataError(f"{path}: holds no rows")
    return table


def numbers(table: pd.DataFrame, column: str, path: Path) -> NDArray[np.float64]:
    """Return a column as finite float64.

    Raises
    ------
    DataError
        If a cell is not a finite number; line and text are named.
    """
    values = pd.to_numeric(table[column], errors="coerce").to_numpy(np.float64)
    _complain_where(~np.isfinite(values), table, column, path, "is not a finite number")
    return values


def integers(table: pd.DataFrame, column: str, path: Path) -> NDArray[np.int64]:
    """Return a column as int64, without the detour through floats that would round long ids.

    Raises
    ------
    DataError
        If a cell is not a whole number; line and text are named.
    """
    text = table[column].str.strip()
    whole = text.str.fullmatch(r"[+-]?\d{1,18}").to_numpy(bool)
    _complain_where(~whole, table, column, path, "is not a whole number")
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
        check_degrees(coordinates, path)
    weight = np.ones(len(table))
    if weights and "weight" in table.columns:
        weight = numbers(table, "weight", path)
        _complain_where(weight < 0, table, "weight", path, "is negative")
        if not weight.any():
            raise DataError(f"{path}: all weights are zero")
    return Points(coordinates=coordinates, planar=planar, weight=weight)


def check_degrees(lonlat: NDArray[np.float64], source: object) -> None:
    """Refuse coordinates that cannot be longitudes and latitudes in degrees.

    Raises
    ------
    DataError
        With the first offending point.
    """
    outside = (np.abs(lonlat[:, 0]) > 180) | (np.abs(lonlat[:, 1]) > 90)
    if outside.any():
        row = int(np.argmax(outside))
        lon, lat = lonlat[row]
        raise DataError(
            f"{source}: row {row + 1}: lon {lon:g}, lat {lat:g} is out of range; coordinates must be degrees"
        )


def _complain_where(
    bad: NDArray[np.bool_], table: pd.DataFrame, column: str, path: Path, complaint: str
) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        # Line 1 is the header.
        raise DataError(f"{path}: line {row + 2}: {column} {table[column].iloc[row]!r} {complaint}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
