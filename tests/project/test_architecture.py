"""The rules of the house that a machine can check: rooms, sizes, and which libraries live where."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mdpext_dask"
# A room imports from itself and from rooms before it; the modules at the top of the package come first.
ROOMS = (
    "top", "job", "readers", "problem", "seed", "extend", "runtime", "store", "compute", "auditors",
    "evaluation", "pipeline", "sampling", "reports", "cli",
)  # fmt: skip
MOST_AT_THE_TOP, MOST_IN_A_ROOM, MOST_LINES = 7, 15, 600
# Of other rooms, what draws on a device may import these alone: NumPy is all they need.
RUNTIME_NEEDS = {
    "readers.longitudes", "problem.grid", "problem.identity", "problem.plausible", "problem.projection",
    "extend.log_convex", "extend.noise",
}  # fmt: skip
# Library -> the rooms or modules that may import it.
CONFINED = {
    "aiohttp": {"store.remote_drivers"},
    "distributed": {"compute"},
    "dask": {"compute"},
    "dask_jobqueue": {"compute.workers"},
    "dask_kubernetes": {"compute.workers"},
    # These by name only, in functions (see `optional_libraries`).
    **{name: set[str]() for name in ("ijson", "osmnx", "osmium", "pyogrio", "platformdirs", "geopandas")},
    "highspy": {"seed.highs"},
    "pyarrow": {"readers.tables", "readers.point_tables", "auditors.foreign", "sampling.report_files"},
    "rasterio": {"problem.population_raster"},
    "shapely": {"readers", "problem.region", "evaluation.attackers.districts"},
    "matplotlib": {"files", "problem.maps", "auditors.figure", "evaluation.figure", "reports"},
    "PIL": {"reports.page"},
    "jinja2": {"reports"},
    "tomli_w": {"reports"},
    "typer": {"cli"},
    "rich": {"cli", "reports.compare.tables"},
    "yaml": {"compute.kubernetes"},
    "cryptography": {"runtime.random_bits", "runtime.signatures", "compute.workers"},
}


@cache
def imports() -> dict[str, set[str]]:
    """Return what every module imports, read once for all tests."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): imported(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__init__.py"  # it hands names on from every room
    }


def imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(module: str) -> set[str]:
    """Return the modules and rooms of the package that one of its modules imports."""
    own = {name.removeprefix("mdpext_dask.") for name in imports()[module] if name.startswith("mdpext_dask.")}
    return {name for name in own if name in imports() or f"{name}.__init__" in imports()}


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    if module == "__main__":  # the command line by another name
        return ROOMS[-1]
    return first if rest or (PACKAGE / first).is_dir() else "top"


def test_every_folder_is_a_room_and_says_what_lives_there() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS[1:])
    for path in PACKAGE.glob("*/__init__.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(doc.split()) >= 20, path


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room: str) -> None:
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for module in imports():
        if room_of(module) == room:
            assert not {name for name in own_imports(module) if room_of(name) in later}, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: {name for name in own_imports(module) if name in imports()} for module in imports()}
    while free := {module for module, names in left.items() if not names & set(left)}:
        for module in free:
            del left[module]
    assert not left


def test_the_runtime_imports_little() -> None:
    # Python imports the room of a module that it imports, so rooms themselves must be empty.
    for module in imports():
        if room_of(module) == "runtime":
            others = {name for name in own_imports(module) if room_of(name) not in ("runtime", "top")}
            assert others & set(imports()) <= RUNTIME_NEEDS, module


@pytest.mark.parametrize(("library", "allowed"), CONFINED.items())
def test_libraries_stay_where_they_belong(library: str, allowed: set[str]) -> None:
    found = imports().items()
    users = {user for user, names in found if any(f"{name}.".startswith(f"{library}.") for name in names)}
    assert not {user for user in users if not any(f"{user}.".startswith(f"{room}.") for room in allowed)}


def test_rooms_and_modules_are_small() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lengths.values()) <= MOST_LINES, lengths
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= MOST_AT_THE_TOP
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        assert len(list(folder.glob("*.py"))) - 1 <= MOST_IN_A_ROOM, folder


def test_no_test_imports_a_test() -> None:
    for path in (PACKAGE.parent / "tests").rglob("*.py"):
        wrong = {name for name in imported(path.read_text()) if name.startswith("tests.")}
        assert not {name for name in wrong if ".test_" in name}, path


def test_help_does_not_wait_for_heavy_libraries() -> None:
    heavy = "{'numpy', 'zarr', 'scipy', 'pandas', 'distributed', 'osmnx', 'highspy', 'pydantic'}"
    code = f"import sys, mdpext_dask.cli.main; assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_do_not_load_what_only_the_client_needs() -> None:
    unwanted = (
        "{'osmnx', 'matplotlib', 'geopandas', 'shapely', 'pandas', 'pyarrow', 'rasterio', 'ijson', 'osmium', "
        "'pyogrio', 'requests'}"
    )
    code = f"import sys, mdpext_dask.pipeline.run; assert not {unwanted} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
