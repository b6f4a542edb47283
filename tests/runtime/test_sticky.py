"""Sticky answers: known ones, independent ones, and key files that nobody else may read."""

import hashlib
import hmac
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.runtime import sticky
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick
from mdpext_dask.runtime.sticky import StickyKey, new_key_file, release_tags, sticky_below

KEY = StickyKey(bytes(range(32)), "2026")
MECHANISM = "5b6f2cfd"
TOTAL = 2**60


def derived(secret: bytes, use: str, epoch: str, mechanism: str) -> bytes:
    """Return a key for one use, put together by hand."""
    message = b""
    for part in (use.encode(), epoch.encode(), mechanism.encode()):
        message += len(part).to_bytes(4, "big") + part
    return hmac.new(secret, message, hashlib.sha256).digest()


def number(secret: bytes, epoch: str, mechanism: str, user: str, record: int, total: int) -> int:
    """Return a sticky number in plain Python: the first of the accepted words, modulo the total."""
    key = derived(secret, "mdpext sticky draw, version 1", epoch, mechanism)
    end = (2**64 - 1) // (total + total // 64) * total
    for counter in range(1000):
        message = record.to_bytes(8, "big") + counter.to_bytes(4, "big") + user.encode()
        digest = hmac.new(key, message, hashlib.sha256).digest()
        for k in range(0, 32, 8):
            word = int.from_bytes(digest[k : k + 8], "little")
            if word < end:
                return word % total
    raise AssertionError("a thousand digests without an accepted word")


def below(key: StickyKey, users: list[str], records: list[int], total: int = TOTAL) -> list[int]:
    numbers = sticky_below(
        key, MECHANISM, users, np.array(records, dtype=np.int64), np.full(len(users), total, np.uint64)
    )
    return [int(one) for one in numbers]


def test_an_answer_never_changes() -> None:
    """A number that was computed once: other versions of this software must find it too."""
    assert below(KEY, ["anna", "anna", "Ümit"], [7, 63_864, 7]) == [
        565_870_732_151_316_998,
        699_372_897_041_533_729,
        515_245_798_508_518_346,
    ]


@given(
    st.binary(min_size=32, max_size=32),
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=9),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    st.integers(0, 2**62),
    st.integers(1, 2**61),
)
def test_numbers_are_those_of_plain_python(
    secret: bytes, epoch: str, user: str, record: int, total: int
) -> None:
    expected = number(secret, epoch, MECHANISM, user, record, total)
    assert below(StickyKey(secret, epoch), [user], [record], total) == [expected]


