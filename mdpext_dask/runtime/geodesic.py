"""Where a place lies in an azimuthal equidistant plane, with NumPy alone.

The store projects with PROJ, which takes its geodesics from Karney's series. Here the inverse problem is
solved with T. Vincenty's nested equations, "Direct and inverse solutions of geodesics on the ellipsoid with
application of nested equations" (Survey Review 23, 1975), whose terms beyond the cube of the flattening are
left out. Compared with PROJ over the whole Earth: distances within 0.1 mm up to 19,900 km, places within 1
cm there, within 1 mm up to 19,000 km and within 1 µm in a city around the centre. These are comparisons,
in the tests, not proofs.

In a box around a city the plane is two polynomials instead, so that a place costs tens of products and no
geodesic. East and west of the centre the plane is mirrored, so with u the difference of longitudes and v that
of latitudes, each scaled to [-1, 1],

    x = u Σ_ij X_ij u^2i v^j,        y = Σ_ij Y_ij u^2i v^j.

The coefficients are fitted when a city is exported, and kept only if they agree with PROJ to well below a
millimetre at many places that they were not fitted to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.problem.projection import Projection

Array = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]
# Takes differences of longitudes, and latitudes, both in degrees, to x and y in km.
Plane = Callable[[Array, Array], tuple[Array, Array]]

# Largest difference between :class:`PlainProjection` and PROJ, in km: after `folded` everywhere, and in the
# plane up to 19,000 km from its centre. One of these two millimetres is PROJ's, which takes what is closer
# than that to the centre, or to its meridian, for being there.
PROJECTION_ERROR_KM = 2e-6
# The ellipsoid WGS 84: equatorial radius in km, flattening, polar radius.
_A, _F = 6378.137, 1 / 298.257223563
_B = _A * (1 - _F)
_SECOND_ECCENTRICITY_SQUARED = (_A**2 - _B**2) / _B**2
# Only next to the antipode are more steps needed; beyond 19,900 km there are places that never converge.
_MOST_STEPS, _CONVERGED = 300, 1e-13
_LEAST_TERMS, _MOST_TERMS = 2, 6
# Largest error of the polynomials: a hundredth of what is promised.
_CLOSE_ENOUGH_KM = 1e-8
_NODES, _CHECKED = 32, 97
# Points that are evaluated together stay in a processor's cache.
_AT_ONCE = 8192
# Wider boxes are not worth a polynomial.
_WIDEST_DEG = 20.0


@dataclass(frozen=True)
class PlaneFit:
    """Polynomials in the scaled differences u and v; see the module's text.

    Parameters
    ----------
    half_lon, middle_lat, half_lat
        The box in degrees: longitudes up to `half_lon` from the centre, latitudes up to `half_lat` from
        `middle_lat`.
    x, y
        Coefficients in km: x[j][i] is that of u^(2 i) v^j.
    """

    half_lon: float
    middle_lat: float
    half_lat: float
    x: Table
    y: Table

    @classmethod
    def of(cls, plane: Plane, half_lon: float, middle_lat: float, half_lat: float) -> "PlaneFit | None":
        """Fit the polynomials of least degree that are good enough, or return None if there are none."""
        if not (half_lon <= _WIDEST_DEG and half_lat <= _WIDEST_DEG and abs(middle_lat) + half_lat < 90):
            return None
        nodes = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
        u, v = (axis.ravel() for axis in np.meshgrid(nodes[: _NODES // 2], nodes, indexing="ij"))
        x, y = plane(half_lon * u, middle_lat + half_lat * v)
        between = np.linspace(-1, 1, _CHECKED)
        u2, v2 = (axis.ravel() for axis in np.meshgrid(between, between, indexing="ij"))
        east, lat = half_lon * u2, middle_lat + half_lat * v2
        truth = np.stack(plane(east, lat))
        for terms in range(_LEAST_TERMS, _MOST_TERMS + 1):
            basis = np.einsum("ni,nj->nji", np.vander(u * u, terms, True), np.vander(v, 2 * terms, True))
            basis = basis.reshape(len(u), -1)
            found = [np.linalg.lstsq(basis, target, rcond=None)[0] for target in (x / u, y)]
            fit = cls(half_lon, middle_lat, half_lat, *(_table(c.reshape(2 * terms, terms)) for c in found))
            if np.abs(np.stack(fit.many(east, lat)) - truth).max() <= _CLOSE_ENOUGH_KM:
                return fit
        return None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PlaneFit":
        """Return the fit whose fields a file holds."""
        half_lon, middle_lat, half_lat = (float(content[k]) for k in ("half_lon", "middle_lat", "half_lat"))
        return cls(half_lon, middle_lat, half_lat, _table(content["x"]), _table(content["y"]))

    def covers(self, east: Any, lat: Any) -> Any:
        """Return whether places lie in the box.

        Parameters
        ----------
        east, lat
            Differences to the centre's longitude, and latitudes, in degrees: numbers, or arrays of one shape.
        """
        return (abs(east) <= self.half_lon) & (abs(lat - self.middle_lat) <= self.half_lat)

    def at(self, east: Any, lat: Any) -> tuple[Any, Any]:
        """Return x and y in km of places in the box: the same bits for one place as for many."""
        u, v = east / self.half_lon, (lat - self.middle_lat) / self.half_lat
        square = u * u
        return u * _horner(self.x, square, v), _horner(self.y, square, v)

    def many(self, east: Array, lat: Array) -> tuple[Array, Array]:
        """Return what :meth:`at` does, each of shape (n,), some places at a time."""
        x, y = np.empty_like(east), np.empty_like(east)
        for first in range(0, len(east), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            x[part], y[part] = self.at(east[part], lat[part])
        return x, y


@dataclass(frozen=True)
class PlainProjection(Projection):
    """The same plane as its base class, without pyproj; there is no way back to degrees.

    Parameters
    ----------
    fit
        The plane around the centre as polynomials; without, geodesics are solved everywhere.
    """

    fit: PlaneFit | None = None

    @cached_property
    def _proj(self) -> "PlainProjection":
        return self

    def __call__(self, lon: Any, lat: Any) -> tuple[Any, Any]:
        """Return x and y in km before the plane is turned; see :func:`geodesic_plane`.

        Parameters
        ----------
        lon, lat
            Degrees: two numbers, or float64 of shape (n,).
        """
        if not isinstance(lon, float):
            return self._many(lon, lat)
        east = lon - self.centre_lon
        east -= 360 * round(east / 360)
        if self.fit is not None and self.fit.covers(east, lat):
            return self.fit.at(east, lat)
        x, y = self._many(np.array([lon]), np.array([lat]))
        return float(x[0]), float(y[0])

    def _many(self, lon: Array, lat: Array) -> tuple[Array, Array]:
        east = around(lon - self.centre_lon)
        if self.fit is None:
            return geodesic_plane(self.centre_lat, east, lat)
        near = self.fit.covers(east, lat)
        if near.all():
            return self.fit.many(east, lat)
        x, y = np.empty_like(east), np.empty_like(east)
        x[near], y[near] = self.fit.many(east[near], lat[near])
        x[~near], y[~near] = geodesic_plane(self.centre_lat, east[~near], lat[~near])
        return x, y


def around(east: Array) -> Array:
    """Return differences of longitudes the short way round, in degrees, in [-180, 180]."""
    return np.asarray(east - 360 * np.rint(east / 360))


def geodesic_plane(centre_lat: float, east: Array, lat: Array) -> tuple[Array, Array]:
    """Return distance and bearing from a centre, as x and y of the azimuthal equidistant plane, in km.

    Parameters
    ----------
    centre_lat
        Latitude of the centre, in degrees.
    east
        Longitudes less the centre's, in degrees, in [-180, 180], float64 of shape (n,).
    lat
        Latitudes in degrees, float64 of shape (n,).

    Returns
    -------
    x and y, each of shape (n,); NaN for places near the antipode, all of them further away than 19,900 km,
    where the equations do not converge.
    """
    x, y = np.full_like(east, np.nan), np.full_like(east, np.nan)
    longitude = np.radians(east)
    sphere = longitude.copy()
    # Reduced latitudes.
    beta1, beta2 = (np.arctan((1 - _F) * np.tan(np.radians(v))) for v in (np.float64(centre_lat), lat))
    sin1, cos1, sin2, cos2 = np.sin(beta1), np.cos(beta1), np.sin(beta2), np.cos(beta2)
    left = np.arange(len(east))
    for _ in range(_MOST_STEPS):
        sin_l, cos_l = np.sin(sphere[left]), np.cos(sphere[left])
        across = cos2[left] * sin_l
        along = cos1 * sin2[left] - sin1 * cos2[left] * cos_l
        sin_s = np.hypot(across, along)
        cos_s = sin1 * sin2[left] + cos1 * cos2[left] * cos_l
        arc = np.arctan2(sin_s, cos_s)
        # At the centre itself, and along the equator, the quotients are 0 by convention.
        sin_a = cos1 * across / np.where(sin_s > 0, sin_s, 1)
        cos_a2 = 1 - sin_a * sin_a
        cos_m = np.where(cos_a2 > 0, cos_s - 2 * sin1 * sin2[left] / np.where(cos_a2 > 0, cos_a2, 1), 0)
        c = _F / 16 * cos_a2 * (4 + _F * (4 - 3 * cos_a2))
        nested = arc + c * sin_s * (cos_m + c * cos_s * (2 * cos_m**2 - 1))
        further = longitude[left] + (1 - c) * _F * sin_a * nested
        done = np.abs(further - sphere[left]) <= _CONVERGED
        sphere[left] = further
        scale = _per_sine(*(values[done] for values in (sin_s, cos_s, arc, cos_a2, cos_m)))
        x[left[done]], y[left[done]] = scale * across[done], scale * along[done]
        left = left[~done]
        if not len(left):
            break
    return x, y


def _per_sine(sin_s: Array, cos_s: Array, arc: Array, cos_a2: Array, cos_m: Array) -> Array:
    """Return the geodesic's length in km by the sine of its arc on the sphere."""
    root = np.sqrt(1 + cos_a2 * _SECOND_ECCENTRICITY_SQUARED)
    k = (root - 1) / (root + 1)
    a, b = (1 + k * k / 4) / (1 - k), k * (1 - 3 / 8 * k * k)
    # At the centre the arc and its sine are 0, and their quotient 1.
    quotient = np.where(sin_s > 0, arc / np.where(sin_s > 0, sin_s, 1), 1.0)
    cubic = b / 6 * cos_m * (4 * sin_s**2 - 3) * (4 * cos_m**2 - 3)
    correction = b * (cos_m + b / 4 * (cos_s * (2 * cos_m**2 - 1) - cubic))
    return np.asarray(_B * a * (quotient - correction))


def _table(rows: Any) -> Table:
    return tuple(tuple(map(float, row)) for row in rows)


def _horner(table: Table, square: Any, v: Any) -> Any:
    """Evaluate Σ_ij c[j][i] square^i v^j, for numbers or arrays."""
    total: Any = 0.0
    for row in reversed(table):
        inner: Any = row[-1]
        for coefficient in row[-2::-1]:
            inner = inner * square + coefficient
        total = total * v + inner
    return total
