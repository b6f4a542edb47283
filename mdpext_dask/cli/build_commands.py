"""Commands that make stores, and compare methods; heavy modules are imported inside them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mdpext_dask.cli.console import end_badly, observed, range_of, show
from mdpext_dask.cli.options import (
    MAKE,
    MEASURE,
    PIECES,
    Job,
    Json,
    NewStore,
    Override,
    Overwrite,
    Progress,
    Quiet,
    Readers,
    Replace,
    Scheduler,
    Store,
    Verbose,
    Workers,
    command,
    one_of,
)
from mdpext_dask.errors import EXIT_BAD_INPUT, SpecError, printable

if TYPE_CHECKING:
    from mdpext_dask.job.spec import JobSpec


@command(MAKE, 'start "Rome, Italy" --hide 200')
def start(
    where: Annotated[
        str | None,
        Argument(
            metavar="[WHERE]",
            help="A place to download, a file or folder, or builtin:manhattan; asked for if it is not given.",
        ),
    ] = None,
    epsilon: Annotated[float | None, Option(metavar="PER_KM", help="ε, in 1/km; 2 to 10 as a rule.")] = None,
    hide: Annotated[
        float | None,
        Option(
            metavar="METRES",
            help="Instead of ε: one report changes odds between records so far apart by a factor of at most "
            "e = 2.72, and by less between nearer ones (ε = 1000/METRES).",
        ),
    ] = None,
    box: Annotated[
        str | None, Option(metavar="W,S,E,N", help="Only this part of the network, in degrees.")
    ] = None,
    seconds: Annotated[
        float, Option(metavar="SECONDS", help="How long programs may be planned to take, to lower the error.")
    ] = 300.0,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE.toml",
            help="The job file, after which job and store are called; default: ./NAME.toml.",
        ),
    ] = None,
    overwrite: Replace = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a job file for a city of your own, and say what it will come to."""
    from mdpext_dask.cli.start import prospect_screen, write_job

    with observed("plain", quiet=quiet, verbose=verbose) as observer:
        facts = write_job(where, epsilon, hide, box, seconds, output, overwrite=overwrite, observer=observer)
    show(facts, as_json, beside=Path(facts["job"]), screen=prospect_screen, quiet=quiet, verbose=verbose)


