"""One call to audit any mechanism: a store for its own promise, a plain array for the promise given."""

import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdpext_dask.auditors.figure import draw_audit
from mdpext_dask.auditors.foreign.read import check_exists, check_known
from mdpext_dask.auditors.methods import Sampling, certify, check_boundary, compare_all, sample_pairs
from mdpext_dask.auditors.pairs import exhaustive
from mdpext_dask.auditors.result import BOUNDARY, CERTIFICATE, EXHAUSTIVE, METHODS, SAMPLED, AuditReport
from mdpext_dask.auditors.subject import (
    city_subject,
    is_store,
    plain_subject,
    rewritten_subject,
    store_subject,
)
from mdpext_dask.compute.executor import FEW_NUMBERS, open_for_reader
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import (
    DataError,
    GuaranteeViolation,
    SpecError,
    StoreAccessError,
    alternatives,
    first_line,
)
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.files import check_picture
from mdpext_dask.job.spec import json_number
from mdpext_dask.runtime.city import CityFile, is_city
from mdpext_dask.runtime.signatures import Trusted
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, MechanismStore
from mdpext_dask.store.signature import require_signed

# With fewer triples, starting processes takes longer than the work.
_FEW_TRIPLES = 2 * 10**9
# Pairs drawn for a picture if the audit draws none.
_PICTURE_PAIRS = 100_000
# Attributes that identify a finished store.
_SAME_STORE = "fingerprint", "chunk_hashes"


