"""Linear programs of windows: rows of some records of a lattice, while those of all others stay.

    min Σ_x π(x) Σ_y z_x(y) c(x, y)   s.t.  z_x(y) ≤ exp(ε ‖x − x'‖) z_x'(y)

for steps from record to record, as in :mod:`mdpext_dask.seed.record_program`, but x runs over the records of
a window alone, and y over the outputs that have some mass there. What other outputs have stays, so
Σ_y z_x(y) is what it was; and steps that leave the window are bounds on z. Rows that keep a little less than
ε are inside of all of it: every program is feasible, and its rows, in place of those before, keep ε with all
others.
"""

from dataclasses import dataclass, replace

import numpy as np

from mdpext_dask.errors import SolverError
from mdpext_dask.seed.block_tridiagonal import ends
from mdpext_dask.seed.grid_rows import PairRows, directions
from mdpext_dask.seed.interior_point import solve_program
from mdpext_dask.seed.model import Array
from mdpext_dask.seed.record_program import Lattice, LatticeProgram, LatticePromise, in_blocks
from mdpext_dask.seed.solve import one_blas_thread

# The relative duality gap to aim for, and Newton steps at most.
_GAP, _ITERATIONS = 1e-3, 60
# Records that are there for whole blocks alone lie within so much of 1, in any unit.
_APART = 2.0
Box = tuple[slice, slice]


@dataclass(frozen=True)
class WindowProblem:
    """A window, and what it may become.

    Parameters
    ----------
    lattice
        Its records, and what the outputs that may change cost, float64 of shape (n_x, n_y, n), in km.
    rows
        M of these outputs, float64 of the same shape, in (0, 1).
    lower, upper
        What steps to other records allow, same shape, lower < rows < upper.
    """

    lattice: Lattice
    rows: Array
    lower: Array
    upper: Array

    @classmethod
    def of(
        cls,
        lattice: Lattice,
        around: Array,
        free: Box,
        sides_km: tuple[float, float],
        promise: LatticePromise,
        reach: int,
        least: float,
    ) -> "WindowProblem":
        """Return a window in its surroundings.

        Parameters
        ----------
        lattice
            The records of the window, and what they cost.
        around
            M of these and of those around them, as far as steps go or the lattice does, float64 of shape
            (N_x, N_y, n).
        free
            Which of them are the window.
        sides_km
            Spacings of records along both axes.
        promise, reach
            What steps have to keep, and their largest coordinate.
        least
            The least probability.
        """
        rows = around[free]
        fixed = around.copy()
        fixed[free] = np.nan
        lower, upper = np.full_like(rows, least), np.ones_like(rows)
        for a, b in directions(reach):
            growth = promise.growth(a * sides_km[0], abs(b) * sides_km[1])
            for step in ((a, b), (-a, -b)):
                here, there = _shifted(free, step, around.shape)
                # NaN is no bound.
                np.fmax(lower[here], fixed[there] / growth, out=lower[here])
                np.fmin(upper[here], fixed[there] * growth, out=upper[here])
        return cls(lattice, rows, lower, upper)

    def program(self, promise: LatticePromise, reach: int) -> LatticeProgram:
        """Return the program, its columns divided by what a record's row adds up to, times n.

        Parameters
        ----------
        promise, reach
            See :meth:`of`.
        """
        outputs = self.rows.shape[-1]
        totals = self.rows.sum(axis=-1, keepdims=True)
        start, lower, upper = (values * (outputs / totals) for values in (self.rows, self.lower, self.upper))
        lattice = replace(self.lattice, cost=self.lattice.cost * totals, kept=np.ones_like(self.lattice.kept))
        # Pairs that are left out have a growth that the bounds imply, however totals differ.
        widest = float(totals.max() / totals.min())
        posed = LatticeProgram.of(lattice, promise, reach, float(lower.min()) / (_APART * widest))

        def blocks(values: Array, fill: float) -> Array:
            return in_blocks(values.swapaxes(0, 1) if posed.flipped else values, reach, fill)

        assert isinstance(posed.program.rows, PairRows)
        shape, growth = posed.program.rows.shape, {}
        of_record = blocks(totals, 1.0).reshape(shape[0] * shape[1], shape[2])
        for direction, grown in posed.program.rows.growth.items():
            ratio = of_record[ends(direction)[0]] / of_record[ends(direction)[1]]
            growth[direction] = grown * np.stack([ratio, 1 / ratio])[:, None]
        program = replace(
            posed.program,
            rows=PairRows(shape, growth),
            lower=blocks(lower, 1 / _APART),
            upper=blocks(upper, _APART),
            capped=True,
            start=blocks(start, 1.0),
        )
        return replace(posed, program=program)


def solve_window(problem: WindowProblem, promise: LatticePromise, reach: int, settled: float) -> Array:
    """Return better rows for a window.

    Parameters
    ----------
    problem
        The window.
    promise, reach
        What steps have to keep, and their largest coordinate.
    settled
        It ends where three steps gain less than this share of what all steps have.

    Returns
    -------
    float64 of shape (n_x, n_y, n), with the totals of before; they keep the promise up to the solver's
    tolerance.

    Raises
    ------
    SolverError
        If the program cannot be solved.
    """
    if not problem.lattice.cost.any():
        return problem.rows
    if not ((problem.lower < problem.rows) & (problem.rows < problem.upper)).all():
        raise SolverError("the rows of a window break what is around it")
    posed = problem.program(promise, reach)
    with one_blas_thread():
        found = solve_program(posed.program, gap=_GAP, iterations=_ITERATIONS, settled=settled)
    if not found.iterations:
        raise SolverError("the program of a window takes no step")
    return np.asarray(posed.rows(found.z) * problem.rows.sum(axis=-1, keepdims=True))


def _shifted(free: Box, step: tuple[int, int], shape: tuple[int, ...]) -> tuple[Box, Box]:
    """Return the records of a window a step from which there is another, and those others.

    The first counted from the window's first record, the second from that of its surroundings.
    """
    here, there = [], []
    for part, along, side in zip(free, step, shape, strict=False):
        first, last = max(part.start, -along), min(part.stop, side - along)
        here.append(slice(first - part.start, max(last - part.start, first - part.start)))
        there.append(slice(first + along, max(last, first) + along))
    return (here[0], here[1]), (there[0], there[1])
