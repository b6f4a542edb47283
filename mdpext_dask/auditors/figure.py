"""The figure of an audit: log ratios over their bounds by distance, and a map.

It is read in grey and by people who see few colours as well: what breaks the promise differs from the rest by
its place, its outline or its hatching, never by its colour alone. Nothing here keeps state in matplotlib,
which is imported late: workers never need it.
"""

import math
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import BOUNDARY, SAMPLED, VIOLATED, AuditReport, sentence, steepness, table
from mdpext_dask.auditors.source import Source, coordinates_of_outputs
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.files import rendered, whole_file
from mdpext_dask.problem import maps
from mdpext_dask.problem.grid import Box
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.objects import shown_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the figure, in inches and dots per inch: 1320 x 792 pixels.
SIZE_INCHES, DOTS_PER_INCH = (12.0, 7.2), 110
# Of a map: as high as there is room, so wide with what is beside it, and no narrower or wider, in inches.
_HEIGHT_INCHES, _BESIDE_INCHES, _WIDTHS_INCHES = 5.0, 1.5, (3.6, 6.2)
# Where ratios beyond 1 are drawn, whatever they are: apart from those that keep the promise.
_BEYOND = (1.06, 1.20)
_TOP, _LABEL_INCHES = 1.27, 0.42
# A logarithm turned back is not what it was.
_ROUNDING = 1e-9
# How wide the first band is drawn, which begins at 0: its upper end over its lower end.
_FIRST_BAND = (2.0, 4.0)
# Of the axis: no closer are two numbers to be read.
_CLOSEST_TICKS, _CLOSEST_VALUES = 0.075, 0.065
_LEAST_SHARE = 1e-9
_TITLE_POINTS, _TITLE_WIDTH, _TITLE_LINES, _SUBJECT_WIDTH = 10.0, 155, 4, 90
# Records that a map shows: more are a stain, and a slow one.
_MOST_POINTS = 20_000
# Of the worst pairs, in points: where ends are closer, a ring tells where to look.
_RING_POINTS = 15.0


def draw_audit(report: AuditReport, drawn: AuditReport, subject: Subject, path: Path) -> None:
    """Draw an audit and write it, as a whole or not at all.

    Parameters
    ----------
    report, drawn, subject
        As for :func:`figure_of`.
    path
        A file that :func:`mdpext_dask.files.check_picture` has passed; one that is there is replaced.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    content = rendered(lambda: figure_of(report, drawn, subject), path.suffix.lower())
    with whole_file(path, "--picture") as file:
        file.write(content)


def figure_of(report: AuditReport, drawn: AuditReport, subject: Subject) -> "Figure":
    """Draw an audit.

    Parameters
    ----------
    report
        The audit.
    drawn
        A sampled audit of the same, whose pairs are shown by distance; the audit itself if it is one.
    subject
        What was audited.

    Returns
    -------
    The figure, which belongs to no window; its first two axes are the panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    west, east, south, north = maps.limits_of(_box_of(subject))
    ratio = (east - west) / (north - south)
    width = maps.width_inches(ratio, _HEIGHT_INCHES, _BESIDE_INCHES, _WIDTHS_INCHES)
    left, right = figure.subplots(1, 2, width_ratios=(SIZE_INCHES[0] - width, width))
    draw_ratios(left, report, drawn)
    draw_map(right, report, subject)
    handles: dict[str, Any] = {}
    for axes in (left, right):
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    attribution = "" if subject.store is None else subject.store.attribution
    looks: dict[str, Any] = {"fontsize": _TITLE_POINTS, "linespacing": 1.35, "parse_math": False}
    title = figure.suptitle(_title(report, attribution), x=0.012, ha="left", **looks)
    room = title.get_window_extent().width / (figure.bbox.width * 0.976)
    title.set_fontsize(_TITLE_POINTS / max(room, 1.0))
    return figure


# --- log ratios by distance -----------------------------------------------------------------------


