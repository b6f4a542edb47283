"""What every method is given, and what it gives back.

All methods get the same records, outputs, prior, loss and ε; differences between them are then theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.domain import Domain
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.loss import Loss
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.store.loss import read_loss
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """One problem, in the plane.

    Parameters
    ----------
    grid
        The grid of records.
    epsilon_per_km
        ε to keep in the plane, in 1/km.
    metric_p
        Exponent p of the metric.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    prior
        π of the records, float64 of shape ``grid.shape``, summing to 1.
    loss
        The loss between records and outputs.
    min_probability
        Floor δ of probabilities, for methods that have one.
    random_seed
        For methods that draw anything.
    """

    grid: Grid
    epsilon_per_km: float
    metric_p: float
    output_xy_km: Array
    prior: Array
    loss: Loss
    min_probability: float
    random_seed: int = 0

    @classmethod
    def of_store(cls, store: MechanismStore) -> "Problem":
        """Return the problem that a store was made for; it need not have any rows yet."""
        return cls(
            grid=store.grid,
            epsilon_per_km=float(store.attributes["epsilon_planar_per_km"]),
            metric_p=store.metric_p,
            output_xy_km=store.output_xy_km(),
            prior=np.asarray(store.read("prior"), dtype=np.float64),
            loss=read_loss(store),
            min_probability=float(store.attributes["job"]["privacy"]["min_probability"]),
        )

    @classmethod
    def of_domain(cls, spec: JobSpec, domain: Domain, random_seed: int = 0) -> "Problem":
        """Return the problem of a job."""
        return cls(
            grid=domain.grid,
            epsilon_per_km=planar_epsilon(spec.privacy.epsilon_per_km, domain.distortion),
            metric_p=spec.domain.metric_p,
            output_xy_km=domain.output_xy_km,
            prior=domain.prior,
            loss=domain.loss,
            min_probability=spec.privacy.min_probability,
            random_seed=random_seed,
        )

    @property
    def outputs(self) -> int:
        """Number K of outputs."""
        return len(self.output_xy_km)

    def records_xy_km(self, east: slice) -> Array:
        """Return the records of some lattice columns, float64 of shape (columns · n_y, 2), north fastest."""
        x, y = np.meshgrid(self.grid.x_km()[east], self.grid.y_km(), indexing="ij")
        return np.stack([x.ravel(), y.ravel()], axis=-1)

    def distances_km(self, xy_km: Array, other_xy_km: Array) -> Array:
        """Return d_p between places, float64 of shape (n, m), in km."""
        return np.asarray(cdist(xy_km, other_xy_km, "minkowski", p=self.metric_p))


class Guarantee(StrEnum):
    """What a method promises of ε."""

    EPSILON = "epsilon"  # (ε, d_p)-mDP between all pairs of records
    PROBABILISTIC = "probabilistic"  # with a probability, or between most pairs
    NONE = "none"


# Rows of the records in some lattice columns, float64 of shape (columns, n_y, K), each summing to 1.
RowsOf = Callable[[slice], Array]


@dataclass(frozen=True)
class BaselineMechanism:
    """What a method made.

    Parameters
    ----------
    rows
        Its rows, a strip of records at a time, so that no more than a strip need be in memory; None of a
        method that reports places other than the outputs.
    guarantee
        What it promises.
    note
        One sentence on what it promises, or why it does not.
    sampled_loss_km, sampled_standard_error
        Expected loss and its standard error in km, of a method without rows.
    facts
        What else is worth telling, plain JSON values.
    """

    rows: RowsOf | None
    guarantee: Guarantee
    note: str
    sampled_loss_km: float | None = None
    sampled_standard_error: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


# Rows are gone through so many numbers at a time.
_STRIP_ELEMENTS = 500_000


def strips(problem: Problem) -> list[slice]:
    """Return the lattice columns in portions whose rows fit into memory easily."""
    across, along = problem.grid.shape
    step = max(_STRIP_ELEMENTS // (along * problem.outputs), 1)
    return [slice(first, min(first + step, across)) for first in range(0, across, step)]


def expected_loss(problem: Problem, rows: RowsOf) -> float:
    """Return UL(M) = Σ_x π(x) Σ_y M(y|x) c(x, y) in km, with rows divided by their sums."""
    total = 0.0
    for strip in strips(problem):
        prior = problem.prior[strip].ravel()
        used = np.flatnonzero(prior)
        if len(used):
            part = rows(strip).reshape(-1, problem.outputs)[used]
            loss = problem.loss.rows(problem.records_xy_km(strip)[used])
            total += float(prior[used] @ ((part * loss).sum(axis=1) / part.sum(axis=1)))
    return total


# A method: from a problem, and how many seconds it may take, to a mechanism.
Method = Callable[[Problem, float], BaselineMechanism]
