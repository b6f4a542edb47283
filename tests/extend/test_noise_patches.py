"""Rows of noise by patches of records: the bits of one record after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.evaluation.baselines.fine_noise import _threshold
from mdpext_dask.extend import noise_patches
from mdpext_dask.extend.noise import Kernel, NoiseLattice, NoiseTables
from mdpext_dask.extend.noise_patches import NoisePatches, matrix_numbers, side_of
from mdpext_dask.problem.grid import Grid


def tables_of(cells: tuple[int, int], factor: int, spacing: float, outputs: int, seed: int) -> NoiseTables:
    """Return tables with random outputs of cells, for ε = 1/km."""
    grid = Grid(-3.0, 2.0, *cells, spacing * factor, (factor,))
    lattice = NoiseLattice.around(grid, 1.0, 6.0)
    reported = np.random.default_rng(seed).integers(0, outputs, lattice.shape).astype(np.int32)
    return NoiseTables(Kernel.of(lattice, 1.0, _threshold(lattice, 4.0)), reported, outputs, 1e-6)


@given(
    cells=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    factor=st.integers(1, 5),
    # Of 16 records to a cell down to 4 cells to a record.
    spacing=st.sampled_from([0.0213, 0.05, 0.11, 0.34, 0.6, 1.3]),
    outputs=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_the_bits_are_those_of_single_records(
    cells: tuple[int, int], factor: int, spacing: float, outputs: int, seed: int, data: st.DataObject
) -> None:
    tables = tables_of(cells, factor, spacing, outputs, seed)
    x, y = (
        slice(*sorted(data.draw(st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True))))
        for side in tables.kernel.lattice.grid.shape
    )
    patches, singly = NoisePatches(tables), np.stack(list(tables.lines(x, y)))
    assert np.array_equal(patches.stored_rows(x, y), tables.stored_rows(x, y))
    seen = np.zeros(singly.shape[:2], dtype=int)
    for patch in patches.of(x, y):
        within = patch.within(x, y)
        seen[within] += 1
        assert np.array_equal(patch.rows, singly[within][..., patch.near])
        far = np.setdiff1d(np.arange(outputs), patch.near)
        assert (singly[within][..., far] == tables.floor).all()
    assert (seen == 1).all()
    side = patches._masses.shape[2]
    assert patches._masses.size <= matrix_numbers(tables.kernel.lattice, side)


def test_where_the_matrix_would_be_too_large_records_are_made_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of((2, 3), 2, 0.11, 5, 0)
    whole = tuple(slice(0, side) for side in tables.kernel.lattice.grid.shape)
    monkeypatch.setattr(noise_patches, "_MOST", 1)
    assert side_of(tables.kernel.lattice) == 0
    patches = NoisePatches(tables)
    assert np.array_equal(patches.stored_rows(*whole), tables.stored_rows(*whole))


def test_tables_without_any_mass_are_the_floor() -> None:
    tables = tables_of((2, 2), 2, 0.34, 5, 0)
    empty = Kernel(tables.kernel.lattice, 0 * tables.kernel.masses, tables.kernel.totals)
    rows = NoisePatches(NoiseTables(empty, tables.reported, 5, 1e-6)).stored_rows(slice(0, 4), slice(0, 4))
    assert (rows == np.float32(1e-6)).all()
