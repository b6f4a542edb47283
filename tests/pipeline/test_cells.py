"""Stores made with cell programs: certified, better than what they began from, the same bytes everywhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from mdpext_dask import audit, open_mechanism
from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.events import Event, Note
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import load_job, parse_job
from mdpext_dask.pipeline.cells import programs
from mdpext_dask.pipeline.cells import sweep as sweeping
from mdpext_dask.pipeline.cells.lattice import Box
from mdpext_dask.pipeline.cells.programs import Patches, Solutions
from mdpext_dask.pipeline.cells.tasks import COSTS, LatticeArray, Level, write_costs, write_level_costs
from mdpext_dask.pipeline.run import build, finalise, init, partition
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import sha256_of
from tests.support.problems import write_toml
from tests.support.reference import audited_epsilon
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"


@pytest.fixture(scope="module")
def cell_job(small_job: Job) -> Job:
    """Return a function that makes a small job with cell programs."""

    def make(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
        extension = {"method": "cell-lp", "sweeps": 1, **sections.pop("extension", {})}
        return small_job(**{"extension": extension, "loss": {"kind": "euclidean"}, **sections})

    return make


def make(job: dict[str, Any], path: Path, **arguments: Any) -> dict[str, Any]:
    summary = build(parse_job(job), str(path), **arguments)
    assert summary["state"] == "complete"
    return summary


def bytes_of(path: Path) -> np.ndarray:
    return MechanismStore.open(str(path)).read("probability")


def facts_of(path: Path) -> dict[str, Any]:
    return MechanismStore.open(str(path)).seed_attributes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, cell_job: Job) -> Path:
    """Return a store that must not be changed."""
    path = tmp_path_factory.mktemp("cells") / "cells.zarr"
    make(cell_job(), path)
    return path


# The other pairs of metric and budgets are for the slow ones.
_EVERY_TIME = {("inf", "bound"), (2, "certified")}


@pytest.mark.parametrize(
    ("p", "budget"),
    [
        pytest.param(p, budget, marks=() if (p, budget) in _EVERY_TIME else pytest.mark.slow)
        for p in (1, 1.5, 2, "inf")
        for budget in ("half", "bound", "certified")
    ],
)
def test_store_is_private_and_better(tmp_path: Path, cell_job: Job, p: float | str, budget: str) -> None:
    """Brute force over all pairs of stored rows, certificate above it, promise above the certificate."""
    sections = {
        "domain": {"refine": [4], "metric_p": p},
        "privacy": {"budget": budget, "epsilon_per_km": 0.8},
        "seed": {"refine_rounds": 0},
    }
    summary = make(cell_job(**sections), tmp_path / "s.zarr")
    assert (summary["fallbacks"], summary["boundary_mismatches"]) == (0, 0)
    dataset = xr.open_zarr(tmp_path / "s.zarr")
    exact = audited_epsilon(dataset.probability.values, dataset.x.values, dataset.y.values, float(p))
    assert exact <= summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]
    # What is left of ε is used.
    assert summary["epsilon_certified"] >= 0.97 * summary["epsilon_planar_per_km"]
    without = make(cell_job(**sections, extension={"method": "log-convex"}), tmp_path / "without.zarr")
    assert summary["loss_km"] < 0.995 * without["loss_km"]


@pytest.mark.parametrize(
    "refine", [[2, 1, 3], *(pytest.param(case, marks=pytest.mark.slow) for case in [[1], [5]])]
)
def test_any_refinement_will_do(tmp_path: Path, cell_job: Job, refine: list[int]) -> None:
    """Odd numbers of steps, levels that refine nothing, no level at all: every record a seed."""
    summary = make(cell_job(domain={"refine": refine}), tmp_path / "s.zarr")
    assert summary["fallbacks"] == 0
    levels = {sweep["level"] for sweep in facts_of(tmp_path / "s.zarr")["cells"]["sweeps"]}
    assert levels == set(range(1, max(sum(n > 1 for n in refine), 1) + 1))
    interpolated = cell_job(domain={"refine": refine}, extension={"method": "log-convex"})
    assert summary["loss_km"] < make(interpolated, tmp_path / "without.zarr")["loss_km"]


def test_one_output_leaves_nothing_to_choose(path: Path, cell_job: Job) -> None:
    make(cell_job(outputs={"count": 1}), path)
    assert (bytes_of(path) == 1).all()


def test_the_store_has_the_least_loss_of_all_sweeps_and_says_what_was_done(built: Path) -> None:
    """A sweep that loses has not been made, so the last state is the best one."""
    cells = facts_of(built)["cells"]
    losses = [sweep["loss_km"] for sweep in cells["sweeps"]]
    assert min(losses) == pytest.approx(MechanismStore.open(str(built)).attributes["loss_km"], rel=1e-6)
    assert losses[-1] < losses[0]
    assert json.loads(json.dumps(cells)) == cells
    assert {"tube", "tried", "sweeps", "seconds"} <= set(cells)
    assert all(sweep["programs"] > 0 for sweep in cells["sweeps"])


@pytest.mark.parametrize("epsilon", [pytest.param(1.0, marks=pytest.mark.slow), 8.0])
def test_the_least_floor_there_is(path: Path, cell_job: Job, epsilon: float) -> None:
    """Programs want to go to the floor; nothing falls below what the sampler can represent."""
    privacy = {"min_probability": 2.0**-36, "epsilon_per_km": epsilon}
    make(cell_job(privacy=privacy, extension={"sweeps": 2}), path)
    least = bytes_of(path).min()
    assert least >= 2.0**-36
    assert least < 2.0**-35 or epsilon < 8


def test_one_source_cell_that_refines_nothing(tmp_path: Path) -> None:
    """Four records, all seeds, and no line to part them by."""
    x = np.array([0.0, 1.0])
    outputs = np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    records = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1)
    loss = np.linalg.norm(records[:, :, None] - outputs, axis=-1)
    np.savez(tmp_path / "loss.npz", x_km=x, y_km=x, output_xy_km=outputs, loss_km=loss)
    job = {
        "domain": {"refine": [1]}, "privacy": {"epsilon_per_km": 1.0, "budget": "half"},
        "loss": {"kind": "file", "file": str(tmp_path / "loss.npz")},
        "extension": {"method": "cell-lp", "sweeps": 2}, "cluster": {"kind": "inline"},
    }  # fmt: skip
    summary = make(job, tmp_path / "s.zarr")
    sweeps = facts_of(tmp_path / "s.zarr")["cells"]["sweeps"]
    assert (sweeps[0]["programs"], sweeps[0]["frozen_share"]) == (1, 0)
    without = make({**job, "extension": {"method": "log-convex"}}, tmp_path / "without.zarr")
    assert summary["loss_km"] < 0.99 * without["loss_km"]


@pytest.mark.slow
def test_same_bytes_every_way(path: Path, cell_job: Job, any_cluster: ClusterSection, built: Path) -> None:
    make(cell_job(cluster=any_cluster.model_dump(exclude_none=True)), path)
    assert np.array_equal(bytes_of(path), bytes_of(built))


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_cells", [[1, 1], *(pytest.param(case, marks=pytest.mark.slow) for case in [[2, 3], [9, 9]])]
)
def test_block_shape_does_not_matter(path: Path, cell_job: Job, built: Path, block_cells: list[int]) -> None:
    summary = make(cell_job(store={"block_cells": block_cells}), path)
    assert np.array_equal(bytes_of(path), bytes_of(built))
    assert summary["boundary_mismatches"] == 0
    assert (summary["boundary_rows_checked"] > 0) == (block_cells != [9, 9])


def test_box_and_batch_do_not_matter(tmp_path: Path, cell_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut lattices into many boxes, programs into batches of one: sides and insides are the same (A2)."""
    job = cell_job(domain={"refine": [2]}, outputs={"count": 5})
    make(job, tmp_path / "one.zarr")
    monkeypatch.setattr("mdpext_dask.pipeline.cells.improve.BOX_PATCHES", 1)
    monkeypatch.setattr("mdpext_dask.pipeline.cells.sweep._BATCH_ELEMENTS", 1)
    make(job, tmp_path / "other.zarr")
    assert np.array_equal(bytes_of(tmp_path / "one.zarr"), bytes_of(tmp_path / "other.zarr"))


