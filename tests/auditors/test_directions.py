"""The certificate by directions covers all pairs, and is no stricter than its definition."""

import itertools
import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.auditors.audit import audit
from mdpext_dask.auditors.directions import (
    RADII,
    certify_directions,
    largest_steps,
    quadrant,
    slopes,
    steps_of,
)
from mdpext_dask.auditors.subject import plain_subject, store_subject
from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.events import silent
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.known_answers import by_steps, largest_step

Array = NDArray[np.float64]
Job = Callable[..., dict[str, dict[str, Any]]]
EXPONENTS = (1.0, 1.0001, 1.5, 2.0, 3.0, math.inf)


def lattice(shape: tuple[int, int], sides: tuple[float, float]) -> Array:
    """Points of a lattice in km, those of the first column first."""
    x, y = (np.arange(n) * side for n, side in zip(shape, sides, strict=True))
    return np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)


def random_logs(rng: np.random.Generator, shape: tuple[int, int], outputs: int) -> Array:
    """ℓ of rows: smooth, with a few records out of line, or pure chance."""
    i, j = np.indices(shape)
    scores = rng.normal(size=outputs) * i[..., None] * 0.1 + rng.normal(size=outputs) * j[..., None] * 0.1
    scores = scores + rng.normal(size=(*shape, outputs)) * rng.choice([0.0, 0.01, 1.0])
    peak = rng.integers(0, shape)
    scores[tuple(peak)] += rng.normal(size=outputs) * rng.choice([0.0, 2.0])
    return np.asarray(scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)))


def steepest_pair(logs: Array, points: Array, p: float) -> float:
    """Return the largest slope of any pair of records."""
    rows = logs.reshape(len(points), -1)
    first, second = np.triu_indices(len(points), 1)
    apart = np.linalg.norm(points[first] - points[second], ord=p, axis=1)
    return float((np.abs(rows[first] - rows[second]).max(axis=1) / apart).max())


def certify(rows: Array, points: Array, epsilon: float, p: float) -> Any:
    with plain_subject(rows, points, epsilon, p, 0.0) as subject:
        return certify_directions(subject, epsilon, InlineExecutor(), Stages(silent))


# --- vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", RADII)
def test_neighbours_span_the_lattice(radius: int) -> None:
    vectors = quadrant(radius)
    assert vectors[0] == (1, 0)
    assert vectors[-1] == (0, 1)
    assert all(u[0] * v[1] - u[1] * v[0] == 1 for u, v in pairwise(vectors))
    # 1/cos(θ/2) for the widest gap, which is what noise loses.
    turn = [math.atan2(b, a) for a, b in vectors]
    widest = max(second - first for first, second in pairwise(turn))
    known = {1: 1.08239, 3: 1.01308, 8: 1.00194, 16: 1.00049}
    assert 1 / math.cos(widest / 2) == pytest.approx(known[radius], abs=1e-5)


@pytest.mark.parametrize("radius", RADII)
def test_every_offset_is_a_walk_of_two_neighbours(radius: int) -> None:
    for offset in product(range(12), repeat=2):
        walks = [
            (a, b)
            for u, v in pairwise(quadrant(radius))
            for a, b in [(offset[0] * v[1] - offset[1] * v[0], u[0] * offset[1] - u[1] * offset[0])]
            if a >= 0 and b >= 0 and (a * u[0] + b * v[0], a * u[1] + b * v[1]) == offset
        ]
        assert walks


