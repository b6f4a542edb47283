"""The seed LP: against an independent dense formulation, exact feasibility, honest bounds."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from mdpext_dask.errors import SolverError
from mdpext_dask.seed import highs
from mdpext_dask.seed.highs import solve_highs
from mdpext_dask.seed.interior_point import solve_interior_point
from mdpext_dask.seed.model import SeedMechanism, SeedProblem
from tests.support.reference import SEEDS
from tests.support.refusals import refused
from tests.support.seed_problems import assert_feasible, edges, random_problem


def dense_optimum(problem: SeedProblem) -> float:
    """Solve the LP written out constraint by constraint, with another solver front end."""
    seeds, outputs = problem.cost.shape
    upper = []
    for risen, fallen, k, budget in edges(problem):
        row = np.zeros(seeds * outputs)
        row[risen * outputs + k], row[fallen * outputs + k] = 1, -math.exp(budget)
        upper.append(row)
    inequalities = np.array(upper), np.zeros(len(upper))
    sums = np.kron(np.eye(seeds), np.ones(outputs)), np.ones(seeds)
    bounds = problem.min_probability, None
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(problem.cost.ravel(), *inequalities, *sums, bounds, method="highs-ds", options=options)
    assert answer.status == 0
    return float(answer.fun)


@given(seed=SEEDS)
def test_optimum_agrees_with_the_dense_formulation(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    solved = solve_highs(problem)
    optimum = dense_optimum(problem)
    assert_feasible(problem, solved.rows)
    assert solved.primal == pytest.approx(optimum, rel=2e-6)
    assert solved.dual <= optimum * (1 + 1e-9)
    assert solved.dual == pytest.approx(optimum, rel=1e-6)
    assert 0 <= solved.gap + 1e-12 < 1e-5


@pytest.mark.parametrize("solve", [solve_highs, solve_interior_point])
@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_scale_of_cost_does_not_matter(solve: Callable[[SeedProblem], SeedMechanism], scale: float) -> None:
    problem = random_problem(np.random.default_rng(3))
    scaled = dataclasses.replace(problem, cost=problem.cost * scale)
    assert solve(scaled).primal == pytest.approx(scale * solve(problem).primal, rel=2e-6)


@pytest.mark.parametrize("solve", [solve_highs, solve_interior_point])
def test_seeds_without_cost_and_a_single_output(solve: Callable[[SeedProblem], SeedMechanism]) -> None:
    rng = np.random.default_rng(5)
    cost = np.zeros((12, 4))
    cost[3] = rng.exponential(size=4)
    for costs in (cost, np.zeros((12, 4))):
        problem = random_problem(rng, cost=costs, seeds_shape=(3, 4))
        solved = solve(problem)
        assert_feasible(problem, solved.rows)
        assert costs.any() or solved.primal == 0
    assert (solve(random_problem(rng, cost=np.ones((6, 1)), seeds_shape=(2, 3))).rows == 1).all()


def test_what_hinders_nobody_is_the_best_output() -> None:
    """With budgets so wide that nothing binds, every seed reports its cheapest output."""
    problem = random_problem(np.random.default_rng(1), deltas=(40.0, 40.0), min_probability=1e-9)
    rows = solve_highs(problem).rows
    assert (rows.argmax(axis=1) == problem.cost.argmin(axis=1)).all()
    assert rows.max(axis=1).min() > 1 - 1e-5


def test_repair_keeps_what_is_feasible() -> None:
    problem = random_problem(np.random.default_rng(2), seeds_shape=(2, 3), cost=np.ones((6, 4)))
    uniform = np.full((6, 4), 0.25)
    assert np.array_equal(problem.repair(uniform), uniform)


@given(seed=SEEDS, error=st.floats(-12, -8))
def test_repair_makes_a_solver_s_answer_exact(seed: int, error: float) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, min_probability=1e-6)
    rows = solve_highs(problem).rows
    repaired = problem.repair(rows + rng.normal(scale=10**error, size=rows.shape))
    assert_feasible(problem, repaired)
    assert np.abs(repaired - rows).max() < 1e4 * 10**error + 1e-9


def test_rubbish_is_not_repaired() -> None:
    like = {"seeds_shape": (2, 3), "cost": np.ones((6, 4)), "deltas": (0.1, 0.1)}
    problem = random_problem(np.random.default_rng(2), **like)
    refused(SolverError, "beyond repair", problem.repair, np.eye(4)[np.arange(6) % 4])
    refused(SolverError, "non-finite", lambda: problem.repair(np.full((6, 4), np.nan)))
    refused(SolverError, "negative", lambda: problem.repair(np.full((6, 4), -0.25)))


@given(seed=SEEDS)
def test_any_multipliers_give_a_lower_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    matrix = highs._constraint_matrix(problem)
    bound = highs._dual_bound(matrix, problem, 1.0, rng.normal(size=matrix.shape[0]))
    assert bound <= dense_optimum(problem) + 1e-9


def test_an_infeasible_program_is_an_error_not_an_answer() -> None:
    # Four outputs cannot all have at least 0.3.
    problem = random_problem(
        np.random.default_rng(0), seeds_shape=(2, 3), cost=np.ones((6, 4)), min_probability=0.3
    )
    refused(SolverError, "status", solve_highs, problem)


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve_highs(random_problem(np.random.default_rng(0)))
    assert capfd.readouterr() == ("", "")
