"""A folder for what is made on the way; what a killed process leaves, the next one deletes."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"


@contextlib.contextmanager
def scratch_in(folder: Path, prefix: str = "scratch-") -> Iterator[Path]:
    """Make a folder of one's own, and delete it in the end, with what those that were killed have left.

    The lock of a folder is held as long as its owner lives, and is there before the folder is.

    Parameters
    ----------
    folder
        Where to make it.
    prefix
        What its name begins with, and the names of those that are looked for.
    """
    for left in folder.glob(f"{prefix}*{_LOCK}"):
        if not _is_own(left):
            continue
        with contextlib.suppress(OSError), left.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(left)
    with tempfile.NamedTemporaryFile(prefix=prefix, suffix=_LOCK, dir=folder, delete=False) as lock:
        path = Path(lock.name)
        # Where nothing can be locked, nothing is swept either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        own = path.with_suffix("")
        own.mkdir()
        try:
            yield own
        finally:
            _delete(path)


def _is_own(path: Path) -> bool:
    """Whether a file is a plain one of this user; in a folder that all share, anything may have any name."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    return False


def _delete(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
