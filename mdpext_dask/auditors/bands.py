"""The certificate of a plain array whose records make a lattice, a band of it at a time."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.certificate import BlockCertificate, Place, certify_cells
from mdpext_dask.auditors.findings import inspect_rows
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.source import ArraySource
from mdpext_dask.store.blocks import FLOAT64

# Of the rows of a band.
_BAND_BYTES = 8 * 2**20


def bands_of(lattice: NDArray[np.intp], outputs: int) -> Iterator[slice]:
    """Yield closed ranges of the first axis that share their ends, so that every fine cell is in one band.

    Parameters
    ----------
    lattice
        Record numbers along both axes, shape (lines of the first, lines of the second).
    outputs
        Number K of outputs.
    """
    cells = len(lattice) - 1
    bands = min(math.ceil(lattice.size * outputs * FLOAT64 / _BAND_BYTES), cells)
    for band in range(bands):
        yield slice(cells * band // bands, cells * (band + 1) // bands + 1)


def certify_band(
    source: ArraySource, lattice_file: Path, index: int, first: int, last: int, promise: Promise
) -> BlockCertificate:
    """Certify the fine cells between lattice rows `first` and `last`.

    Parameters
    ----------
    source
        The array.
    lattice_file
        Record numbers along both axes, as :func:`numpy.save` writes them.
    index
        Number of the band.
    first, last
        Positions on the first axis of the lattice.
    promise
        What is audited.
    """
    lattice = np.load(lattice_file, mmap_mode="r")
    records = np.array(lattice[first : last + 1])
    rows = source.rows(records.ravel())
    # The last lattice row is the next band's, but for the last band.
    owned = records.size if last + 1 == len(lattice) else records[:-1].size
    _, findings = inspect_rows(records.ravel()[:owned], rows[:owned], source.range, normalised=True)
    # Whichever axis comes first: the certificate treats both alike.
    lines, across = source.xy_km(records[:, 0]), source.xy_km(records[0])
    axis = int(lines[0, 0] == lines[1, 0])
    x_km, y_km = lines[:, axis], across[:, 1 - axis]
    found = certify_cells(
        rows.reshape(*records.shape, -1), x_km, y_km, promise.metric_p, promise.kept_per_km, source.range
    )
    return BlockCertificate(
        block=index,
        epsilon=found.epsilon,
        place=Place(found.place.i + first, found.place.j, found.place.output),
        violations=found.violations,
        recomputed=found.recomputed,
        findings=tuple(findings),
    )
