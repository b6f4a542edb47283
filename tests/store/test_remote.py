"""Asking again: what passes and what does not, how long it goes on, what is said in the end."""

import asyncio
import errno
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.errors import EXIT_BAD_INPUT, EXIT_INCOMPLETE, StoreAccessError, StoreError
from mdpext_dask.store import objects, remote
from mdpext_dask.store.remote import RetryPolicy, open_remote
from mdpext_dask.store.remote_drivers import is_transient, said_by, status_of
from tests.support.refusals import refused

QUICK = RetryPolicy(attempts=3, first_delay=0.001, longest_delay=0.002, settle_seconds=0.001)


class Bucket(AsyncFileSystem):  # type: ignore[misc]
    """A file system in memory which does, before each request, what a script says."""

    protocol = "scripted"
    cachable = False
    content: dict[str, bytes] = {}  # noqa: RUF012 is one for all instances, as a server is
    script: Iterator[Any] = iter(())
    conditions = True
    asked = 0

    async def _obey(self) -> None:
        type(self).asked += 1
        order = next(type(self).script, None)
        if isinstance(order, float):
            await asyncio.sleep(order)
        elif order is not None:
            raise order

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        await self._obey()
        try:
            return self.content[path][start:end]
        except KeyError:
            raise FileNotFoundError(path) from None

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        await self._obey()
        if mode == "create" and self.conditions and path in self.content:
            raise FileExistsError(path)
        self.content[path] = value

    async def _rm_file(self, path: str, **_: Any) -> None:
        await self._obey()
        if self.content.pop(path, None) is None:
            raise FileNotFoundError(path)

    async def _find(self, path: str, **_: Any) -> list[str]:
        await self._obey()
        return [key for key in self.content if key.startswith(path.rstrip("/") + "/")]

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if not await self._find(path):
            raise FileNotFoundError(path)
        return {"name": path, "type": "directory"}


@pytest.fixture
def obey(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[Bucket]]:
    """Return a function that sets what happens to the next requests, one by one."""
    fsspec.register_implementation("scripted", Bucket, clobber=True)
    monkeypatch.setattr(remote, "POLICY", QUICK)
    monkeypatch.setattr(Bucket, "content", {})
    monkeypatch.setattr(Bucket, "conditions", True)

    def make(*orders: Any) -> type[Bucket]:
        Bucket.script, Bucket.asked = iter(orders), 0
        return Bucket

    make()
    return make


class Answer(Exception):
    """An error as botocore raises it."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"An error occurred ({code})")
        error, metadata = {"Code": code, "Message": message}, {"HTTPStatusCode": status}
        self.response = {"Error": error, "ResponseMetadata": metadata}


class ClientResponseError(Exception):
    """An error as aiohttp raises it."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(f"{status}, message='{message}'")
        self.status, self.message = status, message


class ClientPayloadError(Exception):
    """As aiohttp raises it where a body is cut off; what caused it is numbered like a status."""

    def __init__(self) -> None:
        super().__init__("Response payload is not completed")
        self.__cause__ = ClientResponseError(400, "Not enough data")


@pytest.mark.parametrize("url", ["http://me:pass@host/a.zarr", "s3://key:pass@bucket/a", "http://:pass@h/a"])
def test_a_password_in_an_address_is_refused_and_not_told(url: str) -> None:
    said = r"^(http|s3)://\.\.\.: an address with a password in it"
    assert "pass@" not in str(refused(StoreError, said, open_remote, url, read_only=True))


def dressed(error: Exception, cause: Exception) -> Exception:
    """Return an error as s3fs makes it of one of botocore's."""
    error.__cause__ = cause
    return error


BUSY = dressed(OSError(errno.EBUSY, "Please reduce"), Answer(503, "SlowDown", "Please reduce"))
DENIED = dressed(PermissionError("Access Denied"), Answer(403, "AccessDenied", "Access Denied"))


