"""Writing a file whole or not at all."""

import contextlib
import fcntl
import importlib
import io
import os
import shutil
import stat
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdpext_dask.errors import SpecError, StoreError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

import re
from typing import IO

from mdpext_dask.errors import DataError, MdpextError

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


SUFFIXES = (".png", ".pdf", ".svg")
# Whoever has a style of their own gets the same picture; and the same answer the same bytes, without a date.
_STYLE: list[Any] = ["default", {"font.size": 9, "svg.hashsalt": "mdpext"}]
_NO_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def check_picture(path: Path, option: str = "--picture") -> None:
    """Refuse a picture that cannot be drawn or written, before any work is done for it.

    Parameters
    ----------
    path
        Where it is to be.
    option
        Who asks for it.

    Raises
    ------
    SpecError
        As for :func:`check_file`, or if matplotlib is not installed.
    """
    check_file(path, option, SUFFIXES)
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise SpecError(
            f"{option}: matplotlib is needed: pip install 'mdpext-dask[report]' ({first_line(error)})"
        ) from None


def check_file(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Parameters
    ----------
    path
        Where it is to be.
    option
        Who asks for it.
    suffixes
        What its name may end in.

    Raises
    ------
    SpecError
        If its format is unknown, its folder is not there or cannot be written, or a folder has its name.
    """
    if path.suffix.lower() not in suffixes:
        choice = " or ".join(part for part in (", ".join(suffixes[:-1]), suffixes[-1]) if part)
        raise SpecError(f"{option}: {path}: must end in {choice}")
    try:
        if path.is_dir():
            raise SpecError(f"{option}: {path}: is a folder")
        if not path.parent.is_dir():
            raise SpecError(f"{option}: {path}: there is no folder {path.parent}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SpecError(f"{option}: {path}: cannot be written: {first_line(error)}") from None


def rendered(draw: "Callable[[], Figure]", suffix: str) -> bytes:
    """Return the bytes of a picture.

    Parameters
    ----------
    draw
        Makes the figure.
    suffix
        One of :data:`SUFFIXES`.
    """
    from matplotlib import style

    content = io.BytesIO()
    with style.context(_STYLE), warnings.catch_warnings():
        # Names of files may be in any script.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        draw().savefig(content, format=suffix[1:], dpi="figure", metadata=_NO_DATE.get(suffix))
    return content.getvalue()


def write_whole(path: Path, write: Callable[[Path], object], option: str = "--picture") -> None:
    """Write a file as a whole or not at all; one that is there is replaced.

    Parameters
    ----------
    path
        A file that :func:`check_file` has passed.
    write
        Writes it to the path it is given.
    option
        Who asks for it.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    try:
        # A link stays one.
        target = path.resolve()
        partial = target.with_name(f".mdpext-{uuid.uuid4().hex}.partial{target.suffix}")
        try:
            write(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{option}: {path}: cannot be written: {first_line(error)}") from None


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
