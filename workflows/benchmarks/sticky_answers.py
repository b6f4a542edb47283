"""How long answers take, and what a sticky key gives away if it leaks.

    python workflows/benchmarks/sticky_answers.py STORE [--points 1000000]

Of a finished store: one answer, many, sticky ones, with and without a ledger, and random bits; processor
seconds of this process, the least of several tries. Then, over forty keys and true places drawn from the
prior: how many of the records with any prior give the answer that was seen, to somebody who has the key.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick
from mdpext_dask.runtime.ledger import ReleaseBudget
from mdpext_dask.runtime.random_bits import system_words
from mdpext_dask.runtime.sticky import StickyKey, sticky_below
from mdpext_dask.sampling.mechanism import Mechanism, check_finished
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at

USERS, KEYS, NEAR_KM = 50_000, 40, 1.0


def least(action: Callable[[], object], repeats: int = 1, tries: int = 5) -> float:
    """Return the processor seconds of one call: the least of several tries of so many repeats."""
    seconds = []
    for _ in range(tries):
        start = time.process_time()
        for _ in range(repeats):
            action()
        seconds.append((time.process_time() - start) / repeats)
    return min(seconds)


def speed(store: MechanismStore, points: int) -> None:
    """Print what answers and random bits take."""
    mechanism, projection = Mechanism(store), store.projection
    rng = np.random.default_rng(0)
    outputs = mechanism.output_xy_km
    xy = outputs[rng.integers(0, len(outputs), points)] + rng.normal(0, 2.0, (points, 2))
    places = xy if projection is None else projection.to_degrees(xy)
    planar = projection is None
    users = [f"user {k % USERS}" for k in range(points)]
    key = StickyKey.generate()
    one = dict(zip(("x_km", "y_km") if planar else ("lon", "lat"), places[0].tolist(), strict=True))
    print(
        "one answer                         ", f"{1e6 * least(lambda: mechanism.sample(**one), 500):9.1f} µs"
    )
    sticky = least(lambda: mechanism.sample(**one, user="anna", sticky=key), 500)
    print("one sticky answer                  ", f"{1e6 * sticky:9.1f} µs")
    with tempfile.TemporaryDirectory() as folder:
        budget = ReleaseBudget(Path(folder) / "ledger", 10**9)
        charged = least(lambda: mechanism.sample(**one, user="anna", budget=budget), 20)
        print("one answer that is charged         ", f"{1e6 * charged:9.1f} µs")
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("answers", {}),
            ("sticky answers", {"users": users, "sticky": key}),
            ("answers that are charged", {"users": users, "budget": budget}),
            ("sticky answers that are charged", {"users": users, "sticky": key, "budget": budget}),
        )
        for name, arguments in kinds:
            draw = partial(mechanism.sample_points, places, planar=planar, **arguments)
            seconds = least(draw, tries=2)
            print(f"{points:,} {name}".ljust(44), f"{seconds:.2f} s".rjust(10))
    for n in (1, 100, 1_000, 1_000_000):
        repeats = max(10_000 // n, 3)
        own, ours = least(partial(os.urandom, 8 * n), repeats), least(partial(system_words, n), repeats)
        print(f"{n:9,} words: os.urandom {1e6 * own:9.1f} µs, system_words {1e6 * ours:9.1f} µs")


def leaked(store: MechanismStore) -> None:
    """Print how many records are left to somebody who has the key and one answer."""
    grid, rng = store.grid, np.random.default_rng(0)
    prior = store.read("prior").ravel()
    i, j = np.divmod(np.arange(grid.records), grid.shape[1])
    cumulative = cumulative_weights(rows_at(store, i, j))
    xy = np.stack([grid.x_km()[i], grid.y_km()[j]], axis=-1)
    left, near, near_left = [], [], []
    for _ in range(KEYS):
        numbers = sticky_below(
            StickyKey.generate(), "", ["anna"] * grid.records, np.arange(grid.records), cumulative[:, -1]
        )
        answers = pick(cumulative, numbers)
        true = rng.choice(grid.records, p=prior / prior.sum())
        fits = (answers == answers[true]) & (prior > 0)
        close = np.hypot(*(xy - xy[true]).T) < NEAR_KM
        left.append(fits.sum())
        near.append((close & (prior > 0)).sum())
        near_left.append((close & fits).sum())
    print(f"a leaked key and one answer leave {np.mean(left):.0f} of {(prior > 0).sum():,} records,")
    print(f"of {np.mean(near):.0f} within {NEAR_KM:g} km of the true one {np.mean(near_left):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("--points", type=int, default=1_000_000)
    chosen = parser.parse_args()
    opened = MechanismStore.open(chosen.store)
    check_finished(opened)
    speed(opened, chosen.points)
    leaked(opened)
