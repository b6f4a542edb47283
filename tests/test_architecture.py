"""The rules of the house that a machine can check."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mdpext_dask"
# Each module imports only from those before it.
ORDER = (
    "namesake", "errors", "limits", "coarse", "complaints", "sections", "spec", "grid", "card", "longitudes",
    "projection", "tables", "extras", "reference_systems", "vector_files", "polygon_files",
    "road_files.network", "road_files.folder", "road_files.drivable", "road_files.junctions",
    "road_files.osm", "road_files.graphs", "downloads", "region",
    "points", "point_tables", "point_features", "point_files", "roads",
    "problem_file", "loss", "frame", "job_points", "raster", "priors", "kmeans", "outputs",
    "domain", "budget", "record_metrics", "graph_checks", "graph",
    "seed.model", "seed.highs", "seed.block_tridiagonal", "seed.grid_rows", "seed.pair_rows",
    "seed.columns", "seed.interior_point", "seed.cuts", "seed.solve", "extend.lattice", "extend.normalise",
    "extend.operator", "extend.log_convex", "extend.mcshane_whitney", "extend.choose",
    "partition", "refusals", "drivers", "retrying", "objects", "locks", "hierarchy",
    "foreign_rows", "foreign_tables", "foreign_arrays", "foreign",
    "receipts", "template", "store", "stored_loss", "shards", "integrity", "blocks", "rows", "tasks",
    "boundary",
    "audit.exact", "audit.tiles", "audit.source", "audit.promise", "audit.findings", "audit.judge",
    "audit.pairs", "audit.exhaustive", "audit.intervals", "audit.designs", "audit.points", "audit.sampled",
    "audit.certificate", "audit.bands", "audit.shared_rows", "audit.report", "audit.words",
    "pictures", "maps", "audit.figure",
    "remap", "baselines.problem", "baselines.seed_cost", "baselines.published", "baselines.rounding",
    "baselines.em", "baselines.sectors", "baselines.laplace", "baselines.remap",
    "baselines.dense_rows", "baselines.pair_rows", "baselines.lp", "baselines.lp_coarse", "baselines.panda",
    "baselines.copt",
    "evaluate.quantiles", "evaluate.loss", "evaluate.spread", "evaluate.attack_words", "evaluate.words",
    "evaluate.figure", "evaluate.attackers", "evaluate.tallies", "evaluate.geometric_median",
    "evaluate.judged", "evaluate.ranks", "evaluate.leakage", "evaluate.repeated", "evaluate.districts",
    "evaluate.remap", "evaluate.lattice_program", "evaluate.lattices", "evaluate.seed_dual",
    "entropy", "sampler", "sticky", "releases", "record_lookup", "reporter", "runtime.fit",
    "runtime.geodesic", "runtime.layout", "runtime.city_file", "runtime.city", "draws", "shown", "mechanism",
    "whole_file", "report_files", "batch", "export",
    "scratch", "steady_clock", "dask_settings", "submit.manifests",
    "workers", "cluster",
    "progress", "forecast", "progress_lines", "progress_bar", "slopes", "trials",
    "cells.small_matrices", "cells.programs", "cells.fallback",
    "cells.budgets", "cells.lattice", "cells.sweep", "cells.tasks", "cells.state", "cells.noise",
    "cells.improve", "solving", "refine", "splits", "search", "stages", "evaluate.bound",
    "evaluate.release_curve",
    "seeding", "rates", "needs", "costs", "subjects",
    "audit_picture", "auditors",
    "auditing", "attacking", "evaluation", "plots",
    "report.lattice", "report.rasters", "report.maps", "report.compared", "report.words", "report.costs",
    "report.making", "report.contents",
    "report.page", "reporting",
    "run", "remapping",
    "submit.files", "submit.follow", "submit.slurm_scripts", "submit.slurm", "submit.kubernetes",
    "submit.command",
    "compare.methods", "compare.answers", "compare.children", "compare.attempt", "compare.summary",
    "compare.figure", "compare.tables", "compare.screen", "compare.protocol",
    "console", "command_line.options", "command_line.making", "command_line.using", "cli",
)  # fmt: skip
# Library -> the modules that may import it.
CONFINED = {
    "aiohttp": {"drivers"},
    "distributed": {"steady_clock", "workers", "cluster"},
    "dask": {"workers", "cluster"},
    "dask_jobqueue": {"workers"},
    "dask_kubernetes": {"workers"},
    # These by name only, in functions (see `extras`).
    "osmnx": set(),
    "osmium": set(),
    "pyogrio": set(),
    "platformdirs": set(),
    "geopandas": set(),
    "highspy": {"seed.highs"},
    "pyarrow": {"foreign_tables", "point_tables", "report_files"},
    "rasterio": {"raster"},
    "ijson": {"point_features"},
    "shapely": {
        "region", "polygon_files", "vector_files", "downloads", "point_tables", "evaluate.districts",
    },
    "matplotlib": {
        "pictures", "maps", "plots", "audit.figure", "evaluate.figure", "compare.figure", "report.rasters",
        "reporting",
    },
    "PIL": {"report.rasters"},
    "jinja2": {"report.page", "reporting"},
    "tomli_w": {"report.making", "reporting"},
    "typer": {"command_line.options", "command_line.making", "command_line.using", "cli"},
    "rich": {"console", "compare.screen", "progress_bar"},
    "yaml": {"submit.manifests"},
    "cryptography": {"entropy"},
}  # fmt: skip


@cache
def imports() -> dict[str, set[str]]:
    """Return what every module imports, read once for all tests."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): imported(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_order_lists_every_module() -> None:
    assert set(imports()) == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_one_way(name: str) -> None:
    own = {n.removeprefix("mdpext_dask.") for n in imports()[name] if "mdpext_dask." in n}
    later = set(ORDER[ORDER.index(name) :])
    assert not own & later


@pytest.mark.parametrize(("library", "allowed"), CONFINED.items())
def test_libraries_stay_where_they_belong(library: str, allowed: set[str]) -> None:
    users = {
        name
        for name, names in imports().items()
        if any(n == library or n.startswith(library + ".") for n in names)
    }
    assert users <= allowed


def test_no_module_is_over_500_lines() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lengths.values()) <= 500, lengths


def test_help_does_not_wait_for_heavy_libraries() -> None:
    heavy = "{'numpy', 'zarr', 'scipy', 'pandas', 'distributed', 'osmnx', 'highspy', 'pydantic'}"
    code = f"import sys, mdpext_dask.cli; assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_do_not_load_what_only_the_client_needs() -> None:
    unwanted = (
        "{'osmnx', 'matplotlib', 'geopandas', 'shapely', 'pandas', 'pyarrow', 'rasterio', 'ijson', 'osmium', "
        "'pyogrio', 'requests'}"
    )
    code = f"import sys, mdpext_dask.run; assert not {unwanted} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
