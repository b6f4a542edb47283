"""A local planar projection in km, and what it costs.

The mechanism is built and certified in the plane, but the promise is made for distance on the
ground. An azimuthal equidistant projection centred on the box keeps the two within a few parts in a
million for a city; the rest is computed and charged to ε.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError

# Beyond this, "planar distance" no longer says much about the ground.
LARGEST_DISTORTION = 0.02
_PROBES = 33  # points a side at which the distortion is evaluated
_MARGIN = 0.05  # geodesics bulge out of a box; the probes reach this share of its size beyond it


@dataclass(frozen=True)
class Projection:
    """An azimuthal equidistant projection on WGS 84.

    Parameters
    ----------
    centre_lon, centre_lat
        Centre in degrees.
    """

    centre_lon: float
    centre_lat: float

    @classmethod
    def centred_on(cls, west: float, south: float, east: float, north: float) -> "Projection":
        """Return the projection centred on a box given in degrees."""
        return cls(float(west + east) / 2, float(south + north) / 2)

    @property
    def definition(self) -> str:
        """The projection as a PROJ string; coordinates are in km."""
        return (
            f"+proj=aeqd +lat_0={self.centre_lat!r} +lon_0={self.centre_lon!r} "
            "+x_0=0 +y_0=0 +ellps=WGS84 +units=km +no_defs"
        )

    @cached_property
    def _proj(self) -> Any:
        from pyproj import Proj

        return Proj(self.definition)

    def to_plane(self, lonlat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Project points of shape (n, 2), lon and lat in degrees, to x and y in km."""
        x, y = self._proj(lonlat[:, 0], lonlat[:, 1])
        return np.stack([x, y], axis=-1)

    def to_degrees(self, xy_km: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return lon and lat in degrees of points of shape (n, 2) in km."""
        lon, lat = self._proj(xy_km[:, 0], xy_km[:, 1], inverse=True)
        return np.stack([lon, lat], axis=-1)

    def distortion(self, west_km: float, south_km: float, east_km: float, north_km: float) -> float:
        """Return the largest relative stretching of a ground distance over a box.

        With s the largest scale factor (the larger semi-axis of Tissot's indicatrix) over the box and
        a margin around it, a geodesic of length d maps to a curve no longer than s d, and the straight
        segment in the plane is no longer than that curve: planar distance ≤ (1 + distortion) · ground
        distance with distortion = s − 1. The scale factors are evaluated on a 33 × 33 lattice; they
        grow away from the centre, so the largest lies on the border, which the lattice holds.

        Raises
        ------
        SpecError
            If it exceeds 2 %: the box is too large for one plane.
        """
        margin_x = _MARGIN * (east_km - west_km)
        margin_y = _MARGIN * (north_km - south_km)
        x, y = np.meshgrid(
            np.linspace(west_km - margin_x, east_km + margin_x, _PROBES),
            np.linspace(south_km - margin_y, north_km + margin_y, _PROBES),
        )
        lonlat = self.to_degrees(np.stack([x.ravel(), y.ravel()], axis=-1))
        factors = self._proj.get_factors(lonlat[:, 0], lonlat[:, 1])
        # The factors are differentiated numerically; 1e-7 covers their noise (seen: 4e-8).
        distortion = max(float(np.max(factors.tissot_semimajor)) - 1.0, 0.0) + 1e-7
        if not distortion <= LARGEST_DISTORTION:
            raise SpecError(
                f"domain: a box of {east_km - west_km:.0f} km x {north_km - south_km:.0f} km distorts "
                f"distances by {distortion:.1%}; at most {LARGEST_DISTORTION:.0%} is allowed, choose a "
                "smaller bbox"
            )
        return distortion

    def grid_mapping(self) -> dict[str, Any]:
        """Return CF grid mapping attributes, with the CRS as WKT."""
        from pyproj import CRS

        return dict(CRS.from_user_input(self.definition).to_cf())
