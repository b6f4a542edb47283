"""Numbers on a lattice as pictures in the page: PNG in a data URL. matplotlib is imported late."""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.grid import Box

# Perceptually uniform, in grey as well, and told apart in all common kinds of colour blindness; what is more
# is further from what is around it.
ON_DARK, ON_LIGHT = "viridis", "viridis_r"
_TABLE = 256
# Of the picture of a road network, on its longer side; and how strong one node is, and many.
_ROAD_PIXELS, _ROAD_ALPHA = 640, (0.6, 1.0)
_GREY = 128


def field_png(shares: NDArray[np.float64], colours: str) -> str:
    """Return a field as a picture, a pixel a number, north up.

    Parameters
    ----------
    shares
        float64 of shape (n_x, n_y), 0 for the first colour and 1 for the last, as are those beyond;
        transparent where it is not a number.
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


def points_png(xy_km: NDArray[np.float64], box: Box) -> str:
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


def colours_of(shares: NDArray[np.float64], colours: str) -> list[str]:
    """Return the colours of numbers from 0 to 1, as ``#rrggbb``."""
    table = colour_table(colours)
    at = np.clip(shares * (_TABLE - 1), 0, _TABLE - 1).astype(int)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in table[at].tolist()]


def _png(rgba: NDArray[Any]) -> str:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rgba)).save(content, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")
