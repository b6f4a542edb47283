"""The seed LP with HiGHS: its interior-point method without crossover.

HiGHS stops within absolute tolerances, so its answer is only a proposal: statuses are checked, the
rows are repaired to keep every constraint exactly, and the dual bound is recomputed from the
multipliers with their signs enforced.
"""

import math

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.errors import SolverError
from mdpext_dask.seed.model import Array, SeedMechanism, SeedProblem, dual_bound_of, dual_part

# The thread count is fixed by the first solve of a process, so it goes first. One thread: the method is
# serial, and thread counts must not decide bytes.
_Options = dict[str, bool | float | str]
_OPTIONS: _Options = {
    "threads": 1,
    # Smaller coefficients are dropped, with a warning for a status: rows near the floor have them.
    "small_matrix_value": 1e-12,
}
_TOLERANCES = "primal_feasibility_tolerance", "dual_feasibility_tolerance", "ipm_optimality_tolerance"
_INTERIOR: _Options = {"solver": "ipm", "run_crossover": "off", **dict.fromkeys(_TOLERANCES, 1e-9)}
# The least that HiGHS accepts, so that a floor of 1e-6 is kept to a part in 10,000.
_SIMPLEX: _Options = {"solver": "simplex", "primal_feasibility_tolerance": 1e-10}
# HiGHS may find that a program has no solution before it knows whether it is bounded; ours are.
_NO_SOLUTION = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


# Columns, and values there.
Entries = tuple[NDArray[np.intp], Array]


class InfeasibleError(SolverError):
    """A linear program has no solution."""


class _SilentHighs(highspy.Highs):
    """HiGHS without its banner, which would break a machine-readable standard output.

    The constructor of :class:`highspy.Highs` enables callbacks, and that prints already (seen in 1.16),
    before printing can be turned off; this one initialises the base alone and turns it off first.
    """

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()
        _check(self.setOptionValue("output_flag", False), "turning output off")


def solve_highs(problem: SeedProblem) -> SeedMechanism:
    """Solve a seed LP.

    Raises
    ------
    SolverError
        If HiGHS does not report an optimum, or its answer cannot be repaired.
    """
    seeds, outputs = problem.cost.shape
    scale = float(np.abs(problem.cost).max()) or 1.0
    matrix = _constraint_matrix(problem)
    upper = np.zeros(matrix.shape[0])
    lower = np.full(matrix.shape[0], -highspy.kHighsInf)
    lower[-seeds:] = upper[-seeds:] = 1.0
    floor, most = (np.full(matrix.shape[1], bound) for bound in (problem.min_probability, np.inf))
    what = f"the seed LP ({seeds} seeds, {outputs} outputs)"
    cost = problem.cost.ravel() / scale
    rows, multipliers, iterations = solve_linear_program(what, cost, (floor, most), matrix, (lower, upper))
    mechanism = problem.repair(rows.reshape(seeds, outputs))
    dual = scale * _dual_bound(matrix, problem, scale, multipliers)
    return SeedMechanism(mechanism, problem.objective(mechanism), dual, "highs", iterations)


def _constraint_matrix(problem: SeedProblem) -> sparse.csr_array:
    """Return all rows of the LP: the budgets z_j − exp(β h) z_i ≤ 0, then the sums of the seeds' rows."""
    seeds, outputs = problem.cost.shape
    i, j, budget = problem.pairs()
    budget = np.broadcast_to(budget, (2, len(i), outputs))
    # Where exp(β h) ≥ 1/δ the row follows from δ ≤ z ≤ 1, and its huge coefficient would only do harm.
    direction, pair, output = np.nonzero(budget < -np.log(problem.min_probability))
    risen = np.where(direction == 0, j[pair], i[pair]) * outputs + output
    fallen = np.where(direction == 0, i[pair], j[pair]) * outputs + output
    growth = np.exp(budget[direction, pair, output])
    budgets = rows_of_two((risen, np.ones(len(pair))), (fallen, -growth), seeds * outputs)
    sums = sparse.kron(sparse.eye_array(seeds), np.ones((1, outputs)))
    return sparse.csr_array(sparse.vstack([budgets, sums]))


