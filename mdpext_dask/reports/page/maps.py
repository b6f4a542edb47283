"""Maps of a store as values for the page: what lies where in a picture that is drawn by the browser."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.problem.grid import Box
from mdpext_dask.problem.maps import averaged
from mdpext_dask.reports.page.rasters import ON_DARK, ON_LIGHT, colours_of, cover_png, field_png, points_png
from mdpext_dask.reports.page.thinned import Thinned
from mdpext_dask.store.mechanism_store import MechanismStore

# Of a map, in its own units: the longer side; and the largest dot.
LONG_SIDE, LARGEST_DOT = 640.0, 24.0
# Numbers along a side that a picture of a field shows; of more, neighbours are averaged.
_MOST_SHOWN = 320
# What is above this quantile of what is shown has the last colour.
_TOP_SHARE = 0.995
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

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        return self.box.width_km * self.scale, self.box.height_km * self.scale

    def place(self, xy_km: NDArray[np.float64]) -> NDArray[np.float64]:
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
        width, height = self.size
        length = _round_below(self.box.width_km * _SCALE_SHARE)
        return {
            "width": round(width, 1),
            "height": round(height, 1),
            "scale_km": length,
            "scale": round(length * self.scale, 1),
        }


def base_of(store: MechanismStore, frame: Frame) -> dict[str, Any]:
    """Return what all maps of a store share: roads, outputs, the region, whose data it is."""
    outputs = store.read_output_xy_km()
    radius = min(max(60 / math.sqrt(max(len(outputs), 1)), 2.2), 5.0)
    projection = store.projection
    hidden = ~store.kept
    grid = store.grid
    box = grid.box
    return {
        **frame.values(),
        "roads": _roads(store, frame),
        "outputs": [
            {"x": x, "y": y, "number": number}
            for number, (x, y) in enumerate(frame.place(np.nan_to_num(outputs)).tolist())
        ],
        "radius": round(radius, 1),
        "turned_deg": None if projection is None else round(projection.rotation_deg, 2),
        "cover": cover_png(hidden) if hidden.any() else None,
        "cells": frame.rectangle(box.west_km, box.south_km, box.east_km, box.north_km),
        "attribution": str(store.attributes.get("attribution", "")),
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
    values: NDArray[np.float64],
    corner_km: tuple[float, float],
    step_km: float,
    *,
    power: float = 1.0,
    least: float | None = None,
    most: float | None = None,
) -> dict[str, Any] | None:
    """Return a field as a picture in a frame, with what a legend says; None if it holds no number.

    Parameters
    ----------
    frame
        Where it lies.
    values
        float64 of shape (n_x, n_y); not-a-number where there is nothing.
    corner_km
        Where the first of them lies: its middle, in km.
    step_km
        How far they are apart, in km.
    power
        Of the scale: colours stand for shares of the largest raised to it.
    least, most
        What the first and the last colour stand for; default: the least, and nearly the largest.
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
        "on_light": field_png(shares, ON_LIGHT),
        "on_dark": field_png(shares, ON_DARK),
        **frame.rectangle(west, south, east, north),
        "legend": legend(low, high, power, over=bool(present.max() > high)),
    }


def legend(least: float, most: float, power: float = 1.0, *, over: bool = False) -> dict[str, Any]:
    """Return the colours of a scale from the least to the largest, and numbers to read off."""
    stops = np.linspace(0, 1, _LEGEND_STOPS)
    names = [f"{share:.4g}" for share in stops.tolist()]
    return {
        "on_light": list(zip(names, colours_of(stops, ON_LIGHT), strict=True)),
        "on_dark": list(zip(names, colours_of(stops, ON_DARK), strict=True)),
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


def _on_lattice(
    frame: Frame, thinned: Thinned, values: NDArray[np.float64], **how: Any
) -> dict[str, Any] | None:
    corner = float(thinned.x_km[0]), float(thinned.y_km[0])
    return field_of(frame, values, corner, thinned.step * thinned.grid.spacing_km, **how)


def loss_field(
    frame: Frame, store: MechanismStore, expected_km: NDArray[np.float64]
) -> dict[str, Any] | None:
    """Return what each record can expect to lose, in km; means over squares where they are many."""
    values, side = averaged(expected_km, _MOST_SHOWN)
    grid = store.grid
    middle = (side - 1) / 2 * grid.spacing_km
    corner = grid.west_km + middle, grid.south_km + middle
    found = field_of(frame, values, corner, side * grid.spacing_km)
    return None if found is None else {**found, "side": side}


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


def dots_of(row: NDArray[np.float64]) -> list[dict[str, float]]:
    """Return the dots of a row: their area is the probability.

    Parameters
    ----------
    row
        M(·|x), float64 of shape (K,); not-a-number if it is not known.
    """
    known = np.nan_to_num(row)
    shares = known / max(float(known.max()), np.finfo(float).tiny)
    radii = np.round(np.maximum(LARGEST_DOT * np.sqrt(shares), 0.8), 1)
    opacities = np.round(0.35 + 0.6 * shares, 2)
    return [{"radius": r, "opacity": o} for r, o in zip(radii.tolist(), opacities.tolist(), strict=True)]


def _roads(store: MechanismStore, frame: Frame) -> str | None:
    if store.problem_attributes.get("loss") != "travel":
        return None
    nodes = np.asarray(store.read("problem/node_xy"), dtype=np.float64)
    return points_png(nodes[np.isfinite(nodes).all(axis=1)], frame.box)


def _round_below(length: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is no more."""
    power = 10.0 ** math.floor(math.log10(length))
    return max((step * power for step in (1, 2, 5) if step * power <= length), default=power)
