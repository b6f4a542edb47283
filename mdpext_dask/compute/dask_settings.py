"""Settings of Dask, wherever its processes are started; ``deploy/dask.yaml`` has the same."""

from collections.abc import Mapping
from typing import Any

DASK_CONFIG: dict[str, Any] = {
    # Arrays of numpy do not spill, so a worker that runs low must pause, not write to disk.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": 0.85,
    "distributed.worker.memory.terminate": 0.95,
    "distributed.scheduler.allowed-failures": 5,
    "distributed.scheduler.worker-saturation": 1.1,
    # A machine that is cut off says nothing; its tasks must not wait five minutes for it.
    "distributed.scheduler.worker-ttl": "60s",
    # The matrices of a seed program go out with its tasks, tens of megabytes at every iteration.
    "distributed.admin.large-graph-warning-threshold": "1GB",
    # By default, workers return memory after every large array, and NumPy then spends as long on getting it
    # again as on computing (seed programs took three times as long).
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**28,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
    # The nanny sets the other thread counts itself.
    "distributed.nanny.pre-spawn-environ.NUMBA_NUM_THREADS": 1,
}
PAUSE: float = DASK_CONFIG["distributed.worker.memory.pause"]


def settings_under(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not set in `own`, what Dask collects from files and the environment."""
    return {key: value for key, value in DASK_CONFIG.items() if not _is_set(own, key)}


def nested(settings: Mapping[str, Any] = DASK_CONFIG) -> dict[str, Any]:
    """Return settings as Dask has them in files."""
    from dask import config

    tree: dict[str, Any] = {}
    config.set(settings, config=tree)
    return tree


def _is_set(tree: Any, key: str) -> bool:
    # To Dask, hyphens and underscores in names are the same.
    for name in key.split("."):
        if not isinstance(tree, Mapping):
            return True
        alike = [value for found, value in tree.items() if found.replace("_", "-") == name.replace("_", "-")]
        if not alike:
            return False
        tree = alike[0]
    return True
