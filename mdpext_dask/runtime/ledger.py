"""A ledger of releases: it counts how often a user's places are reported, and refuses more than was promised.

Independent releases compose: for places x_1, ..., x_n and x'_1, ..., x'_n the log ratio of the joint
probabilities is the sum of those of the single ones, at most Σ ε_i d(x_i, x'_i); for n reports of one place
at one ε, that is n ε. The places may be chosen in the light of earlier reports (the sum is then one of
conditional probabilities). With different metrics in one ledger, d is the largest of them.

:class:`ReleaseBudget` is such a ledger in an SQLite file; it refuses what would exceed the limit with
:class:`mdpext_dask.errors.BudgetExceeded` (exit code 1: a promise would be broken).
:meth:`ReleaseBudget.charge` charges one user before anything is drawn; :meth:`ReleaseBudget.batch` a whole
file, or nothing of it. :meth:`ReleaseBudget.held` is for a service: requests that arrive together, each
charged or refused by itself, wait for the disk once.

A sticky answer (:mod:`mdpext_dask.runtime.sticky`) that is repeated is no new release: each user and record
of one key, epoch and mechanism counts once. For that a keyed tag is stored, not the record. Users are stored
as salted hashes, which hide names from a glance and not from somebody who tries names. The file shows how
many releases a user has had (for sticky answers: how many records), so only its owner can read it.

Processes on one machine may share a ledger, and one that is killed loses nothing that was charged. A ledger
needs a file system with sound locks (some network ones have none). Deleting the file, or putting an older
copy in its place, forgets releases; and while it is held, or after who held it was killed, so does deleting
or leaving behind the file ``-wal`` beside it.
"""

import contextlib
import hashlib
import math
import os
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import (
    BudgetExceeded,
    SpecError,
    StoreError,
    as_number,
    first_line,
    newer_format,
    shown,
)
from mdpext_dask.runtime.sticky import encoded_user, encoded_users, whole_number

Tags = Sequence[bytes] | None

# "mdpe": marks the file, so that no other database is taken for a ledger.
_APPLICATION, _VERSION = 0x6D647065, 1
_SALT_BYTES, _USER_BYTES = 16, 16
_PRIVATE = 0o600
# One thread makes a file and closes it before another one opens it.
_MAKING = threading.Lock()
_IDENTITY = ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
_TABLES = """
    CREATE TABLE promise (release_limit INTEGER NOT NULL, salt BLOB NOT NULL);
    CREATE TABLE spent (user BLOB NOT NULL, epsilon REAL NOT NULL, releases INTEGER NOT NULL,
                        PRIMARY KEY (user, epsilon)) WITHOUT ROWID;
    CREATE TABLE sticky (user BLOB NOT NULL, tag BLOB NOT NULL, PRIMARY KEY (user, tag)) WITHOUT ROWID;
"""
# Tables of one connection, never written to the file: what a batch is about to be charged.
_PENDING = """
    CREATE TEMP TABLE pending (user BLOB NOT NULL, epsilon REAL NOT NULL, releases INTEGER NOT NULL,
                               PRIMARY KEY (user, epsilon)) WITHOUT ROWID;
    CREATE TEMP TABLE answers (user BLOB NOT NULL, tag BLOB NOT NULL, epsilon REAL NOT NULL,
                               PRIMARY KEY (user, tag)) WITHOUT ROWID;
"""
_ADD_PENDING = """
    INSERT INTO pending VALUES (?, ?, ?)
    ON CONFLICT (user, epsilon) DO UPDATE SET releases = releases + excluded.releases
"""
_ADD_ANSWER = "INSERT OR IGNORE INTO answers VALUES (?, ?, ?)"
# "WHERE true" tells SQLite that ON CONFLICT belongs to the INSERT.
_COUNT_NEW_ANSWERS = """
    INSERT INTO pending
    SELECT user, epsilon, COUNT(*) FROM answers
    WHERE NOT EXISTS (SELECT 1 FROM sticky WHERE sticky.user = answers.user AND sticky.tag = answers.tag)
    GROUP BY user, epsilon
    ON CONFLICT (user, epsilon) DO UPDATE SET releases = releases + excluded.releases
"""
_CHARGE = """
    INSERT INTO spent SELECT user, epsilon, releases FROM pending WHERE true
    ON CONFLICT (user, epsilon) DO UPDATE SET releases = releases + excluded.releases
"""
_SPENT = "SELECT COALESCE(SUM(releases), 0), COALESCE(SUM(releases * epsilon), 0) FROM spent WHERE user = ?"
_KNOWN = "SELECT COUNT(*) FROM sticky WHERE user = ? AND tag = ?"
_ADD_KNOWN = "INSERT INTO sticky VALUES (?, ?)"
_ADD_SPENT = _ADD_PENDING.replace("pending", "spent")
_MOST_EPSILON = """
    SELECT MAX(total) FROM (
        SELECT SUM(releases * epsilon) + (? - SUM(releases)) * ? AS total FROM spent GROUP BY user)
"""
_EXCEEDED = """
    SELECT COUNT(*), MAX(total) FROM (
        SELECT SUM(releases) AS total FROM spent WHERE user IN (SELECT user FROM pending)
        GROUP BY user HAVING total > ?)
"""


