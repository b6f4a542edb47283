"""The certificate: a proof over all pairs of records, in one pass over the stored bytes.

Let ℓ(y|x) be the log of the probability that the sampler uses (stored bytes, normalised exactly), D1
the differences of ℓ(y|·) along the bottom and top of a fine cell, D2 those along its left and right,
both over the side's length, and q dual to p. If ‖(D1, D2)‖_q ≤ ε at the four corners of every fine cell
of the rectangle and for every output, then |ℓ(y|x) − ℓ(y|x')| ≤ ε ‖x − x'‖_p for *all* pairs. PROOF.md in
the package's folder has the proof.

The norm grows with both components, so the largest of the four corners is the norm of the larger D1
and the larger D2. Everything is float64, and what rounding could have hidden is added: a pass is a
proof. What the sampler cannot represent makes the certificate infinite: a probability that is not a
number, or below 2^-36, and a row whose total is above 2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask import receipts
from mdpext_dask.budget import NORM_RELATIVE_ERROR, certificate_allowance, dual_exponent
from mdpext_dask.errors import StoreError
from mdpext_dask.rows import rows_of
from mdpext_dask.sections import LARGEST_TOTAL, SMALLEST_PROBABILITY
from mdpext_dask.store import MechanismStore

# Of one fine row of a strip, so that its working arrays stay in the processor's cache.
_STRIP_ELEMENTS = 8192


@dataclass(frozen=True)
class Place:
    """Where a certificate is largest: a fine cell, by its lower left record, and an output."""

    i: int
    j: int
    output: int


@dataclass(frozen=True)
class BlockCertificate:
    """Certificate of the fine cells of one block.

    Parameters
    ----------
    block
        Index of the block.
    epsilon
        Smallest ε, in 1/km, for which the certificate holds there, rounded outward; may be infinite.
    place
        Where it is attained.
    violations
        Number of (fine cell, output) with a norm above the limit that was asked for.
    changed
        Keys of shards whose bytes are not those of the block's receipt, that are not there, or that are there
        although the block is skipped; and x or y where the stored coordinates are not those of the grid.
    """

    block: int
    epsilon: float
    place: Place
    violations: int
    changed: tuple[str, ...]


class _UnsoundTotalError(Exception):
    """A row's total is above what the sampler's integers hold; the row is (i, j)."""

    def __init__(self, i: int, j: int) -> None:
        super().__init__(i, j)
        self.i, self.j = i, j


def certify_cells(
    probability: NDArray[np.float32],
    x_km: NDArray[np.float64],
    y_km: NDArray[np.float64],
    metric_p: float,
    limit: float = math.inf,
) -> tuple[float, Place, int]:
    """Return the certificate of a rectangle of records.

    Parameters
    ----------
    probability
        M(y|x), float32 of shape (len(x_km), len(y_km), K), at least 2 × 2 records.
    x_km, y_km
        Coordinates, float64, strictly increasing, in km.
    metric_p
        Exponent p of the metric.
    limit
        ε, in 1/km, above which a (cell, output) counts as a violation.

    Returns
    -------
    epsilon
        Smallest ε for which the certificate holds, in 1/km, rounded outward.
    place
        Where, relative to the rectangle.
    violations
        Number of (cell, output) above `limit`.
    """
    step_x, step_y = np.diff(x_km), np.diff(y_km)
    if not (np.isfinite(x_km).all() and np.isfinite(y_km).all()):
        return math.inf, Place(0, 0, 0), _all(probability)
    if (step_x <= 0).any() or (step_y <= 0).any():
        return math.inf, Place(0, 0, 0), _all(probability)
    sound = _sound(probability)
    if sound is not None:
        first_x, first_y, first_output = (int(v[0]) for v in np.nonzero(~sound))
        place = _cell_of(first_x, first_y, first_output, probability.shape)
        return math.inf, place, int((~sound).sum())

    q = dual_exponent(metric_p)
    outputs = probability.shape[2]
    allowance = certificate_allowance(outputs, float(step_x.min()), float(step_y.min()), metric_p)
    # A cell is over the limit if it is so after rounding outward.
    raw_limit = rank_of_norm((limit - allowance) / (1 + NORM_RELATIVE_ERROR), q)
    largest, place, violations = -1.0, Place(0, 0, 0), 0
    width = max(_STRIP_ELEMENTS // outputs, 1)
    for start in range(0, len(step_y), width):
        cells = slice(start, min(start + width, len(step_y)))
        records = slice(start, cells.stop + 1)
        try:
            peak, where, count = _certify_strip(probability[:, records], step_x, step_y[cells], q, raw_limit)
        except _UnsoundTotalError as found:
            return math.inf, _cell_of(found.i, found.j + start, 0, probability.shape), outputs
        violations += count
        if peak > largest:
            largest, place = peak, Place(where.i, where.j + start, where.output)
    norm = math.sqrt(largest) if q == 2 else largest
    return norm * (1 + NORM_RELATIVE_ERROR) + allowance, place, violations


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
    plan = store.plan
    block = plan[index]
    receipt = receipts.read_receipt(store.objects, index, plan.skipped)
    named: dict[str, str | None] = {**receipt.shards} if receipt is not None else {}
    if index in plan.skipped:
        named = dict.fromkeys(store.shard_keys(block))  # there must be none
    changed = [
        key
        for key in store.shard_keys(block)
        if key not in named or receipts.shard_sha256(store.objects, key) != named[key]
    ]
    grid = store.grid
    x, y = grid.x_km()[block.closed_x], grid.y_km()[block.closed_y]
    for name, values, part in (("x", x, block.closed_x), ("y", y, block.closed_y)):
        if not np.array_equal(store.read(name, part), values):
            changed.append(name)
    try:
        probability = rows_of(store, block.closed_x, block.closed_y)
    except StoreError:
        # Bytes that cannot be decoded are nothing that a sampler could keep a promise with.
        probability = np.full((*block.closed_shape, store.outputs), np.nan, dtype=np.float32)
    epsilon, place, violations = certify_cells(probability, x, y, metric_p, limit)
    return BlockCertificate(
        block=index,
        epsilon=epsilon,
        place=Place(place.i + block.closed_x.start, place.j + block.closed_y.start, place.output),
        violations=violations,
        changed=tuple(changed),
    )


def log_probability(probability: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return ℓ = log p − log Σ p over the last axis: the log of what the sampler uses."""
    wide = probability.astype(np.float64)
    total = np.add.reduce(wide, axis=-1, keepdims=True)
    return np.asarray(np.log(wide, out=wide) - np.log(total))


