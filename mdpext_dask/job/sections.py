"""The sections of a job file: their keys, allowed values, and which keys exclude each other."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from mdpext_dask.row_limits import SMALLEST_PROBABILITY

# How seed rows may be extended, besides by an operator of the user's own.
MCSHANE_WHITNEY = "mcshane-whitney"
LOG_CONVEX, CELL_PROGRAMS = "log-convex", "cell-lp"
# Planar noise on fine cells, remapped: no seed program, and rows that follow from tables.
NOISE = "noise"
# One program over all records, where they are few; or programs over windows of them, that begin with noise.
RECORDS, WINDOWS = "records", "windows"
# Methods without seeds between which rows are interpolated.
SEEDLESS = (NOISE, RECORDS, WINDOWS)
METHODS = (LOG_CONVEX, MCSHANE_WHITNEY, CELL_PROGRAMS, *SEEDLESS)
# The method is chosen: noise, or programs where the job allows them the time and they lose less.
FITTING = "auto"
# How long programs may be planned to take, in s, for a job to try them.
PROGRAM_SECONDS = 60.0
# A region that is the outline of the job's own place, or of another one.
PLACE, PLACE_PREFIX = "place", "place:"
# The outputs are thinned road nodes, as many as are of use.
AUTO_OUTPUTS: Literal["auto"] = "auto"
# Workers of a cluster, where a job does not say.
_WORKERS = 2
# Half a turn either way covers every direction twice.
LARGEST_ROTATION_DEG = 180


def _number_or_auto(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "auto" and not (number and abs(value) <= LARGEST_ROTATION_DEG):
        raise ValueError(
            f"must be a number of degrees from -{LARGEST_ROTATION_DEG} to {LARGEST_ROTATION_DEG}, "
            f'counter-clockwise, or "auto", got {value!r}'
        )
    return float(value) if number else value


MetricExponent = Annotated[
    float, Field(ge=1.0), BeforeValidator(lambda value: math.inf if value == "inf" else value)
]
Rotation = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
Named = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
AtLeastOne = Annotated[int, Field(ge=1)]
Degrees = tuple[float, float, float, float]
RandomSeed = Annotated[int, Field(ge=0)]


def _list_as(example: str = "") -> BeforeValidator:
    """Return what makes a list of TOML the tuple that the job has, and refuses what is without brackets.

    Parameters
    ----------
    example
        What it looks like; default: the value itself in brackets.
    """

    def listed(value: Any) -> Any:
        if isinstance(value, bool | int | float | str):
            word = isinstance(value, str) and not _NUMBERS.fullmatch(value)
            text = f'["{value}"]' if word else f"[{value}]"
            raise ValueError(f"must be a list, in brackets, got {value!r}; say {example or text}")
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(listed)


_NUMBERS = re.compile(r"[-+\d., ]+")
_LIST = _list_as()
_PLAIN = "letters, digits, dots, dashes and underscores, and begin with a letter or digit"
_ADDRESS = '"tcp://host:port", or the name of a scheduler file that ends in .json'
_OBJECT = "a name as Kubernetes takes it: small letters, digits and dashes"


def _spelt(pattern: str, words: str) -> AfterValidator:
    """Return a check that a whole text is of a pattern, whose message says so in words."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {words}, got {text!r}")
        return text

    return AfterValidator(check)


# These go into a batch script as they are.
_OPTION = _spelt(r"--[a-z][a-z-]*(=[^\s\"'`$\\;&|<>]+)?", '"--name=value", without spaces or quotes')
_WORD = _spelt(r"[A-Za-z0-9][\w.,+-]*", "one word of letters, digits and . , + - _")


def _go_together(choice: str, chosen: str, choices: tuple[str, ...], key: str, value: object) -> None:
    """Refuse a choice without the key that it needs, and the key with another choice.

    Raises
    ------
    ValueError
        If so.
    """
    if chosen in choices and value is None:
        raise ValueError(f'{choice} = "{chosen}" needs {key} = "..."')
    if chosen not in choices and value is not None:
        wanted = " or ".join(f'"{name}"' for name in choices)
        raise ValueError(f'{key} goes with {choice} = {wanted}; with {choice} = "{chosen}" leave it out')


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JobSection(Section):
    """``[job]``: the name of the job.

    Parameters
    ----------
    name
        Letters, digits, dots, dashes and underscores; the default store is ``NAME.zarr``.
    """

    name: Annotated[str, _spelt(r"[A-Za-z0-9][A-Za-z0-9._-]*", _PLAIN)] = "mechanism"


