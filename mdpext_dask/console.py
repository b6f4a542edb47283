"""What a command reads from its arguments, and how it shows progress and results.

Heavy modules are imported late, so that ``mdpext --help`` answers at once.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mdpext_dask.errors import SpecError

if TYPE_CHECKING:
    from mdpext_dask.auditors import Sampling
    from mdpext_dask.progress import Observer


def show(values: dict[str, Any], as_json: bool) -> None:
    """Print values on standard output: one JSON document, or a table."""
    if as_json:
        print(json.dumps(values, sort_keys=True, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in values.items():
        # As it is: a path may look like markup.
        table.add_row(Text(name), Text(_readable(value)))
    Console().print(table)


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_readable, value)) or "none"
    return "-" if value is None else str(value)


def range_of(option: str, text: str) -> tuple[int, int]:
    """Return the range A:B that an option names.

    Raises
    ------
    SpecError
        If it looks otherwise.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise SpecError(f"{option}: must look like A:B, got {text!r}")
    return int(first), int(last)


def names_of(text: str | None) -> tuple[str, ...] | None:
    """Return the names in a list with commas between them."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def exponent(text: str | None) -> float | None:
    """Return the number that ``--metric-p`` names.

    Raises
    ------
    SpecError
        If it is none.
    """
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"--metric-p: must be a number of at least 1 or inf, got {text!r}") from None


def sampling_of(
    pairs: int | None,
    seconds: float | None,
    design: str | None,
    random_seed: int | None,
    confidence: float | None,
    *,
    stop_at_first: bool,
) -> "Sampling | None":
    """Return what was said of how to draw pairs, if anything was."""
    said = {
        "pairs": pairs,
        "seconds": seconds,
        "design": design,
        "random_seed": random_seed,
        "confidence": confidence,
        "stop_at_first": stop_at_first or None,
    }
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if not given:
        return None
    from mdpext_dask.auditors import Sampling

    return Sampling(**given)


@contextlib.contextmanager
def observed(style: str) -> Iterator["Observer"]:
    """Show progress in a style, for as long as something goes on.

    Raises
    ------
    SpecError
        If there is no such style.
    """
    from mdpext_dask import progress

    if style not in ("auto", "plain", "json", "none"):
        raise SpecError(f"--progress: must be auto, plain, json or none, got {style!r}")
    if style == "none":
        yield progress.silent
    elif style == "json":
        yield progress.json_lines
    elif style == "plain" or not sys.stderr.isatty():
        yield progress.plain_lines
    else:
        with progress.RichBar() as bar:
            yield bar
