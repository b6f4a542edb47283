"""The exponential mechanism and planar Laplace: by hand, against other integrators, and strictly audited."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import IntegrationWarning, quad
from scipy.spatial import KDTree

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines import sectors
from mdpext_dask.evaluation.baselines.noise import (
    continuous_laplace,
    em_remap,
    epsilon_within,
    euclidean_epsilon,
    exponential_mechanism,
    laplace_remap,
    planar_laplace,
)
from mdpext_dask.evaluation.baselines.problem import Guarantee, Method, Problem
from mdpext_dask.evaluation.baselines.sectors import EDGE_ERROR, edge_integrals, masses, voronoi_cells
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import TravelLoss
from tests.support.baseline_checks import LONG, Floats, expected_loss, holds, problem_of, rows_of
from tests.support.refusals import refused

METHODS: tuple[Method, ...] = (exponential_mechanism, planar_laplace, em_remap, laplace_remap)


# --- the exponential mechanism --------------------------------------------------------------------


def test_the_exponential_mechanism_by_hand() -> None:
    """From (0, 0), outputs at 0 and 5 km, at ε = 0.5 / km: weights 1 and exp(-0.5 · 5 / 2) = 0.286505."""
    problem = problem_of(np.array([[0.0, 0.0], [4.0, 3.0]]), 0.5, grid=Grid(0.0, 0.0, 1, 1, 4.0, (1,)))
    row = rows_of(exponential_mechanism, problem)[0, 0]
    assert row == pytest.approx([1 / 1.286505, 0.286505 / 1.286505], rel=1e-6)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_the_exponential_mechanism_takes_the_metric_of_the_problem(p: float) -> None:
    problem = problem_of(np.array([[0.1, 0.2], [1.7, 0.4], [1.0, 2.5]]), 0.8, p)
    records = problem.records_xy_km(slice(None))
    weights = np.exp(-0.4 * np.linalg.norm(records[:, None] - problem.output_xy_km, ord=p, axis=2))
    expected = (weights / weights.sum(axis=1, keepdims=True)).reshape(5, 5, 3)
    assert np.allclose(rows_of(exponential_mechanism, problem), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("method", "outputs", "less"),
    [
        # An unlikely output on one side of all records, likely ones on the other.
        (exponential_mechanism, [[-30.0, 0.0], [2.0, 0.0], [2.5, 0.0]], 2.0 * (1 - 1e-6)),
        # Between records in line with a far cell, log ratios are all but ε d.
        (planar_laplace, [[0.0, 0.0], [1.0, 1.0], [90.0, 0.5]], 1.9),
    ],
)
def test_all_of_epsilon_is_used_and_no_more(method: Method, outputs: list[list[float]], less: float) -> None:
    problem = problem_of(np.array(outputs), 2.0)
    rows = rows_of(method, problem)
    assert holds(rows, problem)
    assert not holds(rows, problem, epsilon=less)


def test_small_probabilities_are_kept_or_refused() -> None:
    rows = rows_of(exponential_mechanism, problem_of(np.array([[0.0, 0.0], [900.0, 0.0]]), 1.5))
    assert rows.min() > 1e-300
    for method in (exponential_mechanism, planar_laplace):
        with pytest.raises(SolverError, match="below what float64 holds"):
            method(problem_of(np.array([[0.0, 0.0], [960.0, 0.0]]), 1.5), LONG)


def test_an_epsilon_that_rounding_swallows_is_refused() -> None:
    refused(SolverError, "lost in rounding", epsilon_within, Grid(0.0, 0.0, 2, 1, 1.0, (3,)), 1, 1e-9, 1e-9)


# --- strict audits --------------------------------------------------------------------------------

_PLACES = st.one_of(
    # On the lattice, so that records lie on edges and corners of cells and bounds are reached; and anywhere.
    st.tuples(st.integers(-4, 8).map(lambda i: i / 2), st.integers(-4, 8).map(lambda i: i / 2)),
    st.tuples(st.floats(-3, 5), st.floats(-3, 5)).filter(lambda place: place[0] != place[1]),
)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15)
@given(
    places=st.lists(_PLACES, min_size=1, max_size=7), epsilon=st.sampled_from([0.05, 1.0, 3.0, 40.0]),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_triple(method: Method, places: list[Any], epsilon: float, p: float, seed: int) -> None:
    grid = Grid(0.0, 0.0, 2, 1, 1.0, (3,))
    # Outputs closer than a micrometre are for another test.
    outputs = np.unique(np.round(places, 9), axis=0)
    problem = problem_of(outputs, epsilon, p, grid, seed)
    try:
        mechanism = method(problem, LONG)
    except SolverError:
        return  # cells that are too small for float64; see below
    assert mechanism.guarantee is Guarantee.EPSILON
    assert mechanism.rows is not None
    rows = mechanism.rows(slice(None))
    assert rows.shape == (*grid.shape, len(outputs))
    assert np.abs(rows.sum(axis=-1) - 1).max() < 1e-14
    assert holds(rows, problem)
    # A strip at a time: the same but for rounding.
    assert np.allclose(mechanism.rows(slice(2, 4)), rows[2:4], rtol=1e-10, atol=0)


@pytest.mark.parametrize(("p", "factor"), [(1, 1), (2, 1), (4, 2**-0.25), (math.inf, 2**-0.5)])
def test_noise_is_euclidean_whatever_the_metric(p: float, factor: float) -> None:
    assert euclidean_epsilon(0.7, p) == pytest.approx(0.7 * factor, rel=1e-14)
    for x, y in np.random.default_rng(0).normal(size=(200, 2)):
        metric = np.linalg.norm([x, y], ord=p)
        assert euclidean_epsilon(0.7, p) * math.hypot(x, y) <= 0.7 * metric * (1 + 1e-14)


# --- masses of cells ------------------------------------------------------------------------------


def test_edge_integrals_over_all_distances_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against shorter panels, more nodes and a later cut: what EDGE_ERROR says."""
    rng = np.random.default_rng(0)
    a = 10 ** rng.uniform(-13, 2.8, 4000)
    near = np.where(rng.random(4000) < 0.3, 0.0, rng.uniform(0, 1, 4000) ** 2 * 650)
    outer = near + 10 ** rng.uniform(-3, 3, 4000)
    keep = np.hypot(a, near) < 690
    a, near, outer = a[keep], near[keep], outer[keep]
    beyond, within, angle = edge_integrals(a, near, outer)
    monkeypatch.setattr(sectors, "_NODES", 48)
    monkeypatch.setattr(sectors, "_PANEL", 1.0)
    monkeypatch.setattr(sectors, "_CUT", 80.0)
    finer = edge_integrals(a, near, outer)
    assert np.abs(beyond / finer[0] - 1).max() < EDGE_ERROR
    assert np.abs(within / finer[1] - 1).max() < EDGE_ERROR
    assert np.abs((beyond + within) / angle - 1).max() < 1e-12


