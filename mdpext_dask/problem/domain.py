"""From a job to numbers: outputs, prior, tasks and loss on the grid of a geometry."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.sections import AUTO_OUTPUTS
from mdpext_dask.job.spec import FROM_LOSS_FILE, JobSpec, check_min_probability
from mdpext_dask.problem.geometry import FileGeometry, Geometry, RoadGeometry, build_geometry
from mdpext_dask.problem.loss import EuclideanLoss, TableLoss, TravelLoss
from mdpext_dask.problem.outputs import (
    STREAM_TASKS,
    check_counts,
    check_prior_count,
    choose_outputs,
    generator_of,
    output_count,
)
from mdpext_dask.problem.population_raster import read_population
from mdpext_dask.readers.point_chunks import PointColumns


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
    road_xy_km
        Both ends of every road that touches the grid, for maps: float32 of shape (m, 2, 2), in km; empty
        without a network.
    """

    output_xy_km: NDArray[np.float64]
    output_lonlat: NDArray[np.float64]
    prior: NDArray[np.float64]
    loss: TravelLoss | EuclideanLoss | TableLoss
    road_xy_km: NDArray[np.float32]

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
    if spec.outputs.choose != AUTO_OUTPUTS:
        notes += _more_than_records(len(output_xy), geometry)
    if np.count_nonzero(prior) == 1:
        outside += ("prior: all of it is at one record; what is reported is best for whoever is there alone",)
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
        road_xy_km=_roads_on(geometry),
        notes=geometry.notes + notes + found + outside,
        downloads=geometry.downloads,
    )


def _roads_on(geometry: RoadGeometry | FileGeometry) -> NDArray[np.float32]:
    """Return :attr:`Domain.road_xy_km`: each road once, whatever its directions."""
    if isinstance(geometry, FileGeometry):
        return np.empty((0, 2, 2), dtype=np.float32)
    network, xy = geometry.network, geometry.node_xy_km
    ends = np.unique(np.sort(np.stack([network.start, network.end], axis=-1), axis=-1), axis=0)
    inside = geometry.grid.box.contains(xy)
    ends = ends[(ends[:, 0] != ends[:, 1]) & inside[ends].any(axis=-1)]
    return np.asarray(xy[ends], dtype=np.float32)


def _more_than_records(outputs: int, geometry: Geometry) -> tuple[str, ...]:
    """Return a note if there are more places to report than places to be at."""
    records = geometry.grid.count_vertices_of(geometry.kept)
    if outputs <= records:
        return ()
    return (
        f"outputs: {outputs:,} for {records:,} records: more places to report than places to be at; time "
        "and memory grow with each, so check that this is meant",
    )


def _choose_tasks(spec: JobSpec, geometry: RoadGeometry) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tasks' road nodes, shape (Q,), and their weights, summing to 1."""
    file, count = spec.loss.tasks_file, spec.loss.tasks
    if file is None:
        generator = generator_of(spec.loss.random_seed, STREAM_TASKS)
        node = np.sort(generator.choice(geometry.nodes_inside, size=count, replace=False))
        return node, np.full(count, 1 / count)
    columns = PointColumns(spec.loss.tasks_lon_column, spec.loss.tasks_lat_column)
    xy, weight, seen = geometry.read_places(file, "loss.tasks_file", columns)
    if seen.outside:
        raise DataError(f"loss.tasks_file: {file}: {seen.said()}")
    return geometry.nearest_nodes(xy), shares(weight)


