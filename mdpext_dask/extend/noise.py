"""Planar Laplace noise on a fine lattice of cells: what a cell collects from a record, and rows of outputs.

Noise with the density ∝ e^{−ε ‖z − x‖} puts the mass I_c(x) = ∫_c e^{−ε ‖z − x‖} dz into a cell c, up to a
factor that all records share, and |log I_c(x) − log I_c(x')| ≤ ε ‖x − x'‖ for every cell. So does max(I_c, τ)
for any constant τ, a sum of such terms, and such a sum plus a constant that is not negative. With a table r
that sends every cell to an output, N_y cells of which go to y, this is what a record at x reports:

    M(y|x) = f + (1 − K f) S_y(x) / V,    S_y(x) = Σ_{c: r(c) = y} max(I_c(x) − τ, 0),    V = Σ_y S_y(x).

It keeps ε between any two records if V is the same for all of them and f ≥ (1 − K f) τ N_y / V for every y:
then M(y|x) = (1 − K f) / V · Σ_{c: r(c) = y} max(I_c(x), τ), plus a constant that is not negative. Outputs
with no cell near a record have the probability f from there, exactly. Records that lie alike in their cells
share one table of masses, and V; where records lie in F² different ways in their cells, V differs between
these in the tail alone, which is paid for as rounding is, see :attr:`Kernel.log_error`. Only cells that some
record reaches count in N_y: from all others, max(I_c, τ) is τ.

Andrés, Bordenabe, Chatzikokolakis & Palamidessi, "Geo-indistinguishability: differential privacy for
location-based systems" (CCS 2013).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array, Grid

# Side of a noise cell, times ε, about. Half of it lowers the loss by 0.3 % and takes four times as long.
CELL = 0.34
# Tables of masses grow with the square of it; as many cells as there may be, and masses.
MOST_PER_CELL, MOST_CELLS, _MOST_MASSES = 32, 20_000_000, 2**25
# Larger numbers are shown as this one: a float ends.
_MOST_SHOWN = 10**300
# Relative error of a cell's mass, as it is integrated here.
_MASS_ERROR = 1e-12
# So many squares from the peak on, it is inside or so close that a plain rule would not do. Further out, the
# function is analytic in an ellipse of Bernstein's with parameter 14 around a square: an error of 14^-2n.
_NEAR = 4
_NODES_NEAR, _NODES = 40, 6


@dataclass(frozen=True)
class NoiseLattice:
    """Square cells over the grid and some way beyond it.

    A cell holds `per_cell` records along each axis, around its middle; or a record is the middle of a cell,
    and `per_record` cells make one step of records. One of the two is 1.

    Parameters
    ----------
    grid
        The grid of records.
    per_cell, per_record
        See above.
    reach
        Cells beyond those of the outermost records, on every side.
    """

    grid: Grid
    per_cell: int
    per_record: int
    reach: int

    @classmethod
    def around(cls, grid: Grid, epsilon_per_km: float, reach_km: float) -> "NoiseLattice":
        """Return the lattice of cells of about :data:`CELL` / ε, at least `reach_km` beyond every record."""
        cell_km = CELL / epsilon_per_km
        per_cell = max(min(round(cell_km / grid.spacing_km), MOST_PER_CELL), 1)
        per_record = 1 if per_cell > 1 else max(math.ceil(grid.spacing_km / cell_km), 1)
        return cls(
            grid, per_cell, per_record, math.ceil(reach_km / (grid.spacing_km * per_cell / per_record)) + 1
        )

    @classmethod
    def checked(cls, grid: Grid, per_cell: float, per_record: float, reach: float) -> "NoiseLattice":
        """Return the lattice that stored numbers describe.

        Raises
        ------
        ValueError
            If there is none, or far too large a one.
        """
        numbers = per_cell, per_record, reach
        # Written so that NaN is none.
        if not all(0 <= number <= MOST_CELLS and number % 1 == 0 for number in numbers):
            raise ValueError("its numbers are none of a lattice of noise cells")
        found = cls(grid, *map(int, numbers))
        if min(per_cell, per_record) != 1 or per_cell > MOST_PER_CELL or found.excess is not None:
            raise ValueError("its numbers are none of a lattice of noise cells, or of too large a one")
        return found

    @property
    def excess(self) -> str | None:
        """What there would be more of than can be gone through, in words; None if there is not."""
        cells, masses = math.prod(self.shape), math.prod(self.tables[1][1])
        if cells > MOST_CELLS:
            return f"{min(cells, _MOST_SHOWN):.1e} cells of noise, more than {MOST_CELLS:.0e}"
        if masses > _MOST_MASSES:
            return f"{min(masses, _MOST_SHOWN):.1e} masses of noise, more than {_MOST_MASSES:.0e}"
        return None

    @property
    def tables(self) -> list[tuple[str, tuple[int, ...]]]:
        """What dtype and shape the tables of :class:`NoiseTables` have: outputs of cells, masses, totals."""
        side, window = self.per_cell, 2 * self.reach + 1
        shapes = self.shape, (side, side, window, window), (side, side)
        return list(zip(("int32", "float64", "float64"), shapes, strict=True))

    @property
    def cell_km(self) -> float:
        """Side of a cell, in km."""
        return self.grid.spacing_km * self.per_cell / self.per_record

    @property
    def shape(self) -> tuple[int, int]:
        """Cells to the east and to the north."""
        x, y = (self.cell_of(side - 1) + 1 + 2 * self.reach for side in self.grid.shape)
        return x, y

    def cell_of(self, record: int) -> int:
        """Return the cell of a record along an axis, counted from that of the first record."""
        return record * self.per_record // self.per_cell

    def middles_km(self) -> tuple[Array, Array]:
        """Return the middles of cells to the east and to the north, float64, in km."""
        first = (self.per_cell - 1) / 2 * self.grid.spacing_km
        x, y = ((np.arange(float(side)) - self.reach) * self.cell_km + first for side in self.shape)
        return np.asarray(self.grid.west_km + x), np.asarray(self.grid.south_km + y)


@dataclass(frozen=True)
class Kernel:
    """Masses of the cells around a record, for every way in which a record may lie in its cell.

    Parameters
    ----------
    lattice
        The cells.
    masses
        max(I_c − τ, 0), float64 of shape (F, F, 2 reach + 1, 2 reach + 1), in km².
    totals
        V, float64 of shape (F, F), in km².
    """

    lattice: NoiseLattice
    masses: Array
    totals: Array

    @classmethod
    def of(cls, lattice: NoiseLattice, epsilon_per_km: float, threshold: float) -> "Kernel":
        """Return the masses of noise.

        Every record is the middle of a square of its own, and a cell is F² of these.

        Parameters
        ----------
        lattice
            The cells.
        epsilon_per_km
            ε of the noise, in 1/km.
        threshold
            τ, in km².
        """
        side = lattice.per_cell
        most = lattice.reach * side + side - 1
        quadrant = square_masses(most + 1, lattice.cell_km / side, epsilon_per_km)
        steps = np.abs(np.arange(-most, most + 1))
        squares = quadrant[np.ix_(steps, steps)]
        for axis in (0, 1):
            squares = sliding_window_view(squares, side, axis=axis).sum(axis=-1)
        # The record `step` of its cell sees the cells' first squares this many steps away.
        phases = [slice(side - 1 - step, None, side) for step in range(side)]
        tables = [[squares[x, y] for y in phases] for x in phases]
        masses = np.maximum(np.array(tables) - threshold, 0)
        return cls(lattice, masses, masses.sum(axis=(2, 3)))

    @cached_property
    def log_error(self) -> float:
        """What log M may be off by: the integrals, sums of all cells one by one, and differences in V."""
        cells = int(np.count_nonzero(self.masses, axis=(2, 3)).max())
        different = math.log(float(self.totals.max() / self.totals.min()))
        return _MASS_ERROR + 2 * cells * 2.0**-52 + different

    @property
    def reached(self) -> NDArray[np.bool_]:
        """Which cells some record may reach, bool of the lattice's shape; some others may be among them.

        A cell that is (a, b) cells away from those of records, along both axes, is seen by them at offsets of
        at least a and b. Counted in whole numbers.
        """
        lattice = self.lattice
        middle = lattice.reach
        seen = np.asarray(self.masses.any(axis=(0, 1)))
        quadrant: NDArray[np.bool_] = np.zeros((middle + 1, middle + 1), dtype=bool)
        for across in (seen[middle:], seen[middle::-1]):
            for along in (across[:, middle:], across[:, middle::-1]):
                quadrant |= along
        # Whether any offset is at least as large along both axes.
        for axis in (0, 1):
            quadrant = np.flip(np.maximum.accumulate(np.flip(quadrant, axis), axis=axis), axis)
        away = []
        for side in lattice.shape:
            cell = np.arange(side)
            away.append(np.maximum(np.maximum(middle - cell, cell - (side - 1 - middle)), 0))
        return np.asarray(quadrant[np.ix_(*away)])

    @cached_property
    def _entries(self) -> list[list[tuple[NDArray[np.intp], Array]]]:
        """Cells above τ and their masses: offsets in the flat lattice from the window's first cell."""
        width, found = self.lattice.shape[1], []
        for tables in self.masses:
            columns = []
            for table in tables:
                x, y = np.nonzero(table)
                columns.append((x * width + y, table[x, y]))
            found.append(columns)
        return found

    def rows(
        self, part: tuple[slice, slice], reported: NDArray[np.integer], outputs: int, floor: float
    ) -> Array:
        """Return M(·|x) of the records of a part of their lattice, float64 of shape (n_x, n_y, K).

        Sums run over cells in the lattice's order, so the bits of a record do not depend on the others.

        Parameters
        ----------
        part
            Which records, along both axes.
        reported
            r: the output of every cell, of the lattice's shape.
        outputs, floor
            K and f.
        """
        lattice, flat = self.lattice, reported.ravel()
        width, phases = lattice.shape[1], lattice.per_cell
        columns, lines = (range(side)[axis] for side, axis in zip(lattice.grid.shape, part, strict=True))
        rows = np.empty((len(columns), len(lines), outputs))
        scale = (1 - outputs * floor) / self.totals
        for across, i in zip(rows, columns, strict=True):
            for row, j in zip(across, lines, strict=True):
                offsets, masses = self._entries[i % phases][j % phases]
                window = lattice.cell_of(i) * width + lattice.cell_of(j)
                np.multiply(
                    np.bincount(flat[offsets + window], masses, outputs),
                    scale[i % phases, j % phases],
                    out=row,
                )
        rows += floor
        return rows


