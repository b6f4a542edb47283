"""The structured interior-point method for the seed LP.

For output k the constraints touch only column z_·k, through the same sparse grid; only the J row sums tie the
outputs together. With slacks s1 = g z_j − z_i, s2 = z − δ, multipliers λ1, λ2 and θ = λ / s, output k has the
J × J matrix of the grid's pattern

    H_k = diag(θ2) + Σ_e θ1_e (g_e e_j − e_i)(g_e e_j − e_i)ᵀ,

and a Newton step is H_k Δz_k − Δν = r_k, Σ_k Δz_k = r_e, hence one dense Schur system
(Σ_k H_k^{-1}) Δν = r_e − Σ_k H_k^{-1} r_k. Mehrotra's predictor-corrector method with Gondzio's multiple
centrality correctors, slacks as iterates of their own, iterative refinement with the structured product.

Nothing here is trusted: the rows are repaired to keep every constraint exactly, and the reported dual is a
lower bound for whatever multipliers come out.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from mdpext_dask.seed.block_tridiagonal import FIRST_SHIFT, LARGEST_SHIFT, Array, BlockTridiagonal, Mapper
from mdpext_dask.seed.model import SeedMechanism, SeedProblem, dual_bound

_ITERATIONS = 200
# Multipliers start at this share of the mean cost over the slack.
_START = 0.1
_TO_BOUNDARY = 0.99
_SMALLEST_STEP = 1e-8
_CORRECTORS = 3
_REFINEMENTS = 2
_REFINE_ABOVE = 1e-12
# Without a better gap for so many iterations, the best iterate is the answer.
_PATIENCE = 15


class _Slacks(NamedTuple):
    """What belongs to each inequality: by east edges, north edges, floors.

    Shapes (2, K, n - 1, m), (2, K, n, m - 1) and (K, n, m); index 0 of the first axis bounds the seed further
    east or north by the other one, index 1 the other way round.
    """

    east: Array
    north: Array
    floor: Array


@dataclass(frozen=True)
class _Operators:
    """The constraint matrix A of the LP, as grid operations: A z = (g z_j − z_i, z)."""

    east: Array
    north: Array

    def forward(self, z: Array) -> _Slacks:
        """Return A z."""
        return _Slacks(
            np.stack([self.east[0] * z[:, :-1] - z[:, 1:], self.east[1] * z[:, 1:] - z[:, :-1]]),
            np.stack(
                [self.north[0] * z[:, :, :-1] - z[:, :, 1:], self.north[1] * z[:, :, 1:] - z[:, :, :-1]]
            ),
            z,
        )

    def transposed(self, v: _Slacks) -> Array:
        """Return Aᵀ v."""
        total = v.floor.copy()
        total[:, :-1] += self.east[0] * v.east[0] - v.east[1]
        total[:, 1:] += self.east[1] * v.east[1] - v.east[0]
        total[:, :, :-1] += self.north[0] * v.north[0] - v.north[1]
        total[:, :, 1:] += self.north[1] * v.north[1] - v.north[0]
        return total

    def magnitude(self, v: _Slacks) -> Array:
        """Return |A_budget|ᵀ |v|: the size of what Aᵀ v adds up, without the floors."""
        total = np.zeros_like(v.floor)
        total[:, :-1] += self.east[0] * v.east[0] + v.east[1]
        total[:, 1:] += self.east[1] * v.east[1] + v.east[0]
        total[:, :, :-1] += self.north[0] * v.north[0] + v.north[1]
        total[:, :, 1:] += self.north[1] * v.north[1] + v.north[0]
        return total

    def normal(self, theta: _Slacks) -> tuple[Array, Array, Array]:
        """Return diagonal and couplings (within, between blocks) of H = Aᵀ diag(θ) A for all outputs."""
        main = theta.floor.copy()
        main[:, :-1] += self.east[0] ** 2 * theta.east[0] + theta.east[1]
        main[:, 1:] += self.east[1] ** 2 * theta.east[1] + theta.east[0]
        main[:, :, :-1] += self.north[0] ** 2 * theta.north[0] + theta.north[1]
        main[:, :, 1:] += self.north[1] ** 2 * theta.north[1] + theta.north[0]
        within = -(self.north[0] * theta.north[0] + self.north[1] * theta.north[1])
        between = -(self.east[0] * theta.east[0] + self.east[1] * theta.east[1])
        return main, within, between


@dataclass
class _Iterate:
    """z (scaled by K), slacks, multipliers, ν."""

    z: Array
    slack: _Slacks
    multiplier: _Slacks
    nu: Array


class _Step(NamedTuple):
    z: Array
    slack: _Slacks
    multiplier: _Slacks
    nu: Array


class _Newton:
    """The Newton system at one iterate, factorised."""

    def __init__(self, operators: _Operators, iterate: _Iterate, mapper: Mapper) -> None:
        self._operators, self._iterate = operators, iterate
        theta = _Slacks(*(m / s for m, s in zip(iterate.multiplier, iterate.slack, strict=True)))
        self._theta = theta
        self._main, self._within, self._between = operators.normal(theta)
        self._system = BlockTridiagonal(self._main, self._within, self._between)
        schur = self._system.inverse_sum(mapper)
        self._schur_scale = 1 / np.sqrt(np.diag(schur))
        schur *= self._schur_scale[:, None] * self._schur_scale
        self._factor = _cholesky(schur)

    def step(self, complementarity: _Slacks, residuals: "_Residuals | None") -> _Step:
        """Return the step for right-hand sides of complementarity, and the other residuals if given."""
        slack, multiplier = self._iterate.slack, self._iterate.multiplier
        quotients = [c / s for c, s in zip(complementarity, slack, strict=True)]
        if residuals is not None:
            for quotient, theta, primal in zip(quotients, self._theta, residuals.primal, strict=True):
                quotient -= theta * primal
        right = self._operators.transposed(_Slacks(*quotients))
        sums = np.zeros(right.shape[1:])
        if residuals is not None:
            right -= residuals.dual
            sums = residuals.sums
        z, nu = self._solve(right, sums)
        tolerance = _REFINE_ABOVE * max(float(np.abs(right).max()), 1e-300)
        for _ in range(_REFINEMENTS):
            rest = right - (self._product(z) - nu)
            rest_sums = sums - z.sum(axis=0)
            if np.abs(rest).max() <= tolerance and np.abs(rest_sums).max() <= _REFINE_ABOVE:
                break
            more_z, more_nu = self._solve(rest, rest_sums)
            z, nu = z + more_z, nu + more_nu
        moved = self._operators.forward(z)
        if residuals is not None:
            moved = _Slacks(*(a + b for a, b in zip(moved, residuals.primal, strict=True)))
        change = _Slacks(
            *((c - m * d) / s for c, m, d, s in zip(complementarity, multiplier, moved, slack, strict=True))
        )
        return _Step(z, moved, change, nu)

    def _solve(self, right: Array, sums: Array) -> tuple[Array, Array]:
        first = self._system.solve(right)
        rest = (sums - first.sum(axis=0)).ravel()
        scaled = cho_solve(self._factor, self._schur_scale * rest, check_finite=False)
        nu = (self._schur_scale * scaled).reshape(sums.shape)
        return first + self._system.solve(np.broadcast_to(nu, right.shape)), nu

    def _product(self, z: Array) -> Array:
        total = self._main * z
        total[:, :-1] += self._between * z[:, 1:]
        total[:, 1:] += self._between * z[:, :-1]
        total[:, :, :-1] += self._within * z[:, :, 1:]
        total[:, :, 1:] += self._within * z[:, :, :-1]
        return total


class _Residuals(NamedTuple):
    primal: _Slacks
    dual: Array
    sums: Array


@dataclass(frozen=True)
class _Best:
    """The iterate with the smallest certified gap so far."""

    gap: float
    dual: float
    z: Array


def solve_interior_point(problem: SeedProblem, *, gap: float = 1e-6, threads: int = 1) -> SeedMechanism:
    """Solve a seed LP to a relative duality gap.

    Parameters
    ----------
    problem
        The LP.
    gap
        Relative duality gap at which to stop.
    threads
        Threads for the sum over outputs; they do not change the result.

    Returns
    -------
    The iterate with the smallest gap: its rows, repaired, and the lower bound of its multipliers. It may miss
    `gap` where the arithmetic ends first; the returned gap says so.

    Raises
    ------
    SolverError
        If not even the first steps succeed, or the rows cannot be repaired.
    """
    seeds_x, seeds_y = problem.seeds_shape
    outputs = problem.cost.shape[1]
    if outputs == 1 or not problem.cost.any():
        # One mechanism, or all equally good.
        rows = np.full_like(problem.cost, 1 / outputs)
        value = problem.objective(rows)
        return SeedMechanism(rows=rows, primal=value, dual=value, solver="structured", iterations=0)
    # Blocks along the longer side: the work grows with the cube of the shorter one.
    flip = seeds_y > seeds_x
    scale = float(np.abs(problem.cost).max())
    cost = _by_output(problem.cost.reshape(seeds_x, seeds_y, outputs) / scale, flip)
    # A budget beyond log(1/δ) binds nothing, and its huge coefficient would only do harm.
    largest = -np.log(problem.min_probability)
    growth = [np.exp(np.minimum(_by_output(b, flip), largest)) for b in (problem.budget_x, problem.budget_y)]
    operators = _Operators(*(reversed(growth) if flip else growth))
    with ThreadPoolExecutor(threads) as pool:
        mapper: Mapper = pool.map if threads > 1 else map
        best, iterations = _iterate(cost, operators, problem.min_probability, gap, mapper)
    z = np.moveaxis(best.z, 0, -1)
    rows = problem.repair((z.swapaxes(0, 1) if flip else z).reshape(problem.cost.shape) / outputs)
    return SeedMechanism(
        rows=rows,
        primal=problem.objective(rows),
        dual=scale * best.dual,
        solver="structured",
        iterations=iterations,
    )


def _by_output(values: Array, flip: bool) -> Array:
    """Bring (..., seeds east, seeds north, K) to (..., K, blocks, block size)."""
    moved = np.moveaxis(values, -1, -3)
    return np.ascontiguousarray(moved.swapaxes(-1, -2) if flip else moved)


def _iterate(
    cost: Array, operators: _Operators, min_probability: float, gap: float, mapper: Mapper
) -> tuple[_Best, int]:
    """Follow the central path from the uniform mechanism; return the best iterate and their number.

    Columns are scaled by K, so that the uniform mechanism is z = 1.
    """
    outputs = len(cost)
    floor = min_probability * outputs
    z = np.ones_like(cost)
    slack = operators.forward(z)._replace(floor=z - floor)
    level = _START * float(np.abs(cost).mean())
    iterate = _Iterate(z, slack, _Slacks(*(level / s for s in slack)), np.zeros(cost.shape[1:]))
    best = _Best(np.inf, -np.inf, z)
    waited = 0
    for iteration in range(_ITERATIONS):
        residuals, dual = _measure(cost, operators, floor, iterate)
        primal = float(np.vdot(cost, iterate.z)) / outputs
        relative = (primal - dual) / max(abs(primal), np.finfo(float).tiny)
        if relative < best.gap:
            best, waited = _Best(relative, dual, iterate.z), 0
        else:
            waited += 1
        if best.gap <= gap or waited > _PATIENCE:
            return best, iteration
        try:
            newton = _Newton(operators, iterate, mapper)
        except np.linalg.LinAlgError:
            return best, iteration
        if _advance(newton, iterate, residuals) < _SMALLEST_STEP:
            return best, iteration
    return best, _ITERATIONS


def _measure(cost: Array, operators: _Operators, floor: float, iterate: _Iterate) -> tuple[_Residuals, float]:
    """Return the residuals of the optimality conditions, and the lower bound of the multipliers."""
    held = operators.transposed(iterate.multiplier)
    product = operators.forward(iterate.z)
    primal = _Slacks(
        product.east - iterate.slack.east,
        product.north - iterate.slack.north,
        iterate.z - floor - iterate.slack.floor,
    )
    outputs = len(cost)
    sums = outputs - iterate.z.sum(axis=0)
    reduced = cost - held + iterate.multiplier.floor - iterate.nu
    # All multipliers are positive, so what was subtracted is as large as their operator's absolute value; the
    # floors' are subtracted and added again.
    sizes = (
        np.abs(cost)
        + np.abs(iterate.nu)
        + operators.magnitude(iterate.multiplier)
        + 2 * iterate.multiplier.floor
    )
    dual = dual_bound(
        reduced.reshape(outputs, -1).T, sizes.reshape(outputs, -1).T, iterate.nu.ravel(), floor / outputs
    )
    return _Residuals(primal, cost - held - iterate.nu, sums), dual


def _advance(newton: _Newton, iterate: _Iterate, residuals: _Residuals) -> float:
    """Take one step in place: predictor, corrector, centrality correctors; return the shorter length."""
    slack, multiplier = iterate.slack, iterate.multiplier
    count = sum(s.size for s in slack)
    mu = _complementarity(slack, multiplier) / count
    affine = newton.step(_Slacks(*(-m * s for m, s in zip(multiplier, slack, strict=True))), residuals)
    primal, dual = _length(slack, affine.slack), _length(multiplier, affine.multiplier)
    ahead = _complementarity(_moved(slack, affine.slack, primal), _moved(multiplier, affine.multiplier, dual))
    target = (ahead / count / mu) ** 3 * mu
    step = newton.step(
        _Slacks(
            *(
                target - m * s - dm * ds
                for m, s, dm, ds in zip(multiplier, slack, affine.multiplier, affine.slack, strict=True)
            )
        ),
        residuals,
    )
    primal, dual = _length(slack, step.slack), _length(multiplier, step.multiplier)
    for _ in range(_CORRECTORS):
        if min(primal, dual) > 0.95:
            break
        step, lengths = _centred(newton, iterate, step, (primal, dual), target)
        if lengths == (primal, dual):
            break
        primal, dual = lengths
    primal, dual = min(1.0, _TO_BOUNDARY * primal), min(1.0, _TO_BOUNDARY * dual)
    iterate.z = iterate.z + primal * step.z
    iterate.slack = _moved(slack, step.slack, primal)
    iterate.nu = iterate.nu + dual * step.nu
    iterate.multiplier = _moved(multiplier, step.multiplier, dual)
    return min(primal, dual)


def _centred(
    newton: _Newton, iterate: _Iterate, step: _Step, lengths: tuple[float, float], target: float
) -> tuple[_Step, tuple[float, float]]:
    """Add one of Gondzio's correctors if it lengthens the step (Comput. Optim. Appl. 6, 1996).

    Products that a longer step would throw far off the central path are pulled back into [0.1, 10] μ.
    """
    further = min(1.0, 1.5 * lengths[0] + 0.1), min(1.0, 1.5 * lengths[1] + 0.1)
    trial = zip(
        _moved(iterate.slack, step.slack, further[0]),
        _moved(iterate.multiplier, step.multiplier, further[1]),
        strict=True,
    )
    products = [s * m for s, m in trial]
    pull = (np.clip(p, 0.1 * target, 10 * target) - p for p in products)
    corrector = newton.step(_Slacks(*(np.maximum(p, -10 * target) for p in pull)), None)
    tried = _Step(
        step.z + corrector.z,
        _moved(step.slack, corrector.slack, 1.0),
        _moved(step.multiplier, corrector.multiplier, 1.0),
        step.nu + corrector.nu,
    )
    reached = _length(iterate.slack, tried.slack), _length(iterate.multiplier, tried.multiplier)
    if min(reached) >= 0.9 * min(lengths) and sum(reached) >= sum(lengths) + 0.02:
        return tried, reached
    return step, lengths


def _moved(start: _Slacks, change: _Slacks, length: float) -> _Slacks:
    return _Slacks(*(a + length * b for a, b in zip(start, change, strict=True)))


def _complementarity(slack: _Slacks, multiplier: _Slacks) -> float:
    return sum(float(np.vdot(s, m)) for s, m in zip(slack, multiplier, strict=True))


def _length(start: _Slacks, change: _Slacks) -> float:
    """Return the largest length, at most 1 after division, up to which everything stays positive."""
    fastest = max((float((-b / a).max()) if a.size else 0.0) for a, b in zip(start, change, strict=True))
    return 1.0 if fastest <= 1.0 else 1.0 / fastest


def _cholesky(schur: Array) -> tuple[Array, bool]:
    """Factorise a matrix with unit diagonal, shifted as little as it takes."""
    shift = 0.0
    while True:
        try:
            factor: tuple[Array, bool] = cho_factor(
                schur + shift * np.eye(len(schur)) if shift else schur, check_finite=False
            )
        except np.linalg.LinAlgError:
            shift = max(FIRST_SHIFT, 10 * shift)
            if shift > LARGEST_SHIFT:
                raise
        else:
            return factor
