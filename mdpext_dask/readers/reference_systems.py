"""From coordinates in any reference system to longitude and latitude on WGS 84, in degrees."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line

# OGC's name for longitude and latitude on WGS 84, in that order.
DEGREES = "OGC:CRS84"


def to_degrees(xy: NDArray[np.float64], crs: Any, source: str) -> NDArray[np.float64]:
    """Return lon and lat of points given in a reference system; on WGS 84 they are taken as they are.

    Parameters
    ----------
    xy
        float64 of shape (n, 2), in the order east, north.
    crs
        The system, as pyproj takes it: a code such as ``"EPSG:32633"``, or WKT.
    source
        What to name in the error.

    Raises
    ------
    DataError
        If the system is not known.
    """
    transformer = _transformer(crs, source)
    if transformer is None:
        return xy
    return np.stack(transformer.transform(xy[:, 0], xy[:, 1]), axis=-1)


def metres_per_unit(crs: Any, source: str) -> float | None:
    """Return how long the unit of a projected system is, in metres; None of one in degrees.

    Raises
    ------
    DataError
        If the system is not known.
    """
    found = _crs(crs, source)
    return float(found.axis_info[0].unit_conversion_factor) if found.is_projected else None


def _crs(crs: Any, source: str) -> Any:
    from pyproj import CRS
    from pyproj.exceptions import CRSError

    try:
        return CRS.from_user_input(crs)
    except CRSError as error:
        raise DataError(
            f"{source}: its coordinate reference system is not known: {first_line(error)}"
        ) from None


def _transformer(crs: Any, source: str) -> Any:
    from pyproj import CRS, Transformer
    from pyproj.exceptions import ProjError

    found, degrees = _crs(crs, source), CRS.from_user_input(DEGREES)
    # What is on WGS 84 keeps its bits.
    if found.equals(degrees, ignore_axis_order=True) or found.to_epsg() == 4326:
        return None
    try:
        return Transformer.from_crs(found, degrees, always_xy=True)
    except ProjError as error:
        raise DataError(f"{source}: no way from {found.name} to degrees: {first_line(error)}") from None
