"""What attackers learn from a finished mechanism: all measures, from the stored bytes, block by block.

docs/attackers.md says what each number means. Everything but the curve of repeated releases is computed for
all records; sums run in the order of the blocks, so they are the same bits wherever tasks run.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.attackers.best_guesses import (
    Guesses,
    best_guesses,
    judge_blocks,
    nearest_records,
    slopes_of_blocks,
)
from mdpext_dask.evaluation.attackers.districts import Districts, by_district, read_districts, rectangles
from mdpext_dask.evaluation.attackers.geometric_median import SLOPE_NUMBERS, descend, lower_bound
from mdpext_dask.evaluation.attackers.leakage import (
    MOST_SORTED,
    counted_ranks,
    leakage,
    losses_of_guesses,
    misled_loss_km,
    output_groups,
    rank_outputs,
    sorted_ranks,
)
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.release_curve import (
    CONFIDENCE,
    LEAST_VICTIMS,
    release_curve,
    victims_for,
)
from mdpext_dask.evaluation.attackers.requests import (
    TRUTH,
    Attacker,
    AttackRequest,
    PointPrior,
    attackers_of,
    read_attacker_prior,
)
from mdpext_dask.evaluation.attackers.tallies import Tally, TallyPlan, tally_blocks
from mdpext_dask.evaluation.spread import Spread
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
# How close the informed attacker's error is brought to its bound, relatively.
_GOOD_GAP = 5e-4
# Of fewer people, a mean has no error that could be told.
_LEAST_DRAWN = 2
# Records that the client holds a few numbers of: some 40 bytes each.
MOST_RECORDS = 2**24
# What other guesses cost under the loss is K by K numbers a prior, 32 MB, and takes N K² of their products.
_MOST_COSTS, _MOST_PRODUCTS = 2**22, 10**12


@dataclass(frozen=True)
class Attack:
    """What is asked for, and what its files say.

    Parameters
    ----------
    request
        What is asked for.
    districts
        Parts of the city; None where there are too many records to hold them.
    points
        What somebody believes, if there is a file.
    """

    request: AttackRequest
    districts: Districts | None
    points: PointPrior | None

    @property
    def keeps_records(self) -> bool:
        """Whether the loss of every record is needed."""
        return self.districts is not None

    @property
    def attackers(self) -> tuple[Attacker, ...]:
        """Who attacks, the informed one first."""
        return attackers_of(2 if self.points is None else 3)


def prepare(store: MechanismStore, request: AttackRequest) -> Attack:
    """Read the files of a request, before anything long is done.

    Raises
    ------
    SpecError, DataError
        If one cannot be used with this store, or a number is out of range.
    """
    if request.releases < 0:
        raise SpecError(f"--releases: must be at least 0, got {request.releases}")
    if request.victims < _LEAST_DRAWN:
        raise SpecError(f"victims: must be at least {_LEAST_DRAWN}, got {request.victims}")
    if request.random_seed < 0:
        raise SpecError(f"--random-seed: must be at least 0, got {request.random_seed}")
    points = None if request.attacker_prior is None else read_attacker_prior(store, request.attacker_prior)
    districts = None
    if store.grid.records <= MOST_RECORDS:
        asked = request.districts
        districts = rectangles(store.grid) if asked is None else read_districts(store, asked)
    return Attack(request, districts, points)


def measure_attacks(
    store: MechanismStore, executor: Executor, stages: Stages, spread: Spread, attack: Attack
) -> dict[str, Any]:
    """Return what attackers learn from a store, as plain JSON values.

    Parameters
    ----------
    store, executor, stages
        The store, and where tasks run.
    spread
        How its loss is spread.
    attack
        What is asked for.

    Returns
    -------
    See docs/attackers.md. What would take more memory or time than it may is null, and `not_measured` says
    why.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    missing: dict[str, str] = {}
    passes = Passes(store, executor, stages)
    records, outputs = spread.records, store.outputs
    # Twice: it is added up for all records, whoever is believed to be there.
    work = len(attack.attackers[0].shares) * outputs**2
    loss = work <= _MOST_COSTS and store.grid.records * work <= _MOST_PRODUCTS
    sort = records * outputs <= MOST_SORTED
    plan = TallyPlan.of(store.grid, outputs, attack.attackers, sort=sort, loss=loss)
    tally, group_prior = _tally(passes, plan, attack.points)
    guesses = _refined(passes, best_guesses(store.grid, plan, tally), tally)
    errors, alone, error_km = _judge(passes, guesses, attack.keeps_records)
    found: dict[str, Any] = {
        "inference_error_km": float(errors[0]),
        "inference_error_lower_km": min(float(guesses.lower_km[0].sum()), float(errors[0])),
        "prior_inference_error_km": alone,
        "prior_inference_error_lower_km": min(guesses.alone_lower_km, alone),
        "error_under_loss_km": None,
        "prior_error_under_loss_km": None,
        **leakage(tally),
    }
    if loss:
        found |= losses_of_guesses(tally)
    else:
        missing["error_under_loss_km"] = (
            f"{outputs} outputs and {store.grid.records} records: the loss of every guess would take too long"
        )
    found |= _ranks(passes, records) if sort else counted_ranks(tally)
    found["worst_record"] = _worst(store, spread, tally)
    if found["worst_record"] is None:
        missing["worst_record"] = f"more than {MOST_RECORDS} records"
    found["beliefs"] = [
        {
            "prior": attacker.name,
            "inference_error_km": float(errors[position]),
            # In one try: Σ_y π(x) M(y|x) for x, the record that he believes in most after y.
            "vulnerability": math.fsum(tally.guess_joint[position]),
            "error_under_loss_km": misled_loss_km(tally, attacker.mixed(tally.costs)) if loss else None,
        }
        for position, attacker in enumerate(attack.attackers)
        if position > 0
    ]
    if attack.points is not None:
        found["beliefs"][-1]["points_left_out"] = attack.points.outside
    found["releases"] = _releases(passes, attack.request, group_prior, records, found, missing)
    found["districts"] = None
    if attack.districts is None or error_km is None or spread.expected_km is None:
        missing["districts"] = f"more than {MOST_RECORDS} records"
    else:
        prior = np.asarray(store.read("prior"), dtype=np.float64)
        found["districts"] = by_district(attack.districts, prior, spread.expected_km, error_km)
    return {**found, "not_measured": missing}


