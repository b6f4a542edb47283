"""Places by name: outline and roads, downloaded once by osmnx, and kept with where they come from.

A download is a folder in the cache, ``outlines/NAME`` or ``roads/NAME``, with a ``provenance.json`` that
names the query, what the geocoder answered, when and from where it came, its licence, and the SHA-256 of the
other files. From then on no network is needed, nor osmnx. When the folder is deleted, the next run downloads
anew.

The cache is ``MDPEXT_CACHE``, or else the user's cache folder (platformdirs).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mdpext_dask.errors import DataError, MdpextError, first_line
from mdpext_dask.job.spec import ROAD_FILES
from mdpext_dask.readers.longitudes import HALF_TURN
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.roads.csv_folder import read_folder, write_folder
from mdpext_dask.readers.roads.graph_files import network_of
from mdpext_dask.readers.roads.network import RoadNetwork

CACHE_VARIABLE = "MDPEXT_CACHE"
PROVENANCE, OUTLINE = "provenance.json", "outline.geojson"
_FORMAT = 1
_OUTLINES, _ROADS = "outlines", "roads"
_FILES = {_OUTLINES: (OUTLINE,), _ROADS: ROAD_FILES}
_NETWORK_TYPE = "drive"
_LICENCE = {
    "attribution": "© OpenStreetMap contributors",
    "licence": "Open Database License (ODbL) 1.0",
    "licence_url": "https://www.openstreetmap.org/copyright",
}
# HTTP: too many requests, and no answer in time.
_ASKED_AGAIN = (429, 504)


def roads_of_place(place: str) -> RoadNetwork:
    """Return the roads of a place that cars may use, downloaded if they are not in the cache.

    Raises
    ------
    DataError
        If they cannot be downloaded, or what is in the cache is damaged.
    SpecError
        If they are not in the cache, and osmnx is not installed.
    """
    folder, facts = _kept(_ROADS, place, "domain.place", _download_roads)
    note = f"{place}: roads of OpenStreetMap as downloaded on {facts['downloaded'][:10]}, kept in the cache"
    network = read_folder(folder)
    return replace(network, source=place, notes=(note, *network.notes))


def outline_of_place(place: str, key: str) -> Path:
    """Return the GeoJSON file with the polygons of a place, downloaded if it is not in the cache.

    Raises
    ------
    DataError
        If it cannot be downloaded, or what is in the cache is damaged; `key` says where the job names it.
    SpecError
        If it is not in the cache, and osmnx is not installed.
    """
    return _kept(_OUTLINES, place, key, _download_outline)[0] / OUTLINE


def digests(place: str | None, outline_of: str | None) -> dict[str, str]:
    """Return the SHA-256 of what the cache holds of a place's roads and of a place's outline, by job key.

    Nothing is downloaded: what is not there, is damaged or cannot be read is left out.
    """
    wanted = {"domain.place": (_ROADS, place), "domain.region": (_OUTLINES, outline_of)}
    found = {}
    for key, (kind, name) in wanted.items():
        with contextlib.suppress(MdpextError, OSError):
            if name is not None and (folder := _folder(kind, name)).is_dir():
                sums = _facts(folder, kind, name, key)["sha256"]
                found[key] = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
    return found


def _folder(kind: str, place: str) -> Path:
    """Return where the download of a place is kept; its name begins as the place does."""
    cache = os.environ.get(CACHE_VARIABLE)
    cache = cache or import_optional("platformdirs", "the cache").user_cache_dir("mdpext")
    readable = re.sub(r"[^a-z0-9]+", "-", place.lower()).strip("-")[:40]
    return Path(cache, kind, f"{readable}-{hashlib.sha256(place.encode()).hexdigest()[:16]}")


def _kept(
    kind: str, place: str, key: str, download: Callable[[str, str, Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a download, made if it is not there, and where it comes from."""
    folder = _folder(kind, place)
    try:
        if not folder.exists():
            _make(folder, kind, place, key, download)
        return folder, _facts(folder, kind, place, key)
    except OSError as error:
        raise DataError(f"{key}: the cache in {folder} cannot be used: {first_line(error)}") from None


