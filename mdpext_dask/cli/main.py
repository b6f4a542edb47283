"""The command line: arguments in, one call, one answer printed.

Heavy modules are imported inside the commands, so that ``mdpext --help`` answers at once.
"""

import os
import sys
from typing import Annotated

from mdpext_dask import __version__
from mdpext_dask.errors import SpecError, first_line

try:
    import typer

    from mdpext_dask.cli import build_commands, sweep, use_commands
    from mdpext_dask.cli.console import answer, ending_politely
    from mdpext_dask.cli.options import app
except ModuleNotFoundError as _missing:  # NumPy alone is enough for mdpext_dask.runtime, but not for commands
    _needs = "needs more than mdpext_dask.runtime does: pip install mdpext-dask"
    print(f"error: mdpext: {_needs} ({first_line(_missing)})", file=sys.stderr)
    sys.exit(SpecError.exit_code)

# Importing these modules adds their commands to the application, in this order.
COMMANDS = (build_commands, sweep, use_commands)

# Shells that ask for completions set this variable.
_COMPLETE = "_MDPEXT_COMPLETE"
# Typer's exit code for an interrupt that it has caught.
_TYPER_INTERRUPTED = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mdpext-dask {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[  # noqa: ARG001 its callback prints
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="module:Class", help="Operator of your own that stores may use; may import its module."
        ),
    ] = None,
) -> None:
    if operator:
        from mdpext_dask.extend.choose import trust_operators

        trust_operators(*operator)


def _is_completing(given: list[str]) -> bool:
    """Whether a shell asks for completions, or is to learn them."""
    return _COMPLETE in os.environ or given[:1] in (["--install-completion"], ["--show-completion"])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an expected error is one line and an exit code.

    Parameters
    ----------
    arguments
        Default: those of the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    with ending_politely():
        answer(_call, given, as_json="--json" in given)


def _call(given: list[str]) -> int:
    try:
        # Typer itself would print errors in boxes, and swallow an interrupt.
        code = app(args=given or ["--help"], standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as ended:
        if not _is_completing(given):  # commands do not end so
            raise
        return int(ended.code or 0)
    if code == _TYPER_INTERRUPTED:
        raise KeyboardInterrupt
    return code or 0
