"""Maps of a store for the page: places in a picture that the browser draws, and fields as PNG in data URLs.

matplotlib and Pillow are imported late.
"""

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.problem.grid import Array, Box
from mdpext_dask.reports.page.thinned import Thinned, gathered
from mdpext_dask.store.mechanism_store import MechanismStore

# Perceptually uniform, also in grey and with all common kinds of colour blindness; large values contrast most
# with the page.
ON_DARK, ON_LIGHT = "viridis", "viridis_r"
# Of differences: blue below 0, red above, white between; told apart with all kinds of colour blindness.
DIVERGING = "RdBu_r"
_TABLE = 256
# Of the picture of a road network, on its longer side; and how strong one node is, and many.
_ROAD_PIXELS, _ROAD_ALPHA = 640, (0.6, 1.0)
_GREY = 128
# In a map's own units: its longer side, and the radius of the largest dot.
LONG_SIDE, _LARGEST_DOT = 640.0, 24.0
# Of so many outputs the largest dot has that size, of more a smaller one; the least dot is a thirtieth of it.
_FEW_OUTPUTS, _LEAST_DOT = 100, 1 / 30
# More outputs than this are points: circles would hide what is below them.
_MANY_OUTPUTS = 600
# Pixels along a side of a field; above, neighbours are averaged.
_MOST_SHOWN = 320
# Values above this quantile have the last colour.
_TOP_SHARE = 0.995
# Of differences, where a few large ones would leave the others white.
_APART_SHARE = 0.95
_SCALE_SHARE = 0.3
_LEGEND_STOPS = 9


@dataclass(frozen=True)
class Frame:
    """A rectangle of the plane as a picture, north up.

    Parameters
    ----------
    box
        The rectangle, in km.
    """

    box: Box

    @classmethod
    def of(cls, store: MechanismStore) -> "Frame":
        """Return the frame around all records of a store, each with a square of its own."""
        grid = store.grid
        box, half = grid.box, grid.spacing_km / 2
        return cls(Box(box.west_km - half, box.south_km - half, box.east_km + half, box.north_km + half))

    @property
    def scale(self) -> float:
        """Units of the picture in a km."""
        return LONG_SIDE / max(self.box.width_km, self.box.height_km)

    def place(self, xy_km: Array) -> Array:
        """Return where points of shape (n, 2), in km, are in the picture, to a tenth."""
        x = (xy_km[:, 0] - self.box.west_km) * self.scale
        y = (self.box.north_km - xy_km[:, 1]) * self.scale
        return np.asarray(np.round(np.stack([x, y], axis=-1), 1), dtype=np.float64)

    def rectangle(self, west: float, south: float, east: float, north: float) -> dict[str, float]:
        """Return a rectangle, in km, as the attributes of an image."""
        (x, y), (right, bottom) = self.place(np.array([[west, north], [east, south]])).tolist()
        return {"x": x, "y": y, "width": round(right - x, 1), "height": round(bottom - y, 1)}

    def values(self) -> dict[str, Any]:
        """Return the size, and a scale bar of a round length."""
        length = round_below(self.box.width_km * _SCALE_SHARE)
        return {
            "width": round(self.box.width_km * self.scale, 1),
            "height": round(self.box.height_km * self.scale, 1),
            "scale_km": length,
            "scale": round(length * self.scale, 1),
        }


def base_of(store: MechanismStore, frame: Frame) -> dict[str, Any]:
    """Return what all maps of a store share but the streets: outputs, region, attribution."""
    outputs, projection, hidden = store.output_xy_km(), store.projection, ~store.kept
    box = store.grid.box
    many = len(outputs) > _MANY_OUTPUTS
    radius = 0.7 if many else min(max(60 / math.sqrt(max(len(outputs), 1)), 2.2), 5.0)
    return {
        **frame.values(),
        "many": many,
        "outputs": [{"x": x, "y": y} for x, y in frame.place(np.nan_to_num(outputs)).tolist()],
        "radius": round(radius, 1),
        "turned_deg": None if projection is None else round(projection.rotation_deg, 2),
        "cover": cover_png(hidden) if hidden.any() else None,
        "cells": frame.rectangle(box.west_km, box.south_km, box.east_km, box.north_km),
        "attribution": store.attribution,
    }


def seeds_path(store: MechanismStore, frame: Frame) -> str:
    """Return the sides of the source cells as one SVG path."""
    grid = store.grid
    x = grid.west_km + np.arange(grid.cells_x + 1) * grid.cell_km
    y = grid.south_km + np.arange(grid.cells_y + 1) * grid.cell_km
    xs = frame.place(np.stack([x, np.full(len(x), y[0])], axis=-1))[:, 0].tolist()
    ys = frame.place(np.stack([np.full(len(y), x[0]), y], axis=-1))[:, 1].tolist()
    columns = (f"M{at:g} {ys[0]:g}V{ys[-1]:g}" for at in xs)
    return "".join([*columns, *(f"M{xs[0]:g} {at:g}H{xs[-1]:g}" for at in ys)])


