"""Phrases of the page that depend on its numbers; everything else is in the template."""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any

from mdpext_dask.auditors.result import HOLDS, AuditReport
from mdpext_dask.store.mechanism_store import REFUSED

# Distances, in km, for which the promise is spelt out.
_DISTANCES_KM = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Log factors beyond which a factor says nothing.
_MOST_LOG = 12.0
_BOUND = "lower_bound_km"


def metric_in_words(p: float, *, planar: bool) -> str:
    """Return what distance the promise is about."""
    if p == 2:
        return f"straight-line distance {'in the plane' if planar else 'on the ground'}"
    if p == 1:
        return "distance along the two axes of the plane, added up (p = 1)"
    if math.isinf(p):
        return "distance along the longer of the two axes of the plane (p = ∞)"
    return f"distance ‖x − x′‖ with exponent p = {p:g} in the plane"


def headline(state: str, certificate: AuditReport) -> dict[str, Any]:
    """Return the verdict on top of the page: whether it is good, in two words, and in a sentence."""
    if certificate.verdict != HOLDS:
        what = {"title": "Does not hold", "text": "Do not use this store. What it promises is not proved."}
        return {"good": False, **what}
    if state == REFUSED:
        text = (
            "Do not use this store. It was refused when it was finished or audited, and stays refused "
            "whatever the certificate says now."
        )
        return {"good": False, "title": "Refused", "text": text}
    text = "The promise is proved for all pairs of places, from the stored bytes, when this page was made."
    return {"good": True, "title": "Holds", "text": text}


def factors(epsilon_per_km: float, quantisation_km: float) -> list[dict[str, str]]:
    """Return the promise for some distances: the factor, and what a guess of even odds can become.

    For two places at distance d, rounding to the grid included: f = e^{ε (d + 2ρ)}, and of two places that an
    observer took for equally likely, one is at most f / (1 + f) likely after one report.
    """
    rows = []
    for distance in _DISTANCES_KM:
        log = epsilon_per_km * (distance + 2 * quantisation_km)
        factor = factor_in_words(log)
        share = math.ceil(1000 / (1 + math.exp(-log))) / 10
        sure = f"{share:g}%" if share < 100 else "over 99.9%"
        name = "0" if distance == 0 else f"{distance * 1000:g} m" if distance < 1 else f"{distance:g} km"
        rows.append({"distance": name, "factor": factor, "sure": sure})
    return rows


def factor_in_words(log: float) -> str:
    """Return e to a number, rounded up to three digits; as a power where it says nothing any more."""
    if log > _MOST_LOG:
        return f"e^{rounded_up(log, 3)}"
    return f"{float(rounded_up(math.exp(log), 3)):,g}"


def estimate_tells(result: Mapping[str, Any]) -> bool:
    """Whether there is an estimate of the bound, and it is above what is certified anyway."""
    return not result["lower_bound_certified"] and result[_BOUND] > result["lower_bound_certified_km"]


def bound_in_words(result: Mapping[str, Any]) -> str:
    """Return what is known of the least loss that any mechanism with this promise could have."""
    if result[_BOUND] is None:
        return (
            "No lower bound was computed for this page. Give it time with --bound-seconds 60, or take the "
            "figures of an earlier evaluation with --evaluation."
        )
    certified = result["lower_bound_certified_km"]
    text = (
        "No mechanism that keeps this promise on these outputs loses less than "
        f"{rounded_down(certified, 4)} km (certified)."
    )
    if estimate_tells(result):
        text += (
            f" All lattices of every {ordinal(result['lower_bound_stride'])} record together would show "
            f"about {result[_BOUND]:.4g} ± {1.96 * result['lower_bound_standard_error_km']:.2g} km, an "
            f"estimate from {result['offsets_used']} of {result['offsets_total']:,}."
        )
    # Of windows, every border costs something.
    if result["lower_bound_stride"] > 4 or result.get("lower_bound_window") is not None:
        text += (
            " Found in little time, so it is weak: the best possible loss lies between it and the loss of "
            "this mechanism, and more time (--bound-seconds) brings it closer."
        )
    if "bound_computed" in result:
        text += (
            f" The store says so: an evaluation has left it there on {result['bound_computed']}, and this "
            "page has not computed it again (--bound-seconds does)."
        )
    return text


def ordinal(number: int) -> str:
    """Return a whole number as in a list: 1st, 2nd, 3rd."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"


def rounded_up(value: float, digits: int = 6) -> str:
    """Return an upper bound in so many digits: what is said is no less than what is proved."""
    return _rounded(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 6) -> str:
    """Return a lower bound in so many digits: what is said is no more than what is proved."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "∞"
    with localcontext() as context:
        context.prec, context.rounding = digits, rounding
        return f"{+Decimal(value):f}"