def make_prior(spec: JobSpec, geometry: Geometry) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return π on the fine lattice, summing to 1, and what a user should know.

    Raises
    ------
    SpecError, DataError
        If the file cannot be read, or has nothing inside the grid.
    """
    grid = geometry.grid
    if isinstance(geometry, FileGeometry) and spec.prior.kind == FROM_LOSS_FILE:
        return geometry.problem.prior, ()
    if spec.prior.kind == "uniform":
        return np.full(grid.shape, 1 / grid.records), ()
    if spec.prior.kind == "raster":
        return _from_raster(spec, geometry)
    i, j, weight, notes = _prior_points(spec, geometry)
    # bincount adds in the order of the points, so the prior is the same on every machine.
    record = i * grid.shape[1] + j
    flat = np.asarray(np.bincount(record, weights=weight, minlength=grid.records), dtype=np.float64)
    flat /= flat.sum()  # in place: it may take much memory
    return flat.reshape(grid.shape), notes


def _prior_points(
    spec: JobSpec, geometry: Geometry
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64], tuple[str, ...]]:
    """Return the records and weights of the points of a prior inside the grid, and what to know of them."""
    grid = geometry.grid
    source, notes = f"prior.file: {spec.prior.file}", tuple[str, ...]()
    if isinstance(geometry, RoadGeometry) and spec.prior.kind == "road-nodes":
        xy = geometry.node_xy_km[geometry.nodes_inside]
        weight = np.ones(len(xy))
        i, j, inside = grid.nearest_records(xy)
    else:
        columns = PointColumns(spec.prior.lon_column, spec.prior.lat_column)
        xy, weight, seen = geometry.read_places(spec.prior.file, "prior.file", columns)
        i, j, inside = grid.nearest_records(xy)
        weight, notes = shares(weight), seen.notes(source, left_out=True)
        if not weight[inside].any():
            raise DataError(f"{source}: no weight lies inside the grid: {seen.said()}")
    return i[inside], j[inside], weight[inside], notes


def check_places(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> None:
    """Refuse what :func:`build_domain` would of prior, outputs, tasks and loss, without building them.

    Arrays over all records are made only where a file has one.

    Raises
    ------
    SpecError, DataError
        As of :func:`build_domain`.
    """
    if spec.prior.kind in ("raster", FROM_LOSS_FILE):
        available = int(np.count_nonzero(in_region(make_prior(spec, geometry)[0], geometry)[0]))
    elif spec.prior.kind == "uniform":
        available = geometry.grid.count_vertices_of(geometry.kept)
    else:
        i, j, weight, _ = _prior_points(spec, geometry)
        used = geometry.grid.are_vertices_of(geometry.kept, i, j) & (weight > 0)
        if not used.any():
            raise _outside_region()
        available = len(np.unique(i[used] * geometry.grid.shape[1] + j[used]))
    if isinstance(geometry, FileGeometry):
        geometry.problem.read_loss()
        return
    if spec.outputs.choose == "prior":
        check_prior_count(spec.outputs.count or 0, available)
    if spec.loss.kind == "travel":
        _choose_tasks(spec, geometry)


def _outside_region() -> DataError:
    return DataError("domain.region: all of the prior lies outside the region")


def _from_raster(spec: JobSpec, geometry: Geometry) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    assert spec.prior.file is not None  # ensured by the job file's validation
    if geometry.projection is None:
        raise DataError(
            f"prior.file: {spec.prior.file}: lies on Earth, but the loss file has no centre to place it by"
        )
    found = read_population(Path(spec.prior.file), geometry.grid, geometry.projection)
    total = float(found.mass.sum())
    notes = [f"{total:,.1f} of the population of {spec.prior.file} is in the grid"]
    if found.outside > 0:
        notes[0] += f", {found.outside:,.1f} in pixels at its border was left out"
    if not found.covered:
        notes.append(f"{spec.prior.file} does not cover all of the grid; the prior is 0 where it does not")
    found.mass[...] /= total
    return found.mass, tuple(notes)


def in_region(prior: NDArray[np.float64], geometry: Geometry) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return π set to 0 outside the region, summing to 1, and a note on how much was dropped.

    Raises
    ------
    DataError
        If all of it lies outside.
    """
    if geometry.kept.all():
        return prior, ()
    kept = np.where(geometry.grid.vertices_of(geometry.kept), prior, 0.0)
    total = float(kept.sum())
    if total == 0:
        raise _outside_region()
    dropped = max(1 - total / float(prior.sum()), 0.0)
    note = (f"{dropped:.2%} of the prior lies outside the region and was left out",) if dropped > 0 else ()
    kept /= total
    return kept, note


def shares(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights divided by their sum; the sum may exceed the range of float64."""
    relative = weight / weight.max()
    return np.asarray(relative / relative.sum())
