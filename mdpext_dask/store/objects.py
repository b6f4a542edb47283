"""Objects of a store by key, such as receipts and audits beside the arrays.

All go through Zarr's store interface, so a local folder and remote storage behave alike.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeVar, runtime_checkable

import zarr
from pydantic import ConfigDict, TypeAdapter
from zarr.abc.store import ByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.common import concurrent_map
from zarr.core.sync import sync
from zarr.storage import LocalStore

from mdpext_dask.errors import SpecError, StoreAccessError, StoreError, first_line
from mdpext_dask.store.remote import REQUESTS_AT_ONCE, RetryingStore, open_remote

T = TypeVar("T")

# Suffix that Zarr gives a local file while it is being written.
LEFTOVER = ".partial"
# Says which run is at work on a store; no part of it.
LOCK = "lock.json"
# How a JSON object is read into a dataclass: no other keys, no other types, no NaN.
STORED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# The largest object that is read, in bytes: many times a shard of the usual 32 MiB; and the largest document.
_LARGEST_OBJECT, _LARGEST_DOCUMENT = 2**32, 2**26
# How often a write is tried while other runs sweep.
_TRIES = 10
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@runtime_checkable
class Addressed(Protocol):
    """What has the address of its store, such as an open mechanism."""

    @property
    def url(self) -> str:
        """Path or URL of the store."""


# How functions for users take a store.
WhereStored = str | Path | Addressed


def address_of(store: WhereStored) -> str:
    """Return the path or URL of a store."""
    return store.url if isinstance(store, Addressed) else str(store)


def is_remote(url: str) -> bool:
    """Whether a store address is a URL rather than a local path."""
    return "://" in url and not url.startswith("file://")


def absolute(url: str) -> str:
    """Return a store address that means the same in every working folder."""
    return url if is_remote(url) else str(local_path(url).absolute())


def shown_name(url: str) -> str:
    """Return what others may read of an address: a URL, or a path without its folders, which are private."""
    return url if is_remote(url) else PurePath(url).name


def local_path(url: str) -> Path:
    """Return the folder of a store address that is not remote."""
    return Path(url.removeprefix("file://")).expanduser()


def require_folder(url: str) -> None:
    """Refuse a local path where there is no folder, and say what a file there seems to be.

    Raises
    ------
    StoreError
        If so.
    """
    path = local_path(url)
    if is_remote(url) or path.is_dir():
        return
    if not path.exists():
        raise StoreError(f"{url}: no such store")
    kinds = {
        ".toml": "a job file; make its store with mdpext run",
        ".mdp": "an exported city, which audit and open_city take",
    }
    what = kinds.get(path.suffix.lower(), "a file")
    raise StoreError(f"{url}: not a mechanism store, which is a folder such as NAME.zarr, but {what}")


def open_objects(url: str, *, read_only: bool = False) -> Store:
    """Return the Zarr store behind a local path or URL, without touching it yet.

    Raises
    ------
    StoreError
        If the URL's protocol is not known, its driver is not installed, or it cannot be written.
    StoreAccessError
        If its driver connects at once, and nothing answers.
    """
    if is_remote(url):
        return open_remote(url, read_only=read_only)
    return ContainedStore(local_path(url), read_only=read_only)


class ContainedStore(LocalStore):
    """A local folder, in which nothing is written or deleted through a link that leads out of it.

    A link in the place of an object is replaced, and not followed. Reading follows links, to files alone:
    devices and pipes would never end, and what is far larger than any part of a store would fill the memory.
    """

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> "list[Buffer | None]":
        """Return parts of objects."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    def check_readable(self, key: str) -> None:
        """Refuse what is no file, or larger than an object can be.

        Raises
        ------
        StoreError
            If so; nothing has been opened.
        """
        try:
            found = (self.root / key).stat()
        except (OSError, ValueError):
            return  # for the reader to say
        most = _LARGEST_DOCUMENT if key.endswith(".json") else _LARGEST_OBJECT
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise StoreError(f"{self.root}: {key} is no file; it is not read")
        if stat.S_ISREG(found.st_mode) and found.st_size > most:
            raise StoreError(f"{self.root}: {key} has {found.st_size} bytes; no more than {most} are read")

    def check_inside(self, key: str) -> None:
        """Refuse a key whose folder lies elsewhere.

        Raises
        ------
        StoreError
            If so.
        """
        root, folder = os.path.realpath(self.root), os.path.realpath((self.root / key).parent)
        if os.path.commonpath([root, folder]) != root:
            raise StoreError(
                f"{self.root}: a link leads to {folder}, out of the store; {key} is not written there"
            )


