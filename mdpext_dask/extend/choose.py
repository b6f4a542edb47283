"""Operators by the name that a job gives them."""

import importlib

from mdpext_dask.errors import SpecError
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.mcshane_whitney import McShaneWhitney
from mdpext_dask.extend.operator import Operator
from mdpext_dask.sections import ExtensionSection


def operator_of(extension: ExtensionSection) -> Operator:
    """Return the operator of a job.

    Raises
    ------
    SpecError
        If an operator of the user's own cannot be imported, or is none.
    """
    one_stage = extension.stages == "one"
    if extension.method == McShaneWhitney.name:
        return McShaneWhitney(one_stage=one_stage)
    if ":" in extension.method:
        return _imported(extension.method)
    # Its scores are the same however many stages there are. Cell programs start from it.
    return LogConvex()


def _imported(name: str) -> Operator:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        operator = found()
    except Exception as error:  # whatever somebody else's module raises
        raise SpecError(f"extension.method: {name}: cannot be made: {error}") from None
    if not isinstance(operator, Operator):
        raise SpecError(f"extension.method: {name}: is not an mdpext_dask.extend.operator.Operator")
    return operator
