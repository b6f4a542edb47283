"""How far apart two records are, where a record is any identifier: a place, a name, a database.

Three classical promises are one inequality, |log M(y|x) − log M(y|x')| ≤ ε d(x, x'), with three metrics:
points in the plane (geo-indistinguishability), 0 or 1 (local differential privacy), and the number of
changed rows (central differential privacy, group privacy included). Distances may be infinite: such a pair
is promised nothing. The triangle inequality is not needed anywhere and not checked.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Array, Grid

Record = Hashable
_T = TypeVar("_T")
# What d(x, x') and d(x', x) may differ by, relative to them, when a formula is not written symmetrically.
_ASYMMETRY = 1e-12


class Metric(ABC):
    """A metric that knows all distances of some records at once; calling it gives one of them."""

    @abstractmethod
    def table(self, records: Sequence[Record]) -> Array:
        """Return d(x, x') for all pairs of n records, float64 of shape (n, n).

        Raises
        ------
        SpecError
            If the metric does not know one of the records.
        """

    def __call__(self, first: Record, second: Record) -> float:
        """Return d(first, second)."""
        return float(self.table([first, second])[0, 1])


class DiscreteMetric(Metric):
    """d = 1 for any two different records: ε-mDP is then ε-local differential privacy."""

    def table(self, records: Sequence[Record]) -> Array:
        """Return 0 for equal records and 1 for others, float64 of shape (n, n)."""
        numbers: dict[Record, int] = {}
        index = np.array([numbers.setdefault(record, len(numbers)) for record in records])
        return np.where(index[:, None] == index, 0.0, 1.0)


class MatrixMetric(Metric):
    """A metric that is given as a matrix.

    Parameters
    ----------
    records
        The n records that it knows, all different.
    matrix
        d, of shape (n, n); may hold infinities.

    Raises
    ------
    SpecError
        If records repeat or the matrix has another shape.
    """

    def __init__(self, records: Iterable[Record], matrix: ArrayLike) -> None:
        listed = tuple(records)
        self._place = {record: place for place, record in enumerate(listed)}
        self._matrix = np.array(matrix, dtype=np.float64)
        if len(self._place) != len(listed):
            raise SpecError("the metric's list of records names one twice")
        if self._matrix.shape != (len(listed), len(listed)):
            needed = f"{len(listed)} records need {(len(listed), len(listed))}"
            raise SpecError(f"the metric's matrix has the shape {self._matrix.shape}; {needed}")

    def table(self, records: Sequence[Record]) -> Array:
        """Return the rows and columns of these records, float64 of shape (n, n)."""
        places = [_known(self._place, record) for record in records]
        return self._matrix[np.ix_(places, places)]


class PlanarMetric(Metric):
    """d_p(x, x') = ‖x − x'‖_p of points in the plane.

    Parameters
    ----------
    points
        Coordinates of every record, as pairs of finite numbers; distances have their unit.
    p
        Exponent, in [1, ∞].

    Raises
    ------
    SpecError
        If p is below 1 or a point is not a pair of finite numbers.
    """

    def __init__(self, points: Mapping[Record, Sequence[float]], p: float = 2) -> None:
        if not p >= 1:
            raise SpecError(f"the metric's exponent must be at least 1, got {p}")
        for record, point in points.items():
            if len(point) != 2 or not all(math.isfinite(coordinate) for coordinate in point):
                raise SpecError(f"record {record!r}: {point!r} is not a point in the plane")
        self._points = dict(points)
        self._p = p

    def table(self, records: Sequence[Record]) -> Array:
        """Return d_p for all pairs, float64 of shape (n, n)."""
        points = np.array([_known(self._points, record) for record in records], dtype=np.float64)
        apart = np.abs(points[:, None] - points)
        largest = apart.max(axis=-1)
        if math.isinf(self._p):
            return np.asarray(largest)
        # Scaled by the largest, so that no power overflows.
        share = apart / np.where(largest > 0, largest, 1.0)[..., None]
        return np.asarray(largest * (share**self._p).sum(axis=-1) ** (1 / self._p))


def grid_metric(grid: Grid, p: float = 2) -> PlanarMetric:
    """Return d_p, in km, of the records of a grid; a record is its index (i, j) on the fine lattice."""
    x, y = grid.x_km().tolist(), grid.y_km().tolist()
    return PlanarMetric({(i, j): (x[i], y[j]) for i in range(len(x)) for j in range(len(y))}, p)


def adjacency_metric(records: Iterable[Record], adjacent: Callable[[Record, Record], bool]) -> MatrixMetric:
    """Return the least number of steps between adjacent records; infinite where no steps lead.

    With databases for records, adjacent when one row differs, it counts changed rows, as central
    differential privacy does.

    Parameters
    ----------
    records
        All records that steps may go through, all different.
    adjacent
        Whether two records are one step apart; asked for each pair once.

    Raises
    ------
    SpecError
        If records repeat.
    """
    from scipy.sparse.csgraph import shortest_path  # takes longer to import than all of this package

    listed = list(records)
    near = np.zeros((len(listed), len(listed)))
    for earlier, later in itertools.combinations(range(len(listed)), 2):
        near[earlier, later] = near[later, earlier] = adjacent(listed[earlier], listed[later])
    return MatrixMetric(listed, shortest_path(near, unweighted=True))


def distance_table(metric: Metric | Callable[[Record, Record], float], records: Sequence[Record]) -> Array:
    """Return the distances of all pairs of different records, and check that they can be distances.

    Parameters
    ----------
    metric
        A :class:`Metric`, or any function d(x, x').
    records
        The n records, all different.

    Returns
    -------
    d, float64 of shape (n, n), symmetric, with zeros on the diagonal. Where d(x, x') and d(x', x) differ by
    rounding, it is the smaller one, which promises more.

    Raises
    ------
    SpecError
        If a distance is negative or not a number, is not symmetric, or is not 0 from a record to itself.
    """
    if isinstance(metric, Metric):
        table = metric.table(records)
    else:
        table = np.array([[metric(x, other) for other in records] for x in records], dtype=np.float64)
    smaller, larger = np.minimum(table, table.T), np.maximum(table, table.T)
    for wrong, what in (
        (~(table >= 0), "not a distance"),
        ((table != 0) & np.eye(len(records), dtype=bool), "not 0"),
        (larger > smaller * (1 + _ASYMMETRY), "another one than back"),
    ):
        if wrong.any():
            first, second = np.argwhere(wrong)[0]
            raise SpecError(
                f"the metric gives {table[first, second]} from record {records[first]!r} to "
                f"{records[second]!r}, which is {what}"
            )
    return np.asarray(smaller)


def _known(known: Mapping[Record, _T], record: Record) -> _T:
    if record not in known:
        raise SpecError(f"the metric does not know the record {record!r}")
    return known[record]
