"""The structured solver: against HiGHS over all shapes, in every extreme, the same on every thread."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from mdpext_dask.errors import SolverError
from mdpext_dask.seed import interior_point, solve
from mdpext_dask.seed.block_tridiagonal import BlockTridiagonal, LatticeMatrix, NormalMatrix, ends
from mdpext_dask.seed.columns import GridProgram
from mdpext_dask.seed.grid_rows import CellRows
from mdpext_dask.seed.highs import solve_highs
from mdpext_dask.seed.interior_point import solve_interior_point, solve_program
from mdpext_dask.seed.model import SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem
from tests.support.reference import SEEDS
from tests.support.refusals import refused
from tests.support.seed_problems import assert_feasible, problem_of_axes, random_problem


def agree(problem: SeedProblem, tolerance: float = 2e-6) -> None:
    """Compare with HiGHS: feasible exactly, primal and dual on either side of the same optimum."""
    structured, highs = solve_interior_point(problem), solve_highs(problem)
    assert_feasible(problem, structured.rows)
    size = max(abs(highs.primal), 1e-300)
    assert abs(structured.primal - highs.primal) <= tolerance * size
    assert structured.dual <= highs.primal + 1e-12 * size
    assert highs.dual <= structured.primal + 1e-12 * size
    assert structured.gap <= tolerance


@given(seed=SEEDS)
def test_it_agrees_with_highs(seed: int) -> None:
    agree(random_problem(np.random.default_rng(seed)))


@pytest.mark.parametrize("budget", [1e-3, 0.03, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 9), (7, 1), (3, 6), (6, 3)])
def test_budgets_from_tight_to_none_on_every_shape(budget: float, shape: tuple[int, int]) -> None:
    cost = np.random.default_rng(1).exponential(size=(shape[0] * shape[1], 5))
    agree(problem_of_axes(cost, shape, (budget, budget), 1e-6))


@pytest.mark.parametrize("kind", ["tied", "huge spread", "mostly zero"])
def test_costs_of_all_kinds(kind: str) -> None:
    rng = np.random.default_rng(2)
    cost = rng.exponential(size=(20, 6))
    kinds = {
        "tied": np.rint(cost),
        "huge spread": cost * 10.0 ** rng.uniform(-6, 6, size=(20, 1)),
        "mostly zero": cost * (rng.random((20, 1)) < 0.2),
    }
    agree(random_problem(rng, cost=kinds[kind], seeds_shape=(4, 5)))


def test_threads_and_repetition_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four parts, as of a problem that is many times as large.
    monkeypatch.setattr(interior_point, "_PART_ENTRIES", 3000)
    rng = np.random.default_rng(5)
    problem = random_problem(rng, cost=rng.exponential(size=(48, 270)), seeds_shape=(6, 8))
    first = solve_interior_point(problem)
    for threads in (1, 2, 3):
        again = solve_interior_point(problem, threads=threads)
        assert np.array_equal(again.rows, first.rows)
        assert again.dual == first.dual


def test_auto_falls_back_to_highs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(6))
    assert solve_seed_problem(problem).solver == "structured"
    assert solve_seed_problem(problem, "highs").solver == "highs"

    def fail(*_: Any, **__: Any) -> None:
        raise SolverError("no luck")

    monkeypatch.setattr(solve, "solve_interior_point", fail)
    assert solve_seed_problem(problem).solver == "highs"
    refused(SolverError, "no luck", solve_seed_problem, problem, "structured")


def test_every_lower_bound_on_the_way_is_one() -> None:
    program = random_program(5, 3, 4, seed=7)
    optimum = general_solver(program)
    told: list[float] = []
    solved = solve_program(program, gap=1e-6, least_slack=0.01, watcher=lambda _, dual: told.append(dual))
    assert len(told) == solved.iterations + 1
    assert max(told) <= optimum * (1 + 1e-9)
    assert max(told) == pytest.approx(optimum, rel=2e-6)


def test_sums_of_inverses_made_elsewhere_change_nothing() -> None:
    rng = np.random.default_rng(8)
    problem = random_problem(rng, cost=rng.random((20, 12)), seeds_shape=(4, 5))
    calls = []

    def elsewhere(matrices: Sequence[NormalMatrix]) -> Iterator[np.ndarray]:
        calls.append(len(matrices))
        return (matrix.factorised().inverse_sum() for matrix in matrices)

    apart = solve_interior_point(problem, inverse_sums=elsewhere)
    assert np.array_equal(apart.rows, solve_interior_point(problem).rows)
    assert len(calls) == apart.iterations


def random_matrix(
    rng: np.random.Generator, outputs: int, blocks: int, size: int, *, diagonals: bool
) -> LatticeMatrix:
    """Make diagonally dominant matrices over many decades."""
    spread = 10.0 ** rng.uniform(-6, 6, (outputs, blocks, size))
    couplings = {}
    for direction in ((0, 1), (1, 0), (1, 1), (1, -1))[: 4 if diagonals else 2]:
        first, second = (np.sqrt(spread)[:, *end] for end in ends(direction))
        couplings[direction] = -rng.uniform(0, 1, first.shape) * first * second
    return LatticeMatrix(8.1 * spread, (blocks, 1, size), couplings)


def dense(matrix: LatticeMatrix, output: int) -> np.ndarray:
    """Assemble one output's matrix entry by entry."""
    whole, size = np.diag(matrix.main[output].ravel()), matrix.shape[2]
    for (blocks_on, along), coupling in matrix.couplings.items():
        for i, j in np.ndindex(coupling.shape[1:]):
            here = i * size + j + max(-along, 0)
            there = here + blocks_on * size + along
            whole[here, there] = whole[there, here] = coupling[output, i, j]
    return whole