def field_of(
    frame: Frame,
    values: Array,
    corner_km: tuple[float, float],
    step_km: float,
    *,
    power: float = 1.0,
    least: float | None = None,
    most: float | None = None,
    colours: tuple[str, str] = (ON_LIGHT, ON_DARK),
) -> dict[str, Any] | None:
    """Return a field as a picture in a frame, with its legend; None if all of it is NaN.

    Parameters
    ----------
    frame
        The frame.
    values
        float64 of shape (n_x, n_y); NaN where there is no value.
    corner_km
        Middle of the first value's square, in km.
    step_km
        Side of the squares, in km.
    power
        Colours are spaced by shares of the largest value raised to this power.
    least, most
        Values of the first and the last colour; default: the least value, and the 99.5 % quantile.
    colours
        Names of colour maps, on light and on dark.
    """
    present = values[np.isfinite(values)]
    if not present.size:
        return None
    low = float(present.min()) if least is None else least
    high = float(np.quantile(present, _TOP_SHARE)) if most is None else most
    high = max(high, low)
    span = high - low if high > low else 1.0
    with np.errstate(invalid="ignore"):
        shares = np.clip((values - low) / span, 0, None) ** power
    west, south = corner_km[0] - step_km / 2, corner_km[1] - step_km / 2
    east, north = west + step_km * values.shape[0], south + step_km * values.shape[1]
    return {
        "on_light": field_png(shares, colours[0]),
        "on_dark": field_png(shares, colours[1]),
        **frame.rectangle(west, south, east, north),
        "legend": legend(low, high, power, over=bool(present.max() > high), colours=colours),
    }


def legend(
    least: float,
    most: float,
    power: float = 1.0,
    *,
    over: bool = False,
    colours: tuple[str, str] = (ON_LIGHT, ON_DARK),
) -> dict[str, Any]:
    """Return the colours of a scale from the least to the largest, and numbers to read off."""
    stops = np.linspace(0, 1, _LEGEND_STOPS)
    names = [f"{share:.4g}" for share in stops.tolist()]
    at = (stops * (_TABLE - 1)).astype(int)
    kinds = zip(("on_light", "on_dark"), colours, strict=True)
    found = {kind: [f"#{bytes(rgb).hex()}" for rgb in colour_table(name)[at]] for kind, name in kinds}
    return {
        **{kind: list(zip(names, stops, strict=True)) for kind, stops in found.items()},
        "least": least,
        "middle": least + (most - least) * 0.5 ** (1 / power),
        "most": most,
        "over": over,
    }


def prior_field(frame: Frame, thinned: Thinned) -> dict[str, Any] | None:
    """Return the prior, in percent of the whole for each square, on a square-root scale."""
    shares = np.where(thinned.prior > 0, 100 * thinned.prior, np.nan)
    return _on_lattice(frame, thinned, shares, least=0.0, power=0.5)


def posterior_field(frame: Frame, thinned: Thinned, output: int) -> dict[str, Any] | None:
    """Return where a report may come from, in percent for each square."""
    shares = 100 * thinned.posterior(output)
    shown = np.where(thinned.prior > 0, shares, np.nan)
    most = float(shares.max())
    return _on_lattice(frame, thinned, shown, least=0.0, most=most, power=0.5)


def _on_lattice(frame: Frame, thinned: Thinned, values: Array, **how: Any) -> dict[str, Any] | None:
    corner = float(thinned.x_km[0]), float(thinned.y_km[0])
    return field_of(frame, values, corner, thinned.step * thinned.grid.spacing_km, **how)


def error_fields(
    frame: Frame, thinned: Thinned, prior: Array, own_km: Array, plain_km: Array
) -> dict[str, Any] | None:
    """Return the expected errors of a mechanism and of the plain thing on one scale, and their difference.

    Parameters
    ----------
    frame
        The frame.
    thinned
        Whose squares are shown.
    prior
        π, float64 of the grid's shape.
    own_km, plain_km
        Expected losses, float64 of the same shape, in km; NaN where they are not known.

    Returns
    -------
    `own`, `plain` and `difference`, fields of means over squares by the prior, in m; `less`, the share of
    people at records where the mechanism loses less; and `records`, how many are counted. None where none is.
    """
    known = np.isfinite(own_km) & np.isfinite(plain_km) & (prior > 0)
    if not known.any():
        return None
    weight = np.where(known, prior, 0.0)
    at = thinned.i, thinned.j, thinned.step
    with np.errstate(invalid="ignore"):
        own, plain = (
            1000 * gathered(weight * np.where(known, km, 0.0), *at) / gathered(weight, *at)
            for km in (own_km, plain_km)
        )
    both = np.concatenate([field[np.isfinite(field)] for field in (own, plain)])
    scale = {"least": float(both.min()), "most": float(np.quantile(both, _TOP_SHARE))}
    apart = own - plain
    most = float(np.quantile(np.abs(apart[np.isfinite(apart)]), _APART_SHARE)) or 1.0
    difference = {"least": -most, "most": most, "colours": (DIVERGING, DIVERGING)}
    return {
        "own": _on_lattice(frame, thinned, own, **scale),
        "plain": _on_lattice(frame, thinned, plain, **scale),
        "difference": _on_lattice(frame, thinned, apart, **difference),
        "less": float(weight[known & (own_km < plain_km)].sum() / weight.sum()),
        "records": int(np.count_nonzero(known)),
    }


