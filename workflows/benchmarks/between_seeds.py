"""Draw how likely one output is to be reported from the places around it, in two stores of the same problem.

    python workflows/benchmarks/between_seeds.py INTERPOLATED.zarr CELLS.zarr [-o
    workflows/images/between_seeds.png]

The output is the one whose probability at its own place differs most. Lines are the seeds' grid.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm

from mdpext_dask.store.mechanism_store import MechanismStore

PICTURE = Path(__file__).resolve().parents[1] / "images" / "between_seeds.png"
# How far around the output, in source cells.
AROUND = 1.6


def at_outputs(store: MechanismStore) -> np.ndarray:
    """Return M(y|x) of every output y at the record x nearest to it, shape (K,)."""
    places = store.output_xy_km()
    i, j, _ = store.grid.nearest_records(places)
    found = [
        store.read("probability", slice(a, a + 1), slice(b, b + 1))[0, 0] for a, b in zip(i, j, strict=True)
    ]
    return np.array([row[k] for k, row in enumerate(found)])


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stores", nargs=2)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    given = parser.parse_args()
    stores = [MechanismStore.open(url) for url in given.stores]
    first, second = (at_outputs(store) for store in stores)
    output = int(np.argmax(second / first))
    grid = stores[0].grid
    x, y = grid.x_km(), grid.y_km()
    centre = stores[0].read("output_x")[output], stores[0].read("output_y")[output]
    reach = AROUND * grid.cell_km
    part = tuple(
        slice(*np.searchsorted(values, (middle - reach, middle + reach)))
        for values, middle in ((x, centre[0]), (y, centre[1]))
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    rows = [store.read("probability", *part)[..., output] for store in stores]
    norm = LogNorm(min(r.min() for r in rows), max(r.max() for r in rows))
    for panel, store, values in zip(axes, stores, rows, strict=True):
        drawn = panel.pcolormesh(
            x[part[0]], y[part[1]], values.T, norm=norm, cmap="viridis", shading="nearest"
        )
        seeds = grid.seeds_xy_km()
        panel.set_xticks(np.unique(seeds[:, 0]), minor=True)
        panel.set_yticks(np.unique(seeds[:, 1]), minor=True)
        panel.grid(which="minor", color="white", linewidth=0.6, alpha=0.7)
        panel.plot(*centre, marker="x", color="red", markersize=9, markeredgewidth=2)
        panel.set(xlim=x[part[0]][[0, -1]], ylim=y[part[1]][[0, -1]], xlabel="easting (km)", aspect="equal")
        loss = store.attributes["loss_km"]
        panel.set_title(f"{store.attributes['job']['extension']['method']}: loss {loss:.2f} km", fontsize=11)
    axes[0].set_ylabel("northing (km)")
    figure.colorbar(drawn, ax=axes, label="probability of reporting the marked output")
    given.output.parent.mkdir(exist_ok=True)
    figure.savefig(given.output, dpi=100, bbox_inches="tight")
    print(f"{given.output}: output {output}, at its own place {first[output]:.3f} and {second[output]:.3f}")


if __name__ == "__main__":
    main()