def _checked(method: Callable[..., Any], check: Callable[[ContainedStore, str], None]) -> Callable[..., Any]:
    """Return a method of a local store that looks first what is at its key."""

    @functools.wraps(method)
    def looking_first(self: ContainedStore, key: str, *arguments: Any, **named: Any) -> Any:
        check(self, key)
        return method(self, key, *arguments, **named)

    return looking_first


# All that read, or change anything below a key; versions of Zarr have more of them or fewer.
for _check, _names in (
    (ContainedStore.check_readable, ("get", "get_sync")),
    (
        ContainedStore.check_inside,
        ("set", "set_if_not_exists", "set_sync", "delete", "delete_sync", "delete_dir"),
    ),
):
    for _name in _names:
        if hasattr(LocalStore, _name):
            setattr(ContainedStore, _name, _checked(getattr(LocalStore, _name), _check))


def impatient(store: Store, seconds: float) -> Store:
    """Return the same store, which gives a remote request up after so many seconds."""
    return store.within(seconds) if isinstance(store, RetryingStore) else store


def check_place(url: str) -> None:
    """Refuse a store path that cannot be written, before any work is done for it.

    Raises
    ------
    SpecError, StoreError
        If the path is empty or its parent folder does not exist or is not writable.
    StoreAccessError
        If what is behind the URL cannot be written.
    """
    if not url:
        raise SpecError("--store: the path is empty")
    if is_remote(url):
        store, key = open_objects(url), f"check{LEFTOVER}"
        put_bytes(store, key, b"")
        delete_keys(store, [key])
        return
    path = local_path(url).absolute()
    try:
        if path.is_file():
            raise StoreError(f"{url}: is a file, not a store")
        _in_spite_of_sweeping(lambda: _check_folder(path))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: cannot be written: {first_line(error)}") from None


def _check_folder(path: Path) -> None:
    parent = next(p for p in (path, *path.parents) if p.exists())
    with tempfile.TemporaryFile(dir=parent):
        pass


def get_bytes(store: Store, key: str, end: int | None = None) -> bytes | None:
    """Return an object's bytes, or so many at its end; None if there is no such object.

    Raises
    ------
    StoreError
        If it exists but cannot be read.
    """
    return _get_many(store, [key], key, None if end is None else SuffixByteRequest(end))[0]


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Write an object; a reader sees the old one or the new one, never a part.

    Raises
    ------
    StoreError
        If the store refuses: full, read-only, gone.
    """
    with _refused(store, key, "written"):
        content = default_buffer_prototype().buffer.from_bytes(value)
        _in_spite_of_sweeping(lambda: sync(store.set(key, content)))


def create_exclusively(store: Store, key: str, value: bytes) -> bool:
    """Write an object if there is none of that key, and return whether this call has created it.

    Of many callers at once, in any processes on any machines, one gets True, and readers never see a part of
    its value. That relies on hard links or exclusive creation in a local folder (the former also over NFS),
    and on conditional writes behind a URL (``If-None-Match``). With a server that lacks these, as its answers
    show, the value is written and read back, and two callers at the same moment may both get True.

    Parameters
    ----------
    store, key
        Where.
    value
        Must differ from every other caller's, by a random token: by it a caller recognises its own object if
        an answer was lost.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    with _refused(store, key, "written"):
        if isinstance(store, LocalStore):
            return _in_spite_of_sweeping(lambda: _link_exclusively(store, key, value))
        assert isinstance(store, RetryingStore)  # there is no other kind here
        return sync(store.create(key, value))


def get_json(store: Store, key: str, kind: type | None = None) -> Any:
    """Return an object parsed as JSON, or None if it is missing or damaged; NaN and infinity are damage.

    Parameters
    ----------
    store, key
        Where.
    kind
        A dataclass with :data:`STORED` as its configuration; whatever is not one is damaged.
    """
    return _parsed(get_bytes(store, key), kind)


def get_many_json(store: Store, keys: Sequence[str], kind: type | None = None) -> list[Any]:
    """Return many objects parsed as JSON, requested together; see :func:`get_json`."""
    return [_parsed(value, kind) for value in _get_many(store, keys, "an object")]


