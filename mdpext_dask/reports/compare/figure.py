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
# Points share a label within so many times the seconds of the first, and so much of the range of losses.
_TOGETHER = 2.5, 0.03


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
    named, points = set(), list[tuple[float, float, str]]()
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
        points.append((*place, row["method"]))
    for x, y, names in _labels(points):
        up, side = (-4, "top") if "\n" in names else (4, "baseline")
        axes.annotate(names, (x, y), xytext=(5, up), textcoords="offset points", fontsize=7, va=side)
    bound = summary.problem["lower_bound_km"]
    if bound is not None:
        least = "no mechanism on these outputs is below"
        axes.axhline(bound, color="#666666", linestyle="--", linewidth=1, label=least)
    axes.set(xscale="log", xlabel="seconds to construct", ylabel="expected loss, km")
    axes.set_title(f"{summary.name} (hollow: breaks ε)", fontsize=9, parse_math=False)
    axes.legend(fontsize=7, loc="best")
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)


def _labels(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the labels of points, and where they go: one for those that lie together, a line each.

    Parameters
    ----------
    points
        Seconds, loss in km, and name.
    """
    losses = [y for _, y, _ in points]
    apart = _TOGETHER[1] * (max(losses) - min(losses)) if losses else 0.0
    labels: list[tuple[float, float, str]] = []
    for x, y, name in sorted(points):
        for number, (seconds, loss, names) in enumerate(labels):
            if x <= seconds * _TOGETHER[0] and abs(y - loss) <= apart:
                labels[number] = seconds, loss, f"{names}\n{name}"
                break
        else:
            labels.append((x, y, name))
    return labels
