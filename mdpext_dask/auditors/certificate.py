"""The certificate: a proof over all pairs of records, in one pass over the stored bytes.

Let ℓ(y|x) be the log of the probability that the sampler uses (stored bytes, normalised exactly), D1
the differences of ℓ(y|·) along the bottom and top of a fine cell, D2 those along its left and right,
both over the side's length, and q dual to p. If ‖(D1, D2)‖_q ≤ ε at the four corners of every fine cell
of the rectangle and for every output, then |ℓ(y|x) − ℓ(y|x')| ≤ ε ‖x − x'‖_p for *all* pairs. PROOF.md in
the package's folder has the proof.

The norm grows with both components, so the largest of the four corners is the norm of the larger D1
and the larger D2. Everything is float64, and what rounding could have hidden is added: a pass is a
proof. Where rounding decides, the cell is computed again in as many digits as it takes, so what is counted as
above the limit is above it. What the sampler cannot represent makes the certificate infinite: a probability
that is NaN or below 2^-36, and a row whose total is above 2.

The rectangle is that of one block of a store, or a band of a plain array whose records are on a lattice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.city import CitySource
from mdpext_dask.auditors.exact import Undecided, cell_exceeds
from mdpext_dask.auditors.findings import Finding, inspect_rows
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.source import (
    ANY_RANGE,
    IMPOSSIBLE_LOG,
    INFINITE_DIFFERENCE,
    SAMPLER_RANGE,
    ArraySource,
    Range,
)
from mdpext_dask.errors import StoreError
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.problem.grid import Array
from mdpext_dask.seed.budget import (
    NORM_RELATIVE_ERROR,
    certificate_allowance,
    dual_exponent,
    log_ratio_error,
    vector_norm,
)
from mdpext_dask.store.blocks import FLOAT64, Block
from mdpext_dask.store.integrity import ShardDamage, damage_of_block
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import local_rows_of

# Of one fine row of a strip, so that its working arrays stay in the processor's cache.
_STRIP_ELEMENTS = 8192
# Of the rows of a band.
_BAND_BYTES = 8 * 2**20
# Where certificate vectors of a source cell are: at its four corners, then at its worst place.
PLACES = 5
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True)
class Place:
    """Where a certificate is largest: a fine cell, by its lower left record, and an output."""

    i: int
    j: int
    output: int


class Certificate(NamedTuple):
    """Certificate of a rectangle of records.

    Parameters
    ----------
    epsilon
        Smallest ε, in 1/km, for which the certificate holds, rounded outward; the limit, if that is less and
        nothing exceeds it. May be infinite.
    place
        Where it is attained, relative to the rectangle.
    violations
        Number of (fine cell, output) with a norm above the limit that was asked for.
    recomputed
        Number of (fine cell, output) that float64 could not decide.
    """

    epsilon: float
    place: Place
    violations: int
    recomputed: int = 0


@dataclass(frozen=True)
class BlockCertificate:
    """Certificate of the fine cells of one block, or of one band.

    Parameters
    ----------
    block
        Index of the block.
    cells
        What is certified; its place is that in the whole lattice.
    findings
        What is wrong with rows, where they are not those of a sound store of ours.
    damage
        Shards that are not those of the block's receipt; among the changed, x or y where the stored
        coordinates are not those of the grid.
    """

    block: int
    cells: Certificate
    findings: tuple[Finding, ...]
    damage: ShardDamage = field(default_factory=ShardDamage)


class _UnsoundTotalError(Exception):
    """A row's total is above what the sampler's integers hold; its arguments are the row's (i, j)."""


