"""The optimal remap of outputs: report another output instead, if its expected loss is less.

An output y gives a posterior over records, ∝ π(x) M(y|x); the best report in place of y is the output y' of
least expected loss under it. Reporting r(y) in place of y is post-processing, so ε holds for any table r.
A store that has a table is used with it, everywhere; see :func:`remap_of`. Chatzikokolakis, ElSalamouny &
Palamidessi, "Efficient utility improvement for location privacy" (PoPETs 2017).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import with_config

from mdpext_dask.errors import StoreError
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore

TABLE = "remap/table.json"


def best_remap(costs_km: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the output to report instead of each, shape (K,).

    UL(M R) = Σ_y Σ_y' R(y'|y) G[y, y'] is linear in every row of R, a distribution, so it is least if each
    row is concentrated on one y' that minimises G[y, ·]: no random remap is better. An output is kept unless
    another is strictly better, so the loss never grows. A second remap changes nothing: if every y that is
    reported as z has its least cost at z, so has their sum.

    Parameters
    ----------
    costs_km
        G[y, y'] = Σ_x π(x) M(y|x) c(x, y'), float64 of shape (K, K), in km.
    """
    best = costs_km.argmin(axis=1)
    own = np.arange(len(costs_km))
    return np.where(costs_km[own, best] < costs_km[own, own], best, own)


def merge_columns(rows: NDArray[Any], table: NDArray[np.intp]) -> NDArray[Any]:
    """Return rows of shape (..., K) after a remap: columns of outputs that become one are added."""
    merged = np.zeros_like(rows)
    for output, reported in enumerate(table.tolist()):
        merged[..., reported] += rows[..., output]
    return merged


@with_config(objects.STORED)
@dataclass(frozen=True)
class Remap:
    """A remap that is stored beside a finished mechanism.

    Parameters
    ----------
    content_sha256
        Digest of the stored bytes that it was computed for.
    output
        The output to report in place of each output.
    loss_km, remapped_loss_km
        Expected loss without it and with it, in km.
    no_longer_reported
        Outputs that are never reported with it.
    """

    content_sha256: str
    output: list[int]
    loss_km: float
    remapped_loss_km: float
    no_longer_reported: list[int]

    @property
    def table(self) -> NDArray[np.intp]:
        """The output to report in place of each output, shape (K,)."""
        return np.array(self.output, dtype=np.intp)


def content_of(store: MechanismStore) -> str:
    """Return the digest of a finished store's bytes when it was certified.

    Raises
    ------
    StoreError
        If the store has none.
    """
    hashes = store.attributes.get("chunk_hashes")
    digest = hashes.get("digest") if isinstance(hashes, Mapping) else None
    if not isinstance(digest, str):
        raise StoreError(f"{store.url}: has no digest of its bytes; run the job again")
    return digest


def write_remap(store: MechanismStore, remap: Remap) -> None:
    """Write a remap into a store, whole or not at all, in place of an existing one.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    objects.put_json(store.objects, TABLE, asdict(remap))


def remove_remap(store: MechanismStore) -> None:
    """Delete the remap of a store, which is then used without one.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    objects.delete_keys(store.objects, [TABLE])


def has_remap(store: MechanismStore) -> bool:
    """Whether a store is used with a remap."""
    return objects.exists(store.objects, TABLE)


def remap_of(store: MechanismStore, wanted: bool | None = None) -> Remap | None:
    """Return the remap to use a store with; None to use it without.

    Parameters
    ----------
    store
        The store.
    wanted
        True: it must have one; False: without; None: as the store says, with a remap if it has one.

    Raises
    ------
    StoreError
        If it is wanted and there is none, it is damaged, or was made for other bytes.
    """
    return read_remap(store) if (has_remap(store) if wanted is None else wanted) else None


def read_remap(store: MechanismStore) -> Remap:
    """Return the remap of a store.

    Raises
    ------
    StoreError
        If there is none, it is damaged, or was made for other bytes.
    """
    remap: Remap | None = objects.get_json(store.objects, TABLE, Remap)
    again = f"run mdpext remap {store.url}"
    if remap is None and not has_remap(store):
        raise StoreError(f"{store.url}: has no remap; {again}")
    if remap is not None and remap.content_sha256 != content_of(store):
        raise StoreError(f"{store.url}: {TABLE} was made for other bytes than the store has; {again}")
    if remap is None or not _is_of(remap, store.outputs):
        raise StoreError(f"{store.url}: {TABLE} is damaged; {again}")
    return remap


def _is_of(remap: Remap, outputs: int) -> bool:
    """Whether a remap replaces every one of so many outputs by one of them."""
    return len(remap.output) == outputs and {*remap.output, *remap.no_longer_reported} <= {*range(outputs)}
