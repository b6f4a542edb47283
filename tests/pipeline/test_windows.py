"""Programs of windows: stores that hold, lose less than noise, and go on where they were killed."""

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
import tomli_w
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdpext_dask.auditors.audit import audit
from mdpext_dask.errors import SolverError, SpecError, StoreError
from mdpext_dask.events import Event, Note
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline import cost_model
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.pipeline.windows import sizes, tasks
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.runtime import open_city
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.mechanism import open_mechanism
from mdpext_dask.seed.record_program import predicted_bytes, predicted_seconds
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of
from tests.support.forged import edit, flip_a_bit
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
BOX = [-74.003, 40.735, -73.968, 40.762]


def windows_job(small_job: Job, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job of 16 x 16 records and 10 outputs."""
    job = small_job(
        domain={"bbox": BOX, "cell_km": 0.2, "refine": [1]},
        privacy={"budget": "certified", "epsilon_per_km": 3.0},
        extension={"method": "windows"},
        outputs={"count": 10},
    )
    for name, keys in sections.items():
        job.setdefault(name, {}).update(keys)
    return job


def all_of_side(side: int, patch: pytest.MonkeyPatch) -> None:
    """Make all windows of one side, whatever their programs take."""
    patch.setattr(sizes, "SIDES", (side,))
    patch.setattr(sizes, "SECONDS", 0.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows small: their programs take milliseconds."""
    all_of_side(6, monkeypatch)


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows") / "s.zarr"
    with pytest.MonkeyPatch.context() as patch:
        all_of_side(6, patch)
        build(parse_job(windows_job(small_job)), str(path))
    return path


def rows(path: Path) -> np.ndarray:
    return MechanismStore.open(str(path)).read("probability")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "p", [2.0, *(pytest.param(case, marks=pytest.mark.slow) for case in [1.0, 1.5, "inf"])]
)
def test_it_is_proved_and_loses_less_than_noise(small_job: Job, tmp_path: Path, p: Any) -> None:
    said: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Note):
            said.append(event.text)

    job = windows_job(small_job, domain={"metric_p": p})
    made = build(parse_job(job), str(tmp_path / "s.zarr"), observer=note)
    assert made["state"] == "complete"
    assert 0.98 * made["epsilon_planar_per_km"] <= made["epsilon_certified"] <= made["epsilon_planar_per_km"]
    assert made["fallbacks"] == 0
    assert audit(str(tmp_path / "s.zarr"), method="exhaustive").holds
    by_turn = [float(text.split()[-2]) for text in said if text.startswith("windows: turn")]
    start = MechanismStore.open(str(tmp_path / "s.zarr")).seed_attributes["start_km"]
    assert by_turn == sorted([start, *by_turn], reverse=True)[1:]
    assert made["loss_km"] == pytest.approx(by_turn[-1], rel=1e-4)
    job = windows_job(small_job, domain={"metric_p": p}, extension={"method": "noise"})
    assert made["loss_km"] < 0.99 * build(parse_job(job), str(tmp_path / "noise.zarr"))["loss_km"]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    epsilon=st.floats(1.0, 12.0),
    cell=st.sampled_from([0.2, 0.31, 0.5]),
    outputs=st.integers(2, 20),
    prior=st.sampled_from(["uniform", "road-nodes"]),
)
def test_never_worse_than_what_it_begins_with(
    small_job: Job, tmp_path_factory: pytest.TempPathFactory,
    epsilon: float, cell: float, outputs: int, prior: str,
) -> None:  # fmt: skip
    job = windows_job(
        small_job,
        domain={"cell_km": cell}, privacy={"epsilon_per_km": epsilon},
        outputs={"count": outputs}, prior={"kind": prior},
    )  # fmt: skip
    path = tmp_path_factory.mktemp("any") / "s.zarr"
    made = build(parse_job(job), str(path))
    assert made["epsilon_certified"] <= made["epsilon_planar_per_km"]
    assert made["loss_km"] <= MechanismStore.open(str(path)).seed_attributes["start_km"] * (1 + 1e-6)


def test_where_all_records_fit_into_one_window_it_is_solved_once(
    built: Path, small_job: Job, tmp_path: Path
) -> None:
    made = build(parse_job(windows_job(small_job)), str(tmp_path / "s.zarr"))
    seed = MechanismStore.open(made["store"]).seed_attributes
    assert (seed["solves"], seed["fallbacks"], seed["record_scores"]["turns"]) == (1, 0, 1)
    assert made["epsilon_certified"] <= made["epsilon_planar_per_km"]
    assert seed["loss_km"] < MechanismStore.open(str(built)).seed_attributes["loss_km"]