def rows_of_two(first: Entries, second: Entries, variables: int) -> sparse.csr_array:
    """Return rows with two entries each, given as their columns and their values, of shape (n,)."""
    count = len(first[0])
    columns, values = (np.concatenate(both) for both in zip(first, second, strict=True))
    return sparse.csr_array((values, (np.tile(np.arange(count), 2), columns)), shape=(count, variables))


def solve_linear_program(
    what: str,
    cost: Array,
    bounds: tuple[Array, Array],
    matrix: sparse.csr_array,
    row_bounds: tuple[Array, Array],
    *,
    simplex: bool = False,
    seconds: float = math.inf,
) -> tuple[Array, Array, int]:
    """Minimise cost·z subject to bounds on z and on matrix z.

    Parameters
    ----------
    what
        What to call it in an error.
    cost
        float64 of shape (n,).
    bounds
        Lower and upper bounds of z, each of shape (n,); may be infinite.
    matrix
        Of shape (m, n).
    row_bounds
        Lower and upper bounds of matrix z, each of shape (m,).
    simplex
        With the simplex method: to a vertex, and it sees that there is no solution. It suits small programs.
    seconds
        When to give up.

    Returns
    -------
    z, multipliers of the rows, iterations.

    Raises
    ------
    InfeasibleError
        If there is no solution.
    SolverError
        If HiGHS does not report an optimum.
    """
    if seconds <= 0:
        raise SolverError(f"no time is left to solve {what} within the limit")
    solver = _SilentHighs()
    for option, value in {**_OPTIONS, **(_SIMPLEX if simplex else _INTERIOR), "time_limit": seconds}.items():
        _check(solver.setOptionValue(option, value), f"option {option}")

    count, variables = matrix.shape
    program = highspy.HighsLp()
    program.num_row_, program.num_col_ = count, variables
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = bounds
    program.row_lower_, program.row_upper_ = row_bounds
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = matrix.indptr
    program.a_matrix_.index_ = matrix.indices
    program.a_matrix_.value_ = matrix.data

    _check(solver.passModel(program), "passing the model")
    outcome, status = solver.run(), solver.getModelStatus()
    if status == highspy.HighsModelStatus.kTimeLimit:
        raise SolverError(f"HiGHS did not solve {what} within {seconds:.3g} s")
    _check(outcome, "solving")
    if status != highspy.HighsModelStatus.kOptimal:
        kind = InfeasibleError if status in _NO_SOLUTION else SolverError
        raise kind(f"HiGHS ended {what} with status '{solver.modelStatusToString(status)}'")
    solution, info = solver.getSolution(), solver.getInfo()
    iterations = int(info.simplex_iteration_count if simplex else info.ipm_iteration_count)
    return np.array(solution.col_value), np.array(solution.row_dual), iterations


def _check(status: highspy.HighsStatus, what: str) -> None:
    # A warning is not an answer either: HiGHS returns one with an objective of 0.
    if status != highspy.HighsStatus.kOk:
        raise SolverError(f"HiGHS: {what} failed with status {status}")


def _dual_bound(matrix: sparse.csr_array, problem: SeedProblem, scale: float, multipliers: Array) -> float:
    """Return a lower bound on the optimum of the scaled LP that holds for any multipliers."""
    seeds = problem.cost.shape[0]
    y = multipliers.copy()
    y[:-seeds] = np.minimum(y[:-seeds], 0)
    cost = problem.cost.ravel() / scale
    reduced, sizes = cost - matrix.T @ y, np.abs(cost) + abs(matrix).T @ np.abs(y)
    r, size = (values.reshape(problem.cost.shape).T for values in (reduced, sizes))
    part = dual_part(r, size, np.array(problem.min_probability), np.array(1.0))
    return dual_bound_of([part], y[-seeds:], 1.0)
