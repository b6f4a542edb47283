"""From a job to numbers: outputs, prior, tasks and loss on the grid of a geometry."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.spec import JobSpec, check_min_probability
from mdpext_dask.problem.geometry import FileGeometry, Geometry, RoadGeometry, build_geometry
from mdpext_dask.problem.loss import EuclideanLoss, TableLoss, TravelLoss
from mdpext_dask.problem.outputs import check_counts, choose_outputs, output_count
from mdpext_dask.problem.places import STREAM_TASKS, generator_of, nearest_nodes, read_places, shares
from mdpext_dask.problem.priors import in_region, make_prior


@dataclass(frozen=True, kw_only=True)
class Domain(Geometry):
    """Everything about the problem that does not depend on ε.

    Parameters
    ----------
    output_xy_km, output_lonlat
        Outputs, float64 of shape (K, 2); degrees are NaN without a projection.
    prior
        π of the records, float64 of shape ``grid.shape``, summing to 1; 0 outside the region.
    loss
        The loss between records and outputs.
    """

    output_xy_km: NDArray[np.float64]
    output_lonlat: NDArray[np.float64]
    prior: NDArray[np.float64]
    loss: TravelLoss | EuclideanLoss | TableLoss

    @property
    def outputs(self) -> int:
        """Number K of outputs."""
        return len(self.output_xy_km)


def build_domain(spec: JobSpec, geometry: RoadGeometry | FileGeometry | None = None) -> Domain:
    """Build the whole domain of a job.

    Raises
    ------
    SpecError, DataError
        If the job and its files do not fit together; before any long work.
    """
    geometry = geometry or build_geometry(spec)
    check_counts(spec, geometry)
    # Before the prior is made, which may take longer.
    check_min_probability(spec.privacy.min_probability, output_count(spec, geometry))
    prior, found = make_prior(spec, geometry)
    prior, outside = in_region(prior, geometry)
    loss: TravelLoss | EuclideanLoss | TableLoss
    if isinstance(geometry, FileGeometry):
        problem = geometry.problem
        output_xy, notes = problem.output_xy_km, problem.notes
        loss = TableLoss(geometry.grid, problem.read_loss())
    else:
        outputs = choose_outputs(spec, geometry, prior)
        output_xy, notes = outputs.xy_km, outputs.notes
        loss = EuclideanLoss(output_xy)
        if spec.loss.kind == "travel":
            tasks, weight = _choose_tasks(spec, geometry)
            distance = geometry.network.distances_to(tasks, directed=spec.loss.directed)
            loss = TravelLoss(geometry.node_xy_km, distance, weight, outputs.node)
    projection, nowhere = geometry.projection, np.full_like(output_xy, np.nan)
    return Domain(
        projection=projection,
        distortion=geometry.distortion,
        grid=geometry.grid,
        kept=geometry.kept,
        output_xy_km=output_xy,
        output_lonlat=nowhere if projection is None else projection.to_degrees(output_xy),
        prior=prior,
        loss=loss,
        notes=geometry.notes + notes + found + outside,
        downloads=geometry.downloads,
    )


def _choose_tasks(spec: JobSpec, geometry: RoadGeometry) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tasks' road nodes, shape (Q,), and their weights, summing to 1."""
    file, count = spec.loss.tasks_file, spec.loss.tasks
    if file is None:
        generator = generator_of(spec.loss.random_seed, STREAM_TASKS)
        node = np.sort(generator.choice(geometry.nodes_inside, size=count, replace=False))
        return node, np.full(count, 1 / count)
    xy, weight = read_places(file, "loss.tasks_file", geometry)
    outside = int((~geometry.grid.box.contains(xy)).sum())
    if outside:
        raise DataError(f"loss.tasks_file: {file}: {outside} of {len(xy)} tasks lie outside the grid")
    return nearest_nodes(geometry, xy), shares(weight)
