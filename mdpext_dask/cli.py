"""The command line: thin glue between arguments, the stages, and what is printed.

Heavy modules are imported inside the commands, so that ``mdpext --help`` answers at once.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mdpext_dask.console import (
    answer,
    blocks_of,
    ending_politely,
    exponent,
    names_of,
    observed,
    range_of,
    sampling_of,
    show,
)
from mdpext_dask.errors import EXIT_BAD_INPUT, EXIT_GUARANTEE, SpecError

if TYPE_CHECKING:
    from mdpext_dask.spec import JobSpec

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Blur locations with a proof: metric differential privacy for a whole city.",
)

# What Typer answers instead of letting an interrupt through.
_TYPER_INTERRUPTED = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"mdpext-dask {version('mdpext-dask')}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


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
    from mdpext_dask.run import build

    spec = _load(job, override)
    with observed(progress) as observer:
        summary = build(spec, _store_of(spec, store), overwrite=overwrite, workers=workers, observer=observer)
    show(summary, as_json)


@app.command()
def plan(job: JobArgument, override: SetOption = None, as_json: JsonOption = False) -> None:
    """Say what a job will cost, without doing it; exit 2 if `run` would refuse it."""
    from mdpext_dask.costs import plan_job

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
    from mdpext_dask.run import init as init_job

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
    from mdpext_dask.run import partition as extend_blocks

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
    from mdpext_dask.run import finalise as finalise_store

    with observed(progress) as observer:
        summary = finalise_store(store, workers=workers, observer=observer)
    show(summary, as_json)


@app.command()
def status(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Show how far a store is."""
    from mdpext_dask.run import summarise
    from mdpext_dask.store import MechanismStore

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
    from mdpext_dask.submit.command import submit as submit_job

    spec = _load(job, override)
    url, how = _store_of(spec, store), {"dry_run": dry_run, "array": array, "detach": detach}
    with observed(progress) as observer:
        result = submit_job(spec, to, url, folder, **how, observer=observer)
    if dry_run and not as_json:
        print(*result["commands"], sep="\n")
    else:
        show(result, as_json)


@app.command()
def audit(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="STORE|ARRAY",
            help="Path or URL of a store; or rows of any mechanism: .npy, .npz, CSV, Parquet, Zarr.",
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="certificate|exhaustive|sampled|boundary",
            help="A proof in one pass (for stores, the default), every triple (for arrays), an "
            "estimate, or rows that blocks share.",
        ),
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option("--points", metavar="FILE", help="An array's records: columns x_km,y_km or lon,lat."),
    ] = None,
    epsilon_per_km: Annotated[
        float | None, typer.Option("--epsilon-per-km", help="The promise, instead of the store's own.")
    ] = None,
    metric_p: Annotated[
        str | None, typer.Option("--metric-p", metavar="P|inf", help="Exponent of the metric; of arrays, 2.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="What log ratios may exceed their bounds by; said what it hides."),
    ] = 0.0,
    pairs: Annotated[
        int | None, typer.Option("--pairs", help="sampled: how many to draw; default: a million.")
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="sampled: when to stop.")] = None,
    design: Annotated[
        str | None,
        typer.Option("--design", metavar="stratified|uniform", help="sampled: by distance, or all alike."),
    ] = None,
    random_seed: Annotated[
        int | None, typer.Option("--random-seed", help="sampled: to draw the same pairs again.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option("--confidence", help="sampled: of the interval; default 0.95.")
    ] = None,
    stop_at_first: Annotated[
        bool, typer.Option("--stop-at-first", help="sampled: stop at the first violation.")
    ] = False,
    blocks: Annotated[
        str | None, typer.Option("--blocks", metavar="A:B", help="boundary: blocks A to B - 1 only.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE.png", help="Draw the map and the ratios by distance as well."
        ),
    ] = None,
    workers: WorkersOption = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler", metavar="ADDRESS", help="A Dask scheduler to use; never the store's own."
        ),
    ] = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Audit a store, or anyone's mechanism, from its bytes; exit 1 if it does not keep its promise."""
    from mdpext_dask.audit.words import sentence, table
    from mdpext_dask.auditing import audit as audit_subject

    sampling = sampling_of(pairs, seconds, design, random_seed, confidence, stop_at_first=stop_at_first)
    with observed(progress) as observer:
        report = audit_subject(
            subject,
            method,
            points=points,
            epsilon_per_km=epsilon_per_km,
            metric_p=exponent(metric_p),
            tolerance=tolerance,
            sampling=sampling,
            blocks=None if blocks is None else range_of("--blocks", blocks),
            picture=picture,
            workers=workers,
            scheduler=scheduler,
            observer=observer,
        )
    show(report.as_json() if as_json else dict(table(report)), as_json)
    if not report.holds:
        print(f"error: {sentence(report)}", file=sys.stderr)
        raise typer.Exit(EXIT_GUARANTEE)


