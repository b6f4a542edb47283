"""McShane-Whitney extension of log scores, done so that budgets survive every level.

On a segment with ends a and b and budgets β, every function that keeps the budget and has these ends lies
between two envelopes,

    lower(t) = max(a − β t, b − β (s − t)),      upper(t) = min(a + β t, b + β (s − t)),

and the rule takes their mean. It is made along one axis, then along the other between opposite points of the
sides. The rule is monotone and commutes with adding a constant, so it is non-expansive in (a, b) for the sup
norm: slopes across the segment do not grow, slopes along it are at most β by construction. So scores keep
their budgets at every level, and envelopes never cross (PROOF.md, section 5).

Scores are carried *un-normalised* through all levels and normalised when a row is stored. Normalising in
between, as the published recipe does, makes log ratios of the normalised rows exceed the old budget: at the
next level the lower envelope rises above the upper one, and ε is broken.

`stages = "one"` goes from the seeds to the records at once: both envelopes over *all* seeds, with the metric
Σ_t β_t |Δ_t| that the seeds' budgets imply, and their mean at the end. Seeds that keep their budgets are
dominated by the corners of a record's own cell (a shortest path to any other seed passes through one of
them), so that operator is local as well.

Budgets may differ by edge and output. Inside a cell they are interpolated between opposite edges, and
where a difference exceeds them they give way to it; such budgets are set by the certificate.
"""

import math

import numpy as np

from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.seed.model import Array

# What normalising may add: at most another budget.
_STEEPENING = 2.0


class McShaneWhitney(Operator):
    """Mean of the two McShane-Whitney envelopes.

    Parameters
    ----------
    one_stage
        Extend from the seeds to the records at once, the envelopes over all seeds.
    """

    uses_budgets = True

    def __init__(self, *, one_stage: bool = False) -> None:
        self._one_stage = one_stage

    def scores(self, corners: Corners) -> Array:
        """Return the means of the envelopes."""
        scores, along_x, along_y = corners.scores, corners.budget_x, corners.budget_y
        if self._one_stage:
            parts = math.prod(corners.refine)
            lower, upper = (_extend_both(scores, along_x, along_y, parts, side) for side in (-1, 1))
            return (lower + upper) / 2
        for level, parts in enumerate(corners.refine):
            if level > 0:
                along_x, along_y = refined_budgets(along_x, along_y, corners.refine[level - 1])
            scores = _extend_both(scores, along_x, along_y, parts, 0)
        return scores

    def steepening(self, delta_axis: float, delta_other: float) -> float:  # noqa: ARG002 the same for all
        """Return 2: slopes of scores are within budget, and a normaliser's are a mean of those."""
        return _STEEPENING


def refined_budgets(along_x: Array, along_y: Array, parts: int) -> tuple[Array, Array]:
    """Return the budgets of the edges of the next level.

    Parameters
    ----------
    along_x, along_y
        Budgets of edges in log units, as in :class:`mdpext_dask.extend.operator.Corners`.
    parts
        Subdivisions N_r.
    """
    across_x = interpolated(along_x, parts, axis=2)
    across_y = interpolated(along_y, parts, axis=1)
    return np.repeat(across_x / parts, parts, axis=1), np.repeat(across_y / parts, parts, axis=2)


def _extend_both(scores: Array, along_x: Array, along_y: Array, parts: int, side: int) -> Array:
    """Extend along y on all lines of corners, then along x between opposite points of the sides."""
    lines = _extend(scores.swapaxes(0, 1), along_y.swapaxes(1, 2), parts, side).swapaxes(0, 1)
    return _extend(lines, interpolated(along_x, parts, axis=2), parts, side)


def _extend(scores: Array, budgets: Array, parts: int, side: int) -> Array:
    """Apply the one-dimensional rule along the first axis.

    Parameters
    ----------
    scores
        float64 of shape (n + 1, m, K).
    budgets
        How much scores may rise towards larger and towards smaller indices, (2, n, m, K or 1).
    parts
        Subdivisions.
    side
        -1 for the lower envelope, 1 for the upper one, 0 for their mean.

    Returns
    -------
    float64 of shape (n · parts + 1, m, K).
    """
    first, last = scores[:-1], scores[1:]
    rise = np.maximum(budgets[0], last - first)
    fall = np.maximum(budgets[1], first - last)
    fine = np.empty((len(first), parts, *scores.shape[1:]))
    fine[:, 0] = first
    for step in range(1, parts):
        t = step / parts
        if side <= 0:
            lower = np.maximum(first - t * fall, last - (1 - t) * rise)
        if side >= 0:
            upper = np.minimum(first + t * rise, last + (1 - t) * fall)
        fine[:, step] = (lower + upper) / 2 if side == 0 else (lower if side < 0 else upper)
    return np.concatenate([fine.reshape(-1, *scores.shape[1:]), scores[-1:]])
