"""Whether a store still is what was certified."""

import numpy as np

from mdpext_dask import objects, receipts
from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.spec import fingerprint_of
from mdpext_dask.store import COMPLETE, MechanismStore

_SAME_PLACE_KM = 1e-3


def inconsistencies(store: MechanismStore) -> list[str]:
    """Return the attributes that do not belong to each other, or to the receipts of a finished store."""
    attributes = store.attributes
    identity, wrong = attributes["identity"], []
    if fingerprint_of(identity) != attributes["fingerprint"]:
        wrong.append("fingerprint")
    if identity["privacy"]["epsilon_per_km"] != attributes["epsilon_per_km"]:
        wrong.append("epsilon_per_km")
    if identity["domain"]["metric_p"] != attributes["metric_p"]:
        wrong.append("metric_p")
    if not _outputs_are_where_they_are_said_to_be(store):
        wrong.append("projection")
    grid = store.grid
    if not np.array_equal(store.read("inside"), grid.vertices_of(store.kept)):
        wrong.append("inside")
    for name, coordinates in (("x", grid.x_km()), ("y", grid.y_km())):
        if not np.array_equal(store.read(name), coordinates):
            wrong.append(name)
    if attributes["state"] == COMPLETE:
        if not store.has_seed():
            wrong.append("seed")
        hashes = attributes.get("chunk_hashes") or {}
        if hashes.get("digest") != store.content_digest(store.read_receipts()):
            wrong.append("chunk_hashes")
    return wrong


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