# --- interrupted ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupted_after_any_sweep_it_goes_on(tmp_path: Path, cell_job: Job) -> None:
    """In the search of the split, and twice on the last level."""
    job, path = cell_job(extension={"sweeps": 2}), tmp_path / "s.zarr"
    told: list[str] = []
    stops: list[int] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("cells:"):
            told.append(event.text.split(":")[1])
            if len(told) in stops:
                raise KeyboardInterrupt

    make(job, tmp_path / "whole.zarr", observer=interrupt)
    # Six sweeps of the search, one more of the first level, two of the last one.
    assert len(told) == 9
    made = []
    for stop in (2, 8, 1):
        told.clear()
        stops[:] = [stop]
        refused(KeyboardInterrupt, "", make, job, path, observer=interrupt)
        made.append(list(told))
    stops.clear()
    told.clear()
    make(job, path, observer=interrupt)
    # What has been saved is not made again; what was told of last had not been saved yet.
    assert made[1][-1] == made[2][0] == told[0] == " level 2, sweep 1"
    assert told == [" level 2, sweep 1", " level 2, sweep 2"]
    assert np.array_equal(bytes_of(path), bytes_of(tmp_path / "whole.zarr"))
    kept = [n for n in MechanismStore.open(str(path)).seed_arrays() if n.startswith(("cells_", "trial"))]
    assert kept == [facts_of(path)["record_scores"]["name"]]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, cell_job: Job) -> Path:
    """Return a store that was left in the middle of its last level, and must not be changed."""

    def interrupt(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("cells: level 2"):
            raise KeyboardInterrupt

    path = tmp_path_factory.mktemp("interrupted") / "s.zarr"
    refused(KeyboardInterrupt, "", lambda: make(cell_job(), path, observer=interrupt))
    return path


@pytest.mark.parametrize(
    "harm",
    [
        "changed",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ["array gone", "chunks gone", "key gone", "level", "candidate"]
        ),
    ],
)
def test_a_changed_state(tmp_path: Path, cell_job: Job, built: Path, interrupted: Path, harm: str) -> None:
    path = shutil.copytree(interrupted, tmp_path / "s.zarr")
    group = zarr.open_group(str(path / "seed"), mode="r+", use_consolidated=False)
    progress = dict(group.attrs["cells_progress"])
    name = progress["scores"]["name"]
    if harm == "array gone":
        del group[name]
    elif harm == "chunks gone":
        shutil.rmtree(path / "seed" / name / "c")
    elif harm == "changed":
        group[name][2, 2, 0] = group[name][2, 2, 0] - 1
    elif harm == "key gone":
        del progress["tube"]
    else:
        progress[harm] = 7
    group.attrs["cells_progress"] = progress
    make(cell_job(), path)
    assert np.array_equal(bytes_of(path), bytes_of(built))


