"""What a report says of losses, of attackers, and of how much of ε is used, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.evaluation.words import attack_rows
from mdpext_dask.reports.page import words
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import TABLE

# Parts of the promise that ratios are counted in, and of a share that shades stand for.
_SHADES = 10
_LEAST_SHARE = 5e-5
_NORMAL_95 = 1.96
_LOSSES = {
    "travel": "mean error in road distance to the places that people travel to",
    "euclidean": "straight-line distance from the true place to the reported one",
}


@dataclass(frozen=True)
class Findings:
    """What was found out about a store for its report.

    Parameters
    ----------
    certificate
        The certificate, computed anew.
    sampled
        A sampled audit, for how much of the budget pairs use; None if rows cannot be compared.
    evaluation
        What ``evaluate`` says; None if losses cannot be worked out.
    unevaluated
        Why there is no evaluation.
    expected_km
        ℓ(x) of all records, in km; None without an evaluation, or of too many.
    others
        What other mechanisms lose.
    """

    certificate: AuditReport
    sampled: AuditReport | None
    evaluation: dict[str, Any] | None
    unevaluated: str
    expected_km: NDArray[np.float64] | None
    others: Sequence[Mapping[str, Any]]


def costs_of(store: MechanismStore, found: Findings) -> dict[str, Any]:
    """Return what a report says of costs.

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
        "bars": [] if result is None else _bars(result, found.others, store),
        "bound": "" if result is None else words.bound_in_words(result),
        "quantiles": [] if result is None else _quantiles(result),
        "bands": [] if result is None else _bands(result["by_distance"]),
        "adversary": [] if result is None else attack_rows(result["adversary"]),
        "ratios": None if found.sampled is None else _ratios(found.sampled),
        "loss_kind": _LOSSES.get(str(store.problem_attributes.get("loss")), "as the loss file says"),
    }


def _bars(
    result: Mapping[str, Any], others: Sequence[Mapping[str, Any]], store: MechanismStore
) -> list[dict[str, Any]]:
    """Return losses to set beside each other, in km, least first."""
    bars: list[dict[str, Any]] = [
        {"name": "this mechanism", "loss_km": result["loss_km"], "error_km": None, "kind": "own"}
    ]
    bars += [{**other, "kind": "other"} for other in others]
    remapped = objects.get_json(store.objects, TABLE)
    hashes = store.attributes.get("chunk_hashes") or {}
    if isinstance(remapped, Mapping) and remapped.get("content_sha256") == hashes.get("digest"):
        own = {"name": "this mechanism, remapped", "loss_km": float(remapped["remapped_loss_km"])}
        bars.append({**own, "error_km": None, "kind": "own"})
    if result["lower_bound_km"] is not None:
        bars.append(
            {
                "name": "no mechanism can lose less (certified)",
                "loss_km": result["lower_bound_certified_km"],
                "error_km": None,
                "kind": "bound",
            }
        )
        if words.estimate_tells(result):
            bars.append(
                {
                    "name": "all lattices together would show (estimate)",
                    "loss_km": result["lower_bound_km"],
                    "error_km": _NORMAL_95 * result["lower_bound_standard_error_km"],
                    "kind": "bound",
                }
            )
    most = max(bar["loss_km"] + (bar["error_km"] or 0) for bar in bars) or 1.0
    shown = [
        {**bar, "share": bar["loss_km"] / most, "error": (bar["error_km"] or 0.0) / most} for bar in bars
    ]
    return sorted(shown, key=lambda bar: (float(bar["loss_km"]), str(bar["name"])))


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
    """Return how much of ε pairs use, by distance: shares of triples in tenths of the promise, and beyond."""
    rows = []
    for stratum in sampled.details["strata"]:
        if not stratum["pairs_drawn"]:
            continue
        counts = np.array(stratum["triples_by_ratio"], dtype=np.float64)
        tenths = np.append(counts[:-1].reshape(_SHADES, -1).sum(axis=1), counts[-1])
        shares = tenths / (stratum["pairs_drawn"] * sampled.outputs)
        shades = np.ceil(shares * (_SHADES - 1)).astype(int)
        largest = stratum["epsilon_audited"]
        rows.append(
            {
                "lower_km": stratum["lower_km"],
                "upper_km": stratum["upper_km"],
                "pairs": stratum["pairs"],
                "drawn": stratum["pairs_drawn"],
                "largest": None if largest is None else float(largest) / sampled.limit_per_km,
                "cells": [
                    {"share": share, "shade": shade}
                    for share, shade in zip(shares.tolist(), shades.tolist(), strict=True)
                ],
            }
        )
    total = sum(row["pairs"] for row in rows) or 1
    overall = [
        sum(row["pairs"] * row["cells"][k]["share"] for row in rows) / total for k in range(_SHADES + 1)
    ]
    most = max(overall) or 1.0
    names = [f"{10 * k} to {10 * k + 10}%" for k in range(_SHADES)] + ["over 100%"]
    return {
        "pairs": sampled.details["pairs"],
        "all_pairs": total,
        "triples": sampled.triples_checked,
        "random_seed": sampled.details["random_seed"],
        "rows": rows,
        "overall": [
            {"name": name, "share": share, "bar": share / most}
            for name, share in zip(names, overall, strict=True)
        ],
    }
