"""The best lower bound that any evaluation has found, which is kept in the store."""

from typing import Any

from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore

BOUND = "audit/bound.json"


def kept_bound(store: MechanismStore) -> dict[str, Any] | None:
    """Return the bound that evaluations have left in a store, as it is there; None if not about its bytes."""
    found, digest = objects.get_json(store.objects, BOUND), store.content_sha256
    about = digest is not None and isinstance(found, dict) and found.get("content_sha256") == digest
    return found if about else None
