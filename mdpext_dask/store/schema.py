"""A new store before any task runs: its attributes, arrays and coordinates; checks of the attributes."""

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from typing import Any, TypeGuard

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from mdpext_dask.errors import StoreError, newer_format
from mdpext_dask.job.spec import JobSpec, fingerprint_of, json_number
from mdpext_dask.problem.domain import Domain
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import Loss, TableLoss, TravelLoss
from mdpext_dask.problem.projection import Projection
from mdpext_dask.seed.budget import vector_norm
from mdpext_dask.store.blocks import Plan

# Version 1 kept lists and objects among the attributes of the root as they are, which netCDF cannot hold, and
# had no groups around receipts and audits. Version 2 stored every chunk of rows, and NaN was what is not
# stored; see mdpext_dask.store.local_chunks.
FORMAT_VERSION = 3
# The state of a store while its template is being written.
CREATING = "creating"
PROBABILITY = "probability"
# Of the problem: both ends of each road, for maps. Stores of before, and of loss files, have none.
ROADS = "road_xy"
# Arrays of the seed group with what, besides scores, an extension may depend on.
EXTENSION_X, EXTENSION_Y, EXPONENT = "extension_x", "extension_y", "extension_exponent"
# Arrays of the seed group that rows of noise follow from: the output of every cell; masses of the cells
# around a record, and their sums; records to a cell, cells to a record, reach, and the floor.
NOISE_TABLES = NOISE_OUTPUT, NOISE_MASS, NOISE_TOTAL, NOISE_FORM = (
    "noise_output", "noise_mass", "noise_total", "noise_form",
)  # fmt: skip
# And those of the noise that windows are laid over; the windows' arrays are called so, with their numbers.
START_TABLES = tuple(f"start_{name}" for name in NOISE_TABLES)
WINDOW = "window"
# Attribute of the seed that says where the log probabilities of all records are, if the store holds them; or
# how its windows lie.
RECORD_SCORES = "record_scores"
# Attributes of the root of a store whose job leaves the method open: what was chosen, once it is, and why.
METHOD_CHOSEN, METHOD_IN_WORDS = "method_chosen", "method_in_words"
METHOD_TRIED = "method_tried"
# Of the numbers in the attributes.
UNITS = {"distance": "km", "epsilon": "1/km"}
EdgeBudgets = tuple[NDArray[np.float64], NDArray[np.float64]]
# Attributes that every store must have.
REQUIRED = (
    "format_version", "state", "job", "identity", "fingerprint", "grid", "block_cells", "projection",
    "distortion", "quantisation_km", "notes", "metric_p", "epsilon_per_km",
    "epsilon_planar_per_km", "epsilon_design_per_km", "epsilon_certified",
)  # fmt: skip
# Shuffled bytes and LZ4 make the store a fifth smaller, and faster to read, than no compression. Every chunk
# has a checksum, so that changes by a disk or a network are seen by readers that do not compare whole shards
# with their receipts.
_COMPRESSORS = (BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec())
_PLANE_CHUNK_BYTES = 2**20
# Write fill-value chunks too: without list permission, "missing" and "forbidden" look alike.
_WHOLE: Any = {"write_empty_chunks": True}
# Of a grid: as many source cells as jobs may ask for, and records along an axis.
_MOST_CELLS, _LONGEST_AXIS = 10**8, 10**7
# Of one array: the largest chunk, and shard, in bytes as numbers; and codecs that no other software decides.
_LARGEST_CHUNK, _LARGEST_SHARD = 2**30, 2**32
_CODECS = {"bytes", "blosc", "zstd", "gzip", "crc32c", "sharding_indexed"}
_NUMBERS = "biuf"
_MOST_OUTPUTS = 10**7
# How much larger than expected an array may be to be looked at.
_SLACK = 8
_SOFTWARE = ("mdpext-dask", "numpy", "scipy", "zarr", "dask", "highspy")


