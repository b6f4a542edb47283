"""What a worker runs to improve rows on a lattice, a box of points at a time.

Every task reads windows of arrays that other tasks have finished, and writes the box that it owns: whole
chunks of an array of its own. So a program is solved once, by one task, and every task that needs its points
afterwards reads the same bytes (requirement A2), whichever worker solved it.

Arrays of a sweep are padded in front, so that its lines lie on borders of chunks.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from mdpext_dask.auditors.certificate import certify_source_cells
from mdpext_dask.errors import StoreError, first_line
from mdpext_dask.extend.lattice import interpolated
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.extend.normalise import exponential, logarithm
from mdpext_dask.job.spec import json_number
from mdpext_dask.pipeline.cells.lattice import Box, Lines, cell_patches, line_patches
from mdpext_dask.pipeline.cells.sweep import Swept, Window, edge_budgets, normaliser_drift, sweep
from mdpext_dask.seed.budget import dual_exponent
from mdpext_dask.store.loss import loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LatticeArray:
    """An array of the seed group over the points of a lattice and the outputs.

    Parameters
    ----------
    name
        Name of the array.
    padding
        What is in front of the first point, to the east and to the north.
    """

    name: str
    padding: tuple[int, int] = (0, 0)

    def read(self, store: MechanismStore, box: Box) -> Floats:
        """Return the points of a box, float64 of shape (points, points, K)."""
        return store.read(f"seed/{self.name}", *box.part(self.padding))

    def write(self, store: MechanismStore, box: Box, values: Floats) -> None:
        """Write the points of a box.

        Raises
        ------
        StoreError
            If the store refuses the write.
        """
        try:
            store.array(f"seed/{self.name}")[box.part(self.padding)] = values
        except (OSError, ValueError, RuntimeError) as error:
            raise StoreError(f"{store.url}: {self.name} cannot be written: {first_line(error)}") from None


# What probabilities of records cost, in km.
COSTS = LatticeArray("cells_cost")


@dataclass(frozen=True)
class Level:
    """A lattice between the seeds and the records.

    Parameters
    ----------
    shape
        Points to the east and to the north.
    rest
        Fine steps in one of its steps.
    cost
        What probabilities of its points cost, in km.
    """

    shape: tuple[int, int]
    rest: int
    cost: LatticeArray


@dataclass(frozen=True)
class Sweep:
    """One pass over the programs of a lattice.

    Parameters
    ----------
    level
        The lattice.
    lines
        Its lines, to the east and to the north.
    reference, sides, result
        Log probabilities before; with the points on lines solved; with the points inside cells solved as
        well.
    drift
        Arrays whose normalisers are charged to budgets; none on the finest lattice.
    frozen
        Name of the array of points that stay, if there is one.
    tube
        How far log probabilities of points on lines may go.
    allowed
        ε times the spacing of the lattice.
    margin
        By what share of that the reference keeps its budgets at least.
    floor
        Least probability.
    target
        ε, in 1/km, for the certificate of what extends from the result.
    """

    level: Level
    lines: tuple[Lines, Lines]
    reference: LatticeArray
    sides: LatticeArray
    result: LatticeArray
    drift: tuple[LatticeArray, ...]
    frozen: str | None
    tube: float
    allowed: float
    margin: float
    floor: float
    target: float


@dataclass(frozen=True)
class Verdict:
    """What a box has come to.

    Parameters
    ----------
    above
        Cells of the lattice in which the certificate of the records is above the target, bool.
    worst
        The certificate, in 1/km.
    loss_km
        The records' part of the expected loss, in km.
    swept
        Its programs.
    """

    above: NDArray[np.bool_]
    worst: float
    loss_km: float
    swept: Swept


@dataclass(frozen=True)
class Improved:
    """What a sweep has come to.

    Parameters
    ----------
    level
        Which level, from 1.
    loss_km
        Expected loss of the records that extend from it, in km.
    tries
        How often it was made.
    frozen_share
        Share of points that had to stay in the end.
    programs, by_highs
        How many programs, and how many of them HiGHS solved in the place of the structured method.
    fallbacks
        Patches whose program could not be solved, on the lattice of the level: lower left point, points.
    seconds
        How long it took.
    """

    level: int
    loss_km: float
    tries: int
    frozen_share: float
    programs: int
    by_highs: int
    fallbacks: tuple[tuple[int, int, int, int], ...]
    seconds: float


@dataclass(frozen=True)
class State:
    """Where the programs are: log probabilities on a lattice, and how they came about.

    Parameters
    ----------
    candidate, tube
        Which seeds they began from, and how far points on lines may go.
    tried
        What else was tried.
    level
        Which level, from 1.
    scores
        Log probabilities of its points.
    loss_km
        Expected loss of the records that extend from them, in km.
    sweeps
        Sweeps so far.
    sha256, next
        Digest of the scores, and a number that no array has yet, when it was saved.
    """

    candidate: int
    tube: float
    tried: tuple[dict[str, Any], ...]
    level: int
    scores: LatticeArray
    loss_km: float
    sweeps: tuple[Improved, ...]
    sha256: str = ""
    next: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "tube": json_number(self.tube), "loss_km": json_number(self.loss_km)}

    @staticmethod
    def from_json(values: object) -> "State":
        """Return what :meth:`as_json` was made of.

        Raises
        ------
        pydantic.ValidationError
            If it was made of nothing of the kind.
        """
        return TypeAdapter(State).validate_python(values)


def write_costs(url: str, index: int) -> None:
    """Write π(x) c(x, y) of the records that a block owns."""
    store = MechanismStore.open(url, mode="r+")
    block = store.plan[index]
    prior = store.read("prior", block.owned_x, block.owned_y)
    values = np.zeros((*prior.shape, store.outputs))
    for column in loss_columns(store, block.owned_x, block.owned_y, prior):
        values[column.i, column.used] = column.prior[:, None] * column.loss_km
    owned = ((part.start, part.stop) for part in (block.owned_x, block.owned_y))
    COSTS.write(store, Box(*owned), values)


def write_level_costs(url: str, box: Box, level: Level) -> None:
    """Write what the points of a box of a lattice cost: records' costs, shared out by bilinear weights."""
    store = MechanismStore.open(url, mode="r+")
    rest, grid = level.rest, store.grid
    ranges = zip(box, grid.shape, strict=True)
    fine = Box(*((max((start - 1) * rest + 1, 0), min(stop * rest, n)) for (start, stop), n in ranges))
    values = COSTS.read(store, fine)
    for axis, ((first, _), (start, stop)) in enumerate(zip(fine, box, strict=True)):
        values = np.moveaxis(values, axis, 0)
        shared = np.zeros((stop - start, *values.shape[1:]))
        for away in range(1 - rest, rest):
            at = np.arange(start, stop) * rest + away - first
            there = (at >= 0) & (at < len(values))
            shared[there] += (1 - abs(away) / rest) * values[at[there]]
        values = np.moveaxis(shared, 0, axis)
    level.cost.write(store, box, values)


