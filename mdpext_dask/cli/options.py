"""The application, and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Blur locations with a proof: metric differential privacy for a whole city.",
)

JobArgument = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")]
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Path or URL of the store.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Where the store goes; default: NAME.zarr here."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace another job's store at the same place.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=4096, help="Local processes, instead of the job's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
ProgressOption = Annotated[
    str,
    typer.Option("--progress", metavar="auto|plain|json|none", help="How to show progress."),
]
