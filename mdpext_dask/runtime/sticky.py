"""Sticky answers: the same user at the same record gets the same answer, by a key.

If a place is reported again and again, the noise can be averaged out: n fresh draws are n ε. A sticky answer
is drawn once: the draw of :mod:`mdpext_dask.runtime.integer_sampling`, exact, by rejection, with the random
bits

    HMAC-SHA256(k, record || counter || user),    k = HMAC-SHA256(key, "... draw" || epoch || mechanism).

Without the key these are indistinguishable from fresh bits, one sequence for each user and record, so the
first answer is a draw from M(·|x) and all later ones repeat it, in every process, for ever. Nothing is
stored.

:class:`StickyKey` makes, writes and reads keys; :func:`new_key_file` is for the command line.
:func:`sticky_below` is the draw; :func:`release_tags` makes what a ledger (:mod:`mdpext_dask.runtime.ledger`)
counts instead of places.

**Threat model.** See ``docs/sampling.md`` for the long form.

- *Whoever has the key* can draw for everybody: keep it only where the true places already are, and as secret
  as they are.
- *A leaked key* makes every answer, past and future, a function that anybody can compute: for a user whose
  name is known, the attacker tries all N records and keeps those that give the answer that was seen, about N
  M(y) of them. That is no longer (ε, d)-privacy: some neighbours of the true record are ruled out, and
  answers for several places nearby leave few. Only destroying the key (all copies of it) makes past answers
  as good as fresh draws.
- *Repeats are visible.* Equal places give equal answers, so an observer of a user's answers sees which of
  them may be the same place, and that two different answers are from different places: the pattern of
  returning is neither hidden nor charged to ε. Given that pattern, k distinct records cost ε each: Σ ε d over
  distinct records. Changing a user's name hides nothing while answers go on repeating.
- *Two users* at one place have independent answers.
- *Another epoch*, another key, or another mechanism (other bytes) draws anew: one more release of every place
  that is visited again. Rotating keys bounds what a later leak reveals, and costs ε each time.
"""

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError, shown
from mdpext_dask.runtime.integer_sampling import acceptance
from mdpext_dask.runtime.key_files import read_key_file, write_key_file
from mdpext_dask.runtime.random_bits import words_of

KEY_BYTES = 32
FIRST_EPOCH = "1"
_FORMAT = "mdpext sticky key, version 2"
# Answers with such keys went by the certified bytes alone.
_BY_BYTES = "mdpext sticky key, version 1"
_FIELDS = "format", "epoch", "key", "check"
_LONGEST_EPOCH, _LONGEST_USER = 100, 1000
# Largest limit, and most releases at once; far below SQLite's largest integer.
_MOST_RELEASES = 10**9
_ID_DIGITS, _TAG_BYTES = 16, 16
# What keys are derived for; fixed for ever, answers depend on it.
_FOR_DRAWS, _FOR_TAGS, _FOR_ID = (
    f"mdpext sticky {use}, version 1".encode() for use in ("draw", "tag", "key id")
)
_WORDS_OF_A_DIGEST = 4


