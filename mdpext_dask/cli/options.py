"""The application, and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Metric differential privacy for locations: random places instead of true ones, with a proof of ε.",
)

Job = Annotated[Path, Argument(metavar="JOB.toml", help="The job file.")]
Store = Annotated[str, Argument(metavar="STORE", help="Path or URL of the store.")]
NewStore = Annotated[
    str | None, Option("--store", metavar="URL", help="Path or URL of the store; default: ./NAME.zarr.")
]
Override = Annotated[
    list[str] | None, Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job file.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the store of another job.")]
Replace = Annotated[bool, Option("--overwrite", help="Replace files that exist already.")]
Workers = Annotated[int | None, Option(min=1, max=4096, help="Local processes to use, instead of the job's.")]
Readers = Annotated[
    int | None,
    Option(
        "--workers",
        min=1,
        max=4096,
        help="Local processes to use; default: one for each processor, or none for a small store.",
    ),
]
Scheduler = Annotated[
    str | None, Option(metavar="ADDRESS", help="Dask scheduler, or its file, to use instead.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON document on standard output.")]
TrustedKey = Annotated[
    str | None,
    Option(metavar="KEY", help="Refuse what this public key has not signed: a file, or its 64 digits."),
]
Progress = Annotated[str, Option(metavar="auto|plain|json|none", help="How to show progress.")]