def test_windows_are_as_large_as_their_programs_may_be(small_job: Job) -> None:
    sides = []
    for outputs in (10, 40, 160, 639):
        spec = parse_job(windows_job(small_job, domain={"cell_km": 0.05}))
        grid = build_geometry(spec).grid
        windows = sizes.windows_of_job(spec, grid, outputs)
        sides.append(windows.side)
        assert predicted_bytes(*sizes.window_program(spec, grid, outputs)) <= 2**30
        assert windows.turns == (1 if windows.side >= max(grid.shape) else 4)
    assert sides == sorted(sides, reverse=True)
    assert sides[0] > sides[-1]


def test_where_the_method_is_left_open_windows_fit_into_the_time_or_take_the_least(small_job: Job) -> None:
    def found(seconds: float, outputs: int) -> tuple[int, float]:
        spec = parse_job(windows_job(small_job, extension={"method": "auto", "seconds": seconds}))
        grid = build_geometry(spec).grid
        windows = sizes.windows_of_job(spec, grid, outputs)
        each = sizes.SHARE * predicted_seconds(*sizes.window_program(spec, grid, outputs))
        return windows.turns, each * sum(map(windows.count, range(windows.turns)))

    for outputs in (100, 400, 1000):
        in_time, least = found(1e6, outputs), found(1e-3, outputs)
        assert least[1] <= in_time[1]
        assert found(2 * least[1] * 1.001, outputs)[1] <= least[1] * 1.001
    assert found(1e-3, 100)[0] == 1  # all records at once, where windows of 11 would be solved in four turns


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_outputs_that_no_program_has_room_for_stay(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 5
    monkeypatch.setattr(tasks, "_MOST_BYTES", predicted_bytes((6, 6), most, 3))
    made = build(parse_job(windows_job(small_job)), str(tmp_path / "s.zarr"))
    assert made["epsilon_certified"] <= made["epsilon_planar_per_km"]
    store = MechanismStore.open(made["store"])
    shapes = [store.array(f"seed/{name}").shape for name in store.seed_arrays() if "window" in name]
    assert max(outputs for rows, outputs in shapes if rows == 1 + 36) == most  # a row for their numbers
    assert store.seed_attributes["loss_km"] < store.seed_attributes["start_km"]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["one process", "two processes"])
def test_every_executor_makes_the_same(built: Path, small_job: Job, tmp_path: Path, kind: str) -> None:
    workers = {"one process": 1, "two processes": 2}[kind]
    job = windows_job(small_job, cluster={"kind": "local", "workers": workers}, store={"block_cells": [7, 9]})
    build(parse_job(job), str(tmp_path / "s.zarr"))
    assert np.array_equal(rows(built), rows(tmp_path / "s.zarr"))


