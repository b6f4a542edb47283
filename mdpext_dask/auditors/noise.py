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
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import damage_found
from mdpext_dask.auditors.city import CitySource
from mdpext_dask.auditors.directions import RADII, Step, slopes, steps_of
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import StoreError
from mdpext_dask.extend.noise import NoiseTables
from mdpext_dask.problem.grid import Array
from mdpext_dask.store.integrity import ShardDamage
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import noise_tables, rows_of
from mdpext_dask.store.schema import is_noise

# Of a float64 logarithm of a mass plus τ, and of τ itself, with room.
_LOG_ERROR = 1e-13
_ROUNDING = 1e-12


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
            arguments = [(store.url, index) for index in range(store.plan.blocks)]
        elif isinstance(source, CitySource):
            tables = source.city.noise
            arguments = [(source, index) for index in range(source.parts)]
    except StoreError:
        return None
    if tables is None:
        return None
    epsilon, rounding = epsilon_of_tables(tables, subject.promise.metric_p)
    with stages.stage("audit", len(arguments)):
        found = stages.gather(executor, "audit", function, arguments)
    step_km = tables.kernel.lattice.grid.spacing_km * (1 - _ROUNDING)
    by_block = tuple(epsilon + 4 * (rounding + difference) / step_km for difference, _ in found)
    return NoiseCertificate(by_block, tuple(damage for _, damage in found if damage is not None))


def compare_block(url: str, index: int) -> tuple[float, ShardDamage]:
    """Compare the rows that a block of a store owns with those that follow from its tables.

    Returns
    -------
    By how much a log probability differs at most, and what is wrong with the block's shards.
    """
    store = MechanismStore.open(url)
    block = store.plan[index]
    damage = damage_found(store, block)
    try:
        stored = rows_of(store, block.owned_x, block.owned_y)
        return _difference(stored, noise_tables(store), block.owned_x, block.owned_y), damage
    except StoreError:
        return math.inf, damage


def compare_tile(source: CitySource, index: int) -> tuple[float, None]:
    """Compare the rows of a tile of a city with those that follow from its tables."""
    tables, (x, y) = source.city.noise, source.city.tiles.records(index)
    assert tables is not None
    rows = source.part(index)[1].reshape(x.stop - x.start, y.stop - y.start, -1)
    return _difference(rows, tables, x, y), None


def _difference(rows: NDArray[np.floating], tables: NoiseTables, x: slice, y: slice) -> float:
    """Return by how much the logarithm of an entry differs from what follows from tables; may be infinite."""
    largest = 0.0
    for ours, line in zip(rows, tables.lines(x, y), strict=True):
        ratio = ours / line
        least, most = float(ratio.min()), float(ratio.max())
        # Written so that NaN is infinitely far.
        if not 0 < least <= most < math.inf:
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
    square_km = lattice.cell_km / per_cell
    middle = per_cell * lattice.reach + (per_cell - 1) / 2
    x, y = np.nonzero(offsets)
    if not len(x):
        return math.inf, 0.0
    reached_km = float(np.hypot(x - middle, y - middle).max()) * square_km * (1 + _ROUNDING)
    counted = np.bincount(tables.reported[lattice.beyond_km() <= reached_km], minlength=tables.outputs)
    scale = (1 - tables.outputs * tables.floor) / kernel.totals
    threshold = tables.floor / float(scale.max() * counted.max())
    logs = np.log(np.pad(offsets, step) + threshold)
    epsilon = 0.0
    # Records are `step` squares apart, so offsets of one cell from two records are.
    for i in range(step):
        for j in range(step):
            epsilon = max(epsilon, _epsilon_of_function(logs[i::step, j::step], square_km * step, metric_p))
    totals = tables.outputs * tables.floor + scale * masses.sum(axis=(2, 3))
    spread = math.log(float(totals.max() / totals.min()))
    return epsilon, kernel.log_error + spread + _ROUNDING


def _epsilon_of_function(logs: Array, step_km: float, metric_p: float) -> float:
    """Return the certificate by directions of one function on a lattice, in 1/km, from its logarithms."""
    largest: dict[Step, Array] = {}
    for a, b in steps_of(RADII[-1], (logs.shape[0], logs.shape[1])):
        east, west = logs[a:], logs[: len(logs) - a]
        first, last = (east[:, b:], west[:, : west.shape[1] - b]) if b >= 0 else (east[:, :b], west[:, -b:])
        largest[a, b] = np.array([float(np.abs(first - last).max()) + _LOG_ERROR])
    shape = (logs.shape[0], logs.shape[1])
    certified, _ = slopes(largest, RADII[-1], shape, (step_km, step_km), metric_p)
    return float(certified[0])
