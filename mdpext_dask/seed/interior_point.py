"""The structured interior-point method.

For output k the constraints touch only column z_·k, through the same sparse grid; only the J row sums tie the
outputs together. With slacks s, multipliers λ and θ = λ / s, output k has the J × J matrix of the grid's
pattern H_k = A_kᵀ diag(θ) A_k, and a Newton step is H_k Δz_k − Δν = r_k, Σ_k Δz_k = r_e, hence one dense
Schur system

    (Σ_k H_k^{-1}) Δν = r_e − Σ_k H_k^{-1} r_k.

Mehrotra's predictor-corrector method with Gondzio's multiple centrality correctors, slacks as iterates of
their own, iterative refinement with the structured product. Outputs are cut into parts, always the same ones
for the same problem: threads, or workers elsewhere that make the sum of inverses, do not decide bits.

Nothing here is trusted: the rows are repaired to keep every constraint exactly, and the reported dual is a
lower bound for whatever multipliers come out.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from mdpext_dask.seed.block_tridiagonal import NormalMatrix, first_that_factorises
from mdpext_dask.seed.columns import SHARES, Columns, GridProgram, Lengths
from mdpext_dask.seed.grid_rows import PairRows
from mdpext_dask.seed.model import Array, SeedMechanism, SeedProblem, dual_bound_of

_ITERATIONS = 200
# Multipliers start at this share of the mean cost over the slack.
_START = 0.1
_TO_BOUNDARY = 0.99
_SMALLEST_STEP = 1e-8
# Centrality correctors: how many at most, until steps are so long, while they lengthen them by so much.
_CORRECTORS, _LONG_ENOUGH, _LEAST_GAIN = 3, 0.95, 0.02
_REFINEMENTS = 2
_REFINE_ABOVE = 1e-9
# Without a better gap for so many iterations, the best iterate is the answer.
_PATIENCE = 15
# Where it is enough that the objective settles, it has to for so many steps.
_SETTLED_STEPS = 3
# Outputs are cut into as many parts (a power of two) as leave each so many entries and outputs: numpy calls
# must be long for threads to run side by side.
_PART_ENTRIES, _PART_OUTPUTS, _MOST_PARTS = 24_000, 8, 16

# From the matrices of every part to the upper triangles of their sums of inverses, in order.
InverseSums = Callable[[Sequence[NormalMatrix]], Iterable[Array]]
# Called with every iterate: its objective, and the lower bound of its multipliers.
Watcher = Callable[[float, float], None]


@dataclass(frozen=True)
class Solution:
    """The iterate with the smallest gap.

    Parameters
    ----------
    z
        float64 of shape (K, n, m). Over K it sums to the program's total up to rounding, or as nearly as the
        arithmetic of an ill-conditioned end allows: divide by the sum.
    dual
        Certified lower bound on the optimum.
    gap
        |primal − dual| / |primal|, or by how much rows are broken, relative to their slacks, if that is more.
    iterations
        Newton steps taken.
    """

    z: Array
    dual: float
    gap: float
    iterations: int


def solve_interior_point(
    problem: SeedProblem, *, gap: float = 1e-6, threads: int = 1, inverse_sums: InverseSums | None = None
) -> SeedMechanism:
    """Solve a seed LP to a relative duality gap.

    Parameters
    ----------
    problem
        The LP.
    gap
        Relative duality gap at which to stop.
    threads, inverse_sums
        See :func:`solve_program`.

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
        return SeedMechanism(rows, value, value, "structured", 0)
    # Blocks along the longer side: the work grows with the cube of the shorter one.
    flip = seeds_y > seeds_x
    scale = float(np.abs(problem.cost).max())
    cost = by_output(problem.cost.reshape(seeds_x, seeds_y, outputs) / scale, flip)
    # A budget beyond log(1/δ) binds nothing, and its huge coefficient would only do harm.
    largest = -np.log(problem.min_probability)
    growth = [np.exp(np.minimum(by_output(b, flip), largest)) for b in (problem.budget_x, problem.budget_y)]
    between, within = reversed(growth) if flip else growth
    edges = PairRows((cost.shape[1], 1, cost.shape[2]), {(1, 0): between, (0, 1): within})
    program = GridProgram.over_mechanisms(cost, edges, problem.min_probability * outputs)
    solution = solve_program(program, gap=gap, threads=threads, inverse_sums=inverse_sums)
    rows = problem.repair(by_seed(solution.z, flip).reshape(problem.cost.shape) / outputs)
    dual = scale / outputs * solution.dual
    return SeedMechanism(rows, problem.objective(rows), dual, "structured", solution.iterations)


def by_output(values: Array, flip: bool) -> Array:
    """Bring (..., seeds east, seeds north, K) to (..., K, blocks, block size)."""
    moved = np.moveaxis(values, -1, -3)
    return np.ascontiguousarray(moved.swapaxes(-1, -2) if flip else moved)


