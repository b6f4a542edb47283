"""Losses on the fixed 20 km problem, which compare to the metre: slow, run with ``-m slow``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask import build, load_job

JOB = Path(__file__).resolve().parents[2] / "workflows" / "rome-20km-fixed.toml"
# Estimate of what no mechanism can beat, in km: a relaxation on every second record, two of four offsets.
LOWER_BOUND = {0.5: 2.386, 1.0: 1.521, 1.5: 1.177}


def missed(reached: str) -> pytest.MarkDecorator:
    """Mark an aim that is not met yet; meeting it must take the mark away."""
    return pytest.mark.xfail(strict=True, reason=f"reached {reached}", raises=AssertionError)


def loss_km(tmp_path: Path, fixed_problem: Any, refine: int, epsilon: float, *more: str) -> float:
    file = f"loss.file={fixed_problem('rome-20km')}"
    overrides = (file, f"domain.refine=[{refine}]", f"privacy.epsilon_per_km={epsilon}", *more)
    summary = build(load_job(JOB, overrides), str(tmp_path / "s.zarr"))
    # Not asserted: a missed aim may be expected to fail, and these never are.
    if not 0.99 * epsilon <= summary["epsilon_certified"] <= epsilon:
        pytest.fail(f"certified at {summary['epsilon_certified']}")
    if not summary["loss_km"] > LOWER_BOUND[epsilon]:
        pytest.fail(f"a loss of {summary['loss_km']} km is below the bound")
    return float(summary["loss_km"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("epsilon", "reached"), [(0.5, 2.68), (1.0, 1.77), pytest.param(1.5, 1.42, marks=missed("1.13 x bound"))]
)
def test_half_the_records(tmp_path: Path, fixed_problem: Any, epsilon: float, reached: float) -> None:
    assert loss_km(tmp_path, fixed_problem, 2, epsilon) <= 1.12 * LOWER_BOUND[epsilon] <= reached


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("more", "reached"), [((), 1.85), pytest.param(("seed.refine_rounds=0",), 1.94, marks=missed("1.942 km"))]
)
def test_a_quarter(tmp_path: Path, fixed_problem: Any, more: tuple[str, ...], reached: float) -> None:
    assert loss_km(tmp_path, fixed_problem, 4, 1.0, *more) <= reached


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, pytest.param(1.5, marks=missed("1.072 x bound"))])
def test_every_record_a_seed(tmp_path: Path, fixed_problem: Callable[[str], Path], epsilon: float) -> None:
    assert loss_km(tmp_path, fixed_problem, 1, epsilon) <= 1.06 * LOWER_BOUND[epsilon]
