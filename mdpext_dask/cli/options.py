"""The application, and arguments that several commands have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

# Groups of commands, in the order of the help.
MAKE, PIECES = "Make a store", "The same in pieces, and on clusters"
MEASURE, USE, KEYS = "Prove and measure", "Use a store", "Keys and signatures"
# Groups of options.
SHOWN, WORK, FILES = "What is shown", "Where it runs", "Files and columns"


def _without_types(params: list[Any]) -> list[Any]:
    """Return parameters that show no type in the help where they are flags."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Metric differential privacy for locations: random places instead of true ones, with a proof of ε.",
    epilog="Example: mdpext run workflows/manhattan.toml",
)


def command(
    group: str, example: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command, under a group of the help and with an example."""
    return app.command(name, cls=_Command, rich_help_panel=group, epilog=f"Example: mdpext {example}")


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return what completes an option that has few values."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Job = Annotated[Path, Argument(metavar="JOB.toml", help="The job file.")]
Store = Annotated[str, Argument(metavar="STORE", help="Path or URL of the store.")]
NewStore = Annotated[
    str | None, Option("--store", metavar="URL", help="Path or URL of the store; default: ./NAME.zarr.")
]
Override = Annotated[
    list[str] | None, Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the store of another job.")]
Replace = Annotated[
    bool, Option("--overwrite", help="Replace files that exist already.", rich_help_panel=FILES)
]
Workers = Annotated[
    int | None,
    Option(
        min=1,
        max=4096,
        metavar="N",
        help="Local processes to use, instead of the job's.",
        rich_help_panel=WORK,
    ),
]
Readers = Annotated[
    int | None,
    Option(
        "--workers",
        min=1,
        max=4096,
        metavar="N",
        help="Local processes to use; default: one for each processor, or none for a small store.",
        rich_help_panel=WORK,
    ),
]
Scheduler = Annotated[
    str | None,
    Option(metavar="ADDRESS", help="Dask scheduler, or its file, to use instead.", rich_help_panel=WORK),
]
LonColumn = Annotated[
    str | None,
    Option(
        metavar="NAME", help="Column with the longitude, if its name does not say so.", rich_help_panel=FILES
    ),
]
LatColumn = Annotated[
    str | None,
    Option(
        metavar="NAME", help="Column with the latitude, if its name does not say so.", rich_help_panel=FILES
    ),
]
Json = Annotated[
    bool, Option("--json", help="Print one JSON document on standard output.", rich_help_panel=SHOWN)
]
Quiet = Annotated[
    bool, Option("--quiet", "-q", help="Print nothing if all is well, but for --json.", rich_help_panel=SHOWN)
]
Verbose = Annotated[
    bool, Option("--verbose", "-v", help="Print all that there is to say.", rich_help_panel=SHOWN)
]
TrustedKey = Annotated[
    str | None,
    Option(
        metavar="KEY",
        help="Refuse what this public key has not signed: a file, or its 64 digits.",
        rich_help_panel=FILES,
    ),
]
Progress = Annotated[
    str,
    Option(
        metavar="STYLE",
        help="How to show progress: auto, plain, json or none.",
        autocompletion=one_of("auto", "plain", "json", "none"),
        rich_help_panel=SHOWN,
    ),
]
