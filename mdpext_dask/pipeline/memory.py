"""What a job needs of memory, on workers and on the client, before any of it is taken."""

import math

import psutil

from mdpext_dask.compute.dask_settings import PAUSE
from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.baselines.fine_noise import cells_of, posterior_reach
from mdpext_dask.extend.noise_patches import matrix_numbers, side_of
from mdpext_dask.extend.noise_remap import AT_A_TIME, BLOCK, MOST_MOMENTS, TILE
from mdpext_dask.job.sections import CELL_PROGRAMS, NOISE, RECORDS, SEEDLESS, WINDOWS, LossSection
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.windows.sizes import window_program
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.outputs import output_count
from mdpext_dask.seed.record_program import predicted_bytes, record_reach
from mdpext_dask.store.blocks import FLOAT32, FLOAT64, Plan
from mdpext_dask.store.loss import CACHE_BYTES
from mdpext_dask.store.mechanism_store import plan_of

# A trial with certificate vectors needs up to so many times what extending a block does.
_TRIAL_PEAK = 15
# What the rows of a refining program need for one seed and output, measured at 2,401 x 100.
_REFINING_BYTES = 7_000
# What a task on the largest box of cell programs needs, measured.
_CELL_BYTES = 160 * 2**20
# Outputs lie up to so many times as densely as on average, and those that are candidates for a tile of noise
# cells up to so far from it, times ε.
_CROWDED, _BESIDE = 5, 4.0
# Arrays over all records that the client holds while it makes the prior, outside a region or not, and writes
# it: two, measured, and flags.
_CLIENT_ARRAYS = 3
# What a client has loaded, with a scheduler of its own, before it does anything; measured 190 to 230 MB.
_CLIENT_BASE = 220 * 2**20
# And a worker, measured 135 MB; some more when it has run a task.
_WORKER_BASE = 160 * 2**20
# A receipt as an object in the store, without its digests; hex digits of the digest of a shared row; and
# what it takes in memory, as often as in the store.
_RECEIPT_BYTES, ROW_DIGITS, _RECEIPT_IN_MEMORY = 600, 16, 2.5


