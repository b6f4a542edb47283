"""A full disk ends every command that writes with exit code 3 and one line, whatever was being written."""

import errno
import json
import pickle
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.compute import executor
from mdpext_dask.errors import (
    DataError,
    MdpextError,
    SpecError,
    StoreError,
    exit_code_of,
    first_line,
    is_disk_full,
)
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.runtime.signatures import new_signing_key
from tests.support.disks import Disk, small_disk
from tests.support.inside import run_inside
from tests.support.problems import write_toml

Job = Callable[..., dict[str, dict[str, Any]]]
FULL = OSError(errno.ENOSPC, "No space left on device", "/somewhere/.city.mdp.x7k2p")


def raised(*errors: BaseException) -> BaseException:
    """Return the last of some errors, each raised from none while the one before was handled."""
    try:
        try:
            raise errors[0]
        except BaseException:
            if len(errors) == 1:
                raise
            raise raised(*errors[1:]) from None
    except BaseException as error:
        return error


def sqlite_full() -> sqlite3.Error:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("CREATE TABLE t (x)")
    return caught.value


@pytest.mark.parametrize(
    ("errors", "full"),
    [
        ((FULL,), True),
        ((OSError(errno.EDQUOT, "Disk quota exceeded"),), True),
        ((FULL, DataError("cannot be written")), True),
        ((FULL, ValueError("flush"), StoreError("cannot be written")), True),
        ((OSError(errno.EROFS, "Read-only file system"), StoreError("cannot be written")), False),
        ((SpecError("no such city"),), False),
    ],
)
def test_a_full_disk_is_seen_behind_any_error(errors: tuple[BaseException, ...], full: bool) -> None:
    error = raised(*errors)
    assert is_disk_full(error) is full
    if isinstance(error, MdpextError):
        assert exit_code_of(error) == (3 if full else 2)


def test_a_ledger_s_full_disk_is_one() -> None:
    assert is_disk_full(raised(sqlite_full(), StoreError("the ledger cannot be used")))


def test_reasons_name_no_file_of_a_moment() -> None:
    assert first_line(FULL) == "No space left on device"
    assert first_line(StoreError("s.zarr: is full")) == "s.zarr: is full"
    assert first_line(ValueError("bad\nworse")) == "bad"


def test_a_worker_s_full_disk_arrives_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its causes, which may not be possible to send."""

    def write() -> None:
        raise raised(FULL, DataError("block 3: cannot be written"))

    monkeypatch.setattr(executor, "_own_versions", dict)
    with pytest.raises(DataError) as caught:
        executor._apply(write, (), {}, frozenset())
    assert exit_code_of(pickle.loads(pickle.dumps(caught.value))) == 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    folder = tmp_path_factory.mktemp("full")
    build(parse_job(small_job()), str(folder / "s.zarr"))
    job = small_job(compare={"methods": ["em"], "repeats": 1, "bound_seconds": 0})
    write_toml(folder / "job.toml", job)
    (folder / "points.csv").write_text("lon,lat,user\n" + "-73.98,40.75,kim\n" * 3000)
    new_signing_key(folder / "key")
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", size="2m") as mounted:
        yield mounted


# FROM stands for the folder with what is read, DISK for the one that is full.
COMMANDS = {
    "sample": "sample FROM/s.zarr FROM/points.csv -o DISK/out.csv",
    "sample parquet": "sample FROM/s.zarr FROM/points.csv -o DISK/out.parquet",
    "sample geojson": "sample FROM/s.zarr FROM/points.csv -o DISK/out.geojson",
    "ledger": "sample FROM/s.zarr FROM/points.csv -o FROM/out.csv --user-column user "
    "--ledger DISK/ledger --release-limit 9999",
    "sticky-key": "sticky-key DISK/key",
    "signing-key": "signing-key DISK/key",
    "export": "export FROM/s.zarr -o DISK/city.mdp",
    "report": "report FROM/s.zarr -o DISK/r.html --bound-seconds 0",
    "records": "evaluate FROM/s.zarr --records DISK/r.npz --no-attacks --bound-seconds 0",
    "map": "evaluate FROM/s.zarr --map DISK/m.png --no-attacks --bound-seconds 0",
    "picture": "audit FROM/s.zarr --picture DISK/a.png",
    "compare": "compare FROM/job.toml -o DISK/compare",
    "submit": "submit FROM/job.toml --to slurm --dry-run --folder DISK/slurm --store FROM/s.zarr",
    "run": "run FROM/job.toml --store DISK/new.zarr",
    "init": "init FROM/job.toml --store DISK/new.zarr",
    "remap": "remap DISK/s.zarr",
    "sign": "sign DISK/s.zarr --key FROM/key",
}


# What is written in other ways; by default, one command for each.
_EVERY_TIME = ("sample", "ledger", "export", "records", "run", "remap")


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=() if name in _EVERY_TIME else pytest.mark.slow) for name in COMMANDS],
)
def test_a_full_disk_is_exit_3_and_one_line(
    command: str, finished: Path, disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    if "DISK/s.zarr" in COMMANDS[command]:
        shutil.copytree(finished / "s.zarr", disk / "s.zarr")
    disk.fill()
    words = COMMANDS[command].replace("FROM", str(finished)).replace("DISK", str(disk.folder)).split()
    quiet = (
        [] if words[0] in ("sample", "export", "sticky-key", "signing-key", "sign") else ["--progress=none"]
    )
    ended = run_inside(capfd, *words, *quiet, "--json")
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["exit_code"]) == (3, 3), ended.stderr
    assert ended.stderr == f"error: {document['message']}\n"
    assert re.search("No space left|is full", document["message"])
    # Where it was to go, and no name of a moment.
    assert str(disk.folder) in document["message"]
    assert not re.search(r"\.partial|[0-9a-f]{32}|/\.[a-z]|/tmp[a-z0-9_]{8}\b", document["message"])
    assert sorted(path.name for path in disk.folder.iterdir() if path.name.startswith(".")) == []
