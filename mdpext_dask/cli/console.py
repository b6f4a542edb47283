"""What a command reads from its arguments, and how it shows progress and results.

Heavy modules are imported late, so that ``mdpext --help`` answers at once.
"""

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from mdpext_dask.errors import (
    EXIT_CRASH,
    EXIT_UNREAD,
    IncompleteStoreError,
    MdpextError,
    SpecError,
    StoreError,
    alternatives,
    first_line,
    printable,
)
from mdpext_dask.files import is_standard_output

if TYPE_CHECKING:
    from pathlib import Path

    from mdpext_dask.events import Observer

# What Typer and Click say, and how it reads better.
_PARSER_WORDS = (
    (r"^Invalid value for '\[?(.*?)\]?': ", r"\1: "),
    (r"Input should be greater than or equal to ", "must be at least "),
    (r"Input should be less than or equal to ", "must be at most "),
    (r"Input should be a valid integer, .*", "must be a whole number"),
    (r"Input should be a valid number, .*", "must be a number"),
    (r"Input should be ", "must be "),
)
STYLES = ("auto", "plain", "json", "none")
_DUMB = ("dumb", "unknown")


def keep_apart(output: "Path", as_json: bool) -> None:
    """Refuse ``--json`` if the output file is standard output too.

    Raises
    ------
    SpecError
        If it is.
    """
    if as_json and is_standard_output(output):
        raise SpecError(f"--json: {output} goes to standard output as well; give a file instead")


def show(values: dict[str, Any], as_json: bool, beside: "Path | None" = None) -> None:
    """Print values on standard output: one JSON document, or a table.

    Parameters
    ----------
    values
        Names and values, as plain JSON.
    as_json
        Whether to print JSON.
    beside
        A file that was written. If it is standard output, the table goes to standard error.
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
        # As plain text: a path may look like markup, and hold what terminals act on.
        table.add_row(Text(printable(name)), Text(printable(_readable(value))))
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


def range_of(option: str, text: str | None) -> tuple[int, int]:
    """Return the range A:B that an option names.

    Raises
    ------
    SpecError
        If the text is no such range, or nothing lies in it.
    """
    first, colon, last = (text or "").partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise SpecError(f"{option}: must look like A:B, got {text!r}")
    if int(first) >= int(last):
        raise SpecError(f"{option}: {text} is empty; A:B is A to B - 1")
    return int(first), int(last)


@contextlib.contextmanager
def ending_politely() -> Iterator[None]:
    """Treat SIGTERM of batch systems as an interrupt; end silently if the reader of a pipe is gone."""
    in_charge = threading.current_thread() is threading.main_thread()  # other threads may set no handlers
    before = signal.signal(signal.SIGTERM, _interrupt) if in_charge else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal can show every letter
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
    """Show progress in a style while the body runs.

    Terminals that can move their cursor get bars; everything else gets lines.

    Raises
    ------
    SpecError
        If there is no such style.
    """
    if style not in STYLES:
        raise SpecError(f"--progress: must be {alternatives(STYLES)}, got {style!r}")
    if style == "none":
        from mdpext_dask.events import silent

        yield silent
    elif style == "auto" and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _DUMB:
        from mdpext_dask.cli.progress import RichBar

        with RichBar() as bar:
            yield bar
    else:
        from mdpext_dask.cli.progress import JsonLines, PlainLines

        yield JsonLines() if style == "json" else PlainLines()


def answer(call: Callable[[list[str]], int], given: list[str], *, as_json: bool) -> NoReturn:
    """End this process with a command's exit code; an error is one line.

    Parameters
    ----------
    call
        The command line's parser.
    given
        Its arguments.
    as_json
        Whether an error is also printed as a document on standard output.
    """
    try:
        code = call(given)
        if sys.stdout is not None:  # it may have been closed before this process started
            with _writing():
                sys.stdout.flush()
    except MdpextError as error:
        code = _tell(error, error.exit_code, as_json=as_json)
    except KeyboardInterrupt:
        # Requests of Zarr are abandoned with the process; their warnings help nobody.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        interrupted = IncompleteStoreError("interrupted; run again to go on")
        code = _tell(interrupted, interrupted.exit_code, as_json=as_json)
        # Libraries interrupted while they start would print tracebacks at exit.
        _drop(sys.stderr)
    except BaseException as error:  # SystemExit included: no command ends by it
        for broken in (error, error.__context__):  # the parser and the table printer exit with 1
            if isinstance(broken, BrokenPipeError):
                raise broken from None
        if hasattr(error, "format_message"):  # an error of the parser; its class differs between versions
            code = _tell(SpecError(_of_parser(error)), SpecError.exit_code, as_json=as_json)
        else:
            print(*map(printable, traceback.format_exc().splitlines()), sep="\n", file=sys.stderr)
            code = _tell(MdpextError(f"{type(error).__name__}: {error}"), EXIT_CRASH, as_json=as_json)
    sys.exit(code)


def _of_parser(error: Any) -> str:
    """Return what the parser says of a command line, in our words, and where to read on."""
    text = str(error.format_message()).rstrip(".")
    for pattern, words in _PARSER_WORDS:
        text = re.sub(pattern, words, text)
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    command = "mdpext" if context.parent is None else f"mdpext {context.info_name}"
    return f"{text} (see {command} --help)"


def end_badly(message: str, code: int) -> NoReturn:
    """End a command that has printed its answer with an exit code, and one line on why."""
    _print(printable(f"error: {message}"), sys.stderr)
    raise typer.Exit(code)


def _tell(error: MdpextError, code: int, *, as_json: bool) -> int:
    line = printable(" ".join(str(error).split()))
    _print(f"error: {line}", sys.stderr)
    if as_json:
        _print(json.dumps({"error": type(error).__name__, "message": line, "exit_code": code}), sys.stdout)
    return code


def _print(line: str, stream: TextIO | None) -> None:
    """Print a line if possible: a full disk or a closed stream must not change the exit code."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except (OSError, ValueError):
        _drop(stream)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Report an error of standard output in one line.

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
    """Discard what a stream still has to write."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
