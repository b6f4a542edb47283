"""What the drivers of object stores raise: whether it passes, and what the server said.

What tells a passing fault from a refusal is the HTTP status where there is one (RFC 9110, section 15; the
codes of S3 are in the *Error responses* of its API reference), else the kind of exception. No driver need be
installed for it.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from mdpext_dask.errors import first_line

# Statuses below 500 that pass: time-out, conflict of two writes, too early, too many requests.
_PASSING_STATUSES = {408, 409, 425, 429}
# What S3 says, with a status of 400, of a body that was cut off or changed on its way.
_PASSING_CODES = {
    "BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "XAmzContentSHA256Mismatch",
}  # fmt: skip
_LASTING_STATUSES = {501, 505}
# Names of what drivers raise where a connection fails; they need not be installed to be known.
_PASSING_KINDS = {
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "HTTPClientError", "ConnectionError", "ResponseParserError",  # botocore
    "IncompleteRead", "IncompleteReadError", "ProtocolError",  # urllib3, asyncio
}  # fmt: skip


def is_transient(error: BaseException) -> bool:
    """Whether the same request may be answered another time."""
    if codes_of(error) & _PASSING_CODES:
        return True
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUSES or (status >= 500 and status not in _LASTING_STATUSES)
    return any(map(_is_of_connection, _causes(error)))


def said_by(error: BaseException) -> str:
    """Return what a server, or else the driver, said in an error, in one line; nothing if it was silent."""
    if status_of(error) is None:
        return first_line(error) if str(error) else ""
    for cause in _causes(error):
        status = _own_status(cause)
        if status is not None:
            details = _response_of(cause).get("Error", {})
            said = details.get("Code"), details.get("Message") or getattr(cause, "message", None)
            words = ": ".join(str(word) for word in said if word and str(word) != str(status))
            return f"{status} {words}".strip().splitlines()[0]
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what has caused it: drivers dress one up as another."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _response_of(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def _is_of_connection(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError | EOFError) or bool(kinds & _PASSING_KINDS)


def _own_status(error: BaseException) -> int | None:
    status = _response_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    # As botocore has it; else aiohttp, or the drivers of other object stores.
    for name in ("status", "code"):
        if status is None:
            status = getattr(error, name, None)
    return status if isinstance(status, int) and 300 <= status < 600 else None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error or what has caused it, if there is one."""
    # Where a connection breaks there is none: aiohttp numbers what is wrong with a body like one.
    causes = itertools.takewhile(lambda cause: not _is_of_connection(cause), _causes(error))
    return next((s for s in map(_own_status, causes) if s is not None), None)


def codes_of(error: BaseException) -> set[str]:
    """Return what S3 calls the error, in all that has caused it."""
    return {str(_response_of(cause).get("Error", {}).get("Code")) for cause in _causes(error)}
