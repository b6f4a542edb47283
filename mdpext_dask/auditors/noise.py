"""The certificate of noise, in a store or a city: its rows are what its tables say, and the tables keep ε.

Let m(δ) be the mass of a cell at an offset δ from a record, V what they add up to, and N_y how many cells
that some record reaches are reported as y. A row that follows from the tables is, with s = (1 − K f) / V,

    M(y|x) = f + s Σ_{c: r(c) = y} m(c − x) = s Σ_{c: r(c) = y} (m(c − x) + τ) + (f − s τ N_y),

and with τ = f / (s · the largest N_y) the last term is a constant that is not negative. A ratio of two such
sums is at most the largest ratio of their terms, so

    |log M(y|x) − log M(y|x')| ≤ the largest |log (m(δ) + τ) − log (m(δ') + τ)| over δ − δ' = x' − x:

one function on the lattice of offsets, whatever the outputs. What it keeps is certified by directions
(:mod:`mdpext_dask.auditors.directions`), from the masses as they are stored. Beyond the table m is 0; with a
rim of zeros around it, an offset further out may be moved onto the rim, which is closer to all others.

The stored rows are then compared with those that follow from the tables. If no logarithm differs by more than
r, a log ratio of normalised rows differs by at most 4 r, over a distance of at least one step of records.
PROOF.md, section 2, has the proof.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdpext_dask.auditors.certificate import damage_found
from mdpext_dask.auditors.city import CitySource
from mdpext_dask.auditors.directions import RADII, Step, sides_of, slopes, steps_of
from mdpext_dask.auditors.source import SAMPLER_RANGE
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import StoreError
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.noise import NoiseTables
from mdpext_dask.extend.noise_patches import NoisePatches
from mdpext_dask.problem.grid import Array, Grid
from mdpext_dask.store.integrity import ShardDamage
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import local_rows_of, noise_patches, noise_tables
from mdpext_dask.store.schema import PROBABILITY, is_noise, sha256_of

# Of a difference of two float64 logarithms, of up to 750, of a mass plus τ.
_LOG_ERROR = 5e-13
_ROUNDING = 1e-12
# Lines of records that are compared at a time, about.
_LINES = 32


@dataclass(frozen=True)
class NoiseCertificate:
    """What tables of noise certify of a store.

    Parameters
    ----------
    by_block
        ε of the records of each block or tile, towards all others, in 1/km; infinite where rows are not those
        of the tables.
    damage
        Shards that are not those of their receipts, by block.
    """

    by_block: tuple[float, ...]
    damage: tuple[ShardDamage, ...]

    @property
    def epsilon(self) -> float:
        """Smallest ε, in 1/km, that is shown to be kept by all pairs and outputs."""
        return max(self.by_block)


def certify_noise(subject: Subject, executor: Executor, stages: Stages) -> NoiseCertificate | None:
    """Certify a store or a city by its tables of noise; None if it has none, or they are damaged."""
    source, store = subject.source, subject.store
    tables: NoiseTables | None = None
    arguments: list[tuple[Any, ...]] = []
    function: Any = compare_tile
    try:
        if store is not None and is_noise(store.seed_attributes):
            tables, function = noise_tables(store), compare_block
            known = sha256_of(*tables.arrays), tables.outputs, tables.kernel.lattice.grid
            arguments = [(store.url, index, *known) for index in range(store.plan.blocks)]
        elif isinstance(source, CitySource):
            tables = source.city.noise
            arguments = [(source, index) for index in range(source.parts)]
    except StoreError:
        return None
    if tables is None:
        return None
    epsilon, rounding = epsilon_of_tables(tables, subject.promise.metric_p)
    if math.isinf(epsilon):  # as where records coincide
        return None
    with stages.stage("audit", len(arguments)):
        found = stages.gather(executor, "audit", function, arguments)
    step_km = min(sides_of(tables.kernel.lattice.grid)) * (1 - _ROUNDING)
    by_block = [epsilon + 4 * (rounding + difference) / step_km for difference, _ in found]
    # Written so that NaN is infinite.
    by_block = [each if 0 <= each < math.inf else math.inf for each in by_block]
    return NoiseCertificate(tuple(by_block), tuple(damage for _, damage in found if damage is not None))


def compare_block(url: str, index: int, sha256: str, outputs: int, grid: Grid) -> tuple[float, ShardDamage]:
    """Compare the rows that a block of a store owns with those that follow from its tables.

    Parameters
    ----------
    url, index
        The store and the block.
    sha256, outputs, grid
        Digest of the tables, K and the records, as they are where ε is derived from them.

    Returns
    -------
    By how much a log probability differs at most, and what is wrong with the block's shards.
    """
    store = MechanismStore.open(url)
    block = store.plan[index]
    damage = damage_found(store, block)
    # Whole chunks at a time, and not the block, whose outputs may be many.
    chunk = store.array(PROBABILITY).chunks[0]
    lines = chunk * math.ceil(_LINES / chunk)
    largest = 0.0
    try:
        patches = noise_patches(url, sha256, outputs, grid)
        for first in range(block.owned_x.start, block.owned_x.stop, lines):
            x = slice(first, min(first + lines, block.owned_x.stop))
            rows = local_rows_of(store, x, block.owned_y)
            largest = max(largest, _difference(rows, patches, x, block.owned_y))
        return largest, damage
    except StoreError:
        return math.inf, damage


def compare_tile(source: CitySource, index: int) -> tuple[float, None]:
    """Compare the rows of a tile of a city with those that follow from its tables."""
    patches, (x, y) = source.noise_patches, source.city.tiles.records(index)
    rows = source.part(index)[1].reshape(x.stop - x.start, y.stop - y.start, -1)
    local = LocalRows.of(rows, float(np.float32(patches.tables.floor)))
    return _difference(local, patches, x, y), None


def _difference(rows: LocalRows, patches: NoisePatches, x: slice, y: slice) -> float:
    """Return by how much the logarithm of an entry differs from what follows from tables; may be infinite.

    It is for rows that the sampler refuses.
    """
    if rows.total_outputs != patches.tables.outputs:
        return math.inf
    largest, counts = 0.0, rows.counts.astype(np.float64)
    for patch in patches.of(x, y):
        ours, columns = rows.entries[patch.within(x, y)], rows.columns_of(patch.near)
        # What else there is, the column of far outputs always, stands beside the floor.
        beside = np.ones(len(counts), dtype=bool)
        beside[columns] = False
        beside[-1] |= rows.copies > 1
        ratios = ours[..., columns] / patch.rows, ours[..., beside] / patches.tables.floor
        least = min(float(ratio.min(initial=1.0)) for ratio in ratios)
        most = max(float(ratio.max(initial=1.0)) for ratio in ratios)
        total = np.einsum("xyk,k->xy", ours, counts).max()
        # Written so that NaN is infinitely far.
        usable = ours.min() >= SAMPLER_RANGE.least and total <= SAMPLER_RANGE.largest_total
        if not (usable and 0 < least <= most < math.inf):
            return math.inf
        largest = max(largest, -math.log(least), math.log(most))
    return largest


def epsilon_of_tables(tables: NoiseTables, metric_p: float) -> tuple[float, float]:
    """Return the ε that rows keep, in 1/km, but for what their logarithms may be off by, and that.

    Parameters
    ----------
    tables
        The tables.
    metric_p
        Exponent p of the metric.
    """
    kernel, lattice = tables.kernel, tables.kernel.lattice
    masses, per_cell, step = kernel.masses, lattice.per_cell, lattice.per_record
    window = masses.shape[-1]
    # A record that is `phase` squares into its cell sees the cells' first squares that many steps nearer.
    offsets = masses[::-1, ::-1].transpose(2, 0, 3, 1).reshape(per_cell * window, per_cell * window)
    sides_km = sides_of(lattice.grid)
    # Tables that are none of noise may overflow: what is not finite proves nothing.
    with np.errstate(all="ignore"):
        counted = np.bincount(tables.reported[kernel.reached], minlength=tables.outputs).max()
        scale = (1 - tables.outputs * tables.floor) / kernel.totals
        threshold = tables.floor / (scale.max() * np.float64(counted))
        logs = np.log(np.pad(offsets, step) + threshold)
        epsilon = _epsilon_of_function(logs, step, sides_km, metric_p)
        totals = tables.outputs * tables.floor + scale * masses.sum(axis=(2, 3))
        rounding = kernel.log_error + float(np.log(totals.max() / totals.min())) + _ROUNDING
    sound = 0 < threshold < math.inf and np.isfinite(logs).all() and min(sides_km) > 0
    if not (sound and math.isfinite(epsilon) and math.isfinite(rounding)):
        return math.inf, 0.0
    return epsilon, rounding


def _epsilon_of_function(logs: Array, step: int, sides_km: tuple[float, float], metric_p: float) -> float:
    """Return the certificate by directions of one function of offsets, in 1/km.

    Parameters
    ----------
    logs
        Its logarithms, float64, on a lattice of which records are every `step`-th point. All its sublattices
        are looked at as one, by the steepest.
    step
        See there.
    sides_km
        Between neighbouring records.
    metric_p
        Exponent p of the metric.
    """
    shape = math.ceil(logs.shape[0] / step), math.ceil(logs.shape[1] / step)
    largest: dict[Step, Array] = {}
    for a, b in steps_of(RADII[-1], shape):
        east, west = logs[a * step :], logs[: len(logs) - a * step]
        along = abs(b) * step
        first, last = (east[:, along:], west[:, : west.shape[1] - along])
        if b < 0:
            first, last = east[:, : east.shape[1] - along], west[:, along:]
        largest[a, b] = np.array([float(np.abs(first - last).max()) + _LOG_ERROR])
    certified, _ = slopes(largest, RADII[-1], shape, sides_km, metric_p)
    return float(certified[0])
