"""The result of an audit: as values, as JSON, in one line, and as a table."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mdpext_dask.auditors.findings import NOT_FINITE, Finding
from mdpext_dask.errors import StoreError
from mdpext_dask.job.spec import json_number
from mdpext_dask.problem.notebook_card import card

CERTIFICATE, EXHAUSTIVE, SAMPLED, BOUNDARY = METHODS = ("certificate", "exhaustive", "sampled", "boundary")
HOLDS, VIOLATED, NOT_PROVED, WITHIN_TOLERANCE = "holds", "violated", "not proved", "within tolerance"
NO_VIOLATION_FOUND, ROWS_AGREE, ROWS_DIFFER = "no violation found", "shared rows agree", "shared rows differ"
CHANGED, NO_MECHANISM = "changed since it was written", "not a mechanism"
# What each verdict means, and whether the whole promise holds then: proved, not so (broken, changed or not
# proved), or None where the method does not decide it. `docs/auditing.md` has the same table.
VERDICTS: dict[str, tuple[str, bool | None]] = {
    HOLDS: ("proved for all pairs, from bytes that match their receipts", True),
    NO_VIOLATION_FOUND: ("none of the pairs that were drawn breaks the promise", None),
    ROWS_AGREE: ("rows that blocks share are those that the seed extends to", None),
    WITHIN_TOLERANCE: ("log ratios exceed their bounds, by no more than the tolerance", False),
    VIOLATED: ("a pair breaks the promise, as a fact", False),
    NOT_PROVED: ("the proof fails, though no pair is known to break the promise", False),
    ROWS_DIFFER: ("rows that blocks share are not those that the seed extends to", False),
    CHANGED: ("bytes, receipts, attributes or certificate do not belong together", False),
    NO_MECHANISM: ("rows are no distributions", False),
}
# What ε is called in JSON: certified, or audited over pairs themselves.
_CERTIFIED, _AUDITED = "epsilon_certified", "epsilon_audited"
# Said of a triple.
_KEPT = " (kept)"
# In names of shards and tiles, and of no attribute.
_SHARD = re.compile("/c/|^tile ")
# Shards and findings that are named; the rest is counted.
_NAMED = 3
_METHODS = {
    CERTIFICATE: "certificate: all pairs, proved in one pass over the rows",
    EXHAUSTIVE: "exhaustive: every triple (x, x', y)",
    SAMPLED: "sampled: pairs of records drawn at random",
    BOUNDARY: "boundary: rows that blocks share, made again from the seed",
}


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
        A key of :data:`VERDICTS`, which has what it means.
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
    def holds(self) -> bool | None:
        """Whether the whole promise is proved; None where the method does not decide that."""
        return VERDICTS[self.verdict][1]

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the promise, and what the method claims was verified; no proof."""
        return self.holds is not False

    @property
    def epsilon_name(self) -> str:
        """What ε is called: certified, or audited over pairs themselves."""
        return _CERTIFIED if self.method == CERTIFICATE else _AUDITED

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        return card(f"Audit: {self.verdict}", table(self))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinity as ``"inf"``."""
        values = {**self.__dict__, "holds": self.holds}
        del values["epsilon"], values["details"]
        if self.method != BOUNDARY:  # comparing rows says nothing of ε
            values[self.epsilon_name] = json_number(self.epsilon)
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        findings = [finding.as_json() for finding in self.findings]
        return {**values, "metric_p": json_number(self.metric_p), "findings": findings, **self.details}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "AuditReport":
        """Return the report that :meth:`as_json` has made these values of.

        Raises
        ------
        StoreError
            If they are no report.
        """
        method = values.get("method")
        if method not in METHODS:
            raise StoreError(f"not an audit report: method is {method!r}")
        name = _CERTIFIED if method == CERTIFICATE else _AUDITED
        own = {each.name for each in dataclasses.fields(cls)}
        report = {key: value for key, value in values.items() if key in own}
        report["epsilon"] = math.nan if method == BOUNDARY else values.get(name)
        if method == BOUNDARY:  # older ones have the verdicts of proofs
            older = {HOLDS: ROWS_AGREE, VIOLATED: ROWS_DIFFER}
            report["verdict"] = older.get(values.get("verdict", ""), values.get("verdict"))
        if report.get("verdict") not in VERDICTS:
            raise StoreError(f"not an audit report: verdict is {report.get('verdict')!r}")
        report["details"] = {
            key: value for key, value in values.items() if key not in (*own, "holds", _CERTIFIED, _AUDITED)
        }
        try:
            return TypeAdapter(cls).validate_python(report)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StoreError(f"not an audit report: {where}: {first['msg']}") from None


def verdict_on_rows(findings: tuple[Finding, ...]) -> str | None:
    """Return the verdict that single rows alone decide, if they do."""
    return NO_MECHANISM if any(finding.refutes for finding in findings) else None


def steepness(worst: dict[str, Any], over: str) -> float:
    """Return the |log ratio| of a triple over its ``"bound"`` or ``"distance_km"``; over 0, ∞ or 0."""
    log_ratio, below = float(worst["log_ratio"]), float(worst[over])
    if below > 0:
        return log_ratio / below
    return math.inf if log_ratio > 0 else 0.0


def sentence(report: AuditReport) -> str:
    """Return the outcome in one line."""
    details, promised, hidden = report.details, _promised(report), _hidden(report)
    if report.verdict == ROWS_AGREE:
        return (
            f"shared rows agree: {details['boundary_rows_checked']:,} are those that the seed extends to; no "
            "proof of the promise"
        )
    if report.verdict == HOLDS:
        proved = "certified at" if report.method == CERTIFICATE else "no pair is steeper than"
        where = " in the plane" if report.limit_per_km == report.epsilon_planar_per_km else ""
        return f"holds for all pairs: {proved} {report.epsilon:.6g}/km{where}, promised {promised}{hidden}"
    if report.verdict == NO_VIOLATION_FOUND:
        high, confidence = details["violation_ratio_interval"][1], details["confidence"]
        return (
            f"no violation found among {details['pairs']:,} pairs: with {confidence:.0%} confidence at most "
            f"{high:.2g} of all triples break the promise of {promised}; an estimate, not a proof{hidden}"
        )
    within = " (but within tolerance)" if report.verdict == WITHIN_TOLERANCE else ""
    return f"does not hold{within}: " + "; ".join(_reasons(report)) + hidden


def table(report: AuditReport) -> list[tuple[str, str]]:
    """Return the report as labels and texts, most important first."""
    planar = f"{report.epsilon_planar_per_km:.9g}/km"
    rows = [
        ("verdict", sentence(report)),
        ("audited", f"{report.subject}: {report.records:,} records, {report.outputs:,} outputs"),
        ("method", _METHODS[report.method]),
        ("promise", f"{_promised(report)}, p = {report.metric_p:g}; in the plane {planar}"),
    ]
    if report.method != BOUNDARY:
        rows += _figures(report)
    if report.worst:
        rows.append(("worst", in_words(report.worst)))
    rows += [("rows", _in_rows(finding)) for finding in report.findings]
    at_fault = tuple(map(str, report.blocks_at_fault))
    damage = {"changed": report.changed, "missing": report.missing, "extra": report.extra}
    rows += [(name, _some(keys)) for name, keys in (damage | {"blocks at fault": at_fault}).items() if keys]
    rows += [("note", note) for note in report.details.get("notes", ())]
    rows.append(("time", f"{report.seconds:.2f} s"))
    return rows


def in_words(worst: dict[str, Any]) -> str:
    """Return a triple in words: where, how far apart, how much more likely, and how much is allowed."""
    bound, ratio = worst["bound"], worst["log_ratio"]
    output = f"output {worst['output']}"
    if "output_lonlat" in worst:
        output += f" at {_degrees(worst['output_lonlat'])}"
    apart = f"{_place(worst, 'x')} and {_place(worst, 'x_prime')} are {worst['distance_km']:.6g} km apart"
    if not isinstance(ratio, float):
        return f"{apart}; {output} is possible from one of them only, or one has a row that cannot be used"
    share = f", {ratio / bound:.6g} of it" if bound > 0 else ""
    return (
        f"{apart}; {output} is {_times(ratio)} as likely from one as from the other, where {_times(bound)} "
        f"is allowed (log ratio {ratio:.9g} against {bound:.9g}{share})"
    )


def _figures(report: AuditReport) -> list[tuple[str, str]]:
    unit = "(cell, output)" if report.method == CERTIFICATE else "triples"
    share = report.epsilon / report.limit_per_km
    rows = [
        (report.epsilon_name.replace("_", " "), f"{report.epsilon:.9g}/km, {share:.6g} of the limit"),
        ("triples", f"{report.triples_checked:,} covered"),
        ("violations", f"{report.violations:,} {unit}, {report.violation_ratio:.3g} of all"),
    ]
    if sizes := [size for size in report.details.get("violation_sizes", ()) if size["violations"]]:
        by_size = (f"{size['violations']:,} by a factor of {size['at_least']:.10g} or more" for size in sizes)
        rows.append(("sizes", "log ratios exceed bounds: " + ", ".join(by_size)))
    if (by_steps := report.details.get("epsilon_of_directions")) is not None:
        cells, radius = report.details["epsilon_of_cells"], report.details["radius_of_directions"]
        both = f"of cells {cells:.9g}/km, of steps by at most {radius} records {by_steps:.9g}/km"
        rows.append(("certificates", f"{both}; the smaller counts"))
    if isinstance(of_noise := report.details.get("epsilon_of_noise"), float):
        rows.append(("of noise", f"{of_noise:.9g}/km: rows are those of the store's tables of noise"))
    if report.recomputed:
        rows.append(("near ties", f"{report.recomputed:,} decided beyond float64"))
    if interval := report.details.get("violation_ratio_interval"):
        (low, high), confidence = interval, report.details["confidence"]
        rows.append(("violation ratio", f"between {low:.3g} and {high:.3g} with {confidence:.0%} confidence"))
    if report.tolerance:
        rows.append(("tolerance", _hidden(report).removeprefix("; ")))
    return rows


def _reasons(report: AuditReport) -> list[str]:
    shards = tuple(key for key in report.changed if _SHARD.search(key))
    damage = {
        "bytes changed since they were written": shards,
        "not what was certified": tuple(key for key in report.changed if key not in shards),
        "bytes missing": report.missing,
        "shards of no block": report.extra,
    }
    reasons = [f"{what}: {_some(keys)}" for what, keys in damage.items() if keys]
    if report.method == BOUNDARY and report.violations:
        reasons.append(f"{report.violations} of {report.details['boundary_rows_checked']} shared rows differ")
    reasons += [_in_rows(finding) for finding in report.findings if finding.refutes]
    if report.method == CERTIFICATE and not report.epsilon <= report.limit_per_km:
        reasons.append(f"certificate {report.epsilon:.6g}/km exceeds {report.limit_per_km:.6g}/km")
    elif report.verdict == WITHIN_TOLERANCE:
        reasons.append(f"up to {report.epsilon:.6g}/km against {report.limit_per_km:.6g}/km")
    elif report.verdict == VIOLATED:
        drawn = " of those drawn" if report.method == SAMPLED else ""
        reasons.append(
            f"{report.violations:,} triples{drawn} break the promise, up to {report.epsilon:.6g}/km against "
            f"{report.limit_per_km:.6g}/km"
        )
    elif report.verdict == NOT_PROVED and report.violations:
        reasons.append(
            f"{report.violations:,} triples exceed the plane's {report.limit_per_km:.9g}/km by less than it "
            "is charged for distortion; none is known to break the promise on the ground"
        )
    elif report.verdict == CHANGED and report.method in (CERTIFICATE, EXHAUSTIVE):
        reasons.append("what is there now breaks no bound, but is not what was certified")
    kept = _whether_kept(report) if report.worst else ""
    # One that keeps its bound is of use where bytes are others; of rows that cannot be used, none is.
    usable = report.verdict != NO_MECHANISM or isinstance(report.worst.get("log_ratio"), float)
    if (worst := report.worst) and (shards if kept == _KEPT else usable):
        ratio = worst["log_ratio"] if isinstance(worst["log_ratio"], str) else f"{worst['log_ratio']:.9g}"
        reasons.append(
            f"worst triple: output {worst['output']} between records {worst['record']} and "
            f"{worst['record_prime']}, log ratio {ratio} against bound {worst['bound']:.9g}" + kept
        )
    if undecided := report.details.get("undecided", 0):
        reasons.append(f"{undecided:,} triples could not be decided")
    return reasons


def _whether_kept(report: AuditReport) -> str:
    if report.verdict == NOT_PROVED and report.method == CERTIFICATE:
        return " (kept by this pair, but not proved for all of its cell)"
    ratio = report.worst["log_ratio"]
    return _KEPT if isinstance(ratio, float) and ratio <= report.worst["bound"] else ""


def _in_rows(finding: Finding) -> str:
    extreme = "" if finding.kind == NOT_FINITE else f", the worst {finding.extreme:.9g}"
    return f"{finding.kind}: {finding.count:,}, first in record {finding.first_record}{extreme}"


def _hidden(report: AuditReport) -> str:
    if not report.tolerance:
        return ""
    hidden = report.details.get("hidden_violations", 0)
    return f"; a tolerance of {report.tolerance:g} in log ratios hides {hidden:,} violations"


def _promised(report: AuditReport) -> str:
    return f"{report.epsilon_per_km:g}/km" + ("" if report.details.get("planar") else " on the ground")


def _place(worst: dict[str, Any], name: str) -> str:
    x, y = worst[name]
    lonlat = worst.get(f"{name}_lonlat")
    at = f" at {_degrees(lonlat)}" if lonlat else f" at x {x:.6g}, y {y:.6g} km"
    record = "record" if name == "x" else "record_prime"
    return f"record {worst[record]}{at}"


def _degrees(lonlat: list[float]) -> str:
    return f"{lonlat[1]:.6f}, {lonlat[0]:.6f} (lat, lon)"


def _times(log: float) -> str:
    return f"{math.exp(log):.6g} times" if log < 700 else f"e^{log:.6g} times"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
