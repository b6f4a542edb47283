"""The method that a job leaves open: noise, or programs where they may be tried and lose less."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdpext_dask.errors import SpecError
from mdpext_dask.events import Event, Note
from mdpext_dask.extend import noise
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline import seed_stage
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.pipeline.windows import sizes
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import METHOD_CHOSEN, NOISE_TABLES

Job = Callable[..., dict[str, dict[str, Any]]]
# Where records are few, one program over all of them wins; where they are many, programs of windows do. Where
# these would take too long, other programs are tried, and noise wins.
COARSE = {"cell_km": 3.0, "refine": [1]}
DENSE = {"cell_km": 1.5, "refine": [2, 2]}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows small, chosen or asked for, so that programs take milliseconds; few records be many."""
    monkeypatch.setattr("mdpext_dask.pipeline.cost_model._RECORDS_MORE", 100.0)
    monkeypatch.setattr(sizes, "SIDES", (6,))
    monkeypatch.setattr(sizes, "SECONDS", 0.0)


def open_job(small_job: Job, domain: dict[str, Any], **extension: Any) -> JobSpec:
    """Return a job that leaves its method open."""
    job = small_job(domain=domain, privacy={"budget": "certified"}, outputs={"count": 12})
    job["seed"] = {"refine_rounds": 4}
    job["extension"] = {**extension}
    return parse_job(job)


def named(spec: JobSpec, method: str) -> JobSpec:
    return spec.replace(extension={"method": method})


def losses(folder: Path, spec: JobSpec, *methods: str) -> dict[str, float]:
    """Return what the job loses with each method, in km, each built on its own."""
    return {
        method: float(build(named(spec, method), folder / f"{method}.zarr")["loss_km"]) for method in methods
    }


@pytest.mark.parametrize(
    ("domain", "best"),
    [(COARSE, "records"), pytest.param(DENSE, "windows", marks=pytest.mark.slow), (DENSE, "noise")],
)
def test_what_loses_less_is_kept(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: dict[str, Any], best: str
) -> None:
    if best == "noise":
        monkeypatch.setattr("mdpext_dask.pipeline.cost_model.SHARE", 1e6)
    spec, told = open_job(small_job, domain), list[Event]()
    built = build(spec, tmp_path / "open.zarr", observer=told.append)
    alone = losses(tmp_path, spec, "noise", best)
    assert built["method"] == best
    # Outputs are in the order of a curve, so sums are in another.
    assert built["loss_km"] == pytest.approx(alone[best], rel=1e-9)
    assert built["loss_km"] <= alone["noise"]
    assert float(built["epsilon_certified"]) <= float(built["epsilon_planar_per_km"])
    assert Note(built["method_in_words"]) in told
    # What a job has that names the method, and nothing of the other.
    store, other = (MechanismStore.open(str(tmp_path / f"{name}.zarr")) for name in ("open", best))
    assert (store.seed_sha256() == other.seed_sha256()) == (best != "records")
    assert store.seed_arrays() == other.seed_arrays()
    assert (set(NOISE_TABLES) <= store.seed_arrays()) == (best == "noise")
    # It is as finished as any other.
    assert build(spec, tmp_path / "open.zarr")["fingerprint"] == spec.fingerprint()


def test_the_other_method_is_told_with_its_loss(small_job: Job, tmp_path: Path) -> None:
    spec = open_job(small_job, COARSE)
    words = build(spec, tmp_path / "open.zarr")["method_in_words"]
    other = losses(tmp_path, spec, "noise")["noise"]
    assert words.startswith("method: records, which loses ")
    assert words.endswith(f"; noise would lose {other:.4g} km")


def test_programs_that_take_longer_than_allowed_are_not_tried(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed_stage, "_solve", lambda *_: 1 / 0)
    spec = open_job(small_job, COARSE, seconds=0.1)
    planned = plan_job(spec)
    words = r"method: noise; about \d+ s with log-convex would be more than extension.seconds allows \(0.1\)"
    assert planned["method"] == "noise"
    assert re.fullmatch(words, planned["notes"][-1])
    built = build(spec, tmp_path / "s.zarr")
    assert (built["method"], built["method_in_words"]) == ("noise", planned["notes"][-1])
    assert built["seeds"] == 0


def test_programs_that_fit_are_planned_with_noise_beside_them(small_job: Job) -> None:
    spec = open_job(small_job, COARSE, seconds=1000.0)
    planned, alone = plan_job(spec), plan_job(named(spec, "records"))
    assert planned["method"] == "auto"
    assert planned["notes"][-1].startswith("method: the better of noise and records, about ")
    # The noise that is made as well takes its time.
    both, one = (float(plan["seconds_by_workers"]["1"]["total"]) for plan in (planned, alone))
    assert both > one


