"""Rows of the mechanism: the stored bytes and, for skipped blocks, the bytes that would be stored.

What is certified and what is sampled is both read by :func:`rows_of`, so the two are the same. A skipped
block is extended again from the seed as a whole, as when its receipt was written, and refused if one bit
differs.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.extend.choose import checked_rows, is_own, operator_of, trusted_operators
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.noise import NoiseLattice, NoiseTables
from mdpext_dask.extend.noise_patches import NoisePatches
from mdpext_dask.extend.normalise import exponential, normalise
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.extend.windows import WindowRows, Windows, laid_over
from mdpext_dask.job.sections import FITTING, METHODS, NOISE, WINDOWS, ExtensionSection
from mdpext_dask.job.spec import JobSpec, fingerprint_of, is_job_of, parse_job
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store import receipts, schema
from mdpext_dask.store.blocks import Block, common, relative
from mdpext_dask.store.local_chunks import chunks_of, floor_of, outputs_of, read_chunks, stored_chunks
from mdpext_dask.store.mechanism_store import MechanismStore

# Prefixes of the names of a store's seed, and of one that is only tried.
SEED, TRIAL = "", "trial_"
# Skipped blocks that a process caches: the next request is usually for one of these, or for one beside it.
_BLOCKS_KEPT = 2
# Stores of noise whose tables a process caches.
_TABLES_KEPT = 2


# --- extending a block ----------------------------------------------------------------------------


def extension_of_store(store: MechanismStore) -> ExtensionSection:
    """Return the section of a store's job that says how it is extended, with the method once it is chosen."""
    extension = ExtensionSection.model_validate(store.attributes["job"]["extension"])
    chosen = store.attributes.get(schema.METHOD_CHOSEN)
    if chosen is None or extension.method != FITTING:
        return extension
    if chosen not in METHODS:
        raise StoreError(f"{store.url}: {chosen!r} is no method; use --overwrite")
    return extension.model_copy(update={"method": chosen, "seconds": None})


def job_of(store: MechanismStore) -> JobSpec:
    """Return the job that a store was made for, as it was asked for."""
    return parse_job(store.attributes["job"], source=store.url)


def operator_of_store(store: MechanismStore) -> Operator:
    """Return the operator of a store's job.

    Raises
    ------
    StoreError
        If the job is not the one that the store was made for; nothing that it names is imported then.
    SpecError
        If the operator is of somebody's own, and nobody here has named it; or if it cannot be imported.
    """
    attributes = store.attributes
    job, identity, fingerprint = (attributes[key] for key in ("job", "identity", "fingerprint"))
    if not is_job_of(identity, job) or fingerprint_of(identity) != fingerprint:
        raise StoreError(f"{store.url}: its job has changed since it was made; use --overwrite")
    extension = extension_of_store(store)
    if is_own(extension) and extension.method not in trusted_operators():
        raise SpecError(
            f"{store.url}: its rows need {extension.method}, code that is not part of this package; if you "
            f"trust it, say mdpext --operator {extension.method} and then the command (in Python: "
            "mdpext_dask.trust_operators)"
        )
    return operator_of(extension)


