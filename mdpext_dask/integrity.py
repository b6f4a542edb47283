"""Whether a store still is what was certified."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mdpext_dask import objects, receipts
from mdpext_dask.budget import vector_norm
from mdpext_dask.errors import GuaranteeViolation, StoreError
from mdpext_dask.spec import fingerprint_of, is_job_of
from mdpext_dask.store import COMPLETE, MechanismStore
from mdpext_dask.template import is_number

# The certificate as it was when the store was last audited.
CERTIFICATE = "audit/certificate.json"
_SAME_PLACE_KM = 1e-3
_ROUNDING = 1e-6


def inconsistencies(store: MechanismStore, certified: float | None = None) -> list[str]:
    """Return the attributes that do not belong to each other, or to the receipts of a finished store.

    Parameters
    ----------
    store
        The store.
    certified
        What a finished store's certificate has just been found to be; default: what its last audit says.
    """
    attributes = store.attributes
    identity, wrong = attributes["identity"], []
    if fingerprint_of(identity) != attributes["fingerprint"]:
        wrong.append("fingerprint")
    if identity.get("privacy", {}).get("epsilon_per_km") != attributes["epsilon_per_km"]:
        wrong.append("epsilon_per_km")
    if identity.get("domain", {}).get("metric_p") != attributes["metric_p"]:
        wrong.append("metric_p")
    if not _outputs_are_where_they_are_said_to_be(store):
        wrong.append("projection")
    if not is_job_of(identity, attributes["job"]):
        wrong.append("job")
    wrong += _misreported(store, certified)
    grid = store.grid
    if not np.array_equal(store.read("inside"), grid.vertices_of(store.kept)):
        wrong.append("inside")
    for name, coordinates in (("x", grid.x_km()), ("y", grid.y_km())):
        if not np.array_equal(store.read(name), coordinates):
            wrong.append(name)
    if attributes["state"] == COMPLETE:
        if not store.has_seed():
            wrong.append("seed")
        elif not _seed_rows_are_those_of_its_scores(store):
            wrong.append("seed/probability")
        hashes = attributes.get("chunk_hashes") or {}
        if hashes.get("digest") != store.content_digest(store.read_receipts()):
            wrong.append("chunk_hashes")
    return wrong


def _misreported(store: MechanismStore, certified: float | None) -> list[str]:
    """Return the attributes with figures that are not those of the grid, the plane and the certificate."""
    attributes, grid, limit = store.attributes, store.grid, store.planar_limit()
    half = grid.spacing_km / 2
    expected: dict[str, float] = {
        "quantisation_km": vector_norm(half, half, store.metric_p),
        "epsilon_planar_per_km": limit,
        # Without a plane on Earth nothing is charged.
        "distortion": float(attributes["epsilon_per_km"]) / limit - 1,
        "source_cells_kept": int(store.kept.sum()),
        "records_inside": grid.count_vertices_of(store.kept),
    }
    if attributes["state"] == COMPLETE:
        if certified is None:
            report = objects.get_json(store.objects, CERTIFICATE)
            certified = report.get("epsilon_certified") if isinstance(report, Mapping) else None
        # No store is complete without a certificate within the limit.
        expected["epsilon_certified"] = certified if is_number(certified) and certified <= limit else math.nan
    # Older stores do not say all of it.
    return [key for key, value in expected.items() if key in attributes and not _is(attributes[key], value)]


def _is(figure: Any, expected: float) -> bool:
    """Whether a figure is what was expected: to rounding, and versions of PROJ, unless it is a count."""
    if isinstance(expected, int):
        return bool(figure == expected)
    return is_number(figure) and math.isclose(figure, expected, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _seed_rows_are_those_of_its_scores(store: MechanismStore) -> bool:
    """Whether the corners' rows, from which nothing is made any more, are those of their log scores."""
    try:
        step = store.array("seed/score").chunks[0]
        for first in range(0, store.grid.seeds_shape[0], step):
            part = slice(first, first + step)
            rows, scores = store.read("seed/probability", part), store.read("seed/score", part)
            if rows.shape != scores.shape or not np.allclose(np.exp(scores), rows, rtol=_ROUNDING, atol=0):
                return False
    except StoreError:
        return False
    return True


def _outputs_are_where_they_are_said_to_be(store: MechanismStore) -> bool:
    """Whether degrees and plane of the outputs belong together, and to the projection."""
    lonlat = np.stack([store.read("output_lon"), store.read("output_lat")], axis=-1)
    if store.projection is None:
        # Without a centre no distortion is charged, so there must not have been one.
        return not np.isfinite(lonlat).any()
    xy = np.stack([store.read("output_x"), store.read("output_y")], axis=-1)
    # Versions of PROJ differ by less than this, and nobody gains by a metre.
    return bool(np.abs(store.projection.to_plane(lonlat) - xy).max() <= _SAME_PLACE_KM)


def verify(store: MechanismStore) -> None:
    """Compare every shard with the hash its receipt names, and the attributes with each other.

    Raises
    ------
    GuaranteeViolation
        If something is not what was certified.
    """
    wrong = inconsistencies(store)
    found, plan = store.read_receipts(), store.plan
    for block in plan:
        receipt = found.get(block.index)
        stray = block.index in plan.skipped and any(
            objects.exists(store.objects, key) for key in store.shard_keys(block)
        )
        if receipt is None or stray or not receipts.is_intact(store.objects, receipt):
            raise GuaranteeViolation(
                f"{store.url}: block {block.index} (records {block.owned_x.start}.."
                f"{block.owned_x.stop - 1} x {block.owned_y.start}..{block.owned_y.stop - 1}) has "
                "changed since it was certified",
                worst={"block": block.index},
            )
    if wrong:
        raise GuaranteeViolation(
            f"{store.url}: {', '.join(wrong)} has changed since the store was certified; run the audit"
        )
