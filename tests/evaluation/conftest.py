"""Finished stores that tests of evaluations share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from tests.support.loss_files import job as file_job
from tests.support.loss_files import write as write_problem
from tests.support.regions import u_job


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory, small_job: Any) -> Callable[[str], Path]:
    """Return a function from a kind of problem to a finished store of several blocks, built once."""
    folder = tmp_path_factory.mktemp("evaluation")

    @functools.cache
    def find(kind: str) -> Path:
        if kind == "planar":
            prior = np.random.default_rng(1).integers(0, 4, (5, 7)).astype(np.float64)
            write_problem(folder / "loss.npz", (5, 7), prior=prior)
            document = file_job(folder / "loss.npz", store={"block_cells": [1, 2]})
        elif kind == "region":
            document = u_job(folder)
        else:
            blocks = {"block_cells": [2, 2]}
            document = small_job(domain={"refine": [2]}, loss={"kind": kind}, store=blocks)
        build(parse_job(document), str(folder / f"{kind}.zarr"))
        return folder / f"{kind}.zarr"

    return find
