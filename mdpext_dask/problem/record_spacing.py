"""How far apart records are, where a job does not say: as near as ε asks for, and as a city's size allows.

A place is moved to its nearest record, by at most ρ = h / √2 for records h apart, so two places at distance d
are told apart by at most ε (d + 2 ρ). What that adds, 2 ε ρ, is kept small.
"""

import math

from mdpext_dask.problem.grid import Box

# ε h: then e^{2 ε ρ} is 1.33, as for two places 0.28 / ε apart.
_APART = 0.2
# Records at most, which is a few minutes with noise; and steps between records across a small box, at least.
_MOST_RECORDS, _LEAST_STEPS = 2_500_000, 16
# Levels of source cells, each of which halves them, that are chosen; levels are at most so many.
_LEVELS, _MOST_LEVELS = 4, 16
_DIGITS = 3


def chosen_cells(
    box: Box, epsilon_per_km: float, cell_km: float | None, refine: tuple[int, ...] | None
) -> tuple[float, tuple[int, ...]]:
    """Return the side of source cells, in km, and their subdivisions by level.

    What a job says stays as it is.

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
