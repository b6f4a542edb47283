"""The auditors at work: their tasks, and what the answers come to."""

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdpext_dask.auditors.bands import bands_of, certify_band
from mdpext_dask.auditors.certificate import Place, certify_block
from mdpext_dask.auditors.findings import inspect_rows, merged
from mdpext_dask.auditors.pairs import exhaustive, sampled
from mdpext_dask.auditors.pairs.compare import SIZE_EDGES, Tally, Triple, logs_of
from mdpext_dask.auditors.pairs.designs import Design
from mdpext_dask.auditors.pairs.intervals import mean_interval, stratified_interval
from mdpext_dask.auditors.pairs.tiles import lengths
from mdpext_dask.auditors.result import (
    BOUNDARY,
    CERTIFICATE,
    CHANGED,
    EXHAUSTIVE,
    HOLDS,
    NO_VIOLATION_FOUND,
    NOT_PROVED,
    SAMPLED,
    VIOLATED,
    AuditReport,
    describe_triple,
    verdict_on_rows,
)
from mdpext_dask.auditors.shared_rows import check_shared_rows
from mdpext_dask.auditors.subject import Subject, damage_of, verdict_on_pairs
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError
from mdpext_dask.job.spec import json_number
from mdpext_dask.store.integrity import ShardDamage, damage_of_block
from mdpext_dask.store.mechanism_store import MechanismStore

# Of pairs that are drawn, without a number or a time.
DEFAULT_PAIRS = 1_000_000
# Batches between two looks at the clock, for each worker.
_BATCHES_A_WAVE = 2
_LARGEST_WAVE = 1000
_RANDOM_BITS = 63


@dataclass(frozen=True)
class Sampling:
    """How the sampled auditor draws pairs.

    Parameters
    ----------
    pairs
        How many; default: a million, or without end where `seconds` is given.
    seconds
        After how many to stop.
    design
        ``"stratified"`` by distance, or ``"uniform"`` over all pairs.
    random_seed
        What draws follow from; default: a new one, which the report names.
    confidence
        Of the interval, in (0, 1).
    stop_at_first
        Whether to stop at the first violation.

    Raises
    ------
    SpecError
        If one of them cannot be.
    """

    pairs: int | None = None
    seconds: float | None = None
    design: str = sampled.STRATIFIED
    random_seed: int | None = None
    confidence: float = 0.95
    stop_at_first: bool = False

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise SpecError(f"--pairs: must be at least 1, got {self.pairs}")
        if self.seconds is not None and not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise SpecError(f"--seconds: must be a positive number, got {self.seconds}")
        if self.design not in sampled.DESIGNS:
            raise SpecError(f"--design: must be {' or '.join(sampled.DESIGNS)}, got {self.design!r}")
        if not 0 < self.confidence < 1:
            raise SpecError(f"--confidence: must lie between 0 and 1, got {self.confidence}")
        if self.random_seed is not None and self.random_seed < 0:
            raise SpecError(f"--random-seed: must not be negative, got {self.random_seed}")


# --- the certificate ------------------------------------------------------------------------------


def certify(subject: Subject, executor: Executor, stages: Stages) -> AuditReport:
    """Certify all pairs, from the bytes read back.

    Raises
    ------
    SpecError
        If the records are on no lattice.
    """
    started = time.perf_counter()
    function, tasks = _certificate_tasks(subject)
    with stages.stage("audit", len(tasks)):
        found = stages.gather(executor, "audit", function, tasks)
    source, store, promise = subject.source, subject.store, subject.promise
    worst = max(found, key=lambda part: (part.epsilon, -part.block))
    violations = sum(part.violations for part in found)
    damage = damage_of(subject, [part.damage for part in found], worst.epsilon)
    findings = tuple(merged(finding for part in found for finding in part.findings))
    steepest = _steepest_of_cell(subject, worst.place)
    described = describe_triple(source, promise, steepest)
    if worst.epsilon <= promise.kept_per_km and not violations:
        verdict = verdict_on_rows(findings) or (CHANGED if damage else HOLDS)
    else:
        verdict = VIOLATED if subject.breaks(steepest) else verdict_on_rows(findings) or NOT_PROVED
    across, along = subject.lattice_shape
    return subject.report(
        CERTIFICATE,
        verdict,
        worst.epsilon,
        time.perf_counter() - started,
        triples_checked=exhaustive.pairs_of(source.records) * source.outputs,
        violations=violations,
        violation_ratio=violations / ((across - 1) * (along - 1) * source.outputs),
        recomputed=sum(part.recomputed for part in found),
        worst=described,
        findings=findings,
        changed=damage.changed,
        missing=damage.missing,
        extra=damage.extra,
        blocks_at_fault=tuple(
            part.block for part in found if part.damage or not part.epsilon <= promise.kept_per_km
        ),
        details={"epsilon_by_block": _map_of(store, [json_number(part.epsilon) for part in found])},
    )


