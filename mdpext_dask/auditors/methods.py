"""The four auditors: the work items of each, and what their answers come to."""

import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from mdpext_dask.auditors import result
from mdpext_dask.auditors.certificate import Place, bands_of, certify_band, certify_block
from mdpext_dask.auditors.city import damaged_tiles, false_claims
from mdpext_dask.auditors.directions import DirectionCertificate, certify_directions
from mdpext_dask.auditors.findings import NOT_FINITE, inspect_rows, merged
from mdpext_dask.auditors.noise import certify_noise
from mdpext_dask.auditors.pairs import exhaustive, sampled
from mdpext_dask.auditors.pairs.compare import SIZE_EDGES, Tally, Triple, logs_of
from mdpext_dask.auditors.pairs.intervals import mean_interval, stratified_interval
from mdpext_dask.auditors.pairs.tiles import lengths
from mdpext_dask.auditors.result import AuditReport, steepness, verdict_on_rows
from mdpext_dask.auditors.shared_rows import check_shared_rows, owners
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError
from mdpext_dask.events import Note
from mdpext_dask.job.spec import json_number
from mdpext_dask.store.integrity import FINISHED, ShardDamage, damage_of_block, extra_shards, inconsistencies
from mdpext_dask.store.loss import is_problem_of
from mdpext_dask.store.mechanism_store import MechanismStore

# Pairs that are drawn, if neither a number nor a time is given.
DEFAULT_PAIRS = 1_000_000
# Triples that one worker compares in a second, measured; and from when on people want to know beforehand.
_TRIPLES_A_SECOND, _LONG_SECONDS = 3e8, 120.0
# Batches between two looks at the clock, for each worker.
_BATCHES_A_WAVE = 2
_LARGEST_WAVE = 1000
_RANDOM_BITS = 63
_ALL_DRAWN, _AT_FIRST, _IN_TIME = "all pairs drawn", "first violation", "time"


