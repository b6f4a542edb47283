"""Coarse places: fewer records than there are, so that a place which wobbles stays the same place.

Of the lattice of records along an axis only every m-th is used, and the last. A place is moved to the
nearest of these, at most m h / 2 away along the axis: also beyond the last multiple of m, where the last
record takes its turn. So a place is moved by at most ρ' = ‖(m h / 2, m h / 2)‖_p, and two places at distance
d are told apart by at most ε (d + 2ρ'), as with m = 1 by ε (d + 2ρ).
"""

import math

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError

# A side that is a whole number of steps must not gain one through rounding.
_ROUNDING_STEPS = 1e-9
# Wider than the Earth: all places are one.
_WIDEST_KM = 1e5


def steps_of(place_km: float, spacing_km: float) -> int:
    """Return m: how many steps of the lattice a coarse place is wide, to be no narrower than asked for.

    Parameters
    ----------
    place_km
        Side of a coarse place, in km.
    spacing_km
        Distance h of neighbouring records, in km.

    Raises
    ------
    SpecError
        If it is not a positive number.
    """
    if not (isinstance(place_km, int | float) and 0 < place_km <= _WIDEST_KM):
        raise SpecError(f"place_km: must be a positive number of km, up to {_WIDEST_KM:g}, got {place_km!r}")
    return max(math.ceil(place_km / spacing_km - _ROUNDING_STEPS), 1)


def radius_km(steps: int, spacing_km: float, metric_p: float) -> float:
    """Return ρ' = ‖(m h / 2, m h / 2)‖_p, in km: how far a place is moved, at most."""
    return steps * spacing_km / 2 * 2 ** (1 / metric_p)


def coarse_indices(position: NDArray[np.float64], steps: int, last: int) -> NDArray[np.intp]:
    """Return the records along one axis to which places are moved.

    Parameters
    ----------
    position
        Where places are along the axis, in steps from the first record, between 0 and `last`; any shape.
    steps
        m.
    last
        Index of the last record of the axis.

    Returns
    -------
    Indices of the same shape: multiples of m, or `last`.
    """
    return np.asarray(np.minimum(np.rint(position / steps) * steps, last), dtype=np.intp)
