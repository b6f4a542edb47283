"""How ε is shared out: metric exponents, the normaliser bound, and budgets for the seed LP.

A *budget* β_t bounds how fast a log score may change along axis t between neighbouring seeds, in 1/km.
Normalisation makes the log *probability* change faster than the score; the ways to set β differ in
how they pay for that. PROOF.md beside this module derives the bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Array, Grid

# s(δ_t, δ_o): what normalising may multiply a score's slope along an axis with, at most.
Steepening = Callable[[float, float], float]
# Shares of ε that the published experiments try for the first axis.
PUBLISHED_SHARES = (1 / 5, 2 / 5, 3 / 5, 4 / 5)
# float32 rounding moves a stored log probability by at most 2^-24, and a row's total by as much; the
# extension's own float64 arithmetic stays below the second term.
_STORED_LOG_ERROR = 4 * 2.0**-24 * (1 + 2.0**-23) + 2e-12
# Direction-wise budgets: least angle to either axis, and what the metric's exponent counts for at most.
_LEAST_ANGLE = 0.25
_LEAST_FACTOR = 1 / 8
_SHARPEST_EXPONENT = 4.0
# A program with 100 outputs takes about ten seconds then.
_MANY_SEEDS = 1000
# What a certificate in float64 may be wrong by. A log ratio takes four logarithms of numbers in [2^-36, 2],
# each good to 4 units in the last place (1.4e-14), and their differences; a row's total adds its number of
# terms times 2^-53, twice. Smaller numbers have larger logarithms, whose units are larger in proportion.
_LOG_RATIO_ERROR = 1e-12
_LARGEST_STORED_LOG = 25.0
_TOTAL_ERROR_PER_OUTPUT = 2.0**-51
# Quotients, powers and the root behind a norm.
NORM_RELATIVE_ERROR = 1e-12


@dataclass(frozen=True)
class AxisBudgets:
    """Budgets of the seed LP for both axes.

    Parameters
    ----------
    split
        (ε_1, ε_2): what each axis may use of ε after normalisation, in 1/km.
    beta
        (β_1, β_2): budgets of log scores, in 1/km.
    """

    split: tuple[float, float]
    beta: tuple[float, float]


def dual_exponent(p: float) -> float:
    """Return q with 1/p + 1/q = 1, for p in [1, ∞]."""
    if p == 1:
        return math.inf
    return 1.0 if math.isinf(p) else p / (p - 1)


def vector_norm(first: float, second: float, q: float) -> float:
    """Return ‖(first, second)‖_q."""
    first, second = abs(float(first)), abs(float(second))
    if math.isinf(q):
        return max(first, second)
    largest = max(first, second)
    if largest == 0:
        return 0.0
    return float(largest * ((first / largest) ** q + (second / largest) ** q) ** (1 / q))


def planar_epsilon(epsilon: float, distortion: float) -> float:
    """Return the ε, in 1/km, to keep in the plane so that `epsilon` holds on the ground.

    Planar distance is at most (1 + distortion) times ground distance.
    """
    return math.nextafter(epsilon / (1 + distortion), 0)


def log_ratio_error(outputs: int, largest_log: float = _LARGEST_STORED_LOG) -> float:
    """Return what a difference of two log probabilities in float64 may be off by.

    Parameters
    ----------
    outputs
        Number K of outputs.
    largest_log
        Largest absolute value of the logarithms that it is made of; by default, of numbers that can be
        stored.
    """
    return _LOG_RATIO_ERROR * max(largest_log / _LARGEST_STORED_LOG, 1.0) + outputs * _TOTAL_ERROR_PER_OUTPUT


def certificate_allowance(outputs: int, side_x_km: float, side_y_km: float, p: float) -> float:
    """Return what rounding may hide from a certificate's norm, in 1/km, for fine sides of this length."""
    return log_ratio_error(outputs) * vector_norm(1 / side_x_km, 1 / side_y_km, dual_exponent(p))


def design_epsilon(epsilon: float, spacing_km: float, outputs: int, p: float) -> float:
    """Return the ε, in 1/km, to design for so that the certificate of the stored float32 is within `epsilon`.

    What storing, the extension's arithmetic and the certificate's outward rounding may add is set aside.

    Parameters
    ----------
    epsilon
        The limit in the plane, in 1/km.
    spacing_km
        Fine spacing h, in km.
    outputs
        Number K of outputs.
    p
        Exponent of the metric.

    Raises
    ------
    SpecError
        If the fine spacing is so small that float32 cannot carry ε.
    """
    storing = _STORED_LOG_ERROR * vector_norm(1, 1, dual_exponent(p)) / spacing_km
    rounding = certificate_allowance(outputs, spacing_km, spacing_km, p)
    design = epsilon * (1 - 2 * NORM_RELATIVE_ERROR) - storing - rounding
    if design <= epsilon / 2:
        raise SpecError(
            f"privacy.epsilon_per_km: {epsilon:g}/km over a fine spacing of {spacing_km:g} km is below "
            "the resolution of stored probabilities; use larger cells or less refinement"
        )
    return design