def _tally(passes: Passes, plan: TallyPlan, points: PointPrior | None) -> tuple[Tally, Array]:
    """Return the tally of all blocks, and Σ π of every group of them."""
    store = passes.store
    across, along = (-(-n // plan.bin_side) for n in store.grid.shape)
    total = Tally.nothing(plan, store.outputs, (across, along))
    blocks = [[store.plan[index] for index in group] for group in passes.groups]
    arguments = (
        (group, plan, [None if points is None else points.of_block(store.grid, block) for block in some])
        for group, some in zip(passes.groups, blocks, strict=True)
    )
    masses = []
    for some, part in zip(blocks, passes.each("attackers", tally_blocks, arguments), strict=True):
        masses.append(float(part.prior[TRUTH]))
        total.add(part, *plan.bins_of(some))
    return total, np.array(masses)


def _refined(passes: Passes, guesses: Guesses, tally: Tally) -> Guesses:
    """Return the informed attacker's guesses, improved on the records themselves, and the best bounds."""
    grid, reported = passes.store.grid, tally.reported[TRUTH]
    weight = np.where(reported > 0, reported, 1.0)[:, None]

    def judge(places: Array) -> Array:
        arguments = ((group, places[:, :, 0]) for group in passes.groups)
        found = np.zeros((*places.shape[:2], SLOPE_NUMBERS))
        for part in passes.each("guesses", slopes_of_blocks, arguments):
            found += part
        return np.asarray((found / weight)[:, :, None])

    def bound(slope: Array) -> Array:
        # What the bins say holds as well.
        binned = guesses.lower_km[0][:, None] / weight
        return np.asarray(np.maximum(lower_bound(slope, 1.0, grid.records), binned))

    begin = guesses.places_km[0][None, :, None]
    guess, _, lower = descend(judge, begin, partial(nearest_records, grid), bound, weight, _GOOD_GAP)
    places, bounds = guesses.places_km.copy(), guesses.lower_km.copy()
    # Weights are sums of as many numbers as there are records.
    rounding = 4 * (grid.records + 8) * np.finfo(float).eps
    places[0], bounds[0] = guess[:, 0], (lower * weight)[:, 0] * (1 - rounding)
    return replace(guesses, places_km=places, lower_km=bounds)


def _judge(passes: Passes, guesses: Guesses, keep: bool) -> tuple[Array, float, Array | None]:
    """Return the errors of all attackers, of the guess without a report, and of all records, in km."""
    store = passes.store
    errors, alone = np.zeros(len(guesses.places_km)), 0.0
    expected = np.full(store.grid.shape, np.nan) if keep else None
    parts = passes.each("errors", judge_blocks, ((group, guesses, keep) for group in passes.groups))
    for group, part in zip(passes.groups, parts, strict=True):
        errors += part.error_km
        alone += part.alone_km
        if expected is not None:
            for index, of_block in zip(group, part.expected_km, strict=True):
                expected[store.plan[index].owned_x, store.plan[index].owned_y] = of_block
    return errors, alone, expected


def _ranks(passes: Passes, records: int) -> dict[str, object]:
    groups = output_groups(records, passes.store.outputs)
    masses = np.zeros(2 * records + 1)
    for part in passes.each("ranks", rank_outputs, ((first, last, records) for first, last in groups)):
        masses += part
    return sorted_ranks(masses)


def _worst(store: MechanismStore, spread: Spread, tally: Tally) -> dict[str, float | None] | None:
    """Return where the record is that loses most, and how much; None if that is not known."""
    grid = store.grid
    loss_km, record = tally.worst_km, tally.worst_record
    if record < 0:
        if spread.expected_km is None:
            return None
        record = int(np.nanargmax(spread.expected_km))
        loss_km = float(spread.expected_km.reshape(-1)[record])
    i, j = divmod(record, grid.shape[1])
    place = np.array([[grid.x_km()[i], grid.y_km()[j]]])
    degrees = [None, None] if store.projection is None else store.projection.to_degrees(place)[0].tolist()
    x, y = place[0].tolist()
    return {"loss_km": loss_km, "x_km": x, "y_km": y, "lon": degrees[0], "lat": degrees[1]}


def _releases(
    passes: Passes,
    request: AttackRequest,
    group_prior: Array,
    records: int,
    found: dict[str, Any],
    missing: dict[str, str],
) -> dict[str, Any] | None:
    """Return the curve of independent releases; what one release tells is known without any draw."""
    if request.releases == 0:
        return None
    victims = victims_for(request, records)
    if victims < min(LEAST_VICTIMS, request.victims):
        missing["releases"] = (
            f"{records} records with a prior: there is time for {victims} people only; ask for fewer releases"
        )
        return None
    curve = release_curve(passes, request, group_prior, victims)
    once = {
        "inference_error_km": found["inference_error_km"],
        "inference_error_lower_km": found["inference_error_lower_km"],
        "vulnerability": found["vulnerability"],
        "entropy_bits": found["conditional_entropy_bits"],
    }
    for entry in curve:
        entry["exact"] = entry["releases"] == 1
    curve[0] |= {**dict.fromkeys((key for key in curve[0] if "half_width" in key), 0.0), **once}
    return {
        "victims": victims,
        "confidence": CONFIDENCE,
        "random_seed": request.random_seed,
        "curve": curve,
        "sticky": once,
    }
