"""Sticky answers: known ones, independent ones, and key files that nobody else may read."""

import errno
import hashlib
import hmac
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.runtime import key_files, sticky
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick
from mdpext_dask.runtime.sticky import StickyKey, new_key_file, release_tags, sticky_below
from tests.support.refusals import refused

KEY = StickyKey(bytes(range(32)), "2026")
MECHANISM = "5b6f2cfd"
TOTAL = 2**60


def derived(secret: bytes, use: str, epoch: str, mechanism: str) -> bytes:
    """Return a key for one use, put together by hand."""
    message = b""
    for part in (use.encode(), epoch.encode(), mechanism.encode()):
        message += len(part).to_bytes(4, "big") + part
    return hmac.digest(secret, message, "sha256")


def words(key: bytes, user: str, record: int, counters: int) -> list[int]:
    """Return the 64-bit words of some digests, in plain Python."""
    prefix = record.to_bytes(8, "big")
    messages = [prefix + counter.to_bytes(4, "big") + user.encode() for counter in range(counters)]
    content = b"".join(hmac.digest(key, message, "sha256") for message in messages)
    return [int.from_bytes(content[k : k + 8], "little") for k in range(0, len(content), 8)]


def below(key: StickyKey, users: list[str], records: list[int], total: int = TOTAL) -> list[int]:
    numbers = sticky_below(
        key, MECHANISM, users, np.array(records, dtype=np.int64), np.full(len(users), total, np.uint64)
    )
    return [int(one) for one in numbers]


def test_an_answer_never_changes() -> None:
    """A number that was computed once: other versions of this software must find it too."""
    assert below(KEY, ["anna", "anna", "Ümit"], [7, 63_864, 7]) == [
        565_870_732_151_316_998, 699_372_897_041_533_729, 515_245_798_508_518_346,
    ]  # fmt: skip


@given(
    st.binary(min_size=32, max_size=32),
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=9),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    st.integers(0, 2**62),
    st.integers(1, 2**61),
)
def test_numbers_match_plain_python(secret: bytes, epoch: str, user: str, record: int, total: int) -> None:
    key = derived(secret, "mdpext sticky draw, version 1", epoch, MECHANISM)
    end = (2**64 - 1) // (total + total // 64) * total
    expected = next(word for word in words(key, user, record, 50) if word < end) % total
    assert below(StickyKey(secret, epoch), [user], [record], total) == [expected]


