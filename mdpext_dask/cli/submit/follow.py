"""A job on a cluster, followed from anywhere: its state in the batch system, and the progress of its store.

The job does not depend on whoever follows it: it goes on when the follower ends or is killed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mdpext_dask.errors import (
    EXIT_BAD_INPUT,
    EXIT_GUARANTEE,
    EXIT_SOLVER,
    ClusterError,
    GuaranteeViolation,
    IncompleteStoreError,
    MdpextError,
    SolverError,
    SpecError,
)
from mdpext_dask.events import Note, Observer, StageFinished, StageStarted, TaskDone
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, MechanismStore

# Seconds between two questions; a batch system serves many, so they are rare while nothing changes.
_FIRST_WAIT, _LONGEST_WAIT, _SLOWER = 1.0, 15.0, 1.3
# Seconds without an answer of the batch system after which following ends.
_UNANSWERED = 1800.0
# Reading receipts may be slow; then follows a rest of this many times as long, up to this many seconds.
_REST, _LONGEST_REST = 10, 120.0
_ERRORS: dict[int | None, type[MdpextError]] = {
    EXIT_GUARANTEE: GuaranteeViolation,
    EXIT_BAD_INPUT: SpecError,
    EXIT_SOLVER: SolverError,
}


@dataclass(frozen=True)
class JobState:
    """What a batch system says of a job.

    Parameters
    ----------
    state
        ``"pending"``; ``"running"``; ``"done"``: it has succeeded; ``"failed"``; ``"gone"``: the batch system
        does not know it any more.
    message
        Why it waits, or how it has failed, with the last error of its output.
    exit_code
        Exit code of the job, if there is one.
    """

    state: Literal["pending", "running", "done", "failed", "gone"]
    message: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state not in ("pending", "running")


def follow(name: str, ask: Callable[[], JobState], store_url: str, observer: Observer) -> None:
    """Watch a job until it ends.

    Parameters
    ----------
    name
        What people call it, as in "Slurm job 12".
    ask
        Returns its state, or raises ``ClusterError`` if the batch system does not answer.
    store_url
        Its store.
    observer
        Is told of progress.

    Raises
    ------
    IncompleteStoreError
        If it ends without completing the store, or is no longer followed after an interrupt.
    GuaranteeViolation, SpecError, SolverError
        If it ends with the exit code of one of these.
    """
    try:
        final = _watch(name, ask, store_url, observer)
    except KeyboardInterrupt:
        raise IncompleteStoreError(
            f"{store_url}: no longer followed; {name} goes on (mdpext status says how far it is)"
        ) from None
    reached, why = _state_of(store_url)
    # The job's own exit code comes first: it may have been refused, and the store belong to another job.
    if reached == COMPLETE and final.exit_code not in _ERRORS:
        return
    if final.state == "done" and reached is None:
        observer(Note(f"{name} has ended well, but its store cannot be read from here: {why}"))
        return
    how = {"done": "has ended", "failed": "has failed", "gone": "is gone"}[final.state]
    line = f"{store_url}: {name} {how}{f': {final.message}' if final.message else ''}"
    if final.state == "gone" and reached == REFUSED:
        raise GuaranteeViolation(line + "; the store does not hold what it promises")
    if final.exit_code in _ERRORS:
        raise _ERRORS[final.exit_code](line)
    raise IncompleteStoreError(line + "; what is done is kept, submit again to go on")


def _watch(name: str, ask: Callable[[], JobState], store_url: str, observer: Observer) -> JobState:
    """Pass progress on to an observer, and return the final state."""
    shown = _Shown(observer)
    wait, last = _FIRST_WAIT, None
    unanswered: float | None = None
    while True:
        try:
            now, unanswered = ask(), None
        except ClusterError as error:
            if unanswered is None:
                observer(Note(str(error)))
                unanswered = time.monotonic()
            if time.monotonic() - unanswered > _UNANSWERED:
                raise ClusterError(
                    f"{error}; {name} may go on (mdpext status {store_url} says how far it is)"
                ) from None
            now = JobState("running")
        started = time.monotonic()
        stage = ("queue", 0, 0) if now.state == "pending" else _stage_of(store_url)
        if now.state == "pending" and now.message and (last is None or last[0] != now):
            observer(Note(f"{name} waits: {now.message}"))
        shown.show(*stage)
        if now.ended:
            shown.close()
            return now
        rest = min(_REST * (time.monotonic() - started), _LONGEST_REST)
        wait = min(wait * _SLOWER, _LONGEST_WAIT) if (now, stage) == last else _FIRST_WAIT
        last = (now, stage)
        time.sleep(max(wait, rest))


class _Shown:
    """The stage that an observer knows."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._stage, self._done, self._started = "", 0, 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage, self._done, self._started = stage, 0, time.perf_counter()
            self._observer(StageStarted(stage, total))
        for _ in range(done - self._done):
            self._observer(TaskDone(stage))
        self._done = max(done, self._done)

    def close(self) -> None:
        if self._stage:
            self._observer(StageFinished(self._stage, time.perf_counter() - self._started))
        self._stage = ""


def _stage_of(store_url: str) -> tuple[str, int, int]:
    """Return a job's stage, judged by its store, with its work items done and their number."""
    try:
        store = MechanismStore.open(store_url)
        if not store.has_seed():
            return "seed", 0, 0
        done, blocks = len(store.read_receipts()), store.plan.blocks
    except (MdpextError, OSError):
        # Not there yet, half created, or out of reach from here.
        return "seed", 0, 0
    return ("extend", done, blocks) if done < blocks else ("audit", 0, 0)


def _state_of(store_url: str) -> tuple[str | None, str]:
    """Return the state of a store, or None and why it cannot be read."""
    try:
        return MechanismStore.open(store_url).state, ""
    except (MdpextError, OSError) as error:
        return None, str(error)
