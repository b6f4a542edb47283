"""What a worker runs to lower the loss in a window of records, and the check that its rows keep ε.

A task reads the window and as much around it as a step of the certificate reaches, as the turns before have
left it, and writes one array of its own: the rows of the window. Windows of a turn do not see each other.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.directions import largest_steps, sides_of, steps_of
from mdpext_dask.errors import SolverError, StoreError
from mdpext_dask.evaluation.bound.lattices import lattice_at
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.windows import WindowRows, Windows
from mdpext_dask.row_limits import SMALLEST_PROBABILITY
from mdpext_dask.seed.budget import NORM_RELATIVE_ERROR, vector_norm
from mdpext_dask.seed.record_program import Lattice, LatticePromise, predicted_bytes
from mdpext_dask.seed.window_program import WindowProblem, solve_window
from mdpext_dask.store.blocks import relative
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import read_window, window_name, window_rows
from mdpext_dask.store.schema import sha256_of

# Outputs change that have so much from some record of the window.
MOVING = 1e-3
# What a program may hold, in bytes: where more outputs change than the plan took for possible, those that
# have least stay as they are.
_MOST_BYTES = 5 * 2**28
# Least probability of those, above what can be stored.
_LEAST = SMALLEST_PROBABILITY * (1 + 2.0**-20)
# Shares of the rows of before that are mixed in where float32 has broken a step.
_SHARES = (0.0, 1e-4, 1e-2, 0.1)
# Ties are not decided by rounding.
_UNDECIDED = 1e-9
_BEGUN, _FAILED = "begun_with", "failed"


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
    settled
        When programs end, see :func:`mdpext_dask.seed.window_program.solve_window`.
    """

    windows: Windows
    start: str
    design_per_km: float
    limit_per_km: float
    settled: float

    @property
    def reach(self) -> int:
        """Largest coordinate of a step: what lies between windows."""
        return self.windows.gap


class Outcome(NamedTuple):
    """By how much a window has lowered the loss, in km, and whether its program has failed."""

    gain_km: float
    failed: bool