@dataclass(frozen=True)
class Sampling:
    """How the sampled auditor draws pairs.

    Parameters
    ----------
    pairs
        How many; default: a million, or no limit if `seconds` is given.
    seconds
        When to stop.
    design
        ``"stratified"`` by distance, or ``"uniform"`` over all pairs.
    random_seed
        Seed of the draws; default: a random one, which the result names.
    confidence
        Of the interval, in (0, 1).
    stop_at_first
        Whether to stop at the first violation.

    Raises
    ------
    SpecError
        If a value is out of range.
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
    source, store, promise = subject.source, subject.store, subject.promise
    if source.lattice_shape is None:
        raise SpecError(
            f"{subject.name}: the certificate needs records on all crossings of a lattice in the plane; use "
            "--method exhaustive"
        )
    own = subject.own_limit_per_km if promise.metric_p == subject.own_metric_p else None
    noise = certify_noise(subject, executor, stages)
    if noise is not None and noise.epsilon <= promise.kept_per_km:
        details: dict[str, Any] = {
            "epsilon_by_block": _by_block(noise.by_block, store),
            "epsilon_of_cells": None,
            "cells_above_limit": 0,
            "epsilon_of_directions": None,
            "radius_of_directions": None,
            "epsilon_of_noise": noise.epsilon,
        }
        return _report(
            subject,
            result.CERTIFICATE,
            result.HOLDS,
            noise.epsilon,
            started,
            details,
            damage=noise.damage,
            certified=noise.epsilon,
            triples_checked=exhaustive.pairs_of(source.records) * source.outputs,
            violations=0,
            violation_ratio=0.0,
            recomputed=0,
            worst={},
            blocks_at_fault=tuple(index for index, damage in enumerate(noise.damage) if damage),
        )
    function: Any = certify_block
    tasks: list[tuple[Any, ...]]
    if store is not None:
        limits = promise.metric_p, promise.kept_per_km
        tasks = [(store.url, index, *limits) for index in range(store.plan.blocks)]
    else:
        function, bands = certify_band, bands_of(source.lattice_shape, source.outputs)
        tasks = [(source, index, band.start, band.stop - 1, promise) for index, band in enumerate(bands)]
    with stages.stage("audit", len(tasks)):
        found = stages.gather(executor, "audit", function, tasks)
    worst = max(found, key=lambda part: (part.cells.epsilon, -part.block)).cells
    violations = above = sum(part.cells.violations for part in found)
    findings = merged(finding for part in found for finding in part.findings)
    steepest = _steepest_of_cell(subject, worst.place)
    proved = worst.epsilon <= promise.kept_per_km and not violations

    @cache
    def directions_at(limit: float) -> DirectionCertificate:
        return certify_directions(subject, limit, executor, stages)

    epsilon = certified = worst.epsilon
    if noise is not None:
        epsilon = min(epsilon, noise.epsilon)
    directions, usable = None, math.isfinite(worst.epsilon) and not verdict_on_rows(findings)
    if usable and not (proved or subject.breaks(steepest)):
        directions = directions_at(promise.kept_per_km)
        epsilon = min(epsilon, directions.epsilon)
        if epsilon <= promise.kept_per_km:
            proved, violations = True, 0
    # What it says of itself is what was found for its own promise.
    if usable and own is not None:
        if noise is not None and noise.epsilon <= own:
            certified = noise.epsilon
        elif worst.epsilon > own:
            certified = min(certified, directions_at(own).epsilon)
    if not proved and subject.breaks(steepest):
        verdict = result.VIOLATED
    else:
        verdict = verdict_on_rows(findings) or (result.HOLDS if proved else result.NOT_PROVED)
    at_fault = [
        part.block
        for part in found
        if part.damage or not (proved or part.cells.epsilon <= promise.kept_per_km)
    ]
    details = {
        "epsilon_by_block": _by_block([part.cells.epsilon for part in found], store),
        "epsilon_of_cells": json_number(worst.epsilon),
        "cells_above_limit": above,
        # Asked only where cells do not decide.
        "epsilon_of_directions": None if directions is None else json_number(directions.epsilon),
        "radius_of_directions": None if directions is None else directions.radius,
        "epsilon_of_noise": None if noise is None else json_number(noise.epsilon),
    }
    across, along = source.lattice_shape
    return _report(
        subject,
        result.CERTIFICATE,
        verdict,
        epsilon,
        started,
        details,
        damage=[part.damage for part in found],
        certified=certified,
        triples_checked=exhaustive.pairs_of(source.records) * source.outputs,
        violations=violations,
        violation_ratio=violations / ((across - 1) * (along - 1) * source.outputs),
        recomputed=sum(part.cells.recomputed for part in found),
        worst=subject.describe(steepest),
        findings=findings,
        blocks_at_fault=tuple(at_fault),
    )


def _by_block(epsilons: Sequence[float], store: MechanismStore | None) -> list[Any]:
    """Return what blocks certify; of a store, as rows from west to east, each from south to north."""
    numbers: list[Any] = [json_number(epsilon) for epsilon in epsilons]
    along = 0 if store is None else store.plan.blocks_shape[1]
    return [numbers[start : start + along] for start in range(0, len(numbers), along)] if along else numbers


def _steepest_of_cell(subject: Subject, place: Place) -> Triple:
    """Return the steepest pair of a fine cell's records for an output."""
    source, output = subject.source, place.output
    records = source.records_of_cell(place.i, place.j)
    rows, xy_km = source.rows(records), source.xy_km(records)
    good, _ = inspect_rows(records, rows, source.range, normalised=False)
    if not good.all():
        bad = int(np.argmin(good))
        return Triple(True, math.inf, int(records[bad]), int(records[bad - 1]), output)
    logs = logs_of(rows)[0][:, output]
    first, second = np.triu_indices(4, 1)
    dx, dy = (xy_km[first] - xy_km[second]).T.copy()
    slopes = np.abs(logs[first] - logs[second]) / lengths(dx, dy, subject.promise.metric_p)
    steepest = int(slopes.argmax())
    pair = int(records[first[steepest]]), int(records[second[steepest]])
    return Triple(False, float(slopes[steepest]), *pair, output)


# --- every triple ---------------------------------------------------------------------------------


