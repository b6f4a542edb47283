"""The model of a cluster is right where it can be worked out."""

from pathlib import Path

import pytest

from tests.support.scripts import module_at

SCRIPT = Path(__file__).resolve().parents[2] / "workflows" / "benchmarks" / "scale_simulation.py"


simulation = module_at(SCRIPT)
ON = simulation.Machines(dispatch=0.01, store_bytes=1e9, worker_bytes=1e8)


@pytest.mark.parametrize(
    ("tasks", "each", "moved", "workers", "expected"),
    [
        (20, 1.0, 5e7, 1, 20 * 1.51),  # 10 ms to be sent, 1 s to compute, 0.5 s for 50 MB
        (1000, 0.1, 0.0, 4096, 1000 * 0.01 + 0.1),  # all wait for the scheduler
        (1000, 0.0, 1e8, 4096, 1000 * 1e8 / 1e9),  # the store moves no more than it can
        (100, 1.0, 0.0, 2, 100 * 1.01 / 2),  # two share the work
    ],
)
def test_cases_by_hand(tasks: int, each: float, moved: float, workers: int, expected: float) -> None:
    assert simulation.stage_seconds(tasks, each, moved, workers, ON) == pytest.approx(expected, rel=0.02)


def test_what_holds_a_job_up() -> None:
    size = simulation.SIZES[1]
    costs = size.costs()
    assert costs.plan.grid.records == pytest.approx(1e7, rel=0.02)
    seconds, held_up_by = simulation.simulate(size, 1, ON)
    assert held_up_by == "workers"
    assert seconds > sum(costs.seconds(1)[stage] for stage in ("loss", "extend", "audit", "evaluate"))
    full = simulation.Machines(dispatch=0.01, store_bytes=1e8, worker_bytes=1e8)
    assert simulation.simulate(size, 4096, full)[1] == "store"
    slow = simulation.Machines(dispatch=1.0, store_bytes=1e12, worker_bytes=1e12)
    assert simulation.simulate(size, 4096, slow)[1] == "scheduler"


def test_noise_has_tiles_for_a_seed_and_writes_what_is_near() -> None:
    size = next(size for size in simulation.SIZES if size.spacing_km is not None)
    costs = size.costs()
    assert costs.noise is not None
    seconds, held_up_by = simulation.simulate(size, 1, ON)
    assert held_up_by == "workers"
    stages = costs.seconds(1)
    assert seconds > sum(stages[stage] for stage in ("seed", "extend", "audit", "evaluate")) * 0.9
    assert costs.plan.near_outputs < size.outputs
    everything = simulation.Size("more", size.cells, size.factor, 2 * size.outputs, size.spacing_km)
    assert simulation.simulate(everything, 1, ON)[0] > seconds
