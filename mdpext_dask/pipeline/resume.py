"""What comes before the stages: the store that is there already, or the problem of a new one.

Bad input, a store of another job and workers without enough memory are refused here, before any long work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError
from mdpext_dask.events import STAGES, TOTAL, Note, Observer, Planned
from mdpext_dask.extend.choose import (
    COARSE_SEEDS,
    check_operator,
    operator_of,
    seed_programs,
    trust_operators,
)
from mdpext_dask.job.sections import FITTING, LOG_CONVEX
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.memory import worker_bytes
from mdpext_dask.pipeline.method_choice import plan_method
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.problem.geometry import build_geometry, downloads_of
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.outputs import check_counts, output_count
from mdpext_dask.problem.plausible import notes_on_epsilon
from mdpext_dask.seed import budget
from mdpext_dask.store.mechanism_store import COMPLETE, MechanismStore, plan_of
from mdpext_dask.store.rows import extension_of_store
from mdpext_dask.store.schema import METHOD_CHOSEN, METHOD_TRIED


def finished_store(spec: JobSpec, url: str, observer: Observer, *, overwrite: bool) -> MechanismStore | None:
    """Return the job's store if there is nothing left to do, so that it need not be written to.

    Raises
    ------
    StoreError
        If something is in the way.
    """
    if not url:
        raise SpecError("--store: the path is empty")
    if overwrite:
        MechanismStore.at(url)
        return None
    found = MechanismStore.find(url, spec)
    if found is None:
        return None
    # Places enter a job's identity by name. Its tables are in the store, so nothing is mixed, but it is told.
    made_with = found.attributes.get("downloads", {})
    for key, digest in downloads_of(spec).items():
        if made_with.get(key, digest) != digest:
            made = f"{key}: {found.url} was made with another download than the cache now holds"
            observer(Note(f"{made}, and stays with it; --overwrite makes it anew"))
    return found if found.is_finished() else None


@dataclass(frozen=True)
class NewStore:
    """What a new store is created from, besides its job.

    Parameters
    ----------
    domain
        The job's problem.
    facts
        Further attributes: the method, if it has been chosen.
    """

    domain: Domain
    facts: Mapping[str, str]


def find_or_prepare(spec: JobSpec, url: str, *, overwrite: bool, stages: Stages) -> MechanismStore | NewStore:
    """Return the job's store; if there is none, the job's problem, so that bad input replaces no store."""
    trust_operators(spec.extension.method)
    if not overwrite:
        found = MechanismStore.find(url, spec)
        if found is not None:
            if found.state != COMPLETE:
                operator_of(spec.extension)
            else:
                lost = "was complete and has lost receipts, or what skipped blocks follow from"
                again = "it is made again, and may differ if the software has changed"
                stages.observer(Note(f"{found.url}: {lost}; {again}"))
            return found
    operator_of(spec.extension)
    with stages.stage("domain"):
        geometry = build_geometry(spec)
        check_counts(spec, geometry)
        planned = plan_method(spec, geometry)
        grid, outputs, p = geometry.grid, output_count(spec, geometry), spec.domain.metric_p
        design = epsilons(spec, grid, geometry.distortion, outputs)["epsilon_design_per_km"]
        check_operator(spec.extension, spec.privacy.budget, design, grid, outputs, p)
        stages.expected = planned.seconds
        domain = build_domain(spec, geometry)
        notes = domain.notes + notes_on_epsilon(spec.privacy.epsilon_per_km, grid)
        domain = replace(domain, notes=notes)
    hints = _coarse_seeds(spec, design * grid.cell_km)
    for note in (*domain.notes, *hints, *((planned.words,) if planned.words else ())):
        stages.observer(Note(note))
    return NewStore(domain, planned.facts)


def create(
    spec: JobSpec, url: str, domain: Domain, more: Mapping[str, str] = MappingProxyType({})
) -> MechanismStore:
    """Create the job's store at `url`, with `more` attributes, in the place of any mechanism store there."""
    trust_operators(spec.extension.method)
    MechanismStore.clear(url)
    facts = epsilons(spec, domain.grid, domain.distortion, domain.outputs)
    return MechanismStore.create(url, spec, domain, {**facts, **more})


def epsilons(spec: JobSpec, grid: Grid, distortion: float, outputs: int) -> dict[str, float]:
    """Return the ε's of a job: promised, to keep in the plane, to design for; all in 1/km.

    Raises
    ------
    SpecError
        If stored probabilities cannot carry ε on so fine a grid.
    """
    planar = budget.planar_epsilon(spec.privacy.epsilon_per_km, distortion)
    design = budget.design_epsilon(planar, grid.spacing_km, outputs, spec.domain.metric_p)
    return {
        "epsilon_per_km": spec.privacy.epsilon_per_km,
        "epsilon_planar_per_km": planar,
        "epsilon_design_per_km": design,
    }


def room_of_worker(spec: JobSpec, found: MechanismStore | NewStore) -> int:
    """Return what a worker needs for a task of a store, or of the one to be made, in bytes."""
    facts: Mapping[str, Any]
    if isinstance(found, MechanismStore):
        plan, method = found.plan, extension_of_store(found).method
        facts = found.attributes
    else:
        domain, facts = found.domain, found.facts
        method = facts.get(METHOD_CHOSEN, spec.extension.method)
        plan = plan_of(spec, domain.grid, domain.outputs, domain.kept, method)
    if method == FITTING:
        method = facts.get(METHOD_TRIED, seed_programs(spec.privacy.epsilon_per_km, plan.grid))
    return worker_bytes(spec, plan, method)


def on_workers(spec: JobSpec, workers: int | None, observer: Observer) -> JobSpec:
    """Return a job with so many workers instead of its own, where that means something."""
    if workers is None:
        return spec
    if spec.cluster.kind in ("inline", "address"):
        observer(Note(f'--workers has no effect with [cluster] kind = "{spec.cluster.kind}"'))
        return spec
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"workers": workers})})


def tell_plan(store: MechanismStore, workers: int, stages: Stages) -> None:
    """Tell the observer how long the job should take: for these workers, or as it was said when it began."""
    if stages.expected is not None:
        store.update(seconds_planned=stages.expected(workers))
    planned = store.attributes.get("seconds_planned")
    if planned:
        # Attributes have lost the order.
        stages.observer(Planned({name: planned[name] for name in (*STAGES, TOTAL) if name in planned}))


def _coarse_seeds(spec: JobSpec, reach: float) -> tuple[str, ...]:
    """Return a hint where interpolating loses much: where ε h_0, the reach from seed to seed, is large."""
    if spec.privacy.budget != "certified" or spec.extension.method != LOG_CONVEX or reach < COARSE_SEEDS:
        return ()
    return (
        f"the seeds are coarse (ε times a cell's side is {reach:.1f}): smaller source cells, or "
        'extension.method = "cell-lp", lose less and take longer',
    )
