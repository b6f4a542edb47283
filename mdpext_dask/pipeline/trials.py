"""Trying seeds: what the mechanism extended from them would cost and certify, without storing it.

A trial runs block by block on the workers, on the very bytes that would be stored, and never needs the
mechanism in memory. What it leaves in the store, beside the seed's own arrays, is deleted at the end.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import PLACES, Slopes, certify_source_cells, steepest_slopes
from mdpext_dask.compute.executor import Executor
from mdpext_dask.evaluation.loss import expected_loss
from mdpext_dask.job.spec import json_number
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import TRIAL, extended_block, extension_arrays, operator_of_store
from mdpext_dask.store.schema import EXPONENT, EXTENSION_X, EXTENSION_Y, EdgeBudgets

# Tempering aims this far below ε and is content with so much of it.
AIM, CONTENT = 1 - 1e-5, 0.998
_TEMPERINGS = 25
_SCORE, _VECTOR, _WORST = f"{TRIAL}score", f"{TRIAL}vector", f"{TRIAL}worst"


@dataclass(frozen=True)
class Trial:
    """A seed and what extends from it.

    Parameters
    ----------
    rows
        z, float64 of shape (J, K).
    budgets
        Budgets of edges that they are extended with, where there are any.
    exponent
        Rows of records are proportional to the exponentials of this times their extended scores.
    alpha
        α, if it is another trial's mechanism tempered, M^α / Σ M^α; else 1.
    extension
        What, besides the scores of `rows`, it is extended from, by name of the array.
    norms
        Certificate of each source cell and output, in 1/km, float64 of shape (cells east, cells north, K).
    loss_km
        Expected loss, in km.
    """

    rows: NDArray[np.float64]
    budgets: EdgeBudgets | None
    exponent: float
    alpha: float
    extension: dict[str, NDArray[np.float64]]
    norms: NDArray[np.float64]
    loss_km: float

    def measures(self, limit: float) -> dict[str, Any]:
        """Return loss, certificate and the share of (source cell, output) above a limit, as JSON values."""
        return {
            "loss_km": self.loss_km,
            "epsilon_certified": json_number(self.epsilon),
            "failing_share": float((self.norms > limit).mean()),
        }

    @property
    def corner_rows(self) -> NDArray[np.float64]:
        """Rows of the mechanism at the seeds, float64 of shape (J, K)."""
        return tempered(self.rows, self.exponent) if self.exponent != 1 else self.rows

    @property
    def epsilon(self) -> float:
        """The certificate of the whole, in 1/km."""
        return float(self.norms.max())


def try_block(url: str, index: int, slopes: bool) -> tuple[NDArray[np.float64], float]:
    """Extend a block from the scores under trial, to the bytes that would be stored, without storing it.

    Parameters
    ----------
    url, index
        Store and block.
    slopes
        Whether to leave the block's certificate vectors in the store.

    Returns
    -------
    norms
        Certificate of each source cell and output, in 1/km, float64 of shape (cells east, cells north, K).
    loss_km
        The block's part of the expected loss, in km.

    Raises
    ------
    StoreError
        If the scores cannot be read.
    """
    store = MechanismStore.open(url, mode="r+" if slopes else "r")
    block, grid = store.plan[index], store.grid
    rows = extended_block(store, block, TRIAL)
    fine = rows.dense()
    norms = certify_source_cells(fine, grid.spacing_km, grid.factor, store.metric_p)
    if slopes:
        found = steepest_slopes(fine, grid.spacing_km, grid.factor, store.metric_p)
        where = block.cells_x, block.cells_y
        store.array(f"seed/{_VECTOR}")[where] = found.vector
        store.array(f"seed/{_WORST}")[where] = found.worst
    east, north = block.owned_shape
    return norms, expected_loss(store, block, rows.part(slice(east), slice(north)))


def read_rows(store: MechanismStore) -> NDArray[np.float64]:
    """Return the rows under trial, float64 of shape (seeds east, seeds north, K)."""
    rows = np.exp(store.read(f"seed/{_SCORE}"))
    return np.asarray(rows / np.add.reduce(rows, axis=-1, keepdims=True))


def read_slopes(store: MechanismStore) -> Slopes:
    """Return the certificate vectors of the last trial that was asked for them."""
    return Slopes(store.read(f"seed/{_VECTOR}"), store.read(f"seed/{_WORST}"))


def tempered(rows: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return z^α / Σ z^α, over the last axis."""
    power: NDArray[np.float64] = rows**alpha
    return power / np.add.reduce(power, axis=-1, keepdims=True)


