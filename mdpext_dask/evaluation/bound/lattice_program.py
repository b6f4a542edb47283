"""What no mechanism can beat on one lattice of records: a linear program, and its dual as a proof.

    min Σ_x π(x) Σ_y M(y|x) c(x, y)   s.t.  M(y|x) ≤ exp(ε d(x, x')) M(y|x')

for pairs x, x' that are near each other: neighbours along axes and diagonals, and knight's moves. Every
ε-mDP mechanism keeps these rows and many more, so the optimum is at most its loss there, and every dual value
is at most the optimum. Rows bind only records that a mechanism has to have rows for. PROOF.md has the whole
argument (section 8).
"""

import math

from mdpext_dask.seed.interior_point import InverseSums, solve_program
from mdpext_dask.seed.record_program import ROUNDING, Lattice, LatticeProgram, LatticePromise
from mdpext_dask.seed.solve import one_blas_thread

# Relative duality gap to aim for: what a bound may miss of the optimum.
GAP = 1e-4
# Floor δ' of the program that is solved, over 1 / K; what it adds to the optimum is taken off again.
_FLOOR = 1e-8


def lattice_bound(
    lattice: Lattice,
    promise: LatticePromise,
    *,
    reach: int | None = None,
    gap: float = GAP,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
    deadline: float = math.inf,
) -> float:
    """Return what every mechanism that keeps the promise loses on a lattice at least, in km.

    Parameters
    ----------
    lattice
        The lattice.
    promise
        The promise.
    reach
        Over how many lines pairs reach that have rows; default: see :func:`reach_of`.
    gap
        Relative duality gap at which to stop; the bound holds whatever it comes to.
    threads, inverse_sums, deadline
        See :func:`mdpext_dask.seed.interior_point.solve_program`. Stopped at the deadline, the bound is what
        the best multipliers so far prove.

    Returns
    -------
    A dual value, corrected for the floor and rounded down; no less than the loss without any privacy.
    """
    lattice = lattice.cropped()
    free = lattice.free_km
    outputs = lattice.cost.shape[-1]
    if outputs == 1 or lattice.kept.size <= 1 or not lattice.cost.any():
        return free
    most = reach_of(promise.metric_p) if reach is None else reach
    reach = most if min(lattice.kept.shape) > 1 else 1
    posed = LatticeProgram.of(lattice, promise, reach, _FLOOR)
    duals = [-math.inf]
    with one_blas_thread():
        solve_program(
            posed.program,
            gap=gap,
            threads=threads,
            inverse_sums=inverse_sums,
            watcher=lambda _, dual: duals.append(dual),
            deadline=deadline,
        )
    # For every mechanism M of the lattice, (1 − K δ') M + δ' is one of the program. The multipliers of every
    # iterate prove a bound.
    best = max(dual for dual in duals if not math.isnan(dual))
    dual, uniform = posed.scale_km / outputs * best, _FLOOR / outputs * math.fsum(lattice.cost.ravel())
    rest = dual - uniform - ROUNDING * (abs(dual) + uniform)
    return max(rest / (1 - _FLOOR) * (1 - ROUNDING), free) if math.isfinite(rest) else free


def reach_of(metric_p: float) -> int:
    """Return over how many lines pairs reach that have rows: what is worth having for a metric.

    For p = 1 and p = ∞ distances add up along the eight directions to neighbours. For p = 2 a detour along
    them is up to 8.2 % longer than the way, with the knight's moves 2.7 %.
    """
    return 1 if metric_p == 1 or math.isinf(metric_p) else 2
