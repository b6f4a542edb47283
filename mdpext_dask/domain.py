"""From a job to numbers: outputs, prior, tasks and loss on the grid of a frame."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from mdpext_dask.errors import DataError
from mdpext_dask.frame import FileFrame, Frame, build_frame
from mdpext_dask.grid import Grid
from mdpext_dask.loss import EuclideanLoss, TableLoss, TravelLoss
from mdpext_dask.projection import Projection
from mdpext_dask.roads import points_path
from mdpext_dask.spec import FROM_LOSS_FILE, JobSpec, check_min_probability
from mdpext_dask.tables import Points, read_points

# Independent streams for what is drawn, so that changing one number redraws one thing.
_STREAM_OUTPUTS, _STREAM_TASKS = 1, 2


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
    output_xy, output_node = _choose_outputs(spec, frame)
    check_min_probability(spec.privacy.min_probability, len(output_xy))
    prior, dropped = _make_prior(spec, frame)
    notes += _prior_note(dropped)
    prior, outside = _in_region(prior, frame)
    notes += outside
    loss: TravelLoss | EuclideanLoss = EuclideanLoss(output_xy)
    if spec.loss.kind == "travel":
        task_node, task_weight = _choose_tasks(spec, frame)
        loss = TravelLoss(
            node_xy_km=frame.node_xy_km,
            task_distance_km=network.distances_to(task_node, directed=spec.loss.directed),
            task_weight=task_weight,
            output_node=output_node,
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
    )


def _domain_of_file(spec: JobSpec, frame: FileFrame) -> Domain:
    problem, projection = frame.problem, frame.projection
    outputs = problem.output_xy_km
    check_min_probability(spec.privacy.min_probability, len(outputs))
    prior, notes = problem.prior, problem.notes
    if spec.prior.kind != FROM_LOSS_FILE:
        prior, dropped = _make_prior(spec, frame)
        notes += _prior_note(dropped)
    prior, outside = _in_region(prior, frame)
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
    )


def output_count(spec: JobSpec, frame: Frame | FileFrame) -> int:
    """Return K without drawing anything.

    Raises
    ------
    SpecError, DataError
        If the outputs' file cannot be read.
    """
    if isinstance(frame, FileFrame):
        return len(frame.problem.output_xy_km)
    if spec.outputs.choose == "seeds":
        return int(frame.corners_kept.sum())
    if spec.outputs.choose == "file":
        return len(_read_file(spec.outputs.file, "outputs.file", weights=False).coordinates)
    assert spec.outputs.count is not None  # the job file's validation sees to it
    return spec.outputs.count


def check_counts(spec: JobSpec, frame: Frame | FileFrame) -> None:
    """Refuse to draw more outputs or tasks than there are road nodes in the box, or the region.

    With a loss file nothing is drawn.

    Raises
    ------
    DataError
        With both numbers.
    """
    if isinstance(frame, FileFrame):
        return
    available = len(frame.nodes_inside)
    wanted = [("outputs.count", spec.outputs.count or 0)]
    if spec.loss.kind == "travel" and spec.loss.tasks_file is None:
        wanted.append(("loss.tasks", spec.loss.tasks))
    for key, count in wanted:
        if count > available:
            place = "box" if spec.domain.region is None else "region"
            raise DataError(f"{key}: {count} are wanted, but the {place} holds only {available} road nodes")


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


def _choose_outputs(spec: JobSpec, frame: Frame) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the outputs, float64 of shape (K, 2) in km, and the nearest road node of each."""
    if spec.outputs.choose == "road-nodes":
        generator = _generator(spec.outputs.random_seed, _STREAM_OUTPUTS)
        node = np.sort(generator.choice(frame.nodes_inside, size=spec.outputs.count, replace=False))
        return frame.node_xy_km[node], node
    if spec.outputs.choose == "seeds":
        xy = frame.grid.seeds_xy_km()[frame.corners_kept.ravel()]
    else:
        points = _read_file(spec.outputs.file, "outputs.file", weights=False)
        xy = _in_plane(points, frame.projection)
        outside = ~frame.grid.box.contains(xy)
        if outside.any():
            row = int(np.argmax(outside))
            raise DataError(
                f"outputs.file: {spec.outputs.file}: {int(outside.sum())} of {len(xy)} outputs lie "
                f"outside the grid, the first in row {row + 1} at x = {xy[row, 0]:.3f} km, "
                f"y = {xy[row, 1]:.3f} km"
            )
        if len(np.unique(xy, axis=0)) < len(xy):
            raise DataError(f"outputs.file: {spec.outputs.file}: two outputs are the same place")
    return xy, _nearest_nodes(frame, xy)


