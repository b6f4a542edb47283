"""Stores of noise: proved, as good as the noise they are made of, and the same however they are made."""

import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.evaluation.baselines.fine_noise import cells_of, laplace_fine
from mdpext_dask.evaluation.baselines.problem import Problem, expected_loss
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
from mdpext_dask.evaluation.evaluate import evaluate
from mdpext_dask.events import Event, Note
from mdpext_dask.extend.noise_remap import tile_count
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline.memory import noise_table_bytes
from mdpext_dask.pipeline.noise_stage import remap_tile, strictness
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build, finalise, init, partition
from mdpext_dask.pipeline.tasks import extend_block
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime.city import open_city
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.mechanism import open_mechanism
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of
from tests.support.forged import rehash
from tests.support.refusals import refused
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]
NOISE = {"extension": {"method": "noise"}, "privacy": {"budget": "certified"}}


def noise_job(small_job: Job, **sections: dict[str, Any]) -> dict[str, Any]:
    both = {name: {**NOISE.get(name, {}), **sections.get(name, {})} for name in {*NOISE, *sections}}
    return small_job(**both)


def all_rows(path: Path | str) -> Any:
    store = MechanismStore.open(str(path))
    return rows_of(store, slice(0, store.grid.shape[0]), slice(0, store.grid.shape[1]))


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "s.zarr"
    build(parse_job(noise_job(small_job, store={"block_cells": [2, 2]})), str(path))
    return path


# --- what it is -----------------------------------------------------------------------------------


def test_it_is_proved_and_loses_what_its_noise_does(built: Path) -> None:
    store = MechanismStore.open(str(built))
    report = audit(built, method="certificate")
    assert report.holds
    assert 0.95 <= report.epsilon / report.limit_per_km <= 1  # records are further apart than noise cells
    assert audit(built, method="exhaustive").holds
    assert audit(built, method="boundary").verdict == "shared rows agree"
    problem = Problem.of_store(store)
    rows = laplace_fine(problem, 100.0).rows
    assert rows is not None
    # Of the baseline no certificate is asked, so its ε is a bit more.
    loss = expected_loss(problem, rows)
    assert loss * (1 - 1e-6) <= store.attributes["loss_km"] <= loss * 1.003
    assert (
        evaluate(str(built), bound=BoundRequest(seconds=0), attacks=None)["loss_km"]
        == store.attributes["loss_km"]
    )


def test_there_is_no_seed(built: Path, small_job: Job) -> None:
    spec = parse_job(noise_job(small_job))
    planned, store = plan_job(spec), MechanismStore.open(str(built))
    assert planned["seeds"] == 0
    assert planned["seed_work"] == {"programs": 0, "rounds": 0, "trials": 0}
    assert store.seed_arrays() == {"noise_output", "noise_mass", "noise_total", "noise_form"}
    facts = store.seed_attributes["noise"]
    assert 0 < facts["floor"] * store.outputs < 1e-3
    assert all_rows(built).min() == np.float32(facts["floor"])


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    epsilon=st.sampled_from([0.3, 1.0, 4.0]),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]),
    refine=st.sampled_from([[1], [3], [2, 2]]),
    kind=st.sampled_from(["travel", "euclidean"]),
    outputs=st.integers(1, 20),
)
def test_every_job_holds(
    small_job: Job,
    tmp_path_factory: pytest.TempPathFactory,
    epsilon: float,
    p: float,
    refine: list[int],
    kind: str,
    outputs: int,
) -> None:
    job = noise_job(
        small_job,
        domain={"metric_p": p, "refine": refine},
        privacy={"epsilon_per_km": epsilon},
        loss={"kind": kind},
        outputs={"count": outputs},
    )
    path = tmp_path_factory.mktemp("any") / "s.zarr"
    summary = build(parse_job(job), str(path))
    assert summary["state"] == "complete"
    assert summary["epsilon_certified"] <= summary["epsilon_planar_per_km"]
    assert audit(path, method="exhaustive").holds


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_steps_are_a_bit_stricter_than_noise(p: float) -> None:
    found = strictness(Grid(0.0, 0.0, 20, 20, 1.0, (2,)), 3.0, p)
    assert 1 <= found <= (1.0 + 1e-9 if p in (1.0, math.inf) else 1.0021)


