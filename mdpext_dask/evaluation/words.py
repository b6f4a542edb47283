"""What a mechanism costs and what attackers learn, in words: rows of a table for people."""

import math
from collections.abc import Mapping
from typing import Any

from mdpext_dask.job.sections import NOISE, WINDOWS

Row = tuple[str, str]
# The label of what speaks against a store.
LOSES = "loses"
# Bands with less than this share of reports are summed up in one row.
_LEAST_SHARE = 5e-4
# Of a normal distribution: two-sided, 95 %.
NORMAL_95 = 1.96
# What is expected, by the kind of the loss.
_ERRORS = {
    "travel": "expected in road distance", "euclidean": "expected between place and report",
    "file": "expected, by the table of the loss",
}  # fmt: skip
# The budget that methods without a seed program go with.
_SEARCHED = "certified"
# The number of releases of one place that is told of, if it was measured.
_TOLD_RELEASES = 10
# Districts that are listed in full; of more, the extremes.
_MOST_LISTED = 16


def metres(km: float) -> str:
    """Return a length or a loss as people say it: ``287 m``, ``1,264 m``, ``0.24 m``."""
    return f"{1000 * km:,.0f} m" if km >= 0.01 else f"{1000 * km:.2g} m"


def headline(facts: Mapping[str, Any]) -> list[Row]:
    """Return what a store loses, what the plain thing loses, and what nothing can lose less than.

    Parameters
    ----------
    facts
        `loss_km` and, where they are known, `loss_kind`, `plain_loss_km`, `plain_standard_error_km`,
        `over_plain`, `plain_advice` and `lower_bound_certified_km`: what :func:`~mdpext_dask.evaluation.\
evaluate.evaluate` returns, or the summary of a store.
    """
    rows = [("error", f"{metres(facts['loss_km'])} {_ERRORS.get(facts.get('loss_kind') or '', 'expected')}")]
    plain_km, over = facts.get("plain_loss_km"), facts.get("over_plain")
    if plain_km is not None:
        than = "" if over is None else f"; this errs {abs(over):.1%} {'more' if over > 0 else 'less'}"
        rows.append(("plain", f"{metres(plain_km)} with planar noise at the nearest output{than}"))
    if facts.get("plain_advice") is not None:
        rows.append((LOSES, f"to the plain thing: set {facts['plain_advice']}, which does not"))
    bound_km = facts.get("lower_bound_certified_km")
    if bound_km is None:
        return [*rows, ("bound", "not known yet: mdpext evaluate computes it")]
    gap = facts["loss_km"] / bound_km - 1 if bound_km > 0 else math.inf
    above = f"; this errs {gap:.0%} more" if gap <= 1 else " (weak: more --bound-seconds)"
    return [*rows, ("bound", f"{metres(bound_km)}: no mechanism that keeps ε errs less{above}")]


def plain_advice(method: str, budget: str, loss_km: float, plain_km: float, half_km: float) -> str | None:
    """Return what to set in the job of a store that loses more than the plain thing; None if nothing helps.

    Parameters
    ----------
    method, budget
        Those of the store.
    loss_km, plain_km
        What it and the plain thing lose, in km.
    half_km
        Half the interval in which the latter lies, in km.
    """
    # Noise sends each cell to the best report, which is never worse; windows improve it.
    if loss_km - plain_km <= half_km or method in (NOISE, WINDOWS):
        return None
    seedless = "" if budget == _SEARCHED else f' and privacy.budget = "{_SEARCHED}"'
    return f'extension.method = "{NOISE}"{seedless}'