def test_one_output_takes_all_and_two_share_by_a_line() -> None:
    one = masses(voronoi_cells(np.array([[3.0, 4.0]]), 0.5, 20.0), 0.5, np.array([[0.0, 0.0], [9.0, 1.0]]))[0]
    assert np.abs(one - 1).max() < 1e-14
    cells = voronoi_cells(np.array([[-1.0, 0.0], [1.0, 0.0]]), 2.0, 400.0)
    for s in (0.0, 1e-14, 0.25, 3.0, 300.0):
        # The share beyond a line at distance s: 1/π ∫ T(ε s / cos θ) dθ over a quarter turn.
        shift = 2 * s

        def tail(t: float, shift: float = shift) -> float:
            return (1 + shift / math.cos(t)) * math.exp(shift - shift / math.cos(t))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IntegrationWarning)
            scaled = quad(tail, 0, math.pi / 2, epsabs=0, epsrel=1e-12, limit=400)[0]
        expected = scaled / math.pi * math.exp(-shift)
        mass, error = masses(cells, 2.0, np.array([[-s, 0.3]]))
        assert mass[0, 1] == pytest.approx(expected, rel=1e-10)
        assert mass[0, 0] == pytest.approx(1 - expected, rel=1e-12)
        assert error.max() < 1e-10


@pytest.mark.parametrize("epsilon", [0.02, 0.5, 5.0])
def test_cells_add_up_and_follow_draws(epsilon: float) -> None:
    rng = np.random.default_rng(3)
    outputs = rng.uniform(0, 8, (12, 2))
    places = np.concatenate([rng.uniform(-2, 10, (50, 2)), outputs, (outputs[:1] + outputs[1:2]) / 2])
    mass, error = masses(voronoi_cells(outputs, epsilon, 20.0), epsilon, places)
    assert (mass > 0).all()
    assert np.abs(mass.sum(axis=1) - 1).max() < error.max() < 1e-8
    draws = 40_000
    radius, angle = rng.gamma(2, 1 / epsilon, draws), rng.uniform(0, 2 * np.pi, draws)
    noise = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    counts = np.bincount(KDTree(outputs).query(places[0] + noise)[1], minlength=12)
    # Six standard deviations of a binomial count.
    assert (np.abs(counts - draws * mass[0]) <= 6 * np.sqrt(draws * mass[0] * (1 - mass[0])) + 1).all()


