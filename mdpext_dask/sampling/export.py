"""Exporting a finished store to one compact file, for :mod:`mdpext_dask.runtime`.

What is sampled from the file is what was certified, bit for bit: the store is first compared with its
receipts, and the digest of every tile's rows goes into the file. Where the log-convex extension of the seed's
log scores gives the rows, only the scores are written, a few bytes for a thousand, and of noise only its
tables; these give the same bits on every machine, and the digests notice if one ever does not. Other rows are
compressed without loss.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError, alternatives, first_line
from mdpext_dask.extend.noise_patches import NoisePatches
from mdpext_dask.files import check_new, whole_file
from mdpext_dask.runtime import city_header, city_layout
from mdpext_dask.runtime.geodesic import Array, PlaneFit, around
from mdpext_dask.runtime.signatures import Trusted
from mdpext_dask.sampling.mechanism import Mechanism, check_finished, require_same
from mdpext_dask.store import integrity, objects
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import Remap, content_of, remap_of
from mdpext_dask.store.rows import noise_tables, rows_of
from mdpext_dask.store.schema import has_scores, is_noise
from mdpext_dask.store.signature import require_signed

PACKINGS = ("auto", *city_header.PACKINGS)
# With fewer records between two seeds, their scores, in float64, take more room than the rows.
_LEAST_FACTOR = 3
_IN_MEMORY = 2**26
# The fitted box is larger, so that places just outside the grid cost no geodesic either.
_MARGIN = 1.1
_SIDE_POINTS = 33


def export_city(
    url: str,
    output: Path,
    packing: str = "auto",
    *,
    remap: bool | None = None,
    overwrite: bool = False,
    trusted_key: Trusted | None = None,
) -> dict[str, Any]:
    """Write a finished store as one file.

    Parameters
    ----------
    url
        The store.
    output
        Where the file goes, whole or not at all.
    packing
        ``"seed"`` for log scores of the seed, ``"noise"`` for tables of noise, ``"rows"`` for compressed
        rows, or ``"auto"`` for the first of these that gives the rows.
    remap
        Whether the city is used with the store's remap; default: where the store has one.
    overwrite
        Whether the file may be there already, and is replaced.
    trusted_key
        Public key that must have signed the store; the city is another thing, to be signed by itself.

    Returns
    -------
    Size, packing and promise of what was written.

    Raises
    ------
    SpecError
        If the packing is unknown, or not possible for this store, or the file would lie in the store, or
        exists and must not be replaced.
    IncompleteStoreError, GuaranteeViolation
        If the store is not complete, is refused, is no longer what was certified, or is not signed by the
        trusted key.
    StoreError
        If it cannot be read, is replaced meanwhile, or has no remap that is asked for.
    DataError
        If the file cannot be written.
    """
    started = time.perf_counter()
    if packing not in PACKINGS:
        raise SpecError(f"--packing: must be {alternatives(PACKINGS)}, got {packing!r}")
    if not objects.is_remote(url) and objects.local_path(url).resolve() in output.resolve().parents:
        raise SpecError(f"{output}: lies inside the store")
    check_new(output, overwrite=overwrite)
    store = MechanismStore.open(url)
    check_finished(store, verify=True)
    signed_by = None if trusted_key is None else require_signed(store, trusted_key)
    header = _header(store, remap_of(store, remap))
    tiles = city_layout.Tiles(store.grid, city_layout.tile_cells(store.grid, store.outputs))
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
        wanted = [*city_header.PACKINGS] if packing == "auto" else [packing]
        if packing == "auto" and store.grid.factor < _LEAST_FACTOR:
            wanted.remove(city_header.SEED)
        for packed in wanted:
            written = _write_sections(store, tiles, spool, packed)
            if written is not None:
                break
        else:
            reasons = {
                city_header.SEED: "are not those that its seed extends to; use rows",
                city_header.NOISE: "are no noise; use auto",
                city_header.ROWS: "are noise, which is exported as its tables; use noise",
            }
            raise SpecError(f"--packing {packing}: the rows of {url} {reasons[packed]}")
        # If the store is still the one that was verified, so is all that has been read since.
        require_same(store)
        header |= {"packing": packed, "sections": written[0], "rows_sha256": written[1]}
        if packed == city_header.NOISE:
            lattice, floor = (tables := noise_tables(store)).kernel.lattice, tables.floor
            numbers = {name: getattr(lattice, name) for name in ("per_cell", "per_record", "reach")}
            header["noise"] = {**numbers, "floor": floor}
        content = city_layout.encode(header)
        try:
            city_layout.read_header(lambda n, at: content[at : at + n], len(content), output)
        except ValueError as error:
            raise SpecError(f"{url}: does not fit into one file: {first_line(error)}") from None
        size = len(content) + spool.tell()
        spool.seek(0)
        with whole_file(output) as file:
            file.write(content)
            shutil.copyfileobj(spool, file)
    raw = 4 * store.grid.records * store.outputs
    return {
        "file": str(output),
        "bytes": size,
        "bytes_raw": raw,
        "ratio": raw / size,
        "packing": packed,
        "records": store.grid.records,
        "outputs": store.outputs,
        "remap": header["remap"] is not None,
        "signed_by": signed_by,
        **{
            key: header[key]
            for key in ("epsilon_per_km", "epsilon_certified", "fingerprint", "mechanism_sha256")
        },
        "seconds": time.perf_counter() - started,
    }


def _header(store: MechanismStore, remap: Remap | None) -> dict[str, Any]:
    attributes, kept = store.attributes, store.kept
    certificate = objects.get_bytes(store.objects, integrity.CERTIFICATE) or b""
    outputs = {name: store.read(f"output_{name}").tolist() for name in ("lon", "lat", "x", "y")}
    copied = (
        "epsilon_per_km", "epsilon_planar_per_km", "epsilon_certified", "metric_p", "quantisation_km",
        "distortion", "fingerprint", "problem_sha256", "attribution", "title", "units", "software", "grid",
    )  # fmt: skip
    return {
        **{key: attributes[key] for key in copied if key in attributes},
        "projection": None if store.projection is None else attributes["projection"],
        "plane_fit": _fitted(store),
        "content_sha256": content_of(store),
        "mechanism_sha256": Mechanism(store).mechanism_sha256,
        "certificate_sha256": hashlib.sha256(certificate).hexdigest(),
        "kept": None if kept.all() else np.packbits(kept).tobytes().hex(),
        # JSON has no NaN, which is what degrees are where there is no projection.
        "outputs": {name: [v if np.isfinite(v) else None for v in a] for name, a in outputs.items()},
        "remap": None if remap is None else remap.output,
        "tile_cells": city_layout.tile_cells(store.grid, store.outputs),
    }


def _fitted(store: MechanismStore) -> dict[str, Any] | None:
    """Return polynomials for the plane around the box, if any are good enough."""
    projection, box = store.projection, store.grid.box
    if projection is None:
        return None
    x = np.linspace(box.west_km, box.east_km, _SIDE_POINTS)
    y = np.linspace(box.south_km, box.north_km, _SIDE_POINTS)
    sides = ((x, box.south_km), (x, box.north_km), (box.west_km, y), (box.east_km, y))
    border = np.concatenate([np.stack(np.broadcast_arrays(*side), axis=-1) for side in sides])
    lon, lat = projection.to_degrees(border).T
    east = around(lon - projection.centre_lon)
    middle = (lat.min() + lat.max()) / 2
    unturned = replace(projection, rotation_deg=0.0)

    def plane(east: Array, lat: Array) -> tuple[Array, Array]:
        x, y = unturned.to_plane(np.stack([projection.centre_lon + east, lat], axis=-1)).T
        return x, y

    half_lon, half_lat = float(np.abs(east).max()), float(lat.max() - middle)
    fit = PlaneFit.of(plane, _MARGIN * half_lon, float(middle), _MARGIN * half_lat)
    return None if fit is None else asdict(fit)


def _write_sections(
    store: MechanismStore, tiles: city_layout.Tiles, spool: IO[bytes], packing: str
) -> tuple[list[tuple[int, str]], list[str]] | None:
    """Write the seed's scores, tables of noise, or the rows of all tiles; None where these do not follow.

    Returns
    -------
    Lengths and digests of the sections, and digests of the rows of the tiles.
    """
    sections: list[tuple[int, str]] = []
    digests = []

    def write(section: bytes) -> None:
        spool.write(section)
        sections.append((len(section), hashlib.sha256(section).hexdigest()))

    # Noise goes by its tables and nothing else: what they prove does not follow from rows alone.
    if (packing == city_header.NOISE) != is_noise(store.seed_attributes):
        return None
    if packing == city_header.SEED and not has_scores(store.seed_attributes.get("extension", ())):
        return None
    tables, rows_from = _tables(store, tiles, packing)
    for tile, rows in _rows_of_tiles(store, tiles):
        if not tables:
            write(city_layout.pack_rows(rows))
        elif not np.array_equal(rows_from(tile).view(np.uint32), rows.view(np.uint32)):
            return None
        digests.append(city_layout.rows_sha256(rows))
    for table in tables:
        write(city_layout.pack_table(table))
    return sections, digests


def _tables(
    store: MechanismStore, tiles: city_layout.Tiles, packing: str
) -> tuple[list[NDArray[Any]], Callable[[int], NDArray[np.float32]]]:
    """Return the tables of a packing, none for rows, and what gives the rows of a tile from them."""
    if packing == city_header.SEED:
        scores = store.read("seed/score")
        return [scores], lambda tile: tiles.extended(scores, tile)
    if packing == city_header.NOISE:
        noise = noise_tables(store)
        tables = noise.arrays[:3]  # the header has the rest
        patches = NoisePatches(noise)
        return tables, lambda tile: patches.stored_rows(*tiles.records(tile))
    return [], lambda tile: rows_of(store, *tiles.records(tile))


def _rows_of_tiles(
    store: MechanismStore, tiles: city_layout.Tiles
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the rows of all tiles, stored or not, float32 of shape (records east, records north, K)."""
    across, along = tiles.shape
    for column in range(across):
        band = range(column * along, (column + 1) * along)
        x, _ = tiles.records(band[0])
        # The whole band at once, so that what neighbours share is read once.
        rows = rows_of(store, x, slice(0, store.grid.shape[1]))
        for tile in band:
            _, y = tiles.records(tile)
            yield tile, np.ascontiguousarray(rows[:, y])
