"""When the dual of a store's seed LP bounds what any mechanism loses.

It does where every record is a seed and the LP's constraints are no tighter than the promise; or hardly so,
for a budget is a little less than ε h, and probabilities have a floor. Mixing any ε-mDP mechanism with the
uniform one makes it feasible; PROOF.md, section 8.
"""

import math
import sys

import numpy as np

from mdpext_dask.evaluation.bound.lattices import promise_of
from mdpext_dask.store.mechanism_store import MechanismStore

# What products and sums of a few numbers may be wrong by, with a margin.
_ROUNDING = 16 * sys.float_info.epsilon


def seed_dual_bound(store: MechanismStore) -> float | None:
    """Return a lower bound on the loss of every mechanism that keeps the store's promise, in km.

    Every such M, mixed with the uniform mechanism to (1 − t) M + t / K, keeps a budget g' < g = exp(ε h) if
    (1 − t) (g − g') ≤ (t / K) (g' − 1), since M ≤ 1, and the floor δ if t ≥ K δ. Its loss is then no less
    than the dual.

    Parameters
    ----------
    store
        The store.

    Returns
    -------
    None if not every record is a seed, a region leaves records out, the seed is not solved, or budgets are
    so much less than ε h that the mixture says nothing.
    """
    seed, grid = store.seed_attributes, store.grid
    if grid.factor != 1 or not store.kept.all() or "dual_km" not in seed or not store.has_seed():
        return None
    budget = _least_budget(store)
    if budget is None:
        return None
    outputs, floor = store.outputs, float(store.attributes["job"]["privacy"]["min_probability"])
    sides = [float(np.diff(at).max()) for at in (grid.x_km(), grid.y_km())]
    grown = promise_of(store).growth(math.nextafter(max(sides), math.inf), 0.0)
    kept = math.exp(min(budget, 700.0)) * (1 - _ROUNDING)
    if not kept > 1:
        return None
    share = outputs * max(floor, (grown - kept) / (kept - 1), 0.0) * (1 + _ROUNDING)
    if not share < 1:
        return None
    uniform = share / outputs * math.fsum(store.read_seed_cost().ravel())
    dual = float(seed["dual_km"])
    rest = dual - uniform - _ROUNDING * (abs(dual) + uniform)
    return max(rest, 0.0) / (1 - share) * (1 - _ROUNDING)


def _least_budget(store: MechanismStore) -> float | None:
    """Return the least budget β h_0 of the seed LP; None if the store does not say."""
    found = {"budget_x", "budget_y"} & store.seed_arrays()
    if len(found) == 2:
        return min(float(store.read(f"seed/{name}").min(initial=math.inf)) for name in sorted(found))
    beta = store.seed_attributes.get("beta_per_km")
    return None if beta is None else min(beta) * store.grid.cell_km * (1 - _ROUNDING)
