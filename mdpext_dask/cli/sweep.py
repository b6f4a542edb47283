"""``mdpext sweep``: one job with several ε, outputs and cells, in one table, to choose from."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mdpext_dask.cli.console import observed, show
from mdpext_dask.cli.options import (
    MEASURE,
    Job,
    Json,
    Override,
    Progress,
    Quiet,
    Replace,
    Verbose,
    Workers,
    command,
)
from mdpext_dask.errors import SpecError, printable

if TYPE_CHECKING:
    from rich.table import Table

_AUTO = "auto"


@command(MEASURE, "sweep workflows/manhattan.toml --epsilon 2,5,10 --outputs 100,auto")
def sweep(
    job: Job,
    epsilon: Annotated[str, Option(metavar="A,B,...", help="Values of ε, in 1/km.")],
    outputs: Annotated[
        str | None, Option(metavar="A,B,...", help="Numbers of outputs, or auto; default: as the job says.")
    ] = None,
    cell_km: Annotated[
        str | None,
        Option(metavar="A,B,...", help="Sides of source cells, in km, or auto; default: as the job says."),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FOLDER", help="Folder of results; default: ./NAME-sweep."),
    ] = None,
    keep_stores: Annotated[
        bool, Option("--keep-stores", help="Keep the stores, in the folder; else each is deleted.")
    ] = False,
    overwrite: Replace = False,
    override: Override = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Build a job for several ε, and compare what they cost; run again, also with more values, to go on."""
    epsilons = _numbers("--epsilon", epsilon, float)
    counts, cells = _numbers("--outputs", outputs, int, _AUTO), _numbers("--cell-km", cell_km, float, _AUTO)
    from mdpext_dask.job.spec import load_job
    from mdpext_dask.reports.sweep import settings_of
    from mdpext_dask.reports.sweep import sweep as sweep_jobs

    spec = load_job(job, override or ())
    settings = settings_of(spec, epsilons, counts, cells)
    folder = Path(f"{spec.job.name}-sweep") if output is None else output
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = sweep_jobs(
            settings, folder, keep_stores=keep_stores, overwrite=overwrite, workers=workers, observer=observer
        )
    show(result, as_json, drawn=_table, quiet=quiet)


def _numbers(option: str, text: str | None, kind: Callable[[str], Any], word: str | None = None) -> list[Any]:
    """Return the values of an option, in order and once each; none if it is not given.

    Raises
    ------
    SpecError
        If one is neither a number of this kind nor the word.
    """
    found = []
    for part in [] if text is None else text.split(","):
        try:
            found.append(word if part.strip() == word else kind(part))
        except ValueError:
            what = ("whole numbers" if kind is int else "numbers") + (f", or {word}" if word else "")
            raise SpecError(
                f"{option}: must be {what}, with commas between, got {printable(text or '')}"
            ) from None
    return list(dict.fromkeys(found))


def _table(result: dict[str, Any]) -> "Table":
    """Return the rows of a sweep as a table; below it, where the files are."""
    from rich.table import Table
    from rich.text import Text

    from mdpext_dask.cli.eta import readable_seconds
    from mdpext_dask.evaluation.words import metres

    table = Table(box=None, pad_edge=False, header_style="cyan", caption_justify="left", caption_style="")
    asked = any(row["asked"] for row in result["rows"])
    for name in ("ε, 1/km", *(["asked for"] if asked else []), "records", "outputs", "error", "plain noise"):
        table.add_column(name, justify="left" if name == "asked for" else "right", no_wrap=True)
    for name in ("certified", "took"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        values = [f"{row['epsilon_per_km']:g}", *([", ".join(row["asked"])] if asked else [])]
        values += [f"{row['records']:,}", f"{row['outputs']:,}", metres(row["loss_km"])]
        values += [metres(row["plain_loss_km"]), f"{float(row['epsilon_certified']):.6g}"]
        table.add_row(*map(Text, [*values, readable_seconds(row["seconds"])]))
    files = [Path(file) for file in result["files"]]
    names = ", ".join(file.name for file in files)
    table.caption = Text(printable(f"Written to {files[0].parent}: {names}"))
    return table
