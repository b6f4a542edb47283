"""The part of a problem that is cheap to build: network or loss file, projection, region, grid, places."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.grid import Array, Box, Grid, chosen_cells, least_rectangle_deg
from mdpext_dask.problem.loss_file import ProblemFile, read_problem
from mdpext_dask.problem.plausible import PointsSeen
from mdpext_dask.problem.projection import Projection
from mdpext_dask.problem.region import outlined, read_region, rounded
from mdpext_dask.readers.longitudes import Degrees, as_swapped, between, east_of
from mdpext_dask.readers.point_chunks import BY_NAME, PointColumns
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.roads.downloads import digests
from mdpext_dask.readers.roads.read_network import RoadNetwork, points_path, read_roads


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """Projection, grid and region of a job.

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
    notes
        What a user should know: parts of the network dropped, prior points outside.
    downloads
        SHA-256 of what was downloaded for the job, by the key of the job that names the place.
    """

    projection: Projection | None
    distortion: float
    grid: Grid
    kept: NDArray[np.bool_]
    notes: tuple[str, ...]
    downloads: Mapping[str, str] = field(default_factory=dict)

    def read_places(
        self, name: str | None, key: str, columns: PointColumns = BY_NAME, *, weights: bool = True
    ) -> tuple[Array, Array, PointsSeen]:
        """Return the points of a file that a job names.

        Parameters
        ----------
        name
            Path of the file, or the name of a built-in one.
        key
            Where the job names it.
        columns
            Which columns hold longitude and latitude, where the job says so.
        weights
            Whether the file's weights count.

        Returns
        -------
        xy_km
            In the plane, float64 of shape (n, 2), in km.
        weight
            float64 of shape (n,), ≥ 0, not all zero.
        seen
            Which of them lie outside the grid, and what looks wrong about them.

        Raises
        ------
        SpecError, DataError
            If the file cannot be read, or has degrees and there is no projection.
        """
        assert name is not None  # ensured by the job file's validation
        points = read_points(points_path(name, key), weights=weights, columns=columns)
        xy, seen = points.coordinates, PointsSeen(self.grid, self.projection)
        if not points.planar:
            if self.projection is None:
                raise DataError(
                    f"{key}: {name}: has columns lon,lat, but the loss file has no centre to place them by; "
                    "use x_km,y_km"
                )
            xy = self.projection.to_plane(xy)
        seen.add(points.coordinates, xy, ~self.grid.box.contains(xy), planar=points.planar)
        return xy, points.weight, seen


@dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity, as a key of caches
class RoadGeometry(Geometry):
    """The geometry of a job on a road network.

    Parameters
    ----------
    network
        The kept part of the road network.
    node_xy_km
        The network's nodes in the plane, float64 of shape (n, 2).
    nodes_inside
        Indices of the nodes inside the box that the job names and, with a region, in a kept source cell.
    """

    projection: Projection
    network: RoadNetwork
    node_xy_km: Array
    nodes_inside: NDArray[np.intp]

    @property
    def corners_kept(self) -> NDArray[np.bool_]:
        """Which corners of source cells are corners of kept ones, bool of the shape of the seeds."""
        return replace(self.grid, refine=(1,)).vertices_of(self.kept)

    def nearest_nodes(self, xy_km: Array) -> NDArray[np.intp]:
        """Return the nearest road node of each place of shape (n, 2), in km."""
        return np.asarray(KDTree(self.node_xy_km).query(xy_km)[1], dtype=np.intp)


@dataclass(frozen=True, kw_only=True)
class FileGeometry(Geometry):
    """The geometry of a job on a loss file, whose records are those of the grid.

    Parameters
    ----------
    problem
        The file, without the loss matrix itself.
    """

    problem: ProblemFile


def downloads_of(spec: JobSpec) -> dict[str, str]:
    """Return the SHA-256 of cached downloads of the places that a job names, by the key that names them."""
    domain = spec.domain
    return digests(domain.place, outlined(domain.region, domain.place))


def build_geometry(spec: JobSpec) -> RoadGeometry | FileGeometry:
    """Read the network, or the loss file without its matrix, and the region, and lay the grid.

    Raises
    ------
    SpecError, DataError
        If the job and its files do not fit together; before any long work.
    """
    geometry: RoadGeometry | FileGeometry
    geometry = _on_loss_file(spec) if spec.loss.kind == "file" else _on_roads(spec)
    return replace(geometry, downloads=downloads_of(spec))


def _on_roads(spec: JobSpec) -> RoadGeometry:
    bbox = spec.domain.bbox
    directed = spec.loss.kind == "travel" and spec.loss.directed
    network = read_roads(spec.domain.roads, spec.domain.place, bbox)
    if directed and not network.directions_known:
        raise SpecError(
            f"loss.directed: {spec.domain.roads} has lost the directions of its streets; use directed = false"
        )
    network = network.largest_connected_part(directed=directed)
    region = None if spec.domain.region is None else read_region(spec.domain.region, spec.domain.place)
    if region is not None and bbox is not None:
        region = region.within(bbox)
    within = _nodes_in_box(network, bbox)
    degrees = bbox or (network.box_degrees if region is None else region.box_degrees)
    projection, rotation = Projection.centred_on(*degrees), spec.domain.rotation_deg
    if rotation == "auto":  # to fit the region, or else the road nodes
        places = (
            projection.to_plane(network.lonlat[within]) if region is None else region.outline_km(projection)
        )
        rotation = least_rectangle_deg(places)
    projection = replace(projection, rotation_deg=rotation)
    node_xy = projection.to_plane(network.lonlat)
    # The box that the job names stays the box, unless the rectangle of least area takes its place.
    if bbox is not None and spec.domain.rotation_deg != "auto":
        box = _projected_box(projection, bbox)
    else:
        box = Box.around(node_xy[within]) if region is None else region.box_km(projection)
    grid = Grid.covering(
        box, *chosen_cells(box, spec.privacy.epsilon_per_km, spec.domain.cell_km, spec.domain.refine)
    )
    distortion = projection.distortion(grid.box.radius_km)
    kept = np.ones((grid.cells_x, grid.cells_y), dtype=bool)
    notes = network.notes
    if region is not None:
        kept = region.cells(grid, projection)
        within = within[grid.lie_in(kept, node_xy[within])]
        if len(within) == 0:
            raise DataError(
                f"domain.region: {region.path}: no road within reach: none of the {network.nodes} road nodes "
                f"lies in a source cell that meets it; the network spans {rounded(network.box_degrees)}"
            )
        notes += region.notes
    if network.nodes < network.nodes_read:
        kept_nodes = f"{network.nodes} of {network.nodes_read} nodes"
        notes += (f"kept the largest connected part of the road network: {kept_nodes}",)
    return RoadGeometry(
        network=network,
        projection=projection,
        distortion=distortion,
        grid=grid,
        kept=kept,
        node_xy_km=node_xy,
        nodes_inside=within,
        notes=notes,
    )


def _on_loss_file(spec: JobSpec) -> FileGeometry:
    assert spec.loss.file is not None  # ensured by the job file's validation
    problem = read_problem(spec.loss.file)
    grid, projection = problem.grid(spec.domain.refine or (1,), spec.domain.cell_km), problem.projection
    distortion = 0.0
    if projection is not None:
        try:
            distortion = projection.distortion(grid.box.radius_km)
        except SpecError as error:
            raise DataError(
                f"loss.file: {problem.path}: x_km and y_km must be km from centre_lon, centre_lat; {error}"
            ) from None
    kept = np.ones((grid.cells_x, grid.cells_y), dtype=bool)
    notes: tuple[str, ...] = ()
    if spec.domain.region is not None:
        if projection is None:
            raise DataError(
                f"domain.region: is in degrees, but {problem.path} has no centre_lon, centre_lat to place it "
                "by; leave it out"
            )
        region = read_region(spec.domain.region)
        kept, notes = region.cells(grid, projection), region.notes
        if not kept.any():
            raise DataError(
                f"domain.region: {region.path}: lies outside the grid of {problem.path}; the region spans "
                f"{rounded(region.box_degrees)}"
            )
    return FileGeometry(
        problem=problem, projection=projection, distortion=distortion, grid=grid, kept=kept, notes=notes
    )


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
            f"{list(degrees)}; the network spans {rounded(network.box_degrees)}"
            f"{as_swapped(degrees, network.lonlat)}"
        )
    return inside


def _projected_box(projection: Projection, degrees: Degrees) -> Box:
    """Return the box in the plane around a box in degrees; its curved sides are sampled."""
    west, south, east, north = degrees
    east = east_of(west, east)
    along = np.linspace(0, 1, 65)
    lon, lat = west + along * (east - west), south + along * (north - south)
    border = [
        np.stack(np.broadcast_arrays(x, y), axis=-1)
        for x, y in ((lon, south), (lon, north), (west, lat), (east, lat))
    ]
    return Box.around(projection.to_plane(np.concatenate(border)))