def _choose_tasks(spec: JobSpec, frame: Frame) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tasks' road nodes, shape (Q,), and their weights, summing to 1."""
    if spec.loss.tasks_file is not None:
        points = _read_file(spec.loss.tasks_file, "loss.tasks_file")
        xy = _in_plane(points, frame.projection)
        outside = ~frame.grid.box.contains(xy)
        if outside.any():
            raise DataError(
                f"loss.tasks_file: {spec.loss.tasks_file}: {int(outside.sum())} of {len(xy)} tasks lie "
                "outside the grid"
            )
        return _nearest_nodes(frame, xy), _shares(points.weight)
    count = spec.loss.tasks
    generator = _generator(spec.loss.random_seed, _STREAM_TASKS)
    node = np.sort(generator.choice(frame.nodes_inside, size=count, replace=False))
    return node, np.full(count, 1 / count)


def _shares(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights that add up to 1, however large they are."""
    relative = weight / weight.max()
    return np.asarray(relative / relative.sum())


def _nearest_nodes(frame: Frame, xy_km: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.asarray(KDTree(frame.node_xy_km).query(xy_km)[1], dtype=np.intp)


def _prior_note(dropped: int) -> tuple[str, ...]:
    return (f"{dropped} prior points lie outside the grid and were left out",) if dropped else ()


def _make_prior(spec: JobSpec, frame: Frame | FileFrame) -> tuple[NDArray[np.float64], int]:
    """Return π on the fine lattice and the number of prior points outside the grid."""
    grid = frame.grid
    if spec.prior.kind == "uniform":
        return np.full(grid.shape, 1 / grid.records), 0
    if isinstance(frame, Frame) and spec.prior.kind == "road-nodes":
        xy = frame.node_xy_km[frame.nodes_inside]
        weight = np.ones(len(xy))
    else:
        points = _read_file(spec.prior.file, "prior.file")
        if frame.projection is None and not points.planar:
            raise DataError(
                f"prior.file: {spec.prior.file}: has columns lon,lat, but the loss file has no centre to "
                "place them by; use x_km,y_km"
            )
        xy, weight = _in_plane(points, frame.projection), _shares(points.weight)
    i, j, inside = grid.nearest_records(xy)
    if not weight[inside].any():
        raise DataError(f"prior.file: {spec.prior.file}: no weight lies inside the grid")
    # bincount adds in the order of the points, so the prior is the same on every machine.
    record = i[inside] * grid.shape[1] + j[inside]
    counted = np.bincount(record, weights=weight[inside], minlength=grid.records)
    flat = np.asarray(counted, dtype=np.float64)  # which it is; the weights are
    flat /= flat.sum()  # in place: of very many records one such array is much
    return flat.reshape(grid.shape), int((~inside).sum())


def _in_region(
    prior: NDArray[np.float64], frame: Frame | FileFrame
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return π with nothing outside the region, summing to 1, and a note on how much that was."""
    if frame.kept.all():
        return prior, ()
    kept = np.where(frame.grid.vertices_of(frame.kept), prior, 0.0)
    total = float(kept.sum())
    if total == 0:
        raise DataError("domain.region: all of the prior lies outside the region")
    dropped = max(1 - total / float(prior.sum()), 0.0)
    note = (f"{dropped:.2%} of the prior lies outside the region and was left out",) if dropped > 0 else ()
    kept /= total
    return kept, note


def _read_file(name: str | None, key: str, *, weights: bool = True) -> Points:
    assert name is not None  # the job file's validation sees to it
    return read_points(points_path(name, key), weights=weights)


def _in_plane(points: Points, projection: Projection | None) -> NDArray[np.float64]:
    if points.planar:
        return points.coordinates
    assert projection is not None  # who may have none has asked for points in the plane
    return projection.to_plane(points.coordinates)
