"""What each output would cost if it were reported as another, from the stored bytes, block by block."""

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of


def remap_costs_block(url: str, index: int) -> NDArray[np.float64]:
    """Return the part of G[y, y'] = Σ_x π(x) M(y|x) c(x, y'), of the records that a block owns.

    Every sum runs in an order that depends on the block alone.

    Parameters
    ----------
    url, index
        Which block of which store.

    Returns
    -------
    float64 of shape (K, K), in km.

    Raises
    ------
    StoreError
        If rows or the tables of the loss cannot be read.
    """
    store = MechanismStore.open(url)
    block, outputs = store.plan[index], store.outputs
    costs = np.zeros((outputs, outputs))
    prior = store.read("prior", block.owned_x, block.owned_y)
    if not prior.any():
        return costs
    probability = rows_of(store, block.owned_x, block.owned_y)
    loss = cached_loss(store.url, store.problem_sha256)
    x, y = store.grid.x_km()[block.owned_x], store.grid.y_km()[block.owned_y]
    for i in np.flatnonzero(prior.any(axis=1)):
        used = np.flatnonzero(prior[i])
        rows = probability[i, used].astype(np.float64)
        rows *= (prior[i, used] / rows.sum(axis=1))[:, None]
        records = np.stack([np.full(len(used), x[i]), y[used]], axis=-1)
        # Not a product of matrices, which libraries share out among threads in ways of their own.
        costs += np.einsum("xk,xl->kl", rows, loss.rows(records))
    return costs
