"""Log-convex extension: bilinear interpolation of log scores, then one normalisation.

In a source cell f_y(x) = Σ_corners w_c(x) log z_c,y and M(y|x) = exp f_y(x) / Σ exp f. Interpolating
level by level and normalising at each level gives the same mechanism, because a normaliser enters every
output's score alike and cancels; so the whole subtree of a cell is done in closed form.

Along a fine row from the west to the east side of a cell the scores are linear, so their exponentials
form a geometric progression: two exponentials per output and cell row, then one product per record.
Everything is elementwise in a fixed order, and the exponential is our own, made of IEEE operations
only. So a record's bytes depend on the corners of its cell alone: not on the block it is computed in,
the number of workers, or the processor. A record on a side shared by two cells sees only that side's
two corners, so both cells agree to the last bit (requirement A2).
"""

import math

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.extend.normalise import exponential, normalise
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.seed.budget import log_convex_steepening


class LogConvex(Operator):
    """Interpolate log scores bilinearly; normalise once."""

    linear = True

    def scores(self, corners: Corners) -> NDArray[np.float64]:
        """Return Σ_corners w_c(x) log z_c,y."""
        factor = math.prod(corners.refine)
        return np.ascontiguousarray(interpolated(interpolated(corners.scores, factor), factor, axis=1))

    def steepening(self, delta_axis: float, delta_other: float) -> float:
        """Return 1 + η of bound (2)."""
        return log_convex_steepening(delta_axis, delta_other)

    def rows(self, corners: Corners) -> NDArray[np.float32]:
        """Return M(y|x) of the closed block, with one product per record instead of an exponential."""
        return extend_log_convex(corners.exponent * corners.scores, math.prod(corners.refine))


def extend_log_convex(scores: NDArray[np.float64], factor: int) -> NDArray[np.float32]:
    """Extend log scores on the corners of a block of source cells to its fine records.

    Parameters
    ----------
    scores
        log z, float64 of shape (cells east + 1, cells north + 1, K), each in [-700, 0].
    factor
        Refinement factor F.

    Returns
    -------
    M(y|x), float32 of shape (cells east · F + 1, cells north · F + 1, K): the closed block.
    """
    cells_east, outputs = scores.shape[0] - 1, scores.shape[2]
    side = interpolated(scores[0], factor)
    fine = np.empty((cells_east * factor + 1, len(side), outputs), dtype=np.float32)
    for cell in range(cells_east):
        next_side = interpolated(scores[cell + 1], factor)
        weight = exponential(side)
        normalise(weight, out=fine[cell * factor])
        if factor > 1:
            ratio = exponential((next_side - side) / factor)
            for step in range(1, factor):
                weight *= ratio
                normalise(weight, out=fine[cell * factor + step])
        side = next_side
    normalise(exponential(side), out=fine[-1])
    return fine
