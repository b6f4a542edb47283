"""Which solver, and what happens when it falls short."""

from threadpoolctl import threadpool_limits

from mdpext_dask.errors import SolverError
from mdpext_dask.seed.highs import solve_highs
from mdpext_dask.seed.interior_point import InverseSums, solve_interior_point
from mdpext_dask.seed.model import SeedMechanism, SeedProblem

# Relative duality gap to aim for, and the largest that is still an answer.
GAP = 1e-6
_LARGEST_GAP = 1e-3


def one_blas_thread() -> threadpool_limits:
    """Return a context in which BLAS uses one thread: their number must not decide bytes, ours does not."""
    return threadpool_limits(limits=1, user_api="blas")


def solve_seed_problem(
    problem: SeedProblem,
    solver: str = "auto",
    gap: float = GAP,
    *,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> SeedMechanism:
    """Solve a seed LP with the structured interior-point method or with HiGHS.

    Parameters
    ----------
    problem
        The LP.
    solver
        ``"structured"``, ``"highs"``, or ``"auto"``: the structured method, and HiGHS where that falls short.
    gap
        Relative duality gap to aim for.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.

    Returns
    -------
    The solution; its `solver` says which solver found it.

    Raises
    ------
    SolverError
        If no solver gets within a relative gap of 1e-3.
    """
    if solver == "highs":
        return solve_highs(problem)
    with one_blas_thread():
        try:
            solved = solve_interior_point(problem, gap=gap, threads=threads, inverse_sums=inverse_sums)
            if solved.gap <= _LARGEST_GAP:
                return solved
            failure = f"stopped at a relative gap of {solved.gap:.1e}"
        except SolverError as error:
            failure = str(error)
    if solver == "structured":
        raise SolverError(f'the structured solver {failure}; use solver = "auto" or "highs"')
    return solve_highs(problem)