def attributes_of(spec: JobSpec, domain: Domain, plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a new store's root.

    Parameters
    ----------
    spec, domain, plan
        The job, its problem and how it is cut into blocks.
    facts
        Further attributes: the ε's.
    """
    identity, grid, half = spec.identity(), domain.grid, domain.grid.spacing_km / 2
    # Without a centre the plane is not on Earth, and distances are those in it.
    nowhere = {"centre_lon": None, "centre_lat": None}
    # The source of a loss file is not known here.
    is_map = spec.loss.kind != "file"
    return {
        "Conventions": "CF-1.11",
        "title": f"Location obfuscation mechanism {spec.job.name}",
        "format_version": FORMAT_VERSION,
        "job": spec.canonical(),
        "identity": identity,
        "fingerprint": fingerprint_of(identity),
        "state": CREATING,
        "epsilon_certified": None,
        "metric_p": json_number(spec.domain.metric_p),
        "units": UNITS,
        "grid": {**asdict(grid), "refine": list(grid.refine)},
        "block_cells": list(plan.block_cells),
        "projection": nowhere if domain.projection is None else asdict(domain.projection),
        "source_cells_kept": int(domain.kept.sum()),
        "records_inside": grid.count_vertices_of(domain.kept),
        "kept_sha256": cells_sha256(domain.kept),
        "distortion": domain.distortion,
        "quantisation_km": vector_norm(half, half, spec.domain.metric_p),
        "problem_sha256": problem_sha256(
            (grid, domain.projection),
            (domain.output_xy_km, domain.prior, domain.kept, *loss_tables(domain.loss)),
        ),
        "notes": list(domain.notes),
        "downloads": dict(domain.downloads),
        "software": software_versions(),
        **({"attribution": "Map data (c) OpenStreetMap contributors, ODbL 1.0"} if is_map else {}),
        **facts,
    }


def digested(names: Sequence[str]) -> tuple[str, ...]:
    """Return the arrays that a seed's digest is of: its scores and these, or these alone, where none are."""
    return ("score", *names) if has_scores(names) else tuple(names)


def has_scores(names: Sequence[str]) -> bool:
    """Whether a seed whose digest names these arrays has scores of corners, rather than tables of noise."""
    return not {NOISE_OUTPUT, START_TABLES[0]} & set(names)


def is_noise(seed_attributes: Mapping[str, Any]) -> bool:
    """Whether the seed, by the arrays that its digest is of, has tables of noise and no scores."""
    names = seed_attributes.get("extension")
    return isinstance(names, list) and NOISE_OUTPUT in names


def as_stored(attributes: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return attributes of the root as they are stored: strings and numbers; JSON for anything else."""
    return {
        key: value
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else json.dumps(value, sort_keys=True, allow_nan=False)
        for key, value in attributes.items()
    }


def as_read(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`as_stored` has stored; the attributes of version 1 are returned as they are."""
    return {key: _parsed(value) if isinstance(value, str) else value for key, value in stored.items()}


def _parsed(text: str) -> Any:
    # No other attribute looks like this.
    if text.startswith(("{", "[")) or text in ("null", "true", "false"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return text


def write_arrays(root: zarr.Group, domain: Domain, plan: Plan) -> None:
    """Create the probability array, empty, and everything that describes it."""
    grid, projection = domain.grid, domain.projection
    mapped: dict[str, Any] = {} if projection is None else {"grid_mapping": "spatial_ref"}
    root.create_array(
        PROBABILITY,
        shape=(*grid.shape, domain.outputs),
        dtype="float32",
        chunks=plan.chunk_shape,
        shards=plan.shard_shape,
        # Not 0: an all-zero chunk would not be stored and would look unwritten. Local rows get their floor.
        fill_value=np.nan,
        compressors=_COMPRESSORS,
        dimension_names=("x", "y", "output"),
        attributes={
            "long_name": "probability of reporting an output from a record",
            "units": "1",
            "coordinates": "output_x output_y output_lon output_lat",
            **mapped,
        },
    )
    # Rotated axes have no standard names, and do not point to the east and the north.
    turned = projection is not None and projection.rotation_deg != 0
    easting, northing = ("first coordinate", "second coordinate") if turned else ("easting", "northing")
    for name, title, values in (("x", easting, grid.x_km()), ("y", northing, grid.y_km())):
        names: dict[str, Any] = {"long_name": title, "units": "km", "axis": name.upper()}
        if mapped and not turned:
            names["standard_name"] = f"projection_{name}_coordinate"
        _write(root, name, values, (name,), **names)
    _write(root, "output", np.arange(domain.outputs), ("output",), long_name="output number")
    for name, values, title, units in (
        ("output_x", domain.output_xy_km[:, 0], f"{easting} of the output", "km"),
        ("output_y", domain.output_xy_km[:, 1], f"{northing} of the output", "km"),
        ("output_lon", domain.output_lonlat[:, 0], "longitude of the output", "degrees_east"),
        ("output_lat", domain.output_lonlat[:, 1], "latitude of the output", "degrees_north"),
    ):
        _write(root, name, values, ("output",), long_name=title, units=units)
    # Chunks of about a megabyte, however many blocks there are.
    side = int(math.sqrt(_PLANE_CHUNK_BYTES / 8))
    plane = min(side, grid.shape[0]), min(side, grid.shape[1])
    if mapped:
        # So that xarray makes it a coordinate, where mapping software looks for it.
        mapped["coordinates"] = mapped["grid_mapping"]
    title = "prior probability of the record"
    _write(root, "prior", domain.prior, ("x", "y"), plane, long_name=title, **mapped)
    inside, title = grid.vertices_of(domain.kept), "whether the record belongs to the region"
    _write(root, "inside", inside, ("x", "y"), plane, long_name=title, **mapped)
    title = "whether the source cell meets the region"
    _write(root, "kept", domain.kept, ("cell_x", "cell_y"), domain.kept.shape, long_name=title)
    if projection is not None:
        _write(root, "spatial_ref", np.array(0), (), **projection.grid_mapping())
    _write_problem(root.create_group("problem"), domain)
    # What is in them is not Zarr's, but Zarr warns of folders that are no groups.
    for name in ("receipts", "audit", "remap"):
        root.create_group(name)


def _write_problem(problem: zarr.Group, domain: Domain) -> None:
    """Write the tables of the loss, so that a finished store can be evaluated by itself, and its roads."""
    if len(domain.road_xy_km):  # in no digest: nothing but maps depends on them
        _write(problem, ROADS, domain.road_xy_km, ("road", "end", "axis"), units="km")
    if isinstance(domain.loss, TableLoss):
        table = _table(domain.loss)
        # Chunks of one row of records, at most about a megabyte: a task reads the rows it needs.
        rows = max(_PLANE_CHUNK_BYTES // (table.shape[2] * table.itemsize), 1)
        chunks = 1, min(rows, table.shape[1]), table.shape[2]
        _write(problem, "loss", table, ("x", "y", "output"), chunks, units="km")
        problem.attrs["loss"] = "table"
        return
    if not isinstance(domain.loss, TravelLoss):
        problem.attrs["loss"] = "euclidean"
        return
    _write(problem, "node_xy", domain.loss.node_xy_km, ("node", "axis"), units="km")
    _write(problem, "task_distance", domain.loss.task_distance_km, ("node", "task"), units="km")
    _write(problem, "task_weight", domain.loss.task_weight, ("task",))
    _write(problem, "output_node", domain.loss.output_node, ("output",))
    problem.attrs["loss"] = "travel"


def _write(
    group: zarr.Group,
    name: str,
    values: NDArray[Any],
    dimensions: tuple[str, ...],
    chunks: tuple[int, ...] | None = None,
    **attributes: Any,
) -> None:
    group.create_array(
        name,
        data=np.asarray(values, order="C"),
        chunks=chunks or "auto",
        # A chunk that is lost must not read as zeros.
        fill_value={"f": np.nan, "b": True}.get(values.dtype.kind),
        dimension_names=dimensions,
        attributes=attributes,
        config=_WHOLE,
    )


def _table(loss: TableLoss) -> NDArray[Any]:
    assert isinstance(loss.table, np.ndarray)  # a problem that has just been built is all in memory
    return loss.table


def cells_sha256(cells: NDArray[np.bool_]) -> str:
    """Return the SHA-256 (hex) of a choice of source cells, bool of shape (cells_x, cells_y)."""
    return hashlib.sha256(repr(cells.shape).encode() + np.ascontiguousarray(cells).tobytes()).hexdigest()


def says_its_cells(attributes: Mapping[str, Any]) -> bool:
    """Whether a store has attributes on the source cells it keeps; stores of before regions have none."""
    return any(key in attributes for key in ("kept_sha256", "records_inside", "source_cells_kept"))


def check_attributes(attributes: Mapping[str, Any], url: str) -> None:
    """Refuse attributes that are not a mechanism store's, or are of a newer format.

    Raises
    ------
    StoreError
        With what is missing, or both versions.
    """
    version = attributes.get("format_version")
    # First, as nothing is known of what else a newer one has.
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise newer_format(url, "store", version, FORMAT_VERSION)
    required = (*REQUIRED, "problem_sha256") if says_its_cells(attributes) else REQUIRED
    missing = [key for key in required if key not in attributes]
    if missing or not isinstance(version, int):
        raise StoreError(f"{url}: not a mechanism store: {', '.join(missing) or 'format_version'} missing")
    if not _is_plain(attributes):
        raise StoreError(f"{url}: not a mechanism store: its attributes hold what is no JSON, such as NaN")
    wrong = [key for key, is_sound in _SHAPES.items() if not is_sound(attributes[key])]
    if wrong:
        raise StoreError(f"{url}: not a mechanism store: {', '.join(wrong)} in its attributes is damaged")


def _is_projection(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"centre_lon", "centre_lat"} <= {*value} <= _PROJECTION_KEYS:
        return False
    centre = value["centre_lon"], value["centre_lat"]
    return all(map(is_number, value.values())) or (centre == (None, None) and len(value) == len(centre))


def _is_grid(value: Any) -> bool:
    if not isinstance(value, Mapping) or {*value} != {field.name for field in fields(Grid)}:
        return False
    if not isinstance(value["refine"], list) or not value["refine"]:
        return False
    counts = all(map(_is_count, (*value["refine"], value["cells_x"], value["cells_y"])))
    lengths = all(is_number(value[key]) for key in ("west_km", "south_km", "cell_km"))
    if not (counts and lengths and value["cell_km"] > 0):
        return False
    grid = Grid(**{**value, "refine": tuple(value["refine"])})
    # Before an array is made for one of them.
    return grid.source_cells <= _MOST_CELLS and max(grid.shape) <= _LONGEST_AXIS and grid.spacing_km > 0


def _is_job(value: Any) -> bool:
    """Whether a job has what is read of it without parsing it; older ones lack sections of today."""
    if not _is_table(value) or not {"job", "domain", "privacy", "extension"} <= {*value}:
        return False
    return isinstance(value["extension"].get("method"), str) and is_number(
        value["privacy"].get("min_probability")
    )


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(dict(value), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an attribute is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(section, Mapping) for section in value.values())


_PROJECTION_KEYS = {field.name for field in fields(Projection)}
_SHAPES: dict[str, Callable[[Any], bool]] = {
    "job": _is_job,
    "notes": lambda value: isinstance(value, list) and all(isinstance(note, str) for note in value),
    "identity": _is_table,
    "grid": _is_grid,
    "block_cells": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)),
    "projection": _is_projection,
    "epsilon_per_km": lambda value: is_number(value) and value > 0,
    "metric_p": lambda value: value == "inf" or (is_number(value) and value >= 1),
}


def check_array(place: str, name: str, array: zarr.Array[Any], grid: Grid, outputs: int | None) -> None:
    """Refuse an array by its description, before anything is read or allocated for it.

    Parameters
    ----------
    place
        What to name in errors.
    name
        Its name in the store.
    array
        The array.
    grid
        The store's grid.
    outputs
        Number K of outputs; None where it is this array that says it.

    Raises
    ------
    StoreError
        If it is none that the store could have, or far too large.
    """
    if complaint := _complaint_of(name, array, grid, outputs):
        raise StoreError(f"{place} is damaged: the array {complaint}")


def _complaint_of(name: str, array: zarr.Array[Any], grid: Grid, outputs: int | None) -> str | None:
    if array.dtype.kind not in _NUMBERS:
        return f"holds {array.dtype}, not numbers"
    if others := _codecs_of(array.metadata.to_dict().get("codecs", [])) - _CODECS:
        return f"is written with {min(others)}, which is not read"
    chunk = math.prod(array.chunks) * array.dtype.itemsize
    shard = math.prod(array.shards or (0,)) * array.dtype.itemsize
    if chunk > _LARGEST_CHUNK or shard > _LARGEST_SHARD:
        return f"has chunks of {chunk} bytes, shards of {shard}"
    k = array.shape[-1] if outputs is None and array.shape else outputs
    shapes: dict[str, tuple[Any, ...]] = {
        PROBABILITY: (*grid.shape, k),
        "x": grid.shape[:1],
        "y": grid.shape[1:],
        "prior": grid.shape,
        "inside": grid.shape,
        "kept": (grid.cells_x, grid.cells_y),
        "seed/score": (*grid.seeds_shape, k),
        "seed/probability": (*grid.seeds_shape, k),
        "seed/cost": (*grid.seeds_shape, k),
        "problem/loss": (*grid.shape, k),
        "problem/output_node": (k,),
        **dict.fromkeys(("output", "output_x", "output_y", "output_lon", "output_lat"), (k,)),
    }
    if name in shapes and array.shape != shapes[name]:
        # Of these, others than expected are for the comparison with the certificate, which names them.
        compared = name.startswith(("output", "kept", "inside")) or name in (PROBABILITY, "x", "y")
        if not compared or array.size > _SLACK * math.prod(shapes[name]):
            return f"has the shape {array.shape}, not {shapes[name]}"
    return None if k is None or 0 < k <= _MOST_OUTPUTS else f"has {k} outputs"


def _codecs_of(codecs: Any) -> set[str]:
    """Return the names of codecs, and of those within them."""
    found: set[str] = set()
    for codec in codecs if isinstance(codecs, list | tuple) else ():
        found.add(str(codec.get("name")))
        inner = codec.get("configuration") or {}
        for part in ("codecs", "index_codecs"):
            found |= _codecs_of(inner.get(part))
    return found


def loss_tables(loss: Loss) -> tuple[NDArray[Any], ...]:
    """Return the tables of a loss that is all in memory, in the order of the problem's digest."""
    if isinstance(loss, TravelLoss):
        return loss.node_xy_km, loss.task_distance_km, loss.task_weight, loss.output_node
    return (_table(loss),) if isinstance(loss, TableLoss) else ()


def problem_sha256(place: object, tables: Iterable[NDArray[Any] | zarr.Array[Any]]) -> str:
    """Return the SHA-256 (hex) of a problem.

    Parameters
    ----------
    place
        Its grid and projection.
    tables
        Outputs in the plane, float64 of shape (K, 2), in km; prior; kept cells; the tables of the loss.
    """
    return sha256_of(*tables, prefix=repr(place).encode())


def sha256_of(*arrays: NDArray[Any] | zarr.Array[Any], prefix: bytes = b"") -> str:
    """Return one SHA-256 (hex) over the values of arrays, read a chunk's width at a time, after `prefix`."""
    digest = hashlib.sha256(prefix)
    for array in arrays:
        step = array.chunks[0] if isinstance(array, zarr.Array) else max(array.shape[0], 1)
        for first in range(0, array.shape[0], step):
            digest.update(np.ascontiguousarray(array[first : first + step]).data)
    return digest.hexdigest()


def seed_sha256(arrays_sha256: str, record_scores: Mapping[str, Any] | None) -> str:
    """Return one SHA-256 (hex) over the arrays of a seed, given theirs, and its :data:`RECORD_SCORES`."""
    if record_scores is None:
        return arrays_sha256
    return fingerprint_of({"arrays": arrays_sha256, RECORD_SCORES: record_scores})


def software_versions() -> dict[str, str]:
    """Return the versions of the software that decides the bytes of a store."""
    versions = {"python": platform.python_version()}
    for package in _SOFTWARE:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions
