"""The ledger of releases: no user gets more than was promised, whatever happens to those who charge."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import BudgetExceeded, SpecError, StoreError, shown
from mdpext_dask.runtime import ledger
from mdpext_dask.runtime.ledger import ReleaseBudget
from tests.support.disks import small_disk
from tests.support.refusals import refusal, refused


@pytest.fixture
def budget(tmp_path: Path) -> ReleaseBudget:
    return ReleaseBudget(tmp_path / "ledger", 5)


def test_releases_are_counted_and_refused_after_the_limit(budget: ReleaseBudget) -> None:
    for spent in range(1, 6):
        budget.charge("anna", epsilon_per_km=0.5)
        assert (budget.spent("anna"), budget.composed_epsilon("anna")) == (spent, spent * 0.5)
    message = "a user would have up to 6 releases, 5 are the limit"
    error = refused(BudgetExceeded, message, budget.charge, "anna", epsilon_per_km=0.5)
    assert error.exit_code == 1  # a promise kept, and not bad input
    assert budget.spent("anna") == 5
    assert budget.spent("ben") == budget.composed_epsilon("ben") == 0
    budget.charge("ben", epsilon_per_km=0.5)


def test_several_at_once_are_charged_whole_or_not_at_all(budget: ReleaseBudget) -> None:
    budget.charge("anna", 4, epsilon_per_km=1.0)
    for n in (2, 10**9):
        refused(BudgetExceeded, "", budget.charge, "anna", n, epsilon_per_km=1.0)
    assert budget.spent("anna") == 4
    many = ["ben", "anna", "ben", "anna", *["cem"] * 6]
    assert refused(BudgetExceeded, "", budget.charge_many, many, 1.0).users == 2
    assert [budget.spent(user) for user in ("anna", "ben", "cem")] == [4, 0, 0]
    budget.charge_many(["ben", "anna", "ben"], 1.0)
    assert [budget.spent(user) for user in ("anna", "ben", "cem")] == [5, 2, 0]


def test_what_all_releases_may_add_up_to_counts_those_of_a_larger_promise(budget: ReleaseBudget) -> None:
    """Five are the limit: of ε = 1, or two of ε = 3 that somebody has had, and three more."""
    assert budget.most_epsilon(1.0) == 5.0
    budget.charge("ben", 4, epsilon_per_km=0.25)
    assert budget.most_epsilon(1.0) == 5.0
    budget.charge("anna", 2, epsilon_per_km=3.0)
    assert budget.most_epsilon(1.0) == 2 * 3.0 + 3 * 1.0
    budget.charge("anna", 3, epsilon_per_km=1.0)
    assert budget.most_epsilon(1.0) == budget.composed_epsilon("anna") == 9.0


def test_sticky_answers_count_once(budget: ReleaseBudget) -> None:
    a, b = bytes(16), bytes([1] * 16)
    budget.charge_many(["anna", "anna", "ben", "anna"], 1.0, [a, a, a, b])
    budget.charge_many(["anna", "anna"], 1.0, [b, a])
    assert [budget.spent(user) for user in ("anna", "ben")] == [2, 1]
    tags = [bytes([2, k]) for k in range(4)]
    refused(BudgetExceeded, "", budget.charge_many, ["anna"] * 4, 1.0, tags)
    assert budget.spent("anna") == 2
    # What was refused is not known either: it counts when it is charged.
    budget.charge_many(["anna"] * 3, 1.0, tags[:3])
    assert budget.spent("anna") == 5
    budget.charge_many(["anna"] * 3, 1.0, tags[:3])
    refused(BudgetExceeded, "", budget.charge, "anna", epsilon_per_km=1.0)


charges = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from([0.5, 1.0]), st.none() | st.integers(0, 3)), max_size=6
)


@given(batches=st.lists(st.lists(charges, max_size=3), max_size=5))
def test_a_ledger_is_what_it_counts(
    tmp_path_factory: pytest.TempPathFactory, batches: Sequence[Sequence[Sequence[tuple[str, float, int]]]]
) -> None:
    """Against a list and a set: batches of charges, of both kinds, in any mixture."""
    budget = ReleaseBudget(tmp_path_factory.mktemp("ledger") / "ledger", 4)
    spent: dict[str, list[float]] = {"a": [], "b": []}
    known: set[tuple[str, int]] = set()
    for batch in batches:
        after, tags = {user: list(done) for user, done in spent.items()}, set(known)
        for user, epsilon, tag in (charge for part in batch for charge in part):
            if tag is None or (user, tag) not in tags:
                after[user].append(epsilon)
            if tag is not None:
                tags.add((user, tag))
        fits = all(len(done) <= 4 or len(done) == len(spent[user]) for user, done in after.items())
        try:
            with budget.batch() as pending:
                for part in batch:
                    for user, epsilon, tag in part:
                        pending.charge_many([user], epsilon, None if tag is None else [bytes([tag])])
        except BudgetExceeded:
            assert not fits
        else:
            assert fits
            spent, known = after, tags
        for user, done in spent.items():
            assert (budget.spent(user), budget.composed_epsilon(user)) == (len(done), sum(done))


@settings(max_examples=15)
@given(groups=st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=7), max_size=4))
@pytest.mark.parametrize("tagged", [True, False])
def test_a_held_ledger_charges_each_by_itself(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[tuple[str, int]]], tagged: bool
) -> None:
    """Against lists: in the order of the entries, as long as something is left; what was paid is free."""
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    budget, paid = ReleaseBudget(path, 3), {"a": [0] * 0, "b": [0] * 0}
    with budget.held() as held:
        for group in groups:
            expected = []
            for user, tag in group:
                known = tagged and tag in paid[user]
                expected.append(known or len(paid[user]) < 3)
                if expected[-1] and not known:
                    paid[user].append(tag)
            tags = [bytes([tag]) * 16 for _, tag in group] if tagged else None
            assert held.charge_each([user for user, _ in group], 0.5, tags).tolist() == expected
            # On the disk by now, and seen by others, who need not wait until it is let go of.
            assert [budget.spent(user) for user in "ab"] == [len(paid[user]) for user in "ab"]
    assert [name.name for name in path.parent.iterdir()] == ["ledger"]
    assert [budget.composed_epsilon(user) for user in "ab"] == [len(paid[user]) * 0.5 for user in "ab"]


def test_others_charge_while_a_ledger_is_held(budget: ReleaseBudget) -> None:
    """As the command line does, and a second service; none gets more than is left by all."""
    with budget.held() as held, ReleaseBudget(budget._path).held() as second:
        assert held.charge_each(["anna", "ben"], 1.0).all()
        budget.charge("anna", 2, epsilon_per_km=1.0)
        assert second.charge_each(["anna"], 1.0).all()
        with budget.batch() as pending:
            pending.charge_many(["ben"] * 3, 1.0)
            assert held.charge_each(["anna", "anna", "ben"], 1.0).tolist() == [True, False, True]
        assert second.charge_each(["anna", "ben"], 1.0).tolist() == [False, False]
        refused(BudgetExceeded, "", budget.charge, "anna", epsilon_per_km=1.0)
    assert (budget.spent("anna"), budget.spent("ben")) == (5, 5)
    with budget._connected() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert [path.name for path in budget._path.parent.iterdir()] == ["ledger"]


def test_what_a_held_ledger_charges_is_on_the_disk(budget: ReleaseBudget) -> None:
    """It waits for the disk once for all that is charged, and not where nothing is."""
    with budget.held() as held:
        # FULL is what makes SQLite wait at every commit in this mode; EXTRA is that and more.
        assert held._connection.execute("PRAGMA synchronous").fetchone() == (3,)
        assert held._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert held.charge_each(["anna"] * 5, 1.0).all()
        log = Path(f"{budget._path}-wal")
        written = log.stat()
        assert (written.st_size > 0, written.st_mode & 0o777) == (True, 0o600)
        assert not held.charge_each(["anna"] * 5, 1.0).any()
        assert log.stat().st_size == written.st_size


def test_a_held_ledger_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    """What could not be written is not charged, and what was is not lost."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        budget = ReleaseBudget(disk / "ledger", 10**6)
        with budget.held() as held:
            assert held.charge_each(["anna"], 1.0).all()
            disk.fill()
            users = [f"user {k}" for k in range(200)]
            refused(StoreError, "full|I/O", held.charge_each, users, 1.0)
            assert {budget.spent(user) for user in users[::9]} == {0}
            (disk / "ballast").unlink()
            assert held.charge_each(["anna", *users], 1.0).all()
        assert {budget.spent(user) for user in users[::9]} == {1}
        assert budget.spent("anna") == 2


def test_a_held_ledger_that_is_moved_or_broken_releases_nothing(
    budget: ReleaseBudget, tmp_path: Path
) -> None:
    path, impatient = tmp_path / "ledger", ReleaseBudget(tmp_path / "ledger", wait_seconds=0.01)
    with impatient.held() as held:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        refused(StoreError, "locked", held.charge_each, ["anna"], 1.0)
        holder.execute("ROLLBACK")
        holder.close()
        for users, tags in ((["anna", ""], None), (["anna"], []), (["anna"], ["tag"])):
            refused(SpecError, "user|tags", held.charge_each, users, 1.0, tags)
        assert (budget.spent("anna"), held.charge_each(["anna"], 1.0).tolist()) == (0, [True])
        with pytest.raises(StoreError, match="thread"), ThreadPoolExecutor(1) as pool:
            pool.submit(held.charge_each, ["anna"], 1.0).result()
        path.rename(tmp_path / "away")
        refused(StoreError, "has been moved", held.charge_each, ["anna"], 1.0)
        ReleaseBudget(path, 5)
        refused(StoreError, "has been moved, deleted or replaced", held.charge_each, ["anna"], 1.0)
    assert ReleaseBudget(path, 5).spent("anna") == 0


def test_others_charge_during_a_batch_and_a_failed_one_is_not_charged(budget: ReleaseBudget) -> None:
    with pytest.raises(RuntimeError), budget.batch() as pending:  # noqa: PT012
        pending.charge_many(["anna"], 1.0)
        raise RuntimeError
    assert budget.spent("anna") == 0
    with budget.batch() as pending:
        pending.charge_many(["anna"] * 3, 1.0)
        budget.charge("anna", 2, epsilon_per_km=1.0)
    assert budget.spent("anna") == 5
    with pytest.raises(BudgetExceeded), budget.batch() as pending:  # noqa: PT012
        pending.charge_many(["ben"] * 3, 1.0)
        budget.charge("ben", 3, epsilon_per_km=1.0)
    assert budget.spent("ben") == 3


def test_a_ledger_is_for_one_limit_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    refused(SpecError, "a new one needs a release limit", ReleaseBudget, path)
    assert not path.exists()
    ReleaseBudget(path, 3).charge("anna", 2, epsilon_per_km=1.0)
    assert (ReleaseBudget(path).limit, ReleaseBudget(path, 3).spent("anna")) == (3, 2)
    refused(SpecError, "for at most 3 releases a user, not 4", ReleaseBudget, path, 4)


def test_the_file_is_private_and_has_no_names_and_no_order(budget: ReleaseBudget, tmp_path: Path) -> None:
    budget.charge("Anna Example", epsilon_per_km=1.0)
    budget.charge_many(["Anna Example"] * 3, 1.0, [b"3", b"1", b"2"])
    path = tmp_path / "ledger"
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"Anna" not in path.read_bytes()
    assert [one.name for one in tmp_path.iterdir()] == ["ledger"]
    other = ReleaseBudget(tmp_path / "other", 5)
    other.charge("Anna Example", epsilon_per_km=1.0)
    one, two = (
        sqlite3.connect(at).execute("SELECT user FROM spent").fetchone() for at in (path, other._path)
    )
    assert one != two
    tags = sqlite3.connect(path).execute("SELECT tag FROM sticky").fetchall()
    assert tags == sorted(tags)


NOT_COUNTS: list[Any] = [0, -1, 2.5, "3", True, 10**9 + 1, 10**30, 10**5000, np.True_, [1], float("nan")]
NOT_POSITIVE: list[Any] = [0.0, -1.0, float("nan"), float("inf"), True, "1", None, 10**400, 10**5000, [1.0]]


@pytest.mark.parametrize("number", NOT_COUNTS, ids=shown)
def test_what_is_charged_is_positive_and_whole(budget: ReleaseBudget, tmp_path: Path, number: Any) -> None:
    with pytest.raises(SpecError, match="release limit"):
        ReleaseBudget(tmp_path / "new", number)
    assert not (tmp_path / "new").exists()
    refused(SpecError, "n: ", budget.charge, "anna", number, epsilon_per_km=1.0)
    assert budget.spent("anna") == 0


@pytest.mark.parametrize("number", NOT_POSITIVE, ids=shown)
def test_an_epsilon_and_a_time_are_positive(budget: ReleaseBudget, tmp_path: Path, number: Any) -> None:
    for use in (
        lambda: budget.charge("anna", epsilon_per_km=number),
        lambda: budget.charge_many(["anna"], number),
        lambda: budget.charge_many(["anna"], number, [b"tag"]),
        lambda: budget.most_epsilon(number),
    ):
        assert "epsilon_per_km: must be a positive number, got " in refusal(use, kind=SpecError)
    with pytest.raises(SpecError, match="wait_seconds: "):
        ReleaseBudget(tmp_path / "new", 3, wait_seconds=number)
    assert budget.spent("anna") == 0


def test_numbers_of_other_kinds_are_numbers(tmp_path: Path) -> None:
    budget = ReleaseBudget(tmp_path / "new", np.int64(3))  # type: ignore[arg-type]
    budget.charge("anna", np.int32(2), epsilon_per_km=np.float32(0.5))  # type: ignore[arg-type]
    budget.charge_many(np.array(["anna"]), Fraction(1, 4))  # type: ignore[arg-type]
    assert (budget.spent("anna"), budget.composed_epsilon("anna")) == (3, 1.25)


@pytest.mark.parametrize("users", [None, "anna", b"anna", 7, True, iter(["anna"]), {"anna"}])
def test_users_that_are_no_list_are_refused_and_none_is_forgotten(budget: ReleaseBudget, users: Any) -> None:
    for tags in (None, [bytes(16)]):
        with pytest.raises(SpecError, match="users: must be a list of texts"):
            budget.charge_many(users, 1.0, tags)


@pytest.mark.parametrize("tags", [7, True, b"x", "x", [7], [None], [b""], ["tag"]])
def test_tags_are_bytes(budget: ReleaseBudget, tags: Any) -> None:
    with pytest.raises(SpecError, match="tags: "):
        budget.charge_many(["anna"], 1.0, tags)
    assert budget.spent("anna") == 0


@pytest.mark.parametrize("path", [None, True, 7, b"ledger", 10**5000], ids=shown)
def test_a_ledger_has_a_path(path: Any) -> None:
    with pytest.raises(SpecError, match="ledger: must be a path, got "):
        ReleaseBudget(path, 3)


def test_charges_that_are_none_are_refused(budget: ReleaseBudget) -> None:
    for user in ("", None, 7, True, 10**5000, ["anna"]):
        with pytest.raises(SpecError, match="user"):
            budget.charge(user, epsilon_per_km=1.0)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="user"):
            budget.charge_many(["anna", user], 1.0)  # type: ignore[list-item]
    with pytest.raises(SpecError, match="tags"):
        budget.charge_many(["anna"], 1.0, [b"1", b"2"])
    assert budget.spent("anna") == 0


def test_another_file_or_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger", tmp_path / "other"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE other (number)")
    for content in (b"no database", b"x" * 5000, b"SQLite format 3\0" + bytes(5000), other.read_bytes()):
        path.write_bytes(content)
        refused(StoreError, "ledger", ReleaseBudget, path, 5)
        assert path.read_bytes() == content


