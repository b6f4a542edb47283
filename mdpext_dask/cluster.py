"""Where tasks run: in this process, in local processes, or on an existing Dask scheduler.

Together with nothing else in the package, this module imports ``distributed``.
"""

import contextlib
import itertools
import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Protocol, TypeVar

from mdpext_dask.errors import ClusterError, first_line
from mdpext_dask.sections import ClusterSection

T = TypeVar("T")

# Arrays of numpy do not spill, so a worker that runs low must pause, not write to disk; the same
# settings are in deploy/dask.yaml for clusters that are started otherwise.
DASK_CONFIG: dict[str, Any] = {
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": 0.85,
    "distributed.worker.memory.terminate": 0.95,
    "distributed.scheduler.allowed-failures": 5,
    "distributed.scheduler.worker-saturation": 1.1,
    # The matrices of a seed program go out with its tasks, tens of megabytes at every iteration.
    "distributed.admin.large-graph-warning-threshold": "1GB",
    # Dask has workers give memory back after every large array, and numpy then spends as long on getting it
    # anew as on computing (seed programs took three times as long).
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**28,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}
_CONNECT_SECONDS = 10
# A result that takes longer to fetch is lost with its worker.
_LOST_SECONDS = 5


def processors() -> int:
    """Return how many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every operating system
        return os.cpu_count() or 1


class Executor(Protocol):
    """Runs a function over a list of arguments, in any order."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        ...

    @property
    def on_this_machine(self) -> bool:
        """Whether the workers share this machine."""
        ...

    @property
    def threads(self) -> int:
        """Threads that a task may use while no other runs."""
        ...

    def map(
        self, stage: str, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Yield (position in `arguments`, result) as results come in.

        Raises
        ------
        ClusterError
            If workers are lost for good.
        """
        ...


class InlineExecutor:
    """Runs everything in this process, one after the other.

    Parameters
    ----------
    threads
        Of a task; default: as many as this process may use processors.
    """

    workers = 1
    on_this_machine = True

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    @property
    def threads(self) -> int:
        """Threads that a task may use."""
        return processors() if self._threads is None else self._threads

    def map(
        self,
        stage: str,  # noqa: ARG002 part of the protocol
        function: Callable[..., T],
        arguments: Sequence[tuple[Any, ...]],
    ) -> Iterator[tuple[int, T]]:
        """Yield results in order."""
        for position, argument in enumerate(arguments):
            yield position, function(*argument)


class DaskExecutor:
    """Runs tasks on a Dask cluster."""

    def __init__(self, client: Any, *, on_this_machine: bool) -> None:
        self._client = client
        self.on_this_machine = on_this_machine
        self._calls = itertools.count()
        self._run = uuid.uuid4().hex[:8]

    @property
    def workers(self) -> int:
        """Number of workers that are there now."""
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    @property
    def threads(self) -> int:
        """One for each local worker, which rest meanwhile; one elsewhere, or while workers are replaced."""
        return max(self.workers, 1) if self.on_this_machine else 1

    def map(
        self, stage: str, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Yield results as they come in; tasks of dead workers run again elsewhere."""
        from distributed import KilledWorker, as_completed
        from distributed.client import FutureCancelledError

        call = next(self._calls)
        # Explicit keys: a task is known by stage and position, and never mistaken for another run's.
        keys = [f"{stage}-{self._run}-{call}-{position}" for position in range(len(arguments))]
        futures = self._client.map(_apply, [function] * len(arguments), arguments, key=keys, pure=False)
        position_of = {future.key: position for position, future in enumerate(futures)}
        try:
            for future in as_completed(futures):
                result = self._fetch(future)
                # Let go at once: results of a hundred thousand tasks must not pile up.
                future.release()
                yield position_of[future.key], result
        except KilledWorker as error:
            raise ClusterError(
                f"{stage}: workers keep dying (out of memory?); what is done is kept, run again "
                f"({first_line(error)})"
            ) from None
        except (FutureCancelledError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise
            raise ClusterError(
                f"{stage}: the scheduler or its workers are gone; what is done is kept, run again"
            ) from None
        finally:
            for future in futures:
                future.release()

    def _fetch(self, future: Any) -> Any:
        """Return a finished task's result, wherever it has to come from.

        A result dies with its worker. The scheduler then queues the task again, but takes nothing from the
        queue before something else happens, which at the end of a stage may be never (seen with distributed
        2026.8): so something is made to happen.
        """
        while True:
            try:
                return future.result(timeout=_LOST_SECONDS)
            except TimeoutError:
                if future.status != "pending":
                    raise
                self._client.submit(int, key=f"nudge-{uuid.uuid4().hex}", pure=False).result()


def _apply(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return function(*arguments)


@contextlib.contextmanager
def open_executor(cluster: ClusterSection, workers: int | None = None) -> Iterator[Executor]:
    """Start or reach the workers that a job asks for, and let go of them at the end.

    Parameters
    ----------
    cluster
        Section of the job.
    workers
        Number of local processes, instead of the job's.

    Raises
    ------
    ClusterError
        If a scheduler cannot be reached.
    """
    if cluster.kind == "inline":
        yield InlineExecutor()
        return
    import dask
    from distributed import Client

    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(DASK_CONFIG))
        if cluster.kind == "local":
            target: Any = _start_local(stack, workers or cluster.workers)
        else:
            target = cluster.address
        try:
            client = stack.enter_context(Client(target, timeout=_CONNECT_SECONDS))
            client.wait_for_workers(1, timeout=_CONNECT_SECONDS)
        except (OSError, TimeoutError, ValueError) as error:
            where = (
                f"scheduler with workers answers at {cluster.address}" if cluster.address else "worker came"
            )
            raise ClusterError(f"cluster: no {where}: {first_line(error)}") from None
        yield DaskExecutor(client, on_this_machine=cluster.kind == "local")


def _start_local(stack: contextlib.ExitStack, workers: int) -> Any:
    """Start worker processes here; they end with the stack.

    An interrupt from the keyboard reaches every process of the terminal; only this one shall act on it. The
    signal is blocked while the cluster's thread is made, which hands the block down to all it starts.
    """
    from distributed import LocalCluster

    # Starting the first process would start this tracker, and that unblocks the signal again.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return stack.enter_context(
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
            )
        )
    except (OSError, RuntimeError, TimeoutError) as error:
        raise ClusterError(f"cluster: the local workers could not be started: {first_line(error)}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
