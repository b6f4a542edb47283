"""What an audit answers, as values."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from mdpext_dask.audit.exact import log_ratio, probability_ratio
from mdpext_dask.audit.findings import Finding
from mdpext_dask.audit.pairs import Triple
from mdpext_dask.audit.promise import Promise, ground_distance_km
from mdpext_dask.audit.source import Source
from mdpext_dask.record_metrics import PlanarMetric
from mdpext_dask.spec import json_number

CERTIFICATE, EXHAUSTIVE, SAMPLED, BOUNDARY = METHODS = ("certificate", "exhaustive", "sampled", "boundary")
# Verdicts. Only the first two are proofs; what is not proved may still hold.
HOLDS, VIOLATED = "holds", "violated"
NOT_PROVED, NO_VIOLATION_FOUND = "not proved", "no violation found"
CHANGED, NO_MECHANISM = "changed since it was written", "not a mechanism"


@dataclass(frozen=True)
class AuditReport:
    """Outcome of an audit.

    Parameters
    ----------
    subject
        What was audited.
    method
        Which auditor.
    verdict
        ``"holds"``: proved for all pairs. ``"violated"``: a pair breaks the promise, as a fact. ``"not
        proved"``: the certificate fails, though no pair is known to break the promise, or something could not
        be decided. ``"no violation found"``: among the pairs that were drawn. ``"changed since it was
        written"``: bytes are not those of the receipts. ``"not a mechanism"``: rows are no distributions.
    epsilon_per_km
        The promise, in 1/km: of our stores, for distance on the ground.
    epsilon_planar_per_km
        The slope in the plane, in 1/km, up to which the promise is kept.
    limit_per_km
        What ε is compared with, in 1/km: the slope in the plane, or the promise itself where distances on the
        ground were measured.
    epsilon
        Smallest ε that was proved for all pairs (certificate, exhaustive), rounded outward, or the largest
        |log ratio| / distance that was seen (sampled), in 1/km; may be infinite. Not-a-number where rows are
        compared only (boundary).
    metric_p
        Exponent of the metric.
    tolerance
        What log ratios were allowed to exceed their bounds by.
    records, outputs
        How many.
    triples_checked
        Triples ({x, x'}, y), of unordered pairs, that the answer covers.
    violations, violation_ratio
        Triples that break the promise (certificate: (fine cell, output) above the limit; boundary: rows that
        differ), and their share of all that the answer covers.
    recomputed
        How many of those that were looked at float64 could not decide.
    worst
        The worst triple, as values.
    findings
        What is wrong with single rows.
    changed, missing, extra
        Keys of shards whose bytes are not those of their receipts (and names of other parts that do not
        belong to what was certified), that are not there, and that are there but belong to no block.
    blocks_at_fault
        Blocks above the limit or with changed bytes.
    details
        What only this auditor says, by JSON key.
    seconds
        How long it took.
    """

    subject: str
    method: str
    verdict: str
    epsilon_per_km: float
    epsilon_planar_per_km: float
    limit_per_km: float
    epsilon: float
    metric_p: float
    tolerance: float
    records: int
    outputs: int
    triples_checked: int
    violations: int
    violation_ratio: float
    recomputed: int
    worst: dict[str, Any]
    seconds: float
    findings: tuple[Finding, ...] = ()
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    blocks_at_fault: tuple[int, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the promise; only ``"holds"`` is a proof."""
        return self.verdict in (HOLDS, NO_VIOLATION_FOUND)

    @property
    def epsilon_name(self) -> str:
        """What ε is called: certified, or audited over pairs themselves."""
        return "epsilon_certified" if self.method == CERTIFICATE else "epsilon_audited"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinity as ``"inf"``."""
        values = {**self.__dict__, "holds": self.holds}
        del values["epsilon"], values["details"]
        # Comparing rows says nothing of ε.
        epsilon = {} if self.method == BOUNDARY else {self.epsilon_name: json_number(self.epsilon)}
        return {
            **values,
            **epsilon,
            "metric_p": json_number(self.metric_p),
            "findings": [finding.as_json() for finding in self.findings],
            **{name: list(values[name]) for name in ("changed", "missing", "extra", "blocks_at_fault")},
            **self.details,
        }


def verdict_on_rows(findings: tuple[Finding, ...]) -> str | None:
    """Return the verdict that single rows alone decide, if they do."""
    return NO_MECHANISM if any(finding.refutes for finding in findings) else None


def exact_ratio(source: Source, triple: Triple) -> Fraction | None:
    """Return M(y|x) / M(y|x') of a triple, also of rows that the sampler would refuse; None where it is none.

    Parameters
    ----------
    source
        The mechanism.
    triple
        x, x' and y.
    """
    first, second = source.rows(np.array([triple.record, triple.record_prime]))
    rows = np.stack([first, second])
    if not (np.isfinite(rows).all() and (rows >= 0).all() and rows.any(axis=1).all()):
        return None
    ours, theirs = float(first[triple.output]), float(second[triple.output])
    if ours and theirs:
        return probability_ratio(first, second, triple.output)
    return Fraction(1) if ours == theirs else None


def describe_triple(source: Source, promise: Promise, triple: Triple) -> dict[str, Any]:
    """Return a triple as values, its log ratio computed anew from the exact rows.

    Parameters
    ----------
    source
        The mechanism.
    promise
        What is audited.
    triple
        x, x' and y.
    """
    pair = np.array([triple.record, triple.record_prime])
    xy_km = source.xy_km(pair)
    ratio = exact_ratio(source, triple)
    size = math.inf if ratio is None else float(log_ratio(ratio)) if ratio != 1 else 0.0
    if promise.distortion is None:
        distance = PlanarMetric(dict(enumerate(xy_km.tolist())), promise.metric_p)(0, 1)
    else:
        distance = ground_distance_km(*source.places(pair))
    bound = promise.epsilon_per_km * distance
    return {
        "x": xy_km[0].tolist(),
        "x_prime": xy_km[1].tolist(),
        "record": source.name_of(triple.record),
        "record_prime": source.name_of(triple.record_prime),
        "output": triple.output,
        "log_ratio": json_number(size),
        "bound": bound,
        "distance_km": distance,
        **source.describe(pair, triple.output),
    }
