"""Linear programs over a lattice of records: each record a column, and rows for steps from record to record.

    min Σ_x π(x) Σ_y M(y|x) c(x, y)   s.t.  M(y|x) ≤ exp(ε d(x, x')) M(y|x'),  M ≥ δ,  Σ_y M(y|x) = 1

for pairs x, x' that are steps (a, b) apart, a and b without a common divisor and at most `reach`. What no
mechanism can beat follows from its dual (:mod:`mdpext_dask.evaluation.bound.lattice_program`). What solves it
for a little less than ε is a mechanism: every offset is made of steps of two neighbouring directions, so all
pairs keep ε (:mod:`mdpext_dask.auditors.directions`; PROOF.md, section 2).
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.seed.block_tridiagonal import Direction, ends
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, vector_norm
from mdpext_dask.seed.columns import GridProgram
from mdpext_dask.seed.grid_rows import PairRows, directions
from mdpext_dask.seed.interior_point import InverseSums, by_output, solve_program
from mdpext_dask.seed.model import Array, SeedMechanism
from mdpext_dask.seed.solve import one_blas_thread

# Steps of a program whose rows are stored, for 1 < p < ∞. With p = 2, all pairs keep 1.0131 times what steps
# of up to 3 lines do (1.0824 and 1.0275 with 1 and 2, as where there are only two or three lines), and 1.0020
# times with 8. Such wide ones are for few records: as long as a program is predicted to take so many seconds
# of one processor. For other p neighbours do.
_REACH, _WIDEST_REACH, _WIDER_SECONDS = 3, 8, 30.0
# The relative duality gap to aim for then; the loss is off by less.
RECORD_GAP = 1e-4
# A solution further than this from its optimum, relative to it, is none.
_WORST_GAP = 0.05
# What an exponential function and a product may be wrong by, and costs that are products; with a margin.
ROUNDING = 16 * sys.float_info.epsilon

# Seconds of a program for one processor, fitted to lattices from 2 x 2 x 20 to 49 x 49 x 100 on one core of
# a server processor of 2024. For all its iterations: by program, by entry and row, by multiplication of
# blocks, of rows of inverses, and of the Schur matrix.
_CALLS, _ENTRY, _BLOCK_FLOP, _INVERSE_FLOP, _SCHUR_FLOP = 0.02, 6e-6, 4e-8, 3e-9, 1e-9
# Arrays over all rows of a program that an iteration holds at once, over blocks, and of Schur matrices.
_ROW_ARRAYS, _BLOCK_ARRAYS, _SCHUR_ARRAYS = 20, 4, 3
_FLOAT64 = 8


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
        return math.exp(exponent) * (1 + ROUNDING) if exponent < 700 else math.inf


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
        return math.fsum(self.cost.min(axis=-1).ravel()) * (1 - ROUNDING)

    @property
    def free_at_most_km(self) -> float:
        """The same, rounded up."""
        return math.fsum(self.cost.min(axis=-1).ravel()) * (1 + ROUNDING)

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
        return replace(
            self, cost=_with_lines(self.cost, reach, 0.0), kept=_with_lines(self.kept, reach, False)
        )


@dataclass(frozen=True)
class LatticeProgram:
    """The program over a lattice, as the interior-point method takes it.

    Parameters
    ----------
    program
        Its columns are scaled by K, and its costs by `scale_km`.
    scale_km
        The largest cost, in km.
    shape
        Records to the east and to the north.
    flipped
        Whether the axes are exchanged, so that blocks lie along the longer one: the work grows with the cube
        of the shorter.
    """

    program: GridProgram
    scale_km: float
    shape: tuple[int, int]
    flipped: bool

    @classmethod
    def of(cls, lattice: Lattice, promise: LatticePromise, reach: int, floor: float) -> "LatticeProgram":
        """Return the program.

        Parameters
        ----------
        lattice, promise
            The records, not all of whose costs are 0, and what they are promised.
        reach
            Largest coordinate of a step.
        floor
            K δ.
        """
        shape, outputs = lattice.kept.shape, lattice.cost.shape[-1]
        scale = float(lattice.cost.max())
        if flipped := shape[1] > shape[0]:
            lattice = lattice.transposed()
        cost = in_blocks(lattice.cost / scale, reach, 0.0)
        lattice = lattice.with_lines_for(reach)
        n, m = lattice.kept.shape
        rows = PairRows((n // reach, reach, m), _growth(lattice, promise, outputs / floor, reach))
        return cls(GridProgram.over_mechanisms(cost, rows, floor), scale, (shape[0], shape[1]), flipped)

    def rows(self, z: Array) -> Array:
        """Return M of a solution z, float64 of shape (records east, records north, K), rows summing to 1."""
        lines = np.moveaxis(z.reshape(len(z), -1, min(self.shape)), 0, -1)[: max(self.shape)]
        rows = np.ascontiguousarray(lines.swapaxes(0, 1) if self.flipped else lines)
        return np.asarray(rows / rows.sum(axis=-1, keepdims=True))


def in_blocks(values: Array, reach: int, fill: float) -> Array:
    """Bring values of records, (n_x, n_y, K), to (K, blocks, records of a block), `reach` lines in a block.

    Parameters
    ----------
    values
        The values; no fewer lines in x than in y.
    reach, fill
        Lines in a block, and the value of records in further lines for whole blocks.
    """
    lines = _with_lines(values, reach, fill)
    n, m, outputs = lines.shape
    return by_output(lines, False).reshape(outputs, n // reach, reach * m)


def _with_lines(values: NDArray[Any], reach: int, fill: float) -> NDArray[Any]:
    more = ((0, -len(values) % reach), *[(0, 0)] * (values.ndim - 1))
    return np.pad(values, more, constant_values=fill)


def record_reach(shape: tuple[int, int], metric_p: float, outputs: int | None = None) -> int:
    """Return the largest coordinate of steps in a program whose rows are stored.

    Parameters
    ----------
    shape
        Records to the east and to the north.
    metric_p
        Exponent p of the metric.
    outputs
        K of a program over all of them, for which wider steps may be worth their time.
    """
    if metric_p == 1 or math.isinf(metric_p):
        return 1
    reach = _REACH
    if outputs is not None:
        wider = range(_WIDEST_REACH, _REACH, -1)
        in_time = (r for r in wider if predicted_seconds(shape, outputs, r) <= _WIDER_SECONDS)
        reach = next(in_time, _REACH)
    return min(reach, max(min(shape) - 1, 1))


def solve_records(
    lattice: Lattice,
    promise: LatticePromise,
    reach: int,
    min_probability: float,
    *,
    gap: float,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> SeedMechanism:
    """Return the best mechanism that keeps a promise for steps from record to record.

    Parameters
    ----------
    lattice, promise
        The records and the promise; rows of all records have to keep it.
    reach
        Largest coordinate of a step.
    min_probability
        δ.
    gap, threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.

    Returns
    -------
    Rows in the lattice's order, float64 of shape (n_x · n_y, K), that keep the promise up to the solver's
    tolerance; the dual is that of this program, whose promise is a stricter one.

    Raises
    ------
    SolverError
        If the program cannot be solved.
    """
    outputs = lattice.cost.shape[-1]
    if outputs == 1 or not lattice.cost.any():
        rows = np.full((lattice.kept.size, outputs), 1 / outputs)
        value = float((lattice.cost.reshape(rows.shape) * rows).sum())
        return SeedMechanism(rows, value, value, "structured", 0)
    posed = LatticeProgram.of(lattice, promise, reach, outputs * min_probability)
    with one_blas_thread():
        found = solve_program(posed.program, gap=gap, threads=threads, inverse_sums=inverse_sums)
    rows = posed.rows(found.z).reshape(-1, outputs)
    if not found.gap <= _WORST_GAP:
        raise SolverError(f"the program over all records ends {found.gap:.2g} from its optimum")
    primal = float((lattice.cost.reshape(rows.shape) * rows).sum())
    dual = posed.scale_km / outputs * found.dual
    return SeedMechanism(rows, primal, dual, "structured", found.iterations)


def _growth(lattice: Lattice, promise: LatticePromise, largest: float, reach: int) -> dict[Direction, Array]:
    """Return the growth of pairs by direction; where nothing is promised, one that δ' ≤ z ≤ 1 imply."""
    largest *= 1 + ROUNDING
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


def predicted_seconds(shape: tuple[int, int], outputs: int, reach: int) -> float:
    """Return about how long one processor takes for the program of one lattice."""
    (m, n), reach = sorted(shape), reach if min(shape) > 1 else 1
    points = n * m
    return (
        _CALLS
        + _ENTRY * outputs * points * _rows(reach)
        + _BLOCK_FLOP * outputs * n * reach**2 * m**3
        + _INVERSE_FLOP * outputs * reach * m * points**2
        + _SCHUR_FLOP * points**3
    )


def predicted_bytes(shape: tuple[int, int], outputs: int, reach: int) -> int:
    """Return about what the program of one lattice holds in memory at most."""
    (m, n), reach = sorted(shape), reach if min(shape) > 1 else 1
    points = n * m
    numbers = (
        _ROW_ARRAYS * outputs * points * _rows(reach)
        + _BLOCK_ARRAYS * outputs * points * reach * m
        + _SCHUR_ARRAYS * points**2
    )
    return _FLOAT64 * numbers


def _rows(reach: int) -> int:
    """Return how many rows there are for each point, about, and its floor."""
    return 2 * len(directions(reach)) + 1
