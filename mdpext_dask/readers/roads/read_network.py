"""Road networks by what a job says of them: built in, a file or folder of any kind, or a place.

Map data © OpenStreetMap contributors (ODbL).
"""

from collections.abc import Mapping
from pathlib import Path

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.job.spec import BUILTIN_PREFIX
from mdpext_dask.readers.longitudes import Degrees
from mdpext_dask.readers.roads.csv_folder import read_folder
from mdpext_dask.readers.roads.downloads import roads_of_place
from mdpext_dask.readers.roads.graph_files import read_geopackage, read_graphml
from mdpext_dask.readers.roads.network import RoadNetwork
from mdpext_dask.readers.roads.openstreetmap import SUFFIXES, read_osm

__all__ = ["RoadNetwork", "points_path", "read_roads"]

_DATA = Path(__file__).parents[1] / "data"
_BUILTIN_NETWORKS = {"manhattan": _DATA / "manhattan"}
_BUILTIN_POINTS = {"manhattan-trips": _DATA / "manhattan" / "trip_origins.csv.gz"}


def read_roads(roads: str | None, place: str | None, box: Degrees | None = None) -> RoadNetwork:
    """Read the network that a job names; exactly one of the first two arguments is given.

    Parameters
    ----------
    roads, place
        As in the job's ``[domain]``.
    box
        West, south, east, north in degrees. Of an extract of OpenStreetMap, which may be a whole country's,
        only roads that touch it are read; other networks are read whole.

    Raises
    ------
    DataError
        If the source cannot be read or does not hold a road network.
    SpecError
        If the source is of a kind that is not known, or needs an extra that is not installed.
    """
    if place is not None:
        return roads_of_place(place)
    assert roads is not None  # the job file's validation sees to it
    if roads.startswith(BUILTIN_PREFIX):
        folder = _builtin(roads, _BUILTIN_NETWORKS, "domain.roads")
        return read_folder(folder, directions_known=False)
    path = Path(roads)
    if not path.exists():
        raise DataError(f"domain.roads: {path} does not exist")
    if path.is_dir():
        return read_folder(path)
    if path.name.lower().endswith(SUFFIXES):
        return read_osm(path, box)
    if path.suffix.lower() == ".graphml":
        return read_graphml(path)
    if path.suffix.lower() == ".gpkg":
        return read_geopackage(path)
    raise SpecError(
        f"domain.roads: {path}: must be builtin:manhattan, a folder with nodes.csv.gz and edges.csv.gz, an "
        f"extract of OpenStreetMap ({', '.join(SUFFIXES)}), or a .graphml or .gpkg file as osmnx saves it"
    )


def points_path(name: str, key: str) -> Path:
    """Return the path of a points file, which may be a built-in one such as builtin:manhattan-trips.

    Raises
    ------
    SpecError
        If there is no built-in file of that name.
    """
    return _builtin(name, _BUILTIN_POINTS, key) if name.startswith(BUILTIN_PREFIX) else Path(name)


def _builtin(name: str, builtin: Mapping[str, Path], key: str) -> Path:
    found = builtin.get(name.removeprefix(BUILTIN_PREFIX))
    if found is None:
        known = ", ".join(BUILTIN_PREFIX + known for known in builtin)
        raise SpecError(f"{key}: {name} is not built in; known: {known}")
    return found