@given(
    outputs=st.integers(1, 20), blocks=st.integers(1, 5), size=st.integers(1, 5), diagonals=st.booleans(),
    seed=SEEDS,
)  # fmt: skip
def test_block_tridiagonal_systems(outputs: int, blocks: int, size: int, diagonals: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, outputs, blocks, size, diagonals=diagonals)
    right = rng.normal(size=matrix.main.shape)
    system = BlockTridiagonal(matrix)
    solutions, products = system.solve(right), matrix.times(right)
    total = np.zeros((blocks * size, blocks * size))
    for k in range(outputs):
        whole = dense(matrix, k)
        size_of_terms = abs(whole) @ abs(right[k].ravel())
        assert (abs(products[k].ravel() - whole @ right[k].ravel()) <= 1e-14 * size_of_terms).all()
        scale = 1 / np.sqrt(np.diag(whole))
        inverse = np.linalg.inv(whole * scale[:, None] * scale) * scale[:, None] * scale
        np.testing.assert_allclose(solutions[k].ravel(), inverse @ right[k].ravel(), rtol=1e-9, atol=1e-12)
        total += inverse
    # The sum is symmetric; its blocks on and above the diagonal are what is made.
    np.testing.assert_allclose(np.triu(system.inverse_sum()), np.triu(total), rtol=1e-9, atol=1e-14)
    assert system.shift == 0


def test_a_singular_system_is_shifted_and_an_indefinite_one_refused() -> None:
    def of(coupling: float) -> BlockTridiagonal:
        couplings = {(0, 1): np.full((1, 1, 1), coupling), (1, 0): np.empty((1, 0, 2))}
        return BlockTridiagonal(LatticeMatrix(np.ones((1, 1, 2)), (1, 1, 2), couplings))

    assert 0 < of(-1.0).shift <= 1e-6
    refused(np.linalg.LinAlgError, "", of, -1.5)


def random_cells(rng: np.random.Generator, outputs: int, blocks: int, size: int) -> CellRows:
    """Make a few rows on every cell, of differences as certificates have them."""
    cells = np.sort(rng.integers(0, outputs * (blocks - 1) * (size - 1), 2 * outputs * blocks * size))
    coefficient = rng.normal(size=(len(cells), 4))
    coefficient -= coefficient.mean(axis=1, keepdims=True)
    return CellRows((outputs, blocks, size), cells, coefficient, -rng.uniform(0.01, 0.3, len(cells)))


def as_matrix(rows: CellRows) -> np.ndarray:
    """Return A densely, row by row."""
    outputs, blocks, size = rows.shape
    matrix = np.zeros((len(rows.cell), outputs, blocks, size))
    for r, (cell, a) in enumerate(zip(rows.cell, rows.coefficient, strict=True)):
        k, i, j = np.unravel_index(cell, (outputs, blocks - 1, size - 1))
        matrix[r, k, i : i + 2, j : j + 2] = a.reshape(2, 2)
    return matrix.reshape(len(rows.cell), -1)


