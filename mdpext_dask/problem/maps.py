"""Parts of all maps of a plane: a frame in km, a field over records, outputs, attribution.

Maps stay readable in grey and with few colours: values are shown by lightness, and marks differ by shape or
outline, never by colour alone. Nothing here keeps state in matplotlib, which is imported late: workers never
need it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Box, Grid, square_sums

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.image import AxesImage

# Vermilion is told from the sequential map in all common kinds of colour blindness.
SIGNAL, SEQUENTIAL = "#d55e00", "viridis_r"
# Most records along a side of a map; beyond it, neighbours are averaged.
MOST_SHOWN = 1200
# Points beyond which they are drawn as an image, not as vectors.
MANY_POINTS = 2_000
# Of a map: margin as a share of its longer side, and its shorter side at least, in the same unit.
_MARGIN, _SLIMMEST = 0.04, 0.5


def limits_of(box: Box) -> tuple[float, float, float, float]:
    """Return west, east, south and north of a map, in km: not too slim, and with a margin."""
    sides = box.width_km, box.height_km
    longer = max(sides) or 1.0
    half_x, half_y = (max(side, _SLIMMEST * longer) / 2 + _MARGIN * longer for side in sides)
    x, y = (box.west_km + box.east_km) / 2, (box.south_km + box.north_km) / 2
    return x - half_x, x + half_x, y - half_y, y + half_y


def frame(
    axes: "Axes", limits: tuple[float, float, float, float], names: tuple[str, str] = ("east", "north")
) -> None:
    """Make axes a map: kilometres, as long to the east as to the north.

    Parameters
    ----------
    axes
        Where the map is drawn.
    limits
        West, east, south and north, in km.
    names
        Of the coordinates.
    """
    labels = {"xlabel": f"{names[0]} (km)", "ylabel": f"{names[1]} (km)"}
    axes.set(xlim=limits[:2], ylim=limits[2:], aspect="equal", **labels)


def width_inches(ratio: float, height: float, beside: float, limits: tuple[float, float]) -> float:
    """Return how wide a map is drawn whose sides have a ratio, with what is beside it, within limits."""
    return min(max(height * ratio + beside, limits[0]), limits[1])


def as_title(lines: Iterable[str]) -> str:
    """Return lines as a title; names of files in it may hold what is no text."""
    return "\n".join(lines).encode("utf-8", "replace").decode()


def shortened(name: str, most: int) -> str:
    """Return the end of a name, in at most so many characters."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def around_records(grid: Grid) -> tuple[float, float, float, float]:
    """Return west, east, south and north of the squares around all records, in km."""
    box, half = grid.box, grid.spacing_km / 2
    return box.west_km - half, box.east_km + half, box.south_km - half, box.north_km + half


def averaged(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], int]:
    """Return means over squares of records, and the least side with at most `most` squares along a side.

    Parameters
    ----------
    values
        float64 of shape (n, m); NaN where there is nothing; means skip it.
    most
        How many squares there may be along a side.
    """
    side = -(-max(values.shape) // most)
    if side == 1:
        return values, 1
    there = np.isfinite(values)
    sums = square_sums(np.where(there, values, 0.0), side)
    counts = square_sums(there.astype(np.float64), side)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), side


def draw_field(
    axes: "Axes", grid: Grid, values: NDArray[np.float64], label: str, *, step: int = 1, **options: Any
) -> "AxesImage":
    """Draw one value for every square of records, with a colour bar.

    Parameters
    ----------
    axes
        Where the map is drawn.
    grid
        The grid of records.
    values
        float64 of shape (n, m), one for each square, the first one around the first record; NaN where
        there is nothing to show.
    label
        What the values are, with their unit.
    step
        Side of a square, in records.
    options
        Of the image, and `extend` of the bar.
    """
    import matplotlib as mpl

    west, _, south, _ = around_records(grid)
    east, north = (n * step * grid.spacing_km for n in values.shape)
    extend = options.pop("extend", "neither")
    image = axes.imshow(
        np.ma.masked_invalid(values).T,
        origin="lower",
        extent=(west, west + east, south, south + north),
        interpolation="nearest",
        **{"cmap": mpl.colormaps[SEQUENTIAL], "gid": "records", **options},
    )
    colour_bar(axes, image, label, extend=extend)
    return image


def draw_outputs(axes: "Axes", xy_km: NDArray[np.float64]) -> None:
    """Draw outputs, float64 of shape (K, 2) in km, as white dots with an outline; thousands as black ones."""
    size = min(2000 / len(xy_km), 14.0)
    axes.scatter(
        xy_km[:, 0], xy_km[:, 1],
        s=max(size, 1.0), color="white", edgecolors="black", linewidths=0.7 if size > 1 else 0.4,
        rasterized=len(xy_km) > MANY_POINTS, zorder=3, label="output", gid="outputs",
    )  # fmt: skip


def colour_bar(axes: "Axes", mappable: Any, label: str, **options: Any) -> "Colorbar":
    """Draw a colour bar beside a panel."""
    return axes.figure.colorbar(mappable, ax=axes, label=label, pad=0.02, aspect=35, **options)


def say_whose(axes: "Axes", attribution: str) -> None:
    """Write the attribution of a map's data into its lower right corner."""
    if attribution:
        axes.text(
            0.995, 0.005, attribution, transform=axes.transAxes, ha="right", va="bottom", fontsize=6,
            color="0.25", parse_math=False, gid="attribution", zorder=6,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
