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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from mdpext_dask.errors import (
    EXIT_CRASH,
    EXIT_INCOMPLETE,
    EXIT_UNREAD,
    IncompleteStoreError,
    MdpextError,
    SpecError,
    StoreError,
    alternatives,
    exit_code_of,
    first_line,
    is_disk_full,
    printable,
)
from mdpext_dask.files import is_standard_output

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mdpext_dask.cli.screens import Screen
    from mdpext_dask.events import Event, Observer

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
# What an interrupted command leaves behind.
_GO_ON = "run again to go on"
_KEPT = {
    "run": f"finished blocks are kept, and the seed once it is solved; what was under way is not; {_GO_ON}",
    "init": f"the seed is kept once it is solved, what was under way is not; {_GO_ON}",
    "partition": f"finished blocks are kept, the one under way is not; {_GO_ON}",
    "finalise": "the blocks are kept, checks begin anew; run again",
    "sweep": f"finished jobs are kept in the folder of results, the one under way is not; {_GO_ON}",
    "compare": f"finished answers are kept, those under way are not; {_GO_ON}",
    "sample": "no report is written; a ledger is charged when all reports are drawn, not before; run again",
    "": "nothing is kept; run again",
}
# Notes of the command that runs.
_told: set[str] = set()


def keep_apart(output: Path, as_json: bool) -> None:
    """Refuse ``--json`` if the output file is standard output too.

    Raises
    ------
    SpecError
        If it is.
    """
    if as_json and is_standard_output(output):
        raise SpecError(f"--json: {output} goes to standard output as well; give a file instead")


def show(
    values: dict[str, Any],
    as_json: bool,
    beside: Path | None = None,
    screen: "Callable[[dict[str, Any]], Screen] | None" = None,
    drawn: "Callable[[dict[str, Any]], Screen | RenderableType] | None" = None,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Print values on standard output: one JSON document, or for people.

    Parameters
    ----------
    values
        Names and values, as plain JSON.
    as_json
        Whether to print JSON.
    beside
        A file that was written. If it is standard output, what is for people goes to standard error.
    screen
        Function that makes the answer at a glance; default: all names and values.
    drawn
        Function that draws the rest, which follows where much is wanted; default: all names and values.
    quiet
        Whether people want no answer.
    verbose
        Whether they want all of it.
    """
    if as_json:
        text = json.dumps(values, sort_keys=True, allow_nan=False)
        with _writing():
            print(text, flush=True)
        return
    if quiet:
        return
    from rich.console import Console
    from rich.text import Text

    with _writing():
        console = Console(stderr=beside is not None and is_standard_output(beside))
        if screen is not None:
            _print_drawn(console, screen(values))
            console.print("" if verbose else Text("-v shows more, --json all of it", "dim"))
        if screen is None or verbose:
            _print_drawn(console, (drawn or _names_and_values)(values))


def _print_drawn(console: "Console", drawn: "Screen | RenderableType") -> None:
    from mdpext_dask.cli.screens import Screen

    if isinstance(drawn, Screen):
        # Lines are wrapped already, and what is long, such as a command or a hash, can be copied.
        console.print(drawn.text(console.width), soft_wrap=True)
    else:
        console.print(drawn)


def _names_and_values(values: dict[str, Any]) -> "Screen":
    from mdpext_dask.cli.screens import Screen, plainly

    told = {"notes"} if values.get("notes") and _told.issuperset(values["notes"]) else ()
    return Screen("", "", [(name, plainly(value)) for name, value in values.items() if name not in told])


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
def observed(style: str, *, quiet: bool = False, verbose: bool = False) -> Iterator["Observer"]:
    """Show progress in a style while the body runs.

    Terminals that can move their cursor get bars; everything else gets lines.

    Parameters
    ----------
    style
        One of :data:`STYLES`.
    quiet
        Whether nothing is shown.
    verbose
        Whether diaries and the shortest stages are shown as well.

    Raises
    ------
    SpecError
        If there is no such style.
    """
    if style not in STYLES:
        raise SpecError(f"--progress: must be {alternatives(STYLES)}, got {style!r}")
    if style == "none" or quiet:
        from mdpext_dask.events import silent

        yield silent
        return
    _told.clear()
    if style == "auto" and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _DUMB:
        from mdpext_dask.cli.progress import RichBar

        with RichBar(verbose=verbose) as bar:
            yield _noted(bar)
    else:
        from mdpext_dask.cli.progress import JsonLines, PlainLines

        yield _noted(JsonLines() if style == "json" else PlainLines(verbose=verbose))


def _noted(observer: "Observer") -> "Observer":
    """Return an observer that remembers which notes it has told, so that :func:`show` leaves them out."""
    from mdpext_dask.events import Note

    def observe(event: "Event") -> None:
        if isinstance(event, Note):
            _told.add(event.text)
        observer(event)

    return observe


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
        code = _tell(error, exit_code_of(error), as_json=as_json)
    except KeyboardInterrupt:
        # Requests of Zarr are abandoned with the process; their warnings help nobody.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        command = next((name for name in given if name in _KEPT), "")
        interrupted = IncompleteStoreError(f"interrupted; {_KEPT[command]}")
        code = _tell(interrupted, interrupted.exit_code, as_json=as_json)
        # Libraries interrupted while they start would print tracebacks at exit.
        _drop(sys.stderr)
    except BaseException as error:  # SystemExit included: no command ends by it
        for broken in (error, error.__context__):  # the parser and the table printer exit with 1
            if isinstance(broken, BrokenPipeError):
                raise broken from None
        if hasattr(error, "format_message"):  # an error of the parser; its class differs between versions
            code = _tell(SpecError(_of_parser(error)), SpecError.exit_code, as_json=as_json)
        elif is_disk_full(error):
            # Not the file itself, which may be one of a moment.
            named = getattr(error, "filename", None)
            place = f"{Path(os.fsdecode(named)).parent}: " if isinstance(named, str | bytes) else ""
            full = StoreError(
                f"{place}a file cannot be written: {first_line(error)}; make room and run again"
            )
            code = _tell(full, EXIT_INCOMPLETE, as_json=as_json)
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
