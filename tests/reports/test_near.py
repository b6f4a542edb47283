"""Close-ups and streets of a report page: by hand, by brute force, and against the network."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from mdpext_dask import build
from mdpext_dask.job.spec import parse_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import RoadGeometry, build_geometry
from mdpext_dask.problem.grid import Box
from mdpext_dask.reports.page import near, streets
from mdpext_dask.reports.page.maps import Frame
from mdpext_dask.reports.page.streets import path_of, snapped, streets_of
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import ROADS

Job = Callable[..., dict[str, dict[str, Any]]]
WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12)
FRAME = Frame(Box(0.0, 0.0, 10.0, 10.0))  # 64 units in a km


def test_distances_and_sets_by_hand() -> None:
    weight, apart = np.array([0.1, 0.4, 0.2, 0.3]), np.array([0.0, 3.0, 1.0, 2.0])
    assert near.distance_within(apart, weight, 0.5) == 2.0  # 0.1, 0.3, then 0.6
    assert near.distance_within(apart, weight, 0.9) == 3.0
    assert near.distance_within(apart, weight, 0.3) == 1.0  # though the sum may be a little less
    assert near.least_set(weight, 0.5).tolist() == [1, 3]
    assert near.least_set(weight, 0.9).tolist() == [1, 3, 2]
    assert near.least_set(np.array([1.0]), 0.9).tolist() == [0]


@given(WEIGHTS, st.sampled_from([near.HALF, near.MOST]))
def test_no_fewer_places_hold_as_much(weight: list[float], share: float) -> None:
    values = np.array(weight)
    found = near.least_set(values, share)
    assert values[found].sum() >= share * values.sum() * (1 - 1e-6)
    most = np.sort(values)[::-1]
    assert len(found) == 1 or most[: len(found) - 1].sum() < share * values.sum()


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=15))
def test_an_area_holds_its_places_and_turns_one_way(points: list[tuple[int, int]]) -> None:
    path = near.hull_path(np.array(points, dtype=float))
    corners = [tuple(map(float, one.split())) for one in path.strip("MZ").split("L")]
    assert set(corners) <= set(points)
    assert path.startswith("M")
    assert path.endswith("Z")
    for (a, b), (c, d) in zip(corners, corners[1:] + corners[:1], strict=True):
        # Every place is on one side of every side.
        assert all((c - a) * (y - b) - (d - b) * (x - a) >= 0 for x, y in points)
    box = np.array(points)
    assert np.ptp(np.array(corners), axis=0).tolist() == np.ptp(box, axis=0).tolist()


@pytest.mark.parametrize(
    ("km", "said"),
    [(0.0423, "42 m"), (0.2149, "210 m"), (1.2551, "1,260 m"), (9.99, "9,990 m"), (12.34, "12.3 km")],
)
def test_distances_in_words(km: float, said: str) -> None:
    assert near.in_metres(km).replace("\N{NO-BREAK SPACE}", " ") == said


def test_a_close_up_shows_what_it_says() -> None:
    outputs = np.array([[5.0, 5.0], [5.0, 6.0], [7.0, 5.0], [0.0, 0.0]])
    row = np.array([0.5, 0.3, 0.15, 0.05])
    found = near.reports_near(FRAME, row, outputs, np.array([5.0, 5.0]), 0.1)
    assert found is not None
    assert (found["half_count"], found["most_count"]) == (1, 3)
    assert [ring["words"].replace("\N{NO-BREAK SPACE}", " ") for ring in found["rings"]] == ["0 m", "2,000 m"]
    assert [dot["kind"] for dot in found["dots"]] == ["in-half", "in-most", "in-most"]
    # The farthest of them, 2 km away, is in the picture, and the place is in its middle.
    match = re.fullmatch(r"translate\((\S+) (\S+)\) scale\((\S+)\)", found["transform"])
    assert match is not None
    x, y, scale = map(float, match.groups())
    assert (x + scale * 320, y + scale * 320) == pytest.approx((near.WIDTH / 2, near.HEIGHT / 2), abs=0.5)
    assert found["rings"][1]["radius"] == pytest.approx(scale * 128, rel=1e-3)
    assert found["rings"][1]["radius"] < near.HEIGHT / 2
    assert found["bar"] == pytest.approx(scale * 64 * 1.0, rel=1e-3)  # a kilometre; two would be too long
    assert near.reports_near(FRAME, row * math.nan, outputs, outputs[0], 0.1) is None
    assert near.senders_near(FRAME, np.zeros(4), outputs, outputs[0], 0.1) is None


def drawn(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the lines that a path draws."""
    lines = []
    for part in path.split("M")[1:]:
        first, steps = part.split("l")
        x, y = map(int, first.split())
        numbers = [int(one) for one in re.findall(r"-?\d+", steps)]
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
            lines.append(((x, y), (x + dx, y + dy)))
            x, y = x + dx, y + dy
    return lines


