"""Which windows, strides and outputs a lower bound can be made of: what they take, and how good they are.

Predictions only: which level is taken next decides how good a bound is, never whether it holds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mdpext_dask.evaluation.bound.lattice_program import reach_of
from mdpext_dask.evaluation.bound.lattices import Level, Offset, Part, Window
from mdpext_dask.seed.record_program import predicted_bytes, predicted_seconds
from mdpext_dask.store.mechanism_store import MechanismStore

# Outputs of a part for each square of side 1/ε of its window, and no fewer than some.
_COLUMNS, _LEAST_COLUMNS = (0.6, 1.2, 2.4, 4.8), 20
# Records along the longer side of a lattice in a window at least and at most; where all is one, two at least.
_LEAST_SIDE, _MOST_SIDE = 4, 64
# Windows at most: more programs are never solved in a reasonable time, and take long to list.
_MOST_WINDOWS = 30_000
# Outputs by which speed is measured.
_PROBE_COLUMNS = 64
# Seconds for each record and output whose loss is computed.
_LOSS = 4e-8
# Up to so many records it is looked up where the prior is; beyond, windows are taken to be full.
_LOOKED_UP = 10_000_000
_FLOAT64 = 8


class Used(NamedTuple):
    """What of a window has prior: records to the east and to the north from first to last, and how much."""

    size: tuple[int, int]
    mass: float

    @property
    def thin(self) -> float:
        """Records for their prior."""
        return self.size[0] * self.size[1] / self.mass if self.mass > 0 else math.inf


class Levels:
    """The levels of a store's problem.

    Parameters
    ----------
    store
        The store.
    """

    def __init__(self, store: MechanismStore) -> None:
        self._grid, self._outputs = store.grid, store.outputs
        self._epsilon, self._reach = float(store.attributes["epsilon_per_km"]), reach_of(store.metric_p)
        self._prior = store.read("prior") if store.grid.records <= _LOOKED_UP else None
        self._found: dict[tuple[int, int], dict[Window, Used]] = {}
        self._sizes: dict[tuple[int, int], Counter[tuple[int, int]]] = {}

    def probe(self, stride: int) -> Level:
        """Return the level of whole lattices with few outputs."""
        few = _PROBE_COLUMNS if self._outputs > _PROBE_COLUMNS else None
        return Level(stride, (1, 1), few, self._reach)

    def whole(self, stride: int) -> Level:
        """Return the level of whole lattices with all outputs."""
        return Level(stride, (1, 1), None, self._reach)

    def of_window(self, stride: int, side: int) -> Level:
        """Return the level of windows of so many records along a side, with many outputs."""
        east, north = (math.ceil(records / max(side, stride)) for records in self._grid.shape)
        return self._level(stride, (east, north), _COLUMNS[-1], self._reach)

    @cached_property
    def every(self) -> list[Level]:
        """All that are worth a thought, strides and windows by powers of two."""
        shape, found = self._grid.shape, []
        strides = [1 << power for power in range(max(max(shape) // 2, 1).bit_length())]
        for halvings in range(max(shape).bit_length()):
            side = max(shape) / (1 << halvings)
            east, north = (1 << max(round(math.log2(records / side)), 0) for records in shape)
            if east * north > _MOST_WINDOWS:
                break
            for stride in strides:
                if halvings and not _LEAST_SIDE <= side / stride <= _MOST_SIDE:
                    continue
                if not halvings:
                    found.append(self.whole(stride))
                if side / stride <= _MOST_SIDE:
                    found += [
                        self._level(stride, (east, north), columns, reach)
                        for columns in _COLUMNS
                        for reach in {1, self._reach}
                    ]
        return list(dict.fromkeys(found))

    def _level(self, stride: int, windows: tuple[int, int], columns: float, reach: int) -> Level:
        east, north = self._sides(windows)
        most = max(math.ceil(columns * east * north), _LEAST_COLUMNS)
        return Level(stride, windows, most if most < self._outputs else None, reach)

    def _sides(self, windows: tuple[int, int]) -> tuple[float, float]:
        """Return how long the sides of windows are, in 1/ε."""
        unit = self._epsilon * self._grid.spacing_km
        east, north = (unit * n / count for n, count in zip(self._grid.shape, windows, strict=True))
        return east, north

    def quality(self, level: Level) -> float:
        """Return about which share of the best bound a level proves.

        Fitted to a city of 625 records and 639 outputs where ε times the spacing is 0.6, cut into windows
        of 4 to 16 times 1/ε, with 40 to 639 outputs.
        """
        east, north = self._sides(level.windows)
        cut = 1.0
        for side, count in zip((east, north), level.windows, strict=True):
            cut /= 1 + 1.25 * (1 - 1 / count) / side
        few = 0.0 if level.columns is None else 0.6 * math.exp(-1.6 * level.columns / (east * north))
        apart = level.stride * self._epsilon * self._grid.spacing_km
        return cut * (1 - few) / (1 + 0.05 * apart**2) * (1.0 if level.reach == self._reach else 0.975)

    def windows(self, level: Level) -> dict[Window, Used]:
        """Return the windows that have prior, and where; all of them where it is not looked up."""
        if level.windows not in self._found:
            self._found[level.windows] = dict(self._used(level))
        return self._found[level.windows]

    def _used(self, level: Level) -> Iterator[tuple[Window, Used]]:
        shape = self._grid.shape
        ranges = [itertools.pairwise(level.ends(axis, shape[axis])) for axis in (0, 1)]
        for (i, (west, east)), (j, (south, north)) in itertools.product(*map(enumerate, ranges)):
            if self._prior is None or level.windows == (1, 1):
                yield (i, j), Used((east - west, north - south), 1.0)
                continue
            prior = self._prior[west:east, south:north]
            used = [np.flatnonzero(prior.any(axis=axis)) for axis in (1, 0)]
            if len(used[0]):
                extent = tuple(int(lines[-1] - lines[0] + 1) for lines in used)
                yield (i, j), Used((extent[0], extent[1]), float(prior.sum()))

    def heaviest(self, stride: int) -> Offset:
        """Return the offset of the lattice with the most likely record; the first if that is not known."""
        if self._prior is None:
            return 0, 0
        i, j = divmod(int(self._prior.argmax()), self._grid.shape[1])
        return i % stride, j % stride

    def parts(self, level: Level, offsets: Sequence[Offset]) -> list[Part]:
        """Return the parts of some offsets, those first that a program has the most prior for its size in."""
        windows = self.windows(level)
        ordered = sorted(windows, key=lambda window: windows[window].thin)  # stable
        return [Part(window, offset) for window in ordered for offset in offsets]

    def largest(self, level: Level) -> float:
        """Return about how many seconds the largest part takes."""
        return max((self._seconds(level, size) for size in self._counted(level)), default=0.0)

    def seconds(self, level: Level, offsets: int) -> float:
        """Return about how many seconds the parts of so many offsets take one processor."""
        return offsets * sum(many * self._seconds(level, size) for size, many in self._counted(level).items())

    def _counted(self, level: Level) -> Counter[tuple[int, int]]:
        """Return how many windows with prior there are of each size."""
        if level.windows not in self._sizes:
            self._sizes[level.windows] = Counter(used.size for used in self.windows(level).values())
        return self._sizes[level.windows]

    def bytes(self, level: Level) -> int:
        """Return about what the largest part takes in memory."""
        east, north = (math.ceil(n / count) for n, count in zip(self._grid.shape, level.windows, strict=True))
        shape = math.ceil(east / level.stride), math.ceil(north / level.stride)
        outputs = self._outputs if level.columns is None else level.columns
        losses = 0 if level.columns is None else 4 * _FLOAT64 * shape[0] * shape[1] * self._outputs
        return predicted_bytes(shape, outputs, level.reach) + losses

    def _seconds(self, level: Level, size: tuple[int, int]) -> float:
        shape = math.ceil(size[0] / level.stride), math.ceil(size[1] / level.stride)
        outputs = self._outputs if level.columns is None else level.columns
        seconds = predicted_seconds(shape, outputs, level.reach)
        return seconds + _LOSS * shape[0] * shape[1] * self._outputs