def improve_window(url: str, turn: Turn, number: int, x: slice, y: slice) -> Outcome:
    """Solve a window and write its rows, unless they are there; where that fails, it keeps those it has.

    Rows that are there count if they were made from what is there now, and keep ε.

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
    around = [_widened(part, turn.reach, side) for part, side in zip((x, y), store.grid.shape, strict=True)]
    before = window_rows(store, turn.windows, turn.start, around[0], around[1])
    work = _Work.of(store, turn, before, (x, y), (relative(x, around[0].start), relative(y, around[1].start)))
    name, begun = window_name(turn.windows.turns, number), work.begun_with()
    done = _done(store, name, begun, x, y)
    if done is not None and work.keeps(done[0].outputs, done[0].rows):
        return Outcome(work.gain_km(done[0].outputs, done[0].rows), done[1])
    rows, failed = work.better()
    outputs = work.moving if rows.size else work.moving[:0]
    packed = WindowRows(x, y, before.outputs[outputs], rows).packed()
    dimensions = f"{name}_record", f"{name}_output"
    attributes = {_BEGUN: begun, _FAILED: failed}
    store.create_seed_array(name, dimensions, packed.shape, data=packed, attributes=attributes)
    return Outcome(work.gain_km(before.outputs[outputs], rows), failed)


def _done(store: MechanismStore, name: str, begun: str, x: slice, y: slice) -> tuple[WindowRows, bool] | None:
    """Return the rows that a run before has made of the same ones, and whether its program has failed."""
    try:
        rows = read_window(store, name, x, y)
        known = store.array(f"seed/{name}").attrs
    except StoreError:
        return None
    failed = known.get(_FAILED)
    return (rows, failed) if isinstance(failed, bool) and known.get(_BEGUN) == begun else None


def _widened(part: slice, reach: int, side: int) -> slice:
    return slice(max(part.start - reach, 0), min(part.stop + reach, side))


@dataclass(frozen=True)
class _Work:
    """A window in its surroundings.

    Parameters
    ----------
    store, turn
        The store and the turn.
    before
        Rows of the window and around it.
    free
        Where in these the window is.
    moving
        Columns of these that may change, shape (n,).
    lattice
        The window's records, and what probabilities there cost, float64 of shape (n_x, n_y, n), in km.
    """

    store: MechanismStore
    turn: Turn
    before: LocalRows
    free: tuple[slice, slice]
    moving: NDArray[np.intp]
    lattice: Lattice

    @classmethod
    def of(
        cls,
        store: MechanismStore,
        turn: Turn,
        before: LocalRows,
        window: tuple[slice, slice],
        free: tuple[slice, slice],
    ) -> "_Work":
        """Return the work of a window, given its records and where they are in the rows before."""
        most = before.entries[free].max(axis=(0, 1))[: len(before.near)]
        moving = np.flatnonzero(most > MOVING)
        shape = before.entries[free].shape
        empty, one = (predicted_bytes((shape[0], shape[1]), outputs, turn.reach) for outputs in (0, 1))
        room = max((_MOST_BYTES - empty) // (one - empty), 2)
        moving = np.sort(moving[np.argsort(-most[moving], kind="stable")[:room]])
        lattice = lattice_at(store, *window, store.read("prior", *window))
        lattice = replace(lattice, cost=lattice.cost[..., before.outputs[moving]])
        return cls(store, turn, before, free, moving, lattice)

    def begun_with(self) -> str:
        """Return the digest of all that the rows of the window follow from, but for the software."""
        before, turn = self.before, self.turn
        of_turn = turn.design_per_km, turn.limit_per_km, turn.reach, turn.settled
        settings = repr((before.copies, *of_turn, MOVING)).encode()
        return sha256_of(before.entries, before.outputs, self.moving, self.lattice.cost, prefix=settings)

    def better(self) -> tuple[NDArray[np.float32], bool]:
        """Return better rows, float32 of shape (n_x, n_y, n), and whether the program has failed.

        Without outputs, if there is nothing to gain.
        """
        rows = self.before.entries[..., self.moving].astype(np.float64)
        none = np.zeros((*self.lattice.cost.shape[:2], 0), dtype=np.float32)
        if len(self.moving) < 2:
            return none, False
        spacing = self.store.grid.spacing_km
        promise = LatticePromise(self.turn.design_per_km, self.store.metric_p)
        problem = WindowProblem.of(
            self.lattice, rows, self.free, (spacing, spacing), promise, self.turn.reach, _LEAST
        )
        try:
            solved = solve_window(problem, promise, self.turn.reach, self.turn.settled)
        except SolverError:
            return none, True
        outputs = self.before.outputs[self.moving]
        for share in _SHARES:
            found = ((1 - share) * solved + share * problem.rows).astype(np.float32)
            if self.keeps(outputs, found):
                return (found if self.gain_km(outputs, found) > 0 else none), False
        return none, True

    def gain_km(self, outputs: NDArray[np.intp], rows: NDArray[np.float32]) -> float:
        """Return by how much rows of some outputs lower the loss, in km."""
        if not len(outputs):
            return 0.0
        before = self.before.entries[self.free][..., self.before.columns_of(outputs)].astype(np.float64)
        columns = np.searchsorted(self.before.outputs[self.moving], outputs)
        return math.fsum((self.lattice.cost[..., columns] * (before - rows)).ravel())

    def keeps(self, outputs: NDArray[np.intp], rows: NDArray[np.float32]) -> bool:
        """Whether rows in the place of those of the window keep ε in every step, as they are stored."""
        if not np.isin(outputs, self.before.outputs[self.moving]).all():
            return False
        if not (np.isfinite(rows).all() and (rows >= np.float32(SMALLEST_PROBABILITY)).all()):
            return False
        entries, store = self.before.entries.copy(), self.store
        entries[self.free][..., self.before.columns_of(outputs)] = rows
        shape = entries.shape[0], entries.shape[1]
        steps, every = steps_of(self.turn.reach, shape), (slice(0, shape[0]), slice(0, shape[1]))
        columns = np.arange(entries.shape[2])
        found = largest_steps(entries, every, steps, columns, self.before.copies).max(axis=1)
        east, north = sides_of(store.grid)
        limit = self.turn.limit_per_km * (1 - _UNDECIDED) * (1 - NORM_RELATIVE_ERROR)
        allowed = [limit * vector_norm(a * east, abs(b) * north, store.metric_p) for a, b in steps]
        return bool((found <= np.array(allowed)).all())
