"""What a report says in sentences, made from its numbers."""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any

from mdpext_dask.auditors.result import HOLDS, AuditReport
from mdpext_dask.store.mechanism_store import REFUSED

# Distances, in km, for which the promise is spelt out.
_DISTANCES_KM = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Log factors beyond which a factor says nothing.
_MOST_LOG = 12.0
_BOUND = "lower_bound_km"


def metric_in_words(p: float, *, planar: bool) -> str:
    """Return what distance the promise is about."""
    if p == 2:
        return "straight-line distance in the plane" if planar else "straight-line distance on the ground"
    if p == 1:
        kind = "distance along the two axes of the plane, added up (p = 1)"
    elif math.isinf(p):
        kind = "distance along the longer of the two axes of the plane (p = ∞)"
    else:
        kind = f"the distance ‖x − x′‖ with exponent p = {p:g} in the plane"
    return kind


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
    text = "The promise is proved for all pairs of places, from the stored bytes, when this report was made."
    return {"good": True, "title": "Holds", "text": text}


def promise(facts: Mapping[str, Any]) -> list[str]:
    """Return what was promised, in paragraphs.

    Parameters
    ----------
    facts
        `epsilon_per_km`, `metric`, `outputs`.
    """
    epsilon = facts["epsilon_per_km"]
    return [
        f"A person’s place is replaced by one of {facts['outputs']:,} fixed places, drawn at random. The "
        "draw is made so that whoever sees the report cannot tell nearby places apart well: for any two "
        "places x and x′ of the grid at distance d, every report is at most e^(ε d) times as likely from one "
        f"as from the other, with ε = {epsilon:g} per km. d is the {facts['metric']}.",
        "That holds whatever the observer knows beforehand, and however much they can compute. It limits "
        "what one report adds to what they know.",
    ]


def proof(report: AuditReport, distortion: float) -> list[str]:
    """Return what was proved, and what proved means, in paragraphs."""
    pairs = report.records * (report.records - 1) // 2
    slack = f"the promised {report.epsilon_per_km:g}/km"
    if not report.details.get("planar"):
        slack += f" less {_parts(distortion)}, by which the plane may lengthen distances on the ground"
    result = (
        f"Certified: ε = {rounded_up(report.epsilon)}/km in the plane"
        if report.verdict == HOLDS
        else f"Not proved: the certificate comes to ε = {rounded_up(report.epsilon)}/km in the plane"
    )
    return [
        f"{result}, against a limit of {rounded_down(report.limit_per_km, 9)}/km ({slack}). It covers all "
        f"{pairs:,} pairs of {report.records:,} records with all {report.outputs:,} reports: "
        f"{report.triples_checked:,} combinations. None is left out, none is sampled, and no tolerance is "
        "allowed.",
        "Proved means: from the stored probabilities themselves, by arithmetic whose rounding is counted "
        "against the store. On every fine cell of the grid the slopes of the log-probabilities are within ε "
        "at the corners, hence everywhere between, and along every straight line from one record to another. "
        "The sampler draws from exactly these numbers. It is a statement about the mechanism; it does not "
        "watch how the mechanism is used.",
    ]


def limits(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the promise does not cover, as titles and texts.

    Parameters
    ----------
    facts
        `epsilon_per_km`, `quantisation_km`, `distortion`, `planar`.
    """
    epsilon, rho = facts["epsilon_per_km"], facts["quantisation_km"]
    ground = (
        "The loss file does not say where on Earth its plane lies, so the promise is about distances in that "
        "plane, as they are given."
        if facts["planar"]
        else f"The proof is about distances in a flat map, which may be {_parts(facts['distortion'])} "
        "longer than those on the ground. That is charged: the limit is lower by as much."
    )
    return [
        (
            "Several reports",
            f"Every report spends ε anew: n independent reports of one place keep n ε only. Ten of them are "
            f"{10 * epsilon:g} per km, and many of them show the place. Report once and repeat the answer "
            "(mdpext sample --sticky-key), or limit how often (--release-limit).",
        ),
        (
            "Places that belong together",
            "Home, way and work of one person are not independent, nor are people who travel together. The "
            "promise is about one report of one place; what several such reports say together is covered "
            "only by adding up their ε.",
        ),
        (
            "Far places",
            "Places far apart are told apart, by design: the promise weakens with distance. It does not hide "
            "which part of the city somebody is in.",
        ),
        (
            "Rounding to the grid",
            f"A place is first moved to its nearest record, at most ρ = {rounded_up(1000 * rho, 3)} m away. "
            "For places as they are, the bound is e^(ε (d + 2ρ)): even for two places next to each other it "
            f"may come to {factor_in_words(2 * epsilon * rho)}, where they lie on two sides of a line "
            "between records.",
        ),
        ("The flat map", ground),
        (
            "Everything but the report",
            "When somebody reports, how long it takes, from which address, and that they report at all are "
            "outside the promise; so is whatever else an application sends or keeps.",
        ),
        (
            "Who made this file",
            "Neither store nor report is signed. Changed bytes are noticed because they no longer fit the "
            "rest of the store; a store that was replaced as a whole is noticed only if the digest below was "
            "noted elsewhere.",
        ),
    ]


def _parts(share: float) -> str:
    return f"{rounded_up(1e6 * share, 2)} parts in a million"


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
            "No lower bound was computed for this report. Give it time with --bound-seconds 60, or take the "
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
    if result["lower_bound_stride"] > 4:
        text += (
            " Found in little time, so it is weak: the best possible loss lies between it and the loss of "
            "this mechanism, and more time (--bound-seconds) brings it closer."
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
