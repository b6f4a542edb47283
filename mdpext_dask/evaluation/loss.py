"""Expected loss UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y), from the stored bytes, block by block."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of


def expected_loss_block(url: str, index: int) -> float:
    """Return the part of UL(M), in km, of the records that a block owns."""
    store = MechanismStore.open(url)
    plan = store.plan
    block = plan[index]
    if index in plan.skipped and not store.read("prior", block.owned_x, block.owned_y).any():
        return 0.0
    return expected_loss(store, block, rows_of(store, block.owned_x, block.owned_y))


def expected_loss(store: MechanismStore, block: Block, probability: NDArray[np.float32]) -> float:
    """Return the part of UL(M), in km, of the records that a block owns, for given rows.

    Parameters
    ----------
    store
        The store, for prior and loss.
    block
        The block.
    probability
        M(y|x) of its owned records, float32 of shape (rows east, rows north, K).
    """
    prior = store.read("prior", block.owned_x, block.owned_y)
    total = 0.0
    for line in lines_of(store, block, probability, prior):
        total += line.part_km()  # sum() would round in another way, from Python 3.12 on
    return total


@dataclass(frozen=True)
class Line:
    """The records of one lattice column of a block that have a prior.

    Parameters
    ----------
    i
        Which column, from the block's first.
    used
        Which of its n records, of shape (n,).
    records_km
        Where they are, float64 of shape (n, 2), in km.
    prior
        π, float64 of shape (n,).
    rows
        M as stored, float64 of shape (n, K): rows sum to 1 but for rounding.
    totals
        What they sum to, float64 of shape (n,).
    loss_km
        c of every output, float64 of shape (n, K), in km.
    expected_km
        ℓ(x) = Σ_y M(y|x) c(x, y), float64 of shape (n,), in km.
    """

    i: int
    used: NDArray[np.intp]
    records_km: NDArray[np.float64]
    prior: NDArray[np.float64]
    rows: NDArray[np.float64]
    totals: NDArray[np.float64]
    loss_km: NDArray[np.float64]
    expected_km: NDArray[np.float64]

    def part_km(self) -> float:
        """Return the part of UL(M) of these records, in km."""
        return float((self.prior * self.expected_km).sum())


def lines_of(
    store: MechanismStore,
    block: Block,
    probability: NDArray[np.float32],
    prior: NDArray[np.float64],
) -> Iterator[Line]:
    """Yield the records of a block that have a prior, column by column.

    Parameters
    ----------
    store, block, probability
        See :func:`expected_loss`.
    prior
        π of its owned records, float64 of shape (rows east, rows north).
    """
    if not prior.any():
        return
    loss = cached_loss(store.url, store.problem_sha256)
    x, y = store.grid.x_km()[block.owned_x], store.grid.y_km()[block.owned_y]
    for i in np.flatnonzero(prior.any(axis=1)):
        used = np.flatnonzero(prior[i])
        records = np.stack([np.full(len(used), x[i]), y[used]], axis=-1)
        rows = probability[i, used].astype(np.float64)
        totals, costs = rows.sum(axis=1), loss.rows(records)
        yield Line(
            int(i), used, records, prior[i, used], rows, totals, costs, (rows * costs).sum(axis=1) / totals
        )


def finite(loss_km: float, store: MechanismStore) -> float:
    """Return UL(M), or a part of it, if it is a number.

    Raises
    ------
    StoreError
        If it is not, which only damage can be the reason of.
    """
    if not math.isfinite(loss_km):
        raise StoreError(
            f"{store.url}: the rows, the prior or the tables of the loss are damaged; use --overwrite"
        )
    return loss_km
