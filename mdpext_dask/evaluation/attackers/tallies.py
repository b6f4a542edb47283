"""What attackers need to know of a mechanism, added up block by block: nothing has the size of a mechanism.

With priors p (π first) and rows M, by output y:

    Σ_x p(x) M(y|x)                 what is reported;
    max_x p(x) M(y|x), max_x M(y|x) the likeliest record, for vulnerability and capacity;
    Σ_x p(x) M(y|x) c(x, y')        what another guess costs under the job's loss;
    Σ_{x in bin} p(x) M(y|x) (1, x) mass and centre of the posterior by square bins of records;
    counts and masses of π M by its size, where records are too many to be sorted.

A posterior by bins gives a lower bound for every guess: a norm is convex, so within a bin the mean distance
is no less than that of the centre (Jensen).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.requests import TRUTH, Attacker, PointPrior
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import local_rows_of

Array = NDArray[np.float64]
# Numbers in one array of bins, 16 MB; a task holds one like it, the client all three.
MOST_BINNED = 2**21
# Classes of sizes of π M, for all outputs together: from 1 down to a power of two that nothing is below.
_MOST_CLASSES, _OCTAVES = 2**20, 128
_FINEST_OCTAVE = 128


@dataclass(frozen=True)
class TallyPlan:
    """What all tasks tally.

    Parameters
    ----------
    attackers
        Who attacks.
    bin_side
        Records along a side of a bin.
    classes
        Classes of an octave that π M is counted in; 0 where ranks are found by sorting.
    loss
        Whether what guesses cost under the loss is added up.
    """

    attackers: tuple[Attacker, ...]
    bin_side: int
    classes: int
    loss: bool

    @property
    def priors(self) -> int:
        """How many priors beliefs are mixed from."""
        return len(self.attackers[0].shares)

    @classmethod
    def of(
        cls, grid: Grid, outputs: int, attackers: tuple[Attacker, ...], *, sort: bool, loss: bool
    ) -> "TallyPlan":
        """Return the plan with the smallest bins that there is room for."""
        priors, side = len(attackers[0].shares), 1
        while priors * outputs * math.prod(-(-n // side) for n in grid.shape) > MOST_BINNED:
            side += 1
            if side >= max(grid.shape):
                break
        classes = max(min(_MOST_CLASSES // (_OCTAVES * outputs), _FINEST_OCTAVE), 1)
        # A power of two, so that the bits of a number say its class.
        return cls(attackers, side, 0 if sort else 1 << (classes.bit_length() - 1), loss)

    def bins_of(self, blocks: Sequence[Block]) -> tuple[slice, slice]:
        """Return half-open ranges of bins, to the east and to the north, that hold what some blocks own."""
        side, found = self.bin_side, []
        for owned in ([block.owned_x for block in blocks], [block.owned_y for block in blocks]):
            first, last = min(part.start for part in owned), max(part.stop for part in owned) - 1
            found.append(slice(first // side, last // side + 1))
        return found[0], found[1]


@dataclass
class Tally:
    """What some records add; the arrays' shapes are for P priors, A attackers and K outputs.

    Parameters
    ----------
    prior
        Σ p, of shape (P,).
    self_bits
        Σ −π log2 π, in bits.
    joint_bits
        Σ π M log2 M, in bits.
    reported
        Σ p M, of shape (P, K).
    likeliest
        max M of any record, of shape (K,).
    guess, guess_record, guess_joint
        By attacker and output, of shape (A, K): the most that belief times M is; the first record, by flat
        index, where it is; π M there.
    alone
        max π: the likeliest record without a report.
    costs
        Σ p M c, of shape (P, K, K), in km; empty unless asked for.
    worst_km, worst_record
        The largest expected loss of a record with π > 0, in km, and the first such record; -1 for none.
    bins
        Mass, and mass times x and y as seen from the corner of the grid, in km, of shape
        (3, bins east, bins north, P, K); mass alone where bins are single records.
    by_class
        Records with π > 0, and their π M, by output and class: (2, K, classes); empty unless asked for.
    first_class
        Where these classes begin.
    """

    prior: Array
    reported: Array
    likeliest: Array
    guess: Array
    guess_record: NDArray[np.int64]
    guess_joint: Array
    costs: Array
    bins: Array
    by_class: Array
    first_class: int = 0
    self_bits: float = 0.0
    joint_bits: float = 0.0
    alone: float = 0.0
    worst_km: float = -math.inf
    worst_record: int = -1

    @classmethod
    def nothing(cls, plan: TallyPlan, outputs: int, bins: tuple[int, int]) -> "Tally":
        """Return what no records add."""
        priors, attackers = plan.priors, len(plan.attackers)
        return cls(
            prior=np.zeros(priors),
            reported=np.zeros((priors, outputs)),
            likeliest=np.zeros(outputs),
            guess=np.zeros((attackers, outputs)),
            guess_record=np.full((attackers, outputs), -1, dtype=np.int64),
            guess_joint=np.zeros((attackers, outputs)),
            costs=np.zeros((priors, outputs, outputs) if plan.loss else (0, 0, 0)),
            bins=np.zeros((1 if plan.bin_side == 1 else 3, *bins, priors, outputs)),
            by_class=np.zeros((2, outputs, _OCTAVES * plan.classes)),
        )

    def trimmed(self) -> "Tally":
        """Drop classes at both ends that hold nothing, so that less is sent."""
        held = np.flatnonzero(self.by_class[0].any(axis=0))
        first, last = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
        self.first_class += first
        self.by_class = self.by_class[..., first:last].copy()
        return self

    def add(self, other: "Tally", across: slice, along: slice) -> None:
        """Add what others add, in bins of these ranges."""
        self.self_bits += other.self_bits
        self.joint_bits += other.joint_bits
        self.prior += other.prior
        self.reported += other.reported
        self.costs += other.costs
        self.bins[:, across, along] += other.bins
        classes = other.by_class.shape[2]
        self.by_class[..., other.first_class : other.first_class + classes] += other.by_class
        np.maximum(self.likeliest, other.likeliest, out=self.likeliest)
        self.take_guesses(other.guess, other.guess_record, other.guess_joint)
        self.alone = max(self.alone, other.alone)
        self.take_worst(other.worst_km, other.worst_record)

    def take_guesses(self, guess: Array, record: NDArray[np.int64], joint: Array) -> None:
        """Take guesses where they are better, or as good at a record that is before."""
        tied = (
            (guess == self.guess) & (record >= 0) & ((record < self.guess_record) | (self.guess_record < 0))
        )
        better = (guess > self.guess) | tied
        self.guess[better], self.guess_joint[better] = guess[better], joint[better]
        self.guess_record[better] = record[better]

    def take_worst(self, loss_km: float, record: int) -> None:
        """Take a record if it loses more, or as much and is before."""
        if record >= 0 and (loss_km, -record) > (self.worst_km, -self.worst_record):
            self.worst_km, self.worst_record = loss_km, record


@dataclass(frozen=True)
class Column:
    """Records of one lattice column of a block that have a prior in any belief.

    Parameters
    ----------
    i
        The column of the whole lattice.
    j
        Which of its records, of shape (n,), ascending.
    beliefs
        Priors p, float64 of shape (P, n).
    rows
        M(y|x), float64 of shape (n, K); rows sum to 1 but for rounding.
    """

    i: int
    j: NDArray[np.intp]
    beliefs: Array
    rows: Array

    def places_km(self, spacing_km: float) -> Array:
        """Return the records as seen from the corner of the grid, float64 of shape (n, 2), in km."""
        return np.asarray(np.stack([np.full(len(self.j), self.i), self.j], axis=-1) * spacing_km)


# Positions among the records that a block owns, and their probabilities in another prior.
Points = tuple[NDArray[np.int64], Array]


def columns_of(
    store: MechanismStore, group: Sequence[int], priors: int = 1, points: Sequence[Points | None] = ()
) -> Iterator[Column]:
    """Yield the records that some blocks own and the store keeps, column by column.

    Parameters
    ----------
    store, group
        Which blocks of which store.
    priors
        How many priors to fill in: π; all kept records alike; `points`.
    points
        By block, see :meth:`mdpext_dask.evaluation.attackers.requests.PointPrior.of_block`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    for index, at in zip(group, points or (None,) * len(group), strict=True):
        yield from _columns_of_block(store, store.plan[index], priors, at)


