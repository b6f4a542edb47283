"""An audit's answer in words: one line, and a table for people."""

import math
from typing import Any

from mdpext_dask.auditors.findings import NOT_FINITE, Finding
from mdpext_dask.auditors.result import (
    BOUNDARY,
    CERTIFICATE,
    EXHAUSTIVE,
    HOLDS,
    NOT_PROVED,
    SAMPLED,
    VIOLATED,
    AuditReport,
)
from mdpext_dask.errors import GuaranteeViolation

# Shards and findings that are named; the rest is counted.
_NAMED = 3
_METHODS = {
    CERTIFICATE: "certificate: all pairs, proved cell by cell in one pass over the rows",
    EXHAUSTIVE: "exhaustive: every triple (x, x', y)",
    SAMPLED: "sampled: pairs of records drawn at random",
    BOUNDARY: "boundary: rows that blocks share, made again from the seed",
}


def sentence(report: AuditReport) -> str:
    """Return the outcome in one line."""
    details, promised, hidden = report.details, _promised(report), _hidden(report)
    if report.verdict == HOLDS and report.method == BOUNDARY:
        return f"holds: {details['boundary_rows_checked']:,} shared rows are those that the seed extends to"
    if report.verdict == HOLDS:
        proved = "certified at" if report.method == CERTIFICATE else "no pair is steeper than"
        where = " in the plane" if report.limit_per_km == report.epsilon_planar_per_km else ""
        return f"holds for all pairs: {proved} {report.epsilon:.6g}/km{where}, promised {promised}{hidden}"
    if report.holds:
        high, confidence = details["violation_ratio_interval"][1], details["confidence"]
        return (
            f"no violation found among {details['pairs']:,} pairs: with {confidence:.0%} confidence at most "
            f"{high:.2g} of all triples break the promise of {promised}; an estimate, not a proof{hidden}"
        )
    return "does not hold: " + "; ".join(_reasons(report)) + hidden


def violation(report: AuditReport) -> GuaranteeViolation:
    """Return the error that says so."""
    return GuaranteeViolation(sentence(report), worst=report.worst)


def table(report: AuditReport) -> list[tuple[str, str]]:
    """Return the report as labels and texts, most important first."""
    promise = (
        f"{_promised(report)}, p = {report.metric_p:g}; in the plane {report.epsilon_planar_per_km:.9g}/km"
    )
    rows = [
        ("verdict", sentence(report)),
        ("audited", f"{report.subject}: {report.records:,} records, {report.outputs:,} outputs"),
        ("method", _METHODS[report.method]),
        ("promise", promise),
    ]
    if report.method != BOUNDARY:
        rows += _found(report)
    if report.worst:
        rows.append(("worst", in_words(report.worst)))
    rows += [("rows", _in_rows(finding)) for finding in report.findings]
    for name, keys in (("changed", report.changed), ("missing", report.missing), ("extra", report.extra)):
        if keys:
            rows.append((name, _some(keys)))
    if report.blocks_at_fault:
        rows.append(("blocks at fault", _some(tuple(map(str, report.blocks_at_fault)))))
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


def _found(report: AuditReport) -> list[tuple[str, str]]:
    unit = "(cell, output)" if report.method == CERTIFICATE else "triples"
    rows = [
        (report.epsilon_name.replace("_", " "), f"{report.epsilon:.9g}/km, {_share(report)} of the limit"),
        ("triples", f"{report.triples_checked:,} covered"),
        ("violations", f"{report.violations:,} {unit}, {report.violation_ratio:.3g} of all"),
    ]
    sizes = [size for size in report.details.get("violation_sizes", ()) if size["violations"]]
    if sizes:
        by_size = (f"{size['violations']:,} by a factor of {size['at_least']:.10g} or more" for size in sizes)
        rows.append(("sizes", "log ratios exceed bounds: " + ", ".join(by_size)))
    if report.recomputed:
        rows.append(("near ties", f"{report.recomputed:,} decided beyond float64"))
    if report.details.get("violation_ratio_interval"):
        low, high = report.details["violation_ratio_interval"]
        confidence = report.details["confidence"]
        rows.append(("violation ratio", f"between {low:.3g} and {high:.3g} with {confidence:.0%} confidence"))
    if report.tolerance:
        rows.append(("tolerance", _hidden(report).removeprefix("; ")))
    return rows


def _reasons(report: AuditReport) -> list[str]:
    reasons = []
    for what, keys in (("changed since they were written", report.changed), ("missing", report.missing)):
        if keys:
            reasons.append(f"bytes {what}: {_some(keys)}")
    if report.extra:
        reasons.append(f"shards of no block: {_some(report.extra)}")
    if report.method == BOUNDARY and report.violations:
        reasons.append(f"{report.violations} of {report.details['boundary_rows_checked']} shared rows differ")
    reasons += [_in_rows(finding) for finding in report.findings if finding.refutes]
    if report.method == CERTIFICATE and not report.epsilon <= report.limit_per_km:
        reasons.append(f"certificate {report.epsilon:.6g}/km exceeds {report.limit_per_km:.6g}/km")
    elif report.verdict == VIOLATED and report.method != BOUNDARY:
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
    if report.worst:
        worst = report.worst
        ratio = worst["log_ratio"] if isinstance(worst["log_ratio"], str) else f"{worst['log_ratio']:.9g}"
        reasons.append(
            f"worst triple: output {worst['output']} between records {worst['record']} and "
            f"{worst['record_prime']}, log ratio {ratio} against bound {worst['bound']:.9g}"
            + _whether_kept(report)
        )
    undecided = report.details.get("undecided", 0)
    if undecided:
        reasons.append(f"{undecided:,} triples could not be decided")
    return reasons


def _whether_kept(report: AuditReport) -> str:
    if report.verdict == NOT_PROVED and report.method == CERTIFICATE:
        return " (kept by this pair, but not proved for all of its cell)"
    ratio = report.worst["log_ratio"]
    return " (kept)" if isinstance(ratio, float) and ratio <= report.worst["bound"] else ""


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


def _share(report: AuditReport) -> str:
    return f"{report.epsilon / report.limit_per_km:.6g}"


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
