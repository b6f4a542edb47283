"""The linear-programming baselines: against dense programs, brute force and the strict audit."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines import copt, pair_rows, panda
from mdpext_dask.evaluation.baselines.copt import const_opt
from mdpext_dask.evaluation.baselines.dense_rows import PairRows, Triples
from mdpext_dask.evaluation.baselines.lp import coarse_lp, costs, full_lp, needed_directions, pairs_along
from mdpext_dask.evaluation.baselines.noise import exponential_mechanism
from mdpext_dask.evaluation.baselines.pair_rows import PairProgram, budgets, check_size, largest_size
from mdpext_dask.evaluation.baselines.panda import panda_exponential, panda_logistic, panda_power_law
from mdpext_dask.evaluation.baselines.problem import BaselineMechanism, Guarantee, Method, Problem
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss, TableLoss
from tests.support.baseline_checks import expected_loss, holds, least_loss, rows_of
from tests.support.refusals import refused

Array = NDArray[np.float64]
PS = (1.0, 1.5, 2.0, math.inf)
PANDAS = (panda_exponential, panda_power_law, panda_logistic)


def make(
    cells: tuple[int, int] = (2, 2),
    refine: tuple[int, ...] = (1,),
    *,
    p: float = 2.0,
    epsilon: float = 1.0,
    outputs: int = 3,
    seed: int = 0,
    random_loss: bool = False,
    cell_km: float = 1.0,
) -> Problem:
    rng = np.random.default_rng(seed)
    grid = Grid(0.0, 0.0, *cells, cell_km, refine)
    xy = rng.uniform(0, 1, (outputs, 2)) * np.array(cells) * cell_km
    prior = rng.uniform(0.5, 1.5, grid.shape)
    table = TableLoss(grid, rng.uniform(0, 3, (*grid.shape, outputs)))
    loss = table if random_loss else EuclideanLoss(xy)
    return Problem(grid, epsilon, p, xy, prior / prior.sum(), loss, min_probability=1e-6)


def all_rows(problem: Problem, mechanism: BaselineMechanism) -> Array:
    assert mechanism.rows is not None
    strips = [mechanism.rows(slice(i, i + 1)) for i in range(problem.grid.shape[0])]
    rows = np.concatenate(strips).reshape(-1, problem.outputs)
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-12)
    assert rows.min() > 0
    # A longer strip is the same.
    longer = mechanism.rows(slice(0, 2)).reshape(-1, problem.outputs)
    np.testing.assert_array_equal(longer, rows[: len(longer)])
    return rows


def loss_of(problem: Problem, rows: Array) -> float:
    return float((costs(problem) * rows).sum())


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize(("cells", "seed"), [((2, 2), 1), ((2, 3), 2)])
def test_the_full_program_is_the_dense_one(p: float, cells: tuple[int, int], seed: int) -> None:
    problem = make(cells, p=p, seed=seed, random_loss=True)
    mechanism = full_lp(problem, 60)
    rows = all_rows(problem, mechanism)
    xy = problem.records_xy_km(slice(None))
    budget = problem.epsilon_per_km * problem.distances_km(xy, xy)
    optimum = least_loss(costs(problem), budget, problem.min_probability)
    assert loss_of(problem, rows) == pytest.approx(optimum, rel=2e-6)
    assert mechanism.facts["lower_bound_km"] <= optimum * (1 + 1e-9)
    assert mechanism.facts["gap"] < 1e-5
    assert mechanism.guarantee is Guarantee.EPSILON
    assert holds(rows, problem)


@pytest.mark.parametrize("p", PS)
def test_pruned_pairs_are_those_with_a_record_between(p: float) -> None:
    problem = make((3, 4), p=p)
    xy = problem.records_xy_km(slice(None))
    d = problem.distances_km(xy, xy)
    count = len(xy)

    def between(i: int, j: int) -> bool:
        others = (z for z in range(count) if z not in (i, j))
        return any(d[i, z] + d[z, j] <= d[i, j] * (1 + 1e-12) for z in others)

    first, second = pairs_along(needed_directions(problem.grid.shape, p), problem.grid.shape)
    needed = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(needed) == len(first)
    pairs = itertools.combinations(range(count), 2)
    assert needed == {frozenset(pair) for pair in pairs if not between(*pair)}


def test_rows_are_added_until_none_is_broken() -> None:
    # Steps of (1, 3) are not among the first pairs; in a long narrow grid they bind.
    problem = make((3, 6), p=2.0, seed=5, outputs=4, random_loss=True, epsilon=0.3)
    mechanism = full_lp(problem, 60)
    directions = needed_directions(problem.grid.shape, 2.0)
    first, _ = pairs_along(directions[np.abs(directions).max(axis=1) <= 2], problem.grid.shape)
    assert mechanism.facts["constraints"] > 2 * len(first) * problem.outputs
    assert holds(all_rows(problem, mechanism), problem)


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_no_method_that_keeps_epsilon_beats_the_full_program(epsilon: float) -> None:
    problem = make((3, 3), (2,), outputs=5, seed=3, epsilon=epsilon)
    optimal = full_lp(problem, 60)
    bound = optimal.facts["lower_bound_km"]
    fixed = const_opt(problem, 60)
    rows = all_rows(problem, fixed)
    assert bound <= loss_of(problem, rows) * (1 + 1e-9)
    assert loss_of(problem, all_rows(problem, optimal)) <= loss_of(problem, rows) * (1 + 1e-6)
    assert loss_of(problem, rows) <= fixed.facts["loss_of_decay_km"] * (1 + 1e-9)
    exponential = expected_loss(problem, rows_of(exponential_mechanism, problem))
    assert loss_of(problem, rows) <= exponential * (1 + 1e-4)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("most", [20, 60, 10_000])
def test_copt_keeps_epsilon_between_all_pairs(p: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copt, "_MOST_FREE", most)
    problem = make((2, 3), (3,), p=p, outputs=4, seed=7)
    mechanism = const_opt(problem, 60)
    assert mechanism.guarantee is Guarantee.EPSILON
    assert mechanism.facts["r"] == min(most // 4, problem.grid.records)
    rows = all_rows(problem, mechanism)
    assert holds(rows, problem)
    if most == 10_000 and p == 2:
        # All entries are free: this is the full program, by another solver.
        assert loss_of(problem, rows) == pytest.approx(full_lp(problem, 60).facts["lower_bound_km"], rel=1e-4)


def test_the_coarse_program_keeps_epsilon_between_corners_only() -> None:
    problem = make((3, 3), (2, 2), outputs=5, seed=4)
    mechanism = coarse_lp(problem, 60)
    assert mechanism.guarantee is Guarantee.NONE
    rows = all_rows(problem, mechanism)
    assert not holds(rows, problem)
    corners = dataclasses.replace(problem, grid=dataclasses.replace(problem.grid, refine=(1,)))
    factor = problem.grid.factor
    assert holds(rows.reshape(*problem.grid.shape, -1)[::factor, ::factor], corners)


def test_the_coarse_program_of_a_grid_without_refinement_is_the_full_one() -> None:
    problem = make((3, 3), outputs=4, seed=4)
    mechanism = coarse_lp(problem, 60)
    assert mechanism.guarantee is Guarantee.EPSILON
    np.testing.assert_array_equal(all_rows(problem, mechanism), all_rows(problem, full_lp(problem, 60)))


@pytest.mark.parametrize("method", PANDAS)
@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_panda_breaks_its_share(method: Method, delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panda, "_DELTA", delta)
    monkeypatch.setattr(panda, "_MOST_ANCHORS", 12)
    problem = make((3, 4), (3,), outputs=4, seed=6, cell_km=3.0)
    mechanism = method(problem, 60)
    assert mechanism.guarantee is Guarantee.PROBABILISTIC
    assert 1 < mechanism.facts["anchors"] <= 12
    rows = all_rows(problem, mechanism)
    assert len(np.unique(rows, axis=0)) <= 12
    xy = problem.records_xy_km(slice(None))
    logs = np.log(rows)
    excess = np.abs(logs[:, None] - logs).max(axis=-1) - problem.epsilon_per_km * problem.distances_km(xy, xy)
    broken = int((excess > 1e-12).sum()) / (len(xy) * (len(xy) - 1))
    assert broken <= delta
    assert holds(rows, problem) == (broken == 0)


def test_a_share_of_pairs_is_counted_exactly() -> None:
    # Two anchors with two and three records on a line: six pairs, at distances 1, 2, 2, 3, 3 and 4.
    problem = make((4, 1), (1,))
    xy = np.stack([np.arange(5.0), np.zeros(5)], axis=1)
    nearest = np.array([0, 0, 1, 1, 1])
    for delta, kept in ((0.0, 1.0), (0.16, 1.0), (0.17, 2.0), (0.5, 3.0), (0.9, 4.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panda, "_DELTA", delta)
            distance = panda._kept_distances(problem, xy, nearest, 2)
        np.testing.assert_array_equal(distance, [[0, kept], [kept, 0]])


@pytest.mark.parametrize("method", [full_lp, coarse_lp, const_opt, *PANDAS])
def test_methods_are_deterministic(method: Method) -> None:
    problem = make((2, 3), (2,), outputs=3, seed=8)
    first, second = (method(problem, 60) for _ in range(2))
    np.testing.assert_array_equal(all_rows(problem, first), all_rows(problem, second))
    assert first.facts == second.facts


def test_other_seeds_draw_other_anchors() -> None:
    problem = make((8, 8), (2,), outputs=3, seed=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panda, "_MOST_ANCHORS", 10)
        first = panda_exponential(problem, 60)
        second = panda_exponential(dataclasses.replace(problem, random_seed=1), 60)
    assert (all_rows(problem, first) != all_rows(problem, second)).any()


def test_what_is_too_large_is_refused_before_any_work() -> None:
    problem = make((100, 110), (6,), outputs=20)
    refused(SolverError, r"397,261 records x 20 outputs are 7\.9e\+06 variables and", full_lp, problem, 1800)
    refused(SolverError, "the limit is 10 s", coarse_lp, problem, 10)


@pytest.mark.parametrize("seconds", [1.0, 120.0])
def test_the_largest_size_is_the_largest_that_is_not_refused(seconds: float) -> None:
    most = largest_size(20, seconds)
    check_size("it", most, 20, seconds)
    refused(SolverError, "", check_size, "it", most + 1, 20, seconds)


@pytest.mark.parametrize("method", [full_lp, coarse_lp, const_opt, panda_exponential])
def test_a_method_stops_at_its_time_limit(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_rows, "_SPEED", 1e300)
    refused(SolverError, "within", method, make((4, 4), outputs=3), 1e-9)


def test_copt_refuses_what_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copt, "_MOST_ENTRIES", 10)
    refused(SolverError, "9 records x 3 outputs", const_opt, make(), 60)


def test_sums_of_many_rows_are_allowed_more_rounding() -> None:
    """One record against 640 others: ten times what a reduced cost of 64 terms is allowed."""
    for others, times in ((8, 1.0), (640, 10.0)):
        pairs = np.zeros(others, dtype=np.intp), np.arange(1, others + 1, dtype=np.intp)
        triples = Triples(np.zeros(others, dtype=np.intp), *pairs)
        rows = PairRows((1, 1, others + 1), triples, np.full(others, 2.0))
        found = rows.magnitude((np.ones(others),))[0, 0]
        assert found[0] == times * others
        assert (found[1:] == times * 2.0).all()


def test_the_repair_keeps_every_pair_and_the_floor() -> None:
    problem = make((2, 2), outputs=3)
    xy = problem.records_xy_km(slice(None))
    program = PairProgram(costs(problem), budgets(1.0, problem.distances_km(xy, xy)), 1e-6)
    rows = full_lp(problem, 60).rows
    assert rows is not None
    # Broken a little, as a solver's tolerance leaves it.
    noise = np.random.default_rng(0).uniform(-1e-7, 1e-7, (9, 3))
    repaired = program.repair(rows(slice(None)).reshape(9, 3) + noise)
    assert program.worst_excess(repaired) <= 0
    assert repaired.min() >= 1e-6
    refused(SolverError, "beyond repair", program.repair, np.eye(3)[np.arange(9) % 3])
    refused(SolverError, "negative", program.repair, np.full((9, 3), -1.0))


def test_of_no_rows_the_normal_matrix_is_zero() -> None:
    none = np.array([], dtype=np.intp)
    matrix = PairRows((2, 1, 3), Triples(none, none, none), np.array([])).normal((np.array([]),))
    for part in (matrix.main, matrix.lower):
        assert part.dtype == np.float64
        assert not part.any()


def test_one_output_leaves_no_choice() -> None:
    problem = make((2, 2), outputs=1)
    for method in (full_lp, coarse_lp, const_opt, panda_exponential):
        np.testing.assert_allclose(all_rows(problem, method(problem, 60)), 1.0, rtol=1e-15)
