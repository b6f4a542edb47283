"""Which method ``"auto"`` stands for: noise, or seed programs where they may be tried and lose less.

Noise takes seconds, whatever the city. Programs may lose less, and may take days. They are tried if the plan
says that the whole job takes no longer with them than it allows; it is the plan that decides, not a clock and
not what this machine or cluster has, so that a job has the same bytes everywhere. Then the mechanism with the
lower expected loss is kept (:mod:`mdpext_dask.pipeline.seed_stage`), so the result is never worse than noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.baselines.fine_noise import cells_of
from mdpext_dask.extend.choose import seed_programs
from mdpext_dask.job.sections import FITTING, NOISE, RECORDS, WINDOWS, ClusterSection
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.cost_model import JobCosts
from mdpext_dask.pipeline.memory import check_memory
from mdpext_dask.pipeline.noise_limits import check_noise
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry
from mdpext_dask.problem.outputs import MOST_WITH_NOISE
from mdpext_dask.store.schema import METHOD_CHOSEN, METHOD_IN_WORDS, METHOD_TRIED


@dataclass(frozen=True)
class PlannedMethod:
    """What a job is planned with.

    Parameters
    ----------
    costs
        Of the job with a method that is not ``"auto"``: that of the programs, if they are tried.
    seconds
        Seconds by stage for a number of workers, with what choosing takes.
    facts
        Attributes of the store: the method, if it is chosen before anything is computed, and why; else the
        one that is compared with noise.
    words
        What is planned, in one line; None where the job names its method.
    """

    costs: JobCosts
    seconds: Callable[[int], dict[str, float]]
    facts: dict[str, str]
    words: str | None = None


def plan_method(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> PlannedMethod:
    """Return what a job is planned with: the same on every machine, and on every cluster.

    Raises
    ------
    SpecError
        If this machine has no memory for it, or there is more noise than can be gone through.
    """
    if spec.extension.method != FITTING:
        if spec.extension.method in (NOISE, WINDOWS):
            check_noise(spec, geometry)
        check_memory(spec, geometry)
        costs = JobCosts.of(spec, geometry)
        return PlannedMethod(costs, costs.seconds, {})
    noise = _with_method(spec, NOISE)
    # Of no cluster in particular, whose workers would take time to start.
    alone = spec.model_copy(update={"cluster": ClusterSection(kind="inline")})
    allowed = spec.extension.seconds
    assert allowed is not None  # the section fills it in
    # One program over all records is the best of programs, where it may be tried; then windows of them.
    seeds = seed_programs(spec.privacy.epsilon_per_km, geometry.grid)
    methods = RECORDS, WINDOWS, seeds
    planned = {method: _seconds_of_both(alone, geometry, method)(1)["total"] for method in methods}
    tried = next((method for method in methods if planned[method] <= allowed), seeds)
    programs = _with_method(spec, tried)
    if (excess := cells_of(geometry.grid, spec.privacy.epsilon_per_km).excess) is not None:
        if planned[tried] > allowed or tried == WINDOWS:
            check_noise(spec, geometry)  # which says so: neither can be
        return _chosen(programs, geometry, f"{NOISE} would have {excess}")
    words = f"about {planned[tried]:,.0f} s with {tried}"
    if planned[tried] > allowed:
        return _chosen(noise, geometry, f"{words} would be more than extension.seconds allows ({allowed:g})")
    check_memory(noise, geometry)
    try:
        check_memory(programs, geometry)
    except SpecError as error:
        # They are not just left out: a job has the same bytes on every machine that can run it.
        raise SpecError(f'{error}; or name extension.method = "{NOISE}"') from None
    costs, facts = JobCosts.of(programs, geometry), {METHOD_TRIED: tried}
    words = f"method: the better of {NOISE} and {tried}, {words}"
    return PlannedMethod(costs, _seconds_of_both(spec, geometry, tried), facts, words)


def _seconds_of_both(
    spec: JobSpec, geometry: RoadGeometry | FileGeometry, tried: str
) -> Callable[[int], dict[str, float]]:
    """Return how long a job takes with programs and noise, in s, by stage for a number of workers."""
    noise, programs = (JobCosts.of(_with_method(spec, method), geometry) for method in (NOISE, tried))

    def seconds(workers: int) -> dict[str, float]:
        found, made = programs.seconds(workers), noise.seconds(workers)
        more = made["seed"] + made["extend"] + made["evaluate"]
        return {**found, "seed": found["seed"] + more, "total": found["total"] + more}

    return seconds


def _chosen(spec: JobSpec, geometry: RoadGeometry | FileGeometry, why: str) -> PlannedMethod:
    """Return the plan of a job whose method is chosen before anything is computed."""
    check_memory(spec, geometry)
    costs, method = JobCosts.of(spec, geometry), spec.extension.method
    words = f"method: {method}; {why}"
    return PlannedMethod(costs, costs.seconds, {METHOD_CHOSEN: method, METHOD_IN_WORDS: words}, words)


def _with_method(spec: JobSpec, method: str) -> JobSpec:
    """Return a job with a method, and with the outputs that it has without."""
    outputs = spec.outputs
    if outputs.limit is None:
        outputs = outputs.model_copy(update={"limit": MOST_WITH_NOISE})
    extension = spec.extension.model_copy(update={"method": method})  # with the seconds, which bound windows
    return spec.model_copy(update={"extension": extension, "outputs": outputs})
