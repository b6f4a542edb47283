"""Utility against time: one dot for every method, hollow where it breaks ε."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mdpext_dask.reports.compare.methods import INTERPOLATION, NOISE, OURS, PROGRAM, PUBLISHED
from mdpext_dask.reports.compare.summary import NORMAL_95, CaseSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By family: told apart by shape, and by colours that all common kinds of colour blindness tell apart.
_MARKS = {
    NOISE: ("s", "#0072b2"),
    PROGRAM: ("D", "#e69f00"),
    INTERPOLATION: ("^", "#009e73"),
    PUBLISHED: ("X", "#d55e00"),
    OURS: ("o", "#000000"),
}
_PANEL_INCHES, _MOST_ACROSS = (6.0, 4.4), 3


def comparison_of(summaries: Sequence[CaseSummary]) -> "Figure":
    """Return the figure of all cases, a panel each."""
    from matplotlib.figure import Figure

    across = min(len(summaries), _MOST_ACROSS)
    down = math.ceil(len(summaries) / across)
    figure = Figure(figsize=(across * _PANEL_INCHES[0], down * _PANEL_INCHES[1]), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, summary in zip(panels, summaries, strict=False):
        _panel(axes, summary)
    for axes in panels[len(summaries) :]:
        axes.set_axis_off()
    return figure


def _panel(axes: "Axes", summary: CaseSummary) -> None:
    named = set()
    for row in summary.rows:
        if row["loss_km"] is None:
            continue
        marker, colour = _MARKS[row["family"]]
        place, error = (max(row["seconds"], 1e-3), row["loss_km"]), row["loss_standard_error"]
        axes.errorbar(
            *place, yerr=None if error is None else NORMAL_95 * error, marker=marker, color=colour,
            markerfacecolor="white" if row["violation_ratio"] else colour, linestyle="none", capsize=2,
            markersize=6, label=None if row["family"] in named else row["family"],
        )  # fmt: skip
        named.add(row["family"])
        axes.annotate(row["method"], place, xytext=(5, 4), textcoords="offset points", fontsize=7)
    bound = summary.problem["lower_bound_km"]
    if bound is not None:
        least = "no mechanism on these outputs is below"
        axes.axhline(bound, color="#666666", linestyle="--", linewidth=1, label=least)
    axes.set(xscale="log", xlabel="seconds to construct", ylabel="expected loss, km")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{summary.name} (hollow: breaks ε)", fontsize=9, parse_math=False)
    axes.legend(fontsize=7, loc="lower left")
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
