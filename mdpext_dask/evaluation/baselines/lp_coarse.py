"""LP-A: the linear program on the coarse grid, whose rows every record borrows from its nearest corner.

The usual way around the size of the linear program, called LP or LP+CA (coarse approximation) where newer
methods are compared with it: R. Liu, C. Qiu, arXiv 2509.08720, and arXiv 2601.09946. It is ε-mDP between
corners. Two records on both sides of the line between two corners are one fine step h apart but use rows that
may differ by ε h_0: the log ratio may be F = h_0 / h times what ε allows.
"""

import numpy as np

from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices
from mdpext_dask.evaluation.baselines.lp import costs, solve_lattice
from mdpext_dask.evaluation.baselines.pair_rows import check_size
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Problem


def coarse_lp(problem: Problem, seconds: float) -> BaselineMechanism:
    """Make the optimal mechanism of the corners of the source cells, for all records.

    Prior and cost of every record count at its nearest corner; half way, at the one to the east or north.

    Raises
    ------
    SolverError
        If there are too many corners, or it is not solved in time.
    """
    grid, outputs = problem.grid, problem.outputs
    what = "the linear program on the coarse grid"
    check_size(what, grid.seeds, outputs, seconds)
    i, j = (_nearest_corner(length, grid.factor) for length in grid.shape)
    cost: Array = np.zeros((*grid.seeds_shape, outputs))
    np.add.at(cost, (i[:, None], j), costs(problem).reshape(*grid.shape, outputs))
    solution = solve_lattice(
        problem, grid.seeds_xy_km(), cost.reshape(-1, outputs), grid.seeds_shape, seconds, what
    )
    corners = solution.rows.reshape(*grid.seeds_shape, outputs)
    return BaselineMechanism(
        rows=lambda east: corners[i[east]][:, j],
        # Where every record is a corner there is nothing to borrow.
        guarantee=Guarantee.NONE if grid.factor > 1 else Guarantee.EPSILON,
        note=(
            "Kept between the corners of source cells: neighbouring records that use the rows of two corners "
            f"may differ {grid.factor} times as much as ε allows."
        ),
        facts={"corners": grid.seeds} | solution.facts(),
    )


def _nearest_corner(records: int, factor: int) -> Indices:
    """Return the nearest corner of each record along an axis, of shape (records,)."""
    return (np.arange(records, dtype=np.intp) + factor // 2) // factor