def check_memory(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> None:
    """Refuse a job whose arrays cannot fit into this machine or a worker, before any of them is made.

    Raises
    ------
    SpecError
        With what is needed and what there is.
    """
    grid = geometry.grid
    plan = plan_of(spec, grid, output_count(spec, geometry), geometry.kept)
    smaller = "larger cells or less refinement"
    needed = [(_CLIENT_ARRAYS * grid.records * FLOAT64, "arrays over all records", smaller)]
    if isinstance(geometry, FileGeometry):
        needed.append((geometry.problem.loss_bytes, "the loss file", smaller))
    noise = spec.extension.method in (NOISE, WINDOWS)
    records = spec.extension.method == RECORDS
    certified = spec.privacy.budget == "certified" and spec.extension.method not in SEEDLESS
    peak = plan.peak_bytes(spec.extension.method) * (_TRIAL_PEAK if certified else 1)
    if spec.extension.method == CELL_PROGRAMS:
        peak += _CELL_BYTES
    elif noise:
        peak += noise_table_bytes(spec, geometry.grid)
    program = noise_bytes(spec, geometry) if noise else seed_bytes(plan, spec)
    if certified and spec.seed.refine_rounds:
        program += _REFINING_BYTES * grid.seeds * plan.outputs
    if spec.cluster.memory_gib is not None:
        _check_worker(spec.cluster.memory_gib, table_bytes(spec.loss, geometry), peak, program)
    if spec.cluster.kind in ("inline", "local"):
        workers = (spec.cluster.workers or 1) if spec.cluster.kind == "local" else 1
        # A block is one source cell at least.
        way_out = "smaller cells with less refinement, smaller store.block_cells or fewer workers"
        needed.append((workers * (peak + table_bytes(spec.loss, geometry)), "the tasks", way_out))
        for_what = ("the remap of noise", "fewer outputs") if noise else ("the seed program", "larger cells")
        if records:
            for_what = "the program over all records", "fewer records or outputs"
        # One worker solves it; but every one a window.
        solvers = workers if spec.extension.method == WINDOWS else 1
        needed.append((solvers * program, *for_what))
    total, available = sum(size for size, *_ in needed), psutil.virtual_memory().total
    if total > available:
        most, what, way_out = max(needed)
        raise SpecError(
            f"domain: {grid.records:,} records x {plan.outputs} outputs need {total / 2**30:,.1f} GiB of "
            f"memory here, {most / 2**30:,.1f} GiB of it for {what}, but there are "
            f"{available / 2**30:,.1f} GiB; use {way_out}"
        )


def _check_worker(gib: float, table: int, peak: int, program: int) -> None:
    """Refuse a job of which a worker with so many GiB cannot hold a task or the seed program.

    A worker pauses when what is left may not do for another task, at :data:`dask_settings.PAUSE` of what it
    may use; what needs more than that by itself would never be done.
    """
    needed = _WORKER_BASE + table + max(peak, program)
    if needed > PAUSE * gib * 2**30:
        what, way_out = "a task", "or smaller store.block_cells"
        if program > peak:
            what, way_out = "its program", "or larger cells"
        raise SpecError(
            f"cluster.memory_gib: a worker needs {needed / 2**30:,.2f} GiB with {what}, but pauses at "
            f"{PAUSE:.0%} of {gib:g} GiB; give it more, {way_out}"
        )


def worker_bytes(spec: JobSpec, plan: Plan, method: str) -> int:
    """Return what a worker holds with the task of extending a block, or the program of a window.

    Parameters
    ----------
    spec
        The job.
    plan, method
        How the grid is cut into blocks, and how they are extended.
    """
    window = predicted_bytes(*window_program(spec, plan.grid, plan.outputs)) if method == WINDOWS else 0
    return _WORKER_BASE + max(plan.peak_bytes(method), window)


def check_worker(needed: int, limit: int | None) -> None:
    """Refuse workers that cannot hold what they need.

    Parameters
    ----------
    needed
        See :func:`worker_bytes`.
    limit
        What the worker with the least may use, in bytes; None for no limit.

    Raises
    ------
    SpecError
        With what is needed and what there is.
    """
    if limit is not None and needed > PAUSE * limit:
        raise SpecError(
            f"cluster: a worker needs {needed / 2**30:,.2f} GiB with a task, but one of them pauses at "
            f"{PAUSE:.0%} of {limit / 2**30:,.2f} GiB; give workers more, or use smaller store.block_cells"
        )


def table_bytes(loss: LossSection, geometry: RoadGeometry | FileGeometry) -> int:
    """Return what a worker holds of the loss: travel tables, twice while they are read; a part of a table."""
    if isinstance(geometry, FileGeometry):
        return min(CACHE_BYTES, geometry.problem.loss_bytes)
    tasks = loss.tasks if loss.kind == "travel" else 0
    return 2 * geometry.network.nodes * (tasks * FLOAT32 + 2 * FLOAT64)


def client_bytes(spec: JobSpec, geometry: RoadGeometry | FileGeometry, plan: Plan) -> int:
    """Return about what the client holds at most: arrays over records, seed cost or noise, or receipts."""
    prior = _CLIENT_ARRAYS * geometry.grid.records * FLOAT64
    if isinstance(geometry, FileGeometry):
        prior += geometry.problem.loss_bytes
    # Corners of all cells, the cost that is assembled from them, and its digest.
    cost = (2 * 4 * geometry.grid.source_cells + geometry.grid.seeds) * plan.outputs * FLOAT64
    if spec.extension.method in (NOISE, WINDOWS):
        cost = noise_table_bytes(spec, geometry.grid)
    receipts = int(receipt_bytes(plan) * _RECEIPT_IN_MEMORY)
    table = table_bytes(spec.loss, geometry) if isinstance(geometry, RoadGeometry) else 0
    return _CLIENT_BASE + table + max(prior, cost, receipts)


def receipt_bytes(plan: Plan) -> int:
    """Return about what all receipts take in the store; most of it digests of rows that blocks share."""
    blocks_x, blocks_y = plan.blocks_shape
    records_x, records_y = plan.grid.shape
    shared = 2 * ((blocks_x - 1) * records_y + (blocks_y - 1) * records_x)
    return plan.blocks * _RECEIPT_BYTES + ROW_DIGITS * shared


def noise_places(spec: JobSpec, grid: Grid, nodes: int) -> int:
    """Return about how many noise cells hold records with a prior; `nodes` is 0 without a road network.

    Nodes leave many cells empty, and share others: half of them count, and a quarter of the cells (measured:
    2,323 of 4,197 in Manhattan; of 43,160 in Rome, 11,356 of 63,865 cells and 23,295 of 254,449).
    """
    lattice = cells_of(grid, spec.privacy.epsilon_per_km)
    inside = math.prod(min(n - 2 * lattice.reach, m) for n, m in zip(lattice.shape, grid.shape, strict=True))
    if not nodes or spec.prior.kind in ("uniform", "raster"):
        return inside
    return min(-(-inside // 4), -(-nodes // 2))


def noise_outputs(spec: JobSpec, grid: Grid, outputs: int, within_km: float) -> float:
    """Return about how many outputs lie in a square of this side; all, of a loss that is no distance."""
    if spec.loss.kind == "file":
        return outputs
    return outputs * min(1.0, _CROWDED * within_km**2 / (grid.box.width_km * grid.box.height_km))


def noise_tile(spec: JobSpec, grid: Grid, nodes: int, outputs: int) -> tuple[float, float]:
    """Return about how many places and outputs there are the losses of in a tile of noise cells."""
    epsilon = spec.privacy.epsilon_per_km
    lattice = cells_of(grid, epsilon)
    window = (TILE + 2 * posterior_reach(lattice, epsilon)) / lattice.per_record
    places = min(noise_places(spec, grid, nodes), math.prod(min(window, side) for side in grid.shape))
    return places, noise_outputs(spec, grid, outputs, TILE * lattice.cell_km + 2 * _BESIDE / epsilon)


def noise_bytes(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> int:
    """Return about what a worker takes to choose the outputs of a tile of noise, or to solve a window."""
    grid = geometry.grid
    nodes = geometry.network.nodes if isinstance(geometry, RoadGeometry) else 0
    places, outputs = noise_tile(spec, grid, nodes, output_count(spec, geometry))
    # The losses, twice while there come to be more; what is computed at a time; a block's weights and losses.
    losses = places * outputs
    if spec.loss.kind != "file":  # which is read as a whole
        losses = min(losses, MOST_MOMENTS)
    held = 2.5 * losses + 4 * AT_A_TIME + 2 * places * BLOCK**2
    window = 0
    if spec.extension.method == WINDOWS:
        window = predicted_bytes(*window_program(spec, grid, output_count(spec, geometry)))
    return max(int(FLOAT64 * held), window) + noise_table_bytes(spec, grid)


def noise_table_bytes(spec: JobSpec, grid: Grid) -> int:
    """Return what a worker holds of noise: outputs of cells, masses as they are, above τ, and of a patch."""
    lattice = cells_of(grid, spec.privacy.epsilon_per_km)
    masses = lattice.per_cell**2 * (2 * lattice.reach + 1) ** 2
    return FLOAT64 * (math.prod(lattice.shape) + 3 * masses + matrix_numbers(lattice, side_of(lattice)))


def seed_bytes(plan: Plan, spec: JobSpec) -> int:
    """Return what solving the seed takes: factors of all outputs, about sixty arrays (J, K), three (J, J)."""
    if spec.extension.method == RECORDS:
        reach = record_reach(plan.grid.shape, spec.domain.metric_p, plan.outputs)
        return predicted_bytes(plan.grid.shape, plan.outputs, reach)
    seeds, entries = plan.grid.seeds, plan.grid.seeds * plan.outputs
    return FLOAT64 * (2 * entries * min(plan.grid.seeds_shape) + 60 * entries + 3 * seeds**2)