def band_shares(drawn: AuditReport) -> NDArray[np.float64]:
    """Return the shares of each band's triples by |log ratio| / (ε d), float64 of shape (bands, bins).

    The last bin is that beyond 1; the triples of rows that cannot be used, which keep no promise, are in it.
    """
    strata = drawn.details["strata"]
    counts = np.array([stratum["triples_by_ratio"] for stratum in strata], dtype=np.float64)
    triples = np.array([stratum["pairs_drawn"] * drawn.outputs for stratum in strata], dtype=np.float64)
    counts[:, -1] += triples - counts.sum(axis=1)
    return np.asarray(counts / np.maximum(triples, 1)[:, None])


def draw_ratios(axes: "Axes", report: AuditReport, drawn: AuditReport) -> None:
    """Draw |log ratio| / (ε d) of pairs that were drawn at random, by distance, and the worst triple.

    Parameters
    ----------
    axes
        Where.
    report
        The audit, whose worst triple is marked.
    drawn
        A sampled audit of the same, whose pairs are shown.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.transforms import ScaledTranslation

    strata, shares = drawn.details["strata"], band_shares(drawn)
    uppers = [stratum["upper_km"] for stratum in strata]
    edges = _band_edges(uppers)
    least = float(shares[shares > 0].min(initial=1.0))
    highest = math.ceil(math.log10(float(shares.max(initial=_LEAST_SHARE))))
    lowest = min(math.floor(math.log10(max(least, _LEAST_SHARE))), highest - 1)
    norm = LogNorm(10.0**lowest, 10.0**highest)
    colours: dict[str, Any] = {"cmap": maps.SEQUENTIAL, "norm": norm, "edgecolors": "white", "linewidth": 0.4}
    kept = np.ma.masked_equal(shares[:, :-1].T, 0)
    mesh = axes.pcolormesh(edges, drawn.details["ratio_edges"], kept, gid="kept", **colours)
    beyond = np.ma.masked_equal(shares[:, -1:].T, 0)
    axes.pcolormesh(edges, _BEYOND, beyond, gid="beyond", **colours)
    maps.colour_bar(axes, mesh, "share of the band's triples")
    axes.axhline(1, color="black", linewidth=2.5, label="the promise: |log ratio| = ε d", gid="promise")
    axes.fill_between(
        [edges[0], edges[-1]], *_BEYOND, facecolor="none", edgecolor="black", linewidth=0.8, linestyle=":"
    )

    axes.set(xscale="log", xlim=(edges[0], edges[-1]), ylim=(0, _TOP))
    # Records that are all in one place have no distances.
    ticks = _distance_ticks(edges) if uppers[-1] > 0 else [float(edges[0])]
    axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
    axes.set_xticks([], minor=True)
    marks = [0, 0.2, 0.4, 0.6, 0.8, 1]
    axes.set_yticks([*marks, sum(_BEYOND) / 2], [*(f"{mark:g}" for mark in marks), _beyond_in_words(drawn)])
    axes.set(xlabel="distance d of the two records (km)", ylabel="|log ratio| / (ε d)")
    # Beside the numbers, not beyond the words above them.
    beside = ScaledTranslation(-_LABEL_INCHES, 0, axes.figure.dpi_scale_trans)
    axes.yaxis.set_label_coords(0, 0.5 / _TOP, transform=axes.transAxes + beside)
    axes.set_title(f"{drawn.details['pairs']:,} pairs drawn at random, all outputs, by distance", fontsize=10)

    _mark_largest(axes, edges, drawn)
    if report.worst:
        distance = report.worst["distance_km"]
        # A pair in one place, or far below the first band's end, is shown in the middle of that band.
        x = math.sqrt(edges[0] * edges[1]) if distance <= edges[0] else min(distance, edges[-1])
        ratio = _on_its_side(steepness(report.worst, "bound"), broken=report.verdict == VIOLATED)
        # A white rim, so that it is seen on dark shares, in grey as well.
        axes.plot(x, _height(ratio), "D", color="white", markersize=12, clip_on=False, zorder=6)
        axes.plot(
            x, _height(ratio), "D", color=maps.SIGNAL if ratio > 1 else "white", markersize=8,
            markeredgecolor="black", markeredgewidth=1.4, clip_on=False, zorder=6, gid="worst ratio",
            label=f"worst triple: {_in_few_digits(ratio)} of its bound", linestyle="none",
        )  # fmt: skip


def _mark_largest(axes: "Axes", edges: NDArray[np.float64], drawn: AuditReport) -> None:
    """Mark each band's largest ratio; in numbers where it is beyond 1 and there is room."""
    ratios = []
    for stratum in drawn.details["strata"]:
        largest = stratum["epsilon_audited"]
        ratio = math.nan if largest is None else float(largest) / drawn.limit_per_km
        ratios.append(_on_its_side(ratio, broken=stratum["violations"] > 0))
    middles = np.sqrt(edges[:-1] * edges[1:])
    axes.plot(
        middles, [_height(ratio) for ratio in ratios], "v", color="white", markersize=6, linestyle="none",
        markeredgecolor="black", clip_on=False, zorder=5, gid="largest", label="largest of a distance band",
    )  # fmt: skip
    widths = np.diff(np.log(edges)) / math.log(edges[-1] / edges[0])
    for x, ratio, width in zip(middles, ratios, widths, strict=True):
        if ratio > 1 and width >= _CLOSEST_VALUES:
            axes.text(x, _BEYOND[1] + 0.02, _in_few_digits(ratio), ha="center", va="bottom", fontsize=9)


