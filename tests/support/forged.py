"""Stores whose bytes were changed by somebody who knows how all of it is recorded."""

import json
from pathlib import Path

from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.store import receipts
from mdpext_dask.store.mechanism_store import MechanismStore


def rehash(path: Path) -> str:
    """Make receipts, digest and identity fit the bytes of a store; return the digest."""
    store = MechanismStore.open(str(path), mode="r+")
    for index, receipt in store.read_receipts().items():
        file = path / receipts.key_of(index)
        shards = {key: receipts.shard_sha256(store.objects, key) for key in receipt.shards}
        file.write_text(json.dumps({**json.loads(file.read_text()), "shards": shards}))
    digest = store.content_digest(store.read_receipts())
    plane, outputs = (store.grid, store.projection), (store.output_xy_km(), store.output_lonlat())
    identity = mechanism_sha256(digest, store.attributes, plane, store.kept, outputs)
    hashes = {**store.attributes["chunk_hashes"], "digest": digest}
    store.update(chunk_hashes=hashes, mechanism_sha256=identity)
    return digest
