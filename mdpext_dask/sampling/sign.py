"""Signing a finished store or an exported city, once all of its bytes are those of their digests."""

from pathlib import Path
from typing import Any

from mdpext_dask.files import whole_file
from mdpext_dask.runtime import city_layout
from mdpext_dask.runtime.city import CityFile, is_city
from mdpext_dask.runtime.signatures import CITY, SigningKey, statement_of_city
from mdpext_dask.sampling.mechanism import check_finished, require_same
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.signature import write_signature


def sign(subject: str | Path, key: str | Path) -> dict[str, Any]:
    """Sign a store or a city; an earlier signature of it is replaced.

    Nothing is proved again: audit what somebody else has made before signing it.

    Parameters
    ----------
    subject
        Path or URL of a finished store, or the file of a city, which is written again as a whole.
    key
        File with the secret key; see :class:`mdpext_dask.runtime.signatures.SigningKey`.

    Returns
    -------
    What was signed, and the public key.

    Raises
    ------
    DataError
        If the key cannot be read, or the city cannot be written.
    IncompleteStoreError, GuaranteeViolation
        If the store is not complete, is refused, or is no longer what was certified.
    StoreError
        If it cannot be read or written, or tiles of the city are damaged.
    """
    secret, name = SigningKey.read(key), str(subject)
    if is_city(name):
        path = Path(objects.absolute(name))
        city = CityFile(path)
        for tile in range(len(city.tiles)):
            city.rows(tile)
        statement = statement_of_city(city.header)
        signature = secret.signed(CITY, statement)
        with whole_file(path) as file:
            file.write(city_layout.encode({**statement, "signature": signature}))
            for part in range(len(city.header["sections"])):
                file.write(city.section(part))
        return {"signed": name, "kind": CITY, "public_key": signature["public_key"]}
    store = MechanismStore.open(name, mode="r+")
    check_finished(store, verify=True)
    require_same(store)
    return {"signed": name, "kind": "store", "public_key": write_signature(store, secret)}
