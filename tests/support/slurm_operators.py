"""Extension operators for jobs on a cluster: one that can be held, one that breaks its promise."""

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.extend.log_convex import LogConvex
from mdpext_dask.extend.operator import Corners

# Names a folder with receipts. Once there are so many, blocks wait for a file of this name beside the store.
HELD_BY, FREE, OPEN = "MDPEXT_TEST_RECEIPTS", 5, "open"


class Held(LogConvex):
    """Log-convex extension, which can be held in the middle of a job."""

    def rows(self, corners: Corners) -> NDArray[np.float32]:
        receipts = Path(os.environ[HELD_BY])
        while len(list(receipts.glob("0*.json"))) >= FREE and not (receipts.parent.parent / OPEN).exists():
            time.sleep(0.05)
        return super().rows(corners)


def setting(name: str) -> object:
    """Return a setting of Dask, where this runs."""
    from dask import config

    return config.get(name)


class Bold(LogConvex):
    """Steeper than it says."""

    linear = False

    def scores(self, corners: Corners) -> NDArray[np.float64]:
        return 3 * super().scores(corners)

    def rows(self, corners: Corners) -> NDArray[np.float32]:
        return super(LogConvex, self).rows(corners)

    def steepening(self, delta_axis: float, delta_other: float) -> float:  # noqa: ARG002
        return 1.0
