"""What a finished mechanism costs: one call, from the stored bytes."""

import contextlib
import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.compute.executor import Executor, is_small, open_for_reader
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError, StoreAccessError
from mdpext_dask.evaluation.attackers.measure import measure_attacks, prepare
from mdpext_dask.evaluation.attackers.requests import AttackRequest
from mdpext_dask.evaluation.bound.kept import BOUND, kept_bound
from mdpext_dask.evaluation.bound.lower_bound import FACTS, BoundRequest, bound_facts
from mdpext_dask.evaluation.figure import loss_map
from mdpext_dask.evaluation.plain import plain_facts
from mdpext_dask.evaluation.quantiles import weighted_quantiles
from mdpext_dask.evaluation.spread import Spread, add_up, spread_block
from mdpext_dask.events import Observer, silent
from mdpext_dask.files import check_file, check_picture, rendered, whole_file
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import reopened, require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, MechanismStore
from mdpext_dask.store.objects import WhereStored, address_of
from mdpext_dask.store.remap import remap_of

# Records whose losses are sent to the client and sorted there, at about 50 bytes each; of more, quantiles are
# taken from tallies.
MOST_SORTED = 10_000_000
RECORDS_SUFFIX = ".npz"
# A bound that may take so long, in s, is not worth starting processes for.
QUICK_BOUND = 2.0
EVERY_ATTACK = AttackRequest()


