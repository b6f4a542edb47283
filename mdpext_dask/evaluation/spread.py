"""How the loss of a mechanism is spread: over records, over reports, over distances; block by block.

A task reads the rows that its block owns once and answers with sums, with tallies in the bins that hold
anything, and, if asked, with one number for every record. Records without a prior are nobody's, so nothing is
worked out for them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from mdpext_dask.evaluation.loss import Line, finite, lines_of
from mdpext_dask.evaluation.quantiles import Bins, Tally
from mdpext_dask.problem.grid import Box, Grid
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of

# Shares that quantiles are given for.
SHARES = ("0", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99", "1")
_STEPS = (1, 2, 5)


@dataclass(frozen=True)
class BlockSpread:
    """What the records of a block add.

    Parameters
    ----------
    loss_km
        Their part of UL(M), in km.
    distance_km
        Their part of E ‖X − Y‖₂, in km.
    records
        How many of them have a prior.
    band_probability
        Probability of each band of distances, float64 of shape (bands,).
    band_loss_km
        Their part of the expected loss in each band, float64 of shape (bands,), in km.
    by_record
        Prior of the records' expected losses.
    by_report
        Probabilities π(x) M(y|x) of the losses c(x, y).
    expected_km
        ℓ(x), float64 of the shape of the owned records, in km; not-a-number without a prior. None if nobody
        asks.
    """

    loss_km: float
    distance_km: float
    records: int
    band_probability: NDArray[np.float64]
    band_loss_km: NDArray[np.float64]
    by_record: Bins
    by_report: Bins
    expected_km: NDArray[np.float64] | None


def spread_block(url: str, index: int, keep_records: bool) -> BlockSpread:
    """Return what the records that a block owns add; with the loss of each one if `keep_records`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    block = store.plan[index]
    prior = np.asarray(store.read("prior", block.owned_x, block.owned_y), dtype=np.float64)
    sums = _Sums(store)
    expected = np.full(block.owned_shape, np.nan) if keep_records else None
    if prior.any():  # where nobody is, rows that are not stored need not be made again either
        for line in lines_of(store, block, rows_of(store, block.owned_x, block.owned_y), prior):
            sums.add(line)
            if expected is not None:
                expected[line.i, line.used] = line.expected_km
    return sums.spread(expected)


class _Sums:
    """Sums over lines, always in the same order."""

    def __init__(self, store: MechanismStore) -> None:
        self._store = store
        self._outputs = store.read_output_xy_km()
        self._edges = band_edges_km(store.grid, self._outputs)
        self._loss_km = self._distance_km = 0.0
        self._records = 0
        self._bands = np.zeros((2, len(self._edges) - 1))
        self._by_record, self._by_report = Tally(), Tally()

    def add(self, line: Line) -> None:
        # What is not a number has no bin.
        self._loss_km += finite(line.part_km(), self._store)
        self._records += len(line.used)
        joint = line.rows * (line.prior / line.totals)[:, None]
        apart = cdist(line.records_km, self._outputs)
        weights, losses, distances = joint.ravel(), line.loss_km.ravel(), apart.ravel()
        self._distance_km += finite(float(weights @ distances), self._store)
        band = np.searchsorted(self._edges[1:-1], distances, side="right")
        for total, weight in zip(self._bands, (weights, weights * losses), strict=True):
            total += np.bincount(band, weight, len(total))
        self._by_record.add(line.expected_km, line.prior)
        self._by_report.add(losses, weights)

    def spread(self, expected_km: NDArray[np.float64] | None) -> BlockSpread:
        return BlockSpread(
            self._loss_km, self._distance_km, self._records, self._bands[0], self._bands[1],
            self._by_record.bins(), self._by_report.bins(), expected_km,
        )  # fmt: skip


