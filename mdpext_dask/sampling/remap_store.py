"""The optimal remap of a finished store, computed from its bytes and kept beside them."""

import math
from typing import Any

import numpy as np

from mdpext_dask.compute.executor import is_small, open_for_reader
from mdpext_dask.compute.stages import at_work
from mdpext_dask.errors import StoreError
from mdpext_dask.evaluation.loss import remap_costs_block
from mdpext_dask.events import Observer, silent
from mdpext_dask.sampling.mechanism import check_finished
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import Remap, best_remap, content_of, has_remap, remove_remap, write_remap


def remap_store(
    url: str, *, workers: int | None = None, scheduler: str | None = None, observer: Observer = silent
) -> dict[str, Any]:
    """Compute the optimal remap of a finished store's outputs and leave it in the store.

    Nothing that is certified changes. From then on the store is used with it: reports drawn from the store
    and from cities exported from it, plots of rows and the report page are of what the remap reports, unless
    they are asked to leave it out.

    Parameters
    ----------
    url
        Local path or URL of the store.
    workers
        Number of local processes, 1 for this process alone; default: this process for a small store, else one
        for each processor. The store has no say in it.
    scheduler
        Address of a Dask scheduler to use instead.
    observer
        Is told of progress.

    Returns
    -------
    Expected losses before and after in km, how many outputs are moved, and how many are still reported.

    Raises
    ------
    IncompleteStoreError
        If blocks or the certificate are missing.
    GuaranteeViolation
        If the store has been refused.
    StoreError
        If its problem is damaged, its bytes are not those that were certified, or it cannot be written.
    """
    store = MechanismStore.open(url, mode="r+")
    check_finished(store)
    content = content_of(store)
    blocks = store.plan.blocks
    costs = np.zeros((store.outputs, store.outputs))
    with (
        at_work(store.url, observer) as stages,
        open_for_reader(workers, scheduler, small=is_small(store)) as executor,
        stages.stage("remap", blocks, "blocks"),
    ):
        arguments = [(store.url, index) for index in range(blocks)]
        # In the order of the blocks, so that the sums are the same bits whoever made the parts.
        for part in stages.gather(executor, "remap", remap_costs_block, arguments):
            costs += part
    table, own = best_remap(costs), np.arange(len(costs))
    loss_km = float(costs[own, own].sum())
    remapped_loss_km = float(costs[own, table].sum())
    if not (np.isfinite(costs).all() and math.isfinite(loss_km)):
        raise StoreError(f"{url}: the prior or the tables of the loss are damaged; use --overwrite")
    reported = np.unique(table)
    remap = Remap(
        content_sha256=content,
        output=table.tolist(),
        loss_km=loss_km,
        remapped_loss_km=remapped_loss_km,
        no_longer_reported=np.setdiff1d(own, reported).tolist(),
    )
    write_remap(store, remap)
    return {
        "store": store.url,
        "loss_km": loss_km,
        "remapped_loss_km": remapped_loss_km,
        "moved": int((table != own).sum()),
        "outputs_reported": len(reported),
        "seconds": stages.total(),
    }


def unmap_store(url: str) -> dict[str, Any]:
    """Use a store without a remap again: delete its table; nothing else changes.

    Parameters
    ----------
    url
        Local path or URL of the store.

    Returns
    -------
    Whether there was a remap.

    Raises
    ------
    StoreError
        If there is no such store, or it cannot be written.
    """
    store = MechanismStore.open(url, mode="r+")
    removed = has_remap(store)
    if removed:
        remove_remap(store)
    return {"store": store.url, "removed": removed}