@app.command()
def evaluate(
    store: StoreArgument,
    picture: Annotated[
        Path | None,
        typer.Option("--map", metavar="FILE.png", help="Draw a map of the expected loss of every record."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="FILE.npz", help="Write the expected loss of every record."),
    ] = None,
    bound_seconds: Annotated[
        float,
        typer.Option(
            "--bound-seconds", metavar="S", help="About how long to bound any loss; 0 for no bound."
        ),
    ] = 60.0,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", help="Bound on every Nth record, however long it takes."),
    ] = None,
    offsets: Annotated[
        int | None,
        typer.Option(
            "--offsets", metavar="N", help="Estimate the bound from so many lattices of the stride."
        ),
    ] = None,
    random_seed: Annotated[
        int, typer.Option("--random-seed", min=0, metavar="N", help="Which lattices --offsets draws.")
    ] = 0,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Compute what a finished store costs its users, from its bytes, and what no mechanism can beat."""
    from mdpext_dask.evaluate.bound import BoundRequest
    from mdpext_dask.evaluate.words import table
    from mdpext_dask.evaluation import evaluate as evaluate_store

    request = BoundRequest(bound_seconds, stride, offsets, random_seed)
    with observed(progress) as observer:
        result = evaluate_store(
            store, picture=picture, records=records, bound=request, workers=workers, observer=observer
        )
    show(result if as_json else dict(table(result)), as_json)


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
    from mdpext_dask.compare.protocol import compare as compare_methods
    from mdpext_dask.compare.tables import as_json as document
    from mdpext_dask.compare.tables import write_results

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
    from mdpext_dask.compare.screen import show_tables

    show_tables(summaries, files)


@app.command()
def remap(
    store: StoreArgument,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Find what to report instead of each output so that less is lost; same epsilon, kept in the store."""
    from mdpext_dask.remapping import remap_store

    with observed(progress) as observer:
        result = remap_store(store, workers=workers, observer=observer)
    show(result, as_json)


@app.command()
def sample(
    store: StoreArgument,
    points: Annotated[Path, typer.Argument(metavar="POINTS.csv", help="Columns lon,lat or x_km,y_km.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.csv", help="Where the reports go.")],
    outside: Annotated[
        str,
        typer.Option(
            "--outside",
            metavar="nearest|drop|error",
            help="Points outside grid or region: report from the nearest record, leave out, or refuse.",
        ),
    ] = "nearest",
    remap: Annotated[bool, typer.Option("--remap", help="Apply what `remap` has left in the store.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Obfuscate locations: one exact, independent draw for every point."""
    from mdpext_dask.batch import sample_file

    show(sample_file(store, points, output, outside, remap=remap), as_json)


# --- glue -----------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an expected error is one line and an exit code.

    Parameters
    ----------
    arguments
        Instead of the process' own.
    """
    given = sys.argv[1:] if arguments is None else arguments
    with ending_politely():
        answer(_call, given, as_json="--json" in given)


def _call(given: list[str]) -> int:
    try:
        # Typer's own handling would print boxes, and answer an interrupt by itself.
        code = app(args=given or ["--help"], standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == _TYPER_INTERRUPTED:
        raise KeyboardInterrupt
    return code or 0


def _load(job: Path, overrides: list[str] | None) -> "JobSpec":
    from mdpext_dask.spec import load_job

    return load_job(job, overrides or ())


def _store_of(spec: "JobSpec", store: str | None) -> str:
    if store is not None and store.startswith("memory:"):
        raise SpecError(f"--store: {store} would be gone with this command; give a path or another URL")
    return f"{spec.job.name}.zarr" if store is None else store


if __name__ == "__main__":
    main()
