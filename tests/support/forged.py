"""Files and stores that were changed: by accident, or by somebody who knows how all of it is recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdpext_dask.problem.identity import mechanism_sha256
from mdpext_dask.store import receipts
from mdpext_dask.store.mechanism_store import MechanismStore


def flip_a_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a document."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def attribute(store: Path, **attributes: Any) -> None:
    """Change what a store says of itself, without the software's help."""
    edit(store / "zarr.json", lambda root: root["attributes"].update(attributes))


def shard_of(store: Path, block: int = 0) -> Path:
    opened = MechanismStore.open(str(store))
    return store / opened.shard_keys(opened.plan[block])[0]


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
