"""The protocol: cases, repetitions and methods, as tasks; what is answered already is not asked again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from pydantic import ValidationError

from mdpext_dask.compute.executor import Executor, open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import ClusterError, MdpextError, SpecError, StoreError, first_line
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.files import scratch_in
from mdpext_dask.job.sections import CompareSection
from mdpext_dask.job.spec import JobSpec, first_complaint, with_overrides
from mdpext_dask.pipeline.memory import check_memory
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.outputs import check_counts, output_count
from mdpext_dask.reports.compare.answers import BOUND, Answers, Case, is_settled
from mdpext_dask.reports.compare.attempt import Request
from mdpext_dask.reports.compare.methods import OWN, chosen, own_method
from mdpext_dask.reports.compare.summary import CaseSummary, summarise_case

ALL = "all"
_ITSELF = "the job"
_ANSWERS = "answers"
# Tasks a worker, at least, so that none is idle for long at the end.
_TASKS_A_WORKER = 4
# Of the memory that is there, what constructions may hold.
_MEMORY_SHARE = 0.8
# More threads would make methods unequal, and a process that cannot be forked.
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


def cases_of(spec: JobSpec, names: Sequence[str] | None, methods: Sequence[str] | None) -> list[Case]:
    """Return the cases to compare on.

    Parameters
    ----------
    spec
        The job.
    names
        Of cases in ``[compare]``, or ``("all",)``; default: the job itself.
    methods
        Which methods; default: as ``[compare]`` says, or all.

    Raises
    ------
    SpecError
        If there is no such case or method, or a case is no job.
    """
    named = spec.compare.methods if methods is None else methods
    wanted, known = chosen(named), spec.compare.cases
    jobs = {_ITSELF: spec}
    if names is not None:
        if not names:
            raise SpecError("--cases: names none")
        for name in names:
            if name not in known and (name != ALL or not known):
                there = f"there are {', '.join(known)}" if known else "the job has none in [compare.cases]"
                raise SpecError(f"--cases: there is no case {name!r}; {there}")
        jobs = {name: _case(spec, name) for name in known if ALL in names or name in names}
    cases = []
    for name, job in jobs.items():
        own = own_method(job)
        more = (OWN,) if own == OWN and named is None else ()
        cases.append(Case(name, job, (*wanted, *more), own))
    return cases


def _case(spec: JobSpec, name: str) -> JobSpec:
    try:
        return with_overrides(spec, spec.compare.cases[name])
    except SpecError as error:
        raise SpecError(f"compare.cases: {name}: {error}") from None


def compare(
    spec: JobSpec,
    folder: Path,
    *,
    cases: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    repeats: int | None = None,
    limit_seconds: float | None = None,
    bound_seconds: float | None = None,
    workers: int | None = None,
    observer: Observer = silent,
) -> list[CaseSummary]:
    """Run every method on the same problems; return what came of it, case by case.

    Parameters
    ----------
    spec
        The job.
    folder
        Where answers are kept, which all workers must reach; what is there already is not done again.
    cases, methods
        See :func:`cases_of`.
    repeats, limit_seconds, bound_seconds
        Instead of those of ``[compare]``.
    workers
        Number of local processes, instead of the job's.
    observer
        Is told of progress.

    Raises
    ------
    SpecError, DataError
        If the job, or one of its cases, cannot be done; before any long work.
    StoreError
        If the folder cannot be written.
    ClusterError
        If the workers are lost.
    """
    given = {"repeats": repeats, "limit_seconds": limit_seconds, "bound_seconds": bound_seconds}
    settings = _settings(spec.compare, {key: value for key, value in given.items() if value is not None})
    found, stages = cases_of(spec, cases, methods), Stages(observer)
    facts = []
    with stages.stage("problem", len(found)):
        for case in found:
            facts.append(_facts(case))
            if settings.repeats > 1 and not case.draws:
                observer(Note(f"{case.name}: outputs and loss are given, so there is one problem only"))
    answers = Answers(_prepared(folder) / _ANSWERS)
    if any(True for _ in _open(found, answers, settings)):
        with scratch_in(folder.absolute()) as scratch, open_executor(spec.cluster, workers) as executor:
            requests = list(_requests(found, answers, scratch, settings, executor))
            with stages.stage("compare", len(requests)):
                for _ in stages.run(executor, "compare", attempt_all, [(one,) for one in requests]):
                    pass
    return [
        summarise_case(answers, case, fact, _repeats(case, settings), with_bound=settings.bound_seconds > 0)
        for case, fact in zip(found, facts, strict=True)
    ]


def _settings(section: CompareSection, given: dict[str, float]) -> CompareSection:
    try:
        return CompareSection.model_validate({**section.model_dump(), **given})
    except ValidationError as error:
        raise SpecError(f"compare: {first_complaint(error, CompareSection)}") from None


def _repeats(case: Case, settings: CompareSection) -> int:
    return settings.repeats if case.draws else 1


def _facts(case: Case) -> dict[str, object]:
    """Return the size of a case's problem; refuse what cannot be, before any long work."""
    spec = case.spec
    try:
        geometry = build_geometry(spec)
        check_counts(spec, geometry)
        check_memory(spec, geometry)
        outputs = output_count(spec, geometry)
    except MdpextError as error:
        raise type(error)(f"{case.name}: {error}") from None
    grid = geometry.grid
    return {
        "name": spec.job.name,
        "records": grid.records,
        "outputs": outputs,
        "seeds": grid.seeds,
        "cells": [grid.cells_x, grid.cells_y],
        "cell_km": grid.cell_km,
        "refine": list(grid.refine),
        "epsilon_per_km": spec.privacy.epsilon_per_km,
        "metric_p": spec.canonical()["domain"]["metric_p"],
    }


