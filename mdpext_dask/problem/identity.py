"""What a mechanism is: one digest over its bytes and over everything that gives them a meaning."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection

# Fixed for ever: sticky answers and the tags in ledgers depend on it.
_FORMAT = "mdpext mechanism, version 1"
# The numbers of the promise that are part of the identity.
_PROMISE = "epsilon_per_km", "epsilon_certified", "metric_p"


def mechanism_sha256(
    content_sha256: str,
    promise: Mapping[str, Any],
    plane: tuple[Grid, Projection | None],
    kept: NDArray[np.bool_],
    outputs: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> str:
    """Return the identity of a mechanism: SHA-256 (hex).

    Two mechanisms with equal bytes are two if they differ in where their records or outputs lie, or in what
    they promise. A remap is no part of it: it is applied after the draw, and is no other release.

    Parameters
    ----------
    content_sha256
        Digest of the certified bytes, the description of their array (with its fill value) included.
    promise
        ``epsilon_per_km`` and ``epsilon_certified``, in 1/km, and ``metric_p``: numbers, or their texts.
    plane
        The records, and where on Earth they lie; None without a place on Earth.
    kept
        Source cells of the region, bool of shape (cells_x, cells_y).
    outputs
        Where the outputs lie, in their order: x and y in km, lon and lat in degrees (NaN without a place on
        Earth), each float64 of shape (K, 2).

    Raises
    ------
    ValueError
        If the promise is not three numbers.
    """
    grid, projection = plane
    places = np.ascontiguousarray(np.concatenate(outputs, axis=1), dtype="<f8")
    places[np.isnan(places)] = np.nan  # there are many of them
    turned = () if projection is None else ("centre_lon", "centre_lat", "rotation_deg")
    document = {
        "format": _FORMAT,
        "content_sha256": content_sha256,
        "promise": [float(promise[name]).hex() for name in _PROMISE],
        "origin_and_side": [float(v).hex() for v in (grid.west_km, grid.south_km, grid.cell_km)],
        "cells": [grid.cells_x, grid.cells_y, *grid.refine],
        "projection": [float(getattr(projection, name)).hex() for name in turned],
        "kept": np.packbits(kept).tobytes().hex(),
        "outputs_sha256": hashlib.sha256(places.data).hexdigest(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
