"""A job on a cluster, followed from anywhere: what the batch system says of it, and how far its store is.

The job does not know that it is followed. Letting go of it, or being killed, leaves it as it is.
"""

import time
from dataclasses import dataclass
from typing import Literal, Protocol

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

# A batch system serves many: ask often only while something changes.
_FIRST_WAIT, _LONGEST_WAIT, _SLOWER = 1.0, 15.0, 1.3
# A batch system that has not answered for so long, in seconds, is no longer waited for.
_UNANSWERED = 1800.0
# Reading a store's receipts may take long; so many times that is left to others, up to so many seconds.
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
        ``"pending"``; ``"running"``; ``"done"``: it has ended well; ``"failed"``: it has ended otherwise;
        ``"gone"``: it is not known any more.
    message
        What else is said: why it waits, how it has failed, with the last error of its output.
    exit_code
        Of the job's own, where there is one.
    """

    state: Literal["pending", "running", "done", "failed", "gone"]
    message: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state not in ("pending", "running")


class Submission(Protocol):
    """A job that was handed to a batch system."""

    @property
    def name(self) -> str:
        """What people call it, as in "Slurm job 12"."""
        ...

    def state(self) -> JobState:
        """Ask for its state.

        Raises
        ------
        ClusterError
            If the batch system does not answer.
        """
        ...


def follow(submission: Submission, store_url: str, observer: Observer) -> None:
    """Watch a job until it ends.

    Raises
    ------
    IncompleteStoreError
        If it ends without completing the store, or is let go of by an interrupt.
    GuaranteeViolation, SpecError, SolverError
        If it ends with the exit code of one of these.
    """
    try:
        final = _watch(submission, store_url, observer)
    except KeyboardInterrupt:
        raise IncompleteStoreError(
            f"{store_url}: no longer followed; {submission.name} goes on (mdpext status says how far it is)"
        ) from None
    reached, why = _state_of(store_url)
    # What the job says of itself counts for more: it may have been refused, and the store be another job's.
    if reached == COMPLETE and final.exit_code not in _ERRORS:
        return
    if final.state == "done" and reached is None:
        observer(Note(f"{submission.name} has ended well, but its store cannot be read from here: {why}"))
        return
    raise _failure(submission, final, store_url, reached)


def _failure(submission: Submission, final: JobState, store_url: str, reached: str | None) -> MdpextError:
    said = f": {final.message}" if final.message else ""
    how = {"done": "has ended", "failed": "has failed", "gone": "is gone"}[final.state]
    line = f"{store_url}: {submission.name} {how}{said}"
    if final.state == "gone" and reached == REFUSED:
        return GuaranteeViolation(line + "; the store does not hold what it promises")
    if final.exit_code in _ERRORS:
        return _ERRORS[final.exit_code](line)
    return IncompleteStoreError(line + "; what is done is kept, submit again to go on")


def _watch(submission: Submission, store_url: str, observer: Observer) -> JobState:
    """Tell an observer what goes on, and return how it has ended."""
    shown = _Shown(observer)
    wait, last = _FIRST_WAIT, None
    unanswered: float | None = None
    while True:
        try:
            now, unanswered = submission.state(), None
        except ClusterError as error:
            if unanswered is None:
                observer(Note(str(error)))
                unanswered = time.monotonic()
            if time.monotonic() - unanswered > _UNANSWERED:
                raise ClusterError(
                    f"{error}; {submission.name} may go on (mdpext status {store_url} says how far it is)"
                ) from None
            now = JobState("running")
        started = time.monotonic()
        stage = ("queue", 0, 0) if now.state == "pending" else _stage_of(store_url)
        if now.state == "pending" and now.message and (last is None or last[0] != now):
            observer(Note(f"{submission.name} waits: {now.message}"))
        shown.show(*stage)
        if now.ended:
            shown.close()
            return now
        rest = min(_REST * (time.monotonic() - started), _LONGEST_REST)
        wait = min(wait * _SLOWER, _LONGEST_WAIT) if (now, stage) == last else _FIRST_WAIT
        last = (now, stage)
        time.sleep(max(wait, rest))


class _Shown:
    """The stage that an observer was told of."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._stage = ""
        self._done = 0
        self._started = 0.0

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
    """Return which stage a job is in by its store, how many of its tasks are done, and of how many."""
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