class DomainSection(Section):
    """``[domain]``: the region, its road network and the grid of records.

    With a loss file there is no road network, and the grid is the file's: `roads`, `place`, `bbox` and
    `rotation_deg` do not go with it, and `cell_km` may be left out.

    Parameters
    ----------
    roads
        ``builtin:manhattan``, a folder with ``nodes.csv.gz`` and ``edges.csv.gz``, an extract of
        OpenStreetMap (``.osm.pbf``, ``.osm``, ``.osm.bz2``, ``.osm.gz``), or a GraphML file or GeoPackage
        saved by osmnx.
    place
        Instead of `roads`: a place name that osmnx downloads, once.
    bbox
        West, south, east, north in degrees, west > east across the antimeridian; default: the box of the
        region, or else of the network's nodes.
    region
        Polygons that hold the records: a GeoJSON file, a shapefile or a GeoPackage, ``"place"`` for the
        outline of `place`, or ``"place:NAME"`` for that of another one; default: all of the box.
    rotation_deg
        How far the grid is turned, counter-clockwise, in degrees; ``"auto"``: as far as the rectangle of
        least area around the region, or else around the road nodes.
    cell_km
        Side of a source cell in km; with a loss file its spacing times the product of `refine`. Default: what
        brings records as near to each other as ε asks, see :func:`mdpext_dask.problem.grid.chosen_cells`.
    refine
        Subdivisions per level, each at least 1. Default: halved until records are so near.
    metric_p
        Exponent p of the metric d_p in which privacy is measured; ``"inf"`` for the maximum.
    """

    roads: Named | None = None
    place: Named | None = None
    bbox: Annotated[Degrees | None, _list_as("[west, south, east, north]")] = None
    region: Named | None = None
    rotation_deg: Rotation = 0.0
    cell_km: Positive | None = None
    refine: Annotated[tuple[AtLeastOne, ...] | None, Field(min_length=1), _LIST] = None
    metric_p: MetricExponent = 2.0

    @field_validator("bbox")
    @classmethod
    def _bbox_is_a_box(cls, value: Degrees | None) -> Degrees | None:
        if value is None:
            return None
        west, south, east, north = value
        must = "must be [west, south, east, north], in this order, in degrees, with west < east"
        if not (abs(west) <= 180 and abs(east) <= 180 and west != east and -90 < south < north < 90):
            raise ValueError(f"{must} and south < north, got {list(value)}")
        if west > east and east + 360 - west > 180:
            raise ValueError(
                f"{must}; west > east is for boxes across the antimeridian, where this one would be "
                f"{east + 360 - west:g} degrees wide"
            )
        return value

    @model_validator(mode="after")
    def _one_source_of_roads(self) -> "DomainSection":
        if self.roads is not None and self.place is not None:
            raise ValueError("give exactly one of roads and place")
        if self.region == PLACE and self.place is None:
            raise ValueError(
                'region = "place" is the outline of place, which is not given; name one, as "place:NAME"'
            )
        region = self.region or ""
        if region.startswith(PLACE_PREFIX) and not region.removeprefix(PLACE_PREFIX).strip():
            raise ValueError('region = "place:NAME" must name a place')
        return self


