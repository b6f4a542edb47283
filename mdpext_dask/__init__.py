"""Metric differential privacy for locations at city scale.

``JobSpec.of`` or ``load_job`` say what is wanted, ``build`` makes a store of it, and ``open_mechanism`` opens
the finished store and samples from it. ``audit`` audits a store, or anyone's mechanism; ``evaluate`` says
what it costs its users and what attackers learn; ``plots`` draws it; ``report`` puts all of it into one file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdpext_dask import plots
    from mdpext_dask.audit.report import AuditReport
    from mdpext_dask.auditing import audit
    from mdpext_dask.auditors import Sampling
    from mdpext_dask.evaluate.attackers import AttackRequest
    from mdpext_dask.evaluate.bound import BoundRequest
    from mdpext_dask.evaluation import evaluate
    from mdpext_dask.mechanism import Mechanism, open_mechanism
    from mdpext_dask.progress_lines import PlainLines
    from mdpext_dask.releases import ReleaseBudget
    from mdpext_dask.reporting import report
    from mdpext_dask.run import build
    from mdpext_dask.spec import JobSpec, load_job
    from mdpext_dask.sticky import StickyKey

__all__ = [
    "AttackRequest",
    "AuditReport",
    "BoundRequest",
    "JobSpec",
    "Mechanism",
    "PlainLines",
    "ReleaseBudget",
    "Sampling",
    "StickyKey",
    "audit",
    "build",
    "evaluate",
    "load_job",
    "open_mechanism",
    "plots",
    "report",
]
__version__ = "0.1.0"

_HOME = {
    "AttackRequest": "mdpext_dask.evaluate.attackers",
    "AuditReport": "mdpext_dask.audit.report",
    "BoundRequest": "mdpext_dask.evaluate.bound",
    "JobSpec": "mdpext_dask.spec",
    "Mechanism": "mdpext_dask.mechanism",
    "PlainLines": "mdpext_dask.progress_lines",
    "ReleaseBudget": "mdpext_dask.releases",
    "Sampling": "mdpext_dask.auditors",
    "StickyKey": "mdpext_dask.sticky",
    "audit": "mdpext_dask.auditing",
    "build": "mdpext_dask.run",
    "evaluate": "mdpext_dask.evaluation",
    "load_job": "mdpext_dask.spec",
    "open_mechanism": "mdpext_dask.mechanism",
    "report": "mdpext_dask.reporting",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line's help must not wait for numpy and zarr.
    if name == "plots":
        return import_module("mdpext_dask.plots")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