def _read_corners(store: MechanismStore, block: Block, operator: Operator, prefix: str) -> Corners:
    """Return scores and budgets at the corners of a block's source cells, as the operator takes them.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    across, along = block.cells_x, block.cells_y
    closed_x, closed_y = (slice(part.start, part.stop + 1) for part in (across, along))
    scores = store.read(f"seed/{prefix}score", closed_x, closed_y)
    east, north = across.stop - across.start, along.stop - along.start
    budget_x = np.full((2, east, north + 1, 1), np.inf)
    budget_y = np.full((2, east + 1, north, 1), np.inf)
    if operator.uses_budgets:
        every = slice(None)
        budget_x = store.read(f"seed/{prefix}{schema.EXTENSION_X}", every, across, closed_y)
        budget_y = store.read(f"seed/{prefix}{schema.EXTENSION_Y}", every, closed_x, along)
    exponent = np.ones(1) if operator.linear else store.read(f"seed/{prefix}{schema.EXPONENT}")
    fits = (
        (scores.shape, exponent.shape) == ((east + 1, north + 1, store.outputs), (1,))
        and (budget_x.shape[:-1], budget_y.shape[:-1]) == ((2, east, north + 1), (2, east + 1, north))
        and {budget_x.shape[-1], budget_y.shape[-1]} <= {1, store.outputs}
    )
    # Lost chunks read as NaN.
    lost = not fits or not np.isfinite([scores.sum(), exponent[0]]).all()
    if lost or np.isnan([budget_x.sum(), budget_y.sum()]).any():
        raise StoreError(f"{store.url}: the seed's scores or budgets are damaged; run the job again")
    refine = (store.grid.factor,) if extension_of_store(store).stages == "one" else store.grid.refine
    return Corners(scores, budget_x, budget_y, refine, float(exponent[0]))


def extension_arrays(
    operator: Operator, budgets: schema.EdgeBudgets | None, exponent: float
) -> dict[str, NDArray[np.float64]]:
    """Return what, besides scores, an operator extends from, as arrays of the seed group by name.

    Parameters
    ----------
    operator
        The operator.
    budgets, exponent
        See :class:`mdpext_dask.extend.operator.Corners`.
    """
    arrays = {}
    if operator.uses_budgets:
        assert budgets is not None  # a solved seed LP has budgets
        arrays = dict(zip((schema.EXTENSION_X, schema.EXTENSION_Y), budgets, strict=True))
    return arrays if operator.linear else {**arrays, schema.EXPONENT: np.array([exponent])}


def extended_block(store: MechanismStore, block: Block, prefix: str = SEED) -> LocalRows:
    """Return the rows of a closed block as they are stored.

    Parameters
    ----------
    store, block
        Which block of which store.
    prefix
        :data:`SEED` or :data:`TRIAL`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    SpecError
        If a user's own operator fails, or returns something else than rows.
    """
    if prefix == SEED and extension_of_store(store).method == WINDOWS:
        windows, sha256 = windows_of(store)
        return window_rows(store, windows, sha256, block.closed_x, block.closed_y)
    if prefix == SEED and schema.RECORD_SCORES in store.seed_attributes:
        return LocalRows.of(_from_records(store, block, store.seed_attributes[schema.RECORD_SCORES]))
    operator = operator_of_store(store)
    if prefix == SEED and extension_of_store(store).method == NOISE:
        patches = noise_patches(store.url, store.seed_sha256(), store.outputs, store.grid)
        return patches.local_rows(block.closed_x, block.closed_y)
    corners = _read_corners(store, block, operator, prefix)
    own = is_own(extension_of_store(store))
    return LocalRows.of(checked_rows(operator, corners) if own else operator.rows(corners))


def _from_records(store: MechanismStore, block: Block, where: object) -> NDArray[np.float32]:
    """Return rows whose log probabilities are stored, as cell programs leave them.

    Parameters
    ----------
    store, block
        Which block of which store.
    where
        The seed's :data:`RECORD_SCORES`, as they are stored.
    """
    match where:
        case {"name": str(name), "padding": [int(east), int(north)]}:
            x, y = relative(block.closed_x, -east), relative(block.closed_y, -north)
        case _:
            raise StoreError(f"{store.url}: where the records' scores are is damaged; use --overwrite")
    scores = store.read(f"seed/{name}", x, y)
    if scores.shape != (*block.closed_shape, store.outputs) or not np.isfinite(scores).all():
        raise StoreError(f"{store.url}: the records' scores are damaged; use --overwrite")
    rows = np.empty(scores.shape, dtype=np.float32)
    for line, out in zip(scores, rows, strict=True):
        normalise(exponential(line), out=out)
    return rows


def windows_of(store: MechanismStore) -> tuple[Windows, str]:
    """Return how the windows of a finished seed lie, and the digest of the noise that they are laid over.

    Raises
    ------
    StoreError
        If that is damaged.
    """
    match store.seed_attributes.get(schema.RECORD_SCORES):
        case {
            "name": schema.WINDOW,
            "side": int(side),
            "gap": int(gap),
            "turns": int(turns),
            "start": str(sha),
        }:
            if min(side, gap, turns) > 0:
                return Windows(store.grid.shape, side, gap, turns), sha
    raise StoreError(f"{store.url}: how its windows lie is damaged; use --overwrite")


def window_rows(store: MechanismStore, windows: Windows, sha256: str, x: slice, y: slice) -> LocalRows:
    """Return the rows of a rectangle of records: noise, with the rows of windows laid over it turn by turn.

    Parameters
    ----------
    store
        The store.
    windows
        How windows lie, and how many turns of them are done.
    sha256
        Digest of the tables of noise.
    x, y
        The rectangle.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    patches = noise_patches(store.url, sha256, store.outputs, store.grid, schema.START_TABLES)
    side = windows.side
    around = tuple(slice(max(part.start - side, 0), part.stop + side) for part in (x, y))
    prior = store.read("prior", *around)
    if not np.isfinite(prior).all():
        raise StoreError(f"{store.url}: the prior is damaged; use --overwrite")
    found = []
    for turn in range(windows.turns):
        for number, across, along in windows.touching(turn, x, y):
            if prior[relative(across, around[0].start), relative(along, around[1].start)].any():
                found.append(read_window(store, window_name(turn, number), across, along))
    return laid_over(patches.local_rows(x, y), x, y, found)


