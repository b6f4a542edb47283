"""Mechanisms in NumPy files and Zarr hierarchies: an array (records, outputs) or (x, y, outputs).

Beside the array, a ``.npz`` file or a Zarr group may say where the records are: ``x_km`` and ``y_km``, or
``lon`` and ``lat``, each with one number for each record or, for an array with x and y, along its axes; or
``points_km`` (records, 2); in a Zarr group also ``x`` and ``y``, whose attribute ``units`` must say km.
"""

import itertools
import zipfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import zarr
from numpy.typing import NDArray

from mdpext_dask.auditors.foreign import row_files
from mdpext_dask.auditors.foreign.row_files import Places
from mdpext_dask.errors import DataError
from mdpext_dask.readers.tables import LONLAT, PLANAR, reading
from mdpext_dask.store import objects

PROBABILITY = "probability"
_POINTS = "points_km"
_AXES = ("x", "y")
_KILOMETRES = ("km", "kilometre", "kilometres", "kilometer", "kilometers")
# From a name to the array that is called so, or None.
_Lookup = Callable[[str], NDArray[Any] | None]


def read_npy(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Return a ``.npy`` file of rows as it lies, or what it holds in a new one.

    Parameters
    ----------
    path
        The file: (N, K), or (n_x, n_y, K) with the records (i, j) in C order.
    source
        What to name in errors.
    folder
        Where a new file goes, if one is needed.
    points
        Where the records are.

    Raises
    ------
    DataError
        If the file cannot be read or holds no such array of numbers.
    SpecError
        If nothing says where the records are.
    """
    with row_files.parsing(source, ".npy file"), path.open("rb") as file:
        shape, dtype = _header(file)
    records, _ = row_files.check_shape(shape, source)
    row_files.stored_dtype(dtype, source)
    if points is None:
        raise row_files.without_places(source)
    row_files.check_count(points, records, source)
    return _usable(path, source, folder, ".npy file"), points


def read_npz(path: Path, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a ``.npz`` file into a ``.npy`` file.

    They are the array ``probability``, or else the only array that could be it. Parameters and errors are
    those of :func:`read_npy`.
    """
    kind = ".npz file"
    with row_files.parsing(source, kind):
        archive = zipfile.ZipFile(path)
    with archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]

        def header(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
            with row_files.parsing(source, kind), archive.open(f"{name}.npy") as member:
                return _header(member)

        def lookup(name: str) -> NDArray[Any] | None:
            if name not in names:
                return None
            _check_coordinates(name, *header(name), records, source)
            with row_files.parsing(source, kind), archive.open(f"{name}.npy") as member:
                return np.asarray(np.lib.format.read_array(member, allow_pickle=False))

        key = PROBABILITY if PROBABILITY in names else _only_array(names, header, source)
        shape, dtype = header(key)
        array = f"{source}: {key}"
        records, _ = row_files.check_shape(shape, array)
        row_files.stored_dtype(dtype, array)
        places = _settle(points, shape, lookup, (PLANAR, LONLAT), source)
        with row_files.new_file(folder) as rows:
            with (
                row_files.parsing(source, kind),
                archive.open(f"{key}.npy") as member,
                rows.open("wb") as out,
            ):
                while piece := member.read(row_files.PIECE_BYTES):
                    with row_files.writing(folder):
                        out.write(piece)
            usable = _usable(rows, array, folder, kind)
    if usable != rows:
        rows.unlink()
    return usable, places


def read_zarr(url: str, source: str, folder: Path, points: Places | None) -> tuple[Path, Places]:
    """Bring the rows of a Zarr array, or of the array ``probability`` of a group, into a ``.npy`` file.

    What has never been written reads as the fill value of the array.

    Parameters
    ----------
    url
        Local path or URL.
    source, folder, points
        As for :func:`read_npy`.

    Raises
    ------
    DataError, SpecError
        As :func:`read_npy` does.
    StoreError
        If the URL's protocol is not known or its driver is not installed.
    """
    kind = "Zarr array or group"
    with reading(source, kind):
        store = objects.open_objects(url, read_only=True)
    with row_files.parsing(source, kind):
        node = zarr.open(store, mode="r")

    def beside(name: str) -> "zarr.Array[Any] | None":
        with row_files.parsing(source, kind):
            found = node.get(name) if isinstance(node, zarr.Group) else None
        return found if isinstance(found, zarr.Array) else None

    def lookup(name: str) -> NDArray[Any] | None:
        found = beside(name)
        if found is None:
            return None
        if name in _AXES and (units := _units(found)) not in _KILOMETRES:
            # Metres taken for km would make any mechanism pass.
            has = "has no attribute units" if units is None else f"has the units {units}"
            raise DataError(
                f"{source}: {name} {has}; coordinates in km have units km or are called {name}_km"
            )
        _check_coordinates(name, found.shape, found.dtype, records, source)
        with row_files.parsing(source, kind):
            return np.asarray(found[...])

    array = node if isinstance(node, zarr.Array) else beside(PROBABILITY)
    if array is None:
        raise DataError(f"{source}: a Zarr group without an array {PROBABILITY}")
    with row_files.parsing(source, kind):
        shape, dtype, chunks = array.shape, array.dtype, array.chunks
    records, outputs = row_files.check_shape(shape, source)
    kept = row_files.stored_dtype(dtype, source)
    _check_dimensions(array, source)
    axes = [beside(name) for name in _AXES]
    in_km = all(axis is not None and _units(axis) in _KILOMETRES for axis in axes)
    # Axes in another unit are refused, unless something else says where the records are.
    pairs = (PLANAR, _AXES, LONLAT) if in_km else (PLANAR, LONLAT, _AXES)
    places = _settle(points, shape, lookup, pairs, source)
    with row_files.new_file(folder) as path:
        target = row_files.allocate(path, (records, outputs), kept).reshape(shape)
        for block in _blocks(shape, chunks, max(dtype.itemsize, kept.itemsize)):
            with row_files.parsing(source, kind):
                values = np.asarray(array[block])
            target[block] = row_files.converted(values, kept, source)
        return path, places


def _attributes(array: "zarr.Array[Any]") -> dict[str, Any]:
    """Return the attributes of an array; none, where what stands there is no object."""
    found = array.metadata.attributes
    return found if isinstance(found, dict) else {}


def _units(array: "zarr.Array[Any]") -> Any:
    return _attributes(array).get("units")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array in a ``.npy`` file, nothing else read of it."""
    formats = np.lib.format
    old = formats.read_magic(file) == (1, 0)
    shape, _, dtype = (formats.read_array_header_1_0 if old else formats.read_array_header_2_0)(file)
    return shape, dtype


def _only_array(
    names: list[str], header: Callable[[str], tuple[tuple[int, ...], np.dtype[Any]]], source: str
) -> str:
    """Return the name of the only array that can be a mechanism."""
    headers = {name: header(name) for name in names if name not in (*PLANAR, *LONLAT, _POINTS)}
    fitting = [
        name for name, (shape, dtype) in headers.items() if len(shape) in (2, 3) and dtype.kind in "biuf"
    ]
    if not fitting:
        raise DataError(
            f"{source}: no array (records, outputs) or (x, y, outputs) of numbers; "
            f"found {', '.join(names) or 'nothing'}"
        )
    if len(fitting) > 1:
        raise DataError(
            f"{source}: which array is the mechanism? Call it {PROBABILITY}; found {', '.join(fitting)}"
        )
    return fitting[0]


def _usable(path: Path, source: str, folder: Path, kind: str) -> Path:
    """Return a file of rows that can be used, which is this one where it can be."""
    with row_files.parsing(source, kind):
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    dtype = row_files.stored_dtype(array.dtype, source)
    if array.ndim == 2 and array.dtype == dtype and array.dtype.isnative and array.flags.c_contiguous:
        return path
    outputs = array.shape[-1]
    if array.ndim == 3 and array.flags.c_contiguous:
        array = array.reshape(-1, outputs)
    step = row_files.rows_at_once(outputs, max(dtype.itemsize, array.dtype.itemsize))
    with row_files.new_file(folder) as rows:
        with row_files.RowWriter(rows, outputs, dtype) as writer:
            # Reshaping an array in Fortran order would copy all of it.
            for part in [array] if array.ndim == 2 else array:
                for first in range(0, len(part), step):
                    writer.append(row_files.converted(part[first : first + step], dtype, source))
        return rows


def _settle(
    points: Places | None,
    shape: tuple[int, ...],
    lookup: _Lookup,
    pairs: tuple[tuple[str, str], ...],
    source: str,
) -> Places:
    """Return where the records are: as the file of points says, or else as the arrays beside them do."""
    if points is not None:
        row_files.check_count(points, prod(shape[:-1]), source)
        return points
    together = lookup(_POINTS)
    if together is not None:
        allowed = {(prod(shape[:-1]), 2), (*shape[:-1], 2)}
        if together.shape not in allowed:
            raise DataError(f"{source}: {_POINTS} has the shape {together.shape}, but must have (records, 2)")
        return row_files.check_places(Places(together.reshape(-1, 2).astype(np.float64), True, source))
    for pair in pairs:
        first, second = map(lookup, pair)
        if first is None and second is None:
            continue
        if first is None or second is None:
            there, absent = pair if second is None else reversed(pair)
            raise DataError(f"{source}: {there} needs {absent} beside it")
        coordinates = _spread(first, second, shape, pair, source)
        return row_files.check_places(Places(coordinates, pair != LONLAT, source))
    raise row_files.without_places(source)


def _spread(
    first: NDArray[Any], second: NDArray[Any], shape: tuple[int, ...], pair: tuple[str, str], source: str
) -> NDArray[np.float64]:
    """Return the coordinates of all records, float64 of shape (N, 2), from those given."""
    grid = shape[:-1]
    if len(grid) == 2 and (first.shape, second.shape) == ((grid[0],), (grid[1],)):
        # The last axis varies fastest.
        first, second = np.repeat(first, grid[1]), np.tile(second, grid[0])
    fitting = {(prod(grid),), grid}
    for name, values in zip(pair, (first, second), strict=True):
        if values.shape not in fitting:
            raise DataError(
                f"{source}: {name} has the shape {values.shape}, which does not fit an array of shape {shape}"
            )
    return np.stack([first.ravel(), second.ravel()], axis=-1).astype(np.float64)


def _check_coordinates(
    name: str, shape: tuple[int, ...], dtype: np.dtype[Any], records: int, source: str
) -> None:
    """Refuse what cannot be coordinates before it is read."""
    if prod(shape) > 2 * records:
        raise DataError(f"{source}: {name} has the shape {shape}, too many numbers for {records} records")
    if dtype.kind not in "fiu":
        raise DataError(f"{source}: {name} holds {dtype}, not numbers")


def _check_dimensions(array: "zarr.Array[Any]", source: str) -> None:
    """Refuse an array whose own names of its dimensions say that y comes before x."""
    names = getattr(array.metadata, "dimension_names", None) or _attributes(array).get("_ARRAY_DIMENSIONS")
    names = list(names) if isinstance(names, list | tuple) else []
    if set(_AXES) <= set(names) and tuple(names[:2]) != _AXES:
        raise DataError(
            f"{source}: the dimensions are ({', '.join(map(str, names))}), but must be (x, y, output)"
        )


def _blocks(shape: tuple[int, ...], chunks: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into blocks of whole chunks, as many as make a piece, the last axis first."""
    sides = [min(chunk, length) for chunk, length in zip(chunks, shape, strict=True)]
    room = row_files.PIECE_BYTES // (prod(sides) * itemsize)
    for axis in reversed(range(len(shape))):
        times = max(1, min(room, -(-shape[axis] // sides[axis])))
        sides[axis] *= times
        room //= times
    starts = itertools.product(*(range(0, length, side) for length, side in zip(shape, sides, strict=True)))
    for corner in starts:
        yield tuple(slice(start, start + side) for start, side in zip(corner, sides, strict=True))
