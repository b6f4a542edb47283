"""A map of what each record can expect to lose; matplotlib is imported late: workers never need it."""

import textwrap
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.maps import MOST_SHOWN, around_records, averaged, draw_field, draw_outputs, frame
from mdpext_dask.store.objects import is_remote

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the figure, in inches and dots per inch: as wide as the map needs, within limits.
_HEIGHT_INCHES, _WIDTHS_INCHES, _BESIDE_INCHES, DOTS_PER_INCH = 7.2, (6.0, 12.0), 1.6, 110
# What is above this quantile of the records shown has the last colour.
_TOP_SHARE = 0.995
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
    from matplotlib.figure import Figure

    box = shown.grid.box
    width = _HEIGHT_INCHES * box.width_km / box.height_km + _BESIDE_INCHES
    width = min(max(width, _WIDTHS_INCHES[0]), _WIDTHS_INCHES[1])
    figure = Figure(figsize=(width, _HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    step = draw_loss(figure.subplots(), shown)
    figure.legend(loc="outside lower center", frameon=False)
    figure.suptitle(
        _title(shown, step, int(_TITLE_CHARACTERS_AN_INCH * width)),
        x=0.012, ha="left", fontsize=9, linespacing=1.35, parse_math=False,
    )  # fmt: skip
    return figure


def draw_loss(axes: "Axes", shown: LossMap) -> int:
    """Draw ℓ(x) = Σ_y M(y|x) c(x, y) of every record, and the outputs.

    Returns
    -------
    Records along a side of each square that is shown: their mean.
    """
    values, step = averaged(shown.expected_km, MOST_SHOWN)
    present = values[np.isfinite(values)]
    lowest, top = float(present.min()), float(np.quantile(present, _TOP_SHARE))
    draw_field(
        axes, shown.grid, values, "expected loss of the record (km)", step=step,
        vmin=lowest, vmax=max(top, lowest), extend="max" if present.max() > top else "neither",
    )  # fmt: skip
    draw_outputs(axes, shown.output_xy_km)
    frame(axes, around_records(shown.grid))
    return step


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
