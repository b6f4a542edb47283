"""The published grids: job files that can be compared on, and one comparison of all methods, small."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from mdpext_dask import JobSpec, load_job
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.reports.compare.methods import METHODS
from mdpext_dask.reports.compare.protocol import cases_of, compare

PAPER = Path(__file__).resolve().parents[2] / "workflows" / "paper"
# Source cells to the east and to the north, and records by depth.
GRIDS = {
    "rome": ((10, 11), {2: 483, 3: 4_087, 4: 63_865}),
    "london": ((9, 7), {2: 285, 3: 2_365, 4: 36_673}),
    "new-york": ((7, 7), {2: 225, 3: 1_849, 4: 28_561}),
}
EPSILONS = (0.5, 1.0, 1.5)


@pytest.fixture(
    params=[pytest.param(name, marks=() if name == "new-york" else pytest.mark.slow) for name in GRIDS]
)
def city(request: pytest.FixtureRequest, city_roads: Callable[[str], Path]) -> tuple[str, JobSpec]:
    """Name and job of every city whose network is at hand."""
    name = request.param
    roads = [] if name == "new-york" else [f"domain.roads={city_roads(name)}"]
    return name, load_job(PAPER / f"{name}.toml", roads)


def test_cases_are_the_published_grids(city: tuple[str, JobSpec]) -> None:
    name, spec = city
    cells, records = GRIDS[name]
    cases = {case.name: case for case in cases_of(spec, ["all"], None)}
    geometry = build_geometry(spec)
    assert (geometry.grid.cells_x, geometry.grid.cells_y) == cells
    for depth, count in records.items():
        for epsilon in EPSILONS:
            case = cases.pop(f"depth {depth} at {epsilon:g}/km")
            grid = geometry.grid
            assert (case.spec.privacy.epsilon_per_km, case.spec.domain.cell_km) == (epsilon, grid.cell_km)
            factor = math.prod(case.spec.domain.refine)
            assert (cells[0] * factor + 1) * (cells[1] * factor + 1) == count
    assert (spec.compare.repeats, spec.compare.limit_seconds, spec.outputs.count) == (50, 1800, 20)
    # What is left changes how dense the seeds are, and not where the records are.
    seeds = {name: build_geometry(case.spec).grid for name, case in cases.items()}
    expected = {f"seeds {n}x{n}": (n, n) for n in (5, 7, 9, 13, 17)}
    assert {name: grid.seeds_shape for name, grid in seeds.items()} == expected
    assert {grid.shape for grid in seeds.values()} == {(49, 49)}
    assert max(grid.spacing_km for grid in seeds.values()) < 1.001 * min(g.spacing_km for g in seeds.values())


@pytest.mark.slow
def test_all_methods_are_compared(tmp_path: Path) -> None:
    small = ["domain.refine=[2]", "outputs.count=6", "loss.tasks=5", "domain.cell_km=6.3"]
    spec = load_job(PAPER / "new-york.toml", small)
    (summary,) = compare(spec, tmp_path, repeats=1, limit_seconds=30, bound_seconds=2)
    rows = {row["method"]: row for row in summary.rows}
    assert set(rows) == set(METHODS)
    assert {name: row["reason"] for name, row in rows.items() if not row["completed"]} == {}
    promised = {name for name, row in rows.items() if row["guarantee"] == "epsilon"}
    assert promised >= {"em", "laplace", "em-remap", "laplace-remap", "lp", "copt", "aipo", "mw"}
    audited = {name for name, row in rows.items() if row["verdict"] != "not audited"}
    assert set(METHODS) - audited == {"laplace-roads"}
    # Who promises ε keeps it; who copies rows across cells does not.
    assert {name for name in promised & audited if rows[name]["verdict"] != "holds"} == set()
    assert rows["lp-a"]["verdict"] == "violated"
    # Nothing that keeps ε on these outputs is below the bound, or below the program over all pairs.
    keeping = [row for name, row in rows.items() if name in audited and row["verdict"] == "holds"]
    assert min(row["gap"] for row in keeping) >= -1e-9
    assert min(row["loss_km"] for row in keeping) >= rows["lp"]["loss_km"] * (1 - 1e-4)
    assert rows["mlaet-o"]["default"]
    assert rows["mlaet-o"]["loss_km"] < min(rows[name]["loss_km"] for name in ("em", "laplace", "aipo", "mw"))
