"""Jobs submitted to a cluster: the files it needs, the commands that submit them, and how they are followed.

:func:`submit` calls the function of the same name in ``slurm`` or ``kubernetes``. It returns the document
that ``mdpext submit --json`` prints: ``to``, ``store``, ``folder``, ``files``, ``commands`` (which submit
them, quoted for a shell), ``jobs`` (their ids), ``state`` (``"written"``, ``"submitted"`` or ``"done"``). A
followed job that fails is an error, with the exit code of ``run``.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from mdpext_dask.errors import SpecError, alternatives
from mdpext_dask.events import Observer
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import ClusterSection
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
    """Submit a job to a cluster, and follow it.

    Parameters
    ----------
    spec
        The job.
    to
        Kind of cluster, one of :data:`CLUSTERS`.
    store_url
        Path or URL of the store.
    folder
        Where the files go; default: the job's name with the kind of cluster, here.
    dry_run
        Write the files and submit nothing; this works where there is no such cluster.
    array
        Submit independent tasks on blocks, without Dask.
    detach
        Return once the job is submitted.
    observer
        Is told of progress.

    Raises
    ------
    MdpextError
        If there is no such kind of cluster, or if the job is not accepted, or fails.
    """
    if to not in CLUSTERS:
        raise SpecError(f"--to: must be {alternatives(tuple(CLUSTERS))}, got {to!r}")
    # Before the job is looked at; where it goes is told when it goes there.
    tell_beyond(observer, spec.model_copy(update={"cluster": ClusterSection()}))
    place = (folder or Path(f"{spec.job.name}-{to}")).expanduser().absolute()
    how = {"dry_run": dry_run, "array": array, "detach": detach, "observer": observer}
    module = import_module(f"{__name__}.{to}")
    result: dict[str, Any] = module.submit(spec, objects.absolute(store_url), place, **how)
    return result