# --- what is certified ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)).filter(lambda n: n != (1, 1)),
    sides=st.tuples(st.floats(0.02, 2.0), st.floats(0.02, 2.0)),
    p=st.sampled_from(EXPONENTS),
)
def test_no_pair_is_steeper_and_nothing_is_added(
    seed: int, shape: tuple[int, int], sides: tuple[float, float], p: float
) -> None:
    logs = random_logs(np.random.default_rng(seed), shape, 3)
    rows, points = np.exp(logs), lattice(shape, sides)
    before, everything = math.inf, (slice(0, shape[0]), slice(0, shape[1]))
    for radius in RADII:
        steps = steps_of(radius, shape)
        sizes = largest_steps(rows, everything, steps, np.arange(3))
        found, steepest = slopes(dict(zip(steps, sizes, strict=True)), radius, shape, sides, p)
        expected = by_steps(logs, sides, p, radius)
        assert (expected <= found).all()
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-8)
        assert found.max() >= steepest_pair(logs, points, p)
        assert steepest.max() <= steepest_pair(logs, points, p) * (1 + 1e-9) + 1e-8
        assert found.max() <= before * (1 + 1e-12)  # a wider one is no stricter
        before = float(found.max())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    radius=st.sampled_from(RADII),
    data=st.data(),
)
def test_records_may_be_cut_in_any_way(
    seed: int, shape: tuple[int, int], radius: int, data: st.DataObject
) -> None:
    rows = np.exp(random_logs(np.random.default_rng(seed), shape, 4))
    steps = steps_of(radius, shape)
    outputs = np.array([3, 1])
    whole = largest_steps(rows, (slice(0, shape[0]), slice(0, shape[1])), steps, outputs)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    parts = [
        largest_steps(rows, (slice(*x), slice(*y)), steps, outputs)
        for x, y in product(*(list(pairwise(ends)) for ends in cuts))
    ]
    assert np.array_equal(np.maximum.reduce(parts), whole)


# --- noise, which keeps ε exactly, and less than that -----------------------------------------------


