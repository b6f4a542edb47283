"""The shipped jobs and settings: the demo, Rome on the published grid, deploy/."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import xarray as xr
import yaml

from mdpext_dask import build, load_job, open_mechanism
from mdpext_dask.auditing import audit
from mdpext_dask.cluster import DASK_CONFIG
from mdpext_dask.costs import plan_job

PROJECT = Path(__file__).resolve().parents[1]


def test_the_demo(tmp_path: Path) -> None:
    path = tmp_path / "manhattan.zarr"
    spec = load_job(PROJECT / "workflows" / "manhattan.toml")
    planned = plan_job(spec)
    summary = build(spec, str(path))
    assert summary["state"] == "complete"
    assert summary["records"] == planned["records"] == 99_169
    assert summary["outputs"] == 64
    assert summary["boundary_mismatches"] == summary["fallbacks"] == 0
    assert summary["boundary_rows_checked"] > 1000
    assert 0.99 < summary["epsilon_certified"] <= summary["epsilon_planar_per_km"] <= 1
    assert summary["seed_gap"] < 1e-4
    assert summary["seed_dual"] <= summary["seed_primal"]
    assert 1.15 < summary["loss_km"] < 1.25
    assert summary["peak_bytes_per_task"] == pytest.approx(planned["peak_bytes_per_task"], rel=0.3)
    assert open_mechanism(path, verify=True).sample(lon=-73.98, lat=40.75, n=3).shape == (3, 2)
    assert audit(str(path)).holds


@pytest.mark.parametrize(("refine", "records"), [("[2]", 483), ("[2, 3]", 4_087), ("[2, 3, 4]", 63_865)])
def test_rome_on_the_published_grid(
    tmp_path: Path, city_roads: Callable[[str], Path], refine: str, records: int
) -> None:
    folder = city_roads("rome")
    spec = load_job(
        PROJECT / "workflows" / "rome.toml", [f"domain.roads={folder}", f"domain.refine={refine}"]
    )
    summary = build(spec, str(tmp_path / "rome.zarr"))
    assert summary["records"] == records
    assert (summary["source_cells"], summary["seeds"]) == (110, 132)
    assert summary["state"] == "complete"
    # What the published budgets use of epsilon.
    assert 0.5 < summary["epsilon_certified"] < 0.9
    dataset = xr.open_zarr(tmp_path / "rome.zarr")
    assert float(dataset.prior.sum()) == pytest.approx(1)
    assert (dataset.attrs["grid"]["cells_x"], dataset.attrs["grid"]["cells_y"]) == (10, 11)


def test_the_shipped_dask_settings_are_those_of_local_processes() -> None:
    def flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in tree.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return found

    shipped = yaml.safe_load((PROJECT / "deploy" / "dask.yaml").read_text())
    assert flat(shipped) == DASK_CONFIG


def test_readme_commands_are_one_line_each_and_made_for_a_bare_machine() -> None:
    readme = (PROJECT / "README.md").read_text()
    for marker in ("demo", "tests"):
        found = re.search(rf"<!-- {marker} -->\n```sh\n(.+)\n```\n", readme)
        assert found, f"no command after {marker}"
        assert found[1].startswith("python3 -m venv .venv && ")


def test_json_of_a_plan_is_plain(small_job: Callable[..., dict[str, dict[str, object]]]) -> None:
    from mdpext_dask.spec import parse_job

    planned = plan_job(parse_job(small_job(privacy={"budget": "half"})))
    assert json.loads(json.dumps(planned)) == planned
    assert planned["tasks"] == 4 * planned["blocks"] + 5
    totals = [planned["seconds_by_workers"][n]["total"] for n in ("1", "2", "4")]
    assert totals == sorted(totals, reverse=True)