def compare_all(subject: Subject, executor: Executor, stages: Stages) -> AuditReport:
    """Compare all pairs of records for all outputs, but for those that bounds say keep the promise.

    Parameters
    ----------
    subject
        What is audited.
    executor, stages
        Where work items run, and who observes them.
    """
    started = time.perf_counter()
    source, promise = subject.source, subject.promise
    triples = exhaustive.pairs_of(source.records) * source.outputs
    if (most := triples / (_TRIPLES_A_SECOND * executor.workers)) > _LONG_SECONDS:
        on_lattice = "; --method certificate proves all pairs in one pass" if source.lattice_shape else ""
        minutes = f"about {most / 60:,.0f} minutes"
        stages.observer(Note(f"{triples:.2g} triples take {minutes} if bounds rule out none{on_lattice}"))
    damage = _damage(subject.store, None, executor, stages)
    with stages.stage("near", source.parts):
        near = [(source, index, promise) for index in range(source.parts)]
        summaries = stages.gather(executor, "near", exhaustive.compare_within, near)
    tally = Tally()
    for summary in summaries:
        tally.add(summary.tally)
    portions = exhaustive.parts_to_compare(summaries, promise, tally.slope)
    with stages.stage("far", len(portions)):
        far = [(source, part, partners, promise, tally.slope) for part, partners in portions]
        for _, found in stages.run(executor, "far", exhaustive.compare_between, far):
            tally.add(found)
    exhaustive.forget()
    usable = sum(summary.usable for summary in summaries)
    # A row that cannot be used keeps no promise towards any other.
    refused = (exhaustive.pairs_of(source.records) - exhaustive.pairs_of(usable)) * source.outputs
    violations = tally.violations + refused
    findings = merged(finding for summary in summaries for finding in summary.findings)
    if tally.violations:
        verdict = subject.verdict_on_pairs(tally.worst)
    else:
        passed = result.WITHIN_TOLERANCE if tally.hidden else result.HOLDS
        verdict = result.NOT_PROVED if tally.undecided else verdict_on_rows(findings) or passed
    worst = sorted(tally.worst, reverse=True)
    described = [subject.describe(triple) for triple in worst]
    sizes = zip(SIZE_EDGES[:-1], SIZE_EDGES[1:], tally.sizes, strict=True)
    details = {
        "worst_triples": described,
        "violation_sizes": [
            {"at_least": low, "below": json_number(high), "violations": count} for low, high, count in sizes
        ],
        "hidden_violations": tally.hidden,
        "undecided": tally.undecided,
        "triples_compared": tally.compared,
        "peak_bytes_per_task": exhaustive.peak_bytes(source),
    }
    return _report(
        subject,
        result.EXHAUSTIVE,
        verdict,
        math.inf if refused else _audited_epsilon(subject, tally),
        started,
        details,
        damage=damage.values(),
        triples_checked=triples,
        violations=violations,
        violation_ratio=violations / triples if triples else 0.0,
        recomputed=tally.recomputed,
        worst=described[0] if described else {},
        findings=findings,
        blocks_at_fault=_at_fault(damage),
    )


def _damage(
    store: MechanismStore | None, blocks: Iterable[int] | None, executor: Executor, stages: Stages
) -> dict[int, ShardDamage]:
    """Compare the bytes of blocks (default: all) with their receipts; of an array, nothing is known."""
    if store is None:
        return {}
    chosen = sorted(range(store.plan.blocks) if blocks is None else blocks)
    with stages.stage("bytes", len(chosen), "blocks"):
        tasks = [(store.url, index) for index in chosen]
        return dict(zip(chosen, stages.gather(executor, "bytes", damage_of_stored_block, tasks), strict=True))


def _at_fault(damage: Mapping[int, ShardDamage]) -> tuple[int, ...]:
    return tuple(index for index, part in damage.items() if part)


def damage_of_stored_block(url: str, index: int) -> ShardDamage:
    """Compare the bytes of one block with its receipt; a work item."""
    return damage_of_block(MechanismStore.open(url), index)


