"""Files with keys: small JSON documents, never overwritten, and the secret ones for their owner alone."""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdpext_dask.errors import DataError, newer_format

_PRIVATE, _PUBLIC = 0o600, 0o644
_ANYBODY_ELSE = 0o077
_MOST_BYTES = 1 << 16
_FORM = re.compile(r"(.*), version (\d{1,9})")


def read_key_file(
    path: str | Path, what: str, newest: str, fields: Sequence[str], *, secret: bool
) -> list[str]:
    """Return texts of a key file; none of them if it is damaged, or no such file.

    Parameters
    ----------
    path
        The file.
    what
        What to call the key in messages.
    newest
        Newest format that is known, ``"mdpext ..., version N"``.
    fields
        The fields that it must have.
    secret
        Whether nobody but its owner may read it.

    Raises
    ------
    DataError
        If it cannot be read, may be read by others than its owner, or has a newer format.
    """
    try:
        with Path(path).open("rb") as file:
            # Of the open file: its name may stand for another by now.
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path}: the {what} cannot be read: {error.strerror}") from None
    if secret and os.name == "posix" and stat.S_IMODE(mode) & _ANYBODY_ELSE:
        raise DataError(
            f"{path}: others than its owner may read or write the {what}; chmod 600 {path}, and make "
            "a new key if somebody may have"
        )
    try:
        document: Any = json.loads(content)
    except (ValueError, RecursionError):
        return []
    if not isinstance(document, dict):
        return []
    # First: fields of a newer format need not be those of this one.
    found, known = (_FORM.fullmatch(str(form)) for form in (document.get("format"), newest))
    if found and known and found[1] == known[1] and int(found[2]) > int(known[2]):
        raise DataError(str(newer_format(path, what, int(found[2]), int(known[2]))))
    values = map(document.get, fields)
    texts = [value for value in values if isinstance(value, str)]
    return texts if len(texts) == len(fields) else []


def write_key_file(path: str | Path, what: str, document: Mapping[str, str], *, secret: bool) -> None:
    """Write a key into a new file; a secret one so that its owner alone can read it.

    Raises
    ------
    DataError
        If there is something already, or it cannot be written.
    """
    try:
        # Fails if anything is there, a link too: a key that is overwritten is lost.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE if secret else _PUBLIC)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            Path(path).unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise DataError(f"{path}: exists; a key is never overwritten") from None
    except OSError as error:
        raise DataError(f"{path}: the {what} cannot be written: {error.strerror}") from None