@pytest.mark.slow
def test_killed_for_real_while_it_sweeps_it_goes_on(tmp_path: Path, cell_job: Job, built: Path) -> None:
    """SIGKILL the whole process group of a command-line run, at several moments; run again."""
    path, job = tmp_path / "s.zarr", tmp_path / "job.toml"
    write_toml(job, cell_job(cluster={"kind": "local", "workers": 1}))
    command = [sys.executable, "-m", "mdpext_dask.cli", "run", str(job), "--store", str(path)]
    for arrays in (2, 6):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(list(path.glob("seed/cells_*"))) < arrays and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    make(cell_job(), path)
    assert np.array_equal(bytes_of(path), bytes_of(built))


@pytest.mark.slow
def test_in_pieces_it_is_the_same(path: Path, cell_job: Job, built: Path) -> None:
    for index in range(init(parse_job(cell_job()), str(path))["blocks"]):
        partition(str(path), index, index + 1)
    assert finalise(str(path))["state"] == "complete"
    assert np.array_equal(bytes_of(path), bytes_of(built))


# --- what must be noticed -------------------------------------------------------------------------


def test_changed_scores_of_records_are_noticed(finished: Path) -> None:
    name = facts_of(finished)["record_scores"]["name"]
    array = zarr.open_array(str(finished / "seed" / name), mode="r+")
    array[3, 4, 0] = array[3, 4, 0] - 0.1
    assert not MechanismStore.open(str(finished)).has_seed()
    report = audit(str(finished))
    assert not report.holds
    assert "seed" in report.changed


