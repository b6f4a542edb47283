"""What a worker runs to build a store: plain functions of a store URL and a block index.

A task reads what it needs from the store and answers with little: nothing the size of the mechanism travels
through the scheduler, and no task needs another task's output.
"""

import os
import socket
import time
import tracemalloc

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.problem.loss import corner_costs
from mdpext_dask.seed.budget import axis_budgets
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.seed.model import SeedMechanism, SeedProblem
from mdpext_dask.seed.solve import solve_seed_problem
from mdpext_dask.store import objects, receipts
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.integrity import damage_against
from mdpext_dask.store.local_chunks import encode_block
from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import COMPLETE, MechanismStore
from mdpext_dask.store.receipts import Receipt
from mdpext_dask.store.rows import extended_block

# Reading a receipt once more costs nothing beside a block that has taken so long.
_LONG_SECONDS = 1.0


def seed_cost_block(url: str, index: int) -> NDArray[np.float64]:
    """Return a block's part of the seed cost; see :func:`mdpext_dask.problem.loss.corner_costs`."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    prior = store.read("prior", block.owned_x, block.owned_y)
    if not prior.any():  # outside the region: no loss need be worked out to be told that it costs nothing
        cells = (b.stop - b.start for b in (block.cells_x, block.cells_y))
        return np.zeros((*cells, 2, 2, store.outputs))
    return corner_costs(
        grid=store.grid,
        loss=cached_loss(url, store.problem_sha256),
        prior=prior,
        cells=(block.cells_x, block.cells_y),
    )


def solve_seed(
    url: str,
    beta: tuple[float, float] | None,
    gap: float,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> SeedMechanism:
    """Solve the seed LP of a store.

    Parameters
    ----------
    url
        The store.
    beta
        Budgets of both axes, in 1/km; None for the budgets per edge and output that are in the store.
    gap
        Relative duality gap to aim for.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.
    """
    store = MechanismStore.open(url)
    grid, job = store.grid, store.attributes["job"]
    cost = store.read_seed_cost()
    floor = float(job["privacy"]["min_probability"])
    if beta is None:
        budgets = store.read("seed/budget_x"), store.read("seed/budget_y")
    else:
        budgets = axis_budgets(grid, beta)
    problem = SeedProblem(cost, grid.seeds_shape, *budgets, floor)
    return solve_seed_problem(problem, job["seed"]["solver"], gap, threads=threads, inverse_sums=inverse_sums)


def extend_block(url: str, index: int) -> None:
    """Extend a block from the seed, write the rows it owns, and leave a receipt.

    A block whose receipt is there and whose shards still have the bytes it names is not done again. Of a
    block that the plan skips nothing is written but the receipt, for neighbours and later extensions to be
    compared with.

    Raises
    ------
    StoreError
        If the store is complete, so that its certificate would no longer be about its bytes.
    """
    started = time.perf_counter()
    store = MechanismStore.open(url, mode="r+")
    seed_sha256 = store.seed_sha256()
    plan = store.plan
    block, skipped = plan[index], index in plan.skipped
    if _is_done(store, block, seed_sha256):
        return

    # All full blocks are alike; tracing every allocation is slow, so the first stands for them.
    measure = index == plan.first_stored and not tracemalloc.is_tracing()
    if measure:
        tracemalloc.start()
    try:
        fine = extended_block(store, block)
        encoded = {} if skipped else encode_block(store, block, fine)
        # A worker may be stopped, given up, and go on when others have long done its work. What is left to do
        # from here on takes a moment, unless it is stopped in that very moment.
        stopped = time.perf_counter() - started > _LONG_SECONDS
        if stopped and _is_done(MechanismStore.open(url), block, seed_sha256):
            return
        if skipped:
            extra = [key for key in store.shard_keys(block) if objects.exists(store.objects, key)]
            objects.delete_keys(store.objects, extra)
        shards = store.write_shards(encoded)
        peak = tracemalloc.get_traced_memory()[1] if measure else None
    finally:
        if measure:
            tracemalloc.stop()
    receipt = Receipt(
        block=index,
        seed_sha256=seed_sha256,
        shards=shards,
        sides=receipts.digest_sides(fine, block),
        fallbacks=0,
        seconds=time.perf_counter() - started,
        peak_bytes=peak,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        rows_sha256=receipts.rows_sha256(fine, block) if skipped else None,
    )
    receipts.write_receipt(store.objects, receipt)


def _is_done(store: MechanismStore, block: Block, seed_sha256: str) -> bool:
    """Whether a block has a receipt of this seed, and the bytes that it names.

    Raises
    ------
    StoreError
        If it has not and may not be written: the store is complete, or has another seed by now.
    """
    done = receipts.read_receipt(store.objects, block.index, store.plan.skipped)
    damage = damage_against(store, block, done)
    if store.seed_sha256() != seed_sha256:
        raise StoreError(f"{store.url}: the seed has changed; is another run at work on this store?")
    if done is not None and not damage and done.seed_sha256 == seed_sha256:
        return True
    if store.state == COMPLETE:
        raise StoreError(
            f"{store.url}: block {block.index} has changed although the store is complete; audit it, then "
            "run the job again"
        )
    return False
