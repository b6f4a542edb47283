"""Expected loss UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y), from the stored bytes, block by block."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.loss import loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of


def expected_loss_block(url: str, index: int) -> float:
    """Return the part of UL(M), in km, of the records that a block owns."""
    store = MechanismStore.open(url)
    return expected_loss(store, store.plan[index])


def expected_loss(
    store: MechanismStore, block: Block, probability: NDArray[np.float32] | None = None
) -> float:
    """Return the part of UL(M), in km, of the records that a block owns; see :func:`lines_of`."""
    total = 0.0
    for line in lines_of(store, block, probability):
        total += line.part_km()  # sum() would round in another way, from Python 3.12 on
    return total


def remap_costs_block(url: str, index: int) -> NDArray[np.float64]:
    """Return the part of G[y, y'] = Σ_x π(x) M(y|x) c(x, y') of the records that a block owns.

    Every sum runs in an order that depends on the block alone.

    Returns
    -------
    float64 of shape (K, K), in km.

    Raises
    ------
    StoreError
        If rows or the tables of the loss cannot be read.
    """
    store = MechanismStore.open(url)
    costs = np.zeros((store.outputs, store.outputs))
    for line in lines_of(store, store.plan[index]):
        # Not a product of matrices, which libraries share out among threads in ways of their own.
        costs += np.einsum("xk,xl->kl", line.joint, line.loss_km)
    return costs


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
    loss_km
        c of every output, float64 of shape (n, K), in km.
    """

    i: int
    used: NDArray[np.intp]
    records_km: NDArray[np.float64]
    prior: NDArray[np.float64]
    rows: NDArray[np.float64]
    loss_km: NDArray[np.float64]

    @cached_property
    def _totals(self) -> NDArray[np.float64]:
        return np.asarray(self.rows.sum(axis=1))

    @cached_property
    def expected_km(self) -> NDArray[np.float64]:
        """ℓ(x) = Σ_y M(y|x) c(x, y), float64 of shape (n,), in km."""
        return np.asarray((self.rows * self.loss_km).sum(axis=1) / self._totals)

    @property
    def joint(self) -> NDArray[np.float64]:
        """π(x) M(y|x), float64 of shape (n, K)."""
        return np.asarray(self.rows * (self.prior / self._totals)[:, None])

    def part_km(self) -> float:
        """Return the part of UL(M) of these records, in km."""
        return float((self.prior * self.expected_km).sum())


def lines_of(
    store: MechanismStore, block: Block, probability: NDArray[np.float32] | None = None
) -> Iterator[Line]:
    """Yield the records of a block that have a prior, column by column.

    Parameters
    ----------
    store, block
        The store, for prior and loss, and the block.
    probability
        M(y|x) of the records that it owns, float32 of shape (rows east, rows north, K); default: the stored
        rows, which are read only if one of these records has a prior.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    prior = np.asarray(store.read("prior", block.owned_x, block.owned_y), dtype=np.float64)
    for column in loss_columns(store, block.owned_x, block.owned_y, prior):
        if probability is None:
            probability = rows_of(store, block.owned_x, block.owned_y)
        rows = probability[column.i, column.used].astype(np.float64)
        yield Line(
            column.i, column.used, column.records_km, prior[column.i, column.used], rows, column.loss_km
        )


def finite(loss_km: float, store: MechanismStore) -> float:
    """Return UL(M), or a part of it, if it is finite.

    Raises
    ------
    StoreError
        If it is not, which only damage can cause.
    """
    if not math.isfinite(loss_km):
        raise StoreError(
            f"{store.url}: the rows, the prior or the tables of the loss are damaged; use --overwrite"
        )
    return loss_km