@pytest.mark.parametrize(
    ("kind", "outputs"), [pytest.param("travel", 300, marks=pytest.mark.slow), ("euclidean", 40)]
)
def test_a_tile_takes_no_more_memory_than_planned(
    small_job: Job, path: Path, kind: str, outputs: int
) -> None:
    spec = parse_job(noise_job(small_job, loss={"kind": kind}, outputs={"count": outputs}))
    build(spec, str(path))
    store = MechanismStore.open(str(path))
    lattice = cells_of(store.grid, 1.0)
    assert tile_count(lattice) > 1
    remap_tile(str(path), 1.0, 0)  # reads the loss
    tracemalloc.start()
    for index in range(tile_count(lattice)):
        remap_tile(str(path), 1.0, index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= plan_job(spec)["seed_bytes"]


# --- the same, however it is made -----------------------------------------------------------------


@pytest.mark.slow
def test_extending_takes_no_more_memory_than_planned(small_job: Job, path: Path) -> None:
    """Near outputs count, and not all of them."""
    job = noise_job(
        small_job, domain={"cell_km": 2.0, "refine": [12]}, privacy={"epsilon_per_km": 10.0},
        outputs={"count": 1500}, loss={"kind": "euclidean"},
    )  # fmt: skip
    init(parse_job(job), str(path))
    store = MechanismStore.open(str(path))
    peaks = []
    for index in range(store.plan.blocks):
        tracemalloc.start()
        extend_block(str(path), index)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    planned, dense = store.plan.peak_bytes("noise"), store.plan.peak_bytes("log-convex")
    tables = noise_table_bytes(parse_job(job), store.grid)
    assert max(peaks) <= planned + tables
    assert planned < 0.8 * dense


@pytest.mark.parametrize(
    "block_cells", [[1, 1], *(pytest.param(case, marks=pytest.mark.slow) for case in [[3, 2], [99, 99]])]
)
def test_blocks_do_not_decide_the_bytes(
    built: Path, small_job: Job, path: Path, block_cells: list[int]
) -> None:
    build(parse_job(noise_job(small_job, store={"block_cells": block_cells})), str(path))
    assert np.array_equal(all_rows(path).view(np.uint32), all_rows(built).view(np.uint32))


def test_every_executor_makes_the_same(
    built: Path, small_job: Job, path: Path, any_cluster: ClusterSection
) -> None:
    spec = parse_job(noise_job(small_job, store={"block_cells": [2, 2]}))
    build(spec.model_copy(update={"cluster": any_cluster}), str(path))
    found, before = (MechanismStore.open(str(each)) for each in (path, built))
    assert found.content_sha256 == before.content_sha256
    assert found.seed_sha256() == before.seed_sha256()
    assert found.attributes["epsilon_certified"] == before.attributes["epsilon_certified"]


def test_in_pieces(built: Path, small_job: Job, path: Path) -> None:
    spec = parse_job(noise_job(small_job, store={"block_cells": [2, 2]}))
    init(spec, str(path))
    for index in reversed(range(MechanismStore.open(str(path)).plan.blocks)):
        partition(str(path), index, index + 1)
    assert finalise(str(path))["state"] == "complete"
    assert MechanismStore.open(str(path)).content_sha256 == MechanismStore.open(str(built)).content_sha256


@pytest.mark.slow
def test_with_a_region(tmp_path: Path) -> None:
    found = []
    for cells in (1, 9):
        job = u_job(tmp_path, store={"block_cells": [cells, cells]}, privacy={"budget": "certified"})
        job["extension"] = {"method": "noise"}
        path = tmp_path / f"{cells}.zarr"
        assert build(parse_job(job), str(path))["state"] == "complete"
        assert audit(str(path)).holds
        assert audit(str(path), method="boundary").passed
        found.append(all_rows(path))
    assert np.array_equal(*found)
    assert len(MechanismStore.open(str(tmp_path / "1.zarr")).plan.skipped) == 8


def test_on_a_turned_grid(small_job: Job, path: Path) -> None:
    build(parse_job(noise_job(small_job, domain={"rotation_deg": 30.0})), str(path))
    assert audit(path, method="exhaustive").holds


def test_a_city_of_it_draws_the_same(built: Path, tmp_path: Path) -> None:
    facts = export_city(str(built), tmp_path / "m.mdp")
    assert facts["packing"] == "noise"
    assert audit(str(tmp_path / "m.mdp")).holds
    assert audit(str(tmp_path / "m.mdp"), method="exhaustive").holds
    city, store = open_city(tmp_path / "m.mdp"), open_mechanism(built)
    lon, lat = -73.97, 40.77
    assert np.array_equal(city.row(lon=lon, lat=lat), store.row(lon=lon, lat=lat))


@pytest.mark.parametrize(
    ("epsilon", "cell_km", "refine", "p"),
    [
        (4.0, 4.0, [2], 2.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1.0, 4.0, [3], 2.0), (1.0, 4.0, [3], 3.0)]
        ),
    ],
)
def test_a_city_claims_what_its_rows_are_certified_for(
    small_job: Job, tmp_path: Path, epsilon: float, cell_km: float, refine: list[int], p: float
) -> None:
    job = noise_job(
        small_job,
        domain={"cell_km": cell_km, "refine": refine, "metric_p": p},
        privacy={"epsilon_per_km": epsilon},
        outputs={"count": 30},
    )
    build(parse_job(job), str(tmp_path / "s.zarr"))
    export_city(str(tmp_path / "s.zarr"), tmp_path / "m.mdp")
    of_store, of_city = audit(tmp_path / "s.zarr"), audit(str(tmp_path / "m.mdp"))
    assert of_store.holds
    assert of_city.holds
    assert of_store.epsilon == of_city.epsilon


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "noise_mass",
        "noise_form",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ["noise_output", "noise_total"]),
    ],
)
def test_changed_tables_are_found(built: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(built, tmp_path / "copy.zarr")
    array = MechanismStore.open(str(path), mode="r+").array(f"seed/{name}")
    values = array[...]
    middle = tuple(n // 2 for n in values.shape)
    values[middle] = (values[middle] + 1) % 8 if name == "noise_output" else values[middle] * 1.01 + 1e-3
    array[...] = values
    report = audit(path)
    assert report.verdict == "changed since it was written"
    assert "seed" in report.changed


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise_output", 8), ("noise_output", -1), ("noise_mass", math.nan), ("noise_total", 0.0),
     ("noise_form", 2.5), ("noise_form", math.inf), ("noise_form", 3.0)],
)  # fmt: skip
def test_damaged_tables_are_one_line(built: Path, tmp_path: Path, name: str, value: float) -> None:
    path = shutil.copytree(built, tmp_path / "copy.zarr")
    array = MechanismStore.open(str(path), mode="r+").array(f"seed/{name}")
    values = array[...]
    values[(0,) * values.ndim] = value
    array[...] = values
    rehash(path)
    refused(StoreError, "damaged", audit, path, method="boundary")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("noise_output", "float64", None), ("noise_mass", "float32", None),
     ("noise_mass", "float64", (1, 1, 9_999, 9_999)), ("noise_output", "int32", (9_999, 9_999))],
)  # fmt: skip
def test_other_tables_are_not_read(
    built: Path, tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...] | None
) -> None:
    path = shutil.copytree(built, tmp_path / "copy.zarr")
    store = MechanismStore.open(str(path), mode="r+")
    values = store.read(f"seed/{name}")
    content: dict[str, Any] = {"data": values.astype(dtype)}
    if shape is not None:
        content = {"shape": shape, "dtype": dtype}
    dimensions = tuple(f"{name}_{axis}" for axis in range(values.ndim))
    store.create_seed_array(name, dimensions, shape or values.shape, fill_value=0, **content)
    tracemalloc.start()
    refused(StoreError, "damaged", audit, path, method="boundary")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


