"""Methods followed by the optimal remap of their outputs (:mod:`mdpext_dask.store.remap`)."""

import time

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.em import exponential_mechanism
from mdpext_dask.evaluation.baselines.laplace import planar_laplace
from mdpext_dask.evaluation.baselines.problem import Array, BaselineMechanism, Method, Problem, RowsOf, strips
from mdpext_dask.store.remap import best_remap, merge_columns


def em_remap(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the exponential mechanism with its optimal remap; raises as :func:`remapped` and it do."""
    return remapped(exponential_mechanism, problem, seconds)


def laplace_remap(problem: Problem, seconds: float) -> BaselineMechanism:
    """Return the planar Laplace mechanism with its optimal remap; raises as :func:`remapped` and it do."""
    return remapped(planar_laplace, problem, seconds)


def remapped(method: Method, problem: Problem, seconds: float) -> BaselineMechanism:
    """Return what a method makes, followed by the optimal remap for the problem's prior and loss.

    Post-processing keeps what the method promises. Outputs that are never reported have columns of
    zeros, the same for every record.

    Parameters
    ----------
    method
        The method; must make rows.
    problem
        The problem.
    seconds
        How long both may take together.

    Raises
    ------
    SolverError
        If the method fails or has no rows, or there was not enough time.
    """
    deadline = time.perf_counter() + seconds
    mechanism = method(problem, seconds)
    rows = mechanism.rows
    if rows is None:
        raise SolverError("remap: the method has no rows over the outputs")
    costs = remap_costs(problem, rows, deadline)
    table = best_remap(costs)
    own = np.arange(problem.outputs)
    return BaselineMechanism(
        rows=lambda east: merge_columns(rows(east), table),
        guarantee=mechanism.guarantee,
        note=f"{mechanism.note} The remap is post-processing.",
        facts={
            **mechanism.facts,
            "loss_km_before_remap": float(costs[own, own].sum()),
            "outputs_moved": int((table != own).sum()),
            "outputs_reported": len(np.unique(table)),
        },
    )


def remap_costs(problem: Problem, rows: RowsOf, deadline: float) -> NDArray[np.float64]:
    """Return G[y, y'] = Σ_x π(x) M(y|x) c(x, y'), float64 of shape (K, K), in km, strip by strip.

    Parameters
    ----------
    problem
        The problem.
    rows
        M.
    deadline
        When to give up, by :func:`time.perf_counter`.

    Raises
    ------
    SolverError
        If the deadline passes.
    """
    costs = np.zeros((problem.outputs, problem.outputs))
    for east in strips(problem):
        prior = problem.prior[east].ravel()
        used = np.flatnonzero(prior)
        if not len(used):
            continue
        if time.perf_counter() > deadline:
            raise SolverError("remap: not all records could be gone through in time")
        probability: Array = rows(east).reshape(-1, problem.outputs)[used]
        loss = problem.loss.rows(problem.records_xy_km(east)[used])
        costs += (probability * prior[used, None]).T @ loss
    return costs
