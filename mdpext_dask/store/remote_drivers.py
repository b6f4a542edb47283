"""The drivers behind URLs, of fsspec: opened so that they do not retry, and what their errors say.

Whether an error is transient is decided by its HTTP status where there is one (RFC 9110, section 15; the
codes of S3 are in the *Error responses* of its API reference), else by the kind of exception. No driver need
be installed for that.
"""

import asyncio
import contextlib
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import fsspec
from zarr.storage import FsspecStore

from mdpext_dask.errors import StoreAccessError, StoreError, first_line

_S3, _PLAIN_HTTP = ("s3", "s3a"), ("http", "https")
# Of the package, by protocol; which driver another protocol needs is for fsspec to say.
_EXTRAS = dict.fromkeys((*_S3, *_PLAIN_HTTP), "cloud")
# At least as many as objects that are asked for at once; botocore's own limit is 10.
_CONNECTIONS = 64
_CLOSING, _CLOSE_SECONDS = "_closed_in_the_end", 1.0
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


# --- opening -----------------------------------------------------------------------------------------


def protocol_of(url: str) -> str:
    """Return the protocol of a URL."""
    return url.partition("://")[0]


def is_plain_http(url: str) -> bool:
    """Whether a URL is of a web server: there is no way to list what it holds, nor to write."""
    return protocol_of(url) in _PLAIN_HTTP


def check_no_password(url: str) -> None:
    """Refuse an address with a name and a password: it is told in errors, and kept in job files and scripts.

    Raises
    ------
    StoreError
        If there is one; it is not in the message.
    """
    if re.search(r"://[^/@]*:[^/@]*@", url):
        raise StoreError(
            f"{protocol_of(url)}://...: an address with a password in it would be told to everybody; "
            "leave it to the configuration of its driver, or of fsspec"
        )


def open_driver(url: str, *, read_only: bool, connect_seconds: float, silence_seconds: float) -> FsspecStore:
    """Return the store behind a URL, which asks once, and says of what is not there that it is not there.

    Parameters
    ----------
    url
        Protocol and path; all else (endpoint, credentials) is for the driver to find in the environment.
    read_only
        Whether to refuse writes.
    connect_seconds, silence_seconds
        Time limits, in s, for a connection and for silence on it, where the driver is known to have them.

    Raises
    ------
    StoreError
        If the protocol is not known, its driver is not installed, it is to be written and cannot be, or there
        is a password in the URL.
    StoreAccessError
        If its driver connects at once, and nothing answers.
    """
    check_no_password(url)
    if is_plain_http(url) and not read_only:
        raise StoreError(f"{url}: can only be read; to write, give a local path or a URL such as s3://")
    protocol = protocol_of(url)
    try:
        store = FsspecStore.from_url(
            url.rstrip("/"),
            storage_options=_options(protocol, connect_seconds, silence_seconds),
            read_only=read_only,
            # What is not there is told from what may not be seen by whoever asks.
            allowed_exceptions=(),
        )
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"; pip install 'mdpext-dask[{extra}]'" if extra else ""
        raise StoreError(f"{url}: the driver is not installed: {first_line(error)}{hint}") from None
    except (ValueError, TypeError) as error:
        raise StoreError(f"{url}: cannot be opened: {first_line(error)}") from None
    except OSError as error:  # some drivers connect at once
        raise StoreAccessError(f"{url}: does not answer: {first_line(error)}", transient=True) from None
    if protocol in _S3:
        store.fs.retries = 1
    return store


def _options(protocol: str, connect_seconds: float, silence_seconds: float) -> dict[str, Any]:
    """Return what a driver is told, beside what the user's own configuration of fsspec tells it."""
    own = fsspec.config.conf.get(protocol, {})
    if protocol in _S3:
        config = {
            "max_pool_connections": _CONNECTIONS,
            **own.get("config_kwargs", {}),
            "connect_timeout": connect_seconds,
            "read_timeout": silence_seconds,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        # In one piece: s3fs would first ask how large an object is, and then for many parts of it, of which
        # nothing says that they are of one version.
        return {"config_kwargs": config, "max_concurrency": 1, "use_listings_cache": False}
    if protocol in _PLAIN_HTTP:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=silence_seconds)
        return {"client_kwargs": {**own.get("client_kwargs", {}), "timeout": limit}}
    return {}


def close_in_the_end(fs: Any) -> None:
    """Let a driver's connections be closed with it, or with the process: asynchronous ones are left open."""
    if _CLOSING in vars(fs):
        return
    creator, session = getattr(fs, "_s3creator", None), getattr(fs, "_session", None)
    if creator is not None:  # of s3fs
        vars(fs)[_CLOSING] = weakref.finalize(
            fs, _close, asyncio.get_running_loop(), functools.partial(creator.__aexit__, None, None, None)
        )
    elif session is not None:  # of fsspec's own HTTP
        vars(fs)[_CLOSING] = weakref.finalize(fs, _close, asyncio.get_running_loop(), session.close)


def _close(loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if not loop.is_running():
        return
    closed = asyncio.run_coroutine_threadsafe(close(), loop)
    if asyncio._get_running_loop() is not loop:  # whoever is in the loop must not wait for it
        with contextlib.suppress(Exception):
            closed.result(timeout=_CLOSE_SECONDS)


# --- errors ------------------------------------------------------------------------------------------


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
