"""A map of what each record can expect to lose; matplotlib is imported late: workers never need it."""

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from mdpext_dask.evaluation.spread import Spread
from mdpext_dask.problem import maps
from mdpext_dask.store.mechanism_store import MechanismStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the figure, in inches and dots per inch: as wide as the map needs, within limits.
_HEIGHT_INCHES, _WIDTHS_INCHES, _BESIDE_INCHES, DOTS_PER_INCH = 7.2, (6.0, 12.0), 1.6, 110
# What is above this quantile of the records shown has the last colour.
_TOP_SHARE = 0.995
_NAME_WIDTH, _TITLE_CHARACTERS_AN_INCH = 80, 13


def loss_map(store: MechanismStore, spread: Spread) -> "Figure":
    """Return a map of a store's loss, that of all records kept; the figure belongs to no window."""
    from matplotlib.figure import Figure

    box = store.grid.box
    width = maps.width_inches(box.width_km / box.height_km, _HEIGHT_INCHES, _BESIDE_INCHES, _WIDTHS_INCHES)
    figure = Figure(figsize=(width, _HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    step = draw_loss(figure.subplots(), store, spread)
    figure.legend(loc="outside lower center", frameon=False)
    figure.suptitle(
        _title(store, spread, step, int(_TITLE_CHARACTERS_AN_INCH * width)),
        x=0.012, ha="left", fontsize=9, linespacing=1.35, parse_math=False,
    )  # fmt: skip
    return figure


def draw_loss(axes: "Axes", store: MechanismStore, spread: Spread) -> int:
    """Draw ℓ(x) = Σ_y M(y|x) c(x, y) of every record, and the outputs.

    Returns
    -------
    Records along a side of each square that is shown: their mean.
    """
    assert spread.expected_km is not None  # kept for the map
    values, step = maps.averaged(spread.expected_km, maps.MOST_SHOWN)
    present = values[np.isfinite(values)]
    lowest, top = float(present.min()), float(np.quantile(present, _TOP_SHARE))
    maps.draw_field(
        axes, store.grid, values, "expected loss of the record (km)", step=step,
        vmin=lowest, vmax=max(top, lowest), extend="max" if present.max() > top else "neither",
    )  # fmt: skip
    maps.draw_outputs(axes, store.output_xy_km())
    maps.frame(axes, maps.around_records(store.grid))
    return step


def _title(store: MechanismStore, spread: Spread, step: int, width: int) -> str:
    means = "" if step == 1 else f", means over {step} by {step}"
    epsilon = float(store.attributes["epsilon_per_km"])
    name = maps.shortened(store.name, _NAME_WIDTH)
    said = (
        f"{name}: expected loss {spread.loss_km:.4g} km at ε = {epsilon:g} per km; "
        f"{spread.records:,} records with a prior{means}"
    )
    return maps.as_title([*textwrap.wrap(said, width), *textwrap.wrap(store.attribution, width)])
