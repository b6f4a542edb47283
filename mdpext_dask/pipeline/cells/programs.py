"""The programs of patches: a few records each, thousands at a time, their surroundings fixed.

With R a row of the reference, z = R u, and budgets b between neighbours,

    min Σ c_ik z_ik   s.t.  Σ_k z_ik = 1,   z_ik ≤ exp(b) z_jk for neighbours i, j in the patch, both ways,

and bounds on u from the floor and from neighbours outside. u = 1 is the reference, and it keeps every
constraint, so no program is infeasible.

For output k the constraints tie together the points of the patch; row sums tie together the outputs. The
primal-dual method (Mehrotra's predictor and corrector, from slacks of any size) solves, for every program,

    H_k Δu_k = R_k Δν + q_k,     Σ_k R_k Δu_k = r      =>      (Σ_k R_k H_k⁻¹ R_k) Δν = r − Σ_k R_k H_k⁻¹ q_k.

Everything is elementwise over programs, in a fixed order, made of sums, products, quotients and roots: a
program's solution has the same bits in whatever batch and on whatever machine it is solved.

A matrix is a dictionary from (i, j), i ≥ j, to an array with that entry of every program; entries outside the
band are not there. For systems of a few unknowns this is faster than a call of LAPACK for each.

HiGHS solves the programs one by one where this method fails, and is its reference in the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from mdpext_dask.errors import SolverError
from mdpext_dask.seed.highs import rows_of_two, solve_linear_program

Floats = NDArray[np.float64]
Matrix = dict[tuple[int, int], Floats]
# Relative gap to stop at, iterations at most, and after how many finished programs are taken out of the
# batch.
_GAP, _ITERATIONS, _COMPACT = 1e-5, 60, 4
# What a violation counts against the gap: margins that the reference keeps are small.
_VIOLATION_WEIGHT = 1e4
# Slacks to begin with, at least; how far to the boundary a step goes.
_SLACK, _SHORT = 0.05, 0.99
# A solution is used although it is not optimal to :data:`_GAP` if it is this close.
_GOOD_ENOUGH = 1e-2
# A pivot is at least this share of the diagonal entry it comes from: what rounding may have eaten up.
_LEAST_PIVOT = 1e-14
# HiGHS is not given coefficients below this share of 1.
_NEGLIGIBLE = 1e-11


@dataclass(frozen=True)
class Patches:
    """Programs of one shape.

    Parameters
    ----------
    cost
        c, float64 of shape (n, K, P): points, outputs, programs; in km.
    reference
        R, rows of the reference, same shape; over outputs they sum to 1.
    pairs
        Neighbours in the patch (i, j), both ways.
    weight
        w, float64 of shape (pairs, K, P) in (0, 1]: u_j ≥ w u_i.
    lower, upper
        Bounds of u, shape (n, K, P), lower ≤ 1 ≤ upper.
    band
        Largest |i − j| of neighbours.
    """

    cost: Floats
    reference: Floats
    pairs: tuple[tuple[int, int], ...]
    weight: Floats
    lower: Floats
    upper: Floats
    band: int

    def part(self, which: NDArray[np.intp]) -> "Patches":
        """Return some of the programs."""
        arrays = ("cost", "reference", "weight", "lower", "upper")
        return replace(self, **{name: getattr(self, name).take(which, axis=-1) for name in arrays})

    def gain(self, u: Floats) -> Floats:
        """Return by how much u lowers the cost of the reference, shape (P,), in km."""
        return np.asarray((self.cost * self.reference * (1 - u)).sum(axis=(0, 1)))

    def towards_reference(self, u: Floats) -> Floats:
        """Return how far to go from u to the reference, in [0, 1], until every row is kept; shape (P,).

        A row's violation is linear along the way, and the reference violates none.
        """
        share = np.zeros(u.shape[-1])
        one = np.ones_like(u)
        for there, reference in zip(self._violations(u), self._violations(one), strict=True):
            over = np.maximum(there, 0.0)
            with np.errstate(invalid="ignore"):
                needed = np.where(over > 0, over / (over - np.minimum(reference, 0.0)), 0.0)
            share = np.maximum(share, needed.max(axis=(0, 1), initial=0.0))
        return share

    def _violations(self, u: Floats) -> tuple[Floats, Floats, Floats]:
        first, second = _indices(self.pairs)
        return self.weight * u[first] - u[second], self.lower - u, u - self.upper


@dataclass(frozen=True)
class Solutions:
    """What became of programs.

    Parameters
    ----------
    u
        Rows over the reference's, float64 of shape (n, K, P): every constraint is kept, no cost is above the
        reference's, and where a program failed it is 1.
    failed
        Programs whose solution could not be used, bool of shape (P,).
    """

    u: Floats
    failed: NDArray[np.bool_]


def solve_patches(patches: Patches) -> Solutions:
    """Solve programs; what comes out is feasible and never worse than the reference."""
    count = patches.cost.shape[-1]
    # Sums run in the order of memory: programs last, and two of them at least.
    u, gap = _interior_point(patches.part(np.arange(max(count, 2)) % count))
    u, gap = u[..., :count], gap[:count]
    sound = np.isfinite(u).all(axis=(0, 1))
    u = np.where(sound, u, 1.0)
    return usable(patches, u, failed=~(sound & (gap <= _GOOD_ENOUGH)))


def usable(patches: Patches, u: Floats, failed: NDArray[np.bool_]) -> Solutions:
    """Bring proposals back into the feasible set; give up those that gain nothing or have failed."""
    u = np.clip(u, patches.lower, patches.upper)
    share = patches.towards_reference(u)
    u = u + share * (1 - u)
    better = (patches.gain(u) > 0) & ~failed
    return Solutions(u=np.where(better, u, 1.0), failed=failed)


def _indices(pairs: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class _Iterate:
    """u, slacks and multipliers of a batch of programs, and its Newton steps."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches
        self.first, self.second = _indices(patches.pairs)
        # Row sums are fixed, so what a row costs at least plays no part.
        regret = patches.cost - patches.cost.min(axis=1, keepdims=True)
        self.cost = regret * patches.reference
        scale = self.cost.sum(axis=(0, 1))
        self.worthless = scale == 0
        self.cost /= np.where(self.worthless, 1.0, scale)
        self.u = np.ones_like(self.cost)
        self.nu = np.zeros((self.cost.shape[0], self.cost.shape[2]))
        self.slack = [np.maximum(row, _SLACK) for row in self._rows(self.u)]
        start = 0.1 * np.maximum(self.cost.mean(axis=(0, 1)), np.finfo(float).tiny)
        self.multiplier = [start / slack for slack in self.slack]
        self._count = sum(slack[..., 0].size for slack in self.slack)

    def part(self, which: NDArray[np.intp]) -> "_Iterate":
        """Return the iterate of some of the programs."""
        part = object.__new__(_Iterate)
        part.patches = self.patches.part(which)
        part.first, part.second, part._count = self.first, self.second, self._count
        part.cost, part.u, part.nu = (v.take(which, axis=-1) for v in (self.cost, self.u, self.nu))
        part.slack = [slack.take(which, axis=-1) for slack in self.slack]
        part.multiplier = [multiplier.take(which, axis=-1) for multiplier in self.multiplier]
        return part

    def gap(self) -> Floats:
        """Return the relative gap, with what is missing of feasibility; shape (P,)."""
        self.residual = [row - slack for row, slack in zip(self._rows(self.u), self.slack, strict=True)]
        reference = self.patches.reference
        self.dual = self.cost - self._transposed(self.multiplier) - reference * self.nu[:, None]
        self.missing = 1 - (reference * self.u).sum(axis=1)
        self.complementarity = _dot(self.slack, self.multiplier)
        primal = (self.cost * self.u).sum(axis=(0, 1))
        away = np.abs(self.dual).sum(axis=(0, 1))
        infeasible = np.max([np.abs(r).max(axis=(0, 1), initial=0.0) for r in self.residual], axis=0)
        floor = np.finfo(float).tiny
        relative = (self.complementarity + away) / np.maximum(np.abs(primal), floor)
        return np.asarray(relative + _VIOLATION_WEIGHT * infeasible)

    def step(self) -> None:
        """Make a predictor and a corrector step; call :meth:`gap` first."""
        self._factorise()
        mean = self.complementarity / self._count
        affine = [-s * m for s, m in zip(self.slack, self.multiplier, strict=True)]
        *_, ds, dm = self._direction(affine)
        primal = np.minimum(1.0, self._longest(self.slack, ds))
        dual = np.minimum(1.0, self._longest(self.multiplier, dm))
        ahead = _dot(
            [s + primal * d for s, d in zip(self.slack, ds, strict=True)],
            [m + dual * d for m, d in zip(self.multiplier, dm, strict=True)],
        )
        # Not a power, whose last bit depends on the machine.
        share = ahead / self.complementarity
        centre = share * share * share * mean
        right = [centre + a - x * y for a, x, y in zip(affine, ds, dm, strict=True)]
        du, dnu, ds, dm = self._direction(right)
        primal = np.minimum(1.0, _SHORT * self._longest(self.slack, ds))
        dual = np.minimum(1.0, _SHORT * self._longest(self.multiplier, dm))
        self.u = self.u + primal * du
        self.nu = self.nu + dual * dnu
        self.slack = [s + primal * d for s, d in zip(self.slack, ds, strict=True)]
        self.multiplier = [m + dual * d for m, d in zip(self.multiplier, dm, strict=True)]

    def _rows(self, u: Floats) -> list[Floats]:
        patches = self.patches
        return [u[self.second] - patches.weight * u[self.first], u - patches.lower, patches.upper - u]

    def _forward(self, du: Floats) -> list[Floats]:
        return [du[self.second] - self.patches.weight * du[self.first], du, -du]

    def _transposed(self, values: list[Floats]) -> Floats:
        total = values[1] - values[2]
        weighted = self.patches.weight * values[0]
        for row, (i, j) in enumerate(self.patches.pairs):
            total[j] += values[0][row]
            total[i] -= weighted[row]
        return total

    def _factorise(self) -> None:
        patches, size = self.patches, len(self.u)
        self.theta = [m / s for m, s in zip(self.multiplier, self.slack, strict=True)]
        matrix: Matrix = {(i, i): self.theta[1][i] + self.theta[2][i] for i in range(size)}
        weighted = self.theta[0] * patches.weight
        squared = weighted * patches.weight
        for row, (i, j) in enumerate(patches.pairs):
            matrix[j, j] += self.theta[0][row]
            matrix[i, i] += squared[row]
            where = max(i, j), min(i, j)
            matrix[where] = matrix[where] - weighted[row] if where in matrix else -weighted[row]
        self.factor = factorised(matrix, size, patches.band)
        # Σ_k R_k H_k⁻¹ R_k = Σ_k (L_k⁻¹ R_k)ᵀ (L_k⁻¹ R_k), column by column from the diagonal down.
        zero = np.zeros_like(self.u[0])
        columns = [
            np.stack(
                forward(self.factor, patches.band, [patches.reference[j], *[zero] * (size - 1 - j)], first=j)
            )
            for j in range(size)
        ]
        schur: Matrix = {
            (i, j): (columns[j][i - j :] * columns[i]).sum(axis=(0, 1))
            for j in range(size)
            for i in range(j, size)
        }
        self.schur = factorised(schur, size, size)

    def _direction(self, right: list[Floats]) -> tuple[Floats, Floats, list[Floats], list[Floats]]:
        """Return Δu, Δν, Δslack and Δmultiplier for s Δλ + λ Δs = right."""
        reference, band = self.patches.reference, self.patches.band
        parts = zip(right, self.multiplier, self.residual, self.slack, strict=True)
        q = self._transposed([(r - m * p) / s for r, m, p, s in parts]) - self.dual
        y = np.stack(solved(self.factor, band, list(q)))
        need = self.missing - (reference * y).sum(axis=1)
        dnu = np.stack(solved(self.schur, len(need), list(need)))
        du = np.stack(solved(self.factor, band, list(q + reference * dnu[:, None])))
        ds = [row + p for row, p in zip(self._forward(du), self.residual, strict=True)]
        dm = [(r - m * d) / s for r, m, d, s in zip(right, self.multiplier, ds, self.slack, strict=True)]
        return du, dnu, ds, dm

    @staticmethod
    def _longest(values: list[Floats], steps: list[Floats]) -> Floats:
        """Return how far all values stay positive, shape (P,)."""
        steepest = [(-d / v).max(axis=(0, 1), initial=0.0) for v, d in zip(values, steps, strict=True)]
        return np.asarray(1 / np.maximum(np.max(steepest, axis=0), np.finfo(float).tiny))


