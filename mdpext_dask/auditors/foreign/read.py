"""Reading mechanisms that anything may have made, for the auditors.

A mechanism is an array of probabilities, records × outputs, with coordinates of the records. It may be a
``.npy`` or ``.npz`` file, a table in CSV or Parquet, or Zarr in a folder or behind a URL; see
:mod:`~mdpext_dask.auditors.foreign.tables` and :mod:`~mdpext_dask.auditors.foreign.arrays` for what each may
look like. Its numbers are kept as they are, also those that no probability can be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign.arrays import read_npy, read_npz, read_zarr
from mdpext_dask.auditors.foreign.row_files import Places
from mdpext_dask.auditors.foreign.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, read_csv, read_parquet
from mdpext_dask.errors import DataError
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.tables import reading
from mdpext_dask.store import objects

_READERS = {
    ".npy": read_npy,
    ".npz": read_npz,
    **dict.fromkeys(CSV_SUFFIXES, read_csv),
    **dict.fromkeys(PARQUET_SUFFIXES, read_parquet),
}


@dataclass(frozen=True)
class ForeignMechanism:
    """A mechanism and where its records are.

    Parameters
    ----------
    rows
        A ``.npy`` file of shape (N, K) in C order, float32 or float64, that ``np.load`` can map: row i holds
        the probabilities of the K outputs from record i, as they were found.
    coordinates
        float64 of shape (N, 2): x and y in km, or lon and lat in degrees; finite.
    planar
        Whether the coordinates are x and y in km.
    lattice
        Record numbers, intp of shape (n_x, n_y), by increasing x and y, if the planar coordinates are
        exactly all crossings of n_x ≥ 2 distinct x and n_y ≥ 2 distinct y, once each; else None.
    source
        What to call the mechanism in reports.
    """

    rows: Path
    coordinates: NDArray[np.float64]
    planar: bool
    lattice: NDArray[np.intp] | None
    source: str


def read_foreign(path: str, points: Path | None, folder: Path) -> ForeignMechanism:
    """Read a mechanism of any supported format.

    Parameters
    ----------
    path
        The file or folder, or the URL of a Zarr hierarchy.
    points
        CSV, Parquet or GeoJSON file of points in km or degrees, its rows in the order of the records; it
        counts for more than coordinates beside the mechanism, which are then not read.
    folder
        Scratch folder of the caller, made if need be: what cannot be used where it lies is converted into a
        new file there. Nothing is left in it after an error.

    Raises
    ------
    DataError
        If a file is missing, damaged, of an unknown format or holds something else.
    SpecError
        If nothing says where the records are.
    StoreError
        If the folder cannot be written, or a URL's protocol is not known.
    """
    place, remote = objects.absolute(path), objects.is_remote(path)
    check_exists(path)
    check_known(path)
    places = None
    if points is not None:
        points = points.expanduser()
        there = read_points(points, weights=False)
        places = Places(there.coordinates, there.planar, str(points))
    reader = _reader_of(place)
    if remote and reader is not None:
        raise DataError(f"{path}: only Zarr is read from a URL; download the file")
    if remote or Path(place).is_dir():
        rows, found = read_zarr(place, path, folder, places)
    else:
        assert reader is not None  # checked above
        rows, found = reader(Path(place), path, folder, places)
    lattice = lattice_of(found.coordinates) if found.planar else None
    return ForeignMechanism(rows, found.coordinates, found.planar, lattice, path)


def _reader_of(place: str) -> Callable[..., tuple[Path, Places]] | None:
    return next((reader for suffix, reader in _READERS.items() if place.lower().endswith(suffix)), None)


def check_known(path: str) -> None:
    """Refuse a local file of a format that holds no mechanism.

    Raises
    ------
    DataError
        If so.
    """
    place = objects.absolute(path)
    if not objects.is_remote(path) and not Path(place).is_dir() and _reader_of(place) is None:
        known = ", ".join(_READERS)
        raise DataError(f"{path}: unknown format; mechanisms are read from {known} and Zarr folders")


def check_exists(path: str) -> None:
    """Refuse a local path where there is nothing.

    Raises
    ------
    DataError
        If so.
    """
    if not objects.is_remote(path):
        with reading(path, "file"):
            if not Path(objects.absolute(path)).exists():
                raise DataError(f"{path}: no such file")


def lattice_of(coordinates: NDArray[np.float64]) -> NDArray[np.intp] | None:
    """Return which point is where in the lattice that points make, if they make one.

    Parameters
    ----------
    coordinates
        float64 of shape (N, 2): x and y.

    Returns
    -------
    intp of shape (n_x, n_y), by increasing x and y; None where a crossing of two lines has no point or
    several, or there are fewer than two lines each way.
    """
    (x, i), (y, j) = (np.unique(values, return_inverse=True) for values in coordinates.T)
    shape = len(x), len(y)
    if min(shape) < 2 or shape[0] * shape[1] != len(coordinates):
        return None
    lattice = np.full(shape, -1, dtype=np.intp)
    lattice[i, j] = np.arange(len(coordinates))
    # As many points as crossings: one that has two leaves another without any.
    return None if (lattice < 0).any() else lattice
