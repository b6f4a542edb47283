"""The seed program with the certificate itself as its constraint, linearised around a mechanism.

    min Σ C z   s.t.  n · (v + ∂v/∂log z · (z / z⁰ − 1)) ≤ ε,  e^{−ρ} ≤ z / z⁰ ≤ e^ρ,  z ≥ δ,  Σ_k z_jk = 1

for the certificate vectors v of the mechanism extended from z⁰ and a fan of normals n of the q-norm's ball
around each. Scores are bilinear in a source cell, so v depends on the cell's four corners and, through the
normaliser, a little on all outputs; that part is left out, and the next linearisation corrects it. Nothing
here carries the guarantee: the certificate of whatever comes out decides.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.seed.columns import GridProgram
from mdpext_dask.seed.grid_rows import CellRows
from mdpext_dask.seed.interior_point import InverseSums, by_output, by_seed, solve_program
from mdpext_dask.seed.model import raised_to_floor

Array = NDArray[np.float64]

# Vectors turn and grow by about so much times ρ / (ε h_0): how far away from ε they are still constrained,
# and how wide their fan is; within these limits.
_TURN, _LEAST_THRESHOLD, _WIDEST = 2.0, 0.6, 0.4
_WIDE_TURN = 0.3
# Slacks of the interior-point method start at no less than this share of the largest; and its iterations.
_LEAST_SLACK, _ITERATIONS = 0.02, 60
# The relative gap a step of ρ is worth, and its limits.
_GAP_OF_REACH, _LEAST_GAP, _LARGEST_GAP = 0.01, 1e-4, 1e-3
# An entry at the floor may still give way a little, or it would have no interior.
_GIVE = 1e-3


@dataclass(frozen=True)
class CertificateVectors:
    """Certificate vectors at places in source cells.

    Parameters
    ----------
    vector
        (D1, D2) in 1/km, float64 of shape (n, 2).
    cell
        Source cell to the east and to the north, and output, integers of shape (n, 3).
    place
        Position in the cell to the east and to the north, in [0, 1], float64 of shape (n, 2).
    """

    vector: Array
    cell: NDArray[np.intp]
    place: Array


@dataclass(frozen=True)
class Limit:
    """What certificate vectors may be.

    Parameters
    ----------
    epsilon
        ε, in 1/km.
    dual_exponent
        q of the norm.
    cell_km
        Side h_0 of a source cell, in km.
    """

    epsilon: float
    dual_exponent: float
    cell_km: float

    def turn(self, reach: float) -> float:
        """Return how far vectors turn, in radians, and by what share they grow, for a reach."""
        return _TURN * reach / (self.epsilon * self.cell_km)

    def threshold(self, reach: float) -> float:
        """Return from which share of ε on a vector has to be constrained for such steps."""
        return max(_LEAST_THRESHOLD, 1 - 2 * self.turn(reach))


def improve(
    rows: Array,
    cost: Array,
    vectors: CertificateVectors,
    limit: Limit,
    reach: float,
    min_probability: float,
    *,
    threads: int = 1,
    inverse_sums: InverseSums | None = None,
) -> Array:
    """Solve the linearised program.

    Parameters
    ----------
    rows
        z⁰, float64 of shape (seeds east, seeds north, K), rows summing to 1.
    cost
        C, of the same shape, in km.
    vectors, limit
        The certificate vectors to keep within ε.
    reach
        ρ: how much log z may change.
    min_probability
        Floor δ.
    threads, inverse_sums
        See :func:`mdpext_dask.seed.interior_point.solve_program`.

    Returns
    -------
    z, shape as `rows`: no entry below the floor, rows summing to 1.
    """
    seeds_x, seeds_y, outputs = rows.shape
    flip = seeds_y > seeds_x
    start = by_output(rows, flip) * outputs
    lower = np.maximum(start * math.exp(-reach), min_probability * outputs)
    lower, upper = np.minimum(lower, start * (1 - _GIVE)), start * math.exp(reach)
    cuts, costs = _cuts(rows, vectors, limit, reach, flip=flip), by_output(cost, flip)
    program = GridProgram(costs, cuts, lower, upper, capped=True, start=start, total=float(outputs))
    gap = min(max(_GAP_OF_REACH * reach, _LEAST_GAP), _LARGEST_GAP)
    solve = functools.partial(solve_program, least_slack=_LEAST_SLACK, iterations=_ITERATIONS)
    solution = solve(program, gap=gap, threads=threads, inverse_sums=inverse_sums)
    improved = np.maximum(by_seed(solution.z, flip), np.finfo(float).tiny)
    improved /= np.add.reduce(improved, axis=-1, keepdims=True)
    return raised_to_floor(improved, min_probability)


def _cuts(rows: Array, vectors: CertificateVectors, limit: Limit, reach: float, *, flip: bool) -> CellRows:
    """Return the rows n · (v + J (z / z⁰ − 1)) ≤ ε, with signs turned and z scaled by K."""
    seeds_x, seeds_y, outputs = rows.shape
    epsilon, cell_km = limit.epsilon, limit.cell_km
    normals = fan(vectors.vector, limit.turn(reach), limit.dual_exponent)
    count = normals.shape[1]
    value = np.einsum("rac,rc->ra", normals, vectors.vector)
    # Rows that are broken at the start need not hold at once, only come down by what is surely within reach.
    restored = min(reach * max(1.0, 1 / (epsilon * cell_km)), 1.0)
    slack = value - np.maximum(epsilon, value * (1 - restored))
    # Derivatives of (D1, D2) by log z at the corners, by offset to the east and to the north.
    east, north = vectors.place[:, :1], vectors.place[:, 1:]
    i, j, output = vectors.cell.T
    corners = []
    for to_east, to_north in ((0, 0), (0, 1), (1, 0), (1, 1)):
        across = (2 * to_east - 1) * (north if to_north else 1 - north)
        along = (2 * to_north - 1) * (east if to_east else 1 - east)
        slope = (normals[:, :, 0] * across + normals[:, :, 1] * along) / cell_km
        corners.append(-slope / (outputs * rows[i + to_east, j + to_north, output])[:, None])
    if flip:
        corners[1], corners[2] = corners[2], corners[1]
        block, position, blocks, size = j, i, seeds_y, seeds_x
    else:
        block, position, blocks, size = i, j, seeds_x, seeds_y
    cell = np.repeat((output * (blocks - 1) + block) * (size - 1) + position, count)
    order = np.argsort(cell, kind="stable")
    coefficient = np.stack([c.ravel() for c in corners], axis=-1)[order]
    return CellRows((outputs, blocks, size), cell[order], coefficient, slack.ravel()[order])


def fan(vector: Array, turn: float, q: float) -> Array:
    """Return normals n of the unit ball of the q-norm, ‖n‖_p = 1, around the directions of vectors.

    n · v ≤ ‖v‖_q for every v, with equality for the vector's own.

    Parameters
    ----------
    vector
        float64 of shape (n, 2), not zero.
    turn
        How far directions may turn, in radians.
    q
        Exponent of the norm, in [1, ∞].

    Returns
    -------
    float64 of shape (n, normals, 2).
    """
    if math.isinf(q) or q == 1:
        # The ball has only four sides; of these, those nearby.
        signs = np.where(vector < 0, -1.0, 1.0)
        turned = np.array([[1, 0], [0, 1]] if math.isinf(q) else [[1, 1], [1, -1], [-1, 1]])
        return np.asarray(signs[:, None] * turned)
    spacing = min(_WIDEST, turn / 2)
    angles = spacing * np.array([0, 1, -1, 2, -2] if turn > _WIDE_TURN else [0, 1, -1])
    angle = np.arctan2(vector[:, 1], vector[:, 0])[:, None] + angles
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    # Scaled by the larger component, so that no power of the other underflows to a wrong norm.
    size = np.abs(direction)
    size /= size.max(axis=-1, keepdims=True)
    norm = (size**q).sum(axis=-1, keepdims=True) ** (1 / q)
    return np.asarray(np.sign(direction) * (size / norm) ** (q - 1))
