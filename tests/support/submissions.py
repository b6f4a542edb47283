"""Jobs submitted to stand-ins of clusters, from within this process."""

from pathlib import Path
from typing import Any

from mdpext_dask.cli.submit import submit
from mdpext_dask.events import Event, Note
from mdpext_dask.job.spec import JobSpec


def program(folder: Path, name: str, text: str) -> Path:
    """Write a program of a shell into a folder, which is made, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return folder


def notes_of(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def to_kubernetes(
    spec: JobSpec, folder: Path, store: str, **options: bool
) -> tuple[dict[str, Any], list[str]]:
    """Submit a job and follow it; return the document, and the notes of the way."""
    events = list[Event]()
    how = {"dry_run": False, "array": False, "detach": False, **options}
    return submit(spec, "kubernetes", store, folder, **how, observer=events.append), notes_of(events)
