"""Mechanisms whose largest log ratios are known, and what an auditor has to answer about each of them.

Answers come from a formula, or from comparing every triple, or every fine cell, in fifty decimal digits.
:func:`check_known_answers` asks for much of it in a second or two: an auditor with a mistake in it must fail.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from mdpext_dask.auditors.directions import RADII
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.reference import softmax

Array = NDArray[np.floating]
# Digits of the answers, and what they are good to.
_DIGITS = 50
_GOOD_TO = Decimal("1e-40")
# What float64 does not tell apart, with the logarithms and distances that are used here.
_NEAR = Decimal("1e-11")
# What the auditors may add when they round outward, relative to ε, at distances of some hundred metres.
OUTWARD = 1e-9
INFINITE = Decimal("Infinity")


# --- answers to fifty digits ----------------------------------------------------------------------


@dataclass(frozen=True)
class Triple:
    """|ln M(y|x) − ln M(y|x')| of two records and an output, and how far apart the records are in km."""

    log_ratio: Decimal
    apart: Decimal
    records: frozenset[int]
    output: int

    @property
    def slope(self) -> Decimal:
        """|log ratio| / distance, in 1/km."""
        if not self.log_ratio:
            return Decimal(0)
        return self.log_ratio / self.apart if self.apart else INFINITE

    def excess(self, epsilon: float) -> Decimal:
        """Return by how much it exceeds its bound."""
        with localcontext(prec=_DIGITS):
            return self.log_ratio - Decimal(epsilon) * self.apart


@dataclass(frozen=True)
class Mechanism:
    """Rows, float of shape (N, K), and where their records are, float64 of shape (N, 2), in km."""

    rows: Array
    points: NDArray[np.float64]
    p: float = 2.0

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """Which rows are distributions once they are divided by their total."""
        return np.array([np.isfinite(row).all() and (row >= 0).all() and row.any() for row in self.rows])

    @cached_property
    def logs(self) -> list[list[Decimal] | None]:
        """Logarithms ln M(y|x) of every usable row; −∞ of what is impossible."""
        return [logs_of_row(row) if good else None for row, good in zip(self.rows, self.usable, strict=True)]

    @cached_property
    def triples(self) -> list[Triple]:
        """All triples of two usable records, the steepest first."""
        found = []
        with localcontext(prec=_DIGITS):
            usable = np.flatnonzero(self.usable).tolist()
            for first, second in ((a, b) for b in usable for a in usable if a < b):
                apart = length(self.points[first], self.points[second], self.p)
                for output, (a, b) in enumerate(zip(self.logs[first], self.logs[second], strict=True)):
                    found.append(Triple(gap(a, b), apart, frozenset((first, second)), output))
            found.sort(key=lambda triple: triple.slope, reverse=True)
        return found

    @property
    def sup(self) -> Decimal:
        """The smallest ε that all usable records keep."""
        return self.triples[0].slope

    def broken(self, epsilon: float, tolerance: float = 0.0) -> int:
        """Return how many triples of usable records exceed their bounds."""
        with localcontext(prec=_DIGITS):
            slope, more = Decimal(epsilon), Decimal(tolerance)
            return sum(triple.log_ratio > slope * triple.apart + more for triple in self.triples)

    @property
    def refused(self) -> int:
        """How many triples have a record whose row cannot be used."""
        n, good = len(self.rows), int(self.usable.sum())
        return (n * (n - 1) - good * (good - 1)) // 2 * self.rows.shape[1]

    @cached_property
    def cells(self) -> list[tuple[Decimal, frozenset[int], int]]:
        """Certificate of every fine cell and output, with the cell's records; the largest first."""
        east, north = (sorted(set(axis.tolist())) for axis in self.points.T)
        at = {tuple(point): record for record, point in enumerate(self.points.tolist())}
        found = []
        with localcontext(prec=_DIGITS):
            for xs, ys in product(pairwise(east), pairwise(north)):
                corners = [at[place] for place in product(xs, ys)]
                side_x, side_y = (length((a, 0.0), (b, 0.0), 1) for a, b in (xs, ys))
                for output in range(self.rows.shape[1]):
                    l00, l01, l10, l11 = (self.logs[record][output] for record in corners)
                    across = max(gap(l00, l10), gap(l01, l11)) / side_x
                    along = max(gap(l00, l01), gap(l10, l11)) / side_y
                    found.append((dual_norm(across, along, self.p), frozenset(corners), output))
        return sorted(found, key=lambda cell: cell[0], reverse=True)


def logs_of_row(row: Array) -> list[Decimal]:
    """Return ln M(y|x) of one row, divided by its total."""
    entries = [Fraction(value) for value in row.tolist()]
    with localcontext(prec=_DIGITS):
        total = logarithm(sum(entries, Fraction(0)))
        return [logarithm(entry) - total if entry else -INFINITE for entry in entries]


def logarithm(number: Fraction) -> Decimal:
    return (Decimal(number.numerator) / Decimal(number.denominator)).ln()


def gap(one: Decimal, other: Decimal) -> Decimal:
    """Return |one − other|: 0 for equal distributions, whose logarithms differ in their last digits."""
    if one == other:
        return Decimal(0)
    apart = abs(one - other)
    return apart if apart > _GOOD_TO else Decimal(0)


def length(a: Any, b: Any, p: float) -> Decimal:
    """Return ‖a − b‖_p of two points whose coordinates are floats."""
    dx, dy = (abs(Decimal(float(u)) - Decimal(float(v))) for u, v in zip(a, b, strict=True))
    if p == 1:
        return dx + dy
    if math.isinf(p):
        return max(dx, dy)
    return (dx * dx + dy * dy).sqrt() if p == 2 else power_norm(dx, dy, Decimal(p))


def dual_norm(across: Decimal, along: Decimal, p: float) -> Decimal:
    if p == 1:
        return max(across, along)
    return across + along if math.isinf(p) else power_norm(across, along, Decimal(p) / (Decimal(p) - 1))


def power_norm(a: Decimal, b: Decimal, p: Decimal) -> Decimal:
    return max(a, b) if not a or not b or INFINITE in (a, b) else (a**p + b**p) ** (1 / p)


def float_below(value: Decimal) -> float:
    """Return the largest float below a number that is none."""
    near = float(value)
    return near if Decimal(near) < value else math.nextafter(near, 0)


def float_above(value: Decimal) -> float:
    """Return the smallest float above a number that is none."""
    return math.nextafter(float_below(value), math.inf)


def short_of(value: Decimal, size: float) -> float:
    """Return an ε that `value` exceeds by so much, relative to it."""
    with localcontext(prec=_DIGITS):
        return float_below(value / (1 + Decimal(size)))


# --- asking ---------------------------------------------------------------------------------------


def current(module: str, name: str) -> Any:
    """Return what a module of the package has by a name: now, as it may be another module later."""
    return getattr(importlib.import_module(f"mdpext_dask.{module}"), name)


@contextmanager
def cut_small(part: int = 64, band: int = 64, tile: int = 2, strip: int = 8) -> Iterator[None]:
    """Cut whatever is audited into many parts, bands, tiles and strips.

    Parameters
    ----------
    part, band
        Bytes of the float64 rows of a part and of a band.
    tile
        Records of a tile at most.
    strip
        Elements of a strip of the certificate.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            ("source", "_PART_BYTES", part),
            ("certificate", "_BAND_BYTES", band),
            ("pairs.compare", "TILE", tile),
            ("pairs.compare", "_TILE_PAIRS", 3),
            ("pairs.compare", "_WORST", 3),
            ("pairs.tiles", "BOUNDS_AT_ONCE", 4),
            ("pairs.exhaustive", "_PARTNERS", 2),
            ("certificate", "_STRIP_ELEMENTS", strip),
            ("directions", "_ROW_ELEMENTS", strip),
        ):
            patch.setattr(importlib.import_module(f"mdpext_dask.auditors.{module}"), name, value)
        yield


def ask(mechanism: Mechanism, method: str, epsilon: float, tolerance: float = 0.0, **how: Any) -> Any:
    """Return an auditor's report on a mechanism."""
    methods = importlib.import_module("mdpext_dask.auditors.methods")
    given = mechanism.points, epsilon, mechanism.p, tolerance
    with current("auditors.subject", "plain_subject")(mechanism.rows, *given) as subject:
        executor = current("compute.executor", "InlineExecutor")()
        at_work = executor, current("compute.stages", "Stages")(current("events", "silent"))
        if method == "certificate":
            return methods.certify(subject, *at_work)
        if method == "exhaustive":
            return methods.compare_all(subject, *at_work)
        return methods.sample_pairs(subject, methods.Sampling(**how), *at_work)


def how_sampled(method: str, pairs: int) -> dict[str, int]:
    """Return what to ask a method with: how pairs are drawn, if they are."""
    return {"pairs": pairs, "random_seed": 1} if method == "sampled" else {}


def records_of(worst: dict[str, Any]) -> frozenset[int]:
    return frozenset((worst["record"], worst["record_prime"]))


def check_all_pairs(mechanism: Mechanism, epsilon: float, tolerance: float = 0.0) -> Any:
    """Check that the exhaustive audit says what fifty digits say, and return its report."""
    report = ask(mechanism, "exhaustive", epsilon, tolerance)
    check_all_pairs_of(report, mechanism, epsilon, tolerance)
    return report


def check_all_pairs_of(report: Any, mechanism: Mechanism, epsilon: float, tolerance: float = 0.0) -> None:
    """Check a report of the exhaustive audit against fifty digits; `epsilon` is that of the plane."""
    triples, refused = mechanism.triples, mechanism.refused
    broken = mechanism.broken(epsilon, tolerance)
    assert report.violations == broken + refused
    assert report.details["hidden_violations"] == mechanism.broken(epsilon) - broken
    assert report.details["undecided"] == 0
    assert sum(bin_["violations"] for bin_ in report.details["violation_sizes"]) == broken
    n, outputs = mechanism.rows.shape
    assert report.triples_checked == n * (n - 1) // 2 * outputs
    assert report.triples_checked == refused + len(triples)
    assert report.violation_ratio == report.violations / report.triples_checked
    if broken and report.details["planar"]:
        assert report.verdict == "violated"
    elif broken:
        # What exceeds the plane by less than it is charged for may keep the promise on the ground.
        assert report.verdict in ("violated", "not proved")
    elif refused:
        assert report.verdict == "not a mechanism"
    else:
        assert report.verdict != "violated"
    if triples:
        check_outward(report.epsilon, INFINITE if refused else mechanism.sup)
        check_worst(report, mechanism)
    if broken + refused == broken and mechanism.broken(epsilon):
        # Of triples that are equally steep in float64, one that breaks the promise is named.
        numbers = records_of(report.worst), report.worst["output"]
        (named,) = (triple for triple in triples if (triple.records, triple.output) == numbers)
        assert named.excess(epsilon) > 0


def check_outward(epsilon: float, exact: Decimal) -> None:
    """Check that an ε is the exact one, rounded outward."""
    if exact == INFINITE:
        assert epsilon == math.inf
    else:
        assert exact <= Decimal(epsilon)
        assert epsilon <= float(exact) * (1 + OUTWARD) + OUTWARD


def check_worst(report: Any, mechanism: Mechanism) -> None:
    """Check that the worst triple is one of the steepest, as far as float64 tells them apart."""
    if not report.worst:
        # Nothing is worst where no two records differ, and none are any distance apart.
        assert not any(triple.log_ratio or triple.apart for triple in mechanism.triples)
        return
    named = {(triple.records, triple.output): triple for triple in mechanism.triples}
    assert (records_of(report.worst), report.worst["output"]) in named
    worst = named[records_of(report.worst), report.worst["output"]]
    sup = mechanism.sup
    assert worst.slope == INFINITE if sup == INFINITE else worst.slope >= sup * (1 - _NEAR) - _NEAR
    told = report.worst["log_ratio"]
    infinite = worst.log_ratio == INFINITE
    assert told == ("inf" if infinite else pytest.approx(float(worst.log_ratio), rel=1e-14))
    assert report.worst["bound"] == report.limit_per_km * report.worst["distance_km"]
    assert report.worst["distance_km"] == pytest.approx(float(worst.apart), rel=1e-14)
    for name, record in (("x", "record"), ("x_prime", "record_prime")):
        assert report.worst[name] == mechanism.points[report.worst[record]].tolist()


def check_cells(mechanism: Mechanism, epsilon: float) -> Any:
    """Check that the certificate is what fifty digits say, and return its report."""
    report = ask(mechanism, "certificate", epsilon)
    check_cells_of(report, mechanism, epsilon)
    return report


def check_cells_of(report: Any, mechanism: Mechanism, epsilon: float) -> None:
    """Check a report of the certificate against fifty digits; `epsilon` is that of the plane."""
    largest, found = mechanism.cells[0][0], report.details
    assert largest * (1 + _GOOD_TO) >= mechanism.sup
    if largest == INFINITE:
        assert not report.holds
        assert report.epsilon == math.inf
        return
    check_outward(found["epsilon_of_cells"], largest)
    # Steps are asked where cells do not decide, and the kinder of the two is the answer.
    by_steps = found["epsilon_of_directions"]
    by_steps = math.inf if by_steps is None else by_steps
    assert mechanism.sup <= Decimal(by_steps)
    assert report.epsilon == min(found["epsilon_of_cells"], by_steps)
    proved = largest <= Decimal(epsilon) or by_steps <= epsilon
    assert (report.verdict in ("violated", "not proved")) == (not proved)
    above = sum(norm > Decimal(epsilon) for norm, _, _ in mechanism.cells)
    assert found["cells_above_limit"] == above
    assert report.violations == (0 if proved else above)
    if report.verdict == "violated":
        assert mechanism.sup > Decimal(epsilon)
    near = {
        (pair, output)
        for norm, cell, output in mechanism.cells
        if norm >= largest * (1 - _NEAR) - _NEAR
        for pair in (frozenset((a, b)) for a in cell for b in cell if a != b)
    }
    assert (records_of(report.worst), report.worst["output"]) in near


def largest_step(logs: Array, step: tuple[int, int]) -> Array:
    """L_u of each output by looking at every pair of records."""
    shape = logs.shape[:2]
    return np.max(
        [
            abs(logs[i + step[0], j + step[1]] - logs[i, j])
            for i, j in product(*map(range, shape))
            if i + step[0] < shape[0] and 0 <= j + step[1] < shape[1]
        ],
        axis=0,
    )


def by_steps(logs: Array, sides: tuple[float, float], p: float, radius: int) -> Array:
    """Return the largest (a L_u + b L_v) / ‖a u + b v‖ of each output, over many a and b."""
    numbers = range(radius + 1)
    steps = sorted(
        ((a, b) for a in numbers for b in numbers if math.gcd(a, b) == 1),
        key=lambda v: math.atan2(v[1], v[0]),
    )
    shape, found = logs.shape[:2], np.zeros(logs.shape[2])
    share = np.linspace(0, 1, 2001)[:, None]
    for mirror in (1, -1):
        vectors = [(a, b * mirror) for a, b in steps if a < shape[0] and b < shape[1]]
        for u in vectors:
            size = largest_step(logs, u if u[0] else (0, 1))
            found = np.maximum(found, size / np.linalg.norm(np.multiply(u, sides), ord=p))
        for u, v in pairwise(vectors):
            if u[0] + v[0] >= shape[0] or abs(u[1] + v[1]) >= shape[1]:
                continue  # no two records are apart by both
            first, second = (largest_step(logs, step if step[0] else (0, 1)) for step in (u, v))
            offsets = (1 - share) * np.multiply(u, sides) + share * np.multiply(v, sides)
            lengths = np.linalg.norm(offsets, ord=p, axis=1)[:, None]
            found = np.maximum(found, (((1 - share) * first + share * second) / lengths).max(axis=0))
    return found


def check_steps(mechanism: Mechanism, shape: tuple[int, int]) -> None:
    """Check what steps certify of records on a lattice, where cells do not decide."""
    order = np.lexsort(mechanism.points.T[::-1])
    logs = np.array(mechanism.logs, dtype=np.float64)[order].reshape(*shape, -1)
    sides = np.diff(np.unique(mechanism.points[:, 0])).min(), np.diff(np.unique(mechanism.points[:, 1])).min()
    for radius in RADII:
        certified = float(by_steps(logs, sides, mechanism.p, radius).max())
        if certified >= mechanism.cells[0][0]:
            continue
        report = check_cells(mechanism, certified * (1 + 1e-3))
        found = report.details["radius_of_directions"]
        assert report.holds
        assert found <= radius
        expected = by_steps(logs, sides, mechanism.p, found)
        assert (expected <= report.epsilon).all()
        assert report.epsilon == pytest.approx(expected.max(), rel=1e-3)


def check_cone(
    p: float, radius: int, stricter: float, top: tuple[int, int], shape: tuple[int, int] = (5, 5)
) -> None:
    """Check what steps up to a radius certify of rows that fall by 1/km from one record, which steps do not.

    Parameters
    ----------
    p
        Exponent of the metric.
    radius
        Where the certificate should stop: just above what is known of it.
    stricter
        1/cos(θ/2) for the widest angle θ between two steps, for p = 2; of other p the cone bends at a step.
    top
        The record.
    shape
        Numbers of records to the east and to the north.
    """
    i, j = np.indices(shape)
    points = np.stack([i, j], axis=-1).reshape(-1, 2) * 1.0
    peak = np.exp(-np.linalg.norm(points - np.array(top), ord=p, axis=1)) / 1000
    rows = np.stack([peak, 1 - peak], axis=1) * (1 + 4e-7 * ((i + 2 * j).reshape(-1, 1) % 3))
    mechanism = Mechanism(rows, points, p)
    report = check_cells(mechanism, float_above(Decimal(stricter * (1 + OUTWARD))))
    if radius:
        assert report.details["radius_of_directions"] == radius
        # The totals of the rows are 1 but for rounding.
        assert report.details["epsilon_of_directions"] == pytest.approx(stricter, rel=OUTWARD)
    assert report.holds
    assert not check_cells(mechanism, 1 - 1e-6).holds


def check_sample(mechanism: Mechanism, epsilon: float, tolerance: float = 0.0, **how: Any) -> Any:
    """Check a sample that has drawn every pair of a small mechanism, and return its report."""
    # So confident that no run ever misses, unless it is asked to be less so.
    report = ask(mechanism, "sampled", epsilon, tolerance, **{"confidence": 1 - 1e-9, **how})
    triples = mechanism.triples
    broken = mechanism.broken(epsilon, tolerance) + mechanism.refused
    hidden = mechanism.broken(epsilon) - mechanism.broken(epsilon, tolerance)
    assert (report.violations > 0) == (broken > 0)
    assert (report.details["hidden_violations"] > 0) == (hidden > 0)
    assert report.violations <= report.triples_checked == report.details["pairs"] * mechanism.rows.shape[1]
    assert report.verdict != "violated" or broken
    low, high = report.details["violation_ratio_interval"]
    assert low <= report.violation_ratio <= high
    assert low <= broken / (len(triples) + mechanism.refused) <= high
    if mechanism.refused:
        assert report.epsilon == math.inf
    else:
        assert report.epsilon == pytest.approx(float(mechanism.sup), rel=1e-11, abs=1e-11)
        check_worst(report, mechanism)
    return report


# --- mechanisms with a formula --------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """A mechanism on a lattice, its largest |log ratio| / distance, and how many triples attain it."""

    mechanism: Mechanism
    sup: float
    attained: int


def two_ends(epsilon: float, step_km: float, steps: int) -> Array:
    """Return the exponential mechanism on a segment with an output at each end, shape (steps + 1, 2).

    M(y|t) ∝ exp(−ε |t − y| / 2).
    """
    t = np.arange(steps + 1) * step_km
    return softmax(-epsilon / 2 * np.abs(t[:, None] - np.array([0.0, steps * step_km])))


def steepest_of_two_ends(epsilon: float, step_km: float, steps: int) -> float:
    """Return the largest |log ratio| / distance of :func:`two_ends`.

    M(0|t) = 1 / (1 + exp(−u)) with u = ε (L / 2 − t); its logarithm is concave in u, so the steepest pair is
    that of the last two records, and by symmetry for the other output that of the first two.
    """
    far = epsilon * steps * step_km / 2
    return (math.log1p(math.exp(far)) - math.log1p(math.exp(far - epsilon * step_km))) / step_km


@cache
def segment(p: float) -> Formula:
    """Two copies of the segment side by side: what a record says does not depend on y."""
    epsilon, step, steps = 3.0, 0.75, 6
    rows = np.repeat(two_ends(epsilon, step, steps), 2, axis=0)
    points = np.array([(i * step, j * 0.5) for i in range(steps + 1) for j in (0, 1)])
    sup = steepest_of_two_ends(epsilon, step, steps)
    # In the l_inf metric the two diagonals of the last cells are as short as its sides.
    return Formula(Mechanism(rows, points, p), sup, 8 if math.isinf(p) else 4)


@cache
def slanted_segment(p: float) -> Formula:
    """One segment along (3, 4): distances are as along an axis, but for the norm of the direction."""
    epsilon, step, steps = 3.0, 1.25, 4
    points = np.array([(0.75 * i, float(i)) for i in range(steps + 1)])
    norm = float(np.linalg.norm([0.6, 0.8], ord=p))
    sup = steepest_of_two_ends(epsilon, step, steps) / norm
    return Formula(Mechanism(two_ends(epsilon, step, steps), points, p), sup, 2)


@cache
def square(p: float) -> Formula:
    """Four outputs at the corners of a square, M(y|x) ∝ exp(−ε ‖x − y‖_1 / 2): one segment for each axis.

    log M is a sum of two functions of one coordinate, each at most s = steep, both at once in the corner
    opposite to the output. So the largest slope is s for p = 1, s √2 (along the diagonal) for p = 2 and 2 s
    for p = inf: s ‖(1, 1)‖_q, which is also the certificate of the corner's cell.
    """
    epsilon, step, steps = 3.0, 0.75, 3
    one = two_ends(epsilon, step, steps)
    rows = np.einsum("ia,jb->ijab", one, one).reshape(-1, 4)
    points = np.array([(i * step, j * step) for i in range(steps + 1) for j in range(steps + 1)])
    shares = {1.0: 1.0, 2.0: math.sqrt(2), math.inf: 2.0}
    sup = steepest_of_two_ends(epsilon, step, steps) * shares[p]
    # p = 1: two sides for each of the lines along both axes, and the corner cell's diagonal.
    return Formula(Mechanism(rows, points, p), sup, 4 * (2 * (steps + 1) + 1) if p == 1 else 4)


FORMULAS: list[Callable[[float], Formula]] = [segment, slanted_segment, square]
EXPONENTS = (1.0, 2.0, math.inf)


def check_formula(make: Callable[[float], Formula], p: float) -> None:
    """Both proofs give the formula's ε; a promise of a little less is broken as often as it must be."""
    known = make(p)
    assert float(known.mechanism.sup) == pytest.approx(known.sup, rel=1e-14)
    for epsilon, broken in ((known.sup * (1 + 1e-10), 0), (known.sup * (1 - 1e-10), known.attained)):
        for method in ["exhaustive"] if make is slanted_segment else ["exhaustive", "certificate"]:
            report = ask(known.mechanism, method, epsilon)
            assert report.holds == (not broken)
            assert report.verdict == ("violated" if broken else "holds")
            if method == "exhaustive":
                assert report.violations == broken
            else:
                assert (report.violations > 0) == (broken > 0)
            outward = 1e-12 if method == "exhaustive" else 3e-12
            most = known.sup * (1 + outward) if broken else epsilon
            assert known.sup * (1 - 1e-14) <= report.epsilon <= most


# --- planted violations ---------------------------------------------------------------------------


def ramp(
    shape: tuple[int, int], gradient: tuple[float, float], step_km: float, bump: tuple[int, int], by: float
) -> Mechanism:
    """Return a lattice on which log M(0|x) rises evenly, but for one record that is a little higher.

    Rows add up to 1 but for some 1e-7, as if they had been rounded; records are numbered at random.

    Parameters
    ----------
    shape
        Records to the east and to the north.
    gradient
        Of log M(0|x), in 1/km; that of the other output is less than a tenth of it.
    step_km
        Spacing.
    bump, by
        Which record is higher, and by how much log M(0|x) is.
    """
    i, j = (axis.ravel() for axis in np.indices(shape))
    rise = step_km * (gradient[0] * i + gradient[1] * j)
    logs = rise - rise.max() - 2.5
    logs[(i == bump[0]) & (j == bump[1])] += by
    share = np.exp(logs)
    rng = np.random.default_rng(7)
    rows = np.stack([share, 1 - share], axis=1) * (1 + rng.uniform(-4e-7, 4e-7, size=(len(share), 1)))
    order = rng.permutation(len(share))
    return Mechanism(rows[order], np.stack([i, j], axis=1)[order] * step_km)


SIZES = (1e-3, 1e-6, 1e-9)
_STEP, _SLOPE = 0.25, 1.5


@cache
def planted_beside(record: tuple[int, int], size: float, shape: tuple[int, int] = (13, 4)) -> Mechanism:
    """Return a ramp to the east on which one record exceeds its western neighbour by too much.

    The next steepest pair is two steps apart, and has half of the excess.
    """
    return ramp(shape, (_SLOPE, 0.0), _STEP, record, 4 * size * _SLOPE * _STEP)


@cache
def planted_afar(size: float) -> Mechanism:
    """Return a ramp along the only pair of records whose offset is (7, 3), or (3, 1), and a bump there.

    All nearer pairs lie askew to the gradient, so that they are less steep.
    """
    i, j = offset = (3, 1) if size > 1e-4 else (7, 3)
    away = math.hypot(i, j)
    gradient = _SLOPE * i / away, _SLOPE * j / away
    return ramp((2 * i, 2 * j), gradient, _STEP, offset, 2 * size * _SLOPE * _STEP * away)


@cache
def planted_between_clusters(size: float) -> Mechanism:
    """Return two groups of records 10 km apart within which rows are alike; one pair is a bit closer."""
    near = np.random.default_rng(3).uniform(-0.3, 0.3, size=(2, 9, 2))
    near[0, :, 0] -= 0.31 + 0.02
    near[1, :, 0] += 10.31 + 0.02
    near[0, 4], near[1, 2] = (0.0, 0.0), (10.0 - 0.1 * size, 0.0)
    rows = np.repeat([[0.1, 0.9], [0.1 * math.e**5 / 20, 1 - 0.1 * math.e**5 / 20]], 9, axis=0)
    return Mechanism(rows, near.reshape(-1, 2))


def check_planted(mechanism: Mechanism, size: float, *, lattice: bool = True) -> None:
    """Exactly the planted triple is found, down to the last bit; then nothing is."""
    worst = mechanism.triples[0]
    epsilon = short_of(worst.slope, size)
    assert mechanism.broken(epsilon) == 1
    for limit in (epsilon, float_below(worst.slope)):
        report = check_all_pairs(mechanism, limit)
        assert not report.holds
        assert report.violations == 1
        assert (records_of(report.worst), report.worst["output"]) == (worst.records, worst.output)
    report = check_all_pairs(mechanism, float_above(worst.slope))
    assert report.verdict == "holds"
    assert report.epsilon <= float_above(worst.slope)
    if not lattice:
        return
    assert not check_cells(mechanism, epsilon).holds
    largest = mechanism.cells[0][0]
    check_cells(mechanism, float_below(largest))
    report = check_cells(mechanism, float_above(largest))
    assert report.verdict == "holds"
    assert report.epsilon <= float_above(largest)


# --- near ties, anywhere in the list --------------------------------------------------------------


def check_ties(mechanism: Mechanism, ranks: tuple[int, ...], *, lattice: bool = False) -> None:
    """Check that what is a bit above ε counts, and what is a bit below does not, of steep triples one by one.

    And the same with a tolerance that makes up for half of ε.
    """
    for rank in ranks:
        triple = mechanism.triples[rank]
        slope, half = triple.slope, float(triple.slope) / 2
        excess = triple.excess(half)
        for beside in (float_below, float_above):
            check_all_pairs(mechanism, beside(slope))
            check_all_pairs(mechanism, half, beside(excess))
            if lattice:
                check_cells(mechanism, beside(mechanism.cells[min(rank, len(mechanism.cells) - 1)][0]))
                check_cells(mechanism, beside(mechanism.cells[len(mechanism.cells) // 2 + rank][0]))


@cache
def four_on_a_line() -> Mechanism:
    """Two parts of two records; the bounds of the parts are attained by the pair that is nearest.

    Going east log M(0|x) falls, rises steeply, and falls: the lowest of the west and the highest of the east
    are neighbours.
    """
    share = np.array([0.05, 0.02, 0.06, 0.03])
    points = np.array([[0.0, 0.0], [0.5, 0.0], [1.5, 0.0], [2.0, 0.0]])
    return Mechanism(np.stack([share, 1 - share], axis=1), points)


@cache
def equally_steep(step_km: float = 0.1, share: float = 0.4) -> Mechanism:
    """Return a truncated geometric mechanism: every pair is as steep as ε = 1, but for the last bits."""
    x = step_km * np.arange(12)
    rows = np.stack([share * np.exp(-x), 1 - share * np.exp(-x)], axis=1)
    return Mechanism(rows, np.stack([x, np.zeros(12)], axis=1))


@cache
def random_case(
    seed: int,
    n: int | tuple[int, int],
    outputs: int = 3,
    *,
    p: float = 2.0,
    dtype: Any = np.float64,
    roughness: float = 0.7,
    same_place: bool = False,
    zeros: bool = False,
    unusable: bool = False,
) -> Mechanism:
    """Return random rows at random points, or on an uneven lattice.

    Parameters
    ----------
    seed
        What it follows from.
    n
        Number of records, or records to the east and to the north.
    outputs, p, dtype
        K, the metric's exponent, and the type of the rows.
    roughness
        Standard deviation of log scores.
    same_place
        Whether some records are where others are: with the same row, with another, with one that differs in
        its last bit, and with twice the row.
    zeros
        Whether one output is impossible, one from a few records, and one from one of two at a place.
    unusable
        Whether some rows are no distributions.
    """
    rng = np.random.default_rng(seed)
    if isinstance(n, tuple):
        east, north = (np.cumsum(rng.uniform(0.2, 1.5, size=side)) for side in n)
        points = np.stack(np.meshgrid(east, north, indexing="ij"), axis=-1).reshape(-1, 2)
        points = points[rng.permutation(len(points))]
    else:
        points = rng.uniform(0, 3, size=(n, 2))
    count = len(points)
    # Of similar rows: many are steep, and none is out of reach of the others.
    rows = softmax(rng.normal(scale=roughness, size=(count, outputs)) - np.arange(outputs) * 2.0)
    if zeros:
        rows = np.concatenate([rows, np.zeros((count, 1)), rng.uniform(0, 1, size=(count, 1)) > 0.2], axis=1)
        rows /= rows.sum(axis=1, keepdims=True)
    rows = rows.astype(dtype)
    if same_place and count >= 4:
        where = rng.permutation(count)
        points[where[[1, 3]]] = points[where[[0, 2]]]
        kind = seed % 4
        if kind != 3:
            rows[where[1]] = rows[where[0]] * dtype(2 if kind == 2 else 1)
        if kind == 1:
            rows[where[1], 0] = np.nextafter(rows[where[1], 0], dtype(1))
        if seed % 3:
            rows[where[3]] = rows[where[2]]
    if unusable:
        some = rng.permutation(count)
        rows[some[0], 0] = math.nan
        rows[some[1 % count], -1] = -0.1
        rows[some[2 % count]] = 0.0
    return Mechanism(rows, points, p)


# --- copies in few bits ---------------------------------------------------------------------------


@cache
def good_copy() -> tuple[Mechanism, float]:
    """Return the exponential mechanism of eight outputs for 25 × 25 records, and an ε that it keeps."""
    x = np.arange(25) / 24
    points = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1).reshape(-1, 2)
    outputs = np.random.default_rng(1).uniform(-40, 40, size=(8, 2))
    apart = np.hypot(*(points[:, None] - outputs).transpose(2, 0, 1))
    return Mechanism(softmax(-apart / 2).astype(np.float32), points), 1.0


def few_bits(rows: Array) -> dict[str, NDArray[Any]]:
    """Return copies of rows that are too coarse, by name."""
    scaled = np.maximum(np.rint(rows * 65535), 1).astype(np.uint16)
    half = rows.astype(np.float16)
    return {
        "float16": half, "float16 as float32": half.astype(np.float32), "uint16": scaled,
        "uint16 as float32": (scaled / np.float32(65535)).astype(np.float32),
    }  # fmt: skip


def check_copy(rows: NDArray[Any], points: NDArray[np.float64], epsilon: float, method: str) -> None:
    report = ask(Mechanism(rows, points), method, epsilon, **how_sampled(method, 3000))
    assert report.verdict == "violated"
    assert report.violations > 0
    assert report.epsilon > 1.5 * epsilon


def check_good_copy(mechanism: Mechanism, epsilon: float, method: str) -> None:
    report = ask(mechanism, method, epsilon, **how_sampled(method, 3000))
    assert report.verdict == ("no violation found" if method == "sampled" else "holds")
    assert report.violations == 0
    assert report.epsilon <= epsilon


METHODS = ("exhaustive", "certificate", "sampled")


# --- a store --------------------------------------------------------------------------------------


def make_store(folder: Path) -> str:
    """Build a store of six blocks with 5 × 7 records, 4 km apart, and three outputs; return where it is."""
    job = {
        "job": {"name": "six"}, "domain": {"roads": "builtin:manhattan", "cell_km": 8.0, "refine": [2]},
        "privacy": {"epsilon_per_km": 1.0, "budget": "bound"}, "outputs": {"count": 3},
        "prior": {"kind": "uniform"}, "loss": {"kind": "euclidean"}, "store": {"block_cells": [1, 1]},
        "cluster": {"kind": "inline"},
    }  # fmt: skip
    url = str(folder / "six.zarr")
    build(parse_job(job), url)
    assert MechanismStore.open(url).plan.blocks == 6
    return url


def plant_in_store(url: str, record: tuple[int, int], size: float, axis: int = 0) -> Mechanism:
    """Write a ramp with one record too high over the rows of a store, and return what it holds now.

    What is planted is between the record and its neighbour to the west (axis 0) or to the south (axis 1).
    """
    store = MechanismStore.open(url)
    slope, step = 0.05, store.grid.spacing_km
    i, j = np.indices(store.grid.shape)
    rise = slope * step * (i, j)[axis]
    logs = rise - rise.max() - 2.5
    # The last bit of float32 is 1e-7 of a number.
    logs[record] += max(4 * size * slope * step, 1e-5)
    share = np.exp(logs)
    rows = np.stack([share, 0.4 * (1 - share), 0.6 * (1 - share)], axis=-1).astype(np.float32)
    zarr.open_array(f"{url}/probability", mode="r+")[...] = rows
    points = np.stack(np.meshgrid(store.grid.x_km(), store.grid.y_km(), indexing="ij"), axis=-1)
    return Mechanism(rows.reshape(-1, 3), points.reshape(-1, 2))


def ask_store(url: str, method: str, planar: float, **how: Any) -> Any:
    """Return the report on a store for the smallest promise whose limit in the plane is at least `planar`."""
    store = MechanismStore.open(url)
    distortion = store.projection.distortion(store.grid.box.radius_km)
    promised = planar * (1 + distortion) * (1 - 1e-15)
    while planar_epsilon(promised, distortion) < planar:
        promised = math.nextafter(promised, math.inf)
    sampling = current("auditors.methods", "Sampling")(**how) if how else None
    report = current("auditors.audit", "audit")(
        url, method, epsilon_per_km=promised, metric_p=2, sampling=sampling, workers=1
    )
    assert report.epsilon_planar_per_km >= planar
    # Records of a store are named by their place on the lattice.
    if report.worst:
        places = {name: report.worst[name] for name in ("record", "record_prime")}
        numbers = {name: i * store.grid.shape[1] + j for name, (i, j) in places.items()}
        report = replace(report, worst={**report.worst, **numbers})
    return report


def check_planted_in_store(url: str, record: tuple[int, int], size: float, axis: int = 0) -> None:
    """Exactly what was planted in a store is found, and nothing is at the next float."""
    mechanism = plant_in_store(url, record, size, axis)
    across = MechanismStore.open(url).grid.shape[1]
    higher = record[0] * across + record[1]
    planted = frozenset((higher, higher - (across, 1)[axis]))
    worst = mechanism.triples[0]
    assert (worst.records, worst.output) == (planted, 0)
    report = ask_store(url, "exhaustive", short_of(worst.slope, size))
    assert mechanism.broken(report.epsilon_planar_per_km) == 1
    assert (report.violations, records_of(report.worst)) == (1, planted)
    check_all_pairs_of(report, mechanism, report.epsilon_planar_per_km)
    report = ask_store(url, "exhaustive", float_above(worst.slope))
    check_all_pairs_of(report, mechanism, report.epsilon_planar_per_km)
    # Its bytes are not those that were certified when it was built.
    assert (report.verdict, report.violations) == ("changed since it was written", 0)
    largest = mechanism.cells[0][0]
    for limit in (short_of(worst.slope, size), short_of(largest, 1e-15)):
        report = ask_store(url, "certificate", limit)
        check_cells_of(report, mechanism, report.epsilon_planar_per_km)
        assert report.details["cells_above_limit"] > 0
    report = ask_store(url, "certificate", float_above(largest))
    assert (report.violations, report.verdict) == (0, "changed since it was written")


# --- everything, quickly --------------------------------------------------------------------------


def check_known_answers() -> None:
    """Ask for all that is known of plain arrays, in a second or two; what kills most mistakes comes first."""
    for p in (2.0, 1.0, math.inf, 1.5):
        mechanism = random_case(5, (4, 3), p=p)
        with cut_small(part=96, band=200, strip=3):
            check_ties(mechanism, (0, 2) if p == 2 else (1,), lattice=True)
        beside = float_below(mechanism.sup), float_above(mechanism.sup)
        for epsilon in (*beside, short_of(mechanism.sup, 1e-6), 0.4):
            check_sample(mechanism, epsilon, pairs=1500, random_seed=0, confidence=0.95)
    with cut_small():
        check_ties(four_on_a_line(), (0, 1, 2))
    # Several, for which of them are equally steep in float64 depends on how a machine's logarithms round.
    for step_km, share in ((0.1, 0.4), (0.13, 0.45), (0.11, 0.45)):
        with cut_small():
            check_all_pairs(equally_steep(step_km, share), 1.0)
    same_place = random_case(9, 9, same_place=True)
    zeros = random_case(3, 8, zeros=True, dtype=np.float32)
    for mechanism in (same_place, zeros, random_case(2, 8, unusable=True)):
        check_all_pairs(mechanism, 1.0, tolerance=0.3)
        with cut_small():
            check_all_pairs(mechanism, 1.0)
        check_sample(mechanism, 1.0, tolerance=0.3, pairs=1500, random_seed=0, confidence=0.95)
    with cut_small():
        check_planted(planted_beside((3, 2), 1e-9, (6, 3)), 1e-9)
        check_planted(planted_between_clusters(1e-6), 1e-6, lattice=False)
    check_planted(planted_afar(1e-6), 1e-6)
    for make in FORMULAS:
        for p in EXPONENTS:
            check_formula(make, p)
    for top in ((0, 0), (0, 4), (4, 1)):
        with cut_small(band=80):
            check_cone(2.0, 1, 1 / math.cos(math.pi / 8), top)
            check_cone(2.0, 3, 1 / math.cos(math.atan2(1, 3) / 2), top)
            check_cone(math.inf, 1, 1.0, top)
            check_cone(1.0, 0, 1.0, top)
    # Steepest along its last line.
    i, j = np.indices((5, 3))
    saddle = np.exp(-0.1 * i * j).reshape(-1, 1) / 1000
    points = np.stack([i, j], axis=-1).reshape(-1, 2) * 1.0
    with cut_small(band=48):
        check_steps(Mechanism(np.concatenate([saddle, 1 - saddle], axis=1), points), (5, 3))
    with cut_small(band=80):
        check_cone(2.0, 3, 1 / math.cos(math.atan2(1, 3) / 2), (0, 0), (9, 2))
    for seed, p in product((20, 26), (2.0, 1.5, 3.0, math.inf)):
        with cut_small(band=96):
            check_steps(random_case(seed, (4, 3), p=p), (4, 3))
    good, epsilon = good_copy()
    bad = few_bits(good.rows)
    for method in METHODS:
        check_good_copy(good, epsilon, method)
        for name in ("float16 as float32", "uint16"):
            check_copy(bad[name], good.points, epsilon, method)
