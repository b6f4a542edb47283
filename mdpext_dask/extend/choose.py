"""Operators by the name that a job gives them, and whether what they promise is enough for its budgets."""

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import MdpextError, SpecError, first_line
from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.mcshane_whitney import McShaneWhitney
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.job.sections import (
    CELL_PROGRAMS,
    FITTING,
    LOG_CONVEX,
    MCSHANE_WHITNEY,
    METHODS,
    ExtensionSection,
)
from mdpext_dask.problem.grid import Grid
from mdpext_dask.seed.budget import AxisBudgets, bound_budgets, candidate_splits, even_split

# `half` gives half of ε to scores, so it needs a promise of no more than this.
_HALF = 2.0
# ε h_0, how much log z may change by from seed to seed, from which on seeds are coarse. There, cell programs
# lose a tenth less than interpolating, which loses more than planar Laplace noise (Rome, at 2.4 to 7.2).
COARSE_SEEDS = 2.0
# Of ε: budgets below this are none.
_LEAST_SHARE = 1e-6
_TRUSTED: set[str] = set()


def operator_of(extension: ExtensionSection) -> Operator:
    """Return the operator of a job.

    Raises
    ------
    SpecError
        If an operator of the user's own cannot be imported, or is none.
    """
    one_stage = extension.stages == "one"
    if extension.method == MCSHANE_WHITNEY:
        return McShaneWhitney(one_stage=one_stage)
    if is_own(extension):
        module, _, attribute = extension.method.partition(":")
        with _told(f"{extension.method}: cannot be made where the tasks run"):
            found = getattr(importlib.import_module(module), attribute)
            # Nothing is called that is not meant for this.
            if isinstance(found, type) and issubclass(found, Operator):
                return found()
        what = "is not a subclass of mdpext_dask.extend.operator.Operator"
        raise SpecError(f"extension.method: {extension.method}: {what}")
    # Its scores are the same however many stages there are. Cell programs start from it.
    return LogConvex()


def trust_operators(*names: str) -> None:
    """Let stores use these operators of the user's own from now on, in this process and its workers.

    The operator of a job that is run is trusted as the job is. A store may come from anybody, and reading it
    imports no code that its reader has not named.

    Parameters
    ----------
    names
        Each as ``"module:Class"``; operators of this package need no trust.

    Raises
    ------
    SpecError
        If it is none of these.
    """
    for name in names:
        if ":" not in name and name not in (FITTING, *METHODS):
            raise SpecError(f"--operator: must be module:Class, got {name!r}")
    _TRUSTED.update(name for name in names if ":" in name)


def trusted_operators() -> frozenset[str]:
    """Return the operators that stores may use; see :func:`trust_operators`."""
    return frozenset(_TRUSTED)


def is_own(extension: ExtensionSection) -> bool:
    """Whether a job's operator is one of the user's own."""
    return ":" in extension.method


def seed_programs(epsilon_per_km: float, grid: Grid) -> str:
    """Return the seed programs that ``"auto"`` may compare with noise: cell programs where seeds are coarse.

    Parameters
    ----------
    epsilon_per_km
        ε, in 1/km.
    grid
        The records and seeds.
    """
    coarse = epsilon_per_km * grid.cell_km >= COARSE_SEEDS
    return CELL_PROGRAMS if coarse and max(grid.refine) > 1 else LOG_CONVEX


def promise(operator: Operator, split: tuple[float, float], cell_km: float) -> float:
    """Return what an operator promises under half of ε: the larger steepening of both axes.

    Parameters
    ----------
    operator
        The operator.
    split
        (ε_1, ε_2), in 1/km.
    cell_km
        h_0, in km.

    Returns
    -------
    At least 1; infinity if it promises nothing.

    Raises
    ------
    SpecError
        If it answers with anything else, or fails.
    """
    first, second = (epsilon / _HALF * cell_km for epsilon in split)
    with _told(f"{_named(operator)}: steepening fails"):
        promised = [float(operator.steepening(*deltas)) for deltas in ((first, second), (second, first))]
    for value in promised:
        # NaN included. A rule that gives the corners back steepens what is linear by 1.
        if not value >= 1:
            raise SpecError(
                f"extension.method: {_named(operator)}: steepening must be at least 1, but is {value:g}"
            )
    return max(promised)


