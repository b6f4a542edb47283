"""Values on the lines of a lattice, between its points."""

import numpy as np
from numpy.typing import NDArray


def interpolated(values: NDArray[np.float64], parts: int, axis: int = 0) -> NDArray[np.float64]:
    """Interpolate linearly along an axis, between n + 1 points to n · parts + 1.

    What was there comes back to the last bit.

    Parameters
    ----------
    values
        float64.
    parts
        Subdivisions of a step.
    axis
        Which axis.
    """
    values = np.moveaxis(values, axis, 0)
    t = (np.arange(parts) / parts).reshape(-1, *(1,) * (values.ndim - 1))
    fine = (1 - t) * values[:-1, None] + t * values[1:, None]
    fine = np.concatenate([fine.reshape(-1, *values.shape[1:]), values[-1:]])
    return np.moveaxis(fine, 0, axis)
