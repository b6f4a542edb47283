"""Commands that use stores; heavy modules are imported inside them."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from mdpext_dask.cli.console import end_badly, keep_apart, observed, range_of, show
from mdpext_dask.cli.options import (
    KEYS,
    MEASURE,
    USE,
    Json,
    LatColumn,
    LonColumn,
    Progress,
    Quiet,
    Readers,
    Replace,
    Scheduler,
    Store,
    TrustedKey,
    Verbose,
    command,
    one_of,
)
from mdpext_dask.errors import EXIT_GUARANTEE, SpecError

# Groups of options.
_SAMPLED, _BOUND, _ATTACKERS = "With --method sampled", "Lower bound", "Attackers"
_USERS = "Users who report again and again"
_BOUND_SECONDS = "Time for a lower bound on any loss, in s; 0: no bound."
UseRemap = Annotated[
    bool | None,
    Option(
        "--remap/--no-remap",
        help="Report the places that `remap` found, or what is drawn; default: as the store says.",
    ),
]


@command(MEASURE, "audit manhattan.zarr")
def audit(
    subject: Annotated[
        str,
        Argument(
            metavar="STORE|CITY|ARRAY",
            help="A store, an exported city, or any mechanism's rows: .npy, .npz, CSV, Parquet, Zarr.",
        ),
    ],
    method: Annotated[
        str | None,
        Option(
            metavar="METHOD",
            help="certificate: proof over all pairs (default for stores, cities); exhaustive: every triple "
            "(default for arrays); sampled: estimate from random pairs; boundary: rows that blocks share.",
            autocompletion=one_of("certificate", "exhaustive", "sampled", "boundary"),
        ),
    ] = None,
    points: Annotated[
        Path | None, Option(metavar="FILE", help="Where an array's records are: CSV, Parquet or GeoJSON.")
    ] = None,
    lon_column: LonColumn = None,
    lat_column: LatColumn = None,
    epsilon_per_km: Annotated[
        float | None, Option(metavar="EPSILON", help="ε to test in 1/km, instead of the store's.")
    ] = None,
    metric_p: Annotated[
        float | None, Option(metavar="P|inf", help="Exponent of the metric; default for arrays: 2.")
    ] = None,
    tolerance: Annotated[
        float,
        Option(
            metavar="LOG",
            help="Count only log ratios that exceed their bound by more; what is hidden does not hold.",
        ),
    ] = 0.0,
    pairs: Annotated[
        int | None, Option(metavar="N", help="Number of pairs; default: a million.", rich_help_panel=_SAMPLED)
    ] = None,
    seconds: Annotated[
        float | None, Option(metavar="SECONDS", help="Time limit.", rich_help_panel=_SAMPLED)
    ] = None,
    design: Annotated[
        str | None,
        Option(
            metavar="DESIGN",
            help="stratified: by distance; uniform: all pairs alike.",
            autocompletion=one_of("stratified", "uniform"),
            rich_help_panel=_SAMPLED,
        ),
    ] = None,
    random_seed: Annotated[
        int | None, Option(metavar="N", help="Seed, to draw the same pairs again.", rich_help_panel=_SAMPLED)
    ] = None,
    confidence: Annotated[
        float | None,
        Option(metavar="LEVEL", help="Level of the interval; default: 0.95.", rich_help_panel=_SAMPLED),
    ] = None,
    stop_at_first: Annotated[
        bool, Option("--stop-at-first", help="Stop at the first violation.", rich_help_panel=_SAMPLED)
    ] = False,
    blocks: Annotated[str | None, Option(metavar="A:B", help="boundary: only blocks A to B - 1.")] = None,
    picture: Annotated[
        Path | None, Option(metavar="FILE.png", help="Draw a map, and the log ratios by distance.")
    ] = None,
    overwrite: Replace = False,
    workers: Readers = None,
    scheduler: Scheduler = None,
    trusted_key: TrustedKey = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Audit a store, a city, or anyone's mechanism; exit 1 unless what the method claims is so."""
    from mdpext_dask.auditors.audit import audit as audit_subject
    from mdpext_dask.auditors.methods import Sampling
    from mdpext_dask.auditors.result import sentence
    from mdpext_dask.cli.screens import audit_details, audit_screen
    from mdpext_dask.readers.point_chunks import PointColumns

    options: dict[str, Any] = {
        "pairs": pairs, "seconds": seconds, "design": design, "random_seed": random_seed,
        "confidence": confidence, "stop_at_first": stop_at_first or None,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        report = audit_subject(
            subject,
            method,
            points=points,
            columns=PointColumns(lon_column, lat_column),
            epsilon_per_km=epsilon_per_km,
            metric_p=metric_p,
            tolerance=tolerance,
            sampling=Sampling(**given) if given else None,
            blocks=None if blocks is None else range_of("--blocks", blocks),
            picture=picture,
            overwrite=overwrite,
            workers=workers,
            scheduler=scheduler,
            trusted_key=trusted_key,
            observer=observer,
        )
    screens: dict[str, Any] = {
        "screen": lambda _: audit_screen(report, subject), "drawn": lambda _: audit_details(report)
    }  # fmt: skip
    show(report.as_json(), as_json, **screens, quiet=quiet and report.passed, verbose=verbose)
    if not report.passed:
        end_badly(sentence(report), EXIT_GUARANTEE)


@command(MEASURE, "evaluate manhattan.zarr --map losses.png")
def evaluate(
    store: Store,
    picture: Annotated[
        Path | None, Option("--map", metavar="FILE.png", help="Draw a map of the records' expected losses.")
    ] = None,
    records: Annotated[
        Path | None, Option(metavar="FILE.npz", help="Write the expected loss of every record.")
    ] = None,
    overwrite: Replace = False,
    bound_seconds: Annotated[
        float, Option(metavar="SECONDS", help=_BOUND_SECONDS, rich_help_panel=_BOUND)
    ] = 60.0,
    stride: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="Bound on every Nth record, however long it takes.",
            rich_help_panel=_BOUND,
        ),
    ] = None,
    window: Annotated[
        int | None,
        Option(
            min=1, metavar="N", help="With --stride: in windows of N x N records.", rich_help_panel=_BOUND
        ),
    ] = None,
    offsets: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="Estimate the bound from N lattices of that stride.",
            rich_help_panel=_BOUND,
        ),
    ] = None,
    random_seed: Annotated[
        int,
        Option(min=0, metavar="N", help="Seed that chooses lattices (--offsets) and people (--releases)."),
    ] = 0,
    attacks: Annotated[
        bool,
        Option("--attacks/--no-attacks", help="Measure what attackers learn.", rich_help_panel=_ATTACKERS),
    ] = True,
    districts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Districts an attacker tells apart: GeoJSON or shapefile; default: 4 x 4 rectangles.",
            rich_help_panel=_ATTACKERS,
        ),
    ] = None,
    district_name: Annotated[
        str | None,
        Option(
            metavar="PROPERTY",
            help="Property with the districts' names; default: name, or id.",
            rich_help_panel=_ATTACKERS,
        ),
    ] = None,
    attacker_prior: Annotated[
        Path | None,
        Option(
            metavar="POINTS",
            help="Prior of the attacker, as points; same columns as prior.file.",
            rich_help_panel=_ATTACKERS,
        ),
    ] = None,
    lon_column: LonColumn = None,
    lat_column: LatColumn = None,
    releases: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="Attack up to N independent releases of one place; 0: none.",
            rich_help_panel=_ATTACKERS,
        ),
    ] = 100,
    workers: Readers = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Compute the expected loss of a complete store, a lower bound on any loss, and what attackers learn."""
    from mdpext_dask.cli.screens import evaluation_details, evaluation_screen
    from mdpext_dask.evaluation.attackers.requests import AttackRequest
    from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
    from mdpext_dask.evaluation.evaluate import evaluate as evaluate_store
    from mdpext_dask.readers.point_chunks import PointColumns

    attack = AttackRequest(
        districts,
        attacker_prior,
        releases,
        random_seed=random_seed,
        district_name=district_name,
        prior_columns=PointColumns(lon_column, lat_column),
    )
    if not attacks and (districts or attacker_prior):
        raise SpecError("--no-attacks: has no use for --districts and --attacker-prior; leave them out")
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = evaluate_store(
            store,
            picture=picture,
            records=records,
            overwrite=overwrite,
            bound=BoundRequest(bound_seconds, stride, offsets, random_seed, window),
            attacks=attack if attacks else None,
            workers=workers,
            scheduler=scheduler,
            observer=observer,
        )
    screen = partial(evaluation_screen, store=store)
    show(result, as_json, screen=screen, drawn=evaluation_details, quiet=quiet, verbose=verbose)


@command(USE, "remap manhattan.zarr")
def remap(
    store: Store,
    remove: Annotated[bool, Option("--remove", help="Use the store without a remap again.")] = False,
    workers: Readers = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Find a better place to report for each output, at the same ε, and use the store with it."""
    from mdpext_dask.cli.screens import remap_screen
    from mdpext_dask.sampling.remap_store import remap_store, unmap_store

    if remove:
        show(unmap_store(store), as_json, quiet=quiet)
        return
    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = remap_store(store, workers=workers, scheduler=scheduler, observer=observer)
    show(result, as_json, screen=remap_screen, quiet=quiet, verbose=verbose)


