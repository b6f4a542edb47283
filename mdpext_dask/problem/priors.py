"""The prior π of the records: uniform, counted from road nodes or points of a file, or from a raster."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.spec import FROM_LOSS_FILE, JobSpec
from mdpext_dask.problem.geometry import FileGeometry, Geometry, RoadGeometry
from mdpext_dask.problem.places import read_places, shares
from mdpext_dask.problem.population_raster import read_population


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
    if isinstance(geometry, RoadGeometry) and spec.prior.kind == "road-nodes":
        xy = geometry.node_xy_km[geometry.nodes_inside]
        weight = np.ones(len(xy))
    else:
        xy, weight = read_places(spec.prior.file, "prior.file", geometry)
        weight = shares(weight)
    i, j, inside = grid.nearest_records(xy)
    if not weight[inside].any():
        raise DataError(f"prior.file: {spec.prior.file}: no weight lies inside the grid")
    # bincount adds in the order of the points, so the prior is the same on every machine.
    record = i[inside] * grid.shape[1] + j[inside]
    flat = np.asarray(np.bincount(record, weights=weight[inside], minlength=grid.records), dtype=np.float64)
    flat /= flat.sum()  # in place: it may take much memory
    dropped = int((~inside).sum())
    notes = (f"{dropped} prior points lie outside the grid and were left out",) if dropped else ()
    return flat.reshape(grid.shape), notes


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
        raise DataError("domain.region: all of the prior lies outside the region")
    dropped = max(1 - total / float(prior.sum()), 0.0)
    note = (f"{dropped:.2%} of the prior lies outside the region and was left out",) if dropped > 0 else ()
    kept /= total
    return kept, note