def read_window(store: MechanismStore, name: str, x: slice, y: slice) -> WindowRows:
    """Return the rows of a window.

    Parameters
    ----------
    store
        The store.
    name
        Of its array, see :func:`window_name`.
    x, y
        Its records.

    Raises
    ------
    StoreError
        If they are not there, or damaged.
    """
    try:
        return WindowRows.unpacked(x, y, store.read(f"seed/{name}"), store.outputs)
    except ValueError as error:
        raise StoreError(f"{store.url}: seed/{name}: {error}; use --overwrite") from None


def window_name(turn: int, number: int) -> str:
    """Return the name, in the seed group, of the array with the rows of a window."""
    return f"{schema.WINDOW}_{turn}_{number}"


def noise_tables(store: MechanismStore, names: Sequence[str] = schema.NOISE_TABLES) -> NoiseTables:
    """Return a store's tables of noise.

    Parameters
    ----------
    store
        The store.
    names
        The arrays of the seed group that they are.

    Raises
    ------
    StoreError
        If they are damaged.
    """
    arrays = [store.array(f"seed/{name}") for name in names]
    form = np.full(1, np.nan) if arrays[3].shape != (4,) else store.read(f"seed/{names[3]}")
    try:
        lattice = NoiseLattice.checked(store.grid, *form.tolist()[:3])
        # Nothing is read that is not as large as it should be.
        if [(array.dtype.name, array.shape) for array in arrays[:3]] != lattice.tables:
            raise ValueError("they are not of the lattice")
        tables = (store.read(f"seed/{name}") for name in names[:3])
        return NoiseTables.checked(lattice, tables, store.outputs, float(form[3]))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{store.url}: the tables of noise are damaged; run the job again") from error


@lru_cache(maxsize=_TABLES_KEPT)
def noise_patches(
    url: str, sha256: str, outputs: int, grid: Grid, names: tuple[str, ...] = schema.NOISE_TABLES
) -> NoisePatches:
    """Return what makes rows of noise from a store's tables, which a process reads once.

    Parameters
    ----------
    url
        The store.
    sha256, outputs, grid
        Digest of the tables, K and the records: all that rows follow from, so none of it may be another.
    names
        See :func:`noise_tables`.

    Raises
    ------
    StoreError
        If they are damaged, or are not these.
    """
    tables = noise_tables(MechanismStore.open(url), names)
    found = schema.sha256_of(*tables.arrays), tables.outputs, tables.kernel.lattice.grid
    if found != (sha256, outputs, grid):
        raise StoreError(f"{url}: the tables of noise have changed; run the job again")
    return NoisePatches(tables)


# --- rows, stored or not --------------------------------------------------------------------------