def by_seed(values: Array, flip: bool) -> Array:
    """Bring (K, blocks, block size) to (seeds east, seeds north, K)."""
    return np.ascontiguousarray(np.moveaxis(values.swapaxes(-1, -2) if flip else values, 0, -1))


def sum_pairwise(sums: Iterable[Array]) -> Array:
    """Add arrays up as a binary tree, as they come, so that subtrees may be added elsewhere.

    The arrays are overwritten.
    """
    waiting: list[tuple[int, Array]] = []
    for one in sums:
        size, total = 1, one
        while waiting and waiting[-1][0] == size:
            total = np.add(waiting.pop()[1], total, out=total)
            size *= 2
        waiting.append((size, total))
    total = waiting.pop()[1]
    while waiting:
        total = np.add(waiting.pop()[1], total, out=total)
    return total


def solve_program(
    program: GridProgram,
    *,
    gap: float,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
    watcher: Watcher | None = None,
    least_slack: float = 0.0,
    iterations: int = _ITERATIONS,
    deadline: float = math.inf,
    settled: float = 0.0,
) -> Solution:
    """Follow the central path of a program on a grid.

    Parameters
    ----------
    program
        The program.
    gap
        Relative duality gap at which to stop.
    threads
        Threads for the parts; they do not change the result.
    inverse_sums
        Function that makes the sums of inverses instead of these threads: the most expensive part for many
        seeds.
    watcher
        Called with the objective and the lower bound of every iterate.
    least_slack
        Slacks of rows start at no less than this share of the largest, for a start on the boundary.
    iterations
        Newton steps at most.
    deadline
        When to stop at the best iterate so far, in s of :func:`time.monotonic`. It is looked at before every
        call of a part, several hundred times in a step of a large program.
    settled
        Stop as well where three steps have lowered the objective by less than this share of what all steps
        have: a feasible start is improved by most of what can be gained long before the bound says so.

    Returns
    -------
    The iterate with the smallest gap.
    """
    outputs = len(program.cost)
    parts = 1
    while 2 * parts <= min(_MOST_PARTS, outputs // _PART_OUTPUTS, program.cost.size // _PART_ENTRIES):
        parts *= 2
    cuts = [outputs * part // parts for part in range(parts + 1)]
    # Products of slacks and multipliers as large as costs times probabilities are.
    level = _START * float((np.abs(program.cost) * program.start).mean())
    with ThreadPoolExecutor(threads) as pool:
        each = pool.map if threads > 1 and parts > 1 else map
        ranges = (slice(*ends) for ends in itertools.pairwise(cuts))
        columns = list(each(lambda part: Columns(program.part(part), level, least_slack), ranges))
        team = _Team(columns, each, inverse_sums, deadline)
        return _iterate(program, team, gap, iterations, watcher, settled)


class _TimeUp(Exception):
    """The deadline has passed in the middle of a step."""


@dataclass(frozen=True)
class _Team:
    """All parts, and how their methods are called, until when."""

    columns: list[Columns]
    mapper: Any
    inverse_sums: InverseSums | None
    deadline: float

    def each(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method of every part; results in order."""
        return list(self._calls(method, *arguments))

    def _calls(self, method: Callable[..., Any], *arguments: Any) -> Iterable[Any]:
        def call(part: Columns) -> Any:
            if time.monotonic() > self.deadline:
                raise _TimeUp
            return method(part, *arguments)

        results: Iterable[Any] = self.mapper(call, self.columns)
        return results

    def schur(self) -> "_Schur":
        """Factorise every part and the Schur matrix Σ_k H_k^{-1}."""
        matrices = self.each(Columns.stencil)
        if self.inverse_sums is None:
            self.each(Columns.factorise)
            sums = self._calls(Columns.inverse_sum)
        else:
            sums = self.inverse_sums(matrices)
            self.each(Columns.factorise)
        return _Schur(sum_pairwise(sums))


class _Schur:
    """The factorised Schur matrix, scaled to a unit diagonal.

    Parameters
    ----------
    upper
        The matrix, of which only the upper triangle is read; it is overwritten.

    Raises
    ------
    numpy.linalg.LinAlgError
        If it stays indefinite up to the largest shift.
    """

    def __init__(self, upper: Array) -> None:
        self._scale = 1 / np.sqrt(np.diag(upper))
        upper *= self._scale[:, None]
        upper *= self._scale

        def factorise(shift: float) -> tuple[Array, bool]:
            shifted = upper + shift * np.eye(len(upper)) if shift else upper
            return cho_factor(shifted, check_finite=False)

        self._factor, _ = first_that_factorises(factorise)

    def solve(self, right: Array) -> Array:
        """Return the solution for one right-hand side of shape (n, m)."""
        solution = self._scale * cho_solve(self._factor, self._scale * right.ravel(), check_finite=False)
        return np.asarray(solution.reshape(right.shape))


def _iterate(
    program: GridProgram, team: _Team, gap: float, iterations: int, watcher: Watcher | None, settled: float
) -> Solution:
    nu = np.zeros(program.cost.shape[1:])
    objectives: list[float] = []
    best = Solution(program.start, -np.inf, np.inf, 0)
    waited = 0
    for iteration in range(iterations + 1):
        try:
            measures = team.each(Columns.measure, nu)
        except _TimeUp:
            break
        primal = sum(m.primal for m in measures)
        dual = dual_bound_of([m.dual for m in measures], nu, program.total)
        if watcher is not None:
            watcher(primal, dual)
        # A start that breaks some rows is led back to them; until then the objective may be below the bound.
        relative = max(
            abs(primal - dual) / max(abs(primal), np.finfo(float).tiny), *(m.infeasibility for m in measures)
        )
        if not np.isfinite(relative):
            break
        if relative < best.gap:
            z = np.concatenate([part.z for part in team.columns])
            best, waited = Solution(z, dual, relative, iteration), 0
        else:
            waited += 1
        best = Solution(best.z, best.dual, best.gap, iteration)
        objectives.append(primal)
        recent = objectives[-1 - _SETTLED_STEPS :]
        fallen = objectives[0] - primal
        if len(objectives) > _SETTLED_STEPS and 0 <= recent[0] - primal < settled * fallen:
            break
        if best.gap <= gap or waited > _PATIENCE or iteration == iterations:
            break
        try:
            schur = team.schur()
            step = _advance(team, schur, program.total - sum(m.sums for m in measures))
        except (np.linalg.LinAlgError, _TimeUp):
            break
        if step is None:
            break
        nu = nu + step
    return best


def _advance(team: _Team, schur: _Schur, sums: Array) -> Array | None:
    """Take one step: predictor, corrector, centrality correctors; return the change of ν.

    None if the step became too short to be worth taking.
    """
    products = team.each(Columns.complementarity)
    count = sum(terms for _, terms in products)
    mu = sum(value for value, _ in products) / count
    nu = _newton(team, schur, team.each(Columns.aim_affine), sums)
    lengths = _shortest(team.each(Columns.finish))
    ahead = sum(team.each(Columns.ahead, lengths)) / count
    target = max(ahead / mu, 0.0) ** 3 * mu
    none = np.zeros_like(sums)
    for round_ in range(1 + _CORRECTORS):
        if round_ == 0:
            largest = team.each(Columns.aim_second, target)
        elif min(lengths) > _LONG_ENOUGH:
            break
        else:
            further = tuple(min(1.0, 1.5 * length + 0.1) for length in lengths)
            largest = team.each(Columns.aim_central, target, further)
        more_nu = _newton(team, schur, largest, none)
        # A share of each corrector that lengthens the steps most (Colombo and Gondzio, Comput. Optim.
        # Appl. 41, 2008).
        shares = zip(*team.each(Columns.finish_corrector), strict=True)
        by_share = [_shortest(list(lengths)) for lengths in shares]
        (primal, at_primal), (dual, at_dual) = (
            max((lengths[side], share) for lengths, share in zip(by_share, SHARES, strict=True))
            for side in (0, 1)
        )
        if round_ and primal + dual < sum(lengths) + _LEAST_GAIN:
            team.each(Columns.discard)
            break
        team.each(Columns.blend, at_primal, at_dual)
        lengths, nu = (primal, dual), nu + at_dual * more_nu
    lengths = min(1.0, _TO_BOUNDARY * lengths[0]), min(1.0, _TO_BOUNDARY * lengths[1])
    if min(lengths) < _SMALLEST_STEP:
        return None
    team.each(Columns.advance, lengths)
    return lengths[1] * nu


def _newton(team: _Team, schur: _Schur, largest: list[float], sums: Array) -> Array:
    """Solve the Newton system for the right-hand sides that the parts aim at; return Δν."""
    size = max(*largest, 1e-300)
    nu, rest_sums, error = np.zeros_like(sums), sums, np.inf
    for _ in range(1 + _REFINEMENTS):
        more_nu = schur.solve(rest_sums - sum(team.each(Columns.eliminate)))
        outcomes = team.each(Columns.couple, more_nu, nu + more_nu)
        left = sums - sum(moved for _, moved in outcomes)
        before, error = error, max(max(rest for rest, _ in outcomes) / size, float(np.abs(left).max()))
        if not error < before:
            # Where the arithmetic ends, refining makes it worse.
            team.each(Columns.undo)
            break
        nu, rest_sums = nu + more_nu, left
        if error <= _REFINE_ABOVE:
            break
    return nu


def _shortest(lengths: list[Lengths]) -> Lengths:
    return min(primal for primal, _ in lengths), min(dual for _, dual in lengths)