@dataclass(frozen=True)
class NoiseTables:
    """All that rows of noise follow from.

    Parameters
    ----------
    kernel
        Masses of cells around a record.
    reported
        r: the output of every cell, integers of the lattice's shape.
    outputs, floor
        K and f.
    """

    kernel: Kernel
    reported: NDArray[np.integer]
    outputs: int
    floor: float

    @classmethod
    def checked(
        cls, lattice: NoiseLattice, tables: Iterable[NDArray[Any]], outputs: int, floor: float
    ) -> "NoiseTables":
        """Return tables that have been stored: outputs of cells, masses, totals.

        Raises
        ------
        ValueError
            If rows cannot follow from them.
        """
        reported, masses, totals = tables = tuple(tables)
        if [(table.dtype.name, table.shape) for table in tables] != lattice.tables:
            raise ValueError("the tables of noise are not those of their lattice")
        # Lost chunks read as NaN, and as -1.
        finite = np.isfinite(masses).all() and np.isfinite(totals).all()
        if not (finite and (masses >= 0).all() and (totals > 0).all()):
            raise ValueError("the masses of noise are damaged")
        if not (reported.min() >= 0 and reported.max() < outputs and 0 < floor * outputs < 1):
            raise ValueError("the outputs of noise cells are damaged")
        return cls(Kernel(lattice, masses, totals), reported, outputs, floor)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What is stored of them: outputs of cells, masses, totals, and the numbers of lattice and floor."""
        lattice = self.kernel.lattice
        form = np.array([lattice.per_cell, lattice.per_record, lattice.reach, self.floor])
        return [self.reported, self.kernel.masses, self.kernel.totals, form]

    def lines(self, x: slice, y: slice) -> Iterator[Array]:
        """Yield M(·|x) of a rectangle of records, column by column, float64 of shape (records north, K)."""
        for i in range(x.start, x.stop):
            yield self.kernel.rows((slice(i, i + 1), y), self.reported, self.outputs, self.floor)[0]

    def stored_rows(self, x: slice, y: slice) -> NDArray[np.float32]:
        """Return M(y|x) as it is stored, float32 of shape (records east, records north, K)."""
        rows = np.empty((x.stop - x.start, y.stop - y.start, self.outputs), dtype=np.float32)
        for out, line in zip(rows, self.lines(x, y), strict=True):
            out[:] = line
        return rows


def square_masses(steps: int, side_km: float, epsilon_per_km: float) -> Array:
    """Return ∫∫ e^{−ε ‖z‖} dz over the squares with middles (a, b) times their side, a, b = 0, 1, ….

    Parameters
    ----------
    steps
        Squares along an axis.
    side_km
        Their side, in km; ε times it should not be much more than 1.
    epsilon_per_km
        ε, in 1/km.

    Returns
    -------
    float64 of shape (steps, steps), in km², each to 1e-12 of itself.
    """
    node, weight = np.polynomial.legendre.leggauss(_NODES)
    node, weight = node * (side_km / 2), weight * (side_km / 2)
    middle = np.arange(steps) * side_km
    north = middle[:, None] + node
    masses = np.empty((steps, steps))
    for a, x in enumerate(middle):
        # Nodes to the east one by one: arrays stay small, and the order of sums is fixed.
        masses[a, a:] = masses[a:, a] = sum(
            w * (np.exp(-epsilon_per_km * np.hypot(x + east, north[a:])) * weight).sum(axis=1)
            for east, w in zip(node, weight, strict=True)
        )
    near = min(_NEAR, steps)
    edges = (np.arange(near + 1) - 0.5) * side_km
    corners = np.array([[_from_peak(a, b, epsilon_per_km) for b in edges] for a in edges])
    masses[:near, :near] = np.diff(np.diff(corners, axis=0), axis=1)
    return masses


def _from_peak(a: float, b: float, epsilon: float) -> float:
    """Return ∫_0^a ∫_0^b e^{−ε ‖z‖} dz, which changes its sign with a and with b.

    The rectangle is two triangles that meet at the peak. With z = (u, u sinh w) in the one along a,
    ∫_0^a ∫_0^{asinh(b/a)} u cosh w e^{−ε u cosh w} dw du: smooth everywhere, so few nodes do.
    """
    sign, a, b = math.copysign(1, a) * math.copysign(1, b), abs(a), abs(b)
    if a == 0 or b == 0:
        return 0.0
    node, weight = np.polynomial.legendre.leggauss(_NODES_NEAR)
    node, weight = (node + 1) / 2, weight / 2
    total = 0.0
    for along, across in ((a, b), (b, a)):
        most = math.asinh(across / along)
        u, stretch = along * node, np.cosh(most * node)
        inner = (u[:, None] * stretch * np.exp(-epsilon * u[:, None] * stretch)) @ weight
        total += along * most * float(weight @ inner)
    return sign * total
