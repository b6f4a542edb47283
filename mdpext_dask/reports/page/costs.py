"""Losses, attackers and the use of ε as plain values; losses of other mechanisms with the same promise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.noise import exponential_mechanism
from mdpext_dask.evaluation.baselines.problem import Problem, expected_loss
from mdpext_dask.evaluation.words import attack_rows
from mdpext_dask.reports.page import words
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import Remap

# Ratios are counted in tenths of the promise; shades stand for tenths of a share.
_SHADES = 10
_LEAST_SHARE = 5e-5
_NORMAL_95 = 1.96
# Numbers of a mechanism's rows beyond which making them takes longer than a report page should.
_MOST_NUMBERS = 200_000_000
_LOSSES = {
    "travel": "mean error in road distance to the places that people travel to",
    "euclidean": "straight-line distance from the true place to the reported one",
}


@dataclass(frozen=True)
class Findings:
    """What was found out about a store for its page.

    Parameters
    ----------
    certificate
        The certificate, computed anew.
    sampled
        A sampled audit, which shows how much of ε pairs use; None if rows cannot be compared.
    evaluation
        The result of ``evaluate``; None if losses cannot be computed.
    unevaluated
        Why there is no evaluation.
    expected_km
        ℓ(x) of all records, in km; None without an evaluation, or of too many.
    others
        Losses of other mechanisms, as bars.
    plain_km
        The same of the plain thing, see :func:`~mdpext_dask.evaluation.plain.plain_expected_km`; or None.
    remap
        The remap that the store is used with; None without one.
    """

    certificate: AuditReport
    sampled: AuditReport | None
    evaluation: dict[str, Any] | None
    unevaluated: str
    expected_km: NDArray[np.float64] | None
    others: Sequence[dict[str, Any]]
    plain_km: NDArray[np.float64] | None = None
    remap: Remap | None = None


def costs_of(store: MechanismStore, found: Findings) -> dict[str, Any]:
    """Return losses, attackers and ratios.

    Parameters
    ----------
    store
        The store.
    found
        What was found out about it.
    """
    result = found.evaluation
    return {
        "unevaluated": found.unevaluated,
        "evaluation": result,
        "bars": [] if result is None else _bars(result, found.others, found.remap),
        "remap": None if found.remap is None else _remap_facts(found.remap),
        "bound": "" if result is None else words.bound_in_words(result),
        "quantiles": [] if result is None else _quantiles(result),
        "bands": [] if result is None else _bands(result["by_distance"]),
        "adversary": [] if result is None else attack_rows(result["adversary"]),
        "ratios": None if found.sampled is None else _ratios(found.sampled),
        "loss_kind": _LOSSES.get(str(store.problem_attributes.get("loss")), "as the loss file says"),
    }


def _remap_facts(remap: Remap) -> dict[str, Any]:
    moved = int((remap.table != np.arange(len(remap.output))).sum())
    return {"loss_km": remap.remapped_loss_km, "moved": moved}


def _bars(
    result: Mapping[str, Any], others: Sequence[dict[str, Any]], remap: Remap | None
) -> list[dict[str, Any]]:
    """Return losses to compare, in km, the least first."""
    without = "" if remap is None else ", without its remap"
    bars = [_bar(f"this mechanism{without}", result["loss_km"], "own")]
    plain = result["plain_loss_km"], "other", result["plain_standard_error_km"]
    bars += [_bar("planar Laplace noise, nearest output", *plain), *others]
    if remap is not None:
        bars.append(_bar("this mechanism", remap.remapped_loss_km, "own"))
    if result["lower_bound_km"] is not None:
        certified = result["lower_bound_certified_km"]
        bars.append(_bar("no mechanism can lose less (certified)", certified, "bound"))
        if words.estimate_tells(result):
            error = _NORMAL_95 * result["lower_bound_standard_error_km"]
            name = "all lattices together would show (estimate)"
            bars.append(_bar(name, result["lower_bound_km"], "bound", error))
    most = max(bar["loss_km"] + (bar["error_km"] or 0) for bar in bars) or 1.0
    shown = [
        {**bar, "share": bar["loss_km"] / most, "error": (bar["error_km"] or 0.0) / most} for bar in bars
    ]
    return sorted(shown, key=lambda bar: (float(bar["loss_km"]), str(bar["name"])))


def _bar(name: str, loss_km: float, kind: str, error_km: float | None = None) -> dict[str, Any]:
    return {"name": name, "loss_km": loss_km, "error_km": error_km, "kind": kind}


def _quantiles(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    records, reports = result["loss_quantiles_km"], result["report_loss_quantiles_km"]
    return [
        {"share": float(share), "record_km": value, "report_km": reports.get(share)}
        for share, value in records.items()
    ]


def _bands(bands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    most = max((band["probability"] for band in bands), default=0.0) or 1.0
    return [
        {**band, "share": band["probability"] / most} for band in bands if band["probability"] >= _LEAST_SHARE
    ]


def _ratios(sampled: AuditReport) -> dict[str, Any]:
    """Return the share of triples in each tenth of the promise, and beyond it, by distance."""
    rows = []
    for stratum in sampled.details["strata"]:
        if not stratum["pairs_drawn"]:
            continue
        counts = np.array(stratum["triples_by_ratio"], dtype=np.float64)
        tenths = np.append(counts[:-1].reshape(_SHADES, -1).sum(axis=1), counts[-1])
        shares = tenths / (stratum["pairs_drawn"] * sampled.outputs)
        shades = np.ceil(shares * (_SHADES - 1)).astype(int)
        largest = stratum["epsilon_audited"]
        cells = [{"share": s, "shade": h} for s, h in zip(shares.tolist(), shades.tolist(), strict=True)]
        rows.append(
            {
                "lower_km": stratum["lower_km"],
                "upper_km": stratum["upper_km"],
                "pairs": stratum["pairs"],
                "largest": None if largest is None else float(largest) / sampled.limit_per_km,
                "cells": cells,
            }
        )
    total = sum(row["pairs"] for row in rows) or 1
    overall = [
        sum(row["pairs"] * row["cells"][k]["share"] for row in rows) / total for k in range(_SHADES + 1)
    ]
    most = max(overall) or 1.0
    names = [f"{10 * k} to {10 * k + 10}%" for k in range(_SHADES)] + ["over 100%"]
    used = zip(names, overall, strict=True)
    return {
        "pairs": sampled.details["pairs"],
        "all_pairs": total,
        "triples": sampled.triples_checked,
        "random_seed": sampled.details["random_seed"],
        "rows": rows,
        "overall": [{"name": name, "share": share, "bar": share / most} for name, share in used],
    }


# --- other mechanisms -----------------------------------------------------------------------------


def exponential_loss(problem: Problem) -> float | None:
    """Return UL of the exponential mechanism, in km, from all of its rows; None if they are too many.

    It is the one of :func:`mdpext_dask.evaluation.baselines.noise.exponential_mechanism`.
    """
    if problem.grid.records * problem.outputs > _MOST_NUMBERS:
        return None
    try:
        made = exponential_mechanism(problem, math.inf)
    except SolverError:
        return None
    assert made.rows is not None  # it reports outputs
    return expected_loss(problem, made.rows)


def others(problem: Problem) -> list[dict[str, Any]]:
    """Return the losses of other mechanisms, besides planar Laplace noise, as bars."""
    exponential = exponential_loss(problem)
    return [] if exponential is None else [_bar("exponential mechanism", exponential, "other")]
