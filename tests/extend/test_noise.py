"""Noise on fine cells: masses against another integrator, rows and remaps against their formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import dblquad

from mdpext_dask.extend.noise import Kernel, NoiseLattice, square_masses
from mdpext_dask.extend.noise_remap import Posterior, best_outputs
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import EuclideanLoss

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


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999), outputs=st.integers(1, 30), lattice=st.sampled_from(LATTICES))
def test_no_output_is_better_for_a_cell_than_its_own(
    seed: int, outputs: int, lattice: tuple[Grid, int, int]
) -> None:
    generator = np.random.default_rng(seed)
    grid, per_cell, per_record = lattice
    cells = NoiseLattice(grid, per_cell, per_record, 3)
    places = generator.uniform(-0.5, 1.5, (outputs, 2))
    prior = generator.random(grid.shape) * (generator.random(grid.shape) < 0.5)
    prior[0, 0] = 1.0
    prior /= prior.sum()
    loss = EuclideanLoss(places)
    x, y = grid.x_km(), grid.y_km()

    def losses(i: int, j: np.ndarray) -> np.ndarray:
        return loss.rows(np.stack([np.full(len(j), x[i]), y[j]], axis=-1))

    kernel = Kernel.of(cells, 5.0, 1e-5)
    posterior = Posterior(cells, prior, losses, outputs)
    reported, loss_km = best_outputs(kernel, posterior, places, lambda output: loss.rows(places[[output]])[0])
    table, least = kernel.masses.mean(axis=(0, 1)), 0.0
    for a in range(cells.shape[0]):
        for b in range(cells.shape[1]):
            costs = np.zeros(outputs)
            for i, j in np.argwhere(prior):
                away = a - cells.cell_of(i), b - cells.cell_of(j)
                if min(away) >= 0 and max(away) <= 2 * cells.reach:
                    costs += prior[i, j] * table[away] * losses(i, np.array([j]))[0]
            if costs.any():
                assert costs[reported[a, b]] <= costs.min() * (1 + 1e-9)
            least += costs.min()
    assert loss_km == pytest.approx(least / table.sum(), rel=1e-9)
