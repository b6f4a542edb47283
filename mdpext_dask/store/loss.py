"""The loss of a store's problem, as tasks read it."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.problem.loss import EuclideanLoss, Loss, TableLoss, TravelLoss
from mdpext_dask.store import schema
from mdpext_dask.store.mechanism_store import DAMAGED_CONTENT, MechanismStore

_TABLE = "problem/loss"
# Cache of a loss table, in bytes a process, so that trials of the same block do not read it again.
CACHE_BYTES = 32 * 2**20


class StoredTable:
    """The loss table of a store, read chunk by chunk when it is needed, never as a whole.

    Parameters
    ----------
    store
        A store whose problem has one.
    """

    def __init__(self, store: MechanismStore) -> None:
        self._store = store
        array = store.array(_TABLE)
        self.shape: tuple[int, ...] = array.shape
        self._step = array.chunks[1]
        kept = max(CACHE_BYTES // (self._step * self.shape[2] * array.dtype.itemsize), 1)
        self._chunk = lru_cache(maxsize=kept)(self._read_chunk)

    def _read_chunk(self, i: int, position: int) -> NDArray[Any]:
        first = position * self._step
        return np.asarray(self._store.read(_TABLE, slice(i, i + 1), slice(first, first + self._step))[0])

    def __getitem__(self, index: tuple[int, slice]) -> NDArray[Any]:
        """Return the losses of consecutive records in km, of shape (records, K).

        Raises
        ------
        StoreError
            If a chunk is lost or damaged.
        """
        i, rows = index
        first, last = rows.start // self._step, (rows.stop - 1) // self._step
        part = np.concatenate([self._chunk(i, position) for position in range(first, last + 1)])
        part = part[rows.start - first * self._step : rows.stop - first * self._step]
        if not np.isfinite(part).all():
            raise StoreError(f"{self._store.url}: {_TABLE} is damaged; use --overwrite")
        return part


def read_loss(store: MechanismStore) -> Loss:
    """Return the loss of a store's problem.

    Raises
    ------
    StoreError
        If its tables are missing or damaged.
    """
    kind = store.problem_attributes.get("loss")
    if kind is None:
        raise StoreError(f"{store.url}: the tables of the loss are missing; use --overwrite")
    if kind == "table":
        return TableLoss(store.grid, StoredTable(store))
    if kind == "euclidean":
        return EuclideanLoss(store.output_xy_km())
    tables = "node_xy", "task_distance", "task_weight", "output_node"
    found = [store.read(f"problem/{name}") for name in tables]
    if not all(_fit(*found)):
        raise StoreError(f"{store.url}: the tables of the loss are damaged; use --overwrite")
    return TravelLoss(*found)


def _fit(
    node_xy: NDArray[Any], distance: NDArray[Any], weight: NDArray[Any], output_node: NDArray[Any]
) -> Iterator[bool]:
    """Yield whether tables of travel belong together; lost chunks read as NaN."""
    nodes = len(node_xy)
    yield node_xy.shape == (nodes, 2) and weight.ndim == 1 and distance.shape == (nodes, len(weight))
    yield bool(np.isfinite(node_xy).all() and np.isfinite(weight).all() and not np.isnan(distance).any())
    yield output_node.dtype.kind in "iu"
    yield bool(((output_node >= 0) & (output_node < nodes)).all())


def is_problem_of(store: MechanismStore) -> bool:
    """Whether outputs, prior and the tables of the loss are those that a store was made with, bit for bit.

    All of them are read, a loss table chunk by chunk. The oldest stores have no digest of them.
    """
    try:
        loss = read_loss(store)
        tables = (store.array(_TABLE),) if isinstance(loss, TableLoss) else schema.loss_tables(loss)
        outputs = store.output_xy_km()
        first, place = (outputs, store.array("prior")), (store.grid, store.projection)
        found = {schema.problem_sha256(place, (*first, store.kept, *tables))}
        if store.kept.all():  # stores of before regions have neither the plane nor the cells in their digest
            found.add(schema.problem_sha256(store.grid, (*first, *tables)))
    except DAMAGED_CONTENT:
        return False
    return store.problem_sha256 in {*found, *([] if schema.says_its_cells(store.attributes) else [""])}


@lru_cache(maxsize=2)
def cached_loss(url: str, problem_sha256: str) -> Loss:  # noqa: ARG001 part of the cache's key
    """Return the loss of a store's problem, read once per process for as long as it is that problem."""
    return read_loss(MechanismStore.open(url))


class LossColumn(NamedTuple):
    """Losses of the records of one lattice column that have a prior.

    Parameters
    ----------
    i
        Which column, from the first of the rectangle.
    used
        Which of its n records, of shape (n,).
    records_km
        Where they are, float64 of shape (n, 2), in km.
    prior
        π, float64 of shape (n,).
    loss_km
        c of every output, float64 of shape (n, K), in km.
    """

    i: int
    used: NDArray[np.intp]
    records_km: NDArray[np.float64]
    prior: NDArray[np.float64]
    loss_km: NDArray[np.float64]


def loss_columns(
    store: MechanismStore, east: slice, north: slice, prior: NDArray[np.float64]
) -> Iterator[LossColumn]:
    """Yield the losses of the records with a prior, column by column.

    Parameters
    ----------
    store
        The store.
    east, north
        Which records of the lattice.
    prior
        Their π, float64 of shape (records east, records north).

    Raises
    ------
    StoreError
        If the tables of the loss are missing or damaged.
    """
    if not prior.any():
        return
    loss = cached_loss(store.url, store.problem_sha256)
    x, y = store.grid.x_km()[east], store.grid.y_km()[north]
    for i in np.flatnonzero(prior.any(axis=1)).tolist():
        used = np.flatnonzero(prior[i])
        records = np.stack([np.full(len(used), x[i]), y[used]], axis=-1)
        yield LossColumn(i, used, records, prior[i, used], loss.rows(records))
