"""What is audited: |log M(y|x) − log M(y|x')| ≤ ε d(x, x') + tolerance, and where float64 decides it."""

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors import exact
from mdpext_dask.auditors.pairs.tiles import LENGTH_ERROR, lengths
from mdpext_dask.errors import SpecError

# A geodesic is good to 15 nanometres (Karney 2013); in km, with a margin, and relative to it.
_GEODESIC_ERROR_KM, _GEODESIC_ERROR = 5e-11, 1e-13
# Coordinates in a plane that stands for the ground are rounded, and PROJ takes what is within 0.64 mm of its
# centre for the centre.
_PLANE_ERROR_KM = 1e-6
# Below this, squares lose digits; such distances are decided exactly.
_SHORTEST_KM = 1e-140


@dataclass(frozen=True)
class Promise:
    """A promise for pairs of records in the plane, or on the ground.

    Parameters
    ----------
    epsilon_per_km
        ε, in 1/km, for the distance that is meant.
    metric_p
        Exponent p of the metric.
    tolerance
        What a log ratio may exceed its bound by; it hides violations, so it is 0 unless somebody wants it.
    distortion
        By how much the plane may lengthen a distance on the ground, relative to it. None where the distance
        in the plane is the one that is meant.
    """

    epsilon_per_km: float
    metric_p: float
    tolerance: float = 0.0
    distortion: float | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(v, Real) for v in (self.epsilon_per_km, self.metric_p, self.tolerance)):
            raise SpecError("--epsilon-per-km, --metric-p, --tolerance: must be numbers")
        if not (self.epsilon_per_km > 0 and math.isfinite(self.epsilon_per_km)):
            raise SpecError(f"--epsilon-per-km: must be a positive number, got {self.epsilon_per_km!r}")
        if not self.metric_p >= 1:
            raise SpecError(f"--metric-p: must be at least 1 or inf, got {self.metric_p!r}")
        if not (self.tolerance >= 0 and math.isfinite(self.tolerance)):
            raise SpecError(f"--tolerance: must be a number of at least 0, got {self.tolerance!r}")

    @property
    def kept_per_km(self) -> float:
        """Slope in the plane, in 1/km, up to which the promise is certainly kept."""
        if self.distortion is None:
            return self.epsilon_per_km
        return math.nextafter(self.epsilon_per_km / (1 + self.distortion), 0)

    @property
    def broken_per_km(self) -> float:
        """Slope in the plane, in 1/km, above which it is certainly broken.

        An azimuthal equidistant plane shrinks nothing: its scale is 1 along a bearing and r / m(r) across it,
        where the reduced length m(r) is at most r on an ellipsoid, whose curvature is positive.
        """
        return self.epsilon_per_km

    @property
    def plane_error_km(self) -> float:
        """What a distance in the plane may be off by, because the plane stands for something else."""
        return 0.0 if self.distortion is None else _PLANE_ERROR_KM

    def apart_km(
        self,
        dx: NDArray[np.float64],
        dy: NDArray[np.float64],
        out: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return ‖(dx, dy)‖_p, less what the plane may be off by, 0 for next to nothing; overwrites both."""
        apart = lengths(dx, dy, self.metric_p, out=out)
        if self.plane_error_km:
            apart -= self.plane_error_km
            np.maximum(apart, 0.0, out=apart)
        if apart.min() < _SHORTEST_KM:
            apart[apart < _SHORTEST_KM] = 0.0
        return apart

    def furthest_km(self, apart_km: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what a distance in the plane is at most that is computed as `apart_km`."""
        return np.asarray((apart_km + (2 * self.plane_error_km + _SHORTEST_KM)) * (1 + LENGTH_ERROR))

    def is_broken(self, ratio: Fraction, places: NDArray[np.float64], *, tolerant: bool = True) -> bool:
        """Return whether one pair breaks the promise for an output, decided beyond float64.

        Parameters
        ----------
        ratio
            M(y|x) / M(y|x') > 0.
        places
            x and x', float64 of shape (2, 2): in the plane, in km, or lon and lat in degrees where the ground
            is meant.
        tolerant
            Whether the tolerance counts.

        Raises
        ------
        mdpext_dask.auditors.exact.Undecided
            If the length of a geodesic is not known well enough.
        """
        tolerance = self.tolerance if tolerant else 0.0
        if self.distortion is None:
            apart = exact.displacement(*places)
            return exact.pair_exceeds(ratio, apart, self.metric_p, self.epsilon_per_km, tolerance)
        if ratio == 1:
            return False
        if np.array_equal(places[0], places[1]):
            return exact.pair_exceeds(ratio, (Fraction(0), Fraction(0)), 1, self.epsilon_per_km, tolerance)
        length = ground_distance_km(places[0], places[1])
        error = _GEODESIC_ERROR_KM + _GEODESIC_ERROR * length
        answers = {
            exact.pair_exceeds(
                ratio, (Fraction(max(end, 0.0)), Fraction(0)), 1, self.epsilon_per_km, tolerance
            )
            for end in (length - error, length + error)
        }
        if len(answers) == 2:
            raise exact.Undecided(f"a geodesic of {length} km decides, and is known to {error:.1g} km")
        return answers.pop()


def ground_distance_km(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the length, in km, of the geodesic on WGS 84 between two places, lon and lat in degrees."""
    return float(_geod().inv(*first.tolist(), *second.tolist())[2]) / 1000


def _geod() -> Any:
    from pyproj import Geod

    return Geod(ellps="WGS84")