@pytest.mark.slow
def test_killed_in_the_middle_of_a_turn_it_goes_on(built: Path, small_job: Job, tmp_path: Path) -> None:
    job, store = tmp_path / "job.toml", tmp_path / "s.zarr"
    job.write_text(tomli_w.dumps(windows_job(small_job)))
    small = "from mdpext_dask.pipeline.windows import sizes; sizes.SIDES, sizes.SECONDS = (6,), 0.0"
    run = f"{small}; from mdpext_dask.cli.main import main; main()"
    command = [sys.executable, "-c", run, "run", str(job), "--store", str(store)]
    for turn in (0, 1):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(store.glob(f"seed/window_{turn}_*/c")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert MechanismStore.open(str(store)).state != "complete"
    # What was not made from what is there, or breaks a step, is made again.
    other = next(store.glob("seed/window_0_*"))
    array = zarr.open_array(other, mode="r+")
    array[1:] = array[1:] * 1.3
    made = {path: path.stat().st_mtime_ns for path in store.glob("seed/window_0_*/c/0/0")}
    made.pop(other / "c" / "0" / "0")
    subprocess.run(command, check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    assert np.array_equal(rows(built), rows(store))


@pytest.mark.usefixtures("small")
def test_a_window_whose_program_fails_keeps_its_rows(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise SolverError("no")

    said: list[str] = []
    monkeypatch.setattr(tasks, "solve_window", fail)
    made = build(
        parse_job(windows_job(small_job)),
        str(tmp_path / "s.zarr"),
        observer=lambda event: said.append(event.text) if isinstance(event, Note) else None,
    )
    assert made["state"] == "complete"
    assert made["fallbacks"] == 4  # and a turn that gains nothing is the last
    assert "records 0:6 x 0:6 has failed; its rows stay" in " ".join(said)
    assert made["loss_km"] == pytest.approx(MechanismStore.open(made["store"]).seed_attributes["start_km"])


@pytest.mark.usefixtures("small")
def test_rows_that_break_a_step_are_mixed_or_not_taken(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, power = tasks.solve_window, 1.0

    def loose(*arguments: Any) -> Any:
        found = original(*arguments)
        totals = found.sum(axis=-1, keepdims=True)
        found = found**power
        return found / found.sum(axis=-1, keepdims=True) * totals

    monkeypatch.setattr(tasks, "solve_window", loose)
    power = 1 + 1e-5
    made = build(parse_job(windows_job(small_job)), str(tmp_path / "s.zarr"))
    assert made["state"] == "complete"
    power = 1.5
    made = build(parse_job(windows_job(small_job)), str(tmp_path / "t.zarr"))
    assert made["state"] == "complete"
    assert made["fallbacks"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_skipped_blocks_extend_again_and_a_city_draws_the_same(small_job: Job, tmp_path: Path) -> None:
    outline = {"type": "Polygon", "coordinates": [[[-74.0, 40.736], [-73.99, 40.736], [-73.975, 40.76],
                                                   [-73.985, 40.76], [-74.0, 40.736]]]}  # fmt: skip
    region = tmp_path / "region.geojson"
    region.write_text(str(outline).replace("'", '"'))
    job = windows_job(
        small_job,
        domain={"region": str(region), "cell_km": 0.15, "refine": [1]},
        store={"block_cells": [3, 3]},
    )
    made = build(parse_job(job), str(tmp_path / "s.zarr"))
    assert made["blocks_skipped"] > 0
    assert audit(str(tmp_path / "s.zarr"), method="exhaustive").holds
    export_city(str(tmp_path / "s.zarr"), tmp_path / "s.mdp")
    city, store = open_city(tmp_path / "s.mdp"), open_mechanism(tmp_path / "s.zarr")
    assert np.array_equal(city.row(lon=-73.987, lat=40.748), store.row(lon=-73.987, lat=40.748))
    with pytest.raises(SpecError, match="--packing seed"):
        export_city(str(tmp_path / "s.zarr"), tmp_path / "t.mdp", packing="seed")
    told = list[Event]()
    # A finished store without what skipped blocks follow from is not finished.
    shutil.rmtree(next((tmp_path / "s.zarr").glob("seed/window_1_*")))
    assert build(parse_job(job), str(tmp_path / "s.zarr"), observer=told.append)["state"] == "complete"
    assert any("was complete" in event.text for event in told if isinstance(event, Note))
    assert MechanismStore.open(str(tmp_path / "s.zarr")).has_seed()
    # What skipped blocks would be is not what was certified any more.
    (tmp_path / "s.zarr").rename(tmp_path / "t.zarr")  # nothing of it has been read in this process
    for chunk in (tmp_path / "t.zarr").glob("seed/window_*/c/0/0"):
        flip_a_bit(chunk)
    opened = MechanismStore.open(str(tmp_path / "t.zarr"))
    refused(
        StoreError,
        "cannot be read|does not extend",
        rows_of,
        opened,
        *(slice(0, side) for side in opened.grid.shape),
    )


@pytest.mark.usefixtures("small")
def test_a_forged_description_of_windows_is_refused(small_job: Job, tmp_path: Path) -> None:
    build(parse_job(windows_job(small_job)), str(tmp_path / "s.zarr"))

    def one_turn(document: dict[str, Any]) -> None:
        document["attributes"]["record_scores"]["turns"] = "many"

    edit(tmp_path / "s.zarr" / "seed" / "zarr.json", one_turn)
    store = MechanismStore.open(str(tmp_path / "s.zarr"))
    assert not store.has_seed()
    report = audit(store.url)
    assert not report.holds


@pytest.mark.usefixtures("small")
def test_auto_tries_windows_where_one_program_takes_too_long(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "_RECORDS_MORE", 1e6)
    job = parse_job(windows_job(small_job, extension={"method": "auto", "seconds": 1000.0}))
    made = build(job, str(tmp_path / "s.zarr"))
    assert made["method"] == "windows"
    assert "noise would lose" in made["method_in_words"]
    arrays = MechanismStore.open(made["store"]).seed_arrays()
    assert not {name for name in arrays if name.startswith("noise_")}


def test_what_cannot_be(small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(SpecError, "is for seeds", parse_job, windows_job(small_job, privacy={"budget": "half"}))
    all_of_side(3000, monkeypatch)
    large = windows_job(small_job, domain={"cell_km": 0.005})
    assert "GiB" in plan_job(parse_job(large))["refused"]
