"""A store behind a URL: requests are retried for as long as a policy allows, and then end in one error.

Drivers retry as well (s3fs, and botocore below it); they are told not to, so that the times below hold.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.common import concurrent_map
from zarr.storage import FsspecStore, WrapperStore

from mdpext_dask.errors import StoreAccessError, printable
from mdpext_dask.store import remote_drivers as drivers

T = TypeVar("T")
# Within the class, ``list`` is a method of it.
Names = list[str]
Buffers = list[Buffer | None]

_LOG = logging.getLogger(__name__)
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# Bytes a second that any upload is expected to reach.
_SLOWEST = 2**18
REQUESTS_AT_ONCE = 64
# Retries before a warning, and s between warnings.
_MENTIONED_AFTER, _MENTIONED_EVERY = 3, 30.0
_MENTIONED_NEXT = [0.0]


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, a request is retried.

    Parameters
    ----------
    attempts
        Most requests.
    first_delay, longest_delay
        Pause after the first failure, in s, doubled after each further one up to the longest; each is
        shortened by up to a half at random, so that many workers do not retry together.
    connect_seconds, silence_seconds
        Time limits, in s, for a connection and for silence on it; for the drivers of S3 and HTTP.
    request_seconds, total_seconds
        Time limits, in s, for one request and for all attempts at it. Uploads get a second more for every
        256 KiB.
    settle_seconds
        Pause, in s, before an object is read back from a server without conditional writes.
    """

    attempts: int = 8
    first_delay: float = 0.5
    longest_delay: float = 30.0
    connect_seconds: float = 10.0
    silence_seconds: float = 30.0
    request_seconds: float = 300.0
    total_seconds: float = 600.0
    settle_seconds: float = 2.0

    def delay(self, attempt: int) -> float:
        """Return the pause, in s, after an attempt, counted from 1."""
        longest = min(self.first_delay * 2.0 ** (attempt - 1), self.longest_delay)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 spreads requests, decides nothing


# The policy of new stores.
POLICY = RetryPolicy()


def open_remote(url: str, *, read_only: bool = False, policy: RetryPolicy | None = None) -> "RetryingStore":
    """Return the store behind a URL, without touching it yet.

    Parameters
    ----------
    url, read_only
        See :func:`mdpext_dask.store.remote_drivers.open_driver`.
    policy
        Default: :data:`POLICY`.

    Raises
    ------
    StoreError
        As for :func:`mdpext_dask.store.remote_drivers.open_driver`.
    """
    policy = policy or POLICY
    limits = {"connect_seconds": policy.connect_seconds, "silence_seconds": policy.silence_seconds}
    return RetryingStore(drivers.open_driver(url, read_only=read_only, **limits), url, policy)


