"""Shared fixtures: small jobs, real networks where they are at hand, every executor."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from tests.support.regions import u_job

# How long an example takes says something of the machine, not of what is tested.
settings.register_profile("ours", deadline=None, max_examples=40)
settings.load_profile("ours")

ROADS_VARIABLE = "MDPEXT_ROADS"
PROBLEMS_VARIABLE = "MDPEXT_PROBLEMS"
_BESIDE_THE_PROJECT = Path(__file__).resolve().parents[2] / "shared" / "data"

# Who imports one of these starts processes: programs, workers, servers, browsers or clusters.
_STARTERS = {
    "subprocess", "multiprocessing", "distributed", "playwright", "tests.support.processes",
    "tests.support.servers", "tests.support.hosts", "tests.support.slurm_cluster", "tests.support.disks",
    "tests.support.toy_kubernetes", "tests.support.walkthrough",
}  # fmt: skip
_ON_PROCESSES = {"one process", "two processes", "scheduler"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes: by what its module imports, or by the cluster it runs on."""
    for item in items:
        assert isinstance(item, pytest.Function)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if _imports_a_starter(item.module) or any(
            isinstance(value, str) and value in _ON_PROCESSES for value in parameters
        ):
            item.add_marker(pytest.mark.processes)


@cache
def _imports_a_starter(module: ModuleType) -> bool:
    homes = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        for value in vars(module).values()
    }
    return any(isinstance(home, str) and {home, home.split(".")[0]} & _STARTERS for home in homes)


_SMALL_JOB: dict[str, dict[str, Any]] = {
    "job": {"name": "small"},
    "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
    # One LP and no search: what most tests are about comes after it.
    "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
    "extension": {"method": "log-convex"},
    "outputs": {"count": 8},
    "loss": {"tasks": 5},
    "cluster": {"kind": "inline"},
}


@pytest.fixture(scope="session")
def small_job() -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that makes a small job; keyword sections are merged into it."""

    def make(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
        job = copy.deepcopy(_SMALL_JOB)
        for name, keys in sections.items():
            job.setdefault(name, {}).update(keys)
        return job

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where a test's store may go."""
    return tmp_path / "s.zarr"


@pytest.fixture(scope="session")
def u_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 4 x 5 blocks of one cell and 2 x 2 fine cells, of which eight are skipped."""
    folder = tmp_path_factory.mktemp("u")
    build(parse_job(u_job(folder)), str(folder / "u.zarr"))
    return folder / "u.zarr"


@pytest.fixture
def finished(built: Path, tmp_path: Path) -> Path:
    """Return a copy of the store that a module calls built, to be spoilt."""
    return shutil.copytree(built, tmp_path / "copy.zarr")


@pytest.fixture(scope="session")
def city_roads() -> Callable[[str], Path]:
    """Return a function from a city's name to the folder of its network; skips where there is none."""

    def find(city: str) -> Path:
        folder = Path(os.environ.get(ROADS_VARIABLE, _BESIDE_THE_PROJECT / "roads")) / city
        if not folder.is_dir():
            pytest.skip(f"no road network of {city} in {folder.parent} (set {ROADS_VARIABLE})")
        return folder

    return find


@pytest.fixture(scope="session")
def fixed_problem() -> Callable[[str], Path]:
    """Return a function from a fixed problem's name to its loss file; skips where there is none."""

    def find(name: str) -> Path:
        file = Path(os.environ.get(PROBLEMS_VARIABLE, _BESIDE_THE_PROJECT / "problems")) / f"{name}.npz"
        if not file.is_file():
            pytest.skip(f"no fixed problem {name} in {file.parent} (set {PROBLEMS_VARIABLE})")
        return file

    return find


@pytest.fixture(scope="session")
def scheduler_address() -> Iterator[str]:
    """Return the address of a running scheduler with two worker processes on loopback."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(
    params=["inline", pytest.param("one process", marks=pytest.mark.slow), "two processes", "scheduler"]
)
def any_cluster(request: pytest.FixtureRequest) -> ClusterSection:
    """Every way to run tasks, as a ``[cluster]`` section."""
    if request.param == "scheduler":
        return ClusterSection(kind="address", address=request.getfixturevalue("scheduler_address"))
    if request.param == "inline":
        return ClusterSection(kind="inline")
    return ClusterSection(kind="local", workers=1 if request.param == "one process" else 2)
