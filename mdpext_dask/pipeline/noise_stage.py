"""Making the tables of a store of planar noise: the mass of cells around a record, and the output of each.

There is no seed program. The tables are in the seed group and under its digest, and a block's rows follow
from them alone (:func:`mdpext_dask.store.rows.extended_block`). That noise keeps ε is said in
:mod:`mdpext_dask.extend.noise`; what is proved of the store is its certificate, that of steps between records
(:mod:`mdpext_dask.auditors.directions`), which is stricter by a factor that is known beforehand. The noise is
of so much less than ε.
"""

from dataclasses import replace

import numpy as np

from mdpext_dask.auditors.directions import RADII, slopes, steps_of
from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.fine_noise import choose_noise
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.mechanism_store import MechanismStore


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
    noise = choose_noise(problem, euclidean)
    if noise.floor * problem.outputs >= 1:
        raise SolverError(f"noise: no floor is left for {problem.outputs} outputs; use fewer")
    lattice = noise.kernel.lattice
    form = np.array([lattice.per_cell, lattice.per_record, lattice.reach, noise.floor])
    store.write_noise(noise.reported, noise.kernel.masses, noise.kernel.totals, form, noise.facts)


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
