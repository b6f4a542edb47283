"""How the loss of a mechanism is spread: over records, over reports, over distances; block by block.

A task reads the rows that its block owns once and answers with sums, with tallies in the bins that hold
anything, and, if asked, with one number for every record. Records without a prior are skipped; their loss is
NaN.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from mdpext_dask.evaluation.loss import finite, lines_of
from mdpext_dask.evaluation.quantiles import Tally
from mdpext_dask.problem.grid import Array, Box, Grid
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import MechanismStore

_STEPS = (1, 2, 5)


@dataclass
class Spread:
    """How the loss of some records is spread.

    Parameters
    ----------
    edges_km
        Edges of the bands of distances; see :func:`band_edges_km`.
    bands
        By band: its probability, and its part of the expected loss in km, float64 of shape (2, bands).
    expected_km
        ℓ(x), float64 of the records' shape, in km; NaN without a prior. None unless asked for.
    loss_km, distance_km
        Their parts of UL(M) and of E ‖X − Y‖₂, in km.
    records
        How many of them have a prior.
    by_record
        Prior of the records' expected losses.
    by_report
        Probabilities π(x) M(y|x) of the losses c(x, y).
    """

    edges_km: Array
    bands: Array
    expected_km: Array | None
    loss_km: float = 0.0
    distance_km: float = 0.0
    records: int = 0
    by_record: Tally = field(default_factory=Tally)
    by_report: Tally = field(default_factory=Tally)

    @classmethod
    def nothing(cls, store: MechanismStore, shape: tuple[int, int] | None) -> "Spread":
        """Return that of no records; with the loss of each one of such a shape, if there is one."""
        edges = band_edges_km(store.grid, store.output_xy_km())
        return cls(edges, np.zeros((2, len(edges) - 1)), None if shape is None else np.full(shape, np.nan))

    def add(self, other: "Spread", block: Block) -> None:
        """Add what a block has."""
        self.loss_km += other.loss_km
        self.distance_km += other.distance_km
        self.records += other.records
        self.bands += other.bands
        self.by_record.merge(other.by_record)
        self.by_report.merge(other.by_report)
        if self.expected_km is not None and other.expected_km is not None:
            self.expected_km[block.owned_x, block.owned_y] = other.expected_km

    def by_distance(self) -> list[dict[str, Any]]:
        """Return the bands as plain JSON values; the loss is the mean within the band, if there is any."""
        found = []
        for edges, (share, loss) in zip(pairwise(self.edges_km.tolist()), self.bands.T.tolist(), strict=True):
            mean = loss / share if share else None
            found.append({"from_km": edges[0], "to_km": edges[1], "probability": share, "loss_km": mean})
        return found


def spread_block(url: str, index: int, keep_records: bool) -> Spread:
    """Return what the records that a block owns add; with the loss of each one if `keep_records`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    block, outputs = store.plan[index], store.output_xy_km()
    found = Spread.nothing(store, block.owned_shape if keep_records else None)
    for line in lines_of(store, block):
        column = line.column
        # A NaN has no bin.
        found.loss_km += finite(line.part_km(), store)
        found.records += len(column.used)
        apart = cdist(column.records_km, outputs)
        weights, losses, distances = line.joint.ravel(), column.loss_km.ravel(), apart.ravel()
        found.distance_km += finite(float(weights @ distances), store)
        band = np.searchsorted(found.edges_km[1:-1], distances, side="right")
        for total, weight in zip(found.bands, (weights, weights * losses), strict=True):
            total += np.bincount(band, weight, len(total))
        found.by_record.add(line.expected_km, column.prior)
        found.by_report.add(losses, weights)
        if found.expected_km is not None:
            found.expected_km[column.i, column.used] = line.expected_km
    return found


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


def add_up(store: MechanismStore, parts: Iterable[Spread], keep_records: bool) -> Spread:
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
    total = Spread.nothing(store, store.grid.shape if keep_records else None)
    losses, blocks = [], iter(store.plan)
    for block, part in zip(blocks, parts, strict=True):
        losses.append(part.loss_km)
        total.add(part, block)
    # Added up as where a job is finished.
    total.loss_km = finite(float(sum(losses)), store)
    return total