def _audited_epsilon(subject: Subject, tally: Tally) -> float:
    """Return an ε, in 1/km, that no pair exceeds: the steepest rounded outward, or the limit if less."""
    steepest = max(tally.worst, default=None)
    if steepest is not None and math.isinf(steepest.slope):
        return math.inf
    epsilon = tally.slope_above
    if subject.promise.distortion is not None:
        epsilon = math.nextafter(epsilon * (1 + subject.promise.distortion), math.inf)
    proved = not (tally.violations or tally.undecided or tally.hidden)
    return min(epsilon, subject.promise.epsilon_per_km) if proved else epsilon


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
        Where work items run, and who observes them.
    """
    started = time.perf_counter()
    source, promise = subject.source, subject.promise
    seed = secrets.randbits(_RANDOM_BITS) if sampling.random_seed is None else sampling.random_seed
    design = sampled.design_of(source, sampling.design, promise.metric_p)
    strata = [sampled.StratumTally() for _ in design.strata]
    stopped = _ALL_DRAWN
    for wave in _waves(sampling, source.outputs, executor.workers):
        tasks = [(source, promise, sampling.design, seed, batch, pairs) for batch, pairs in wave]
        with stages.stage("audit", len(tasks)):
            for _, found in stages.run(executor, "audit", sampled.sample_batch, tasks):
                for stratum, tally in zip(strata, found, strict=True):
                    stratum.add(tally)
                if sampling.stop_at_first and any(stratum.violations for stratum in strata):
                    stopped = _AT_FIRST
                    break
        if stopped == _ALL_DRAWN and sampling.seconds and time.perf_counter() - started >= sampling.seconds:
            stopped = _IN_TIME
        if stopped != _ALL_DRAWN:
            break
    total = sampled.StratumTally()
    for stratum in strata:
        total.add(stratum)
    damage = _damage(subject.store, total.blocks, executor, stages)
    findings = merged(total.findings)
    ratio, means = sampled.estimate(strata, design.weights, source.outputs)
    # Neither a sample that ends with what it has seen is fair, nor one of which something is not decided.
    fair = stopped != _AT_FIRST and not total.undecided
    numbers, confidence = [stratum.pairs for stratum in strata], sampling.confidence
    interval = stratified_interval(means, numbers, design.weights, confidence) if fair else None
    if total.violations > total.unusable * source.outputs:
        verdict = subject.verdict_on_pairs([each.worst for each in strata if each.worst is not None])
    else:
        passed = result.WITHIN_TOLERANCE if total.hidden else result.NO_VIOLATION_FOUND
        verdict = verdict_on_rows(findings) or (result.NOT_PROVED if total.undecided else passed)
    worst = subject.describe(total.worst)
    in_a_batch = min(total.pairs, sampled.batch_pairs(source.outputs))
    details = {
        "pairs": total.pairs,
        "design": sampling.design,
        "random_seed": seed,
        "confidence": confidence,
        "violation_ratio_interval": None if interval is None else list(interval),
        "stopped": stopped,
        "hidden_violations": total.hidden,
        "undecided": total.undecided,
        "ratio_edges": list(sampled.RATIO_EDGES),
        "strata": [
            {
                "lower_km": stratum.lower_km,
                "upper_km": stratum.upper_km,
                "pairs": stratum.pairs,
                "pairs_drawn": tally.pairs,
                "violations": tally.violations,
                "violation_ratio": mean,
                "violation_ratio_interval": list(mean_interval(mean, tally.pairs, confidence))
                if fair
                else None,
                "epsilon_audited": json_number(tally.worst.slope) if tally.worst else None,
                "triples_by_ratio": tally.histogram,
            }
            for stratum, tally, mean in zip(design.strata, strata, means, strict=True)
        ],
        "peak_bytes_per_task": sampled.peak_bytes(source, sampling.design, in_a_batch),
    }
    return _report(
        subject,
        result.SAMPLED,
        verdict,
        steepness(worst, "distance_km") if worst else 0.0,
        started,
        details,
        triples_checked=total.pairs * source.outputs,
        violations=total.violations,
        violation_ratio=ratio,
        recomputed=total.recomputed,
        worst=worst,
        findings=findings,
        damage=damage.values(),
        blocks_at_fault=_at_fault(damage),
    )


def _waves(sampling: Sampling, outputs: int, workers: int) -> Iterator[list[tuple[int, int]]]:
    """Yield portions of batches (number, pairs); their sizes do not depend on how many workers there are."""
    most = sampled.batch_pairs(outputs)
    wanted: float = DEFAULT_PAIRS if sampling.seconds is None else math.inf
    if sampling.pairs is not None:
        wanted = sampling.pairs
    # All at once, but for what cannot be held, and where a clock has to be looked at.
    count = _LARGEST_WAVE if sampling.seconds is None else _BATCHES_A_WAVE * max(workers, 1)
    first = 0
    while first * most < wanted:
        numbers = (number for number in range(first, first + count) if number * most < wanted)
        yield [(number, int(min(most, wanted - number * most))) for number in numbers]
        first += count


# --- shared rows ----------------------------------------------------------------------------------


def check_boundary(
    subject: Subject, blocks: tuple[int, int] | None, executor: Executor, stages: Stages
) -> AuditReport:
    """Make the rows that blocks share again from the seed, and compare them with what is stored (A2).

    Before that, the stored bytes of all blocks that are read are compared with their receipts.

    Parameters
    ----------
    subject
        A store.
    blocks
        Half-open range of blocks; default: all.
    executor, stages
        Where work items run, and who observes them.

    Raises
    ------
    SpecError
        If the subject is no store, or blocks are not in its plan.
    """
    started = time.perf_counter()
    store = subject.store
    if store is None:
        raise SpecError("--method: only mechanism stores, with their receipts, have blocks with a boundary")
    first, last = (0, store.plan.blocks) if blocks is None else blocks
    if not 0 <= first < last <= store.plan.blocks:
        raise SpecError(f"--blocks: there are no blocks {first}:{last}; its blocks are 0:{store.plan.blocks}")
    read = {owner.index for index in range(first, last) for owner in owners(store.plan, store.plan[index])}
    damage = _damage(store, read, executor, stages)
    tasks = [(store.url, index) for index in range(first, last)]
    with stages.stage("boundary", len(tasks)):
        found = stages.gather(executor, "boundary", check_shared_rows, tasks)
    checked = sum(part.rows_checked for part in found)
    mismatches = sorted({mismatch for part in found for mismatch in part.mismatches})
    details = {
        "blocks_checked": [first, last],
        "boundary_rows_checked": checked,
        "boundary_mismatches": [
            {"record": list(mismatch.record), "block": mismatch.block, "said_by": mismatch.said_by}
            for mismatch in mismatches
        ],
    }
    return _report(
        subject,
        result.BOUNDARY,
        result.ROWS_DIFFER if mismatches else result.ROWS_AGREE,
        math.nan,
        started,
        details,
        triples_checked=0,
        violations=len(mismatches),
        violation_ratio=len(mismatches) / checked,
        recomputed=0,
        worst={},
        damage=damage.values(),
        blocks_at_fault=tuple(sorted({mismatch.block for mismatch in mismatches} | {*_at_fault(damage)})),
    )


# --- what is reported -----------------------------------------------------------------------------


def _report(
    subject: Subject,
    method: str,
    verdict: str,
    epsilon: float,
    started: float,
    details: dict[str, Any],
    *,
    damage: Iterable[ShardDamage] = (),
    certified: float | None = None,
    **found: Any,
) -> AuditReport:
    """Return a report about a subject, with what has changed since it was written.

    Parameters
    ----------
    subject
        What was audited.
    method, verdict, epsilon, details, found
        Fields of the report. What has changed takes the verdict's place where nothing else is wrong.
    started
        When the audit was begun, by :func:`time.perf_counter`.
    damage
        What is wrong with the shards of each block that was compared with its receipt.
    certified
        What a store's certificate has just been found to be, if it has.
    """
    damage = list(damage)
    of_city = any(finding.kind == NOT_FINITE for finding in found.get("findings", ()))
    wrong = _changed(subject, damage, certified, tiles=of_city)
    if wrong and result.VERDICTS[verdict][1] is not False:
        verdict = result.CHANGED
    facts: dict[str, Any] = {"planar": subject.promised.distortion is None, "notes": list(subject.notes)}
    if (store := subject.store) is not None:  # of which bytes of which job all this is said
        content = store.content_digest(store.read_receipts())
        facts |= {"fingerprint": store.fingerprint, "content_sha256": content}
    facts["receipts_compared"] = None if store is None else len(damage)
    if subject.signed_by is not None:
        facts["signed_by"] = subject.signed_by
    return AuditReport(
        subject=subject.name,
        method=method,
        verdict=verdict,
        epsilon_per_km=subject.promised.epsilon_per_km,
        epsilon_planar_per_km=subject.promise.kept_per_km,
        limit_per_km=subject.promise.epsilon_per_km,
        epsilon=epsilon,
        metric_p=subject.promise.metric_p,
        tolerance=subject.promise.tolerance,
        records=subject.source.records,
        outputs=subject.source.outputs,
        seconds=time.perf_counter() - started,
        details={**details, **facts},
        **asdict(wrong),
        **found,
    )


def _changed(
    subject: Subject, blocks: Sequence[ShardDamage], certified: float | None, *, tiles: bool
) -> ShardDamage:
    """Return what is wrong with a store or city besides its rows; of an array, nothing is known."""
    store, city = subject.store, subject.city
    whole = store or city
    if whole is None:
        return ShardDamage()
    # The certificate for another metric is no claim of theirs.
    certified = certified if subject.promise.metric_p == whole.metric_p else None
    if city is not None:
        return ShardDamage((*false_claims(city, certified), *(damaged_tiles(city) if tiles else ())))
    assert store is not None  # one of both
    changed = inconsistencies(store, certified)
    if store.state in FINISHED and not is_problem_of(store):
        changed.append("problem_sha256")
    all_of_it = ShardDamage.joined([*blocks, ShardDamage(tuple(changed), extra=extra_shards(store))])
    return ShardDamage(**{kind: tuple(dict.fromkeys(keys)) for kind, keys in asdict(all_of_it).items()})