def _make(
    folder: Path, kind: str, place: str, key: str, download: Callable[[str, str, Path], dict[str, Any]]
) -> None:
    """Download into a folder of its own, and put it in its place in one step."""
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    part.mkdir(parents=True)
    try:
        facts = {"format": _FORMAT, "place": place, "downloaded": datetime.now(UTC).isoformat(), **_LICENCE}
        facts |= download(place, key, part)
        facts["sha256"] = {name: _sha256(part / name) for name in _FILES[kind]}
        text = json.dumps(facts, indent=2, ensure_ascii=False)
        (part / PROVENANCE).write_text(text + "\n", encoding="utf-8")
        try:
            part.rename(folder)
        except OSError:
            # Another run was faster: its download is as good, and may be in use already.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _facts(folder: Path, kind: str, place: str, key: str) -> dict[str, Any]:
    """Return where a download comes from, after a check that its files are those that were downloaded.

    Raises
    ------
    DataError
        If they are not.
    """
    try:
        facts = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        sums = {name: _sha256(folder / name) for name in _FILES[kind]}
        match facts:
            case {"format": version, "place": name, "downloaded": str(), "sha256": dict(expected)}:
                changed = [name for name in sums if sums[name] != expected.get(name)]
                if (version, name) != (_FORMAT, place):
                    complaint = f"{PROVENANCE} is of something else"
                elif changed:
                    complaint = f"{changed[0]} has changed"
                else:
                    return dict(facts)
            case _:
                complaint = f"{PROVENANCE} cannot be read"
    except FileNotFoundError as error:
        complaint = f"{Path(error.filename).name} is missing"
    except ValueError:
        complaint = f"{PROVENANCE} cannot be read"
    damaged = f"{key}: what was downloaded of {place!r} is damaged: {complaint}"
    raise DataError(f"{damaged}; delete {folder} to download it anew")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- downloading ----------------------------------------------------------------------------------


def _download_outline(place: str, key: str, folder: Path) -> dict[str, Any]:
    osmnx = import_optional("osmnx", f"{key}: {place!r}")
    with _asking(osmnx, place, key):
        answer = osmnx.geocode_to_gdf(place).iloc[0]
    geometry = answer.pop("geometry").__geo_interface__
    feature = {"type": "Feature", "properties": {"place": place, **_LICENCE}, "geometry": geometry}
    (folder / OUTLINE).write_text(json.dumps(feature) + "\n", encoding="utf-8")
    return {
        "geocoder": osmnx.settings.nominatim_url,
        "geocoder_answer": json.loads(answer.to_json(double_precision=15)),
        "software": _software(),
    }


def _download_roads(place: str, key: str, folder: Path) -> dict[str, Any]:
    import shapely

    osmnx = import_optional("osmnx", f"{key}: {place!r}")
    outline, facts = _kept(_OUTLINES, place, key, _download_outline)
    polygon = shapely.from_geojson((outline / OUTLINE).read_text(encoding="utf-8"))
    polygon = polygon.geoms[0] if polygon.geom_type == "GeometryCollection" else polygon
    west, _, east, _ = polygon.bounds
    if east - west > HALF_TURN:
        raise DataError(
            f"{key}: {place!r} lies on both sides of the antimeridian, where osmnx cannot download; give "
            "domain.roads an extract of OpenStreetMap instead"
        )
    with _asking(osmnx, place, key):
        graph = osmnx.graph_from_polygon(polygon, network_type=_NETWORK_TYPE)
    network = network_of(graph, place)
    write_folder(network, folder)
    return {
        **{name: facts[name] for name in ("geocoder", "geocoder_answer")},
        "outline_sha256": facts["sha256"][OUTLINE],
        "server": osmnx.settings.overpass_url,
        "network_type": _NETWORK_TYPE,
        "nodes": network.nodes,
        "edges": len(network.start),
        "software": _software(),
    }


@contextlib.contextmanager
def _asking(osmnx: Any, place: str, key: str) -> Iterator[None]:
    """Turn osmnx's own cache off, which forgets where answers came from, and failures into one line."""
    settings = osmnx.settings
    before = settings.use_cache, settings.requests_kwargs
    settings.use_cache = False
    settings.requests_kwargs = {**settings.requests_kwargs, "hooks": {"response": _refuse_half_answers}}
    try:
        yield
    except MdpextError:
        raise
    except Exception as error:  # network, geocoder and parser failures have no common base
        raise DataError(
            f"{key}: {place!r} could not be downloaded ({_why(error)}); offline, give "
            f"{'domain.roads' if key == 'domain.place' else key} a folder or file instead"
        ) from None
    finally:
        settings.use_cache, settings.requests_kwargs = before


def _why(error: Exception) -> str:
    """Return why nothing was downloaded, in few words: of no connection, requests tells the whole story."""
    import requests  # which osmnx needs

    if not isinstance(error, requests.ConnectionError | requests.Timeout):
        return first_line(error)
    host = urlsplit(getattr(error.request, "url", None) or "").hostname or "the server"
    if isinstance(error, requests.exceptions.SSLError):
        return f"no secure connection to {host}"
    return (
        f"{host} {'has not answered in time' if isinstance(error, requests.Timeout) else 'cannot be reached'}"
    )


def _refuse_half_answers(response: Any, *_: Any, **__: Any) -> None:
    """Refuse an answer that osmnx would take with a warning: of a query that failed, or that ran out of time.

    What is kept must be whole. Where osmnx waits and asks again, it is left to it.
    """
    if response.status_code in _ASKED_AGAIN or response.url.endswith("/status"):
        return
    try:
        answer = response.json()
    except ValueError:  # which osmnx refuses
        answer = None
    if not response.ok or (isinstance(answer, dict) and "remark" in answer):
        response.close()
        response.raise_for_status()
        raise RuntimeError(f"the server says: {answer['remark']}")


def _software() -> dict[str, str]:
    return {name: version(name) for name in ("osmnx", "mdpext-dask")}
