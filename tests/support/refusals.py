"""What an action is refused with."""

from collections.abc import Callable
from typing import Any

import pytest

from mdpext_dask.errors import DataError


def refusal(action: Callable[[], object], *parts: str, kind: type[Exception] = DataError) -> str:
    """Return the message of the error that an action ends in: one line, in which all parts are found."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for part in parts:
        assert part in message, message
    return message


def refused(kind: Any, match: str, action: Callable[..., object], *given: Any, **how: Any) -> Any:
    """Return the error that a call ends in: one line, in which a pattern is found."""
    with pytest.raises(kind, match=match or None) as caught:
        action(*given, **how)
    assert len(str(caught.value).splitlines()) <= 1, str(caught.value)
    return caught.value