@command(MAKE, "run workflows/manhattan.toml --set privacy.epsilon_per_km=2")
def run(
    job: Job,
    store: NewStore = None,
    overwrite: Overwrite = False,
    override: Override = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Build and certify a store; run again after an interruption to resume."""
    from mdpext_dask.cli.screens import store_screen
    from mdpext_dask.pipeline.run import build

    spec = _load(job, override)
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        summary = build(spec, _store_of(spec, store), overwrite=overwrite, workers=workers, observer=observer)
    show(summary, as_json, screen=store_screen, quiet=quiet, verbose=verbose)


@command(MAKE, "plan workflows/manhattan.toml")
def plan(
    job: Job, override: Override = None, as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """Estimate time, memory and size of a job; exit 2 if `run` would refuse it."""
    from mdpext_dask.cli.plan_table import plan_table
    from mdpext_dask.cli.screens import plan_screen
    from mdpext_dask.pipeline.plan import plan_job

    spec = _load(job, override)
    with observed("plain", quiet=quiet, verbose=verbose) as observer:
        planned = plan_job(spec, observer)
    screen = partial(plan_screen, job=str(job))
    show(planned, as_json, screen=screen, drawn=plan_table, quiet=quiet, verbose=verbose)
    if planned["refused"] is not None:
        end_badly(planned["refused"], EXIT_BAD_INPUT)


@command(PIECES, "init workflows/manhattan.toml --store manhattan.zarr")
def init(
    job: Job,
    store: NewStore = None,
    overwrite: Overwrite = False,
    override: Override = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Create a store and solve its seed; `partition` comes next."""
    from mdpext_dask.cli.screens import store_screen
    from mdpext_dask.pipeline.run import init as init_job

    spec = _load(job, override)
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        place = _store_of(spec, store)
        summary = init_job(spec, place, overwrite=overwrite, workers=workers, observer=observer)
    show(summary, as_json, screen=store_screen, quiet=quiet, verbose=verbose)


@command(PIECES, "partition manhattan.zarr --range 0:8")
def partition(
    store: Store,
    index: Annotated[int | None, Argument(metavar="[I]", help="Number of the block, from 0.")] = None,
    blocks: Annotated[str | None, Option("--range", metavar="A:B", help="Blocks A to B - 1 instead.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Extend one block, or a range of blocks, of an initialised store in this process."""
    from mdpext_dask.cli.screens import blocks_screen
    from mdpext_dask.pipeline.run import partition as extend_blocks

    if (index is None) == (blocks is None):
        raise SpecError("give either a block or --range A:B")
    first, last = range_of("--range", blocks) if index is None else (index, index + 1)
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        summary = extend_blocks(store, first, last, observer=observer)
    show(summary, as_json, screen=blocks_screen, quiet=quiet, verbose=verbose)


@command(PIECES, "finalise manhattan.zarr")
def finalise(
    store: Store,
    workers: Readers = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Check and certify a store whose blocks are all done, and mark it complete."""
    from mdpext_dask.cli.screens import store_screen
    from mdpext_dask.pipeline.run import finalise as finalise_store

    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        summary = finalise_store(store, workers=workers, scheduler=scheduler, observer=observer)
    show(summary, as_json, screen=store_screen, quiet=quiet, verbose=verbose)


@command(MAKE, "status manhattan.zarr")
def status(store: Store, as_json: Json = False, verbose: Verbose = False) -> None:
    """Show the state of a store and how many of its blocks are done."""
    from mdpext_dask.cli.screens import store_screen
    from mdpext_dask.pipeline.summary import summarise
    from mdpext_dask.store.mechanism_store import MechanismStore

    show(summarise(MechanismStore.open(store)), as_json, screen=store_screen, verbose=verbose)


@command(PIECES, "submit workflows/manhattan.toml --to slurm --dry-run")
def submit(
    job: Job,
    to: Annotated[
        str,
        Option(
            metavar="CLUSTER",
            help="Kind of cluster: slurm or kubernetes.",
            autocompletion=one_of("slurm", "kubernetes"),
        ),
    ],
    store: NewStore = None,
    override: Override = None,
    array: Annotated[bool, Option("--array", help="Submit an array of jobs without Dask (Slurm).")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Write the files and print the commands only.")
    ] = False,
    detach: Annotated[bool, Option("--detach", help="Do not wait for the job.")] = False,
    folder: Annotated[
        Path | None,
        Option(metavar="DIR", help="Where the files go; default: ./NAME-slurm or ./NAME-kubernetes."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Submit a job to a cluster and follow it; submit again to resume."""
    from mdpext_dask.cli.submit import submit as submit_job

    spec = _load(job, override)
    url, how = _store_of(spec, store), {"dry_run": dry_run, "array": array, "detach": detach}
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = submit_job(spec, to, url, folder, **how, observer=observer)
    if dry_run and not as_json and not quiet:
        lines = (line for command in result["commands"] for line in command.splitlines())
        print(*map(printable, lines), sep="\n")
    else:
        show(result, as_json, quiet=quiet)


@command(MEASURE, "compare workflows/manhattan-published.toml --methods laplace,windows --repeats 1")
def compare(
    job: Job,
    repeats: Annotated[
        int | None, Option(min=1, metavar="N", help="Repetitions, each with new outputs and tasks.")
    ] = None,
    limit: Annotated[float | None, Option(metavar="SECONDS", help="Time limit of one construction.")] = None,
    methods: Annotated[str | None, Option(metavar="A,B,...", help="Methods to run; default: all.")] = None,
    cases: Annotated[
        str | None, Option(metavar="all|NAME,...", help="Cases under \\[compare] to run, instead of the job.")
    ] = None,
    bound_seconds: Annotated[
        float | None, Option(metavar="SECONDS", help="Time for the lower bound; 0: no bound.")
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FOLDER", help="Folder of results; default: ./NAME-compare."),
    ] = None,
    overwrite: Replace = False,
    override: Override = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Run published methods on the same problem and print one table; run again to resume."""
    from mdpext_dask.reports.compare.protocol import compare as compare_methods
    from mdpext_dask.reports.compare.tables import as_json as document
    from mdpext_dask.reports.compare.tables import show_tables, write_results

    spec = _load(job, override)
    folder = Path(f"{spec.job.name}-compare") if output is None else output
    options: dict[str, Any] = {
        "cases": _names(cases), "methods": _names(methods), "repeats": repeats, "limit_seconds": limit,
        "bound_seconds": bound_seconds, "overwrite": overwrite, "workers": workers,
    }  # fmt: skip
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        summaries = compare_methods(spec, folder, **options, observer=observer)
    files = write_results(folder, summaries)
    if as_json:
        show(document(summaries), as_json)
    elif not quiet:
        show_tables(summaries, files, verbose=verbose)


def _load(job: Path, overrides: list[str] | None) -> "JobSpec":
    from mdpext_dask.job.spec import load_job

    return load_job(job, overrides or ())


def _store_of(spec: "JobSpec", store: str | None) -> str:
    if store is not None and store.startswith("memory:"):
        raise SpecError(f"--store: {store} would be gone with this command; give a path or another URL")
    return f"{spec.job.name}.zarr" if store is None else store


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