def band_edges_km(grid: Grid, output_xy_km: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where bands of distances begin and end: 0, then 1, 2, 5, 10, ... times a power of ten.

    The first band is about a fine step wide, and the last ends beyond the farthest that an output can be
    from a record; so the bands depend on the problem alone.

    Parameters
    ----------
    grid
        The grid.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.

    Returns
    -------
    float64 of shape (bands + 1,), in km.
    """
    box = Box.around(np.vstack([_corners(grid.box), output_xy_km]))
    farthest = math.hypot(box.width_km, box.height_km)
    decade = math.floor(math.log10(grid.spacing_km)) - 1
    edges = [0.0]
    while edges[-1] <= farthest:
        decade += 1
        # A quotient or a product of whole numbers is the nearest float64 to what is meant.
        edges += [step * 10.0**decade if decade >= 0 else step / 10.0**-decade for step in _STEPS]
    first = int(np.searchsorted(edges, grid.spacing_km))
    last = int(np.searchsorted(edges, farthest, side="right"))
    return np.array([0.0, *edges[first : last + 1]])


def _corners(box: Box) -> NDArray[np.float64]:
    return np.array([(box.west_km, box.south_km), (box.east_km, box.north_km)])


@dataclass(frozen=True)
class Spread:
    """How the loss of a whole mechanism is spread; see :class:`BlockSpread`.

    Parameters
    ----------
    loss_km, distance_km
        UL(M) and E ‖X − Y‖₂, in km.
    records
        How many records have a prior.
    band_edges_km
        See :func:`band_edges_km`.
    band_probability, band_loss_km
        By band, float64 of shape (bands,): its probability; its part of the expected loss, in km.
    by_record, by_report
        Tallies of ℓ(x), and of c(x, y).
    expected_km
        ℓ(x), float64 of the grid's shape, in km; not-a-number without a prior. None if nobody asked.
    """

    loss_km: float
    distance_km: float
    records: int
    band_edges_km: NDArray[np.float64]
    band_probability: NDArray[np.float64]
    band_loss_km: NDArray[np.float64]
    by_record: Tally
    by_report: Tally
    expected_km: NDArray[np.float64] | None

    def bands(self) -> list[dict[str, Any]]:
        """Return the bands as plain JSON values; the loss is the mean within the band, if there is any."""
        edges = self.band_edges_km.tolist()
        values = zip(self.band_probability.tolist(), self.band_loss_km.tolist(), strict=True)
        return [
            {
                "from_km": lower,
                "to_km": upper,
                "probability": probability,
                "loss_km": loss / probability if probability else None,
            }
            for lower, upper, (probability, loss) in zip(edges[:-1], edges[1:], values, strict=True)
        ]


def add_up(store: MechanismStore, parts: Iterable[BlockSpread], keep_records: bool) -> Spread:
    """Add up what all blocks answer.

    Parameters
    ----------
    store
        The store.
    parts
        What :func:`spread_block` answers, in the order of the blocks, so that sums are always the same to
        the last bit; each is let go of as soon as it is added.
    keep_records
        Whether they hold the losses of records.

    Raises
    ------
    StoreError
        If the sum is not finite.
    """
    outputs = store.read_output_xy_km()
    edges = band_edges_km(store.grid, outputs)
    losses, distance_km, records = [], 0.0, 0
    bands = np.zeros((2, len(edges) - 1))
    by_record, by_report = Tally(), Tally()
    expected = np.full(store.grid.shape, np.nan) if keep_records else None
    blocks: Iterable[Block] = store.plan
    for block, part in zip(blocks, parts, strict=True):
        losses.append(part.loss_km)
        distance_km += part.distance_km
        records += part.records
        bands += part.band_probability, part.band_loss_km
        by_record.merge(part.by_record)
        by_report.merge(part.by_report)
        if expected is not None and part.expected_km is not None:
            expected[block.owned_x, block.owned_y] = part.expected_km
    # Added up as where a job is finished.
    loss_km = finite(float(sum(losses)), store)
    return Spread(loss_km, distance_km, records, edges, bands[0], bands[1], by_record, by_report, expected)
