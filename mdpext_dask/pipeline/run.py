"""The stages of a job: domain, loss, seed, extend, boundary, audit, evaluate; each resumable.

Every function leaves the store in a state from which the next call goes on. Nothing is marked complete
before the certificate has passed on the bytes read back from the store.
"""

from pathlib import Path
from typing import Any

from mdpext_dask.auditors.methods import certify
from mdpext_dask.auditors.subject import store_subject
from mdpext_dask.auditors.words import violation
from mdpext_dask.compute.executor import Executor, open_executor
from mdpext_dask.compute.stages import Stages, at_work, observe_cluster
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, SpecError, StoreError
from mdpext_dask.evaluation.loss import expected_loss_block, finite
from mdpext_dask.events import TOTAL, JobFinished, Note, Observer, Planned, TaskDone, silent
from mdpext_dask.extend.choose import check_operator, is_own, operator_of
from mdpext_dask.job.sections import LOG_CONVEX
from mdpext_dask.job.spec import COARSE_SEEDS, JobSpec, json_number
from mdpext_dask.pipeline.cost_model import ORDER, JobCosts
from mdpext_dask.pipeline.memory import check_memory, check_workers
from mdpext_dask.pipeline.seed_stage import seed_job
from mdpext_dask.pipeline.tasks import extend_block
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.problem.geometry import build_frame, downloads_of
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.outputs import check_counts, output_count
from mdpext_dask.seed import budget
from mdpext_dask.store import locks, objects, receipts
from mdpext_dask.store.blocks import Plan
from mdpext_dask.store.extension import extension_of_store
from mdpext_dask.store.integrity import CERTIFICATE, extra_shards, require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, EXTENDING, PLANNED, REFUSED, MechanismStore, job_of
from mdpext_dask.store.receipts import BoundaryReport, check_boundaries

STAGES = ("domain", "loss", "seed", "extend", "boundary", "audit", "evaluate")


