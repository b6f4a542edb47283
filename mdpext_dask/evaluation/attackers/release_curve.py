"""How attackers get on with more and more independent releases: means over people, with their errors."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.evaluation.attackers.best_guesses import nearest_records
from mdpext_dask.evaluation.attackers.geometric_median import Slope, add_slope, descend, lower_bound
from mdpext_dask.evaluation.attackers.repeated_releases import (
    Posteriors,
    draw_groups,
    draw_reports,
    judge_posteriors,
    lengths_up_to,
    observe_blocks,
)
from mdpext_dask.evaluation.attackers.requests import AttackRequest
from mdpext_dask.store.mechanism_store import MechanismStore

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
    store: MechanismStore,
    executor: Executor,
    stages: Stages,
    request: AttackRequest,
    groups: list[tuple[int, ...]],
    group_prior: Array,
    victims: int,
) -> list[dict[str, Any]]:
    """Return what is told by n independent releases of one record, for some n.

    Every mean is over `victims` people drawn from the prior, with a half-width from Student's t: the interval
    is that of a normal approximation, of the draw of people and reports alone.

    Parameters
    ----------
    store, executor, stages
        The store, and where tasks run.
    request
        Lengths, and the random seed.
    groups, group_prior
        Which blocks tasks look at; Σ π of each of these groups, float64 of shape (groups,).
    victims
        How many people to draw, at least 2.

    Returns
    -------
    For every n: `releases`; `inference_error_km`, the expected distance to the attacker's guess under his
    posterior, for the best guess found; `inference_error_lower_km`, a bound from below for the same draws;
    `vulnerability`, the largest posterior; `entropy_bits` of the posterior; and the half-widths of 95 %.
    """
    lengths = lengths_up_to(request.releases)
    reports = _reports(store, executor, stages, request, groups, group_prior, victims)
    total, parts = _observe(store, executor, stages, groups, reports, lengths)
    error, lower = _errors(store, executor, stages, groups, reports, lengths, total, parts)
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


def _reports(
    store: MechanismStore,
    executor: Executor,
    stages: Stages,
    request: AttackRequest,
    groups: list[tuple[int, ...]],
    group_prior: Array,
    victims: int,
) -> NDArray[np.int32]:
    """Return reports of all people, int32 of shape (V, releases)."""
    drawn = draw_groups(group_prior, victims, request.random_seed)
    where = [index for index, people in enumerate(drawn) if people]
    tasks = [(store.url, groups[i], drawn[i], request.releases, request.random_seed) for i in where]
    reports = np.zeros((victims, request.releases), dtype=np.int32)
    with stages.stage("draws", len(tasks)):
        for index, part in zip(where, stages.in_order(executor, "draws", draw_reports, tasks), strict=True):
            reports[[victim for victim, _ in drawn[index]]] = part
    return reports


def _observe(
    store: MechanismStore,
    executor: Executor,
    stages: Stages,
    groups: list[tuple[int, ...]],
    reports: NDArray[np.int32],
    lengths: tuple[int, ...],
) -> tuple[Posteriors, Array | None]:
    """Return sums over all records, and log Σ exp(a) by group, person and length, if they are few."""
    keep = len(groups) * len(reports) * len(lengths) <= _MOST_KEPT
    parts = np.empty((len(groups), len(reports), len(lengths))) if keep else None
    total = Posteriors.nothing(len(reports), len(lengths))
    tasks = [(store.url, group, reports, lengths) for group in groups]
    with stages.stage("releases", len(tasks)):
        for index, found in enumerate(stages.in_order(executor, "releases", observe_blocks, tasks)):
            total.add(found)
            if parts is not None:
                parts[index] = found.log_total()
    return total, parts


def _errors(
    store: MechanismStore,
    executor: Executor,
    stages: Stages,
    groups: list[tuple[int, ...]],
    reports: NDArray[np.int32],
    lengths: tuple[int, ...],
    total: Posteriors,
    parts: Array | None,
) -> tuple[Array, Array]:
    """Return expected distances to the best guesses found, and bounds from below, of shape (V, C), in km."""
    log_total = total.log_total()
    needed = np.full((len(groups), len(reports)), len(lengths))
    if parts is not None:
        held = parts - log_total >= math.log(_NEGLIGIBLE / len(groups))
        # With how many of the lengths, up to the last one that the group has a part in.
        needed = np.where(held.any(axis=2), len(lengths) - held[..., ::-1].argmax(axis=2), 0)

    def judge(guesses: Array) -> Slope:
        tasks = [
            (store.url, group, reports, lengths, log_total, guesses, some)
            for group, some in zip(groups, needed, strict=True)
        ]
        found = Slope.zero(guesses.shape[:-1])
        with stages.stage("guesses", len(tasks)):
            for part in stages.in_order(executor, "guesses", judge_posteriors, tasks):
                add_slope(found, (), part)
        return found

    guesses = np.stack([total.mean_km(), total.peak_xy_km])
    _, cost, lower = descend(
        judge,
        guesses,
        lambda places: nearest_records(store.grid, places),
        lambda slope: _lower(slope, store),
        np.ones(log_total.shape),
        _GOOD_GAP,
    )
    return cost, lower


def _lower(slope: Slope, store: MechanismStore) -> Array:
    # What is left out of a posterior can tilt it no more than it weighs.
    bound = lower_bound(slope, 1.0, store.grid.records) - 2 * _NEGLIGIBLE * slope.cost
    return np.asarray(np.maximum(bound, 0.0))
