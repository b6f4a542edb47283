"""Work in a process of its own, that may take so long and so much memory and no more.

Solvers do not come back to Python to be told that time is up, so a process is what can be ended. The caller
must have one thread only: the work is done in a fork of it, which has all that the caller has read already.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdpext_dask.errors import ClusterError, MdpextError, StoreError, first_line

_POLL_SECONDS = 0.01
# Beyond its time a child ends itself, should nobody be left to end it.
_GRACE_SECONDS = 60
_MEMORY = "out of memory"


@dataclass(frozen=True)
class Outcome:
    """How work in a child process ended.

    Parameters
    ----------
    values
        What it returned; None if it did not end well.
    reason
        Why not, in one line.
    seconds
        How long it took, by the clock.
    limited
        Whether it is a limit that ended it.
    passing
        Whether the reason lies outside the work: a full disk, a signal, a crash. Another time may do better.
    """

    values: dict[str, Any] | None
    reason: str | None
    seconds: float
    limited: bool = False
    passing: bool = False


def in_child(
    work: Callable[[], dict[str, Any]],
    answer: Path,
    *,
    seconds: float | None = None,
    memory_bytes: int | None = None,
    parent: int | None = None,
) -> Outcome:
    """Do some work in a fork of this process.

    Parameters
    ----------
    work
        What to do; it returns plain JSON values.
    answer
        A file for them, in a folder that is there.
    seconds
        When to end it.
    memory_bytes
        What it may hold beyond what this process holds now.
    parent
        Who waits for the answer; default: the parent that this process has now.

    Raises
    ------
    SystemExit
        If the parent of this process has gone: nobody waits for an answer any more.
    """
    answer.unlink(missing_ok=True)
    parent, started = parent or os.getppid(), time.perf_counter()
    if os.getppid() != parent:
        raise SystemExit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _run(work, answer, seconds, memory_bytes)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        elapsed = time.perf_counter() - started
        if ended:
            return _outcome(answer, status, elapsed, memory_bytes)
        late = seconds is not None and elapsed > seconds
        if late or os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if not late:
                raise SystemExit(1)
            return Outcome(None, f"not finished within {seconds:g} s", elapsed, limited=True)
        time.sleep(_POLL_SECONDS)


def _run(
    work: Callable[[], dict[str, Any]], answer: Path, seconds: float | None, memory_bytes: int | None
) -> None:
    """Do the work and end the process, whatever happens; nothing of the parent's is tidied up here."""
    code = 1
    try:
        if seconds is not None:
            limit = int(time.process_time() + seconds + _GRACE_SECONDS)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        if memory_bytes is not None:
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (held + memory_bytes,) * 2)
        answer.write_text(json.dumps({"values": work()}))
        code = 0
    except MdpextError as error:
        outside = isinstance(error, StoreError | ClusterError)
        answer.write_text(json.dumps({"reason": " ".join(str(error).split()), "passing": outside}))
    except MemoryError:
        answer.write_text(json.dumps({"reason": _MEMORY}))
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {first_line(error)}"
        answer.write_text(json.dumps({"reason": reason, "passing": True}))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _outcome(answer: Path, status: int, seconds: float, memory_bytes: int | None) -> Outcome:
    try:
        found = json.loads(answer.read_text())
    except (OSError, ValueError):
        found = {"passing": True}
    if "values" in found:
        return Outcome(found["values"], None, seconds)
    reason = found.get("reason")
    limited = reason == _MEMORY
    if limited and memory_bytes is not None:
        reason = f"more than {memory_bytes / 2**30:.1f} GiB of memory are needed"
    if reason is None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        reason = f"ended by signal {number}" if number else "ended without an answer"
    return Outcome(None, reason, seconds, limited, bool(found.get("passing")))
