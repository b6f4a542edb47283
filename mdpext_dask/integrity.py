"""Whether a store still is what was certified."""

import numpy as np

from mdpext_dask import receipts
from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.spec import fingerprint_of
from mdpext_dask.store import COMPLETE, MechanismStore


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
    # Without a centre no distortion is charged, so there must not have been one.
    if store.projection is None and np.isfinite(store.read("output_lon")).any():
        wrong.append("projection")
    grid = store.grid
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


def verify(store: MechanismStore) -> None:
    """Compare every shard with the hash its receipt names, and the attributes with each other.

    Raises
    ------
    GuaranteeViolation
        If something is not what was certified.
    """
    wrong = inconsistencies(store)
    found = store.read_receipts()
    for block in store.plan:
        receipt = found.get(block.index)
        if receipt is None or not receipts.is_intact(store.objects, receipt):
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
