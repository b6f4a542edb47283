"""An exported city as a subject of audits: its rows as the sampler reads them, and what its header claims.

The rows and the grid of the file alone decide; the header's figures are compared with what they should be.
What the file cannot prove are the digests of the store that it was exported from, and names and licences.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.source import SAMPLER_RANGE, LatticeSource
from mdpext_dask.errors import StoreError
from mdpext_dask.extend.noise_patches import NoisePatches
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.problem.projection import Projection
from mdpext_dask.runtime.city import CityFile
from mdpext_dask.runtime.geodesic import PROJECTION_ERROR_KM
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.store.blocks import FLOAT32

_ROUNDING = 1e-6
_SAME_PLACE_KM = 1e-3
# Chebyshev nodes along both axes of a fitted plane; more than twice the largest degree of its polynomials.
_NODES = 64
# Of the polynomials at these nodes; exported ones are closer by a factor of 25.
_FIT_ERROR_KM = PROJECTION_ERROR_KM / 8


@dataclass(frozen=True)
class CitySource(LatticeSource):
    """All rows of an exported city, as the sampler reads them; parts are its tiles.

    Parameters
    ----------
    path
        The file.
    """

    path: Path

    @classmethod
    def of(cls, city: CityFile) -> "CitySource":
        """Describe a city."""
        grid = city.grid
        return cls(grid.records, city.outputs, FLOAT32, SAMPLER_RANGE, grid.shape, city.path.absolute())

    @property
    def city(self) -> CityFile:
        """The file, opened once in a process for an audit."""
        return _city(self.path, self.token)

    @property
    def noise_patches(self) -> NoisePatches:
        """What makes rows from the tables of noise that the file has, made once in a process for an audit."""
        return _patches(self.path, self.token)

    @property
    def grid(self) -> Grid:
        """The city's grid."""
        return self.city.grid

    @property
    def projection(self) -> Projection | None:
        """The city's plane, by PROJ."""
        return projection_of(self.city)

    @property
    def parts(self) -> int:
        """Tiles."""
        return len(self.city.tiles)

    @property
    def largest_part(self) -> int:
        """Records of a tile at most."""
        return max(math.prod(self._shape(tile)) for tile in range(self.parts))

    def part(self, index: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
        """Return the records of a tile, and their rows."""
        records = self.grid.record_numbers(*self.city.tiles.records(index))
        return records, self._rows(index).reshape(len(records), -1)

    def rows(self, records: NDArray[np.intp]) -> NDArray[np.floating]:
        """Return rows, tile by tile."""
        i, j = np.divmod(records, self.grid.shape[1])
        tiles = self.city.tiles.of_records(i, j)
        found = np.empty((len(records), self.outputs), dtype=np.float32)
        for tile in np.unique(tiles).tolist():
            x, y = self.city.tiles.records(tile)
            here = tiles == tile
            found[here] = self._rows(tile)[i[here] - x.start, j[here] - y.start]
        return found

    def lattice_rows(self, first: int, last: int) -> NDArray[np.intp]:
        """Return record numbers of the lattice, from one line along its first axis up to another."""
        return np.arange(first, last + 1)[:, None] * self.grid.shape[1] + np.arange(self.grid.shape[1])

    def output_places(self) -> Mapping[str, NDArray[np.float64]]:
        """Return what the header says."""
        return {"output_xy_km": self.city.output_xy_km, "output_lonlat": self.city.output_lonlat}

    def _rows(self, tile: int) -> NDArray[np.float32]:
        try:
            return self.city.rows(tile)
        except StoreError:
            # Bytes that the sampler refuses are nothing that it could keep a promise with.
            return np.full((*self._shape(tile), self.outputs), np.nan, dtype=np.float32)

    def _shape(self, tile: int) -> tuple[int, int]:
        x, y = self.city.tiles.records(tile)
        return x.stop - x.start, y.stop - y.start


def projection_of(city: CityFile) -> Projection | None:
    """Return a city's plane, by PROJ and not by the polynomials of the file."""
    plane = city.projection
    return None if plane is None else Projection(plane.centre_lon, plane.centre_lat, plane.rotation_deg)


def false_claims(city: CityFile, certified: float | None) -> list[str]:
    """Return the entries of a header that are not what rows, grid and plane give.

    Parameters
    ----------
    city
        The file.
    certified
        What the certificate of the rows has just been found to be; None if it has not been computed.
    """
    header, projection = city.header, projection_of(city)
    distortion = 0.0 if projection is None else projection.distortion(city.grid.box.radius_km)
    planar = planar_epsilon(header["epsilon_per_km"], distortion)
    expected = {"epsilon_planar_per_km": planar, "distortion": distortion}
    if certified is not None:
        expected["epsilon_certified"] = certified
    wrong = [
        name
        for name, value in expected.items()
        if name in header and not math.isclose(header[name], value, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    ]
    outputs, content = (city.output_xy_km, city.output_lonlat), header["content_sha256"]
    identity = mechanism_sha256(content, header, (city.grid, projection), city.kept, outputs)
    if header.get("mechanism_sha256", identity) != identity:
        wrong.append("mechanism_sha256")
    if projection is not None:
        away = np.abs(projection.to_plane(city.output_lonlat) - city.output_xy_km).max()
        # Written so that a place without a plane fails.
        if not away <= _SAME_PLACE_KM:
            wrong.append("outputs")
        if not _fits(city, projection):
            wrong.append("plane_fit")
    return wrong


def damaged_tiles(city: CityFile) -> list[str]:
    """Return the names of tiles whose rows are not those of the digests in the header."""
    names = []
    for tile in range(len(city.tiles)):
        try:
            city.rows(tile)
        except StoreError:
            names.append(f"tile {tile}")
    return names


def _fits(city: CityFile, projection: Projection) -> bool:
    """Whether the polynomials of a city are its plane.

    At Chebyshev nodes of more than twice its degree n, a polynomial is nowhere larger than 1 / cos(π n / 2 m)
    times what it is there (Ehlich & Zeller 1964), so what is right at the nodes is right between them.
    """
    fit = None if city.projection is None else city.projection.fit
    if fit is None:
        return True
    nodes = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
    east, lat = (axis.ravel() for axis in np.meshgrid(fit.half_lon * nodes, fit.half_lat * nodes))
    lat = lat + fit.middle_lat
    unturned = Projection(projection.centre_lon, projection.centre_lat)
    truth = unturned.to_plane(np.stack([projection.centre_lon + east, lat], axis=-1))
    found: Any = np.stack(fit.many(east, lat), axis=-1)
    return bool(np.abs(found - truth).max() <= _FIT_ERROR_KM)


@lru_cache(maxsize=2)
def _city(path: Path, token: str) -> CityFile:  # noqa: ARG001 part of the cache's key
    return CityFile(path)


@lru_cache(maxsize=2)
def _patches(path: Path, token: str) -> NoisePatches:
    noise = _city(path, token).noise
    assert noise is not None  # asked by who has seen that there are tables
    return NoisePatches(noise)
