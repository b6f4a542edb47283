"""Where a linear program is solved: on one worker, or here with the sums of inverses on all workers.

The sum over outputs in the structured solver's Schur matrix is a map-reduce. Its results are J × J numbers,
so sending them pays only if each worker has enough outputs; on one machine, threads need not send them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.compute.executor import Executor, processors
from mdpext_dask.seed.block_tridiagonal import NormalMatrix
from mdpext_dask.seed.interior_point import sum_pairwise
from mdpext_dask.seed.solve import one_blas_thread
from mdpext_dask.store.mechanism_store import MechanismStore

T = TypeVar("T")

# Outputs times block size a worker needs for its sum of inverses to take as long (at 40 Gflop/s) as its
# result takes to come back (at 1 Gbit/s).
_WORTH_SENDING = 3200


def sum_over_parts(matrices: Sequence[NormalMatrix]) -> NDArray[np.float64]:
    """Return the upper triangle of Σ H^{-1} over parts of outputs: a worker's share."""
    with one_blas_thread():
        return sum_pairwise(matrix.factorised().inverse_sum() for matrix in matrices)


class SharedSums:
    """Computes sums of inverses on workers.

    Parameters
    ----------
    executor
        The workers.
    shares
        Tasks at most. The number of tasks is a power of two, as the number of parts is, so that sums have the
        same bits as without sharing.
    """

    def __init__(self, executor: Executor, shares: int) -> None:
        self._executor, self._shares = executor, shares

    def __call__(self, matrices: Sequence[NormalMatrix]) -> Iterable[NDArray[np.float64]]:
        """Return the sums of consecutive parts, in order."""
        shares = min(1 << (self._shares.bit_length() - 1), len(matrices))
        cuts = [len(matrices) * share // shares for share in range(shares + 1)]
        arguments = [(list(matrices[cuts[s] : cuts[s + 1]]),) for s in range(shares)]
        results = dict(self._executor.map("seed", sum_over_parts, arguments))
        return [results[share] for share in range(shares)]


def shares_worth_sending(store: MechanismStore, executor: Executor) -> int:
    """Return the number of tasks that the sum over outputs is worth splitting into; 1 for no splitting."""
    if executor.on_this_machine:
        return 1
    return max(min(executor.workers, store.outputs * min(store.grid.seeds_shape) // _WORTH_SENDING), 1)


def solve_alone(
    store: MechanismStore, executor: Executor, function: Callable[..., T], *arguments: object
) -> T:
    """Run a solver, `function(url, *arguments, threads, inverse_sums)`, while nothing else runs.

    Parameters
    ----------
    store
        The store whose URL is the first argument.
    executor
        The workers.
    function
        The solver.
    arguments
        What it takes after the URL.
    """
    shares = shares_worth_sending(store, executor)
    if shares > 1:
        return function(store.url, *arguments, processors(), SharedSums(executor, shares))
    ((_, result),) = executor.map("seed", function, [(store.url, *arguments, executor.threads, None)])
    return result
