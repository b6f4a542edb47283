"""How the loss of a mechanism is spread: over records, over reports, over distances; block by block.

A task reads the rows that its block owns once and answers with sums, with tallies in the bins that hold
anything, and, if asked, with one number for every record. Records without a prior are skipped; their loss is
NaN.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from mdpext_dask.evaluation.loss import finite, lines_of
from mdpext_dask.evaluation.quantiles import Bins, Tally
from mdpext_dask.problem.grid import Array, Box, Grid
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import MechanismStore

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
    bands
        By band of distances: its probability, and its part of the expected loss in km, float64 of shape
        (2, bands).
    by_record
        Prior of the records' expected losses.
    by_report
        Probabilities π(x) M(y|x) of the losses c(x, y).
    expected_km
        ℓ(x), float64 of the shape of the owned records, in km; NaN without a prior. None unless asked for.
    """

    loss_km: float
    distance_km: float
    records: int
    bands: Array
    by_record: Bins
    by_report: Bins
    expected_km: Array | None


def spread_block(url: str, index: int, keep_records: bool) -> BlockSpread:
    """Return what the records that a block owns add; with the loss of each one if `keep_records`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    block = store.plan[index]
    outputs = store.output_xy_km()
    edges = band_edges_km(store.grid, outputs)
    loss_km, distance_km, records, bands = 0.0, 0.0, 0, np.zeros((2, len(edges) - 1))
    by_record, by_report = Tally(), Tally()
    expected = np.full(block.owned_shape, np.nan) if keep_records else None
    for line in lines_of(store, block):
        column = line.column
        # A NaN has no bin.
        loss_km += finite(line.part_km(), store)
        records += len(column.used)
        apart = cdist(column.records_km, outputs)
        weights, losses, distances = line.joint.ravel(), column.loss_km.ravel(), apart.ravel()
        distance_km += finite(float(weights @ distances), store)
        band = np.searchsorted(edges[1:-1], distances, side="right")
        for total, weight in zip(bands, (weights, weights * losses), strict=True):
            total += np.bincount(band, weight, len(total))
        by_record.add(line.expected_km, column.prior)
        by_report.add(losses, weights)
        if expected is not None:
            expected[column.i, column.used] = line.expected_km
    return BlockSpread(loss_km, distance_km, records, bands, by_record.bins(), by_report.bins(), expected)


def band_edges_km(grid: Grid, output_xy_km: Array) -> Array:
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
    box = grid.box
    corners = (box.west_km, box.south_km), (box.east_km, box.north_km)
    box = Box.around(np.vstack([corners, output_xy_km]))
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


@dataclass(frozen=True)
class Spread:
    """How the loss of a whole mechanism is spread; see :class:`BlockSpread`.

    Parameters
    ----------
    loss_km, distance_km
        UL(M) and E ‖X − Y‖₂, in km.
    records
        How many records have a prior.
    edges_km
        Edges of the bands; see :func:`band_edges_km`.
    bands
        By band: its probability, and its part of the expected loss in km, float64 of shape (2, bands).
    by_record, by_report
        Tallies of ℓ(x), and of c(x, y).
    expected_km
        ℓ(x), float64 of the grid's shape, in km; NaN without a prior. None unless asked for.
    """

    loss_km: float
    distance_km: float
    records: int
    edges_km: Array
    bands: Array
    by_record: Tally
    by_report: Tally
    expected_km: Array | None

    def by_distance(self) -> list[dict[str, Any]]:
        """Return the bands as plain JSON values; the loss is the mean within the band, if there is any."""
        found = []
        for edges, (share, loss) in zip(pairwise(self.edges_km.tolist()), self.bands.T.tolist(), strict=True):
            mean = loss / share if share else None
            found.append({"from_km": edges[0], "to_km": edges[1], "probability": share, "loss_km": mean})
        return found


def add_up(store: MechanismStore, parts: Iterable[BlockSpread], keep_records: bool) -> Spread:
    """Add up what all blocks answer.

    Parameters
    ----------
    store
        The store.
    parts
        What :func:`spread_block` answers, in the order of the blocks, so that sums are always the same to
        the last bit; each is dropped as soon as it is added.
    keep_records
        Whether they hold the losses of records.

    Raises
    ------
    StoreError
        If the sum is not finite.
    """
    edges = band_edges_km(store.grid, store.output_xy_km())
    losses, distance_km, records = [], 0.0, 0
    bands = np.zeros((2, len(edges) - 1))
    by_record, by_report = Tally(), Tally()
    expected = np.full(store.grid.shape, np.nan) if keep_records else None
    blocks: Iterable[Block] = store.plan
    for block, part in zip(blocks, parts, strict=True):
        losses.append(part.loss_km)
        distance_km += part.distance_km
        records += part.records
        bands += part.bands
        by_record.merge(part.by_record)
        by_report.merge(part.by_report)
        if expected is not None and part.expected_km is not None:
            expected[block.owned_x, block.owned_y] = part.expected_km
    # Added up as where a job is finished.
    loss_km = finite(float(sum(losses)), store)
    return Spread(loss_km, distance_km, records, edges, bands, by_record, by_report, expected)
