"""JSON files that are read whole."""

import json
from pathlib import Path
from typing import Any

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.tables import not_utf8

# More digits than any number of use has; Python refuses to read thousands of them.
_MOST_DIGITS = 300


def read_json(path: Path, source: str, kind: str = "GeoJSON file") -> Any:
    """Return what a JSON file holds.

    Parameters
    ----------
    path
        The file.
    source
        What to name in errors.
    kind
        What it is not if it cannot be read.

    Raises
    ------
    DataError
        If it cannot be read, is not UTF-8 or not JSON; with the line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{source} does not exist") from None
    except OSError as error:
        raise DataError(f"{source} cannot be read: {first_line(error)}") from None
    try:
        return json.loads(data.decode("utf-8-sig"), parse_int=whole_number)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise not_utf8(f"{source}: line {line}" if error.start else source, error) from None
    except RecursionError:
        raise DataError(f"{source}: not a {kind}: objects in objects without end") from None
    except ValueError as error:
        raise DataError(f"{source}: not a {kind}: {first_line(error)}") from None


def whole_number(text: str) -> float:
    """Return a whole number of JSON, as int unless it is beyond all use."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)