def _columns_of_block(
    store: MechanismStore, block: Block, priors: int, points: Points | None
) -> Iterator[Column]:
    grid = store.grid
    shape = block.owned_shape
    beliefs = np.zeros((priors, *shape))
    beliefs[TRUTH] = store.read("prior", block.owned_x, block.owned_y)
    if not (beliefs[TRUTH] >= 0).all():
        raise StoreError(f"{store.url}: the prior is damaged; use --overwrite")
    if priors > 1:
        i, j = np.indices(shape).reshape(2, -1)
        kept = grid.are_vertices_of(store.kept, i + block.owned_x.start, j + block.owned_y.start)
        beliefs[1] = kept.reshape(shape) / grid.count_vertices_of(store.kept)
    if points is not None:
        beliefs[2].reshape(-1)[points[0]] = points[1]
    used: NDArray[np.bool_] = np.any(beliefs != 0, axis=0)
    if not used.any():  # skipped blocks without a prior need not be extended
        return
    local = local_rows_of(store, block.owned_x, block.owned_y)
    for column in np.flatnonzero(used.any(axis=1)).tolist():
        at = np.flatnonzero(used[column])
        rows = local.part(slice(column, column + 1), at).dense()[0].astype(np.float64)
        rows /= rows.sum(axis=1)[:, None]
        if not (rows > 0).all():
            raise StoreError(f"{store.url}: block {block.index}: rows are damaged; use --overwrite")
        yield Column(block.owned_x.start + column, at + block.owned_y.start, beliefs[:, column, at], rows)


