"""The certificate by directions: steps between records in place of slopes inside cells.

The certificate of fine cells (:mod:`mdpext_dask.auditors.certificate`) bounds what a place *between* records
could do, and so asks more than the promise: planar noise keeps ε for all pairs of records, but two sides of a
cell that meet at its peak have a slope of ε each, √2 ε together. Here, for each output, L_u is the largest
|ℓ(y|x + u) − ℓ(y|x)| over all steps by a primitive lattice vector u with coordinates of at most r. Every
offset between two records is a u + b v with two neighbouring vectors and whole a, b ≥ 0, and the
steps that make it up stay in the rectangle. So

    |ℓ(y|x) − ℓ(y|x')| ≤ a L_u + b L_v ≤ ε ‖a u + b v‖_p,    ε = the largest (a L_u + b L_v) / ‖a u + b v‖_p,

for *all* pairs. PROOF.md, section 2, has the proof. Everything is float64, and what rounding may have hidden
is added.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import bands_of
from mdpext_dask.auditors.city import CitySource
from mdpext_dask.auditors.source import IMPOSSIBLE_LOG, ArraySource
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.compute.executor import Executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.problem.grid import Array, Grid
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, dual_exponent, log_ratio_error
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import local_rows_of

# Wider ones are asked where narrower ones do not decide. On square lattices planar noise is certified at
# 1.0824, 1.0131, 1.0020 and 1.0005 ε: 1/cos(θ/2) for the widest angle θ between two neighbours.
RADII = (1, 3, 8, 16)
# Of one fine row of a portion of outputs, so that its working arrays stay in the processor's cache.
_ROW_ELEMENTS = 16384
# A maximum so near to a border of its cone counts as inside, which can only raise the result.
_NEARLY_INSIDE = 1e-9
Step = tuple[int, int]


@dataclass(frozen=True)
class DirectionCertificate:
    """What directions certify.

    Parameters
    ----------
    epsilon
        Smallest ε, in 1/km, that is shown to be kept by all pairs and outputs.
    radius
        r, the largest coordinate of the steps that were asked.
    """

    epsilon: float
    radius: int


def certify_directions(
    subject: Subject, limit: float, executor: Executor, stages: Stages
) -> DirectionCertificate:
    """Certify a subject on a lattice, whose rows are sound, with steps as wide as it takes.

    Wider steps are asked only of outputs that narrower ones leave above the limit, in 1/km, and not at all
    once a step itself is above it.
    """
    source = subject.source
    shape = source.lattice_shape
    assert shape is not None
    function: Any = steps_of_block
    tasks: list[tuple[Any, ...]]
    if (store := subject.store) is not None:
        tasks = [(store.url, index) for index in range(store.plan.blocks)]
        sides = sides_of(store.grid)
    else:
        assert isinstance(source, ArraySource | CitySource)
        tasks = [(source, band.start, band.stop - 1) for band in bands_of(shape, source.outputs)]
        function, sides = steps_of_band, _sides_of(source)
    certified = np.full(source.outputs, math.inf)
    largest: dict[Step, Array] = {}
    radius = 0
    for wider in RADII:
        outputs = np.flatnonzero(certified > limit)
        asked = [step for step in steps_of(wider, shape) if step not in largest]
        if not asked:  # the rectangle is as narrow as the steps
            continue
        radius = wider
        found = np.zeros((len(asked), len(outputs)))
        with stages.stage("directions", len(tasks)):
            arguments = [(*task, asked, outputs) for task in tasks]
            for _, part in stages.run(executor, "directions", function, arguments):
                np.maximum(found, part, out=found)
        for step, sizes in zip(asked, found, strict=True):
            largest[step] = np.zeros(source.outputs)
            largest[step][outputs] = sizes
        of_outputs = {step: sizes[outputs] for step, sizes in largest.items()}
        certified[outputs], steepest = slopes(of_outputs, radius, shape, sides, subject.promise.metric_p)
        if steepest.max() > limit or certified.max() <= limit:
            break
    return DirectionCertificate(float(certified.max()), radius)


def steps_of_block(url: str, index: int, steps: list[Step], outputs: NDArray[np.intp]) -> Array:
    """Return :func:`largest_steps` for the records that a block of a store owns."""
    store = MechanismStore.open(url)
    block, grid = store.plan[index], store.grid
    reach = max(max(step[0], abs(step[1])) for step in steps)
    x = slice(block.owned_x.start, min(block.owned_x.stop + reach, grid.shape[0]))
    y = slice(max(block.owned_y.start - reach, 0), min(block.owned_y.stop + reach, grid.shape[1]))
    owned = (
        slice(0, block.owned_x.stop - x.start),
        slice(block.owned_y.start - y.start, block.owned_y.stop - y.start),
    )
    rows = local_rows_of(store, x, y)
    columns, of_output = np.unique(rows.columns_of(outputs), return_inverse=True)
    return largest_steps(rows.entries, owned, steps, columns, rows.copies)[:, of_output]


def steps_of_band(
    source: ArraySource | CitySource, first: int, last: int, steps: list[Step], outputs: NDArray[np.intp]
) -> Array:
    """Return :func:`largest_steps` for the records between two lines of an array's or a city's lattice."""
    assert source.lattice_shape is not None
    reach = max(step[0] for step in steps)
    records = source.lattice_rows(first, min(last + reach, source.lattice_shape[0] - 1))
    rows = source.rows(records.ravel()).reshape(*records.shape, -1)
    return largest_steps(rows, (slice(0, last - first + 1), slice(0, records.shape[1])), steps, outputs)


def _sides_of(source: ArraySource | CitySource) -> tuple[float, float]:
    assert source.lattice_shape is not None
    records = source.lattice_rows(0, source.lattice_shape[0] - 1)
    lines, across = source.xy_km(records[:, 0]), source.xy_km(records[0])
    axis = int(lines[0, 0] == lines[1, 0])
    return _shortest(lines[:, axis]), _shortest(across[:, 1 - axis])


def sides_of(grid: Grid) -> tuple[float, float]:
    """Return the shortest spacings of records along both axes, in km, as coordinates are rounded."""
    return _shortest(grid.x_km()), _shortest(grid.y_km())


def _shortest(positions_km: Array) -> float:
    return float(np.diff(positions_km).min())


@cache
def quadrant(radius: int) -> tuple[Step, ...]:
    """Return the primitive vectors of the first quadrant, both axes among them, by angle from the first axis.

    Two neighbours have determinant 1, so they span the lattice: they are a Farey sequence and its mirror.

    Parameters
    ----------
    radius
        r, the largest coordinate.
    """
    numbers = range(radius + 1)
    primitive = [(a, b) for a in numbers for b in numbers if math.gcd(a, b) == 1]
    return tuple(sorted(primitive, key=lambda step: math.atan2(step[1], step[0])))


def steps_of(radius: int, shape: tuple[int, int]) -> list[Step]:
    """Return all steps up to sign whose both ends fit into a rectangle of records, up to a radius."""
    fitting = [step for step in quadrant(radius) if _fits(step, shape)]
    return fitting + [(a, -b) for a, b in fitting if a and b]


def largest_steps(
    probability: NDArray[np.floating],
    owned: tuple[slice, slice],
    steps: list[Step],
    outputs: NDArray[np.intp],
    copies: int = 1,
) -> Array:
    """Return L_u over the steps that begin at some records of a rectangle.

    Parameters
    ----------
    probability
        M(y|x) of the rectangle, float of shape (n_x, n_y, n), with sound rows.
    owned
        Records where steps begin; those that would leave the rectangle are left out.
    steps
        S vectors (a, b) with a ≥ 0.
    outputs
        Which k of these n columns, shape (k,).
    copies
        How many outputs the last column stands for.

    Returns
    -------
    float64 of shape (S, k), with what rounding may hide.
    """
    across, along, columns = probability.shape
    least, most = 1.0, 1.0
    totals = np.empty((across, along))
    for i in range(across):
        row = probability[i].astype(np.float64)
        totals[i] = row.sum(axis=-1) + (copies - 1) * row[:, -1]
        least = min(least, float(row[row > 0].min(initial=1.0)))
        most = max(most, float(totals[i].max()))
    error = log_ratio_error(columns + copies - 1, max(abs(math.log(least)), abs(math.log(most))))
    log_totals = np.log(totals, out=totals)[..., None]
    # An output of one probability for all, as those far from all records have, differs in totals alone.
    near = np.flatnonzero((probability.min(axis=(0, 1)) < probability.max(axis=(0, 1)))[outputs])
    largest = np.full((len(steps), len(outputs)), np.ptp(log_totals))
    portion = max(_ROW_ELEMENTS // along, 1)
    for start in range(0, len(near), portion):
        part = near[start : start + portion]
        logs = probability[..., outputs[part]].astype(np.float64)
        impossible = logs == 0
        logs[impossible] = 1.0
        np.log(logs, out=logs)
        logs -= log_totals
        logs[impossible] = IMPOSSIBLE_LOG
        for found, step in zip(largest, steps, strict=True):
            found[part] = _largest_step(logs, owned, step)
    return largest + error


def _largest_step(logs: Array, owned: tuple[slice, slice], step: Step) -> Array:
    """Return L_u of outputs, shape (k,), without what rounding may hide; 0 where no step fits."""
    (a, b), (across, along, outputs) = step, logs.shape
    first, last = max(owned[1].start, -b), min(owned[1].stop, along - b)
    if first >= last:
        return np.zeros(outputs)
    # Line by line, in two buffers that stay in the cache.
    largest, difference = np.zeros((2, last - first, outputs))
    for i in range(owned[0].start, min(owned[0].stop, across - a)):
        np.subtract(logs[i + a, first + b : last + b], logs[i, first:last], out=difference)
        np.abs(difference, out=difference)
        np.maximum(largest, difference, out=largest)
    return np.asarray(largest.max(axis=0))


def slopes(
    largest: dict[Step, Array],
    radius: int,
    shape: tuple[int, int],
    sides_km: tuple[float, float],
    metric_p: float,
) -> tuple[Array, Array]:
    """Return the certificate of each output, and its steepest step, both in 1/km.

    Parameters
    ----------
    largest
        L_u of each step that fits, float64 of shape (k,).
    radius
        r.
    shape
        Numbers of records along both axes of the whole rectangle.
    sides_km
        The shortest spacings along both axes.
    metric_p
        Exponent p of the metric.

    Returns
    -------
    certified
        Smallest ε that all pairs keep, rounded outward, float64 of shape (k,).
    steepest
        The largest L_u / ‖u‖: no radius certifies less.
    """
    p, outputs = metric_p, len(next(iter(largest.values())))
    certified, steepest = np.zeros(outputs), np.zeros(outputs)
    lattice = np.asarray(sides_km)
    for mirror in (1, -1):
        fitting = [step for step in quadrant(radius) if _fits(step, shape)]
        sizes = [largest[_mirrored(step, mirror)] for step in fitting]
        vectors = [np.asarray(step) * lattice for step in fitting]
        for vector, size in zip(vectors, sizes, strict=True):
            np.maximum(steepest, size / _norm(vector[:, None], p), out=steepest)
        for first, second in pairwise(range(len(fitting))):
            # If one step of each is too much for the rectangle, no offset has both.
            if _fits(np.add(fitting[first], fitting[second]), shape):
                inside = _inside(vectors[first], sizes[first], vectors[second], sizes[second], p)
                np.maximum(certified, inside, out=certified)
    certified = np.maximum(certified, steepest)
    return certified * (1 + NORM_RELATIVE_ERROR), steepest


def looseness(reach: int, shape: tuple[int, int], metric_p: float) -> float:
    """Return how many times ε all pairs keep of a square lattice at most, if steps up to a radius keep ε.

    1.0131 for a radius of 3 and p = 2; 1 for p = 1 and p = ∞.

    Parameters
    ----------
    reach
        The radius.
    shape
        Numbers of records along both axes.
    metric_p
        Exponent p of the metric.
    """
    steps = steps_of(reach, shape)
    sizes = {step: _norm(np.array(step, dtype=np.float64)[:, None], metric_p) for step in steps}
    return float(slopes(sizes, reach, shape, (1.0, 1.0), metric_p)[0][0])


def _fits(step: Step | NDArray[np.int_], shape: tuple[int, int]) -> bool:
    return bool(step[0] < shape[0] and step[1] < shape[1])


def _mirrored(step: Step, mirror: int) -> Step:
    a, b = step
    return (a, b * mirror) if a and b else step


def _inside(u: Array, first: Array, v: Array, second: Array, p: float) -> Array:
    """Return the largest (a L_u + b L_v) / ‖a u + b v‖_p where it is attained between u and v, else 0.

    The numerator is g·w for w = a u + b v, so over all w the ratio is largest, ‖g‖_q, where w is parallel to
    sign(g) |g|^{q−1}. Along the arc from u to v it rises and falls once, for the norm is convex: if that w is
    not between them, the ratio is largest at one of them.
    """
    q = dual_exponent(p)
    if math.isinf(q):  # ‖w‖_1 is linear in a quadrant, and so the ratio is monotone
        return np.zeros_like(first)
    determinant = u[0] * v[1] - u[1] * v[0]
    g = np.stack([first * v[1] - second * u[1], second * u[0] - first * v[0]]) / determinant
    scale = np.maximum(np.abs(g).max(axis=0), np.finfo(float).tiny)
    w = np.sign(g) * (np.abs(g) / scale) ** (q - 1)
    room = _NEARLY_INSIDE * np.hypot(*w)
    after_u = u[0] * w[1] - u[1] * w[0] >= -room * math.hypot(*u)
    before_v = w[0] * v[1] - w[1] * v[0] >= -room * math.hypot(*v)
    return np.where(after_u & before_v, scale * _norm(g / scale, q), 0.0)


def _norm(vectors: Array, p: float) -> Array:
    """Return ‖·‖_p over the first axis, whose largest entries should be about 1."""
    sizes = np.abs(vectors)
    largest = sizes.max(axis=0)
    if math.isinf(p):
        return np.asarray(largest)
    shares = sizes / np.maximum(largest, np.finfo(float).tiny)
    return np.asarray(largest * (shares**p).sum(axis=0) ** (1 / p))
