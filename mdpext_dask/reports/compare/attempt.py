"""One repetition: the problem is made once, then each method on it, in a process of its own.

Run as ``python -m mdpext_dask.reports.compare.attempt REQUEST.json PARENT``, with one thread: an arithmetic
library that uses more would make the methods unequal, and could not be forked.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.methods import compare_all
from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.auditors.subject import plain_subject, store_subject
from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import DataError
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem, strips
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, lower_bound
from mdpext_dask.events import silent
from mdpext_dask.job.spec import JobSpec, json_number, parse_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.pipeline.run import complete
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.reports.compare.answers import BOUND, given_up, write_answer
from mdpext_dask.reports.compare.children import Outcome, in_child
from mdpext_dask.reports.compare.methods import entry_of
from mdpext_dask.store.mechanism_store import MechanismStore

_ROWS, _STORE = "rows.npy", "mechanism.zarr"


@dataclass(frozen=True)
class Request:
    """What one process is asked for.

    Parameters
    ----------
    job
        The job of this repetition, as plain JSON values.
    answers
        By method, the file its answer goes to.
    scratch
        A folder for what is made.
    limit_seconds
        What one construction may take.
    bound_seconds
        What the lower bound may take.
    memory_bytes
        What one construction may hold.
    random_seed
        For methods that draw anything.
    """

    job: dict[str, Any]
    answers: dict[str, str]
    scratch: str
    limit_seconds: float
    bound_seconds: float
    memory_bytes: int
    random_seed: int


def serve(request: Request, parent: int) -> None:
    """Do all that is asked for, while the process that asks is there; every answer is written at once."""
    spec = parse_job(request.job, source="job")
    domain = build_domain(spec)
    for name, answer in request.answers.items():
        path = Path(answer)
        reason = given_up(path, request.limit_seconds)
        if reason is not None and name != BOUND:
            limits = {"limited": True, "limit_seconds": request.limit_seconds}
            write_answer(path, {"completed": False, "reason": reason, **limits})
            continue
        with tempfile.TemporaryDirectory(dir=request.scratch) as folder:
            values = _attempt(name, spec, domain, request, Path(folder), partial(in_child, parent=parent))
        write_answer(path, values)


def _attempt(
    name: str,
    spec: JobSpec,
    domain: Domain,
    request: Request,
    folder: Path,
    ended: Callable[..., Outcome],
) -> dict[str, Any]:
    """Return what is to be told of one method, whatever became of it."""
    if name == BOUND:
        bound = partial(_bound, spec, domain, folder, request.bound_seconds)
        # The time is the bound's own affair: it takes what fits.
        given = dict.fromkeys(("given_seconds", "limit_seconds"), request.bound_seconds)
        return _told(ended(bound, folder / "answer.json"), given)
    work = partial(_construct, name, spec, domain, folder, request)
    made = ended(work, folder / "made.json", seconds=request.limit_seconds, memory_bytes=request.memory_bytes)
    if made.values is None:
        return _told(made, {"limit_seconds": request.limit_seconds})
    judged = ended(partial(_judge, spec, domain, folder), folder / "judged.json")
    told = {**made.values, "seconds": made.seconds}
    if entry_of(name).spends_time:
        told["given_seconds"] = request.limit_seconds
    return _told(judged, told)


def _alone() -> InlineExecutor:
    """Return what runs with one thread, as all methods do: seconds are those of one processor for each."""
    return InlineExecutor(threads=1)


def _told(outcome: Outcome, before: dict[str, Any]) -> dict[str, Any]:
    completed = outcome.values is not None
    told = {"completed": completed, "reason": outcome.reason, **before, **(outcome.values or {})}
    if not completed:
        told |= {"limited": outcome.limited, "passing": outcome.passing}
    return told


def _construct(name: str, spec: JobSpec, domain: Domain, folder: Path, request: Request) -> dict[str, Any]:
    """Make a mechanism, as a store or as rows; return what it promises."""
    entry = entry_of(name)
    if entry.made_by is None:
        job = entry.job(spec)
        store = create(job, str(folder / _STORE), domain)
        complete(store, _alone(), Stages(silent))
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
    """
    assert made.rows is not None  # the caller has looked
    columns, along = problem.grid.shape
    stored: NDArray[np.float64] | None = None
    for strip in strips(problem):
        rows = made.rows(strip)
        if stored is None:
            shape = (columns * along, problem.outputs)
            stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=shape)
        if not (np.isfinite(rows).all() and (rows >= 0).all()):
            raise DataError("the rows hold numbers that are no probabilities")
        stored[strip.start * along : strip.stop * along] = rows.reshape(-1, problem.outputs)


def _judge(spec: JobSpec, domain: Domain, folder: Path) -> dict[str, Any]:
    """Return the loss of what was made, and what a strict audit of every triple says."""
    stages, executor = Stages(silent), _alone()
    problem = Problem.of_domain(spec, domain)
    if (folder / _STORE).exists():
        store = MechanismStore.open(str(folder / _STORE))
        report = compare_all(store_subject(store), executor, stages)
        return {"loss_km": store.attributes["loss_km"], **_audited(report)}
    if not (folder / _ROWS).exists():
        return {"epsilon_audited": None, "violation_ratio": None, "verdict": "not audited"}
    rows = np.load(folder / _ROWS, mmap_mode="r")
    points = problem.records_xy_km(slice(None))
    audited = plain_subject(folder / _ROWS, points, problem.epsilon_per_km, problem.metric_p, 0.0)
    with audited as subject:
        report = compare_all(subject, executor, stages)
    return {"loss_km": expected_loss(problem, rows), **_audited(report)}


def _audited(report: AuditReport) -> dict[str, Any]:
    return {
        "epsilon_audited": json_number(report.epsilon),
        "violation_ratio": report.violation_ratio,
        "verdict": report.verdict,
        "audit_seconds": report.seconds,
    }


def expected_loss(problem: Problem, rows: NDArray[np.float64]) -> float:
    """Return UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y) in km.

    Parameters
    ----------
    problem
        The problem.
    rows
        M, float64 of shape (records, K), north fastest.
    """
    along = problem.grid.shape[1]
    total = 0.0
    for strip in strips(problem):
        prior = problem.prior[strip].ravel()
        used = np.flatnonzero(prior)
        if len(used) == 0:
            continue
        part = rows[strip.start * along : strip.stop * along][used]
        loss = problem.loss.rows(problem.records_xy_km(strip)[used])
        expected = (part * loss).sum(axis=1) / part.sum(axis=1)
        total += float(prior[used] @ expected)
    return total


def _bound(spec: JobSpec, domain: Domain, folder: Path, seconds: float) -> dict[str, Any]:
    """Return what no mechanism can beat, and what more a random part of the lattices leads to expect."""
    store = create(spec, str(folder / "problem.zarr"), domain)
    found = lower_bound(store, _alone(), Stages(silent), BoundRequest(seconds))
    return {
        "lower_bound_km": found.certified_km,
        "expected_km": max(found.lower_bound_km, found.certified_km),
        "stride": found.stride,
        "offsets": [found.offsets_used, found.offsets_total],
        "seconds": found.seconds,
    }


def main(arguments: list[str]) -> None:
    """Answer one request."""
    with contextlib.redirect_stdout(sys.stderr):
        serve(Request(**json.loads(Path(arguments[0]).read_text(encoding="utf-8"))), int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
