"""Files that an answer is left in: what is asked for is checked first, and written whole or not at all."""

import importlib
import io
import tempfile
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdpext_dask.errors import SpecError, StoreError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            f"{option}: matplotlib is needed: pip install 'mdpext-dask[plot]' ({first_line(error)})"
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
