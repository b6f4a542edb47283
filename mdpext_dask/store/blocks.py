"""Blocks of source cells: what one task computes and owns, and its memory.

A block *computes* the closed range of its fine rows and *owns* the half-open one (closed at the upper border
of the grid). Owned ranges are whole shards of the store, so no two tasks write one shard; shared rows are
computed by both neighbours and compared. A block without a source cell that meets the region is *skipped*: it
is computed when it is needed, and never stored.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.job.sections import CELL_PROGRAMS, FITTING, NOISE, RECORDS, WINDOWS
from mdpext_dask.problem.grid import Grid

FLOAT32, FLOAT64 = 4, 8
# A block's stored bytes: small enough to spread, large enough to outweigh a task's overhead.
_BLOCK_BYTES = 32 * 2**20
_LEAST_BLOCKS = 16
_LEAST_BLOCK_BYTES = 256 * 2**10
# An inner chunk is what must be read to look up one record. Of local rows those with an output near it are
# read, and Zarr takes a millisecond for each that there is, so they are larger.
_CHUNK_BYTES, _LOCAL_CHUNK_BYTES = 192 * 2**10, 640 * 2**10
# ε times the distance up to which noise gives outputs more than the floor, measured 20 to 22; and outputs lie
# up to so many times as densely as on average, measured 6.6.
_NOISE_REACH, _CROWDED = 22.0, 7.0
# Outputs of a chunk of local rows: few, so that chunks without a near output are many.
_CHUNK_OUTPUTS = 256
# Seeds are read in chunks of at most this, so that a worker reads its corners and little more.
_SEED_CHUNK_BYTES = 256 * 2**10
# Memory for writing a block (a copy in the shard's order, its compressed chunks, the joined file) as a share
# of the block; slabs of one fine row that the extension holds; and interpreter objects of one task. Measured;
# the last two matter for tiny blocks only.
_WRITE_SHARE, _LOCAL_WRITE_SHARE = 2.1, 1.2
_SLABS = 8
_COLUMNS, _UNPACKED, _SCORES = 4, 9, 4
# Columns that a user's own operator may need, if it transforms scores and back.
_OWN_COLUMNS = 12
_TASK_OVERHEAD_BYTES = 150 * 2**10


@dataclass(frozen=True)
class Block:
    """One task: a rectangle of source cells.

    Parameters
    ----------
    index
        Position in the plan, from 0.
    cells_x, cells_y
        Half-open ranges of source cells.
    owned_x, owned_y
        Half-open ranges of fine rows that the task writes.
    closed_x, closed_y
        Half-open ranges of fine rows that the task computes: the owned ones and the row after.
    neighbours
        Indices of the neighbouring blocks to the ``"east"`` and ``"north"``, where there are any.
    """

    index: int
    cells_x: slice
    cells_y: slice
    owned_x: slice
    owned_y: slice
    closed_x: slice
    closed_y: slice
    neighbours: dict[str, int]

    @property
    def owned_shape(self) -> tuple[int, int]:
        """Rows to the east and to the north that the task writes."""
        return _shape(self.owned_x, self.owned_y)

    @property
    def closed_shape(self) -> tuple[int, int]:
        """Rows to the east and to the north that the task computes."""
        return _shape(self.closed_x, self.closed_y)

    def records(self, side: str) -> list[tuple[int, int]]:
        """Return the records on one side of the closed block, corners included, in lattice order."""
        x, y = self.closed_x, self.closed_y
        if side in ("west", "east"):
            i = x.start if side == "west" else x.stop - 1
            return [(i, j) for j in range(y.start, y.stop)]
        j = y.start if side == "south" else y.stop - 1
        return [(i, j) for i in range(x.start, x.stop)]

    def shards(self, shard: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the positions of the shards that the rows which the task writes fill.

        Parameters
        ----------
        shard, shape
            Rows to the east and to the north of a shard, and of the whole array.

        Raises
        ------
        ValueError
            If they are not whole shards; two tasks would write one file.
        """
        ranges = []
        for owned, side, end in zip((self.owned_x, self.owned_y), shard, shape, strict=True):
            if owned.start % side or (owned.stop % side and owned.stop != end):
                raise ValueError(
                    f"rows {owned.start}..{owned.stop - 1} are not whole shards of {side} rows in an array "
                    f"of {end}"
                )
            ranges.append(range(owned.start // side, math.ceil(owned.stop / side)))
        return [(i, j) for i in ranges[0] for j in ranges[1]]


@dataclass(frozen=True)
class Plan:
    """How a grid is cut into blocks.

    Parameters
    ----------
    grid
        The grid.
    outputs
        Number K of outputs.
    block_cells
        Source cells of a full block, to the east and to the north.
    skipped
        Blocks that are not stored.
    reach_km
        How far from a record outputs have more than the floor, in km, about; None where rows are not local.
        Chunks of local rows are cut along the outputs as well, which matters to new stores only.
    """

    grid: Grid
    outputs: int
    block_cells: tuple[int, int]
    skipped: frozenset[int] = frozenset()
    reach_km: float | None = None

    @classmethod
    def of(
        cls,
        grid: Grid,
        outputs: int,
        block_cells: tuple[int, int] | None = None,
        kept: NDArray[np.bool_] | None = None,
        reach_km: float | None = None,
    ) -> "Plan":
        """Return the plan for a grid; it depends on the job alone, never on the number of workers.

        Without `block_cells`, blocks are as square as the grid allows and hold about 32 MB, or a
        sixteenth of the whole rectangle if that is less. Blocks without any of the source cells in `kept`,
        bool of shape (cells_x, cells_y), are skipped; without `kept`, none is.
        """
        if block_cells is None:
            block_cells = _choose_block_cells(grid, near_outputs(grid, outputs, (1, 1), reach_km, _CROWDED))
        sides = min(block_cells[0], grid.cells_x), min(block_cells[1], grid.cells_y)
        plan = cls(grid, outputs, sides, reach_km=reach_km)
        if kept is None or kept.all():
            return plan
        stored = np.zeros(plan.blocks_shape, dtype=bool)
        cells_x, cells_y = np.nonzero(kept)
        stored[cells_x // plan.block_cells[0], cells_y // plan.block_cells[1]] = True
        return replace(plan, skipped=frozenset(np.flatnonzero(~stored).tolist()))

    def skipped_blocks(self, x: slice, y: slice) -> list[Block]:
        """Return the skipped blocks that own some of a rectangle of records (half-open ranges of rows)."""
        if not self.skipped:
            return []
        across, along = (self._owners(part, axis) for axis, part in enumerate((x, y)))
        owners = {i * self.blocks_shape[1] + j for i in across for j in along}
        return [self[index] for index in sorted(owners & self.skipped)]

    def blocks_of(self, i: NDArray[np.intp], j: NDArray[np.intp]) -> set[int]:
        """Return the blocks that own records (i, j), each of shape (n,)."""
        ends = self.grid.cells_x - 1, self.grid.cells_y - 1
        across, along = (
            np.minimum(records // self.grid.factor, end) // side
            for records, end, side in zip((i, j), ends, self.block_cells, strict=True)
        )
        return set(np.unique(across * self.blocks_shape[1] + along).tolist())

    def _owners(self, part: slice, axis: int) -> range:
        """Return the positions, along an axis, of the blocks that own a range of fine rows."""
        last = (self.grid.cells_x, self.grid.cells_y)[axis] - 1
        ends = (min(record // self.grid.factor, last) for record in (part.start, part.stop - 1))
        first, final = (cell // self.block_cells[axis] for cell in ends)
        return range(first, final + 1)

    @property
    def blocks_shape(self) -> tuple[int, int]:
        """Blocks to the east and to the north."""
        across, along = self.block_cells
        return math.ceil(self.grid.cells_x / across), math.ceil(self.grid.cells_y / along)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.prod(self.blocks_shape)

    @property
    def shard_shape(self) -> tuple[int, int, int]:
        """Shape of a shard: the fine rows of a full block, all outputs, up to a whole number of chunks."""
        factor, chunk = self.grid.factor, self._chunk_outputs
        outputs = math.ceil(self.outputs / chunk) * chunk
        return self.block_cells[0] * factor, self.block_cells[1] * factor, outputs

    @property
    def _chunk_outputs(self) -> int:
        return self.outputs if self.reach_km is None else min(self.outputs, _CHUNK_OUTPUTS)

    @property
    def chunk_shape(self) -> tuple[int, int, int]:
        """Shape of an inner chunk; its sides divide the shard's."""
        side_x, side_y, _ = self.shard_shape
        chunk_x, chunk_y, outputs = side_x, side_y, self._chunk_outputs
        most = _LOCAL_CHUNK_BYTES if outputs < self.outputs else _CHUNK_BYTES
        while chunk_x * chunk_y * outputs * FLOAT32 > most and chunk_x * chunk_y > 1:
            if chunk_x >= chunk_y:
                chunk_x = _next_divisor(side_x, chunk_x)
            else:
                chunk_y = _next_divisor(side_y, chunk_y)
        return chunk_x, chunk_y, outputs

    @property
    def seed_chunk_shape(self) -> tuple[int, int, int]:
        """Shape of a chunk of the seed arrays."""
        side = max(int(math.sqrt(_SEED_CHUNK_BYTES / (FLOAT64 * self.outputs))), 1)
        seeds_x, seeds_y = self.grid.seeds_shape
        return min(side, seeds_x), min(side, seeds_y), self.outputs

    @property
    def near_outputs(self) -> int:
        """How many outputs have more than the floor from some record of a full block, about."""
        return near_outputs(self.grid, self.outputs, self.block_cells, self.reach_km)

    @property
    def store_bytes(self) -> int:
        """Bytes of all stored probabilities before compression, of near outputs; skipped blocks have none."""
        skipped = sum(math.prod(self[index].owned_shape) for index in self.skipped)
        return (self.grid.records - skipped) * self.near_outputs * FLOAT32

    def peak_bytes(self, method: str) -> int:
        """Return the predicted peak memory of an extension task, in bytes.

        The corners' scores as they are read; then the closed block in float32, with slabs in float64 while it
        is computed, or with the copies for writing it. Operators that make scores need slabs of a column of
        cells; cell programs leave scores of the whole block, which are unpacked as they are read.

        Parameters
        ----------
        method
            The job's method of extension.
        """
        rows_x, rows_y = self[0].closed_shape  # no block is larger than the first
        block = rows_x * rows_y * self.outputs * FLOAT32
        slabs = _SLABS * rows_y * self.outputs * FLOAT64
        if method in (NOISE, WINDOWS):
            near = near_outputs(self.grid, self.outputs, self.block_cells, self.reach_km, _CROWDED)
            block = rows_x * rows_y * min(near + self._chunk_outputs, self.outputs) * FLOAT32
            return int(block * (1 + _LOCAL_WRITE_SHARE) + _TASK_OVERHEAD_BYTES)
        if method in (CELL_PROGRAMS, RECORDS):
            slabs += (_UNPACKED if method == CELL_PROGRAMS else _SCORES) * block
        elif method != "log-convex":
            columns = _OWN_COLUMNS if ":" in method else _COLUMNS
            slabs = columns * (self.grid.factor + 1) * rows_y * self.outputs * FLOAT64
        seed = math.prod(self.seed_chunk_shape) * FLOAT64
        return int(max(seed, block + max(_WRITE_SHARE * block, slabs)) + _TASK_OVERHEAD_BYTES)

    @property
    def first_stored(self) -> int:
        """Index of the first block that is stored."""
        return next(index for index in range(self.blocks) if index not in self.skipped)

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(self.blocks))

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < self.blocks:
            raise IndexError(f"block {index} is not in 0..{self.blocks - 1}")
        across, along = divmod(index, self.blocks_shape[1])
        cells, owned, closed = [], [], []
        factor, ends = self.grid.factor, (self.grid.cells_x, self.grid.cells_y)
        for position, size, end in zip((across, along), self.block_cells, ends, strict=True):
            first, last = position * size, min((position + 1) * size, end)
            cells.append(slice(first, last))
            owned.append(slice(first * factor, last * factor + int(last == end)))
            closed.append(slice(first * factor, last * factor + 1))
        neighbours = {}
        if across + 1 < self.blocks_shape[0]:
            neighbours["east"] = index + self.blocks_shape[1]
        if along + 1 < self.blocks_shape[1]:
            neighbours["north"] = index + 1
        return Block(index, cells[0], cells[1], owned[0], owned[1], closed[0], closed[1], neighbours)


def reach_of(method: str, loss: str, epsilon_per_km: float) -> float | None:
    """Return how far from a record outputs have more than the floor, in km, about; None: all have, anywhere.

    Parameters
    ----------
    method, loss
        The method of extension, and the kind of loss.
    epsilon_per_km
        ε, in 1/km.
    """
    if method not in (NOISE, WINDOWS, FITTING):
        return None
    # It may come to be programs; and where the loss is no distance, any output may be near.
    return math.inf if method == FITTING or loss == "file" else _NOISE_REACH / epsilon_per_km


def near_outputs(
    grid: Grid, outputs: int, cells: tuple[int, int], reach_km: float | None, crowded: float = 1.0
) -> int:
    """Return how many outputs lie within reach of a rectangle of source cells, about.

    Parameters
    ----------
    grid, outputs
        The grid, and K.
    cells
        Sides of the rectangle.
    reach_km
        See :class:`Plan`.
    crowded
        How many times as densely as on average they lie there.
    """
    if reach_km is None:
        return outputs
    share = crowded
    for side, every in zip(cells, (grid.cells_x, grid.cells_y), strict=True):
        share *= min((side + 2 * reach_km / grid.cell_km) / every, 1.0)
    return min(math.ceil(outputs * share), outputs)


def common(one: slice, other: slice) -> slice:
    """Return the intersection of two half-open ranges; if it is empty, it ends at or before its start."""
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def relative(part: slice, start: int) -> slice:
    """Return a half-open range counted from `start`."""
    return slice(part.start - start, part.stop - start)


def _shape(x: slice, y: slice) -> tuple[int, int]:
    return int(x.stop - x.start), int(y.stop - y.start)


def _next_divisor(side: int, below: int) -> int:
    return next(d for d in range(below - 1, 0, -1) if side % d == 0) if below > 1 else 1


def _choose_block_cells(grid: Grid, outputs: int) -> tuple[int, int]:
    cell_bytes = grid.factor**2 * outputs * FLOAT32
    total = cell_bytes * grid.source_cells
    target = min(_BLOCK_BYTES, max(total / _LEAST_BLOCKS, _LEAST_BLOCK_BYTES))
    cells = max(target / cell_bytes, 1.0)
    side = math.sqrt(cells)
    # Cut each axis into equal parts, so that the last block is not a sliver.
    parts_x = math.ceil(grid.cells_x / min(max(side, 1.0), grid.cells_x))
    block_x = math.ceil(grid.cells_x / parts_x)
    parts_y = math.ceil(grid.cells_y / min(max(cells / block_x, 1.0), grid.cells_y))
    return block_x, math.ceil(grid.cells_y / parts_y)
