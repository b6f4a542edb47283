"""Where most of a probability is: the distances and the least sets that hold a half and nine tenths of it."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Array
from mdpext_dask.reports.page.maps import Frame, round_below

# Of a probability, what is drawn and said.
HALF, MOST = 0.5, 0.9
# Of a close-up, in its own units: its sides, the share of its height that areas take, and its scale bar.
WIDTH, HEIGHT = 480.0, 360.0
_FILLED, _BAR = 0.86, 120.0
# Radius of a dot in it: of one, and at least.
_DOT, _LEAST_DOT = 60.0, 2.0
# A sum of rounded probabilities may miss what it stands for by so much.
_ROUNDING = 1e-9


def distance_within(apart_km: Array, weight: Array, share: float) -> float:
    """Return the least distance within which a share of all weight lies.

    Parameters
    ----------
    apart_km
        Distances, float64 of shape (n,), in km.
    weight
        What lies at each, float64 of shape (n,), ≥ 0 and not all 0.
    share
        The share, in (0, 1].
    """
    order = np.argsort(apart_km, kind="stable")
    held = np.cumsum(weight[order])
    return float(apart_km[order[np.searchsorted(held, share * held[-1] * (1 - _ROUNDING))]])


def least_set(weight: Array, share: float) -> NDArray[np.intp]:
    """Return the fewest places that hold a share of all weight, the heaviest first; arguments as above."""
    order = np.argsort(-weight, kind="stable")
    held = np.cumsum(weight[order])
    return order[: int(np.searchsorted(held, share * held[-1] * (1 - _ROUNDING))) + 1]


def hull_path(points: Array) -> str:
    """Return the convex hull of places of shape (n, 2), n ≥ 1, as an SVG path; of one place, that place."""
    ordered = [(x, y) for x, y in np.unique(points, axis=0).tolist()]
    corners = [*_half_hull(ordered)[:-1], *_half_hull(ordered[::-1])[:-1]] or ordered
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners) + "Z"


def _half_hull(ordered: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return one side of a convex hull of places in order (Andrew's monotone chain)."""
    side: list[tuple[float, float]] = []
    for x, y in ordered:
        while len(side) > 1:
            (a, b), (c, d) = side[-2:]
            if (c - a) * (y - b) - (d - b) * (x - a) > 0:
                break
            side.pop()
        side.append((x, y))
    return side


def in_metres(km: float) -> str:
    """Return a distance as people say it: in metres below 10 km, to ten metres from 100 m on."""
    metres = 1000 * km
    if metres < 100:
        return f"{metres:.0f}\N{NO-BREAK SPACE}m"
    return (
        f"{round(metres, -1):,.0f}\N{NO-BREAK SPACE}m" if metres < 9995 else f"{km:,.1f}\N{NO-BREAK SPACE}km"
    )


def view_of(frame: Frame, middle: Array, reach: float) -> dict[str, Any]:
    """Return a close-up of a map around a place.

    Parameters
    ----------
    frame
        The map.
    middle
        The place, shape (2,), in the map's units.
    reach
        How far from it the close-up must show, in the map's units.

    Returns
    -------
    `transform` from the map's units to its own, their `scale`, and a scale bar: `bar`, its length in its own
    units, and `bar_words`.
    """
    scale = _FILLED * HEIGHT / 2 / reach
    x, y = WIDTH / 2 - scale * middle[0], HEIGHT / 2 - scale * middle[1]
    bar_km = round_below(_BAR / (scale * frame.scale))
    return {
        "transform": f"translate({x:.1f} {y:.1f}) scale({scale:.3f})",
        "scale": scale,
        "bar": round(bar_km * scale * frame.scale, 1),
        "bar_words": in_metres(bar_km) if bar_km < 1 else f"{bar_km:g} km",
    }


def rings_of(frame: Frame, view: dict[str, Any], within: tuple[float, float]) -> list[dict[str, Any]]:
    """Return circles around a close-up's middle, by their radii in km: `radius` in its units, and `words`."""
    return [{"radius": round(km * frame.scale * view["scale"], 1), "words": in_metres(km)} for km in within]


def reports_near(
    frame: Frame, row: Array, outputs_km: Array, xy_km: Array, least_km: float
) -> dict[str, Any] | None:
    """Return where most of the reports from a record are, with a close-up; None where its row is not known.

    Parameters
    ----------
    frame
        The map.
    row
        M(·|x), float64 of shape (K,).
    outputs_km
        Outputs, float64 of shape (K, 2), in km.
    xy_km
        The record, shape (2,), in km.
    least_km
        What a close-up shows at least around the record, in km.
    """
    if not np.isfinite(row).all() or not row.any():
        return None
    apart = np.hypot(*(outputs_km - xy_km).T)
    within = distance_within(apart, row, HALF), distance_within(apart, row, MOST)
    half, most = least_set(row, HALF), least_set(row, MOST)
    places = frame.place(outputs_km)
    view = view_of(
        frame, frame.place(xy_km[None])[0], max(within[1], float(apart[most].max()), least_km) * frame.scale
    )
    radius = dot_radius(len(most)) / view["scale"]
    return {
        **view,
        "rings": rings_of(frame, view, within),
        "half": hull_path(places[half]),
        "most": hull_path(places[most]),
        "half_count": len(half),
        "most_count": len(most),
        "radius": f"{radius:.3g}",
        "dots": [
            {"x": places[k, 0], "y": places[k, 1], "kind": "in-half" if n < len(half) else "in-most"}
            for n, k in enumerate(most.tolist())
        ],
    }


def dot_radius(count: int) -> float:
    """Return the radius of dots in a close-up that shows so many, in its units."""
    return max(min(_DOT / math.sqrt(count), 9.0), _LEAST_DOT)


def senders_near(
    frame: Frame, posterior: Array, records_km: Array, place_km: Array, least_km: float
) -> dict[str, Any] | None:
    """Return where most of those are who report a place, with a close-up; None where nobody reports it.

    Parameters
    ----------
    frame, least_km
        As of :func:`reports_near`.
    posterior
        P(x | y), float64 of shape (n,).
    records_km
        Records, float64 of shape (n, 2), in km.
    place_km
        The reported place, shape (2,), in km.
    """
    if not posterior.any() or not np.isfinite(place_km).all():
        return None
    apart = np.hypot(*(records_km - place_km).T)
    within = distance_within(apart, posterior, HALF), distance_within(apart, posterior, MOST)
    view = view_of(frame, frame.place(place_km[None])[0], max(within[1], least_km) * frame.scale)
    return {**view, "rings": rings_of(frame, view, within)}