def even_split(epsilon: float, p: float) -> tuple[float, float]:
    """Return the split that treats both axes alike: ‖(ε_1, ε_2)‖_q = ε."""
    share = epsilon / vector_norm(1, 1, dual_exponent(p))
    return share, share


def candidate_splits(epsilon: float, p: float) -> list[tuple[float, float]]:
    """Return the published splits ε_1 = ε k/5, k = 1..4, and the even one, all with ‖·‖_q = ε.

    For p = 1 every axis may use all of ε, so there is only one split.
    """
    even, q = even_split(epsilon, p), dual_exponent(p)
    if math.isinf(q):
        return [even]
    return [even, *((s * epsilon, epsilon * (1 - s**q) ** (1 / q)) for s in PUBLISHED_SHARES)]


def normaliser_excess(delta_axis: float, delta_other: float) -> float:
    """Return η of bound (2): by how much normalising can steepen a log probability.

    |∂_t log M| ≤ β_t (1 + η(β_t h_0, β_o h_0)),
    η(δ_t, δ_o) = min(1, (cosh δ_t − sech(δ_o / 2)) / sinh δ_t).

    Parameters
    ----------
    delta_axis, delta_other
        δ_t = β_t h_0 along the axis and δ_o across it, both ≥ 0.
    """
    if delta_axis == 0:
        return 0.0 if delta_other == 0 else 1.0
    # (cosh δ − 1)/sinh δ = tanh(δ/2); written so, nothing cancels or overflows.
    tilt = math.tanh(delta_axis / 2)
    sech = 2 * math.exp(-delta_other / 2) / (1 + math.exp(-delta_other))
    csch = 2 * math.exp(-delta_axis) / -math.expm1(-2 * delta_axis)
    return min(1.0, tilt + (1 - sech) * csch)


def half_budgets(split: tuple[float, float]) -> AxisBudgets:
    """Return the published budgets β_t = ε_t / 2; the factor 2 is the worst case of bound (2)."""
    return AxisBudgets(split=split, beta=(split[0] / 2, split[1] / 2))


def log_convex_steepening(delta_axis: float, delta_other: float) -> float:
    """Return 1 + η of bound (2): slopes of log probabilities over those of interpolated scores, at most."""
    return 1 + normaliser_excess(delta_axis, delta_other)


def bound_budgets(
    split: tuple[float, float], cell_km: float, steepening: Steepening = log_convex_steepening
) -> AxisBudgets:
    """Return the largest budgets for which slopes of log probabilities stay within the split on both axes.

    Each β_t is the root of β s(β h_0, β_o h_0) = ε_t for the other axis' β_o, iterated to a fixed
    point; a last common factor makes sure that both axes hold whatever the iteration left open.

    Parameters
    ----------
    split
        (ε_1, ε_2), in 1/km.
    cell_km
        h_0, in km.
    steepening
        s(δ_t, δ_o) ≥ 1, growing with both; see :meth:`mdpext_dask.extend.operator.Operator.steepening`.
    """
    beta = (split[0] / 2, split[1] / 2)
    for _ in range(60):
        first = _largest_budget(split[0], beta[1], cell_km, steepening)
        second = _largest_budget(split[1], first, cell_km, steepening)
        if (first, second) == beta:
            break
        beta = (first, second)
    scale = 1.0
    while any(
        _slope_bound(beta[t] * scale, beta[1 - t] * scale, cell_km, steepening) > split[t] for t in (0, 1)
    ):
        scale = scale * (1 - 1e-12) if scale > 1 - 1e-9 else scale * 0.99
    return AxisBudgets(split=split, beta=(beta[0] * scale, beta[1] * scale))