def _certificate_tasks(subject: Subject) -> tuple[Any, list[tuple[Any, ...]]]:
    promise, source = subject.promise, subject.source
    if subject.store is not None:
        url, p, limit = subject.store.url, promise.metric_p, promise.kept_per_km
        return certify_block, [(url, index, p, limit) for index in range(subject.store.plan.blocks)]
    if subject.lattice_file is None:
        raise SpecError(
            f"{subject.name}: the certificate needs records on all crossings of a lattice in the plane; use "
            "--method exhaustive"
        )
    bands = list(bands_of(subject.lattice(), source.outputs))
    return certify_band, [
        (source, subject.lattice_file, index, band.start, band.stop - 1, promise)
        for index, band in enumerate(bands)
    ]


def _steepest_of_cell(subject: Subject, place: Place) -> Triple:
    """Return the steepest pair of a fine cell's records for an output."""
    records = subject.records_of_cell(place)
    source, output = subject.source, place.output
    rows, xy_km = source.rows(records), source.xy_km(records)
    good, _ = inspect_rows(records, rows, source.range, normalised=False)
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    if not good.all():
        bad = int(np.argmin(good))
        return Triple(True, math.inf, int(records[bad]), int(records[bad - 1]), output)
    logs = logs_of(rows)[0][:, output]
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    dx, dy = (xy_km[first] - xy_km[second]).T.copy()
    slopes = np.abs(logs[first] - logs[second]) / lengths(dx, dy, subject.promise.metric_p)
    steepest = int(slopes.argmax())
    a, b = pairs[steepest]
    return Triple(False, float(slopes[steepest]), int(records[a]), int(records[b]), output)


def _map_of(store: MechanismStore | None, values: list[Any]) -> list[Any]:
    """Return values of blocks as rows from west to east, each from south to north; of bands as they are."""
    if store is None:
        return values
    along = store.plan.blocks_shape[1]
    return [values[start : start + along] for start in range(0, len(values), along)]


# --- every triple ---------------------------------------------------------------------------------


def compare_all(subject: Subject, executor: Executor, stages: Stages, *, prune: bool = True) -> AuditReport:
    """Compare all pairs of records for all outputs, but for those that bounds say keep the promise.

    Parameters
    ----------
    subject
        What is audited.
    executor, stages
        Where tasks run, and who is told.
    prune
        Whether bounds are used at all.
    """
    started = time.perf_counter()
    source, store, promise = subject.source, subject.store, subject.promise
    damage = []
    if store is not None:
        with stages.stage("bytes", store.plan.blocks, "blocks"):
            blocks = [(store.url, index) for index in range(store.plan.blocks)]
            damage = stages.gather(executor, "bytes", damage_of_stored_block, blocks)
    with stages.stage("near", source.parts):
        near = [(source, index, promise, prune) for index in range(source.parts)]
        summaries = stages.gather(executor, "near", exhaustive.compare_within, near)
    tally = Tally()
    for summary in summaries:
        tally.add(summary.tally)
    portions = exhaustive.parts_to_compare(summaries, promise, tally.slope, prune=prune)
    with stages.stage("far", len(portions)):
        far = [(source, part, partners, promise, tally.slope, prune) for part, partners in portions]
        for _, found in stages.run(executor, "far", exhaustive.compare_between, far):
            tally.add(found)
    exhaustive.forget()
    usable = sum(summary.usable for summary in summaries)
    # A row that cannot be used keeps no promise towards any other.
    refused = (exhaustive.pairs_of(source.records) - exhaustive.pairs_of(usable)) * source.outputs
    violations = tally.violations + refused
    total = exhaustive.pairs_of(source.records) * source.outputs
    findings = tuple(merged(finding for summary in summaries for finding in summary.findings))
    epsilon = _audited_epsilon(subject, tally, violations, refused)
    found_damage = damage_of(subject, damage, None)
    if tally.violations:
        verdict = verdict_on_pairs(subject, tally.worst)
    elif tally.undecided:
        verdict = NOT_PROVED
    else:
        verdict = verdict_on_rows(findings) or (CHANGED if found_damage else HOLDS)
    worst = sorted(tally.worst, reverse=True)
    described = [describe_triple(source, promise, triple) for triple in worst]
    return subject.report(
        EXHAUSTIVE,
        verdict,
        epsilon,
        time.perf_counter() - started,
        triples_checked=total,
        violations=violations,
        violation_ratio=violations / total if total else 0.0,
        recomputed=tally.recomputed,
        worst=described[0] if described else {},
        findings=findings,
        changed=found_damage.changed,
        missing=found_damage.missing,
        extra=found_damage.extra,
        blocks_at_fault=tuple(index for index, part in enumerate(damage) if part),
        details={
            "worst_triples": described,
            "violation_sizes": [
                {"at_least": low, "below": json_number(high), "violations": count}
                for low, high, count in zip(SIZE_EDGES[:-1], SIZE_EDGES[1:], tally.sizes, strict=True)
            ],
            "hidden_violations": tally.hidden,
            "undecided": tally.undecided,
            "triples_compared": tally.compared,
            "peak_bytes_per_task": exhaustive.peak_bytes(source),
        },
    )


