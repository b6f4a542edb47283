"""Which points of a lattice belong to which program of a sweep.

A sweep lays lines `patch` steps apart over the lattice, moved by an offset, and along its border. Points
where two lines cross stay. Points on a line between two crossings are one program each, whose surroundings
are those of the reference. Then the points inside each cell of lines are one program, with its sides as
they have become.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Lines:
    """The lines of a sweep along one axis.

    Parameters
    ----------
    last
        Index n of the last point.
    patch
        Steps between lines.
    offset
        Where the first line after the border is, 0 ≤ offset < patch; 0 for `patch`.
    """

    last: int
    patch: int
    offset: int

    @property
    def padding(self) -> int:
        """What to add to an index so that lines lie at multiples of `patch`."""
        return (self.patch - self.offset) % self.patch

    def positions(self, first: int, last: int) -> list[int]:
        """Return the lines at first ≤ i ≤ last; on an axis with two points there is none."""
        return [i for i in range(max(first, 0), min(last, self.last) + 1) if self._is_line(i)]

    def segments(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield (first point, points) between neighbouring lines that both lie in first .. last."""
        if self.last == 1:
            # Two lines would be next to each other; the two points go into one program instead.
            yield 0, 2
            return
        lines = self.positions(first, last)
        for left, right in itertools.pairwise(lines):
            if right - left > 1:
                yield left + 1, right - left - 1

    def bounds(self) -> list[int]:
        """Return the ends of the axis and the lines between them."""
        return self.positions(0, self.last) or [0, self.last]

    def cuts(self, side: int) -> list[int]:
        """Return where boxes begin that are about `side` points wide, a multiple of `patch`; then the end."""
        inner = range(side - self.padding, self.last + 1, side)
        return [0, *(i for i in inner if i > 0 and self._is_line(i)), self.last + 1]

    def _is_line(self, i: int) -> bool:
        if i in (0, self.last):
            return self.last > 1
        # Not next to the border: points of neighbouring lines would be solved without knowing of each other.
        return 1 < i < self.last - 1 and (i + self.padding) % self.patch == 0


class Box(NamedTuple):
    """Points x[0] ≤ i < x[1], y[0] ≤ j < y[1] of a lattice: what one task owns."""

    x: tuple[int, int]
    y: tuple[int, int]

    def part(self, moved: tuple[int, int] = (0, 0)) -> tuple[slice, slice]:
        """Return the indices of the points in an array where they are moved so far."""
        across, along = (slice(first + by, last + by) for (first, last), by in zip(self, moved, strict=True))
        return across, along


def boxes_of(lines: tuple[Lines, Lines], side: int) -> list[Box]:
    """Return boxes that part a lattice along lines, whole chunks of `side` points of a padded array each."""
    across, along = (itertools.pairwise(axis.cuts(side)) for axis in lines)
    return [Box(x, y) for x, y in itertools.product(across, along)]


Patch = tuple[int, int]
ByShape = dict[tuple[int, int], list[Patch]]


def line_patches(lines: tuple[Lines, Lines], box: Box) -> ByShape:
    """Return the programs on the lines of a box, by their shape: lower left point of each."""
    found: ByShape = {}
    across, along = lines
    (x0, x1), (y0, y1) = box
    for i, points in across.segments(x0, x1):
        for j in along.positions(y0, y1 - 1):
            found.setdefault((points, 1), []).append((i, j))
    for j, points in along.segments(y0, y1):
        for i in across.positions(x0, x1 - 1):
            found.setdefault((1, points), []).append((i, j))
    return found


def cell_patches(lines: tuple[Lines, Lines], box: Box) -> ByShape:
    """Return the programs inside the cells of a box, by their shape: lower left point of each."""
    found: ByShape = {}
    for i, east in lines[0].segments(*box.x):
        for j, north in lines[1].segments(*box.y):
            found.setdefault((east, north), []).append((i, j))
    return found