def _dot(left: list[Floats], right: list[Floats]) -> Floats:
    return np.asarray(sum((a * b).sum(axis=(0, 1)) for a, b in zip(left, right, strict=True)))


def _interior_point(patches: Patches) -> tuple[Floats, Floats]:
    """Return the best iterate of every program, and its gap."""
    iterate = _Iterate(patches)
    # Where all outputs cost the same, nothing is to be gained.
    u, reached = np.ones_like(patches.cost), np.where(iterate.worthless, 0.0, np.inf)
    running = np.arange(len(reached))
    with np.errstate(all="ignore"):  # a program that fails is told by its gap, and no warning
        for iteration in range(_ITERATIONS):
            gap = iterate.gap()
            # A program stops when it is close enough, whatever others are in the batch.
            closer = (gap < reached[running]) & (reached[running] > _GAP)
            u[..., running[closer]] = iterate.u[..., closer]
            reached[running[closer]] = gap[closer]
            open_ = (reached[running] > _GAP) & np.isfinite(gap)
            if not open_.any():
                break
            if iteration % _COMPACT == 0 and not open_.all() and len(running) > 2:
                # Two at least, for the order of sums.
                left = np.sort(np.argsort(~open_, kind="stable")[: max(int(open_.sum()), 2)])
                iterate, running = iterate.part(left), running[left]
                iterate.gap()
            iterate.step()
    return u, reached


