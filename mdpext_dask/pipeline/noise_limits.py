"""Whether there is more noise than can be gone through, and what to ask for instead.

At a large ε, cells of noise are small, and many in a large area; at a small one they reach far.
"""

import math
from collections.abc import Iterator

from mdpext_dask.errors import SpecError
from mdpext_dask.evaluation.baselines.fine_noise import cells_of
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.geometry import FileGeometry, RoadGeometry, build_geometry
from mdpext_dask.problem.grid import Box, Grid, chosen_cells

# Numbers are tried up to so many powers of ten away.
_POWERS = 6
# A box of less, in km, has hardly a road node; and one in degrees may be larger than was meant by so much.
_LEAST_KM, _BEYOND = 0.1, 1.01


def check_noise(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> None:
    """Refuse a job with too many cells of noise, or masses of one, and name the nearest that could be.

    Raises
    ------
    SpecError
        With the nearest ε that this area can have, and the largest square that can have this ε.
    """
    epsilon, grid = spec.privacy.epsilon_per_km, geometry.grid
    if (excess := cells_of(grid, epsilon).excess) is None:
        return
    ways = []
    if (other := _nearest_epsilon(spec, geometry)) is not None:
        ways.append(f"{other:g}/km (the nearest ε that can be)")
    if isinstance(geometry, RoadGeometry) and (side := _largest_square_km(spec, grid.box)) is not None:
        ways.append(f"a box of at most {side:g} km x {side:g} km")
    wanted = " or ".join(ways) or "other cells"
    raise SpecError(f"privacy.epsilon_per_km: {epsilon:g}/km here has {excess}; use {wanted}")


def _nearest_epsilon(spec: JobSpec, geometry: RoadGeometry | FileGeometry) -> float | None:
    """Return the ε of two digits, in 1/km, nearest by ratio, whose noise is not too much; None without."""
    laid = None
    for epsilon in _near(spec.privacy.epsilon_per_km):
        # Of the grid that is there, which may be off by a cell, and of the last that was laid, at first:
        # others take seconds to lay.
        grid = (
            geometry.grid if isinstance(geometry, FileGeometry) else _grid(spec, geometry.grid.box, epsilon)
        )
        if all(cells_of(near, epsilon).excess is None for near in (grid, laid or grid)):
            laid = build_geometry(spec.replace(privacy={"epsilon_per_km": epsilon})).grid
            if cells_of(laid, epsilon).excess is None:
                return epsilon
    return None


def _largest_square_km(spec: JobSpec, box: Box) -> float | None:
    """Return the side of the largest square, of two digits in km, shorter than a box; None without."""
    epsilon, longest = spec.privacy.epsilon_per_km, max(box.width_km, box.height_km)
    for side in _near(longest):
        if not _LEAST_KM <= side < longest:
            continue
        try:
            grid = _grid(spec, Box(0.0, 0.0, _BEYOND * side, _BEYOND * side), epsilon)
        except SpecError:  # smaller than a source cell
            continue
        if cells_of(grid, epsilon).excess is None:
            return side
    return None


def _grid(spec: JobSpec, box: Box, epsilon_per_km: float) -> Grid:
    return Grid.covering(box, *chosen_cells(box, epsilon_per_km, spec.domain.cell_km, spec.domain.refine))


def _near(number: float) -> Iterator[float]:
    """Yield numbers of two digits, those first that are nearest to a positive one by ratio."""
    power = math.floor(math.log10(number))
    powers = range(power - _POWERS - 1, power + _POWERS)
    numbers = (float(f"{digits}e{exponent}") for exponent in powers for digits in range(10, 100))
    return iter(sorted(numbers, key=lambda other: abs(math.log(other / number))))