class PrivacySection(Section):
    """``[privacy]``: the guarantee.

    Parameters
    ----------
    epsilon_per_km
        ε in 1/km, for distance on the ground; without a place on Earth, in the plane.
    budget
        How much of ε the seed may use: ``"half"`` as published; ``"bound"`` as much as a closed formula
        allows; ``"certified"`` as much as the certificate allows, found by solving repeatedly.
    min_probability
        Least probability of every output at every seed.
    """

    epsilon_per_km: Positive
    budget: Literal["half", "bound", "certified"] = "certified"
    min_probability: float = Field(default=1e-6, lt=1.0, allow_inf_nan=False)

    @field_validator("min_probability")
    @classmethod
    def _every_output_is_possible(cls, value: float) -> float:
        if value < SMALLEST_PROBABILITY:
            raise ValueError(
                f"must be at least {SMALLEST_PROBABILITY:.3g}, got {value!r}: an output that some places "
                "never report would rule them out"
            )
        return value


class OutputsSection(Section):
    """``[outputs]``: the places that may be reported; with a loss file, those of the file.

    Parameters
    ----------
    choose
        ``"auto"``: road nodes, the denser where roads are, as many as ε makes use of; ``"road-nodes"``:
        `count` road nodes, drawn; ``"all-road-nodes"``: all of them; ``"seeds"``: the corners of the source
        cells; ``"prior"``: `count` centres of a k-means of the prior; ``"file"``: the points of `file`. Road
        nodes are those in the box or the region. Default: ``"road-nodes"`` with `count`, else ``"auto"``.
    count
        Number of outputs.
    random_seed
        Seed of the draw, and of the start of k-means.
    file
        Points in CSV, Parquet, GeoJSON or GeoPackage; see :mod:`mdpext_dask.readers.point_files`.
    lon_column, lat_column
        Columns of the file with longitude and latitude, where their names do not say so.
    outside
        What to do with points of the file outside the grid: ``"error"`` or ``"drop"``.
    limit
        Largest number of outputs with ``"auto"`` and ``"all-road-nodes"``; default: 100,000 with
        ``extension.method = "noise"`` or ``"auto"``; else 2000, and with ``choose = "auto"`` no more than a
        seed program bears.
    """

    choose: Literal["auto", "road-nodes", "all-road-nodes", "seeds", "prior", "file", "loss-file"] = (
        AUTO_OUTPUTS
    )
    count: AtLeastOne | None = None
    random_seed: RandomSeed = 0
    file: Named | None = None
    lon_column: Named | None = None
    lat_column: Named | None = None
    outside: Literal["error", "drop"] = "error"
    limit: AtLeastOne | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "OutputsSection":
        if self.count is not None and "choose" not in self.model_fields_set:
            # The job is frozen only after it has been validated. Still not set by the user.
            object.__setattr__(self, "choose", "road-nodes")
        _go_together("choose", self.choose, ("file",), "file", self.file)
        if self.choose != "file" and (self.lon_column or self.lat_column):
            raise ValueError('lon_column and lat_column go with choose = "file" only')
        if self.choose != "file" and self.outside != "error":
            raise ValueError(f'outside = "{self.outside}" goes with choose = "file" only')
        if self.choose not in (AUTO_OUTPUTS, "all-road-nodes") and self.limit is not None:
            raise ValueError('limit goes with choose = "auto" or "all-road-nodes" only')
        if self.choose in ("road-nodes", "prior"):
            if self.count is None:
                raise ValueError(f'choose = "{self.choose}" needs count')
        elif self.count is not None:
            implied = ', which loss.kind = "file" implies' if self.choose == "loss-file" else ""
            raise ValueError(f'count does not go with choose = "{self.choose}"{implied}; leave it out')
        return self


class PriorSection(Section):
    """``[prior]``: how likely each record is.

    A file of points has columns lon, lat and, if wanted, weight (CSV, Parquet, GeoJSON or GeoPackage; see
    :mod:`mdpext_dask.readers.point_files`); with ``"raster"``, the file is a GeoTIFF of population (see
    :mod:`mdpext_dask.problem.population_raster`). With a loss file, ``"loss-file"`` is its own prior,
    uniform where it has none.

    Parameters
    ----------
    kind
        ``"road-nodes"``: proportional to the number of road nodes nearest to it; ``"uniform"``; ``"file"``
        and ``"raster"``: read from `file`.
    file
        Points, or a GeoTIFF; or ``builtin:manhattan-trips``.
    lon_column, lat_column
        Columns of the points with longitude and latitude, where their names do not say so.
    """

    kind: Literal["road-nodes", "uniform", "file", "raster", "loss-file"] = "road-nodes"
    file: Named | None = None
    lon_column: Named | None = None
    lat_column: Named | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "PriorSection":
        if self.kind != "file" and (self.lon_column or self.lat_column):
            raise ValueError('lon_column and lat_column go with kind = "file" only')
        _go_together("kind", self.kind, ("file", "raster"), "file", self.file)
        return self


