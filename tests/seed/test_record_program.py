"""The program over all records: its optimum is that of HiGHS, and its rows keep what steps promise."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from mdpext_dask.auditors.directions import looseness
from mdpext_dask.errors import SolverError
from mdpext_dask.seed import record_program
from mdpext_dask.seed.grid_rows import directions
from mdpext_dask.seed.record_program import Lattice, LatticePromise, record_reach, solve_records

FLOOR = 1e-6


def lattice_of(shape: tuple[int, int], outputs: int, seed: int) -> Lattice:
    generator = np.random.default_rng(seed)
    x, y = (np.arange(float(side)) * 0.5 for side in shape)
    places = generator.uniform(0, 0.5 * max(shape), (outputs, 2))
    prior = generator.dirichlet(np.ones(shape[0] * shape[1])).reshape(shape)
    away = np.hypot(x[:, None, None] - places[:, 0], y[None, :, None] - places[:, 1])
    return Lattice(x, y, prior[..., None] * away, np.ones(shape, dtype=bool))


def steps_between(shape: tuple[int, int], reach: int) -> list[tuple[int, int, float, float]]:
    """Return all pairs of records that a program has rows for, and how far they are apart along both axes."""
    found = []
    for i, j in np.ndindex(*shape):
        for a, b in directions(reach):
            if i + a < shape[0] and 0 <= j + b < shape[1]:
                first, second = i * shape[1] + j, (i + a) * shape[1] + j + b
                found.append((first, second, 0.5 * a, 0.5 * abs(b)))
    return found


def optimum(lattice: Lattice, epsilon: float, p: float, reach: int) -> float:
    """Return the optimum of the program, by HiGHS."""
    shape, outputs = lattice.kept.shape, lattice.cost.shape[-1]
    records, rows = shape[0] * shape[1], []
    for first, second, across, along in steps_between(shape, reach):
        growth = math.exp(epsilon * float(np.linalg.norm([across, along], ord=p)))
        for y in range(outputs):
            for less, more in ((first, second), (second, first)):
                row = np.zeros(records * outputs)
                row[less * outputs + y], row[more * outputs + y] = 1.0, -growth
                rows.append(row)
    sums = np.kron(np.eye(records), np.ones(outputs))
    found = linprog(
        lattice.cost.ravel(), A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=sums,
        b_eq=np.ones(records), bounds=(FLOOR, 1), method="highs",
    )  # fmt: skip
    assert found.status == 0
    return float(found.fun)


@settings(max_examples=15)
@given(
    st.tuples(st.integers(2, 5), st.integers(2, 5)), st.integers(2, 4), st.integers(0, 99),
    st.sampled_from([1.0, 2.0, math.inf]), st.floats(0.5, 3.0),
)  # fmt: skip
def test_the_optimum_is_that_of_another_solver(
    shape: tuple[int, int], outputs: int, seed: int, p: float, epsilon: float
) -> None:
    lattice, reach = lattice_of(shape, outputs, seed), record_reach(shape, p)
    found = solve_records(lattice, LatticePromise(epsilon, p), reach, FLOOR, gap=1e-5)
    exact = optimum(lattice, epsilon, p, reach)
    assert found.dual <= exact * (1 + 1e-9)
    assert found.primal >= exact * (1 - 1e-6)
    assert found.primal == pytest.approx(exact, rel=1e-4)
    assert np.allclose(found.rows.sum(axis=1), 1, rtol=0, atol=1e-12)


@settings(max_examples=15)
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 99), st.sampled_from([1.0, 1.5, 2.0]))
def test_all_pairs_keep_what_steps_keep_times_the_looseness(
    shape: tuple[int, int], seed: int, p: float
) -> None:
    lattice, reach, epsilon = lattice_of(shape, 3, seed), record_reach(shape, p), 1.5
    rows = solve_records(lattice, LatticePromise(epsilon, p), reach, FLOOR, gap=1e-6).rows
    i, j = np.indices(shape).reshape(2, -1) * 0.5
    first, second = np.triu_indices(i.size, 1)
    if not len(first):
        return
    apart = np.linalg.norm([i[first] - i[second], j[first] - j[second]], ord=p, axis=0)
    steepest = float((np.abs(np.log(rows[first] / rows[second])).max(axis=1) / apart).max())
    assert steepest <= epsilon * looseness(reach, shape, p) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("reach", "p", "expected"),
    [(1, 2.0, 1.0824), (2, 2.0, 1.0275), (3, 2.0, 1.0131), (1, 1.0, 1.0), (1, math.inf, 1.0)],
)
def test_looseness_is_that_of_the_widest_angle(reach: int, p: float, expected: float) -> None:
    assert looseness(reach, (20, 20), p) == pytest.approx(expected, abs=1e-4)


def test_wide_and_high_lattices_are_the_same_problem() -> None:
    wide = lattice_of((7, 4), 3, 5)
    high = Lattice(wide.y_km, wide.x_km, wide.cost.swapaxes(0, 1), wide.kept.T)
    one, other = (solve_records(each, LatticePromise(1.0, 2.0), 3, FLOOR, gap=1e-7) for each in (wide, high))
    assert one.primal == pytest.approx(other.primal, rel=1e-9)
    turned = other.rows.reshape(4, 7, 3).swapaxes(0, 1).reshape(28, 3)
    assert np.allclose(one.rows, turned, rtol=0, atol=1e-9)


def test_one_output_and_no_costs_need_no_program() -> None:
    alone, free = lattice_of((3, 3), 1, 0), lattice_of((3, 3), 2, 0)
    assert (solve_records(alone, LatticePromise(1.0, 2.0), 2, FLOOR, gap=1e-6).rows == 1).all()
    free = Lattice(free.x_km, free.y_km, np.zeros_like(free.cost), free.kept)
    assert (solve_records(free, LatticePromise(1.0, 2.0), 2, FLOOR, gap=1e-6).rows == 0.5).all()


def test_a_program_that_ends_far_from_its_optimum_is_no_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = record_program.solve_program
    monkeypatch.setattr(record_program, "solve_program", lambda *a, **k: original(*a, **k, iterations=1))
    with pytest.raises(SolverError, match="from its optimum"):
        solve_records(lattice_of((5, 5), 3, 1), LatticePromise(1.0, 2.0), 3, FLOOR, gap=1e-6)