class RetryingStore(WrapperStore[FsspecStore]):
    """A store that retries its requests; made by :func:`open_remote`.

    Every method raises :class:`StoreAccessError` where the policy ends or the store refuses. A missing object
    is no error.
    """

    def __init__(self, store: FsspecStore, url: str, policy: RetryPolicy) -> None:
        super().__init__(store)
        self.url = url
        self._policy = policy

    def __reduce__(self) -> tuple[Any, ...]:
        reopen = functools.partial(open_remote, read_only=self.read_only, policy=self._policy)
        return reopen, (self.url,)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RetryingStore({self.url!r})"

    def with_read_only(self, read_only: bool = False) -> "RetryingStore":
        """Return the same store, to be written or not."""
        return open_remote(self.url, read_only=read_only, policy=self._policy)

    def within(self, seconds: float) -> "RetryingStore":
        """Return the same store, which gives a request up after so many seconds."""
        policy = replace(self._policy, request_seconds=seconds, total_seconds=seconds)
        return RetryingStore(self._store, self.url, policy)

    @property
    def supports_listing(self) -> bool:
        """Whether its keys can be listed; not over plain HTTP."""
        return not drivers.is_plain_http(self.url)

    # --- reading ----------------------------------------------------------------------------------

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return an object or a part of it; None if there is no such object."""
        # Servers may answer with all of it. How long the rest after an offset is, is not known: ask for all.
        asked = None if isinstance(byte_range, OffsetByteRequest) else byte_range

        async def request() -> Buffer:
            try:
                found = await self._store.get(key, prototype, asked)
            except Exception as error:
                if drivers.status_of(error) != 416:
                    raise
                found = None  # the object ends before the range begins
            return prototype.buffer.from_bytes(b"") if found is None else found

        try:
            return _cut(await self._ask("read", key, request), byte_range)
        except _ABSENT:
            return None

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> Buffers:
        """Return parts of objects, requested together."""
        requests = [(key, prototype, part) for key, part in key_ranges]
        return await concurrent_map(requests, self.get, REQUESTS_AT_ONCE)

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        for key, prototype, byte_range in requests:
            yield key, await self.get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        """Whether there is an object of that key; one request, whose failure is an error."""
        return await self.get(key, default_buffer_prototype(), RangeByteRequest(0, 1)) is not None

    async def is_empty(self, prefix: str) -> bool:
        """Whether there is nothing under a prefix; two requests at most, however much there is."""
        path = f"{self._store.path}/{prefix}".rstrip("/")

        async def request() -> None:
            self._store.fs.invalidate_cache()
            await self._store.fs._info(path)

        try:
            await self._ask("listed", prefix, request)
        except _ABSENT:
            return True
        return False

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys under a prefix."""
        for key in await self._listed(prefix, self._store.list_prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names right under a prefix."""
        for name in await self._listed(prefix, self._store.list_dir):
            yield name

    async def _listed(self, prefix: str, lister: Callable[[str], AsyncIterator[str]]) -> Names:
        if not self.supports_listing:
            raise StoreAccessError(f"{self.url}: {prefix or 'the store'} cannot be listed over plain HTTP")

        async def request() -> Names:
            # See what other processes have written since.
            self._store.fs.invalidate_cache()
            return [name async for name in lister(prefix)]

        try:
            return await self._ask("listed", prefix, request)
        except _ABSENT:
            return []

    # --- writing ----------------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object."""
        self._check_writable()
        try:
            await self._ask("written", key, lambda: self._store.set(key, value), len(value))
        except _ABSENT as error:
            self._refuse("written", key, error)

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        await concurrent_map(values, self.set, REQUESTS_AT_ONCE)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write an object unless there is one."""
        await self.create(key, value.to_bytes())

    async def create(self, key: str, value: bytes) -> bool:
        """Write an object if there is none; see :func:`mdpext_dask.store.objects.create_exclusively`."""
        self._check_writable()
        if await self.exists(key):
            return False

        async def request() -> None:
            try:
                await self._store.fs._pipe_file(f"{self._store.path}/{key}", value, mode="create")
            except Exception as error:
                if isinstance(error, ValueError) or drivers.status_of(error) == 501:
                    raise NotImplementedError from error
                raise

        try:
            await self._ask("written", key, request, len(value))
        except FileExistsError:
            # The answer to a first attempt may have been lost, and the object be this caller's. Attempts
            # cannot be counted: aiohttp repeats a request on a connection that had been closed.
            return await self._holds(key, value)
        except (NotImplementedError, TypeError):
            await self.set(key, default_buffer_prototype().buffer.from_bytes(value))
        except _ABSENT as error:
            self._refuse("written", key, error)
        else:
            try:
                # A server that ignores the condition is found out: it must refuse the second time.
                await self._ask("written", key, request, len(value))
            except FileExistsError:
                return True
        await asyncio.sleep(self._policy.settle_seconds)
        return await self._holds(key, value)

    async def _holds(self, key: str, value: bytes) -> bool:
        found = await self.get(key, default_buffer_prototype())
        return found is not None and found.to_bytes() == value

    async def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        self._check_writable()

        async def request() -> None:
            try:
                # One request; the store's own way looks for a folder of that name first.
                await self._store.fs._rm_file(f"{self._store.path}/{key}")
            except NotImplementedError:
                await self._store.delete(key)

        with contextlib.suppress(*_ABSENT):
            await self._ask("deleted", key, request)

    async def delete_dir(self, prefix: str) -> None:
        """Delete all objects under a prefix, one by one: s3fs deletes in bulk, but passes over failures."""
        self._check_writable()
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        keys = [(key,) async for key in self.list_prefix(folder)]
        await concurrent_map(keys, self.delete, REQUESTS_AT_ONCE)

    async def clear(self) -> None:
        """Delete all objects."""
        await self.delete_dir("")

    # --- asking again -----------------------------------------------------------------------------

    async def _ask(self, done: str, key: str, request: Callable[[], Awaitable[T]], size: int = 0) -> T:
        try:
            return await self._until_answered(done, key, request, size)
        finally:
            drivers.close_in_the_end(self._store.fs)

    async def _until_answered(self, done: str, key: str, request: Callable[[], Awaitable[T]], size: int) -> T:
        """Repeat a request until it is answered.

        Raises
        ------
        StoreAccessError
            If it is not answered, or is refused.
        FileNotFoundError, FileExistsError, NotImplementedError, TypeError
            As the driver raises them: the object is missing, exists, or the driver lacks the request.
        """
        policy, extra, begin = self._policy, size / _SLOWEST, time.monotonic()
        deadline = begin + policy.total_seconds + extra
        for attempt in range(1, policy.attempts + 1):
            limit = max(min(policy.request_seconds + extra, deadline - time.monotonic()), 0.0)
            try:
                async with asyncio.timeout(limit):
                    return await request()
            except (*_ABSENT, FileExistsError, NotImplementedError, TypeError) as error:
                if "NoSuchBucket" in drivers.codes_of(error):
                    self._refuse(done, key, error)
                raise
            except Exception as error:
                if drivers.status_of(error) == 412:
                    raise FileExistsError(key) from None
                if not drivers.is_transient(error):
                    self._refuse(done, key, error)
                said = drivers.said_by(error) or f"no answer within {limit:.3g} s"
            delay = policy.delay(attempt)
            if attempt == policy.attempts or time.monotonic() + delay >= deadline:
                break
            if attempt >= _MENTIONED_AFTER and time.monotonic() >= _MENTIONED_NEXT[0]:
                _MENTIONED_NEXT[0] = time.monotonic() + _MENTIONED_EVERY
                _LOG.warning(
                    "%s: %s cannot be %s: %s; trying again",
                    *map(printable, (self.url, key or "the store", done, said)),
                )
            await asyncio.sleep(delay)
        raise StoreAccessError(
            f"{self.url}: {key or 'the store'} cannot be {done}: {said}; tried {attempt} times in "
            f"{time.monotonic() - begin:.0f} s; what is done is kept, run again",
            transient=True,
        )

    def _refuse(self, done: str, key: str, error: BaseException) -> NoReturn:
        said, hint = drivers.said_by(error) or type(error).__name__, ""
        if drivers.status_of(error) == 403 and done == "read":
            hint = " (S3 says so of objects that are not there, too, to those who may not list the bucket)"
        raise StoreAccessError(f"{self.url}: {key or 'the store'} cannot be {done}: {said}{hint}") from None


def _cut(found: Buffer, byte_range: ByteRequest | None) -> Buffer:
    """Return the requested part, given that part or, from servers without ranges, the whole object.

    A range lies within its object, so a longer answer can only be the whole object.
    """
    if isinstance(byte_range, RangeByteRequest) and len(found) > byte_range.end - byte_range.start:
        return found[byte_range.start : byte_range.end]
    if isinstance(byte_range, SuffixByteRequest) and len(found) > byte_range.suffix:
        return found[len(found) - byte_range.suffix :]
    return found[byte_range.offset :] if isinstance(byte_range, OffsetByteRequest) else found
