"""From coordinates in any reference system to longitude and latitude on WGS 84, in degrees."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line

# OGC's name for longitude and latitude on WGS 84, in that order; EPSG's code has them the other way round.
DEGREES = "OGC:CRS84"
_WGS84 = 4326


def to_degrees(xy: NDArray[np.float64], crs: Any, source: str) -> NDArray[np.float64]:
    """Return lon and lat of points given in a reference system; on WGS 84 they keep their bits.

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
    from pyproj import Transformer
    from pyproj.exceptions import ProjError

    found = _known(crs, source)
    if _is_wgs84(found):
        return xy
    try:
        transformer = Transformer.from_crs(found, DEGREES, always_xy=True)
    except ProjError as error:
        raise DataError(f"{source}: no way from {found.name} to degrees: {first_line(error)}") from None
    return np.stack(transformer.transform(xy[:, 0], xy[:, 1]), axis=-1)


def metres_per_unit(crs: Any, source: str) -> float | None:
    """Return how long the unit of a projected system is, in metres; None of one in degrees.

    Raises
    ------
    DataError
        If the system is not known.
    """
    found = _known(crs, source)
    return float(found.axis_info[0].unit_conversion_factor) if found.is_projected else None


def check_wgs84(crs: Any, source: object) -> None:
    """Refuse a reference system other than degrees on WGS 84.

    Parameters
    ----------
    crs
        Anything that pyproj understands, such as PROJJSON; None if the file does not name it.
    source
        What to name in the error.

    Raises
    ------
    DataError
        If it is another one, or not known.
    """
    found = None if crs is None else _known(crs, source)
    if found is None or not _is_wgs84(found):
        name = "unknown" if found is None else found.name
        raise DataError(f"{source}: has the crs {name}; coordinates must be degrees on WGS 84 (EPSG:4326)")


def _known(crs: Any, source: object) -> Any:
    from pyproj import CRS
    from pyproj.exceptions import CRSError

    try:
        return CRS.from_user_input(crs)
    except CRSError as error:
        raise DataError(
            f"{source}: its coordinate reference system is not known: {first_line(error)}"
        ) from None


def _is_wgs84(crs: Any) -> bool:
    return bool(crs.equals(DEGREES, ignore_axis_order=True)) or crs.to_epsg() == _WGS84
