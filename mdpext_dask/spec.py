"""The job file: TOML in, a frozen and validated :class:`JobSpec` out.

A job is identified by its *fingerprint*: the SHA-256 of everything that decides the bytes of the
store. Paths enter it by the content of the file they name, so a job may be moved between machines;
where and how it runs (``[cluster]``) and what it is called (``[job]``) do not enter it.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mdpext_dask.complaints import first_complaint
from mdpext_dask.errors import SpecError

BUILTIN_PREFIX = "builtin:"
# What the folder of a road network holds: nodes (id, lon, lat), edges (u, v, length_m, oneway).
ROAD_FILES = ("nodes.csv.gz", "edges.csv.gz")

# Probabilities are stored as float32; from 2^-36 upwards each is an integer multiple of 2^-60, which
# is what makes exact integer sampling weights possible.
SMALLEST_PROBABILITY = 2.0**-36
# A row's weights, in units of 2^-60, must add up within 64 bits; a normalised row's total is 1.
LARGEST_TOTAL = 2.0

# Job keys that name a file or folder of the user's.
_PATH_KEYS = (
    ("domain", "roads"),
    ("outputs", "file"),
    ("prior", "file"),
    ("loss", "tasks_file"),
    ("loss", "file"),
)
# Given as an override, this key replaces that one ...
_ALTERNATIVES = {("domain", "roads"): "place", ("domain", "place"): "roads"}
# ... and this choice makes those keys of its section meaningless, unless the choice is as stated.
_DEPENDENTS = {
    ("outputs", "choose"): {"count": "road-nodes", "file": "file"},
    ("prior", "kind"): {"file": "file"},
    ("loss", "kind"): {"file": "file", "tasks": "travel", "tasks_file": "travel", "directed": "travel"},
    ("cluster", "kind"): {"address": "address"},
}
# A loss file brings grid, outputs and prior. Where the job may say so, and what it says then.
FROM_LOSS_FILE = "loss-file"
_FROM_LOSS_FILE_KEYS = (("outputs", "choose"), ("prior", "kind"))
# An override that turns to a loss file drops these, whose place the file takes.
_REPLACED_BY_LOSS_FILE = {
    "domain": ("roads", "place", "bbox", "cell_km"),
    "outputs": ("choose", "count", "file", "random_seed"),
    "prior": ("kind", "file"),
}


def _number_or_inf(value: Any) -> Any:
    return math.inf if value == "inf" else value


MetricExponent = Annotated[float, Field(ge=1.0), BeforeValidator(_number_or_inf)]
Named = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JobSection(Section):
    """``[job]``: what the job is called; the default store is ``NAME.zarr``."""

    name: str = Field(default="mechanism", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class DomainSection(Section):
    """``[domain]``: the region, its road network and the grid of records.

    With a loss file there is no road network: `roads`, `place` and `bbox` do not go with it, and
    `cell_km` may be left out.

    Parameters
    ----------
    roads
        ``builtin:manhattan``, a folder with ``nodes.csv.gz`` and ``edges.csv.gz``, or a GraphML file
        saved by osmnx.
    place
        Instead of `roads`: a place name that osmnx downloads.
    bbox
        West, south, east, north in degrees; default: the box of the network's nodes.
    cell_km
        Side of a source cell in km; with a loss file its spacing times the product of `refine`.
    refine
        Subdivisions per level, each at least 1.
    metric_p
        Exponent p of the metric d_p in which privacy is measured; ``"inf"`` for the maximum.
    """

    roads: Named | None = None
    place: Named | None = None
    bbox: tuple[float, float, float, float] | None = None
    cell_km: Positive | None = None
    refine: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    metric_p: MetricExponent = 2.0

    @field_validator("bbox", "refine", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("bbox")
    @classmethod
    def _bbox_is_a_box(
        cls, value: tuple[float, float, float, float] | None
    ) -> tuple[float, float, float, float] | None:
        if value is None:
            return None
        west, south, east, north = value
        if not (-180 <= west < east <= 180 and -90 < south < north < 90):
            raise ValueError(
                "must be [west, south, east, north] in degrees with west < east and south < north"
            )
        return value

    @model_validator(mode="after")
    def _one_source_of_roads(self) -> "DomainSection":
        if self.roads is not None and self.place is not None:
            raise ValueError("give exactly one of roads and place")
        return self


class PrivacySection(Section):
    """``[privacy]``: the promise. `epsilon_per_km` is in 1/km, for ground distance."""

    epsilon_per_km: Positive
    budget: Literal["half", "bound", "certified"] = "certified"
    min_probability: float = Field(default=1e-6, ge=SMALLEST_PROBABILITY, lt=1.0, allow_inf_nan=False)


class OutputsSection(Section):
    """``[outputs]``: the places that may be reported; with a loss file, those of the file."""

    choose: Literal["road-nodes", "seeds", "file", "loss-file"] = "road-nodes"
    count: Annotated[int, Field(ge=1)] | None = None
    random_seed: Annotated[int, Field(ge=0)] = 0
    file: Named | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "OutputsSection":
        if (self.choose == "file") != (self.file is not None):
            raise ValueError('file goes with choose = "file", and only with it')
        if self.choose == "road-nodes" and self.count is None:
            raise ValueError('choose = "road-nodes" needs count')
        if self.choose != "road-nodes" and self.count is not None:
            raise ValueError(f'count does not go with choose = "{self.choose}"')
        return self


class PriorSection(Section):
    """``[prior]``: how likely each record is; a file has columns lon, lat and, if wanted, weight.

    With a loss file, ``"loss-file"`` is its own prior, uniform where it has none.
    """

    kind: Literal["road-nodes", "uniform", "file", "loss-file"] = "road-nodes"
    file: Named | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "PriorSection":
        if (self.kind == "file") != (self.file is not None):
            raise ValueError('file goes with kind = "file", and only with it')
        return self


class LossSection(Section):
    """``[loss]``: what a wrong report costs, in km.

    `tasks` road nodes are drawn as places to travel to (or read from `tasks_file`); `directed` makes
    travel follow one-way streets. `file` is an ``.npz`` with a loss matrix, its grid, outputs and prior;
    see :mod:`mdpext_dask.problem_file`.
    """

    kind: Literal["travel", "euclidean", "file"] = "travel"
    file: Named | None = None
    tasks: Annotated[int, Field(ge=1)] = 50
    tasks_file: Named | None = None
    random_seed: Annotated[int, Field(ge=0)] = 0
    directed: bool = False

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "LossSection":
        if (self.kind == "file") != (self.file is not None):
            raise ValueError('file goes with kind = "file", and only with it')
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
        ``"auto"``: the structured method, and HiGHS where that falls short. Refining always uses the
        structured method.
    refine_rounds
        Rounds of refining after the search for certified budgets, at most; 0 for none.
    refine_seconds
        No further round begins after so much time, the first one always does. With it the bytes of the store
        depend on the speed of the machine.
    """

    solver: Literal["auto", "structured", "highs"] = "auto"
    refine_rounds: Annotated[int, Field(ge=0, le=1000)] = 20
    refine_seconds: Positive | None = None


