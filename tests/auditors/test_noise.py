"""The certificate by tables of noise: never below the truth, and not fooled by other rows or tables."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.auditors.audit import audit
from mdpext_dask.auditors.noise import compare_block, epsilon_of_tables
from mdpext_dask.extend.noise import Kernel, NoiseLattice, NoiseTables
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.local_chunks import floor_of
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import noise_tables, rows_of
from tests.support.forged import rehash
from tests.support.inside import run_inside

Job = Callable[..., dict[str, dict[str, Any]]]
EXPONENTS = st.sampled_from([1.0, 1.5, 2.0, 4.0, math.inf])


def steepest(tables: NoiseTables, p: float) -> float:
    """Return the largest |log ratio| / distance of all pairs of records and all outputs, by brute force."""
    grid = tables.kernel.lattice.grid
    rows = np.stack(list(tables.lines(*(slice(0, side) for side in grid.shape)))).reshape(grid.records, -1)
    logs = np.log(rows) - np.log(rows.sum(axis=1, keepdims=True))
    i, j = np.indices(grid.shape).reshape(2, -1) * grid.spacing_km
    first, second = np.triu_indices(grid.records, 1)
    apart = np.linalg.norm([i[first] - i[second], j[first] - j[second]], ord=p, axis=0)
    return float((np.abs(logs[first] - logs[second]).max(axis=1) / apart).max())


@st.composite
def tables_of_noise(draw: st.DrawFn) -> NoiseTables:
    refine, epsilon = draw(st.sampled_from([(1,), (2,), (3,)])), draw(st.sampled_from([0.3, 1.0, 4.0]))
    grid = Grid(0.0, 0.0, draw(st.integers(1, 3)), draw(st.integers(1, 3)), 1.0, refine)
    lattice = NoiseLattice.around(grid, epsilon, draw(st.floats(1.0, 4.0)) / epsilon)
    threshold = math.exp(-draw(st.floats(0.5, 6.0))) * lattice.cell_km**2
    kernel = Kernel.of(lattice, epsilon, threshold)
    outputs = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**32 - 1))
    reported = np.random.default_rng(seed).integers(0, outputs, lattice.shape)
    return NoiseTables(kernel, reported, outputs, draw(st.sampled_from([1e-9, 1e-5, 1e-3, 0.1])))


@settings(max_examples=25, deadline=None)
@given(tables_of_noise(), EXPONENTS)
def test_no_pair_is_steeper_than_its_tables_say(tables: NoiseTables, p: float) -> None:
    if not tables.kernel.masses.any() or not tables.kernel.totals.all():
        return
    epsilon, rounding = epsilon_of_tables(tables, p)
    step_km = tables.kernel.lattice.grid.spacing_km
    assert steepest(tables, p) <= (epsilon + 4 * rounding / step_km) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(tables_of_noise(), st.floats(1.5, 20.0), st.integers(0, 2**32 - 1))
def test_a_mass_that_stands_out_is_found(tables: NoiseTables, times: float, seed: int) -> None:
    masses = tables.kernel.masses.copy()
    if not masses.any():
        return
    place = tuple(np.random.default_rng(seed).choice(np.argwhere(masses > 0)))
    masses[place] *= times
    changed = replace(tables, kernel=Kernel(tables.kernel.lattice, masses, masses.sum(axis=(2, 3))))
    epsilon, rounding = epsilon_of_tables(changed, 2.0)
    step_km = tables.kernel.lattice.grid.spacing_km
    assert steepest(changed, 2.0) <= (epsilon + 4 * rounding / step_km) * (1 + 1e-9)


def test_the_floor_must_be_high_enough() -> None:
    grid = Grid(0.0, 0.0, 3, 3, 1.0, (4,))
    lattice = NoiseLattice.around(grid, 4.0, 2.0)
    kernel = Kernel.of(lattice, 4.0, math.exp(-6.0) * lattice.cell_km**2)
    reported = np.zeros(lattice.shape, dtype=np.intp)
    reported[lattice.shape[0] // 2 :] = 1
    epsilons = [
        epsilon_of_tables(NoiseTables(kernel, reported, 2, f), 2.0)[0] for f in (0.3, 1e-2, 1e-4, 1e-8)
    ]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] <= 4.0 * 1.0006 < epsilons[-1]


def a_spike(west_km: float = 0.0, spacing_km: float = 1.0, times: float = 1.0) -> NoiseTables:
    """Return tables of one cell that collects much, in a neighbourhood of cells that collect nothing."""
    lattice = NoiseLattice(Grid(west_km, 5500.33, 3, 3, spacing_km, (1,)), 1, 1, 1)
    masses = np.zeros((1, 1, 3, 3))
    masses[0, 0, 1, 1] = times
    reported = np.arange(math.prod(lattice.shape)).reshape(lattice.shape) % 2
    return NoiseTables(Kernel(lattice, masses, np.full((1, 1), times)), reported, 2, 1e-3)


@pytest.mark.parametrize("times", [1e-308, 1e-320, 1e308])
def test_what_overflows_proves_nothing(times: float) -> None:
    assert epsilon_of_tables(a_spike(), 2.0)[0] > 6
    assert epsilon_of_tables(a_spike(times=times), 2.0)[0] > 6


@pytest.mark.parametrize("spacing_km", [1e-12, 1e-9, 0.01, 1.0])
def test_distances_are_those_of_rounded_coordinates(spacing_km: float) -> None:
    tables = a_spike(5000.3, spacing_km)
    grid = tables.kernel.lattice.grid
    shortest = min(np.diff(grid.x_km()).min(), np.diff(grid.y_km()).min())
    epsilon, _ = epsilon_of_tables(tables, 2.0)
    if shortest <= 0:
        assert epsilon == math.inf
    else:
        assert epsilon * shortest >= math.log(500)


def test_cells_at_the_edge_of_reach_are_counted_far_from_the_origin() -> None:
    for west in (0.0, 5000.3):
        lattice = NoiseLattice(Grid(west, 5500.33, 1, 1, 0.01, (1,)), 1, 1, 1)
        masses = np.ones((1, 1, 3, 3))
        reported = np.zeros(lattice.shape, dtype=np.intp)
        tables = NoiseTables(Kernel(lattice, masses, np.full((1, 1), 9.0)), reported, 1, 0.9)
        # All 16 cells are reached: τ is f / (s · 16).
        expected = math.log1p(1 / (0.9 / (0.1 / 9 * 16)))
        assert epsilon_of_tables(tables, math.inf)[0] == pytest.approx(expected / 0.01, rel=1e-6)


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "s.zarr"
    sections = {
        "extension": {"method": "noise"},
        "privacy": {"budget": "certified"},
        "outputs": {"count": 30},
    }
    job = small_job(**sections, store={"block_cells": [2, 2]})
    build(parse_job(job), str(path))
    return path


def test_a_store_is_proved_by_its_tables_and_by_every_triple(built: Path) -> None:
    report = audit(built)
    assert report.holds
    assert report.details["epsilon_of_noise"] == report.epsilon
    assert 0.995 * report.epsilon_planar_per_km < report.epsilon <= report.epsilon_planar_per_km
    exhaustive = audit(built, method="exhaustive")
    assert exhaustive.holds
    assert exhaustive.epsilon <= report.epsilon
    # For less, nothing proves it: every certificate is asked, and what the store claims is still found.
    stricter = audit(built, epsilon_per_km=0.5 * report.epsilon)
    assert not stricter.holds
    assert stricter.details["epsilon_of_noise"] == stricter.epsilon == report.epsilon
    assert "epsilon_certified" not in stricter.changed


@pytest.mark.parametrize(
    ("times", "close"), [(1 + 1e-6, True), (1.2, False), pytest.param(40.0, False, marks=pytest.mark.slow)]
)
def test_rows_that_are_not_those_of_the_tables(
    built: Path, tmp_path: Path, times: float, close: bool
) -> None:
    path = shutil.copytree(built, tmp_path / "s.zarr")
    store = MechanismStore.open(str(path), mode="r+")
    block = store.plan[0]
    rows = rows_of(store, block.owned_x, block.owned_y)
    rows[1, 1, int(rows[1, 1].argmax())] *= np.float32(times)
    store.array("probability")[block.owned_x, block.owned_y] = rows
    report = audit(path)
    assert not report.passed
    rehash(path)
    report = audit(path)
    limit = report.epsilon_planar_per_km
    assert (float(report.details["epsilon_of_noise"]) <= limit * 1.001) == close
    assert report.epsilon >= audit(path, method="exhaustive").epsilon


def test_a_lost_chunk_is_no_row(built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = shutil.copytree(built, tmp_path / "s.zarr")
    store = MechanismStore.open(str(path))
    floor = floor_of(store)
    assert floor == float(np.float32(noise_tables(store).floor))
    block = store.plan[0]
    assert (rows_of(store, block.owned_x, block.owned_y) == np.float32(floor)).any()
    for key in store.shard_keys(block):
        (path / key).unlink()
    lost = rows_of(store, block.owned_x, block.owned_y)
    assert np.isnan(lost).any(axis=-1).all()
    assert not audit(path).passed
    said = run_inside(capfd, "audit", path, "--progress", "none")
    assert said.returncode == 1
    assert "bytes missing" in said.stdout + said.stderr


def test_tables_that_a_process_has_cached_are_those_of_as_many_outputs_and_the_same_records(
    small_job: Job, tmp_path: Path
) -> None:
    job = small_job(privacy={"budget": "certified"}, extension={"method": "noise"})
    build(parse_job(job), tmp_path / "s.zarr")
    store = MechanismStore.open(str(tmp_path / "s.zarr"))
    known = store.seed_sha256(), store.outputs, store.grid
    assert compare_block(store.url, 0, *known)[0] < 1e-6
    # What was read belongs to K and the grid, whatever the digest of the tables is.
    moved = replace(store.grid, west_km=store.grid.west_km + 1)
    for other in ((known[0], 9, known[2]), (known[0], known[1], moved), ("0" * 64, *known[1:])):
        assert compare_block(store.url, 0, *other)[0] == math.inf