def test_tables_in_a_store_with_seeds_hide_nothing(small_job: Job, path: Path) -> None:
    build(parse_job(small_job()), str(path))
    store = MechanismStore.open(str(path), mode="r+")
    rows = store.array("seed/probability")
    rows[...] = rows[...][::-1]
    store.create_seed_array(
        "noise_output", ("a", "b"), (2, 2), fill_value=-1, data=np.zeros((2, 2), np.int32)
    )
    assert "seed/probability" in audit(path).changed


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"privacy": {"budget": "half"}}, "is for seeds"),
        ({"privacy": {"epsilon_per_km": 1e-4}}, "cells of noise"),
    ],
)
def test_what_cannot_be(small_job: Job, path: Path, sections: dict[str, Any], message: str) -> None:
    def run(function: Callable[..., Any], *arguments: str) -> None:
        function(parse_job(noise_job(small_job, **sections)), *arguments)

    refused(SpecError, message, run, build, str(path))
    if "budget" in sections["privacy"]:
        refused(SpecError, message, run, plan_job)
    else:
        assert message in plan_job(parse_job(noise_job(small_job, **sections)))["refused"]
    assert not path.exists()


@pytest.mark.parametrize("epsilon", [1e-4, 300.0])
def test_the_epsilon_that_is_named_instead_can_be(small_job: Job, epsilon: float) -> None:
    def planned(epsilon: float) -> str | None:
        job = noise_job(small_job, domain={"refine": [16]}, privacy={"epsilon_per_km": epsilon})
        refused: str | None = plan_job(parse_job(job))["refused"]
        return refused

    named = re.search(r"use (\S+)/km", planned(epsilon) or "")
    assert named is not None
    assert planned(float(named[1])) is None
    # There is none that is nearer, to two digits.
    assert "of noise" in (planned(float(named[1]) * (1.1 if epsilon > 1 else 0.9)) or "")


def test_a_whole_city_is_told_what_epsilon_it_can_have(
    city_roads: Callable[[str], Path], tmp_path: Path
) -> None:
    roads = {"roads": str(city_roads("rome"))}
    spec = JobSpec.of(domain=roads, privacy={"epsilon_per_km": 50})
    named = re.search(
        r"use (\S+)/km", refused(SpecError, "cells of noise", build, spec, tmp_path / "s").args[0]
    )
    assert named is not None
    assert plan_job(spec.replace(privacy={"epsilon_per_km": float(named[1])}))["method"] == "noise"


def test_a_prior_of_one_record_and_reports_that_are_all_the_same_are_told(
    small_job: Job, tmp_path: Path
) -> None:
    points = tmp_path / "points.csv"
    points.write_text("lon,lat\n-73.98,40.75\n")
    told: list[Event] = []
    job = noise_job(small_job, prior={"kind": "file", "file": str(points)})
    built = build(parse_job(job), tmp_path / "s.zarr", observer=told.append)
    said = [event.text for event in told if isinstance(event, Note)]
    assert any(text.startswith("prior: all of it is at one record") for text in said)
    assert any("of the reports from the middle of the grid are output" in text for text in said)
    assert audit(tmp_path / "s.zarr").holds
    assert built["loss_km"] < built["plain_loss_km"]
