"""Expected loss UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y), from the stored bytes, block by block."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.loss import LossColumn, loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import local_rows_of


def expected_loss_block(url: str, index: int) -> float:
    """Return the part of UL(M), in km, of the records that a block owns."""
    store = MechanismStore.open(url)
    return expected_loss(store, store.plan[index])


def expected_loss(store: MechanismStore, block: Block, rows: LocalRows | None = None) -> float:
    """Return the part of UL(M), in km, of the records that a block owns; see :func:`lines_of`."""
    total = 0.0
    for line in lines_of(store, block, rows):
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
        costs += np.einsum("xk,xl->kl", line.joint, line.column.loss_km)
    return costs


@dataclass(frozen=True)
class Line:
    """The records of one lattice column of a block that have a prior.

    Parameters
    ----------
    column
        Where they are, their prior and their losses.
    rows
        M as stored, of near and far outputs: rows sum to 1 but for rounding.
    """

    column: LossColumn
    rows: LocalRows

    @cached_property
    def _entries(self) -> NDArray[np.float64]:
        """M of the columns that rows have, float64 of shape (n, columns)."""
        return np.asarray(self.rows.entries[self.column.i, self.column.used], dtype=np.float64)

    @cached_property
    def _totals(self) -> NDArray[np.float64]:
        return np.asarray((self._entries * self.rows.counts).sum(axis=1))

    @cached_property
    def expected_km(self) -> NDArray[np.float64]:
        """ℓ(x) = Σ_y M(y|x) c(x, y), float64 of shape (n,), in km."""
        every, outputs = self.column.loss_km, self.rows.outputs
        losses = every
        if self.rows.copies > 1:  # the last column's losses are those of all that it stands for
            losses = every[:, outputs]
            losses[:, -1] = every.sum(axis=1) - losses[:, :-1].sum(axis=1)
        return np.asarray((self._entries * losses).sum(axis=1) / self._totals)

    @property
    def joint(self) -> NDArray[np.float64]:
        """π(x) M(y|x), float64 of shape (n, K)."""
        every = self.rows.columns_of(np.arange(self.rows.total_outputs))
        return np.asarray(self._entries[:, every] * (self.column.prior / self._totals)[:, None])

    def part_km(self) -> float:
        """Return the part of UL(M) of these records, in km."""
        return float((self.column.prior * self.expected_km).sum())


def lines_of(store: MechanismStore, block: Block, rows: LocalRows | None = None) -> Iterator[Line]:
    """Yield the records of a block that have a prior, column by column.

    Parameters
    ----------
    store, block
        The store, for prior and loss, and the block.
    rows
        Rows of the records that it owns; default: the stored ones, read only if one of these records has a
        prior.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    prior = np.asarray(store.read("prior", block.owned_x, block.owned_y), dtype=np.float64)
    for column in loss_columns(store, block.owned_x, block.owned_y, prior):
        if rows is None:
            rows = local_rows_of(store, block.owned_x, block.owned_y)
        yield Line(column, rows)


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
