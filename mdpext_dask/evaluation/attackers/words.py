"""What attackers learn, in words: rows of a table for people."""

from typing import Any

# Districts that are told in full; of more, the extremes.
_MOST_TOLD = 16


def attack_rows(adversary: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the answer of :func:`~mdpext_dask.evaluation.attackers.measure.measure_attacks` as texts."""
    if adversary is None:
        return []
    return [
        *_one_report(adversary),
        *_beliefs(adversary),
        *_releases(adversary["releases"]),
        *_where(adversary),
        *((key.replace("_", " "), f"not measured: {why}") for key, why in adversary["not_measured"].items()),
    ]


def _one_report(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            "attacker",
            f"off by {found['inference_error_km']:.4g} km on average, whatever he guesses by at least "
            f"{found['inference_error_lower_km']:.4g}; without a report "
            f"{found['prior_inference_error_km']:.4g} km",
        )
    ]
    if found["error_under_loss_km"] is not None:
        rows.append(
            (
                "under the loss",
                f"{found['error_under_loss_km']:.4g} km if he guesses outputs (as with the optimal remap); "
                f"without a report {found['prior_error_under_loss_km']:.4g} km",
            )
        )
    resolution = found["rank_quantiles_resolution"]
    loose = "" if resolution == 0 else f" (up to {resolution:,.0f} less)"
    ranks = ", ".join(f"{float(share):.0%} {rank:,.4g}" for share, rank in found["rank_quantiles"].items())
    return [
        *rows,
        (
            "in one try",
            f"the record is guessed with probability {found['vulnerability']:.3g}; without a report "
            f"{found['prior_vulnerability']:.3g}",
        ),
        (
            "leakage",
            f"{found['leakage_bits']:.3f} bits, at most {found['capacity_bits']:.3f} under any prior "
            "(min-entropy)",
        ),
        (
            "entropy",
            f"{found['conditional_entropy_bits']:.3f} of {found['prior_entropy_bits']:.3f} bits are left; a "
            f"report tells {found['mutual_information_bits']:.3f}",
        ),
        ("rank of the truth", f"quantiles {ranks}{loose}, mean {found['rank_mean']:,.4g}"),
    ]


def _beliefs(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for belief in found["beliefs"]:
        loss = belief["error_under_loss_km"]
        under = "" if loss is None else f"; a remap made for that loses {loss:.4g} km"
        left_out = belief.get("points_left_out", 0)
        but = f"; {left_out} points of the file lie at no record and do not count" if left_out else ""
        text = f"off by {belief['inference_error_km']:.4g} km{under}{but}"
        rows.append((f"believes {belief['prior']}", text))
    return rows


def _releases(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    rows = []
    for entry in found["curve"]:
        if entry["exact"]:
            continue
        rows.append(
            (
                f"{entry['releases']} releases",
                f"off by {entry['inference_error_km']:.3g} "
                f"± {entry['inference_error_half_width_km']:.2g} km; "
                f"in one try {entry['vulnerability']:.2g} ± {entry['vulnerability_half_width']:.1g}; "
                f"{entry['entropy_bits']:.2f} ± {entry['entropy_half_width_bits']:.1g} bits are left",
            )
        )
    if rows:
        rows.append(
            (
                "sticky releases",
                f"stay at those of one; above, {found['confidence']:.0%} intervals from "
                f"{found['victims']} people drawn",
            )
        )
    return rows


def _where(found: dict[str, Any]) -> list[tuple[str, str]]:
    worst, rows = found["worst_record"], []
    if worst is not None:
        degrees = "" if worst["lon"] is None else f" (lon {worst['lon']:.5f}, lat {worst['lat']:.5f})"
        rows.append(
            (
                "worst record",
                f"loses {worst['loss_km']:.4g} km, at x {worst['x_km']:.3f}, y {worst['y_km']:.3f} km"
                f"{degrees}",
            )
        )
    inhabited = [district for district in found["districts"] or [] if district["loss_km"] is not None]
    told = inhabited
    if len(inhabited) > _MOST_TOLD:
        by_loss = sorted(inhabited, key=lambda district: -district["loss_km"])
        told = [*by_loss[: _MOST_TOLD // 2], *by_loss[-_MOST_TOLD // 2 :]]
        rows.append(("districts", f"{len(inhabited)}; those where most and where least is lost:"))
    rows += [
        (
            f"in {district['name']}",
            f"{district['probability']:.1%} of people; lose {district['loss_km']:.4g} km, 95 % of them at "
            f"most {district['loss_quantiles_km']['0.95']:.4g}; attacker off by "
            f"{district['inference_error_km']:.4g} km",
        )
        for district in told
    ]
    return rows
