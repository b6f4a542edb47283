"""Making the tables of a store of planar noise: the mass of cells around a record, and the output of each.

There is no seed program; the outputs of cells are chosen by tasks, a tile of cells each. The tables are in
the seed group and under its digest, and a block's rows follow from them alone
(:func:`mdpext_dask.store.rows.extended_block`). That noise keeps ε is said in
:mod:`mdpext_dask.extend.noise`; what is proved of the store is its certificate
(:mod:`mdpext_dask.auditors.noise`), by steps between records
(:mod:`mdpext_dask.auditors.directions`), which is stricter by a factor that is known beforehand. The noise is
of so much less than ε.
"""

import math
from functools import lru_cache

import numpy as np

from mdpext_dask.auditors.directions import RADII, slopes, steps_of
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.fine_noise import FineNoise, cells_of, choose_noise, remap_of
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon
from mdpext_dask.evaluation.loss import expected_loss
from mdpext_dask.events import Note
from mdpext_dask.extend.noise import NoiseTables
from mdpext_dask.extend.noise_remap import Remap, Tile, tile_cells, tile_count
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.local_chunks import keep_floor
from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import noise_patches
from mdpext_dask.store.schema import NOISE_TABLES, sha256_of

# Of the logarithm of what is stored: half a unit in the last place, and the error of the next order.
_FLOAT32_ERROR = 2.0**-24 * (1 + 2.0**-20)
# Of the reports from a place, a share that is worth a note.
_NEARLY_ALL = 0.99


def find_noise(
    store: MechanismStore,
    executor: Executor,
    stages: Stages,
    names: tuple[str, ...] = NOISE_TABLES,
    epsilon_per_km: float | None = None,
) -> FineNoise:
    """Choose the noise and its remap, and write their tables beside whatever seed there is.

    Parameters
    ----------
    store, executor, stages
        The store, and where tiles of its noise are remapped.
    names
        What to call the tables.
    epsilon_per_km
        ε of the noise, for d_2; default: as much as steps between records certify.

    Raises
    ------
    SolverError
        If the losses of a tile of noise cells do not fit into memory, or rounding takes too much of ε.
    """
    design, p = float(store.attributes["epsilon_design_per_km"]), store.metric_p
    euclidean = epsilon_per_km or euclidean_epsilon(design, p) / strictness(store.grid, design, p)
    tiles = tile_count(cells_of(store.grid, euclidean))
    work = [(store.url, euclidean, index) for index in range(tiles)]
    with stages.stage("seed", tiles, "tiles"):
        noise = choose_noise(
            store.grid,
            store.outputs,
            euclidean,
            lambda _: stages.in_order(executor, "seed", remap_tile, work),
            _FLOAT32_ERROR,
        )
        if noise.floor * store.outputs >= 1:
            most = math.ceil(1 / noise.floor) - 1
            raise SolverError(f"noise: no floor is left for {store.outputs} outputs; use at most {most:,}")
        tables = _tables(store, noise)
        for name, values in zip(names, tables.arrays, strict=True):
            dimensions = tuple(f"{name}_{axis}" for axis in range(values.ndim))
            lost = -1 if name == names[0] else np.nan
            store.create_seed_array(name, dimensions, values.shape, fill_value=lost, data=values)
    middle = (slice(side // 2, side // 2 + 1) for side in store.grid.shape)
    row = tables.stored_rows(*middle)[0, 0]
    if row.max() > _NEARLY_ALL and store.outputs > 1:
        said = f"{row.max():.2%} of the reports from the middle of the grid are output {row.argmax()}"
        stages.observer(Note(f"noise: {said}: with this prior, loss and ε, that is nearly always the best"))
    return noise


def write_noise(store: MechanismStore, noise: FineNoise) -> None:
    """Make the tables of noise, which are written, the store's seed, under one digest."""
    keep_floor(store, noise.floor)
    digest = tables_sha256(store, noise)
    # The attributes come last: they mark the tables as written.
    store.note_seed({"sha256": digest, "extension": list(NOISE_TABLES), "noise": noise.facts})


def tables_sha256(store: MechanismStore, noise: FineNoise) -> str:
    """Return the digest of the tables of noise."""
    return sha256_of(*_tables(store, noise).arrays)


def noise_loss(
    store: MechanismStore,
    noise: FineNoise,
    executor: Executor,
    stages: Stages,
    names: tuple[str, ...] = NOISE_TABLES,
) -> float:
    """Return UL of the mechanism that the written tables of noise would be extended to, in km."""
    blocks, digest = store.plan.blocks, tables_sha256(store, noise)
    with stages.stage("seed", blocks, "blocks"):
        work = [(store.url, index, digest, names) for index in range(blocks)]
        return float(sum(stages.gather(executor, "seed", noise_loss_block, work)))


def noise_loss_block(url: str, index: int, sha256: str, names: tuple[str, ...]) -> float:
    """Return a block's part of :func:`noise_loss`, in km, from tables with a digest and these names."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    patches = noise_patches(url, sha256, store.outputs, store.grid, names)
    return expected_loss(store, block, patches.local_rows(block.owned_x, block.owned_y))


def _tables(store: MechanismStore, noise: FineNoise) -> NoiseTables:
    return NoiseTables(noise.kernel, noise.reported, store.outputs, noise.floor)


def remap_tile(url: str, epsilon_per_km: float, index: int) -> Tile:
    """Return the best outputs of a tile of the cells of noise around a store's records.

    Parameters
    ----------
    url
        The store.
    epsilon_per_km
        ε of the noise, for d_2.
    index
        Which tile.
    """
    store = MechanismStore.open(url)
    remap = _remap(url, store.problem_sha256, epsilon_per_km)
    return remap.tile(tile_cells(remap.lattice, index), lambda east, north: store.read("prior", east, north))


@lru_cache(maxsize=1)
def _remap(url: str, problem_sha256: str, epsilon_per_km: float) -> Remap:
    """Return the remap of a store's noise, whose masses are computed once per process."""
    store = MechanismStore.open(url)
    lattice = cells_of(store.grid, epsilon_per_km)
    return remap_of(lattice, epsilon_per_km, cached_loss(url, problem_sha256), store.output_xy_km())


def strictness(grid: Grid, epsilon_per_km: float, p: float) -> float:
    """Return how many times ε steps between records certify of noise that keeps ε d_2, for the metric d_p.

    Noise that keeps :func:`~mdpext_dask.evaluation.baselines.noise.euclidean_epsilon` of ε steepens a step
    by u no more than that times ‖u‖_2; the certificate of such steps is computed as that of a store is.
    """
    euclidean = euclidean_epsilon(epsilon_per_km, p)
    largest = {
        step: np.array([euclidean * grid.spacing_km * np.hypot(*step)])
        for step in steps_of(RADII[-1], grid.shape)
    }
    sides = grid.spacing_km, grid.spacing_km
    certified, _ = slopes(largest, RADII[-1], grid.shape, sides, p)
    return max(float(certified[0]) / epsilon_per_km, 1.0)