def put_json(store: Store, key: str, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, keys in order; NaN and infinity are refused."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    put_bytes(store, key, text.encode())


def list_keys(store: Store, prefix: str) -> list[str]:
    """Return the keys that begin with a prefix, sorted."""
    with _refused(store, prefix or "the store", "listed"):
        return sorted(sync(_listed(store, prefix)))


def list_keys_if_possible(store: Store, prefix: str) -> list[str] | None:
    """Return the keys that begin with a prefix, sorted; None if they cannot or may not be listed."""
    if not store.supports_listing:
        return None
    try:
        return list_keys(store, prefix)
    except StoreAccessError as error:
        if error.transient:
            raise
        return None


def exists(store: Store, key: str) -> bool:
    """Whether there is an object of that key."""
    with _refused(store, key, "read"):
        return bool(sync(store.exists(key)))


def is_empty(store: Store) -> bool:
    """Whether the store holds nothing at all."""
    with _refused(store, "the store", "listed"):
        return bool(sync(store.is_empty("")))


def delete_keys(store: Store, keys: list[str]) -> None:
    """Delete objects, in any order; missing ones are no error.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    with _refused(store, "an object", "deleted"):
        sync(concurrent_map([(key,) for key in keys], store.delete, REQUESTS_AT_ONCE))


def delete_everything(store: Store, url: str, *, first: str, last: str) -> None:
    """Delete all objects of the store at `url` but its lock.

    Parameters
    ----------
    store, url
        The store.
    first
        Folder to delete first: without it no block is finished.
    last
        Key of the object to delete last: by it the rest is recognised after an interruption.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    try:
        if is_remote(url):
            delete_keys(store, list_keys(store, f"{first}/"))
            delete_keys(store, [key for key in list_keys(store, "") if key not in (last, LOCK)])
            delete_keys(store, [last])
            return
        folder = local_path(url)
        for path in sorted(folder.iterdir(), key=lambda path: path.name != first):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (last, LOCK):
                # Partial files of the lock come and go.
                path.unlink(missing_ok=True)
        (folder / last).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{url}: cannot be deleted: {first_line(error)}") from None


def sweep(store: Store) -> None:
    """Delete partial files of killed writes."""
    delete_keys(store, [key for key in list_keys(store, "") if key.endswith(LEFTOVER)])


def consolidate(store: Store) -> None:
    """Write consolidated metadata, so that readers open the hierarchy with one request.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    with warnings.catch_warnings():
        # Receipts and audits are plain objects on purpose; Zarr warns of each.
        warnings.filterwarnings("ignore", message="Object at .* is not recognized")
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        try:
            zarr.consolidate_metadata(store)
        except (OSError, ValueError, LookupError, TypeError) as error:  # also of documents that nobody knows
            raise StoreError(f"{store}: zarr.json cannot be written: {first_line(error)}") from None


@contextlib.contextmanager
def _refused(store: Store, what: str, done: str) -> Iterator[None]:
    """Turn errors of a file system into one line with the place."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{store}: {what} cannot be {done}: {first_line(error)}") from None


def _in_spite_of_sweeping(write: Callable[[], T]) -> T:
    """Write into a local folder, again where the draft or the folder has just been deleted.

    A run that ends sweeps up what it takes for leftovers, and folders that it has made and not used.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return write()
    return write()


def _link_exclusively(store: LocalStore, key: str, value: bytes) -> bool:
    if store.read_only:
        raise OSError(errno.EROFS, "opened for reading only")
    if isinstance(store, ContainedStore):
        store.check_inside(key)
    path = store.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named as Zarr names them, so that it is swept if this is killed.
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{LEFTOVER}")
    try:
        _write_new(draft, value)
        os.link(draft, path)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and the second try be refused; the
        # number of links tells (open(2), O_EXCL).
        return draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _open_exclusively(path, value)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _open_exclusively(path: Path, value: bytes) -> bool:
    try:
        _write_new(path, value)
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def _write_new(path: Path, value: bytes) -> None:
    with path.open("xb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


async def _listed(store: Store, prefix: str) -> list[str]:
    return [key async for key in store.list_prefix(prefix)]


def _get_many(
    store: Store, keys: Sequence[str], what: str, part: ByteRequest | None = None
) -> list[bytes | None]:
    requests = [(key, default_buffer_prototype(), part) for key in keys]
    with _refused(store, what, "read"):
        found = sync(concurrent_map(requests, store.get, REQUESTS_AT_ONCE))
    return [None if buffer is None else buffer.to_bytes() for buffer in found]


def _parsed(value: bytes | None, kind: type | None) -> Any:
    try:
        if value is not None:
            if kind is not None:
                return _reader(kind).validate_json(value)
            return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):  # the former also of pydantic
        pass
    return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_reader = functools.lru_cache(TypeAdapter)
