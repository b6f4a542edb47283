"""The stages of a job: domain, loss, seed, extend, boundary, audit, evaluate; each resumable.

Every function leaves the store in a state from which the next call resumes. Nothing is marked complete before
the certificate has passed on the bytes read back from the store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdpext_dask.auditors.methods import certify
from mdpext_dask.auditors.result import AuditReport, sentence
from mdpext_dask.auditors.subject import store_subject
from mdpext_dask.compute.executor import Executor, is_small, open_executor, open_for_reader
from mdpext_dask.compute.stages import Stages, at_work, observe_cluster
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, StoreError
from mdpext_dask.evaluation.loss import expected_loss_block, finite
from mdpext_dask.evaluation.plain import plain_facts
from mdpext_dask.events import JobFinished, Note, Observer, TaskDone, silent
from mdpext_dask.extend.choose import is_own
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.spec import JobSpec, json_number
from mdpext_dask.pipeline import resume
from mdpext_dask.pipeline.memory import check_worker
from mdpext_dask.pipeline.resume import NewStore
from mdpext_dask.pipeline.seed_stage import seed_job
from mdpext_dask.pipeline.summary import seconds_so_far, summarise
from mdpext_dask.pipeline.tasks import extend_block
from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.integrity import CERTIFICATE, extra_shards, require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, EXTENDING, REFUSED, MechanismStore
from mdpext_dask.store.receipts import BoundaryCheck, Receipt, check_boundaries
from mdpext_dask.store.rows import extension_of_store


def build(
    spec: JobSpec,
    url: str | Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Run a whole job, or what is left of it, and return its summary.

    Local processes start by importing the main module: in a script, keep the call under
    ``if __name__ == "__main__":``. Notebooks need nothing of the kind.

    Parameters
    ----------
    spec
        The job.
    url
        Where the store goes: a path, or a URL. A store of the same job is resumed, or returned if it is
        complete.
    overwrite
        Whether another job's store in the same place is replaced.
    workers
        Number of local processes, instead of the job's.
    observer
        Called with each event; see :class:`mdpext_dask.cli.progress.PlainLines`.

    Returns
    -------
    What ``mdpext run --json`` prints: state, sizes, ε promised and certified, expected loss, seconds.

    Raises
    ------
    MdpextError
        Bad input and an occupied store before any long work; :class:`GuaranteeViolation` if the
        finished store does not hold.
    """
    url, spec = str(url), resume.on_workers(spec, workers, observer)
    finished = resume.finished_store(spec, url, observer, overwrite=overwrite)
    if finished is not None:
        return summarise(finished)
    tell_beyond(observer, spec)
    with at_work(url, observer) as stages:
        found = resume.find_or_prepare(spec, url, overwrite=overwrite, stages=stages)
        with _on_workers(spec, url, found, stages) as (store, executor):
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
    store.update(seconds=seconds_so_far(store, stages))
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
    spec = resume.on_workers(spec, workers, observer)
    finished = resume.finished_store(spec, url, observer, overwrite=overwrite)
    if finished is not None:
        return summarise(finished)
    tell_beyond(observer, spec)
    with at_work(url, observer) as stages:
        found = resume.find_or_prepare(spec, url, overwrite=overwrite, stages=stages)
        if isinstance(found, MechanismStore) and found.state == COMPLETE:
            found.update(state=EXTENDING)  # it has lost receipts or its seed: these are to be made again
        if isinstance(found, MechanismStore) and found.has_seed():
            store = found
        else:
            with _on_workers(spec, url, found, stages) as (store, executor):
                seed_job(store, executor, stages)
                store.update(seconds=seconds_so_far(store, stages))
    summary = summarise(store)
    left = summary["blocks"] - summary["blocks_done"]
    said = f"the seed is solved; {left} blocks are left, in parts of any size: {summary['next']}"
    observer(Note(said, diary=True))
    return summary


@contextmanager
def _on_workers(
    spec: JobSpec, url: str, found: MechanismStore | NewStore, stages: Stages
) -> Iterator[tuple[MechanismStore, Executor]]:
    """Start a job's workers, and create its store where there is only its problem yet.

    Raises
    ------
    SpecError
        If a worker cannot hold a task.
    """
    room = resume.room_of_worker(spec, found)
    with open_executor(spec.cluster, room_of_worker=room) as executor:
        observe_cluster(executor, stages.observer)
        check_worker(room, executor.memory_bytes)
        if isinstance(found, MechanismStore):
            store = found
        else:
            store = resume.create(spec, url, found.domain, found.facts)
        resume.tell_plan(store, executor.workers, stages)
        yield store, executor


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
        raise StoreError(
            f"{url}: there are no blocks {first}:{last}; its blocks are 0:{blocks} (0 to {blocks - 1})"
        )
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


