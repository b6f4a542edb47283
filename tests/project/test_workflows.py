"""The shipped jobs and settings: the demo, Rome on the published grid, deploy/."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import yaml

from mdpext_dask import audit, build, load_job, open_mechanism
from mdpext_dask.compute.dask_settings import nested
from mdpext_dask.pipeline.plan import plan_job

PROJECT = Path(__file__).resolve().parents[2]


# Budgets as shipped take a minute and a half; `.ci/run` builds and audits them by the README's command. Here
# it is all of the rest, on all records, with budgets that need one seed program.
@pytest.mark.parametrize(
    ("budget", "epsilon", "loss_km", "gap"),
    [("bound", 0.93, 1.294, 1e-6), pytest.param("certified", 0.99, 1.2, 1e-4, marks=pytest.mark.slow)],
)
def test_the_demo(tmp_path: Path, budget: str, epsilon: float, loss_km: float, gap: float) -> None:
    path = tmp_path / "manhattan.zarr"
    assert load_job(PROJECT / "workflows" / "manhattan-published.toml").privacy.budget == "certified"
    spec = load_job(PROJECT / "workflows" / "manhattan-published.toml", [f"privacy.budget={budget}"])
    planned = plan_job(spec)
    summary = build(spec, str(path))
    assert summary["state"] == "complete"
    assert summary["records"] == planned["records"] == 99_169
    assert summary["outputs"] == 64
    assert summary["boundary_mismatches"] == summary["fallbacks"] == 0
    assert summary["boundary_rows_checked"] > 1000
    assert epsilon < summary["epsilon_certified"] <= summary["epsilon_planar_per_km"] <= 1
    assert summary["seed_gap"] < gap
    assert summary["seed_dual"] <= summary["seed_primal"]
    assert loss_km - 0.05 < summary["loss_km"] < loss_km + 0.05
    assert summary["peak_bytes_per_task"] == pytest.approx(planned["peak_bytes_per_task"], rel=0.3)
    assert open_mechanism(path, verify=True).sample(lon=-73.98, lat=40.75, n=3).shape == (3, 2)
    assert audit(str(path)).holds


@pytest.mark.slow
def test_the_demo_s_budgets_use_all_of_epsilon_and_lose_less(tmp_path: Path) -> None:
    """Searched for and refined as shipped, on larger cells and fewer records and outputs."""
    smaller = ["domain.cell_km=2.0", "domain.refine=[2, 3]", "outputs.count=24"]
    summaries = {}
    for budget in ("bound", "certified"):
        changes = [*smaller, f"privacy.budget={budget}", "cluster.kind=inline"]
        spec = load_job(PROJECT / "workflows" / "manhattan-published.toml", changes)
        summaries[budget] = build(spec, str(tmp_path / f"{budget}.zarr"))
    assert audit(str(tmp_path / "certified.zarr")).holds
    certified = summaries["certified"]
    assert 0.99 < certified["epsilon_certified"] <= certified["epsilon_planar_per_km"] <= 1
    assert certified["seed_gap"] < 1e-4
    assert certified["loss_km"] < 0.94 * summaries["bound"]["loss_km"]


@pytest.mark.parametrize(
    ("refine", "records"),
    [pytest.param("[2]", 483, marks=pytest.mark.slow), pytest.param("[2, 3]", 4_087, marks=pytest.mark.slow),
     pytest.param("[2, 3, 4]", 63_865, marks=pytest.mark.slow)],
)  # fmt: skip
def test_rome_as_published(tmp_path: Path, city_roads: Any, refine: str, records: int) -> None:
    folder = city_roads("rome")
    overrides = [f"domain.roads={folder}", f"domain.refine={refine}"]
    summary = build(load_job(PROJECT / "workflows" / "rome.toml", overrides), str(tmp_path / "rome.zarr"))
    assert (summary["records"], summary["source_cells"], summary["seeds"]) == (records, 110, 132)
    assert summary["state"] == "complete"
    # What the published budgets use of epsilon.
    assert 0.5 < summary["epsilon_certified"] < 0.9
    dataset = xr.open_zarr(tmp_path / "rome.zarr")
    assert float(dataset.prior.sum()) == pytest.approx(1)
    grid = json.loads(dataset.attrs["grid"])
    assert (grid["cells_x"], grid["cells_y"]) == (10, 11)


def test_the_shipped_dask_settings_are_those_of_local_processes() -> None:
    assert yaml.safe_load((PROJECT / "deploy" / "dask.yaml").read_text()) == nested()


def test_the_table_of_sizes_is_what_the_plans_say() -> None:
    command = [sys.executable, PROJECT / "workflows" / "benchmarks" / "sizing.py"]
    assert subprocess.check_output(command, text=True) in (PROJECT / "deploy" / "README.md").read_text()


def test_readme_commands_are_one_line_each_and_made_for_a_bare_machine() -> None:
    readme = (PROJECT / "README.md").read_text()
    for marker in ("demo", "tests"):
        found = re.search(rf"<!-- {marker} -->\n```sh\n(.+)\n```\n", readme)
        assert found, f"no command after {marker}"
        assert found[1].startswith("python3 -m venv .venv && ")


def test_json_of_a_plan_is_plain(small_job: Callable[..., dict[str, dict[str, object]]]) -> None:
    from mdpext_dask.job.spec import parse_job

    planned = plan_job(parse_job(small_job(privacy={"budget": "half"})))
    assert json.loads(json.dumps(planned)) == planned
    assert planned["tasks"] == 4 * planned["blocks"] + 5
    totals = [planned["seconds_by_workers"][n]["total"] for n in ("1", "2", "4")]
    assert totals == sorted(totals, reverse=True)
