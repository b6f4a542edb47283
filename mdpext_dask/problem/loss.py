"""What a wrong report costs: travel-distance loss, Euclidean loss, a table; and the seed cost.

c(x, y) = Σ_q w_q | d_G(x, q) − d_G(y, q) |, the error in road distance to places q, each place x taken
at its nearest road node; or simply ‖x − y‖₂; or what a table says. Losses are made row by row of the
fine lattice, or for some outputs, so no array over all records and outputs is ever held.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist

from mdpext_dask.problem.grid import Array, Grid

# Losses between n records and some outputs, in km: from k of their numbers to float64 of shape (k, n).
Columns = Callable[[NDArray[np.intp]], Array]


class Loss(Protocol):
    """A loss matrix that is evaluated where it is needed."""

    def rows(self, xy_km: Array) -> Array:
        """Return c(x, y_k) in km, float64 of shape (n, K), for records of shape (n, 2) in km."""
        ...

    def pairs(self, xy_km: Array, output: NDArray[np.intp]) -> Array:
        """Return c(x_i, y_{k_i}) in km, float64 of shape (n,): an entry of each of :meth:`rows`."""
        ...

    def columns(self, xy_km: Array) -> Columns:
        """Return what gives the losses of records of shape (n, 2), in km, to outputs that it is asked for."""
        ...

    def from_output(self, output: int) -> Array | None:
        """Return c(y, y_k) of an output y in km, float64 of shape (K,); None if the loss is no distance."""
        ...


@dataclass(frozen=True)
class EuclideanLoss:
    """Distance between the true and the reported place.

    Parameters
    ----------
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    """

    output_xy_km: Array

    def rows(self, xy_km: Array) -> Array:
        """Return ‖x − y_k‖₂ in km, float64 of shape (n, K)."""
        return np.asarray(cdist(xy_km, self.output_xy_km), dtype=np.float64)

    def pairs(self, xy_km: Array, output: NDArray[np.intp]) -> Array:
        """Return ‖x_i − y_{k_i}‖₂ in km, float64 of shape (n,)."""
        return np.asarray(np.hypot(*(xy_km - self.output_xy_km[output]).T))

    def columns(self, xy_km: Array) -> Columns:
        """Return ‖x − y_k‖₂ in km for the outputs that are asked for."""
        return lambda outputs: np.asarray(cdist(self.output_xy_km[outputs], xy_km))

    def from_output(self, output: int) -> Array:
        """Return ‖y − y_k‖₂ in km, float64 of shape (K,)."""
        return np.asarray(self.rows(self.output_xy_km[[output]])[0])


@dataclass(frozen=True)
class TravelLoss:
    """Weighted mean error in road distance to the tasks.

    Parameters
    ----------
    node_xy_km
        Road nodes, float64 of shape (n, 2), in km.
    task_distance_km
        Road distance from every node to every task, float32 of shape (n, Q).
    task_weight
        Weights of the tasks, float64 of shape (Q,), summing to 1.
    output_node
        Nearest road node of each output, shape (K,).
    """

    node_xy_km: Array
    task_distance_km: NDArray[np.float32]
    task_weight: Array
    output_node: NDArray[np.intp]

    @cached_property
    def _tree(self) -> KDTree:
        return KDTree(self.node_xy_km)

    @cached_property
    def _output_table(self) -> Array:
        return self.task_distance_km[self.output_node] * self.task_weight

    def rows(self, xy_km: Array) -> Array:
        """Return Σ_q w_q |d(x, q) − d(y_k, q)| in km, float64 of shape (n, K).

        w |a − b| = |w a − w b|, so it is a city-block distance of weighted table rows; records that
        share a road node share the row.
        """
        table, inverse = self._table_rows(xy_km)
        return np.asarray(cdist(table, self._output_table, "cityblock"), dtype=np.float64)[inverse]

    def pairs(self, xy_km: Array, output: NDArray[np.intp]) -> Array:
        """Return Σ_q w_q |d(x_i, q) − d(y_{k_i}, q)| in km, float64 of shape (n,)."""
        return self._between_nodes(self._nodes(xy_km), self.output_node[output])

    def columns(self, xy_km: Array) -> Columns:
        """Return the same for the outputs that are asked for."""
        table, inverse = self._table_rows(xy_km)
        return lambda outputs: np.asarray(cdist(self._output_table[outputs], table, "cityblock"))[:, inverse]

    def _table_rows(self, xy_km: Array) -> tuple[Array, NDArray[np.intp]]:
        """Return weighted distances of the nodes at some places, of shape (nodes, Q), and which is whose."""
        nodes, inverse = np.unique(self._tree.query(xy_km)[1], return_inverse=True)
        return self.task_distance_km[nodes] * self.task_weight, inverse

    def from_output(self, output: int) -> Array:
        """Return Σ_q w_q |d(y, q) − d(y_k, q)| in km, float64 of shape (K,)."""
        return np.asarray(cdist(self._output_table[[output]], self._output_table, "cityblock")[0])

    def between(self, xy_km: Array, other_xy_km: Array) -> Array:
        """Return Σ_q w_q |d(x_i, q) − d(z_i, q)| in km of places x_i and z_i, float64 of shape (n,).

        Places are taken at their nearest road nodes, as records are.
        """
        return self._between_nodes(self._nodes(xy_km), self._nodes(other_xy_km))

    def _nodes(self, xy_km: Array) -> NDArray[np.intp]:
        return np.asarray(self._tree.query(xy_km)[1], dtype=np.intp)

    def _between_nodes(self, node: NDArray[np.intp], other: NDArray[np.intp]) -> Array:
        here, there = (self.task_distance_km[nodes] for nodes in (node, other))
        return np.asarray(np.abs(here.astype(np.float64) - there) @ self.task_weight)


class Table(Protocol):
    """Numbers of shape (records east, records north, K) that are read a part of a row at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Records to the east, to the north, and outputs."""
        ...

    def __getitem__(self, index: tuple[int, slice]) -> NDArray[Any]:
        """Return the losses of consecutive records ``(i, j)`` of one i, of shape (records, K)."""
        ...


@dataclass(frozen=True)
class TableLoss:
    """Loss that somebody else has worked out, known at the records only.

    Parameters
    ----------
    grid
        The grid of records.
    table
        c of every record and output in km, of shape (*grid.shape, K): an array, or what stands for one.
    """

    grid: Grid
    table: Table

    def rows(self, xy_km: Array) -> Array:
        """Return the losses of the nearest record of each place in km, float64 of shape (n, K)."""
        i, j, _ = self.grid.nearest_records(xy_km)
        rows = np.empty((len(xy_km), self.table.shape[-1]))
        for members, first, part in self._columns(i, j):
            rows[members] = part[j[members] - first]
        return rows

    def pairs(self, xy_km: Array, output: NDArray[np.intp]) -> Array:
        """Return the losses of the nearest record of each place in km, float64 of shape (n,)."""
        i, j, _ = self.grid.nearest_records(xy_km)
        losses = np.empty(len(xy_km))
        for members, first, part in self._columns(i, j):
            losses[members] = part[j[members] - first, output[members]]
        return losses

    def _columns(
        self, i: NDArray[np.intp], j: NDArray[np.intp]
    ) -> Iterator[tuple[NDArray[np.intp], int, NDArray[Any]]]:
        """Yield which records are in a lattice column, their first j, and the table from there on."""
        for east in np.unique(i):
            members = np.flatnonzero(i == east)
            first, last = int(j[members].min()), int(j[members].max())
            yield members, first, self.table[int(east), slice(first, last + 1)]

    def columns(self, xy_km: Array) -> Columns:
        """Return the same for the outputs that are asked for; the table is read each time."""
        return lambda outputs: self.rows(xy_km)[:, outputs].T

    def from_output(self, output: int) -> None:  # noqa: ARG002 as of the others
        """Return nothing: a table need not keep the triangle inequality."""
        return


def corner_costs(grid: Grid, loss: Loss, prior: Array, cells: tuple[slice, slice]) -> Array:
    """Return the seed cost of source cells, before the cells that share a corner are added up.

    C = Wᵀ diag(π) L with W the bilinear weights of every record on the corners of its source cell. A
    record on an edge between cells is counted once, in the cell to its upper right (in the last cell on
    the upper and right border). Every sum runs in an order that depends on the cell alone, so the
    result is the same to the last bit however cells are shared out to tasks.

    Parameters
    ----------
    grid
        The grid.
    loss
        The loss c(x, y_k).
    prior
        π of the records that these cells own, float64; rows ``cells[0]``, columns ``cells[1]`` scaled by
        F, one more at the upper border of the grid.
    cells
        Ranges of source cells, to the east and to the north.

    Returns
    -------
    float64 of shape (cells east, cells north, 2, 2, K), in km.
    """
    x, y = grid.x_km(), grid.y_km()
    factor, across, along = grid.factor, cells[0], cells[1]
    closing_x, closing_y = int(across.stop == grid.cells_x), int(along.stop == grid.cells_y)
    first_x, first_y = across.start * factor, along.start * factor
    row_y = y[first_y : along.stop * factor + closing_y]
    fraction = np.arange(factor + 1) / factor

    n_across, n_along = across.stop - across.start, along.stop - along.start
    outputs = loss.rows(np.array([[x[0], y[0]]])).shape[1]
    cost = np.zeros((n_across, n_along, 2, 2, outputs))
    for cell in range(n_across):
        last = closing_x and cell == n_across - 1
        # By corner side: the sums over the cell's rows of records, still resolved along y.
        strips = np.zeros((2, len(row_y), outputs))
        for step in range(factor + last):
            i = first_x + cell * factor + step
            # Where nobody is, nothing is lost.
            used = np.flatnonzero(prior[i - first_x])
            points = np.stack([np.full(len(used), x[i]), row_y[used]], axis=-1)
            weighted = np.zeros((len(row_y), outputs))
            weighted[used] = loss.rows(points) * prior[i - first_x, used, None]
            strips[0] += (1 - fraction[step]) * weighted
            strips[1] += fraction[step] * weighted
        whole = strips[:, : n_along * factor].reshape(2, n_along, factor, outputs)
        for step in range(factor):
            cost[cell, :, :, 0] += ((1 - fraction[step]) * whole[:, :, step]).swapaxes(0, 1)
            cost[cell, :, :, 1] += (fraction[step] * whole[:, :, step]).swapaxes(0, 1)
        if closing_y:
            cost[cell, -1, :, 1] += strips[:, -1]
    return cost


def assemble_seed_cost(grid: Grid, cost: Array) -> Array:
    """Add up the corner costs of all source cells.

    Parameters
    ----------
    grid
        The grid.
    cost
        :func:`corner_costs` of all cells, float64 of shape (n_x, n_y, 2, 2, K).

    Returns
    -------
    C, float64 of shape (J, K), in km.
    """
    outputs = cost.shape[-1]
    total = np.zeros((*grid.seeds_shape, outputs))
    for east in (0, 1):
        for north in (0, 1):
            total[east : east + grid.cells_x, north : north + grid.cells_y] += cost[:, :, east, north]
    return total.reshape(-1, outputs)