class ExtensionSection(Section):
    """``[extension]``: how seed rows are extended to the fine grid."""

    method: Literal["log-convex"] = "log-convex"


class StoreSection(Section):
    """``[store]``: the layout. A block of `block_cells` source cells is one task and one shard."""

    block_cells: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None

    @field_validator("block_cells", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class ClusterSection(Section):
    """``[cluster]``: where the tasks run."""

    kind: Literal["local", "inline", "address"] = "local"
    workers: Annotated[int, Field(ge=1, le=4096)] = 2
    address: Annotated[str, Field(pattern=r"^([a-z]+://)?[^\s/]+:\d+$")] | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> "ClusterSection":
        if (self.kind == "address") != (self.address is not None):
            raise ValueError('address goes with kind = "address", and only with it')
        return self


class JobSpec(Section):
    """A whole job, validated and frozen; paths in it are absolute."""

    job: JobSection = JobSection()
    domain: DomainSection
    privacy: PrivacySection
    outputs: OutputsSection
    prior: PriorSection = PriorSection()
    loss: LossSection = LossSection()
    seed: SeedSection = SeedSection()
    extension: ExtensionSection = ExtensionSection()
    store: StoreSection = StoreSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="before")
    @classmethod
    def _loss_file_has_outputs_and_prior(cls, document: Any) -> Any:
        loss = document.get("loss") if isinstance(document, Mapping) else None
        if not isinstance(loss, Mapping) or loss.get("kind") != "file":
            return document
        filled = dict(document)
        for section, key in _FROM_LOSS_FILE_KEYS:
            if isinstance(given := filled.get(section, {}), Mapping):
                filled[section] = {key: FROM_LOSS_FILE, **given}
        return filled

    @model_validator(mode="after")
    def _roads_or_a_loss_file(self) -> "JobSpec":
        domain, choose, kind = self.domain, self.outputs.choose, self.prior.kind
        if self.loss.kind != "file":
            if domain.roads is None and domain.place is None:
                raise ValueError("domain: give exactly one of roads and place")
            if domain.cell_km is None:
                raise ValueError("domain.cell_km: is required")
            for (section, key), value in zip(_FROM_LOSS_FILE_KEYS, (choose, kind), strict=True):
                if value == FROM_LOSS_FILE:
                    raise ValueError(f'{section}.{key}: "{value}" goes with loss.kind = "file" only')
            return self
        for key in ("roads", "place", "bbox"):
            if getattr(domain, key) is not None:
                raise ValueError(
                    f'domain.{key}: does not go with loss.kind = "file", whose file has the grid; leave it '
                    "out"
                )
        if choose != FROM_LOSS_FILE:
            raise ValueError(
                f'outputs.choose: "{choose}" does not go with loss.kind = "file", whose file has the '
                "outputs; leave [outputs] out"
            )
        if kind == "road-nodes":
            raise ValueError(
                'prior.kind: "road-nodes" does not go with loss.kind = "file", which has no roads; leave it '
                'out for the prior of the file, or use "uniform" or "file"'
            )
        return self

    @model_validator(mode="after")
    def _probabilities_fit(self) -> "JobSpec":
        if self.outputs.count is not None:
            check_min_probability(self.privacy.min_probability, self.outputs.count)
        return self

    def canonical(self) -> dict[str, Any]:
        """Return the job as plain JSON values, every default spelt out, infinity as ``"inf"``."""
        return {name: _plain(section) for name, section in self.model_dump().items()}

    def identity(self) -> dict[str, Any]:
        """Return what decides the bytes of the store: input files by content, no paths of theirs.

        A place that is downloaded, and built-in data, enter by name.

        Raises
        ------
        SpecError
            If a file that the job names does not exist.
        """
        plain = self.canonical()
        del plain["job"], plain["cluster"]
        for section, key in _PATH_KEYS:
            value = plain[section][key]
            if value is not None and not value.startswith(BUILTIN_PREFIX):
                plain[section][key] = "sha256:" + _content_digest(Path(value), f"{section}.{key}")
        return plain

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of :meth:`identity`."""
        return fingerprint_of(self.identity())


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of plain JSON values in canonical form."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def json_number(value: float) -> float | str:
    """Return a number as JSON can carry it: infinity as ``"inf"``."""
    return "inf" if math.isinf(value) else value


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the ``section.key`` names in which two identities differ, in order."""
    names = []
    for section in sorted({*old, *new}):
        left, right = old.get(section, {}), new.get(section, {})
        names += [f"{section}.{key}" for key in sorted({*left, *right}) if left.get(key) != right.get(key)]
    return names


