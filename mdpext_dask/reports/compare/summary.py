"""Answers summarised to one row for every method."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from mdpext_dask.job.spec import json_number
from mdpext_dask.reports.compare.answers import BOUND, Case, read_answer
from mdpext_dask.reports.compare.methods import entry_of

# Of a normal distribution: two-sided, 95 %.
NORMAL_95 = 1.96


@dataclass(frozen=True)
class CaseSummary:
    """Results of one case.

    Parameters
    ----------
    name
        Name of the case.
    problem
        Size and lower bound, plain JSON values.
    rows
        One for every method, plain JSON values, by loss; methods without a result come last.
    answers
        All single answers, with case, method and repetition.
    """

    name: str
    problem: dict[str, Any]
    rows: list[dict[str, Any]]
    answers: list[dict[str, Any]]


def summarise_case(
    answers: Path, case: Case, facts: dict[str, object], repeats: int, *, with_bound: bool
) -> CaseSummary:
    """Summarise all repetitions of a case.

    Parameters
    ----------
    answers
        The folder of answers.
    case
        The case.
    facts
        Size of its problem.
    repeats
        Number of repetitions there should be.
    with_bound
        Whether there is a lower bound.
    """
    told = {name: _answers(answers, case, name, repeats) for name in case.methods}
    bounds = _answers(answers, case, BOUND, repeats) if with_bound else []
    by_repetition = {one["repetition"]: one["lower_bound_km"] for one in bounds if one["completed"]}
    default = {one["repetition"]: one["loss_km"] for one in told.get(case.default, []) if one["completed"]}
    rows = [
        {
            "case": case.name,
            "epsilon_per_km": case.spec.privacy.epsilon_per_km,
            "default": name == case.default,
            **_row(name, told[name], repeats, by_repetition, default),
        }
        for name in case.methods
    ]
    rows.sort(key=lambda row: math.inf if row["loss_km"] is None else row["loss_km"])
    flat = [
        {"case": case.name, "method": m, **one} for m, of in [(BOUND, bounds), *told.items()] for one in of
    ]
    return CaseSummary(case.name, {**facts, **_bound(bounds, by_repetition)}, rows, flat)


def _answers(folder: Path, case: Case, method: str, repeats: int) -> list[dict[str, Any]]:
    """Return the answers of all repetitions that are there, in order."""
    found = ((r, read_answer(case.answer_path(folder, method, r))) for r in range(repeats))
    return [{"repetition": repetition, **answer} for repetition, answer in found if answer is not None]


def _bound(bounds: list[dict[str, Any]], certified: dict[int, float]) -> dict[str, Any]:
    """Return the lower bound: means over repetitions."""
    whole = [one for one in bounds if one["completed"]]
    reasons = [one["reason"] for one in bounds if not one["completed"]]
    return {
        "lower_bound_km": mean(certified.values()) if certified else None,
        "lower_bound_standard_error": _standard_error(list(certified.values())),
        "lower_bound_expected_km": mean(one["expected_km"] for one in whole) if whole else None,
        "lower_bound_repeats": len(certified),
        "lower_bound_stride": sorted({one["stride"] for one in whole}),
        "lower_bound_reason": reasons[0] if reasons else None,
    }


def _row(
    name: str, told: list[dict[str, Any]], repeats: int, bounds: dict[int, float], default: dict[int, float]
) -> dict[str, Any]:
    entry = entry_of(name)
    done = [one for one in told if one["completed"]]
    failed = [one for one in told if not one["completed"]]
    losses, verdicts = [one["loss_km"] for one in done], [one["verdict"] for one in done]
    audited = [float(one["epsilon_audited"]) for one in done if one["epsilon_audited"] is not None]
    ratios = [one["violation_ratio"] for one in done if one["violation_ratio"] is not None]
    # The bound is one for these outputs; what reports other places has no rows over them to audit.
    bounded = [one for one in done if one["repetition"] in bounds and one["epsilon_audited"] is not None]
    gaps = [one["loss_km"] / bounds[one["repetition"]] - 1 for one in bounded]
    pairs = [one["loss_km"] / default[one["repetition"]] for one in done if one["repetition"] in default]
    spread = _standard_error(losses)
    if spread is None and len(done) == 1:
        spread = done[0].get("sampled_standard_error_km")
    return {
        "method": name,
        "title": entry.title,
        "family": entry.family,
        "completed": len(done) == repeats,
        "loss_km": mean(losses) if losses else None,
        "loss_standard_error": spread,
        "seconds": mean(one["seconds"] for one in done) if done else None,
        # The worst repetition counts.
        "epsilon_audited": json_number(max(audited)) if audited else None,
        "violation_ratio": max(ratios) if ratios else None,
        # The first that does not hold.
        "verdict": ([v for v in verdicts if v != "holds"] or verdicts or [None])[0],
        "guarantee": done[0]["guarantee"] if done else None,
        "gap": mean(gaps) if gaps else None,
        "loss_to_default": mean(pairs) if pairs else None,
        "loss_to_default_standard_error": _standard_error(pairs),
        "repeats": len(done),
        "reason": _reason(failed, len(told), repeats),
        "note": done[0]["note"] if done else None,
    }


def _reason(failed: list[dict[str, Any]], told: int, repeats: int) -> str | None:
    if failed:
        share = "" if len(failed) == repeats else f"{len(failed)} of {repeats} repetitions: "
        return f"{share}{failed[0]['reason']}"
    return None if told == repeats else f"only {told} of {repeats} repetitions were made"


def _standard_error(values: list[float]) -> float | None:
    """Return s / √n, or None for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
