"""The lattices that a store's records split into: what a worker runs to bound the loss on them.

Records (a + s i, b + s j) are the lattice with offset (a, b) of stride s. Plain functions of a store URL: the
store need only hold the problem, not the rows of a mechanism.
"""

import math
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mdpext_dask.errors import StoreError
from mdpext_dask.evaluation.bound.lattice_program import lattice_bound
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.seed.record_program import Lattice, LatticePromise
from mdpext_dask.store.loss import loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore

Offset = tuple[int, int]

# A distance on the ground exceeds the one computed in the plane by at most this: PROJ takes what is within
# 0.64 mm of its centre for the centre, and coordinates are rounded.
_PLANE_ERROR_KM = 1e-6
# When the time of the present call is up in this process; see :class:`Limit`.
_DEADLINES: dict[str, float] = {}


def promise_of(store: MechanismStore) -> LatticePromise:
    """Return the promise of a store's job, no tighter than what it says about the ground.

    An azimuthal equidistant plane shortens no distance, so distances on the ground are at most those in the
    plane; for p ≠ 2, where the promise is one for the plane, ε is not charged for the distortion either, so
    whatever keeps the promise keeps this one.
    """
    return LatticePromise(
        epsilon_per_km=float(store.attributes["epsilon_per_km"]),
        metric_p=store.metric_p,
        allowance_km=0.0 if store.projection is None else _PLANE_ERROR_KM,
    )


def offsets_of(stride: int, shape: tuple[int, int]) -> list[Offset]:
    """Return all offsets of a stride in a grid; those that share lines of records follow each other."""
    return [(a, b) for a in range(min(stride, shape[0])) for b in range(min(stride, shape[1]))]


def lattice_of(store: MechanismStore, stride: int, offset: Offset) -> Lattice:
    """Return one lattice of a store's records; of no other record are prior and losses computed.

    Parameters
    ----------
    store
        The store.
    stride
        Steps s from record to record.
    offset
        Its first record (a, b).

    Raises
    ------
    StoreError
        If the prior or the tables of the loss are damaged.
    """
    east, north = (slice(first, None, stride) for first in offset)
    prior = store.read("prior", east, north)
    if not ((prior >= 0) & np.isfinite(prior)).all():
        raise StoreError(f"{store.url}: the prior is damaged; use --overwrite")
    cost = np.zeros((*prior.shape, store.outputs))
    for column in loss_columns(store, east, north, prior):
        cost[column.i, column.used] = column.loss_km * column.prior[:, None]
    kept = store.grid.vertices_of(store.kept)[east, north]
    return Lattice(store.grid.x_km()[east], store.grid.y_km()[north], cost, kept)


class Found(NamedTuple):
    """What is proved about one lattice.

    Parameters
    ----------
    bound_km
        What every mechanism loses on it at least, in km.
    share
        Its share of π.
    free_km
        What is lost on it without any privacy at most, in km: part of the sum over all records.
    finished
        Whether its program was solved, rather than stopped when the time was up.
    """

    bound_km: float
    share: float
    free_km: float
    finished: bool


@dataclass(frozen=True)
class Limit:
    """When the time of the tasks of one call is up, wherever they run.

    On the client's machine that is a moment of the clock that all its processes share. Clocks of machines are
    not compared: elsewhere the first task of a call in a process starts the time.

    Parameters
    ----------
    seconds
        How much time there was when the tasks were handed out.
    moment
        Until when, in s of :func:`time.monotonic` on the client's machine; None elsewhere.
    call
        A random name, the same for all tasks of the call.
    """

    seconds: float
    moment: float | None = None
    call: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def left(self) -> float:
        """Seconds that are left, in the process that asks."""
        if self.moment is not None:
            return self.moment - time.monotonic()
        if self.call not in _DEADLINES:
            _DEADLINES.clear()
            _DEADLINES[self.call] = time.monotonic() + self.seconds
        return _DEADLINES[self.call] - time.monotonic()


NO_LIMIT = Limit(math.inf, math.inf)


def bound_lattices(url: str, stride: int, offsets: list[Offset], limit: Limit) -> list[Found | None]:
    """Return what is proved about some lattices; None for those that there was no time for."""
    return [bound_alone(url, stride, offset, limit) for offset in offsets]


def bound_alone(
    url: str,
    stride: int,
    offset: Offset,
    limit: Limit = NO_LIMIT,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> Found | None:
    """Return the same for one lattice.

    Parameters
    ----------
    url, stride, offset
        The store and the lattice.
    limit
        When to stop.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.
    """
    deadline = time.monotonic() + limit.left
    if limit.left <= 0:
        return None
    store = MechanismStore.open(url)
    lattice, promise = lattice_of(store, stride, offset), promise_of(store)
    share = math.fsum(store.read("prior", *(slice(first, None, stride) for first in offset)).ravel())
    bound = lattice_bound(lattice, promise, threads=threads, inverse_sums=inverse_sums, deadline=deadline)
    return Found(bound, share, lattice.free_at_most_km, time.monotonic() <= deadline)


def time_lattice(url: str, stride: int, limit: Limit, threads: int) -> tuple[float, float]:
    """Return how long the program of the first lattice takes now, and the whole of this task, in s."""
    began = time.monotonic()
    deadline = began + limit.left
    store = MechanismStore.open(url)
    lattice, promise = lattice_of(store, stride, (0, 0)), promise_of(store)
    started = time.monotonic()
    lattice_bound(lattice, promise, threads=threads, deadline=deadline)
    return time.monotonic() - started, time.monotonic() - began


def free_loss(url: str, index: int, limit: Limit) -> float:
    """Return Σ π(x) min_y c(x, y) of the records that a block owns, rounded down, in km.

    Of a block that there was no time for 0, which is proved as well.
    """
    if limit.left <= 0:
        return 0.0
    store = MechanismStore.open(url)
    block = store.plan[index]
    prior = store.read("prior", block.owned_x, block.owned_y)
    columns = loss_columns(store, block.owned_x, block.owned_y, prior)
    total = math.fsum(float((losses.min(axis=1) * mass).sum()) for *_, mass, losses in columns)
    return float(total * (1 - (max(prior.shape) + 1) * sys.float_info.epsilon))


def shapes_of(shape: tuple[int, int], stride: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the shapes of the lattices of a grid, the largest first, and how many there are of each."""
    sizes = []
    for side in shape:
        # Records (first, first + stride, ...) below `side`; the first offsets may have one more.
        least, longer = divmod(side, stride)
        sizes.append([(least + 1, longer), (least, stride - longer)])
    for n, many in sizes[0]:
        for m, times in sizes[1]:
            if n and m and many and times:
                yield (n, m), many * times