class ReleaseBudget:
    """A ledger in a file, made where there is none.

    Parameters
    ----------
    path
        The file.
    limit
        Releases for each user, at most. A new ledger needs it, and keeps it; it may be left out for one that
        exists.
    wait_seconds
        How long to wait for other processes that are charging.

    Raises
    ------
    SpecError
        If the limit is no whole number from 1 to 10^9, another than that of the ledger, or missing for a new
        one; or the path or the time to wait is none.
    StoreError
        If the file is no ledger, or cannot be read or written.
    """

    def __init__(self, path: str | Path, limit: int | None = None, *, wait_seconds: float = 60.0) -> None:
        if limit is not None:
            limit = whole_number("release limit", limit)
        if not isinstance(path, str | os.PathLike):
            raise SpecError(f"ledger: must be a path, got {shown(path)}")
        self._path, self._wait_seconds = Path(path), _positive("wait_seconds", wait_seconds)
        if limit is None and not self._path.exists():
            raise SpecError(f"{path}: there is no ledger yet; a new one needs a release limit")
        with self._connected() as connection:
            if not connection.execute("PRAGMA user_version").fetchone()[0]:
                self._create(connection, limit)
            self._limit, self._salt = connection.execute("SELECT release_limit, salt FROM promise").fetchone()
        if limit not in (None, self._limit):
            raise SpecError(
                f"{path}: is a ledger for at most {self._limit} releases a user, not {limit}; another limit "
                "is another promise, and needs another ledger"
            )

    @property
    def limit(self) -> int:
        """Releases for each user, at most."""
        return int(self._limit)

    def charge(self, user: str, n: int = 1, *, epsilon_per_km: float) -> None:
        """Charge `n` independent releases, before they are drawn.

        Raises
        ------
        BudgetExceeded
            If these are more than the user has left; then none is charged.
        SpecError
            If the user is no text, or the numbers are not positive.
        StoreError
            If the ledger cannot be written.
        """
        with self.batch() as pending:
            pending.charge(user, n, epsilon_per_km)

    def charge_many(self, users: Sequence[str], epsilon_per_km: float, tags: Tags = None) -> None:
        """Charge one release for every entry of `users`, before they are drawn; all of them or none.

        Parameters
        ----------
        users
            Names, once for each release.
        epsilon_per_km
            ε of each, in 1/km.
        tags
            Of sticky answers, one for each entry: those that a user has been charged before are free.

        Raises
        ------
        BudgetExceeded, SpecError, StoreError
            As for :meth:`charge`.
        """
        with self.batch() as pending:
            pending.charge_many(users, epsilon_per_km, tags)

    @contextlib.contextmanager
    def batch(self) -> Iterator["Batch"]:
        """Collect charges, and make them all, or none, where the block ends.

        What is drawn in the block must not leave before the block has ended without an error::

            with budget.batch() as pending:
                draw, with budget=pending, into a temporary file
            rename the file

        Other processes go on charging meanwhile.

        Raises
        ------
        BudgetExceeded
            At the end, if a user would exceed the limit.
        StoreError
            If the ledger cannot be written.
        """
        with self._connected() as connection:
            connection.executescript(_PENDING)
            yield Batch(connection, self._salt)
            with _transaction(connection):
                self._settle(connection)

    @contextlib.contextmanager
    def held(self) -> Iterator["HeldLedger"]:
        """Keep the file open, for a service that charges again and again; from one thread.

        Until the block ends, charges are written into ``LEDGER-wal``, which belongs to the ledger: that takes
        one wait for the disk and not five. Then, or when the next process opens the ledger after a kill, they
        are moved into the file itself. Other processes may charge, and hold it, meanwhile.

        Raises
        ------
        StoreError
            If the ledger cannot be read or written.
        """
        with self._connected() as connection:
            opened = self._path.stat()
            connection.execute("PRAGMA journal_mode = WAL")
            try:
                yield HeldLedger(connection, self._path, opened, self._limit, self._salt)
            finally:
                # Fails at once where others hold it, and the last of them does it.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("PRAGMA busy_timeout = 0")
                    connection.execute("PRAGMA journal_mode = DELETE")

    def spent(self, user: str) -> int:
        """Return how many releases a user has been charged."""
        return int(self._spent(user)[0])

    def composed_epsilon(self, user: str) -> float:
        """Return Σ ε over a user's releases, in 1/km: what they add up to for one place."""
        return float(self._spent(user)[1])

    def _spent(self, user: str) -> tuple[int, float]:
        with self._connected() as connection:
            found: tuple[int, float] = connection.execute(_SPENT, (_hashed(user, self._salt),)).fetchone()
        return found

    def most_epsilon(self, epsilon_per_km: float) -> float:
        """Return the largest Σ ε that any user can reach, in 1/km, if all further releases are of one ε.

        That is the limit times this ε, unless a user has had releases of a larger ε.

        Parameters
        ----------
        epsilon_per_km
            ε of further releases, in 1/km.

        Raises
        ------
        SpecError
            If that is not a positive number.
        """
        epsilon_per_km = _positive("epsilon_per_km", epsilon_per_km)
        with self._connected() as connection:
            found = connection.execute(_MOST_EPSILON, (self._limit, epsilon_per_km)).fetchone()[0]
        return max(float(self._limit * epsilon_per_km), float(found or 0.0))

    def _settle(self, connection: sqlite3.Connection) -> None:
        _require_salt(connection, self._salt, self._path)
        connection.execute(_COUNT_NEW_ANSWERS)
        connection.execute("INSERT OR IGNORE INTO sticky SELECT user, tag FROM answers")
        connection.execute(_CHARGE)
        users, most = connection.execute(_EXCEEDED, (self._limit,)).fetchone()
        if users:
            who = "a user" if users == 1 else f"{users} users"
            raise BudgetExceeded(
                f"{self._path}: {who} would have up to {most} releases, {self._limit} are the limit; nothing "
                "is released",
                users=users,
            )

    def _create(self, connection: sqlite3.Connection, limit: int | None) -> None:
        connection.execute("BEGIN IMMEDIATE")  # two processes may get here at the same time
        if not connection.execute("PRAGMA user_version").fetchone()[0]:
            if limit is None:
                raise SpecError(f"{self._path}: is empty; a new ledger needs a release limit")
            for statement in _TABLES.split(";")[:-1]:
                connection.execute(statement)
            salt = secrets.token_bytes(_SALT_BYTES)
            connection.execute("INSERT INTO promise VALUES (?, ?)", (limit, salt))
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction: threads and child processes share nothing."""
        _make_private(self._path)
        with _told(self._path):
            opened = sqlite3.connect(self._path, timeout=self._wait_seconds, isolation_level=None)
            with contextlib.closing(opened) as connection:
                # On the disk, with the folder that names the journal, before anything is drawn.
                connection.execute("PRAGMA synchronous = EXTRA")
                self._check(connection)
                yield connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """Refuse a file that is another database, or a ledger of a newer version."""
        # In one transaction, so that no other process makes the ledger between two of these queries.
        connection.execute("BEGIN")
        found = tuple(connection.execute(query).fetchone()[0] for query in _IDENTITY)
        connection.execute("COMMIT")
        # (0, 0, 0): new, or left empty by an interruption, as tables are created in one transaction.
        if found[0] == _APPLICATION and found[1] > _VERSION:
            raise newer_format(self._path, "ledger", found[1], _VERSION)
        if found[:2] != (_APPLICATION, _VERSION) and found != (0, 0, 0):
            raise StoreError(f"{self._path}: is no ledger of releases")


class Batch:
    """Charges to be made at the end of :meth:`ReleaseBudget.batch`."""

    def __init__(self, connection: sqlite3.Connection, salt: bytes) -> None:
        self._connection, self._salt = connection, salt

    def charge(self, user: str, n: int, epsilon_per_km: float) -> None:
        """Note `n` independent releases; otherwise as :meth:`charge_many`.

        Raises
        ------
        SpecError
            If the user is no text, or the numbers are not positive.
        """
        n, epsilon = whole_number("n", n), _positive("epsilon_per_km", epsilon_per_km)
        self._note(_ADD_PENDING, [(_hashed(user, self._salt), epsilon, n)])

    def charge_many(self, users: Sequence[str], epsilon_per_km: float, tags: Tags = None) -> None:
        """Note one release for every entry; see :meth:`ReleaseBudget.charge_many`.

        Raises
        ------
        SpecError
            If a user is no text, ε is not a positive number, or tags are not bytes, as many as users.
        """
        epsilon = _positive("epsilon_per_km", epsilon_per_km)
        hashed = {user: _hashed(user, self._salt) for user in encoded_users(users)}
        if tags is None:
            self._note(_ADD_PENDING, [(hashed[user], epsilon, n) for user, n in Counter(users).items()])
            return
        _check_tags(tags, len(users))
        # In the order of the table, which is several times as fast.
        answers = sorted({(hashed[user], tag) for user, tag in zip(users, tags, strict=True)})
        self._note(_ADD_ANSWER, [(*answer, epsilon) for answer in answers])

    def _note(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        # The tables are of this connection alone, so the ledger is not locked.
        self._connection.execute("BEGIN")
        self._connection.executemany(statement, rows)
        self._connection.execute("COMMIT")


Charges = ReleaseBudget | Batch


class HeldLedger:
    """A ledger that is kept open; made by :meth:`ReleaseBudget.held`."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, opened: os.stat_result, limit: int, salt: bytes
    ) -> None:
        self._connection, self._path, self._opened = connection, path, opened
        self._limit, self._salt = limit, salt

    def charge_each(
        self, users: Sequence[str], epsilon_per_km: float, tags: Tags = None
    ) -> NDArray[np.bool_]:
        """Charge one release for every entry that its user has left, in their order, before they are drawn.

        One entry that is refused is no obstacle to the others. All that are charged are on the disk when this
        returns, together; if it raises, nothing may be released.

        Parameters
        ----------
        users, epsilon_per_km, tags
            As for :meth:`ReleaseBudget.charge_many`.

        Returns
        -------
        charged
            What may be released, bool of shape (entries,): charged now, or before with the same tag.

        Raises
        ------
        SpecError
            As for :meth:`Batch.charge_many`; then nothing is charged.
        StoreError
            If the ledger cannot be written, or another file has taken its place.
        """
        epsilon = _positive("epsilon_per_km", epsilon_per_km)
        hashed = {user: _hashed(user, self._salt) for user in encoded_users(users)}
        if tags is not None:
            _check_tags(tags, len(users))
        with _told(self._path), _transaction(self._connection):
            _require_salt(self._connection, self._salt, self._path)
            charged = self._charge([hashed[user] for user in users], epsilon, tags)
        self._require_in_place()
        return charged

    def _charge(self, users: list[bytes], epsilon: float, tags: Tags) -> NDArray[np.bool_]:
        """Make the charges that are new and within the limit, and return which entries may be released."""
        ask, new = self._connection.execute, Counter[bytes]()
        spent = {user: int(ask(_SPENT, (user,)).fetchone()[0]) for user in set(users)}
        charged = np.ones(len(users), dtype=np.bool_)
        for k, user in enumerate(users):
            if tags is not None and ask(_KNOWN, (user, tags[k])).fetchone()[0]:
                continue
            charged[k] = spent[user] + new[user] < self._limit
            if charged[k]:
                new[user] += 1
                if tags is not None:
                    ask(_ADD_KNOWN, (user, tags[k]))
        self._connection.executemany(_ADD_SPENT, [(user, epsilon, n) for user, n in new.items()])
        return charged

    def _require_in_place(self) -> None:
        """Refuse to go on with a file that the next process would not find."""
        try:
            in_place = os.path.samestat(self._path.stat(), self._opened)
        except OSError:
            in_place = False
        if not in_place:
            raise StoreError(f"{self._path}: has been moved, deleted or replaced while it was held")


