"""Whole small files beside the arrays: receipts and audits, through the same store as the arrays.

Everything goes through Zarr's store interface, so a local folder and an object store behave alike.
"""

import asyncio
import json
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

from mdpext_dask.errors import SpecError, StoreError, first_line

# How Zarr names a local file while it is being written.
LEFTOVER = ".partial"
_REQUESTS_AT_ONCE = 64


def is_remote(url: str) -> bool:
    """Whether a store address is a URL rather than a local path."""
    return "://" in url and not url.startswith("file://")


def absolute(url: str) -> str:
    """Return a store address that means the same in every working folder."""
    return url if is_remote(url) else str(Path(url.removeprefix("file://")).expanduser().absolute())


def open_objects(url: str, *, read_only: bool = False) -> Store:
    """Return the Zarr store behind a local path or URL, without touching it yet.

    Raises
    ------
    StoreError
        If the URL's protocol is not known or its driver is not installed.
    """
    if not is_remote(url):
        return LocalStore(Path(url.removeprefix("file://")), read_only=read_only)
    try:
        return FsspecStore.from_url(url, read_only=read_only)
    except (ImportError, ValueError, TypeError) as error:
        raise StoreError(f"{url}: cannot be opened: {error}") from None


def check_place(url: str) -> None:
    """Refuse a store path that cannot be written, before any work is done for it.

    Raises
    ------
    SpecError, StoreError
        If the path is empty or its parent folder does not exist or is not writable.
    """
    if not url:
        raise SpecError("--store: the path is empty")
    if is_remote(url):
        return
    path = Path(url.removeprefix("file://")).absolute()
    try:
        if path.is_file():
            raise StoreError(f"{url}: is a file, not a store")
        parent = next(p for p in (path, *path.parents) if p.exists())
        with tempfile.TemporaryFile(dir=parent):
            pass
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: cannot be written: {first_line(error)}") from None


def get_bytes(store: Store, key: str) -> bytes | None:
    """Return an object's bytes, or None if there is no such object."""
    buffer = sync(store.get(key, default_buffer_prototype()))
    return None if buffer is None else buffer.to_bytes()


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Write an object; a reader sees the old one or the new one, never a part.

    Raises
    ------
    StoreError
        If the store refuses: full, read-only, gone.
    """
    try:
        sync(store.set(key, default_buffer_prototype().buffer.from_bytes(value)))
    except (OSError, ValueError) as error:
        raise StoreError(f"{store}: {key} cannot be written: {first_line(error)}") from None


def get_json(store: Store, key: str) -> Any:
    """Return an object parsed as JSON; None if it is not there or is damaged."""
    return _parsed(get_bytes(store, key))


def get_many_json(store: Store, keys: Sequence[str]) -> list[Any]:
    """Return many objects parsed as JSON, requested together; None as in :func:`get_json`."""
    return [_parsed(value) for value in sync(_get_all(store, keys))]


def put_json(store: Store, key: str, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, keys in order; not-a-number and infinity are refused."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    put_bytes(store, key, text.encode())


def list_keys(store: Store, prefix: str) -> list[str]:
    """Return the keys under a prefix, sorted; the prefix stays in them."""
    return sorted(sync(_collect(store.list_prefix(prefix))))


def exists(store: Store, key: str) -> bool:
    """Whether there is an object of that key."""
    return bool(sync(store.exists(key)))


def is_empty(store: Store) -> bool:
    """Whether the store holds nothing at all."""
    return bool(sync(store.is_empty("")))


def holds_leftovers_only(store: Store) -> bool:
    """Whether there is nothing but what a run that was killed at its very first write leaves."""
    return all(key.endswith(LEFTOVER) for key in list_keys(store, ""))


def delete_keys(store: Store, keys: list[str]) -> None:
    """Delete objects; those that are not there are no error."""
    for key in keys:
        sync(store.delete(key))


def delete_everything(store: Store, url: str) -> None:
    """Delete all objects of the store at `url`.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    try:
        if is_remote(url):
            # One by one: ``clear`` leaves some behind on remote stores.
            delete_keys(store, list_keys(store, ""))
        else:
            shutil.rmtree(url.removeprefix("file://"))
    except OSError as error:
        raise StoreError(f"{url}: cannot be deleted: {first_line(error)}") from None


def sweep(store: Store) -> None:
    """Delete what killed writes have left behind."""
    delete_keys(store, [key for key in list_keys(store, "") if key.endswith(LEFTOVER)])


def consolidate(store: Store) -> None:
    """Write consolidated metadata, so that readers open the hierarchy with one request."""
    with warnings.catch_warnings():
        # Receipts and audits are plain objects on purpose; Zarr remarks on each.
        warnings.filterwarnings("ignore", message="Object at .* is not recognized")
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store)


async def _collect(keys: AsyncIterator[str]) -> list[str]:
    return [key async for key in keys]


async def _get_all(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    prototype = default_buffer_prototype()
    limit = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def one(key: str) -> bytes | None:
        async with limit:
            buffer = await store.get(key, prototype)
        return None if buffer is None else buffer.to_bytes()

    return list(await asyncio.gather(*(one(key) for key in keys)))


def _parsed(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
