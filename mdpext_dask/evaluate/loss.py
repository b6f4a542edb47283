"""Expected loss UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y), from the stored bytes, block by block."""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.partition import Block
from mdpext_dask.rows import rows_of
from mdpext_dask.store import MechanismStore
from mdpext_dask.tasks import cached_loss


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
    if not prior.any():
        return 0.0
    loss = cached_loss(store.url, store.problem_sha256)
    x, y = store.grid.x_km()[block.owned_x], store.grid.y_km()[block.owned_y]
    total = 0.0
    for i in np.flatnonzero(prior.any(axis=1)):
        used = np.flatnonzero(prior[i])
        records = np.stack([np.full(len(used), x[i]), y[used]], axis=-1)
        rows = probability[i, used].astype(np.float64)
        expected = (rows * loss.rows(records)).sum(axis=1) / rows.sum(axis=1)
        total += float((prior[i, used] * expected).sum())
    return total
