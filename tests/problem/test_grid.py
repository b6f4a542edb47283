"""The grid: how many cells and records a box gets, and which record a place belongs to."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Box, Grid
from tests.support.problems import JobMaker, all_records, road_geometry
from tests.support.refusals import refusal

_grids = st.builds(
    Grid, west_km=st.floats(-50, 50), south_km=st.floats(-50, 50), cells_x=st.integers(1, 4),
    cells_y=st.integers(1, 4), cell_km=st.floats(0.1, 8),
    refine=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
)  # fmt: skip
# Records a metre apart: what rounding can add is far below the distances at stake.
_FINE = Grid(-3.0, 5.0, 2, 3, 4.0, (10, 20, 20))
Place = tuple[float, float]
# A place relative to the grid: 0..1 is inside, the rest outside, on any side or corner.
_places = st.tuples(st.floats(-2, 3), st.floats(-2, 3))


def _place(grid: Grid, relative: Place) -> np.ndarray:
    box = grid.box
    return np.array([box.west_km + relative[0] * box.width_km, box.south_km + relative[1] * box.height_km])


def _record_xy(grid: Grid, places: np.ndarray) -> np.ndarray:
    i, j, _ = grid.nearest_records(places)
    return np.stack([grid.x_km()[i], grid.y_km()[j]], axis=-1)


# --- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("city", "cell_km", "cells", "records"),
    [
        ("rome", 4.77, (10, 11), (483, 4087, 63865)),
        pytest.param("london", 6.78, (9, 7), (285, 2365, 36673), marks=pytest.mark.slow),
    ],
)
def test_published_experiments_have_the_published_numbers_of_records(
    city_roads: Callable[[str], Path],
    small_job: JobMaker,
    city: str,
    cell_km: float,
    cells: tuple[int, int],
    records: tuple[int, ...],
) -> None:
    found = road_geometry(small_job(domain={"roads": str(city_roads(city)), "cell_km": cell_km})).grid
    assert (found.cells_x, found.cells_y) == cells
    assert tuple(replace(found, refine=r).records for r in ((2,), (2, 3), (2, 3, 4))) == records


def test_manhattan_in_cells_of_one_kilometre(small_job: JobMaker) -> None:
    grid = road_geometry(small_job(domain={"cell_km": 1.0, "refine": [2, 3, 4]})).grid
    assert (grid.cells_x, grid.cells_y, grid.records) == (9, 19, 99169)


def test_a_small_grid_by_hand() -> None:
    grid = Grid(west_km=-1.0, south_km=10.0, cells_x=2, cells_y=1, cell_km=3.0, refine=(2, 3))
    assert (grid.factor, grid.spacing_km, grid.source_cells) == (6, 0.5, 2)
    assert (grid.seeds_shape, grid.seeds, grid.shape, grid.records) == ((3, 2), 6, (13, 7), 91)
    assert grid.box == Box(-1.0, 10.0, 5.0, 13.0)
    np.testing.assert_array_equal(grid.x_km(), [-1 + 0.5 * i for i in range(13)])
    np.testing.assert_array_equal(grid.y_km(), [10 + 0.5 * j for j in range(7)])
    seeds = [(-1, 10), (-1, 13), (2, 10), (2, 13), (5, 10), (5, 13)]
    np.testing.assert_array_equal(grid.seeds_xy_km(), seeds)


@given(grid=_grids)
def test_seeds_are_every_fth_record(grid: Grid) -> None:
    x, y = grid.x_km()[:: grid.factor], grid.y_km()[:: grid.factor]
    assert (len(x), len(y)) == grid.seeds_shape
    np.testing.assert_allclose(grid.seeds_xy_km(), [(a, b) for a in x for b in y], rtol=0, atol=1e-12)
    assert len(grid.x_km()) * len(grid.y_km()) == grid.records


def test_order_of_refinement_levels_does_not_move_records() -> None:
    one, other = (Grid(0.3, -7.1, 3, 2, 1.7, refine) for refine in ((2, 3, 4), (4, 3, 2)))
    np.testing.assert_array_equal(one.x_km(), other.x_km())
    np.testing.assert_array_equal(one.y_km(), other.y_km())


# --- covering a box --------------------------------------------------------------------------------


@given(
    west=st.floats(-500, 500), south=st.floats(-500, 500), width=st.floats(1, 60), height=st.floats(1, 60),
    cell=st.floats(0.05, 1),
)  # fmt: skip
def test_covering_grid_holds_box(west: float, south: float, width: float, height: float, cell: float) -> None:
    box = Box(west, south, west + width, south + height)
    grid = Grid.covering(box, cell, (2,))
    assert (grid.west_km, grid.south_km, grid.cell_km, grid.refine) == (west, south, cell, (2,))
    for cells, side in ((grid.cells_x, box.width_km), (grid.cells_y, box.height_km)):
        assert cells * cell >= side - 1e-6 * cell
        assert (cells - 1) * cell < side


@given(
    west=st.floats(-500, 500), south=st.floats(-500, 500),
    cells=st.tuples(st.integers(1, 60), st.integers(1, 60)), cell=st.floats(0.05, 10),
)  # fmt: skip
@example(west=0.0, south=0.0, cells=(3, 3), cell=0.1)  # 0.30000000000000004 by 0.1
def test_whole_cells_do_not_gain_one(west: float, south: float, cells: tuple[int, int], cell: float) -> None:
    grid = Grid.covering(Box(west, south, west + cells[0] * cell, south + cells[1] * cell), cell, (2,))
    assert (grid.cells_x, grid.cells_y) == cells


def test_cell_larger_than_the_box_or_the_network_is_refused(small_job: JobMaker) -> None:
    for box in (Box(0, 0, 2, 9), Box(0, 0, 9, 2), Box(0, 0, 0, 9)):
        parts = "domain.cell_km: ", "2.5 km", "larger than the box"
        refusal(partial(Grid.covering, box, 2.5, (2,)), *parts, kind=SpecError)
    job = small_job(domain={"cell_km": 20.0})
    refusal(lambda: road_geometry(job), "domain.cell_km: ", " 20 km", kind=SpecError)


def test_box_is_closed_to_a_millimetre() -> None:
    box = Box(0.0, 1.0, 2.0, 3.0)
    places = np.array([(0, 1), (2, 3), (-1e-7, 2), (-1e-5, 2), (2 + 1e-5, 2), (1, 1 - 1e-5), (1, 3 + 1e-5)])
    assert box.contains(places).tolist() == [True, True, True, False, False, False, False]


# --- nearest records -------------------------------------------------------------------------------


@given(grid=_grids, relative=st.lists(_places, min_size=1, max_size=20))
def test_no_record_is_nearer_than_the_nearest_one(grid: Grid, relative: list[Place]) -> None:
    some_records = all_records(grid)[:: 1 + grid.records // 50]
    places = np.concatenate([[_place(grid, r) for r in relative], some_records])
    found = np.linalg.norm(_record_xy(grid, places) - places, axis=1)
    distances = np.linalg.norm(places[:, None] - all_records(grid)[None], axis=-1)
    np.testing.assert_allclose(found, distances.min(axis=1), rtol=1e-12, atol=1e-12)


@given(grid=_grids, relative=_places)
def test_inside_means_in_the_rectangle(grid: Grid, relative: Place) -> None:
    x, y = _place(grid, relative)
    box = grid.box
    inside = grid.nearest_records(np.array([(x, y)]))[2]
    beyond = max(box.west_km - x, x - box.east_km, box.south_km - y, y - box.north_km)
    if beyond <= 0 or beyond > 2e-6:  # in between, a millimetre of doubt is allowed
        assert inside.tolist() == [beyond <= 0]


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@given(grid=_grids, one=_places, other=_places)
def test_moving_to_records(p: float, grid: Grid, one: Place, other: Place) -> None:
    """Moving to the rectangle adds nothing, in any d_p; moving on to the record adds up to rho, twice."""
    for lattice in (grid, _FINE):
        places = np.array([_place(lattice, one), _place(lattice, other)])
        records = _record_xy(lattice, places)
        rho = np.linalg.norm([lattice.spacing_km / 2] * 2, ord=p)
        moved = np.linalg.norm(records[0] - records[1], ord=p)
        assert moved <= np.linalg.norm(places[0] - places[1], ord=p) + 2 * rho + 1e-9


def test_records_on_the_border_are_inside() -> None:
    """The last record may lie an ulp beyond the sum of the cells."""
    grid = Grid(-16.208877449286675, -10.838099947183878, 4, 10, 1.89, (3,))
    corner = np.array([[grid.x_km()[-1], grid.y_km()[-1]], [grid.x_km()[0], grid.y_km()[0]]])
    assert grid.nearest_records(corner)[2].all()
    assert not grid.nearest_records(corner + np.array([[0.001, 0.0], [-0.001, 0.0]]))[2].any()
