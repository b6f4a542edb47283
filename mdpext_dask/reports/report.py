"""A report on a store: everything that is found out about it, in one HTML file."""

import datetime
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mdpext_dask.auditors.methods import Sampling, certify, sample_pairs
from mdpext_dask.auditors.result import HOLDS, AuditReport, sentence
from mdpext_dask.auditors.subject import store_subject
from mdpext_dask.compute.executor import Executor, open_executor, processors
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, SpecError, StoreError, first_line
from mdpext_dask.evaluation.attackers.measure import measure_attacks, prepare
from mdpext_dask.evaluation.attackers.requests import AttackRequest
from mdpext_dask.evaluation.attackers.words import attack_rows
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, bound_facts
from mdpext_dask.evaluation.evaluate import MOST_SORTED, measure_spread, spread_facts
from mdpext_dask.events import Observer, silent
from mdpext_dask.files import check_file, whole_file
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.reports.page.contents import contents_of, store_name
from mdpext_dask.reports.page.costs import Findings
from mdpext_dask.reports.page.html import page_of
from mdpext_dask.reports.page.other_mechanisms import others
from mdpext_dask.reports.page.words import bound_in_words
from mdpext_dask.store.integrity import require_all_blocks
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, MechanismStore, job_of
from mdpext_dask.store.objects import WhereStored, address_of

SUFFIXES = (".html", ".htm")
BOUND_SECONDS = 2.0
SECTIONS = ("promise", "reports", "maps", "loss", "budget", "making")
# Numbers of a store below which starting processes takes longer than the work.
_FEW_NUMBERS = 20_000_000
# Numbers of a store beyond which measuring attackers takes longer than a report should.
_MOST_ATTACKED = 100_000_000
# Pairs that are drawn to tell how much of ε is used; always the same, so that a report can be repeated. Of a
# large store every one costs two chunks that nobody else needs.
_PAIRS, _PAIRS_OF_LARGE, _RANDOM_SEED = 20_000, 4_000, 0
_OPTION = "--output"
# What a report shows of an evaluation that was made before.
_EVALUATED = (
    "lower_bound_km", "lower_bound_certified", "lower_bound_standard_error_km", "lower_bound_certified_km",
    "lower_bound_stride", "offsets_used", "offsets_total", "gap", "adversary",
)  # fmt: skip