def test_a_newer_ledger_is_refused_and_left_as_it_is(budget: ReleaseBudget, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    content = path.read_bytes()
    for action in (lambda: ReleaseBudget(path), lambda: budget.charge("anna", epsilon_per_km=1.0)):
        refused(StoreError, "has ledger format 2, newer than 1, .*; upgrade mdpext-dask$", action)
    assert path.read_bytes() == content


def test_an_empty_file_is_a_ledger_that_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.touch()
    refused(SpecError, "needs a release limit", ReleaseBudget, path)
    ReleaseBudget(path, 5).charge("anna", epsilon_per_km=1.0)


def test_a_replaced_or_deleted_ledger_is_noticed(budget: ReleaseBudget, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.unlink()
    refused(StoreError, "cannot be used", budget.charge, "anna", epsilon_per_km=1.0)
    path.unlink()
    other = ReleaseBudget(path, 5)
    refused(StoreError, "another ledger", budget.charge, "anna", epsilon_per_km=1.0)
    assert other.spent("anna") == 0


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "ledger"):
        refused(StoreError, "cannot be opened", ReleaseBudget, path, 5)


# --- processes and threads ------------------------------------------------------------------------

_CHARGE = """
import sys
from mdpext_dask.errors import BudgetExceeded
from mdpext_dask.runtime.ledger import ReleaseBudget
budget, charged = ReleaseBudget(sys.argv[1], 40), 0
print("ready", flush=True)
sys.stdin.readline()
for k in range(60):
    try:
        budget.charge_many(["anna", "anna"] if k % 3 else ["anna"], 1.0)
        charged += 2 if k % 3 else 1
        print(charged, flush=True)
    except BudgetExceeded:
        pass
"""


def _charging(path: Path, count: int) -> "list[subprocess.Popen[str]]":
    """Start processes that charge, all at once."""
    command = [sys.executable, "-c", _CHARGE, str(path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return started


def test_two_processes_at_once_get_no_more_than_the_limit(tmp_path: Path) -> None:
    """Also when both of them make the ledger."""
    processes = _charging(tmp_path / "ledger", 2)
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(int(lines[-1]) for lines in answers if lines) == 40
    assert ReleaseBudget(tmp_path / "ledger").spent("anna") == 40


def test_a_ledger_in_the_making_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked what it is, a file is a ledger or empty, and not something in between."""
    path, original = tmp_path / "ledger", ledger._IDENTITY

    class Interrupted:
        def __iter__(self) -> Iterator[str]:
            first, *others = original
            yield first
            monkeypatch.setattr(ledger, "_IDENTITY", original)
            with contextlib.suppress(StoreError):  # it may have to wait for longer than it likes
                ReleaseBudget(path, 5, wait_seconds=0.01)
            yield from others

    monkeypatch.setattr(ledger, "_IDENTITY", Interrupted())
    assert ReleaseBudget(path, 5).limit == 5


def test_what_was_charged_survives_a_kill(tmp_path: Path) -> None:
    """Killed somewhere in the midst: at least what was said to be charged is, and at most one charge more."""
    path = tmp_path / "ledger"
    for after in (1, 3, 6):
        path.unlink(missing_ok=True)
        [process] = _charging(path, 1)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        # By the same reader, which may have read ahead.
        lines += process.stdout.readlines()
        process.communicate()
        said, spent = int(lines[-1]), ReleaseBudget(path).spent("anna")
        assert said <= spent <= said + 2
        # And it goes on: there is no lock that a dead process holds.
        ReleaseBudget(path).charge("ben", epsilon_per_km=1.0)


def test_what_is_charged_is_on_the_disk_when_it_is_said_to_be(budget: ReleaseBudget) -> None:
    """A machine that stops cannot be tried; SQLite says what it waits for (3: EXTRA, the folder as well)."""
    with budget._connected() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_who_cannot_have_the_lock_says_so(budget: ReleaseBudget, tmp_path: Path) -> None:
    impatient = ReleaseBudget(tmp_path / "ledger", wait_seconds=0.01)
    holder = sqlite3.connect(tmp_path / "ledger", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    refused(StoreError, "locked", impatient.charge, "anna", epsilon_per_km=1.0)
    holder.execute("ROLLBACK")
    holder.close()
    assert budget.spent("anna") == 0


def test_threads_share_a_ledger(budget: ReleaseBudget) -> None:
    refused: list[str] = []

    def charge() -> None:
        for _ in range(3):
            try:
                budget.charge("anna", epsilon_per_km=1.0)
            except BudgetExceeded as error:
                refused.append(str(error))
            time.sleep(0)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(charge)
    assert budget.spent("anna") == 5
    assert len(refused) == 12 - 5


def test_a_thread_that_looks_does_not_drop_the_lock_of_one_that_charges(budget: ReleaseBudget) -> None:
    """Locks are those of a process: whoever closes a file in it, other than by SQLite, drops them all."""
    code = "import sys; from mdpext_dask.runtime.ledger import ReleaseBudget as Budget; "
    code += "Budget(sys.argv[1], wait_seconds=0.01).charge('anna', epsilon_per_km=1.0)"
    with budget._connected() as connection:
        connection.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(budget.spent, "anna").result() == 0
        command = [sys.executable, "-c", code, str(budget._path)]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "the ledger cannot be used: database is locked" in other.stderr
        connection.execute("ROLLBACK")
    assert budget.spent("anna") == 0
