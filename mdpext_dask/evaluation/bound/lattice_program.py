"""What no mechanism can beat on one lattice of records: a linear program, and its dual as a proof.

    min Σ_x π(x) Σ_y M(y|x) c(x, y)   s.t.  M(y|x) ≤ exp(ε d(x, x')) M(y|x')

for pairs x, x' that are near each other: neighbours along axes and diagonals, and knight's moves. Every
ε-mDP mechanism keeps these rows and many more, so the optimum is at most its loss there, and every dual value
is at most the optimum. Rows bind only records that a mechanism has to have rows for. PROOF.md has the whole
argument (section 8).
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.seed.block_tridiagonal import Direction, ends
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, vector_norm
from mdpext_dask.seed.columns import GridProgram
from mdpext_dask.seed.grid_rows import PairRows, directions
from mdpext_dask.seed.interior_point import InverseSums, by_output, solve_program
from mdpext_dask.seed.solve import one_blas_thread

Array = NDArray[np.float64]

# Relative duality gap to aim for: what a bound may miss of the optimum.
GAP = 1e-4
# Floor δ' of the program that is solved, over 1 / K; what it adds to the optimum is taken off again.
_FLOOR = 1e-8
# What an exponential function and a product may be wrong by, and costs that are products; with a margin.
_ROUNDING = 16 * sys.float_info.epsilon


@dataclass(frozen=True)
class LatticePromise:
    """How fast probabilities may grow between records.

    Parameters
    ----------
    epsilon_per_km
        ε, in 1/km, for the distance that is meant.
    metric_p
        Exponent p of the metric.
    allowance_km
        By how much the distance that is meant may exceed the one in the plane, in km.
    """

    epsilon_per_km: float
    metric_p: float
    allowance_km: float = 0.0

    def growth(self, x_km: float, y_km: float) -> float:
        """Return exp(ε d) for records so far apart along the axes, rounded upward."""
        apart = vector_norm(x_km, y_km, self.metric_p) * (1 + NORM_RELATIVE_ERROR) + self.allowance_km
        exponent = self.epsilon_per_km * apart * (1 + NORM_RELATIVE_ERROR)
        return math.exp(exponent) * (1 + _ROUNDING) if exponent < 700 else math.inf


@dataclass(frozen=True)
class Lattice:
    """The records of one lattice, and what they cost.

    Parameters
    ----------
    x_km, y_km
        Coordinates, float64 of shape (n_x,) and (n_y,), in km, ascending.
    cost
        π(x) c(x, y), float64 of shape (n_x, n_y, K), ≥ 0, in km.
    kept
        Which records a mechanism has to have rows for, bool of shape (n_x, n_y); the others cost nothing.
    """

    x_km: Array
    y_km: Array
    cost: Array
    kept: NDArray[np.bool_]

    @property
    def free_km(self) -> float:
        """Σ_x π(x) min_y c(x, y), rounded down, in km: what is lost without any privacy."""
        return math.fsum(self.cost.min(axis=-1).ravel()) * (1 - _ROUNDING)

    @property
    def free_at_most_km(self) -> float:
        """The same, rounded up."""
        return math.fsum(self.cost.min(axis=-1).ravel()) * (1 + _ROUNDING)

    def cropped(self) -> "Lattice":
        """Return the lattice without the lines at its borders that have no record to keep."""
        used_x, used_y = (np.flatnonzero(self.kept.any(axis=axis)) for axis in (1, 0))
        x, y = (slice(u[0], u[-1] + 1) if len(u) else slice(0, 0) for u in (used_x, used_y))
        return Lattice(self.x_km[x], self.y_km[y], self.cost[x, y], self.kept[x, y])

    def transposed(self) -> "Lattice":
        """Return the lattice with its axes exchanged; distances know no difference."""
        return Lattice(self.y_km, self.x_km, self.cost.swapaxes(0, 1), self.kept.T)

    def with_lines_for(self, reach: int) -> "Lattice":
        """Return the lattice with further lines in x, of records that need no rows, for whole blocks."""
        more = -len(self.x_km) % reach
        return Lattice(
            self.x_km,
            self.y_km,
            np.pad(self.cost, ((0, more), (0, 0), (0, 0))),
            np.pad(self.kept, ((0, more), (0, 0))),
        )


def lattice_bound(
    lattice: Lattice,
    promise: LatticePromise,
    *,
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
    floor = _FLOOR / outputs
    scale = float(lattice.cost.max())
    # Blocks along the longer side: the work grows with the cube of the shorter one.
    if lattice.cost.shape[1] > lattice.cost.shape[0]:
        lattice = lattice.transposed()
    reach = reach_of(promise.metric_p) if min(lattice.kept.shape) > 1 else 1
    lattice = lattice.with_lines_for(reach)
    n, m = lattice.kept.shape
    cost = by_output(lattice.cost / scale, False).reshape(outputs, n // reach, reach * m)
    rows = PairRows((n // reach, reach, m), _growth(lattice, promise, 1 / floor, reach))
    program = GridProgram.over_mechanisms(cost, rows, _FLOOR)
    duals = [-math.inf]
    with one_blas_thread():
        solve_program(
            program,
            gap=gap,
            threads=threads,
            inverse_sums=inverse_sums,
            watcher=lambda _, dual: duals.append(dual),
            deadline=deadline,
        )
    # For every mechanism M of the lattice, (1 − K δ') M + δ' is one of the program. The multipliers of every
    # iterate prove a bound.
    best = max(dual for dual in duals if not math.isnan(dual))
    dual, uniform = scale / outputs * best, floor * math.fsum(lattice.cost.ravel())
    rest = dual - uniform - _ROUNDING * (abs(dual) + uniform)
    return max(rest / (1 - _FLOOR) * (1 - _ROUNDING), free) if math.isfinite(rest) else free


def reach_of(metric_p: float) -> int:
    """Return over how many lines pairs reach that have rows: what is worth having for a metric.

    For p = 1 and p = ∞ distances add up along the eight directions to neighbours. For p = 2 a detour along
    them is up to 8.2 % longer than the way, with the knight's moves 2.7 %.
    """
    return 1 if metric_p == 1 or math.isinf(metric_p) else 2


def _growth(lattice: Lattice, promise: LatticePromise, largest: float, reach: int) -> dict[Direction, Array]:
    """Return the growth of pairs by direction; where nothing is promised, one that δ' ≤ z ≤ 1 imply."""
    largest *= 1 + _ROUNDING
    # Coordinates of records are rounded, so sides differ a little: no side is longer than the longest.
    across, along = (
        math.nextafter(float(np.diff(at).max(initial=0.0)), math.inf) for at in (lattice.x_km, lattice.y_km)
    )
    growth = {}
    for direction in directions(reach):
        first, second = (lattice.kept[end] for end in ends(direction))
        grown = promise.growth(direction[0] * across, abs(direction[1]) * along)
        one = np.where(first & second, min(grown, largest), largest)
        growth[direction] = np.broadcast_to(one, (2, 1, *one.shape))  # both ways, for all outputs
    return growth