def cone(points: Array, epsilon: float, p: float, outputs: int = 5) -> Array:
    """Rows that fall by ε a km around records, and one output that takes the rest."""
    chosen = points[:: max(len(points) // outputs, 1)][:outputs]
    apart = np.linalg.norm(points[:, None] - chosen, ord=p, axis=2)
    peaks = np.exp(-epsilon * apart) / (20 * outputs)
    return np.concatenate([peaks, 1 - peaks.sum(axis=1, keepdims=True)], axis=1)


@pytest.mark.parametrize(("radius", "factor"), [(1, 1.0824), (3, 1.0132), (8, 1.0020), (16, 1.0006)])
def test_a_cone_is_certified_as_wide_as_it_takes(radius: int, factor: float) -> None:
    points = lattice((21, 21), (0.05, 0.05))
    rows = cone(points, 5.0, 2.0)
    report = audit(rows, points=points, epsilon_per_km=5.0 * factor, method="certificate", workers=1)
    assert report.holds
    assert report.violations == 0
    assert report.details["epsilon_of_cells"] > 1.3 * 5.0
    assert report.details["radius_of_directions"] == radius
    assert report.epsilon == report.details["epsilon_of_directions"] <= 5.0 * factor
    assert report.epsilon >= steepest_pair(np.log(rows).reshape(21, 21, -1), points, 2.0) * (1 - 1e-12)


@pytest.mark.parametrize("p", EXPONENTS)
def test_one_entry_out_of_line_is_found(p: float) -> None:
    points = lattice((9, 9), (0.1, 0.07))
    rows = cone(points, 3.0, p)
    allowed = 3.0 * 1.02  # of p = inf the kink is on a diagonal that is no step
    assert audit(
        rows, points=points, epsilon_per_km=allowed, metric_p=p, method="certificate", workers=1
    ).holds
    assert audit(
        rows, points=points, epsilon_per_km=allowed, metric_p=p, method="exhaustive", workers=1
    ).holds
    rows[40, 2] *= math.exp(0.06)
    rows[40] /= rows[40].sum()
    certified = certify(rows, points, allowed, p)
    assert (
        certified.epsilon >= steepest_pair(np.log(rows).reshape(9, 9, -1), points, p) * (1 - 1e-12) > allowed
    )
    report = audit(rows, points=points, epsilon_per_km=allowed, metric_p=p, method="certificate", workers=1)
    assert not report.holds
    assert report.violations


def test_a_promise_broken_far_apart_is_found() -> None:
    """Every step keeps ε, and so do pairs along both axes; those along the diagonal do not."""
    points = lattice((12, 12), (1.0, 1.0))
    rows = np.exp(-0.9 * points.sum(axis=1))[:, None] * [0.01, 0.02]
    rows = np.concatenate([rows, 1 - rows.sum(axis=1, keepdims=True)], axis=1)
    steepest = steepest_pair(np.log(rows).reshape(12, 12, -1), points, 2.0)
    assert steepest == pytest.approx(0.9 * math.sqrt(2), rel=1e-2)
    for epsilon in (1.0, steepest * (1 - 1e-9)):
        assert certify(rows, points, epsilon, 2.0).epsilon > epsilon
    assert certify(rows, points, steepest * (1 + 1e-9), 2.0).epsilon <= steepest * (1 + 1e-9)


def test_what_is_impossible_from_one_record_only_is_not_certified() -> None:
    points = lattice((4, 4), (1.0, 1.0))
    rows = cone(points, 1.0, 2.0)
    rows[5, 0] = 0.0
    assert certify(rows, points, 2.0, 2.0).epsilon > 1e9
    rows[:, 0] = 0.0
    assert certify(rows, points, 2.0, 2.0).epsilon <= 2.0


# --- stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block_cells", [[2, 3], *(pytest.param(case, marks=pytest.mark.slow) for case in [[1, 1], [64, 64]])]
)
def test_a_store_is_certified_from_its_blocks(tmp_path: Any, small_job: Job, block_cells: list[int]) -> None:
    url = str(tmp_path / "m.zarr")
    build(parse_job(small_job(store={"block_cells": block_cells})), url)
    store = MechanismStore.open(url)
    subject = store_subject(store)
    certified = certify_directions(subject, store.planar_limit(), InlineExecutor(), Stages(silent))
    rows = store.read("probability")
    rows = rows / rows.astype(np.float64).sum(axis=-1, keepdims=True)
    points = lattice(store.grid.shape, (store.grid.spacing_km, store.grid.spacing_km))
    steepest = steepest_pair(np.log(rows), points, store.metric_p)
    assert steepest <= certified.epsilon <= store.planar_limit()
    expected = by_steps(np.log(rows), (store.grid.spacing_km,) * 2, store.metric_p, certified.radius)
    assert certified.epsilon == pytest.approx(expected.max(), rel=1e-4)


def test_the_order_of_axes_does_not_matter() -> None:
    points = lattice((5, 12), (0.1, 0.2))
    rows = cone(points, 4.0, 2.0)
    found = {
        certify(rows[order], points[order][:, ::flip], 4.1, 2.0).epsilon
        for order, flip in itertools.product((np.arange(60), np.arange(60)[::-1]), (1, -1))
    }
    assert len(found) == 1


def test_a_store_is_the_same_for_another_promise(tmp_path: Any, small_job: Job) -> None:
    """What its attributes say was found for its own ε; a stricter one asks steps, and changes nothing."""
    url = str(tmp_path / "m.zarr")
    build(parse_job(small_job()), url)
    own = audit(url, method="certificate")
    assert own.details["epsilon_of_directions"] is None
    stricter = audit(url, method="certificate", epsilon_per_km=own.epsilon * 0.99)
    assert stricter.verdict in ("holds", "not proved")
    assert stricter.details["epsilon_of_cells"] == own.epsilon > stricter.details["epsilon_of_directions"]
    assert not stricter.changed


def test_an_output_of_one_probability_differs_in_totals() -> None:
    points = lattice((5, 4), (0.1, 0.1))
    rows = np.random.default_rng(0).uniform(0.1, 0.2, (20, 3))
    rows[:, 1] = 0.3
    logs = np.log(rows / rows.sum(axis=1, keepdims=True))
    steps = steps_of(2, (5, 4))
    found = largest_steps(rows.reshape(5, 4, 3), (slice(0, 5), slice(0, 4)), steps, np.arange(3))
    for sizes, step in zip(found, steps, strict=True):
        assert (sizes >= largest_step(logs.reshape(5, 4, 3), step)).all()
    assert found[:, 1].max() <= np.ptp(logs[:, 1]) + 1e-11
    assert certify(rows / rows.sum(axis=1, keepdims=True), points, 1.0, 2.0).epsilon > 1
