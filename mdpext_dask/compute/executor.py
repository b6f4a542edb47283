"""Where tasks run: in this process, or on the workers of a Dask scheduler."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import psutil
from pydantic import ValidationError

from mdpext_dask.compute.dask_settings import PAUSE, settings_under
from mdpext_dask.compute.workers import CONNECT_SECONDS, START
from mdpext_dask.errors import ClusterError, MdpextError, SpecError, StoreError, exit_code_of, first_line
from mdpext_dask.extend.choose import trust_operators, trusted_operators
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import software_versions

T = TypeVar("T")

# After so long without a result, in s, check that there still are workers.
_ASK_SECONDS = 5
# Results fetched in one request, at most: a request takes longer than a tiny task, but results may be large.
_FETCHED_AT_ONCE = 64
# A scheduler that does not answer for so long, in s, is gone. If its cable is cut, TCP finds out earlier.
_ANSWER_SECONDS = 60
# Lost workers come back within this time, in s, in a new process or on a new machine, or never.
_RETURN_SECONDS = 300
# Below this many numbers in a store, starting processes takes longer than the work.
FEW_NUMBERS = 20_000_000
# What a local worker should have of the machine's memory, at least, in bytes.
_LEAST_BYTES = 2**30
# Tasks with the scheduler at a time, at most: WINDOW, or WINDOW_OF_WORKER for each worker if that is more.
# The scheduler holds about 10 kB for each, the client as much again.
WINDOW, WINDOW_OF_WORKER = 1000, 50


def processors() -> int:
    """Return how many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every operating system
        return os.cpu_count() or 1


class InlineExecutor:
    """Runs everything in this process, one after the other; see :class:`DaskExecutor` for the attributes."""

    workers = 1
    on_this_machine = True
    dashboard = None
    memory_bytes = None

    def __init__(self, threads: int | None = None) -> None:
        self.threads = processors() if threads is None else threads

    def map(
        self,
        stage: str,  # noqa: ARG002 as of the other executor
        function: Callable[..., T],
        arguments: Sequence[tuple[Any, ...]],
    ) -> Iterator[tuple[int, T]]:
        """Yield (position in `arguments`, result) in order."""
        for position, argument in enumerate(arguments):
            yield position, function(*argument)


