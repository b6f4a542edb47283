"""Commands that use stores; heavy modules are imported inside them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mdpext_dask.cli.console import exponent, keep_apart, observed, range_of, sampling_of, show
from mdpext_dask.cli.options import JsonOption, ProgressOption, StoreArgument, WorkersOption, app
from mdpext_dask.errors import EXIT_GUARANTEE, SpecError


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
        typer.Option("--points", metavar="FILE", help="An array's records: CSV, Parquet or GeoJSON."),
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
    from mdpext_dask.auditors.audit import audit as audit_subject
    from mdpext_dask.auditors.result import sentence, table

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
        int,
        typer.Option(
            "--random-seed",
            min=0,
            metavar="N",
            help="Which lattices --offsets draws, and which people --releases looks at.",
        ),
    ] = 0,
    attacks: Annotated[
        bool, typer.Option("--attacks/--no-attacks", help="Whether to measure what attackers learn.")
    ] = True,
    districts: Annotated[
        Path | None,
        typer.Option(
            "--districts",
            metavar="FILE",
            help="Polygons to tell of one by one: GeoJSON, or a shapefile; default: 4 x 4 rectangles.",
        ),
    ] = None,
    attacker_prior: Annotated[
        Path | None,
        typer.Option(
            "--attacker-prior",
            metavar="POINTS",
            help="Where an attacker believes that people are; columns as of prior.file.",
        ),
    ] = None,
    releases: Annotated[
        int,
        typer.Option(
            "--releases",
            min=0,
            metavar="N",
            help="Independent releases of one place, up to so many; 0: none.",
        ),
    ] = 100,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Compute what a finished store costs, what no mechanism can beat, and what attackers learn from it."""
    from mdpext_dask.evaluation.attackers.requests import AttackRequest
    from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
    from mdpext_dask.evaluation.evaluate import evaluate as evaluate_store
    from mdpext_dask.evaluation.words import table

    request = BoundRequest(bound_seconds, stride, offsets, random_seed)
    asked = AttackRequest(districts, attacker_prior, releases, random_seed=random_seed)
    if not attacks and (districts or attacker_prior):
        raise SpecError("--no-attacks: leaves nothing to do for --districts and --attacker-prior")
    with observed(progress) as observer:
        result = evaluate_store(
            store,
            picture=picture,
            records=records,
            bound=request,
            attacks=asked if attacks else None,
            workers=workers,
            observer=observer,
        )
    show(result if as_json else dict(table(result)), as_json)


@app.command()
def remap(
    store: StoreArgument,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Find what to report instead of each output so that less is lost; same epsilon, kept in the store."""
    from mdpext_dask.sampling.remap_store import remap_store

    with observed(progress) as observer:
        result = remap_store(store, workers=workers, observer=observer)
    show(result, as_json)


@app.command()
def sample(
    store: StoreArgument,
    points: Annotated[
        Path,
        typer.Argument(metavar="POINTS", help="CSV, Parquet or GeoJSON, with lon,lat or x_km,y_km."),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", help="Where the reports go; CSV, Parquet or GeoJSON."),
    ],
    outside: Annotated[
        str,
        typer.Option(
            "--outside",
            metavar="nearest|drop|error",
            help="Points outside grid or region: report from the nearest record, leave out, or refuse.",
        ),
    ] = "nearest",
    remap: Annotated[bool, typer.Option("--remap", help="Apply what `remap` has left in the store.")] = False,
    user_column: Annotated[
        str | None,
        typer.Option("--user-column", metavar="NAME", help="Column or property that says whose a point is."),
    ] = None,
    keep_users: Annotated[
        bool, typer.Option("--keep-users", help="Write whose each report is; without, nothing tells.")
    ] = False,
    sticky_key: Annotated[
        Path | None,
        typer.Option("--sticky-key", metavar="FILE", help="Give a user at a place the same answer, always."),
    ] = None,
    place_km: Annotated[
        float | None,
        typer.Option("--place-km", help="Move points to coarse places of this width first, in km."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="Count every user's releases in this file."),
    ] = None,
    release_limit: Annotated[
        int | None,
        typer.Option("--release-limit", metavar="N", help="Refuse more releases than this for any user."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Obfuscate locations: one exact draw for every point, independent unless there is a sticky key."""
    from mdpext_dask.sampling.files import Users, sample_file

    keep_apart(output, as_json)
    users = Users(user_column, keep_users, sticky_key, ledger, release_limit)
    result = sample_file(store, points, output, outside, remap=remap, users=users, place_km=place_km)
    show(result, as_json, output)


@app.command("sticky-key")
def sticky_key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the key goes; must not exist.")],
    epoch: Annotated[
        str, typer.Option("--epoch", help="Any short text; answers of different epochs are independent.")
    ] = "1",
    as_json: JsonOption = False,
) -> None:
    """Make a secret key for sticky answers, in a file that its owner alone can read."""
    from mdpext_dask.runtime.sticky import new_key_file

    show(new_key_file(path, epoch), as_json)


@app.command()
def export(
    store: StoreArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="CITY.mdp", help="Where the file goes.")],
    packing: Annotated[
        str,
        typer.Option(
            "--packing",
            metavar="auto|seed|rows",
            help="Write the seed, where it gives the rows to the last bit, or all rows.",
        ),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a finished store as one small file, to sample from with numpy alone."""
    from mdpext_dask.sampling.export import export_city

    keep_apart(output, as_json)
    show(export_city(store, output, packing), as_json, output)


@app.command()
def report(
    store: StoreArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="Where it goes; default: STORE-report.html here."
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--evaluation",
            metavar="FILE.json",
            help="Take the bound and the attackers' measures that `evaluate --json` has found.",
        ),
    ] = None,
    bound_seconds: Annotated[
        float,
        typer.Option("--bound-seconds", metavar="S", help="About how long to bound any loss; 0: not at all."),
    ] = 2.0,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    progress: ProgressOption = "auto",
) -> None:
    """Write a report for people: one HTML file with proof, maps and figures; exit 1 if it does not hold."""
    from mdpext_dask.reports.report import report as report_on

    with observed(progress) as observer:
        result = report_on(
            store,
            output,
            evaluation=evaluation,
            bound_seconds=bound_seconds,
            workers=workers,
            observer=observer,
        )
    show(result, as_json)
    if not result["holds"]:
        print(f"error: {result['store']}: {result['verdict']}", file=sys.stderr)
        raise typer.Exit(EXIT_GUARANTEE)
