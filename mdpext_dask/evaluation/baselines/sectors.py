"""How much of a planar Laplace distribution lies in each of some polygons, to a relative error.

With noise of density ε²/2π · e^{−ε r}, the mass beyond distance R in a direction is T(εR) / 2π per radian,
T(t) = (1 + t) e^{−t}, and within it P(εR) / 2π, P = 1 − T. So the mass of a polygon, seen from x, is

    (1/2π) Σ_edges ± ∫ P(ε R(θ)) dθ  =  w(x) − (1/2π) Σ_edges ± ∫ T(ε R(θ)) dθ,

each edge over the angle under which it is seen, positive where it is passed counter-clockwise; w is 1 inside
and 0 outside. On a line at distance s, with t = s sinh u along it, dθ = du / cosh u and R = s cosh u:
functions of u without singularities near the real axis, whatever s is.

The first sum is good for polygons that are near or around x, the second for far ones, whose mass is that
beyond their near edges less that beyond their far ones. Of a polygon as thin as δ, a share of about 1 / (ε δ)
of the sum cancels; what is left of the relative error is computed with it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import QhullError, Voronoi

from mdpext_dask.errors import SolverError
from mdpext_dask.evaluation.baselines.problem import Array

# Gauss-Legendre on panels of u no longer than this. Over all a = ε s from 1e-13 to 700 and all ends, the
# relative error of either integral was at most 5e-12, most of it the rounding of e^{-700} (against four times
# the panels and more nodes: tests/evaluation/test_baselines_noise.py).
_NODES, _PANEL = 24, 4.0
EDGE_ERROR = 1e-11
# Beyond the nearest point of an edge by more than this over ε, T is smaller by e^-35.
_CUT = 35.0
# The angle under which an edge is seen, in radian, whatever it is: coordinates are rounded as seen from x.
_ANGLE_ERROR = 1e-14
# A line through x itself: the angle jumps there, so x is taken to lie on one side of it, this far off over ε.
_LEAST_DISTANCE = 1e-30
# What angles around a polygon may be off by, in turns.
_CLOSED = 1e-9
# P(t) = t²/2 - t³/3 + ... is summed up below this, where 1 - T would cancel.
_SMALL, _TERMS = 0.25, 12
# What lies beyond the outermost corners is further off than twice the extent and 60 / ε: next to nothing.
_FAR = 120.0
# Edges may miss the lines between their outputs by this share of the outputs' distance, and of their own.
_OFF_LINE, _OFF_DIRECTION = 1e-6, 1e-9
# Edges times records that are worked on together.
_AT_ONCE = 4_000


@dataclass(frozen=True)
class Cells:
    """Convex polygons that have edges in common.

    Parameters
    ----------
    start_xy_km, end_xy_km
        Ends of the edges, float64 of shape (E, 2), in km.
    left, right
        Polygon on either side of an edge, going from its start to its end, shape (E,); -1 for none.
    count
        Number of polygons.
    """

    start_xy_km: Array
    end_xy_km: Array
    left: NDArray[np.intp]
    right: NDArray[np.intp]
    count: int


def voronoi_cells(output_xy_km: Array, epsilon_per_km: float, extent_km: float) -> Cells:
    """Return the Voronoi cells of outputs, closed off where next to no probability is.

    Rounding moves corners by next to nothing, and whatever it does, cells are regions that do not depend on
    the record. Of outputs in the same place one gets the cell, the others none.

    Parameters
    ----------
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    epsilon_per_km
        ε of the noise, in 1/km.
    extent_km
        Extent of records and outputs together, in km.

    Raises
    ------
    SolverError
        If outputs are too close to each other for their cells to be told apart.
    """
    count = len(output_xy_km)
    places, first = np.unique(output_xy_km, axis=0, return_index=True)
    # Four points so far away that their cells close the others off; with them, any outputs span the plane.
    far = _FAR / epsilon_per_km + 10 * extent_km
    centre = (places.min(axis=0) + places.max(axis=0)) / 2
    around = centre + far * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])
    try:
        diagram = Voronoi(np.concatenate([places, around]))
    except (QhullError, ValueError):
        raise SolverError("planar Laplace: the Voronoi cells of the outputs cannot be computed") from None
    owner = np.concatenate([first, np.full(4, -1)])
    pairs = diagram.ridge_points
    ends = np.array([ridge if len(ridge) == 2 else (-1, -1) for ridge in diagram.ridge_vertices])
    used = (owner[pairs] >= 0).any(axis=1)
    pairs, ends = pairs[used], ends[used]
    start, end = diagram.vertices[ends[:, 0]], diagram.vertices[ends[:, 1]]
    both = np.asarray((owner[pairs] >= 0).all(axis=1))
    complete = (ends >= 0).all() and np.isin(np.arange(len(places)), pairs).all()
    if not (complete and _lie_between(diagram.points[pairs], start, end, both)):
        raise SolverError("planar Laplace: some outputs are too close to each other to have cells")
    long = (start != end).any(axis=1)  # four outputs on a circle may have an edge of no length
    pairs, start, end = pairs[long], start[long], end[long]
    along, across = end - start, diagram.points[pairs[:, 0]] - diagram.points[pairs[:, 1]]
    ahead = _cross(along, across) > 0  # the first of the pair lies to the left
    return Cells(
        start_xy_km=start,
        end_xy_km=end,
        left=owner[np.where(ahead, pairs[:, 0], pairs[:, 1])],
        right=owner[np.where(ahead, pairs[:, 1], pairs[:, 0])],
        count=count,
    )


def _lie_between(pair: Array, start: Array, end: Array, wanted: NDArray[np.bool_]) -> bool:
    """Whether the wanted edges are those of the cells of their pairs, as far as anyone would notice."""
    across, middle = pair[:, 0] - pair[:, 1], pair.mean(axis=1)
    width = np.hypot(across[:, 0], across[:, 1])
    for corner in (start - middle, end - middle):
        off = np.abs((corner * across).sum(axis=-1)) / width
        allowed = _OFF_LINE * width + _OFF_DIRECTION * np.hypot(corner[:, 0], corner[:, 1])
        if (off > allowed)[wanted].any():
            return False
    return True


def masses(cells: Cells, epsilon_per_km: float, xy_km: Array) -> tuple[Array, Array]:
    """Return the mass of each cell of noise around each place, and its relative error.

    Parameters
    ----------
    cells
        The cells.
    epsilon_per_km
        ε of the noise, in 1/km.
    xy_km
        Places, float64 of shape (n, 2), in km.

    Returns
    -------
    mass
        float64 of shape (n, cells), not divided by its total.
    error
        Bound of what a mass is off by, relative to it, float64 of the same shape; infinite where nothing is
        left of a mass, 0 of polygons that have no edges.
    """
    mass = np.empty((len(xy_km), cells.count))
    error = np.empty_like(mass)
    step = max(_AT_ONCE // max(len(cells.left), 1), 1)
    for first in range(0, len(xy_km), step):
        part = slice(first, first + step)
        mass[part], error[part] = _masses(cells, epsilon_per_km, xy_km[part])
    return mass, error


def _masses(cells: Cells, epsilon: float, xy_km: Array) -> tuple[Array, Array]:
    start = cells.start_xy_km - xy_km[:, None]
    end = cells.end_xy_km - xy_km[:, None]
    along = cells.end_xy_km - cells.start_xy_km
    along /= np.hypot(along[:, 0], along[:, 1])[:, None]
    beside = _cross(start, along)
    sign = np.where(beside < 0, -1.0, 1.0)
    distance = np.maximum(np.abs(beside), _LEAST_DISTANCE / epsilon)
    from_, to = (start * along).sum(axis=-1), (end * along).sum(axis=-1)
    beyond, within, angle = (
        sign * values for values in edge_integrals(epsilon * distance, epsilon * from_, epsilon * to)
    )
    left, right = (_incidence(side, cells.count) for side in (cells.left, cells.right))
    turn = left - right
    either = left + right
    turns = angle @ turn / (2 * np.pi)
    inside = np.rint(turns)
    # Both are the mass; the one of which less cancels is taken. At a corner no side of its edges is the right
    # one, and angles do not add up; but no probability lies within those edges, so the first sum is right.
    near, far = within @ turn, 2 * np.pi * inside - beyond @ turn
    start_km, end_km = np.hypot(start[..., 0], start[..., 1]), np.hypot(end[..., 0], end[..., 1])
    nearest = epsilon * np.where((from_ < 0) & (to > 0), distance, np.minimum(start_km, end_km))
    furthest = epsilon * np.maximum(start_km, end_km)
    most_within = _ANGLE_ERROR * np.minimum(furthest**2 / 2, 1)
    most_beyond = _ANGLE_ERROR * (1 + nearest) * np.exp(-nearest)
    near_error = (EDGE_ERROR * np.abs(within) + most_within) @ either
    far_error = 2 * np.pi * EDGE_ERROR * inside + (EDGE_ERROR * np.abs(beyond) + most_beyond) @ either
    far_error[np.abs(turns - inside) > _CLOSED] = np.inf
    mass = np.where(near_error <= far_error, near, far) / (2 * np.pi)
    off = np.minimum(near_error, far_error) / (2 * np.pi)
    mass[:, either.sum(axis=0) == 0] = 0.0
    error = np.full_like(mass, np.inf)
    np.divide(off, mass, out=error, where=mass > 0)
    error[:, either.sum(axis=0) == 0] = 0.0
    return mass, error


def edge_integrals(distance: Array, from_: Array, to: Array) -> tuple[Array, Array, Array]:
    """Return ∫ T dθ, ∫ P dθ and the angle of segments, all of them positive; lengths are multiples of 1/ε.

    Parameters
    ----------
    distance
        a = ε s > 0 from x to the line, float64 of any shape.
    from_, to
        Where the segment begins and ends on the line, from the foot of x's perpendicular, of the same shape.

    Returns
    -------
    beyond, within, angle
        ∫ T(εR) dθ, ∫ P(εR) dθ, ∫ dθ, float64 of the same shape.
    """
    a, low, high = distance.ravel(), from_.ravel(), to.ravel()
    crossing = (low < 0) & (high > 0)
    # From the foot outwards: one part, or two where the foot lies between the ends.
    ends = np.sort(np.abs(np.stack([low, high])), axis=0)
    owner = np.concatenate([np.arange(len(a)), np.flatnonzero(crossing)])
    near = np.concatenate([np.where(crossing, 0.0, ends[0]), np.zeros(int(crossing.sum()))])
    outer = np.concatenate([ends[1], ends[0][crossing]])
    a_part = a[owner]
    # Where T has become small, P is 1.
    nearest = np.hypot(a_part, near)
    cut = np.sqrt((nearest + _CUT - a_part) * (nearest + _CUT + a_part))
    stop = np.minimum(outer, cut)
    # sinh(u - v) by the addition theorem, as a quotient of sums without cancellation; 0 where both are.
    span = stop * nearest + near * np.hypot(a_part, stop)
    length = np.arcsinh((stop - near) / span * (stop + near))
    beyond, within = _quadrature(a_part, np.arcsinh(near / a_part), length)
    rest = np.arctan2(a_part * (outer - stop), a_part**2 + outer * stop)
    angle = np.arctan2(a_part * (outer - near), a_part**2 + outer * near)
    parts = (beyond, within + rest, angle)
    totals = (np.asarray(np.bincount(owner, part, len(a)), dtype=np.float64) for part in parts)
    beyond, within, angle = (total.reshape(distance.shape) for total in totals)
    return beyond, within, angle


def _quadrature(a: Array, low: Array, length: Array) -> tuple[Array, Array]:
    """Return the integrals of T(a cosh u) / cosh u and P(a cosh u) / cosh u from `low` on, so far."""
    panels = np.maximum(np.ceil(length / _PANEL), 1).astype(np.intp)
    first = np.cumsum(panels) - panels
    owner = np.repeat(np.arange(len(a)), panels)
    half = (length / panels / 2)[owner]
    middle = low[owner] + half * (2 * (np.arange(len(owner)) - first[owner]) + 1)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    cosh = np.cosh(middle[:, None] + half[:, None] * nodes)
    scaled = a[owner, None] * cosh
    decay = np.exp(-scaled)
    beyond = (1 + scaled) * decay
    within = 1 - beyond
    small = scaled < _SMALL
    within[small] = decay[small] * _small_within(scaled[small])
    return (
        np.add.reduceat((beyond / cosh) @ weights * half, first),
        np.add.reduceat((within / cosh) @ weights * half, first),
    )


def _small_within(t: Array) -> Array:
    """Return e^t P(t), the sum of t^k / k! from k = 2."""
    series = np.ones_like(t)
    for k in range(_TERMS, 2, -1):
        series *= t / k
        series += 1
    return np.asarray(series * t * t / 2)


def _incidence(side: NDArray[np.intp], count: int) -> Array:
    table = np.zeros((len(side), count))
    edges = np.flatnonzero(side >= 0)
    table[edges, side[edges]] = 1.0
    return table


def _cross(first: Array, second: Array) -> Array:
    return np.asarray(first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0])
