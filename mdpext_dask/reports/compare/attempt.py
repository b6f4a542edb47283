"""One method on one problem, in a process of its own with a limit of time and of memory.

Run as ``python -m mdpext_dask.reports.compare.attempt REQUEST.json PARENT``. A solver does not return to
Python when its time is up, so a timer of the kernel ends the process. Arithmetic libraries get one thread:
with more the methods would be unequal.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign.row_files import allocate
from mdpext_dask.auditors.methods import certify, compare_all
from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.auditors.subject import Subject, plain_subject, store_subject
from mdpext_dask.compute.executor import Executor, InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import ClusterError, DataError, MdpextError, StoreError, first_line, is_disk_full
from mdpext_dask.evaluation.baselines.problem import (
    BaselineMechanism,
    Guarantee,
    Problem,
    expected_loss,
    strips,
)
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, lower_bound
from mdpext_dask.events import silent
from mdpext_dask.job.spec import JobSpec, json_number, parse_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.pipeline.run import complete
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.reports.compare.answers import BOUND, given_up, write_answer
from mdpext_dask.reports.compare.methods import entry_of
from mdpext_dask.store.mechanism_store import MechanismStore

_ROWS, _STORE = "rows.npy", "mechanism.zarr"
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_POLL_SECONDS = 1.0
# All methods get one processor.
_ALONE = InlineExecutor(threads=1)


@dataclass(frozen=True)
class Request:
    """What one process is asked for.

    Parameters
    ----------
    method
        Name of the method, or :data:`~mdpext_dask.reports.compare.answers.BOUND`.
    job
        The job of this repetition, as plain JSON values.
    answer
        The file of its answer.
    scratch
        A folder for what is made.
    limit_seconds
        Time limit of the construction, or of the lower bound.
    memory_bytes
        What a construction may hold beyond what the process holds before it.
    random_seed
        For methods that draw anything.
    """

    method: str
    job: dict[str, Any]
    answer: str
    scratch: str
    limit_seconds: float
    memory_bytes: int
    random_seed: int


# --- the process that asks ------------------------------------------------------------------------


def attempt(request: Request) -> None:
    """Answer a request in a process of its own.

    Raises
    ------
    ClusterError
        If the process ends before it has begun with the method.
    StoreError
        If the folder cannot be written.
    """
    path = Path(request.answer)
    because = given_up(path, request.limit_seconds)
    if because is not None and request.method != BOUND:
        write_answer(path, _failure(request, because, limited=True))
        return
    try:
        code, said = _ended(request)
    except OSError as error:
        raise StoreError(f"{path.parent}: nothing can be run there: {first_line(error)}") from None
    if code == -signal.SIGALRM:
        late = f"not finished within {request.limit_seconds:g} s"
        write_answer(path, _failure(request, late, limited=True))
    elif code < 0:
        write_answer(path, _failure(request, f"ended by signal {-code}", passing=True))
    elif code > 0:
        last = (said.strip().splitlines() or ["no reason given"])[-1]
        raise ClusterError(f"compare: a process ended with {code}: {last}; run again to go on")


def _ended(request: Request) -> tuple[int, str]:
    """Have a request answered, and return how the process ended and what it said."""
    with tempfile.TemporaryDirectory(dir=request.scratch) as folder:
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 our own interpreter and module
            [sys.executable, "-m", __name__, str(asked), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate()[1]
        except BaseException:
            # An interrupt reaches this process alone; what it has started must not go on.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return process.returncode, said


def _failure(
    request: Request, reason: str, *, limited: bool = False, passing: bool = False
) -> dict[str, Any]:
    """Return the answer of a method that has failed.

    Parameters
    ----------
    request
        What was asked.
    reason
        Why, in one line.
    limited
        Whether it was one of its limits.
    passing
        Whether the reason lies outside the method (a full disk, a signal, a crash): it may work next time.
    """
    told = {"limit_seconds": request.limit_seconds, "limited": limited, "passing": passing}
    return {"completed": False, "reason": reason, **told}


# --- the process that answers ---------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Answer one request, as long as the process that asks is there."""
    threading.Thread(target=_end_with, args=(int(arguments[1]),), daemon=True).start()
    file = Path(arguments[0])
    request = Request(**json.loads(file.read_text(encoding="utf-8")))
    with contextlib.redirect_stdout(sys.stderr):
        spec = parse_job(request.job, source="job")
        answer = _answer(request, spec, build_domain(spec), file.parent)
    write_answer(Path(request.answer), answer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def _answer(request: Request, spec: JobSpec, domain: Domain, folder: Path) -> dict[str, Any]:
    """Return what is known of the method afterwards, whatever became of it."""
    limit, done = request.limit_seconds, {"completed": True, "reason": None}
    try:
        if request.method == BOUND:
            # It takes the time that it is given.
            return {**done, "given_seconds": limit, **_bound(spec, domain, folder, limit)}
        try:
            with _limits(limit, request.memory_bytes):
                started = time.perf_counter()
                made = _construct(request, spec, domain, folder)
                seconds = time.perf_counter() - started
        except MemoryError:
            needed = f"more than {request.memory_bytes / 2**30:.1f} GiB of memory are needed"
            return _failure(request, needed, limited=True)
        given = {"given_seconds": limit} if entry_of(request.method).spends_time else {}
        return {**done, **made, "seconds": seconds, **given, **_judge(spec, domain, folder)}
    except MdpextError as error:
        if is_disk_full(error):
            raise  # it says nothing about the method, and the next one would meet it too
        outside = isinstance(error, StoreError | ClusterError)
        return _failure(request, " ".join(str(error).split()), passing=outside)
    except BaseException as error:  # SystemExit included: no method ends this process
        if is_disk_full(error):
            raise
        traceback.print_exc()
        return _failure(request, f"{type(error).__name__}: {first_line(error)}", passing=True)


@contextlib.contextmanager
def _limits(seconds: float, memory_bytes: int) -> Iterator[None]:
    """End this process after some time, and let it hold no more than so much memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (held + memory_bytes, hard))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _construct(request: Request, spec: JobSpec, domain: Domain, folder: Path) -> dict[str, Any]:
    """Make a mechanism, as a store or as rows; return what it promises."""
    entry = entry_of(request.method)
    if entry.made_by is None:
        store = create(entry.job(spec), str(folder / _STORE), domain)
        complete(store, _ALONE, Stages(silent))
        note = "certified over all pairs, from the stored bytes"
        return {"guarantee": Guarantee.EPSILON, "note": note, "facts": {}}
    problem = Problem.of_domain(spec, domain, request.random_seed)
    made = entry.function()(problem, request.limit_seconds)
    if made.rows is not None:
        _write_rows(problem, made, folder / _ROWS)
    return {
        "guarantee": made.guarantee,
        "note": made.note,
        "facts": made.facts,
        "loss_km": made.sampled_loss_km,
        "sampled_standard_error_km": made.sampled_standard_error,
    }


def _write_rows(problem: Problem, made: BaselineMechanism, path: Path) -> None:
    """Write all rows as float64, (records, K), north fastest.

    Raises
    ------
    DataError
        If the method made rows that are none.
    StoreError
        If there is no room for them.
    """
    assert made.rows is not None  # the caller has looked
    columns, along = problem.grid.shape
    stored: NDArray[np.float64] | None = None
    for strip in strips(problem):
        rows = made.rows(strip)
        if stored is None:
            stored = allocate(path, (columns * along, problem.outputs), np.dtype(np.float64))
        if not (np.isfinite(rows).all() and (rows >= 0).all()):
            raise DataError("the rows hold numbers that are no probabilities")
        stored[strip.start * along : strip.stop * along] = rows.reshape(-1, problem.outputs)


def _judge(spec: JobSpec, domain: Domain, folder: Path) -> dict[str, Any]:
    """Return the loss of what was made, and the result of a strict audit."""
    stages, executor = Stages(silent), _ALONE
    problem = Problem.of_domain(spec, domain)
    if (folder / _STORE).exists():
        store = MechanismStore.open(str(folder / _STORE))
        report = _strict(store_subject(store), executor, stages)
        return {"loss_km": store.attributes["loss_km"], **_audited(report)}
    if not (folder / _ROWS).exists():
        return {"epsilon_audited": None, "violation_ratio": None, "verdict": "not audited"}
    rows = np.load(folder / _ROWS, mmap_mode="r")
    points = problem.records_xy_km(slice(None))
    audited = plain_subject(folder / _ROWS, points, problem.epsilon_per_km, problem.metric_p, 0.0)
    with audited as subject:
        report = _strict(subject, executor, stages)
    loss_km = expected_loss(problem, rows.reshape(*problem.grid.shape, -1).__getitem__)
    return {"loss_km": loss_km, **_audited(report)}


def _strict(subject: Subject, executor: Executor, stages: Stages) -> AuditReport:
    """Return the certificate, where it proves that all pairs hold; else what comparing all triples finds.

    The ε of a certificate is at least that of the worst pair. Rows that are near ε everywhere take minutes to
    compare.
    """
    if subject.source.lattice_shape is not None:
        report = certify(subject, executor, stages)
        if report.holds:
            return report
    return compare_all(subject, executor, stages)


def _audited(report: AuditReport) -> dict[str, Any]:
    return {
        "epsilon_audited": json_number(report.epsilon),
        "violation_ratio": report.violation_ratio,
        "verdict": report.verdict,
        "audit_seconds": report.seconds,
    }


def _bound(spec: JobSpec, domain: Domain, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the certified lower bound, and the value that a random part of the lattices suggests."""
    store = create(spec, str(folder / "problem.zarr"), domain)
    found = lower_bound(store, _ALONE, Stages(silent), BoundRequest(seconds))
    return {
        "lower_bound_km": found.certified_km,
        "expected_km": max(found.lower_bound_km, found.certified_km),
        "stride": found.stride,
        "offsets": [found.offsets_used, found.offsets_total],
        "seconds": found.seconds,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
