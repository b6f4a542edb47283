"""Draw a finished store: what the problem is, what one person reports, where one report may come from.

pip install 'mdpext-dask[plot]'
python workflows/picture.py manhattan.zarr manhattan.png [--lon -73.9855 --lat 40.7580]
"""

import argparse

import matplotlib as mpl
import numpy as np
import xarray as xr

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from mdpext_dask import open_mechanism


def frame(axes: Axes, dataset: xr.Dataset, title: str) -> None:
    """Set up one map in kilometres."""
    axes.set_title(title, fontsize=10)
    axes.set_aspect("equal")
    axes.set_xlim(float(dataset.x[0]), float(dataset.x[-1]))
    axes.set_ylim(float(dataset.y[0]), float(dataset.y[-1]))
    axes.set_xlabel("east (km)")


def main() -> None:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("picture")
    parser.add_argument("--lon", type=float, default=-73.9855)
    parser.add_argument("--lat", type=float, default=40.7580)
    options = parser.parse_args()

    mechanism = open_mechanism(options.store)
    dataset = mechanism.dataset
    row = mechanism.row(lon=options.lon, lat=options.lat)
    place = float(row.x), float(row.y)
    output = int(np.argmax(row.values))
    nodes = xr.open_zarr(options.store, group="problem", consolidated=False).node_xy.values

    figure, maps = plt.subplots(1, 3, figsize=(11, 7), sharey=True, layout="constrained")
    frame(maps[0], dataset, "prior, roads and outputs")
    maps[0].set_ylabel("north (km)")
    maps[0].scatter(*nodes.T, s=0.5, color="0.75", linewidths=0)
    prior = np.argwhere(dataset.prior.values > 0)
    weight = dataset.prior.values[tuple(prior.T)]
    maps[0].scatter(
        dataset.x.values[prior[:, 0]],
        dataset.y.values[prior[:, 1]],
        s=2e4 * weight,
        color="tab:blue",
        alpha=0.5,
        linewidths=0,
    )
    maps[0].scatter(dataset.output_x, dataset.output_y, s=14, marker="^", color="tab:orange")

    frame(maps[1], dataset, "what a person at ✕ reports")
    maps[1].scatter(*nodes.T, s=0.5, color="0.85", linewidths=0)
    bubbles = maps[1].scatter(
        dataset.output_x, dataset.output_y, s=2500 * row.values, c=100 * row.values, cmap="viridis_r"
    )
    maps[1].plot(*place, "x", color="tab:red", markersize=9, markeredgewidth=2)
    figure.colorbar(bubbles, ax=maps[1], shrink=0.5, label="probability (%)")

    frame(maps[2], dataset, "how likely each place is to report ▲")
    field = 100 * dataset.probability.sel(output=output).T
    mesh = maps[2].pcolormesh(dataset.x, dataset.y, field, cmap="viridis", shading="nearest")
    maps[2].plot(dataset.output_x[output], dataset.output_y[output], "^", color="tab:orange")
    figure.colorbar(mesh, ax=maps[2], shrink=0.5, label="probability (%)")

    rows, columns, outputs = dataset.probability.shape
    figure.suptitle(
        f"{rows * columns:,} records x {outputs} outputs, {mechanism.epsilon_per_km:g}/km promised, "
        f"{mechanism.epsilon_certified:.3f}/km certified over all pairs\n"
        "map data © OpenStreetMap contributors (ODbL)",
        fontsize=10,
    )
    figure.savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