class DaskExecutor:
    """Runs tasks on a Dask cluster, in any order.

    Parameters
    ----------
    client
        Of the scheduler.
    on_this_machine
        Whether the workers share this machine.
    return_seconds
        How long to wait for workers once all are lost.
    """

    def __init__(
        self, client: Any, *, on_this_machine: bool, return_seconds: float = _RETURN_SECONDS
    ) -> None:
        self.on_this_machine = on_this_machine
        self._client, self._address = client, client.scheduler.address
        self._return_seconds = return_seconds
        self._at_work = time.monotonic()
        self._calls = itertools.count()
        self._run = uuid.uuid4().hex[:8]
        self._versions = versions()

    @property
    def workers(self) -> int:
        """Number of workers now; 1 while all are being replaced, as work is divided by it."""
        return max(len(self._workers()), 1)

    @property
    def threads(self) -> int:
        """Threads that a task may use while no other runs: one for each local worker; one elsewhere."""
        return self.workers if self.on_this_machine else 1

    @property
    def dashboard(self) -> str | None:
        """Address of the scheduler's pages, if it has any; local ones have none."""
        link = None if self.on_this_machine else self._client.dashboard_link
        return str(link) if link else None

    @property
    def memory_bytes(self) -> int | None:
        """Memory limit of the worker with the least; None without workers, or without a limit."""
        limits = [worker["memory_limit"] for worker in self._workers().values() if worker["memory_limit"]]
        return min(limits, default=None)

    def _workers(self) -> dict[str, dict[str, Any]]:
        """Return what the scheduler says of its workers, by address."""
        try:
            identity = self._client.sync(self._ask, callback_timeout=_ANSWER_SECONDS)
        except (OSError, TimeoutError):
            raise self._gone("cluster") from None
        found: dict[str, dict[str, Any]] = identity["workers"]
        return found

    async def _ask(self) -> Any:
        scheduler = self._client.scheduler
        if scheduler is None:  # the client has given up
            raise ConnectionError
        return await scheduler.identity(n_workers=-1)

    def _gone(self, stage: str) -> ClusterError:
        return ClusterError(
            f"{stage}: the scheduler at {self._address} does not answer any more; what is done is kept, run "
            "again"
        )

    def _require_workers(self, stage: str) -> None:
        """Refuse to wait any longer where nothing can come.

        Raises
        ------
        ClusterError
            If the scheduler does not answer, or has had no active worker for `return_seconds`.
        """
        workers = self._workers().values()
        now = time.monotonic()
        if any(w["status"] == "running" or w["metrics"].get("executing") for w in workers):
            self._at_work = now
        elif now - self._at_work > self._return_seconds:
            what = "all workers have paused for want of memory" if workers else "there are no workers"
            raise ClusterError(
                f"{stage}: {what}, for {self._return_seconds:.0f} s; what is done is kept, run again"
            )

    def check_versions(self) -> None:
        """Refuse workers whose software is not this process's; see :func:`versions`.

        Raises
        ------
        SpecError
            With the worker, and both versions.
        ClusterError
            If it cannot be asked.
        """
        try:
            # The scheduler only has to know the names of functions; which version it has decides nothing.
            self._client.run_on_scheduler(versions, callback_timeout=_ANSWER_SECONDS)
        except (OSError, TimeoutError):
            raise self._gone("cluster") from None
        except Exception as error:  # Dask wraps what was raised there in errors of many kinds
            raise self._unknown("the scheduler", error) from None
        try:
            found = self._client.run(versions, on_error="return", callback_timeout=_ANSWER_SECONDS)
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"cluster: the workers do not answer: {first_line(error)}") from None
        for worker, theirs in found.items():
            if isinstance(theirs, dict):
                _require_same(worker, theirs, self._versions)
            elif not isinstance(theirs, OSError):  # a worker that was lost meanwhile
                raise self._unknown(f"worker {worker}", theirs)

    def _unknown(self, who: str, error: BaseException) -> SpecError:
        return SpecError(
            f"cluster: {who} does not know mdpext_dask ({first_line(error)}); install version "
            f"{self._versions['mdpext-dask']} there, as here"
        )

    def map(
        self, stage: str, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Yield (position in `arguments`, result) as results come in; tasks of dead workers run again.

        Raises
        ------
        ClusterError
            If workers are lost for good.
        """
        from dask.base import annotate

        call = next(self._calls)
        window = max(WINDOW, WINDOW_OF_WORKER * self.workers)
        held: dict[str, tuple[int, Any]] = {}
        # Not Dask's own as_completed, which waits without a time limit.
        completed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._at_work = time.monotonic()

        def submit(first: int, last: int) -> None:
            positions = range(first, min(last, len(arguments)))
            # Explicit keys: a task is known by stage and position, and never mistaken for another run's.
            keys = [f"{stage}-{self._run}-{call}-{position}" for position in positions]
            if not keys:
                return
            same = [[each] * len(keys) for each in (function, self._versions, trusted_operators())]
            parts = same[0], arguments[first:last], *same[1:]
            # The dashboard groups by prefix of the key; annotations are for plugins and logs.
            with annotate(stage=stage):
                futures = self._client.map(_apply, *parts, key=keys, pure=False)
            for key, position, future in zip(keys, positions, futures, strict=True):
                held[key] = position, future
                future.add_done_callback(completed.put)

        try:
            done, submitted = 0, window
            submit(0, window)
            while held:
                try:
                    futures = _some_of(completed)
                except queue.Empty:
                    self._require_workers(stage)
                    continue
                results = self._fetch(stage, futures)
                self._at_work = time.monotonic()
                # Release at once: results of a hundred thousand tasks must not pile up.
                found = []
                for future, result in zip(futures, results, strict=True):
                    found.append((held.pop(future.key)[0], result))
                    future.release()
                done += len(futures)
                # Half a window at a time: one message to the scheduler for many tasks.
                if submitted < len(arguments) and submitted - done <= window // 2:
                    submit(submitted, done + window)
                    submitted = done + window
                yield from found
        finally:
            for _, future in held.values():
                future.release()

    def _fetch(self, stage: str, futures: list[Any]) -> list[Any]:
        """Return the results of finished tasks, fetched together.

        A result is lost with its worker. The scheduler then queues the task again, but takes nothing from the
        queue before its next event, which may never come at the end of a stage (seen with distributed
        2026.8): so a tiny task is submitted as an event. While the scheduler does not know that the worker is
        gone, as only its cable is cut, the result stays out of reach.
        """
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        async def gather() -> tuple[list[Any], BaseException | None]:
            try:
                return await self._client.gather(futures, asynchronous=True), None
            except BaseException as error:  # also asyncio's CancelledError
                return [], error

        # Never cancelled: on a slow line, large results would then never come.
        gathering = asyncio.run_coroutine_threadsafe(gather(), self._client.loop.asyncio_loop)
        while not concurrent.futures.wait([gathering], timeout=_ASK_SECONDS).done:
            self._require_workers(stage)
            nudge = self._client.submit(int, key=f"nudge-{uuid.uuid4().hex}", pure=False)
            with contextlib.suppress(OSError, FutureCancelledError):
                nudge.result(timeout=_ASK_SECONDS)
        results, error = gathering.result()
        if error is None:
            return results
        if isinstance(error, KilledWorker):
            raise ClusterError(
                f"{stage}: workers keep dying (out of memory, or without mdpext_dask?); what is done is "
                f"kept, run again ({first_line(error)})"
            ) from None
        own = any(future.status == "error" for future in futures)
        if isinstance(error, FutureCancelledError | OSError) and not own:
            raise self._gone(stage) from None
        raise error


# Runs a function over a list of arguments; see `map`.
Executor = InlineExecutor | DaskExecutor


def _some_of(completed: "queue.SimpleQueue[Any]") -> list[Any]:
    """Wait for a finished task, and return it with all others that are finished by then."""
    some = [completed.get(timeout=_ASK_SECONDS)]
    with contextlib.suppress(queue.Empty):
        while len(some) < _FETCHED_AT_ONCE:
            some.append(completed.get_nowait())
    return some


def versions() -> dict[str, str]:
    """Return the versions of the software that decides bytes; of Python without the patch level."""
    found = software_versions()
    return {**found, "python": ".".join(found["python"].split(".")[:2])}


_own_versions = lru_cache(maxsize=1)(versions)


def _require_same(worker: str, theirs: dict[str, str], ours: dict[str, str]) -> None:
    other = [(name, theirs.get(name), ours[name]) for name in ours if theirs.get(name) != ours[name]]
    if different := ", ".join(f"{name} {their} instead of {version}" for name, their, version in other):
        raise SpecError(
            f"cluster: worker {worker} has {different} as this client has; install the same there"
        )


def _apply(
    function: Callable[..., T],
    arguments: tuple[Any, ...],
    expected: dict[str, str],
    operators: frozenset[str],
) -> T:
    """Run a task, unless this worker joined late with other software; it trusts what its client trusts."""
    from distributed import get_worker

    if _own_versions() != expected:
        _require_same(get_worker().address, _own_versions(), expected)
    trust_operators(*operators)
    try:
        return function(*arguments)
    except MdpextError as error:
        failed, code = error, exit_code_of(error)
    if type(failed) is StoreError:
        # Name the worker: a folder may not be mounted there, or its disk be full.
        failed = StoreError(f"{failed} (so says worker {get_worker().address})")
    # Dask sends the causes of an error along; if one cannot be pickled, as some errors of Zarr and drivers,
    # another error arrives in its place. What only they say goes with the error itself.
    failed.exit_code = code
    failed.__cause__ = failed.__context__ = None
    raise failed


@contextlib.contextmanager
def _silent_client() -> Iterator[None]:
    """Silence Dask's log, which has tracebacks: what goes wrong with a scheduler is in our own errors."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def open_for_reader(
    workers: int | None, scheduler: str | None = None, *, small: bool
) -> contextlib.AbstractContextManager[Executor]:
    """Return where to read a store or an array: on this machine, unless the caller names a scheduler.

    What a store says of its job's cluster is a record and is never followed: a scheduler runs code in whoever
    connects to it, and a store may come from anybody.

    Parameters
    ----------
    workers
        Number of local processes; 1 for this process alone. Default: this process for small work, else one
        for each processor, as far as memory goes.
    scheduler
        Address of a Dask scheduler, or its file, to use instead.
    small
        Whether starting processes takes longer than the work.

    Raises
    ------
    SpecError
        If there cannot be so many workers, or the scheduler has no such address.
    ClusterError
        See :func:`open_executor`.
    """
    if workers is not None and workers < 1:
        raise SpecError(f"--workers: must be at least 1, got {workers}")
    if scheduler is not None:
        try:
            return open_executor(ClusterSection(kind="address", address=scheduler))
        except ValidationError:
            raise SpecError(
                f"--scheduler: must be tcp://host:port or a scheduler file (.json), got {scheduler!r}"
            ) from None
    if workers == 1 or (workers is None and small):
        return open_executor(ClusterSection(kind="inline"), workers)
    return open_executor(ClusterSection(kind="local"), workers)


