"""Writing a file whole or not at all."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mdpext_dask.errors import DataError, MdpextError, SpecError

_STANDARD_OUTPUT = 1
_STANDARD = {"/dev/stdout": _STANDARD_OUTPUT, "/dev/stderr": 2}


def is_standard_output(path: Path) -> bool:
    """Whether a name, such as ``/dev/stdout``, stands for where this process' standard output goes."""
    try:
        return os.path.samestat(path.stat(), os.fstat(_STANDARD_OUTPUT))
    except OSError:
        return False


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to, which takes its name when all has gone well, and is gone otherwise.

    It is written beside its name first, so that neither an error nor a full disk nor a kill leaves half a
    file there, or harms one that is there already. Devices, pipes and open files such as /dev/stdout get
    all of it at the end. A link stays, and what it points to is replaced.

    Raises
    ------
    SpecError
        If its name is that of no file, but what other programs take for standard output.
    DataError
        If it cannot be written.
    BrokenPipeError
        If it is an open file such as /dev/stdout, and nobody reads on.
    """
    if str(path) == "-":
        raise SpecError("-: is no file; for standard output give /dev/stdout")
    target, descriptor = path.resolve(), _descriptor(path)
    try:
        if descriptor is not None or (target.exists() and not target.is_file()):
            with tempfile.TemporaryFile() as waiting:
                yield waiting
                waiting.seek(0)
                with target.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as file:
                    shutil.copyfileobj(waiting, file)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                # A name must not come before the bytes that it stands for, if the machine stops.
                os.fsync(file.fileno())
            # mkstemp is private to the user; the result gets the permissions of any new file.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # noqa: PTH101
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        # A store's errors are OSErrors too, and speak for themselves.
        if isinstance(error, MdpextError) or (descriptor and isinstance(error, BrokenPipeError)):
            raise
        raise DataError(f"{path}: cannot be written: {error}") from None


def _descriptor(path: Path) -> int | None:
    """Return the number of an open file, if that is what a name stands for.

    Its place may be the name of a file, which others are writing to as well: that is not to be replaced.
    """
    name = str(path)
    if name in _STANDARD:
        return _STANDARD[name]
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", name)
    return None if found is None else int(found[1])