def closed_form(operator: Operator, split: tuple[float, float], cell_km: float) -> AxisBudgets | None:
    """Return the largest budgets that an operator's promise allows; None if it promises nothing.

    Parameters
    ----------
    operator, split, cell_km
        See :func:`promise`.

    Raises
    ------
    SpecError
        If its promise fails, or allows none.
    """
    if math.isinf(promise(operator, split, cell_km)):
        return None
    with _told(f"{_named(operator)}: steepening fails"):
        found = bound_budgets(split, cell_km, operator.steepening)
    if not min(found.beta) > _LEAST_SHARE * min(split):
        raise SpecError(
            f"extension.method: {_named(operator)}: steepening allows no budgets; it must grow with them"
        )
    return found


def checked_rows(operator: Operator, corners: Corners) -> NDArray[np.float32]:
    """Return the rows of an operator of the user's own, which may answer with anything.

    Raises
    ------
    SpecError
        If it fails, or answers with something else than rows.
    """
    with _told(f"{_named(operator)}: fails"):
        rows = operator.rows(corners)
    factor = math.prod(corners.refine)
    east, north, outputs = corners.scores.shape
    shape = ((east - 1) * factor + 1, (north - 1) * factor + 1, outputs)
    answered = getattr(rows, "shape", None), getattr(rows, "dtype", type(rows).__name__)
    if answered != (shape, np.float32):
        raise SpecError(
            f"extension.method: {_named(operator)}: rows are {answered[1]} of shape {answered[0]}, not "
            f"float32 of shape {shape}"
        )
    return rows


def check_operator(
    extension: ExtensionSection, budget: str, design_epsilon: float, grid: Grid, outputs: int, p: float
) -> None:
    """Refuse an operator that does not work, or whose promise is not enough for a job's budgets.

    Parameters
    ----------
    extension
        Section of the job.
    budget
        ``"half"``, ``"bound"`` or ``"certified"``.
    design_epsilon
        ε, in 1/km.
    grid, outputs
        The grid and the number of outputs.
    p
        Exponent of the metric.

    Raises
    ------
    SpecError
        If it cannot be imported, is no operator, promises too little, or fails on a source cell.
    """
    operator, cell_km = operator_of(extension), grid.cell_km
    split = even_split(design_epsilon, p)
    promised = closed_form(operator, split, cell_km)
    if is_own(extension):
        refine = (grid.factor,) if extension.stages == "one" else grid.refine
        checked_rows(operator, _corners_of_a_cell(outputs, min(split) / _HALF * cell_km, refine))
    if budget == "bound" and promised is None:
        raise SpecError(
            f'privacy.budget: "bound" needs an operator that promises how much it steepens slopes, and '
            f'{_named(operator)} promises nothing; use "certified"'
        )
    if budget != "half":
        return
    worst = max(promise(operator, split, cell_km) for split in candidate_splits(design_epsilon, p))
    if worst > _HALF:
        instead = '"certified"' if promised is None else '"bound" or "certified"'
        raise SpecError(
            f'privacy.budget: "half" needs an operator that steepens slopes at most {_HALF:g}-fold, and '
            f"{_named(operator)} promises {worst:.4g}; use {instead}"
        )


def _corners_of_a_cell(outputs: int, budget: float, refine: tuple[int, ...]) -> Corners:
    """Return the corners of one source cell with some scores that keep a budget."""
    position = np.add.outer(np.add.outer(np.arange(2), 2 * np.arange(2)), np.arange(outputs))
    scores = min(budget, 1.0) / 10 * (position % 3)
    scores = scores - logarithm(np.add.reduce(exponential(scores), axis=-1, keepdims=True))
    return Corners(scores, np.full((2, 1, 2, 1), budget), np.full((2, 2, 1, 1), budget), refine)


def _named(operator: Operator) -> str:
    return f"{type(operator).__module__}:{type(operator).__qualname__}"


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise whatever code of the user's own raises as one line of error, but for our errors and memory."""
    try:
        yield
    except (MdpextError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(f"extension.method: {what}: {type(error).__name__}: {first_line(error)}") from error
