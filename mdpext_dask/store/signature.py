"""The signature of a store, beside its certificate; see :mod:`mdpext_dask.runtime.signatures`.

It stands for the digest of all stored bytes and for what gives them meaning. So it shows who has made a store
only together with :func:`mdpext_dask.store.integrity.verify`, which compares the bytes with that digest.
"""

import hashlib
from typing import Any

import numpy as np

from mdpext_dask.runtime.signatures import STORE, SigningKey, Trusted, require_signature
from mdpext_dask.store import objects, schema
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import content_of

SIGNATURE = "audit/signature.json"
_ATTRIBUTES = (
    "grid", "projection", "metric_p", "epsilon_per_km", "epsilon_planar_per_km", "epsilon_certified",
    "distortion", "quantisation_km", "fingerprint", "problem_sha256", "units",
)  # fmt: skip
_OUTPUTS = "output_lon", "output_lat", "output_x", "output_y"


def statement_of(store: MechanismStore) -> dict[str, Any]:
    """Return what a signature of a finished store stands for.

    A remap is none of it: it is post-processing, and may be computed after signing.

    Raises
    ------
    StoreError
        If parts of the store cannot be read.
    """
    outputs = (np.asarray(store.read(name), dtype="<f8").tobytes() for name in _OUTPUTS)
    return {
        **{name: store.attributes.get(name) for name in _ATTRIBUTES},
        "content_sha256": content_of(store),
        "outputs_sha256": hashlib.sha256(b"".join(outputs)).hexdigest(),
        "kept_sha256": schema.cells_sha256(store.kept),
    }


def write_signature(store: MechanismStore, key: SigningKey) -> str:
    """Sign a finished store, and return the public key.

    Raises
    ------
    StoreError
        If the store refuses.
    """
    signature = key.signed(STORE, statement_of(store))
    objects.put_json(store.objects, SIGNATURE, signature)
    return signature["public_key"]


def require_signed(store: MechanismStore, trusted: Trusted) -> str:
    """Return the public key of a store's signature; see :func:`require_signature` for what is refused."""
    signature = objects.get_json(store.objects, SIGNATURE)
    return require_signature(signature, STORE, statement_of(store), trusted, store.url)