def _make_private(path: Path) -> None:
    """Make an empty file that its owner alone can read, if there is none.

    Raises
    ------
    StoreError
        If it cannot be made, or cannot be read and written.
    """
    try:
        # A file that exists is not opened: closing it would drop all locks that SQLite has on it in this
        # process, also those of other threads.
        with _MAKING:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE))
    except FileExistsError:
        if not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
            raise StoreError(f"{path}: the ledger cannot be opened: no file that may be written") from None
    except OSError as error:
        raise StoreError(f"{path}: the ledger cannot be opened: {error.strerror}") from None


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Do all of a block or nothing of it; a block that changes nothing need not wait for the disk."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Of some errors SQLite has done so already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Make errors of SQLite those of a ledger."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the ledger cannot be used: {first_line(error)}") from None


def _require_salt(connection: sqlite3.Connection, salt: bytes, path: Path) -> None:
    if connection.execute("SELECT salt FROM promise").fetchone()[0] != salt:
        raise StoreError(f"{path}: another ledger has replaced the one that was opened")


def _check_tags(tags: Sequence[bytes], count: int) -> None:
    """Refuse what no tags of so many releases are.

    Raises
    ------
    SpecError
        Says which.
    """
    if not isinstance(tags, Sequence) or len(tags) != count:
        raise SpecError(f"tags: must be {count}, one for each release, got {shown(tags)}")
    if not all(isinstance(tag, bytes) and tag for tag in tags):
        raise SpecError("tags: must be bytes, as release_tags makes them")


def _positive(name: str, number: object) -> float:
    if not 0 < as_number(number) < math.inf:
        raise SpecError(f"{name}: must be a positive number, got {shown(number)}")
    return as_number(number)


def _hashed(user: str, salt: bytes) -> bytes:
    return hashlib.sha256(salt + encoded_user(user)).digest()[:_USER_BYTES]
