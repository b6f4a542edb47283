"""Whether a triple keeps its bound, where float64 cannot tell: decided in exact and multiple precision.

A stored probability is a fraction with a power of two below the line, and so is a row's total. Hence
M(y|x) / M(y|x') is a rational number r, known exactly, and so are the two differences of coordinates; the
bound b = ε d_p(x, x') + tolerance is an algebraic number. If r = 1 the bound is kept. If not, ln r is
transcendental (Hermite and Lindemann), so |ln r| ≠ b: with enough digits the two are told apart, always.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array

# Digits to begin with, and to give up at; no case that reaches the latter is known.
_DIGITS, _MOST_DIGITS = 40, 2_560
# Last digits of a result that rounding may have changed; a wide margin.
_LAST_DIGITS = 6
# Every number from which decimals are computed here fits; the default would overflow at smaller ones.
_LARGEST_EXPONENT = 10**9


class Undecided(ArithmeticError):
    """Two numbers agree in all digits that were computed."""


def probability_ratio(first: NDArray[np.floating], second: NDArray[np.floating], output: int) -> Fraction:
    """Return M(y|x) / M(y|x') of two rows, each divided by its exact total.

    Parameters
    ----------
    first, second
        Rows of shape (K,), all finite, with positive entries of `output`.
    output
        y.
    """
    ours, theirs = Fraction(float(first[output])), Fraction(float(second[output]))
    return ours * exact_total(second) / (theirs * exact_total(first))


def exact_total(row: NDArray[np.floating]) -> Fraction:
    """Return the sum of a row of shape (K,), all finite, without rounding."""
    return _exact_total(row.tobytes(), row.dtype.str)


@lru_cache(maxsize=4096)
def _exact_total(content: bytes, dtype: str) -> Fraction:
    return sum(map(Fraction, np.frombuffer(content, dtype=dtype).tolist()), Fraction(0))


def log_ratio(ratio: Fraction, digits: int = _DIGITS) -> Decimal:
    """Return |ln r|, computed with this many significant digits."""
    with localcontext(prec=digits, Emax=_LARGEST_EXPONENT, Emin=-_LARGEST_EXPONENT):
        return abs(_decimal(ratio).ln())


def norm(components: Sequence[Fraction | Decimal], p: float | Decimal, digits: int = _DIGITS) -> Decimal:
    """Return ‖components‖_p, computed with this many significant digits."""
    with localcontext(prec=digits, Emax=_LARGEST_EXPONENT, Emin=-_LARGEST_EXPONENT):
        sizes = [abs(_decimal(c) if isinstance(c, Fraction) else c) for c in components]
        if p == 1:
            return sum(sizes, Decimal(0))
        largest = max(sizes)
        if largest == 0 or Decimal(p).is_infinite():
            return largest
        if p == 2:
            return sum((size * size for size in sizes), Decimal(0)).sqrt()
        exponent = Decimal(p)
        shares = sum(((size / largest) ** exponent for size in sizes if size), Decimal(0))
        return largest * shares ** (1 / exponent)


def displacement(first_km: Array, second_km: Array) -> tuple[Fraction, Fraction]:
    """Return x − x' of two points of shape (2,), in km, without rounding."""
    (x, y), (x_prime, y_prime) = first_km.tolist(), second_km.tolist()
    return Fraction(x) - Fraction(x_prime), Fraction(y) - Fraction(y_prime)


def pair_exceeds(
    ratio: Fraction, apart_km: tuple[Fraction, Fraction], p: float, epsilon: float, tolerance: float = 0.0
) -> bool:
    """Return whether |ln r| > ε d_p + tolerance.

    Parameters
    ----------
    ratio
        r > 0.
    apart_km
        x − x', in km.
    p
        Exponent of the metric.
    epsilon
        ε, in 1/km.
    tolerance
        What is let through, in units of the log ratio.

    Raises
    ------
    Undecided
        If thousands of digits do not tell; for exact numbers they do.
    """

    def over_bound(digits: int) -> tuple[Decimal, Decimal]:
        bound = Decimal(epsilon) * norm(apart_km, p, digits) + Decimal(tolerance)
        return log_ratio(ratio, digits) - bound, 1 + bound

    return ratio != 1 and _is_positive(over_bound)


def cell_exceeds(
    rows: NDArray[np.floating], x_km: Array, y_km: Array, output: int, p: float, epsilon: float
) -> bool:
    """Return whether the certificate of one fine cell and output, ‖(max |D1|, max |D2|)‖_q, exceeds ε.

    Parameters
    ----------
    rows
        M(·|x) of the four corners, of shape (2, 2, K), all finite, with positive totals.
    x_km, y_km
        Their coordinates, float64 of shape (2,), in km.
    output
        y.
    p
        Exponent of the metric; q is dual to it.
    epsilon
        ε, in 1/km.

    Raises
    ------
    Undecided
        If thousands of digits do not tell: for a norm of two logarithms nothing says that they must.
    """
    side_x, side_y = Fraction(x_km[1]) - Fraction(x_km[0]), Fraction(y_km[1]) - Fraction(y_km[0])
    corners = rows[..., output]
    if not corners.all():
        return bool(corners.any())  # impossible at some corners only
    east = [probability_ratio(rows[1, j], rows[0, j], output) for j in (0, 1)]
    north = [probability_ratio(rows[i, 1], rows[i, 0], output) for i in (0, 1)]

    def over_limit(digits: int) -> tuple[Decimal, Decimal]:
        slopes = [
            max(log_ratio(ratio, digits) for ratio in ratios) / _decimal(side)
            for ratios, side in ((east, side_x), (north, side_y))
        ]
        # A logarithm near 0 has fewer digits than its size suggests, and short sides make much of that.
        unit = 1 + Decimal(epsilon) + 1 / min(_decimal(side_x), _decimal(side_y))
        return norm(slopes, _dual(p), digits) - Decimal(epsilon), unit

    return any(ratio != 1 for ratio in east + north) and _is_positive(over_limit)


def _is_positive(excess_of: Callable[[int], tuple[Decimal, Decimal]]) -> bool:
    """Return whether a number is above 0, in as many digits as it takes to be sure.

    Parameters
    ----------
    excess_of
        Takes a number of digits; returns the number, and the unit of which its last digits may be wrong.

    Raises
    ------
    Undecided
        If thousands of digits do not tell.
    """
    digits = _DIGITS
    while digits <= _MOST_DIGITS:
        with localcontext(prec=digits, Emax=_LARGEST_EXPONENT, Emin=-_LARGEST_EXPONENT):
            excess, unit = excess_of(digits)
            if abs(excess) > unit * Decimal(10) ** (_LAST_DIGITS - digits):
                return excess > 0
        digits *= 2
    raise Undecided(f"two numbers agree in {digits // 2} digits")


def _decimal(number: Fraction) -> Decimal:
    return Decimal(number.numerator) / Decimal(number.denominator)


def _dual(p: float) -> Decimal:
    """Return q with 1/p + 1/q = 1, to the digits of the context."""
    if p == 1:
        return Decimal("Infinity")
    return Decimal(1) if np.isinf(p) else Decimal(p) / (Decimal(p) - 1)