def test_neither_memory_nor_cluster_decides(small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job has the same bytes wherever it runs; where it cannot, that is one line."""
    domain = {"cell_km": 0.2, "refine": [1]}
    job = small_job(domain=domain, privacy={"budget": "certified"}, outputs={"count": 100})
    job["extension"] = {"seconds": 1e9}
    enough = psutil.virtual_memory()._replace(total=2**31)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: enough)
    refused = plan_job(parse_job(job))["refused"]
    assert "GiB of it for the program over all records" in refused
    assert refused.endswith('; or name extension.method = "noise"')
    # What takes too long needs no memory.
    job["extension"] = {"seconds": 5.0}
    assert (plan_job(parse_job(job))["method"], plan_job(parse_job(job))["refused"]) == ("noise", None)
    # Starting workers takes time, and is no reason.
    spec = open_job(small_job, COARSE)
    alone = plan_job(spec)["seconds_by_workers"]["1"]["total"]
    for kind in ("inline", "local"):
        cluster = {"kind": kind, "workers": 1} if kind == "local" else {"kind": kind}
        just = spec.replace(extension={"seconds": alone * 1.001}, cluster=cluster)
        assert plan_job(just)["method"] == "auto"


def test_noise_with_too_many_cells_leaves_programs(small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "MOST_CELLS", 1)
    planned = plan_job(open_job(small_job, COARSE))
    assert planned["method"] == "records"
    assert "cells of noise, more than" in planned["notes"][-1]


def test_noise_that_cannot_be_is_refused_before_anything_is_made(small_job: Job) -> None:
    # Many records to a cell of noise: its tables would be larger than a reader takes.
    dense = small_job(
        domain={"cell_km": 1.0, "refine": [16]},
        privacy={"epsilon_per_km": 0.05, "budget": "certified"},
        extension={"method": "noise"},
    )
    assert "masses of noise, more than" in plan_job(parse_job(dense))["refused"]
    # Neither can programs be where there is no time for them.
    dense["extension"] = {"method": "auto", "seconds": 1.0}
    assert "masses of noise, more than" in plan_job(parse_job(dense))["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("domain", [COARSE, pytest.param(DENSE, marks=pytest.mark.slow)])
def test_a_run_that_ends_around_the_choice_comes_to_the_same(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: dict[str, Any]
) -> None:
    spec = open_job(small_job, domain)
    undisturbed = build(spec, tmp_path / "whole.zarr")
    expected = MechanismStore.open(str(tmp_path / "whole.zarr"))
    update = MechanismStore.update

    def before_it_is_noted(store: MechanismStore, **attributes: Any) -> None:
        if METHOD_CHOSEN in attributes:
            raise KeyboardInterrupt
        update(store, **attributes)

    def before_it_is_written(*_: object) -> None:
        raise KeyboardInterrupt

    for number, ends in enumerate(
        (
            {
                "seed_stage.write_noise": before_it_is_written,
                "seed_stage._Solved.write": before_it_is_written,
                "seed_stage.WindowSeed.write": before_it_is_written,
            },
            {"run.MechanismStore.update": before_it_is_noted},
        )
    ):
        url = tmp_path / f"{number}.zarr"
        with monkeypatch.context() as patch:
            for name, end in ends.items():
                patch.setattr(f"mdpext_dask.pipeline.{name}", end)
            with pytest.raises(KeyboardInterrupt):
                build(spec, url)
        resumed = build(spec, url)
        assert resumed["mechanism_sha256"] == undisturbed["mechanism_sha256"]
        assert resumed["method_in_words"] == undisturbed["method_in_words"]
        # And nothing of the other is left.
        assert MechanismStore.open(str(url)).seed_arrays() == expected.seed_arrays()


@pytest.mark.slow
def test_the_choice_is_the_same_on_processes(small_job: Job, tmp_path: Path) -> None:
    spec = open_job(small_job, DENSE)
    inline = build(spec, tmp_path / "inline.zarr")
    processes = spec.replace(cluster={"kind": "local", "workers": 2})
    assert processes.fingerprint() == spec.fingerprint()
    assert build(processes, tmp_path / "p.zarr")["mechanism_sha256"] == inline["mechanism_sha256"]


@pytest.mark.slow
def test_noise_that_fails_leaves_programs(
    small_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many outputs that no floor is left.
    monkeypatch.setattr("mdpext_dask.evaluation.baselines.fine_noise._LEAST_FLOOR", 0.1)
    built = build(open_job(small_job, DENSE), tmp_path / "s.zarr")
    assert built["method"] == "log-convex"
    assert built["method_in_words"].endswith("noise: no floor is left for 12 outputs; use at most 9")


def test_published_budgets_and_one_stage_are_interpolated(small_job: Job) -> None:
    for sections in ({"privacy": {"budget": "half"}}, {"extension": {"stages": "one"}}):
        job = small_job(**sections)
        job["extension"].pop("method")
        spec = parse_job(job)
        assert (spec.extension.method, spec.extension.seconds) == ("log-convex", None)
        job["extension"]["seconds"] = 5.0
        with pytest.raises(SpecError, match=r"extension\.seconds: goes with"):
            parse_job(job)


def test_seconds_go_with_an_open_method_only(small_job: Job) -> None:
    with pytest.raises(SpecError, match='seconds goes with method = "auto" only'):
        parse_job(small_job(extension={"seconds": 5.0}))
    spec = open_job(small_job, DENSE, seconds=5.0)
    assert named(spec, "noise").extension.seconds is None
    # What nobody has set is in nobody's way, also where it is spelt out.
    spelt_out = parse_job(open_job(small_job, DENSE).canonical())
    assert spelt_out.replace(privacy={"budget": "half"}).extension.method == "log-convex"
    assert spec.replace(privacy={"epsilon_per_km": 2.0}).extension.seconds == 5.0


def test_outputs_are_the_same_whatever_is_chosen(small_job: Job) -> None:
    job = small_job(domain=DENSE, privacy={"budget": "certified"})
    job["extension"], job["outputs"] = {}, {}
    counts = {
        plan_job(parse_job({**job, "extension": {"seconds": seconds}}))["outputs"] for seconds in (0.1, 1e9)
    }
    assert counts == {plan_job(named(parse_job(job), "noise"))["outputs"]}


def test_a_method_that_is_none_is_refused(small_job: Job, tmp_path: Path) -> None:
    spec = open_job(small_job, COARSE, seconds=0.1)
    build(spec, tmp_path / "s.zarr")
    store = MechanismStore.open(str(tmp_path / "s.zarr"), mode="r+")
    store.update(method_chosen="os:system")
    with pytest.raises(Exception, match="'os:system' is no method"):
        build(spec, tmp_path / "s.zarr")