def damage_of_stored_block(url: str, index: int) -> ShardDamage:
    """Compare the bytes of one block with its receipt; a task."""
    return damage_of_block(MechanismStore.open(url), index)


def _audited_epsilon(subject: Subject, tally: Tally, violations: int, refused: int) -> float:
    """Return an ε, in 1/km, that no pair exceeds: the steepest rounded outward, or the limit if less."""
    if refused:
        return math.inf
    steepest = max(tally.worst, default=None)
    if steepest is not None and math.isinf(steepest.slope):
        return math.inf
    epsilon = tally.slope_above
    if subject.promise.distortion is not None:
        epsilon = math.nextafter(epsilon * (1 + subject.promise.distortion), math.inf)
    proved = not (violations or tally.undecided or tally.hidden)
    return min(epsilon, subject.limit_per_km) if proved else epsilon


# --- pairs drawn at random ------------------------------------------------------------------------


def sample_pairs(subject: Subject, sampling: Sampling, executor: Executor, stages: Stages) -> AuditReport:
    """Draw pairs, and estimate how many triples break the promise.

    Parameters
    ----------
    subject
        What is audited.
    sampling
        How pairs are drawn.
    executor, stages
        Where tasks run, and who is told.
    """
    started = time.perf_counter()
    source, promise = subject.source, subject.promise
    seed = secrets.randbits(_RANDOM_BITS) if sampling.random_seed is None else sampling.random_seed
    design = sampled.design_of(source, sampling.design, promise.metric_p)
    total = [sampled.StratumTally() for _ in design.strata]
    stopped = "all pairs drawn"
    for wave in _waves(sampling, source.outputs, executor.workers):
        tasks = [(source, promise, sampling.design, seed, batch, pairs) for batch, pairs in wave]
        with stages.stage("audit", len(tasks)):
            for _, found in stages.run(executor, "audit", sampled.sample_batch, tasks):
                for sum_, tally in zip(total, found, strict=True):
                    sum_.add(tally)
                if sampling.stop_at_first and any(tally.violations for tally in total):
                    stopped = "first violation"
                    break
        if stopped == "first violation":
            break
        if sampling.seconds is not None and time.perf_counter() - started >= sampling.seconds:
            stopped = "time"
            break
    return _summarise_sample(subject, sampling, seed, design, total, stopped, started)


def _waves(sampling: Sampling, outputs: int, workers: int) -> Iterator[list[tuple[int, int]]]:
    """Yield portions of batches (number, pairs); their sizes do not depend on how many workers there are."""
    most = sampled.batch_pairs(outputs)
    wanted: float = DEFAULT_PAIRS if sampling.seconds is None else math.inf
    if sampling.pairs is not None:
        wanted = sampling.pairs
    batch = 0
    while batch * most < wanted:
        # All at once, but for what cannot be held, and where a clock has to be looked at.
        count = _LARGEST_WAVE if sampling.seconds is None else _BATCHES_A_WAVE * max(workers, 1)
        wave = [
            (number, int(min(most, wanted - number * most)))
            for number in range(batch, batch + count)
            if number * most < wanted
        ]
        yield wave
        batch += len(wave)


