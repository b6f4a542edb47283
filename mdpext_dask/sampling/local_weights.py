"""Integer weights of rows that are local: far outputs are one block, and draws are those of whole rows.

Only draws of many places are made so: how long they take depends on how many outputs are near the places of
a chunk. A single draw goes through all outputs, near or far (:mod:`mdpext_dask.runtime.integer_sampling`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.runtime.integer_sampling import integer_weights, pick_rows


@dataclass(frozen=True)
class LocalWeights:
    """Cumulative weights of rows of which far outputs are not gone through one by one.

    Outputs keep their order, so that a number below the total picks what it picks from the whole row: near
    outputs end where their weights and those of all before them add up to; in between lie far ones, all of
    one weight.

    Parameters
    ----------
    cumulative
        uint64 of shape (rows, n + 1): sums up to each near output, and of all.
    far
        The weight of a far output, uint64 of shape (rows,).
    near
        The near outputs, shape (n,).
    outputs
        Number K of outputs.
    """

    cumulative: NDArray[np.uint64]
    far: NDArray[np.uint64]
    near: NDArray[np.intp]
    outputs: int

    @classmethod
    def of(cls, local: LocalRows) -> "LocalWeights":
        """Return the weights of rows, with entries of shape (rows, 1, columns).

        Raises
        ------
        GuaranteeViolation
            If a row is damaged.
        """
        weights = integer_weights(np.asarray(local.entries[:, 0], dtype=np.float32), local.counts)
        near, far = local.outputs, weights[:, -1]
        if local.copies > 1:
            near, weights = near[:-1], weights[:, :-1]
        before = (near - np.arange(len(near))).astype(np.uint64)
        cumulative = np.empty((len(weights), len(near) + 1), dtype=np.uint64)
        np.cumsum(weights, axis=1, dtype=np.uint64, out=cumulative[:, :-1])
        after = np.uint64(local.total_outputs - len(near))
        cumulative[:, -1] = weights.sum(axis=1, dtype=np.uint64) + after * far
        cumulative[:, :-1] += before * far[:, None]
        return cls(cumulative, far, near, local.total_outputs)

    def pick(self, which: NDArray[np.intp], below: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the outputs that numbers pick from the rows `which`; both of shape (n,)."""
        column = pick_rows(self.cumulative, which, below)
        ends = np.concatenate([[-1], self.near, [self.outputs]])
        start = np.where(column > 0, self.cumulative[which, column - 1], np.uint64(0))
        # So many far outputs lie before the number; no more than there are before the near one.
        passed = ((below - start) // self.far[which]).astype(np.intp)
        return np.asarray(np.minimum(ends[column] + 1 + passed, ends[column + 1]), dtype=np.intp)