class LossSection(Section):
    """``[loss]``: the loss of a report, in km.

    Parameters
    ----------
    kind
        ``"travel"``: mean error in road distance to tasks; ``"euclidean"``: distance from record to report;
        ``"file"``: a table.
    file
        An ``.npz`` with the table, its grid, outputs and prior; see :mod:`mdpext_dask.problem.loss_file`.
    tasks
        Number of tasks: road nodes that are drawn as destinations.
    tasks_file
        Points to use as tasks instead, with optional weights.
    tasks_lon_column, tasks_lat_column
        Columns of these points with longitude and latitude, where their names do not say so.
    random_seed
        Seed of the draw of tasks.
    directed
        Whether travel follows one-way streets.
    """

    kind: Literal["travel", "euclidean", "file"] = "travel"
    file: Named | None = None
    tasks: AtLeastOne = 50
    tasks_file: Named | None = None
    tasks_lon_column: Named | None = None
    tasks_lat_column: Named | None = None
    random_seed: RandomSeed = 0
    directed: bool = False

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "LossSection":
        _go_together("kind", self.kind, ("file",), "file", self.file)
        if self.tasks_file is None and (self.tasks_lon_column or self.tasks_lat_column):
            raise ValueError("tasks_lon_column and tasks_lat_column go with tasks_file only")
        if self.kind == "file" and self.tasks_file is not None:
            raise ValueError('tasks_file does not go with kind = "file"; leave it out')
        if self.kind == "file" and self.directed:
            raise ValueError('directed = true does not go with kind = "file"; leave it out')
        return self


class SeedSection(Section):
    """``[seed]``: how the seed linear program is solved, and how long certified seeds are refined.

    Parameters
    ----------
    solver
        ``"auto"``: the structured method, and HiGHS where that does not converge. Refining always uses the
        structured method.
    refine_rounds
        Largest number of refinement rounds after the search for certified budgets; 0 for none.
    refine_seconds
        Time after which no further round begins; the first one always does. With it, the bytes of the store
        depend on the speed of the machine.
    """

    solver: Literal["auto", "structured", "highs"] = "auto"
    refine_rounds: Annotated[int, Field(ge=0, le=1000)] = 20
    refine_seconds: Positive | None = None


class ExtensionSection(Section):
    """``[extension]``: how seed rows are extended to the fine grid.

    Parameters
    ----------
    method
        ``"log-convex"``, ``"mcshane-whitney"``, ``"cell-lp"``, ``"noise"``, ``"records"``, ``"windows"``, or
        an operator of your own as ``"module:Class"``; see :mod:`mdpext_dask.extend.operator`. ``"noise"`` has
        no seed: it is planar noise on cells finer than the outputs, each of which is remapped to its best
        output.
        ``"records"`` interpolates nothing: it is one program over all records, of which a few thousand are
        the most. ``"windows"`` begins with noise, and lowers its loss by programs over windows of records: as
        many as there are, at a cost by the area. ``"auto"``:
        noise, or programs if they lose less and may be tried, see `seconds`: one over all records; where that
        takes longer, windows of them; then cell programs if seeds are so coarse that interpolating between
        them loses much, else log-convex. With another budget than
        ``"certified"``, or one stage, it is log-convex.
    stages
        ``"levels"``: level by level as `domain.refine` says; ``"one"``: all records directly from the seeds.
        Log-convex extension is the same either way.
    sweeps
        Passes of the cell programs over the finest level; each coarser level gets twice as many.
    seconds
        With ``method = "auto"``, how long the whole job may be planned to take with noise and programs, in
        one process, for programs to be tried; default: 60. The plan decides and not the clock, so that a job
        has the same bytes everywhere.
    """

    method: str = FITTING
    stages: Literal["levels", "one"] = "levels"
    sweeps: Annotated[int, Field(ge=1, le=40)] = 4
    seconds: Positive | None = None

    @field_validator("method")
    @classmethod
    def _method_is_known(cls, value: str) -> str:
        if value not in (FITTING, *METHODS) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            known = ", ".join(f"'{name}'" for name in (FITTING, *METHODS))
            raise ValueError(f"must be one of {known}, or 'module:Class' for an operator of your own")
        return value

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "ExtensionSection":
        if self.method == CELL_PROGRAMS and self.stages == "one":
            raise ValueError('stages = "one" does not go with method = "cell-lp", which goes level by level')
        if self.method != FITTING and self.seconds is not None:
            raise ValueError(f'seconds goes with method = "{FITTING}" only')
        if self.method == FITTING and self.seconds is None:
            # The section is frozen only after it has been validated. Still not set by the user.
            object.__setattr__(self, "seconds", PROGRAM_SECONDS)
        return self