def report(
    url: WhereStored,
    path: str | Path | None = None,
    *,
    evaluation: str | Path | None = None,
    bound_seconds: float = BOUND_SECONDS,
    workers: int | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Write a report on a store: one HTML file that fetches nothing.

    Certificate and losses are worked out anew, from the stored bytes; nothing is written to the store.

    Parameters
    ----------
    url
        The store, or a mechanism that is open.
    path
        Where the report goes; default: the store's name with ``-report.html``, here.
    evaluation
        A file with what ``mdpext evaluate --json`` has said of the same bytes, whose bound and measures of
        attackers are taken instead of being computed.
    bound_seconds
        About how long to bound the loss of any mechanism, in s; 0 for no bound.
    workers
        Number of local processes; default: this one for small stores, what the job says for others.
    observer
        Is told of progress.

    Returns
    -------
    `file`, `bytes` and `sections` of the report; `state`, `holds`, `verdict` and `epsilon_certified` of the
    store, as found now; and `seconds`. A store that is refused or does not hold gets a report that says so on
    top, and `holds` is False.

    Raises
    ------
    SpecError
        If the file cannot be written, or the evaluation is none, or one of other bytes.
    IncompleteStoreError
        If the store is not finished: there is nothing to report on.
    StoreError
        If it cannot be read, or the report cannot be written.
    """
    started, url = time.perf_counter(), address_of(url)
    if not bound_seconds >= 0:
        raise SpecError(f"--bound-seconds: must be at least 0, got {bound_seconds:g}")
    target = Path(f"{PurePath(url.rstrip('/')).stem or 'store'}-report.html" if path is None else path)
    if Path(url).resolve() in target.resolve().parents:
        raise SpecError(f"{_OPTION}: {target}: lies inside the store")
    check_file(target, _OPTION, SUFFIXES)
    _require_libraries()
    store = MechanismStore.open(url)
    _require_finished(store)
    before = None if evaluation is None else _evaluation_of(store, Path(evaluation))
    stages = Stages(observer)
    with open_executor(_cluster_of(store, workers), workers) as executor:
        certificate = certify(store_subject(store), executor, stages)
        found = _find_out(store, certificate, before, bound_seconds, executor, stages)
    now = datetime.datetime.now(datetime.UTC)
    with stages.stage("report"):
        contents = contents_of(store, found, f"{now:%Y-%m-%d %H:%M} UTC")
        content = page_of({**contents, "store_argument": _argument(store)}).encode("utf-8", "replace")
        with whole_file(target, _OPTION) as file:
            file.write(content)
    return {
        "store": store.url,
        "file": str(target),
        "bytes": len(content),
        "sections": list(SECTIONS),
        "state": store.state,
        "holds": certificate.verdict == HOLDS and store.state == COMPLETE,
        "verdict": sentence(certificate) if store.state == COMPLETE else f"refused; {sentence(certificate)}",
        "epsilon_certified": certificate.as_json()["epsilon_certified"],
        "seconds": time.perf_counter() - started,
    }


def _require_libraries() -> None:
    """Refuse before any work what could not be drawn in the end.

    Raises
    ------
    SpecError
        If a library is not installed.
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
    """Refuse a store that nobody has finished; a refused one has been, though blocks at fault lost receipts.

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


def _cluster_of(store: MechanismStore, workers: int | None) -> ClusterSection:
    """Return where to work: here, if that is quickest, or else as the job says, but never far away."""
    if workers is None and store.grid.records * store.outputs <= _FEW_NUMBERS:
        return ClusterSection(kind="inline")
    cluster = job_of(store).cluster
    return cluster if cluster.kind == "local" else ClusterSection(workers=processors())


def _find_out(
    store: MechanismStore,
    certificate: AuditReport,
    before: Mapping[str, Any] | None,
    bound_seconds: float,
    executor: Executor,
    stages: Stages,
) -> Findings:
    sampled = _sampled(store, executor, stages)
    result: dict[str, Any] | None = None
    expected = None
    compared, reason = [], ""
    try:
        spread = measure_spread(store, executor, stages)
        expected = spread.expected_km
        seconds = 0.0 if before is not None else bound_seconds
        bounded = bound_facts(store, executor, stages, spread.loss_km, BoundRequest(seconds))
        result = {**spread_facts(store, spread), **bounded, "adversary": None}
        if before is not None:
            result.update(before)
        elif store.grid.records * store.outputs <= _MOST_ATTACKED:
            attack = prepare(store, AttackRequest(releases=0))
            result["adversary"] = measure_attacks(store, executor, stages, spread, attack)
        if store.grid.records <= MOST_SORTED:
            compared = others(Problem.of_store(store))
    except (StoreError, GuaranteeViolation) as error:
        # Of a store that is refused anyway, what can be told is told.
        if certificate.verdict == HOLDS and store.state == COMPLETE:
            raise
        reason, result, expected = first_line(error), None, None
    return Findings(certificate, sampled, result, reason, expected, compared)


def _sampled(store: MechanismStore, executor: Executor, stages: Stages) -> AuditReport | None:
    try:
        small = store.grid.records * store.outputs <= _FEW_NUMBERS
        sampling = Sampling(pairs=_PAIRS if small else _PAIRS_OF_LARGE, random_seed=_RANDOM_SEED)
        return sample_pairs(store_subject(store), sampling, executor, stages)
    except StoreError:
        return None


def _evaluation_of(store: MechanismStore, path: Path) -> dict[str, Any]:
    """Return what an evaluation has found, if it is about the bytes of this store.

    Raises
    ------
    SpecError
        If it is not.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"--evaluation: {path}: cannot be read: {first_line(error)}") from None
    if not isinstance(document, dict) or "content_sha256" not in document:
        raise SpecError(f"--evaluation: {path}: is not what `mdpext evaluate --json` prints")
    hashes = store.attributes.get("chunk_hashes") or {}
    digest = hashes.get("digest")
    if digest is None or document["content_sha256"] != digest:
        raise SpecError(
            f"--evaluation: {path}: is about other bytes than those of {store_name(store)}; evaluate it again"
        )
    missing = [key for key in _EVALUATED if key not in document]
    if missing:
        raise SpecError(f"--evaluation: {path}: {', '.join(missing)} missing; evaluate the store again")
    found = {key: document[key] for key in _EVALUATED}
    try:
        attack_rows(found["adversary"])
        bound_in_words(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"--evaluation: {path}: is damaged ({first_line(error)})") from None
    return found


def _argument(store: MechanismStore) -> str:
    """Return the store's name as an argument of a command in a shell."""
    return shlex.quote(store_name(store))
