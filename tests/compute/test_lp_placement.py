"""Linear programs over workers: the sums of inverses as a map-reduce, with the same result."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.compute import lp_placement
from mdpext_dask.compute.executor import InlineExecutor, open_executor
from mdpext_dask.compute.lp_placement import SharedSums
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.seed import interior_point
from mdpext_dask.seed.interior_point import solve_interior_point, sum_pairwise
from mdpext_dask.seed.model import SeedMechanism, SeedProblem
from mdpext_dask.seed.solve import one_blas_thread
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.seed_problems import random_problem

_PART_ENTRIES = interior_point._PART_ENTRIES


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    """Cut small problems into as many parts as large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interior_point, "_PART_ENTRIES", 200)
        yield


@pytest.fixture(scope="module")
def problem() -> SeedProblem:
    """Return a problem of four parts."""
    rng = np.random.default_rng(9)
    return random_problem(rng, cost=rng.exponential(size=(48, 37)), seeds_shape=(6, 8))


@pytest.fixture(scope="module")
def alone(problem: SeedProblem) -> SeedMechanism:
    with one_blas_thread():
        return solve_interior_point(problem, gap=1e-4)


@pytest.mark.parametrize(
    "shares", [1, 3, *(pytest.param(case, marks=pytest.mark.slow) for case in [2, 4, 7])]
)
def test_shares_decide_no_bit(problem: SeedProblem, alone: SeedMechanism, shares: int) -> None:
    parts = []

    class Counting(SharedSums):
        def __call__(self, matrices: Any) -> Any:
            parts.append(len(matrices))
            return super().__call__(matrices)

    with one_blas_thread():
        shared = solve_interior_point(problem, gap=1e-4, inverse_sums=Counting(InlineExecutor(), shares))
    assert set(parts) == {4}
    assert np.array_equal(shared.rows, alone.rows)
    assert shared.dual == alone.dual


@pytest.mark.slow
def test_workers_decide_nothing(problem: SeedProblem, alone: SeedMechanism, any_cluster: Any) -> None:
    with open_executor(any_cluster) as executor, one_blas_thread():
        shared = solve_interior_point(problem, gap=1e-4, inverse_sums=SharedSums(executor, 2))
    assert np.array_equal(shared.rows, alone.rows)


def test_sums_in_pairs_are_sums() -> None:
    assert sum_pairwise(iter([np.array([10.0**n]) for n in range(7)])) == 1111111.0
    assert sum_pairwise([np.array([3.0])]) == 3.0


def test_shares_are_consecutive_parts_in_order() -> None:
    seen = []

    class Recording(InlineExecutor):
        def map(self, stage: str, function: Callable[..., Any], arguments: Any) -> Any:  # noqa: ARG002
            seen.extend(list(a[0]) for a in arguments)
            yield from reversed(list(enumerate(len(a[0]) for a in arguments)))

    # The largest power of two that is allowed, so that shares are whole subtrees of the sum.
    results = SharedSums(Recording(), 3)(["a", "b", "c", "d"])  # type: ignore[list-item]
    assert seen == [["a", "b"], ["c", "d"]]
    assert list(results) == [2, 2]


@pytest.mark.slow
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
    # Workers cut as they always do.
    monkeypatch.setattr(interior_point, "_PART_ENTRIES", _PART_ENTRIES)
    job = small_job(
        domain={"cell_km": 5.0, "refine": [2]}, privacy={"budget": "certified"}, outputs={"count": 16},
        seed={"refine_rounds": 1}, cluster={"kind": "address", "address": scheduler_address},
    )  # fmt: skip
    alone = build(parse_job(job), str(tmp_path / "alone.zarr"))
    assert not calls
    monkeypatch.setattr(lp_placement, "_WORTH_SENDING", 1)
    shared = build(parse_job(job), str(tmp_path / "shared.zarr"))
    assert calls
    assert shared["loss_km"] == alone["loss_km"]
    assert MechanismStore.open(str(tmp_path / "shared.zarr")).seed_attributes["solver"] == "structured"
