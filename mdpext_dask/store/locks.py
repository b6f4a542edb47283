"""One run at a time on a store: which run holds its lock, and whether it still is alive.

The lock avoids duplicate work; correctness does not depend on it. Tasks of two runs write the same bytes, and
a certificate is of the bytes that are stored.

A lock is an object in the store. On the holder's own machine, its process shows whether it is alive;
elsewhere, a counter in the lock that the holder advances. No two clocks are compared, so clocks may be wrong
or set back.
"""

import contextlib
import json
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from pydantic import with_config
from zarr.abc.store import Store

from mdpext_dask.errors import ClusterError, IncompleteStoreError, StoreAccessError, StoreError
from mdpext_dask.store import objects

KEY = objects.LOCK
# A live holder advances its counter this often, in s; one whose counter stands still for so long is dead.
BEAT_SECONDS, PATIENCE_SECONDS = 3.0, 15.0
# After taking over a dead run's lock, time, in s, for other runs that do so as well to have written theirs.
_SETTLE_SECONDS = 0.3
# Owners in this process.
_OWN: set[str] = set()


@with_config(objects.STORED)
@dataclass(frozen=True)
class Holder:
    """The run that holds the lock of a store.

    Parameters
    ----------
    owner
        A random name of the run.
    host
        Name of its machine, for messages.
    machine
        Identifies the machine, its boot and its container.
    pid, started
        Its process, and when that was started, in units of the machine's own.
    beat
        A counter that advances while it is alive.
    """

    owner: str
    host: str
    machine: str
    pid: int
    started: float
    beat: int

    @classmethod
    def this_process(cls) -> "Holder":
        """Return a new holder in this process."""
        pid, owner = os.getpid(), uuid.uuid4().hex
        _OWN.add(owner)
        return cls(owner, socket.gethostname(), _machine(), pid, _started(pid) or 0.0, 0)

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, where this process sees it."""
        return self.machine == _machine()

    def is_dead(self) -> bool:
        """Whether it is known to be dead; that is never known of one on another machine."""
        if not self.is_here:
            return False
        # Or it was left by an earlier run of this process, at whose end the store did not answer.
        is_left = self.pid == os.getpid() and self.owner not in _OWN
        return is_left or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """The lock of a store, held by this process; see :func:`hold`."""

    def __init__(self, store: Store, url: str, holder: Holder) -> None:
        # The end of a run must not wait long for a store that does not answer.
        self._store, self._url, self._holder = objects.impatient(store, PATIENCE_SECONDS), url, holder
        self._lost: Holder | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mdpext-lock", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Go on only while the lock is held.

        Raises
        ------
        ClusterError
            If another run, which took this one for dead, has taken it over.
        """
        if self._lost is not None:
            raise ClusterError(
                f"{self._url}: {self._lost} has taken this store over, as nothing had been heard of this run "
                f"for {PATIENCE_SECONDS:.0f} s; run again when it is done"
            )

    def release(self) -> None:
        """Delete the lock if it still is this run's."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StoreError, StoreAccessError):  # a lock that is left is seen to be dead
            found = _read(self._store)
            if found is not None and found.owner == self._holder.owner:
                objects.delete_keys(self._store, [KEY])
        _OWN.discard(self._holder.owner)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                found = _read(self._store)
                if found is not None and found.owner != self._holder.owner:
                    self._lost = found
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                _write(self._store, self._holder)
            except (StoreError, StoreAccessError):
                continue  # if the store fails for longer, the run itself reports it


@contextlib.contextmanager
def hold(url: str, told: Callable[[str], None] = lambda _: None) -> Iterator[Lock]:
    """Hold the lock of the store at `url`, whether that exists or not; nothing of it is left afterwards.

    Parameters
    ----------
    url
        Of the store.
    told
        Gets a line on what is waited for.

    Raises
    ------
    IncompleteStoreError
        If another run is at work.
    StoreError
        If the store cannot be written.
    """
    store, made = objects.open_objects(url), []
    if not objects.is_remote(url):
        path = Path(objects.absolute(url))
        # Folders that writing here makes, innermost first.
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        lock = Lock(store, url, _take(store, url, told))
        try:
            yield lock
        finally:
            lock.release()
    finally:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()


def holder_of(store: Store) -> Holder | None:
    """Return the holder of a store's lock; None if there is none, it cannot be read, or it is dead."""
    try:
        found = _read(store)
    except StoreAccessError as error:
        if error.transient:
            raise
        return None  # without list permission, a missing lock looks forbidden
    return None if found is None or found.is_dead() else found


def as_json(holder: Holder | None) -> dict[str, object] | None:
    """Return a holder as ``status`` prints it."""
    return None if holder is None else {"host": holder.host, "pid": holder.pid}


def _take(store: Store, url: str, told: Callable[[str], None]) -> Holder:
    """Take the lock and return its new holder."""
    own = Holder.this_process()
    if objects.create_exclusively(store, KEY, _text(own)):
        return own
    found = _read(store)
    if found is not None and not found.is_dead():
        if found.is_here:
            raise _refusal(url, found)
        told(f"waiting {PATIENCE_SECONDS:.0f} s to see whether {found} is still at work on this store")
        if not _stands_still(store, found):
            raise _refusal(url, _read(store) or found)
    # Of several runs that find a dead run's lock at once, the last to write has it.
    _write(store, own)
    time.sleep(_SETTLE_SECONDS)
    found = _read(store)
    if found is not None and found.owner != own.owner:
        raise _refusal(url, found)
    return own


def _stands_still(store: Store, found: Holder) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(BEAT_SECONDS / 3)
        now = _read(store)
        if now is None:
            return True
        if now != found:
            return False
    return True


def _refusal(url: str, holder: Holder) -> StoreError:
    return IncompleteStoreError(
        f"{url}: another run is at work on this store ({holder}); wait for it, or stop it"
    )


def _read(store: Store) -> Holder | None:
    """Return the holder that a lock names; None if the lock is missing or damaged."""
    holder: Holder | None = objects.get_json(store, KEY, Holder)
    return holder


def _write(store: Store, holder: Holder) -> None:
    objects.put_bytes(store, KEY, _text(holder))


def _text(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), sort_keys=True).encode()


def _machine() -> str:
    """Return an identifier of this machine, its present boot and its process namespace."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        parts += [str(Path("/proc/self/ns/pid").readlink())]
    return " ".join(parts)


def _started(pid: int) -> float | None:
    """Return when a process was started; None if there is none or it has ended.

    In the kernel's ticks since boot where there are any: other systems tell it by a clock that may be set
    back.
    """
    try:
        # After the name in parentheses, which may hold anything: the state and, 19 fields later, the start.
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields_after_name[0] in "ZX" else float(fields_after_name[19])
    except (OSError, IndexError, ValueError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
