"""The losses and the seed cost, against their definitions written out in loops."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import (
    EuclideanLoss,
    Loss,
    TableLoss,
    TravelLoss,
    assemble_seed_cost,
    corner_costs,
)

Floats = NDArray[np.float64]


class _Problem:
    """A grid with random prior and loss; `kind` says which loss."""

    def __init__(
        self, seed: int, cells: tuple[int, int], refine: tuple[int, ...], outputs: int, kind: str
    ) -> None:
        generator = np.random.default_rng(seed)
        self.grid = Grid(-3.2, 41.7, *cells, 1.3, refine)
        self.prior = generator.random(self.grid.shape)
        # Some records have no weight at all, as in a real city.
        self.prior[generator.random(self.grid.shape) < 0.3] = 0
        box = self.grid.box
        low, high = (box.west_km, box.south_km), (box.east_km, box.north_km)
        self.loss: Loss
        if kind == "euclidean":
            self.loss = EuclideanLoss(generator.uniform(low, high, (outputs, 2)))
        else:
            weight, node_xy_km = generator.random(7), generator.uniform(low, high, (12, 2))
            away = generator.uniform(0, 30, (12, 7)).astype(np.float32)
            output_node = generator.integers(0, 12, outputs)
            self.loss = TravelLoss(node_xy_km, away, weight / weight.sum(), output_node)

    def records(self) -> Floats:
        return np.array([(x, y) for x in self.grid.x_km() for y in self.grid.y_km()])

    def costs(self, cells: tuple[slice, slice]) -> Floats:
        """Return the corner costs of some cells, from the part of the prior that they own."""
        factor = self.grid.factor
        owned = tuple(
            slice(part.start * factor, part.stop * factor + (part.stop == whole))
            for part, whole in zip(cells, (self.grid.cells_x, self.grid.cells_y), strict=True)
        )
        return corner_costs(self.grid, self.loss, self.prior[owned], cells)

    def all_costs(self) -> Floats:
        return self.costs((slice(0, self.grid.cells_x), slice(0, self.grid.cells_y)))


def _dense_seed_cost(problem: _Problem) -> Floats:
    """Return Wᵀ diag(π) L with W from the tent function of every seed."""
    grid = problem.grid
    loss = problem.loss.rows(problem.records())
    cost = np.zeros((grid.seeds, loss.shape[1]))
    for i, j, a, b in np.ndindex(*grid.shape, *grid.seeds_shape):
        weight = max(0.0, 1 - abs(i / grid.factor - a)) * max(0.0, 1 - abs(j / grid.factor - b))
        cost[a * grid.seeds_shape[1] + b] += weight * problem.prior[i, j] * loss[i * grid.shape[1] + j]
    return cost


_problems = st.builds(
    _Problem, seed=st.integers(0, 2**32 - 1), cells=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    refine=st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
    outputs=st.sampled_from([1, 2, 5, 17]), kind=st.sampled_from(["euclidean", "travel"]),
)  # fmt: skip


def _cuts(draw: Any, whole: int) -> list[slice]:
    """Cut a range of cells into random consecutive parts."""
    inner = draw(st.sets(st.integers(1, whole - 1))) if whole > 1 else set()
    ends = sorted({0, *inner, whole})
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


# --- losses ----------------------------------------------------------------------------------------


def test_euclidean_loss_by_hand() -> None:
    loss = EuclideanLoss(np.array([(0.0, 0.0), (3.0, 4.0)]))
    rows = loss.rows(np.array([(0.0, 0.0), (3.0, 0.0), (-5.0, 12.0)]))
    np.testing.assert_allclose(rows, [[0, 5], [3, 4], [13, np.sqrt(128)]], rtol=1e-15)


@given(
    seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 12), tasks=st.integers(1, 9),
    outputs=st.integers(1, 6), places=st.integers(1, 15),
)  # fmt: skip
def test_travel_loss_is_its_formula(seed: int, nodes: int, tasks: int, outputs: int, places: int) -> None:
    generator = np.random.default_rng(seed)
    node_xy = generator.uniform(-5, 5, (nodes, 2))
    distance = generator.uniform(0, 40, (nodes, tasks)).astype(np.float32)
    weight = generator.random(tasks)
    output_node = generator.integers(0, nodes, outputs)
    xy = generator.uniform(-6, 6, (places, 2))

    expected = np.zeros((places, outputs))
    for row, place in enumerate(xy):
        nearest = min(range(nodes), key=lambda n: np.hypot(*(node_xy[n] - place)))
        for k, q in np.ndindex(outputs, tasks):
            gap = abs(float(distance[nearest, q]) - float(distance[output_node[k], q]))
            expected[row, k] += weight[q] * gap
    loss = TravelLoss(node_xy, distance, weight, output_node)
    np.testing.assert_allclose(loss.rows(xy), expected, rtol=1e-12, atol=1e-12)
    output = np.arange(places) % outputs
    np.testing.assert_allclose(loss.pairs(xy, output), expected[np.arange(places), output], atol=1e-12)


def test_pairs_are_entries_of_rows() -> None:
    generator, grid = np.random.default_rng(2), Grid(0.0, 0.0, 2, 1, 1.0, (3,))
    xy, output = generator.uniform(0, 1, (40, 2)), generator.integers(0, 4, 40)
    table = TableLoss(grid, generator.uniform(0, 9, (*grid.shape, 4)))
    for loss in (table, EuclideanLoss(generator.uniform(0, 2, (4, 2)))):
        np.testing.assert_allclose(loss.pairs(xy, output), loss.rows(xy)[np.arange(40), output], rtol=1e-12)


@given(problem=_problems, data=st.data())
def test_some_outputs_cost_what_all_do(problem: _Problem, data: st.DataObject) -> None:
    records, rows = problem.records(), problem.loss.rows(problem.records())
    last = rows.shape[1] - 1
    outputs = np.array(data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4)), dtype=np.intp)
    table = TableLoss(problem.grid, rows.reshape(*problem.grid.shape, -1))
    for loss in (problem.loss, table):
        assert np.array_equal(loss.columns(records)(outputs), rows[:, outputs].T)
    assert table.from_output(0) is None


@given(problem=_problems)
def test_outputs_are_as_far_from_each_other_as_triangles_allow(problem: _Problem) -> None:
    rows = problem.loss.rows(problem.records())
    for output in range(rows.shape[1]):
        away = problem.loss.from_output(output)
        assert away is not None
        assert away[output] == 0
        assert (rows + rows[:, [output]] >= away * (1 - 1e-9) - 1e-9).all()
        assert (np.abs(rows - rows[:, [output]]) <= away * (1 + 1e-9) + 1e-9).all()


# --- the seed cost ---------------------------------------------------------------------------------


def test_seed_cost_of_one_cell_by_hand() -> None:
    grid = Grid(0.0, 0.0, 1, 1, 2.0, (2,))
    prior = np.array([(1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)])

    class One:
        def rows(self, xy_km: Floats) -> Floats:
            return np.ones((len(xy_km), 1))

    cost = corner_costs(grid, One(), prior, (slice(0, 1), slice(0, 1)))
    expected = [
        1 + (2 + 4) / 2 + 5 / 4,  # south-west corner
        3 + (2 + 6) / 2 + 5 / 4,  # north-west
        7 + (4 + 8) / 2 + 5 / 4,  # south-east
        9 + (6 + 8) / 2 + 5 / 4,  # north-east
    ]
    assert (cost.shape, cost.ravel().tolist()) == ((1, 1, 2, 2, 1), expected)
    assert assemble_seed_cost(grid, cost).tolist() == [[value] for value in expected]


@given(problem=_problems)
def test_seed_cost_is_the_dense_product(problem: _Problem) -> None:
    found = assemble_seed_cost(problem.grid, problem.all_costs())
    np.testing.assert_allclose(found, _dense_seed_cost(problem), rtol=1e-12, atol=1e-12)


@given(problem=_problems, data=st.data())
def test_costs_are_the_same_to_the_last_bit_in_any_blocks(problem: _Problem, data: st.DataObject) -> None:
    whole = problem.all_costs()
    pieces = np.full_like(whole, np.nan)
    for across in _cuts(data.draw, problem.grid.cells_x):
        for along in _cuts(data.draw, problem.grid.cells_y):
            pieces[across, along] = problem.costs((across, along))
    assert np.array_equal(pieces, whole)


@given(problem=_problems, data=st.data())
def test_a_record_counts_in_one_cell_only(problem: _Problem, data: st.DataObject) -> None:
    grid = problem.grid
    i, j = data.draw(st.integers(0, grid.shape[0] - 1)), data.draw(st.integers(0, grid.shape[1] - 1))
    problem.prior[:] = 0
    problem.prior[i, j] = 1
    cells = np.argwhere(problem.all_costs().sum(axis=(2, 3, 4)) > 0)
    # The cell to its upper right, or the last one on the upper and right border.
    owner = min(i // grid.factor, grid.cells_x - 1), min(j // grid.factor, grid.cells_y - 1)
    loss = problem.loss.rows(np.array([(grid.x_km()[i], grid.y_km()[j])]))
    assert cells.tolist() == ([list(owner)] if loss.any() else [])