def test_a_rejected_digest_is_followed_by_the_next_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to nothing accepted, several counters are used, by some users more than by others."""
    end = 2**61  # one word of eight, and three of five digests hold none
    monkeypatch.setattr(sticky, "acceptance", lambda limits: np.full_like(limits, end))
    users = [f"user {k}" for k in range(50)]
    key = derived(KEY.secret, "mdpext sticky draw, version 1", "2026", MECHANISM)
    of_users = [words(key, user, 0, 60) for user in users]
    accepted = [next(k for k, word in enumerate(found) if word < end) for found in of_users]
    assert below(KEY, users, [0] * 50) == [w[k] % TOTAL for w, k in zip(of_users, accepted, strict=True)]
    assert max(accepted) >= 8  # the third digest, of four words each


def test_the_same_alone_together_and_in_any_order() -> None:
    users, records = ["anna", "ben", "anna", "anna"], [3, 3, 4, 3]
    together = below(KEY, users, records)
    assert together[0] == together[3]
    assert below(KEY, users[::-1], records[::-1]) == together[::-1]
    assert [below(KEY, [user], [record])[0] for user, record in zip(users, records, strict=True)] == together


def test_everything_that_is_said_to_matter_does() -> None:
    asked = [
        (KEY, MECHANISM, "anna", 3),
        (KEY, MECHANISM, "ann", 3),
        (KEY, MECHANISM, "anna ", 3),
        (KEY, MECHANISM, "anna", 4),
        (KEY.for_epoch("2027"), MECHANISM, "anna", 3),
        (StickyKey(bytes(32), "2026"), MECHANISM, "anna", 3),
        (KEY, "another", "anna", 3),
        # Epoch and mechanism are separated by their lengths, not by a character that may stand in them.
        (KEY.for_epoch("1"), "23", "anna", 3),
        (KEY.for_epoch("12"), "3", "anna", 3),
        (KEY.for_epoch("123"), "", "anna", 3),
    ]
    limits = np.array([TOTAL], np.uint64)
    numbers = {int(sticky_below(key, m, [user], np.array([k]), limits)[0]) for key, m, user, k in asked}
    assert len(numbers) == len(asked)


def test_answers_of_many_users_follow_the_row() -> None:
    """Chi-square at a false-alarm rate of 1e-6 with a new key, over users, and over records."""
    row = np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)
    cumulative = cumulative_weights(row)
    n, key = 20_000, StickyKey.generate()
    limits = np.full(n, cumulative[-1])
    for users, records in (([f"{k}" for k in range(n)], np.zeros(n, np.int64)), (["anna"] * n, np.arange(n))):
        drawn = pick(cumulative, sticky_below(key, MECHANISM, users, records, limits))
        expected = row.astype(float) / row.astype(float).sum() * n
        assert stats.chisquare(np.bincount(drawn, minlength=4), expected).pvalue > 1e-6


def test_tags_repeat_with_answers_and_are_no_part_of_them() -> None:
    users, records = ["anna", "ben", "anna", "anna"], np.array([3, 3, 4, 3])
    tags = release_tags(KEY, MECHANISM, users, records)
    assert (tags[0], len(set(tags))) == (tags[3], 3)
    key = derived(KEY.secret, "mdpext sticky tag, version 1", "2026", MECHANISM)
    assert tags[1] == hmac.digest(key, (3).to_bytes(8, "big") + b"ben", "sha256")[:16]
    assert release_tags(KEY.for_epoch("2027"), MECHANISM, users, records)[0] != tags[0]
    assert release_tags(KEY, "another", users, records)[0] != tags[0]


@pytest.mark.parametrize(
    "user", ["", None, 7, 7.5, b"anna", float("nan"), "\ud800", "x" * 1001, ["anna"], {}]
)
def test_users_are_texts(user: object) -> None:
    refused(SpecError, "user: ", below, KEY, [user], [0])


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_read_as_it_was_written_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path, key = tmp_path / "key", StickyKey.generate("winter 2026/27")
    before = os.umask(0)
    try:
        key.write(path)
    finally:
        os.umask(before)
    assert StickyKey.read(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert StickyKey.generate() != StickyKey.generate()


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in (path, tmp_path / "link", tmp_path):
        refused(DataError, "never overwritten", new_key_file, taken)
    assert path.read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610, 0o601])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    path.chmod(mode)
    refused(DataError, "others than its owner", StickyKey.read, path)


def _without_a_digit(content: bytes) -> bytes:
    document = json.loads(content)
    return json.dumps({**document, "key": document["key"][:-2]}).encode()


def _one_digit(content: bytes) -> tuple[bytes, bytes]:
    digits: str = json.loads(content)["key"]
    return digits.encode(), (digits[:-1] + ("1" if digits[-1] == "0" else "0")).encode()


def _of_31_bytes(content: bytes) -> bytes:
    document, secret = json.loads(content), bytes(31)
    check = hashlib.sha256(secret + document["epoch"].encode()).hexdigest()[:8]
    return json.dumps({**document, "key": secret.hex(), "check": check}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"", lambda content: content[:40], lambda content: content[:-3],
        lambda content: content.replace(b'"epoch": "1"', b'"epoch": "2"'),
        lambda content: content.replace(b"version 2", b"version two"), lambda content: b"\xff" + content,
        lambda _: b"[]", lambda _: b"7", lambda _: b"[" * 60_000, lambda _: bytes(32),
        lambda _: b'{"key": null}', lambda content: content.replace(b'"key": "', b'"key": "z'),
        lambda content: content.replace(b'"1"', b"1"), lambda content: content.replace(*_one_digit(content)),
        _without_a_digit, _of_31_bytes,
    ],
)  # fmt: skip
def test_a_damaged_key_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    content = path.read_bytes()
    path.write_bytes(damage(content))  # type: ignore[operator]
    assert path.read_bytes() != content
    refused(DataError, "is damaged, or no sticky key", StickyKey.read, path)


def test_a_key_whose_answers_went_by_the_bytes_alone_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    path.write_bytes(path.read_bytes().replace(b"version 2", b"version 1"))
    refused(DataError, "drawn anew, one more release of each place: make a new key", StickyKey.read, path)


@pytest.mark.parametrize("fields", ["", ', "check": 7, "wrapped": true'])
def test_a_newer_key_says_to_upgrade(tmp_path: Path, fields: str) -> None:
    """Whatever else has changed in it."""
    path = tmp_path / "key"
    path.write_text(f'{{"format": "mdpext sticky key, version 3"{fields}}}')
    path.chmod(0o600)
    said = "has sticky key format 3, newer than 2, .*; upgrade mdpext-dask$"
    refused(DataError, said, StickyKey.read, path)


@pytest.mark.parametrize("name", ["missing", ".", "missing/key"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    refused(DataError, "cannot be read", StickyKey.read, tmp_path / name)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(DataError, "cannot be written", StickyKey.generate().write, tmp_path / "missing" / "key")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(key_files.os, "fsync", full)
    refused(DataError, "cannot be written: No space left", StickyKey.generate().write, tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_shown_has_the_secret(tmp_path: Path) -> None:
    answer = new_key_file(tmp_path / "key", "2026")
    key = StickyKey.read(tmp_path / "key")
    assert answer == {"path": str(tmp_path / "key"), "key_id": key.key_id, "epoch": "2026"}
    for shown in (repr(key), str(key), key.key_id):
        assert key.secret.hex()[:8] not in shown
        assert repr(key.secret)[2:10] not in shown
    ids = {key.key_id, key.for_epoch("2027").key_id, StickyKey.generate("2026").key_id}
    assert len(ids) == 3
    assert all(len(one) == 16 for one in ids)


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "0" * 32, None])
def test_a_key_has_32_bytes(secret: object) -> None:
    refused(SpecError, "32 bytes", StickyKey, secret)


@pytest.mark.parametrize("epoch", ["", "x" * 101, "a\nb", "\ud800", 1, None])
def test_an_epoch_is_a_short_text(epoch: object) -> None:
    refused(SpecError, "epoch", StickyKey.generate, epoch)
