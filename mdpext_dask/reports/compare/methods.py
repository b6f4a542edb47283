"""The methods to compare: their names, and the functions that make them."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.baselines.problem import Method
from mdpext_dask.job.spec import JobSpec, parse_job

NOISE, PROGRAM, INTERPOLATION = "predefined noise", "linear program", "interpolation"
PUBLISHED, OURS = "as published", "ours"
# The row of a job whose settings match no method below.
OWN = "job"


@dataclass(frozen=True)
class Entry:
    """One method.

    Parameters
    ----------
    title
        Name in a table.
    family
        Kind of method.
    made_by
        ``"module:function"`` in :mod:`mdpext_dask.evaluation.baselines`; or else
    settings
        keys to set in a job, by section; the job's store is then the mechanism.
    spends_time
        Whether the result depends on the time limit.
    """

    title: str
    family: str
    made_by: str | None = None
    settings: dict[str, dict[str, str | None]] = field(default_factory=dict)
    spends_time: bool = False

    def function(self) -> Method:
        """Return the function that makes it; imported late, because methods need different libraries."""
        assert self.made_by is not None  # callers ask for stores first
        module, name = self.made_by.split(":")
        return cast(Method, getattr(import_module(f"mdpext_dask.evaluation.baselines.{module}"), name))

    def job(self, spec: JobSpec) -> JobSpec:
        """Return the job that makes it as a store."""
        return parse_job(with_settings(spec.canonical(), self.settings), source=self.title)


def with_settings(document: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a job in plain JSON values with some keys replaced."""
    return {name: {**section, **settings.get(name, {})} for name, section in document.items()}


def _extension(method: str, stages: str, budget: str) -> dict[str, dict[str, str | None]]:
    extension = {"method": method, "stages": stages, "seconds": None}
    return {"extension": extension, "privacy": {"budget": budget}}


METHODS = {
    "em": Entry("EM", NOISE, "noise:exponential_mechanism"),
    "laplace": Entry("planar Laplace, nearest output", NOISE, "noise:planar_laplace"),
    "laplace-roads": Entry(
        "planar Laplace, nearest road node", NOISE, "noise:continuous_laplace", spends_time=True
    ),
    "em-remap": Entry("EM, remapped", NOISE, "noise:em_remap"),
    "laplace-remap": Entry("planar Laplace, remapped", NOISE, "noise:laplace_remap"),
    "laplace-fine": Entry("planar Laplace on fine cells, remapped", NOISE, "fine_noise:laplace_fine"),
    "lp": Entry("LP, all pairs", PROGRAM, "lp:full_lp"),
    "lp-a": Entry("LP-A, coarse grid", PROGRAM, "lp:coarse_lp"),
    "copt": Entry("COPT", PROGRAM, "copt:const_opt"),
    "panda-e": Entry("PAnDA-e", PROGRAM, "panda:panda_exponential", spends_time=True),
    "panda-p": Entry("PAnDA-p", PROGRAM, "panda:panda_power_law", spends_time=True),
    "panda-l": Entry("PAnDA-l", PROGRAM, "panda:panda_logistic", spends_time=True),
    "aipo": Entry("AIPO", INTERPOLATION, settings=_extension("log-convex", "one", "half")),
    "mw": Entry("MW", INTERPOLATION, settings=_extension("mcshane-whitney", "one", "half")),
    "mlaet-m-published": Entry("MLaEt-M, as published", PUBLISHED, "published:published_mcshane_whitney"),
    "mlaet-o-published": Entry("MLaEt-O, as published", PUBLISHED, "published:published_cell_programs"),
    "mlaet-a": Entry("MLaEt-A", OURS, settings=_extension("log-convex", "levels", "certified")),
    "mlaet-m": Entry("MLaEt-M", OURS, settings=_extension("mcshane-whitney", "levels", "certified")),
    "mlaet-o": Entry("MLaEt-O", OURS, settings=_extension("cell-lp", "levels", "certified")),
    "records": Entry("program over all records", OURS, settings=_extension("records", "levels", "certified")),
    "windows": Entry("programs over windows", OURS, settings=_extension("windows", "levels", "certified")),
}


def chosen(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of methods, in the order of the table; default: all.

    Raises
    ------
    SpecError
        If there is no such method, or none is named.
    """
    if names is None:
        return tuple(METHODS)
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(METHODS)}"
            raise SpecError(f"--methods: there is no method {name!r}{hint}")
    if not names:
        raise SpecError("--methods: names none")
    return tuple(name for name in METHODS if name in names)


def own_method(spec: JobSpec) -> str:
    """Return which of our methods a job's own settings make; if none, :data:`OWN`."""
    ours = (name for name, entry in METHODS.items() if entry.made_by is None and entry.job(spec) == spec)
    return next(ours, OWN)


def entry_of(name: str) -> Entry:
    """Return a method by name."""
    return Entry("the job as it is", OURS) if name == OWN else METHODS[name]
