"""Where and how log probabilities change fastest: what the certificate is made of, with directions.

A certificate vector is (D1, D2): the differences of ℓ(y|·) along two sides of a fine cell that meet at one
of its corners, over the spacing. The certificate is their largest q-norm. Refining a seed needs the vectors
themselves: at the four corners of every source cell, and at the worst place inside it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import log_probability, norm_rank
from mdpext_dask.seed.budget import dual_exponent

# The four corners of a source cell, then its worst place.
PLACES = 5
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True)
class Slopes:
    """Certificate vectors of source cells.

    Parameters
    ----------
    vector
        (D1, D2) in 1/km, float32 of shape (cells east, cells north, K, 5, 2): at the corners (west, south),
        (west, north), (east, south), (east, north), and at the place with the largest norm.
    worst
        That place, in fine steps to the east and north from the cell's lower left corner, int16 of shape
        (cells east, cells north, K, 2).
    """

    vector: NDArray[np.float32]
    worst: NDArray[np.int16]


def steepest_slopes(probability: NDArray[np.float32], side_km: float, factor: int, metric_p: float) -> Slopes:
    """Return the certificate vectors of a block.

    Parameters
    ----------
    probability
        The closed block, float32 of shape (cells east · F + 1, cells north · F + 1, K).
    side_km
        Fine spacing h, in km.
    factor
        Refinement factor F.
    metric_p
        Exponent p of the metric.
    """
    outputs = probability.shape[2]
    across, along = ((n - 1) // factor for n in probability.shape[:2])
    vector = np.empty((across, along, outputs, PLACES, 2), dtype=np.float32)
    worst = np.empty((across, along, outputs, 2), dtype=np.int16)
    q = dual_exponent(metric_p)
    for i in range(across):
        logs = log_probability(probability[i * factor : (i + 1) * factor + 1])
        east = np.diff(logs, axis=0) / side_km
        north = np.diff(logs, axis=1) / side_km
        for place, (to_east, to_north) in enumerate(CORNERS):
            # The fine cell in that corner of the source cell, and the sides of it that meet there.
            first = to_north * (factor - 1)
            vector[i, :, :, place, 0] = east[to_east * (factor - 1), first + to_north :: factor][:along]
            vector[i, :, :, place, 1] = north[to_east * factor, first::factor][:along]
        vector[i, :, :, 4], worst[i] = _worst(east, north, factor, q)
    return Slopes(vector, worst)


def _worst(
    east: NDArray[np.float64], north: NDArray[np.float64], factor: int, q: float
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return the largest vector of each cell of a row of source cells, and its place.

    The norm grows with both components, so the worst corner of a fine cell has the larger D1 and the larger
    D2.
    """
    along, outputs = north.shape[1] // factor, north.shape[2]
    size_east, size_north = np.abs(east), np.abs(north)
    rank = norm_rank(
        np.maximum(size_east[:, :-1], size_east[:, 1:]), np.maximum(size_north[:-1], size_north[1:]), q
    )
    by_cell = rank.reshape(factor, along, factor, outputs).transpose(1, 3, 0, 2).reshape(along, outputs, -1)
    step_east, step_north = np.divmod(by_cell.argmax(axis=-1), factor)
    column = np.arange(along)[:, None] * factor + step_north
    output = np.arange(outputs)
    to_north = size_east[step_east, column + 1, output] > size_east[step_east, column, output]
    to_east = size_north[step_east + 1, column, output] > size_north[step_east, column, output]
    vector = np.stack(
        [east[step_east, column + to_north, output], north[step_east + to_east, column, output]], axis=-1
    )
    place = np.stack([step_east + to_east, step_north + to_north], axis=-1)
    return vector.astype(np.float32), place.astype(np.int16)