def _summarise_sample(
    subject: Subject,
    sampling: Sampling,
    seed: int,
    design: Design,
    total: Sequence[sampled.StratumTally],
    stopped: str,
    started: float,
) -> AuditReport:
    source, promise = subject.source, subject.promise
    pairs = sum(tally.pairs for tally in total)
    violations = sum(tally.violations for tally in total)
    undecided = sum(tally.undecided for tally in total)
    findings = tuple(merged(finding for tally in total for finding in tally.findings))
    strata = design.strata
    ratio, means, drawn = sampled.estimate(total, design.weights, source.outputs)
    # Whoever stops because of what has been seen has seen no fair sample, nor who does not know what was
    # seen.
    fair = stopped != "first violation" and not undecided
    interval = stratified_interval(means, drawn, design.weights, sampling.confidence) if fair else None
    steep = [tally.worst for tally in total if tally.worst is not None]
    steepest = max(steep, default=None)
    described = {} if steepest is None else describe_triple(source, promise, steepest)
    damage = damage_of(subject, [], None)
    if violations > sum(tally.unusable for tally in total) * source.outputs:
        verdict = verdict_on_pairs(subject, steep)
    else:
        nothing = NOT_PROVED if undecided else CHANGED if damage else NO_VIOLATION_FOUND
        verdict = verdict_on_rows(findings) or nothing
    return subject.report(
        SAMPLED,
        verdict,
        _slope_of(described),
        time.perf_counter() - started,
        triples_checked=pairs * source.outputs,
        violations=violations,
        violation_ratio=ratio,
        recomputed=sum(tally.recomputed for tally in total),
        worst=described,
        findings=findings,
        changed=damage.changed,
        missing=damage.missing,
        extra=damage.extra,
        details={
            "pairs": pairs,
            "design": sampling.design,
            "random_seed": seed,
            "confidence": sampling.confidence,
            "violation_ratio_interval": None if interval is None else list(interval),
            "stopped": stopped,
            "hidden_violations": sum(tally.hidden for tally in total),
            "undecided": undecided,
            "ratio_edges": list(sampled.RATIO_EDGES),
            "strata": [
                {
                    "lower_km": stratum.lower_km,
                    "upper_km": stratum.upper_km,
                    "pairs": stratum.pairs,
                    "pairs_drawn": tally.pairs,
                    "violations": tally.violations,
                    "violation_ratio": mean,
                    "violation_ratio_interval": list(mean_interval(mean, tally.pairs, sampling.confidence))
                    if fair
                    else None,
                    "epsilon_audited": json_number(tally.worst.slope) if tally.worst else None,
                    "triples_by_ratio": tally.histogram,
                }
                for stratum, tally, mean in zip(strata, total, means, strict=True)
            ],
            "peak_bytes_per_task": sampled.peak_bytes(
                source, sampling.design, min(pairs, sampled.batch_pairs(source.outputs))
            ),
        },
    )


def _slope_of(described: dict[str, Any]) -> float:
    """Return |log ratio| / distance of a triple that is described, in 1/km."""
    if not described:
        return 0.0
    ratio, distance = described["log_ratio"], described["distance_km"]
    if not isinstance(ratio, float):
        return math.inf
    return ratio / distance if distance > 0 else math.inf if ratio > 0 else 0.0


# --- shared rows ----------------------------------------------------------------------------------


def check_boundary(
    subject: Subject, blocks: tuple[int, int] | None, executor: Executor, stages: Stages
) -> AuditReport:
    """Make the rows that blocks share again from the seed, and compare them with what is stored (A2).

    Parameters
    ----------
    subject
        A store.
    blocks
        Half-open range of blocks; default: all.
    executor, stages
        Where tasks run, and who is told.

    Raises
    ------
    SpecError
        If the subject is no store, or blocks are not in its plan.
    """
    started = time.perf_counter()
    store = subject.store
    if store is None:
        raise SpecError("--method: only mechanism stores have blocks with a boundary")
    first, last = (0, store.plan.blocks) if blocks is None else blocks
    if not 0 <= first < last <= store.plan.blocks:
        raise SpecError(f"--blocks: {first}:{last} are not in the plan, which has 0:{store.plan.blocks}")
    tasks = [(store.url, index) for index in range(first, last)]
    with stages.stage("boundary", len(tasks)):
        found = stages.gather(executor, "boundary", check_shared_rows, tasks)
    checked = sum(part.rows_checked for part in found)
    mismatches = sorted({mismatch for part in found for mismatch in part.mismatches})
    damage = damage_of(subject, [], None)
    return subject.report(
        BOUNDARY,
        VIOLATED if mismatches else CHANGED if damage else HOLDS,
        math.nan,
        time.perf_counter() - started,
        triples_checked=0,
        violations=len(mismatches),
        violation_ratio=len(mismatches) / checked,
        recomputed=0,
        worst={},
        changed=damage.changed,
        missing=damage.missing,
        extra=damage.extra,
        blocks_at_fault=tuple(sorted({mismatch.block for mismatch in mismatches})),
        details={
            "blocks_checked": [first, last],
            "boundary_rows_checked": checked,
            "boundary_mismatches": [
                {"record": list(mismatch.record), "block": mismatch.block, "said_by": mismatch.said_by}
                for mismatch in mismatches
            ],
        },
    )