def _band_edges(uppers_km: list[float]) -> NDArray[np.float64]:
    """Return where bands are drawn on a log axis, float64 of shape (bands + 1,), in km; the first ends at 0.

    Records that are all in one place have one band, from 0 to 0, which is drawn anywhere.
    """
    first = uppers_km[0] if uppers_km[0] > 0 else 1.0
    growth = uppers_km[1] / first if len(uppers_km) > 1 else _FIRST_BAND[1]
    left = first / min(max(growth, _FIRST_BAND[0]), _FIRST_BAND[1])
    return np.array([left, first, *uppers_km[1:]])


def _distance_ticks(edges_km: NDArray[np.float64]) -> list[float]:
    """Return which distances to name; the first is where the first band begins, at 0."""
    low, high = float(edges_km[0]), float(edges_km[-1])
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1,)):
        ticks = [low]
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for tick in (step * 10.0**decade for decade in decades for step in steps):
            apart = math.log(tick / ticks[-1]) / math.log(high / low)
            if low < tick <= high and apart >= _CLOSEST_TICKS:
                ticks.append(tick)
        if len(ticks) <= 10:
            break
    return ticks


def _beyond_in_words(drawn: AuditReport) -> str:
    """Return what ratios beyond 1 mean: what a float64 takes for one may keep the promise."""
    broken = any(stratum["violations"] for stratum in drawn.details["strata"])
    if broken or not band_shares(drawn)[:, -1].any():
        return "breaks\nthe promise"
    if drawn.details["undecided"]:
        return "above 1,\nundecided"
    if drawn.details["hidden_violations"]:
        return "above 1,\ntolerated"
    return "above 1,\nby rounding"


def _on_its_side(ratio: float, *, broken: bool) -> float:
    """Return a ratio; if nothing is broken, 1 for what exceeds it by rounding."""
    return 1.0 if not broken and 1 < ratio <= 1 + _ROUNDING else ratio


def _height(ratio: float) -> float:
    """Return how high a ratio is drawn; NaN as it is."""
    return sum(_BEYOND) / 2 if ratio > 1 else ratio


def _in_few_digits(ratio: float) -> str:
    if math.isinf(ratio):
        return "∞"
    if ratio >= 1000:
        return ">999"
    text = f"{ratio:.4g}" if ratio < 1 else f"{ratio:.3g}"
    # What is near 1 is not said to be 1.
    if text == "1" and ratio != 1:
        return ">1" if ratio > 1 else "just below 1"
    return text


