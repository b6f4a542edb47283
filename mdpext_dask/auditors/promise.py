"""What is audited, |log M(y|x) − log M(y|x')| ≤ ε d(x, x') + tolerance, and which triples break it.

A triple is judged in float64 where that is sure, else exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors import exact
from mdpext_dask.auditors.pairs.tiles import LENGTH_ERROR, lengths
from mdpext_dask.errors import SpecError
from mdpext_dask.problem.grid import Array

# A geodesic is good to 15 nanometres (Karney 2013); in km, with a margin, and relative to it.
_GEODESIC_ERROR_KM, _GEODESIC_ERROR = 5e-11, 1e-13
# Coordinates in a plane that stands for the ground are rounded, and PROJ takes what is within 0.64 mm of its
# centre for the centre.
_PLANE_ERROR_KM = 1e-6
# Below this, squares lose digits; such distances are decided exactly.
_SHORTEST_KM = 1e-140
# Two rows, float of shape (K,), and two places as the promise measures them, float64 of shape (2, 2).
Pair = tuple[NDArray[np.floating], NDArray[np.floating], Array]


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
        What a log ratio may exceed its bound by; it hides violations, so the default is 0.
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

    def apart_km(self, dx: Array, dy: Array, out: Array | None = None) -> Array:
        """Return ‖(dx, dy)‖_p, less what the plane may be off by, 0 for next to nothing; overwrites both."""
        apart = lengths(dx, dy, self.metric_p, out=out)
        if self.plane_error_km:
            apart -= self.plane_error_km
            np.maximum(apart, 0.0, out=apart)
        if apart.min() < _SHORTEST_KM:
            apart[apart < _SHORTEST_KM] = 0.0
        return apart

    def furthest_km(self, apart_km: Array) -> Array:
        """Return what a distance in the plane is at most that is computed as `apart_km`."""
        return np.asarray((apart_km + (2 * self.plane_error_km + _SHORTEST_KM)) * (1 + LENGTH_ERROR))

    def is_broken(self, ratio: Fraction, places: Array, *, tolerant: bool = True) -> bool:
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
        limits = self.epsilon_per_km, self.tolerance if tolerant else 0.0
        if self.distortion is None:
            return exact.pair_exceeds(ratio, exact.displacement(*places), self.metric_p, *limits)
        ends = {0.0}
        if not np.array_equal(*places):
            length = ground_distance_km(*places)
            error = _GEODESIC_ERROR_KM + _GEODESIC_ERROR * length
            ends = {max(length - error, 0.0), length + error}
        answers = {exact.pair_exceeds(ratio, (Fraction(end), Fraction(0)), 1, *limits) for end in ends}
        if len(answers) == 2:
            raise exact.Undecided(
                f"a geodesic decides that is known to be {min(ends)} to {max(ends)} km long"
            )
        return answers.pop()


def ground_distance_km(first: Array, second: Array) -> float:
    """Return the length, in km, of the geodesic on WGS 84 between two places, lon and lat in degrees."""
    from pyproj import Geod

    return float(Geod(ellps="WGS84").inv(*first.tolist(), *second.tolist())[2]) / 1000


@dataclass(frozen=True)
class Verdicts:
    """What some triples do.

    Parameters
    ----------
    violates
        Which break the promise, tolerance included, bool of shape (n,).
    hidden
        Which would break it without the tolerance only, bool of shape (n,).
    recomputed
        How many float64 could not decide.
    undecided
        How many of those nothing could decide; they are in neither array.
    """

    violates: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    recomputed: int
    undecided: int


def may_break(differences: Array, apart_km: Array, error: float, promise: Promise) -> NDArray[np.bool_]:
    """Return which triples are not sure to keep the promise without any tolerance.

    Parameters
    ----------
    differences
        |ℓ(y|x) − ℓ(y|x')|, float64.
    apart_km
        Distance in the plane as :meth:`Promise.apart_km` gives it, of a shape
        that broadcasts.
    error
        What the differences may be off by.
    promise
        What is audited.
    """
    return np.asarray(differences + error > promise.kept_per_km * apart_km * (1 - LENGTH_ERROR))


def judge(
    differences: Array,
    apart_km: Array,
    error: float,
    promise: Promise,
    pair_of: Callable[[int], Pair],
    outputs: NDArray[np.intp],
) -> Verdicts:
    """Decide triples one by one.

    Parameters
    ----------
    differences, apart_km, error, promise
        As for :func:`may_break`, arrays of shape (n,).
    pair_of
        Rows and places of the triple at a position.
    outputs
        y of each, shape (n,).
    """
    tolerance = promise.tolerance
    broken = promise.broken_per_km * promise.furthest_km(apart_km)
    kept = promise.kept_per_km * apart_km * (1 - LENGTH_ERROR)
    breaks = differences - error > broken
    violates = differences - error > broken + tolerance
    hidden = breaks & (differences + error <= kept + tolerance)
    unsure = np.flatnonzero((differences + error > kept) & ~violates & ~hidden)
    undecided = 0
    for position in unsure.tolist():
        pair, output = pair_of(position), int(outputs[position])
        try:
            violates[position] = _is_broken(pair, output, promise, tolerant=True)
            if tolerance and not violates[position]:
                hidden[position] = _is_broken(pair, output, promise, tolerant=False)
        except exact.Undecided:
            undecided += 1
    return Verdicts(violates, hidden, len(unsure), undecided)


def _is_broken(pair: Pair, output: int, promise: Promise, *, tolerant: bool) -> bool:
    first, second, places = pair
    if not first[output] or not second[output]:
        # Impossible from one of them only; from both, it never happens.
        return bool(first[output] != second[output])
    return promise.is_broken(exact.probability_ratio(first, second, output), places, tolerant=tolerant)
