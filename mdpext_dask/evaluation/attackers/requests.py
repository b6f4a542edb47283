"""Who attacks: what an attacker knows, and what he believes of where people are.

All of them know the mechanism. The informed one knows the prior π as well; others believe in another, and
are judged under π all the same: R. Shokri, G. Theodorakopoulos, J.-Y. Le Boudec, J.-P. Hubaux, "Quantifying
location privacy" (IEEE S&P 2011).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.plausible import PointsSeen
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.mechanism_store import MechanismStore

# Priors that beliefs are mixed from: π, all records alike, and a file's.
TRUTH, UNIFORM, FILE = 0, 1, 2


@dataclass(frozen=True)
class AttackRequest:
    """What to measure of attackers; see docs/attackers.md.

    Parameters
    ----------
    districts
        File with polygons to measure one by one; by default there are rectangles of source cells.
    attacker_prior
        File of points for the prior that another attacker believes in: CSV, Parquet or GeoJSON.
    releases
        The longest sequence of independent releases to look at; 0 for none.
    victims
        How many people are drawn to look at sequences of releases, at least 2.
    random_seed
        For that draw.
    district_name
        Property of the polygons, or column, that names the districts; default: ``name``, or ``id``.

    Raises
    ------
    SpecError
        If there is such a property, and no file.
    """

    districts: Path | None = None
    attacker_prior: Path | None = None
    releases: int = 100
    victims: int = 200
    random_seed: int = 0
    district_name: str | None = None

    def __post_init__(self) -> None:
        if self.district_name is not None and self.districts is None:
            raise SpecError("--district-name: needs --districts, a file of polygons with such a property")


@dataclass(frozen=True)
class Attacker:
    """Somebody who believes in a mixture of priors.

    Parameters
    ----------
    name
        What he is called in answers.
    shares
        Weights of the priors that beliefs are mixed from, in their order; they add up to 1.
    """

    name: str
    shares: tuple[float, ...]

    def mixed(self, by_prior: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mixture of numbers that are given for every prior, along the first axis."""
        parts = zip(self.shares, by_prior, strict=True)
        return np.asarray(sum(share * part for share, part in parts if share))


def attackers_of(priors: int) -> tuple[Attacker, ...]:
    """Return all attackers, the informed one first, for 2 or 3 priors to mix."""
    known = [
        Attacker("informed", (1.0, 0.0, 0.0)),
        Attacker("half uniform", (0.5, 0.5, 0.0)),
        Attacker("uniform", (0.0, 1.0, 0.0)),
        Attacker("file", (0.0, 0.0, 1.0)),
    ]
    return tuple(Attacker(a.name, a.shares[:priors]) for a in known if sum(a.shares[:priors]) == 1)


@dataclass(frozen=True)
class PointPrior:
    """A prior on few records.

    Parameters
    ----------
    record
        Flat indices of records, ascending, int64 of shape (n,).
    weight
        Their probabilities, float64 of shape (n,); they add up to 1.
    outside
        How many points are at no record that the store keeps, and do not count.
    notes
        What looks wrong about the points.
    """

    record: NDArray[np.int64]
    weight: NDArray[np.float64]
    outside: int
    notes: tuple[str, ...] = ()

    def of_block(self, grid: Grid, block: Block) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return positions among the records that a block owns, and probabilities."""
        i, j = np.divmod(self.record, grid.shape[1])
        x, y = block.owned_x, block.owned_y
        held = (i >= x.start) & (i < x.stop) & (j >= y.start) & (j < y.stop)
        position = (i[held] - x.start) * block.owned_shape[1] + (j[held] - y.start)
        return position, self.weight[held]


def read_attacker_prior(store: MechanismStore, path: Path) -> PointPrior:
    """Return the prior of a points file: each point at its nearest record, as `prior.file` does.

    Raises
    ------
    DataError
        If the file cannot be read, or no weight lies at a record of the store.
    SpecError
        If it is in degrees and the store's plane is nowhere on Earth.
    """
    option, grid, projection = "--attacker-prior", store.grid, store.projection
    try:
        points = read_points(path)
    except DataError as error:
        raise DataError(f"{option}: {error}") from None
    xy = points.coordinates
    if not points.planar:
        if projection is None:
            raise SpecError(f"{option}: {path}: the store has no place on Earth; use columns x_km,y_km")
        xy = projection.to_plane(xy)
    i, j, inside = grid.nearest_records(xy)
    inside &= grid.are_vertices_of(store.kept, i, j)
    weight = points.weight / points.weight.max()
    seen, area = PointsSeen(grid, projection), "grid" if store.kept.all() else "region"
    seen.add(points.coordinates, xy, ~inside, planar=points.planar)
    if not weight[inside].any():
        raise DataError(f"{option}: {path}: no weight lies at the store's records: {seen.said(area)}")
    record, at = np.unique(i[inside].astype(np.int64) * grid.shape[1] + j[inside], return_inverse=True)
    # Adds in the order of the points.
    counted = np.bincount(at, weights=weight[inside])
    held = counted > 0
    notes = seen.notes(f"{option}: {path}", area, left_out=True)
    return PointPrior(record[held], counted[held] / counted.sum(), seen.outside, notes)
