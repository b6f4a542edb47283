"""A local planar projection in km, and what it costs.

The mechanism is built and certified in the plane, but the promise is made for distance on the
ground. An azimuthal equidistant projection centred on the box keeps the two within a few parts in a
million for a city; the rest is computed and charged to ε. The plane may be turned about its origin, so
that a grid along its axes fits a slanted place; that changes no Euclidean distance.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError
from mdpext_dask.readers.longitudes import FULL_TURN, HALF_TURN, east_of

# Beyond this, "planar distance" no longer says much about the ground.
LARGEST_DISTORTION = 0.02
# Points at which the distortion is evaluated; it grows with the distance from the centre.
_BEARINGS, _RADII = 64, 9
# A larger plane would always distort more than that.
LARGEST_RADIUS_KM = 5_000.0
# Below the distance of the first conjugate point of any place, π · 6356.75 km = 19,970 km; see PROOF.md.
_ANTIPODE_KM = 19_900.0
# Half the side of a square about the centre: three times any disc, and what lies outside it, on Earth, is
# where projections may fail, beyond 18,900 km. See `folded`.
_SQUARE_KM = 13_400.0
# EPSG codes of an affine map x' = A0 + A1 x + A2 y, y' = B0 + B1 x + B2 y.
_AFFINE_METHOD = 9624
_KILOMETRE = {"type": "LinearUnit", "name": "kilometre", "conversion_factor": 1000}
_AFFINE_PARAMETERS = (
    ("A0", 8623, _KILOMETRE), ("A1", 8624, "unity"), ("A2", 8625, "unity"),
    ("B0", 8639, _KILOMETRE), ("B1", 8640, "unity"), ("B2", 8641, "unity"),
)  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """An azimuthal equidistant projection on WGS 84.

    Parameters
    ----------
    centre_lon, centre_lat
        Centre in degrees.
    rotation_deg
        How far the axes of the plane are turned, counter-clockwise, in degrees: at 0, x points to the east of
        the centre and y to the north.
    """

    centre_lon: float
    centre_lat: float
    rotation_deg: float = 0.0

    @classmethod
    def centred_on(cls, west: float, south: float, east: float, north: float) -> "Projection":
        """Return the projection centred on a box given in degrees, west > east across the antimeridian."""
        lon = float(west + east_of(west, east)) / 2
        return cls(lon - FULL_TURN if lon > HALF_TURN else lon, float(south + north) / 2)

    @property
    def definition(self) -> str:
        """The projection before it is turned, as a PROJ string; coordinates are in km."""
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
        return self._turned(np.stack([x, y], axis=-1), -self.rotation_deg)

    def point_to_plane(self, lon: float, lat: float) -> tuple[float, float]:
        """Project one point, lon and lat in degrees: the same numbers as :meth:`to_plane`, in less time."""
        x, y = self._proj(lon, lat)
        if self.rotation_deg == 0:
            return x, y
        cosine, sine = _turn(-self.rotation_deg)
        return cosine * x - sine * y, sine * x + cosine * y

    def to_degrees(self, xy_km: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return lon and lat in degrees of points of shape (n, 2) in km."""
        x, y = self._turned(xy_km, self.rotation_deg).T
        lon, lat = self._proj(x, y, inverse=True)
        return np.stack([lon, lat], axis=-1)

    def _turned(self, xy_km: NDArray[np.float64], degrees: float) -> NDArray[np.float64]:
        """Turn points about the origin, counter-clockwise; by nothing, their bits stay as they are."""
        if degrees == 0:
            return xy_km
        cosine, sine = _turn(degrees)
        x, y = xy_km.T
        with np.errstate(invalid="ignore"):  # of infinities, next to the antipode
            return np.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)

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
        if radius_km > LARGEST_RADIUS_KM:
            raise SpecError(
                f"domain: a box that reaches {radius_km:.0f} km is too large for one plane; the order of "
                "bbox is west, south, east, north"
            )
        bearing = np.linspace(0, 2 * np.pi, _BEARINGS, endpoint=False)
        r = np.linspace(0, radius_km, _RADII)[1:, None]
        x, y = r * np.sin(bearing), r * np.cos(bearing)
        # In the plane as it is before it is turned: the disc is the same, and so is the answer, to the bit.
        lon, lat = self._proj(x.ravel(), y.ravel(), inverse=True)
        factors = self._proj.get_factors(lon, lat)
        # The factors are differentiated numerically; 1e-7 covers their noise (seen: 4e-8).
        distortion = max(float(np.max(factors.tissot_semimajor)) - 1.0, 0.0) + 1e-7
        if not distortion <= LARGEST_DISTORTION:
            raise SpecError(
                f"domain: a box that reaches {radius_km:.0f} km from its centre distorts distances by "
                f"{distortion:.1%}; at most {LARGEST_DISTORTION:.0%} is allowed, choose a smaller bbox"
            )
        return distortion

    def grid_mapping(self) -> dict[str, Any]:
        """Return CF grid mapping attributes, with the CRS of the plane as WKT.

        CF has no name for a turned plane; there the WKT says it all, and a comment how to turn back.
        """
        from pyproj import CRS

        plane = CRS.from_user_input(self.definition)
        if self.rotation_deg == 0:
            return dict(plane.to_cf())
        turned = CRS.from_json_dict(self._derived(plane.to_json_dict()))
        return {
            **turned.to_cf(),
            "rotation_deg": self.rotation_deg,
            "comment": "x and y are turned counter-clockwise by rotation_deg: east = x cos(rotation_deg) - "
            "y sin(rotation_deg), north = x sin(rotation_deg) + y cos(rotation_deg), in km, in the azimuthal "
            "equidistant projection that the CRS is derived from",
        }

    def _derived(self, plane: dict[str, Any]) -> dict[str, Any]:
        """Return the turned plane as PROJJSON: derived from `plane` by an affine map."""
        cosine, sine = _turn(self.rotation_deg)
        values = 0.0, cosine, sine, 0.0, -sine, cosine
        parameters = [
            {"name": name, "value": value, "unit": unit, "id": _epsg(code)}
            for (name, code, unit), value in zip(_AFFINE_PARAMETERS, values, strict=True)
        ]
        method = {"name": "Affine parametric transformation", "id": _epsg(_AFFINE_METHOD)}
        return {
            "$schema": plane.pop("$schema"),
            "type": "DerivedProjectedCRS",
            "name": "azimuthal equidistant, turned",
            "base_crs": plane,
            "conversion": {"name": "rotation", "method": method, "parameters": parameters},
            "coordinate_system": plane["coordinate_system"],
        }


