"""What a worker runs to lower the loss in a window of records, and the check that its rows keep ε.

A task reads the window and as much around it as a step of the certificate reaches, as the turns before have
left it, and writes one array of its own: the rows of the window. Windows of a turn do not see each other.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.directions import largest_steps, sides_of, steps_of
from mdpext_dask.errors import SolverError, StoreError
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.windows import WindowRows, Windows
from mdpext_dask.row_limits import SMALLEST_PROBABILITY
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, vector_norm
from mdpext_dask.seed.model import Array
from mdpext_dask.seed.record_program import Lattice, LatticePromise
from mdpext_dask.seed.window_program import WindowProblem, solve_window
from mdpext_dask.store.blocks import relative
from mdpext_dask.store.loss import loss_columns
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import read_window, window_name, window_rows

# Outputs change that have so much from some record of the window.
MOVING = 1e-3
# Least probability of those, above what can be stored.
_LEAST = SMALLEST_PROBABILITY * (1 + 2.0**-20)
# Shares of the rows of before that are mixed in where float32 has broken a step.
_SHARES = (0.0, 1e-4, 1e-2, 0.1)
# Ties are not decided by rounding.
_UNDECIDED = 1e-9
_GAIN, _FAILED, _START = "gain_km", "failed", "start_sha256"


@dataclass(frozen=True)
class Turn:
    """What the windows of a turn have in common.

    Parameters
    ----------
    windows
        How windows lie, with the turns that are done.
    start
        Digest of the tables of noise that they are laid over.
    design_per_km, limit_per_km
        ε of the programs' steps, and ε that the steps of stored rows have to keep, in 1/km.
    reach
        Largest coordinate of a step.
    """

    windows: Windows
    start: str
    design_per_km: float
    limit_per_km: float
    reach: int


class Outcome(NamedTuple):
    """By how much a window has lowered the loss, in km, and whether its program has failed."""

    gain_km: float
    failed: bool


def improve_window(url: str, turn: Turn, number: int, x: slice, y: slice) -> Outcome:
    """Solve a window and write its rows, unless they are there; where that fails, it keeps those it has.

    Parameters
    ----------
    url
        The store.
    turn
        The turn.
    number, x, y
        Which window of it, and its records.
    """
    store = MechanismStore.open(url, mode="r+")
    done = _outcome(store, turn, number, x, y)
    if done is not None:
        return done
    around = [_widened(part, turn.reach, side) for part, side in zip((x, y), store.grid.shape, strict=True)]
    before = window_rows(store, turn.windows, turn.start, around[0], around[1])
    free = relative(x, around[0].start), relative(y, around[1].start)
    moving = np.flatnonzero(before.entries[free].max(axis=(0, 1)) > MOVING)
    moving = moving[moving < len(before.near)]
    found, outcome = _better(store, turn, before, moving, free, (x, y))
    changed = WindowRows(x, y, before.outputs[moving if found.size else moving[:0]], found)
    packed = changed.packed()
    name = window_name(turn.windows.turns, number)
    dimensions = f"{name}_record", f"{name}_output"
    attributes = {_GAIN: outcome.gain_km, _FAILED: outcome.failed, _START: turn.start}
    store.create_seed_array(name, dimensions, packed.shape, data=packed, attributes=attributes)
    return outcome


def _outcome(store: MechanismStore, turn: Turn, number: int, x: slice, y: slice) -> Outcome | None:
    """Return what a window has come to, if its rows are there, laid over the same noise."""
    try:
        read_window(store, turn.windows.turns, number, x, y)
        known = store.array(f"seed/{window_name(turn.windows.turns, number)}").attrs
    except StoreError:
        return None
    gain, failed = known.get(_GAIN), known.get(_FAILED)
    if not (isinstance(gain, float) and isinstance(failed, bool) and known.get(_START) == turn.start):
        return None
    return Outcome(gain, failed)


def _widened(part: slice, reach: int, side: int) -> slice:
    return slice(max(part.start - reach, 0), min(part.stop + reach, side))


def _better(
    store: MechanismStore,
    turn: Turn,
    before: LocalRows,
    moving: NDArray[np.intp],
    free: tuple[slice, slice],
    window: tuple[slice, slice],
) -> tuple[NDArray[np.float32], Outcome]:
    """Return better rows, float32 of shape (n_x, n_y, n), and what they gain; none, if none are found."""
    grid, p = store.grid, store.metric_p
    x, y = window
    known = before.entries[..., moving].astype(np.float64)
    shape = known[free].shape
    none = np.zeros((*shape[:2], 0), dtype=np.float32)
    if len(moving) < 2:
        return none, Outcome(0.0, failed=False)
    outputs = before.outputs[moving]
    cost = np.zeros(shape)
    for column in loss_columns(store, x, y, store.read("prior", x, y)):
        cost[column.i, column.used] = column.loss_km[:, outputs] * column.prior[:, None]
    lattice = Lattice(grid.x_km()[x], grid.y_km()[y], cost, np.ones(shape[:2], dtype=bool))
    promise = LatticePromise(turn.design_per_km, p)
    problem = WindowProblem.of(
        lattice, known, free, (grid.spacing_km, grid.spacing_km), promise, turn.reach, _LEAST
    )
    try:
        solved = solve_window(problem, promise, turn.reach)
    except SolverError:
        return none, Outcome(0.0, failed=True)
    for share in _SHARES:
        rows = ((1 - share) * solved + share * problem.rows).astype(np.float32)
        gain_km = math.fsum((cost * (problem.rows - rows)).ravel())
        if _keeps(store, turn, before, moving, free, rows):
            return (
                (rows, Outcome(gain_km, failed=False)) if gain_km > 0 else (none, Outcome(0.0, failed=False))
            )
    return none, Outcome(0.0, failed=True)


def _keeps(
    store: MechanismStore,
    turn: Turn,
    before: LocalRows,
    moving: NDArray[np.intp],
    free: tuple[slice, slice],
    rows: NDArray[np.float32],
) -> bool:
    """Whether rows that take the place of those of a window keep ε in every step, as they are stored."""
    if not (np.isfinite(rows).all() and (rows >= np.float32(SMALLEST_PROBABILITY)).all()):
        return False
    entries = before.entries.copy()
    entries[free][..., moving] = rows
    shape = entries.shape[0], entries.shape[1]
    steps, every = steps_of(turn.reach, shape), (slice(0, shape[0]), slice(0, shape[1]))
    found = largest_steps(entries, every, steps, np.arange(entries.shape[2]), before.copies).max(axis=1)
    sides = sides_of(store.grid)
    limit = turn.limit_per_km * (1 - _UNDECIDED) * (1 - NORM_RELATIVE_ERROR)
    allowed: Array = np.array(
        [limit * vector_norm(a * sides[0], abs(b) * sides[1], store.metric_p) for a, b in steps]
    )
    return bool((found <= allowed).all())