def certify_cells(
    probability: NDArray[np.floating],
    x_km: Array,
    y_km: Array,
    metric_p: float,
    limit: float = math.inf,
    usable: Range = SAMPLER_RANGE,
    copies: int = 1,
) -> Certificate:
    """Return the certificate of a rectangle of records.

    Parameters
    ----------
    probability
        M(y|x), float of shape (len(x_km), len(y_km), n), at least 2 × 2 records.
    x_km, y_km
        Coordinates, float64, strictly increasing, in km.
    metric_p
        Exponent p of the metric.
    limit
        ε, in 1/km, above which a (cell, output) counts as a violation.
    usable
        Which rows can be used at all.
    copies
        How many outputs the last column stands for; they are alike, so their certificates are.
    """
    step_x, step_y = np.diff(x_km), np.diff(y_km)
    rows, columns, outputs = probability.shape
    counts = np.append(np.ones(outputs - 1, dtype=np.intp), copies)
    finite = np.isfinite(x_km).all() and np.isfinite(y_km).all()
    if not (finite and (step_x > 0).all() and (step_y > 0).all()):
        return Certificate(math.inf, Place(0, 0, 0), (rows - 1) * (columns - 1) * int(counts.sum()))
    sound = _sound(probability, usable)
    if sound is not None:
        first_x, first_y, first_output = (int(v[0]) for v in np.nonzero(~sound))
        place = _cell_of(first_x, first_y, first_output, probability.shape)
        return Certificate(math.inf, place, int((~sound).sum(axis=(0, 1)) @ counts))

    q = dual_exponent(metric_p)
    shortest = float(step_x.min()), float(step_y.min())
    allowance = _allowance(probability, shortest, metric_p, usable, copies)
    # A cell is over the limit if it is so after rounding outward; surely, if it is so after rounding inward.
    raw_limit = rank_of_norm((limit - allowance) / (1 + NORM_RELATIVE_ERROR), q)
    sure_limit = rank_of_norm((limit + allowance) * (1 + NORM_RELATIVE_ERROR), q)
    largest, place, violations, recomputed = -1.0, Place(0, 0, 0), 0, 0
    width = max(_STRIP_ELEMENTS // outputs, 1)
    for start in range(0, len(step_y), width):
        stop = min(start + width, len(step_y))
        unsure: list[Place] = []
        ranks = _ranks(probability[:, start : stop + 1], step_x, step_y[start:stop], q, usable, copies)
        try:
            for i, rank in enumerate(ranks):
                peak = float(rank.max())
                if peak > largest:
                    j, output = divmod(int(rank.argmax()), outputs)
                    largest, place = peak, Place(i, j + start, output)
                if peak > raw_limit:
                    violations += int((rank > sure_limit).sum(axis=0) @ counts)
                    near = np.argwhere((rank > raw_limit) & (rank <= sure_limit))
                    unsure += [Place(i, j + start, output) for j, output in near.tolist()]
        except _UnsoundTotalError as found:
            i, j = found.args
            return Certificate(math.inf, _cell_of(i, j + start, 0, probability.shape), int(counts.sum()))
        recomputed += len(unsure)
        for cell in unsure:
            x, y = slice(cell.i, cell.i + 2), slice(cell.j, cell.j + 2)
            whole, alike = np.repeat(probability[x, y], counts, axis=-1), int(counts[cell.output])
            try:
                violations += alike * cell_exceeds(whole, x_km[x], y_km[y], cell.output, metric_p, limit)
            except Undecided:
                violations += alike  # what nothing decides is no proof
    norm = math.sqrt(largest) if q == 2 else largest
    epsilon = norm * (1 + NORM_RELATIVE_ERROR) + allowance
    if norm * max(float(step_x.max()), float(step_y.max())) > INFINITE_DIFFERENCE:
        epsilon = math.inf
    elif not violations:
        epsilon = min(epsilon, limit)
    return Certificate(epsilon, place, violations, recomputed)


def certify_block(url: str, index: int, metric_p: float, limit: float) -> BlockCertificate:
    """Certify the fine cells of one block on the bytes read back from the store.

    Besides the rows the block owns, the row after them is read, so that every fine cell of the
    rectangle belongs to one block. Rows of skipped blocks are extended from the seed, as for the sampler.
    Distances are those of the grid from which the sampler looks up records.

    Parameters
    ----------
    url
        The store.
    index
        The block.
    metric_p
        Exponent of the metric.
    limit
        ε, in 1/km, above which a (cell, output) counts as a violation.
    """
    store = MechanismStore.open(url)
    block, grid = store.plan[index], store.grid
    damage = damage_found(store, block)
    x, y = grid.x_km()[block.closed_x], grid.y_km()[block.closed_y]
    try:
        rows = local_rows_of(store, block.closed_x, block.closed_y)
    except StoreError:
        # Bytes that cannot be decoded are nothing that a sampler could keep a promise with.
        lost = np.full((*block.closed_shape, store.outputs), np.nan, dtype=np.float32)
        rows = LocalRows.of(lost, None)
    found = certify_cells(rows.entries, x, y, metric_p, limit, copies=rows.copies)
    findings: list[Finding] = []
    if math.isinf(found.epsilon):
        records = grid.record_numbers(x=block.closed_x, y=block.closed_y)
        whole = rows.dense().reshape(len(records), -1)
        findings = inspect_rows(records, whole, SAMPLER_RANGE, normalised=False)[1]
    found = found._replace(place=replace(found.place, output=int(rows.outputs[found.place.output])))
    cells = _moved(found, block.closed_x.start, block.closed_y.start)
    return BlockCertificate(index, cells, tuple(findings), damage)


def damage_found(store: MechanismStore, block: Block) -> ShardDamage:
    """Return which shards of a block are not those of its receipt, and which coordinates not its grid's."""
    damage, grid = damage_of_block(store, block.index), store.grid
    for name, values, part in (("x", grid.x_km(), block.closed_x), ("y", grid.y_km(), block.closed_y)):
        if not np.array_equal(store.read(name, part), values[part]):
            damage = replace(damage, changed=(*damage.changed, name))
    return damage


def bands_of(shape: tuple[int, int], outputs: int) -> Iterator[slice]:
    """Yield closed ranges of the first axis that share their ends, so that every fine cell is in one band.

    Parameters
    ----------
    shape
        Records along both axes of a lattice.
    outputs
        Number K of outputs.
    """
    cells = shape[0] - 1
    bands = min(math.ceil(math.prod(shape) * outputs * FLOAT64 / _BAND_BYTES), cells)
    for band in range(bands):
        yield slice(cells * band // bands, cells * (band + 1) // bands + 1)


def certify_band(
    source: ArraySource | CitySource, index: int, first: int, last: int, promise: Promise
) -> BlockCertificate:
    """Certify the fine cells of a plain array, or of a city, between two lines of its lattice.

    Parameters
    ----------
    source
        The array or city.
    index
        Number of the band.
    first, last
        Positions on the first axis of the lattice.
    promise
        What is audited.
    """
    assert source.lattice_shape is not None
    records = source.lattice_rows(first, last)
    rows = source.rows(records.ravel())
    # The last line is the next band's, but for the last band.
    owned = records.size if last + 1 == source.lattice_shape[0] else records[:-1].size
    _, findings = inspect_rows(
        records.ravel()[:owned], rows[:owned], source.range, normalised=source.range == ANY_RANGE
    )
    # Whichever axis comes first: the certificate treats both alike.
    lines, across = source.xy_km(records[:, 0]), source.xy_km(records[0])
    axis = int(lines[0, 0] == lines[1, 0])
    x_km, y_km = lines[:, axis], across[:, 1 - axis]
    rows = rows.reshape(*records.shape, -1)
    found = certify_cells(rows, x_km, y_km, promise.metric_p, promise.kept_per_km, source.range)
    return BlockCertificate(index, _moved(found, first, 0), tuple(findings))


def _moved(found: Certificate, i: int, j: int) -> Certificate:
    """Return a certificate whose place is that of a lattice in which its rectangle begins at (i, j)."""
    return found._replace(place=Place(found.place.i + i, found.place.j + j, found.place.output))


def log_probability(probability: NDArray[np.float32]) -> Array:
    """Return ℓ = log p − log Σ p over the last axis: the log of what the sampler uses."""
    wide = probability.astype(np.float64)
    total = np.add.reduce(wide, axis=-1, keepdims=True)
    return np.asarray(np.log(wide, out=wide) - np.log(total))


def certify_source_cells(
    probability: NDArray[np.float32], side_km: float, factor: int, metric_p: float
) -> Array:
    """Return the certificate of each source cell and output of a block, rounded outward, in 1/km.

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

    Returns
    -------
    float64 of shape (cells east, cells north, K); infinity where a cell holds what the sampler cannot use.
    """
    sound = _sound(probability, SAMPLER_RANGE)
    if sound is not None:
        probability = np.where(sound, probability, np.float32(SAMPLER_RANGE.least))
    rows, columns, outputs = probability.shape
    q = dual_exponent(metric_p)
    across, along = (rows - 1) // factor, (columns - 1) // factor
    largest = np.zeros((across, along, outputs))
    steps = np.full(rows - 1, side_km), np.full(columns - 1, side_km)
    try:
        for i, rank in enumerate(_ranks(probability, *steps, q, SAMPLER_RANGE)):
            here = largest[i // factor]
            np.maximum(here, rank.reshape(along, factor, outputs).max(axis=1), out=here)
    except _UnsoundTotalError:
        return np.full_like(largest, math.inf)
    if sound is not None:
        for i, j, output in zip(*np.nonzero(~sound), strict=True):
            # A record on a side belongs to the cells on both of its sides.
            here = largest[
                max(i - 1, 0) // factor : i // factor + 1, max(j - 1, 0) // factor : j // factor + 1
            ]
            here[..., output] = math.inf
    norm = np.sqrt(largest) if q == 2 else largest
    allowance = certificate_allowance(outputs, side_km, side_km, metric_p)
    return np.asarray(norm * (1 + NORM_RELATIVE_ERROR) + allowance)


def _sound(probability: NDArray[np.floating], usable: Range) -> NDArray[np.bool_] | None:
    """Return which entries can be used; None if all can."""
    # Written so that NaN fails.
    if float(probability.min()) >= usable.least and float(probability.max()) <= usable.largest_total:
        return None
    # What is the largest float64 overflows in float32.
    largest = np.float64(usable.largest_total)
    return np.asarray((probability >= usable.least) & (probability <= largest))


def _allowance(
    probability: NDArray[np.floating],
    sides_km: tuple[float, float],
    metric_p: float,
    usable: Range,
    copies: int,
) -> float:
    """Return what rounding may hide from a norm, in 1/km; more for entries too small to store."""
    outputs = probability.shape[2] + copies - 1
    if usable == SAMPLER_RANGE:
        return certificate_allowance(outputs, *sides_km, metric_p)
    positive = probability[probability > 0]
    extremes = (float(positive.min()), float(positive.max()) * outputs) if len(positive) else (1.0, 1.0)
    error = log_ratio_error(outputs, max(abs(math.log(extreme)) for extreme in extremes))
    return error * vector_norm(1 / sides_km[0], 1 / sides_km[1], dual_exponent(metric_p))


def _ranks(
    probability: NDArray[np.floating], step_x: Array, step_y: Array, q: float, usable: Range, copies: int = 1
) -> Iterator[Array]:
    """Yield :func:`norm_rank` of the fine cells between fine rows, in a buffer that is reused.

    Raises
    ------
    _UnsoundTotalError
        At a row whose total the sampler cannot represent.
    """
    rows, width, outputs = probability.shape
    # Two fine rows at a time: ℓ, and |D2| between their records.
    logs, north = np.empty((2, width, outputs)), np.empty((2, width - 1, outputs))
    total, east = np.empty((width, 1)), np.empty((width, outputs))
    along_x, along_y = np.empty((width - 1, outputs)), np.empty((width - 1, outputs))
    per_step_y = (1 / step_y)[:, None]
    for i in range(rows):
        row, between = logs[i % 2], north[i % 2]
        np.copyto(row, probability[i])
        np.add.reduce(row, axis=-1, keepdims=True, out=total)
        if copies > 1:
            total += (copies - 1) * row[:, -1:]
        if not total.max() <= usable.largest_total:
            raise _UnsoundTotalError(i, int(total.argmax()))
        if usable.least > 0:
            np.log(row, out=row)
            row -= np.log(total, out=total)
        else:
            if not total.min() > 0:
                raise _UnsoundTotalError(i, int(total.argmin()))
            impossible = row == 0
            row[impossible] = 1.0
            np.log(row, out=row)
            row -= np.log(total, out=total)
            row[impossible] = IMPOSSIBLE_LOG
        np.abs(np.subtract(row[1:], row[:-1], out=between), out=between)
        between *= per_step_y
        if i == 0:
            continue
        np.abs(np.subtract(logs[0], logs[1], out=east), out=east)
        east *= 1 / step_x[i - 1]
        np.maximum(east[:-1], east[1:], out=along_x)
        np.maximum(north[0], north[1], out=along_y)
        yield norm_rank(along_x, along_y, q)


def norm_rank(first: Array, second: Array, q: float) -> Array:
    """Return the norm ‖(first, second)‖_q elementwise, for q = 2 its square; overwrites both.

    The square saves a root per element. Other powers must not be taken without scaling: for p near 1, q
    is so large that they underflow, and a norm of 0 would pass anything.
    """
    if q == 1:
        return np.add(first, second, out=first)
    if math.isinf(q):
        return np.maximum(first, second, out=first)
    if q == 2:
        np.multiply(first, first, out=first)
        np.multiply(second, second, out=second)
        return np.add(first, second, out=first)
    larger = np.maximum(first, second)
    ratio = np.minimum(first, second, out=first)
    ratio /= np.maximum(larger, np.finfo(float).tiny)
    return np.multiply(larger, (1 + ratio**q) ** (1 / q), out=first)


def rank_of_norm(norm: float, q: float) -> float:
    """Bring a norm to the scale of :func:`norm_rank`; below 0, everything exceeds it."""
    if norm <= 0:
        return -1.0
    return norm * norm if q == 2 else norm


def _cell_of(i: int, j: int, output: int, shape: tuple[int, ...]) -> Place:
    """Return the cell whose lower left record is (i, j), or the last one on the border."""
    return Place(min(i, shape[0] - 2), min(j, shape[1] - 2), output)


# --- with directions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slopes:
    """Certificate vectors of source cells, which refining a seed needs.

    A certificate vector is (D1, D2): the differences of ℓ(y|·) along two sides of a fine cell that meet at
    one of its corners, over the spacing. The certificate is their largest q-norm.

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


def _worst(east: Array, north: Array, factor: int, q: float) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
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
