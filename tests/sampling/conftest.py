"""Finished stores that the tests of this folder share; none of them changes one."""

from pathlib import Path

import pytest

from mdpext_dask import Mechanism, build, open_mechanism
from mdpext_dask.job.spec import parse_job
from tests.support.loss_files import job as file_job
from tests.support.loss_files import write as write_problem


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store of 20 outputs, turned, in several blocks."""
    path = str(tmp_path_factory.mktemp("sampling") / "m.zarr")
    job = {
        "domain": {"roads": "builtin:manhattan", "cell_km": 4.0, "refine": [6], "rotation_deg": 29.0},
        "privacy": {"epsilon_per_km": 1.0, "budget": "bound"}, "outputs": {"count": 20},
        "loss": {"kind": "euclidean"}, "cluster": {"kind": "inline"}, "store": {"block_cells": [2, 2]},
    }  # fmt: skip
    build(parse_job(job), path)
    return path


@pytest.fixture(scope="session")
def mechanism(store: str) -> Mechanism:
    return open_mechanism(store)


@pytest.fixture(scope="session")
def planar(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store from a loss file that does not say where on Earth its plane lies."""
    folder: Path = tmp_path_factory.mktemp("planar")
    write_problem(folder / "loss.npz", (9, 7))
    build(parse_job(file_job(folder / "loss.npz")), str(folder / "m.zarr"))
    return str(folder / "m.zarr")