@pytest.mark.parametrize(
    "outputs",
    [
        [[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]],  # strips
        [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [2.5, 2.5 + 1e-12]],  # and all but
        [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]],  # four cells meet in a record
    ],
)
def test_outputs_in_line_and_on_a_circle(outputs: list[list[float]]) -> None:
    problem = problem_of(np.array(outputs), 0.9)
    assert holds(rows_of(planar_laplace, problem), problem)
    mass, _ = masses(voronoi_cells(np.array(outputs), 0.9, 9.0), 0.9, problem.records_xy_km(slice(None)))
    assert np.abs(mass.sum(axis=1) - 1).max() < 1e-12
    middle = mass.reshape(5, 5, -1)[2, 2]
    if len(outputs) == 4 and outputs[1] == [2.0, 0.0]:
        assert np.allclose(middle, 0.25, rtol=1e-12, atol=0)


def test_outputs_in_one_place_and_too_close() -> None:
    problem = problem_of(np.array([[0.3, 0.1], [1.5, 1.0], [0.3, 0.1]]))
    rows = rows_of(planar_laplace, problem)
    assert (rows[..., 2] == 0).all()
    assert holds(rows, problem)
    with pytest.raises(SolverError, match=r"too close|too thin|rounding"):
        planar_laplace(problem_of(np.array([[0.3, 0.1], [0.3, 0.1 + 1e-13], [0.3, 0.1 - 1e-13]]), 0.01), LONG)


def test_what_takes_too_long_is_refused() -> None:
    grid = Grid(0.0, 0.0, 40, 40, 1.0, (5,))
    with pytest.raises(SolverError, match="would take about"):
        planar_laplace(problem_of(np.random.default_rng(0).uniform(0, 40, (30, 2)), grid=grid), 1e-3)
    refused(SolverError, "in time", em_remap, problem_of(np.zeros((1, 2))), 0.0)


# --- the nearest road node ------------------------------------------------------------------------


def travel_problem(nodes: Floats, outputs: Floats, random_seed: int = 0) -> Problem:
    rng = np.random.default_rng(5)
    weight = rng.random(3)
    loss = TravelLoss(
        node_xy_km=nodes,
        task_distance_km=rng.uniform(0, 6, (len(nodes), 3)).astype(np.float32),
        task_weight=weight / weight.sum(),
        output_node=np.asarray(KDTree(nodes).query(outputs)[1], dtype=np.intp),
    )
    return replace(problem_of(outputs, 0.8), loss=loss, random_seed=random_seed)


def test_with_all_nodes_as_outputs_the_continuous_mechanism_is_the_other() -> None:
    nodes = np.random.default_rng(2).uniform(-0.5, 2.5, (9, 2))
    problem = travel_problem(nodes, nodes)
    drawn = continuous_laplace(problem, LONG)
    assert drawn.rows is None
    assert drawn.guarantee is Guarantee.EPSILON
    exact = expected_loss(problem, rows_of(planar_laplace, problem))
    assert abs(drawn.sampled_loss_km - exact) < 5 * drawn.sampled_standard_error
    assert drawn.sampled_standard_error < 0.01 * exact
    assert continuous_laplace(problem, LONG).sampled_loss_km == drawn.sampled_loss_km
    other = continuous_laplace(travel_problem(nodes, nodes, random_seed=1), LONG)
    assert other.sampled_loss_km != drawn.sampled_loss_km


@pytest.mark.parametrize(
    ("make", "seconds", "complaint"),
    [
        (lambda: problem_of(np.zeros((1, 2))), LONG, "only a travel-distance loss"),
        (lambda: travel_problem(np.zeros((1, 2)), np.zeros((1, 2))), -1.0, "no draws"),
    ],
)
def test_continuous_mechanism_refusals(make: Callable[[], Problem], seconds: float, complaint: str) -> None:
    refused(SolverError, complaint, continuous_laplace, make(), seconds)