def begin_level(url: str, box: Box, parts: int, coarse: LatticeArray, fine: LatticeArray) -> None:
    """Interpolate log probabilities to the next lattice.

    Parameters
    ----------
    url, box
        The store, and what the task owns of the next lattice.
    parts
        Subdivisions N_r.
    coarse, fine
        Log probabilities on the lattice before and on the next one.
    """
    store = MechanismStore.open(url, mode="r+")
    around = Box(*((first // parts, -(-(last - 1) // parts) + 1) for first, last in box))
    scores = coarse.read(store, around)
    scores = interpolated(interpolated(scores, parts), parts, axis=1)
    scores = scores[box.part((-around.x[0] * parts, -around.y[0] * parts))]
    fine.write(store, box, normalised(scores))


def solve_sides(url: str, task: Sweep, box: Box) -> Swept:
    """Solve the programs on the lines of a box, with everything else as in the reference."""
    store = MechanismStore.open(url, mode="r+")
    window = _window(store, task, box, widened(box, task.level.shape))
    solved, swept = sweep(window, window.scores, line_patches(task.lines, box), task.tube)
    task.sides.write(store, box, _cut(solved, window.origin, box))
    return swept


def solve_insides(url: str, task: Sweep, box: Box) -> Verdict:
    """Solve the programs inside the cells of a box, and certify what extends from them."""
    store = MechanismStore.open(url, mode="r+")
    around = widened(box, task.level.shape)
    window = _window(store, task, box, around)
    sides = task.sides.read(store, around)
    solved, swept = sweep(window, sides, cell_patches(task.lines, box), math.inf)
    task.result.write(store, box, _cut(solved, window.origin, box))
    above, worst, loss_km = _verified(store, task, box, solved, window.origin)
    return Verdict(above, worst, loss_km, swept)


def normalised(scores: Floats) -> Floats:
    """Return log probabilities for log scores."""
    below = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(below - logarithm(np.add.reduce(exponential(below), axis=-1, keepdims=True)))


def widened(box: Box, shape: tuple[int, int]) -> Box:
    """Return a box with the points around it, where the lattice has any."""
    ranges = zip(box, shape, strict=True)
    return Box(*((max(first - 1, 0), min(last + 1, points)) for (first, last), points in ranges))


def _window(store: MechanismStore, task: Sweep, box: Box, around: Box) -> Window:
    scores = task.reference.read(store, around)
    shape = scores.shape[:2]
    drift_x, drift_y = np.zeros((shape[0] - 1, shape[1])), np.zeros((shape[0], shape[1] - 1))
    for array in task.drift:
        known = scores if array == task.reference else array.read(store, around)
        more_x, more_y = normaliser_drift(known)
        drift_x, drift_y = np.maximum(drift_x, more_x), np.maximum(drift_y, more_y)
    budget_x, budget_y = edge_budgets(
        scores, task.allowed, (drift_x, drift_y), dual_exponent(store.metric_p), task.margin
    )
    cost = np.zeros_like(scores)
    origin = around.x[0], around.y[0]
    _cut(cost, origin, box)[...] = task.level.cost.read(store, box)
    frozen = np.zeros(shape, dtype=bool)
    if task.frozen is not None:
        frozen = store.read(f"seed/{task.frozen}", *around.part())
    return Window(origin, scores, budget_x, budget_y, cost, frozen, task.floor)


def _cut(values: Floats, origin: tuple[int, int], box: Box) -> Floats:
    return values[box.part((-origin[0], -origin[1]))]


def _verified(
    store: MechanismStore, task: Sweep, box: Box, scores: Floats, origin: tuple[int, int]
) -> tuple[NDArray[np.bool_], float, float]:
    """Return where the records' certificate is above the target, how large it is, their part of the loss."""
    level = task.level
    sides = list(zip(box, level.shape, strict=True))
    closed = ((first, min(last + 1, points)) for (first, last), points in sides)
    corners = _cut(scores, origin, Box(*closed))
    fine = extend_log_convex(np.minimum(corners, 0.0), level.rest)
    above = np.zeros((len(corners) - 1, corners.shape[1] - 1), dtype=bool)
    worst = 0.0
    if above.size:
        norms = certify_source_cells(fine, store.grid.spacing_km, level.rest, store.metric_p)
        # Written so that NaN counts as above.
        above = ~(norms.max(axis=-1) <= task.target)
        worst = float(norms.max())
    # A record belongs to the box of the lattice's point to its lower left.
    rest = level.rest
    owned = ((first * rest, (last - 1) * rest + (rest if last < n else 1)) for (first, last), n in sides)
    cost = COSTS.read(store, Box(*owned))
    rows = fine[: cost.shape[0], : cost.shape[1]]
    return above, worst, float((rows * cost).sum())
