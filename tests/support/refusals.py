"""What an action is refused with."""

from collections.abc import Callable

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
