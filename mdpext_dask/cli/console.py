"""What a command reads from its arguments, and how it shows progress and results.

Heavy modules are imported late, so that ``mdpext --help`` answers at once.
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from mdpext_dask.errors import (
    EXIT_CRASH,
    EXIT_UNREAD,
    IncompleteStoreError,
    MdpextError,
    SpecError,
    StoreError,
    first_line,
)
from mdpext_dask.files import is_standard_output

if TYPE_CHECKING:
    from pathlib import Path

    from mdpext_dask.auditors.methods import Sampling
    from mdpext_dask.events import Observer

STYLES = ("auto", "plain", "json", "none")
_DUMB_TERMINALS = ("dumb", "unknown")


def keep_apart(output: "Path", as_json: bool) -> None:
    """Refuse a document on standard output where a file goes there too.

    Raises
    ------
    SpecError
        If it does.
    """
    if as_json and is_standard_output(output):
        raise SpecError(f"--json: standard output is where {output} goes; write that into a file")


def show(values: dict[str, Any], as_json: bool, beside: "Path | None" = None) -> None:
    """Print values on standard output: one JSON document, or a table.

    Parameters
    ----------
    values
        What to print.
    as_json
        Whether as JSON.
    beside
        A file that was written. If it went to standard output, the table goes to standard error.
    """
    if as_json:
        text = json.dumps(values, sort_keys=True, allow_nan=False)
        with _writing():
            print(text, flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in values.items():
        # As it is: a path may look like markup.
        table.add_row(Text(name), Text(_readable(value)))
    with _writing():
        Console(stderr=beside is not None and is_standard_output(beside)).print(table)


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


def blocks_of(index: int | None, blocks: str | None) -> tuple[int, int]:
    """Return the range that a block or ``--range`` names.

    Raises
    ------
    SpecError
        If it is neither or both.
    """
    if (index is None) == (blocks is None):
        raise SpecError("give either a block or --range A:B")
    if index is not None:
        return index, index + 1
    return range_of("--range", blocks or "")


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
    from mdpext_dask.auditors.methods import Sampling

    return Sampling(**given)


@contextlib.contextmanager
def ending_politely() -> Iterator[None]:
    """Take SIGTERM, which batch systems send, for an interrupt; end in silence where nobody reads on."""
    in_charge = threading.current_thread() is threading.main_thread()  # others may set no handlers
    before = signal.signal(signal.SIGTERM, _interrupt) if in_charge else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # some terminals cannot show every letter
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except BrokenPipeError:
        _drop(sys.stdout)
        _drop(sys.stderr)
        sys.exit(EXIT_UNREAD)
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def observed(style: str) -> Iterator["Observer"]:
    """Show progress in a style, for as long as something goes on.

    Bars are for terminals that can move their cursor; everything else gets lines.

    Raises
    ------
    SpecError
        If there is no such style.
    """
    if style not in STYLES:
        raise SpecError(f"--progress: must be {', '.join(STYLES[:-1])} or {STYLES[-1]}, got {style!r}")
    if style == "none":
        from mdpext_dask.events import silent

        yield silent
    elif style == "auto" and _can_draw():
        from mdpext_dask.cli.progress import RichBar

        with RichBar() as bar:
            yield bar
    else:
        from mdpext_dask.cli.progress import JsonLines, PlainLines

        yield JsonLines() if style == "json" else PlainLines()


def _can_draw() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _DUMB_TERMINALS


def answer(call: Callable[[list[str]], int], given: list[str], *, as_json: bool) -> NoReturn:
    """End this process with what a command answers: an exit code, and of errors one line.

    Parameters
    ----------
    call
        The command line's parser.
    given
        Its arguments.
    as_json
        Whether an error is told as a document on standard output too.
    """
    try:
        code = call(given)
        if sys.stdout is not None:  # or closed by whoever has started this
            with _writing():
                sys.stdout.flush()
    except MdpextError as error:
        _fail(error, as_json=as_json)
    except KeyboardInterrupt:
        # What Zarr was waiting for is abandoned with the process; nobody needs to read about it.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        _tell(IncompleteStoreError("interrupted; run again to go on"), as_json=as_json)
        # Libraries that were interrupted at their start have tracebacks to show at their end.
        _drop(sys.stderr)
        sys.exit(IncompleteStoreError.exit_code)
    except BaseException as error:  # whatever ends a process from within is no success either
        for broken in (error, error.__context__):  # the parser and the table printer exit with 1
            if isinstance(broken, BrokenPipeError):
                raise broken from None
        describe = getattr(error, "format_message", None)
        if describe is not None:  # the parser's errors, wherever Typer keeps their class
            _fail(SpecError(describe()), as_json=as_json)
        traceback.print_exc()
        _fail(MdpextError(f"{type(error).__name__}: {error}"), as_json=as_json, code=EXIT_CRASH)
    sys.exit(code)


def _fail(error: MdpextError, *, as_json: bool, code: int | None = None) -> NoReturn:
    sys.exit(_tell(error, as_json=as_json, code=code))


def _tell(error: MdpextError, *, as_json: bool, code: int | None = None) -> int:
    line = " ".join(str(error).split())
    code = error.exit_code if code is None else code
    _print(f"error: {line}", sys.stderr)
    if as_json:
        _print(json.dumps({"error": type(error).__name__, "message": line, "exit_code": code}), sys.stdout)
    return code


def _print(line: str, stream: TextIO | None) -> None:
    """Print a line where that is possible: a full disk or a closed stream must not change the exit code."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except (OSError, ValueError):
        _drop(stream)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turn what goes wrong with standard output into one line.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        _drop(sys.stdout)
        raise StoreError(f"the answer cannot be written: {first_line(error)}") from None


def _drop(stream: TextIO | None) -> None:
    """Let go nowhere whatever a stream is still to write."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
