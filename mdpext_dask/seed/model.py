"""The seed LP as data, its exact feasibility, and how an approximate solution is made exact.

    min Σ C_jk z_jk   s.t.  Σ_k z_jk = 1,   z_jk ≥ δ,   z_ik ≤ exp(β_e h_0) z_jk

for every pair {i, j} of neighbouring seeds on the grid, both ways.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError

# Outward allowance on a log ratio of two float64 probabilities: both logarithms and the difference.
_LOG_ROUNDING = 1e-13
# More than this share of the uniform mechanism means that the solver did not solve the LP.
_LARGEST_UNIFORM_SHARE = 1e-3
# Relative to the floor: the first step of the repair where rounding alone is at fault.
_MARGIN = 1e-9
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
    beta
        Budgets (β_1, β_2) along the axes, in 1/km.
    cell_km
        Distance h_0 between neighbouring seeds, in km.
    min_probability
        Floor δ of every probability.
    """

    cost: NDArray[np.float64]
    seeds_shape: tuple[int, int]
    beta: tuple[float, float]
    cell_km: float
    min_probability: float

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
        """Return neighbouring seeds i < j, each pair once, and the budget β h_0 of each."""
        index = np.arange(self.seeds_shape[0] * self.seeds_shape[1]).reshape(self.seeds_shape)
        east = index[:-1].ravel(), index[1:].ravel()
        north = index[:, :-1].ravel(), index[:, 1:].ravel()
        budget = np.concatenate(
            [
                np.full(len(east[0]), self.beta[0] * self.cell_km),
                np.full(len(north[0]), self.beta[1] * self.cell_km),
            ]
        )
        return (
            np.concatenate([east[0], north[0]]),
            np.concatenate([east[1], north[1]]),
            budget,
        )

    def objective(self, rows: NDArray[np.float64]) -> float:
        """Return Σ C_jk z_jk in km."""
        return float((self.cost * rows).sum())

    def worst_ratio(self, rows: NDArray[np.float64]) -> float:
        """Return the largest |log z_ik − log z_jk| / (β_e h_0) over neighbours, rounded outward.

        The budgets hold exactly when it is ≤ 1.
        """
        i, j, budget = self.pairs()
        logs = np.log(rows)
        change = np.abs(logs[i] - logs[j]).max(axis=1) + _LOG_ROUNDING
        return float((change / budget).max())

    def repair(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
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
        growth = np.exp(np.minimum(budget, _LARGEST_EXPONENT))[:, None]
        outputs = rows.shape[1]
        share = 0.0
        while share <= _LARGEST_UNIFORM_SHARE:
            mixed: NDArray[np.float64] = (1 - share) * rows + share / outputs
            mixed /= mixed.sum(axis=1, keepdims=True)
            if self.worst_ratio(mixed) <= 1 and mixed.min() >= self.min_probability:
                return mixed
            lower, upper = rows[i], rows[j]
            excess = np.maximum(upper - growth * lower, lower - growth * upper)
            over = max(float((excess / (growth - 1)).max()), 0.0)
            under = max(self.min_probability - float(mixed.min()), 0.0)
            share = max(2 * share, outputs * (over + under + self.min_probability * _MARGIN))
        raise SolverError(
            f"the seed LP's solution breaks its budgets by a factor of {self.worst_ratio(rows):.6g}; "
            "that is beyond repair"
        )


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

    rows: NDArray[np.float64]
    primal: float
    dual: float
    solver: str
    iterations: int

    @property
    def gap(self) -> float:
        """Relative duality gap (primal − dual) / max(|primal|, tiny)."""
        return (self.primal - self.dual) / max(abs(self.primal), np.finfo(float).tiny)
