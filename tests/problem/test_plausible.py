"""What is said of input that can be read and looks wrong, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyproj import Geod

from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.plausible import PointsSeen, doubt_on_place, notes_on_epsilon
from mdpext_dask.problem.projection import Projection
from mdpext_dask.runtime.location_sampler import Places
from tests.support.problems import JobMaker, point_file
from tests.support.refusals import refusal

# 20 km x 16 km around Oslo, and two places in it.
PLANE = Projection(10.75, 59.91)
GRID = Grid(-10.0, -8.0, 10, 8, 2.0, (2,))
HOME, WORK = (10.75, 59.91), (10.80, 59.93)
GEOD = Geod(ellps="WGS84")


def seen(points: list[tuple[float, float]], *, chunk: int = 100, planar: bool = False) -> PointsSeen:
    """Look at points, some at a time."""
    found, given = PointsSeen(GRID, PLANE), np.array(points, dtype=np.float64)
    for first in range(0, len(given), chunk):
        part = given[first : first + chunk]
        xy = part if planar else PLANE.to_plane(part)
        found.add(part, xy, ~GRID.box.contains(xy), planar=planar, first_row=first)
    return found


def north_of_the_grid(km: float) -> tuple[float, float]:
    lon, lat, _ = GEOD.fwd(*HOME, 0, (8 + km) * 1000)
    return lon, lat


FAR = north_of_the_grid(57)
CASES: dict[str, tuple[list[tuple[float, float]], list[str]]] = {
    "in the grid": ([HOME, WORK], []),
    "next to it": ([HOME, north_of_the_grid(9)], []),
    "one far away": (
        [HOME, WORK, north_of_the_grid(20), FAR, north_of_the_grid(30), HOME],
        ["3 of 6 points lie outside the grid (the furthest, point 4, by 57 km)"],
    ),
    "all next to it": (
        [north_of_the_grid(1.5), north_of_the_grid(0.4)],
        ["all 2 points lie outside the grid (the furthest, point 1, by 1.5 km)"],
    ),
    "one swapped": (
        [HOME, WORK[::-1], HOME],
        ["1 of 3 points lie outside the grid (the furthest, point 2, by ", "look swapped: point 2"],
    ),
    "three swapped": (
        [HOME, WORK[::-1], HOME, HOME[::-1], WORK[::-1]],
        ["3 of 5 points lie outside", "look swapped: 3 points, the first of them point 2"],
    ),
    "nowhere": (
        [HOME, HOME, (0.0, 0.0), FAR, (0.0, -0.0)],
        ["3 of 5 points lie outside the grid (the furthest, point 3, by ", "no place: 2 points, the first of "
         "them point 3"],
    ),
    "the antipode": ([HOME, (10.75 - 180, -59.91)], ["(the furthest, point 2, by 19,996 km)"]),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize(("points", "expected"), CASES.values(), ids=CASES)
def test_what_is_said_of_points(points: list[tuple[float, float]], expected: list[str], chunk: int) -> None:
    notes = seen(points, chunk=chunk).notes("p.csv")
    assert len(notes) == len(expected)
    for note, part in zip(notes, expected, strict=True):
        assert note.startswith("p.csv: ")
        assert part in note
    # Never where anybody is.
    assert not any(f"{degree:.2f}"[:-1] in "".join(notes) for place in points for degree in place if degree)


def test_places_near_the_diagonal_are_not_taken_for_swapped_ones() -> None:
    plane = Projection(10.0, 10.4)
    grid = Grid(-10.0, -10.0, 20, 20, 1.0, (2,))
    found, swapped = PointsSeen(grid, plane), np.array([[10.4, 10.0]])
    found.add(swapped, plane.to_plane(swapped), np.array([True]), planar=False)
    assert found.outside == 1
    assert not found.all_swapped


def test_kilometres_that_look_like_degrees() -> None:
    found = seen([HOME, (0.0, 1.0), WORK], planar=True)
    assert "x_km and y_km look like degrees: 2 points, the first of them point 1" in found.said()
    assert not found.all_degrees
    assert seen([HOME, WORK], planar=True).all_degrees


def test_the_distance_is_that_to_the_nearest_point_of_the_grid() -> None:
    assert GRID.box.distance_km(np.array([[np.nan, np.nan], [np.inf, 0.0]])).tolist() == [20_000.0] * 2
    rng = np.random.default_rng(5)
    places = rng.uniform(-40, 40, (500, 2))
    x, y = np.meshgrid(np.linspace(-10, 10, 401), np.linspace(-8, 8, 321), indexing="ij")
    for place, away in zip(places, GRID.box.distance_km(places), strict=True):
        nearest = np.hypot(x - place[0], y - place[1]).min()
        assert away == 0 if GRID.box.contains(place[None])[0] else nearest - 0.05 < away <= nearest + 1e-12


@pytest.mark.parametrize(
    ("km", "said"),
    [
        (0.2, "the place lies outside the grid"), (9, "the place lies outside the grid"),
        (11, "the place lies more than 10 km outside the grid"), (99, "more than 10 km"),
        (240, "more than 100 km"), (3000, "more than 1,000 km"),
    ],
)  # fmt: skip
def test_what_is_said_of_one_place_hides_how_far_it_is(km: float, said: str) -> None:
    place = np.array([north_of_the_grid(km)])
    doubt = doubt_on_place(PLANE.to_plane(place), place, GRID, PLANE)
    assert said in doubt
    assert "swapped" not in doubt
    swapped = np.array([WORK[::-1]])
    assert "look swapped" in doubt_on_place(PLANE.to_plane(swapped), swapped, GRID, PLANE)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_one_place_is_outside_where_it_is_among_many(share: float) -> None:
    rng = np.random.default_rng(8)
    places = Places("m", GRID, rng.random((10, 8)) < share, PLANE, 2.0)
    # Records and sides of cells too, and what is a millimetre or so outside.
    xy = np.concatenate([rng.uniform(-12, 12, (300, 2)), rng.integers(-12, 13, (300, 2)), GRID.seeds_xy_km()])
    xy = np.concatenate([xy, xy + 1e-7, xy * (1 + 1e-9), [[np.inf, np.nan]]])
    _, inside = places.records(xy, None)
    doubts = [places.doubt((x, y), None, None) for x, y in xy.tolist()]
    assert [doubt == "" for doubt in doubts] == inside.tolist()
    in_grid = GRID.box.contains(xy)
    assert all(
        ("region" in doubt) == bool(there) for doubt, there in zip(doubts, in_grid, strict=True) if doubt
    )
    assert 50 < inside.sum() < len(xy) - 50


# --- jobs ------------------------------------------------------------------------------------------

# Of the small job in Manhattan.
INSIDE, ALSO = (-73.98, 40.75), (-73.95, 40.78)
BOSTON = (-71.06, 42.36)


@pytest.fixture
def job(small_job: JobMaker) -> Callable[..., JobSpec]:
    return lambda **sections: parse_job(small_job(**sections))


def test_a_prior_of_another_city_is_refused_and_a_stray_point_noted(
    job: Callable[..., JobSpec], tmp_path: Path
) -> None:
    def spec(places: list[tuple[float, float]]) -> JobSpec:
        return job(prior={"kind": "file", "file": point_file(tmp_path / "p.csv", "lon,lat", places)})

    away = "all 2 points lie outside the grid (the furthest, point 2, by "
    refusal(lambda: build_domain(spec([BOSTON, (12.5, 41.9)])), "prior.file: ", "no weight lies inside", away)
    refusal(lambda: build_domain(spec([INSIDE[::-1]])), "longitude and latitude look swapped: point 1")
    *notes, alone = build_domain(spec([INSIDE, BOSTON, ALSO[::-1], (0, 0)])).notes
    assert alone.startswith("prior: all of it is at one record")
    for note, part in zip(
        notes,
        ("3 of 4 points lie outside the grid", "look swapped: point 3", "no place: point 4"),
        strict=True,
    ):
        assert note.startswith(f"prior.file: {tmp_path / 'p.csv'}: ")
        assert part in note


def test_tasks_and_outputs_outside_are_refused_with_the_furthest(
    job: Callable[..., JobSpec], tmp_path: Path
) -> None:
    file = point_file(tmp_path / "p.csv", "lon,lat", [INSIDE, ALSO[::-1], BOSTON, (0, 0)])
    parts = (
        f"{file}: 3 of 4 points lie outside the grid (the furthest, point ",
        "swapped: point 2",
        "point 4",
    )
    refusal(lambda: build_domain(job(loss={"tasks_file": file})), "loss.tasks_file: ", *parts)
    outputs: dict[str, Any] = {"choose": "file", "file": file, "count": None}
    refusal(lambda: build_domain(job(outputs=outputs)), "outputs.file: ", 'outputs.outside = "drop"', *parts)
    notes = build_domain(job(outputs={**outputs, "outside": "drop"})).notes
    assert [part in note for note, part in zip(notes, ("left out", *parts[1:]), strict=True)] == [True] * 3


# --- epsilon ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "parts"),
    [
        (1 / GRID.spacing_km, []), (1.0, []), (0.028, []),
        (1.01 / GRID.spacing_km, ["hides a place from no other record", "2.746 between records"]),
        (101.0, ["101 hides not even 10 m", "2.434e+04 at 100 m", "e^101 at 1 km"]),
        (200.0, ["4.852e+08 at 100 m", "e^200 at 1 km"]),
        (0.027, ["leaves next to nothing", "1.003 at 100 m", "1.027 at 1 km", "2.643 across the grid"]),
        (0.005, ["leaves next to nothing", "1.197 across the grid; if it was meant per metre, say 5"]),
        (1e-9, ["leaves next to nothing", "1 at 100 m, 1 at 1 km"]),
    ],
)  # fmt: skip
def test_an_epsilon_that_hides_or_leaves_nothing(epsilon: float, parts: list[str]) -> None:
    notes = notes_on_epsilon(epsilon, GRID)
    assert len(notes) == bool(parts)
    for part in parts:
        assert part in notes[0]


@pytest.mark.parametrize(("epsilon", "meant"), [(0.005, True), (0.02, True), (1e-5, False), (1.0, False)])
def test_an_epsilon_per_metre_is_guessed_where_it_would_do(epsilon: float, meant: bool) -> None:
    said = "".join(notes_on_epsilon(epsilon, GRID))
    assert said.endswith(f"if it was meant per metre, say {1000 * epsilon:g}") == meant
    assert ("per metre" in said) == meant
    assert bool(said) == (epsilon < 1)


def test_factors_are_those_of_the_promise() -> None:
    [note] = notes_on_epsilon(0.02, GRID)
    for distance in (0.1, 1.0, 20.0 + 16.0):
        assert f"{math.exp(0.02 * distance):.4g} " in note.replace(",", " ")


def test_a_plan_has_the_notes_of_a_run(job: Callable[..., JobSpec]) -> None:
    told: list[Any] = []
    plan = plan_job(job(privacy={"epsilon_per_km": 1e-3}), told.append)
    assert [event.text for event in told] == plan["notes"]
    assert ["leaves next to nothing" in note for note in plan["notes"]] == [True]
    assert plan_job(job())["notes"] == []
