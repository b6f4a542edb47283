"""Metric differential privacy for locations at city scale.

``JobSpec.of`` or ``load_job`` describe a job, ``build`` makes its store, and ``open_mechanism`` opens a
finished store and samples from it. ``audit`` audits a store or any other mechanism; ``evaluate`` measures its
loss and what attackers learn; ``plots`` draws it; ``report`` writes the report page.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before anything that an older Python cannot read. With a name, so that ``python -m`` says it in one line.
if sys.version_info < (3, 11):  # noqa: UP036 a checkout is not installed
    raise ImportError(
        f"mdpext_dask needs Python 3.11 or newer; this is {'.'.join(map(str, sys.version_info[:3]))}",
        name=__name__,
    )

if TYPE_CHECKING:
    from mdpext_dask.auditors.audit import audit as audit
    from mdpext_dask.auditors.methods import Sampling as Sampling
    from mdpext_dask.auditors.result import AuditReport as AuditReport
    from mdpext_dask.cli.progress import PlainLines as PlainLines
    from mdpext_dask.evaluation.attackers.requests import AttackRequest as AttackRequest
    from mdpext_dask.evaluation.bound.lower_bound import BoundRequest as BoundRequest
    from mdpext_dask.evaluation.evaluate import evaluate as evaluate
    from mdpext_dask.extend import graph as graph
    from mdpext_dask.extend.choose import trust_operators as trust_operators
    from mdpext_dask.job.spec import JobSpec as JobSpec
    from mdpext_dask.job.spec import load_job as load_job
    from mdpext_dask.pipeline.run import build as build
    from mdpext_dask.reports import plots as plots
    from mdpext_dask.reports.report import report as report
    from mdpext_dask.runtime.ledger import ReleaseBudget as ReleaseBudget
    from mdpext_dask.runtime.sticky import StickyKey as StickyKey
    from mdpext_dask.sampling.frames import sample_frame as sample_frame
    from mdpext_dask.sampling.mechanism import Mechanism as Mechanism
    from mdpext_dask.sampling.mechanism import open_mechanism as open_mechanism

__version__ = "0.1.0"

# The modules of the public names, which are imported on first use: the command line's help must not wait for
# NumPy. The imports above are for type checkers.
_HOME = {
    "AttackRequest": "evaluation.attackers.requests",
    "AuditReport": "auditors.result",
    "BoundRequest": "evaluation.bound.lower_bound",
    "JobSpec": "job.spec",
    "Mechanism": "sampling.mechanism",
    "PlainLines": "cli.progress",
    "ReleaseBudget": "runtime.ledger",
    "Sampling": "auditors.methods",
    "StickyKey": "runtime.sticky",
    "audit": "auditors.audit",
    "build": "pipeline.run",
    "evaluate": "evaluation.evaluate",
    "graph": "extend",
    "load_job": "job.spec",
    "open_mechanism": "sampling.mechanism",
    "plots": "reports",
    "report": "reports.report",
    "sample_frame": "sampling.frames",
    "trust_operators": "extend.choose",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOME[name]}"
    if name in ("graph", "plots"):  # public modules
        return import_module(f"{home}.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
