"""Reading an exported city: the header at once, rows when they are asked for."""

import hashlib
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import StoreError
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime import city_layout
from mdpext_dask.runtime.geodesic import PlainProjection, PlaneFit

# What is large, and says nothing to people.
_BULKY = {"grid", "plane_fit", "kept", "outputs", "remap", "sections", "rows_sha256"}


class CityFile:
    """An exported city; the file stays open, and is read by position, so that threads may share it.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    StoreError
        If there is none, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._handle)
        try:
            self.header, self._start = city_layout.read_header(self._handle, path)
            self._check_length()
            self._parse()
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path}: its header is not one that mdpext export writes") from None

    def _check_length(self) -> None:
        expected = self._start + sum(size for size, _ in self.header["sections"])
        found = os.fstat(self._handle).st_size
        if found < expected:
            raise StoreError(f"{self.path}: is cut short by {expected - found} bytes; export it again")
        if found > expected:
            raise StoreError(f"{self.path}: has {found - expected} bytes too many; export it again")

    def _parse(self) -> None:
        header = self.header
        self.grid = Grid(**{**header["grid"], "refine": tuple(header["grid"]["refine"])})
        self.metric_p = float(header["metric_p"])
        shape = self.grid.cells_x, self.grid.cells_y
        self.kept = np.ones(shape, dtype=bool)
        if header["kept"] is not None:
            bits = np.frombuffer(bytes.fromhex(header["kept"]), dtype=np.uint8)
            self.kept = np.unpackbits(bits, count=shape[0] * shape[1]).astype(bool).reshape(shape)
        self.projection: PlainProjection | None = None
        if header["projection"] is not None:
            fit = None if header["plane_fit"] is None else PlaneFit.from_json(header["plane_fit"])
            self.projection = PlainProjection(**header["projection"], fit=fit)
        columns = [np.array(header["outputs"][name], dtype=np.float64) for name in ("lon", "lat", "x", "y")]
        # None, of a plane that is nowhere on Earth, is not-a-number here.
        self.output_lonlat, self.output_xy_km = np.stack(columns[:2], -1), np.stack(columns[2:], -1)
        self.outputs = len(self.output_xy_km)
        self.remap = None if header["remap"] is None else np.array(header["remap"], dtype=np.intp)
        self.tiles = city_layout.Tiles(self.grid, tuple(header["tile_cells"]))
        sections = 1 if header["packing"] == city_layout.SEED else len(self.tiles)
        if len(header["sections"]) != sections or len(header["rows_sha256"]) != len(self.tiles):
            raise ValueError("another number of sections")
        sizes = [0, *(size for size, _ in header["sections"])]
        self._offsets = (self._start + np.cumsum(sizes)).tolist()

    def facts(self) -> dict[str, Any]:
        """Return what the header says to people."""
        return {key: value for key, value in self.header.items() if key not in _BULKY}

    def rows(self, tile: int) -> NDArray[np.float32]:
        """Return the rows of a tile, as they were certified, float32 of shape (east, north, K).

        Raises
        ------
        StoreError
            If they are not what was exported.
        """
        if self.header["packing"] == city_layout.SEED:
            across, along = self._tiles_cells(tile)
            x, y = self.tiles.records(tile)
            rows = extend_log_convex(self._scores[across, along], self.grid.factor)
            rows = rows[: x.stop - x.start, : y.stop - y.start]
        else:
            x, y = self.tiles.records(tile)
            packed = self._section(tile)
            try:
                rows = city_layout.unpack_rows(packed, (x.stop - x.start, y.stop - y.start, self.outputs))
            except ValueError:
                raise StoreError(f"{self.path}: tile {tile} is damaged; export it again") from None
        if city_layout.rows_sha256(rows) != self.header["rows_sha256"][tile]:
            raise StoreError(
                f"{self.path}: tile {tile} does not give the rows that were certified: it is damaged, or "
                "this processor computes otherwise; export it again, with --packing rows"
            )
        return rows

    def _tiles_cells(self, tile: int) -> tuple[slice, slice]:
        """Return the corners of a tile's cells."""
        across, along = self.tiles.cells(tile)
        return slice(across.start, across.stop + 1), slice(along.start, along.stop + 1)

    @cached_property
    def _scores(self) -> NDArray[np.float64]:
        """Log scores of the seed, float64 of shape (seeds east, seeds north, K)."""
        shape = (*self.grid.seeds_shape, self.outputs)
        try:
            return city_layout.unpack_scores(self._section(0), shape)
        except ValueError:
            raise StoreError(f"{self.path}: the seed's scores are damaged; export it again") from None

    def _section(self, number: int) -> bytes:
        size, digest = self.header["sections"][number]
        try:
            content = os.pread(self._handle, size, self._offsets[number])
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise StoreError(f"{self.path}: section {number} is damaged; export it again")
        return content
