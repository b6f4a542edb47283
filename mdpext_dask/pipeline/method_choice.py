"""Which method ``"auto"`` stands for: noise, or seed programs where they may be tried and lose less.

Noise takes seconds, whatever the city. Programs may lose less, and may take days. They are tried if the plan
says that the whole job takes no longer with them than it allows; it is the plan that decides and not a clock,
so that a job has the same bytes on every machine. Then the mechanism with the lower expected loss is kept
(:mod:`mdpext_dask.pipeline.seed_stage`), so the result is never worse than noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mdpext_dask.errors import SpecError
from mdpext_dask.job.sections import FITTING, NOISE, ExtensionSection
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.cost_model import JobCosts
from mdpext_dask.pipeline.memory import check_memory
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry
from mdpext_dask.problem.outputs import MOST_WITH_NOISE
from mdpext_dask.store.schema import METHOD_CHOSEN, METHOD_IN_WORDS


@dataclass(frozen=True)
class PlannedMethod:
    """What a job is planned with.

    Parameters
    ----------
    spec
        The job, with a method that is not ``"auto"``: that of the programs, if they are tried.
    costs
        Of that job.
    seconds
        Seconds by stage for a number of workers, with what choosing takes.
    facts
        Attributes of the store: the method, if it is chosen before anything is computed, and why.
    words
        What is planned, in one line; None where the job names its method.
    """

    spec: JobSpec
    costs: JobCosts
    seconds: Callable[[int], dict[str, float]]
    facts: dict[str, str]
    words: str | None = None


def plan_method(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> PlannedMethod:
    """Return what a job is planned with; methods that this machine has no memory for are not.

    Raises
    ------
    SpecError
        If this machine has memory for none.
    """
    if spec.extension.method != FITTING:
        check_memory(spec, geometry)
        costs = JobCosts.of(spec, geometry)
        return PlannedMethod(spec, costs, costs.seconds, {})
    noise, programs = (_with_method(spec, method) for method in (NOISE, spec.programs))
    refused = {one.extension.method: _refusal(one, geometry) for one in (noise, programs)}
    if refused[NOISE] is not None:
        if refused[spec.programs] is not None:
            raise SpecError(refused[NOISE])
        return _chosen(programs, geometry, f"{NOISE}: {refused[NOISE]}")
    if refused[spec.programs] is not None:
        return _chosen(noise, geometry, f"{spec.programs}: {refused[spec.programs]}")
    costs, reference = JobCosts.of(programs, geometry), JobCosts.of(noise, geometry)
    planned, allowed = costs.seconds(1)["total"], spec.extension.seconds
    assert allowed is not None  # the section fills it in
    if planned > allowed:
        so_long = f"{spec.programs} would take about {planned:,.0f} s, more than extension.seconds allows"
        return _chosen(noise, geometry, f"{so_long} ({allowed:g})")

    def seconds(workers: int) -> dict[str, float]:
        found, more = costs.seconds(workers), reference.seconds(workers)["seed"]
        return {**found, "seed": found["seed"] + more, "total": found["total"] + more}

    tried = f"the better of {NOISE} and {spec.programs}, about {planned:,.0f} s"
    return PlannedMethod(programs, costs, seconds, {}, f"method: {tried}")


def _chosen(spec: JobSpec, geometry: RoadGeometry | FileGeometry, why: str) -> PlannedMethod:
    """Return the plan of a job whose method is chosen before anything is computed."""
    costs, method = JobCosts.of(spec, geometry), spec.extension.method
    words = f"method: {method}; {why}"
    return PlannedMethod(spec, costs, costs.seconds, {METHOD_CHOSEN: method, METHOD_IN_WORDS: words}, words)


def _with_method(spec: JobSpec, method: str) -> JobSpec:
    """Return a job with a method, and with the outputs that it has without."""
    outputs = spec.outputs
    if outputs.limit is None:
        outputs = outputs.model_copy(update={"limit": MOST_WITH_NOISE})
    extension = ExtensionSection(method=method, sweeps=spec.extension.sweeps)
    return spec.model_copy(update={"extension": extension, "outputs": outputs})


def _refusal(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> str | None:
    """Return why this machine has no memory for a job, if so."""
    try:
        check_memory(spec, geometry)
    except SpecError as error:
        return str(error)
    return None