def build(
    spec: JobSpec,
    url: str | Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Do a whole job, or what is left of it, and return its summary.

    Local processes start by importing the main module: in a script, keep the call under
    ``if __name__ == "__main__":``. Notebooks need nothing of the kind.

    Parameters
    ----------
    spec
        The job.
    url
        Where the store goes: a path, or a URL. A store of the same job is gone on with, or returned as it is.
    overwrite
        Whether another job's store in the same place is replaced.
    workers
        How many local processes, instead of the job's.
    observer
        Is told of progress; see :class:`mdpext_dask.cli.progress_lines.PlainLines`.

    Returns
    -------
    What ``mdpext run --json`` prints: state, sizes, ε promised and certified, expected loss, seconds.

    Raises
    ------
    MdpextError
        Bad input and an occupied store before any long work; :class:`GuaranteeViolation` if the
        finished store does not hold.
    """
    url, spec = str(url), _on_workers(spec, workers, observer)
    finished = _finished(spec, url, observer, overwrite=overwrite)
    if finished is not None:
        return summarise(finished)
    with at_work(url, observer) as stages:
        found, domain = find_or_prepare(spec, url, overwrite=overwrite, stages=stages)
        with open_executor(spec.cluster) as executor:
            observe_cluster(executor, observer)
            _check_room(spec, found, domain, executor)
            store = found or create(spec, url, domain)
            _tell_plan(store, executor, stages)
            complete(store, executor, stages)
    summary = summarise(store)
    observer(JobFinished(summary["seconds"], summary["seconds_planned"]))
    return summary


def complete(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Do what is left of a store's job, up to the end.

    Raises
    ------
    GuaranteeViolation
        If the store does not hold; it is marked as refused.
    """
    seed_job(store, executor, stages)
    store.update(seconds=_seconds_so_far(store, stages))
    extend(store, executor, stages)
    finish(store, executor, stages)


def init(
    spec: JobSpec,
    url: str,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Create a store and solve its seed, so that :func:`partition` can begin."""
    spec = _on_workers(spec, workers, observer)
    finished = _finished(spec, url, observer, overwrite=overwrite)
    if finished is not None:
        return summarise(finished)
    with at_work(url, observer) as stages:
        found, domain = find_or_prepare(spec, url, overwrite=overwrite, stages=stages)
        if found is not None and found.state == COMPLETE:  # but has lost receipts: blocks are to be done anew
            found.update(state=EXTENDING)
        if found is None or not found.has_seed():
            with open_executor(spec.cluster) as executor:
                observe_cluster(executor, observer)
                _check_room(spec, found, domain, executor)
                found = found or create(spec, url, domain)
                _tell_plan(found, executor, stages)
                seed_job(found, executor, stages)
                found.update(seconds=_seconds_so_far(found, stages))
    return summarise(found)


def partition(url: str, first: int, last: int, *, observer: Observer = silent) -> dict[str, Any]:
    """Extend the blocks `first` .. `last` - 1 of an initialised store, in this process.

    Raises
    ------
    StoreError
        If the blocks are not in the plan, or a block of a complete store would change.
    IncompleteStoreError
        If the seed is not solved.
    """
    store = MechanismStore.open(url)
    store.seed_sha256()
    blocks = store.plan.blocks
    if not 0 <= first < last <= blocks:
        raise StoreError(f"{url}: blocks {first}..{last - 1} are not in the plan, which has 0..{blocks - 1}")
    stages = Stages(observer)
    with stages.stage("extend", last - first, "blocks"):
        for index in range(first, last):
            extend_block(store.url, index)
            observer(TaskDone("extend"))
    return {
        "store": store.url,
        "blocks": blocks,
        "first": first,
        "last": last,
        "seconds": stages.seconds["extend"],
    }


def finalise(url: str, *, workers: int | None = None, observer: Observer = silent) -> dict[str, Any]:
    """Check, certify, evaluate and close a store whose blocks are all done.

    Raises
    ------
    IncompleteStoreError
        If blocks are missing; all of them are named.
    GuaranteeViolation
        If the store does not hold; it is marked as refused.
    """
    store = MechanismStore.open(url, mode="r+")
    require_all_blocks(store)
    if store.state == COMPLETE:
        return summarise(store)
    with at_work(store.url, observer) as stages:
        store = MechanismStore.open(url, mode="r+")  # as whoever had it before has left it
        with open_executor(job_of(store).cluster, workers) as executor:
            observe_cluster(executor, observer)
            _tell_plan(store, executor, stages)
            finish(store, executor, stages)
    return summarise(store)


def _finished(spec: JobSpec, url: str, observer: Observer, *, overwrite: bool) -> MechanismStore | None:
    """Return the job's store if there is nothing left to do, so that it need not be written to.

    Raises
    ------
    StoreError
        If something is in the way.
    """
    if not url:
        raise SpecError("--store: the path is empty")
    if overwrite:
        MechanismStore.check_room(url)
        return None
    found = MechanismStore.find(url, spec)
    if found is None:
        return None
    # Places enter a job's identity by name. Its tables are in the store, so nothing is mixed, but it is told.
    made_with = found.attributes.get("downloads", {})
    for key, digest in downloads_of(spec).items():
        if made_with.get(key, digest) != digest:
            observer(
                Note(
                    f"{key}: {found.url} was made with another download than the cache now holds, and stays "
                    "with it; --overwrite makes it anew"
                )
            )
    return found if found.is_finished() else None


# --- stages ---------------------------------------------------------------------------------------


def find_or_prepare(
    spec: JobSpec, url: str, *, overwrite: bool, stages: Stages
) -> tuple[MechanismStore | None, Domain | None]:
    """Return the job's store at `url`, or else the job's problem, so that bad input costs nobody a store."""
    if not overwrite:
        found = MechanismStore.find(url, spec)
        if found is not None:
            if found.state != COMPLETE:
                operator_of(spec.extension)
            return found, None
    operator_of(spec.extension)
    with stages.stage("domain"):
        frame = build_frame(spec)
        check_counts(spec, frame)
        check_memory(spec, frame)
        grid, outputs, p = frame.grid, output_count(spec, frame), spec.domain.metric_p
        design = epsilons(spec, grid, frame.distortion, outputs)["epsilon_design_per_km"]
        check_operator(spec.extension, spec.privacy.budget, design, grid, outputs, p)
        stages.expected = JobCosts.of(spec, frame).seconds
        domain = build_domain(spec, frame)
    for note in (*domain.notes, *_coarse_seeds(spec, design * grid.cell_km)):
        stages.observer(Note(note))
    return None, domain


def create(spec: JobSpec, url: str, domain: Domain | None) -> MechanismStore:
    """Create the job's store at `url` in the place of whatever mechanism store is there."""
    assert domain is not None  # there is a problem wherever there was no store
    MechanismStore.clear(url)
    return MechanismStore.create(
        url, spec, domain, epsilons(spec, domain.grid, domain.distortion, domain.outputs)
    )


def extend(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Extend all blocks that have no valid receipt yet."""
    store.update(state=EXTENDING)
    blocks = store.plan.blocks
    with stages.stage("extend", blocks, "blocks"):
        for _ in stages.run(executor, "extend", extend_block, [(store.url, i) for i in range(blocks)]):
            pass


def finish(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Cross-check, certify, evaluate; then, and only if all of it holds, mark as complete.

    Blocks at fault lose their receipts, so that running the job again does them anew.

    Raises
    ------
    IncompleteStoreError
        If blocks are missing.
    GuaranteeViolation
        If the store does not hold; it is marked as refused.
    ClusterError, StoreError
        If another run has taken the store over, or changed it, since the certificate was begun.
    """
    found = require_all_blocks(store)
    if not store.has_seed():
        raise IncompleteStoreError(f"{store.url}: the seed has changed or is damaged; run the job again")
    with stages.stage("boundary"):
        objects.sweep(store.objects)
        objects.delete_keys(store.objects, list(extra_shards(store)))
        receipts.sweep(store.objects, store.plan.blocks)
        boundary = check_boundaries(store.plan, found)
    report = certify(store_subject(store), executor, stages)
    objects.put_json(store.objects, CERTIFICATE, report.as_json())
    checked: dict[str, Any] = {
        "epsilon_certified": json_number(report.epsilon),
        "boundary_rows_checked": boundary.rows_checked,
        "boundary_mismatches": len(boundary.mismatches),
    }
    if boundary.mismatches or not report.holds:
        at_fault = {block for mismatch in boundary.mismatches for block in mismatch.blocks}
        receipts.void(store.objects, at_fault | set(report.blocks_at_fault))
        store.update(state=REFUSED, **checked)
        raise _boundary_violation(store, boundary) if boundary.mismatches else violation(report)
    loss_km = expected_loss(store, executor, stages)
    peaks = [r.peak_bytes for r in found.values() if r.peak_bytes is not None]
    fallbacks, digest = sum(r.fallbacks for r in found.values()), store.content_digest(found)
    del found  # of many blocks it is large, and is read once more below
    objects.consolidate(store.objects)
    stages.check()
    _require_same(store, digest)
    # The last thing written, in one piece.
    store.update(
        state=COMPLETE,
        loss_km=loss_km,
        fallbacks=store.seed_attributes.get("fallbacks", 0) + fallbacks,
        peak_bytes_per_task=max(peaks) if peaks else store.plan.peak_bytes(job_of(store).extension.method),
        chunk_hashes={
            "algorithm": "sha256",
            "of": "probability/zarr.json, with a region its cells and the seed, then the keys and hashes of "
            "all shards in receipts/, in order",
            "digest": digest,
        },
        seconds=_seconds_so_far(store, stages),
        **checked,
    )


def _require_same(store: MechanismStore, digest: str) -> None:
    """Refuse to call a store complete that is not the one that was certified.

    This process may have been stopped for so long that another has taken over, and made another store.

    Raises
    ------
    StoreError
        If it has another job or state, or other receipts than those with this digest.
    """
    now = MechanismStore.open(store.url)
    same = (now.fingerprint, now.state) == (store.fingerprint, store.state)
    if not same or now.content_digest(now.read_receipts()) != digest:
        raise StoreError(
            f"{store.url}: has changed while it was certified; is another run at work on this store?"
        )


def expected_loss(store: MechanismStore, executor: Executor, stages: Stages) -> float:
    """Return UL(M) in km."""
    blocks = store.plan.blocks
    with stages.stage("evaluate", blocks, "blocks"):
        parts = stages.gather(
            executor, "evaluate", expected_loss_block, [(store.url, i) for i in range(blocks)]
        )
    return finite(float(sum(parts)), store)


# --- state ----------------------------------------------------------------------------------------


def summarise(store: MechanismStore) -> dict[str, Any]:
    """Return what ``run`` and ``status`` print."""
    attributes, seed, plan = store.attributes, store.seed_attributes, store.plan
    done = len(store.read_receipts()) if seed else 0
    state = store.state
    if state == PLANNED and done:
        state = EXTENDING
    return {
        "store": store.url,
        "state": state,
        "records": plan.grid.records,
        # Stores of before regions do not say: all of it.
        "records_inside": attributes.get("records_inside", plan.grid.records),
        "outputs": plan.outputs,
        "seeds": plan.grid.seeds,
        "source_cells": plan.grid.source_cells,
        "source_cells_kept": int(store.kept.sum()),
        "blocks": plan.blocks,
        "blocks_skipped": len(plan.skipped),
        "blocks_done": done,
        "epsilon_per_km": attributes["epsilon_per_km"],
        "epsilon_planar_per_km": attributes["epsilon_planar_per_km"],
        "epsilon_certified": attributes["epsilon_certified"],
        "distortion": attributes["distortion"],
        "rotation_deg": attributes["projection"].get("rotation_deg", 0.0),
        "max_quantisation_km": attributes["quantisation_km"],
        "metric_p": attributes["metric_p"],
        "method": attributes["job"]["extension"]["method"],
        "budget": attributes["job"]["privacy"]["budget"],
        "loss_km": attributes.get("loss_km"),
        "seed_primal": seed.get("primal_km"),
        "seed_dual": seed.get("dual_km"),
        "seed_gap": seed.get("gap"),
        "seed_solves": seed.get("solves", 0),
        "boundary_rows_checked": attributes.get("boundary_rows_checked", 0),
        "boundary_mismatches": attributes.get("boundary_mismatches", 0),
        "fallbacks": attributes.get("fallbacks", 0),
        "fingerprint": attributes["fingerprint"],
        "running": locks.as_json(locks.holder_of(store.objects)),
        "notes": attributes["notes"],
        "seconds": attributes.get("seconds", {}),
        # By stage like these, as planned for the workers that began; older stores do not say.
        "seconds_planned": attributes.get("seconds_planned"),
        "peak_bytes_per_task": attributes.get(
            "peak_bytes_per_task", plan.peak_bytes(attributes["job"]["extension"]["method"])
        ),
    }


def epsilons(spec: JobSpec, grid: Grid, distortion: float, outputs: int) -> dict[str, float]:
    """Return the ε's of a job: promised, to keep in the plane, to design for; all in 1/km.

    Raises
    ------
    SpecError
        If stored probabilities cannot carry ε on so fine a grid.
    """
    planar = budget.planar_epsilon(spec.privacy.epsilon_per_km, distortion)
    design = budget.design_epsilon(planar, grid.spacing_km, outputs, spec.domain.metric_p)
    return {
        "epsilon_per_km": spec.privacy.epsilon_per_km,
        "epsilon_planar_per_km": planar,
        "epsilon_design_per_km": design,
    }


def _seconds_so_far(store: MechanismStore, stages: Stages) -> dict[str, float]:
    """Return seconds by stage over all runs of a store; a stage done again counts once, as it was last."""
    seconds = {**store.attributes.get("seconds", {}), **stages.seconds}
    seconds.pop("total", None)
    by_stage = {**dict.fromkeys(STAGES, 0.0), **seconds}
    # The rest is starting workers and the like, of the present run.
    rest = stages.total() - sum(stages.seconds.values())
    return {**by_stage, "total": sum(by_stage.values()) + max(rest, 0.0)}


def _tell_plan(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Tell the observer how long the job should take: for these workers, or as it was said when it began."""
    if stages.expected is not None:
        store.update(seconds_planned=stages.expected(executor.workers))
    planned = store.attributes.get("seconds_planned")
    if planned:
        # Attributes have lost the order.
        stages.observer(Planned({name: planned[name] for name in (*ORDER, TOTAL) if name in planned}))


def _coarse_seeds(spec: JobSpec, reach: float) -> tuple[str, ...]:
    """Return a hint where interpolating loses much: where ε h_0, the reach from seed to seed, is large."""
    if spec.privacy.budget != "certified" or spec.extension.method != LOG_CONVEX or reach < COARSE_SEEDS:
        return ()
    return (
        f"the seeds are coarse (ε times a cell's side is {reach:.1f}): smaller source cells, or "
        'extension.method = "cell-lp", lose less and take longer',
    )


def _on_workers(spec: JobSpec, workers: int | None, observer: Observer) -> JobSpec:
    """Return a job with so many workers instead of its own, where that means something."""
    if workers is None:
        return spec
    if spec.cluster.kind in ("inline", "address"):
        observer(Note(f'--workers has no effect with [cluster] kind = "{spec.cluster.kind}"'))
        return spec
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"workers": workers})})


def _check_room(
    spec: JobSpec, found: MechanismStore | None, domain: Domain | None, executor: Executor
) -> None:
    """Refuse workers that cannot hold a task of a store, or of the one to be made.

    Raises
    ------
    SpecError
        With what is needed and what there is.
    """
    if found is not None:
        plan = found.plan
    else:
        assert domain is not None  # there is a problem wherever there was no store
        plan = Plan.of(domain.grid, domain.outputs, spec.store.block_cells, domain.kept)
    check_workers(plan, spec.extension.method, executor.memory_bytes)


def _boundary_violation(store: MechanismStore, boundary: BoundaryReport) -> GuaranteeViolation:
    first = boundary.mismatches[0]
    more = f" and {len(boundary.mismatches) - 1} more" if len(boundary.mismatches) > 1 else ""
    suspect = "is a worker's hardware or software at fault?"
    if is_own(extension_of_store(store)):
        suspect = "is the operator of extension.method not local, or has it changed since?"
    return GuaranteeViolation(
        f"{store.url}: blocks {first.blocks[0]} and {first.blocks[1]} disagree on record "
        f"{first.record}{more}; {suspect}",
        worst={"record": list(first.record), "blocks": list(first.blocks)},
    )