def test_where_the_scores_of_records_are_is_part_of_the_seed(finished: Path) -> None:
    group = zarr.open_group(str(finished / "seed"), mode="r+")
    honest, digest = dict(group.attrs["record_scores"]), group.attrs["sha256"]
    for where in ({**honest, "name": "score"}, {**honest, "padding": [1, 0]}, {"name": 3}, "score", None):
        group.attrs["record_scores"] = where
        assert not MechanismStore.open(str(finished)).has_seed()
        refused(GuaranteeViolation, "seed", open_mechanism, finished, verify=True)
    assert "seed" in audit(str(finished)).changed
    group.attrs["record_scores"] = honest
    assert MechanismStore.open(str(finished)).has_seed()
    # Stores of before this have the arrays in their digest only.
    arrays = (group["score"], group[honest["name"]])
    group.attrs["sha256"] = sha256_of(*arrays)
    assert group.attrs["sha256"] != digest
    assert MechanismStore.open(str(finished)).has_seed()


@pytest.mark.slow
def test_programs_that_cannot_be_solved(tmp_path: Path, cell_job: Job, monkeypatch: Any) -> None:
    def fails(patches: Patches) -> Solutions:
        return Solutions(np.ones_like(patches.cost), np.ones(patches.cost.shape[-1], dtype=bool))

    monkeypatch.setattr(sweeping, "solve_patches", fails)
    monkeypatch.setattr(sweeping, "solve_with_highs", fails)
    summary = make(cell_job(), tmp_path / "s.zarr")
    listed = [f for s in facts_of(tmp_path / "s.zarr")["cells"]["sweeps"] for f in s["fallbacks"]]
    assert summary["fallbacks"] == sum(east * north for *_, east, north in listed) > 0
    # What is left is what the programs would have begun from.
    monkeypatch.undo()
    without = make(cell_job(extension={"method": "log-convex"}), tmp_path / "without.zarr")
    assert np.abs(bytes_of(tmp_path / "s.zarr") / bytes_of(tmp_path / "without.zarr") - 1).max() < 1e-6
    assert summary["loss_km"] == pytest.approx(without["loss_km"], rel=1e-6)


def test_infeasible_programs_stay_private(path: Path, cell_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that ignores its constraints: cells above ε are found, and stay as they were."""
    original = programs.usable

    def greedy(patches: Patches, u: np.ndarray, failed: np.ndarray) -> Solutions:
        cubes = original(patches, u, failed).u ** 3
        return Solutions(cubes / (patches.reference * cubes).sum(axis=1, keepdims=True), failed)

    monkeypatch.setattr(programs, "usable", greedy)
    summary = make(cell_job(), path)
    assert summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]
    assert any(sweep["frozen_share"] > 0 for sweep in facts_of(path)["cells"]["sweeps"])


# --- costs ----------------------------------------------------------------------------------------


def test_costs_of_a_lattice_of_seeds_are_the_costs_of_the_seed_program(path: Path, cell_job: Job) -> None:
    """Costs shared out by bilinear weights, against those the seed program was made of."""
    make(cell_job(extension={"method": "log-convex"}, domain={"refine": [2, 3]}), path)
    store = MechanismStore.open(str(path), mode="r+")
    grid, outputs = store.grid, store.outputs
    coarse = Level(grid.seeds_shape, grid.factor, LatticeArray("cells_cost_0"))
    for array, shape in ((COSTS, (*grid.shape, outputs)), (coarse.cost, (*grid.seeds_shape, outputs))):
        store.create_seed_array(array.name, ("x", "y", "z"), shape, shape=shape, dtype=np.float64)
    for index in range(store.plan.blocks):
        write_costs(str(path), index)
    nx, ny = grid.seeds_shape
    for box in (Box((0, 3), (0, 4)), Box((3, nx), (0, 4)), Box((0, nx), (4, ny))):
        write_level_costs(str(path), box, coarse)
    assert np.allclose(store.read("seed/cells_cost_0"), store.read("seed/cost"), rtol=1e-9, atol=1e-15)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("epsilon", "log_convex"), [(0.5, 4.727), (1.0, 3.529), (1.5, 3.052)])
def test_rome_loses_an_eighth_less_than_the_published_recipe(
    path: Path, city_roads: Callable[[str], Path], epsilon: float, log_convex: float
) -> None:
    overrides = [
        f"domain.roads={city_roads('rome')}", f"privacy.epsilon_per_km={epsilon}", "extension.method=cell-lp",
    ]  # fmt: skip
    summary = build(load_job(WORKFLOWS / "rome.toml", overrides), str(path))
    assert summary["fallbacks"] == 0
    assert 0.999 <= summary["epsilon_certified"] / summary["epsilon_planar_per_km"] <= 1
    assert summary["loss_km"] < 0.885 * log_convex