def highlights(result: dict[str, Any]) -> list[Row]:
    """Return the few figures of an evaluation that everybody should see; :func:`table` has all."""
    rows = headline(result)
    if result.get("remapped_loss_km") is not None:
        rows.append(("remap", f"{metres(result['remapped_loss_km'])} with it; the rest is without"))
    likely = result["report_loss_quantiles_km"].get("0.95")
    if likely is not None:
        rows.append(("reports", f"95 % of them err by at most {metres(likely)}"))
    rows.append(("distance", f"{metres(result['distance_km'])} expected from a place to its report"))
    found = result["adversary"]
    if found is None:
        return rows
    error, before = metres(found["inference_error_km"]), metres(found["prior_inference_error_km"])
    once, guessed = f"{found['vulnerability']:.2g}", f"{found['prior_vulnerability']:.2g}"
    rows += [
        ("attacker", f"off by {error} on average; {before} without a report"),
        ("in one try", f"guesses the record with probability {once}; {guessed} without a report"),
    ]
    for entry in (found["releases"] or {}).get("curve", ()):
        if entry["releases"] == _TOLD_RELEASES and not entry["exact"]:
            off = metres(entry["inference_error_km"])
            rows.append((f"{_TOLD_RELEASES} reports", f"of one place: off by {off}; sticky ones stay at one"))
    worst = found["worst_record"]
    if worst is not None:
        place = f"x {worst['x_km']:.3f}, y {worst['y_km']:.3f} km"
        if worst["lon"] is not None:
            place = f"{worst['lat']:.5f}, {worst['lon']:.5f} (lat, lon)"
        rows.append(("worst", f"{metres(worst['loss_km'])} expected at {place}"))
    return rows


def table(result: dict[str, Any]) -> list[Row]:
    """Return the answer of :func:`~mdpext_dask.evaluation.evaluate.evaluate` as texts, loss first."""
    of_record = _quantiles(result["loss_quantiles_km"], result["loss_quantiles_resolution_km"])
    of_report = _quantiles(result["report_loss_quantiles_km"], result["report_loss_resolution_km"])
    refused = [("refused", "its audit failed: what follows is about a mechanism that keeps no promise")]
    return [
        *(refused if result.get("state") == "refused" else []),
        ("expected loss", f"{result['loss_km']:.6g} km"),
        *_remapped(result.get("remapped_loss_km")),
        ("beside it", result["plain_in_words"]),
        ("of a record", of_record),
        ("of one report", of_report),
        ("distance", f"{result['distance_km']:.6g} km expected from record to report"),
        *_bands(result["by_distance"]),
        ("records", f"{result['records_with_prior']:,} with a prior"),
        *_bound(result),
        *attack_rows(result["adversary"]),
    ]


def _remapped(loss_km: float | None) -> list[Row]:
    if loss_km is None:
        return []
    return [("with its remap", f"{loss_km:.6g} km, which its users lose; what follows is without it")]


def _quantiles(quantiles: dict[str, float], resolution_km: float) -> str:
    exact = "" if resolution_km == 0 else f" (up to {resolution_km:.2g} less)"
    parts = [f"{float(share):.0%} {value:.4g}" for share, value in quantiles.items()]
    return f"quantiles {', '.join(parts)} km{exact}"


def _bands(bands: list[dict[str, Any]]) -> list[Row]:
    rows, rest = [], 0.0
    for band in bands:
        if band["probability"] < _LEAST_SHARE:
            rest += band["probability"]
            continue
        text = f"{band['probability']:.1%} of reports, which lose {band['loss_km']:.4g} km on average"
        rows.append((f"{band['from_km']:g} to {band['to_km']:g} km", text))
    return [*rows, ("elsewhere", f"{rest:.2g} of reports")] if rest else rows


def _bound(result: dict[str, Any]) -> list[Row]:
    """Return the lower bound, if there is one, and how far above it the loss is."""
    if result["lower_bound_km"] is None:
        return []
    sort, above = "", ""
    if not result["lower_bound_certified"]:
        half = NORMAL_95 * result["lower_bound_standard_error_km"]
        sort = (
            f" (± {half:.2g}, estimated from {result['offsets_used']} of {result['offsets_total']} lattices; "
            f"certified: {result['lower_bound_certified_km']:.6g} km)"
        )
    if result["gap"] is not None:
        above = f"; this one loses {result['gap']:.1%} more"
    return [("no mechanism", f"loses less than {result['lower_bound_km']:.6g} km{sort}{above}")]


# --- attackers ------------------------------------------------------------------------------------


def attack_rows(adversary: dict[str, Any] | None) -> list[Row]:
    """Return the answer of :func:`~mdpext_dask.evaluation.attackers.measure.measure_attacks` as texts."""
    if adversary is None:
        return []
    missing = adversary["not_measured"]
    return [
        *_one_report(adversary),
        *_beliefs(adversary),
        *_releases(adversary["releases"]),
        *_where(adversary),
        *((key.replace("_", " "), f"not measured: {why}") for key, why in missing.items()),
    ]


