"""Figures of an evaluation by their definitions."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask import open_mechanism
from mdpext_dask.store.loss import read_loss
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]


def by_definition(path: Path) -> tuple[Array, Array, Array, Array]:
    """Return prior, M(y|x), c(x, y) and ‖x − y‖ of all records with a prior, from what anyone can open."""
    mechanism = open_mechanism(path)
    dataset = mechanism.dataset
    prior = dataset.prior.values.ravel()
    used = prior > 0
    records = np.array(list(itertools.product(dataset.x.values, dataset.y.values)))[used]
    rows = dataset.probability.values.reshape(len(prior), -1).astype(np.float64)[used]
    for position in np.flatnonzero(np.isnan(rows).any(axis=1)):
        # On the border of a region, and of a block beside it that is not stored.
        x, y = records[position]
        rows[position] = mechanism.row(x_km=x, y_km=y)
    losses = read_loss(MechanismStore.open(str(path))).rows(records)
    apart = np.array([[math.dist(x, y) for y in mechanism.output_xy_km] for x in records])
    return prior[used], rows / rows.sum(axis=1, keepdims=True), losses, apart


def records_km(path: Path) -> Array:
    """Return the records with a prior as :func:`by_definition` orders them, shape (n, 2), in km."""
    store = MechanismStore.open(str(path))
    records = np.array(list(itertools.product(store.grid.x_km(), store.grid.y_km())))
    return np.asarray(records[store.read("prior").ravel() > 0])


def quantile_by_definition(values: list[float], weights: list[float], share: str) -> float:
    total = sum(map(Fraction, weights))
    for value in sorted(values):
        below = sum(Fraction(w) for v, w in zip(values, weights, strict=True) if v <= value)
        if below >= Fraction(share) * total:
            return value
    raise AssertionError