def axis_budgets(grid: Grid, beta: tuple[float, float], outputs: int = 1) -> tuple[Array, Array]:
    """Return budgets β h_0 of every edge that are the same along an axis.

    Parameters
    ----------
    grid
        The grid.
    beta
        (β_1, β_2), in 1/km.
    outputs
        How often, along the last axis: K, or 1 for all outputs together.

    Returns
    -------
    budget_x, budget_y
        As :class:`mdpext_dask.seed.model.SeedProblem` takes them.
    """
    seeds_x, seeds_y = grid.seeds_shape
    shapes = (2, seeds_x - 1, seeds_y, outputs), (2, seeds_x, seeds_y - 1, outputs)
    return np.full(shapes[0], beta[0] * grid.cell_km), np.full(shapes[1], beta[1] * grid.cell_km)


def direction_budgets(grid: Grid, output_xy_km: Array, epsilon: float, p: float) -> tuple[Array, Array]:
    """Return budgets β h_0 that follow the direction from each output to each edge.

    A mechanism that decays radially from an output needs all of ε along the radius and none across it: the
    gradient of ε ‖·‖_p, β_t ∝ |d_t|^{p−1} for the direction d, scaled to ‖(β_1, β_2)‖_q = ε. Directions are
    kept away from both axes, and p from infinity, or the lesser axis would get nothing at all.

    Parameters
    ----------
    grid
        The grid.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    epsilon
        What both axes together may use, in 1/km.
    p
        Exponent of the metric.

    Returns
    -------
    budget_x, budget_y
        As :class:`mdpext_dask.seed.model.SeedProblem` takes them.
    """
    seeds = grid.seeds_xy_km().reshape(*grid.seeds_shape, 1, 2)
    q, exponent = dual_exponent(p), min(p, _SHARPEST_EXPONENT) - 1
    budgets = []
    for axis, middle in ((0, (seeds[:-1] + seeds[1:]) / 2), (1, (seeds[:, :-1] + seeds[:, 1:]) / 2)):
        away = np.abs(middle - output_xy_km)
        angle = np.arctan2(away[..., 1], away[..., 0])
        angle[(away == 0).all(axis=-1)] = np.pi / 4  # an output right there has no direction
        angle = np.clip(angle, _LEAST_ANGLE, np.pi / 2 - _LEAST_ANGLE)
        weights = np.stack([np.cos(angle), np.sin(angle)]) ** exponent
        largest = weights.max(axis=0)
        norm = largest if math.isinf(q) else largest * ((weights / largest) ** q).sum(axis=0) ** (1 / q)
        budget = epsilon * grid.cell_km * weights[axis] / norm
        budgets.append(np.stack([budget, budget]))
    return budgets[0], budgets[1]


def many_seeds(seeds: int) -> bool:
    """Whether there are so many seeds that a search should make few programs, and refining do the rest."""
    return seeds > _MANY_SEEDS


def tighten(budgets: tuple[Array, Array], norms: Array, limit: float) -> tuple[Array, Array]:
    """Return budgets lowered on the four edges of every source cell whose certificate exceeds the limit.

    An edge takes the smaller factor of the cells on its two sides, an eighth where that is less: an infinite
    norm must not end all change. Where no cell exceeds the limit, all
    budgets are raised alike instead, up to it.

    Parameters
    ----------
    budgets
        budget_x and budget_y.
    norms
        Largest certificate norm in each source cell, float64 of shape (cells east, cells north, K), in 1/km.
    limit
        ε, in 1/km.
    """
    factor = limit / norms
    if factor.min() >= 1:
        return budgets[0] * factor.min(), budgets[1] * factor.min()
    factor = np.clip(factor, _LEAST_FACTOR, 1.0)
    x = np.pad(factor, ((0, 0), (1, 1), (0, 0)), constant_values=1.0)
    y = np.pad(factor, ((1, 1), (0, 0), (0, 0)), constant_values=1.0)
    return budgets[0] * np.minimum(x[:, :-1], x[:, 1:]), budgets[1] * np.minimum(y[:-1], y[1:])


def _slope_bound(beta: float, beta_other: float, cell_km: float, steepening: Steepening) -> float:
    return beta * steepening(beta * cell_km, beta_other * cell_km) if beta > 0 else 0.0


def _largest_budget(epsilon_axis: float, beta_other: float, cell_km: float, steepening: Steepening) -> float:
    def excess(beta: float) -> float:
        # A promise may grow without bound; what is beyond twice ε is too much in any case.
        return min(_slope_bound(beta, beta_other, cell_km, steepening), 2 * epsilon_axis) - epsilon_axis

    from scipy.optimize import brentq  # takes longer to import than all of this package

    # β = 0 always holds; β = ε never does, unless normalising steepens nothing.
    if excess(epsilon_axis) <= 0:
        return epsilon_axis
    return float(brentq(excess, 0.0, epsilon_axis, xtol=1e-15 * epsilon_axis))
