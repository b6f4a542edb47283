"""What an extension operator is: scores of corners in, scores of fine records out, and what that promises.

The pipeline asks an operator for one thing only: the rows of a block of source cells, given the seed's log
scores on the corners of those cells and the budgets on the edges between them. Whatever it answers, the
certificate of the finished store decides (PROOF.md, section 2). What an operator promises is what budgets
can be set by before anything is built, and what makes neighbouring blocks agree.

An operator must be *local*: the scores of a record depend on the corners and edges of the source cell that it
lies in alone, and on a side shared by two cells on that side's two corners and its edge alone; and it must be
made of operations that give the same bits everywhere. Then two blocks that compute the same record agree to
the last bit (requirement A2).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.normalise import exponential, normalise


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
        Subdivisions N_r of every level.
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
        return replace(
            self,
            scores=self.scores[cell : cell + 2],
            budget_x=self.budget_x[:, cell : cell + 1],
            budget_y=self.budget_y[:, cell : cell + 2],
        )


class Operator(ABC):
    """An extension operator; subclass it and name it in a job as ``"module:Class"``.

    Attributes
    ----------
    name
        What a job calls it.
    uses_budgets
        Whether scores depend on the budgets of edges; if not, it is given infinite ones.
    linear
        Whether fine scores are sums of corner scores with weights that add up to 1 and depend on the place
        alone. Then tempering the seed tempers the mechanism, normalising at any level changes nothing, and
        the certificate can be linearised in the seed (:mod:`mdpext_dask.refine`).
    """

    name: str
    uses_budgets: bool = False
    linear: bool = False

    @abstractmethod
    def scores(self, corners: Corners) -> NDArray[np.float64]:
        """Return log scores f of the closed block, up to a term that is the same for all outputs of a record.

        Parameters
        ----------
        corners
            The block's corners.

        Returns
        -------
        float64 of shape (cells east · F + 1, cells north · F + 1, K), F the product of `corners.refine`.
        """

    def steepening(self, delta_axis: float, delta_other: float) -> float:  # noqa: ARG002 for subclasses
        """Return how many times its budget a log probability's slope along an axis may be, at most.

        Closed-form budgets are set by this; infinity promises nothing, and leaves budgets to the certificate.

        Parameters
        ----------
        delta_axis, delta_other
            Largest budgets β h_0 of scores along the axis and across it.
        """
        return float("inf")

    def rows(self, corners: Corners) -> NDArray[np.float32]:
        """Return M(y|x) ∝ exp(α f_y(x)) of the closed block, float32 of the shape of :meth:`scores`."""
        factor = math.prod(corners.refine)
        east, north, outputs = (*(n - 1 for n in corners.scores.shape[:2]), corners.scores.shape[2])
        rows = np.empty((east * factor + 1, north * factor + 1, outputs), dtype=np.float32)
        # Column by column of cells, then line by line, so that temporary arrays stay small.
        for cell in range(east):
            scores = self.scores(corners.column(cell))
            for line, out in zip(scores, rows[cell * factor : (cell + 1) * factor + 1], strict=True):
                # The largest score becomes 0: nothing overflows.
                below = corners.exponent * (line - line.max(axis=-1, keepdims=True))
                normalise(exponential(below), out=out)
        return rows
