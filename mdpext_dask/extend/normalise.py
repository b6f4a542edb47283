"""From log scores to rows that sum to 1, with the same bits on every machine."""

import math

import numpy as np
from numpy.typing import NDArray

# ln 2 in two parts; the high one has 21 trailing zero bits, so that n · _LN2_HIGH is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LOG2_E = 1.4426950408889634
# Taylor coefficients 1/12! ... 1/0!: for |r| ≤ ln 2 / 2 the rest is below 2e-16.
_TAYLOR = tuple(1 / math.factorial(n) for n in range(12, -1, -1))
_EXPONENT_BIAS = 1023
# |f| ≤ 0.1716 below: f^23 / 23 is below 1e-19.
_SQRT_HALF, _LAST_TERM = 0.7071067811865476, 21
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


def logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log x for normal x > 0, good to a few units of 1e-16, the same bits on every machine.

    With x = m 2^n and f = (m − 1)/(m + 1), log x = n log 2 + 2 (f + f³/3 + f⁵/5 + …).
    """
    mantissa, power = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, 2 * mantissa, mantissa)
    exponent = (power - small).astype(np.float64)
    f = (mantissa - 1) / (mantissa + 1)
    square = f * f
    series = np.full_like(f, 1 / _LAST_TERM)
    for term in range(_LAST_TERM - 2, 0, -2):
        series *= square
        series += 1 / term
    return np.asarray(exponent * _LN2_HIGH + (2 * f * series + exponent * _LN2_LOW))


def normalise(weight: NDArray[np.float64], *, out: NDArray[np.float32]) -> None:
    """Divide weights by their sum over the last axis, into float32.

    Parameters
    ----------
    weight
        Positive, float64 of shape (..., K).
    out
        Where rows go, float32 of the same shape.
    """
    total = np.add.reduce(weight, axis=-1, keepdims=True)
    np.divide(weight, total, out=out, casting="same_kind")
