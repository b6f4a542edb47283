"""The job file: TOML in, a frozen and validated :class:`JobSpec` out.

A job is identified by its *fingerprint*: the SHA-256 of everything that decides the bytes of the
store. Paths enter it by the content of the file they name, so a job may be moved between machines;
where and how it runs (``[cluster]``), what it is called (``[job]``) and what it is compared with
(``[compare]``) do not enter it.
"""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from mdpext_dask.errors import SpecError, first_line
from mdpext_dask.job import sections as job_sections
from mdpext_dask.job.sections import FITTING, LOG_CONVEX, PLACE, PLACE_PREFIX, SEEDLESS, Section

BUILTIN_PREFIX = "builtin:"
# What the folder of a road network holds: nodes (id, lon, lat), edges (u, v, length_m, oneway).
ROAD_FILES = ("nodes.csv.gz", "edges.csv.gz")

# Job keys that name a file or folder of the user's.
_PATH_KEYS = (
    ("domain", "roads"), ("domain", "region"), ("outputs", "file"), ("prior", "file"),
    ("loss", "tasks_file"), ("loss", "file"),
)  # fmt: skip
# Job keys that name a column of such a file.
_COLUMN_KEYS = (
    ("outputs", "lon_column"), ("outputs", "lat_column"), ("prior", "lon_column"), ("prior", "lat_column"),
    ("loss", "tasks_lon_column"), ("loss", "tasks_lat_column"),
)  # fmt: skip
# Sections that do not decide the bytes of a store.
_NOT_IDENTITY = ("job", "cluster", "compare")
_DIGEST_PREFIX = "sha256:"
# Given as an override, this key replaces that one ...
_ALTERNATIVES = {("domain", "roads"): "place", ("domain", "place"): "roads"}
# ... and this choice makes those keys of its section meaningless, unless the choice is one of those stated.
_DEPENDENTS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("outputs", "choose"): {
        "count": ("road-nodes", "prior"), "file": ("file",), "outside": ("file",),
        "limit": ("auto", "all-road-nodes"),
    },
    ("prior", "kind"): {"file": ("file", "raster")},
    ("loss", "kind"): {
        "file": ("file",), "tasks": ("travel",), "tasks_file": ("travel",), "directed": ("travel",)
    },
    ("extension", "method"): {"seconds": ("auto",)},
    ("cluster", "kind"): {"address": ("address",)},
}  # fmt: skip
# A loss file brings grid, outputs and prior. Where the job may say so, and what it says then.
FROM_LOSS_FILE = "loss-file"
_FROM_LOSS_FILE_KEYS = (("outputs", "choose"), ("prior", "kind"))
# An override that turns to a loss file drops these, whose place the file takes.
_REPLACED_BY_LOSS_FILE = {
    "domain": ("roads", "place", "bbox", "region", "rotation_deg", "cell_km"),
    "outputs": ("choose", "count", "file", "random_seed", "outside", "limit"),
    "prior": ("kind", "file"),
}


# What is wrong with a value, by the kinds of pydantic's errors.
_COMPLAINTS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys and values",
    "finite_number": "must be finite",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "model_type": "must be a section of keys and values",
    "string_too_short": "must not be empty",
    "string_type": "must be a text, in quotes",
    "too_long": "has too many entries (at most {max_length})",
    "too_short": "has too few entries (at least {min_length})",
    "tuple_type": "must be a list, in brackets",
}


