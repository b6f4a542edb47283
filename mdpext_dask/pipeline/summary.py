"""What a store of a job is like so far: the document that ``run`` and ``status`` print."""

import shlex
from collections.abc import Mapping
from typing import Any

from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import MdpextError
from mdpext_dask.evaluation.bound.kept import kept_bound
from mdpext_dask.evaluation.words import NORMAL_95, plain_advice
from mdpext_dask.events import STAGES
from mdpext_dask.job.sections import SEEDLESS
from mdpext_dask.store import integrity, locks
from mdpext_dask.store.mechanism_store import COMPLETE, EXTENDING, PLANNED, REFUSED, MechanismStore
from mdpext_dask.store.receipts import Receipt
from mdpext_dask.store.remap import has_remap
from mdpext_dask.store.rows import extension_of_store
from mdpext_dask.store.schema import METHOD_IN_WORDS

# A loss is a sum of rounded numbers; bounds that exceed it by a smaller share are possible.
_ROUNDING = 1e-6


def summarise(store: MechanismStore) -> dict[str, Any]:
    """Return what ``run`` and ``status`` print."""
    attributes, seed, plan = store.attributes, store.seed_attributes, store.plan
    method = extension_of_store(store).method
    found = store.read_receipts() if seed else {}
    done = len(found)
    state = store.state
    if state == PLANNED and done:
        state = EXTENDING
    return {
        "store": store.url,
        "state": state,
        "records": plan.grid.records,
        # Stores of before regions do not say: all of it.
        "records_inside": attributes.get("records_inside", plan.grid.records),
        "outputs": plan.outputs,
        "seeds": 0 if method in SEEDLESS else plan.grid.seeds,
        "source_cells": plan.grid.source_cells,
        "source_cells_kept": int(store.kept.sum()),
        "blocks": plan.blocks,
        "blocks_skipped": len(plan.skipped),
        "blocks_done": done,
        "seed_solved": seed.get("sha256") is not None,
        "next": _next(store, state, [index for index in range(plan.blocks) if index not in found]),
        # Of a store that says that it is complete, else None; and why it must not be sampled all the same.
        "receipts": None if state != COMPLETE else "all" if done == plan.blocks else "missing",
        "refusal": _refusal(store, found) if state == COMPLETE else None,
        "epsilon_per_km": attributes["epsilon_per_km"],
        "epsilon_planar_per_km": attributes["epsilon_planar_per_km"],
        "epsilon_certified": attributes["epsilon_certified"],
        "distortion": attributes["distortion"],
        "rotation_deg": attributes["projection"].get("rotation_deg", 0.0),
        "max_quantisation_km": attributes["quantisation_km"],
        "metric_p": attributes["metric_p"],
        # "auto" until it is chosen; and where it is, why.
        "method": method,
        "method_in_words": attributes.get(METHOD_IN_WORDS),
        "budget": attributes["job"]["privacy"]["budget"],
        "loss_km": attributes.get("loss_km"),
        "loss_kind": attributes["job"]["loss"]["kind"],
        # Older stores do not say what planar Laplace noise loses.
        "plain_loss_km": attributes.get("plain_loss_km"),
        "plain_standard_error_km": attributes.get("plain_standard_error_km"),
        "over_plain": attributes.get("over_plain"),
        "plain_advice": _advice(attributes, method),
        "plain_in_words": attributes.get("plain_in_words"),
        # What an evaluation has left in the store.
        "lower_bound_certified_km": _bound_km(store, attributes.get("loss_km")),
        # Whether it is used with a remap; losses here are those without.
        "remap": has_remap(store),
        "seed_primal": seed.get("primal_km"),
        "seed_dual": seed.get("dual_km"),
        "seed_gap": seed.get("gap"),
        "seed_solves": seed.get("solves", 0),
        "boundary_rows_checked": attributes.get("boundary_rows_checked", 0),
        "boundary_mismatches": attributes.get("boundary_mismatches", 0),
        "fallbacks": attributes.get("fallbacks", 0),
        "fingerprint": attributes["fingerprint"],
        # None before the store is finished; older stores do not say.
        "mechanism_sha256": attributes.get("mechanism_sha256"),
        "running": locks.as_json(locks.holder_of(store.objects)),
        "notes": attributes["notes"],
        "seconds": attributes.get("seconds", {}),
        # By stage like these, as planned for the workers that began; older stores do not say.
        "seconds_planned": attributes.get("seconds_planned"),
        "peak_bytes_per_task": attributes.get("peak_bytes_per_task", plan.peak_bytes(method)),
    }


def _next(store: MechanismStore, state: str, missing: list[int]) -> str | None:
    """Return the command that comes next where blocks are done in pieces; None if there is none."""
    if state in (COMPLETE, REFUSED) or store.seed_attributes.get("sha256") is None:
        return None
    url = shlex.quote(store.url)
    return (
        f"mdpext partition {url} --range {integrity.ranges_of(missing)[0]}"
        if missing
        else f"mdpext finalise {url}"
    )


def _advice(attributes: Mapping[str, Any], method: str) -> str | None:
    found = [attributes.get(name) for name in ("loss_km", "plain_loss_km", "plain_standard_error_km")]
    if None in found:  # not finished, or older
        return None
    loss_km, plain_km, error_km = (float(each or 0.0) for each in found)
    return plain_advice(
        method, attributes["job"]["privacy"]["budget"], loss_km, plain_km, NORMAL_95 * error_km
    )


def _bound_km(store: MechanismStore, loss_km: float | None) -> float | None:
    """Return the certified bound of an evaluation, in km, unless there is none, or it cannot be right."""
    found = None if loss_km is None else (kept_bound(store) or {}).get("lower_bound_certified_km")
    possible = isinstance(found, float) and loss_km is not None and 0 <= found <= loss_km * (1 + _ROUNDING)
    return found if possible else None


def _refusal(store: MechanismStore, found: Mapping[int, Receipt]) -> str | None:
    """Return why a complete store is not sampled, and what to do; None if it may be."""
    try:
        integrity.require_evidence(store, found)
    except MdpextError as error:
        return str(error)
    return None


def seconds_so_far(store: MechanismStore, stages: Stages) -> dict[str, float]:
    """Return seconds by stage over all runs of a store; a stage done again counts once, as it was last."""
    seconds = {**store.attributes.get("seconds", {}), **stages.seconds}
    seconds.pop("total", None)
    by_stage = {**{name: 0.0 for name in STAGES if name != "cells"}, **seconds}
    # The rest is starting workers and the like, of the present run.
    rest = stages.total() - sum(stages.seconds.values())
    return {**by_stage, "total": sum(by_stage.values()) + max(rest, 0.0)}
