"""What a job will lose, about, before anything is built: noise remapped, by a sample of its cells."""

import math
from dataclasses import dataclass, replace

import numpy as np

from mdpext_dask.evaluation.baselines.fine_noise import cells_of, posterior_masses, remap_of
from mdpext_dask.evaluation.baselines.noise import euclidean_epsilon, noisy_places, plain_laplace
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.extend.noise_remap import BLOCK
from mdpext_dask.problem.geometry import RoadGeometry
from mdpext_dask.problem.loss import TravelLoss

# Noisy places that say how often a block is reached; and blocks whose remap is found.
_DRAWS, _BLOCKS = 1_000_000, 32


@dataclass(frozen=True)
class Outlook:
    """About what a job will lose.

    Parameters
    ----------
    loss_km
        Expected loss of planar noise, remapped, in km. Where programs are tried, what is kept loses no more.
    plain_km
        That of planar noise reported at the nearest road node, or at the nearest output where the
        loss is no road distance, in km.
    """

    loss_km: float
    plain_km: float


def outlook(problem: Problem, geometry: RoadGeometry) -> Outlook:
    """Estimate what a job will lose, from draws of a seeded generator, always the same.

    The loss of remapped noise is Σ_b L_b over blocks b of noise cells. With q_b, how often noise falls into
    block b, it is the mean of L_b / q_b over blocks drawn by q; here they are a systematic sample.

    Parameters
    ----------
    problem
        The problem.
    geometry
        Its road network.

    Raises
    ------
    SolverError
        If the losses of a block do not fit into memory.
    """
    epsilon = euclidean_epsilon(problem.epsilon_per_km, problem.metric_p)
    lattice = cells_of(problem.grid, epsilon)
    generator = np.random.default_rng(problem.random_seed)
    _, noisy = noisy_places(problem, generator, _DRAWS)
    first, most = np.array([axis[0] for axis in lattice.middles_km()]), np.array(lattice.shape) - 1
    cell = np.clip(np.rint((noisy - first) / lattice.cell_km), 0, most).astype(np.int64)
    along = -(-lattice.shape[1] // BLOCK)
    block, count = np.unique(cell[:, 0] // BLOCK * along + cell[:, 1] // BLOCK, return_counts=True)
    if len(block) > _BLOCKS:
        steps = (generator.random() + np.arange(_BLOCKS)) * (_DRAWS / _BLOCKS)
        drawn = np.searchsorted(np.cumsum(count), steps, side="right")
        block, weight = block[drawn], _DRAWS / count[drawn] / _BLOCKS
    else:
        weight = np.ones(len(block))
    remap = remap_of(lattice, epsilon, problem.loss, problem.output_xy_km)

    def lost(number: int) -> float:
        x, y = (
            slice(BLOCK * place, min(BLOCK * (place + 1), side))
            for place, side in zip(divmod(number, along), lattice.shape, strict=True)
        )
        return remap.tile((x, y), lambda east, north: problem.prior[east, north]).lost

    total = math.fsum(each * lost(number) for number, each in zip(block.tolist(), weight, strict=True))
    loss_km = total / float(posterior_masses(lattice, epsilon).sum())
    return Outlook(loss_km, plain_laplace(_with_all_nodes(problem, geometry))[0])


def _with_all_nodes(problem: Problem, geometry: RoadGeometry) -> Problem:
    """Return a problem in which every road node within the grid may be reported."""
    if not isinstance(problem.loss, TravelLoss):
        return problem
    nodes = geometry.nodes_inside
    loss = replace(problem.loss, output_node=nodes)
    return replace(problem, output_xy_km=geometry.node_xy_km[nodes], loss=loss)
