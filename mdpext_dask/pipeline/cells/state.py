"""Where cell programs are, and what they have come to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.job.spec import json_number
from mdpext_dask.pipeline.cells.tasks import LatticeArray


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


class Candidate(Protocol):
    """Seeds to begin with."""

    @property
    def rows(self) -> NDArray[np.float64]:
        """Rows, float64 of shape (J, K)."""
        ...


class Candidates(Protocol):
    """Seeds to choose from, in the order of what they use of ε; made when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Candidate: ...


@dataclass(frozen=True)
class Found:
    """What cell programs have come to.

    Parameters
    ----------
    candidate
        Which of the seeds they began from.
    name
        Name of the array in the seed group with log probabilities of all records.
    facts
        What to note about them, for the attributes of the seed.
    """

    candidate: int
    name: str
    facts: dict[str, Any]


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
    """

    candidate: int
    tube: float
    tried: tuple[dict[str, Any], ...]
    level: int
    scores: LatticeArray
    loss_km: float
    sweeps: tuple[Improved, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "tube": json_number(self.tube), "loss_km": json_number(self.loss_km)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "State":
        """Return what :meth:`as_json` was made of."""
        where = values["scores"]
        return cls(
            candidate=values["candidate"],
            tube=float(values["tube"]),
            tried=tuple(values["tried"]),
            level=values["level"],
            scores=LatticeArray(where["name"], tuple(where["padding"])),
            loss_km=float(values["loss_km"]),
            sweeps=tuple(Improved(**sweep) for sweep in values["sweeps"]),
        )
