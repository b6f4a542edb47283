"""What a job with too much noise is told: one line, and advice that works."""

import math
import re
from typing import Any

import pytest

from mdpext_dask.errors import SpecError
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.noise_limits import check_noise
from mdpext_dask.problem.geometry import build_geometry


def refusal(epsilon: float, domain: dict[str, Any]) -> str | None:
    """Return what is said of a job; None if it has not too much noise."""
    job = {"domain": {"roads": "builtin:manhattan", **domain}, "privacy": {"epsilon_per_km": epsilon}}
    spec = JobSpec.of(**job)
    try:
        check_noise(spec, build_geometry(spec))
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("epsilon", "domain"),
    [
        (1000.0, {}),
        (1000.0, {"cell_km": 0.5}),
        (300.0, {"cell_km": 2.0}),
        (300.0, {"cell_km": 0.1, "refine": [2, 2, 2, 2]}),
    ],
)
def test_a_box_of_the_side_that_is_told_can_be_though_degrees_are_rounded(
    epsilon: float, domain: dict[str, Any]
) -> None:
    said = refusal(epsilon, domain)
    assert said is not None
    found = re.search(r"at most (\S+) km x", said)
    assert found is not None
    # A degree is at least 111 km to the north, and has 111.4 to the east at the equator.
    lon, lat, half = -73.98, 40.76, float(found[1]) / 2
    north, east = half / 111, half / (111.4 * math.cos(math.radians(lat)))
    assert refusal(epsilon, {**domain, "bbox": [lon - east, lat - north, lon + east, lat + north]}) is None


@pytest.mark.parametrize("epsilon", [1e-300, 1e-9, 1e5, 1e300])
def test_an_epsilon_that_is_none_is_refused_in_one_line_and_with_no_box_of_metres(epsilon: float) -> None:
    said = refusal(epsilon, {"bbox": [-74.003, 40.735, -73.968, 40.762]})
    assert said is not None
    assert "cells of noise, more than 2e+07; use " in said
    assert "box" not in said