def certificate_field(frame: Frame, store: MechanismStore, report: AuditReport) -> dict[str, Any] | None:
    """Return the certified ε of every block as a share of the limit, in percent."""
    grid, plan = store.grid, store.plan
    found = [float(value) for row in report.details["epsilon_by_block"] for value in row]
    values = np.empty((grid.cells_x, grid.cells_y))
    for block, epsilon in zip(plan, found, strict=True):
        values[block.cells_x, block.cells_y] = 100 * epsilon / report.limit_per_km
    values[~np.isfinite(values)] = np.nan
    side = -(-max(values.shape) // _MOST_SHOWN)
    starts = [np.arange(0, n, side) for n in values.shape]
    largest = np.maximum.reduceat(np.maximum.reduceat(values, starts[0], axis=0), starts[1], axis=1)
    middle = side * grid.cell_km / 2
    corner = grid.west_km + middle, grid.south_km + middle
    low = float(np.nanmin(largest)) if np.isfinite(largest).any() else 0.0
    return field_of(frame, largest, corner, side * grid.cell_km, least=min(low, 50.0), most=100.0)


def largest_dot(outputs: int) -> float:
    """Return the radius of the largest dot, in a map's units, where there are so many."""
    return round(_LARGEST_DOT * min(math.sqrt(_FEW_OUTPUTS / outputs), 1.0), 2)


def dots_of(row: Array) -> list[dict[str, float]]:
    """Return the dots of a row: their area is the probability.

    Parameters
    ----------
    row
        M(·|x), float64 of shape (K,); NaN if it is not known.
    """
    known = np.nan_to_num(row)
    shares = known / max(float(known.max()), np.finfo(float).tiny)
    largest = largest_dot(len(row))
    radii = np.round(np.maximum(largest * np.sqrt(shares), _LEAST_DOT * largest), 2)
    opacities = np.round(0.35 + 0.6 * shares, 2)
    return [{"radius": r, "opacity": o} for r, o in zip(radii.tolist(), opacities.tolist(), strict=True)]


def round_below(length: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is no more."""
    power = 10.0 ** math.floor(math.log10(length))
    return max((step * power for step in (1, 2, 5) if step * power <= length), default=power)


# --- pictures -------------------------------------------------------------------------------------


def field_png(shares: Array, colours: str) -> str:
    """Return a field as a picture, a pixel a number, north up.

    Parameters
    ----------
    shares
        float64 of shape (n_x, n_y), 0 for the first colour and 1 for the last, as are those beyond;
        transparent where it is NaN.
    colours
        Name of the colour map.
    """
    import matplotlib as mpl

    known = np.isfinite(shares)
    rgba = mpl.colormaps[colours](np.clip(np.where(known, shares, 0.0), 0, 1), bytes=True)
    rgba[..., 3] = np.where(known, 255, 0)
    return _png(rgba.swapaxes(0, 1)[::-1])


def cover_png(hidden: NDArray[np.bool_]) -> str:
    """Return a picture that greys out what is hidden, bool of shape (n_x, n_y)."""
    rgba = np.full((*hidden.shape, 4), _GREY, dtype=np.uint8)
    rgba[..., 3] = np.where(hidden, 110, 0)
    return _png(rgba.swapaxes(0, 1)[::-1])


def points_png(xy_km: Array, box: Box) -> str:
    """Return places as a grey haze, the denser the stronger, seen on light and on dark.

    Parameters
    ----------
    xy_km
        float64 of shape (n, 2), in km; those outside the box are not shown.
    box
        What the picture shows.
    """
    scale = _ROAD_PIXELS / max(box.width_km, box.height_km)
    shape = tuple(max(round(side * scale), 1) for side in (box.width_km, box.height_km))
    counts, _, _ = np.histogram2d(
        xy_km[:, 0], xy_km[:, 1], bins=shape,
        range=((box.west_km, box.east_km), (box.south_km, box.north_km)),
    )  # fmt: skip
    low, high = _ROAD_ALPHA
    alpha = np.where(counts > 0, np.minimum(low + (high - low) * (counts - 1) / 3, high), 0.0)
    rgba = np.full((*shape, 4), _GREY, dtype=np.uint8)
    # Few levels: a picture that is a fraction of the size.
    rgba[..., 3] = (np.rint(alpha * 8) / 8 * 255).astype(np.uint8)
    return _png(rgba.swapaxes(0, 1)[::-1])


def colour_table(colours: str) -> NDArray[np.uint8]:
    """Return the colours of a map from the least to the largest, uint8 of shape (256, 3)."""
    import matplotlib as mpl

    table: NDArray[np.uint8] = mpl.colormaps[colours](np.arange(_TABLE), bytes=True)[:, :3]
    return table


def _png(rgba: NDArray[Any]) -> str:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rgba)).save(content, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")
