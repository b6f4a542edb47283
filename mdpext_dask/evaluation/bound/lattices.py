"""The lattices that a store's records split into: what a worker runs to bound the loss on them.

Records (a + s i, b + s j) are the lattice with offset (a, b) of stride s. Plain functions of a store URL: the
store need only hold the problem, not the rows of a mechanism.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.evaluation.bound.lattice_program import Lattice, LatticePromise, lattice_bound, reach_of
from mdpext_dask.seed.grid_rows import directions
from mdpext_dask.seed.interior_point import InverseSums
from mdpext_dask.store.loss import loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore

Offset = tuple[int, int]

# A distance on the ground exceeds the one computed in the plane by at most this: PROJ takes what is within
# 0.64 mm of its centre for the centre, and coordinates are rounded.
_PLANE_ERROR_KM = 1e-6
# Seconds of a program for one processor, fitted to lattices from 2 x 2 x 20 to 49 x 49 x 100 on one core of
# a server processor of 2024. For all its iterations: by program, by entry and row, by multiplication of
# blocks, of rows of inverses, and of the Schur matrix.
_CALLS, _ENTRY, _BLOCK_FLOP, _INVERSE_FLOP, _SCHUR_FLOP = 0.02, 6e-6, 4e-8, 3e-9, 1e-9
# Arrays over all rows of a program that an iteration holds at once, over blocks, and of Schur matrices.
_ROW_ARRAYS, _BLOCK_ARRAYS, _SCHUR_ARRAYS = 20, 4, 3
_FLOAT64 = 8


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


def bound_lattices(url: str, stride: int, offsets: list[Offset]) -> list[tuple[float, float]]:
    """Return, for some lattices, what every mechanism loses on them at least, in km, and their share of π."""
    return [bound_alone(url, stride, offset) for offset in offsets]


def bound_alone(
    url: str, stride: int, offset: Offset, threads: int = 1, inverse_sums: InverseSums | None = None
) -> tuple[float, float]:
    """Return the same for one lattice.

    Parameters
    ----------
    url, stride, offset
        The store and the lattice.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.
    """
    store = MechanismStore.open(url)
    lattice = lattice_of(store, stride, offset)
    share = math.fsum(store.read("prior", *(slice(first, None, stride) for first in offset)).ravel())
    bound = lattice_bound(lattice, promise_of(store), threads=threads, inverse_sums=inverse_sums)
    return bound, share


def free_losses(url: str, index: int, stride: int) -> NDArray[np.float64]:
    """Return Σ π(x) min_y c(x, y) of the records that a block owns, by offset, rounded down.

    Returns
    -------
    float64 of shape (stride, stride) or, where the grid is smaller, of the grid, in km.
    """
    store = MechanismStore.open(url)
    block = store.plan[index]
    total = np.zeros([min(stride, side) for side in store.grid.shape])
    prior = store.read("prior", block.owned_x, block.owned_y)
    for i, used, _, mass, losses in loss_columns(store, block.owned_x, block.owned_y, prior):
        least = losses.min(axis=1) * mass
        residue = (block.owned_y.start + used) % stride
        total[(block.owned_x.start + i) % stride] += np.bincount(residue, least, minlength=total.shape[1])
    # Sums of this many numbers, none negative.
    return np.asarray(total * (1 - prior.size * np.finfo(float).eps))


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


def predicted_seconds(shape: tuple[int, int], outputs: int, metric_p: float) -> float:
    """Return about how long one processor takes for the program of one lattice."""
    n, m, reach = _program_shape(shape, metric_p)
    points = n * m
    return (
        _CALLS
        + _ENTRY * outputs * points * _rows(reach)
        + _BLOCK_FLOP * outputs * n * reach**2 * m**3
        + _INVERSE_FLOP * outputs * reach * m * points**2
        + _SCHUR_FLOP * points**3
    )


def predicted_bytes(shape: tuple[int, int], outputs: int, metric_p: float) -> int:
    """Return about what the program of one lattice holds in memory at most."""
    n, m, reach = _program_shape(shape, metric_p)
    points = n * m
    numbers = (
        _ROW_ARRAYS * outputs * points * _rows(reach)
        + _BLOCK_ARRAYS * outputs * points * reach * m
        + _SCHUR_ARRAYS * points**2
    )
    return _FLOAT64 * numbers


def _program_shape(shape: tuple[int, int], metric_p: float) -> tuple[int, int, int]:
    m, n = sorted(shape)
    return n, m, reach_of(metric_p) if m > 1 else 1


def _rows(reach: int) -> int:
    """Return how many rows there are for each point, about, and its floor."""
    return 2 * len(directions(reach)) + 1
