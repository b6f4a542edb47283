"""The outputs of a job: the places that may be reported, and how many they are."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError
from mdpext_dask.job.sections import AUTO_OUTPUTS, FITTING, NOISE, WINDOWS
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.geometry import FileGeometry, Geometry, RoadGeometry
from mdpext_dask.problem.grid import Grid, square_sums
from mdpext_dask.problem.kmeans import weighted_centres
from mdpext_dask.problem.thinning import along_a_curve, thinned
from mdpext_dask.readers.point_chunks import PointColumns

# Default limits on road nodes as outputs. Noise has no seed program, whose size is proportional to them ...
MOST_ROAD_NODES, MOST_WITH_NOISE = 2000, 100_000
# ... and is to have so many seeds times outputs where they are thinned, but some outputs in any case: about a
# minute with log-convex extension on two cores, some minutes with cell programs.
MOST_SEED_ENTRIES, LEAST_OUTPUTS = 20_000, 20
# How far a road node is from its output on average, times ε: all road nodes as outputs would lose half a
# per cent less (Manhattan, ε = 1, 2, 5; 0.3 % less than at 0.1, 0.8 % than at 0.2, 1.4 % than at 0.3).
NEAR = 0.15
# Most points that k-means works on; neighbouring records are merged to stay below.
_MOST_PLACES = 100_000
# Independent streams for what is drawn, so that changing one number redraws one thing.
STREAM_OUTPUTS, STREAM_TASKS = 1, 2


def generator_of(seed: int, stream: int) -> np.random.Generator:
    """Return the generator of a stream."""
    return np.random.default_rng([seed, stream])


@dataclass(frozen=True)
class Outputs:
    """The places that may be reported.

    Parameters
    ----------
    xy_km
        float64 of shape (K, 2), in km.
    node
        The nearest road node of each, shape (K,), where travel ends.
    notes
        What a user should know.
    """

    xy_km: NDArray[np.float64]
    node: NDArray[np.intp]
    notes: tuple[str, ...] = ()


def choose_outputs(spec: JobSpec, geometry: RoadGeometry, prior: NDArray[np.float64]) -> Outputs:
    """Choose the outputs as the job says.

    With noise, whose rows are local, they are in the order of a curve: those near a record are in few chunks.

    Parameters
    ----------
    spec, geometry
        The job.
    prior
        π of the records, float64 of shape ``grid.shape``, 0 outside the region.

    Raises
    ------
    SpecError, DataError
        If a file cannot be read, or there are not as many places as wanted, or too many.
    """
    found = _chosen(spec, geometry, prior)
    if not takes_many(spec):
        return found
    order = along_a_curve(found.xy_km)
    return replace(found, xy_km=found.xy_km[order], node=found.node[order])


def _chosen(spec: JobSpec, geometry: RoadGeometry, prior: NDArray[np.float64]) -> Outputs:
    choose, count = spec.outputs.choose, spec.outputs.count
    notes: tuple[str, ...] = ()
    if choose == AUTO_OUTPUTS:
        node, note = thinned_nodes(spec, geometry)
        return Outputs(geometry.node_xy_km[node], node, (note,))
    if choose == "all-road-nodes":
        node = _all_road_nodes(spec, geometry)
        return Outputs(geometry.node_xy_km[node], node)
    if choose == "road-nodes":
        generator = generator_of(spec.outputs.random_seed, STREAM_OUTPUTS)
        node = np.sort(generator.choice(geometry.nodes_inside, size=count, replace=False))
        return Outputs(geometry.node_xy_km[node], node)
    if choose == "file":
        xy, notes = _of_file(spec, geometry)
    elif choose == "prior":
        assert count is not None  # ensured by the job file's validation
        xy = centres_of(prior, geometry.grid, count, spec.outputs.random_seed)
    else:
        xy = geometry.grid.seeds_xy_km()[geometry.corners_kept.ravel()]
    return Outputs(xy, geometry.nearest_nodes(xy), notes)


def output_count(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> int:
    """Return K without drawing anything.

    Raises
    ------
    SpecError, DataError
        If the outputs' file cannot be read, or there are too many road nodes.
    """
    if isinstance(geometry, FileGeometry):
        return len(geometry.problem.output_xy_km)
    if spec.outputs.choose == "seeds":
        return int(geometry.corners_kept.sum())
    if spec.outputs.choose == "file":
        return len(_of_file(spec, geometry)[0])
    if spec.outputs.choose == AUTO_OUTPUTS:
        return len(thinned_nodes(spec, geometry)[0])
    if spec.outputs.choose == "all-road-nodes":
        return len(_all_road_nodes(spec, geometry))
    assert spec.outputs.count is not None  # ensured by the job file's validation
    return spec.outputs.count


def notes_on_outputs(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> tuple[str, ...]:
    """Return how many outputs ``"auto"`` chooses, and why; nothing where the job or a file says which."""
    if isinstance(geometry, FileGeometry) or spec.outputs.choose != AUTO_OUTPUTS:
        return ()
    return (thinned_nodes(spec, geometry)[1],)


def check_counts(spec: JobSpec, geometry: Geometry) -> None:
    """Refuse to draw more outputs or tasks than there are road nodes, or records, in the box or the region.

    With a loss file nothing is drawn.

    Raises
    ------
    DataError
        With both numbers.
    """
    if not isinstance(geometry, RoadGeometry):
        return
    nodes = len(geometry.nodes_inside)
    wanted = [("outputs.count", spec.outputs.count or 0, nodes, "road nodes")]
    if spec.outputs.choose == "prior":
        records = geometry.grid.count_vertices_of(geometry.kept)
        wanted = [("outputs.count", spec.outputs.count or 0, records, "records")]
    if spec.loss.kind == "travel" and spec.loss.tasks_file is None:
        wanted.append(("loss.tasks", spec.loss.tasks, nodes, "road nodes"))
    for key, count, available, what in wanted:
        if count > available:
            raise DataError(f"{key}: {count} are wanted, but {_place(spec)} holds only {available} {what}")


def check_prior_count(count: int, available: int) -> None:
    """Refuse to choose more outputs by the prior than there are records that have any.

    Raises
    ------
    DataError
        With both numbers.
    """
    if count > available:
        raise DataError(f"outputs.count: {count} are wanted, but only {available} records have any prior")


def centres_of(prior: NDArray[np.float64], grid: Grid, count: int, random_seed: int) -> NDArray[np.float64]:
    """Return the centres of a weighted k-means of the records, float64 of shape (count, 2), in km.

    Each is the mean, under the prior, of the records that are nearest to it: a place that may lie off every
    road. Where more than 100,000 records have any prior, squares of neighbouring ones are taken together,
    each at the mean of its records.

    Raises
    ------
    DataError
        If fewer records than `count` have any prior.
    """
    check_prior_count(count, int(np.count_nonzero(prior)))
    x, y, mass = grid.x_km()[:, None], grid.y_km()[None, :], prior
    side = 1
    # At most four squares become one, so enough of them are left.
    while np.count_nonzero(mass) > max(_MOST_PLACES, 4 * count):
        side *= 2
        mass = square_sums(prior, side)
    there = mass > 0
    if side == 1:
        places = [np.broadcast_to(axis, mass.shape)[there] for axis in (x, y)]
    else:
        places = [square_sums(prior * axis, side)[there] / mass[there] for axis in (x, y)]
    generator = generator_of(random_seed, STREAM_OUTPUTS)
    return weighted_centres(np.stack(places, axis=-1), mass[there], count, generator)


def takes_many(spec: JobSpec) -> bool:
    """Whether a job may end in noise, which takes thousands of outputs."""
    return spec.extension.method in (NOISE, WINDOWS, FITTING)


def _place(spec: JobSpec) -> str:
    return "the box" if spec.domain.region is None else "the region"


def thinned_nodes(spec: JobSpec, geometry: RoadGeometry) -> tuple[NDArray[np.intp], str]:
    """Return the road nodes that stand for all of them, and how many they are and why, in one line.

    Nodes are on average :data:`NEAR` / ε from the one that stands for them, or there would be more of these
    than the job or its method allows.
    """
    epsilon, limit, why = spec.privacy.epsilon_per_km, spec.outputs.limit, "outputs.limit"
    if limit is None and takes_many(spec):
        limit = MOST_WITH_NOISE
    elif limit is None:
        limit = max(min(MOST_SEED_ENTRIES // geometry.grid.seeds, MOST_ROAD_NODES), LEAST_OUTPUTS)
        why = f'as a seed program bears; with extension.method = "{NOISE}", all that are of use'
    kept, nodes, distance_km = _thinned(geometry, NEAR / epsilon, limit)
    reason = f"more would hardly lower the loss at ε = {epsilon:g}/km"
    if distance_km > NEAR / epsilon:
        reason = f"at most {limit:,}: {why}"
    return kept, (
        f"outputs: {len(kept):,} of {nodes:,} road nodes, which are {distance_km:.3g} km from the nearest of "
        f"them on average; {reason}"
    )


@lru_cache(maxsize=2)  # plan and run ask several times
def _thinned(geometry: RoadGeometry, distance_km: float, most: int) -> tuple[NDArray[np.intp], int, float]:
    """Return road nodes that stand for all, the number of all, and their mean distance from those, in km."""
    node = _distinct_nodes(geometry)
    kept, mean_km = thinned(geometry.node_xy_km[node], distance_km, most)
    return node[kept], len(node), mean_km


def _distinct_nodes(geometry: RoadGeometry) -> NDArray[np.intp]:
    """Return the road nodes in the box, or the region; the first of several in the same place."""
    _, first = np.unique(geometry.node_xy_km[geometry.nodes_inside], axis=0, return_index=True)
    return geometry.nodes_inside[np.sort(first)]


def _all_road_nodes(spec: JobSpec, geometry: RoadGeometry) -> NDArray[np.intp]:
    """Return the distinct road nodes in the box, or the region.

    Raises
    ------
    DataError
        If they are more than the job allows.
    """
    node, noise = _distinct_nodes(geometry), takes_many(spec)
    limit = spec.outputs.limit or (MOST_WITH_NOISE if noise else MOST_ROAD_NODES)
    if len(node) > limit:
        fewer = f'use a smaller region, or choose = "{AUTO_OUTPUTS}", which thins them'
        without = "" if noise else f'extension.method = "{NOISE}", which takes {MOST_WITH_NOISE:,}, '
        raise DataError(
            f'outputs.choose: "all-road-nodes": {_place(spec)} holds {len(node)} road nodes, more than '
            f"{limit}; raise outputs.limit, use {without}{fewer.removeprefix('use ')}"
        )
    return node


def _of_file(spec: JobSpec, geometry: RoadGeometry) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return the places of the outputs' file, and a note on those that were left out.

    Raises
    ------
    SpecError, DataError
        If the file cannot be read, two of its places are the same, or one lies outside the grid and the job
        does not drop those.
    """
    name, columns = spec.outputs.file, PointColumns(spec.outputs.lon_column, spec.outputs.lat_column)
    xy, _, seen = geometry.read_places(name, "outputs.file", columns, weights=False)
    source, rows = f"outputs.file: {name}", np.flatnonzero(geometry.grid.box.contains(xy))
    if seen.outside and (seen.all_outside or spec.outputs.outside == "error"):
        advice = "" if seen.all_outside else '; leave them out, or let outputs.outside = "drop" do it'
        raise DataError(f"{source}: {seen.said()}{advice}")
    xy = xy[rows]
    _, first, of = np.unique(xy, axis=0, return_index=True, return_inverse=True)
    if len(first) < len(xy):
        second = int(np.argmax(first[of.ravel()] != np.arange(len(xy))))
        one, other = rows[first[of.ravel()[second]]] + 1, rows[second] + 1
        raise DataError(f"{source}: two outputs are the same place, those of rows {one} and {other}")
    return xy, seen.notes(source, left_out=True)