def audit(
    subject: objects.WhereStored | ArrayLike,
    method: str | None = None,
    *,
    points: str | Path | ArrayLike | None = None,
    epsilon_per_km: float | None = None,
    metric_p: float | None = None,
    tolerance: float = 0.0,
    sampling: Sampling | None = None,
    blocks: tuple[int, int] | None = None,
    picture: str | Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    trusted_key: Trusted | None = None,
    observer: Observer = silent,
) -> AuditReport:
    """Audit a mechanism and return what was found.

    Parameters
    ----------
    subject
        Path or URL of a mechanism store, or an open mechanism; an exported city (``.mdp``); or the rows of
        any mechanism (records × outputs): an array, or a ``.npy``, ``.npz``, CSV, Parquet or Zarr file.
    method
        ``"certificate"``: a proof over all pairs in one pass, for records on a lattice. ``"exhaustive"``:
        every triple. ``"sampled"``: an estimate. ``"boundary"``: rows that blocks of a store share
        (requirement A2). Default: the certificate for stores and cities, every triple for arrays.
    points
        Coordinates of the records of a plain array: a file with columns ``x_km,y_km`` or ``lon,lat``, or an
        array of shape (N, 2) with x and y in km.
    epsilon_per_km, metric_p
        The promise to audit; default for stores and cities: their own.
    tolerance
        By how much log ratios may exceed their bounds; the report counts the violations that this hides.
    sampling
        How the method ``"sampled"`` draws pairs.
    blocks
        Half-open range of blocks for ``"boundary"``; default: all.
    picture
        File for a picture (``.png``, ``.pdf`` or ``.svg``): log ratios over their bounds by distance, and a
        map.
    overwrite
        Whether the picture may be there already, and is replaced.
    workers
        Number of local processes, 1 for this process alone; default: this process for little work, else one
        for each processor. The store has no say in it: the machine that computes an audit decides its
        verdict.
    scheduler
        Address of a Dask scheduler to use instead.
    trusted_key
        Public key that must have signed the store or city; see :mod:`mdpext_dask.runtime.signatures`.
    observer
        Receives the progress events.

    Returns
    -------
    The audit result. If a store is audited for its own promise and can be written, the result is also written
    into the store, and a store that does not hold is marked as refused.

    Raises
    ------
    IncompleteStoreError
        If blocks of the store are missing.
    StoreError, DataError
        If the subject cannot be read, or the picture cannot be written.
    SpecError
        If arguments do not fit the subject.
    GuaranteeViolation
        If a trusted key is given that has not signed the subject.
    """
    if method is not None and method not in METHODS:
        raise SpecError(f"--method: must be {alternatives(METHODS)}, got {method!r}")
    if sampling is not None and method != SAMPLED:
        raise SpecError("--pairs, --seconds and the like: only for the method sampled")
    if blocks is not None and method != BOUNDARY:
        raise SpecError("--blocks: only for the method boundary")
    if picture is not None:
        picture = Path(picture)
        check_picture(picture, overwrite=overwrite)
    if isinstance(subject, objects.Addressed):
        subject = subject.url
    if not isinstance(subject, str | Path | np.ndarray):
        subject = _array(subject, "the mechanism")
    if points is not None and not isinstance(points, str | Path):
        points = _array(points, "--points")
    with contextlib.ExitStack() as prepared:
        own, signed_by = False, None
        if not isinstance(subject, np.ndarray) and is_store(str(subject)):
            if points is not None:
                raise SpecError("--points: a mechanism store knows where its records are")
            store = MechanismStore.open(str(subject))
            rewritten = store.state == COMPLETE and not store.read_receipts()
            if rewritten:
                if trusted_key is not None:
                    raise GuaranteeViolation(
                        f"{store.url}: its receipts are gone: nothing shows that its bytes were signed"
                    )
                again = rewritten_subject(store, epsilon_per_km, metric_p, tolerance)
                found = prepared.enter_context(again)
            else:
                found = store_subject(store, epsilon_per_km, metric_p, tolerance)
                require_all_blocks(store)
                signed_by = None if trusted_key is None else require_signed(store, trusted_key)
            own = epsilon_per_km is None and metric_p is None and not tolerance and not rewritten
            default = CERTIFICATE
        else:
            if not isinstance(subject, np.ndarray):
                check_exists(str(subject))
            if not isinstance(subject, np.ndarray) and is_city(str(subject)):
                if points is not None:
                    raise SpecError("--points: a city knows where its records are")
                city = CityFile(Path(objects.absolute(str(subject))))
                signed_by = None if trusted_key is None else city.require_signed(trusted_key)
                found = city_subject(city, epsilon_per_km, metric_p, tolerance)
            else:
                if trusted_key is not None:
                    raise SpecError("--trusted-key: only mechanism stores and cities are signed")
                if not isinstance(subject, np.ndarray):
                    check_known(str(subject))
                if epsilon_per_km is None:
                    raise SpecError("--epsilon-per-km: a plain array does not say what it promises")
                p = 2.0 if metric_p is None else metric_p
                found = prepared.enter_context(plain_subject(subject, points, epsilon_per_km, p, tolerance))
            default = EXHAUSTIVE if found.city is None else CERTIFICATE
        for note in found.notes:
            observer(Note(f"{found.name}: {note}"))
        method = method or default
        if tolerance and method not in (EXHAUSTIVE, SAMPLED):
            raise SpecError(f"--tolerance: {method} has none; use --method exhaustive or sampled")
        stages, records, outputs = Stages(observer), found.source.records, found.source.outputs
        small = exhaustive.pairs_of(records) * outputs < _FEW_TRIPLES
        if method in (CERTIFICATE, BOUNDARY):
            small = records * outputs <= FEW_NUMBERS
        with open_for_reader(workers, scheduler, small=small) as executor:
            if method == CERTIFICATE:
                report = certify(found, executor, stages)
            elif method == EXHAUSTIVE:
                report = compare_all(found, executor, stages)
            elif method == BOUNDARY:
                report = check_boundary(found, blocks, executor, stages)
            else:
                report = sample_pairs(found, sampling or Sampling(), executor, stages)
            if signed_by is not None:
                report.details["signed_by"] = signed_by
            drawn = report
            if picture is not None and method != SAMPLED:
                few = Sampling(pairs=_PICTURE_PAIRS, random_seed=0)
                drawn = sample_pairs(found, few, executor, stages)
        if own and not _leave(store, report):
            observer(Note(f"{store.url} cannot be written: the audit result is not stored there"))
        # Last: a picture that cannot be written must not cost the result.
        if picture is not None:
            draw_audit(report, drawn, found, picture)
    return report


def _array(given: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: must be numbers in rows of one length: {first_line(error)}") from None


def _leave(store: MechanismStore, report: AuditReport) -> bool:
    """Write an audit result into the store, and mark a store that does not hold; return whether that worked.

    Nothing is written into another store that has taken the place of the one that was audited.
    """
    document = report.as_json()
    # A read-only store is audited as well.
    with contextlib.suppress(OSError, ValueError, NotImplementedError, StoreAccessError):
        writable = MechanismStore.open(store.url, mode="r+")
        if any(writable.attributes.get(key) != store.attributes.get(key) for key in _SAME_STORE):
            return False
        if not report.passed and writable.state == COMPLETE:
            known = {"epsilon_certified": json_number(report.epsilon)} if report.method == CERTIFICATE else {}
            writable.update(state=REFUSED, **known)
        objects.put_json(writable.objects, f"audit/{report.method}.json", document)
        return True
    return False