# --- small systems ---


def factorised(matrix: Matrix, size: int, band: int) -> Matrix:
    """Return L with L Lᵀ = matrix; on the diagonal, the reciprocals of its entries.

    Parameters
    ----------
    matrix
        The lower triangle.
    size
        Unknowns n.
    band
        Entries with i − j > band are zero.
    """
    factor: Matrix = {}
    for j in range(size):
        pivot = matrix[j, j].copy()
        for k in range(max(0, j - band), j):
            pivot -= factor[j, k] ** 2
        np.maximum(pivot, _LEAST_PIVOT * matrix[j, j], out=pivot)
        factor[j, j] = 1 / np.sqrt(pivot)
        for i in range(j + 1, min(size, j + band + 1)):
            entry = matrix[i, j].copy() if (i, j) in matrix else np.zeros_like(pivot)
            for k in range(max(0, i - band), j):
                entry -= factor[i, k] * factor[j, k]
            entry *= factor[j, j]
            factor[i, j] = entry
    return factor


def forward(factor: Matrix, band: int, right: Sequence[Floats], first: int = 0) -> list[Floats]:
    """Solve L x = right for the unknowns from `first` on; `right` begins there, and is zero before."""
    x: list[Floats] = []
    for i, entry in enumerate(right, start=first):
        value = entry.copy()
        for k in range(max(first, i - band), i):
            value -= factor[i, k] * x[k - first]
        value *= factor[i, i]
        x.append(value)
    return x


