"""How attackers get on with more and more independent releases: means over people, with their errors."""

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from mdpext_dask.evaluation.attackers.best_guesses import nearest_records
from mdpext_dask.evaluation.attackers.geometric_median import COST, SLOPE_NUMBERS, descend, lower_bound
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.repeated_releases import (
    Posteriors,
    draw_groups,
    draw_reports,
    judge_posteriors,
    lengths_up_to,
    observe_blocks,
)
from mdpext_dask.evaluation.attackers.requests import AttackRequest

Array = NDArray[np.float64]
# Additions of log M that a curve may take, and the fewest people that a mean is worth stating of.
MOST_ADDITIONS, LEAST_VICTIMS = 2 * 10**10, 10
CONFIDENCE = 0.95
# What is left out of a posterior where guesses are judged, by all groups of blocks together.
_NEGLIGIBLE = 1e-9
# Numbers by group, person and length that the client keeps to tell which groups are negligible, 128 MB.
_MOST_KEPT = 2**24
# Good enough next to the error of the draw.
_GOOD_GAP = 2e-3


def victims_for(request: AttackRequest, records: int) -> int:
    """Return how many people there is time for, of those asked for."""
    return min(request.victims, MOST_ADDITIONS // max(records * request.releases, 1))


def release_curve(
    passes: Passes, request: AttackRequest, group_prior: Array, victims: int
) -> list[dict[str, Any]]:
    """Return what is told by n independent releases of one record, for some n.

    Every mean is over `victims` people drawn from the prior, with a half-width from Student's t: the interval
    is that of a normal approximation, of the draw of people and reports alone.

    Parameters
    ----------
    passes
        Over the store.
    request
        Lengths, and the random seed.
    group_prior
        Σ π of each group of blocks, float64 of shape (groups,).
    victims
        How many people to draw, at least 2.

    Returns
    -------
    For every n: `releases`; `inference_error_km`, the expected distance to the attacker's guess under his
    posterior, for the best guess found; `inference_error_lower_km`, a bound from below for the same draws;
    `vulnerability`, the largest posterior; `entropy_bits` of the posterior; and the half-widths of 95 %.
    """
    lengths = lengths_up_to(request.releases)
    reports = _reports(passes, request, group_prior, victims)
    total, parts = _observe(passes, reports, lengths)
    error, lower = _errors(passes, reports, lengths, total, parts)
    measured = {
        "inference_error": (error, "_km"),
        "inference_error_lower": (lower, "_km"),
        "vulnerability": (total.vulnerability(), ""),
        "entropy": (total.entropy_bits(), "_bits"),
    }
    quantile = float(stdtrit(victims - 1, (1 + CONFIDENCE) / 2))
    curve = []
    for position, length in enumerate(lengths):
        entry: dict[str, Any] = {"releases": length}
        for name, (values, unit) in measured.items():
            column = values[:, position]
            entry[f"{name}{unit}"] = float(column.mean())
            entry[f"{name}_half_width{unit}"] = quantile * float(column.std(ddof=1)) / math.sqrt(victims)
        curve.append(entry)
    return curve


def _reports(passes: Passes, request: AttackRequest, group_prior: Array, victims: int) -> NDArray[np.int32]:
    """Return reports of all people, int32 of shape (V, releases)."""
    releases, seed = request.releases, request.random_seed
    drawn = draw_groups(group_prior, victims, seed)
    groups = [(group, people) for group, people in zip(passes.groups, drawn, strict=True) if people]
    reports = np.zeros((victims, releases), dtype=np.int32)
    parts = passes.each("draws", draw_reports, ((group, people, releases, seed) for group, people in groups))
    for (_, people), part in zip(groups, parts, strict=True):
        reports[[victim for victim, _ in people]] = part
    return reports


def _observe(
    passes: Passes, reports: NDArray[np.int32], lengths: tuple[int, ...]
) -> tuple[Posteriors, Array | None]:
    """Return sums over all records, and log Σ exp(a) by group, person and length, if they are few."""
    shape = len(passes.groups), len(reports), len(lengths)
    parts = np.empty(shape) if math.prod(shape) <= _MOST_KEPT else None
    total = Posteriors.nothing(len(reports), len(lengths))
    arguments = ((group, reports, lengths) for group in passes.groups)
    for index, found in enumerate(passes.each("releases", observe_blocks, arguments)):
        total.add(found)
        if parts is not None:
            parts[index] = found.log_total()
    return total, parts


def _errors(
    passes: Passes,
    reports: NDArray[np.int32],
    lengths: tuple[int, ...],
    total: Posteriors,
    parts: Array | None,
) -> tuple[Array, Array]:
    """Return expected distances to the best guesses found, and bounds from below, of shape (V, C), in km."""
    grid, groups, log_total = passes.store.grid, passes.groups, total.log_total()
    needed = np.full((len(groups), len(reports)), len(lengths))
    if parts is not None:
        held = parts - log_total >= math.log(_NEGLIGIBLE / len(groups))
        # With how many of the lengths, up to the last one that the group has a part in.
        needed = np.where(held.any(axis=2), len(lengths) - held[..., ::-1].argmax(axis=2), 0)

    def judge(guesses: Array) -> Array:
        found = np.zeros((*guesses.shape[:-1], SLOPE_NUMBERS))
        arguments = (
            (group, reports, lengths, log_total, guesses, some)
            for group, some in zip(groups, needed, strict=True)
        )
        for part in passes.each("guesses", judge_posteriors, arguments):
            found += part
        return found

    def bound(slope: Array) -> Array:
        # What is left out of a posterior can tilt it no more than it weighs.
        least = lower_bound(slope, 1.0, grid.records) - 2 * _NEGLIGIBLE * slope[..., COST]
        return np.asarray(np.maximum(least, 0.0))

    guesses = np.stack([total.mean_km(), total.peak_xy_km])
    weight = np.ones(log_total.shape)
    _, cost, lower = descend(judge, guesses, partial(nearest_records, grid), bound, weight, _GOOD_GAP)
    return cost, lower