@dataclass(frozen=True)
class StickyKey:
    """A secret key and the name of the epoch it is used in.

    Parameters
    ----------
    secret
        32 bytes; never shown.
    epoch
        Any short text; answers of different epochs are independent.

    Raises
    ------
    SpecError
        If they are not that.
    """

    secret: bytes = field(repr=False)
    epoch: str = FIRST_EPOCH

    def __post_init__(self) -> None:
        if not (isinstance(self.secret, bytes) and len(self.secret) == KEY_BYTES):
            raise SpecError(f"sticky key: must be {KEY_BYTES} bytes")
        text = isinstance(self.epoch, str) and self.epoch.isprintable()
        if not (text and 0 < len(self.epoch) <= _LONGEST_EPOCH):
            raise SpecError(
                f"sticky key: an epoch is a text of 1 to {_LONGEST_EPOCH} characters, got {shown(self.epoch)}"
            )

    @classmethod
    def generate(cls, epoch: str = FIRST_EPOCH) -> "StickyKey":
        """Return a new key from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES), epoch)

    @classmethod
    def read(cls, path: str | Path) -> "StickyKey":
        """Read a key that :meth:`write` has written.

        Raises
        ------
        DataError
            If it cannot be read, is damaged, may be read by others than its owner, or is of a newer version,
            or of one that gave other answers.
        """
        found = read_key_file(path, "sticky key", _FORMAT, _FIELDS, secret=True)
        form, sound = "", False
        if found:
            form, epoch, digits, check = found
            with contextlib.suppress(ValueError):
                key = cls(bytes.fromhex(digits), epoch)
                sound = form in (_FORMAT, _BY_BYTES) and check == key._checksum()
        if not sound:
            raise DataError(f"{path}: is damaged, or no sticky key; mdpext sticky-key makes one")
        if form == _BY_BYTES:
            raise DataError(
                f"{path}: is a sticky key of version 1, whose answers went by the stored bytes alone; here "
                "all of them would be drawn anew, one more release of each place: make a new key with mdpext "
                "sticky-key, or go on with the version of mdpext-dask that it is in use with"
            )
        return key

    def write(self, path: str | Path) -> None:
        """Write the key into a new file that its owner alone can read.

        Raises
        ------
        DataError
            If there is something already, or it cannot be written.
        """
        values = _FORMAT, self.epoch, self.secret.hex(), self._checksum()
        document = dict(zip(_FIELDS, values, strict=True))
        write_key_file(path, "sticky key", document, secret=True)

    @property
    def key_id(self) -> str:
        """16 hexadecimal digits that tell keys and epochs apart and say nothing about the key."""
        return self._derived(_FOR_ID).hex()[:_ID_DIGITS]

    def for_epoch(self, epoch: str) -> "StickyKey":
        """Return the same key for another epoch: all answers are drawn anew.

        Whoever has the key can still compute the answers of all its epochs; to rule that out, make another
        key and destroy this one.
        """
        return replace(self, epoch=epoch)

    def _checksum(self) -> str:
        """Return digits that tell a damaged file; as secret as the file they stand in."""
        return hashlib.sha256(self.secret + self.epoch.encode()).hexdigest()[:8]

    def _derived(self, use: bytes, mechanism: str = "") -> bytes:
        """Return a key for one use: HMAC of texts that no two (use, epoch, mechanism) have in common."""
        parts = (use, self.epoch.encode(), mechanism.encode())
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self.secret, message, "sha256")


def new_key_file(path: str | Path, epoch: str = FIRST_EPOCH) -> dict[str, str]:
    """Make a new key, write it, and return what may be shown: ``path``, ``key_id`` and ``epoch``.

    Raises
    ------
    SpecError
        If the epoch is no short text.
    DataError
        If there is something already, or it cannot be written.
    """
    key = StickyKey.generate(epoch)
    key.write(path)
    return {"path": str(path), "key_id": key.key_id, "epoch": key.epoch}


def sticky_below(
    key: StickyKey,
    mechanism: str,
    users: Sequence[str],
    records: NDArray[np.int64],
    limits: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Return the integers in [0, limit) that belong to users and records.

    As :func:`mdpext_dask.runtime.integer_sampling.uniform_below`, with 64-bit numbers, little-endian, four
    from each digest; the next counter is taken where all four are rejected.

    Parameters
    ----------
    key
        The key.
    mechanism
        Its identity: ``mechanism_sha256``.
    users
        n names.
    records
        Flat indices of the records, int64 of shape (n,).
    limits
        Totals of their rows, uint64 of shape (n,).

    Raises
    ------
    SpecError
        If a user is no text, or empty, or very long.
    """
    encoded = encoded_users(users)
    names = [encoded[user] for user in users]
    places = _place_bytes(records)
    ends = acceptance(limits)
    accepted = np.zeros(len(names), dtype=np.uint64)
    pending, counter = np.arange(len(names)), 0
    derived = key._derived(_FOR_DRAWS, mechanism)
    while len(pending):
        tail = counter.to_bytes(4, "big")
        messages = (places[k] + tail + names[k] for k in pending.tolist())
        words = words_of(b"".join(_digests(derived, messages))).reshape(-1, _WORDS_OF_A_DIGEST)
        good = words < ends[pending, None]
        first = good.argmax(axis=1)
        accepted[pending] = words[np.arange(len(pending)), first]
        pending = pending[~good.any(axis=1)]
        counter += 1
    return np.asarray(accepted % limits, dtype=np.uint64)


def release_tags(
    key: StickyKey, mechanism: str, users: Sequence[str], records: NDArray[np.int64]
) -> list[bytes]:
    """Return 16 bytes for each user and record: they repeat when the answer does, and reveal nothing else.

    Parameters
    ----------
    key, mechanism, users, records
        As for :func:`sticky_below`.
    """
    derived = key._derived(_FOR_TAGS, mechanism)
    encoded = encoded_users(users)
    messages = (place + encoded[user] for place, user in zip(_place_bytes(records), users, strict=True))
    return [digest[:_TAG_BYTES] for digest in _digests(derived, messages)]


def encoded_user(user: str) -> bytes:
    """Return a user's name in UTF-8.

    Raises
    ------
    SpecError
        If it is no text, or empty (as where a table has none), or longer than 1000 bytes.
    """
    if not isinstance(user, str) or not user:
        raise SpecError(f"user: must be a text that is not empty, got {shown(user)}")
    try:
        name = user.encode()
    except UnicodeEncodeError:
        raise SpecError(f"user: is no valid text: {shown(user)}") from None
    if len(name) > _LONGEST_USER:
        raise SpecError(f"user: must have at most {_LONGEST_USER} bytes, got {len(name)}")
    return name


def encoded_users(users: Sequence[str]) -> dict[str, bytes]:
    """Return the names of all users that occur, each once, as :func:`encoded_user` does.

    Raises
    ------
    SpecError
        If one of them is refused, or they are no sequence, such as one text, or names that can be read once.
    """
    if isinstance(users, str | bytes) or not (hasattr(users, "__len__") and hasattr(users, "__getitem__")):
        raise SpecError(f"users: must be a list of texts, got {shown(users)}")
    for user in users:
        if not isinstance(user, str):
            encoded_user(user)  # says what is wrong; and what is no text need not be hashable
    return {user: encoded_user(user) for user in set(users)}


def whole_number(name: str, number: object) -> int:
    """Return how many releases there are to be, or may be.

    Raises
    ------
    SpecError
        If it is no whole number from 1 to 10^9.
    """
    # True is an int to Python.
    if (
        not isinstance(number, int | np.integer)
        or isinstance(number, bool)
        or not 1 <= number <= _MOST_RELEASES
    ):
        raise SpecError(f"{name}: must be a whole number from 1 to {_MOST_RELEASES}, got {shown(number)}")
    return int(number)


def _place_bytes(records: NDArray[np.int64]) -> list[bytes]:
    content = np.asarray(records).astype(">i8").tobytes()
    return [content[k : k + 8] for k in range(0, len(content), 8)]


def _digests(key: bytes, messages: Iterator[bytes]) -> Iterator[bytes]:
    keyed = hmac.new(key, digestmod="sha256")
    for message in messages:
        one = keyed.copy()
        one.update(message)
        yield one.digest()
