"""What the header of a city may say: every field with its check, before anything is made of it.

A header comes with digests, which say that it is whole, not who has made it. So no number of it is used as a
size or an index, and no array is made for one, before it lies in its range and fits the others.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mdpext_dask.errors import printable
from mdpext_dask.extend.noise import NoiseLattice
from mdpext_dask.problem.grid import Grid, coarse_radius_km

# How rows are kept: as the seed's scores, as tables of noise, or as they are.
PACKINGS = SEED, NOISE, ROWS = "seed", "noise", "rows"
# Rows of a tile, in bytes; exported tiles have 256 KiB, or one source cell.
LARGEST_TILE_BYTES = 2**28
_LARGEST_KM, _SHORTEST_KM = 1e9, 1e-9
_LARGEST_EPSILON, _LEAST_EPSILON = 1e12, 1e-12
_MOST_CELLS, _MOST_OUTPUTS, _MOST_SUBDIVISIONS, _MOST_LEVELS = 10**8, 10**7, 10**6, 64
_LONGEST_AXIS = 2**31
_MOST_TERMS = 16
_WIDEST_FIT_DEG, _ALL_ROUND_DEG = 90.0, 360.0
_SHORTEST_FIT_DEG = 1e-9
# A coefficient of a plane in km is never as large.
_LARGEST_COEFFICIENT = 1e6
_LARGEST_DISTORTION = 1.0
_FLOAT32 = 4
_ROUNDING = 1e-6
_DIGEST = re.compile("[0-9a-f]{64}")
_HEX = re.compile("(?:[0-9a-f]{2})*")
_LONGEST_SHOWN = 40

# Takes the name of a field, and its value; raises ValueError.
Check = Callable[[str, Any], None]


def parsed(content: bytes) -> dict[str, Any]:
    """Return the header that these bytes are, every field checked.

    Raises
    ------
    ValueError
        If they are none; with the field, what it must be, and what it is.
    """
    try:
        # Decoded here: `json` takes bytes for UTF-16 where they look like it, which other readers do not.
        header = json.loads(content.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _HEADER("header", header)
    _check_sizes(header)
    return dict(header)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


# --- single fields --------------------------------------------------------------------------------


def _number(low: float, high: float, kind: type = float) -> Check:
    """Return a check of a number in a range; of a whole one, where the kind is ``int``."""
    kinds, called = (int, "a whole number") if kind is int else ((int, float), "a number")

    def check(name: str, value: Any) -> None:
        # Written so that NaN is none.
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise _wrong(name, f"{called} from {low:.12g} to {high:.12g}", value)

    return check


def _whole(low: int, high: int) -> Check:
    return _number(low, high, int)


def _text(pattern: "re.Pattern[str]", called: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not (isinstance(value, str) and pattern.fullmatch(value)):
            raise _wrong(name, called, value)

    return check


def _or(other: Any, check: Check) -> Check:
    """Return a check that one value passes, and whatever passes another check."""

    def either(name: str, value: Any) -> None:
        if type(value) is not type(other) or value != other:
            check(name, value)

    return either


def _each(check: Check, least: int, most: int) -> Check:
    """Return a check of a list: its length, and every entry."""

    def all_of_them(name: str, value: Any) -> None:
        if not (isinstance(value, list) and least <= len(value) <= most):
            raise _wrong(
                name, f"a list of {least} to {most}" if least < most else f"a list of {least}", value
            )
        for entry in value:
            check(f"an entry of {name}", entry)

    return all_of_them


def _pair(*checks: Check) -> Check:
    def both(name: str, value: Any) -> None:
        _each(lambda *_: None, len(checks), len(checks))(name, value)
        for check, entry in zip(checks, value, strict=True):
            check(f"an entry of {name}", entry)

    return both


def _object(needed: Mapping[str, Check], optional: Mapping[str, Check], *, more: bool = False) -> Check:
    """Return a check of an object by the checks of its keys.

    Parameters
    ----------
    needed, optional
        Checks by key.
    more
        Whether there may be others, which nothing is made of.
    """

    def check_all(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(name, "an object", value)
        if not more and (others := value.keys() - needed.keys() - optional.keys()):
            raise ValueError(f"{name} has no key {_shown(min(others))}")
        for key, check in {**needed, **optional}.items():
            inner = key if name == "header" else f"{name}.{key}"
            if key in value:
                check(inner, value[key])
            elif key in needed:
                raise ValueError(f"{inner} is missing")

    return check_all


def _wrong(name: str, wanted: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a short text for any JSON value, however long or deep it is."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_SHOWN:
        return "a number with too many digits"
    text = printable(repr(value[:_LONGEST_SHOWN] if isinstance(value, str) else value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


_KM = _number(-_LARGEST_KM, _LARGEST_KM)
_LENGTH_KM = _number(_SHORTEST_KM, _LARGEST_KM)
_EPSILON = _number(_LEAST_EPSILON, _LARGEST_EPSILON)
_LON, _LAT = _number(-_ALL_ROUND_DEG, _ALL_ROUND_DEG), _number(-90, 90)
_SHA256 = _text(_DIGEST, "64 hexadecimal digits")
_SIGNATURE = _text(re.compile("[0-9a-f]{128}"), "128 hexadecimal digits")
_CELLS = _whole(1, _MOST_CELLS)
_COEFFICIENT = _number(-_LARGEST_COEFFICIENT, _LARGEST_COEFFICIENT)
_TABLE = _each(_each(_COEFFICIENT, 1, _MOST_TERMS), 1, _MOST_TERMS)
_HEADER = _object(
    {
        "epsilon_per_km": _EPSILON,
        "epsilon_certified": _EPSILON,
        "quantisation_km": _LENGTH_KM,
        "metric_p": _or("inf", _number(1, 1e300)),
        "content_sha256": _SHA256,
        "grid": _object(
            {
                "west_km": _KM,
                "south_km": _KM,
                "cells_x": _CELLS,
                "cells_y": _CELLS,
                "cell_km": _LENGTH_KM,
                "refine": _each(_whole(1, _MOST_SUBDIVISIONS), 1, _MOST_LEVELS),
            },
            {},
        ),
        "kept": _or(None, _text(_HEX, "null, or an even number of hexadecimal digits")),
        "projection": _or(None, _object({"centre_lon": _LON, "centre_lat": _LAT}, {"rotation_deg": _LON})),
        "plane_fit": _or(
            None,
            _object(
                {
                    "half_lon": _number(_SHORTEST_FIT_DEG, _WIDEST_FIT_DEG),
                    "middle_lat": _LAT,
                    "half_lat": _number(_SHORTEST_FIT_DEG, _WIDEST_FIT_DEG),
                    "x": _TABLE,
                    "y": _TABLE,
                },
                {},
            ),
        ),
        "outputs": _object(
            {
                "lon": _each(_or(None, _LON), 1, _MOST_OUTPUTS),
                "lat": _each(_or(None, _LAT), 1, _MOST_OUTPUTS),
                "x": _each(_KM, 1, _MOST_OUTPUTS),
                "y": _each(_KM, 1, _MOST_OUTPUTS),
            },
            {},
        ),
        "remap": _or(None, _each(_whole(0, _MOST_OUTPUTS), 1, _MOST_OUTPUTS)),
        "packing": _text(re.compile("|".join(PACKINGS)), " or ".join(PACKINGS)),
        "tile_cells": _pair(_CELLS, _CELLS),
        "sections": _each(_pair(_whole(1, 2**62), _SHA256), 1, _MOST_CELLS),
        "rows_sha256": _each(_SHA256, 1, _MOST_CELLS),
    },
    {
        "noise": _object(
            {
                "per_cell": _whole(1, _MOST_SUBDIVISIONS),
                "per_record": _whole(1, _MOST_SUBDIVISIONS),
                "reach": _whole(0, _MOST_CELLS),
                "floor": _number(0, 1),
            },
            {},
        ),
        "epsilon_planar_per_km": _EPSILON,
        "distortion": _number(0, _LARGEST_DISTORTION),
        "certificate_sha256": _SHA256,
        "mechanism_sha256": _SHA256,
        "signature": _object({"public_key": _SHA256, "signature": _SIGNATURE}, {}),
    },
    more=True,
)


# --- what belongs together ------------------------------------------------------------------------


def grid_of(header: Mapping[str, Any]) -> Grid:
    """Return the grid of a header whose fields have been checked."""
    return Grid(**{**header["grid"], "refine": tuple(header["grid"]["refine"])})


def noise_lattice_of(header: Mapping[str, Any], grid: Grid) -> NoiseLattice | None:
    """Return the noise cells of a header whose fields have been checked, if it has any.

    Raises
    ------
    ValueError
        If they are none, or too many.
    """
    form = header.get("noise")
    if form is None:
        return None
    return NoiseLattice.checked(grid, form["per_cell"], form["per_record"], form["reach"])


def _check_sizes(header: Mapping[str, Any]) -> None:
    """Refuse sizes that are too large, or do not belong together."""
    grid = grid_of(header)
    outputs, tile = {name: len(values) for name, values in header["outputs"].items()}, header["tile_cells"]
    k = outputs["x"]
    if grid.source_cells > _MOST_CELLS or max(grid.shape) > _LONGEST_AXIS:
        raise ValueError(f"grid has more than {_MOST_CELLS} cells, or {_LONGEST_AXIS} records in a row")
    if grid.spacing_km < _SHORTEST_KM:
        raise ValueError(f"grid has records less than {_SHORTEST_KM:g} km apart")
    if len(set(outputs.values())) > 1:
        raise ValueError("outputs have coordinates in different numbers")
    cells = grid.cells_x, grid.cells_y
    if tile[0] > cells[0] or tile[1] > cells[1]:
        raise ValueError("tile_cells are more than the grid has")
    if _FLOAT32 * math.prod(side * grid.factor + 1 for side in tile) * k > LARGEST_TILE_BYTES:
        raise ValueError(f"tile_cells: rows of a tile take more than {LARGEST_TILE_BYTES >> 20} MiB")
    tiles = math.prod(-(-all_of // side) for all_of, side in zip(cells, tile, strict=True))
    lattice = noise_lattice_of(header, grid)
    if (header["packing"] == NOISE) != (lattice is not None):
        raise ValueError("noise must be there where the packing is noise, and there only")
    sections = 1 if header["packing"] == SEED else tiles if lattice is None else len(lattice.tables)
    lengths = {"rows_sha256": tiles, "sections": sections}
    if header["kept"] is not None:
        lengths["kept"] = 2 * -(-grid.source_cells // 8)
    if header["remap"] is not None:
        lengths["remap"] = k
        if max(header["remap"]) >= k:
            raise ValueError(f"remap names an output that is none of 0 to {k - 1}")
    for name, length in lengths.items():
        if len(header[name]) != length:
            raise ValueError(f"{name} must have the length {length}, has {len(header[name])}")
    _check_plane(header)
    metric_p = float(header["metric_p"])
    if not math.isclose(
        header["quantisation_km"], coarse_radius_km(1, grid.spacing_km, metric_p), rel_tol=_ROUNDING
    ):
        raise ValueError("quantisation_km is not that of the grid")
    if header["epsilon_certified"] > header["epsilon_per_km"] * (1 + _ROUNDING):
        raise ValueError("epsilon_certified is more than epsilon_per_km")


def _check_plane(header: Mapping[str, Any]) -> None:
    planar, fit = header["projection"] is None, header["plane_fit"]
    degrees: Iterable[Any] = [*header["outputs"]["lon"], *header["outputs"]["lat"]]
    if any((value is None) != planar for value in degrees):
        raise ValueError("outputs must have degrees where there is a projection, and there only")
    if fit is None:
        return
    if planar:
        raise ValueError("plane_fit has no projection")
    if abs(fit["middle_lat"]) + fit["half_lat"] >= 90:
        raise ValueError("plane_fit reaches a pole")
    if any(len({len(row) for row in fit[axis]}) > 1 for axis in ("x", "y")):
        raise ValueError("plane_fit has rows of different lengths")
