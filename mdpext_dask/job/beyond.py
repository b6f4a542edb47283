"""What a job file makes this machine do beyond computing: connect to others, submit, run code of others."""

from mdpext_dask.events import Note, Observer
from mdpext_dask.job.sections import PLACE, PLACE_PREFIX
from mdpext_dask.job.spec import JobSpec


def tell_beyond(observer: Observer, *specs: JobSpec, to: str | None = None) -> None:
    """Tell in one line what jobs reach beyond this machine and this package, if they do, before they do.

    Parameters
    ----------
    observer
        Is told.
    specs
        The jobs.
    to
        Where they are being submitted to: that alone is told.
    """
    found = dict.fromkeys(part for spec in specs for part in _parts(spec, to))
    if found:
        observer(Note(f"this job {', '.join(found)}"))


def _parts(spec: JobSpec, to: str | None) -> list[str]:
    cluster, found = spec.cluster, list[str]()
    kind = to or cluster.kind
    if kind == "address":
        found.append(f"runs on the scheduler at {cluster.address}, which may run anything here")
    elif kind == "slurm":
        options = f" with {' '.join(cluster.options)}" if cluster.options else ""
        found.append(f"submits to Slurm{options}")
    elif kind == "kubernetes":
        found.append(f"starts {cluster.image} on Kubernetes, namespace {cluster.namespace}")
    if to is not None:
        return found
    if ":" in spec.extension.method:
        found.append(f"runs the code of {spec.extension.method}")
    region = spec.domain.region or ""
    if spec.domain.place is not None or region == PLACE or region.startswith(PLACE_PREFIX):
        place = region.removeprefix(PLACE_PREFIX) if spec.domain.place is None else spec.domain.place
        found.append(f"asks OpenStreetMap's servers for {place!r} unless that is cached")
    return found
