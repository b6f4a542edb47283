"""Metric differential privacy for locations at city scale.

``open_mechanism`` opens a finished store and samples from it; ``load_job`` and ``build`` make one; ``audit``
audits one, or anyone's mechanism.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdpext_dask.audit.report import AuditReport
    from mdpext_dask.auditing import audit
    from mdpext_dask.auditors import Sampling
    from mdpext_dask.mechanism import Mechanism, open_mechanism
    from mdpext_dask.run import build
    from mdpext_dask.spec import JobSpec, load_job

__all__ = [
    "AuditReport",
    "JobSpec",
    "Mechanism",
    "Sampling",
    "audit",
    "build",
    "load_job",
    "open_mechanism",
]
__version__ = "0.1.0"

_HOME = {
    "AuditReport": "mdpext_dask.audit.report",
    "JobSpec": "mdpext_dask.spec",
    "Mechanism": "mdpext_dask.mechanism",
    "Sampling": "mdpext_dask.auditors",
    "audit": "mdpext_dask.auditing",
    "build": "mdpext_dask.run",
    "load_job": "mdpext_dask.spec",
    "open_mechanism": "mdpext_dask.mechanism",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for numpy and zarr.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
