"""Shards that are not what their blocks' receipts say: changed, missing, or where none should be."""

from collections.abc import Iterable
from dataclasses import dataclass

from mdpext_dask import objects, receipts
from mdpext_dask.partition import Block
from mdpext_dask.receipts import Receipt
from mdpext_dask.store import MechanismStore
from mdpext_dask.template import PROBABILITY


@dataclass(frozen=True)
class ShardDamage:
    """Shards at fault, by key; falsy if there are none.

    Parameters
    ----------
    changed
        Those whose bytes are not the ones that the receipt names.
    missing
        Those that are not there.
    extra
        Those that are there although no receipt names them.
    """

    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable["ShardDamage"]) -> "ShardDamage":
        """Return what several blocks and the rest of a store have, as one."""
        kinds = zip(*((part.changed, part.missing, part.extra) for part in (cls(), *parts)), strict=True)
        return cls(*(tuple(key for keys in kind for key in keys) for kind in kinds))

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them, the changed first, then the missing."""
        return self.changed + self.missing + self.extra

    def __bool__(self) -> bool:
        return bool(self.keys)


def damage_of_block(store: MechanismStore, index: int) -> ShardDamage:
    """Compare the shards of one block with its receipt as it is in the store; see :func:`damage_against`.

    Parameters
    ----------
    store, index
        Which block of which store.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    receipt = receipts.read_receipt(store.objects, index, store.plan.skipped)
    return damage_against(store, store.plan[index], receipt)


def damage_against(store: MechanismStore, block: Block, receipt: Receipt | None) -> ShardDamage:
    """Compare the shards of one block with a receipt of it.

    Parameters
    ----------
    store, block
        Which block of which store.
    receipt
        Its receipt. Without one nothing says what its shards should be: those that are there are extra, those
        that are not are missing. A block that the plan skips must have no shards, whatever a receipt names.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    named = {} if receipt is None else receipt.shards
    changed, missing, extra = [], [], []
    for key in store.shard_keys(block):
        if block.index in store.plan.skipped or key not in named:
            if objects.exists(store.objects, key):
                extra.append(key)
            elif block.index not in store.plan.skipped:
                missing.append(key)
            continue
        found = receipts.shard_sha256(store.objects, key)
        if found is None:
            missing.append(key)
        elif found != named[key]:
            changed.append(key)
    return ShardDamage(tuple(changed), tuple(missing), tuple(extra))


def extra_shards(store: MechanismStore) -> tuple[str, ...]:
    """Return the keys of objects beside the shards that belong to no block of the plan, sorted.

    Whatever their names, and however deep they lie. What killed writes leave behind (``*.partial``) is none
    of them: nothing ever reads it, and finishing a store sweeps it away. Where a store cannot be listed none
    are found: nothing reads them either, as they belong to no block.

    Parameters
    ----------
    store
        The store.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    owned = {key for block in store.plan for key in store.shard_keys(block)}
    return tuple(
        key
        for key in objects.list_keys_if_possible(store.objects, f"{PROBABILITY}/c/") or ()
        if key not in owned and not key.endswith(objects.LEFTOVER)
    )