def _one_report(found: dict[str, Any]) -> list[Row]:
    place = (
        f"off by {found['inference_error_km']:.4g} km on average, whatever he guesses by at least "
        f"{found['inference_error_lower_km']:.4g}; without a report "
        f"{found['prior_inference_error_km']:.4g} km"
    )
    rows = [("attacker", place)]
    if found["error_under_loss_km"] is not None:
        text = (
            f"{found['error_under_loss_km']:.4g} km if he guesses outputs (as with the optimal remap); "
            f"without a report {found['prior_error_under_loss_km']:.4g} km"
        )
        rows.append(("under the loss", text))
    resolution = found["rank_quantiles_resolution"]
    loose = "" if resolution == 0 else f" (up to {resolution:,.0f} less)"
    ranks = ", ".join(f"{float(share):.0%} {rank:,.4g}" for share, rank in found["rank_quantiles"].items())
    once = (
        f"the record is guessed with probability {found['vulnerability']:.3g}; without a report "
        f"{found['prior_vulnerability']:.3g}"
    )
    capacity = f"at most {found['capacity_bits']:.3f} under any prior (min-entropy)"
    left = (
        f"{found['conditional_entropy_bits']:.3f} of {found['prior_entropy_bits']:.3f} bits are left; "
        f"a report tells {found['mutual_information_bits']:.3f}"
    )
    return [
        *rows,
        ("in one try", once),
        ("leakage", f"{found['leakage_bits']:.3f} bits, {capacity}"),
        ("entropy", left),
        ("rank of the truth", f"quantiles {ranks}{loose}, mean {found['rank_mean']:,.4g}"),
    ]


def _beliefs(found: dict[str, Any]) -> list[Row]:
    rows = []
    for belief in found["beliefs"]:
        loss = belief["error_under_loss_km"]
        under = "" if loss is None else f"; a remap made for that loses {loss:.4g} km"
        left_out = belief.get("points_left_out", 0)
        but = f"; {left_out} points of the file lie at no record and do not count" if left_out else ""
        text = f"off by {belief['inference_error_km']:.4g} km{under}{but}"
        rows.append((f"believes {belief['prior']}", text))
    return rows


def _releases(found: dict[str, Any] | None) -> list[Row]:
    if found is None:
        return []
    rows = []
    for entry in found["curve"]:
        if entry["exact"]:
            continue
        text = (
            f"off by {entry['inference_error_km']:.3g} ± {entry['inference_error_half_width_km']:.2g} km; "
            f"in one try {entry['vulnerability']:.2g} ± {entry['vulnerability_half_width']:.1g}; "
            f"{entry['entropy_bits']:.2f} ± {entry['entropy_half_width_bits']:.1g} bits are left"
        )
        rows.append((f"{entry['releases']} releases", text))
    if rows:
        intervals = f"{found['confidence']:.0%} intervals from {found['victims']} people drawn"
        rows.append(("sticky releases", f"stay at those of one; above, {intervals}"))
    return rows


def _where(found: dict[str, Any]) -> list[Row]:
    worst, rows = found["worst_record"], []
    if worst is not None:
        degrees = "" if worst["lon"] is None else f" (lon {worst['lon']:.5f}, lat {worst['lat']:.5f})"
        place = f"x {worst['x_km']:.3f}, y {worst['y_km']:.3f} km{degrees}"
        rows.append(("worst record", f"loses {worst['loss_km']:.4g} km, at {place}"))
    listed = [district for district in found["districts"] or [] if district["loss_km"] is not None]
    if len(listed) > _MOST_LISTED:
        rows.append(("districts", f"{len(listed)}; those where most and where least is lost:"))
        by_loss = sorted(listed, key=lambda district: -district["loss_km"])
        listed = [*by_loss[: _MOST_LISTED // 2], *by_loss[-_MOST_LISTED // 2 :]]
    for district in listed:
        text = (
            f"{district['probability']:.1%} of people; lose {district['loss_km']:.4g} km, 95 % of them at "
            f"most {district['loss_quantiles_km']['0.95']:.4g}; attacker off by "
            f"{district['inference_error_km']:.4g} km"
        )
        rows.append((f"in {district['name']}", text))
    return rows
