"""The part of a store's rows that a page holds: few enough records to be sent and looked at."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.evaluation.quantiles import weighted_quantiles
from mdpext_dask.problem.grid import Array, Grid
from mdpext_dask.store.local_chunks import floor_of
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import merge_columns
from mdpext_dask.store.rows import by_chunks, rows_at

# Probabilities that a page holds, and records along a side: more make no visible difference.
MOST_NUMBERS, MOST_ALONG = 1_000_000, 160
# Of noise, a page holds outputs that have so many times what they have from far away: in the demo, two in
# three of those that have more than that. Where a report may come from is then off by under 2 % for nineteen
# outputs in twenty; the others are hardly ever reported.
NEAR = 10.0
# Such a share of a row may be below that; where more may be, all outputs are held.
_MOST_LEFT_OUT = 0.01
# Records that are asked how many outputs a row holds.
_SAMPLE = 400
# Steps of the logarithm that codes stand for; code 0 is NaN, or a probability of 0.
_LEVELS = 254
# Numbers of rows, and records of the prior, that are read together.
_ROW_NUMBERS, _STRIP_RECORDS = 4_000_000, 10_000_000


@dataclass(frozen=True)
class Thinned:
    """Every `step`-th record of a store along both axes, with their rows.

    Parameters
    ----------
    grid
        The grid of all records.
    step
        Fine steps between the records.
    i, j
        Which fine columns and rows, shapes (n_x,) and (n_y,).
    rows
        M, float64 of shape (n_x · n_y, K), normalised, by its entries that are held: in each row that can be
        used, of noise, those of at least :data:`NEAR` times `far`, and else those above 0. With a remap, the
        probabilities of the reports: 0 for outputs that are never reported.
    far
        What stands for entries that are not held, float64 of shape (K,): of noise, what outputs have from far
        away, else 0.
    prior
        Prior of the records that are nearest to each, float64 of shape (n_x, n_y).
    kept
        Which of them belong to the region, bool of shape (n_x, n_y).
    """

    grid: Grid
    step: int
    i: NDArray[np.intp]
    j: NDArray[np.intp]
    rows: sparse.csr_array
    far: Array
    prior: Array
    kept: NDArray[np.bool_]

    @classmethod
    def of(cls, store: MechanismStore, table: NDArray[np.intp] | None = None) -> "Thinned":
        """Read as many records of a store as a page can hold.

        Parameters
        ----------
        store
            The store; rows that cannot be read are NaN.
        table
            What is reported instead of each output, shape (K,); default: the output itself.
        """
        grid = store.grid
        step, far = _held(store, table)
        rows = _read(store, step, far, table)
        while rows.nnz > MOST_NUMBERS and step < max(grid.shape):  # rows hold more than those of the sample
            step += 1
            rows = _read(store, step, far, table)
        i, j = (positions(n, step) for n in grid.shape)
        kept = grid.are_vertices_of(store.kept, *(at.ravel() for at in np.meshgrid(i, j, indexing="ij")))
        prior = _gathered_prior(store, i, j, step)
        return cls(grid, step, i, j, rows, far, prior, kept.reshape(len(i), len(j)))

    @property
    def x_km(self) -> Array:
        """East coordinates, float64, in km."""
        return self.grid.x_km()[self.i]

    @property
    def y_km(self) -> Array:
        """North coordinates, float64, in km."""
        return self.grid.y_km()[self.j]

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Which rows can be used, bool of shape (n_x, n_y)."""
        return np.asarray(np.diff(self.rows.indptr) > 0).reshape(self.prior.shape)

    def row(self, a: int, b: int) -> Array:
        """Return M(·|x) of a record, float64 of shape (K,); NaN if it cannot be used."""
        held = self.rows[[a * len(self.j) + b]].toarray()[0]
        return np.where(held > 0, held, self.far) if self.usable[a, b] else np.full(len(held), np.nan)

    def typical(self) -> tuple[int, int]:
        """Return the position of the record nearest to the medians of the prior.

        Only records with usable rows count, and only those with a prior if there are any.
        """
        usable = self.usable
        wanted = usable & (self.prior > 0)
        if not wanted.any():
            wanted = usable if usable.any() else np.ones_like(usable)
        weights = np.where(wanted, np.maximum(self.prior, np.finfo(float).tiny), 0.0)
        x = weighted_quantiles(self.x_km, weights.sum(axis=1), ("0.5",))["0.5"]
        y = weighted_quantiles(self.y_km, weights.sum(axis=0), ("0.5",))["0.5"]
        apart = np.hypot(self.x_km[:, None] - x, self.y_km - y)
        a, b = np.unravel_index(np.where(wanted, apart, np.inf).argmin(), apart.shape)
        return int(a), int(b)

    def posterior(self, output: int) -> Array:
        """Return P(x | y) ∝ π(x) M(y|x) of the records near each of these, float64 of shape (n_x, n_y).

        An approximation where records are left out: those near one get its row.
        """
        held = self.rows[:, [output]].toarray().reshape(self.prior.shape)
        joint = self.prior * self.usable * np.where(held > 0, held, self.far[output])
        total = joint.sum()
        return joint / total if total > 0 else joint

    def within(self, output: int, place_km: Array, radii_km: Sequence[float]) -> list[float]:
        """Return the probability that a person with a given report is within each distance of a place.

        Parameters
        ----------
        output
            Number of the report.
        place_km
            The place, x and y in km, as a rule the reported one.
        radii_km
            The distances, ‖·‖₂ in the plane, in km.
        """
        posterior = self.posterior(output)
        apart = np.hypot(self.x_km[:, None] - place_km[0], self.y_km - place_km[1])
        return [float(posterior[apart <= radius].sum()) for radius in radii_km]


