"""A clock for Dask's loops that is never put back.

Tornado and Dask reckon when to send a message, or a sign of life, by the clock on the wall. Where that is
put back by a day in the middle of a run, they wait for a day. So their loops are given the time of when they
began plus what has passed since, by the clock that only goes forward.

It is a preload module of Dask as well: ``dask worker ... --preload mdpext_dask.steady_clock``.
"""

import time
from typing import Any

_ORIGIN = time.time() - time.monotonic()


def steady_time(*_: object) -> float:
    """Return seconds since 1970 as it was when this process began, however the clock is put since."""
    return _ORIGIN + time.monotonic()


def keep_steady() -> None:
    """Have the loops of this process go by the steady clock."""
    from distributed import batched
    from tornado.ioloop import IOLoop

    setattr(IOLoop, "time", steady_time)  # noqa: B010 of another library
    setattr(batched, "time", steady_time)  # noqa: B010


def dask_setup(_: Any) -> None:
    """Do so in a worker or scheduler, before it begins; see Dask on preload scripts."""
    keep_steady()
