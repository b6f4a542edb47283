"""The report page of a store: everything that is found out about it, in one HTML file."""

import datetime
import hashlib
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from mdpext_dask import __version__
from mdpext_dask.auditors.methods import Sampling, certify, sample_pairs
from mdpext_dask.auditors.result import HOLDS, AuditReport, sentence
from mdpext_dask.auditors.subject import store_subject
from mdpext_dask.compute.executor import Executor, is_small, open_for_reader
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, SpecError, StoreError, first_line
from mdpext_dask.evaluation.attackers.measure import measure_attacks, prepare
from mdpext_dask.evaluation.attackers.requests import AttackRequest
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, bound_facts
from mdpext_dask.evaluation.evaluate import MOST_SORTED, measure_spread, spread_facts
from mdpext_dask.evaluation.plain import plain_expected_km, plain_facts
from mdpext_dask.events import Observer, silent
from mdpext_dask.files import check_file, whole_file
from mdpext_dask.reports.evaluated import read_evaluation, read_kept_bound
from mdpext_dask.reports.page.contents import contents_of
from mdpext_dask.reports.page.costs import Findings, others
from mdpext_dask.reports.page.html import page_of
from mdpext_dask.store.integrity import require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, MechanismStore
from mdpext_dask.store.objects import LOCK, WhereStored, address_of, is_remote, local_path
from mdpext_dask.store.remap import remap_of

SUFFIXES = (".html", ".htm")
BOUND_SECONDS = 2.0
SECTIONS = ("promise", "reports", "maps", "loss", "budget", "making")
# Above this many numbers in a store, measuring attackers takes longer than a page should.
_MOST_ATTACKED = 100_000_000
# Pairs drawn to estimate how much of ε is used; always the same, so that a page can be reproduced. In a large
# store each pair costs two chunks.
_PAIRS, _PAIRS_OF_LARGE, _RANDOM_SEED = 20_000, 4_000, 0
_OPTION = "--output"