def _turn(degrees: float) -> tuple[float, float]:
    """Return the cosine and the sine of an angle."""
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def folded(xy_km: NDArray[np.float64], radius_km: float, metric_p: float) -> NDArray[np.float64]:
    """Move places anywhere in the plane of a projection towards its centre, and bring no two further apart.

    Places in the disc of `radius_km` around the centre stay where they are. For p = 2 all others come into
    it: a place at the distance r keeps its bearing and gets the distance min(r, radius, antipode − r), which
    lengthens no curve on the ground. For other p, where distances are those of the plane, coordinates are cut
    off at ± half of what the larger of them is short of :data:`_SQUARE_KM`. See PROOF.md, section 3.

    Parameters
    ----------
    xy_km
        Places as they are projected, float64 of shape (n, 2), in km: NaN or infinite next to the antipode,
        where there is no bearing.
    radius_km
        Radius of the disc, in km.
    metric_p
        Exponent of the metric.

    Returns
    -------
    float64 of shape (n, 2), in km.
    """
    known = np.isfinite(xy_km).all(axis=1, keepdims=True)
    xy = np.where(known, xy_km, 0.0)
    if metric_p == 2:
        with np.errstate(over="ignore"):
            r = np.where(known, np.hypot(xy[:, :1], xy[:, 1:]), np.inf)
        target = np.minimum(radius_km, np.maximum(_ANTIPODE_KM - r, 0.0))
        return np.asarray(xy * np.minimum(1.0, target / np.maximum(r, 1e-9)))
    most = np.maximum(_SQUARE_KM - np.abs(xy).max(axis=1, keepdims=True), 0.0) / 2
    return np.clip(xy, -most, most)


def _epsg(code: int) -> dict[str, Any]:
    return {"authority": "EPSG", "code": code}
