"""The cheap part of a problem: network or loss file, projection, region and grid."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.grid import Box, Grid, least_rectangle_deg
from mdpext_dask.problem.loss_file import ProblemFile, read_problem
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import Region, outlined, read_region
from mdpext_dask.readers.longitudes import Degrees, between, east_of
from mdpext_dask.readers.roads.downloads import digests
from mdpext_dask.readers.roads.read_network import RoadNetwork, read_roads


@dataclass(frozen=True)
class Frame:
    """Network, projection and grid: the part of a domain that is cheap to build.

    Parameters
    ----------
    network
        The kept part of the road network.
    projection
        From degrees to the plane.
    distortion
        Largest relative stretching of a ground distance over the grid.
    grid
        The grid of records.
    kept
        Source cells that meet the region, bool of shape (cells_x, cells_y); all of them without a region.
    node_xy_km
        The network's nodes in the plane, float64 of shape (n, 2).
    nodes_inside
        Indices of the nodes inside the box that the job names and, with a region, in a kept source cell.
    notes
        What a user should know.
    downloads
        SHA-256 of what was downloaded for it, by the key of the job that names the place.
    """

    network: RoadNetwork
    projection: Projection
    distortion: float
    grid: Grid
    kept: NDArray[np.bool_]
    node_xy_km: NDArray[np.float64]
    nodes_inside: NDArray[np.intp]
    notes: tuple[str, ...]
    downloads: Mapping[str, str] = field(default_factory=dict)

    @property
    def corners_kept(self) -> NDArray[np.bool_]:
        """Which corners of source cells are corners of kept ones, bool of the shape of the seeds."""
        return replace(self.grid, refine=(1,)).vertices_of(self.kept)


@dataclass(frozen=True)
class FileFrame:
    """Like :class:`Frame`, of a job whose problem comes from a loss file.

    Parameters
    ----------
    problem
        The file, but for the loss itself.
    projection
        From degrees to the plane, if the file says which.
    distortion
        Largest relative stretching of a ground distance over the grid; 0 without a projection.
    grid
        The grid of records, which are those of the file.
    kept
        Source cells that meet the region, bool of shape (cells_x, cells_y); all of them without a region.
    notes
        What a user should know.
    downloads
        SHA-256 of what was downloaded for it, by the key of the job that names the place.
    """

    problem: ProblemFile
    projection: Projection | None
    distortion: float
    grid: Grid
    kept: NDArray[np.bool_]
    notes: tuple[str, ...]
    downloads: Mapping[str, str] = field(default_factory=dict)


def downloads_of(spec: JobSpec) -> dict[str, str]:
    """Return the SHA-256 of what the cache holds of the places that a job names, by the key that does."""
    domain = spec.domain
    return digests(domain.place, outlined(domain.region, domain.place))


def build_frame(spec: JobSpec) -> Frame | FileFrame:
    """Read the network, or the loss file but for the loss, and the region, and lay the grid.

    Raises
    ------
    SpecError, DataError
        If the job and its files do not fit together; before any long work.
    """
    if spec.loss.kind == "file":
        return _file_frame(spec)
    assert spec.domain.cell_km is not None  # the job file's validation sees to it
    network = _read_network(spec)
    bbox = spec.domain.bbox
    region = None if spec.domain.region is None else read_region(spec.domain.region, spec.domain.place)
    if region is not None and bbox is not None:
        region = region.within(bbox)
    within = _nodes_in_box(network, bbox)
    degrees = bbox or (network.box_degrees if region is None else region.box_degrees)
    projection = _turned(spec, Projection.centred_on(*degrees), region, network.lonlat[within])
    node_xy = projection.to_plane(network.lonlat)
    # The box that the job names stays the box, unless the rectangle of least area takes its place.
    if bbox is not None and spec.domain.rotation_deg != "auto":
        box = _projected_box(projection, bbox)
    else:
        box = Box.around(node_xy[within]) if region is None else region.box_km(projection)
    grid = Grid.covering(box, spec.domain.cell_km, spec.domain.refine)
    distortion = projection.distortion(grid.box.radius_km)
    kept = _kept_cells(region, grid, projection)
    if region is not None:
        within = within[grid.lie_in(kept, node_xy[within])]
        if len(within) == 0:
            raise DataError(
                f"domain.region: {region.path}: no road within reach: none of the {network.nodes} road nodes "
                "lies in a source cell that meets it; the network spans "
                f"{[round(d, 4) for d in network.box_degrees]}"
            )
    return Frame(
        network=network,
        projection=projection,
        distortion=distortion,
        grid=grid,
        kept=kept,
        node_xy_km=node_xy,
        nodes_inside=within,
        notes=network.notes + (() if region is None else region.notes),
        downloads=downloads_of(spec),
    )


def _file_frame(spec: JobSpec) -> FileFrame:
    assert spec.loss.file is not None  # the job file's validation sees to it
    problem = read_problem(spec.loss.file)
    grid, projection = problem.grid(spec.domain.refine, spec.domain.cell_km), problem.projection
    distortion = 0.0
    if projection is not None:
        try:
            distortion = projection.distortion(grid.box.radius_km)
        except SpecError as error:
            raise DataError(
                f"loss.file: {problem.path}: x_km and y_km must be km from centre_lon, centre_lat; {error}"
            ) from None
    region = None
    if spec.domain.region is not None:
        if projection is None:
            raise DataError(
                f"domain.region: is in degrees, but {problem.path} has no centre_lon, centre_lat to place it "
                "by; leave it out"
            )
        region = read_region(spec.domain.region)
        region.outline_km(projection)  # refuses what the plane does not hold
    kept = _kept_cells(region, grid, projection)
    if region is not None and not kept.any():
        raise DataError(
            f"domain.region: {region.path}: lies outside the grid of {problem.path}; the region spans "
            f"{[round(d, 4) for d in region.box_degrees]}"
        )
    return FileFrame(
        problem=problem,
        projection=projection,
        distortion=distortion,
        grid=grid,
        kept=kept,
        notes=() if region is None else region.notes,
        downloads=downloads_of(spec),
    )


def _read_network(spec: JobSpec) -> RoadNetwork:
    directed = spec.loss.kind == "travel" and spec.loss.directed
    network = read_roads(spec.domain.roads, spec.domain.place, spec.domain.bbox)
    if directed and not network.directions_known:
        raise SpecError(
            f"loss.directed: {spec.domain.roads} has lost the directions of its streets; use directed = false"
        )
    return network.largest_connected_part(directed=directed)


def _nodes_in_box(network: RoadNetwork, degrees: Degrees | None) -> NDArray[np.intp]:
    """Return the indices of the nodes in a box given in degrees; of all of them without one."""
    if degrees is None:
        return np.arange(network.nodes)
    lon, lat = network.lonlat.T
    west, south, east, north = degrees
    inside = np.flatnonzero(between(lon, west, east) & (lat >= south) & (lat <= north))
    if len(inside) == 0:
        raise DataError(
            f"domain.bbox: no road within reach: none of the {network.nodes} road nodes lies in "
            f"{list(degrees)}; the network spans {[round(d, 4) for d in network.box_degrees]}"
        )
    return inside


def _turned(
    spec: JobSpec, projection: Projection, region: Region | None, lonlat: NDArray[np.float64]
) -> Projection:
    """Return the projection turned as the job says; ``"auto"``: to fit the region, or else the places."""
    rotation = spec.domain.rotation_deg
    if rotation == "auto":
        places = projection.to_plane(lonlat) if region is None else region.outline_km(projection)
        rotation = least_rectangle_deg(places)
    return replace(projection, rotation_deg=rotation)


def _kept_cells(region: Region | None, grid: Grid, projection: Projection | None) -> NDArray[np.bool_]:
    if region is None:
        return np.ones((grid.cells_x, grid.cells_y), dtype=bool)
    assert projection is not None  # a region in degrees has been refused without one
    return region.cells(grid, projection)


def _projected_box(projection: Projection, degrees: Degrees) -> Box:
    """Return the box in the plane around a box in degrees; its curved sides are sampled."""
    west, south, north = degrees[0], degrees[1], degrees[3]
    east = east_of(west, degrees[2])
    along = np.linspace(0, 1, 65)
    lon, lat = west + along * (east - west), south + along * (north - south)
    border = np.concatenate(
        [
            np.stack(np.broadcast_arrays(lon, south), axis=-1),
            np.stack(np.broadcast_arrays(lon, north), axis=-1),
            np.stack(np.broadcast_arrays(west, lat), axis=-1),
            np.stack(np.broadcast_arrays(east, lat), axis=-1),
        ]
    )
    return Box.around(projection.to_plane(border))
