"""Blocks: every record owned once, every cell in one block, whole shards only."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.blocks import Plan

grids = st.builds(
    lambda east, north, refine: Grid(0.0, 0.0, east, north, 1.0, tuple(refine)), st.integers(1, 12),
    st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=3),
)  # fmt: skip
blocks = st.one_of(st.none(), st.tuples(st.integers(1, 13), st.integers(1, 13)))


@settings(max_examples=100)
@given(grid=grids, outputs=st.integers(1, 200), block_cells=blocks)
def test_each_record_and_cell_once(grid: Grid, outputs: int, block_cells: tuple[int, int] | None) -> None:
    plan = Plan.of(grid, outputs, block_cells)
    owned = np.zeros(grid.shape, dtype=int)
    cells = np.zeros((grid.cells_x, grid.cells_y), dtype=int)
    seen: set[tuple[int, int]] = set()
    for block in plan:
        owned[block.owned_x, block.owned_y] += 1
        cells[block.cells_x, block.cells_y] += 1
        assert block.closed_shape[0] >= block.owned_shape[0]
        assert block.closed_x.stop - 1 == block.cells_x.stop * grid.factor
        # And no two blocks share a shard.
        ranges = [
            range(part.start // side, math.ceil(part.stop / side))
            for part, side in zip((block.owned_x, block.owned_y), plan.shard_shape[:2], strict=True)
        ]
        shards = {(i, j) for i in ranges[0] for j in ranges[1]}
        assert not shards & seen
        seen |= shards
    assert (owned == 1).all()
    assert (cells == 1).all()
    assert all(s % c == 0 for s, c in zip(plan.shard_shape, plan.chunk_shape, strict=True))


@given(grid=grids, block_cells=blocks)
def test_neighbours_share_their_closed_sides(grid: Grid, block_cells: tuple[int, int] | None) -> None:
    plan = Plan.of(grid, 3, block_cells)
    pairs = 0
    for block in plan:
        for side, index in block.neighbours.items():
            other = plan[index]
            pairs += 1
            if side == "east":
                assert block.closed_x.stop - 1 == other.closed_x.start
                assert block.closed_y == other.closed_y
            else:
                assert block.closed_y.stop - 1 == other.closed_y.start
                assert block.closed_x == other.closed_x
    across, along = plan.blocks_shape
    assert pairs == (across - 1) * along + across * (along - 1)


def test_no_block_is_larger_than_the_first() -> None:
    plan = Plan.of(Grid(0, 0, 10, 7, 1.0, (2, 3)), 5, (4, 3))
    assert max(math.prod(block.closed_shape) for block in plan) == math.prod(plan[0].closed_shape)


@pytest.mark.parametrize("outputs", [1, 64, 1000])
def test_the_plan_of_large_jobs_has_blocks_of_bounded_size(outputs: int) -> None:
    plan = Plan.of(Grid(0, 0, 131, 131, 1.0, (2, 3, 4)), outputs)
    assert plan.store_bytes == 3145**2 * outputs * 4
    assert math.prod(plan.shard_shape) * 4 <= 2 * max(32 * 2**20, 24**2 * outputs * 4)
    assert math.prod(plan.chunk_shape) * 4 <= 192 * 2**10
    assert plan.blocks >= 16


def test_blocks_outside_the_plan_are_refused() -> None:
    plan = Plan.of(Grid(0, 0, 2, 2, 1.0, (2,)), 5, (1, 1))
    assert len(list(plan)) == plan.blocks == 4
    with pytest.raises(IndexError, match=r"0\.\.3"):
        plan[4]
