"""Fewer outputs: groups of them as one, whose cost at every record is the least of its members.

For a mechanism M, Σ over a group G of M(y|x) is a mechanism on groups that keeps the same ratios, and loses
no more with the cost min over G of c(x, y). So the optimum over groups is no more than that over outputs,
whatever the groups (PROOF.md, section 8). Which groups are good is decided by costs alone, so positions and
kinds of loss make no difference.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.seed.model import Array

# Where outputs are likely, for the choice of groups: with exp(−(c − min c) / t), t this share of what the
# best single output loses. Shares of 0.1 to 0.25 do about as well.
_LIKELY = 0.15


def merged(cost: Array, prior: Array, most: int) -> Array:
    """Return the costs of groups of outputs.

    Parameters
    ----------
    cost
        π(x) c(x, y), float64 of shape (n_x, n_y, K), ≥ 0, in km.
    prior
        π, float64 of shape (n_x, n_y).
    most
        Groups at most.

    Returns
    -------
    float64 of shape (n_x, n_y, groups), in km; the costs themselves where outputs are no more than that.
    """
    if cost.shape[-1] <= most:
        return cost
    group = groups_of(cost[prior > 0], prior[prior > 0], most)
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    return np.asarray(np.minimum.reduceat(cost[..., order], first, axis=-1))


def groups_of(cost: Array, prior: Array, most: int) -> NDArray[np.intp]:
    """Return groups of outputs that cost about the same wherever they are likely.

    From one group of all, that group is cut in two, again and again, whose least costs are furthest below
    those of its members: at two of its outputs, each other output going with the one that it is more like.

    Parameters
    ----------
    cost
        π(x) c(x, y), float64 of shape (n, K), in km.
    prior
        π > 0, float64 of shape (n,).
    most
        Groups at most.

    Returns
    -------
    The group of each output, from 0, intp of shape (K,).
    """
    loss = np.ascontiguousarray((cost / prior[:, None]).T)
    scale = _LIKELY * float(cost.sum(axis=0).min() / prior.sum())
    group = np.zeros(len(loss), dtype=np.intp)
    if not scale > 0:
        return group  # one output is best for all records
    likely = np.exp((loss.min(axis=0) - loss) / scale)
    likely *= prior / likely.sum(axis=0)

    def missed(members: NDArray[np.intp]) -> float:
        losses = loss[members]
        return float(np.vdot(likely[members], losses - losses.min(axis=0)))

    waiting = [(-missed(every), 0, every) for every in [np.arange(len(loss))]]
    count = 1
    while count < most and waiting[0][0] < 0:
        _, number, members = heapq.heappop(waiting)
        near = _nearer_to_the_first(loss[members], likely[members])
        for which, half in ((number, members[near]), (count, members[~near])):
            group[half] = which
            heapq.heappush(waiting, (-missed(half), which, half))
        count += 1
    return group


def _nearer_to_the_first(loss: Array, likely: Array) -> NDArray[np.bool_]:
    """Return which of some outputs are more like the likeliest than like one that is likely and unlike it."""
    weight, share = likely.sum(axis=0), likely.sum(axis=1)
    unlike = np.abs(loss - loss[share.argmax()]) @ weight
    other = (unlike * share).argmax()
    if not unlike[other] > 0:
        other = unlike.argmax()
    near = unlike <= np.abs(loss - loss[other]) @ weight
    near[other] = False
    return np.asarray(near)
