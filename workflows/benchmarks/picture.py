"""Draw a finished store: what the problem is, what one person reports, where one report may come from.

pip install 'mdpext-dask[report]'
python workflows/benchmarks/picture.py manhattan.zarr manhattan.png [--lon -73.9855 --lat 40.7580]
"""

import argparse

from matplotlib.figure import Figure

from mdpext_dask import open_mechanism
from mdpext_dask.reports import plots


def main() -> None:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("picture")
    parser.add_argument("--lon", type=float, default=-73.9855)
    parser.add_argument("--lat", type=float, default=40.7580)
    options = parser.parse_args()

    mechanism = open_mechanism(options.store)
    row = mechanism.row(lon=options.lon, lat=options.lat)
    figure = Figure(figsize=(12, 7), layout="constrained")
    maps = figure.subplots(1, 3, sharey=True)
    plots.plot_domain(mechanism, maps[0])
    plots.plot_row(mechanism, lon=options.lon, lat=options.lat, ax=maps[1])
    plots.plot_output(mechanism, int(row.values.argmax()), maps[2])
    for axes in maps[1:]:
        axes.set_ylabel("")
    figure.suptitle(
        f"{mechanism.epsilon_per_km:g}/km promised, {mechanism.epsilon_certified:.3f} certified, all pairs",
        fontsize=10,
    )
    figure.savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
