"""What attackers learn from a finished mechanism: all measures, from the stored bytes, block by block.

docs/attackers.md says what each number means. Everything but the curve of repeated releases is computed for
all records; sums run in the order of the blocks, so they are the same bits wherever tasks run.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.attackers.best_guesses import best_guesses, judged, refined
from mdpext_dask.evaluation.attackers.districts import Districts, by_district, read_districts, rectangles
from mdpext_dask.evaluation.attackers.leakage import (
    MOST_SORTED,
    counted_ranks,
    exact_ranks,
    leakage,
    losses_of_guesses,
    misled_loss_km,
)
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.repeated_releases import measure_releases
from mdpext_dask.evaluation.attackers.requests import (
    AttackRequest,
    PointPrior,
    attackers_of,
    read_attacker_prior,
)
from mdpext_dask.evaluation.attackers.tallies import Tally, TallyPlan, tally_all
from mdpext_dask.evaluation.spread import Spread
from mdpext_dask.events import Note
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
# A standard error needs at least this many people.
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
        The prior of the attacker's file, if there is one.
    """

    request: AttackRequest
    districts: Districts | None
    points: PointPrior | None

    @property
    def keeps_records(self) -> bool:
        """Whether the loss of every record is needed."""
        return self.districts is not None


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
        districts = (
            rectangles(store.grid) if asked is None else read_districts(store, asked, request.district_name)
        )
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
    priors = 2 if attack.points is None else 3
    work = priors * outputs**2
    loss = work <= _MOST_COSTS and store.grid.records * work <= _MOST_PRODUCTS
    sort = records * outputs <= MOST_SORTED
    plan = TallyPlan.of(store.grid, outputs, attackers_of(priors), sort=sort, loss=loss)
    tally, group_prior = tally_all(passes, plan, attack.points)
    guesses = refined(passes, best_guesses(store.grid, plan, tally), tally)
    errors, alone, error_km = judged(passes, guesses, attack.keeps_records)
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
    found |= exact_ranks(passes, records) if sort else counted_ranks(tally)
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
        for position, attacker in enumerate(plan.attackers)
        if position > 0
    ]
    if attack.points is not None:
        found["beliefs"][-1] |= {"points_left_out": attack.points.outside, "notes": list(attack.points.notes)}
        for note in attack.points.notes:
            stages.observer(Note(note))
    found["releases"] = measure_releases(passes, attack.request, group_prior, records, found, missing)
    found["districts"] = None
    if attack.districts is None or error_km is None or spread.expected_km is None:
        missing["districts"] = f"more than {MOST_RECORDS} records"
    else:
        prior = np.asarray(store.read("prior"), dtype=np.float64)
        found["districts"] = by_district(attack.districts, prior, spread.expected_km, error_km)
    return {**found, "not_measured": missing}


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
