"""The interior-point iterate, by outputs: everything that one output's columns can do without the others.

Only the row sums tie outputs together. So the outputs are cut into parts, whose algebra runs side by side on
threads; what has to be added up over outputs is returned, and the multipliers ν of the row sums come in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mdpext_dask.seed.block_tridiagonal import NormalMatrix
from mdpext_dask.seed.grid_rows import GridRows, Groups
from mdpext_dask.seed.model import Array, DualPart, dual_part


@dataclass(frozen=True)
class GridProgram:
    """min Σ_k c_k·z_k  s.t.  A_k z_k ≥ b_k,  lower ≤ z ≤ upper,  Σ_k z_k = total at every seed.

    Parameters
    ----------
    cost
        c, float64 of shape (K, n, m): by output, blocks, position in a block.
    rows
        A and b.
    lower, upper
        Bounds, broadcastable to the shape of `cost`.
    capped
        Whether `upper` is a constraint of its own; if not, the others imply it.
    start
        Where z starts, inside its bounds, float64 of the shape of `cost`.
    total
        What every seed's row sums to; about K, so that entries are about 1.
    """

    cost: Array
    rows: GridRows
    lower: Array
    upper: Array
    capped: bool
    start: Array
    total: float

    @classmethod
    def over_mechanisms(cls, cost: Array, rows: GridRows, lower: float) -> "GridProgram":
        """Return a program whose columns are scaled by K, so that the uniform mechanism is z = 1."""
        outputs, start = float(len(cost)), np.ones_like(cost)
        return cls(cost, rows, np.array(lower), np.array(outputs), capped=False, start=start, total=outputs)

    def part(self, outputs: slice) -> "GridProgram":
        """Return the program of a range of outputs; only the row sums miss the others."""

        def cut(bound: Array) -> Array:
            return bound[outputs] if bound.ndim == 3 and len(bound) > 1 else bound

        rows, lower, upper = self.rows.part(outputs), cut(self.lower), cut(self.upper)
        cost, start = self.cost[outputs], self.start[outputs]
        return GridProgram(cost, rows, lower, upper, self.capped, start, self.total)


class Measures(NamedTuple):
    """Shares of one part in objective, lower bound and row sums; and how far its rows are off."""

    primal: float
    dual: DualPart
    sums: Array
    infeasibility: float


class Move(NamedTuple):
    """A change of z, slacks and multipliers."""

    z: Array
    slack: Groups
    multiplier: Groups


# How far slacks and multipliers may go.
Lengths = tuple[float, float]
# Shares of a corrector that are tried.
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


class Columns:
    """Iterate and Newton system of some outputs.

    Parameters
    ----------
    program
        Their part of the program.
    level
        Product of every slack and its multiplier at the start.
    least_slack
        Least slack of a row at the start, relative to how far rows are from their limits at most.
    """

    def __init__(self, program: GridProgram, level: float, least_slack: float) -> None:
        self._program = program
        self.z = program.start
        count = len(program.rows.limits)
        slack = self._all_of(program.start)
        self._slack: Groups = (
            *(np.maximum(s, least_slack * float(np.abs(s).max(initial=0.0))) for s in slack[:count]),
            *slack[count:],
        )
        self._multiplier: Groups = tuple(level / s for s in self._slack)
        self._row_size = max((float(s.max(initial=0.0)) for s in self._slack[:count]), default=0.0)

    # --- the whole constraint matrix: rows, floors, and ceilings where there are any ----------------

    def _all_of(self, z: Array) -> Groups:
        """Return what the constraints leave: A z − b, z − lower, upper − z."""
        program = self._program
        rows = program.rows.forward(z)
        left = tuple(np.subtract(r, b, out=r) for r, b in zip(rows, program.rows.limits, strict=True))
        return (*left, z - program.lower, *((program.upper - z,) if program.capped else ()))

    def _transposed(self, v: Groups) -> Array:
        count = len(self._program.rows.limits)
        total = self._program.rows.transposed(v[:count])
        total += v[count]
        if self._program.capped:
            total -= v[count + 1]
        return total

    # --- one iteration ------------------------------------------------------------------------------

    def measure(self, nu: Array) -> Measures:
        """Set the residuals of the optimality conditions for ν; return what they add up to."""
        program, count = self._program, len(self._program.rows.limits)
        of_rows = self._multiplier[:count]
        reduced = program.cost - program.rows.transposed(of_rows)
        reduced -= nu
        # All multipliers are positive, so what was subtracted is as large as under the absolute values.
        sizes = np.abs(program.cost) + np.abs(nu) + program.rows.magnitude(of_rows)
        dual = dual_part(reduced, sizes, program.lower, program.upper)
        for multiplier, limit in zip(of_rows, program.rows.limits, strict=True):
            if limit.ndim:
                terms = multiplier * limit
                dual = dual.plus(float(terms.sum()), float(np.abs(terms).sum()), terms.size)
        self._primal_residual = tuple(
            np.subtract(left, s, out=left) for left, s in zip(self._all_of(self.z), self._slack, strict=True)
        )
        reduced -= self._multiplier[count]
        if program.capped:
            reduced += self._multiplier[count + 1]
        self._dual_residual = reduced
        off = max((float(np.abs(r).max(initial=0.0)) for r in self._primal_residual[:count]), default=0.0)
        infeasibility = off / self._row_size if self._row_size else off
        primal = float(np.vdot(program.cost, self.z))
        return Measures(primal, dual, self.z.sum(axis=0), infeasibility)

    def complementarity(self) -> tuple[float, int]:
        """Return Σ s λ and the number of its terms."""
        pairs = zip(self._slack, self._multiplier, strict=True)
        return sum(float(np.vdot(s, m)) for s, m in pairs), sum(s.size for s in self._slack)

    def stencil(self) -> NormalMatrix:
        """Return the matrices H = Aᵀ diag(λ / s) A of this iterate."""
        count = len(self._program.rows.limits)
        self._theta = tuple(m / s for m, s in zip(self._multiplier, self._slack, strict=True))
        matrix = self._program.rows.normal(self._theta[:count])
        for theta in self._theta[count:]:
            np.add(matrix.main, theta, out=matrix.main)
        self._matrix = matrix
        return matrix

    def factorise(self) -> None:
        """Factorise the matrices of :meth:`stencil`.

        Raises
        ------
        numpy.linalg.LinAlgError
            If one is not positive definite even when shifted.
        """
        self._system = self._matrix.factorised()

    def inverse_sum(self) -> Array:
        """Return the upper triangle of Σ_k H_k^{-1}, float64 of shape (J, J)."""
        return self._system.inverse_sum()

    # --- right-hand sides of a Newton step: each returns its largest entry --------------------------

    def aim_affine(self) -> float:
        """Aim at the solution: products of slacks and multipliers at zero."""
        return self._aim(tuple(-m * s for m, s in zip(self._multiplier, self._slack, strict=True)), True)

    def aim_second(self, target: float) -> float:
        """Aim at products equal to a target, and correct for the second-order term of the step so far."""
        self._keep()
        kept = zip(self._kept.slack, self._kept.multiplier, strict=True)
        return self._aim(tuple(target - dm * ds for ds, dm in kept), False)

    def aim_central(self, target: float, lengths: Lengths) -> float:
        """Pull products that a step of these lengths would throw off the central path into [0.1, 10] targets.

        Gondzio, Comput. Optim. Appl. 6 (1996).
        """
        self._keep()
        pulls = []
        for s, ds, m, dm in self._moving(self._kept):
            product = (s + lengths[0] * ds) * (m + lengths[1] * dm)
            pull = np.clip(product, 0.1 * target, 10 * target) - product
            pulls.append(np.maximum(pull, -10 * target, out=pull))
        return self._aim(tuple(pulls), False)

    def _moving(self, move: Move) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Return slack, its change, multiplier and its change by kind of row."""
        return zip(self._slack, move.slack, self._multiplier, move.multiplier, strict=True)

    def _keep(self) -> None:
        """Keep the step found so far, to be added to what comes."""
        self._kept, self._kept_speeds = self._move, self._speeds

    def _aim(self, complementarity: Groups, residuals: bool) -> float:
        self._complementarity, self._with_residuals = complementarity, residuals
        quotients = tuple(c / s for c, s in zip(complementarity, self._slack, strict=True))
        if residuals:
            for quotient, theta, primal in zip(quotients, self._theta, self._primal_residual, strict=True):
                quotient -= theta * primal
        self._right = self._transposed(quotients)
        if residuals:
            self._right -= self._dual_residual
        self._rest, self._step = self._right, np.zeros_like(self._right)
        return float(np.abs(self._right).max())

    def eliminate(self) -> Array:
        """Solve for what is left of the right-hand side alone; return its sum over outputs."""
        self._alone = self._system.solve(self._rest)
        return np.asarray(self._alone.sum(axis=0))

    def couple(self, more_nu: Array, nu: Array) -> tuple[float, Array]:
        """Add the response to a change of Δν, now Δν in all; return what is left at most, and Σ_k Δz_k."""
        self._alone += self._system.solve(np.broadcast_to(more_nu, self._alone.shape))
        self._before = self._step
        self._step = self._step + self._alone
        self._rest = self._right - self._matrix.times(self._step)
        self._rest += nu
        return float(np.abs(self._rest).max()), self._step.sum(axis=0)

    def undo(self) -> None:
        """Take back the last :meth:`couple`."""
        self._step = self._before

    def finish(self) -> Lengths:
        """Complete a step; return how far slacks and multipliers may go along it (1 for any distance)."""
        # By how much the step changes what the constraints leave.
        z, program = self._step, self._program
        moved: Groups = (*program.rows.forward(z), z, *((-z,) if program.capped else ()))
        if self._with_residuals:
            moved = tuple(a + b for a, b in zip(moved, self._primal_residual, strict=True))
        parts = zip(self._complementarity, self._multiplier, moved, self._slack, strict=True)
        change = tuple((c - m * d) / s for c, m, d, s in parts)
        self._move = Move(self._step, moved, change)
        self._speeds = _speeds(self._slack, moved), _speeds(self._multiplier, change)
        return _length(self._speeds[0]), _length(self._speeds[1])

    def finish_corrector(self) -> list[Lengths]:
        """Complete a corrector; return the lengths of the step that was kept plus each share of it."""
        self.finish()
        ways = zip(self._kept_speeds, self._speeds, strict=True)
        lengths = [[_length(kept, share, more) for share in SHARES] for kept, more in ways]
        return list(zip(*lengths, strict=True))

    def blend(self, primal: float, dual: float) -> None:
        """Add shares of the corrector to the step that was kept."""
        kept, more = self._kept, self._move
        self._move = Move(
            kept.z + primal * more.z,
            tuple(a + primal * b for a, b in zip(kept.slack, more.slack, strict=True)),
            tuple(a + dual * b for a, b in zip(kept.multiplier, more.multiplier, strict=True)),
        )
        move = self._move
        self._speeds = _speeds(self._slack, move.slack), _speeds(self._multiplier, move.multiplier)

    def discard(self) -> None:
        """Return to the step that was kept."""
        self._move, self._speeds = self._kept, self._kept_speeds

    def ahead(self, lengths: Lengths) -> float:
        """Return Σ s λ after a step of these lengths."""
        ways = self._moving(self._move)
        return sum(float(np.vdot(s + lengths[0] * ds, m + lengths[1] * dm)) for s, ds, m, dm in ways)

    def advance(self, lengths: Lengths) -> None:
        """Take the step."""
        primal, dual = lengths
        ways = list(self._moving(self._move))
        self.z = self.z + primal * self._move.z
        self._slack = tuple(s + primal * ds for s, ds, _, _ in ways)
        self._multiplier = tuple(m + dual * dm for _, _, m, dm in ways)


def _speeds(start: Groups, change: Groups) -> Groups:
    """Return how fast each entry goes to zero: 1 reaches it with a full step."""
    return tuple(np.divide(-b, a) for a, b in zip(start, change, strict=True))


def _length(speeds: Groups, share: float = 0.0, more: Groups | None = None) -> float:
    """Return the largest length, at most 1, up to which everything stays positive.

    With `more`, for the sum of these speeds and a share of those.
    """
    fastest = 1.0
    for position, speed in enumerate(speeds):
        if more is not None:
            speed = speed + share * more[position]
        if speed.size:
            fastest = max(fastest, float(speed.max()))
    return 1 / fastest
