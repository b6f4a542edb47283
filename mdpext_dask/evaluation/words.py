"""What a mechanism costs, in words: a table for people."""

from typing import Any

from mdpext_dask.evaluation.attackers.words import attack_rows

# Bands with less than this share of reports are told together.
_LEAST_SHARE = 5e-4
# Of a normal distribution: two-sided, 95 %.
_NORMAL_95 = 1.96


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the answer of :func:`~mdpext_dask.evaluation.evaluate.evaluate` as texts, loss first."""
    of_record = _quantiles(result["loss_quantiles_km"], result["loss_quantiles_resolution_km"])
    of_report = _quantiles(result["report_loss_quantiles_km"], result["report_loss_resolution_km"])
    refused = [("refused", "its audit failed: what follows is about a mechanism that keeps no promise")]
    rows = [
        *(refused if result.get("state") == "refused" else []),
        ("expected loss", f"{result['loss_km']:.6g} km"),
        ("of a record", of_record),
        ("of one report", of_report),
        ("distance", f"{result['distance_km']:.6g} km expected from record to report"),
    ]
    rows += _bands(result["by_distance"])
    rows.append(("records", f"{result['records_with_prior']:,} with a prior"))
    rows += _bound(result)
    rows += attack_rows(result["adversary"])
    return rows


def _quantiles(quantiles: dict[str, float], resolution_km: float) -> str:
    exact = "" if resolution_km == 0 else f" (up to {resolution_km:.2g} less)"
    parts = [f"{float(share):.0%} {value:.4g}" for share, value in quantiles.items()]
    return "quantiles " + ", ".join(parts) + " km" + exact


def _bands(bands: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rows, rest = [], 0.0
    for band in bands:
        if band["probability"] < _LEAST_SHARE:
            rest += band["probability"]
            continue
        text = f"{band['probability']:.1%} of reports, which lose {band['loss_km']:.4g} km on average"
        rows.append((f"{band['from_km']:g} to {band['to_km']:g} km", text))
    return [*rows, ("elsewhere", f"{rest:.2g} of reports")] if rest else rows


def _bound(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lower bound, if there is one, and how far above it the loss is."""
    if result["lower_bound_km"] is None:
        return []
    sort, above = "", ""
    if not result["lower_bound_certified"]:
        half = _NORMAL_95 * result["lower_bound_standard_error_km"]
        sort = (
            f" (± {half:.2g}, estimated from {result['offsets_used']} of {result['offsets_total']} lattices; "
            f"certified: {result['lower_bound_certified_km']:.6g} km)"
        )
    if result["gap"] is not None:
        above = f"; this one loses {result['gap']:.1%} more"
    return [("no mechanism", f"loses less than {result['lower_bound_km']:.6g} km{sort}{above}")]
