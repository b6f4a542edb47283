"""The identity of a mechanism: another one for whatever gives its bytes another meaning."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.problem.projection import Projection

GRID = Grid(-4.0, -6.0, 3, 5, 2.0, (2, 3))
PLACE = Projection(12.5, 41.9, 10.0)
KEPT = np.ones((3, 5), dtype=bool)
XY = np.arange(8.0).reshape(4, 2)
THERE = {
    "content_sha256": "00" * 32,
    "promise": {"epsilon_per_km": 1.0, "epsilon_certified": 0.75, "metric_p": 2.0}, "plane": (GRID, PLACE),
    "kept": KEPT, "outputs": (XY, XY + 0.5),
}  # fmt: skip


def with_one_changed(array: np.ndarray, *index: int) -> np.ndarray:
    """Return a copy with the least change of one entry."""
    other = array.copy()
    entry = other[index]
    other[index] = not entry if array.dtype == bool else np.nextafter(entry, np.inf)
    return other


OTHERS: list[dict[str, Any]] = [
    {"content_sha256": "00" * 31 + "01"},
    *({"promise": {**THERE["promise"], name: 1.25}} for name in THERE["promise"]),
    {"promise": {**THERE["promise"], "metric_p": "inf"}},
    *(
        {"plane": (replace(GRID, **other), PLACE)}
        for other in (
            {"west_km": -4.000001}, {"south_km": -5.0}, {"cell_km": 2.5}, {"cells_x": 5, "cells_y": 3},
            {"refine": (3, 2)}, {"refine": (6,)},
        )
    ),
    *(
        {"plane": (GRID, place)}
        for place in (
            None, replace(PLACE, centre_lon=12.6), replace(PLACE, centre_lat=-41.9),
            replace(PLACE, rotation_deg=0.0),
        )
    ),
    *({"kept": with_one_changed(KEPT, *cell)} for cell in ((0, 0), (2, 4))),
    *({"outputs": (with_one_changed(XY, k, 0), XY + 0.5)} for k in range(4)),
    {"outputs": (XY, with_one_changed(XY + 0.5, 3, 1))},
    {"outputs": (XY, np.full_like(XY, np.nan))},
    {"outputs": (XY[::-1], XY[::-1] + 0.5)},
    {"outputs": (XY + 0.5, XY)},
]  # fmt: skip


def test_nothing_that_gives_bytes_their_meaning_is_left_out() -> None:
    found = [mechanism_sha256(**{**THERE, **other}) for other in ({}, *OTHERS)]
    assert len(set(found)) == len(found)


def test_it_is_the_same_however_numbers_are_written() -> None:
    """A digest that was computed once: sticky answers depend on it."""
    assert mechanism_sha256(**THERE) == "7dad842fb317f4a2c60d8a5274f570b53faa86af5ace9b8a5efcd510d4769e96"
    whole = {**{name: f"{value}" for name, value in THERE["promise"].items()}, "epsilon_per_km": 1}
    assert mechanism_sha256(**{**THERE, "promise": whole}) == mechanism_sha256(**THERE)
    nowhere = [np.full((4, 2), nan) for nan in (np.nan, -np.nan)]
    planar = [mechanism_sha256(**{**THERE, "plane": (GRID, None), "outputs": (XY, at)}) for at in nowhere]
    assert planar[0] == planar[1]


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        mechanism_sha256(**{**THERE, "promise": {**THERE["promise"], "metric_p": "two"}})
