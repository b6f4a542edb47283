"""HTML of a value in a notebook: a small table, and a map beside it. All text is escaped."""

from collections.abc import Iterable
from html import escape

import numpy as np

from mdpext_dask.errors import printable
from mdpext_dask.problem.grid import Array, Box, Grid, square_sums

# Squares along the longer side in which the prior is shown, and that side, in pixels.
_SQUARES, _SIDE_PIXELS = 40, 160.0
# Largest number of records for which the prior is read to draw it.
MOST_READ = 4_000_000
# Outputs that are shown, at most.
MOST_DOTS = 1_000
_TABLE = "border-collapse:collapse;font-size:90%"
_CELL = "text-align:left;padding:1px 8px 1px 0;vertical-align:top"


def card(title: str, rows: Iterable[tuple[str, str]], picture: str = "") -> str:
    """Return HTML that needs nothing else and takes its colours from the page.

    Parameters
    ----------
    title, rows
        Plain texts: the title; labels and values.
    picture
        Markup beside the table, such as that of :func:`small_map`; it is not escaped.
    """
    lines = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:.7">{_escaped(label)}</th>'
        f'<td style="{_CELL}">{_escaped(text)}</td></tr>'
        for label, text in rows
    )
    return (
        '<div style="display:flex;gap:16px;align-items:flex-start;flex-wrap:wrap">'
        f'<div><div style="font-weight:bold">{_escaped(title)}</div>'
        f'<table style="{_TABLE}"><tbody>{lines}</tbody></table></div>{picture}</div>'
    )


def small_map(box: Box, densities: Array, side_km: float, outputs: Array) -> str:
    """Return an SVG picture of a prior, darker where it is denser, with the outputs as dots.

    Parameters
    ----------
    box
        The rectangle of the records.
    densities
        The prior's density in squares from the lower left corner of the box on, float64 of shape (n, m);
        NaN where it is 0.
    side_km
        Side of a square, in km.
    outputs
        float64 of shape (K, 2), in km.
    """
    scale = _SIDE_PIXELS / max(box.width_km, box.height_km)
    width, height = scale * box.width_km, scale * box.height_km
    peak = float(np.nanmax(densities, initial=0.0)) or 1.0
    shapes = []
    for i, j in np.argwhere(np.isfinite(densities)).tolist():
        # The square root keeps low densities visible.
        strength = 0.12 + 0.78 * float(np.sqrt(densities[i, j] / peak))
        shapes.append(
            f'<rect x="{scale * side_km * i:.1f}" y="{height - scale * side_km * (j + 1):.1f}" '
            f'width="{scale * side_km:.1f}" height="{scale * side_km:.1f}" fill="#3b78b8" '
            f'fill-opacity="{strength:.2f}"/>'
        )
    for x, y in outputs.tolist():
        shapes.append(
            f'<circle cx="{scale * (x - box.west_km):.1f}" cy="{height - scale * (y - box.south_km):.1f}" '
            'r="2" fill="white" stroke="black" stroke-width="0.8"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.1f} {height:.1f}"><title>prior, and outputs as dots</title>'
        f'<rect width="{width:.1f}" height="{height:.1f}" fill="none" stroke="gray"/>{"".join(shapes)}</svg>'
    )


def prior_in_squares(prior: Array, grid: Grid, most: int = _SQUARES) -> tuple[Array, int]:
    """Return the prior of squares of records over their area, and their side in records.

    Parameters
    ----------
    prior
        float64 of the grid's shape.
    grid
        The grid of records.
    most
        How many squares there may be along a side.

    Returns
    -------
    float64 of shape (n, m), in 1/km²; NaN where the prior is 0.
    """
    step = -(-max(grid.shape) // most)
    sums = square_sums(prior, step)
    return np.where(sums > 0, sums / (step * grid.spacing_km) ** 2, np.nan), step


def _escaped(text: str) -> str:
    return escape(printable(text))
