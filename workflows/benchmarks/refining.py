"""Draw what refining gains by the second, from what finished stores remember of it.

    python workflows/benchmarks/refining.py STORE [STORE ...] [-o workflows/images/refining.png] [--bound KM]

Each store becomes a curve: the least loss that is tempered to epsilon and certified so far, against the
seconds since the first round of refining began. The dashed line is a lower bound on any mechanism, where
one is known.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from mdpext_dask.store.mechanism_store import MechanismStore

PICTURE = Path(__file__).resolve().parents[1] / "images" / "refining.png"


def curve(store: MechanismStore) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds after every round, and the least certified loss so far in km, if there is one."""
    rounds = store.seed_attributes["refinements"]
    losses = [np.nan if r["tempered_loss_km"] is None else r["tempered_loss_km"] for r in rounds]
    return np.cumsum([r["seconds"] for r in rounds]), np.fmin.accumulate(losses)


def main() -> None:
    """Read, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    parser.add_argument("--bound", type=float, help="lower bound in km")
    given = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for url in given.stores:
        store = MechanismStore.open(url)
        seconds, losses = curve(store)
        label = f"{store.grid.seeds:,} seeds, {store.outputs} outputs"
        axes.plot(seconds, losses, "o-", markersize=3, label=label)
        first = next(position for position, loss in enumerate(losses) if np.isfinite(loss))
        print(
            f"{label}: {losses[first]:.4f} km after {seconds[first]:.1f} s, {losses[-1]:.4f} km after "
            f"{seconds[-1]:.1f} s, {len(losses)} rounds"
        )
    if given.bound is not None:
        axes.axhline(given.bound, linestyle="--", color="grey", label="lower bound")
    axes.set(xscale="log", xlabel="seconds of refining", ylabel="certified expected loss (km)")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(given.output, dpi=120)
    print(f"drawn: {given.output}")


if __name__ == "__main__":
    main()