def test_a_rejected_digest_is_followed_by_the_next_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to nothing accepted, several counters are used, by some users more than by others."""
    end = 2**61  # one word of eight, and three of five digests hold none
    monkeypatch.setattr(sticky, "acceptance", lambda limits: np.full_like(limits, end))
    users = [f"user {k}" for k in range(50)]
    key, counters = derived(KEY.secret, "mdpext sticky draw, version 1", "2026", MECHANISM), []
    expected = []
    for user in users:
        words = [
            (counter, int.from_bytes(digest[k : k + 8], "little"))
            for counter in range(60)
            for digest in [hmac.digest(key, bytes(8) + counter.to_bytes(4, "big") + user.encode(), "sha256")]
            for k in range(0, 32, 8)
        ]
        counter, word = next((counter, word) for counter, word in words if word < end)
        counters.append(counter)
        expected.append(word % TOTAL)
    assert below(KEY, users, [0] * 50) == expected
    assert max(counters) >= 2


def test_the_same_alone_together_and_in_any_order() -> None:
    users, records = ["anna", "ben", "anna", "anna"], [3, 3, 4, 3]
    together = below(KEY, users, records)
    assert together[0] == together[3]
    assert below(KEY, users[::-1], records[::-1]) == together[::-1]
    assert [below(KEY, [user], [record])[0] for user, record in zip(users, records, strict=True)] == together


def test_everything_that_is_said_to_matter_does() -> None:
    first = below(KEY, ["anna"], [3])
    others = [
        below(KEY, ["ann"], [3]),
        below(KEY, ["anna "], [3]),
        below(KEY, ["anna"], [4]),
        below(KEY.for_epoch("2027"), ["anna"], [3]),
        below(StickyKey(bytes(32), "2026"), ["anna"], [3]),
        [int(sticky_below(KEY, "another", ["anna"], np.array([3]), np.array([TOTAL], np.uint64))[0])],
    ]
    assert len({tuple(numbers) for numbers in [first, *others]}) == 7


def test_texts_that_run_together_are_told_apart() -> None:
    """Epoch and mechanism are separated by their lengths, not by a character that may stand in them."""
    limits = np.array([TOTAL], np.uint64)
    pairs = [("1", "23"), ("12", "3"), ("123", "")]
    numbers = {
        int(sticky_below(StickyKey(bytes(32), epoch), mechanism, ["u"], np.array([0]), limits)[0])
        for epoch, mechanism in pairs
    }
    assert len(numbers) == 3


def test_answers_of_many_users_follow_the_row() -> None:
    """Chi-square at a false-alarm rate of 1e-6 with a new key, over users, and over records."""
    row = np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)
    cumulative = cumulative_weights(row)
    n, key = 20_000, StickyKey.generate()
    limits = np.full(n, cumulative[-1])
    for users, records in (
        ([f"{k}" for k in range(n)], np.zeros(n, np.int64)),
        (["anna"] * n, np.arange(n)),
    ):
        drawn = pick(cumulative, sticky_below(key, MECHANISM, users, records, limits))
        expected = row.astype(float) / row.astype(float).sum() * n
        assert stats.chisquare(np.bincount(drawn, minlength=4), expected).pvalue > 1e-6


def test_tags_repeat_with_answers_and_are_no_part_of_them() -> None:
    users, records = ["anna", "ben", "anna", "anna"], np.array([3, 3, 4, 3])
    tags = release_tags(KEY, MECHANISM, users, records)
    assert tags[0] == tags[3]
    assert len(set(tags)) == 3
    key = derived(KEY.secret, "mdpext sticky tag, version 1", "2026", MECHANISM)
    assert tags[1] == hmac.digest(key, (3).to_bytes(8, "big") + b"ben", "sha256")[:16]
    assert release_tags(KEY.for_epoch("2027"), MECHANISM, users, records)[0] != tags[0]
    assert release_tags(KEY, "another", users, records)[0] != tags[0]


@pytest.mark.parametrize(
    "user", ["", None, 7, 7.5, b"anna", float("nan"), "\ud800", "x" * 1001, ["anna"], {}]
)
def test_users_are_texts(user: object) -> None:
    with pytest.raises(SpecError, match="user: "):
        below(KEY, [user], [0])  # type: ignore[list-item]


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_read_as_it_was_written_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path, key = tmp_path / "key", StickyKey.generate("winter 2026/27")
    key.write(path)
    assert StickyKey.read(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert StickyKey.generate() != StickyKey.generate()


def test_a_wide_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StickyKey.generate().write(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in (path, tmp_path / "link", tmp_path):
        with pytest.raises(DataError, match="never overwritten"):
            new_key_file(taken)
    assert path.read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610, 0o601])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    path.chmod(mode)
    with pytest.raises(DataError, match="others than its owner"):
        StickyKey.read(path)


def _without_a_digit(content: bytes) -> bytes:
    document = json.loads(content)
    return json.dumps({**document, "key": document["key"][:-2]}).encode()


def _of_31_bytes(content: bytes) -> bytes:
    document, secret = json.loads(content), bytes(31)
    check = hashlib.sha256(secret + document["epoch"].encode()).hexdigest()[:8]
    return json.dumps({**document, "key": secret.hex(), "check": check}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: content[:40],
        lambda content: content[:-3],
        lambda content: content.replace(b'"epoch": "1"', b'"epoch": "2"'),
        lambda content: content.replace(b"version 1", b"version 2"),
        lambda content: b"\xff" + content,
        lambda _: b"[]",
        lambda _: b"7",
        lambda _: b"[" * 60_000,
        lambda _: bytes(32),
        lambda content: content.replace(b'"key": "', b'"key": "z'),
        lambda content: content.replace(b'"1"', b"1"),
        _without_a_digit,
        _of_31_bytes,
    ],
)
def test_a_damaged_key_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "key"
    new_key_file(path)
    content = path.read_bytes()
    path.write_bytes(damage(content))  # type: ignore[operator]
    assert path.read_bytes() != content
    with pytest.raises(DataError, match="is damaged, or no sticky key"):
        StickyKey.read(path)


def test_every_single_changed_character_of_the_secret_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    StickyKey(bytes(32)).write(path)
    content = path.read_text()
    start = content.index("0" * 64)
    for k in range(start, start + 64, 7):
        path.write_text(content[:k] + "1" + content[k + 1 :])
        with pytest.raises(DataError, match="is damaged"):
            StickyKey.read(path)


@pytest.mark.parametrize("name", ["missing", ".", "missing/key"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        StickyKey.read(tmp_path / name)


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        StickyKey.generate().write(tmp_path / "missing" / "key")


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
    with pytest.raises(SpecError, match="32 bytes"):
        StickyKey(secret)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", ["", "x" * 101, "a\nb", "\ud800", 1, None])
def test_an_epoch_is_a_short_text(epoch: object) -> None:
    with pytest.raises(SpecError, match="epoch"):
        StickyKey.generate(epoch)  # type: ignore[arg-type]


def test_it_needs_numpy_and_little_else() -> None:
    heavy = "{'pydantic', 'zarr', 'scipy', 'dask', 'pandas', 'xarray', 'pyproj', 'distributed', 'typer'}"
    code = (
        "import sys, mdpext_dask.runtime.sticky, mdpext_dask.runtime.ledger; "
        "import mdpext_dask.problem.grid; "
        f"assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
