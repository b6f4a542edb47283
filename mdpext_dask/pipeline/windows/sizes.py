"""How large windows of a job are: as large as their programs may be.

A larger window has more records in its middle, whose rows move freely, and has to be solved less often; but
its program grows with the cube of its side and with the outputs around it. docs/benchmarks.md has the curve.
"""

import math
from operator import itemgetter

from mdpext_dask.extend.windows import Windows
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.windows.tasks import MOVING
from mdpext_dask.problem.grid import Grid
from mdpext_dask.seed.record_program import predicted_bytes, predicted_seconds, record_reach

# Records along a side of a window, unless all records fit into one; and what its program may be predicted to
# take, in s of one processor, and to hold. It ends long before its optimum, in about so much of that time.
SIDES: tuple[int, ...] = (25, 21, 17, 13, 11)
SECONDS, _BYTES, SHARE = 75.0, 2**30, 0.5
# Turns at most, of as many places where windows may begin.
_TURNS = 4
# As many outputs as on average lie within reach of a window, up to so many times.
_BESIDE = 1.5


def windows_of_job(spec: JobSpec, grid: Grid, outputs: int) -> Windows:
    """Return how the records of a job are cut into windows; where all fit into one, there is one turn.

    It is the job that decides, and not the machine, so that a job has the same bytes everywhere. Where its
    method is left open, all windows have to fit into half of the time that it allows; if none do, those are
    taken that take the least.

    Parameters
    ----------
    spec
        The job.
    grid, outputs
        Its records, and the number K of its outputs.
    """
    reach, whole = record_reach(grid.shape, spec.domain.metric_p), max(grid.shape)
    allowed = math.inf if spec.extension.seconds is None else spec.extension.seconds / 2
    possible: list[tuple[float, Windows]] = []
    for side in (whole, *SIDES):
        windows = Windows(grid.shape, side, reach, 1 if side >= whole else _TURNS)
        program = _program(spec, grid, outputs, side, reach)
        each, count = SHARE * predicted_seconds(*program), sum(map(windows.count, range(windows.turns)))
        if each <= SHARE * SECONDS and predicted_bytes(*program) <= _BYTES:
            possible.append((count * each, windows))
    if not possible:
        return windows
    in_time = (windows for total, windows in possible if total <= allowed)
    return next(in_time, min(possible, key=itemgetter(0))[1])


def window_program(spec: JobSpec, grid: Grid, outputs: int) -> tuple[tuple[int, int], int, int]:
    """Return the shape, about how many outputs, and the reach of the program of a window.

    Parameters
    ----------
    spec, grid, outputs
        See :func:`windows_of_job`.
    """
    windows = windows_of_job(spec, grid, outputs)
    return _program(spec, grid, outputs, windows.side, windows.gap)


def _program(
    spec: JobSpec, grid: Grid, outputs: int, side: int, reach: int
) -> tuple[tuple[int, int], int, int]:
    """Return what :func:`window_program` does, for a side.

    Outputs with at least q at r km from a record have ε² e^{−ε r} / (2 π) ≥ q times how many lie in a square
    kilometre.
    """
    shape = min(side, grid.shape[0]), min(side, grid.shape[1])
    if spec.loss.kind == "file":
        return shape, outputs, reach
    area, epsilon = grid.box.width_km * grid.box.height_km, spec.privacy.epsilon_per_km
    beside_km = max(math.log(epsilon**2 * area / (2 * math.pi * outputs * MOVING)), 0.0) / epsilon
    around = math.prod((records - 1) * grid.spacing_km + 2 * beside_km for records in shape)
    return shape, math.ceil(outputs * min(1.0, _BESIDE * around / area)), reach
