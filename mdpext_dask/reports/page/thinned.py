"""The part of a store's rows that a page holds: few enough records to be sent and looked at."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array, Grid
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import merge_columns
from mdpext_dask.store.rows import rows_at

# Probabilities that a page holds, a byte each; and records along a side: more make no visible difference.
MOST_NUMBERS, MOST_ALONG = 1_000_000, 160
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
        M, float64 of shape (n_x, n_y, K), normalised; NaN where a row cannot be used. With a remap, the
        probabilities of the reports: 0 for outputs that are never reported.
    prior
        Prior of the records that are nearest to each, float64 of shape (n_x, n_y).
    kept
        Which of them belong to the region, bool of shape (n_x, n_y).
    """

    grid: Grid
    step: int
    i: NDArray[np.intp]
    j: NDArray[np.intp]
    rows: Array
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
        grid, outputs = store.grid, store.outputs
        step = step_for(grid.shape, outputs)
        i, j = (positions(n, step) for n in grid.shape)
        kept = grid.are_vertices_of(store.kept, *(at.ravel() for at in np.meshgrid(i, j, indexing="ij")))
        columns = max(_ROW_NUMBERS // (len(j) * outputs), 1)
        parts = []
        for first in range(0, len(i), columns):
            east, north = np.meshgrid(i[first : first + columns], j, indexing="ij")
            parts.append(_distributions(rows_at(store, east.ravel(), north.ravel(), damaged=math.nan)))
        rows = np.concatenate(parts).reshape(len(i), len(j), outputs)
        if table is not None:
            usable = np.isfinite(rows).all(axis=-1, keepdims=True)
            rows = np.where(usable, merge_columns(rows, table), np.nan)
        return cls(grid, step, i, j, rows, _gathered_prior(store, i, j, step), kept.reshape(len(i), len(j)))

    @property
    def x_km(self) -> Array:
        """East coordinates, float64, in km."""
        return self.grid.x_km()[self.i]

    @property
    def y_km(self) -> Array:
        """North coordinates, float64, in km."""
        return self.grid.y_km()[self.j]

    def typical(self) -> tuple[int, int]:
        """Return the position of the record nearest to the medians of the prior.

        Only records with usable rows count, and only those with a prior if there are any.
        """
        usable = np.asarray(np.isfinite(self.rows).all(axis=2))
        wanted = usable & (self.prior > 0)
        if not wanted.any():
            wanted = usable if usable.any() else np.ones_like(usable)
        weights = np.where(wanted, np.maximum(self.prior, np.finfo(float).tiny), 0.0)
        x = _median(self.x_km, weights.sum(axis=1))
        y = _median(self.y_km, weights.sum(axis=0))
        apart = np.hypot(self.x_km[:, None] - x, self.y_km - y)
        a, b = np.unravel_index(np.where(wanted, apart, np.inf).argmin(), apart.shape)
        return int(a), int(b)

    def posterior(self, output: int) -> Array:
        """Return P(x | y) ∝ π(x) M(y|x) of the records near each of these, float64 of shape (n_x, n_y).

        An approximation where records are left out: those near one get its row.
        """
        joint = self.prior * np.nan_to_num(self.rows[..., output])
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


def step_for(shape: tuple[int, int], outputs: int) -> int:
    """Return the least step with which neither records nor probabilities are too many."""
    step = 1
    while True:
        along = [len(positions(n, step)) for n in shape]
        if step >= max(shape) or (
            math.prod(along) * outputs <= MOST_NUMBERS and math.prod(along) <= MOST_ALONG**2
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


def _median(values: Array, weights: Array) -> float:
    sums = np.cumsum(weights)
    return float(values[min(int(np.searchsorted(sums, sums[-1] / 2)), len(values) - 1)])
