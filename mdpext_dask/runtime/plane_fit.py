"""The plane around a city as two polynomials, so that a place costs tens of products and no geodesic.

East of the centre and west of it the plane is mirrored, so with u the difference of longitudes and v that of
latitudes, each scaled to [-1, 1],

    x = u Σ_ij X_ij u^2i v^j,        y = Σ_ij Y_ij u^2i v^j.

The coefficients are fitted when a city is exported, and kept only if they answer as PROJ does to well below a
millimetre at many places that they were not fitted to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST_TERMS, _MOST_TERMS = 2, 6
# Of the largest difference that is let through, a hundredth of what is promised.
_CLOSE_ENOUGH_KM = 1e-8
_NODES, _CHECKED = 32, 97
# Points that are evaluated together stay in a processor's cache.
_AT_ONCE = 8192
# Wider boxes are not worth a polynomial.
_WIDEST_DEG = 20.0

# Takes differences of longitudes, and latitudes, both in degrees, to x and y in km.
Plane = Callable[[NDArray[np.float64], NDArray[np.float64]], tuple[NDArray[np.float64], NDArray[np.float64]]]


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
    x: tuple[tuple[float, ...], ...]
    y: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, plane: Plane, half_lon: float, middle_lat: float, half_lat: float) -> "PlaneFit | None":
        """Fit the polynomials of least degree that are good enough, or return None if there are none.

        Parameters
        ----------
        plane
            What to fit.
        half_lon, middle_lat, half_lat
            The box.
        """
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
            tables = [tuple(tuple(map(float, row)) for row in c.reshape(2 * terms, terms)) for c in found]
            fit = cls(half_lon, middle_lat, half_lat, *tables)
            if np.abs(np.stack(fit(east, lat)) - truth).max() <= _CLOSE_ENOUGH_KM:
                return fit
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {
            "half_lon": self.half_lon,
            "middle_lat": self.middle_lat,
            "half_lat": self.half_lat,
            "x": self.x,
            "y": self.y,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "PlaneFit":
        """Return the fit that a file describes."""
        tables = {name: tuple(tuple(map(float, row)) for row in content[name]) for name in ("x", "y")}
        half_lon, middle_lat, half_lat = (float(content[k]) for k in ("half_lon", "middle_lat", "half_lat"))
        return cls(half_lon, middle_lat, half_lat, tables["x"], tables["y"])

    def covers(self, east: NDArray[np.float64], lat: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which places lie in the box; longitudes are differences to the centre's, in degrees."""
        return np.asarray(
            (np.abs(east) <= self.half_lon) & (np.abs(lat - self.middle_lat) <= self.half_lat), dtype=bool
        )

    def __call__(
        self, east: NDArray[np.float64], lat: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return x and y in km, each of shape (n,), of places in the box."""
        x, y = np.empty_like(east), np.empty_like(east)
        for first in range(0, len(east), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            u, v = east[part] / self.half_lon, (lat[part] - self.middle_lat) / self.half_lat
            square = u * u
            x[part] = u * _horner(self.x, square, v)
            y[part] = _horner(self.y, square, v)
        return x, y

    def one(self, east: float, lat: float) -> tuple[float, float] | None:
        """Return x and y of one place, the same bits as for many, or None if it is not in the box."""
        u, v = east / self.half_lon, (lat - self.middle_lat) / self.half_lat
        if not (abs(east) <= self.half_lon and abs(lat - self.middle_lat) <= self.half_lat):
            return None
        square = u * u
        return u * _horner(self.x, square, v), _horner(self.y, square, v)


def _horner(table: tuple[tuple[float, ...], ...], square: Any, v: Any) -> Any:
    """Evaluate Σ_ij c[j][i] square^i v^j, for numbers or arrays."""
    total: Any = 0.0
    for row in reversed(table):
        inner: Any = row[-1]
        for coefficient in row[-2::-1]:
            inner = inner * square + coefficient
        total = total * v + inner
    return total
