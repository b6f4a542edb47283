"""The grid: source cells, refinement levels and the fine lattice of records. Pure arithmetic.

Index order is x first everywhere: record ``(i, j)`` lies at ``(x[i], y[j])`` and has the flat index
``i * len(y) + j``; seeds (corners of source cells) likewise.

Coarse places use every m-th record along each axis, and the last, so that a place that wobbles stays the
same place. A place moves to the nearest of these, by at most m h / 2 along an axis, also beyond the last
multiple of m. So it moves by at most ρ' = ‖(m h / 2, m h / 2)‖_p, and two places at distance d are told apart
by at most ε (d + 2ρ'); with m = 1 this is ε (d + 2ρ).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError, as_number, shown

Array = NDArray[np.float64]
# A side that is a whole number of cells, or of steps, must not gain one through rounding.
_ROUNDING = 1e-9
# Seeds are listed, and solved for, one by one.
_MOST_CELLS = 1e8
# A place on the border of a box must not fall out of it through rounding: a millimetre.
_BORDER_KM = 1e-6
# From a place to its antipode.
_HALF_ROUND_KM = 20_000.0
# A coarse place as wide as this holds the whole Earth.
_WIDEST_PLACE_KM = 1e5
# Rectangles whose areas differ by no more than rounding count as equal; the least turned one is taken.
_SAME_AREA = 1e-12
_ANGLES_AT_ONCE = 256
# ε h: then e^{2 ε ρ} is 1.33, as for two places 0.28 / ε apart.
_APART = 0.2
# Records at most, which is a few minutes with noise; and steps between records across a small box, at least.
_MOST_RECORDS, _LEAST_STEPS = 2_500_000, 16
# Levels of source cells, each of which halves them, that are chosen; levels are at most so many.
_LEVELS, _MOST_LEVELS = 4, 16
_DIGITS = 3


@dataclass(frozen=True)
class Box:
    """A rectangle in the projected plane, in km."""

    west_km: float
    south_km: float
    east_km: float
    north_km: float

    @property
    def width_km(self) -> float:
        """Extent to the east, in km."""
        return self.east_km - self.west_km

    @property
    def height_km(self) -> float:
        """Extent to the north, in km."""
        return self.north_km - self.south_km

    @classmethod
    def around(cls, xy_km: Array) -> "Box":
        """Return the least box that holds points of shape (n, 2), in km."""
        (west, south), (east, north) = xy_km.min(axis=0), xy_km.max(axis=0)
        return cls(float(west), float(south), float(east), float(north))

    def contains(self, xy_km: Array) -> NDArray[np.bool_]:
        """Return, for points of shape (n, 2) in km, whether each lies in the box, to a millimetre."""
        low = np.array([self.west_km, self.south_km]) - _BORDER_KM
        high = np.array([self.east_km, self.north_km]) + _BORDER_KM
        return np.asarray(((xy_km >= low) & (xy_km <= high)).all(axis=1))

    def distance_km(self, xy_km: Array) -> Array:
        """Return how far points of shape (n, 2), in km, lie outside the box, float64 of shape (n,), in km.

        Of points without a place in the plane, next to the antipode, it is half the way round the Earth.
        """
        low, high = (self.west_km, self.south_km), (self.east_km, self.north_km)
        past = np.maximum(np.maximum(low - xy_km, xy_km - high), 0.0)
        past[past <= _BORDER_KM] = 0.0  # as in `contains`
        away = np.hypot(past[:, 0], past[:, 1])
        return np.asarray(np.where(np.isfinite(away), away, _HALF_ROUND_KM))

    @cached_property
    def radius_km(self) -> float:
        """Radius, in km, of the disc around the origin of the plane that holds the box."""
        x, y = (self.west_km, self.east_km), (self.south_km, self.north_km)
        return math.hypot(max(map(abs, x)), max(map(abs, y)))


@dataclass(frozen=True)
class Grid:
    """A rectangle of square source cells and its refinement.

    Parameters
    ----------
    west_km, south_km
        Lower left corner in the projected plane, in km.
    cells_x, cells_y
        Number of source cells to the east and to the north.
    cell_km
        Side h_0 of a source cell, in km.
    refine
        Subdivisions N_r of every level r = 1..L; their product F is the refinement factor.
    """

    west_km: float
    south_km: float
    cells_x: int
    cells_y: int
    cell_km: float
    refine: tuple[int, ...]

    @classmethod
    def covering(cls, box: Box, cell_km: float, refine: tuple[int, ...]) -> "Grid":
        """Return the grid from the lower left corner of `box` with as many whole cells as needed.

        Raises
        ------
        SpecError
            If a source cell is larger than the box, or there would be more than 10^8.
        """
        if cell_km > min(box.width_km, box.height_km) * (1 + _ROUNDING):
            raise SpecError(
                f"domain.cell_km: a source cell of {cell_km:g} km is larger than the box of "
                f"{box.width_km:.3f} km x {box.height_km:.3f} km"
            )
        if not (cells := (box.width_km / cell_km) * (box.height_km / cell_km)) <= _MOST_CELLS:
            raise SpecError(
                f"domain.cell_km: source cells of {cell_km:g} km would be {cells:.1e} in a box of "
                f"{box.width_km:.3f} km x {box.height_km:.3f} km; at most {_MOST_CELLS:.0e} can be"
            )
        cells_x, cells_y = (math.ceil(side / cell_km - _ROUNDING) for side in (box.width_km, box.height_km))
        return cls(box.west_km, box.south_km, cells_x, cells_y, cell_km, refine)

    @cached_property
    def factor(self) -> int:
        """Refinement factor F: fine steps along one side of a source cell."""
        return math.prod(self.refine)

    @cached_property
    def spacing_km(self) -> float:
        """Fine spacing h = h_0 / F, in km."""
        return self.cell_km / self.factor

    @property
    def source_cells(self) -> int:
        """Number of source cells."""
        return self.cells_x * self.cells_y

    @property
    def seeds_shape(self) -> tuple[int, int]:
        """Seeds to the east and to the north."""
        return self.cells_x + 1, self.cells_y + 1

    @property
    def seeds(self) -> int:
        """Number J of seeds."""
        return math.prod(self.seeds_shape)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Records to the east and to the north."""
        return self.cells_x * self.factor + 1, self.cells_y * self.factor + 1

    @property
    def records(self) -> int:
        """Number N of records."""
        return math.prod(self.shape)

    @cached_property
    def box(self) -> Box:
        """The closed rectangle that the grid covers."""
        # The same operations as in x_km and y_km, so that the last records lie on the border.
        east = self.west_km + (self.shape[0] - 1) * self.spacing_km
        north = self.south_km + (self.shape[1] - 1) * self.spacing_km
        return Box(self.west_km, self.south_km, east, north)

    def x_km(self) -> Array:
        """Return the east coordinates of the fine lattice, float64, in km."""
        return self.west_km + np.arange(self.shape[0], dtype=np.float64) * self.spacing_km

    def y_km(self) -> Array:
        """Return the north coordinates of the fine lattice, float64, in km."""
        return self.south_km + np.arange(self.shape[1], dtype=np.float64) * self.spacing_km

    def seeds_xy_km(self) -> Array:
        """Return the seeds' coordinates, float64 of shape (J, 2), in km, x first."""
        x = self.west_km + np.arange(self.seeds_shape[0]) * self.cell_km
        y = self.south_km + np.arange(self.seeds_shape[1]) * self.cell_km
        return np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)

    def record_numbers(self, x: slice, y: slice) -> NDArray[np.intp]:
        """Return the numbers i n_y + j of the records (i, j) of a rectangle, shape (records,)."""
        i, j = (np.arange(part.start, part.stop) for part in (x, y))
        return (i[:, None] * self.shape[1] + j).ravel()

    def nearest_records(self, xy_km: Array) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Return the nearest record of each point and whether the point lies in the rectangle.

        Clamping to the rectangle first increases no distance d_p in the plane, so the guarantee holds for
        points outside as well.

        Parameters
        ----------
        xy_km
            Points, float64 of shape (n, 2), in km.

        Returns
        -------
        i, j
            Record indices, each of shape (n,).
        inside
            Whether the point lies in the rectangle, bool of shape (n,).
        """
        i, j = self.coarse_records(xy_km, 1)
        return i, j, self.box.contains(xy_km)

    def coarse_records(self, xy_km: Array, steps: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the nearest record of each point among every m-th along both axes, and the last.

        Parameters
        ----------
        xy_km
            Points, float64 of shape (n, 2), in km; outside the rectangle they are clamped to it first.
        steps
            m, in steps of the lattice.
        """
        box = self.box
        x = np.clip(xy_km[:, 0], box.west_km, box.east_km) - box.west_km
        y = np.clip(xy_km[:, 1], box.south_km, box.north_km) - box.south_km
        return (
            coarse_indices(x / self.spacing_km, steps, self.shape[0] - 1),
            coarse_indices(y / self.spacing_km, steps, self.shape[1] - 1),
        )

    def record_at(self, x_km: float, y_km: float, steps: int = 1) -> tuple[int, int]:
        """Return what :meth:`coarse_records` does for one point, in less time."""
        box, (rows, columns) = self.box, self.shape
        across = (min(max(x_km, box.west_km), box.east_km) - box.west_km) / self.spacing_km
        along = (min(max(y_km, box.south_km), box.north_km) - box.south_km) / self.spacing_km
        # round() is np.rint(), to even.
        return min(round(across / steps) * steps, rows - 1), min(round(along / steps) * steps, columns - 1)

    def vertices_of(self, cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which records are vertices, corners or fine ones, of some of the source cells.

        Parameters
        ----------
        cells
            Which source cells, bool of shape (cells_x, cells_y).

        Returns
        -------
        bool of shape `shape`.
        """
        fine = cells.repeat(self.factor, axis=0).repeat(self.factor, axis=1)
        vertices = np.zeros(self.shape, dtype=bool)
        for east in (0, 1):
            for north in (0, 1):
                vertices[east : east + fine.shape[0], north : north + fine.shape[1]] |= fine
        return vertices

    def count_vertices_of(self, cells: NDArray[np.bool_]) -> int:
        """Return how many records are vertices of some of the source cells, without an array of records."""
        around = np.pad(cells, 1)
        sides_x = around[1:-1, 1:] | around[1:-1, :-1]
        sides_y = around[1:, 1:-1] | around[:-1, 1:-1]
        corners = around[1:, 1:] | around[1:, :-1] | around[:-1, 1:] | around[:-1, :-1]
        within = self.factor - 1
        return int(cells.sum() * within**2 + (sides_x.sum() + sides_y.sum()) * within + corners.sum())

    def are_vertices_of(
        self, cells: NDArray[np.bool_], i: NDArray[np.intp], j: NDArray[np.intp]
    ) -> NDArray[np.bool_]:
        """Return :meth:`vertices_of` for the records (i, j) only, bool of shape (n,)."""
        last_x, last_y = self.cells_x - 1, self.cells_y - 1
        # The cell before a record on a side between two cells, and the one after.
        across = np.maximum(-(-i // self.factor) - 1, 0), np.minimum(i // self.factor, last_x)
        along = np.maximum(-(-j // self.factor) - 1, 0), np.minimum(j // self.factor, last_y)
        return np.asarray(np.any([cells[a, b] for a in across for b in along], axis=0))

    def lie_in(self, cells: NDArray[np.bool_], xy_km: Array) -> NDArray[np.bool_]:
        """Return which points lie in some of the source cells, sides included, to a millimetre.

        Parameters
        ----------
        cells
            Which source cells, bool of shape (cells_x, cells_y).
        xy_km
            Points, float64 of shape (n, 2), in km.

        Returns
        -------
        bool of shape (n,).
        """
        position = (xy_km - (self.west_km, self.south_km)) / self.cell_km
        border = _BORDER_KM / self.cell_km
        last = np.array([self.cells_x, self.cells_y]) - 1
        before, after = (
            np.clip(np.floor(position + shift), 0, last).astype(np.intp) for shift in (-border, border)
        )
        found = [cells[a, b] for a in (before[:, 0], after[:, 0]) for b in (before[:, 1], after[:, 1])]
        return np.asarray(np.any(found, axis=0) & self.box.contains(xy_km))


def coarse_steps(place_km: float, spacing_km: float) -> int:
    """Return m, the least number of steps that is no narrower than a coarse place of side `place_km`.

    Raises
    ------
    SpecError
        If `place_km` is not a positive number.
    """
    if not 0 < as_number(place_km) <= _WIDEST_PLACE_KM:
        most = f"{_WIDEST_PLACE_KM:g}"
        raise SpecError(f"place_km: must be a positive number of km, up to {most}, got {shown(place_km)}")
    return max(math.ceil(place_km / spacing_km - _ROUNDING), 1)


def coarse_radius_km(steps: int, spacing_km: float, metric_p: float) -> float:
    """Return ρ' = ‖(m h / 2, m h / 2)‖_p: the largest distance a place moves, in km."""
    return steps * spacing_km / 2 * 2 ** (1 / metric_p)


def coarse_indices(position: Array, steps: int, last: int) -> NDArray[np.intp]:
    """Return the records along one axis to which places are moved: multiples of m, or `last`.

    Parameters
    ----------
    position
        Where places are along the axis, in steps from the first record, between 0 and `last`; any shape.
    steps
        m.
    last
        Index of the last record of the axis.
    """
    return np.asarray(np.minimum(np.rint(position / steps) * steps, last), dtype=np.intp)


def square_sums(values: Array, side: int) -> Array:
    """Return sums of values of shape (n_x, n_y) over squares of `side` by `side`; the last may be smaller."""
    for axis, n in enumerate(values.shape):
        values = np.add.reduceat(values, np.arange(0, n, side), axis=axis)
    return values


def least_rectangle_deg(xy_km: Array) -> float:
    """Return how far the rectangle of least area around points is turned, counter-clockwise, in degrees.

    One side of it lies along a side of the convex hull, so these directions are all that need be tried.

    Parameters
    ----------
    xy_km
        Points, float64 of shape (n, 2), in km.

    Returns
    -------
    The direction of the side that is closest to the first axis, in [-45, 45).
    """
    from scipy.spatial import ConvexHull, QhullError  # sampling needs a grid, and need not wait for this

    try:
        hull = xy_km[ConvexHull(xy_km).vertices]
    except (QhullError, ValueError):
        return 0.0  # points on one line, or too few: no grid fits around them, whichever way it is turned
    east, north = (np.roll(hull, -1, axis=0) - hull).T
    turned = np.unique((np.rad2deg(np.arctan2(north, east)) + 45) % 90 - 45)
    areas = []
    for first in range(0, len(turned), _ANGLES_AT_ONCE):
        angle = np.deg2rad(turned[first : first + _ANGLES_AT_ONCE])
        axes = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        areas.append(np.prod(np.ptp(np.einsum("nc,dca->dna", hull, axes), axis=1), axis=0))
    area = np.concatenate(areas)
    alike = turned[area <= area.min() * (1 + _SAME_AREA)]
    return float(alike[np.argmin(np.abs(alike))])


def chosen_cells(
    box: Box, epsilon_per_km: float, cell_km: float | None, refine: tuple[int, ...] | None
) -> tuple[float, tuple[int, ...]]:
    """Return the side of source cells, in km, and their subdivisions by level; what a job says stays.

    Records are as near as ε asks for, and as a city's size allows. A place is moved to its nearest record, by
    at most ρ = h / √2 for records h apart, so two places at distance d are told apart by at most ε (d + 2 ρ).

    Parameters
    ----------
    box
        What the grid covers.
    epsilon_per_km
        ε, in 1/km.
    cell_km, refine
        As the job has them.
    """
    if cell_km is not None and refine is not None:
        return cell_km, refine
    shorter = min(box.width_km, box.height_km)
    crowded = math.sqrt(box.width_km * box.height_km / _MOST_RECORDS)
    spacing = min(max(_APART / epsilon_per_km, crowded), shorter / _LEAST_STEPS)
    if cell_km is not None:
        halvings = math.ceil(math.log2(max(cell_km / spacing, 1.0)))
        return cell_km, (2,) * min(halvings, _MOST_LEVELS) or (1,)
    refine = refine or (2,) * _LEVELS
    return _rounded_down(min(spacing * math.prod(refine), shorter)), refine


def _rounded_down(length_km: float) -> float:
    scale = 10.0 ** (math.floor(math.log10(length_km)) - _DIGITS + 1)
    return round(math.floor(length_km / scale + 1e-9) * scale, 12)
