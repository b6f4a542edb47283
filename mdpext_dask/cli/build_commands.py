"""Commands that make stores, and compare methods; heavy modules are imported inside them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mdpext_dask.cli.console import blocks_of, names_of, observed, show
from mdpext_dask.cli.options import (
    JobArgument,
    JsonOption,
    OverwriteOption,
    ProgressOption,
    SetOption,
    StoreArgument,
    StoreOption,
    WorkersOption,
    app,
)
from mdpext_dask.errors import EXIT_BAD_INPUT, SpecError

if TYPE_CHECKING:
    from mdpext_dask.job.spec import JobSpec


@app.command()
def run(
    job: JobArgument,
    store: StoreOption = None,
    overwrite: OverwriteOption = False,
    override: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Do the whole job; run again after any interruption and it goes on where it stopped."""
    from mdpext_dask.pipeline.run import build

    spec = _load(job, override)
    with observed(progress) as observer:
        summary = build(spec, _store_of(spec, store), overwrite=overwrite, workers=workers, observer=observer)
    show(summary, as_json)


@app.command()
def plan(job: JobArgument, override: SetOption = None, as_json: JsonOption = False) -> None:
    """Say what a job will cost, without doing it; exit 2 if `run` would refuse it."""
    from mdpext_dask.pipeline.cost_model import plan_job

    planned = plan_job(_load(job, override))
    show(planned, as_json)
    if planned["refused"] is not None:
        print(f"error: {planned['refused']}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command()
def init(
    job: JobArgument,
    store: StoreOption = None,
    overwrite: OverwriteOption = False,
    override: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Create a store and solve its seed, ready for `partition`."""
    from mdpext_dask.pipeline.run import init as init_job

    spec = _load(job, override)
    with observed(progress) as observer:
        summary = init_job(
            spec, _store_of(spec, store), overwrite=overwrite, workers=workers, observer=observer
        )
    show(summary, as_json)


@app.command()
def partition(
    store: StoreArgument,
    index: Annotated[int | None, typer.Argument(metavar="[I]", help="Block to extend, from 0.")] = None,
    blocks: Annotated[
        str | None, typer.Option("--range", metavar="A:B", help="Blocks A to B - 1 instead.")
    ] = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Extend one block, or a range of blocks, of an initialised store in this process."""
    from mdpext_dask.pipeline.run import partition as extend_blocks

    first, last = blocks_of(index, blocks)
    with observed(progress) as observer:
        summary = extend_blocks(store, first, last, observer=observer)
    show(summary, as_json)


@app.command()
def finalise(
    store: StoreArgument,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Check, certify and close a store whose blocks are all done."""
    from mdpext_dask.pipeline.run import finalise as finalise_store

    with observed(progress) as observer:
        summary = finalise_store(store, workers=workers, observer=observer)
    show(summary, as_json)


@app.command()
def status(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Show how far a store is."""
    from mdpext_dask.pipeline.summary import summarise
    from mdpext_dask.store.mechanism_store import MechanismStore

    show(summarise(MechanismStore.open(store)), as_json)


@app.command()
def submit(
    job: JobArgument,
    to: Annotated[str, typer.Option("--to", metavar="slurm|kubernetes", help="Which kind of cluster.")],
    store: StoreOption = None,
    override: SetOption = None,
    array: Annotated[
        bool, typer.Option("--array", help="As independent tasks on blocks, without Dask.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the files, print the commands, submit nothing.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="For the files; default: NAME-slurm or the like."),
    ] = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Hand a job to a cluster and follow it; it goes on when this ends, and again where it has stopped."""
    from mdpext_dask.cli.submit.command import submit as submit_job

    spec = _load(job, override)
    url, how = _store_of(spec, store), {"dry_run": dry_run, "array": array, "detach": detach}
    with observed(progress) as observer:
        result = submit_job(spec, to, url, folder, **how, observer=observer)
    if dry_run and not as_json:
        print(*result["commands"], sep="\n")
    else:
        show(result, as_json)


@app.command()
def compare(
    job: JobArgument,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="Repetitions, with new outputs and tasks each time."),
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="SECONDS", help="What one construction may take.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="A,B,...", help="Which methods; default: all.")
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            "--cases",
            metavar="all|NAME,...",
            help="Cases that the job file has under compare, instead of the job itself.",
        ),
    ] = None,
    bound_seconds: Annotated[
        float | None,
        typer.Option("--bound-seconds", help="What the lower bound may take; 0 for none."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the results; default: NAME-compare here."),
    ] = None,
    override: SetOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Run every method of the literature on the same problem; one table. Run again to go on."""
    from mdpext_dask.reports.compare.protocol import compare as compare_methods
    from mdpext_dask.reports.compare.tables import as_json as document
    from mdpext_dask.reports.compare.tables import write_results

    spec = _load(job, override)
    folder = Path(f"{spec.job.name}-compare") if output is None else output
    with observed(progress) as observer:
        summaries = compare_methods(
            spec,
            folder,
            cases=names_of(cases),
            methods=names_of(methods),
            repeats=repeats,
            limit_seconds=limit,
            bound_seconds=bound_seconds,
            workers=workers,
            observer=observer,
        )
    files = write_results(folder, summaries)
    if as_json:
        show(document(summaries), as_json)
        return
    from mdpext_dask.reports.compare.screen import show_tables

    show_tables(summaries, files)


# --- glue --------------------------------------------------------------------------------------------


def _load(job: Path, overrides: list[str] | None) -> "JobSpec":
    from mdpext_dask.job.spec import load_job

    return load_job(job, overrides or ())


def _store_of(spec: "JobSpec", store: str | None) -> str:
    if store is not None and store.startswith("memory:"):
        raise SpecError(f"--store: {store} would be gone with this command; give a path or another URL")
    return f"{spec.job.name}.zarr" if store is None else store
