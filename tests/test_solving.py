"""Linear programs over workers: the sums of inverses as a map-reduce, with the same result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask import solving
from mdpext_dask.cluster import InlineExecutor, open_executor
from mdpext_dask.run import build
from mdpext_dask.seed.interior_point import solve_interior_point
from mdpext_dask.solving import SharedSums
from mdpext_dask.spec import ClusterSection, parse_job
from mdpext_dask.store import MechanismStore
from tests.test_seed import random_problem


def test_sums_shared_among_workers_give_the_same_solution(any_cluster: ClusterSection) -> None:
    rng = np.random.default_rng(9)
    problem = random_problem(rng, cost=rng.exponential(size=(48, 1100)), seeds_shape=(6, 8))
    alone = solve_interior_point(problem, gap=1e-6)
    with open_executor(any_cluster) as executor:
        shared = solve_interior_point(problem, gap=1e-6, inverse_sums=SharedSums(executor, 2))
    assert shared.gap <= 1e-6
    assert shared.primal == pytest.approx(alone.primal, rel=2e-6)
    np.testing.assert_allclose(shared.rows.sum(axis=1), 1, rtol=1e-13)


def test_shares_are_consecutive_parts_in_order() -> None:
    seen = []

    class Recording(InlineExecutor):
        def map(self, stage: str, function: Callable[..., Any], arguments: Any) -> Any:  # noqa: ARG002
            seen.extend(list(a[0]) for a in arguments)
            yield from reversed(list(enumerate(len(a[0]) for a in arguments)))

    results = SharedSums(Recording(), 3)(["a", "b", "c", "d", "e"])  # type: ignore[list-item]
    assert seen == [["a"], ["b", "c"], ["d", "e"]]
    assert list(results) == [1, 2, 2]


def test_a_job_shares_where_it_pays(
    tmp_path: Path,
    small_job: Callable[..., dict[str, dict[str, Any]]],
    scheduler_address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    original = SharedSums.__call__

    def counted(self: SharedSums, matrices: Any) -> Any:
        calls.append(len(matrices))
        return original(self, matrices)

    monkeypatch.setattr(SharedSums, "__call__", counted)
    job = small_job(
        privacy={"budget": "certified"},
        outputs={"count": 40},
        seed={"refine_rounds": 2},
        cluster={"kind": "address", "address": scheduler_address},
    )
    alone = build(parse_job(job), str(tmp_path / "alone.zarr"))
    assert not calls
    monkeypatch.setattr(solving, "_WORTH_SENDING", 1)
    shared = build(parse_job(job), str(tmp_path / "shared.zarr"))
    assert calls
    assert shared["loss_km"] == pytest.approx(alone["loss_km"], rel=1e-3)
    assert MechanismStore.open(str(tmp_path / "shared.zarr")).seed_attributes["solver"] == "structured"
