"""A sweep over part of a lattice: what neighbours may differ by, and the programs of a window.

Between points of a lattice that is not yet the finest, records are interpolated log-convexly, and normalising
adds to their slopes. Where that is largest it is a divergence: towards a neighbour with row w, the slope of
the log-normaliser at a point with row z is −KL(z‖w) = Σ_y z_y (log w_y − log z_y), the same for all outputs.
It is charged to the budgets as it was last; what it has become is seen by the certificate.

At a corner of a cell of the lattice, differences along its two sides make a certificate vector. Budgets are
its components, with what is left of ε shared out in its own direction: so the reference keeps them, an edge
takes the least of its corners, and whatever keeps them has vectors within ε.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import norm_rank
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.pipeline.cells.lattice import ByShape, Patch
from mdpext_dask.pipeline.cells.programs import Floats, Patches, Solutions, solve_patches, solve_with_highs

Which = slice | NDArray[np.bool_]
# Numbers of a batch in one array over points and outputs: they stay in the processor's cache.
_BATCH_ELEMENTS = 40_000
# Probabilities may go below the floor by so much in all, so that those at it leave programs some room.
_BELOW_FLOOR = 1 - 1e-5
# What is left is never shared out more unevenly than this.
_LEAST_COMPONENT = 0.25
# Log probabilities that differ at all differ by more: squares of less than this are no normal numbers.
_NOTHING = math.sqrt(np.finfo(float).tiny)


@dataclass(frozen=True)
class Window:
    """A rectangle of a lattice with everything that its programs depend on.

    Parameters
    ----------
    origin
        Index of its first point on the lattice.
    scores
        Log probabilities of the reference, float64 of shape (n + 1, m + 1, K).
    budget_x, budget_y
        What neighbours may differ by, (n, m + 1, K) and (n + 1, m, K).
    cost
        What the probabilities of a point cost, in km, (n + 1, m + 1, K).
    frozen
        Points that stay as they are, bool of shape (n + 1, m + 1).
    floor
        δ: no probability is brought below this, to 1e-5 of it.
    """

    origin: tuple[int, int]
    scores: Floats
    budget_x: Floats
    budget_y: Floats
    cost: Floats
    frozen: NDArray[np.bool_]
    floor: float

    def active(self, patches: ByShape) -> ByShape:
        """Return the programs whose points may move and cost anything."""
        found: ByShape = {}
        for (east, north), places in sorted(patches.items()):
            for i, j in places:
                x, y = i - self.origin[0], j - self.origin[1]
                part = slice(x, x + east), slice(y, y + north)
                if not self.frozen[part].any() and self.cost[part].any():
                    found.setdefault((east, north), []).append((i, j))
        return found


@dataclass(frozen=True)
class Swept:
    """What programs have come to.

    Parameters
    ----------
    programs
        How many were solved.
    fallbacks
        Programs that could not be solved, so that their points stayed as they were: lower left point on the
        lattice, points to the east and to the north.
    by_highs
        Programs that HiGHS solved in the place of the structured method.
    """

    programs: int
    fallbacks: tuple[tuple[int, int, int, int], ...]
    by_highs: int


def sweep(window: Window, surroundings: Floats, patches: ByShape, tube: float) -> tuple[Floats, Swept]:
    """Solve programs and return log probabilities of the window with their points replaced.

    Parameters
    ----------
    window
        The window; its scores are the reference.
    surroundings
        Log probabilities of the points that are fixed, of the shape of the window's scores: the reference, or
        with sides that have been solved already.
    patches
        The programs, by their shape; no two have neighbours in each other.
    tube
        How far a log probability may go from the reference; infinite for as far as budgets allow.
    """
    result = surroundings.copy()
    programs = by_highs = 0
    fallbacks: list[tuple[int, int, int, int]] = []
    for shape, places in window.active(patches).items():
        points = shape[0] * shape[1]
        batch = max(_BATCH_ELEMENTS // (points * window.scores.shape[2]), 1)
        for first in range(0, len(places), batch):
            part = places[first : first + batch]
            built = _Built(window, surroundings, shape, part, tube)
            solutions, repaired = _solve(built.patches)
            built.write(solutions, result)
            programs += len(part)
            fallbacks += [(*part[program], *shape) for program in np.flatnonzero(solutions.failed)]
            by_highs += repaired
    return result, Swept(programs, tuple(fallbacks), by_highs)


def _sum_of_outputs(values: Floats) -> Floats:
    """Return sums over the middle axis, one output after the other, however the array lies in memory."""
    total = values[:, :1].copy()
    for output in range(1, values.shape[1]):
        total += values[:, output : output + 1]
    return total


def _solve(patches: Patches) -> tuple[Solutions, int]:
    """Solve programs, those that fail with HiGHS; return how many that mended."""
    solutions = solve_patches(patches)
    failed = np.flatnonzero(solutions.failed)
    if len(failed) == 0:
        return solutions, 0
    again = solve_with_highs(patches.part(failed))
    u, still = solutions.u.copy(), solutions.failed.copy()
    u[..., failed], still[failed] = again.u, again.failed
    return Solutions(u, still), int(len(failed) - again.failed.sum())


class _Built:
    """The programs of some patches of one shape."""

    def __init__(
        self, window: Window, surroundings: Floats, shape: tuple[int, int], places: list[Patch], tube: float
    ) -> None:
        self._window = window
        corner = np.array(places, dtype=np.intp) - np.array(window.origin)
        self._x, self._y = corner[:, 0], corner[:, 1]
        # The shorter side runs fastest: that is the band of the matrices.
        across = shape[0] >= shape[1]
        points = itertools.product(range(shape[0]), range(shape[1]))
        self._points = sorted(points, key=lambda point: point if across else point[::-1])
        self._index = {point: index for index, point in enumerate(self._points)}
        self._scores = self._gather(window.scores)
        # Their sums are 1 but for rounding; here they must be.
        rows = exponential(self._scores)
        self._rows = rows / _sum_of_outputs(rows)
        lower = np.minimum(_BELOW_FLOOR * window.floor / self._rows, 1.0)
        upper = 1 / self._rows + 1
        pairs, budgets = [], []
        for point, index in self._index.items():
            for step in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                other = point[0] + step[0], point[1] + step[1]
                if other in self._index:
                    pairs.append((index, self._index[other]))
                    # z_i ≤ e^b z_j for i = point, j = other.
                    allowed = self._budget(point, other)
                    difference = self._scores[index] - self._scores[self._index[other]]
                    budgets.append(np.minimum(difference - allowed, 0.0))
                else:
                    self._bound_by(surroundings, index, point, other, lower, upper)
        if np.isfinite(tube):
            reach = exponential(np.array([-tube, tube]))
            np.maximum(lower, reach[0], out=lower)
            np.minimum(upper, reach[1], out=upper)
        count = (len(pairs), *self._rows.shape[1:])
        self.patches = Patches(
            cost=self._gather(window.cost),
            reference=self._rows,
            pairs=tuple(pairs),
            weight=exponential(np.stack(budgets)) if budgets else np.empty(count),
            lower=lower,
            upper=upper,
            band=min(shape),
        )

    def write(self, solutions: Solutions, result: Floats) -> None:
        """Put log probabilities of the solutions into an array of the window's shape."""
        moved = (solutions.u != 1).any(axis=(0, 1))
        rows = self._rows * solutions.u
        scores = self._scores + logarithm(solutions.u) - logarithm(_sum_of_outputs(rows))
        for index, (a, b) in enumerate(self._points):
            result[self._x[moved] + a, self._y[moved] + b] = scores[index][:, moved].T

    def _gather(self, values: Floats) -> Floats:
        """Return the patches' points, (n, K, P)."""
        return np.stack([values[self._x + a, self._y + b].T for a, b in self._points])

    def _budget(self, point: Patch, other: Patch, which: Which = slice(None)) -> Floats:
        """Return what neighbours may differ by, (K, P)."""
        a, b = min(point[0], other[0]), min(point[1], other[1])
        budgets = self._window.budget_x if point[0] != other[0] else self._window.budget_y
        return np.asarray(budgets[self._x[which] + a, self._y[which] + b].T)

    def _bound_by(
        self, surroundings: Floats, index: int, point: Patch, other: Patch, lower: Floats, upper: Floats
    ) -> None:
        """Bound a point by a neighbour outside the patch, where the lattice has one."""
        x, y = self._x + other[0], self._y + other[1]
        there = (x >= 0) & (x < surroundings.shape[0]) & (y >= 0) & (y < surroundings.shape[1])
        if not there.any():
            return
        allowed = self._budget(point, other, there)
        difference = surroundings[x[there], y[there]].T - self._scores[index][:, there]
        lowest = exponential(np.minimum(difference - allowed, 0.0))
        highest = exponential(np.maximum(difference + allowed, 0.0))
        lower[index][:, there] = np.maximum(lower[index][:, there], lowest)
        upper[index][:, there] = np.minimum(upper[index][:, there], highest)