def evaluate(
    url: WhereStored,
    *,
    picture: str | Path | None = None,
    records: str | Path | None = None,
    overwrite: bool = False,
    bound: BoundRequest | None = None,
    attacks: AttackRequest | None = EVERY_ATTACK,
    workers: int | None = None,
    scheduler: str | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Return what a finished store costs its users, from its bytes, as plain JSON values.

    The best bound so far is left in the store, if that can be written, for report pages.

    Parameters
    ----------
    url
        The store, or a mechanism that is open.
    picture
        File for a map of the expected loss of every record (``.png``, ``.pdf`` or ``.svg``).
    records
        File for the expected loss of every record, ``.npz``: `x_km`, `y_km`, and on their lattice `loss_km`,
        NaN where there is no prior, and `prior`.
    overwrite
        Whether these files may be there already, and are replaced.
    bound
        What to spend on the lower bound; by default what :class:`BoundRequest` says.
    attacks
        What to measure of attackers; None for nothing.
    workers
        Number of local processes, 1 for this process alone; default: this process for a small store, else one
        for each processor. The store has no say in it.
    scheduler
        Address of a Dask scheduler to use instead.
    observer
        Gets the events of progress.

    Returns
    -------
    - `state`: of the store; one that is "refused" keeps no promise, whatever it costs;
    - `loss_kind`: as in the job;
    - `content_sha256`: the store's own digest of its bytes, None where it has none; whether they still are
      those, :func:`mdpext_dask.auditors.audit.audit` says, not this;
    - `loss_km`: the expected loss UL(M) of what is drawn; as all that follows, without a remap;
    - `plain_loss_km`: what planar Laplace noise of the same ε loses that is reported at the nearest output,
      `plain_standard_error_km`, `over_plain` = `loss_km` / `plain_loss_km` − 1, `plain_advice`, what to
      set where that is more (else None), and `plain_in_words`;
    - `remapped_loss_km`: that of what is reported, if the store is used with a remap, else None;
    - `loss_quantiles_km`: quantiles of ℓ(x) = Σ_y M(y|x) c(x, y) over records under their prior, and
      `loss_quantiles_resolution_km`: by how much they may be too large, 0 up to ten million records;
    - `report_loss_quantiles_km`, `report_loss_resolution_km`: the same of the loss c(X, Y) of one report,
      with at most a thousandth of the loss for a resolution;
    - `distance_km`: how far from the record a report is expected to be, ‖x − y‖₂ in the plane;
    - `by_distance`: by bands of that distance, the least included: probability, and mean loss given the band;
    - `records_with_prior`: how many records have a prior; the others are skipped;
    - `lower_bound_km` and what belongs to it, `gap` = loss / bound − 1: see :func:`bound_facts`;
    - `adversary`: what attackers learn, see
      :func:`mdpext_dask.evaluation.attackers.measure.measure_attacks`; None for no attacks.

    Raises
    ------
    SpecError
        If a file that is asked for cannot be written, or what is asked of attackers does not fit the store.
    DataError
        If a file for attackers cannot be read.
    IncompleteStoreError
        If blocks are missing.
    StoreError
        If what is stored is damaged.
    GuaranteeViolation
        If the loss is less than that of any mechanism which keeps the promise.
    """
    url = address_of(url)
    picture, records = (None if path is None else Path(path) for path in (picture, records))
    for option, path in (("--map", picture), ("--records", records)):
        if path is not None and Path(url).resolve() in path.resolve().parents:
            raise SpecError(f"{option}: {path}: lies inside the store")
    if picture is not None:
        check_picture(picture, "--map", overwrite=overwrite)
    if records is not None:
        check_file(records, "--records", (RECORDS_SUFFIX,), overwrite=overwrite)
    store = MechanismStore.open(url)
    require_all_blocks(store)
    used = remap_of(store) if store.state == COMPLETE else None
    attack = None if attacks is None else prepare(store, attacks)
    stages = Stages(observer)
    keep = picture is not None or records is not None or (attack is not None and attack.keeps_records)
    bound = bound or BoundRequest()
    small = is_small(store) and bound.seconds <= QUICK_BOUND and bound.stride is None
    with open_for_reader(workers, scheduler, small=small) as executor:
        spread = measure_spread(store, executor, stages, keep_records=keep)
        bounded = bound_facts(store, executor, stages, spread.loss_km, bound)
        adversary = None if attack is None else measure_attacks(store, executor, stages, spread, attack)
    result = {
        "state": store.state,
        "loss_kind": store.attributes["job"]["loss"]["kind"],
        **spread_facts(store, spread),
        **plain_facts(store, spread.loss_km),
        "remapped_loss_km": None if used is None else used.remapped_loss_km,
        **bounded,
        "adversary": adversary,
    }
    if records is not None:
        _write_records(store, spread, records)
    if picture is not None:
        content = rendered(lambda: loss_map(store, spread), picture.suffix.lower())
        with whole_file(picture, "--map") as file:
            file.write(content)
    _leave_bound(store, result)
    return result


def _leave_bound(store: MechanismStore, result: dict[str, Any]) -> None:
    """Leave a bound in the store, unless a better one is there, or the store cannot be written."""
    if result["lower_bound_km"] is None or result["content_sha256"] is None:
        return
    certified = "lower_bound_certified_km"
    # A read-only store is evaluated as well.
    with contextlib.suppress(OSError, ValueError, NotImplementedError, StoreAccessError):
        writable = reopened(store)
        before = (kept_bound(writable) or {}).get(certified)
        if isinstance(before, float) and before > result[certified]:
            return
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        document = {key: result[key] for key in ("content_sha256", *FACTS)}
        objects.put_json(writable.objects, BOUND, {**document, "computed": now})


def measure_spread(
    store: MechanismStore, executor: Executor, stages: Stages, *, keep_records: bool = False
) -> Spread:
    """Return how the loss of a store is spread; with every record's loss if asked, or if they are few."""
    keep = keep_records or store.grid.records <= MOST_SORTED
    blocks = [(store.url, index, keep) for index in range(store.plan.blocks)]
    with stages.stage("evaluate", len(blocks), "blocks"):
        return add_up(store, stages.in_order(executor, "evaluate", spread_block, blocks), keep)


def spread_facts(store: MechanismStore, spread: Spread) -> dict[str, Any]:
    """Return what :func:`evaluate` says of how the loss is spread, and of which bytes it says so."""
    of_reports, width = spread.by_report.quantiles()
    if spread.expected_km is not None and store.grid.records <= MOST_SORTED:
        used = ~np.isnan(spread.expected_km)
        of_records, resolution = weighted_quantiles(spread.expected_km[used], store.read("prior")[used]), 0.0
    else:
        of_records, resolution = spread.by_record.quantiles()
    return {
        "content_sha256": store.content_sha256,
        "loss_km": spread.loss_km,
        "loss_quantiles_km": of_records,
        "loss_quantiles_resolution_km": resolution,
        "report_loss_quantiles_km": of_reports,
        "report_loss_resolution_km": width,
        "distance_km": spread.distance_km,
        "by_distance": spread.by_distance(),
        "records_with_prior": spread.records,
    }


def _write_records(store: MechanismStore, spread: Spread, path: Path) -> None:
    assert spread.expected_km is not None  # kept for the file
    x, y, losses, prior = store.grid.x_km(), store.grid.y_km(), spread.expected_km, store.read("prior")
    with whole_file(path, "--records") as file:
        np.savez_compressed(file, x_km=x, y_km=y, loss_km=losses, prior=prior)