@command(USE, "sample manhattan.zarr points.csv -o reports.csv")
def sample(
    store: Store,
    points: Annotated[
        Path,
        Argument(
            metavar="POINTS",
            help="CSV, Parquet, GeoJSON or GeoPackage with columns lon and lat, or x_km and y_km; "
            "-: CSV from standard input.",
        ),
    ],
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            metavar="OUT",
            help="File for the reports: CSV, Parquet or GeoJSON; -: CSV on standard output.",
        ),
    ],
    overwrite: Replace = False,
    outside: Annotated[
        str | None,
        Option(
            metavar="RULE",
            help="Points outside the grid or region: nearest (report from the nearest record), drop (skip), "
            "or error (refuse); default: nearest, unless all are outside.",
            autocompletion=one_of("nearest", "drop", "error"),
        ),
    ] = None,
    remap: UseRemap = None,
    verify: Annotated[
        bool, Option("--verify", help="Compare all shards with their receipts before the first draw.")
    ] = False,
    lon_column: LonColumn = None,
    lat_column: LatColumn = None,
    accuracy_column: Annotated[
        str | None,
        Option(metavar="NAME", help="Column or property that says how well a point is known, in metres."),
    ] = None,
    user_column: Annotated[
        str | None,
        Option(
            metavar="NAME", help="Column or property that names the user of a point.", rich_help_panel=_USERS
        ),
    ] = None,
    keep_users: Annotated[
        bool,
        Option(
            "--keep-users",
            help="Write the user of each report; default: leave users out.",
            rich_help_panel=_USERS,
        ),
    ] = False,
    sticky_key: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Give each user the same answer at the same place, always.",
            rich_help_panel=_USERS,
        ),
    ] = None,
    place_km: Annotated[
        float | None,
        Option(
            metavar="KM",
            help="Move points to the middle of coarse squares first, of this width in km.",
            rich_help_panel=_USERS,
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        Option(metavar="FILE", help="Count every user's releases in this file.", rich_help_panel=_USERS),
    ] = None,
    release_limit: Annotated[
        int | None,
        Option(metavar="N", help="Refuse more than N releases for a user.", rich_help_panel=_USERS),
    ] = None,
    trusted_key: TrustedKey = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Report a random place for each point; draws are exact, and independent without a sticky key."""
    from mdpext_dask.cli.screens import sample_screen
    from mdpext_dask.readers.point_chunks import PointColumns
    from mdpext_dask.sampling.files import Users, sample_file

    keep_apart(output, as_json)
    users = Users(user_column, keep_users, sticky_key, ledger, release_limit)
    columns = PointColumns(lon_column, lat_column)
    with observed("plain", quiet=quiet, verbose=verbose) as observer:
        result = sample_file(
            store,
            points,
            output,
            outside,
            remap=remap,
            users=users,
            columns=columns,
            place_km=place_km,
            accuracy_column=accuracy_column,
            verify=verify,
            overwrite=overwrite,
            trusted_key=trusted_key,
            observer=observer,
        )
    screen = partial(sample_screen, output=output)
    show(result, as_json, output, screen=screen, quiet=quiet, verbose=verbose)


@command(KEYS, "sticky-key secret.key", "sticky-key")
def sticky_key(
    path: Annotated[Path, Argument(metavar="FILE", help="File for the key; must not exist yet.")],
    epoch: Annotated[
        str, Option(metavar="TEXT", help="Any short text; answers in different epochs are independent.")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Make a secret key for sticky answers, in a file that only its owner can read."""
    from mdpext_dask.runtime.sticky import new_key_file

    show(new_key_file(path, epoch), as_json)


@command(KEYS, "signing-key signing.key", "signing-key")
def signing_key(
    path: Annotated[Path, Argument(metavar="FILE", help="File for the secret key; must not exist yet.")],
    as_json: Json = False,
) -> None:
    """Make a secret key for signatures in FILE, and its public key in FILE.pub."""
    from mdpext_dask.runtime.signatures import new_signing_key

    show(new_signing_key(path), as_json)


@command(KEYS, "sign manhattan.zarr --key signing.key")
def sign(
    subject: Annotated[str, Argument(metavar="STORE|CITY", help="A complete store, or an exported city.")],
    key: Annotated[Path, Option(metavar="FILE", help="The secret key, made by `signing-key`.")],
    as_json: Json = False,
) -> None:
    """Sign a store or a city, so that others can check by whom it is."""
    from mdpext_dask.sampling.sign import sign as sign_subject

    show(sign_subject(subject, key), as_json)


@command(USE, "export manhattan.zarr -o manhattan.mdp")
def export(
    store: Store,
    output: Annotated[Path, Option("--output", "-o", metavar="CITY.mdp", help="File to write.")],
    packing: Annotated[
        str,
        Option(
            metavar="PACKING",
            help="seed, or noise for its tables, if they give the rows bit for bit; rows: all rows; auto: "
            "the first of these that is possible.",
            autocompletion=one_of("auto", "seed", "noise", "rows"),
        ),
    ] = "auto",
    overwrite: Replace = False,
    remap: UseRemap = None,
    trusted_key: TrustedKey = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a complete store as one small file, to sample from with NumPy alone."""
    from mdpext_dask.cli.screens import export_screen
    from mdpext_dask.sampling.export import export_city

    keep_apart(output, as_json)
    how: dict[str, Any] = {"remap": remap, "overwrite": overwrite, "trusted_key": trusted_key}
    result = export_city(store, output, packing, **how)
    show(result, as_json, output, screen=export_screen, quiet=quiet, verbose=verbose)


@command(MEASURE, "report manhattan.zarr -o manhattan.html")
def report(
    store: Store,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE.html", help="File to write; default: ./STORE-report.html."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        Option(metavar="FILE.json", help="Take bound and attackers from the output of `evaluate --json`."),
    ] = None,
    bound_seconds: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help=f"{_BOUND_SECONDS} Default: what `evaluate` has left in the store, or 2 s.",
        ),
    ] = None,
    overwrite: Replace = False,
    workers: Readers = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Write a report page: one HTML file with proof, maps and figures; exit 1 if it does not hold."""
    from mdpext_dask.cli.screens import report_screen
    from mdpext_dask.reports.report import report as write_report

    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = write_report(
            store,
            output,
            evaluation=evaluation,
            bound_seconds=bound_seconds,
            overwrite=overwrite,
            workers=workers,
            scheduler=scheduler,
            observer=observer,
        )
    show(result, as_json, screen=report_screen, quiet=quiet, verbose=verbose)
    if not result["holds"]:
        end_badly(f"{result['store']}: {result['verdict']}", EXIT_GUARANTEE)


@command(MEASURE, "show manhattan.zarr", "show")
def show_page(
    store: Store,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help="The page; default: STORE-report.html beside the store, or in a temporary folder.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Make the page again, and replace whatever file is there.")
    ] = False,
    workers: Readers = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    progress: Progress = "auto",
) -> None:
    """Open the report page of a store in a browser; it is made first, unless it is up to date."""
    from mdpext_dask.cli.screens import page_screen
    from mdpext_dask.reports.show import show as open_page

    with observed(progress, quiet=quiet, verbose=verbose) as observer:
        result = open_page(
            store, output, overwrite=overwrite, workers=workers, scheduler=scheduler, observer=observer
        )
    show(result, as_json, screen=page_screen, quiet=quiet, verbose=verbose)
    if not result["holds"]:
        end_badly(f"{result['store']}: {result['verdict']}", EXIT_GUARANTEE)
