"""Log-convex extension: bilinear interpolation of log scores, then one normalisation.

In a source cell f_y(x) = Σ_corners w_c(x) log z_c,y and M(y|x) = exp f_y(x) / Σ exp f. Interpolating
level by level and normalising at each level gives the same mechanism, because a normaliser enters every
output's score alike and cancels; so the whole subtree of a cell is done in closed form.

Along a fine row from the west to the east side of a cell the scores are linear, so their exponentials
form a geometric progression: two exponentials per output and cell row, then one product per record.
Everything is elementwise in a fixed order, and the exponential is our own, made of IEEE operations
only. So a record's bytes depend on the corners of its cell alone: not on the block it is computed in,
the number of workers, or the processor. A record on a side shared by two cells sees only that side's
two corners, so both cells agree to the last bit (requirement A2).
"""

import numpy as np
from numpy.typing import NDArray

# ln 2 in two parts; the high one has 21 trailing zero bits, so that n · _LN2_HIGH is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LOG2_E = 1.4426950408889634
# Taylor coefficients 1/12! ... 1/0!: for |r| ≤ ln 2 / 2 the rest is below 2e-16.
_TAYLOR = (
    1 / 479001600,
    1 / 39916800,
    1 / 3628800,
    1 / 362880,
    1 / 40320,
    1 / 5040,
    1 / 720,
    1 / 120,
    1 / 24,
    1 / 6,
    1 / 2,
    1.0,
    1.0,
)
_EXPONENT_BIAS = 1023
_MANTISSA_BITS = 52


def exponential(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e^x to within 4 units in the last place, for |x| ≤ 700, the same bits on every machine.

    NumPy's own exponential picks its algorithm by the processor's instruction set, so two workers may
    disagree in the last bit. Sums, products and rounding do not.
    """
    power = np.rint(x * _LOG2_E)
    rest = x - power * _LN2_HIGH
    rest -= power * _LN2_LOW
    value = np.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        value *= rest
        value += coefficient
    scale = (power.astype(np.int64) + _EXPONENT_BIAS) << _MANTISSA_BITS
    value *= scale.view(np.float64)
    return value


def extend_log_convex(scores: NDArray[np.float64], factor: int) -> NDArray[np.float32]:
    """Extend log scores on the corners of a block of source cells to its fine records.

    Parameters
    ----------
    scores
        log z, float64 of shape (cells east + 1, cells north + 1, K), each in [-700, 0].
    factor
        Refinement factor F.

    Returns
    -------
    M(y|x), float32 of shape (cells east · F + 1, cells north · F + 1, K): the closed block.
    """
    cells_east, outputs = scores.shape[0] - 1, scores.shape[2]
    fraction = np.arange(factor) / factor
    side = _along_side(scores[0], fraction)
    fine = np.empty((cells_east * factor + 1, len(side), outputs), dtype=np.float32)
    for cell in range(cells_east):
        next_side = _along_side(scores[cell + 1], fraction)
        weight = exponential(side)
        _normalise(weight, out=fine[cell * factor])
        if factor > 1:
            ratio = exponential((next_side - side) / factor)
            for step in range(1, factor):
                weight *= ratio
                _normalise(weight, out=fine[cell * factor + step])
        side = next_side
    _normalise(exponential(side), out=fine[-1])
    return fine


def _along_side(scores: NDArray[np.float64], fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate the scores of one line of seeds to its fine rows, (cells north · F + 1, K)."""
    lower, upper = scores[:-1, None], scores[1:, None]
    t = fraction[:, None]
    fine = ((1 - t) * lower + t * upper).reshape(-1, scores.shape[1])
    return np.concatenate([fine, scores[-1:]])


def _normalise(weight: NDArray[np.float64], *, out: NDArray[np.float32]) -> None:
    total = np.add.reduce(weight, axis=-1, keepdims=True)
    np.divide(weight, total, out=out, casting="same_kind")
