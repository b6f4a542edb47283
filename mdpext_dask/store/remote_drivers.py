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
# Extras of the package by protocol; for other protocols, fsspec names the driver.
_EXTRAS = dict.fromkeys((*_S3, *_PLAIN_HTTP), "cloud")
# At least the number of concurrent requests; botocore's own limit is 10.
_CONNECTIONS = 64
_CLOSING, _CLOSE_SECONDS = "_closed_in_the_end", 1.0
# Transient statuses below 500: time-out, conflict of two writes, too early, too many requests.
_PASSING_STATUSES = {408, 409, 425, 429}
# S3's codes, with a status of 400, for a body that was cut off or changed on its way.
_PASSING_CODES = {
    "BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown",
    "XAmzContentSHA256Mismatch",
}  # fmt: skip
_LASTING_STATUSES = {501, 505}
# Names of the drivers' errors for failed connections.
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
    """Whether a URL is of a web server, which can neither be listed nor written."""
    return protocol_of(url) in _PLAIN_HTTP


def check_no_password(url: str) -> None:
    """Refuse an address with a name and a password, as addresses are printed in errors and stored in files.

    Raises
    ------
    StoreError
        If there is a password; the message does not contain it.
    """
    if re.search(r"://[^/@]*:[^/@]*@", url):
        raise StoreError(
            f"{protocol_of(url)}://...: an address with a password in it would be told to everybody; "
            "leave it to the configuration of its driver, or of fsspec"
        )


def open_driver(url: str, *, read_only: bool, connect_seconds: float, silence_seconds: float) -> FsspecStore:
    """Return the store behind a URL, which does not retry, and raises FileNotFoundError for missing objects.

    Parameters
    ----------
    url
        Protocol and path; the driver finds all else (endpoint, credentials) in the environment.
    read_only
        Whether to refuse writes.
    connect_seconds, silence_seconds
        Time limits, in s, for a connection and for silence on it, if the driver is known to have them.

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
            # The caller tells missing objects from forbidden ones.
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
    """Return options for a driver, beside those of the user's own configuration of fsspec."""
    own = fsspec.config.conf.get(protocol, {})
    if protocol in _S3:
        config = {
            "max_pool_connections": _CONNECTIONS,
            **own.get("config_kwargs", {}),
            "connect_timeout": connect_seconds,
            "read_timeout": silence_seconds,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        # In one piece: s3fs would first request the size of an object and then many parts of it, which need
        # not be of one version.
        return {"config_kwargs": config, "max_concurrency": 1, "use_listings_cache": False}
    if protocol in _PLAIN_HTTP:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=silence_seconds)
        return {"client_kwargs": {**own.get("client_kwargs", {}), "timeout": limit}}
    return {}


def close_in_the_end(fs: Any) -> None:
    """Close a driver's connections with it or with the process; asynchronous drivers leave them open."""
    if _CLOSING in vars(fs):
        return
    creator, session = getattr(fs, "_s3creator", None), getattr(fs, "_session", None)
    if creator is not None:  # of s3fs
        close = functools.partial(creator.__aexit__, None, None, None)
    elif session is not None:  # of fsspec's own HTTP
        close = session.close
    else:
        return
    vars(fs)[_CLOSING] = weakref.finalize(fs, _close, asyncio.get_running_loop(), close)


def _close(loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if not loop.is_running():
        return
    closed = asyncio.run_coroutine_threadsafe(close(), loop)
    if asyncio._get_running_loop() is not loop:  # the loop's own thread must not wait for it
        with contextlib.suppress(Exception):
            closed.result(timeout=_CLOSE_SECONDS)


# --- errors ------------------------------------------------------------------------------------------


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if codes_of(error) & _PASSING_CODES:
        return True
    status = status_of(error)
    if status is None:
        return any(map(_is_of_connection, _causes(error)))
    return status in _PASSING_STATUSES or (status >= 500 and status not in _LASTING_STATUSES)


def said_by(error: BaseException) -> str:
    """Return the message of a server, or else of the driver, in one line; empty if there is none."""
    answer = _answer_in(error)
    if answer is None:
        return first_line(error) if str(error) else ""
    status, details = _own_status(answer), _response_of(answer).get("Error", {})
    said = details.get("Code"), details.get("Message") or getattr(answer, "message", None)
    words = ": ".join(str(word) for word in said if word and str(word) != str(status))
    return f"{status} {words}".strip().splitlines()[0]


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error or its causes, if there is one."""
    answer = _answer_in(error)
    return None if answer is None else _own_status(answer)


def codes_of(error: BaseException) -> set[str]:
    """Return the S3 error codes of an error and its causes."""
    return {str(_response_of(cause).get("Error", {}).get("Code")) for cause in _causes(error)}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: drivers raise one from another."""
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
    # Of botocore; else of aiohttp, or of other drivers.
    for name in ("status", "code"):
        if status is None:
            status = getattr(error, name, None)
    return status if isinstance(status, int) and 300 <= status < 600 else None


def _answer_in(error: BaseException) -> BaseException | None:
    """Return the error or cause with a server's answer, if there is one."""
    # A broken connection has none, though aiohttp numbers faults of a body like one.
    causes = itertools.takewhile(lambda cause: not _is_of_connection(cause), _causes(error))
    return next((cause for cause in causes if _own_status(cause) is not None), None)