def report(
    url: WhereStored,
    path: str | Path | None = None,
    *,
    evaluation: str | Path | None = None,
    bound_seconds: float | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Write the report page of a store: one HTML file that fetches nothing.

    Certificate and losses are computed again from the stored bytes; nothing is written to the store.

    Parameters
    ----------
    url
        The store, or an open mechanism.
    path
        The file; default: the store's name with ``-report.html``, here.
    evaluation
        Output of ``mdpext evaluate --json`` for the same bytes; its bound and its measures of attackers are
        used instead of being computed.
    bound_seconds
        Time for a lower bound on the loss of any mechanism, in s; 0 for no bound. Default: the bound that
        :func:`mdpext_dask.evaluation.evaluate.evaluate` has left in the store, or else 2 s for one.
    overwrite
        Whether the file may be there already, and is replaced.
    workers
        Number of local processes, 1 for this process alone; default: this process for a small store, else one
        for each processor. The store has no say in it.
    scheduler
        Address of a Dask scheduler to use instead.
    observer
        Is told of progress.

    Returns
    -------
    `file`, `bytes` and `sections` of the page; `state`, `holds`, `verdict` and `epsilon_certified` of the
    store, as found now; `remap`, whether the store is used with one, as the page then says; and `seconds`.
    The page of a store that is refused or does not hold says so on top, and `holds` is False.

    Raises
    ------
    SpecError
        If the file cannot be written, or the evaluation is damaged, or about other bytes.
    IncompleteStoreError
        If the store is not finished.
    StoreError
        If it cannot be read, its remap is damaged, or the page cannot be written.
    """
    started, url = time.perf_counter(), address_of(url)
    if bound_seconds is not None and not bound_seconds >= 0:
        raise SpecError(f"--bound-seconds: must be at least 0, got {bound_seconds:g}")
    target = Path(page_name(url) if path is None else path)
    if Path(url).resolve() in target.resolve().parents:
        raise SpecError(f"{_OPTION}: {target}: lies inside the store")
    check_file(target, _OPTION, SUFFIXES, overwrite=overwrite)
    _require_libraries()
    store = MechanismStore.open(url)
    _require_finished(store)
    stamp = stamp_of(store)
    before = None if evaluation is None else read_evaluation(store, Path(evaluation))
    used = remap_of(store) if store.state == COMPLETE else None
    stages = Stages(observer)
    with open_for_reader(workers, scheduler, small=is_small(store)) as executor:
        certificate = certify(store_subject(store), executor, stages)
        found = replace(_find_out(store, certificate, before, bound_seconds, executor, stages), remap=used)
    now = datetime.datetime.now(datetime.UTC)
    with stages.stage("report"):
        contents = contents_of(store, found, f"{now:%Y-%m-%d %H:%M} UTC")
        holds = certificate.verdict == HOLDS and store.state == COMPLETE
        contents["stamp"] = stamp if holds else ""
        contents["store_argument"] = shlex.quote(store.name)
        content = page_of(contents).encode("utf-8", "replace")
        with whole_file(target, _OPTION) as file:
            file.write(content)
    return {
        "store": store.url,
        "file": str(target),
        "bytes": len(content),
        "sections": list(SECTIONS),
        "state": store.state,
        "holds": holds,
        "verdict": sentence(certificate) if store.state == COMPLETE else f"refused; {sentence(certificate)}",
        "epsilon_certified": certificate.as_json()["epsilon_certified"],
        "remap": used is not None,
        "seconds": time.perf_counter() - started,
    }


def page_name(url: str) -> str:
    """Return what the page of a store is called."""
    return f"{PurePath(url.rstrip('/')).stem or 'store'}-report.html"


def stamp_of(store: MechanismStore) -> str:
    """Return a digest (hex) that changes with this software and any file of a store; empty of a remote one.

    Files are known by name, size and time: it proves nothing, but tells whether a page may still be right.
    """
    if is_remote(store.url):
        return ""
    root = local_path(store.url)
    files = [(path, path.stat()) for path in sorted(root.rglob("*")) if path.is_file() and path.name != LOCK]
    listed = [(path.relative_to(root).as_posix(), found.st_size, found.st_mtime_ns) for path, found in files]
    return hashlib.sha256(repr((__version__, store.name, listed)).encode()).hexdigest()


def _require_libraries() -> None:
    """Refuse, before any work, if a library is not installed.

    Raises
    ------
    SpecError
        If one is not.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
        import tomli_w  # noqa: F401
    except ImportError as error:
        raise SpecError(
            f"report: needs jinja2, matplotlib and tomli-w: pip install 'mdpext-dask[report]' "
            f"({first_line(error)})"
        ) from None


def _require_finished(store: MechanismStore) -> None:
    """Refuse an unfinished store. A refused one is finished, though its faulty blocks have lost receipts.

    Raises
    ------
    IncompleteStoreError
        If blocks or the certificate are missing.
    """
    if store.state == REFUSED:
        return
    require_all_blocks(store)
    if store.state != COMPLETE:
        raise IncompleteStoreError(
            f"{store.url}: is {store.state}, not complete: its certificate is missing; run the job again",
            missing=[],
        )


def _find_out(
    store: MechanismStore,
    certificate: AuditReport,
    before: Mapping[str, Any] | None,
    bound_seconds: float | None,
    executor: Executor,
    stages: Stages,
) -> Findings:
    sampled = _sampled(store, executor, stages)
    result: dict[str, Any] | None = None
    expected = plain = None
    compared, reason = [], ""
    try:
        spread = measure_spread(store, executor, stages)
        expected = spread.expected_km
        kept = None
        if before is None and bound_seconds is None:
            kept, bound_seconds = read_kept_bound(store, spread.loss_km), BOUND_SECONDS
        seconds = 0.0 if before or kept else bound_seconds or 0.0
        bounded = bound_facts(store, executor, stages, spread.loss_km, BoundRequest(seconds))
        result = {
            **spread_facts(store, spread),
            **plain_facts(store, spread.loss_km),
            **bounded,
            **(kept or {}),
            "adversary": None,
        }
        if before is not None:
            result.update(before)
        elif store.grid.records * store.outputs <= _MOST_ATTACKED:
            attack = prepare(store, AttackRequest(releases=0))
            result["adversary"] = measure_attacks(store, executor, stages, spread, attack)
        if store.grid.records <= MOST_SORTED:
            problem = Problem.of_store(store)
            compared, plain = others(problem), plain_expected_km(problem)
    except (StoreError, GuaranteeViolation) as error:
        # The page of a store that does not hold shows whatever can be computed.
        if certificate.verdict == HOLDS and store.state == COMPLETE:
            raise
        reason, result, expected = first_line(error), None, None
    return Findings(certificate, sampled, result, reason, expected, compared, plain)


def _sampled(store: MechanismStore, executor: Executor, stages: Stages) -> AuditReport | None:
    try:
        sampling = Sampling(pairs=_PAIRS if is_small(store) else _PAIRS_OF_LARGE, random_seed=_RANDOM_SEED)
        return sample_pairs(store_subject(store), sampling, executor, stages)
    except StoreError:
        return None
