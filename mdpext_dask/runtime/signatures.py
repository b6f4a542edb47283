"""Signatures of mechanisms: who has made a store or a city, by Ed25519.

What is signed is a *statement*: the digests of all bytes, and everything that gives them meaning. Certificate
and digests show that a mechanism keeps its own promise; a signature shows that the promise, the place and the
bytes are those that the owner of a key has stood for. Needs the library ``cryptography``.

A signature says nothing of who may see what, and cannot be taken back: whoever has the secret key can sign
anything, and an old store that was signed stays signed.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdpext_dask.errors import DataError, GuaranteeViolation, SpecError
from mdpext_dask.runtime.key_files import read_key_file, write_key_file

STORE, CITY = "store", "city"
PUBLIC_SUFFIX = ".pub"
_SECRET_FORMAT, _PUBLIC_FORMAT = "mdpext signing key, version 1", "mdpext public key, version 1"
_MESSAGE = "mdpext signature, version 1"
_SECRET_BYTES = 32
_DIGITS, _SIGNATURE_DIGITS = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{128}")

# A public key: its 64 hexadecimal digits, or a file that `mdpext signing-key` has written beside the secret.
Trusted = str | Path


@dataclass(frozen=True)
class SigningKey:
    """A secret key for signatures.

    Parameters
    ----------
    secret
        32 bytes; never shown.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "SigningKey":
        """Return a new key from the operating system's generator."""
        return cls(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def read(cls, path: str | Path) -> "SigningKey":
        """Read a key that :meth:`write` has written.

        Raises
        ------
        DataError
            If it cannot be read, is damaged or of a newer version, or may be read by others than its owner.
        """
        found = read_key_file(
            path, "signing key", _SECRET_FORMAT, ("format", "key", "public_key"), secret=True
        )
        if found and found[0] == _SECRET_FORMAT and _DIGITS.fullmatch(found[1]):
            key = cls(bytes.fromhex(found[1]))
            if key.public_key == found[2]:
                return key
        raise DataError(f"{path}: is damaged, or no signing key; mdpext signing-key makes one")

    def write(self, path: str | Path) -> None:
        """Write the key into a new file that its owner alone can read, and the public one beside it.

        Raises
        ------
        DataError
            If there is something already, or it cannot be written.
        """
        public = {"format": _PUBLIC_FORMAT, "public_key": self.public_key}
        # The public one first: a secret key whose public one is missing would be of no use.
        write_key_file(f"{path}{PUBLIC_SUFFIX}", "public key", public, secret=False)
        try:
            secret = {**public, "format": _SECRET_FORMAT, "key": self.secret.hex()}
            write_key_file(path, "signing key", secret, secret=True)
        except DataError:
            Path(f"{path}{PUBLIC_SUFFIX}").unlink(missing_ok=True)
            raise

    @property
    def public_key(self) -> str:
        """64 hexadecimal digits, for everybody."""
        return str(self._private().public_key().public_bytes_raw().hex())

    def signed(self, kind: str, statement: Mapping[str, Any]) -> dict[str, str]:
        """Return a signature: the public key, and what it verifies."""
        signature = self._private().sign(_message(kind, statement))
        return {"public_key": self.public_key, "signature": signature.hex()}

    def _private(self) -> Any:
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.secret)


def new_signing_key(path: str | Path) -> dict[str, str]:
    """Make a new key, write it, and return what may be shown: both files, and the public key.

    Raises
    ------
    DataError
        If there is something already, or it cannot be written.
    """
    key = SigningKey.generate()
    key.write(path)
    return {"path": str(path), "public_path": f"{path}{PUBLIC_SUFFIX}", "public_key": key.public_key}


def public_key_of(trusted: Trusted) -> str:
    """Return the digits of a public key.

    Raises
    ------
    DataError
        If they are neither given nor in a file of that name, or it is of a newer version.
    """
    if isinstance(trusted, str) and _DIGITS.fullmatch(trusted):
        return trusted
    found = read_key_file(trusted, "public key", _PUBLIC_FORMAT, ("format", "public_key"), secret=False)
    if found and found[0] == _PUBLIC_FORMAT and _DIGITS.fullmatch(found[1]):
        return found[1]
    raise DataError(f"{trusted}: is no public key; mdpext signing-key FILE writes one as FILE{PUBLIC_SUFFIX}")


def require_signature(
    signature: Any, kind: str, statement: Mapping[str, Any], trusted: Trusted, name: str
) -> str:
    """Return the public key if a signature of it stands for a statement, and refuse everything else.

    Parameters
    ----------
    signature
        What was found in the place of a signature: anything.
    kind, statement
        What was signed.
    trusted
        The key that must have signed it.
    name
        What to call the mechanism in messages.

    Raises
    ------
    GuaranteeViolation
        If there is no signature, or one of another key, or of something else.
    DataError
        If the trusted key cannot be read.
    SpecError
        If the library is missing.
    """
    key, library = public_key_of(trusted), _ed25519()
    if not isinstance(signature, dict):
        raise GuaranteeViolation(f"{name}: is not signed; the owner of {key} must sign it: mdpext sign")
    signer, digits = (str(signature.get(part)) for part in ("public_key", "signature"))
    if not (_DIGITS.fullmatch(signer) and _SIGNATURE_DIGITS.fullmatch(digits)):
        raise GuaranteeViolation(f"{name}: its signature is damaged")
    if signer != key:
        raise GuaranteeViolation(f"{name}: is signed by {signer}, and not by the trusted {key}")
    from cryptography.exceptions import InvalidSignature

    try:
        public = library.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(digits), _message(kind, statement))
    except (InvalidSignature, ValueError):
        raise GuaranteeViolation(
            f"{name}: is not what {key} has signed: it has been changed since, or its signature is another's"
        ) from None
    return key


def statement_of_city(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a signature of a city stands for: all of its header, which has the digests of all rows."""
    return {key: value for key, value in header.items() if key != "signature"}


def _message(kind: str, statement: Mapping[str, Any]) -> bytes:
    """Return the bytes to sign: the same for equal statements, on every machine."""
    text = json.dumps(statement, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return f"{_MESSAGE}\n{kind}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SpecError(
            "signatures: cryptography is needed: pip install 'mdpext-dask[sample]', or cryptography alone"
        ) from None
    return ed25519
