"""The linear program over mechanisms with a budget for every pair of records, solved by cutting planes.

    min Σ C_ik z_ik   s.t.  Σ_k z_ik = 1,   z_ik ≥ δ,   z_ik ≤ exp(b_ij) z_jk   for all records i, j,

the optimal mechanism of Bordenabe, Chatzikokolakis and Palamidessi (CCS 2014) where b_ij = ε d(i, j). Few of
the N² K rows bind, so they are made as they are needed: solve with some, add those that are broken, solve
again. The solver is the structured interior-point method of the seed, which has one N × N matrix for each
output, here a dense one, whatever rows that output has.

What comes out is repaired to keep every pair for certain. The lower bound comes from a part of the rows, so
it holds for all of them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.dense_rows import Array, Indices, PairRows, Triples
from mdpext_dask.seed.budget import log_ratio_error
from mdpext_dask.seed.columns import GridProgram
from mdpext_dask.seed.interior_point import solve_program
from mdpext_dask.seed.solve import one_blas_thread

# Relative duality gaps: one after the other, until no rows are missing; and the largest that is an answer.
_GAPS, _LARGEST_GAP = (1e-2, 1e-4, 1e-6), 1e-3
# Rows are missing if the repair would need a larger share of the uniform mechanism because of them. With them
# come those that are about to break, in log units: few, and they save rounds.
_SHARE, _NEARLY = 2e-7, 0.02
_ROUNDS = 50
# Budgets are made smaller by so much, relative to them: distances are good to a few units in the last place.
_BUDGET_ROUNDING = 1e-14
# Numbers that are compared at once.
_AT_ONCE = 2_000_000
# More than this share of the uniform mechanism means that the solver did not solve the program; and the first
# step of the repair, relative to the floor, where rounding alone is at fault.
_LARGEST_UNIFORM_SHARE, _MARGIN = 1e-3, 1e-9
_LARGEST_EXPONENT = 700.0
# For predictions: floating-point operations a second of one processor, Newton steps of all rounds, and N × N
# arrays that an output needs: its matrix and its factor.
_SPEED, _STEPS, _MATRICES = 8e9, 150, 2
_MOST_BYTES = 8 * 2**30


@dataclass(frozen=True)
class PairProgram:
    """The program.

    Parameters
    ----------
    cost
        C, float64 of shape (N, K), in km.
    budget
        b, in log units: float64 of shape (N, N), symmetric, positive off the diagonal, rounded down.
    min_probability
        Floor δ of every probability.
    """

    cost: Array
    budget: Array
    min_probability: float

    def objective(self, rows: Array) -> float:
        """Return Σ C_ik z_ik in km."""
        return float((self.cost * rows).sum())

    def worst_excess(self, rows: Array) -> float:
        """Return the largest log z_ik − log z_jk − b_ij, rounded outward: all rows hold where it is ≤ 0."""
        worst = max(float(excess.max()) for _, excess in self._excesses(rows))
        return worst + log_ratio_error(rows.shape[1])

    def nearly_broken(self, rows: Array) -> "Triples":
        """Return the rows that are broken, or about to be."""
        found = []
        for first, excess in self._excesses(rows):
            risen, fallen, output = np.nonzero(excess > -_NEARLY)
            found.append((output, risen + first, fallen))
        return Triples(*(np.concatenate(part) for part in zip(*found, strict=True)))

    def _excesses(self, rows: Array) -> Iterator[tuple[int, Array]]:
        """Yield log z_ik − log z_jk − b_ij for some records i at a time: the first, and shape (n, N, K)."""
        logs = np.log(rows)
        step = max(_AT_ONCE // logs.size, 1)
        for first in range(0, len(logs), step):
            part = slice(first, first + step)
            excess = logs[part, None] - logs
            excess -= self.budget[part, :, None]
            here = np.arange(len(excess))
            excess[here, first + here] = -np.inf
            yield first, excess

    def repair(self, rows: Array) -> Array:
        """Return a mechanism near `rows` that keeps all rows for certain.

        As :meth:`mdpext_dask.seed.model.SeedProblem.repair`: (1 − t) z + t / K with the least t that does it.
        Where z_i − g z_j > 0 with g = exp(b), that falls by t (g − 1) / K; row sums stay.

        Raises
        ------
        SolverError
            If no small t is enough.
        """
        if not np.isfinite(rows).all() or (rows <= -self.min_probability).any():
            raise SolverError("the linear program's solution holds negative or non-finite probabilities")
        rows = np.maximum(rows, self.min_probability)
        rows = rows / rows.sum(axis=1, keepdims=True)
        outputs, share, needed = rows.shape[1], 0.0, None
        while share <= _LARGEST_UNIFORM_SHARE:
            mixed: Array = (1 - share) * rows + share / outputs
            mixed /= mixed.sum(axis=1, keepdims=True)
            if mixed.min() >= self.min_probability and self.worst_excess(mixed) <= 0:
                return mixed
            if needed is None:
                needed = self.uniform_share(rows) + outputs * self.min_probability * _MARGIN
            share = max(2 * share, needed)
        raise SolverError("the linear program's solution breaks its rows beyond repair")

    def uniform_share(self, rows: Array) -> float:
        """Return about the least t ≥ 0 for which (1 − t) z + t / K keeps rows and floor.

        It is K times the largest (z_i − g z_j) / (g − 1), or what is missing to the floor: to first order,
        and without what rounding needs.
        """
        worst = self.min_probability - float(rows.min())
        step = max(_AT_ONCE // rows.size, 1)
        for first in range(0, len(rows), step):
            gain = np.expm1(np.minimum(self.budget[first : first + step], _LARGEST_EXPONENT))[..., None]
            over = rows[first : first + step, None] - rows - gain * rows
            here = np.arange(len(over))
            over[here, first + here] = 0.0
            gain[here, first + here] = 1.0
            worst = max(worst, float((over / gain).max()))
        return float(max(worst, 0.0) * rows.shape[1])


@dataclass(frozen=True)
class PairSolution:
    """A solved program.

    Parameters
    ----------
    rows
        z, float64 of shape (N, K): all rows of the program hold for certain, each sums to 1 up to rounding.
    primal
        Its objective, in km.
    dual
        Certified lower bound on the optimum of the program with all rows, in km.
    iterations, rounds, constraints
        Newton steps of all rounds, rounds, and rows of the last one.
    """

    rows: Array
    primal: float
    dual: float
    iterations: int
    rounds: int
    constraints: int

    def facts(self) -> dict[str, float | int]:
        """Return what is worth telling, plain JSON values."""
        return {
            "variables": self.rows.size,
            "constraints": self.constraints,
            "rounds": self.rounds,
            "iterations": self.iterations,
            "lower_bound_km": self.dual,
            "gap": (self.primal - self.dual) / max(abs(self.primal), np.finfo(float).tiny),
        }


def budgets(epsilon_per_km: float, distance_km: Array) -> Array:
    """Return ε d rounded down, in log units."""
    return np.asarray(epsilon_per_km * distance_km * (1 - _BUDGET_ROUNDING))


def largest_size(outputs: int, seconds: float) -> int:
    """Return the number N of records up to which a program would be solved in time and memory."""
    by_time = seconds * _SPEED / (_STEPS * outputs)
    by_memory = _MOST_BYTES / (_MATRICES * outputs * 8)
    return max(int(min(by_time ** (1 / 3), by_memory**0.5)), 1)


def check_size(what: str, records: int, outputs: int, seconds: float) -> None:
    """Refuse a program that would not be solved in time or memory, before any work.

    Parameters
    ----------
    what
        What to call it.
    records, outputs
        N and K.
    seconds
        Time limit.

    Raises
    ------
    SolverError
        With what it would take.
    """
    sizes = (
        f"{records:,} records x {outputs} outputs are {records * outputs:.1e} variables and "
        f"{records**2 * outputs:.0e} constraints"
    )
    needed = outputs * float(records) ** 3 * _STEPS / _SPEED
    if needed > seconds:
        raise SolverError(f"{what}: {sizes}, about {needed:.1g} s of work; the limit is {seconds:g} s")
    memory = _MATRICES * outputs * records**2 * 8
    if memory > _MOST_BYTES:
        raise SolverError(f"{what}: {sizes}, {memory / 2**30:.0f} GiB of matrices")


def solve_pairs(
    program: PairProgram, near: tuple[Indices, Indices], seconds: float, what: str
) -> PairSolution:
    """Solve the program.

    Parameters
    ----------
    program
        The program.
    near
        Pairs of records i, j whose rows it starts with.
    seconds
        Time limit.
    what
        What to call it in errors.

    Raises
    ------
    SolverError
        If it is not solved in time, or not well enough.
    """
    deadline = time.monotonic() + seconds
    records, outputs = program.cost.shape
    if outputs == 1 or records == 1 or not program.cost.any():
        return _trivial(program)

    def check_time(*_: float) -> None:
        if time.monotonic() > deadline:
            raise SolverError(f"{what}: not solved within {seconds:g} s")

    scale = float(np.abs(program.cost).max())
    triples = _worth_having(program, Triples.of_pairs(*near, outputs))
    stage = rounds = iterations = 0
    with one_blas_thread():
        while True:
            rounds += 1
            growth = np.exp(program.budget[triples.risen, triples.fallen])
            grid = GridProgram.over_mechanisms(
                np.ascontiguousarray(program.cost.T[:, None]) / scale,
                PairRows((outputs, 1, records), triples, growth),
                program.min_probability * outputs,
            )
            solution = solve_program(grid, gap=_GAPS[stage], watcher=check_time)
            iterations += solution.iterations
            rows = np.maximum(solution.z[:, 0].T / outputs, program.min_probability)
            last, missing = stage == len(_GAPS) - 1, program.uniform_share(rows) > _SHARE
            if last and not missing:
                break
            if rounds == _ROUNDS:
                raise SolverError(f"{what}: rows are still broken after {_ROUNDS} rounds")
            if missing:
                before = len(triples)
                triples = triples.joined(_worth_having(program, program.nearly_broken(rows)))
                if len(triples) == before:
                    raise SolverError(f"{what}: the solver breaks rows that it was given")
            stage = min(stage + 1, len(_GAPS) - 1)
    if solution.gap > _LARGEST_GAP:
        raise SolverError(f"{what}: stopped at a relative gap of {solution.gap:.1e}")
    repaired = program.repair(rows)
    primal, dual = program.objective(repaired), scale / outputs * solution.dual
    return PairSolution(repaired, primal, dual, iterations, rounds, len(triples))


def _worth_having(program: PairProgram, triples: Triples) -> Triples:
    """Leave out rows that follow from δ ≤ z ≤ 1: their huge coefficients would only do harm."""
    largest = -np.log(program.min_probability)
    return triples.kept(program.budget[triples.risen, triples.fallen] < largest)


def _trivial(program: PairProgram) -> PairSolution:
    """Return the solution where there is one mechanism, one record, or no loss."""
    records, outputs = program.cost.shape
    rows = np.full(program.cost.shape, 1 / outputs)
    if records == 1:
        rows[:] = program.min_probability
        rows[0, program.cost[0].argmin()] += 1 - outputs * program.min_probability
    value = program.objective(rows)
    return PairSolution(rows, primal=value, dual=value, iterations=0, rounds=0, constraints=0)