class StoreSection(Section):
    """``[store]``: the layout.

    Parameters
    ----------
    block_cells
        Source cells to the east and to the north in one block, that is one work item and one shard; default:
        chosen from the size of the job.
    """

    block_cells: Annotated[tuple[AtLeastOne, AtLeastOne] | None, _list_as("[2, 2]")] = None


class CompareSection(Section):
    """``[compare]``: how methods are compared; it does not affect the store.

    Parameters
    ----------
    methods
        Methods to compare; default: all.
    repeats
        Number of repetitions, each with new outputs and tasks.
    limit_seconds
        Time limit of one construction.
    bound_seconds
        Time limit of the lower bound of one problem; 0 for no bound.
    cases
        Further problems by name: overrides of the job, as ``section.key=value``.
    """

    methods: Annotated[tuple[str, ...] | None, _LIST] = None
    repeats: Annotated[int, Field(ge=1, le=10_000)] = 50
    limit_seconds: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1800.0
    bound_seconds: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 60.0
    cases: dict[str, Annotated[tuple[str, ...], _LIST]] = Field(default_factory=dict)


class ClusterSection(Section):
    """``[cluster]``: where the work items run.

    Parameters
    ----------
    kind
        ``"local"``: processes here; ``"inline"``: this process; ``"address"``: an existing Dask scheduler;
        ``"slurm"`` or ``"kubernetes"``: workers that are started there.
    workers
        Number of workers; default: one for each processor here, as far as memory goes, and 2 elsewhere.
    address
        Address of the scheduler, ``"tcp://host:port"``, or the scheduler file (``.json``) that it wrote.
    memory_gib
        Memory of a worker, in GiB; default: its share of the machine, or the default of the cluster.
    queue, account
        Slurm's partition and account.
    walltime_hours
        Time limit of a Slurm job.
    options
        Further options of ``sbatch``, each as ``"--name=value"``.
    image, namespace, volume_claim
        On Kubernetes: the container image, the namespace, and the volume that is mounted at ``/data``.
    """

    kind: Literal["local", "inline", "address", "slurm", "kubernetes"] = "local"
    workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    address: Annotated[str, _spelt(r"([a-z]+://)?[^\s/]+:\d+|\S+\.json", _ADDRESS)] | None = None
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    queue: Annotated[str, _WORD] | None = None
    account: Annotated[str, _WORD] | None = None
    walltime_hours: Annotated[float, Field(gt=0, le=8760)] = 1.0
    options: Annotated[tuple[Annotated[str, _OPTION], ...], _LIST] = ()
    image: Annotated[str, _spelt(r"[A-Za-z0-9][\w./:@-]*", "the name of an image")] | None = None
    namespace: Annotated[str, _spelt(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", _OBJECT)] = "default"
    volume_claim: Annotated[str, _spelt(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", _OBJECT)] | None = None

    @property
    def requested(self) -> int:
        """How many workers a cluster is asked for."""
        return self.workers or _WORKERS

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "ClusterSection":
        _go_together("kind", self.kind, ("address",), "address", self.address)
        return self
