"""Extending one block from the seed that a store holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.extend.choose import checked_rows, is_own, operator_of
from mdpext_dask.extend.normalise import exponential, normalise
from mdpext_dask.extend.operator import Corners, Operator
from mdpext_dask.job.sections import ExtensionSection
from mdpext_dask.job.spec import fingerprint_of, is_job_of
from mdpext_dask.store import schema
from mdpext_dask.store.blocks import Block, relative
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import EXPONENT, EXTENSION_X, EXTENSION_Y, EdgeBudgets

# Names of what a store holds of a seed, and of one that is only tried.
SEED, TRIAL = "", "trial_"
RECORD_SCORES = schema.RECORD_SCORES


def extension_of_store(store: MechanismStore) -> ExtensionSection:
    """Return the section of a store's job that says how it is extended."""
    return ExtensionSection.model_validate(store.attributes["job"]["extension"])


def operator_of_store(store: MechanismStore) -> Operator:
    """Return the operator of a store's job.

    Raises
    ------
    StoreError
        If the job is not the one that the store was made for; nothing that it names is imported then.
    """
    attributes = store.attributes
    job, identity, fingerprint = (attributes[key] for key in ("job", "identity", "fingerprint"))
    if not is_job_of(identity, job) or fingerprint_of(identity) != fingerprint:
        raise StoreError(f"{store.url}: its job has changed since it was made; use --overwrite")
    return operator_of(extension_of_store(store))


def read_corners(store: MechanismStore, block: Block, operator: Operator, prefix: str = SEED) -> Corners:
    """Return what the corners of a block's source cells say.

    Parameters
    ----------
    store, block
        Which block of which store.
    operator
        Who is to extend them.
    prefix
        :data:`SEED` or :data:`TRIAL`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    across, along = block.cells_x, block.cells_y
    scores = store.read(f"seed/{prefix}score", _closed(across), _closed(along))
    east, north = across.stop - across.start, along.stop - along.start
    budget_x = np.full((2, east, north + 1, 1), np.inf)
    budget_y = np.full((2, east + 1, north, 1), np.inf)
    if operator.uses_budgets:
        every = slice(None)
        budget_x = store.read(f"seed/{prefix}{EXTENSION_X}", every, across, _closed(along))
        budget_y = store.read(f"seed/{prefix}{EXTENSION_Y}", every, _closed(across), along)
    exponent = np.ones(1) if operator.linear else store.read(f"seed/{prefix}{EXPONENT}")
    fits = (
        (scores.shape, exponent.shape) == ((east + 1, north + 1, store.outputs), (1,))
        and (budget_x.shape[:-1], budget_y.shape[:-1]) == ((2, east, north + 1), (2, east + 1, north))
        and {budget_x.shape[-1], budget_y.shape[-1]} <= {1, store.outputs}
    )
    # Whatever is lost reads as not-a-number.
    lost = not fits or not np.isfinite([scores.sum(), exponent[0]]).all()
    if lost or np.isnan([budget_x.sum(), budget_y.sum()]).any():
        raise StoreError(f"{store.url}: the seed's scores or budgets are damaged; run the job again")
    grid = store.grid
    one_stage = extension_of_store(store).stages == "one"
    return Corners(
        scores, budget_x, budget_y, (grid.factor,) if one_stage else grid.refine, float(exponent[0])
    )


def extension_arrays(
    operator: Operator, budgets: EdgeBudgets | None, exponent: float
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
        assert budgets is not None  # whoever has solved a seed LP has its budgets
        arrays = dict(zip((EXTENSION_X, EXTENSION_Y), budgets, strict=True))
    return arrays if operator.linear else {**arrays, EXPONENT: np.array([exponent])}


def extended_block(store: MechanismStore, block: Block, prefix: str = SEED) -> NDArray[np.float32]:
    """Return the rows of a closed block as they are stored, float32 of shape (rows, rows, K).

    Raises
    ------
    StoreError
        If what is stored is damaged.
    SpecError
        If an operator of the user's own fails, or answers with something else.
    """
    if prefix == SEED and RECORD_SCORES in store.seed_attributes:
        return _from_records(store, block, store.seed_attributes[RECORD_SCORES])
    operator = operator_of_store(store)
    corners = read_corners(store, block, operator, prefix)
    if not is_own(extension_of_store(store)):
        return operator.rows(corners)
    return checked_rows(operator, corners)


def _from_records(store: MechanismStore, block: Block, where: Any) -> NDArray[np.float32]:
    """Return rows whose log probabilities the store holds, as cell programs leave them."""
    try:
        name, (east, north) = where["name"], where["padding"]
        x, y = relative(block.closed_x, -east), relative(block.closed_y, -north)
    except (TypeError, ValueError, LookupError):
        raise StoreError(f"{store.url}: where the records' scores are is damaged; use --overwrite") from None
    scores = store.read(f"seed/{name}", x, y)
    if scores.shape != (*block.closed_shape, store.outputs) or not np.isfinite(scores).all():
        raise StoreError(f"{store.url}: the records' scores are damaged; use --overwrite")
    rows = np.empty(scores.shape, dtype=np.float32)
    for line, out in zip(scores, rows, strict=True):
        normalise(exponential(line), out=out)
    return rows


def _closed(part: slice) -> slice:
    return slice(part.start, part.stop + 1)
