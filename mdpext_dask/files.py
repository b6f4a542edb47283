"""Files that are written whole or not at all, checks of where they go, pictures, and scratch folders."""

import contextlib
import fcntl
import importlib
import io
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mdpext_dask.errors import DataError, MdpextError, SpecError, StoreError, alternatives, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STANDARD_OUTPUT = 1
_STANDARD = {"-": _STANDARD_OUTPUT, "/dev/stdout": _STANDARD_OUTPUT, "/dev/stderr": 2}
SUFFIXES = (".png", ".pdf", ".svg")
# The same picture whatever the user's own style, and the same bytes: no date, no random identifiers.
_STYLE: list[Any] = ["default", {"font.size": 9, "svg.hashsalt": "mdpext"}]
_NO_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
_LOCK = ".lock"


def is_standard_output(path: Path) -> bool:
    """Whether a path, such as ``-`` or ``/dev/stdout``, is where this process's standard output goes."""
    if _descriptor(path) == _STANDARD_OUTPUT:
        return True
    try:
        return os.path.samestat(path.stat(), os.fstat(_STANDARD_OUTPUT))
    except OSError:
        return False


@contextlib.contextmanager
def whole_file(path: Path, option: str | None = None) -> Iterator[IO[bytes]]:
    """Yield a file to write to; it gets its name if all goes well, and is deleted otherwise.

    It is written under another name in the same folder, so neither an error nor a full disk nor a kill leaves
    half a file, or harms an existing one. Devices, pipes, standard output (``-``) and open files such as
    /dev/stdout get all of it at the end. A link stays; the file it points to is replaced.

    Parameters
    ----------
    path
        Where it is to be.
    option
        The option that names it, for messages.

    Raises
    ------
    StoreError, DataError
        If it cannot be written; the former with an option, the latter without.
    BrokenPipeError
        If it is an open file such as /dev/stdout, and its reader is gone.
    """
    descriptor = _descriptor(path)
    try:
        target = path.resolve()
        if descriptor is not None or (target.exists() and not target.is_file()):
            with tempfile.TemporaryFile() as waiting:
                yield waiting
                waiting.seek(0)
                with target.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as file:
                    shutil.copyfileobj(waiting, file)
            return
        # Private to the user until it is whole, and even if this process is killed. Names may be long.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                # The bytes must be on disk before the name is, in case the machine stops.
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            partial.chmod(0o666 & ~umask)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        # Errors of a store are OSErrors with messages of their own.
        if isinstance(error, MdpextError) or (descriptor and isinstance(error, BrokenPipeError)):
            raise
        if option is None:
            raise DataError(f"{path}: cannot be written: {first_line(error)}") from None
        raise StoreError(f"{option}: {path}: cannot be written: {first_line(error)}") from None


def _descriptor(path: Path) -> int | None:
    """Return the number of the open file that ``-`` or ``/dev/fd/3`` stands for; None for other paths.

    It may be open on a named file that others write to as well, which must not be replaced.
    """
    name = str(path)
    if name in _STANDARD:
        return _STANDARD[name]
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", name)
    return None if found is None else int(found[1])


def check_new(path: Path, *, overwrite: bool, option: str | None = None) -> None:
    """Refuse a file that exists already, unless it may be replaced, and one that has no folder.

    Devices, pipes and open files pass.

    Parameters
    ----------
    path
        Where a file is to be.
    overwrite
        Whether it may be replaced.
    option
        The option that names it, for messages.

    Raises
    ------
    SpecError
        If it exists and must not be replaced.
    DataError
        If there is no folder for it, it is one, or its name cannot be one.
    """
    if _descriptor(path) is not None:
        return
    named = path if option is None else f"{option}: {path}"
    try:
        is_folder, has_folder, is_file = path.is_dir(), path.parent.is_dir(), path.is_file()
    except OSError as error:  # its name is too long, or its folder may not be read
        raise DataError(f"{named}: cannot be written: {first_line(error)}") from None
    if is_folder:
        raise DataError(f"{named}: cannot be written: it is a folder; name a file in it")
    if not has_folder:
        raise DataError(f"{named}: cannot be written: there is no folder {path.parent}")
    if not overwrite and is_file:
        raise SpecError(f"{named}: exists already; choose another name, or replace it with --overwrite")


def check_picture(path: Path, option: str = "--picture", *, overwrite: bool) -> None:
    """Refuse a picture that cannot be drawn or written, before any work is done for it.

    Raises
    ------
    SpecError
        As for :func:`check_file`, or if matplotlib is not installed.
    """
    check_file(path, option, SUFFIXES, overwrite=overwrite)
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise SpecError(
            f"{option}: matplotlib is needed: pip install 'mdpext-dask[report]' ({first_line(error)})"
        ) from None


def check_file(path: Path, option: str, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Parameters
    ----------
    path
        Where it is to be.
    option
        The option that names it.
    suffixes
        What its name may end in.
    overwrite
        Whether it may be there already.

    Raises
    ------
    SpecError
        If the suffix is unknown, the folder is missing or not writable, the path is a folder, or the file
        exists and must not be replaced.
    """
    if path.suffix.lower() not in suffixes:
        raise SpecError(f"{option}: {path}: must end in {alternatives(suffixes)}")
    try:
        if path.is_dir():
            raise SpecError(f"{option}: {path}: is a folder")
        if not path.parent.is_dir():
            raise SpecError(f"{option}: {path}: there is no folder {path.parent}")
        check_new(path, overwrite=overwrite, option=option)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SpecError(f"{option}: {path}: cannot be written: {first_line(error)}") from None


def rendered(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """Return the bytes of the figure that `draw` makes, in the format of one of :data:`SUFFIXES`."""
    from matplotlib import style

    content = io.BytesIO()
    with style.context(_STYLE), warnings.catch_warnings():
        # File names in a figure may be in any script.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        draw().savefig(content, format=suffix[1:], dpi="figure", metadata=_NO_DATE.get(suffix))
    return content.getvalue()


@contextlib.contextmanager
def scratch_in(folder: Path, prefix: str = "scratch-") -> Iterator[Path]:
    """Make a scratch folder in a folder and delete it at the end, with those that killed processes have left.

    Its lock file is held for as long as its owner lives, and exists before the folder does.

    Parameters
    ----------
    folder
        Where to make it.
    prefix
        Prefix of its name, and of the names of leftovers.
    """
    for left in folder.glob(f"{prefix}*{_LOCK}"):
        if not _is_own(left):
            continue
        with contextlib.suppress(OSError), left.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(left)
    with tempfile.NamedTemporaryFile(prefix=prefix, suffix=_LOCK, dir=folder, delete=False) as lock:
        path = Path(lock.name)
        # Where nothing can be locked, no leftovers are deleted either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        own = path.with_suffix("")
        own.mkdir()
        try:
            yield own
        finally:
            _delete(path)


def _is_own(path: Path) -> bool:
    """Whether a path is a regular file of this user; in a shared folder, anything may have any name."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    return False


def _delete(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
