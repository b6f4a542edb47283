"""What two variants that were left out would bring: the kinder judge for seeds, and a ratio to noise.

    python workflows/benchmarks/left_out.py judge STORE ...        # of seeds with certified budgets
    python workflows/benchmarks/left_out.py ratio COARSE FINE      # of "windows"; of noise, denser

`judge`: budgets are searched, refined and tempered by the certificate of cells. Where that by directions is
kinder, all rows could be sharpened, M^α / Σ M^α with α > 1, until it says ε: what would they lose then?

`ratio`: log (M / noise) of the records of COARSE, times a share, is interpolated between them and added to
the log of FINE's noise, whose records are a whole number of times as dense: what does that lose and certify?
"""

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from mdpext_dask.auditors.certificate import certify_source_cells
from mdpext_dask.auditors.directions import largest_steps, sides_of, slopes, steps_of
from mdpext_dask.evaluation.bound.lattices import lattice_at
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of

# Of the certificate by directions; halvings of the interval of α.
_RADIUS, _HALVINGS, _LARGEST_POWER = 8, 12, 1.5
_SHARES = (1.0, 0.5, 0.25, 0.1)
Rows = NDArray[np.float64]


class _Problem:
    """A store's rows, and what rows in their place would lose and certify."""

    def __init__(self, url: str) -> None:
        self.store = MechanismStore.open(url)
        self.every = slice(0, self.store.grid.shape[0]), slice(0, self.store.grid.shape[1])
        self.rows: Rows = rows_of(self.store, *self.every).astype(np.float64)
        lattice = lattice_at(self.store, *self.every, self.store.read("prior", *self.every))
        self.cost, self.outputs = lattice.cost, self.store.output_xy_km()

    def loss(self, rows: Rows) -> float:
        """Return the expected loss of rows, in km."""
        return float((self.cost * rows).sum())

    def by_cells(self, rows: Rows) -> float:
        """Return the certificate of cells, in 1/km."""
        grid = self.store.grid
        stored = rows.astype(np.float32)
        return float(certify_source_cells(stored, grid.spacing_km, grid.factor, self.store.metric_p).max())

    def by_directions(self, rows: Rows) -> float:
        """Return the certificate by directions, in 1/km."""
        shape, p = self.store.grid.shape, self.store.metric_p
        steps, outputs = steps_of(_RADIUS, shape), np.arange(rows.shape[-1])
        sizes = largest_steps(rows.astype(np.float32), self.every, steps, outputs)
        by_step = dict(zip(steps, sizes, strict=True))
        return float(slopes(by_step, _RADIUS, shape, sides_of(self.store.grid), p)[0].max())


def judge(stores: list[str]) -> None:
    """Print what stores certify by both, and would lose if directions were the judge."""
    print("| store | loss, km | ε by cells | by directions | loss with all of that |\n" + "|---" * 5 + "|")
    for url in stores:
        problem = _Problem(url)
        limit, low, high = problem.store.planar_limit(), 1.0, _LARGEST_POWER
        for _ in range(_HALVINGS):
            power = (low + high) / 2
            kept = problem.by_directions(_power(problem.rows, power)) <= limit
            low, high = (power, high) if kept else (low, power)
        print(
            f"| {url} | {problem.loss(problem.rows):.4f} | {problem.by_cells(problem.rows):.4f} | "
            f"{problem.by_directions(problem.rows):.4f} | {problem.loss(_power(problem.rows, low)):.4f} |",
            flush=True,
        )


def ratio(of_windows: str, of_noise: str) -> None:
    """Print what noise with an interpolated ratio would lose and certify."""
    seeds, records = _Problem(of_windows), _Problem(of_noise)
    apart_km, order = cKDTree(records.outputs).query(seeds.outputs)  # stores have them in orders of their own
    sides = zip(records.rows.shape[:2], seeds.rows.shape[:2], strict=True)
    if np.max(apart_km) > 0 or len({(fine - 1) / (coarse - 1) for fine, coarse in sides}) != 1:
        raise SystemExit("the stores have other outputs, or records that are not a whole number as dense")
    noise, records.cost = records.rows[..., order], records.cost[..., order]
    times = (noise.shape[0] - 1) // (seeds.rows.shape[0] - 1)
    scores = np.log(seeds.rows / noise[::times, ::times])
    for axis in (0, 1):
        scores = _between(scores, times, axis)
    print("| share of the ratio | loss, km | ε by directions |\n|---|---|---|")
    for share in (0.0, *reversed(_SHARES)):
        rows = noise * np.exp(share * scores)
        rows /= rows.sum(axis=-1, keepdims=True)
        print(f"| {share:g} | {records.loss(rows):.4f} | {records.by_directions(rows):.4f} |", flush=True)


def _power(rows: Rows, power: float) -> Rows:
    raised = rows**power
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def _between(values: Rows, times: int, axis: int) -> Rows:
    """Interpolate linearly along an axis, to so many times as many intervals."""
    at = np.arange((values.shape[axis] - 1) * times + 1) / times
    first = np.minimum(at.astype(int), values.shape[axis] - 2)
    share = np.moveaxis((at - first)[:, None, None], 0, axis)
    low, high = (np.take(values, first + more, axis=axis) for more in (0, 1))
    return np.asarray(low + (high - low) * share)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("judge").add_argument("stores", nargs="+")
    of_ratio = what.add_parser("ratio")
    of_ratio.add_argument("coarse")
    of_ratio.add_argument("fine")
    options = parser.parse_args()
    if options.what == "judge":
        judge(options.stores)
    else:
        ratio(options.coarse, options.fine)


if __name__ == "__main__":
    main()
