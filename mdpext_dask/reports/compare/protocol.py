"""The protocol: a work item for every case, repetition and method that has no answer yet."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from mdpext_dask.compute.executor import open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import MdpextError, SpecError, StoreError, first_line
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.files import scratch_in
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import CompareSection
from mdpext_dask.job.spec import JobSpec, first_complaint, with_overrides
from mdpext_dask.pipeline.method_choice import plan_method
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.outputs import check_counts, output_count
from mdpext_dask.problem.plausible import notes_on_epsilon
from mdpext_dask.reports.compare.answers import BOUND, ITSELF, Case, is_settled, read_answer
from mdpext_dask.reports.compare.attempt import Request, attempt
from mdpext_dask.reports.compare.methods import OWN, chosen, own_method
from mdpext_dask.reports.compare.summary import CaseSummary, summarise_case

ALL = "all"
_ANSWERS = "answers"
# Share of the available memory that constructions may hold.
_MEMORY_SHARE = 0.8


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
    jobs = {ITSELF: spec}
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
    overwrite: bool = False,
    workers: int | None = None,
    observer: Observer = silent,
) -> list[CaseSummary]:
    """Run every method on the same problems; return a summary of each case.

    Parameters
    ----------
    spec
        The job.
    folder
        Where answers are kept, which all workers must reach; answers that are there are reused.
    cases, methods
        See :func:`cases_of`.
    repeats, limit_seconds, bound_seconds
        Instead of those of ``[compare]``.
    overwrite
        Whether the folder may hold something else than an earlier comparison, of which files with the names
        of the results are replaced.
    workers
        Number of local processes; default: the job's.
    observer
        Is told of progress.

    Raises
    ------
    SpecError, DataError
        If the job, or one of its cases, cannot be done; before any long work.
    StoreError
        If the folder holds something else, or cannot be written.
    ClusterError
        If the workers are lost.
    """
    given = {"repeats": repeats, "limit_seconds": limit_seconds, "bound_seconds": bound_seconds}
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        settings = CompareSection.model_validate({**spec.compare.model_dump(), **changes})
    except ValidationError as error:
        key, _, said = first_complaint(error, CompareSection).partition(":")
        option = "limit" if key == "limit_seconds" else key.replace("_", "-")
        raise SpecError(f"--{option}:{said}") from None
    found, stages = cases_of(spec, cases, methods), Stages(observer)
    tell_beyond(observer, spec, *(case.spec for case in found))
    facts = []
    with stages.stage("problem", len(found)):
        for case in found:
            facts.append(facts_of(case.name, case.spec))
            if settings.repeats > 1 and not case.draws:
                observer(Note(f"{case.name}: outputs and loss are given, so there is one problem only"))
    for note in dict.fromkeys(note for fact in facts for note in fact["notes"]):
        observer(Note(note))
    answers = prepared(folder, overwrite, "comparison") / _ANSWERS
    if unanswered := _unanswered(found, answers, settings):
        with scratch_in(folder.absolute()) as scratch, open_executor(spec.cluster, workers) as executor:
            memory = int(_MEMORY_SHARE * psutil.virtual_memory().available) // max(executor.workers, 1)
            requests = [
                (
                    Request(
                        method=method,
                        job=case.repetition(repetition).canonical(),
                        answer=str(case.answer_path(answers, method, repetition)),
                        scratch=str(scratch),
                        limit_seconds=limit,
                        memory_bytes=memory,
                        random_seed=repetition,
                    ),
                )
                for case, repetition, method, limit in unanswered
            ]
            with stages.stage("compare", len(requests)):
                stages.gather(executor, "compare", attempt, requests)
    return [
        summarise_case(answers, case, fact, _repeats(case, settings), with_bound=settings.bound_seconds > 0)
        for case, fact in zip(found, facts, strict=True)
    ]


def _repeats(case: Case, settings: CompareSection) -> int:
    return settings.repeats if case.draws else 1


def facts_of(name: str, spec: JobSpec) -> dict[str, Any]:
    """Return the size of a job's problem; refuse an impossible one, by its name, before any long work."""
    try:
        geometry = build_geometry(spec)
        check_counts(spec, geometry)
        plan_method(spec, geometry)
        outputs = output_count(spec, geometry)
    except MdpextError as error:
        raise type(error)(f"{name}: {error}") from None
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
        "notes": list(geometry.notes + notes_on_epsilon(spec.privacy.epsilon_per_km, grid)),
    }


def prepared(folder: Path, overwrite: bool, of: str) -> Path:
    """Make the folder of a comparison, or of what else keeps answers, and check that it can be written."""
    folder = folder.absolute()
    try:
        if folder.is_file():
            raise StoreError(f"{folder}: is a file; name a folder with --output")
        if (folder / "zarr.json").exists():
            raise StoreError(f"{folder}: is a Zarr store; choose another folder with --output")
        ours = overwrite or (folder / _ANSWERS).is_dir()
        if folder.is_dir() and not ours and any(folder.iterdir()):
            raise StoreError(
                f"{folder}: exists already, and is no folder of an earlier {of}; choose another with "
                "--output, or write into it with --overwrite"
            )
        (folder / _ANSWERS).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {first_line(error)}") from None
    return folder


def _unanswered(
    cases: list[Case], answers: Path, settings: CompareSection
) -> list[tuple[Case, int, str, float]]:
    """Return what has no answer yet: case, repetition, method or lower bound, and its time limit in s."""
    found = []
    for case in cases:
        limits = dict.fromkeys(case.methods, settings.limit_seconds)
        if settings.bound_seconds:
            limits = {BOUND: settings.bound_seconds, **limits}
        for repetition in range(_repeats(case, settings)):
            for method, limit in limits.items():
                answer = read_answer(case.answer_path(answers, method, repetition))
                if not is_settled(answer, limit):
                    found.append((case, repetition, method, limit))
    return found