def _prepared(folder: Path) -> Path:
    """Make the folder, and try whether it can be written."""
    folder = folder.absolute()
    try:
        if (folder / "zarr.json").exists():
            raise StoreError(f"{folder}: is a Zarr store; choose another folder with --output")
        (folder / _ANSWERS).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {first_line(error)}") from None
    return folder


def _open(
    cases: list[Case], answers: Answers, settings: CompareSection
) -> Iterator[tuple[Case, int, list[str]]]:
    """Yield what has no answer yet, repetition by repetition: which methods, and the lower bound."""
    for case in cases:
        for repetition in range(_repeats(case, settings)):
            unanswered = []
            for method in (BOUND, *case.methods) if settings.bound_seconds else case.methods:
                limit = settings.bound_seconds if method == BOUND else settings.limit_seconds
                if not is_settled(answers.read(case, method, repetition), limit):
                    unanswered.append(method)
            if unanswered:
                yield case, repetition, unanswered


def _requests(
    cases: list[Case], answers: Answers, scratch: Path, settings: CompareSection, executor: Executor
) -> Iterator[Request]:
    """Yield what is to be asked, in parts that keep all workers busy."""
    repetitions = sum(_repeats(case, settings) for case in cases)
    parts = max(_TASKS_A_WORKER * executor.workers // repetitions, 1)
    memory = int(_MEMORY_SHARE * psutil.virtual_memory().available) // max(executor.workers, 1)
    for case, repetition, methods in _open(cases, answers, settings):
        for part in range(min(parts, len(methods))):
            yield Request(
                job=case.repetition(repetition).canonical(),
                answers={m: str(answers.path(case, m, repetition)) for m in methods[part::parts]},
                scratch=str(scratch),
                limit_seconds=settings.limit_seconds,
                bound_seconds=settings.bound_seconds,
                memory_bytes=memory,
                random_seed=repetition,
            )


def attempt_all(request: Request) -> None:
    """Answer a request in a process of its own, which may be forked as a worker may not.

    Raises
    ------
    ClusterError
        If the process ends before it has answered.
    """
    with tempfile.TemporaryDirectory(dir=request.scratch) as folder:
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-m", "mdpext_dask.reports.compare.attempt", str(asked), str(os.getpid())]
        process = subprocess.Popen(  # noqa: S603 our own interpreter and module
            command,
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
    if process.returncode != 0:
        last = (said.strip().splitlines() or ["no word of why"])[-1]
        raise ClusterError(f"compare: a process ended with {process.returncode}: {last}; run again to go on")