def check_min_probability(min_probability: float, outputs: int) -> None:
    """Refuse a floor that `outputs` probabilities cannot all reach.

    Raises
    ------
    SpecError
        If ``min_probability`` is not below ``1 / outputs`` (one output alone is allowed any floor).
    """
    if min_probability * outputs >= 1 and outputs > 1:
        raise SpecError(
            f"privacy.min_probability: {min_probability:g} is not below 1/{outputs}, "
            f"the share of each of {outputs} outputs"
        )


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a job file and apply ``section.key=value`` overrides.

    Paths in the file are taken from the file's folder, paths in overrides from the working folder.

    Raises
    ------
    SpecError
        If the file cannot be read, is not TOML, or does not describe a job.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such job file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    _resolve_paths(document, path.resolve().parent)
    for override in overrides:
        _apply_override(document, override)
    return parse_job(document, source=str(path))


def parse_job(document: Mapping[str, Any], source: str = "job") -> JobSpec:
    """Validate a job given as nested dictionaries.

    Raises
    ------
    SpecError
        With one line that names the first offending key, its value and what is allowed.
    """
    try:
        return JobSpec.model_validate(dict(document))
    except ValidationError as error:
        raise SpecError(f"{source}: {first_complaint(error, JobSpec)}") from None


def _resolve_paths(document: dict[str, Any], folder: Path) -> None:
    for section, key in _PATH_KEYS:
        table = document.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _resolved(table[key], folder)


def _resolved(value: str, folder: Path) -> str:
    if value.startswith(BUILTIN_PREFIX) or not value.strip():
        return value
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (RuntimeError, ValueError, OSError) as error:  # no such user, a null byte, a loop of links
        raise SpecError(f"{value!r}: not a path: {error}") from None


def _apply_override(document: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise SpecError(f"--set {override}: must look like section.key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = document.setdefault(section, {})
    if not isinstance(table, dict):
        raise SpecError(f"--set {override}: {section} is not a section")
    if (section, key, value) == ("loss", "kind", "file") and table.get(key) != value:
        for replaced, names in _REPLACED_BY_LOSS_FILE.items():
            if isinstance(there := document.get(replaced), dict):
                document[replaced] = {name: v for name, v in there.items() if name not in names}
    table[key] = value
    table.pop(_ALTERNATIVES.get((section, key), ""), None)
    for dependent, choice in _DEPENDENTS.get((section, key), {}).items():
        if value != choice:
            table.pop(dependent, None)
    if (section, key) in _PATH_KEYS and isinstance(value, str):
        table[key] = _resolved(value, Path.cwd())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def _content_digest(path: Path, key: str) -> str:
    """Return the SHA-256 of a file, or of the two files of a road network's folder."""
    if not path.exists():
        raise SpecError(f"{key}: {path} does not exist")
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            for name in ROAD_FILES:
                digest.update(hashlib.sha256((path / name).read_bytes()).digest())
        else:
            digest.update(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {error}") from None
    return digest.hexdigest()
