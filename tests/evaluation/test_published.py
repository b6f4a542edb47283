"""The published recipes as baselines: what they are given, what they give back, and that they break ε.

What they do inside is tested in `test_published_recipes`.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array, Guarantee, Method, Problem
from mdpext_dask.evaluation.baselines.published import (
    SLOPE,
    by_cell_programs,
    published_cell_programs,
    published_mcshane_whitney,
    seed_cost,
    solve_half_seed,
)
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import init
from mdpext_dask.problem.grid import Grid
from mdpext_dask.seed.budget import candidate_splits
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.recipes import FLOOR, rome_like_problem

EPSILON = 1.5
both = pytest.mark.parametrize("method", [published_mcshane_whitney, published_cell_programs])


@both
def test_the_recipes_break_epsilon_and_say_so(method: Method) -> None:
    problem = rome_like_problem((2, 2), EPSILON)
    made = method(problem, 100.0)
    rows = made.rows(slice(None))
    assert rows.shape == (*problem.grid.shape, problem.outputs)
    assert rows.sum(axis=-1) == pytest.approx(1, abs=1e-9)
    assert rows.min() >= FLOOR / 2
    assert made.guarantee is Guarantee.NONE
    points = problem.records_xy_km(slice(None))
    report = audit(rows.reshape(len(points), -1), "exhaustive", points=points, epsilon_per_km=EPSILON)
    assert not report.holds
    assert report.violations > 100
    assert report.epsilon > 1.2 * EPSILON
    json.dumps(made.facts, allow_nan=False)


@both
def test_the_seed_is_that_of_the_best_split(method: Method) -> None:
    problem = rome_like_problem((2, 3), 0.7, refine=(2,))
    made = method(problem, 100.0)
    cost = seed_cost(problem)
    seeds = {split: solve_half_seed(problem, cost, split) for split in candidate_splits(0.7, 2.0)}
    best = min(seeds, key=lambda split: seeds[split].primal)
    assert made.facts["split_per_km"] == list(best)
    assert made.facts["seed_primal_km"] == seeds[best].primal
    on_corners = made.rows(slice(None))[::2, ::2].reshape(-1, problem.outputs)
    assert on_corners == pytest.approx(seeds[best].rows, rel=1e-12)


def test_the_seed_cost_is_that_of_a_store(
    tmp_path: Path, small_job: Callable[..., dict[str, dict[str, Any]]]
) -> None:
    init(parse_job(small_job()), str(tmp_path / "m.zarr"))
    store = MechanismStore.open(str(tmp_path / "m.zarr"))
    assert np.array_equal(seed_cost(Problem.of_store(store)), store.read_seed_cost())


def test_facts_say_where_it_goes_wrong() -> None:
    problem = rome_like_problem((2, 2), EPSILON)
    crossings = published_mcshane_whitney(problem, 100.0).facts["crossing_by_level"]
    assert len(crossings) == 3
    assert min(crossings) > 1
    facts = published_cell_programs(problem, 100.0).facts
    share = np.average(facts["infeasible_share_by_level"], weights=[4, 16, 144])
    assert facts["infeasible_share"] == pytest.approx(share)
    assert share > 0.5


def test_a_cell_program_minimises_the_loss_it_is_given() -> None:
    """Of one inner point: probability goes to what costs least, as much as the corners allow."""
    rng = np.random.default_rng(4)
    grid = Grid(10.0, -3.0, 1, 1, 1.0, (2,))
    corners = rng.uniform(0.8, 1.2, (2, 2, 5))
    corners /= corners.sum(axis=-1, keepdims=True)
    cost = rng.random(5)

    def loss(places: Array) -> Array:
        assert places.tolist() == [[10.5, -2.5]]
        return cost[None]

    rows, counts = by_cell_programs(corners, grid, loss, 1e-6)
    assert counts == [(0, 1)]
    growth = math.exp(SLOPE * math.sqrt(0.5))
    expected = corners.max(axis=(0, 1)) / growth
    most = corners.min(axis=(0, 1)) * growth
    for output in np.argsort(cost):
        expected[output] += min(most[output] - expected[output], 1 - expected.sum())
    assert rows[1, 1] == pytest.approx(expected, abs=1e-9)


@both
def test_when_the_time_is_up_there_is_no_answer(method: Method) -> None:
    with pytest.raises(SolverError, match=r"^out of time after 1e-09 s"):
        method(rome_like_problem((2, 2), EPSILON), 1e-9)


@pytest.mark.parametrize("seconds", [0.3, 0.6])
def test_time_may_be_up_in_the_middle(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a tenth of a second whenever somebody looks at it."""
    ticks = iter(np.arange(0, 100, 0.1))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    with pytest.raises(SolverError, match="out of time"):
        published_cell_programs(rome_like_problem((1, 1), 0.5), seconds)


def test_hopeless_sizes_are_refused_at_once() -> None:
    with pytest.raises(SolverError, match="inner points and 20 outputs has"):
        published_cell_programs(rome_like_problem((1, 1), 0.5, refine=(40,)), 100.0)
    problem = rome_like_problem((1, 1), 0.5, refine=(2,))
    endless = dataclasses.replace(problem, grid=Grid(0.0, 0.0, 1, 1, 4.77, (6000,)))
    with pytest.raises(SolverError, match="too many to hold in memory"):
        published_mcshane_whitney(endless, 100.0)


@both
def test_levels_that_refine_nothing_change_nothing(method: Method) -> None:
    once, again = (
        method(problem, 100.0).rows(slice(None))
        for problem in (rome_like_problem((1, 2), 0.5, refine=refine) for refine in ((3,), (1, 3, 1)))
    )
    assert again == pytest.approx(once, rel=1e-12)
