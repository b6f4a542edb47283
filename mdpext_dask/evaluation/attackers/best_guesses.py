"""How far off guesses are: what attackers guess is judged under π, record by record."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from mdpext_dask.evaluation.attackers import geometric_median as medians
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.requests import TRUTH
from mdpext_dask.evaluation.attackers.tallies import Tally, TallyPlan, columns_of
from mdpext_dask.problem.grid import Grid
from mdpext_dask.store.mechanism_store import MechanismStore

Array = NDArray[np.float64]
# How close the informed attacker's error is brought to its bound, relatively.
GOOD_GAP = 5e-4


@dataclass(frozen=True)
class Guesses:
    """What is guessed, and what no guess is better than.

    Parameters
    ----------
    places_km
        By attacker and output, float64 of shape (A, K, 2), as seen from the corner of the grid, in km.
    lower_km
        A bound from below on min_g Σ_x p(x) M(y|x) ‖x − g‖, by attacker under his own belief p and output,
        float64 of shape (A, K), in km.
    alone_km
        What the informed one guesses without a report, float64 of shape (2,), likewise.
    alone_lower_km
        A bound from below on min_g Σ_x π(x) ‖x − g‖, in km.
    """

    places_km: Array
    lower_km: Array
    alone_km: Array
    alone_lower_km: float


def best_guesses(grid: Grid, plan: TallyPlan, tally: Tally) -> Guesses:
    """Return the best guesses for posteriors by bins, with the mass of each bin at its centre.

    Bounds hold for the records themselves: within a bin, the mean distance is no less than the centre's.
    """
    outputs = tally.reported.shape[1]
    shape = tally.bins.shape[1:3]
    # One output after the other, without a stride.
    bins = np.ascontiguousarray(tally.bins.transpose(0, 3, 4, 1, 2).reshape(-1, plan.priors, outputs, *shape))
    places = np.zeros((len(plan.attackers), outputs, 2))
    lower = np.zeros((len(plan.attackers), outputs))
    for a, attacker in enumerate(plan.attackers):
        for k in range(outputs):
            found = _median(grid, plan, attacker.mixed(bins[:, :, k].swapaxes(0, 1)))
            places[a, k], lower[a, k] = found.guess_km, found.lower_km
    alone = _median(grid, plan, bins[:, TRUTH].sum(axis=1))
    # Masses are sums of that many products.
    rounding = 4 * (grid.records + outputs) * np.finfo(float).eps
    return Guesses(places, lower * (1 - rounding), alone.guess_km, alone.lower_km * (1 - rounding))


def _median(grid: Grid, plan: TallyPlan, bins: Array) -> medians.Median:
    """Return the best guess for masses and moments of shape (1 or 3, bins east, bins north)."""
    at = np.nonzero(bins[0])
    if not len(at[0]):  # no mass: any guess is as good
        return medians.Median(np.zeros(2), 0.0, 0.0)
    mass = bins[0][at]
    if plan.bin_side == 1:
        centres = np.stack(at, axis=-1).astype(np.float64) * grid.spacing_km
    else:
        centres = np.stack([bins[1][at] / mass, bins[2][at] / mass], axis=-1)
    found = medians.geometric_median(centres, mass)
    # A centre is off by roundings of the extent of the grid.
    extent = max(grid.box.width_km, grid.box.height_km)
    off = 16 * (plan.bin_side**2 + 4) * np.finfo(float).eps * extent * float(mass.sum())
    return medians.Median(found.guess_km, found.cost_km, max(found.lower_km - off, 0.0))


def nearest_records(grid: Grid, places_km: Array) -> Array:
    """Return the nearest records of places, all as seen from the corner of the grid, in km."""
    steps = np.clip(np.rint(places_km / grid.spacing_km), 0, np.array(grid.shape) - 1)
    return np.asarray(steps * grid.spacing_km)


def refined(passes: Passes, guesses: Guesses, tally: Tally) -> Guesses:
    """Return the informed attacker's guesses, improved on the records themselves, and the best bounds."""
    grid, reported = passes.store.grid, tally.reported[TRUTH]
    weight = np.where(reported > 0, reported, 1.0)[:, None]

    def judge(places: Array) -> Array:
        arguments = ((group, places[:, :, 0]) for group in passes.groups)
        return np.asarray((passes.summed("guesses", slopes_of_blocks, arguments) / weight)[:, :, None])

    def bound(slope: Array) -> Array:
        # What the bins say holds as well.
        binned = guesses.lower_km[0][:, None] / weight
        return np.asarray(np.maximum(medians.lower_bound(slope, 1.0, grid.records), binned))

    begin = guesses.places_km[0][None, :, None]
    guess, _, lower = medians.descend(judge, begin, partial(nearest_records, grid), bound, weight, GOOD_GAP)
    places, bounds = guesses.places_km.copy(), guesses.lower_km.copy()
    # Weights are sums of as many numbers as there are records.
    rounding = 4 * (grid.records + 8) * np.finfo(float).eps
    places[0], bounds[0] = guess[:, 0], (lower * weight)[:, 0] * (1 - rounding)
    return replace(guesses, places_km=places, lower_km=bounds)