def finalise(
    url: str, *, workers: int | None = None, scheduler: str | None = None, observer: Observer = silent
) -> dict[str, Any]:
    """Check, certify, evaluate and close a store whose blocks are all done.

    Parameters
    ----------
    url
        The store.
    workers
        Number of local processes, 1 for this process alone; default: this process for a small store, else one
        for each processor. The store has no say in it.
    scheduler
        Address of a Dask scheduler to use instead.
    observer
        Is told of progress.

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
        store = MechanismStore.open(url, mode="r+")  # as the run before has left it
        with open_for_reader(workers, scheduler, small=is_small(store)) as executor:
            observe_cluster(executor, observer)
            resume.tell_plan(store, executor.workers, stages)
            finish(store, executor, stages)
    return summarise(store)


# --- stages ---------------------------------------------------------------------------------------


def extend(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Extend all blocks that have no valid receipt yet."""
    store.update(state=EXTENDING)
    blocks = store.plan.blocks
    with stages.stage("extend", blocks, "blocks"):
        for _ in stages.run(executor, "extend", extend_block, [(store.url, i) for i in range(blocks)]):
            pass


def finish(store: MechanismStore, executor: Executor, stages: Stages) -> None:
    """Cross-check, certify, evaluate; then, and only if all of it holds, mark as complete.

    Raises
    ------
    IncompleteStoreError
        If blocks are missing.
    GuaranteeViolation
        If the store does not hold; it is marked as refused.
    ClusterError, StoreError
        If another run has taken the store over, or changed it, since the certificate was begun.
    """
    done = require_all_blocks(store)
    if not store.has_seed():
        raise IncompleteStoreError(f"{store.url}: the seed has changed or is damaged; run the job again")
    boundary = compare_boundaries(store, done, stages)
    certificate = certify(store_subject(store), executor, stages)
    checked = require_both(store, boundary, certificate)
    loss_km = expected_loss(store, executor, stages)
    peaks = [receipt.peak_bytes for receipt in done.values() if receipt.peak_bytes is not None]
    method = extension_of_store(store).method
    facts = {
        "fallbacks": store.seed_attributes.get("fallbacks", 0) + sum(r.fallbacks for r in done.values()),
        "peak_bytes_per_task": max(peaks) if peaks else store.plan.peak_bytes(method),
    }
    facts |= plain_facts(store, loss_km)
    digest = store.content_digest(done)
    del done, peaks  # of many blocks they are large, and are read once more to close the store
    close(store, {**checked, **facts, "loss_km": loss_km}, digest, stages)


def compare_boundaries(store: MechanismStore, done: dict[int, Receipt], stages: Stages) -> BoundaryCheck:
    """Compare the rows that neighbouring blocks share (A2), and delete what no block accounts for."""
    with stages.stage("boundary"):
        objects.sweep(store.objects)
        objects.delete_keys(store.objects, list(extra_shards(store)))
        receipts.sweep(store.objects, store.plan.blocks)
        return check_boundaries(store.plan, done)


def require_both(store: MechanismStore, boundary: BoundaryCheck, certificate: AuditReport) -> dict[str, Any]:
    """Write the certificate, refuse the store unless it and the boundary hold, and return both as attributes.

    Blocks at fault lose their receipts, so that running the job again does them anew.

    Raises
    ------
    GuaranteeViolation
        If either does not hold; the store is marked as refused.
    """
    objects.put_json(store.objects, CERTIFICATE, certificate.as_json())
    checked: dict[str, Any] = {
        "epsilon_certified": json_number(certificate.epsilon),
        "boundary_rows_checked": boundary.rows_checked,
        "boundary_mismatches": len(boundary.mismatches),
    }
    if boundary.mismatches or not certificate.holds:
        at_fault = {block for mismatch in boundary.mismatches for block in mismatch.blocks}
        receipts.void(store.objects, at_fault | set(certificate.blocks_at_fault))
        store.update(state=REFUSED, **checked)
        if boundary.mismatches:
            raise _boundary_violation(store, boundary)
        raise GuaranteeViolation(sentence(certificate), worst=certificate.worst)
    return checked


def close(store: MechanismStore, attributes: dict[str, Any], digest: str, stages: Stages) -> None:
    """Mark a store as complete: the last thing written, in one piece.

    Parameters
    ----------
    store, stages
        The store and the stages of this run.
    attributes
        What the stages have found.
    digest
        Of the receipts whose bytes were certified.

    Raises
    ------
    ClusterError, StoreError
        If another run has taken the store over, or changed it, since.
    """
    objects.consolidate(store.objects)
    stages.check()
    _require_same(store, digest)
    store.update(
        state=COMPLETE,
        mechanism_sha256=mechanism_sha256(
            digest,
            {**store.attributes, **attributes},
            (store.grid, store.projection),
            store.kept,
            (store.output_xy_km(), store.output_lonlat()),
        ),
        chunk_hashes={
            "algorithm": "sha256",
            "of": "probability/zarr.json, with a region its cells and the seed, then the keys and hashes of "
            "all shards in receipts/, in order",
            "digest": digest,
        },
        seconds=seconds_so_far(store, stages),
        **attributes,
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
        arguments = [(store.url, index) for index in range(blocks)]
        parts = stages.gather(executor, "evaluate", expected_loss_block, arguments)
    return finite(float(sum(parts)), store)


def _boundary_violation(store: MechanismStore, boundary: BoundaryCheck) -> GuaranteeViolation:
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
