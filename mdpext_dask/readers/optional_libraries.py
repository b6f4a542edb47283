"""Libraries that only some jobs need: imported on first use, or named with the extra that brings them."""

import importlib
from typing import Any

from mdpext_dask.errors import SpecError


def import_optional(library: str, purpose: str) -> Any:
    """Import a library of the extra ``files``; each costs seconds and megabytes, so only its users load it.

    Parameters
    ----------
    library
        Its name, or that of one of its modules.
    purpose
        What needs it, to begin the error with.

    Raises
    ------
    SpecError
        If it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError:
        name = library.partition(".")[0]
        raise SpecError(f"{purpose} needs {name}: install it with pip install 'mdpext-dask[files]'") from None
