"""A folder for what one comparison makes on the way, beside answers that several may share."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "scratch-", ".lock"


@contextlib.contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """Make a folder of one's own, and delete it in the end, with what those that were killed have left.

    The lock of a folder is held as long as its owner lives, and is there before the folder is.

    Parameters
    ----------
    folder
        Where to make it.
    """
    for left in folder.glob(f"{_PREFIX}*{_LOCK}"):
        with contextlib.suppress(OSError), left.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(left)
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, suffix=_LOCK, dir=folder, delete=False) as lock:
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


def _delete(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
