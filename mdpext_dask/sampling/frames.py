"""Points in a GeoDataFrame, reported: a GeoDataFrame again, in the same reference system."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from mdpext_dask.errors import DataError, ImplausibleWarning, SpecError
from mdpext_dask.problem.plausible import AccuraciesSeen
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.reference_systems import to_degrees
from mdpext_dask.runtime.location_sampler import OutsideRule, Reporter
from mdpext_dask.runtime.sticky import StickyKey

if TYPE_CHECKING:
    from mdpext_dask.runtime.ledger import Charges

_PURPOSE = "sampling from a GeoDataFrame"


def sample_frame(
    mechanism: Reporter,
    points: Any,
    *,
    outside: OutsideRule = "nearest",
    users: Sequence[str] | None = None,
    sticky: StickyKey | None = None,
    budget: "Charges | None" = None,
    place_km: float | None = None,
    accuracy_m: ArrayLike | None = None,
) -> Any:
    """Draw one report for each point of a GeoDataFrame.

    Only geometry and index are returned: no other column is blurred, and names, times and the like may say
    more than the place. Reset the index first where it says who somebody is.

    Parameters
    ----------
    mechanism
        An open store, or an exported city.
    points
        GeoDataFrame or GeoSeries of points, in any reference system.
    outside, users, sticky, budget, place_km
        As for :meth:`Mechanism.sample_points`; points that are dropped have no row.
    accuracy_m
        How well each point is known, in m, such as a column of `points`; NaN where that is not known. A
        warning, an :class:`~mdpext_dask.errors.ImplausibleWarning`, says how many are worse than 1/ε.

    Returns
    -------
    GeoDataFrame of the reported places, in the reference system and with the index of `points`.

    Raises
    ------
    SpecError
        If it is no GeoDataFrame or GeoSeries, or has no reference system; if the mechanism is planar; or if
        geopandas is not installed; or if accuracies are not one distance for each point.
    DataError
        If a geometry is missing, empty or no point, or the reference system is not known; and as for
        :meth:`Mechanism.sample_points`.
    BudgetExceeded
        If a user has too few releases left.
    """
    geopandas = import_optional("geopandas", _PURPOSE)
    if not isinstance(points, geopandas.GeoDataFrame | geopandas.GeoSeries):
        raise SpecError(f"points: must be a GeoDataFrame or a GeoSeries, got {type(points).__name__}")
    if points.crs is None:
        raise SpecError("points: have no reference system; say which with set_crs, such as set_crs(4326)")
    shapes = points.geometry
    usable = (shapes.geom_type == "Point").to_numpy() & ~shapes.is_empty.to_numpy()
    if not usable.all():
        first = int(np.argmin(usable)) + 1
        raise DataError(f"points: {int((~usable).sum())} geometries are no points, the first in row {first}")
    xy = np.stack([shapes.x.to_numpy(), shapes.y.to_numpy()], axis=-1).astype(np.float64)
    if accuracy_m is not None:
        seen = AccuraciesSeen(mechanism.epsilon_per_km)
        seen.add(accuracy_m, len(points))
        if said := seen.said():
            warnings.warn(said, ImplausibleWarning, stacklevel=2)
    outputs, _ = mechanism.sample_points(
        to_degrees(xy, points.crs, "points"),
        outside=outside,
        users=users,
        sticky=sticky,
        budget=budget,
        place_km=place_km,
    )
    reported = outputs >= 0
    lonlat = mechanism.output_lonlat[outputs[reported]]
    places = geopandas.points_from_xy(lonlat[:, 0], lonlat[:, 1])
    frame = geopandas.GeoDataFrame(geometry=places, index=points.index[reported], crs=4326)
    return frame.to_crs(points.crs)
