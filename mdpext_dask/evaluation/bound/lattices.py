"""The lattices that a store's records split into: what a worker runs to bound the loss on them.

Records (a + s i, b + s j) are the lattice with offset (a, b) of stride s; those of them in one window are a
part of the problem. Plain functions of a store URL: the store need only hold the problem, not the rows of a
mechanism.
"""

import math
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.evaluation.bound.lattice_program import GAP, lattice_bound
from mdpext_dask.evaluation.bound.merging import merged
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.seed.record_program import Lattice, LatticePromise
from mdpext_dask.store.loss import cached_loss, loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore

Offset = tuple[int, int]
# Number of a window to the east and to the north.
Window = tuple[int, int]

# A distance on the ground exceeds the one computed in the plane by at most this: PROJ takes what is within
# 0.64 mm of its centre for the centre, and coordinates are rounded.
_PLANE_ERROR_KM = 1e-6
# Relative duality gap to aim for where windows or merged outputs miss more than that anyway.
_COARSE_GAP = 2e-3
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


class Part(NamedTuple):
    """What one program is about: the records of one lattice in one window."""

    window: Window
    offset: Offset


class Level(NamedTuple):
    """How records are cut into parts, and how many outputs a part has.

    Parameters
    ----------
    stride
        Steps from record to record of a lattice.
    windows
        How many windows there are to the east and to the north, which all records are shared out to evenly.
    columns
        Outputs of a part at most, others being merged; None for all.
    reach
        Over how many lines pairs reach that have rows.
    """

    stride: int
    windows: tuple[int, int]
    columns: int | None
    reach: int

    @property
    def gap(self) -> float:
        """Relative duality gap at which programs stop."""
        return GAP if self.windows == (1, 1) and self.columns is None else _COARSE_GAP

    def ends(self, axis: int, side: int) -> list[int]:
        """Return where windows begin along an axis of `side` records, and where the last one ends."""
        count = self.windows[axis]
        return [side * number // count for number in range(count + 1)]

    def records(self, part: Part, shape: tuple[int, int]) -> tuple[slice, slice]:
        """Return the records of a part, to the east and to the north, in a grid of some shape."""
        found = []
        for axis in (0, 1):
            first, last = self.ends(axis, shape[axis])[part.window[axis] :][:2]
            first += (part.offset[axis] - first) % self.stride
            found.append(slice(min(first, last), last, self.stride))
        return found[0], found[1]

    def refines(self, other: "Level") -> bool:
        """Whether each of its parts is a union of parts of another level."""
        pairs = zip(other.windows, self.windows, strict=True)
        return other.stride % self.stride == 0 and all(many % few == 0 for many, few in pairs)

    def part_with(self, part: Part, other: "Level") -> Part:
        """Return the part that a part of a level which this one refines belongs to."""
        i, j = (
            n * few // many for n, few, many in zip(part.window, self.windows, other.windows, strict=True)
        )
        return Part((i, j), (part.offset[0] % self.stride, part.offset[1] % self.stride))


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
    return lattice_at(store, east, north, store.read("prior", east, north))


def lattice_at(store: MechanismStore, east: slice, north: slice, prior: NDArray[np.float64]) -> Lattice:
    """Return the lattice of some records and their prior; see :func:`lattice_of`."""
    if not ((prior >= 0) & np.isfinite(prior)).all():
        raise StoreError(f"{store.url}: the prior is damaged; use --overwrite")
    cost = np.zeros((*prior.shape, store.outputs))
    for column in loss_columns(store, east, north, prior):
        cost[column.i, column.used] = column.loss_km * column.prior[:, None]
    kept = store.grid.vertices_of(store.kept)[east, north]
    return Lattice(store.grid.x_km()[east], store.grid.y_km()[north], cost, kept)


class Found(NamedTuple):
    """What is proved about one part.

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


def bound_parts(url: str, level: Level, parts: list[Part], limit: Limit) -> list[Found | None]:
    """Return what is proved about some parts; None for those that there was no time for."""
    return [bound_alone(url, level, part, limit) for part in parts]


def bound_alone(
    url: str,
    level: Level,
    part: Part,
    limit: Limit = NO_LIMIT,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> Found | None:
    """Return the same for one part.

    Parameters
    ----------
    url, level, part
        The store and the records.
    limit
        When to stop.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.
    """
    deadline = time.monotonic() + limit.left
    if limit.left <= 0:
        return None
    store = MechanismStore.open(url)
    east, north = level.records(part, store.grid.shape)
    prior = store.read("prior", east, north)
    if not prior.any():
        return Found(0.0, 0.0, 0.0, True)
    if level.windows != (1, 1):
        (i, east), (j, north) = (
            _used(np.asarray(prior.any(axis=axis)), at) for axis, at in ((1, east), (0, north))
        )
        prior = prior[i, j]
    lattice = lattice_at(store, east, north, prior)
    share, free, free_at_most = math.fsum(prior.ravel()), lattice.free_km, lattice.free_at_most_km
    if level.columns is not None:
        lattice = replace(lattice, cost=merged(lattice.cost, prior, level.columns))
    bound = lattice_bound(
        lattice,
        promise_of(store),
        reach=level.reach,
        gap=level.gap,
        threads=threads,
        inverse_sums=inverse_sums,
        deadline=deadline,
    )
    return Found(max(bound, free), share, free_at_most, time.monotonic() <= deadline)


def _used(used: NDArray[np.bool_], records: slice) -> tuple[slice, slice]:
    """Return where lines are used, from the first to the last, and which records of a slice these are."""
    first, last = np.flatnonzero(used)[[0, -1]].tolist()
    start, step = records.start, records.step
    return slice(first, last + 1), slice(start + first * step, start + last * step + 1, step)


def time_part(url: str, level: Level, part: Part, limit: Limit, threads: int) -> tuple[float, float]:
    """Return how long a part takes now, and the whole of this task, which reads tables of losses, in s."""
    began = time.monotonic()
    store = MechanismStore.open(url)
    cached_loss(store.url, store.problem_sha256)
    started = time.monotonic()
    bound_alone(url, level, part, limit, threads)
    ended = time.monotonic()
    return ended - started, ended - began


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