# --- the map --------------------------------------------------------------------------------------


def draw_map(axes: "Axes", report: AuditReport, subject: Subject) -> None:
    """Draw what an audit found, where: certified ε of blocks, shared rows that differ, the worst pairs.

    Parameters
    ----------
    axes
        Where.
    report
        The audit.
    subject
        What was audited: a store's blocks and outputs are shown, or the records of a plain array, some of
        them if there are many.
    """
    title = (
        "records that differ from the seed's" if report.method == BOUNDARY else "where the worst triple is"
    )
    names = "x", "y"
    if subject.store is None:
        _draw_records(axes, subject.source)
    else:
        names = "east", "north"
        if "epsilon_by_block" in report.details:
            title = "certified ε of blocks"
        _draw_store(axes, report, subject.store)
    limits = maps.limits_of(_box_of(subject))
    maps.frame(axes, limits, names)
    axes.set_title(title, fontsize=10)
    worst = report.details.get("worst_triples") or ([report.worst] if report.worst else [])
    points_a_km = _HEIGHT_INCHES * 72 / (limits[3] - limits[2])
    for rank, triple in reversed(list(enumerate(worst))):
        _draw_pair(axes, triple, report, first=rank == 0, points_a_km=points_a_km)


def _box_of(subject: Subject) -> Box:
    """Return the rectangle around all records."""
    if subject.store is not None:
        return subject.store.grid.box
    return Box.around(subject.source.xy_km(np.arange(subject.source.records)))


def _draw_records(axes: "Axes", source: Source) -> None:
    xy_km = source.xy_km(np.arange(source.records))
    label = f"{source.records:,} records"
    if source.records > _MOST_POINTS:
        # At random: every k-th of a lattice would be a pattern that is not there.
        xy_km = xy_km[np.random.default_rng(0).choice(source.records, _MOST_POINTS, replace=False)]
        label = f"{_MOST_POINTS:,} of {label}"
    looks: dict[str, Any] = {"color": "0.6", "linewidths": 0}
    size, shown = min(max(4000 / len(xy_km), 1.0), 16.0), len(xy_km)
    axes.scatter(
        xy_km[:, 0], xy_km[:, 1], s=size, rasterized=shown > maps.MANY_POINTS, gid="records", **looks
    )
    # Of a size that can be seen in the legend.
    axes.scatter([], [], s=14, label=label, **looks)


def _draw_store(axes: "Axes", report: AuditReport, store: MechanismStore) -> None:
    """Draw blocks, outputs where their places are not damaged, and shared records that differ."""
    grid = store.grid
    x_km, y_km = grid.x_km(), grid.y_km()
    columns = {block.cells_x.start for block in store.plan}
    rows = {block.cells_y.start for block in store.plan}
    x = x_km[np.array([*sorted(columns), grid.cells_x]) * grid.factor]
    y = y_km[np.array([*sorted(rows), grid.cells_y]) * grid.factor]
    if "epsilon_by_block" in report.details:
        _draw_blocks(axes, report, x, y)
    else:
        axes.vlines(x, y[0], y[-1], color="0.8", linewidth=0.6)
        axes.hlines(y, x[0], x[-1], color="0.8", linewidth=0.6)
    axes.plot(x[[0, -1, -1, 0, 0]], y[[0, 0, -1, -1, 0]], color="black", linewidth=1.0, gid="outline")
    outputs_km = coordinates_of_outputs(store, "output_x", "output_y")
    if (known := np.isfinite(outputs_km).all(axis=1)).any():
        maps.draw_outputs(axes, outputs_km[known])
    if mismatches := report.details.get("boundary_mismatches"):
        i, j = np.array([mismatch["record"] for mismatch in mismatches]).T
        axes.scatter(
            x_km[i], y_km[j], s=22, marker="X", color=maps.SIGNAL, edgecolors="black", linewidths=0.6,
            rasterized=len(mismatches) > maps.MANY_POINTS, zorder=4, gid="mismatches",
            label="record that differs",
        )  # fmt: skip