def rows_of(store: MechanismStore, x: slice, y: slice) -> NDArray[np.float32]:
    """Return M(y|x) of a rectangle of records, float32 of shape (records east, records north, K).

    See :func:`local_rows_of`.
    """
    return local_rows_of(store, x, y).dense()


def local_rows_of(store: MechanismStore, x: slice, y: slice) -> LocalRows:
    """Return M(y|x) of a rectangle of records, of near outputs and of all others as one.

    Rows that have been lost are NaN.

    Parameters
    ----------
    store
        The store, with its seed.
    x, y
        Half-open ranges of fine rows.

    Raises
    ------
    StoreError
        If stored bytes or the seed are damaged, or a skipped block has no receipt or extends to other rows
        than when it was written.
    """
    floor, chunks = floor_of(store), stored_chunks(store, x, y)
    again: list[tuple[Block, LocalRows]] = []
    for block in store.plan.skipped_blocks(x, y):
        receipt = receipts.read_receipt(store.objects, block.index, store.plan.skipped)
        if receipt is None or receipt.rows_sha256 is None or receipt.seed_sha256 != store.seed_sha256():
            raise StoreError(f"{store.url}: block {block.index} has no receipt; run the job again")
        fine = _extended(store.url, block.index, receipt.rows_sha256)
        again.append((block, fine))
        # Far outputs have the floor of the tables, which a changed store may have another fill value than.
        same = fine.copies == 1 or floor is None or bool(fine.entries[0, 0, -1] == np.float32(floor))
        chunks |= chunks_of(store, fine.near) if same else np.ones_like(chunks)
    rows, outputs = read_chunks(store, x, y, chunks), outputs_of(store, chunks)
    for block, fine in again:
        part_x, part_y = common(block.owned_x, x), common(block.owned_y, y)
        part = fine.part(relative(part_x, block.owned_x.start), relative(part_y, block.owned_y.start))
        rows[relative(part_x, x.start), relative(part_y, y.start)] = part.of_outputs(outputs)
    return LocalRows.of(rows, floor, outputs, store.outputs)


def by_chunks(store: MechanismStore, i: NDArray[np.intp], j: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return which of n records, each of them once, are in each chunk that holds any.

    Chunks of one block follow each other: if it is skipped, it is extended once.
    """
    if not len(i):
        return []
    chunk_x, chunk_y, _ = store.array(schema.PROBABILITY).chunks
    chunk = (i // chunk_x) * (store.grid.shape[1] // chunk_y + 1) + j // chunk_y
    side_x, side_y, _ = store.plan.shard_shape
    order = np.lexsort((chunk, j // side_y, i // side_x))
    starts = np.flatnonzero(np.diff(chunk[order], prepend=-1))
    return np.split(order, starts[1:])


def rows_at(
    store: MechanismStore, i: NDArray[np.intp], j: NDArray[np.intp], damaged: float | None = None
) -> NDArray[np.float32]:
    """Return M(·|x) of n records, float32 of shape (n, K), reading every chunk once.

    Parameters
    ----------
    store
        The store, with its seed.
    i, j
        The records on the fine lattice, each of shape (n,).
    damaged
        What rows are filled with that cannot be read; without, that is an error.

    Raises
    ------
    StoreError
        As for :func:`rows_of`.
    """
    rows = np.empty((len(i), store.outputs), dtype=np.float32)
    for members in by_chunks(store, i, j):
        left, lower = i[members].min(), j[members].min()
        across, along = slice(left, i[members].max() + 1), slice(lower, j[members].max() + 1)
        try:
            part = rows_of(store, across, along)
        except StoreError:
            if damaged is None:
                raise
            rows[members] = damaged
            continue
        rows[members] = part[i[members] - left, j[members] - lower]
    return rows


@lru_cache(maxsize=_BLOCKS_KEPT)
def _extended(url: str, index: int, rows_sha256: str) -> LocalRows:
    """Extend a block to the rows with this digest; cached rows stay valid whatever happens to the store."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    fine = extended_block(store, block)
    if receipts.rows_sha256(fine, block) != rows_sha256:
        raise StoreError(
            f"{url}: block {index} does not extend to the rows that were certified; the seed or the receipt "
            "has changed, or this software is another"
        )
    return fine
