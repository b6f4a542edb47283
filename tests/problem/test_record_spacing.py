"""Records of a job that does not say where they are: near enough for ε, and not more than a machine bears."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.grid import Box, Grid, chosen_cells

SIDES = st.floats(0.05, 500.0)


@given(width=SIDES, height=SIDES, epsilon=st.floats(1e-3, 1e3))
def test_records_are_near_and_not_too_many(width: float, height: float, epsilon: float) -> None:
    box = Box(0.0, 0.0, width, height)
    grid = Grid.covering(box, *chosen_cells(box, epsilon, None, None))
    many = math.sqrt(width * height / 2.5e6)
    assert grid.spacing_km <= max(0.2 / epsilon, many) * (1 + 1e-9)
    assert grid.spacing_km <= min(width, height) / 16 * (1 + 1e-9)
    # Half of what was asked for in each direction, by rounding and whole cells, would be four times as many.
    least = min(max(0.2 / epsilon, many), min(width, height) / 16)
    assert grid.spacing_km >= 0.98 * least


def test_the_usual_city() -> None:
    box = Box(0.0, 0.0, 12.0, 9.0)
    assert chosen_cells(box, 5.0, None, None) == (0.64, (2, 2, 2, 2))  # records 40 m apart
    assert chosen_cells(box, 5.0, 1.0, None) == (1.0, (2, 2, 2, 2, 2))
    assert chosen_cells(box, 5.0, None, (4, 6)) == (0.96, (4, 6))
    assert chosen_cells(box, 5.0, 0.03, None) == (0.03, (1,))
    assert chosen_cells(box, 5.0, 3.0, (7,)) == (3.0, (7,))


@pytest.mark.parametrize("epsilon", [0.01, 5.0, 50.0])
def test_a_job_of_four_lines(epsilon: float) -> None:
    job: dict[str, Any] = {
        "domain": {"roads": "builtin:manhattan"}, "privacy": {"epsilon_per_km": epsilon}
    }  # fmt: skip
    spec = parse_job(job)
    grid = build_geometry(spec).grid
    assert 2 * math.sqrt(0.5) * grid.spacing_km * epsilon <= 0.29 or grid.records > 2_000_000
    assert parse_job(spec.canonical()) == spec
    named = build_geometry(spec.replace(domain={"cell_km": 3.0, "refine": [4]})).grid
    assert (named.cell_km, named.refine) == (3.0, (4,))
