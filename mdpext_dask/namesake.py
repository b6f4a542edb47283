"""A package called like the function that users expect under its name is that function as well.

``from mdpext_dask import audit`` gives the package once any part of it has been imported: Python then sets
the name itself.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, home: str) -> None:
    """Make a package callable as a function of its own name.

    Parameters
    ----------
    package
        Its full name, of which the last part is the function's.
    home
        Full name of the module that has the function; imported on the first call, since that needs the parts
        of the package.
    """
    name = package.rpartition(".")[2]

    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(home), name)
        return found

    class CallablePackage(ModuleType):
        """The package under whose name users expect the function."""

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(function())

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return function()(*arguments, **named)

    sys.modules[package].__class__ = CallablePackage
