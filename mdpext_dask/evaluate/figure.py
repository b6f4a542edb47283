"""A map of what each record can expect to lose; matplotlib is imported late: workers never need it."""

import textwrap
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.grid import Grid
from mdpext_dask.objects import is_remote

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of the figure, in inches and dots per inch: as wide as the map needs, within limits.
_HEIGHT_INCHES, _WIDTHS_INCHES, _BESIDE_INCHES, DOTS_PER_INCH = 7.2, (6.0, 12.0), 1.6, 110
# Records along a side that a picture can show: of more, neighbours are averaged.
MOST_SHOWN = 1200
_SEQUENTIAL = "viridis_r"
# What is above this quantile of the records shown has the last colour.
_TOP_SHARE = 0.995
_MANY_OUTPUTS = 2_000
_NAME_WIDTH, _TITLE_CHARACTERS_AN_INCH = 80, 13


@dataclass(frozen=True)
class LossMap:
    """What the map shows.

    Parameters
    ----------
    name
        Of the store: its path or URL.
    grid
        The grid of records.
    expected_km
        ℓ(x), float64 of the grid's shape, in km; not-a-number without a prior.
    loss_km
        The expected loss of all, in km.
    epsilon_per_km
        Promised ε, in 1/km.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    attribution
        Whose data the map shows, which has to be said wherever it is.
    """

    name: str
    grid: Grid
    expected_km: NDArray[np.float64]
    loss_km: float
    epsilon_per_km: float
    output_xy_km: NDArray[np.float64]
    attribution: str = ""


def loss_map_of(shown: LossMap) -> "Figure":
    """Return the figure, which belongs to no window."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    box, half = shown.grid.box, shown.grid.spacing_km / 2
    width = _HEIGHT_INCHES * box.width_km / box.height_km + _BESIDE_INCHES
    width = min(max(width, _WIDTHS_INCHES[0]), _WIDTHS_INCHES[1])
    figure = Figure(figsize=(width, _HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    values, step = averaged(shown.expected_km, MOST_SHOWN)
    present = values[np.isfinite(values)]
    lowest, top = float(present.min()), float(np.quantile(present, _TOP_SHARE))
    east, north = (n * step * shown.grid.spacing_km for n in values.shape)
    image = axes.imshow(
        np.ma.masked_invalid(values).T,
        origin="lower",
        extent=(
            box.west_km - half, box.west_km - half + east, box.south_km - half, box.south_km - half + north
        ),
        interpolation="nearest",
        cmap=mpl.colormaps[_SEQUENTIAL],
        vmin=lowest,
        vmax=max(top, lowest),
        gid="records",
    )  # fmt: skip
    figure.colorbar(
        image,
        ax=axes,
        label="expected loss of the record (km)",
        extend="max" if present.max() > top else "neither",
        pad=0.02,
        aspect=35,
    )
    axes.scatter(
        shown.output_xy_km[:, 0], shown.output_xy_km[:, 1],
        s=min(max(2000 / len(shown.output_xy_km), 3.0), 14.0),
        color="white", edgecolors="black", linewidths=0.7,
        rasterized=len(shown.output_xy_km) > _MANY_OUTPUTS, label="output", gid="outputs",
    )  # fmt: skip
    axes.set_xlim(box.west_km - half, box.east_km + half)
    axes.set_ylim(box.south_km - half, box.north_km + half)
    axes.set_xlabel("east (km)")
    axes.set_ylabel("north (km)")
    figure.legend(loc="outside lower center", frameon=False)
    figure.suptitle(
        _title(shown, step, int(_TITLE_CHARACTERS_AN_INCH * width)),
        x=0.012, ha="left", fontsize=9, linespacing=1.35, parse_math=False,
    )  # fmt: skip
    return figure


def averaged(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], int]:
    """Return means over squares of records, and their side: the least for at most so many along a side.

    Parameters
    ----------
    values
        float64 of shape (n, m); not-a-number where there is nothing, which no mean takes notice of.
    most
        How many squares there may be along a side.
    """
    side = -(-max(values.shape) // most)
    if side == 1:
        return values, 1
    starts = [np.arange(0, n, side) for n in values.shape]
    there = np.isfinite(values)
    sums, counts = (
        np.add.reduceat(np.add.reduceat(numbers, starts[0], axis=0), starts[1], axis=1)
        for numbers in (np.where(there, values, 0.0), there.astype(np.float64))
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), side


def _title(shown: LossMap, step: int, width: int) -> str:
    # Pictures are passed around: of a local path, whose folders say where somebody works, only the name.
    name = shown.name if is_remote(shown.name) else PurePath(shown.name).name
    if len(name) > _NAME_WIDTH:
        name = "…" + name[1 - _NAME_WIDTH :]
    means = "" if step == 1 else f", means over {step} by {step}"
    said = (
        f"{name}: expected loss {shown.loss_km:.4g} km at ε = {shown.epsilon_per_km:g} per km; "
        f"{int(np.isfinite(shown.expected_km).sum()):,} records with a prior{means}"
    )
    lines = [*textwrap.wrap(said, width), *textwrap.wrap(shown.attribution, width)]
    # Names of files may hold what is no text.
    return "\n".join(lines).encode("utf-8", "replace").decode()