def solved(factor: Matrix, band: int, right: Sequence[Floats]) -> list[Floats]:
    """Solve L Lᵀ x = right."""
    x = forward(factor, band, right)
    size = len(x)
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, min(size, i + band + 1)):
            x[i] -= factor[k, i] * x[k]
        x[i] *= factor[i, i]
    return x


# --- HiGHS ---


def solve_with_highs(patches: Patches) -> Solutions:
    """Solve programs; those that HiGHS cannot solve have failed."""
    points, outputs, programs = patches.cost.shape
    u = np.ones_like(patches.cost)
    failed = np.zeros(programs, dtype=bool)
    for program in range(programs):
        try:
            u[..., program] = _solve_one(patches.part(np.array([program]))).reshape(points, outputs)
        except SolverError:
            failed[program] = True
    return usable(patches, u, failed)


def _solve_one(patches: Patches) -> NDArray[np.float64]:
    points, outputs, _ = patches.cost.shape
    reference = patches.reference[..., 0]
    cost = (patches.cost[..., 0] - patches.cost[..., 0].min(axis=1, keepdims=True)) * reference
    scale = float(cost.sum()) or 1.0
    # u_j − w u_i ≥ 0 for every pair and output; then the sums of the points' rows.
    pairs = np.array(patches.pairs, dtype=np.intp).reshape(-1, 2)
    count = len(pairs) * outputs
    output = np.tile(np.arange(outputs), len(pairs))
    first = np.repeat(pairs[:, 0], outputs) * outputs + output
    second = np.repeat(pairs[:, 1], outputs) * outputs + output
    weight, shape = patches.weight[..., 0].ravel(), (points, points * outputs)
    budgets = rows_of_two((first, -weight), (second, np.ones(count)), shape[1])
    of_point = np.repeat(np.arange(points), outputs), np.arange(shape[1])
    sums = sparse.csr_array((reference.ravel(), of_point), shape=shape)
    matrix = sparse.csr_array(sparse.vstack([budgets, sums]))
    # HiGHS refuses coefficients that it would drop; rows are normalised afterwards, so they are not needed.
    matrix.data[np.abs(matrix.data) < _NEGLIGIBLE] = 0
    matrix.eliminate_zeros()
    u, _, _ = solve_linear_program(
        f"the program of a patch of {points} records, {outputs} outputs",
        cost=cost.ravel() / scale,
        bounds=(patches.lower[..., 0].ravel(), patches.upper[..., 0].ravel()),
        matrix=matrix,
        row_bounds=(np.repeat([0.0, 1.0], [count, points]), np.repeat([np.inf, 1.0], [count, points])),
    )
    return u
