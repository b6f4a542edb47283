"""What an extension operator is: scores of corners in, scores of fine records out, and what that promises.

The pipeline asks an operator for one thing only: the rows of a block of source cells, given the seed's log
scores on the corners of those cells and the budgets on the edges between them. Whatever it answers, the
certificate of the finished store decides (PROOF.md, section 2). What an operator promises is what budgets
can be set by before anything is built, and what makes neighbouring blocks agree.

An operator must be *local*: the scores of a record depend on the corners and edges of the source cell that it
lies in alone, and on a side shared by two cells on that side's two corners and its edge alone; and it must be
made of operations that give the same bits everywhere. Then two blocks that compute the same record agree to
the last bit (requirement A2); blocks that do not are found by the boundary cross-check, and refused.

A job knows an operator of the user's own by its name, not by its code: once the code has changed, stores made
with it are those of another operator (``--overwrite`` makes them anew).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError
from mdpext_dask.extend.normalise import exponential, normalise

# Probabilities this far below the largest of their row are stored as 0, which no certificate passes.
_LOWEST = -700.0


@dataclass(frozen=True)
class Corners:
    """What an operator extends: a rectangle of source cells.

    Parameters
    ----------
    scores
        log z on the corners, float64 of shape (cells east + 1, cells north + 1, K), in [-700, 0].
    budget_x
        Budgets β h_0 of the edges to the east: how much the score may rise towards the east, and towards
        the west, float64 of shape (2, cells east, cells north + 1, K or 1).
    budget_y
        The same of the edges to the north, (2, cells east + 1, cells north, K or 1).
    refine
        Subdivisions N_r of every level; of one level with all of them if the job's `stages` is ``"one"``.
    exponent
        α: fine scores are multiplied by this, so that M(y|x) ∝ exp(α f_y(x)).
    """

    scores: NDArray[np.float64]
    budget_x: NDArray[np.float64]
    budget_y: NDArray[np.float64]
    refine: tuple[int, ...]
    exponent: float = 1.0

    def column(self, cell: int) -> "Corners":
        """Return the corners of the cells in one column, counted from the west."""
        along_x, along_y = self.budget_x[:, cell : cell + 1], self.budget_y[:, cell : cell + 2]
        return replace(self, scores=self.scores[cell : cell + 2], budget_x=along_x, budget_y=along_y)


class Operator(ABC):
    """An extension operator; subclass it, without arguments, and name it in a job as ``"module:Class"``.

    Attributes
    ----------
    uses_budgets
        Whether scores depend on the budgets of edges; if not, it is given infinite ones.
    linear
        Whether fine scores are sums of corner scores with weights that add up to 1 and depend on the place
        alone. Then tempering the seed tempers the mechanism, and `exponent` stays 1.
    """

    uses_budgets: bool = False
    linear: bool = False

    @abstractmethod
    def scores(self, corners: Corners) -> NDArray[np.float64]:
        """Return log scores f of closed source cells, up to a term that all outputs of a record share.

        Parameters
        ----------
        corners
            Corners of some cells of a block: all of them, or a column.

        Returns
        -------
        Finite, float64 of shape (cells east · F + 1, cells north · F + 1, K), F the product of
        `corners.refine`.
        """

    def steepening(self, delta_axis: float, delta_other: float) -> float:  # noqa: ARG002 for subclasses
        """Return how many times its budget a log probability's slope along an axis may be, at most.

        Closed-form budgets are set by this; infinity promises nothing, and leaves budgets to the certificate.
        It must be at least 1, and grow with both.

        Parameters
        ----------
        delta_axis, delta_other
            Largest budgets β h_0 > 0 of scores along the axis and across it.
        """
        return float("inf")

    def rows(self, corners: Corners) -> NDArray[np.float32]:
        """Return M(y|x) ∝ exp(α f_y(x)) of a closed block.

        Parameters
        ----------
        corners
            The block's corners.

        Returns
        -------
        float32 of shape (cells east · F + 1, cells north · F + 1, K).

        Raises
        ------
        SpecError
            If scores are not finite, or not of that shape.
        """
        factor = math.prod(corners.refine)
        cells_east, cells_north = (n - 1 for n in corners.scores.shape[:2])
        shape = cells_north * factor + 1, corners.scores.shape[2]
        rows = np.empty((cells_east * factor + 1, *shape), dtype=np.float32)
        # Column by column of cells, then line by line, so that temporary arrays stay small.
        for cell in range(cells_east):
            scores = self._checked(self.scores(corners.column(cell)), (factor + 1, *shape))
            for line, out in zip(scores, rows[cell * factor :], strict=False):
                # The largest score of a record becomes 0: nothing overflows.
                below = corners.exponent * (line - line.max(axis=-1, keepdims=True))
                normalise(exponential(np.maximum(below, _LOWEST)), out=out)
        return rows

    def _checked(self, scores: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
        scores = np.asarray(scores, dtype=np.float64)
        name = f"extension.method: {type(self).__module__}:{type(self).__qualname__}"
        if scores.shape != shape:
            raise SpecError(f"{name}: scores have the shape {scores.shape}, not {shape}")
        if not np.isfinite(scores).all():
            record = tuple(int(n) for n in np.argwhere(~np.isfinite(scores))[0])
            raise SpecError(f"{name}: scores must be finite; that of {record} is {scores[record]}")
        return scores
