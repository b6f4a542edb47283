"""Noise on fine cells: masses against another integrator, rows and remaps against their formulas."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import dblquad
from scipy.spatial.distance import cdist

from mdpext_dask.errors import SolverError
from mdpext_dask.extend import noise_remap
from mdpext_dask.extend.noise import Kernel, NoiseLattice, square_masses
from mdpext_dask.extend.noise_remap import Remap, tile_cells, tile_count
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import Columns, EuclideanLoss, Loss, TableLoss, TravelLoss
from tests.support.refusals import refused

Floats = NDArray[np.float64]

# Nine records to a cell; each record with a cell of its own; four cells to a step of records, 2 to each side.
LATTICES = (
    (Grid(0.0, 0.0, 3, 2, 0.3, (3,)), 3, 1),
    (Grid(0.5, -1.0, 2, 2, 0.4, (2,)), 1, 1),
    (Grid(0, 0, 2, 1, 0.4, (1,)), 1, 2),
)


def mass(x: float, y: float, side: float, epsilon: float) -> float:
    """Return the integral of exp(-ε ‖z‖) over a square around (x, y), cut where it has its peak."""
    pieces = []
    for middle in (x, y):
        low, high = middle - side / 2, middle + side / 2
        pieces.append([(low, 0.0), (0.0, high)] if low < 0 < high else [(low, high)])
    return sum(
        dblquad(lambda b, a: math.exp(-epsilon * math.hypot(a, b)), *across, *along, epsabs=0, epsrel=1e-11)[
            0
        ]
        for across in pieces[0]
        for along in pieces[1]
    )


@pytest.mark.parametrize("scaled", [0.02, 0.3, 1.0])
def test_masses_are_integrals(scaled: float) -> None:
    masses = square_masses(12, 0.25, scaled / 0.25)
    for a, b in [(0, 0), (0, 1), (3, 3), (4, 0), (4, 4), (11, 7)]:
        assert masses[a, b] == pytest.approx(mass(a * 0.25, b * 0.25, 0.25, scaled / 0.25), rel=1e-10)


def test_masses_add_up_to_that_of_the_plane() -> None:
    masses = square_masses(200, 0.2, 1.0)
    assert 4 * masses[1:, 1:].sum() + 4 * masses[0, 1:].sum() + masses[0, 0] == pytest.approx(
        2 * math.pi, rel=1e-12
    )


@pytest.mark.parametrize(("grid", "per_cell", "per_record"), LATTICES)
def test_rows_by_their_formula(grid: Grid, per_cell: int, per_record: int) -> None:
    lattice = NoiseLattice(grid, per_cell, per_record, 3)
    kernel = Kernel.of(lattice, 4.0, 1e-4)
    reported = np.random.default_rng(0).integers(0, 3, lattice.shape)
    rows = kernel.rows((slice(None), slice(None)), reported, 3, 0.01)
    x, y = lattice.middles_km()
    for i, j in [(0, 0), (1, 1), (grid.shape[0] - 1, 1)]:
        collected = np.zeros(3)
        for (a, b), output in np.ndenumerate(reported):
            offset = x[a] - grid.x_km()[i], y[b] - grid.y_km()[j]
            if max(map(abs, offset)) < (lattice.reach + 0.5) * lattice.cell_km:
                collected[output] += max(mass(*offset, lattice.cell_km, 4.0) - 1e-4, 0)
        # Cells out of reach of the window have a mass below the threshold in a lattice that is used.
        if collected.sum() == pytest.approx(kernel.totals[i % per_cell, j % per_cell], rel=1e-9):
            assert rows[i, j] == pytest.approx(0.01 + 0.97 * collected / collected.sum(), rel=1e-9)
    assert np.abs(rows.sum(axis=-1) - 1).max() < 1e-13
    assert (kernel.rows((slice(1, 2), slice(1, None)), reported, 3, 0.01) == rows[1:2, 1:]).all()


# --- the remap ------------------------------------------------------------------------------------


def loss_of(kind: str, grid: Grid, places: Floats, generator: np.random.Generator) -> Loss:
    if kind == "euclidean":
        return EuclideanLoss(places)
    if kind == "table":
        return TableLoss(grid, generator.random((*grid.shape, len(places))))
    nodes = np.concatenate([places, generator.uniform(-0.5, 2, (99, 2))])
    tasks = generator.uniform(0, 2, (5, 2))
    distance = (cdist(nodes, tasks) * generator.uniform(1, 1.2, (len(nodes), 5))).astype(np.float32)
    return TravelLoss(nodes, distance, generator.dirichlet(np.ones(5)), cdist(places, nodes).argmin(axis=1))


def found_by_tiles(remap: Remap, prior: Floats) -> tuple[Any, float, float]:
    reported = np.full(remap.lattice.shape, -1)
    lost = anywhere_km = 0.0
    for index in range(tile_count(remap.lattice)):
        tile = remap.tile(tile_cells(remap.lattice, index), lambda east, north: prior[east, north])
        reported[tile_cells(remap.lattice, index)] = tile.reported
        lost, anywhere_km = lost + tile.lost, anywhere_km + tile.anywhere_km
    return reported, lost, anywhere_km


def all_costs(remap: Remap, prior: Floats) -> Floats:
    """Return G of every cell and output by its formula, float64 of shape (cells east, cells north, K)."""
    lattice, reach, grid = remap.lattice, len(remap.masses) // 2, remap.lattice.grid
    costs = np.zeros((*lattice.shape, len(remap.output_xy_km)))
    for i, j in np.argwhere(prior):
        x, y = lattice.cell_of(i) + lattice.reach, lattice.cell_of(j) + lattice.reach
        losses = remap.loss.rows(np.array([[grid.x_km()[i], grid.y_km()[j]]]))[0]
        window = slice(x - reach, x + reach + 1), slice(y - reach, y + reach + 1)
        costs[window] += prior[i, j] * remap.masses[..., None] * losses
    return costs


def random_remap(
    seed: int, kind: str, outputs: int, lattice: tuple[Grid, int, int], spread_km: float = 1.5
) -> tuple[Remap, Floats]:
    """Return a remap, with masses that end before the lattice does, and a prior that leaves much empty."""
    generator = np.random.default_rng(seed)
    cells = NoiseLattice(*lattice, 3)
    prior = generator.random(cells.grid.shape) * (generator.random(cells.grid.shape) < 0.3)
    prior[0, 0] = 1.0
    places = generator.uniform(0.75 - spread_km, 0.75 + spread_km, (outputs, 2))
    masses = Kernel.of(cells, 5.0, 1e-5).masses.mean(axis=(0, 1))[1:-1, 1:-1]
    return Remap(cells, masses, loss_of(kind, cells.grid, places, generator), places), prior / prior.sum()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    kind=st.sampled_from(["euclidean", "travel", "table"]),
    outputs=st.sampled_from([1, 2, 9, 150]),
    lattice=st.sampled_from([*LATTICES, (Grid(0.0, 0.0, 4, 3, 0.5, (4,)), 1, 1)]),
)
def test_no_output_is_better_for_a_cell_than_its_own(
    seed: int, kind: str, outputs: int, lattice: tuple[Grid, int, int]
) -> None:
    remap, prior = random_remap(seed, kind, outputs, lattice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_remap, "TILE", 8)
        patch.setattr(noise_remap, "BLOCK", 4)
        reported, lost, anywhere_km = found_by_tiles(remap, prior)
    costs = all_costs(remap, prior)
    own = np.take_along_axis(costs, reported[..., None], axis=-1)[..., 0]
    assert (own <= costs.min(axis=-1) * (1 + 1e-9)).all()
    assert lost == pytest.approx(costs.min(axis=-1).sum(), rel=1e-9)
    middles = np.stack(np.meshgrid(*remap.lattice.middles_km(), indexing="ij"), axis=-1)
    unreached = ~costs.any(axis=-1)
    nearest = cdist(middles.reshape(-1, 2), remap.output_xy_km).argmin(axis=1).reshape(reported.shape)
    assert (reported[unreached] == nearest[unreached]).all()
    i, j = np.nonzero(prior)
    grid = remap.lattice.grid
    rows = remap.loss.rows(np.stack([grid.x_km()[i], grid.y_km()[j]], axis=-1))
    expected = float(prior[i, j] @ rows.mean(axis=1))
    assert expected / 2 <= anywhere_km * (1 + 1e-9) <= 2 * expected * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["euclidean", "travel"])
def test_far_outputs_are_never_looked_at_and_a_tighter_bound_loses_some(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_remap, "TILE", 8)
    monkeypatch.setattr(noise_remap, "BLOCK", 4)
    remap, prior = random_remap(1, kind, 2000, (Grid(0.0, 0.0, 4, 3, 0.5, (4,)), 1, 1), spread_km=6.0)
    asked, columns = set[int](), type(remap.loss).columns

    def noting(loss: Loss, xy_km: Floats) -> Columns:
        losses = columns(loss, xy_km)
        return lambda outputs: [asked.update(outputs.tolist()), losses(outputs)][1]

    monkeypatch.setattr(type(remap.loss), "columns", noting)
    costs = all_costs(remap, prior)
    for share, lost in ((1.0, False), (0.5, True)):
        asked.clear()
        monkeypatch.setattr(noise_remap, "_ROUNDING", share)
        reported = found_by_tiles(remap, prior)[0]
        own = np.take_along_axis(costs, reported[..., None], axis=-1)[..., 0]
        assert (own > costs.min(axis=-1) * (1 + 1e-9)).any() == lost
        assert len(asked) < 1500


def test_losses_of_a_tile_are_found_again_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    remap, prior = random_remap(3, "table", 9, LATTICES[0])
    kept = found_by_tiles(remap, prior)
    everything = noise_remap.MOST_MOMENTS
    # What all blocks ask for together is not held, so blocks begin anew; the result is the same to the bit.
    least = 9 * np.count_nonzero(prior)
    monkeypatch.setattr(noise_remap, "MOST_MOMENTS", least)
    again = found_by_tiles(remap, prior)
    assert least < everything
    assert np.array_equal(kept[0], again[0])
    assert kept[1:] == again[1:]


@pytest.mark.parametrize("kind", ["euclidean", "travel"])
def test_outputs_of_a_block_are_compared_in_parts_where_they_do_not_fit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remap, prior = random_remap(1, kind, 40, LATTICES[0])
    reported, *sums = found_by_tiles(remap, prior)
    for least in (1, 7 * np.count_nonzero(prior)):
        monkeypatch.setattr(noise_remap, "MOST_MOMENTS", least)
        again, *others = found_by_tiles(remap, prior)
        assert np.array_equal(again, reported)
        assert others == pytest.approx(sums, rel=1e-12)


def test_a_table_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_remap, "MOST_MOMENTS", 10)
    remap, prior = random_remap(1, "table", 40, LATTICES[0])
    refused(SolverError, "use fewer outputs", found_by_tiles, remap, prior)