def normaliser_drift(scores: Floats) -> tuple[Floats, Floats]:
    """Return how much normalising may add to differences along the edges of a lattice.

    Parameters
    ----------
    scores
        Log probabilities, float64 of shape (n + 1, m + 1, K).

    Returns
    -------
    drift_x, drift_y
        float64 of shape (n, m + 1) and (n + 1, m).
    """
    rows = exponential(scores)
    drifts = []
    for axis in (0, 1):
        step = np.diff(scores, axis=axis)
        before, after = (rows[:-1], rows[1:]) if axis == 0 else (rows[:, :-1], rows[:, 1:])
        drifts.append(
            np.maximum(-np.add.reduce(before * step, axis=-1), np.add.reduce(after * step, axis=-1))
        )
    return drifts[0], drifts[1]


def edge_budgets(
    scores: Floats, allowed: float, drift: tuple[Floats, Floats], dual_exponent: float, margin: float
) -> tuple[Floats, Floats]:
    """Return what log probabilities of neighbours on a lattice may differ by.

    Parameters
    ----------
    scores
        Log probabilities of the reference, float64 of shape (n + 1, m + 1, K).
    allowed
        ε times the spacing of the lattice.
    drift
        :func:`normaliser_drift`, or zeros on the finest lattice.
    dual_exponent
        q.
    margin
        By what share of `allowed` the reference keeps its budgets, so that programs have an interior.

    Returns
    -------
    budget_x, budget_y
        float64 of shape (n, m + 1, K) and (n + 1, m, K); the reference keeps them by a margin.
    """
    east, north = np.abs(np.diff(scores, axis=0)), np.abs(np.diff(scores, axis=1))
    drift_x, drift_y = drift[0][..., None], drift[1][..., None]
    steep_x, steep_y = east + drift_x, north + drift_y
    budget_x, budget_y = np.full_like(east, np.inf), np.full_like(north, np.inf)
    for side in (slice(None, -1), slice(1, None)):  # the lower and the upper side of a cell
        for flank in (slice(None, -1), slice(1, None)):  # its left and its right one
            x, y = _shared_out(steep_x[:, side], steep_y[flank], allowed, dual_exponent)
            np.minimum(budget_x[:, side], x, out=budget_x[:, side])
            np.minimum(budget_y[flank], y, out=budget_y[flank])
    return (
        np.maximum(budget_x - drift_x, east) + margin * allowed,
        np.maximum(budget_y - drift_y, north) + margin * allowed,
    )


def _shared_out(first: Floats, second: Floats, allowed: float, q: float) -> tuple[Floats, Floats]:
    """Return multiples of vectors with a q-norm of at most `allowed`, but never less than themselves."""
    if math.isinf(q):
        return np.maximum(first, allowed), np.maximum(second, allowed)
    # A little more even than they are, where that is not too long already.
    even_first = np.maximum(first, _LEAST_COMPONENT * second)
    even_second = np.maximum(second, _LEAST_COMPONENT * first)
    # Where both vanish, or their squares do, both get the same.
    nothing = np.maximum(even_first, even_second) < _NOTHING
    even_first, even_second = np.where(nothing, 1.0, even_first), np.where(nothing, 1.0, even_second)
    scale = allowed / _norm(even_first, even_second, q)
    fits = scale >= 1
    own = np.maximum(allowed / np.where(nothing, 1.0, _norm(first, second, q)), 1.0)
    return (
        np.where(fits | nothing, scale * even_first, own * first),
        np.where(fits | nothing, scale * even_second, own * second),
    )


def _norm(first: Floats, second: Floats, q: float) -> Floats:
    rank = norm_rank(first.copy(), second.copy(), q)
    return np.asarray(np.sqrt(rank) if q == 2 else rank)