class Trials:
    """Tries seeds of one store.

    Parameters
    ----------
    store
        The store, with its seed cost.
    executor
        Where blocks are tried.
    """

    def __init__(self, store: MechanismStore, executor: Executor) -> None:
        self.store, self.executor = store, executor
        self.operator = operator_of_store(store)
        self.limit = store.planar_limit()

    def write(self, rows: NDArray[np.float64]) -> None:
        """Put rows (J, K) into the store to be tried, as the seed's own would be."""
        shape = (*self.store.grid.seeds_shape, self.store.outputs)
        self.store.write_seed_arrays({_SCORE: np.log(rows.reshape(shape))})

    def run(
        self,
        rows: NDArray[np.float64],
        budgets: EdgeBudgets | None = None,
        *,
        exponent: float = 1.0,
        alpha: float = 1.0,
        slopes: bool = False,
    ) -> Trial:
        """Try rows; with `slopes`, leave their certificate vectors in the store.

        Parameters
        ----------
        rows, budgets, exponent, alpha
            See :class:`Trial`.
        slopes
            Whether certificate vectors are wanted.
        """
        store, plan, grid = self.store, self.store.plan, self.store.grid
        self.write(rows)
        extension = extension_arrays(self.operator, budgets, exponent)
        store.write_extension({f"{TRIAL}{name}": values for name, values in extension.items()})
        if slopes:
            self._make_room()
        norms = np.empty((grid.cells_x, grid.cells_y, plan.outputs))
        losses = np.empty(plan.blocks)
        arguments = [(store.url, index, slopes) for index in range(plan.blocks)]
        for index, (part, loss_km) in self.executor.map("search", try_block, arguments):
            block: Block = plan[index]
            norms[block.cells_x, block.cells_y] = part
            losses[index] = loss_km
        return Trial(rows, budgets, exponent, alpha, extension, norms, float(losses.sum()))

    def tempered(self, trial: Trial, alpha: float) -> Trial:
        """Try what another trial's mechanism is when it is tempered: M^α / Σ M^α."""
        if self.operator.linear:
            return self.run(tempered(trial.rows, alpha), trial.budgets, alpha=alpha)
        return self.run(trial.rows, trial.budgets, exponent=alpha * trial.exponent, alpha=alpha)

    def _make_room(self) -> None:
        """Create the arrays for certificate vectors; a chunk is a block, so no two tasks write one."""
        grid, plan = self.store.grid, self.store.plan
        cells = (grid.cells_x, grid.cells_y, plan.outputs)
        names = ("cell_x", "cell_y", "output")
        for name, rest, dtype, fill in (
            (_VECTOR, (PLACES, 2), np.float32, np.nan),
            (_WORST, (2,), np.int16, -1),
        ):
            dimensions = (*names, *(f"{name}_{axis}" for axis in range(len(rest))))
            chunks = (*plan.block_cells, plan.outputs, *rest)
            self.store.create_seed_array(name, dimensions, chunks, fill, shape=(*cells, *rest), dtype=dtype)

    def promise(self, trial: Trial) -> float:
        """Return about the loss, in km, that is left when a seed is tempered to ε."""
        if trial.epsilon <= self.limit:
            return trial.loss_km
        return self.tempered(trial, self.limit / trial.epsilon).loss_km

    def temper(self, trial: Trial) -> Trial | None:
        """Return a trial tempered with nearly the largest α ≤ 1 that passes the certificate, if any does."""
        if trial.epsilon <= self.limit:
            return trial
        # Between an α that passes and one that fails, guided by slopes that are nearly proportional to α.
        passing, failing, epsilon = 0.0, 1.0, trial.epsilon
        best: Trial | None = None
        for _ in range(_TEMPERINGS):
            alpha = failing * AIM * self.limit / epsilon
            if not passing < alpha < failing:
                alpha = (passing + failing) / 2
            tried = self.tempered(trial, alpha)
            if tried.epsilon > self.limit:
                failing, epsilon = alpha, tried.epsilon
                continue
            passing, best = alpha, tried
            if tried.epsilon >= CONTENT * self.limit:
                break
        return best

    def clear(self) -> None:
        """Delete what trials have left in the store."""
        names = (f"{TRIAL}{name}" for name in (EXTENSION_X, EXTENSION_Y, EXPONENT))
        self.store.delete_seed_arrays(_SCORE, _VECTOR, _WORST, *names)


def told(measures: dict[str, Any]) -> str:
    """Return :meth:`Trial.measures` in words."""
    return (
        f"loss {measures['loss_km']:.4f} km, certificate {float(measures['epsilon_certified']):.4f}/km, "
        f"{measures['failing_share']:.2%} of cells above"
    )
