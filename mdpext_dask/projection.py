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
# Where the distortion is evaluated; it grows with the distance from the centre.
_BEARINGS, _RADII = 64, 9
_LARGEST_RADIUS_KM = 5_000.0
# Below the distance of the first conjugate point of any place, π · 6356.75 km = 19,970 km; see PROOF.md.
_ANTIPODE_KM = 19_900.0


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

    def to_disc(self, lonlat: NDArray[np.float64], radius_km: float) -> NDArray[np.float64]:
        """Project places anywhere on Earth into the disc of `radius_km` around the centre.

        A place at the distance r from the centre keeps its bearing and gets the distance
        min(r, radius, antipode − r). That lengthens no curve on the ground (PROOF.md, section 3), and
        places in the disc stay where they are.

        Parameters
        ----------
        lonlat
            lon and lat in degrees, float64 of shape (n, 2).
        radius_km
            Radius of the disc, in km.

        Returns
        -------
        float64 of shape (n, 2), in km.
        """
        xy = self.to_plane(lonlat)
        # Next to the antipode there is no bearing, and PROJ may answer with infinity: the centre it is.
        xy[~np.isfinite(xy).all(axis=1)] = 0.0
        r = np.hypot(xy[:, 0], xy[:, 1])
        target = np.minimum(radius_km, np.maximum(_ANTIPODE_KM - r, 0.0))
        return np.asarray(xy * np.minimum(1.0, target / np.maximum(r, 1e-9))[:, None])

    def distortion(self, radius_km: float) -> float:
        """Return the largest relative stretching of a ground distance in a disc around the centre.

        With s the largest scale factor (the larger semi-axis of Tissot's indicatrix) in the disc, a
        geodesic of length d maps to a curve no longer than s d, and the straight segment in the plane is
        no longer than that curve; geodesics between places of the disc stay in it. So planar distance is
        at most (1 + distortion) times ground distance with distortion = s − 1.

        Parameters
        ----------
        radius_km
            Radius of the disc, in km.

        Raises
        ------
        SpecError
            If it exceeds 2 %: the box is too large for one plane.
        """
        if radius_km > _LARGEST_RADIUS_KM:
            raise SpecError(f"domain: a box that reaches {radius_km:.0f} km is too large for one plane")
        bearing = np.linspace(0, 2 * np.pi, _BEARINGS, endpoint=False)
        r = np.linspace(0, radius_km, _RADII)[1:, None]
        x, y = r * np.sin(bearing), r * np.cos(bearing)
        lonlat = self.to_degrees(np.stack([x.ravel(), y.ravel()], axis=-1))
        factors = self._proj.get_factors(lonlat[:, 0], lonlat[:, 1])
        # The factors are differentiated numerically; 1e-7 covers their noise (seen: 4e-8).
        distortion = max(float(np.max(factors.tissot_semimajor)) - 1.0, 0.0) + 1e-7
        if not distortion <= LARGEST_DISTORTION:
            raise SpecError(
                f"domain: a box that reaches {radius_km:.0f} km from its centre distorts distances by "
                f"{distortion:.1%}; at most {LARGEST_DISTORTION:.0%} is allowed, choose a smaller bbox"
            )
        return distortion

    def grid_mapping(self) -> dict[str, Any]:
        """Return CF grid mapping attributes, with the CRS as WKT."""
        from pyproj import CRS

        return dict(CRS.from_user_input(self.definition).to_cf())