def tally_all(passes: Passes, plan: TallyPlan, points: PointPrior | None) -> tuple[Tally, Array]:
    """Return the tally of all blocks, and Σ π of every group of them."""
    store = passes.store
    across, along = (-(-n // plan.bin_side) for n in store.grid.shape)
    total = Tally.nothing(plan, store.outputs, (across, along))
    blocks = [[store.plan[index] for index in group] for group in passes.groups]
    arguments = (
        (group, plan, [None if points is None else points.of_block(store.grid, block) for block in some])
        for group, some in zip(passes.groups, blocks, strict=True)
    )
    masses = []
    for some, part in zip(blocks, passes.each("attackers", tally_blocks, arguments), strict=True):
        masses.append(float(part.prior[TRUTH]))
        total.add(part, *plan.bins_of(some))
    return total, np.array(masses)


def tally_blocks(url: str, group: tuple[int, ...], plan: TallyPlan, points: Sequence[Points | None]) -> Tally:
    """Return what the records that some blocks own add.

    Parameters
    ----------
    url, group
        Which blocks of which store.
    plan
        What is tallied.
    points
        By block, see :func:`columns_of`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    grid, (across, along) = store.grid, plan.bins_of([store.plan[index] for index in group])
    found = Tally.nothing(plan, store.outputs, (across.stop - across.start, along.stop - along.start))
    x, y = grid.x_km(), grid.y_km()
    for column in columns_of(store, group, plan.priors, points):
        losses = None
        if plan.loss:
            places = np.stack([np.full(len(column.j), x[column.i]), y[column.j]], axis=-1)
            losses = cached_loss(store.url, store.problem_sha256).rows(places)
        add_column(found, plan, grid, column, losses, (across.start, along.start))
    return found.trimmed()


def add_column(
    found: Tally, plan: TallyPlan, grid: Grid, column: Column, losses: Array | None, corner: tuple[int, int]
) -> None:
    """Add the records of a column.

    Parameters
    ----------
    found
        What they are added to.
    plan
        What is tallied.
    grid
        Where the records lie.
    column
        The records.
    losses
        c of all outputs, float64 of shape (n, K), in km, if the plan asks.
    corner
        The first bin of `found` to the east and to the north.
    """
    rows, beliefs = column.rows, column.beliefs
    flat = column.i * np.int64(grid.shape[1]) + column.j
    prior = beliefs[TRUTH]
    there = prior > 0
    joints = beliefs[:, :, None] * rows
    found.prior += beliefs.sum(axis=1)
    found.self_bits -= float((prior[there] * np.log2(prior[there])).sum())
    found.joint_bits += float((joints[TRUTH][there] * np.log2(rows[there])).sum())
    found.reported += joints.sum(axis=1)
    np.maximum(found.likeliest, rows.max(axis=0), out=found.likeliest)
    found.alone = max(found.alone, float(prior.max()))
    _add_guesses(found, plan, flat, joints)
    _add_bins(found, plan, grid, column, joints, corner)
    if plan.classes:
        _add_classes(found, plan, joints[TRUTH][there])
    if losses is not None:
        # Not a product of matrices, which libraries share out among threads in ways of their own.
        found.costs += np.einsum("pxk,xl->pkl", joints, losses)
        if there.any():
            expected = (rows[there] * losses[there]).sum(axis=1)
            at = int(expected.argmax())
            found.take_worst(float(expected[at]), int(flat[there][at]))


def _add_guesses(found: Tally, plan: TallyPlan, flat: NDArray[np.int64], joints: Array) -> None:
    outputs = np.arange(joints.shape[2])
    best, record, joint = [], [], []
    for attacker in plan.attackers:
        believed = attacker.mixed(joints)
        at = believed.argmax(axis=0)
        best.append(believed[at, outputs])
        record.append(flat[at])
        joint.append(joints[TRUTH, at, outputs])
    found.take_guesses(np.array(best), np.array(record), np.array(joint))


def _add_bins(
    found: Tally, plan: TallyPlan, grid: Grid, column: Column, joints: Array, corner: tuple[int, int]
) -> None:
    across = column.i // plan.bin_side - corner[0]
    along = column.j // plan.bin_side - corner[1]
    if plan.bin_side == 1:
        found.bins[0, across, along] += np.moveaxis(joints, 1, 0)
        return
    starts = np.flatnonzero(np.diff(along, prepend=-1))
    mass = np.add.reduceat(joints, starts, axis=1)
    height = np.add.reduceat(joints * (column.j * grid.spacing_km)[:, None], starts, axis=1)
    for part, sums in enumerate((mass, mass * (column.i * grid.spacing_km), height)):
        found.bins[part, across, along[starts]] += np.moveaxis(sums, 1, 0)


def _add_classes(found: Tally, plan: TallyPlan, joint: Array) -> None:
    counts, masses = found.by_class
    outputs, classes = counts.shape
    at = np.arange(outputs) * classes + class_of(joint, plan.classes)
    np.add.at(counts.reshape(-1), at.ravel(), 1.0)
    np.add.at(masses.reshape(-1), at.ravel(), joint.ravel())


def class_of(values: Array, classes: int) -> NDArray[np.int64]:
    """Return the classes of numbers in (0, 1], `classes` to an octave; the smallest numbers share one."""
    shift = 52 - (classes.bit_length() - 1)
    # The bits of a positive float64 ascend with it: first the exponent, then the fraction.
    last = int(np.float64(1.0).view(np.int64)) >> shift
    position = (np.ascontiguousarray(values).view(np.int64) >> shift) - (last - _OCTAVES * classes + 1)
    return np.asarray(np.clip(position, 0, _OCTAVES * classes - 1))
