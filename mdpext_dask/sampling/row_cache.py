"""Drawing from the rows of a store: for one record at once, and for many in the order of their chunks."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick_rows
from mdpext_dask.runtime.location_sampler import Numbers
from mdpext_dask.store import objects
from mdpext_dask.store.blocks import FLOAT32
from mdpext_dask.store.mechanism_store import ROOT_KEY, MechanismStore
from mdpext_dask.store.rows import rows_at, rows_of

# Chunks of rows that are kept for single draws, in bytes, and at least.
_CACHE_BYTES, _LEAST_CHUNKS = 64 * 2**20, 4
# Weights that are looked up together; bounds the memory of a batch.
_BATCH_ELEMENTS = 4_000_000
# What a store says of itself that is another once it is another store, or none that is finished.
_IDENTITY = ("state", "fingerprint", "chunk_hashes")


def require_same(store: MechanismStore) -> None:
    """Refuse rows that have just been read if the store is not, or no longer, the one that was opened.

    Whoever replaces a store says first that it is not finished, and last that it is: if it says now what it
    said when it was opened, then rows that were read before are of the store that was certified.

    Raises
    ------
    StoreError
        If it has been replaced, refused or deleted since it was opened, or is being worked on.
    """
    document = objects.get_json(store.objects, ROOT_KEY)
    now = document.get("attributes") if isinstance(document, Mapping) else None
    then = store.attributes
    if not isinstance(now, Mapping) or any(now.get(key) != then.get(key) for key in _IDENTITY):
        raise StoreError(
            f"{store.url}: is not the store any more that was opened: it has been replaced, refused or "
            "deleted, or is being worked on; open it again"
        )


class RowCache:
    """Rows of single records; the chunks that they lie in are kept, those asked for last.

    What has been read stays as it was, whatever happens to the store; nothing is read of another that is put
    in its place. Threads may share one, and child processes.

    Parameters
    ----------
    store
        The store, with its seed.
    """

    def __init__(self, store: MechanismStore) -> None:
        self._store = store
        self._shape = store.grid.shape
        self._side_x, self._side_y, outputs = store.plan.chunk_shape
        chunks = _CACHE_BYTES // (self._side_x * self._side_y * outputs * FLOAT32)
        self._chunk = lru_cache(maxsize=max(chunks, _LEAST_CHUNKS))(self._read_chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCache, (self._store,)

    def cumulative(self, i: int, j: int) -> NDArray[np.uint64]:
        """Return the cumulative weights of the record (i, j), uint64 of shape (K,).

        Raises
        ------
        StoreError
            If its chunk cannot be read; see :func:`mdpext_dask.store.rows.rows_of` and :func:`require_same`.
        GuaranteeViolation
            If the row is damaged.
        """
        across, within_x = divmod(i, self._side_x)
        along, within_y = divmod(j, self._side_y)
        return cumulative_weights(self._chunk(across, along)[within_x, within_y])

    def _read_chunk(self, across: int, along: int) -> NDArray[np.float32]:
        left, lower = across * self._side_x, along * self._side_y
        rows = rows_of(
            self._store,
            slice(left, min(left + self._side_x, self._shape[0])),
            slice(lower, min(lower + self._side_y, self._shape[1])),
        )
        require_same(self._store)
        return rows


def draw_many(store: MechanismStore, records: NDArray[np.int64], numbers: Numbers) -> NDArray[np.intp]:
    """Draw one output for each of many records, every row looked up once, and every chunk about once.

    Parameters
    ----------
    store
        The store, with its seed.
    records
        Flat indices of the records, int64 of shape (n,).
    numbers
        What is compared with the cumulative weights.

    Returns
    -------
    Output numbers, shape (n,).

    Raises
    ------
    StoreError
        If rows cannot be read; see :func:`mdpext_dask.store.rows.rows_at` and :func:`require_same`.
    GuaranteeViolation
        If a row is damaged.
    """
    outputs = np.empty(len(records), dtype=np.intp)
    distinct, which = np.unique(records, return_inverse=True)
    i, j = np.divmod(distinct, store.grid.shape[1])
    side_x, side_y, _ = store.plan.chunk_shape
    order = np.lexsort((j // side_y, i // side_x))
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    # Draws in the order of the chunks of their rows.
    places = place[which]
    draws = np.argsort(places)
    places = places[draws]
    step = max(_BATCH_ELEMENTS // store.outputs, 1)
    for first in range(0, len(order), step):
        rows = order[first : first + step]
        cumulative = cumulative_weights(rows_at(store, i[rows], j[rows]))
        start, end = np.searchsorted(places, (first, first + len(rows)))
        part, row = draws[start:end], places[start:end] - first
        outputs[part] = pick_rows(cumulative, row, numbers(part, cumulative[row, -1]))
    # Nothing leaves before; once for all of them, as what was replaced is replaced for good.
    require_same(store)
    return outputs
