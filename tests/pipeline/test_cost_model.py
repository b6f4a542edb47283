"""What a job will take is said before it runs, kept with it, and compared with what it took."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.errors import SpecError
from mdpext_dask.events import ClusterReady, Event, JobFinished, Planned
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.cost_model import DISPATCH, ELEMENT, TASK, JobCosts
from mdpext_dask.pipeline.memory import _CLIENT_ARRAYS, noise_bytes, receipt_bytes
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.pipeline.run import build
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.blocks import Plan
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support import loss_files
from tests.support.problems import point_file
from tests.support.refusals import refusal

Job = Callable[..., dict[str, dict[str, Any]]]


def test_the_plan_is_kept_and_told(path: Path, small_job: Job) -> None:
    events: list[Event] = []
    spec, url = parse_job(small_job()), str(path)
    summary = build(spec, url, observer=events.append)
    stages = ["domain", "loss", "seed", "extend", "boundary", "audit", "evaluate"]
    (planned,) = (event.seconds for event in events if isinstance(event, Planned))
    assert list(planned) == [*stages, "total"]
    assert dict(planned) == summary["seconds_planned"] == JobCosts.of(spec, build_geometry(spec)).seconds(1)
    assert events[-1] == JobFinished(summary["seconds"], summary["seconds_planned"])
    assert [event.workers for event in events if isinstance(event, ClusterReady)] == [1]
    # Stores of before do not say, and go on without.
    MechanismStore.open(url, mode="r+").update(seconds_planned=None, state="extending")
    events.clear()
    assert build(spec, url, observer=events.append)["seconds_planned"] is None
    assert not any(isinstance(event, Planned) for event in events)


def test_a_plan_by_hand(small_job: Job) -> None:
    """13 x 29 records in 3 x 7 cells of 4 x 4: a block a cell, and nothing else that costs."""
    spec = parse_job(small_job(store={"block_cells": [1, 1]}, cluster={"kind": "local"}))
    costs = JobCosts.of(spec, build_geometry(spec))
    assert (costs.plan.blocks, costs.elements, costs.solves, costs.trials) == (21, 377 * 8, 1, 0)
    each = costs.elements / 21 * ELEMENT["extend"] + TASK["extend"]
    assert costs.seconds(1)["extend"] == pytest.approx(21 * each, abs=1e-3)
    # Four turns of five, and one more.
    assert costs.seconds(5)["extend"] == pytest.approx(5 * each, abs=1e-3)
    # Tasks come no faster than client and scheduler send them, however many workers there are.
    assert costs.seconds(1000)["extend"] == pytest.approx(21 * DISPATCH, abs=1e-3)
    assert costs.tasks == 4 * 21 + 1
    planned = plan_job(spec)
    # Rows that two blocks share: two columns of 29 records and six rows of 13; each is digested twice.
    assert planned["receipt_bytes"] == 21 * 600 + 2 * 16 * (2 * 29 + 6 * 13)
    assert planned["refused"] is None
    assert planned["scheduler"]["tasks_at_once"]["32"] == 21


@pytest.mark.parametrize(
    ("budget", "rounds", "work"),
    [
        # As searches on cities have taken: with few rounds they go on from where they began, and refine then.
        ("bound", 20, (1, 0, 0)), ("half", 20, (5, 0, 0)), ("certified", 20, (4, 20, 88)),
        ("certified", 8, (4, 8, 40)), ("certified", 4, (14, 4, 36)), ("certified", 0, (14, 0, 20)),
    ],
)  # fmt: skip
def test_the_work_on_a_seed_is_counted(
    small_job: Job, budget: str, rounds: int, work: tuple[int, int, int]
) -> None:
    planned = plan_job(parse_job(small_job(privacy={"budget": budget}, seed={"refine_rounds": rounds})))
    assert tuple(planned["seed_work"][name] for name in ("programs", "rounds", "trials")) == work


@pytest.mark.parametrize(
    ("cells", "cell_km", "outputs", "seconds"),
    [
        ((10, 11), 4.77, 20, 0.22),
        ((10, 11), 4.77, 100, 0.90),
        ((9, 19), 1.0, 64, 1.7),
        ((18, 38), 0.5, 64, 10.8),
        ((48, 50), 1.0, 40, 79.0),
    ],
)
def test_a_seed_program_takes_about_what_was_measured(
    small_job: Job, cells: tuple[int, int], cell_km: float, outputs: int, seconds: float
) -> None:
    plan = Plan.of(Grid(0, 0, *cells, cell_km, (2,)), outputs, (1, 1))
    costs = JobCosts(parse_job(small_job()), plan, 0, 0, 1, 0, 0)
    assert costs.program_seconds == pytest.approx(seconds, rel=0.3)


def test_receipts_are_as_large_as_planned(path: Path, small_job: Job) -> None:
    spec, url = parse_job(small_job(store={"block_cells": [1, 1]})), str(path)
    build(spec, url)
    store = MechanismStore.open(url)
    found = [objects.get_bytes(store.objects, receipts.key_of(index)) for index in range(store.plan.blocks)]
    assert sum(len(one or b"") for one in found) == pytest.approx(receipt_bytes(store.plan), rel=0.25)


@given(workers=st.integers(1, 4096), more=st.integers(1, 4096))
def test_more_workers_never_take_longer(small_job: Job, workers: int, more: int) -> None:
    spec = parse_job(small_job(privacy={"budget": "certified"}, store={"block_cells": [1, 1]}))
    costs = JobCosts(spec, Plan.of(Grid(0, 0, 40, 50, 1.0, (6,)), 100, (1, 1)), 4000, 50, 13, 0, 20)
    few, many = costs.seconds(workers), costs.seconds(workers + more)
    assert all(many[stage] <= few[stage] for stage in few)
    stages = sum(seconds for stage, seconds in many.items() if stage != "total")
    assert many["total"] == pytest.approx(stages, abs=0.01)  # tasks run in this process


HERE, ROME = [(-73.98, 40.75, 1.0)], [(12.5, 41.9, 1.0)]
CORNER, TRIANGLE = (
    [(-74.01, 40.79, 1.0)],
    [[-74.02, 40.70], [-73.96, 40.70], [-73.96, 40.80], [-74.02, 40.70]],
)
REFUSED_FILES = {
    "a prior of another city": (ROME, {"prior": {"kind": "file", "file": "FILE"}}, "no weight lies inside"),
    "a prior outside the region": (
        CORNER,
        {"prior": {"kind": "file", "file": "FILE"}, "domain": {"region": "REGION", "cell_km": 1.0}},
        "all of the prior lies outside the region",
    ),
    "a prior for fewer outputs": (
        HERE,
        {"prior": {"kind": "file", "file": "FILE"}, "outputs": {"choose": "prior", "count": 2}},
        "only 1 records have any prior",
    ),
    "tasks of another city": (ROME, {"loss": {"tasks_file": "FILE"}}, "all 1 points lie outside the grid"),
    "a prior that is no table": ([], {"prior": {"kind": "file", "file": "FILE"}}, "FILE"),
    "a raster that is none": ([], {"prior": {"kind": "raster", "file": "FILE"}}, "FILE"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_a_plan_is_refused_where_a_run_is(case: str, tmp_path: Path, small_job: Job) -> None:
    places, sections, said = REFUSED_FILES[case]
    file = tmp_path / ("p.tif" if "raster" in case else "p.csv")
    if "raster" in case:
        file.write_bytes(b"none")
    else:
        point_file(file, "lon,lat,weight", places)
    (tmp_path / "region.json").write_text(json.dumps({"type": "Polygon", "coordinates": [TRIANGLE]}))
    names = {"FILE": str(file), "REGION": str(tmp_path / "region.json")}
    found = {name: {k: names.get(v, v) for k, v in keys.items()} for name, keys in sections.items()}
    job = small_job(**found)
    if "tasks" in case:
        del job["loss"]["tasks"]
    spec = parse_job(job)
    refusals = {refusal(partial(action, spec), names.get(said, said)) for action in (build_domain, plan_job)}
    assert len(refusals) == 1


def test_a_plan_reads_the_loss_file(tmp_path: Path) -> None:
    shape, file = (5, 5), tmp_path / "loss.npz"
    loss_files.write(file, shape, loss_km=np.full((*shape, 4), np.nan))
    spec = parse_job(loss_files.job(file))
    assert len({refusal(partial(action, spec), "loss_km") for action in (build_domain, plan_job)}) == 1


def test_a_thousand_million_records_are_planned_in_a_moment(small_job: Job) -> None:
    domain = {"cell_km": 0.1, "refine": [240]}
    spec = parse_job(small_job(domain=domain, outputs={"count": 1000}, cluster={"kind": "local"}))
    tracemalloc.start()
    planned = plan_job(spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert planned["records"] > 9e8
    assert planned["blocks"] > 10_000
    # Nothing of the size of the records, which are 7 GB at 8 bytes each.
    assert peak < 50 * 2**20
    assert planned["client_bytes"] > 3 * 8 * planned["records"]
    assert 0 < planned["scheduler"]["workers_at_most"]["evaluate"] < planned["blocks"]


def test_losses_of_noise_that_are_held_in_parts_take_less_memory_and_more_time(
    small_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_job(small_job(extension={"method": "noise"}, privacy={"budget": "certified"}))
    geometry = build_geometry(spec)

    def planned() -> tuple[int, float]:
        return noise_bytes(spec, geometry), JobCosts.of(spec, geometry).noise_seconds

    whole = planned()
    for module in ("memory", "cost_model"):
        monkeypatch.setattr(f"mdpext_dask.pipeline.{module}.MOST_MOMENTS", 100)
    parts = planned()
    assert parts[0] < whole[0]
    assert parts[1] > whole[1]


@pytest.mark.parametrize(
    ("domain", "outputs", "what"),
    [
        ({"cell_km": 3.0, "refine": [9000]}, 8, "arrays over all records"),
        ({"cell_km": 3.0, "refine": [800]}, 1000, "the tasks"),
        ({"cell_km": 0.05, "refine": [1]}, 1000, "the seed program"),
    ],
)
def test_what_does_not_fit(domain: Any, outputs: int, what: str, small_job: Job, monkeypatch: Any) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=8 * 2**30))
    job = small_job(domain=domain, outputs={"count": outputs}, cluster={"kind": "local", "workers": 2})
    assert f"GiB of it for {what}, but there are 8.0 GiB" in plan_job(parse_job(job))["refused"]


@pytest.mark.parametrize("region", [False, True])
def test_a_client_holds_no_more_arrays_than_planned(region: bool, tmp_path: Path, small_job: Job) -> None:
    domain: dict[str, Any] = {"cell_km": 1.0, "refine": [60]}
    if region:
        ring = [[-74.0, 40.7], [-73.95, 40.7], [-73.95, 40.8], [-74.0, 40.8], [-74.0, 40.7]]
        (tmp_path / "region.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
        domain["region"] = str(tmp_path / "region.geojson")
    spec = parse_job(small_job(domain=domain))
    geometry = build_geometry(spec)
    tracemalloc.start()
    create(spec, str(tmp_path / "s.zarr"), build_domain(spec, geometry))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Beside them there are chunks on their way into the store, and the network.
    assert peak <= _CLIENT_ARRAYS * 8 * geometry.grid.records + 12 * 2**20


@pytest.mark.slow
def test_too_small_workers_are_refused(tmp_path: Path, small_job: Job, any_cluster: ClusterSection) -> None:
    """Also those that somebody else has started, whose limits only their scheduler knows."""
    store = tmp_path / "small.zarr"
    if any_cluster.kind == "inline":
        assert build(parse_job(small_job()), str(store))["state"] == "complete"
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mdpext_dask.pipeline.memory._WORKER_BASE", 2**50)
        spec = parse_job(small_job(cluster=any_cluster.model_dump(exclude_none=True)))
        with pytest.raises(SpecError, match=r"a worker needs .* GiB with a task, but one of them pauses"):
            build(spec, str(store))
    assert not store.exists()
