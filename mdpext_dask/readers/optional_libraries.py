"""Libraries that only some jobs need: imported when they are, or named with the extra that brings them."""

import importlib
from typing import Any

from mdpext_dask.errors import SpecError


def import_osm(library: str, purpose: str) -> Any:
    """Import a library that comes with the extra ``osm``.

    Such libraries cost seconds and hundreds of megabytes, so only those who need them pay.

    Parameters
    ----------
    library
        Its name.
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
        raise SpecError(
            f"{purpose} needs {library}: install it with pip install 'mdpext-dask[files]'"
        ) from None
