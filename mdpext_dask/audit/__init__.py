"""Auditors: whether what a mechanism holds is as private as it says.

``audit(STORE)`` is the one call: both ``mdpext_dask.audit`` as a function and ``mdpext_dask.audit.audit``.
The parts are modules of this package.
"""

from typing import TYPE_CHECKING, Any

from mdpext_dask.namesake import make_callable

if TYPE_CHECKING:
    from mdpext_dask.auditing import audit

__all__ = ["audit"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the parts are used by what this needs.
    if name != "audit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mdpext_dask.auditing import audit

    return audit


make_callable(__name__, "mdpext_dask.auditing")
