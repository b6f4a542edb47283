"""``mdpext submit``: which cluster a job is handed to."""

from importlib import import_module
from pathlib import Path
from typing import Any

from mdpext_dask.errors import SpecError
from mdpext_dask.events import Observer
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.store import objects

CLUSTERS = ("slurm", "kubernetes")


def submit(
    spec: JobSpec,
    to: str,
    store_url: str,
    folder: Path | None,
    *,
    dry_run: bool,
    array: bool,
    detach: bool,
    observer: Observer,
) -> dict[str, Any]:
    """Hand a job to a cluster, whatever kind of it the job names; see :mod:`mdpext_dask.submit`.

    Raises
    ------
    MdpextError
        If there is no such kind, or if the job is not accepted, or does not end well.
    """
    if to not in CLUSTERS:
        raise SpecError(f"--to: must be one of {', '.join(CLUSTERS)}, got {to!r}")
    module = import_module(f"mdpext_dask.cli.submit.{to}")
    place = Path(f"{spec.job.name}-{to}") if folder is None else folder
    result: dict[str, Any] = module.submit(
        spec,
        objects.absolute(store_url),
        place.expanduser().absolute(),
        dry_run=dry_run,
        array=array,
        detach=detach,
        observer=observer,
    )
    return result
