"""Auditors: whether what a mechanism holds is as private as it says.

``audit(STORE)`` is the one call: both ``mdpext_dask.audit`` as a function and ``mdpext_dask.audit.audit``.
The parts are modules of this package.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdpext_dask.auditing import audit

__all__ = ["audit"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the parts are used by what this needs.
    if name != "audit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mdpext_dask.auditing import audit

    return audit


class _CallablePackage(ModuleType):
    """The package under whose name users expect the function."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Audit a mechanism; see :func:`mdpext_dask.auditing.audit`."""
        from mdpext_dask.auditing import audit

        return audit(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
