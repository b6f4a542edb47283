"""Planar noise as a place that cell programs begin from: within ε, and never worse than noise itself."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mdpext_dask.evaluation.baselines.noise import planar_laplace
from mdpext_dask.evaluation.baselines.problem import Problem, expected_loss
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.cells import noise
from mdpext_dask.pipeline.cells.noise import noise_within, steepest
from mdpext_dask.pipeline.run import build
from mdpext_dask.seed.budget import dual_exponent
from mdpext_dask.store.mechanism_store import MechanismStore

Made = Callable[..., tuple[dict[str, Any], MechanismStore]]


@pytest.fixture(scope="module")
def made(small_job: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that builds a store, and its summary.

    Source cells are as large as the island is wide, with few outputs and little ε.
    """

    @cache
    def make(budget: str, p: float = 2.0) -> tuple[dict[str, Any], MechanismStore]:
        job = small_job(
            domain={"cell_km": 8.5, "refine": [3], "metric_p": p},
            privacy={"budget": budget, "epsilon_per_km": 0.4}, extension={"method": "cell-lp"},
            loss={"kind": "euclidean"}, outputs={"count": 5},
        )  # fmt: skip
        path = str(tmp_path_factory.mktemp("noise") / "s.zarr")
        return build(parse_job(job), path), MechanismStore.open(path)

    return make


@pytest.mark.parametrize("q", [1.0, 1.5, 2.0, 3.0, 1e4, 1e9, math.inf])
def test_the_steepest_corner_is_found(q: float) -> None:
    rows = np.random.default_rng(7).dirichlet(np.ones(3), size=(4, 5))
    logs, h = np.log(rows), 0.7
    worst = 0.0
    for i, j in np.ndindex(3, 4):
        cell = logs[i : i + 2, j : j + 2]
        for along_x, along_y in np.ndindex(2, 2):
            vectors = np.stack([cell[1, along_x] - cell[0, along_x], cell[along_y, 1] - cell[along_y, 0]]) / h
            # Of their largest component, as powers of all of it are too large for floats.
            sizes = np.abs(vectors).max(axis=0)
            worst = max(worst, float((sizes * np.linalg.norm(vectors / sizes, ord=q, axis=0)).max()))
    assert steepest(rows, h, q) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(
    "p", [2.0, *(pytest.param(case, marks=pytest.mark.slow) for case in [1.0, 1.0000003, math.inf])]
)
def test_noise_is_lowered_until_its_certificate_holds(made: Made, p: float) -> None:
    problem = Problem.of_store(made("half", p)[1])
    target, floor = problem.epsilon_per_km, 1e-6
    rows = noise_within(problem, target, floor)
    assert rows is not None
    q = dual_exponent(p)
    everything = rows(slice(None))
    assert steepest(everything, problem.grid.spacing_km, q) <= target
    assert everything.min() >= floor
    np.testing.assert_allclose(everything.sum(axis=-1), 1, rtol=1e-12)


@pytest.mark.slow
def test_programs_that_begin_from_noise_end_below_it(made: Made) -> None:
    summary, store = made("certified")
    assert summary["state"] == "complete"
    assert summary["epsilon_certified"] <= store.planar_limit()
    problem = Problem.of_store(store)
    rows = noise_within(problem, problem.epsilon_per_km, 1e-6)
    assert rows is not None
    assert summary["loss_km"] <= expected_loss(problem, rows) * (1 + 1e-9)
    tried = store.seed_attributes["cells"]["tried"]
    assert [one["candidate"] for one in tried].count("planar noise") == 1
    assert min(one["loss_km"] for one in tried) >= summary["loss_km"] * (1 - 1e-6)


def test_no_noise_start_without_noise_or_free_budgets(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made("half")[1]
    assert "planar noise" not in [one["candidate"] for one in store.seed_attributes["cells"]["tried"]]
    problem = Problem.of_store(store)
    # float64 does not hold such small probabilities.
    assert noise_within(replace(problem, epsilon_per_km=1e3), 1e3, 1e-6) is None
    monkeypatch.setattr(noise, "MOST_NUMBERS", problem.grid.records * problem.outputs - 1)
    assert noise_within(problem, problem.epsilon_per_km, 1e-6) is None
    assert planar_laplace(problem, 60).rows is not None
