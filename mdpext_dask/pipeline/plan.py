"""What a job takes, as ``plan`` prints it, and whether this machine can run it."""

from typing import Any

from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.outlook import outlook
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.extend.choose import check_operator
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import SEEDLESS
from mdpext_dask.job.spec import JobSpec, check_min_probability
from mdpext_dask.pipeline.cost_model import WORKER_COUNTS, JobCosts
from mdpext_dask.pipeline.memory import (
    client_bytes,
    noise_bytes,
    noise_table_bytes,
    receipt_bytes,
    seed_bytes,
    table_bytes,
)
from mdpext_dask.pipeline.method_choice import plan_method
from mdpext_dask.problem.domain import build_domain, check_places
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry, build_geometry
from mdpext_dask.problem.grid import coarse_radius_km
from mdpext_dask.problem.outputs import check_counts, notes_on_outputs
from mdpext_dask.problem.plausible import notes_on_epsilon
from mdpext_dask.seed.budget import design_epsilon, planar_epsilon
from mdpext_dask.store.schema import METHOD_CHOSEN


def prospect(spec: JobSpec, geometry: RoadGeometry, observer: Observer = silent) -> dict[str, Any]:
    """Return what a job will come to, as ``start`` prints it.

    Parameters
    ----------
    spec, geometry, observer
        See :func:`plan_job`.

    Returns
    -------
    The plan; source cells, `spacing_km` of records and `max_quantisation_km`; about what it will lose
    (`loss_km_about`) and planar noise at the nearest road node (`plain_loss_km_about`).

    Raises
    ------
    SpecError, DataError, SolverError
        See :func:`plan_job` and :func:`mdpext_dask.evaluation.outlook.outlook`.
    """
    facts = plan_job(spec, observer, geometry)
    grid = geometry.grid
    facts |= {
        "cell_km": grid.cell_km,
        "refine": list(grid.refine),
        "spacing_km": grid.spacing_km,
        "max_quantisation_km": coarse_radius_km(1, grid.spacing_km, spec.domain.metric_p),
    }
    if facts["refused"] is None:
        problem = Problem.of_domain(spec, build_domain(spec, geometry))
        found = outlook(problem, geometry)
        facts |= {"loss_km_about": found.loss_km, "plain_loss_km_about": found.plain_km}
    return facts


def plan_job(
    spec: JobSpec, observer: Observer = silent, geometry: RoadGeometry | FileGeometry | None = None
) -> dict[str, Any]:
    """Return what a job takes, as ``plan`` prints it: sizes exactly, seconds as an estimate by workers.

    Parameters
    ----------
    spec
        The job.
    observer
        Called with notes.
    geometry
        The job's, if it is known.

    Raises
    ------
    SpecError, DataError
        For what :func:`mdpext_dask.pipeline.run.build` would refuse about the job and its files.
    """
    tell_beyond(observer, spec)
    geometry = geometry or build_geometry(spec)
    notes = geometry.notes + notes_on_outputs(spec, geometry)
    notes += notes_on_epsilon(spec.privacy.epsilon_per_km, geometry.grid)
    refused, found = None, None
    try:
        found = plan_method(spec, geometry)
    except SpecError as error:
        refused = str(error)
    if found is not None and found.words is not None:
        notes += (found.words,)
    for note in notes:
        observer(Note(note))
    # What cannot be run here is told of all the same.
    costs = JobCosts.of(spec, geometry) if found is None else found.costs
    seconds = costs.seconds if found is None else found.seconds
    method = spec.extension.method if found is None else found.facts.get(METHOD_CHOSEN, spec.extension.method)
    spec = costs.spec
    grid, plan, outputs = geometry.grid, costs.plan, costs.plan.outputs
    check_min_probability(spec.privacy.min_probability, outputs)
    check_counts(spec, geometry)
    planar = planar_epsilon(spec.privacy.epsilon_per_km, geometry.distortion)
    design = design_epsilon(planar, grid.spacing_km, outputs, spec.domain.metric_p)
    check_operator(spec.extension, spec.privacy.budget, design, grid, outputs, spec.domain.metric_p)
    if refused is None:
        check_places(spec, geometry)
    return {
        # Why this machine could not run it, if so; elsewhere it may well run.
        "refused": refused,
        # "auto" where it takes the run to choose.
        "method": method,
        # Of network, region, thinned outputs, ε and the method; those of prior and files come with a run.
        "notes": list(notes),
        "records": grid.records,
        "records_inside": grid.count_vertices_of(geometry.kept),
        "outputs": outputs,
        "seeds": 0 if spec.extension.method in SEEDLESS else grid.seeds,
        "source_cells": grid.source_cells,
        "source_cells_kept": int(geometry.kept.sum()),
        "cells": [grid.cells_x, grid.cells_y],
        "blocks": plan.blocks,
        "blocks_skipped": len(plan.skipped),
        "block_cells": list(plan.block_cells),
        "store_bytes": plan.store_bytes,
        # Beside it while cell programs run; a sixth of it stays, so that blocks can be extended again.
        "work_bytes": costs.cells.work_bytes,
        "peak_bytes_per_task": plan.peak_bytes(spec.extension.method)
        + (noise_table_bytes(spec, grid) if costs.noise is not None else 0),
        # What a worker holds besides, once.
        "table_bytes_per_worker": table_bytes(spec.loss, geometry),
        # What solving the seed takes, of one worker.
        "seed_bytes": noise_bytes(spec, geometry) if costs.noise is not None else seed_bytes(plan, spec),
        "client_bytes": client_bytes(spec, geometry, plan),
        "receipt_bytes": receipt_bytes(plan),
        "tasks": costs.tasks,
        # What the seed takes, about; trials are of the whole mechanism.
        "seed_work": {"programs": costs.solves, "rounds": costs.rounds, "trials": costs.trials},
        "scheduler": costs.scheduler(),
        "seconds_by_workers": {str(workers): seconds(workers) for workers in WORKER_COUNTS},
        "road_nodes": costs.nodes,
        "road_nodes_read": geometry.network.nodes_read if isinstance(geometry, RoadGeometry) else 0,
        "distortion": geometry.distortion,
        "rotation_deg": 0.0 if geometry.projection is None else geometry.projection.rotation_deg,
    }
