"""Points that a job names, in its plane; nearest road nodes; generators for what is drawn."""

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from mdpext_dask.errors import DataError
from mdpext_dask.problem.geometry import Geometry, RoadGeometry
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.roads.read_network import points_path

# Independent streams for what is drawn, so that changing one number redraws one thing.
STREAM_OUTPUTS, STREAM_TASKS = 1, 2


def generator_of(seed: int, stream: int) -> np.random.Generator:
    """Return the generator of a stream."""
    return np.random.default_rng([seed, stream])


def read_places(
    name: str | None, key: str, geometry: Geometry, *, weights: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points of a file that a job names.

    Parameters
    ----------
    name
        Path of the file, or the name of a built-in one.
    key
        Where the job names it.
    weights
        Whether the file's weights count.

    Returns
    -------
    xy_km
        In the plane, float64 of shape (n, 2), in km.
    weight
        float64 of shape (n,), ≥ 0, not all zero.

    Raises
    ------
    SpecError, DataError
        If the file cannot be read, or has degrees and there is no projection.
    """
    assert name is not None  # ensured by the job file's validation
    points = read_points(points_path(name, key), weights=weights)
    if points.planar:
        return points.coordinates, points.weight
    if geometry.projection is None:
        raise DataError(
            f"{key}: {name}: has columns lon,lat, but the loss file has no centre to place them by; use "
            "x_km,y_km"
        )
    return geometry.projection.to_plane(points.coordinates), points.weight


def shares(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights divided by their sum; the sum may exceed the range of float64."""
    relative = weight / weight.max()
    return np.asarray(relative / relative.sum())


def nearest_nodes(geometry: RoadGeometry, xy_km: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the nearest road node of each place of shape (n, 2), in km."""
    return np.asarray(KDTree(geometry.node_xy_km).query(xy_km)[1], dtype=np.intp)
