"""The errors for users, as one small tree, and the warning for Python.

Every class has the exit code of the command line, and derives from the built-in exception that a caller who
does not know this package would catch.
"""

import errno
import math
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

EXIT_GUARANTEE = 1
EXIT_BAD_INPUT = 2
EXIT_INCOMPLETE = 3
EXIT_SOLVER = 4
EXIT_CRASH = 70
# As of programs that end by SIGPIPE.
EXIT_UNREAD = 141
_LONGEST_SHOWN = 60
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MdpextError(Exception):
    """Base of all expected errors: one line with what is wrong, where, and what to do.

    Parameters
    ----------
    message
        The line. What cannot be printed is escaped, since names and cells of files may hold anything.
    """

    exit_code: int = EXIT_BAD_INPUT

    def __str__(self) -> str:
        """Return the message as it may be shown: texts of stores and files in it are only shown."""
        return "\n".join(map(printable, super().__str__().split("\n")))


class SpecError(MdpextError, ValueError):
    """The job file, an override or an argument asks for something impossible."""


class DataError(MdpextError, ValueError):
    """An input file or road network cannot be used as it is."""


class SolverError(MdpextError, RuntimeError):
    """A linear program could not be solved to the required accuracy."""

    exit_code = EXIT_SOLVER


class ClusterError(MdpextError, RuntimeError):
    """The workers could not be started or reached, or were lost."""

    exit_code = EXIT_INCOMPLETE


class StoreError(MdpextError, OSError):
    """The mechanism store cannot be created, read or written, or belongs to another job."""


def newer_format(name: object, kind: str, found: int, known: int) -> StoreError:
    """Return the error that says that `name` has format `found` of its kind, where `known` is the newest."""
    newest = f"newer than {known}, the newest that is read here"
    return StoreError(f"{name}: has {kind} format {found}, {newest}; upgrade mdpext-dask")


class StoreAccessError(MdpextError):
    """A remote store did not answer, or refused; what it holds is not known.

    Neither a :class:`StoreError` nor an ``OSError``, so that it is never taken for damage.

    Parameters
    ----------
    message
        One line for the user.
    transient
        Whether running again may help.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient
        self.exit_code = EXIT_INCOMPLETE if transient else EXIT_BAD_INPUT


class IncompleteStoreError(StoreError):
    """The store lacks blocks, or its certificate has not been computed yet.

    Parameters
    ----------
    message
        One line for the user.
    missing
        Indices of the blocks without a valid receipt.
    """

    exit_code = EXIT_INCOMPLETE

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class GuaranteeViolation(MdpextError):
    """The stored mechanism does not keep the promised guarantee.

    Parameters
    ----------
    message
        One line for the user.
    worst
        The worst triple found: two records, an output, the log ratio and its bound.
    """

    exit_code = EXIT_GUARANTEE

    def __init__(self, message: str, worst: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.worst = dict(worst or {})


class BudgetExceeded(MdpextError):
    """A release would exceed its user's limit; nothing has been released or charged.

    As with a :class:`GuaranteeViolation`, a promise would be broken; it is not bad input.

    Parameters
    ----------
    message
        One line for the user.
    users
        How many users would exceed the limit.
    """

    exit_code = EXIT_GUARANTEE

    def __init__(self, message: str, users: int = 1) -> None:
        super().__init__(message)
        self.users = users


class ImplausibleWarning(UserWarning):
    """A place can be reported from, and is hardly one that was meant."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its name where there is none.

    Of errors of the operating system only what went wrong: the caller names the path, no temporary one.
    Timeouts of libraries are OSErrors too, with other arguments in the place of number and words.
    """
    if isinstance(error, OSError) and isinstance(error.errno, int) and isinstance(error.strerror, str):
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk or a used-up quota is behind an error, however it has been worded since."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_code_of(error: MdpextError) -> int:
    """Return the exit code that an error means: on a full disk, running again may do, whatever failed."""
    return EXIT_INCOMPLETE if is_disk_full(error) else error.exit_code


def alternatives(names: Sequence[str]) -> str:
    """Return names as one of which something must be: ``a, b or c``."""
    return " or ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def as_number(value: object) -> float:
    """Return an argument that should be a number, infinite where it is too large; NaN for everything else.

    Truth values and texts are no numbers, also texts with numbers in them.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: object) -> str:
    """Return what an argument was, for a message of one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a whole number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def printable(text: str) -> str:
    """Return a text that shows what it holds, wherever it comes from.

    What a terminal or a page would act on instead of showing it is written as in Python's literals: control
    characters, and with them ANSI sequences and line breaks, marks that turn the direction of writing, lone
    surrogates, and what has no glyph.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