def _held(store: MechanismStore, table: NDArray[np.intp] | None) -> tuple[int, Array]:
    """Return the step between records, and :attr:`Thinned.far`: 0 where near outputs alone show no more."""
    shape, whole = store.grid.shape, step_for(store.grid.shape, store.outputs)
    floor, none = floor_of(store), np.zeros(store.outputs)
    if floor is None or NEAR * floor * store.outputs > _MOST_LEFT_OUT:
        return whole, none
    far = np.full(store.outputs, floor)
    far = far if table is None else merge_columns(far, table)
    sample = _read(store, step_for(shape, MOST_NUMBERS / _SAMPLE), far, table)
    step = step_for(shape, sample.nnz / sample.shape[0])
    return (step, far) if step < whole else (whole, none)


def _read(store: MechanismStore, step: int, far: Array, table: NDArray[np.intp] | None) -> sparse.csr_array:
    """Return :attr:`Thinned.rows` of every `step`-th record, a few of them at a time."""
    east, north = (
        at.ravel() for at in np.meshgrid(*(positions(n, step) for n in store.grid.shape), indexing="ij")
    )
    order = np.concatenate(by_chunks(store, east, north))  # so that few chunks are read twice
    parts = []
    for own in np.split(order, range(0, len(order), max(_ROW_NUMBERS // store.outputs, 1))[1:]):
        rows = _distributions(rows_at(store, east[own], north[own], damaged=math.nan))
        rows = rows if table is None else merge_columns(rows, table)
        parts.append(sparse.csr_array(np.where(rows >= NEAR * far, rows, 0.0)))
    return sparse.csr_array(sparse.vstack(parts))[np.argsort(order)]


def step_for(shape: tuple[int, int], entries: float) -> int:
    """Return the least step with which neither records nor probabilities are too many.

    Parameters
    ----------
    shape
        Records along each axis.
    entries
        Probabilities that are held of a record, on average.
    """
    step = 1
    while True:
        along = [len(positions(n, step)) for n in shape]
        if step >= max(shape) or (
            math.prod(along) * entries <= MOST_NUMBERS and math.prod(along) <= MOST_ALONG**2
        ):
            return step
        step += 1


def positions(n: int, step: int) -> NDArray[np.intp]:
    """Return every `step`-th of n, centred: as many are left out before the first as after the last."""
    return np.arange((n - 1) % step // 2, n, step, dtype=np.intp)


def gathered(values: Array, i: NDArray[np.intp], j: NDArray[np.intp], step: int) -> Array:
    """Add the values of all records to the nearest kept record.

    Parameters
    ----------
    values
        float64 of the grid's shape.
    i, j
        The fine columns and rows that are kept.
    step
        Fine steps between them.
    """
    starts = _starts(i, step), _starts(j, step)
    return np.asarray(np.add.reduceat(np.add.reduceat(values, starts[0], axis=0), starts[1], axis=1))


def _starts(kept: NDArray[np.intp], step: int) -> NDArray[np.intp]:
    """Return the first position that belongs to each kept one."""
    return np.append(0, kept[1:] - step // 2)


def _gathered_prior(store: MechanismStore, i: NDArray[np.intp], j: NDArray[np.intp], step: int) -> Array:
    """Return :func:`gathered` of the prior, read in strips."""
    starts = np.append(_starts(i, step), store.grid.shape[0])
    strips = max(_STRIP_RECORDS // (store.grid.shape[1] * step), 1)
    parts = []
    for first in range(0, len(i), strips):
        own = i[first : first + strips]
        strip = slice(int(starts[first]), int(starts[first + len(own)]))
        values = np.asarray(store.read("prior", strip), dtype=np.float64)
        parts.append(gathered(values, own - strip.start, j, step))
    return np.concatenate(parts)


def quantised(rows: Array) -> tuple[NDArray[np.uint8], float, float]:
    """Return probabilities in a byte each, for looking at, never for sampling.

    Parameters
    ----------
    rows
        Probabilities, or NaN.

    Returns
    -------
    Codes, uint8 of the rows' shape: 0 for NaN and for 0, else 1 + the number of the step; the log probability
    of code 1; and the step from one code to the next.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(rows)
    known = np.isfinite(logs)
    if not known.any():
        return np.zeros(rows.shape, dtype=np.uint8), 0.0, 1.0
    least, most = float(logs[known].min()), float(logs[known].max())
    step = max((most - least) / _LEVELS, 1e-9)
    codes = np.where(known, 1 + np.rint((np.where(known, logs, least) - least) / step), 0)
    return codes.astype(np.uint8), least, step


def encoded(values: NDArray[np.generic]) -> str:
    """Return the bytes of an array, little-endian, in base64."""
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
    return base64.b64encode(little.tobytes()).decode("ascii")


def _distributions(stored: NDArray[np.float32]) -> Array:
    """Return rows divided by their sums; NaN for those that the sampler would refuse."""
    rows = stored.astype(np.float64)
    with np.errstate(invalid="ignore"):
        sound = (rows > 0).all(axis=1) & (rows <= 2).all(axis=1)
    rows[~sound] = np.nan
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))
