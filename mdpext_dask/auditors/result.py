"""What an audit answers, as values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from mdpext_dask.auditors.exact import log_ratio, probability_ratio
from mdpext_dask.auditors.findings import Finding
from mdpext_dask.auditors.pairs.compare import Triple
from mdpext_dask.auditors.promise import Promise, ground_distance_km
from mdpext_dask.auditors.source import Source
from mdpext_dask.errors import StoreError, first_line
from mdpext_dask.extend.record_metrics import PlanarMetric
from mdpext_dask.job.spec import json_number
from mdpext_dask.problem.notebook_card import card

CERTIFICATE, EXHAUSTIVE, SAMPLED, BOUNDARY = METHODS = ("certificate", "exhaustive", "sampled", "boundary")
# Verdicts. Only the first two are proofs; what is not proved may still hold.
HOLDS, VIOLATED = "holds", "violated"
NOT_PROVED, NO_VIOLATION_FOUND = "not proved", "no violation found"
CHANGED, NO_MECHANISM = "changed since it was written", "not a mechanism"
# What ε is called: certified, or audited over pairs themselves.
_EPSILON = {
    CERTIFICATE: "epsilon_certified",
    **dict.fromkeys((EXHAUSTIVE, SAMPLED, BOUNDARY), "epsilon_audited"),
}
# Of the JSON form: lists, and what is there as it is.
_LISTS = ("changed", "missing", "extra", "blocks_at_fault")
_PLAIN = (
    "subject", "method", "verdict", "epsilon_per_km", "epsilon_planar_per_km", "limit_per_km", "tolerance",
    "records", "outputs", "triples_checked", "violations", "violation_ratio", "recomputed", "worst",
    "seconds",
)  # fmt: skip


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
        return _EPSILON[self.method]

    def _repr_html_(self) -> str:
        """Return what notebooks show: the verdict, ε against its limit, and the worst triple."""
        rows = [
            ("audited", f"{self.subject}: {self.records:,} records, {self.outputs:,} outputs"),
            ("method", self.method),
            ("promised", f"ε = {self.epsilon_per_km:g} per km, metric p = {self.metric_p:g}"),
        ]
        if self.method != BOUNDARY:
            found = self.epsilon_name.removeprefix("epsilon_")
            rows.append((found, f"ε = {self.epsilon:.6g} per km, limit {self.limit_per_km:.6g}"))
        rows.append(("violations", f"{self.violations:,}, {self.triples_checked:,} triples covered"))
        if self.worst:
            log_ratio, bound = self.worst["log_ratio"], self.worst["bound"]
            rows.append(
                (
                    "worst triple",
                    f"records {self.worst['record']} and {self.worst['record_prime']}, "
                    f"{self.worst['distance_km']:.4g} km apart, output {self.worst['output']}: "
                    f"log ratio {float(log_ratio):.6g} against a bound of {bound:.6g}",
                )
            )
        rows += [("rows", f"{finding.kind}: {finding.count:,}") for finding in self.findings]
        damage = {"changed": self.changed, "missing": self.missing, "belong to nothing": self.extra}
        rows += [(name, f"{len(keys):,} parts") for name, keys in damage.items() if keys]
        return card(f"Audit: {self.verdict}", rows)

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
            **{name: list(values[name]) for name in _LISTS},
            **self.details,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "AuditReport":
        """Return the report that :meth:`as_json` has made these values of.

        Raises
        ------
        StoreError
            If they are no report.
        """
        try:
            epsilon = math.nan if values["method"] == BOUNDARY else float(values[_EPSILON[values["method"]]])
            own: dict[str, Any] = {
                **{name: values[name] for name in _PLAIN},
                **{name: tuple(values[name]) for name in _LISTS},
                "epsilon": epsilon,
                "metric_p": float(values["metric_p"]),
                "findings": tuple(Finding.from_json(finding) for finding in values["findings"]),
            }
            known = {*own, "holds", *_EPSILON.values()}
            return cls(**own, details={name: value for name, value in values.items() if name not in known})
        except (LookupError, TypeError, ValueError) as error:
            raise StoreError(f"not an audit report: {first_line(error)}") from None


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