def certify_source_cells(
    probability: NDArray[np.float32], side_km: float, factor: int, metric_p: float
) -> NDArray[np.float64]:
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
    sound = _sound(probability)
    if sound is not None:
        probability = np.where(sound, probability, np.float32(SMALLEST_PROBABILITY))
    rows, columns, outputs = probability.shape
    q = dual_exponent(metric_p)
    across, along = (rows - 1) // factor, (columns - 1) // factor
    largest = np.zeros((across, along, outputs))
    steps = np.full(rows - 1, side_km), np.full(columns - 1, side_km)
    try:
        for i, rank in enumerate(_ranks(probability, *steps, q)):
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


def _sound(probability: NDArray[np.float32]) -> NDArray[np.bool_] | None:
    """Return which entries the sampler can use; None if it can use all."""
    # Written so that not-a-number fails.
    if probability.min() >= SMALLEST_PROBABILITY and probability.max() <= LARGEST_TOTAL:
        return None
    return np.asarray((probability >= SMALLEST_PROBABILITY) & (probability <= LARGEST_TOTAL))


def _certify_strip(
    probability: NDArray[np.float32],
    step_x: NDArray[np.float64],
    step_y: NDArray[np.float64],
    q: float,
    raw_limit: float,
) -> tuple[float, Place, int]:
    """Return a strip's largest :func:`norm_rank`, where, and the excesses; narrow enough for the cache."""
    outputs = probability.shape[2]
    largest, place, violations = -1.0, Place(0, 0, 0), 0
    for i, rank in enumerate(_ranks(probability, step_x, step_y, q)):
        peak = float(rank.max())
        if peak > largest:
            j, output = divmod(int(rank.argmax()), outputs)
            largest, place = peak, Place(i, j, output)
        if peak > raw_limit:
            violations += int((rank > raw_limit).sum())
    return largest, place, violations


def _ranks(
    probability: NDArray[np.float32], step_x: NDArray[np.float64], step_y: NDArray[np.float64], q: float
) -> Iterator[NDArray[np.float64]]:
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
        if not total.max() <= LARGEST_TOTAL:
            raise _UnsoundTotalError(i, int(total.argmax()))
        np.log(row, out=row)
        row -= np.log(total, out=total)
        np.abs(np.subtract(row[1:], row[:-1], out=between), out=between)
        between *= per_step_y
        if i == 0:
            continue
        np.abs(np.subtract(logs[0], logs[1], out=east), out=east)
        east *= 1 / step_x[i - 1]
        np.maximum(east[:-1], east[1:], out=along_x)
        np.maximum(north[0], north[1], out=along_y)
        yield norm_rank(along_x, along_y, q)


def norm_rank(first: NDArray[np.float64], second: NDArray[np.float64], q: float) -> NDArray[np.float64]:
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


def _all(probability: NDArray[np.float32]) -> int:
    return int((probability.shape[0] - 1) * (probability.shape[1] - 1) * probability.shape[2])
