"""The structured solver: against HiGHS over all shapes, in every extreme, the same on every thread."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import SolverError
from mdpext_dask.seed import solve
from mdpext_dask.seed.block_tridiagonal import BlockTridiagonal
from mdpext_dask.seed.highs import solve_highs
from mdpext_dask.seed.interior_point import solve_interior_point
from mdpext_dask.seed.model import SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem
from tests.test_seed import assert_feasible, random_problem


def agree(problem: SeedProblem, tolerance: float = 2e-6) -> None:
    """Compare with HiGHS: feasible exactly, primal and dual on either side of the same optimum."""
    structured, highs = solve_interior_point(problem), solve_highs(problem)
    assert_feasible(problem, structured.rows)
    size = max(abs(highs.primal), 1e-300)
    assert abs(structured.primal - highs.primal) <= tolerance * size
    assert structured.dual <= highs.primal + 1e-12 * size
    assert highs.dual <= structured.primal + 1e-12 * size
    assert structured.gap <= tolerance


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_agrees_with_highs(seed: int) -> None:
    agree(random_problem(np.random.default_rng(seed)))


@pytest.mark.parametrize("budget", [1e-3, 0.03, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 9), (7, 1), (3, 6), (6, 3)])
def test_budgets_from_tight_to_none_on_every_shape(budget: float, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    agree(
        SeedProblem.with_axis_budgets(
            cost=rng.exponential(size=(shape[0] * shape[1], 5)),
            seeds_shape=shape,
            beta=(budget, budget),
            cell_km=1.0,
            min_probability=1e-6,
        )
    )


def costs(kind: str) -> np.ndarray:
    rng = np.random.default_rng(2)
    cost = rng.exponential(size=(20, 6))
    if kind == "tied":
        return np.rint(cost)
    if kind == "huge spread":
        return cost * 10.0 ** rng.uniform(-6, 6, size=(20, 1))
    if kind == "mostly zero":
        return cost * (rng.random((20, 1)) < 0.2)
    return np.zeros((20, 6)) if kind == "zero" else cost


@pytest.mark.parametrize("kind", ["tied", "huge spread", "mostly zero"])
def test_costs_of_all_kinds(kind: str) -> None:
    agree(random_problem(np.random.default_rng(3), cost=costs(kind), seeds_shape=(4, 5)))


def test_no_cost_at_all() -> None:
    problem = random_problem(np.random.default_rng(3), cost=costs("zero"), seeds_shape=(4, 5))
    solved = solve_interior_point(problem)
    assert_feasible(problem, solved.rows)
    assert solved.primal == 0


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_scale_of_the_cost_does_not_matter(scale: float) -> None:
    problem = random_problem(np.random.default_rng(4))
    scaled = dataclasses.replace(problem, cost=problem.cost * scale)
    expected = solve_interior_point(problem).primal * scale
    assert solve_interior_point(scaled).primal == pytest.approx(expected, rel=2e-6)


def test_one_output_is_certain() -> None:
    problem = random_problem(np.random.default_rng(0), cost=np.ones((6, 1)), seeds_shape=(2, 3))
    assert (solve_interior_point(problem).rows == 1).all()


def test_threads_and_repetition_change_no_bit() -> None:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, cost=rng.exponential(size=(30, 40)), seeds_shape=(5, 6))
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
    with pytest.raises(SolverError, match="no luck"):
        solve_seed_problem(problem, "structured")


@settings(max_examples=30, deadline=None)
@given(
    outputs=st.integers(1, 20),
    blocks=st.integers(1, 5),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_block_tridiagonal_systems_against_dense_ones(
    outputs: int, blocks: int, size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    within = -rng.uniform(0, 1, (outputs, blocks, size - 1))
    between = -rng.uniform(0, 1, (outputs, blocks - 1, size))
    # Diagonally dominant, over many decades.
    main = 4.1 * np.ones((outputs, blocks, size))
    spread = 10.0 ** rng.uniform(-6, 6, main.shape)
    within *= np.sqrt(spread[:, :, 1:] * spread[:, :, :-1])
    between *= np.sqrt(spread[:, 1:] * spread[:, :-1])
    main *= spread
    right = rng.normal(size=main.shape)
    system = BlockTridiagonal(main, within, between)
    solutions, total = system.solve(right), np.zeros((blocks * size, blocks * size))
    for k in range(outputs):
        dense = np.diag(main[k].ravel())
        for i, j in itertools.product(range(blocks), range(size)):
            here = i * size + j
            if j + 1 < size:
                dense[here, here + 1] = dense[here + 1, here] = within[k, i, j]
            if i + 1 < blocks:
                dense[here, here + size] = dense[here + size, here] = between[k, i, j]
        scale = 1 / np.sqrt(np.diag(dense))
        inverse = np.linalg.inv(dense * scale[:, None] * scale) * scale[:, None] * scale
        np.testing.assert_allclose(solutions[k].ravel(), inverse @ right[k].ravel(), rtol=1e-9, atol=1e-12)
        total += inverse
    np.testing.assert_allclose(system.inverse_sum(), total, rtol=1e-10, atol=1e-14)
    with ThreadPoolExecutor(3) as pool:
        assert np.array_equal(system.inverse_sum(pool.map), system.inverse_sum())
    assert system.shift == 0


def test_a_singular_system_is_shifted_and_an_indefinite_one_refused() -> None:
    ones = np.ones((1, 1, 2))
    assert 0 < BlockTridiagonal(ones, -ones[:, :, :1], np.empty((1, 0, 2))).shift <= 1e-6
    with pytest.raises(np.linalg.LinAlgError):
        BlockTridiagonal(ones, -1.5 * ones[:, :, :1], np.empty((1, 0, 2)))