@given(outputs=st.integers(1, 6), blocks=st.integers(2, 4), size=st.integers(2, 4), seed=SEEDS)
def test_rows_on_cells_against_a_dense_matrix(outputs: int, blocks: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_cells(rng, outputs, blocks, size)
    matrix, z = as_matrix(rows), rng.normal(size=rows.shape)
    theta = rng.exponential(size=len(rows.cell))
    np.testing.assert_allclose(rows.forward(z)[0], matrix @ z.ravel(), atol=1e-12)
    np.testing.assert_allclose(rows.transposed((theta,)).ravel(), theta @ matrix, atol=1e-12)
    np.testing.assert_allclose(rows.magnitude((theta,)).ravel(), theta @ abs(matrix), atol=1e-12)
    normal, per = rows.normal((theta,)), blocks * size
    whole = matrix.T @ (theta[:, None] * matrix)
    for k in range(outputs):
        block = slice(k * per, (k + 1) * per)
        np.testing.assert_allclose(dense(normal, k), whole[block, block], atol=1e-12)
    first = outputs // 2
    part = rows.part(slice(first, outputs))
    kept = rows.cell >= first * (blocks - 1) * (size - 1)
    np.testing.assert_array_equal(part.forward(z[first:])[0], rows.forward(z)[0][kept])


def random_program(outputs: int, blocks: int, size: int, seed: int) -> GridProgram:
    rng = np.random.default_rng(seed)
    rows = random_cells(rng, outputs, blocks, size)
    start = rng.dirichlet(np.ones(outputs), size=(blocks, size)).transpose(2, 0, 1) * outputs
    # The start is feasible, and on the boundary for some rows.
    slack = rng.exponential(size=len(rows.cell)) * (rng.random(len(rows.cell)) < 0.7)
    limited = dataclasses.replace(rows, limit=rows.forward(start)[0] - slack)
    cost = rng.exponential(size=rows.shape)
    bounds = {"lower": 0.7 * start, "upper": 1.4 * start, "capped": True}
    return GridProgram(cost=cost, rows=limited, **bounds, start=start, total=float(outputs))


def general_solver(program: GridProgram) -> float:
    """Return the optimum of a program on cells, written out as one matrix."""
    rows = program.rows
    assert isinstance(rows, CellRows)
    outputs, blocks, size = rows.shape
    sums = np.tile(np.eye(blocks * size), outputs), np.full(blocks * size, program.total)
    bounds = np.stack([program.lower.ravel(), program.upper.ravel()], axis=1)
    return float(linprog(program.cost.ravel(), -as_matrix(rows), -rows.limit, *sums, bounds=bounds).fun)


@given(outputs=st.integers(2, 6), blocks=st.integers(2, 4), size=st.integers(2, 4), seed=SEEDS)
def test_programs_against_a_general_solver(outputs: int, blocks: int, size: int, seed: int) -> None:
    program = random_program(outputs, blocks, size, seed)
    solution, optimum = solve_program(program, gap=1e-5, least_slack=0.01), general_solver(program)
    assert solution.dual <= optimum * (1 + 1e-9)
    assert float(np.vdot(program.cost, solution.z)) == pytest.approx(optimum, rel=1e-4)
    # Where all constraints of a seed bind, the arithmetic may end early, in the sums of rows as well.
    assert solution.gap <= 1e-4
    np.testing.assert_allclose(solution.z.sum(axis=0), program.total, rtol=1e-4)


@pytest.mark.parametrize(("outputs", "blocks", "size", "seed"), [(2, 2, 2, 4912), (3, 3, 2, 1)])
def test_refining_a_step_keeps_what_mends_the_sums(outputs: int, blocks: int, size: int, seed: int) -> None:
    """Although the other rows of the system, which were nearly solved already, may be a little worse off."""
    solution = solve_program(random_program(outputs, blocks, size, seed), gap=1e-5, least_slack=0.01)
    np.testing.assert_allclose(solution.z.sum(axis=0), outputs, rtol=1e-10)
