"""Sweeps: every combination once, what a run of each job says, and nothing built twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mdpext_dask import build
from mdpext_dask.errors import DataError, StoreError
from mdpext_dask.events import Note
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.reports import sweep as sweeping
from mdpext_dask.reports.sweep import AUTO, error_by_epsilon, settings_of, sweep
from tests.support.inside import Capture, call, run_inside

Job = Callable[..., dict[str, dict[str, Any]]]
NOISE = {"extension": {"method": "noise"}, "privacy": {"epsilon_per_km": 1.0, "budget": "certified"}}
FILE = """
[job]
name = "town"
[domain]
roads = "builtin:manhattan"
cell_km = 3.0
refine = [2, 2]
[privacy]
epsilon_per_km = 1.0
[outputs]
count = 6
[loss]
tasks = 4
[extension]
method = "noise"
[cluster]
kind = "inline"
"""


@pytest.fixture
def spec(small_job: Job) -> JobSpec:
    return parse_job(small_job(**NOISE))


def test_all_combinations_are_made_and_the_same_job_only_once(spec: JobSpec) -> None:
    settings = settings_of(spec, [1.0, 2.0], [8, AUTO], [3.0, 1.5, AUTO])
    assert len(settings) == 2 * 2 * 3
    assert len({setting.key for setting in settings}) == 12
    for setting in settings:
        domain, outputs = setting.spec.domain, setting.spec.outputs
        assert setting.spec.privacy.epsilon_per_km == setting.epsilon_per_km
        assert (outputs.choose, outputs.count) == (
            (AUTO, None) if setting.outputs == AUTO else ("road-nodes", 8)
        )
        automatic = setting.cell_km == AUTO
        assert (domain.cell_km, domain.refine) == (
            (None, None) if automatic else (setting.cell_km, spec.domain.refine)
        )
    # Of the job itself, in two ways.
    assert len(settings_of(spec, [1.0, 1], [8], [3.0, 3])) == 1
    (one,) = settings_of(spec, [1.0])
    assert one.spec.fingerprint() == spec.fingerprint()
    means = settings_of(spec.replace(outputs={"choose": "prior", "count": 8}), [1.0], [5])
    assert (means[0].spec.outputs.choose, means[0].spec.outputs.count) == ("prior", 5)


@pytest.mark.slow
def test_its_rows_are_what_runs_of_the_jobs_say(spec: JobSpec, tmp_path: Path) -> None:
    result = sweep(settings_of(spec, [1.0, 2.0], [4]), tmp_path / "swept")
    for row in result["rows"]:
        job = spec.replace(
            privacy={"epsilon_per_km": row["epsilon_per_km"]}, outputs={"choose": "road-nodes", "count": 4}
        )
        summary = build(job, tmp_path / f"{row['epsilon_per_km']}.zarr")
        same = ("loss_km", "plain_loss_km", "epsilon_certified", "records", "outputs", "mechanism_sha256")
        assert all(row[key] == summary[key] for key in same)
        assert row["epsilon_certified"] <= row["epsilon_per_km"]
        assert row["store"] is None
    assert result["rows"][1]["loss_km"] < result["rows"][0]["loss_km"]
    assert {Path(file).name for file in result["files"]} == {"error.png", "table.csv", "results.json"}
    assert json.loads((tmp_path / "swept" / "results.json").read_text())["rows"] == result["rows"]
    assert list(pd.read_csv(tmp_path / "swept" / "table.csv")["asked"]) == ["4 outputs"] * 2
    # Nothing else is left.
    assert {path.name for path in (tmp_path / "swept").iterdir()} == {
        "answers", "error.png", "table.csv", "results.json",
    }  # fmt: skip


@pytest.mark.slow
def test_what_was_found_is_not_built_again_unless_it_is_damaged(spec: JobSpec, tmp_path: Path) -> None:
    told: list[str] = []

    def observer(event: object) -> None:
        if isinstance(event, Note) and " of " in event.text and "ε = " in event.text:
            told.append(event.text)

    first = sweep(settings_of(spec, [1.0]), tmp_path, overwrite=True, observer=observer)
    again = sweep(settings_of(spec, [1.0, 2.0]), tmp_path, observer=observer)
    assert told == ["1 of 1: ε = 1/km", "2 of 2: ε = 2/km"]
    assert again["rows"][0] == first["rows"][0]
    for answer in (tmp_path / "answers").iterdir():
        answer.write_text('{"loss_km": 0.0}')
    mended = sweep(settings_of(spec, [1.0, 2.0]), tmp_path, observer=observer)
    assert len(told) == 4
    assert [row["loss_km"] for row in mended["rows"]] == [row["loss_km"] for row in again["rows"]]


@pytest.mark.slow
def test_stores_are_kept_if_they_are_wanted(spec: JobSpec, tmp_path: Path) -> None:
    from mdpext_dask import open_mechanism

    sweep(settings_of(spec, [1.0]), tmp_path / "swept")
    (row,) = sweep(settings_of(spec, [1.0]), tmp_path / "swept", keep_stores=True)["rows"]
    assert open_mechanism(row["store"], verify=True).mechanism_sha256 == row["mechanism_sha256"]
    (again,) = sweep(settings_of(spec, [1.0]), tmp_path / "swept")["rows"]
    assert again["store"] == row["store"]


def test_what_cannot_be_is_refused_before_anything_is_built(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "build", None)
    floorless = spec.replace(privacy={"min_probability": 1e-9})
    with pytest.raises(DataError, match=r"ε = 1/km, 1000000 outputs: outputs\.count: "):
        sweep(settings_of(floorless, [1.0], [4, 10**6]), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    with pytest.raises(StoreError, match="no folder of an earlier sweep"):
        sweep(settings_of(spec, [1.0]), tmp_path / "b")


def test_the_picture_has_a_line_for_what_differs_in_epsilon_alone_and_one_for_plain_noise() -> None:
    rows = [
        {"epsilon_per_km": epsilon, "asked": asked, "loss_km": 1 / epsilon, "plain_loss_km": 2 / epsilon}
        for epsilon in (5.0, 1.0)
        for asked in ([], ["4 outputs"])
    ]
    axes = error_by_epsilon(rows).axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["this job"] == [[1.0, 1000.0], [5.0, 200.0]]
    assert drawn["plain noise, 4 outputs"] == [[1.0, 2000.0], [5.0, 400.0]]
    assert len(drawn) == 4


def test_the_command_shows_one_table_and_answers_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "town.toml").write_text(FILE)
    document = call(capsys, "sweep", "town.toml", "--epsilon", "1,2", "--outputs", "4,6")
    assert [(row["epsilon_per_km"], row["outputs"]) for row in document["rows"]] == [
        (1, 4), (1, 6), (2, 4), (2, 6),
    ]  # fmt: skip
    code, out, err = run_inside(capsys, "sweep", "town.toml", "--epsilon", "1,2", "--outputs", "4,6")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 6)
    assert "seed" not in err  # all is there
    assert max(map(len, lines)) <= 80
    for line, row in zip(lines[1:5], document["rows"], strict=True):
        assert f"{1000 * row['loss_km']:,.0f} m" in line
        assert f"{row['outputs']} outputs" in line
    assert lines[-1].startswith("Written to town-sweep: error.png, table.csv, results.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epsilon", "a,2"], "--epsilon: must be numbers, with commas between, got a,2"),
        (["--epsilon", ""], "--epsilon: must be numbers"),
        (["--epsilon", "0"], "epsilon_per_km"),
        (["--epsilon", "nan"], "epsilon_per_km"),
        (["--epsilon", "1", "--outputs", "4.5"], "--outputs: must be whole numbers, or auto"),
        (["--epsilon", "1", "--outputs", "0"], "count"),
        (["--epsilon", "1", "--cell-km", "big"], "--cell-km: must be numbers, or auto"),
        (["--epsilon", "1", "--cell-km", "-1"], "cell_km"),
    ],
)
def test_values_that_cannot_be_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "town.toml").write_text(FILE)
    code, out, err = run_inside(capsys, "sweep", "town.toml", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["town.toml"]