def slopes_of_blocks(url: str, group: tuple[int, ...], places_km: Array) -> Array:
    """Return what the records that blocks own add to Σ_x π(x) M(y|x) ‖x − g_y‖ and its derivatives.

    Parameters
    ----------
    url, group
        Which blocks of which store.
    places_km
        g, float64 of shape (G, K, 2), as seen from the corner of the grid, in km.

    Returns
    -------
    Slopes, float64 of shape (G, K, 7).

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    spacing = store.grid.spacing_km
    total = np.zeros((*places_km.shape[:-1], medians.SLOPE_NUMBERS))
    for column in columns_of(store, group):
        east = column.i * spacing - places_km[..., :1]
        north = column.j * spacing - places_km[..., 1:]
        joint = (column.beliefs[TRUTH][:, None] * column.rows).T
        total += medians.slope_at(np.broadcast_to(east, north.shape), north, joint)
    return total


def judge_blocks(
    url: str, group: tuple[int, ...], guesses: Guesses, keep_records: bool
) -> tuple[Array, float, list[Array]]:
    """Return what the records that some blocks own add to the errors of guesses.

    Returns
    -------
    error_km
        Σ_x π(x) Σ_y M(y|x) ‖x − g_y‖, by attacker, float64 of shape (A,), in km.
    alone_km
        Σ_x π(x) ‖x − g‖ for the guess without a report, in km.
    expected_km
        Σ_y M(y|x) ‖x − g_y‖ of the informed attacker, by block float64 of the shape of the owned records, in
        km; NaN without a prior. Empty unless `keep_records`.

    Raises
    ------
    StoreError
        If what is stored is damaged.
    """
    store = MechanismStore.open(url)
    spacing = store.grid.spacing_km
    attackers, outputs, _ = guesses.places_km.shape
    error, alone = np.zeros(attackers), 0.0
    expected = []
    every = guesses.places_km.reshape(-1, 2)
    for index in group:
        block = store.plan[index]
        of_block = np.full(block.owned_shape, np.nan)
        for column in columns_of(store, (index,)):
            prior, places = column.beliefs[TRUTH], column.places_km(spacing)
            apart = cdist(places, every).reshape(len(places), attackers, outputs)
            of_record = (column.rows[:, None] * apart).sum(axis=2)
            error += (prior[:, None] * of_record).sum(axis=0)
            alone += float((prior * cdist(places, guesses.alone_km[None])[:, 0]).sum())
            of_block[column.i - block.owned_x.start, column.j - block.owned_y.start] = of_record[:, 0]
        if keep_records:
            expected.append(of_block)
    return error, alone, expected


def judged(passes: Passes, guesses: Guesses, keep: bool) -> tuple[Array, float, Array | None]:
    """Return the errors of all attackers, of the guess without a report, and of all records, in km."""
    store = passes.store
    errors, alone = np.zeros(len(guesses.places_km)), 0.0
    expected = np.full(store.grid.shape, np.nan) if keep else None
    parts = passes.each("errors", judge_blocks, ((group, guesses, keep) for group in passes.groups))
    for group, (error_km, alone_km, of_blocks) in zip(passes.groups, parts, strict=True):
        errors += error_km
        alone += alone_km
        if expected is not None:
            for index, of_block in zip(group, of_blocks, strict=True):
                expected[store.plan[index].owned_x, store.plan[index].owned_y] = of_block
    return errors, alone, expected
