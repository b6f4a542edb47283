"""The seed LP as data, its exact feasibility, and how an approximate solution is made exact.

    min Σ C_jk z_jk   s.t.  Σ_k z_jk = 1,   z_jk ≥ δ,   z_ik ≤ exp(β_e h_0) z_jk

for every pair {i, j} of neighbouring seeds on the grid, both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError

Array = NDArray[np.float64]
# Outward allowance on a log ratio of two float64 probabilities: both logarithms and the difference.
_LOG_ROUNDING = 1e-13
# More than this share of the uniform mechanism means that the solver did not solve the LP.
_LARGEST_UNIFORM_SHARE = 1e-3
# Relative to the floor: the first step of the repair where rounding alone is at fault.
_MARGIN = 1e-9
# Of a reduced cost: ten at most under budgets, a hundred with a fan of rows at five places of four cells.
_MOST_TERMS = 128
# Growth beyond e^700 overflows, and binds nothing.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class SeedProblem:
    """One seed LP.

    Parameters
    ----------
    cost
        C, float64 of shape (J, K), in km; seeds in grid order, x first.
    seeds_shape
        Seeds to the east and to the north.
    budget_x
        Budgets β h_0 of the edges to the east, float64 of shape (2, seeds east - 1, seeds north, K or 1): how
        much log z may rise towards the east, and towards the west.
    budget_y
        The same of the edges to the north, (2, seeds east, seeds north - 1, K or 1).
    min_probability
        Floor δ of every probability.
    """

    cost: Array
    seeds_shape: tuple[int, int]
    budget_x: Array
    budget_y: Array
    min_probability: float

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
        """Return neighbouring seeds i, j, each pair once, and their budgets, shape (2, pairs, K or 1).

        The first budget bounds log z_j − log z_i, the second log z_i − log z_j.
        """
        index = np.arange(self.seeds_shape[0] * self.seeds_shape[1]).reshape(self.seeds_shape)
        budgets = [b.reshape(2, -1, b.shape[-1]) for b in (self.budget_x, self.budget_y)]
        outputs = max(b.shape[-1] for b in budgets)
        first = np.concatenate([index[:-1].ravel(), index[:, :-1].ravel()])
        second = np.concatenate([index[1:].ravel(), index[:, 1:].ravel()])
        wide = [np.broadcast_to(b, (*b.shape[:2], outputs)) for b in budgets]
        return first, second, np.concatenate(wide, axis=1)

    def objective(self, rows: Array) -> float:
        """Return Σ C_jk z_jk in km."""
        return float((self.cost * rows).sum())

    def worst_ratio(self, rows: Array) -> float:
        """Return the largest change of log z between neighbours over its budget, rounded outward.

        The budgets hold exactly when it is ≤ 1.
        """
        i, j, budget = self.pairs()
        logs = np.log(rows)
        rise = logs[j] - logs[i]
        ratios = (rise + _LOG_ROUNDING) / budget[0], (_LOG_ROUNDING - rise) / budget[1]
        return float(max(ratio.max() for ratio in ratios))

    def repair(self, rows: Array) -> Array:
        """Return a mechanism near `rows` that keeps every constraint exactly.

        Raising small entries to the floor keeps all ratios (both sides of z_i ≤ g z_j with g ≥ 1 are
        maximised with the same number). What the solver's tolerance and the normalisation leave over,
        v = z_i − g z_j > 0, is absolute and shows at the smallest entries; mixing every row with the
        uniform one, (1 − t) z + t / K, keeps row sums, raises the smallest entry, and lowers v by
        t (g − 1) / K. So a t of the size of the tolerance is enough, and the loss hardly moves.

        Raises
        ------
        SolverError
            If the rows are not positive finite numbers, or so far off that no small t repairs them.
        """
        if not np.isfinite(rows).all() or (rows <= -self.min_probability).any():
            raise SolverError("the seed LP's solution holds negative or non-finite probabilities")
        rows = np.maximum(rows, self.min_probability)
        rows = rows / rows.sum(axis=1, keepdims=True)
        i, j, budget = self.pairs()
        growth = np.exp(np.minimum(budget, _LARGEST_EXPONENT))
        outputs = rows.shape[1]
        share = 0.0
        while share <= _LARGEST_UNIFORM_SHARE:
            mixed: Array = (1 - share) * rows + share / outputs
            mixed /= mixed.sum(axis=1, keepdims=True)
            if self.worst_ratio(mixed) <= 1 and mixed.min() >= self.min_probability:
                return mixed
            ways = zip(growth, (i, j), (j, i), strict=True)
            over = max(0.0, *(float(((rows[b] - g * rows[a]) / (g - 1)).max()) for g, a, b in ways))
            under = max(self.min_probability - float(mixed.min()), 0.0)
            share = max(2 * share, outputs * (over + under + self.min_probability * _MARGIN))
        raise SolverError(
            f"the seed LP's solution breaks its budgets by a factor of {self.worst_ratio(rows):.6g}; "
            "that is beyond repair"
        )


def raised_to_floor(rows: Array, floor: float) -> Array:
    """Return rows mixed with the uniform one, (1 − t) z + t / K, each just enough to reach a floor.

    Parameters
    ----------
    rows
        z, float64 of shape (..., K), rows summing to 1.
    floor
        δ, below 1 / K.
    """
    uniform = 1 / rows.shape[-1]
    least = rows.min(axis=-1, keepdims=True)
    share = np.maximum(floor - least, 0.0) / np.maximum(uniform - least, np.finfo(float).tiny)
    return np.asarray((1 - share) * rows + share * uniform)


@dataclass(frozen=True)
class SeedMechanism:
    """A solved seed LP.

    Parameters
    ----------
    rows
        z, float64 of shape (J, K): positive, rows sum to 1, budgets kept exactly.
    primal
        Objective of `rows`, in km.
    dual
        Certified lower bound on the LP's optimum, in km.
    solver
        Which solver made it.
    iterations
        Its iterations.
    """

    rows: Array
    primal: float
    dual: float
    solver: str
    iterations: int

    @property
    def gap(self) -> float:
        """Relative duality gap (primal − dual) / max(|primal|, tiny)."""
        return (self.primal - self.dual) / max(abs(self.primal), np.finfo(float).tiny)


@dataclass(frozen=True)
class DualPart:
    """What some columns contribute to a lower bound.

    Parameters
    ----------
    value, magnitude, terms
        Sum of the terms, of their absolute values, and how many they are.
    sizes
        By seed, the largest sum of absolute values that a reduced cost was made of, shape (J,) or as given.
    """

    value: float
    magnitude: float
    terms: int
    sizes: Array

    def plus(self, value: float, magnitude: float, terms: int) -> "DualPart":
        """Return the part with further terms."""
        return DualPart(self.value + value, self.magnitude + magnitude, self.terms + terms, self.sizes)


def dual_part(reduced: Array, sizes: Array, lower: Array, upper: Array) -> DualPart:
    """Return Σ min over lower ≤ z ≤ upper of r z, with what rounding needs to know.

    Parameters
    ----------
    reduced
        r, float64 with outputs along the first axis.
    sizes
        Sum of the absolute values of the few terms of each r, same shape.
    lower, upper
        Bounds, broadcastable.
    """
    terms = np.minimum(lower * reduced, upper * reduced)
    return DualPart(float(terms.sum()), float(np.abs(terms).sum()), terms.size, sizes.max(axis=0))


def dual_bound_of(parts: Sequence[DualPart], nu: Array, total: float) -> float:
    """Return a lower bound on the optimum from any multipliers, rounded outward.

    For λ ≥ 0 on rows A z ≥ b and free ν on Σ_k z_k = t, every feasible z has
    c·z ≥ t Σ ν + λ·b + Σ r z with r = c − Aᵀ λ − ν, and z lies between its bounds.

    Parameters
    ----------
    parts
        λ·b and the minima of r z, of all columns.
    nu
        ν, any shape.
    total
        t.
    """
    value, magnitude = sum(p.value for p in parts), sum(p.magnitude for p in parts)
    sizes = np.max([p.sizes for p in parts], axis=0)
    weight = total * float(np.abs(nu).sum())
    # Rounding of the sums, and of the reduced costs, which weigh at most their largest in every row of z.
    terms = sum(p.terms for p in parts) + nu.size
    rounding = np.finfo(float).eps * (terms * (weight + magnitude) + _MOST_TERMS * total * float(sizes.sum()))
    return float(total * nu.sum() + value - rounding)
