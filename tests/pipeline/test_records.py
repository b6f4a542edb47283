"""One program over all records: stores that hold, lose less than noise, and hardly more than the bound."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import SolverError, SpecError
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
from mdpext_dask.evaluation.evaluate import evaluate
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline import seed_stage
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.runtime import open_city
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.mechanism import open_mechanism
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.refusals import refused
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]


def records_job(small_job: Job, **sections: dict[str, Any]) -> dict[str, Any]:
    job = small_job(
        domain={"cell_km": 3.0, "refine": [2]},
        privacy={"budget": "certified"},
        extension={"method": "records"},
        seed={"refine_rounds": 4},
    )
    for name, keys in sections.items():
        job.setdefault(name, {}).update(keys)
    return job


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "s.zarr"
    build(parse_job(records_job(small_job)), str(path))
    return path


@pytest.mark.parametrize(
    "p", [2.0, *(pytest.param(case, marks=pytest.mark.slow) for case in [1.0, 1.5, "inf"])]
)
def test_it_is_proved_and_beats_everything_else(small_job: Job, tmp_path: Path, p: Any) -> None:
    job = records_job(small_job, domain={"metric_p": p})
    made = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert made["state"] == "complete"
    # What steps leave over is at most 0.2 % of ε, and the gap of the solver next to nothing.
    assert 0.99 * made["epsilon_planar_per_km"] <= made["epsilon_certified"] <= made["epsilon_planar_per_km"]
    assert audit(str(tmp_path / "s.zarr"), method="exhaustive").holds
    for method in ("noise", "log-convex"):
        other = build(parse_job(records_job(small_job, domain={"metric_p": p}, extension={"method": method})),
                      str(tmp_path / f"{method}.zarr"))  # fmt: skip
        assert made["loss_km"] < other["loss_km"]


@pytest.mark.slow
def test_it_loses_hardly_more_than_any_mechanism_must(small_job: Job, tmp_path: Path) -> None:
    job = records_job(small_job, domain={"refine": [1]})
    made = build(parse_job(job), str(tmp_path / "s.zarr"))
    request = BoundRequest(seconds=60.0, stride=1)
    found = evaluate(str(tmp_path / "s.zarr"), bound=request, attacks=None)
    assert found["lower_bound_certified"]
    assert found["lower_bound_km"] <= made["loss_km"] <= 1.002 * found["lower_bound_km"]


def test_a_program_has_no_interpolation(built: Path) -> None:
    """Its rows are those that were solved, to float32."""
    store = MechanismStore.open(str(built))
    stored = store.read("probability").astype(np.float64)
    solved = np.exp(store.read("seed/record_score"))
    assert np.allclose(stored, solved / solved.sum(axis=-1, keepdims=True), rtol=2.0**-23, atol=0)
    corners = stored[:: store.grid.factor, :: store.grid.factor]
    assert np.allclose(store.read("seed/probability"), corners, rtol=2.0**-23, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one process", "two processes"])
def test_every_executor_makes_the_same(built: Path, small_job: Job, tmp_path: Path, kind: str) -> None:
    workers = {"one process": 1, "two processes": 2}[kind]
    job = records_job(small_job, cluster={"kind": "local", "workers": workers}, store={"block_cells": [1, 2]})
    build(parse_job(job), str(tmp_path / "s.zarr"))
    one, other = (MechanismStore.open(str(path)).read("probability") for path in (built, tmp_path / "s.zarr"))
    assert np.array_equal(one, other)


@pytest.mark.slow
def test_with_a_region(tmp_path: Path) -> None:
    job = u_job(tmp_path, privacy={"budget": "certified"})
    job["extension"] = {"method": "records"}
    made = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert made["blocks_skipped"] > 0
    assert audit(str(tmp_path / "s.zarr"), method="exhaustive").holds


def test_a_city_of_it_draws_the_same(built: Path, tmp_path: Path) -> None:
    export_city(str(built), tmp_path / "s.mdp")
    city, store = open_city(tmp_path / "s.mdp"), open_mechanism(built)
    lon, lat = -73.97, 40.77
    assert np.array_equal(city.row(lon=lon, lat=lat), store.row(lon=lon, lat=lat))


def test_rows_that_do_not_keep_epsilon_are_mixed_until_they_do(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = seed_stage.solve_records

    def loose(*arguments: Any, **more: Any) -> Any:
        found = original(*arguments, **more)
        rows = found.rows.copy()
        rows[0] = rows[0] ** power
        rows[0] /= rows[0].sum()
        return seed_stage.replace(found, rows=rows)

    monkeypatch.setattr(seed_stage, "solve_records", loose)
    power = 1 + 1e-6
    assert build(parse_job(records_job(small_job)), str(tmp_path / "s.zarr"))["state"] == "complete"
    power = 1.5
    with pytest.raises(SolverError, match="of its ε"):
        build(parse_job(records_job(small_job)), str(tmp_path / "t.zarr"))


@pytest.mark.slow
def test_where_wide_steps_are_not_enough_the_program_is_solved_for_less(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = seed_stage.solve_records
    promises: list[float] = []

    def steeper(lattice: Any, promise: Any, *arguments: Any, **more: Any) -> Any:
        promises.append(promise.epsilon_per_km)
        grown = 1.01 if len(promises) == 1 else 1.0
        return original(
            lattice,
            seed_stage.replace(promise, epsilon_per_km=grown * promise.epsilon_per_km),
            *arguments,
            **more,
        )

    monkeypatch.setattr(seed_stage, "solve_records", steeper)
    # Many lines, so that what is known beforehand of steps of 8 lines differs from what is seen with 16.
    made = build(
        parse_job(records_job(small_job, domain={"cell_km": 3.0, "refine": [3]})), str(tmp_path / "s.zarr")
    )
    assert len(promises) == 2
    assert promises[1] < promises[0]
    assert made["state"] == "complete"
    assert made["epsilon_certified"] <= made["epsilon_planar_per_km"]


def test_what_cannot_be(small_job: Job) -> None:
    refused(SpecError, "is for seeds", parse_job, records_job(small_job, privacy={"budget": "half"}))
    large = records_job(small_job, domain={"cell_km": 0.5, "refine": [8]})
    assert "GiB of it for the program over all records" in plan_job(parse_job(large))["refused"]
    assert math.isfinite(plan_job(parse_job(large))["seconds_by_workers"]["2"]["total"])