def is_small(store: MechanismStore) -> bool:
    """Whether one pass over a store takes less time than starting processes."""
    return store.grid.records * store.outputs <= FEW_NUMBERS


@contextlib.contextmanager
def open_executor(
    cluster: ClusterSection, workers: int | None = None, *, room_of_worker: int = 0
) -> Iterator[Executor]:
    """Start or reach the workers that a job asks for, and release them at the end.

    Parameters
    ----------
    cluster
        Section of the job.
    workers
        Number of workers, or in this process of threads, instead of the job's.
    room_of_worker
        What a worker needs at least, in bytes; where nothing says how many local ones there are, it is one
        for each processor, as far as memory goes.

    Raises
    ------
    ClusterError
        If a scheduler cannot be reached, or no worker comes.
    SpecError
        If what the section names is not there, or workers have other software than this process.
    """
    if cluster.kind == "inline":
        yield InlineExecutor(workers)
        return
    import dask
    from distributed import Client

    count = workers or cluster.requested
    if workers is None and cluster.workers is None and cluster.kind == "local":
        room = max(_LEAST_BYTES, math.ceil(room_of_worker / PAUSE))
        count = max(min(processors(), psutil.virtual_memory().total // room), 1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(settings_under(dask.config.collect())))
        stack.enter_context(_silent_client())
        target, where, seconds = START[cluster.kind](stack, cluster, count)
        try:
            client = stack.enter_context(Client(target, timeout=CONNECT_SECONDS))
            client.wait_for_workers(1, timeout=seconds)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # the last three: certificates
            raise ClusterError(f"cluster: {where}: {first_line(error)}") from None
        executor = DaskExecutor(
            client, on_this_machine=cluster.kind == "local", return_seconds=max(seconds, _RETURN_SECONDS)
        )
        if not executor.on_this_machine:
            executor.check_versions()
        yield executor
