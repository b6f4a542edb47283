"""Making the tables of a store of planar noise: the mass of cells around a record, and the output of each.

There is no seed program. The tables are in the seed group and under its digest, and a block's rows follow
from them alone (:func:`mdpext_dask.store.rows.extended_block`). That noise keeps ε is said in
:mod:`mdpext_dask.extend.noise`; what is proved of the store is its certificate
(:mod:`mdpext_dask.auditors.noise`), by steps between records
(:mod:`mdpext_dask.auditors.directions`), which is stricter by a factor that is known beforehand. The noise is
of so much less than ε.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.directions import RADII, slopes, steps_of
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.fine_noise import FineNoise, choose_noise
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.local_rows import keep_floor
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import NOISE_OUTPUT, NOISE_TABLES, sha256_of

# Of the logarithm of what is stored: half a unit in the last place, and the error of the next order.
_FLOAT32_ERROR = 2.0**-24 * (1 + 2.0**-20)


def noise_job(store: MechanismStore) -> None:
    """Choose the noise and its remap, and write their tables as the store's seed.

    Raises
    ------
    SolverError
        If the noise cells or the losses do not fit into memory, or rounding takes too much of ε.
    """
    design = float(store.attributes["epsilon_design_per_km"])
    problem = replace(Problem.of_store(store), epsilon_per_km=design)
    euclidean = euclidean_epsilon(design, store.metric_p) / strictness(store.grid, design, store.metric_p)
    noise = choose_noise(problem, euclidean, rounding=_FLOAT32_ERROR)
    if noise.floor * problem.outputs >= 1:
        most = math.ceil(1 / noise.floor) - 1
        raise SolverError(f"noise: no floor is left for {problem.outputs} outputs; use at most {most:,}")
    _write(store, noise)


def _write(store: MechanismStore, noise: FineNoise) -> None:
    """Write the tables of noise in the place of a seed, under one digest."""
    kernel, lattice = noise.kernel, noise.kernel.lattice
    form = np.array([lattice.per_cell, lattice.per_record, lattice.reach, noise.floor])
    tables: list[NDArray[Any]] = [noise.reported.astype(np.int32), kernel.masses, kernel.totals, form]
    for name, values in zip(NOISE_TABLES, tables, strict=True):
        dimensions = tuple(f"{name}_{axis}" for axis in range(values.ndim))
        lost = -1 if name == NOISE_OUTPUT else np.nan
        store.create_seed_array(name, dimensions, values.shape, fill_value=lost, data=values)
    keep_floor(store, noise.floor)
    digest = sha256_of(*(store.array(f"seed/{name}") for name in NOISE_TABLES))
    # The attributes come last: they mark the tables as written.
    store.note_seed({"sha256": digest, "extension": list(NOISE_TABLES), "noise": noise.facts})


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