def _draw_blocks(axes: "Axes", report: AuditReport, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Draw ε of blocks over the limit; what is above 1 in another colour, outlined and hatched."""
    import matplotlib as mpl
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ratios = np.array(report.details["epsilon_by_block"], dtype=np.float64) / report.limit_per_km
    finite = np.isfinite(ratios)
    least = float(ratios[finite].min(initial=1.0))
    step = 0.01 if least > 0.9 else 0.1
    lowest = min(math.floor(least / step) * step, 1 - step)
    colours = mpl.colormaps[maps.SEQUENTIAL].with_extremes(over=maps.SIGNAL)
    mesh = axes.pcolormesh(
        x, y, np.ma.masked_where(~finite, ratios).T, cmap=colours, vmin=lowest, vmax=1.0,
        edgecolors="white", linewidth=0.3, gid="blocks",
    )  # fmt: skip
    above = finite & (ratios > 1)
    label = f"certified ε / limit of {report.limit_per_km:.7g} per km"
    bar = maps.colour_bar(axes, mesh, label, extend="max" if above.any() else "neither")
    bar.ax.axhline(1, color="black", linewidth=2.5)
    marked = {"block above the limit": (above, "/"), "block with infinite ε": (~finite, "xx")}
    for name, (chosen, hatch) in marked.items():
        if chosen.any():
            patches = [
                Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j])
                for i, j in np.argwhere(chosen).tolist()
            ]
            looks: dict[str, Any] = {"facecolor": maps.SIGNAL, "edgecolor": "black", "linewidth": 1.4}
            axes.add_collection(PatchCollection(patches, hatch=hatch, label=name, zorder=2, **looks))


def _draw_pair(
    axes: "Axes", triple: dict[str, Any], report: AuditReport, *, first: bool, points_a_km: float
) -> None:
    """Draw the two records of a triple as a line with ends; a short one with a ring around it."""
    (x0, y0), (x1, y1) = triple["x"], triple["x_prime"]
    name = "next worst triples"
    if first:
        name = "worst triple drawn: its pair" if report.method == SAMPLED else "worst triple: its pair"
    axes.plot([x0, x1], [y0, y1], color="white", linewidth=5.0 if first else 3.0, zorder=4)
    axes.plot(
        [x0, x1], [y0, y1], "o-", color="black", linewidth=2.0 if first else 1.0, zorder=4.5 if first else 4,
        markersize=5 if first else 3, markerfacecolor="black", markeredgecolor="white", markeredgewidth=0.5,
        gid="worst pair" if first else "further pair", label=name,
    )  # fmt: skip
    if first and math.hypot(x1 - x0, y1 - y0) * points_a_km < _RING_POINTS:
        middle = (x0 + x1) / 2, (y0 + y1) / 2
        for colour, width in (("white", 4.0), ("black", 1.8)):
            axes.plot(
                *middle, "o", markersize=_RING_POINTS + 4, markerfacecolor="none", markeredgecolor=colour,
                markeredgewidth=width, zorder=4, gid="ring",
            )  # fmt: skip


# --- words ----------------------------------------------------------------------------------------


def _title(report: AuditReport, attribution: str) -> str:
    """Return the verdict, what was audited, how, and what it promises, in lines that fit the figure."""
    name = maps.shortened(shown_name(report.subject), _SUBJECT_WIDTH)
    said = dict(table(replace(report, subject=name)))
    lines = textwrap.wrap(sentence(report), _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" …")
    audited = f"{said['audited']}. {attribution}" if attribution else said["audited"]
    for line in (audited, f"{said['method']}; promised {said['promise']}"):
        lines += textwrap.wrap(line, _TITLE_WIDTH)
    return maps.as_title(lines)