@pytest.mark.parametrize(
    ("error", "transient", "said"),
    [
        (BUSY, True, "503 SlowDown: Please reduce"),
        (dressed(OSError(errno.EIO, "?"), Answer(500, "InternalError")), True, "500 InternalError"),
        (dressed(TimeoutError("Idle."), Answer(400, "RequestTimeout", "Idle.")), True, "Idle."),
        (dressed(OSError(errno.EINVAL, "?"), Answer(400, "BadDigest")), True, "400 BadDigest"),
        (dressed(OSError(errno.EBUSY, "?"), Answer(409, "OperationAborted")), True, "409 OperationAborted"),
        (DENIED, False, "403 AccessDenied: Access Denied"),
        (dressed(OSError(errno.EINVAL, "?"), Answer(400, "InvalidArgument")), False, "400 InvalidArgument"),
        (dressed(OSError(errno.EIO, "?"), Answer(301, "PermanentRedirect")), False, "301 PermanentRedirect"),
        (dressed(FileNotFoundError("?"), Answer(404, "NoSuchBucket")), False, "404 NoSuchBucket"),
        (Answer(501, "NotImplemented"), False, "501 NotImplemented"),
        (ClientResponseError(502, "Bad Gateway"), True, "502 Bad Gateway"),
        (ClientResponseError(429), True, "429"),
        (ClientResponseError(401, "Unauthorized"), False, "401 Unauthorized"),
        (ClientPayloadError(), True, "Response payload is not completed"),
        (ConnectionResetError(104, "Connection reset by peer"), True, "Connection reset by peer"),
        (TimeoutError(), True, ""),
        (PermissionError(13, "Permission denied"), False, "Permission denied"),
        (ValueError("two\nlines"), False, "two"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, Exception) else "",
)
def test_what_passes_and_what_is_said(error: Exception, transient: bool, said: str) -> None:
    assert is_transient(error) is transient
    assert said_by(error) == said


def test_errors_of_the_real_drivers_are_known() -> None:
    """Their names and attributes are as this package takes them to be."""
    aiohttp = pytest.importorskip("aiohttp")
    botocore = pytest.importorskip("botocore.exceptions")
    translate = pytest.importorskip("s3fs.errors").translate_boto_error
    kinds = "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"
    errors = [getattr(botocore, kind)(endpoint_url="http://h") for kind in kinds]
    for error in (*errors, aiohttp.ClientPayloadError(), aiohttp.ServerDisconnectedError()):
        assert is_transient(error)
    details = {"ResponseMetadata": {"HTTPStatusCode": 503}, "Error": {"Code": "SlowDown", "Message": "Slow."}}
    error = translate(botocore.ClientError(details, "GetObject"))
    assert is_transient(error)
    assert (status_of(error), said_by(error)) == (503, "503 SlowDown: Slow.")
    assert not is_transient(botocore.NoCredentialsError())


@given(st.integers(1, 40), st.floats(0.001, 2), st.floats(0.001, 60))
def test_pauses_grow_up_to_the_longest(attempt: int, first: float, longest: float) -> None:
    delay = RetryPolicy(first_delay=first, longest_delay=longest).delay(attempt)
    expected = min(first * 2 ** (attempt - 1), longest)
    assert expected / 2 <= delay <= expected


def test_a_fault_that_passes_costs_nothing_else(obey: Callable[..., type[Bucket]]) -> None:
    store = objects.open_objects("scripted://b/s")
    obey(BUSY, ConnectionResetError())
    objects.put_bytes(store, "a", b"1")
    obey(TimeoutError(), ClientPayloadError())
    assert objects.get_bytes(store, "a") == b"1"
    obey(BUSY, None)
    assert objects.list_keys(store, "") == ["a"]
    obey(BUSY, BUSY)
    assert not objects.is_empty(store)
    obey(BUSY)
    assert objects.exists(store, "a")
    obey(BUSY, None, BUSY)
    objects.delete_keys(store, ["a", "b"])
    assert objects.is_empty(store)


def test_patience_ends(obey: Callable[..., type[Bucket]]) -> None:
    store = objects.open_objects("scripted://b/s")
    bucket = obey(*[BUSY] * 9)
    error = refused(StoreAccessError, "", objects.put_bytes, store, "receipts/1.json", b"1")
    assert str(error) == (
        "scripted://b/s: receipts/1.json cannot be written: 503 SlowDown: Please reduce; "
        "tried 3 times in 0 s; what is done is kept, run again"
    )
    assert bucket.asked == 3
    assert (error.exit_code, error.transient) == (EXIT_INCOMPLETE, True)
    # Nothing that takes an error of the system for damage may take this for it.
    assert not isinstance(error, OSError | StoreError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.exit_code, again.transient) == (str(error), EXIT_INCOMPLETE, True)


def test_a_refusal_is_not_asked_again(obey: Callable[..., type[Bucket]]) -> None:
    store = objects.open_objects("scripted://b/s")
    bucket = obey(DENIED)
    said = r"^scripted://b/s: a cannot be read: 403 AccessDenied: Access Denied \(S3 says"
    error = refused(StoreAccessError, said, objects.get_bytes, store, "a")
    assert (bucket.asked, error.exit_code, error.transient) == (1, EXIT_BAD_INPUT, False)


def test_a_hung_request_ends(obey: Callable[..., type[Bucket]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLICY", RetryPolicy(attempts=2, first_delay=0.001, request_seconds=0.05))
    store = objects.open_objects("scripted://b/s")
    bucket = obey(60.0, 60.0)
    with pytest.raises(StoreAccessError, match=r"a cannot be read: no answer within 0.05 s; tried 2 times"):
        objects.get_bytes(store, "a")
    assert bucket.asked == 2


def test_time_ends_too(obey: Callable[..., type[Bucket]], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RetryPolicy(attempts=1000, first_delay=0.02, longest_delay=0.02, total_seconds=0.1)
    monkeypatch.setattr(remote, "POLICY", policy)
    store = objects.open_objects("scripted://b/s")
    bucket = obey(*[BUSY] * 1000)
    refused(StoreAccessError, "tried", objects.get_bytes, store, "a")
    assert bucket.asked <= 10


def test_failing_is_mentioned(obey: Callable[..., type[Bucket]], monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(remote, "POLICY", RetryPolicy(attempts=8, first_delay=0.001, longest_delay=0.001))
    monkeypatch.setattr(remote, "_MENTIONED_NEXT", [0.0])
    store = objects.open_objects("scripted://b/s")
    obey(*[BUSY] * 7)
    assert objects.get_bytes(store, "a") is None
    assert [record.getMessage() for record in caplog.records if "scripted" in record.getMessage()] == [
        "scripted://b/s: a cannot be read: 503 SlowDown: Please reduce; trying again"
    ]


@pytest.mark.parametrize("conditions", [True, False])
def test_creating_what_is_not_there(obey: Callable[..., type[Bucket]], conditions: bool) -> None:
    store, bucket = objects.open_objects("scripted://b/s"), obey()
    bucket.conditions = conditions
    assert objects.create_exclusively(store, "lock", b"one")
    assert not objects.create_exclusively(store, "lock", b"another")
    assert bucket.content == {"b/s/lock": b"one"}


def test_creating_where_another_comes_first(obey: Callable[..., type[Bucket]]) -> None:
    store, bucket = objects.open_objects("scripted://b/s"), obey()

    def orders() -> Iterator[Any]:
        yield None  # nothing is there yet
        bucket.content["b/s/lock"] = b"another"
        yield None

    bucket.script = orders()
    assert not objects.create_exclusively(store, "lock", b"one")
    # The same, where the answer is lost, and where the driver knows of no such thing.
    bucket.content.clear()
    bucket.script = orders()
    next(bucket.script)
    bucket.content["b/s/lock"] = b"one"
    assert not objects.create_exclusively(store, "lock", b"two")
    bucket.content.clear()
    obey(None, NotImplementedError())
    assert objects.create_exclusively(store, "lock", b"three")
    assert bucket.content == {"b/s/lock": b"three"}


def test_creating_where_the_answer_is_lost(obey: Callable[..., type[Bucket]]) -> None:
    store, bucket = objects.open_objects("scripted://b/s"), obey()

    def orders() -> Iterator[Any]:
        yield None
        bucket.content["b/s/lock"] = b"one"  # it does arrive
        yield ConnectionResetError()

    bucket.script = orders()
    assert objects.create_exclusively(store, "lock", b"one")


def test_a_store_is_the_same_in_another_process(obey: Callable[..., type[Bucket]]) -> None:
    obey()
    store = open_remote("scripted://b/s", read_only=True, policy=QUICK)
    again = pickle.loads(pickle.dumps(store))
    assert (again.url, again.read_only, again._policy, again) == ("scripted://b/s", True, QUICK, store)
    assert str(store) == "scripted://b/s"
    assert not store.with_read_only(False).read_only
    refused(StoreError, "read-only", objects.put_bytes, store, "a", b"")
