"""Expected loss UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y), from the stored bytes, block by block."""

import numpy as np

from mdpext_dask.store import MechanismStore
from mdpext_dask.tasks import cached_loss


def expected_loss_block(url: str, index: int) -> float:
    """Return the part of UL(M), in km, of the records that a block owns."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    prior = store.read("prior", block.owned_x, block.owned_y)
    if not prior.any():
        return 0.0
    loss = cached_loss(url, store.problem_sha256)
    x, y = store.read("x", block.owned_x), store.read("y", block.owned_y)
    probability = store.read_probability(block.owned_x, block.owned_y)
    total = 0.0
    for i in np.flatnonzero(prior.any(axis=1)):
        used = np.flatnonzero(prior[i])
        records = np.stack([np.full(len(used), x[i]), y[used]], axis=-1)
        rows = probability[i, used].astype(np.float64)
        expected = (rows * loss.rows(records)).sum(axis=1) / rows.sum(axis=1)
        total += float((prior[i, used] * expected).sum())
    return total