@given(st.sets(st.tuples(*[st.integers(-9, 9)] * 4), max_size=25))
def test_a_path_draws_every_line_once(found: set[tuple[int, int, int, int]]) -> None:
    lines, _ = snapped(np.array(sorted(found), dtype=float).reshape(-1, 4))
    expected = sorted((tuple(one[:2]), tuple(one[2:])) for one in lines.tolist())
    assert sorted(tuple(sorted(line)) for line in drawn(path_of(lines))) == expected


def test_lines_that_fall_together_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = np.array([[0, 0, 10, 0], [10, 0, 0, 0], [0.1, 0, 10, 0.1], [3, 3, 3.1, 3]], dtype=float)
    found, step = snapped(lines)
    assert (found.tolist(), step) == ([[0, 0, 40, 0]], 0.25)
    monkeypatch.setattr(streets, "MOST_LINES", 10)
    many = np.random.default_rng(1).uniform(0, 640, (500, 2))
    short = np.concatenate([many, many + 3], axis=1)
    found, step = snapped(short)
    assert len(found) <= 10
    assert step > 3


def test_streets_are_those_of_the_network(small_job: Job, tmp_path: Path) -> None:
    spec = parse_job(small_job())
    geometry = build_geometry(spec)
    assert isinstance(geometry, RoadGeometry)
    network, xy = geometry.network, geometry.node_xy_km
    pairs = {tuple(sorted(pair)) for pair in zip(network.start.tolist(), network.end.tolist(), strict=True)}
    ends = build_domain(spec).road_xy_km
    inside = geometry.grid.box.contains(xy)
    expected = sorted(
        tuple(xy[[a, b]].astype(np.float32).ravel().tolist())
        for a, b in pairs
        if a != b and (inside[a] or inside[b])
    )
    assert sorted(tuple(one) for one in ends.reshape(-1, 4).tolist()) == expected

    url = tmp_path / "m.zarr"
    build(spec, str(url))
    store = MechanismStore.open(str(url))
    np.testing.assert_array_equal(store.read(f"problem/{ROADS}"), ends)
    frame = Frame.of(store)
    found = streets_of(store, frame)
    assert found["nodes"] is None
    shown = np.array(drawn(found["path"])).reshape(-1, 2) * found["step"]
    nodes = frame.place(xy)
    # Each end is at a node, to half a step along both axes and a tenth that places are rounded to.
    apart, _ = cKDTree(nodes).query(shown, p=np.inf)
    assert apart.max() <= found["step"] / 2 + 0.1
    # A store of before has none, and shows its nodes; damaged ones are as good as none.
    (url / "problem" / ROADS / "zarr.json").unlink()
    found = streets_of(MechanismStore.open(str(url)), frame)
    assert found["path"] is None
    assert found["nodes"].startswith("data:image/png")
    assert "does not hold the roads" in found["words"]
