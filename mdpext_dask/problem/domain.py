"""From a job to numbers: outputs, prior, tasks and loss on the grid of a frame."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.spec import FROM_LOSS_FILE, JobSpec, check_min_probability
from mdpext_dask.problem.geometry import FileFrame, Frame, build_frame
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss, TableLoss, TravelLoss
from mdpext_dask.problem.outputs import check_counts, choose_outputs, output_count
from mdpext_dask.problem.places import STREAM_TASKS, generator_of, nearest_nodes, read_places, shares
from mdpext_dask.problem.priors import in_region, make_prior
from mdpext_dask.problem.projection import Projection


@dataclass(frozen=True)
class Domain:
    """Everything about the problem that does not depend on ε.

    Parameters
    ----------
    projection
        From degrees to the plane; None where the plane is all that is known.
    distortion
        Largest relative stretching of a ground distance in the disc that holds the grid; charged to ε.
        0 without a projection: distances are those of the plane.
    grid
        The grid of records.
    kept
        Source cells that meet the region, bool of shape (cells_x, cells_y); all of them without a region.
    output_xy_km, output_lonlat
        Outputs, float64 of shape (K, 2); degrees are not-a-number without a projection.
    prior
        π of the records, float64 of shape ``grid.shape``, summing to 1; 0 outside the region.
    loss
        The loss between records and outputs.
    notes
        What a user should know: parts of the network dropped, prior points outside.
    downloads
        SHA-256 of what was downloaded for it, by the key of the job that names the place.
    """

    projection: Projection | None
    distortion: float
    grid: Grid
    kept: NDArray[np.bool_]
    output_xy_km: NDArray[np.float64]
    output_lonlat: NDArray[np.float64]
    prior: NDArray[np.float64]
    loss: TravelLoss | EuclideanLoss | TableLoss
    notes: tuple[str, ...]
    downloads: Mapping[str, str] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        """Number K of outputs."""
        return len(self.output_xy_km)


def build_domain(spec: JobSpec, frame: Frame | FileFrame | None = None) -> Domain:
    """Build the whole domain of a job.

    Raises
    ------
    SpecError, DataError
        If the job and its files do not fit together; before any long work.
    """
    frame = frame or build_frame(spec)
    if isinstance(frame, FileFrame):
        return _domain_of_file(spec, frame)
    network, grid = frame.network, frame.grid
    notes = list(frame.notes)
    if network.nodes < network.nodes_read:
        notes.append(
            f"kept the largest connected part of the road network: {network.nodes} of "
            f"{network.nodes_read} nodes"
        )
    check_counts(spec, frame)
    # Before the prior is made, which may take longer.
    check_min_probability(spec.privacy.min_probability, output_count(spec, frame))
    prior, found = make_prior(spec, frame)
    prior, outside = in_region(prior, frame)
    outputs = choose_outputs(spec, frame, prior)
    notes += [*outputs.notes, *found, *outside]
    output_xy = outputs.xy_km
    loss: TravelLoss | EuclideanLoss = EuclideanLoss(output_xy)
    if spec.loss.kind == "travel":
        task_node, task_weight = _choose_tasks(spec, frame)
        loss = TravelLoss(
            node_xy_km=frame.node_xy_km,
            task_distance_km=network.distances_to(task_node, directed=spec.loss.directed),
            task_weight=task_weight,
            output_node=outputs.node,
        )
    return Domain(
        projection=frame.projection,
        distortion=frame.distortion,
        grid=grid,
        kept=frame.kept,
        output_xy_km=output_xy,
        output_lonlat=frame.projection.to_degrees(output_xy),
        prior=prior,
        loss=loss,
        notes=tuple(notes),
        downloads=frame.downloads,
    )


def _domain_of_file(spec: JobSpec, frame: FileFrame) -> Domain:
    problem, projection = frame.problem, frame.projection
    outputs = problem.output_xy_km
    check_min_probability(spec.privacy.min_probability, len(outputs))
    prior, notes = problem.prior, problem.notes
    if spec.prior.kind != FROM_LOSS_FILE:
        prior, found = make_prior(spec, frame)
        notes += found
    prior, outside = in_region(prior, frame)
    return Domain(
        projection=projection,
        distortion=frame.distortion,
        grid=frame.grid,
        kept=frame.kept,
        output_xy_km=outputs,
        output_lonlat=np.full_like(outputs, np.nan) if projection is None else projection.to_degrees(outputs),
        prior=prior,
        loss=TableLoss(frame.grid, problem.read_loss()),
        notes=(*frame.notes, *notes, *outside),
        downloads=frame.downloads,
    )


def _choose_tasks(spec: JobSpec, frame: Frame) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tasks' road nodes, shape (Q,), and their weights, summing to 1."""
    if spec.loss.tasks_file is not None:
        xy, weight = read_places(spec.loss.tasks_file, "loss.tasks_file", frame)
        outside = ~frame.grid.box.contains(xy)
        if outside.any():
            raise DataError(
                f"loss.tasks_file: {spec.loss.tasks_file}: {int(outside.sum())} of {len(xy)} tasks lie "
                "outside the grid"
            )
        return nearest_nodes(frame, xy), shares(weight)
    count = spec.loss.tasks
    generator = generator_of(spec.loss.random_seed, STREAM_TASKS)
    node = np.sort(generator.choice(frame.nodes_inside, size=count, replace=False))
    return node, np.full(count, 1 / count)