class JobSpec(Section):
    """A whole job, validated and frozen; paths in it are absolute."""

    job: job_sections.JobSection = job_sections.JobSection()
    domain: job_sections.DomainSection
    privacy: job_sections.PrivacySection
    outputs: job_sections.OutputsSection = job_sections.OutputsSection()
    prior: job_sections.PriorSection = job_sections.PriorSection()
    loss: job_sections.LossSection = job_sections.LossSection()
    seed: job_sections.SeedSection = job_sections.SeedSection()
    extension: job_sections.ExtensionSection = job_sections.ExtensionSection()
    store: job_sections.StoreSection = job_sections.StoreSection()
    cluster: job_sections.ClusterSection = job_sections.ClusterSection()
    compare: job_sections.CompareSection = job_sections.CompareSection()

    @classmethod
    def of(cls, **sections: Mapping[str, Any] | Section) -> "JobSpec":
        """Return a job from Python values, as from a job file: one line of error, paths made absolute.

        Parameters
        ----------
        sections
            Each section of a job file by its name, as keys and values. Relative paths are taken from the
            working folder.

        Raises
        ------
        SpecError
            With one line that names the first offending key, its value and what is allowed.

        Examples
        --------
        >>> from mdpext_dask import JobSpec
        >>> spec = JobSpec.of(
        ...     domain={"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
        ...     privacy={"epsilon_per_km": 1.0},
        ...     outputs={"count": 8},
        ... )
        >>> spec.replace(privacy={"epsilon_per_km": 2}).privacy.epsilon_per_km
        2.0
        """
        document = {name: _keys_of(name, section) for name, section in sections.items()}
        _resolve_paths(document, Path.cwd())
        return parse_job(document)

    def replace(self, **sections: Mapping[str, Any] | Section) -> "JobSpec":
        """Return another job in which some keys have other values; what is not named stays.

        Keys that were chosen automatically are chosen again; a choice that makes other keys meaningless, such
        as `roads` instead of `place`, drops them, as ``--set`` does.

        Parameters
        ----------
        sections
            See :meth:`of`.

        Raises
        ------
        SpecError
            If that is no job.
        """
        named = ((name, _keys_of(name, section)) for name, section in sections.items())
        return _changed(self, [(name, *pair) for name, keys in named for pair in keys.items()])

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
            for (section, key), value in zip(_FROM_LOSS_FILE_KEYS, (choose, kind), strict=True):
                if value == FROM_LOSS_FILE:
                    raise ValueError(f'{section}.{key}: "{value}" goes with loss.kind = "file" only')
            return self
        for key in ("roads", "place", "bbox", "rotation_deg"):
            if getattr(domain, key) not in (None, 0.0):
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
    def _only_euclidean_distances_turn(self) -> "JobSpec":
        if self.domain.rotation_deg != 0 and self.domain.metric_p != 2:
            raise ValueError(
                f"domain.rotation_deg: {self.domain.rotation_deg} goes with metric_p = 2 only; for "
                f"metric_p = {self.domain.metric_p:g} distances are taken along the axes, which would turn "
                "with the grid"
            )
        return self

    @model_validator(mode="after")
    def _budgets_are_for_seeds(self) -> "JobSpec":
        method = self.extension.method
        if method in SEEDLESS and self.privacy.budget != "certified":
            raise ValueError(
                f'privacy.budget: "{self.privacy.budget}" is for seeds; extension.method = "{method}" has '
                "none: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _published_budgets_are_interpolated(self) -> "JobSpec":
        # They are compared with what was published; and one stage has no cell programs.
        published = self.privacy.budget != "certified" or self.extension.stages == "one"
        if self.extension.method == FITTING and published:
            if self.extension.seconds != job_sections.PROGRAM_SECONDS:
                raise ValueError('extension.seconds: goes with privacy.budget = "certified" and levels only')
            extension = self.extension.model_copy(update={"method": LOG_CONVEX, "seconds": None})
            # Not set by the user, so another job made from this one chooses again.
            extension.model_fields_set.discard("method")
            # The job is frozen only after it has been validated.
            object.__setattr__(self, "extension", extension)
        return self

    @model_validator(mode="after")
    def _probabilities_fit(self) -> "JobSpec":
        if self.outputs.count is not None:
            check_min_probability(self.privacy.min_probability, self.outputs.count)
        return self

    def canonical(self) -> dict[str, Any]:
        """Return the job as plain JSON values, every default spelt out, infinity as ``"inf"``.

        Named columns, and the seconds of a method that is not chosen, are left out where there are none:
        stores made before there were such keys keep their fingerprints.
        """
        plain = {name: _plain(section) for name, section in self.model_dump().items()}
        for section, key in (*_COLUMN_KEYS, ("extension", "seconds")):
            if plain[section][key] is None:
                del plain[section][key]
        return plain

    def identity(self) -> dict[str, Any]:
        """Return what decides the bytes of the store: input files by content, no paths of theirs.

        Downloaded places and built-in data enter by name; the store records the digests of downloads.

        Raises
        ------
        SpecError
            If a file that the job names does not exist.
        """
        plain = self.canonical()
        for section in _NOT_IDENTITY:
            del plain[section]
        for name, path in files_of(self).items():
            section, _, key = name.partition(".")
            plain[section][key] = _DIGEST_PREFIX + _content_digest(Path(path), name)
        return plain

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of :meth:`identity`."""
        return fingerprint_of(self.identity())


def files_of(spec: JobSpec) -> dict[str, str]:
    """Return the files and folders of the user's that a job names, by ``section.key``."""
    named = [(section, key, getattr(getattr(spec, section), key)) for section, key in _PATH_KEYS]
    return {f"{section}.{key}": path for section, key, path in named if path and _is_path(path, key)}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of plain JSON values in canonical form."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def is_job_of(identity: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Whether a job in plain JSON values may have this identity, whatever is in the files that it names."""
    alike = {name: dict(section) for name, section in job.items() if name not in _NOT_IDENTITY}
    for section, key in _PATH_KEYS:
        path, digest = (table.get(section, {}).get(key) for table in (alike, identity))
        by_content = isinstance(path, str) and _is_path(path, key)
        if by_content and isinstance(digest, str) and digest.startswith(_DIGEST_PREFIX):
            alike[section][key] = digest
    return alike == identity


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
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder; a job is a file, such as job.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {first_line(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not a job file in TOML: {error}") from None
    _resolve_paths(document, path.resolve().parent)
    for override in overrides:
        _set(document, *_parsed(override))
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


def with_overrides(spec: JobSpec, overrides: Iterable[str]) -> JobSpec:
    """Return a job with ``section.key=value`` overrides; paths in them are taken from the working folder.

    Keys that were chosen automatically are chosen again.

    Raises
    ------
    SpecError
        If that is no job.
    """
    return _changed(spec, map(_parsed, overrides))


def _changed(spec: JobSpec, changes: Iterable[tuple[str, str, Any]]) -> JobSpec:
    """Return a job in which keys, each given as section, key and value, have other values."""
    document = spec.canonical()
    if "method" not in spec.extension.model_fields_set:
        document["extension"]["method"] = FITTING
    if "seconds" not in spec.extension.model_fields_set:
        document["extension"].pop("seconds", None)
    if "choose" not in spec.outputs.model_fields_set:
        del document["outputs"]["choose"]
    for section, key, value in changes:
        _set(document, section, key, value)
    return parse_job(document, source=spec.job.name)


def _keys_of(name: str, section: object) -> dict[str, Any]:
    """Return a section that is given in Python as what a job file would hold.

    Raises
    ------
    SpecError
        If it is no section.
    """
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    if not isinstance(section, Mapping):
        raise SpecError(f"job: {name}: must be keys and values, got {section!r}")
    return {str(key): _as_in_a_file(value) for key, value in section.items()}


def _as_in_a_file(value: Any) -> Any:
    """Return a Python value as TOML would give it; NumPy's numbers as Python's."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_in_a_file(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_as_in_a_file(item) for item in value]
    if isinstance(value, Integral | Real) and not isinstance(value, bool | int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _resolve_paths(document: dict[str, Any], folder: Path) -> None:
    for section, key in _PATH_KEYS:
        table = document.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _resolved(table[key], key, folder)


def _is_path(value: str, key: str) -> bool:
    """Whether what a job says under a key of paths is one, and not the name of something else."""
    if key == "region" and (value == PLACE or value.startswith(PLACE_PREFIX)):
        return False
    return not value.startswith(BUILTIN_PREFIX)


def _resolved(value: str, key: str, folder: Path) -> str:
    if not _is_path(value, key) or not value.strip():
        return value
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (RuntimeError, ValueError, OSError) as error:  # no such user, a null byte, a loop of links
        raise SpecError(f"{value!r}: not a path: {first_line(error)}") from None


def _parsed(override: str) -> tuple[str, str, Any]:
    """Return section, key and value of ``section.key=value``; a value that is no TOML is a text."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise SpecError(f"--set {override}: must look like section.key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return section, key, value


def _set(document: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Give a key of a job another value, and drop what that makes meaningless."""
    table = document.setdefault(section, {})
    if not isinstance(table, dict):
        raise SpecError(f"{section}.{key}: {section} is not a section")
    if (section, key, value) == ("loss", "kind", "file") and table.get(key) != value:
        for replaced, names in _REPLACED_BY_LOSS_FILE.items():
            if isinstance(there := document.get(replaced), dict):
                document[replaced] = {name: v for name, v in there.items() if name not in names}
    table[key] = value
    table.pop(_ALTERNATIVES.get((section, key), ""), None)
    for dependent, choices in _DEPENDENTS.get((section, key), {}).items():
        if value not in choices:
            table.pop(dependent, None)
    if (section, key) in _PATH_KEYS and isinstance(value, str):
        table[key] = _resolved(value, key, Path.cwd())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def _content_digest(path: Path, key: str) -> str:
    """Return the SHA-256 of a file, with a shapefile's projection, or of a road network's two files."""
    if not path.exists():
        raise SpecError(f"{key}: {path} does not exist")
    digests = []
    try:
        files = [path / name for name in ROAD_FILES] if path.is_dir() else [path]
        # The reference system of a shapefile is in a .prj beside it, in capitals or not.
        if path.suffix.lower() == ".shp" and path.is_file():
            named = (other for other in path.parent.iterdir() if other.stem == path.stem)
            files += sorted(other for other in named if other.suffix.lower() == ".prj")
        for part in files:
            with part.open("rb") as file:  # it may be larger than the memory
                digests.append(hashlib.file_digest(file, "sha256"))
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {first_line(error)}") from None
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def first_complaint(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first entry of a validation error as one line for the user.

    Parameters
    ----------
    error
        What the validation of a document has raised.
    model
        What the document was validated as; its keys are proposed for one that is not known.
    """
    entries = error.errors(include_url=False)
    # An unknown key is usually a misspelt one, which is then also reported as missing.
    first = next((e for e in entries if e["type"] == "extra_forbidden"), entries[0])
    location = tuple(map(str, first["loc"]))
    where = ".".join(location)
    if first["type"] == "extra_forbidden":
        known = list(_known_names(location[:-1], model))
        close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.52)
        prefixed = [name for name in known if name.startswith(location[-1])]
        hint = (close or prefixed or [""])[0]
        advice = f"did you mean {hint}?" if hint else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {advice}"
    if first["type"] == "missing":
        inner = isinstance(first["loc"][-1], int)
        return f"{'.'.join(location[:-1])}: has too few numbers" if inner else f"{where}: is required"
    if (words := _COMPLAINTS.get(first["type"])) is not None:
        limits = {name: _limit(value) for name, value in first.get("ctx", {}).items()}
        found = first["input"]
        return (
            f"{where}: {words.format(**limits)}, got {list(found) if isinstance(found, tuple) else found!r}"
        )
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where and not message.startswith(where) else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _limit(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _known_names(sections: tuple[str, ...], model: type[BaseModel]) -> Iterator[str]:
    for name in sections:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
