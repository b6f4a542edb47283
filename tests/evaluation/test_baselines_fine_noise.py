"""Noise on fine cells, remapped: strictly audited, and never worse than noise that is remapped afterwards."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines import fine_noise
from mdpext_dask.evaluation.baselines.fine_noise import laplace_fine
from mdpext_dask.evaluation.baselines.noise import laplace_remap
from mdpext_dask.problem.grid import Grid
from tests.support.baseline_checks import LONG, expected_loss, holds, problem_of, rows_of
from tests.support.refusals import refused


@settings(max_examples=3, deadline=None)
@given(
    outputs=st.integers(1, 12),
    epsilon=st.sampled_from([0.3, 1.0, 3.0, 9.0]),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]),
    seed=st.integers(0, 99),
)
def test_every_triple_holds(outputs: int, epsilon: float, p: float, seed: int) -> None:
    places = np.random.default_rng(seed).uniform(-1, 3, (outputs, 2))
    problem = problem_of(places, epsilon, p, Grid(0.0, 0.0, 2, 1, 1.0, (3,)), seed)
    rows = rows_of(laplace_fine, problem)
    assert np.abs(rows.sum(axis=-1) - 1).max() < 1e-13
    assert holds(rows, problem)


def test_all_of_epsilon_is_used_and_a_lower_floor_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(
        np.random.default_rng(1).uniform(0, 2, (9, 2)), 3.0, grid=Grid(0.0, 0.0, 3, 3, 1.0, (3,))
    )
    rows = rows_of(laplace_fine, problem)
    assert holds(rows, problem)
    assert not holds(rows, problem, epsilon=2.7)
    monkeypatch.setattr(fine_noise, "_FURTHEST", 8.0)
    monkeypatch.setattr(fine_noise, "_LEAST", 2.0)
    monkeypatch.setattr(fine_noise, "_FLOOR_COST", math.inf)
    near = rows_of(laplace_fine, problem)
    lowered = near - near.min() * (1 - 1e-4)
    assert holds(near, problem)
    assert not holds(lowered / lowered.sum(axis=-1, keepdims=True), problem)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_it_loses_less_than_noise_that_is_remapped_afterwards(epsilon: float) -> None:
    places = np.random.default_rng(4).uniform(0, 2, (9, 2))
    problem = problem_of(places, epsilon, grid=Grid(0.0, 0.0, 2, 2, 1.0, (4,)))
    prior = problem.prior**6  # some places that are likelier than others
    problem = replace(problem, prior=prior / prior.sum())
    fine, after = (
        expected_loss(problem, rows_of(method, problem)) for method in (laplace_fine, laplace_remap)
    )
    assert fine < after


def test_refusals() -> None:
    problem = problem_of(np.zeros((1, 2)))
    refused(SolverError, "in time", laplace_fine, problem, -1.0)
    refused(SolverError, "cells of noise", laplace_fine, replace(problem, epsilon_per_km=1e-9), LONG)
