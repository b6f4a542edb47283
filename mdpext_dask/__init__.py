"""Metric differential privacy for locations at city scale.

``open_mechanism`` opens a finished store and samples from it; ``load_job`` and ``build`` make one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdpext_dask.mechanism import Mechanism, open_mechanism
    from mdpext_dask.run import build
    from mdpext_dask.spec import JobSpec, load_job

__all__ = ["JobSpec", "Mechanism", "build", "load_job", "open_mechanism"]
__version__ = "0.1.0"

_HOME = {
    "JobSpec": "mdpext_dask.spec",
    "Mechanism": "mdpext_dask.mechanism",
    "build": "mdpext_dask.run",
    "load_job": "mdpext_dask.spec",
    "open_mechanism": "mdpext_dask.mechanism",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for numpy and zarr.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
