"""Files written before a job is submitted: the whole job, Dask's settings, a record of what was submitted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdpext_dask.compute.dask_settings import nested
from mdpext_dask.errors import SpecError, first_line
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore

# Marks a folder whose files may be overwritten.
_MARK = ".mdpext-submit"
JOB_FILE, DASK_FILE, RECORD_FILE = "job.toml", "dask.yaml", "submitted.json"


def job_text(spec: JobSpec, cluster: ClusterSection) -> str:
    """Return a job as a job file with all defaults, absolute paths, and another cluster section.

    Parameters
    ----------
    spec
        The job.
    cluster
        Where it runs; its defaults are left out.
    """
    document = spec.model_copy(update={"cluster": cluster}).canonical()
    document["cluster"] = {key: document["cluster"][key] for key in sorted(cluster.model_fields_set)}
    lines = []
    for name, section in document.items():
        given = {key: value for key, value in section.items() if value is not None}
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in given.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # Strings of JSON are strings of TOML, except for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def dask_text() -> str:
    """Return the settings of schedulers and workers as a file for Dask; JSON is YAML."""
    return json.dumps(nested(), indent=2) + "\n"


def check_store(spec: JobSpec, store_url: str, observer: Observer) -> bool:
    """Return whether a job's store is complete: then there is nothing to submit.

    Raises
    ------
    StoreError
        If the place belongs to something else, or cannot be read or written.
    """
    objects.check_place(store_url)
    found = MechanismStore.find(store_url, spec)
    complete = found is not None and found.is_finished()
    if complete:
        observer(Note(f"{store_url}: is complete; there is nothing to submit"))
    return complete


def write_files(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write files into a folder, which is created if it is missing, and return their paths.

    Raises
    ------
    SpecError
        If it cannot be written, or has files of these names that `mdpext submit` did not write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [name for name in texts if (folder / name).exists()]
        if others and not (folder / _MARK).exists():
            raise SpecError(
                f"{folder}: has {', '.join(others)} already, not from mdpext submit; give another --folder"
            )
        (folder / _MARK).touch()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{folder}: cannot be written: {first_line(error)}") from None
    return [str(folder / name) for name in texts]


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of the last submission from this folder, if there is one."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
