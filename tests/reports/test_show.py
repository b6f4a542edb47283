"""``mdpext show``: the page beside the store, made when needed, opened where there is a browser."""

import json
import os
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask import build
from mdpext_dask.errors import IncompleteStoreError, SpecError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import init
from mdpext_dask.reports import show as showing
from mdpext_dask.reports.report import report
from mdpext_dask.reports.show import show
from tests.support.forged import flip_a_bit, shard_of
from tests.support.inside import run_inside

Job = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished store."""
    path = tmp_path_factory.mktemp("show") / "small.zarr"
    build(parse_job(small_job()), str(path))
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be spoilt."""
    return shutil.copytree(built, tmp_path / "a folder" / "copy.zarr")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of what a browser is asked for; there is one, on a display."""
    found: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", lambda address: not found.append(address))
    return found


def test_the_page_is_made_once_and_opened_each_time(store: Path, asked: list[str]) -> None:
    first = show(store)
    page = store.parent / "copy-report.html"
    assert (first["file"], first["reused"], first["opened"], first["holds"]) == (str(page), False, True, True)
    assert "<title>" in page.read_text(encoding="utf-8")
    written = page.stat().st_mtime_ns
    again = show(store)
    assert (again["reused"], again["holds"]) == (True, True)
    assert page.stat().st_mtime_ns == written
    assert asked == [page.resolve().as_uri()] * 2
    assert "%20" in asked[0]
    assert not show(store, overwrite=True)["reused"]


@pytest.mark.slow
def test_a_page_of_report_is_reused_and_one_that_is_out_of_date_is_not(store: Path, asked: list[str]) -> None:
    page = store.parent / "r.html"
    report(store, page, bound_seconds=0)
    assert show(store, page)["reused"]
    (store / "audit" / "bound.json").write_text("{}")  # such as an evaluation leaves there
    assert not show(store, page)["reused"]
    assert show(store, page)["reused"]
    flip_a_bit(shard_of(store))
    for _ in range(2):  # what does not hold is looked at anew each time
        said = show(store, page)
        assert (said["reused"], said["holds"]) == (False, False)
        assert "bytes changed since they were written: probability/c/0/0/0" in said["verdict"]
        # No pair is blamed for rows that cannot be read.
        assert "triple" not in said["verdict"]
    assert len(asked) == 5


@pytest.mark.slow
def test_another_file_is_not_replaced(store: Path, asked: list[str]) -> None:
    page = store.parent / "copy-report.html"
    page.write_text("<h1>mine</h1>")
    with pytest.raises(SpecError, match=r"copy-report\.html"):
        show(store)
    assert page.read_text() == "<h1>mine</h1>"
    assert asked == []
    assert show(store, overwrite=True)["holds"]


def test_without_a_place_beside_the_store_it_is_a_temporary_file(
    store: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(showing.os, "access", lambda *_: False)  # as for a reader of somebody else's store
    monkeypatch.setattr(showing.tempfile, "tempdir", str(tmp_path))
    found = Path(show(store)["file"])
    assert found.name == "copy-report.html"
    assert found.parent.parent == tmp_path
    assert found.parent.stat().st_mode & 0o077 == 0
    assert asked == [found.as_uri()]


def test_without_a_display_it_says_where_the_page_is(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail(f"{address} was opened"))
    command = partial(run_inside, capfd, "show")
    code, out, _ = command(store, "--json", "--progress", "none")
    said = json.loads(out)
    assert (code, said["opened"], said["reused"]) == (0, False, False)
    code, out, _ = command(store, "--progress", "none")
    assert code == 0
    assert "no display here" in out
    assert "copy-report.html" in "".join(out.split())


def test_what_cannot_be_shown_is_one_line(
    store: Path, small_job: Job, tmp_path: Path, asked: list[str]
) -> None:
    with pytest.raises(StoreError, match="no such store"):
        show(tmp_path / "none.zarr")
    url = str(tmp_path / "begun.zarr")
    init(parse_job(small_job()), url)
    with pytest.raises(IncompleteStoreError):
        show(url)
    with pytest.raises(SpecError, match="must end in"):
        show(store, tmp_path / "page.txt")
    assert asked == []


@pytest.mark.slow
def test_the_browser_that_is_named_gets_the_page(store: Path, tmp_path: Path) -> None:
    """In a process of its own, through the standard library's way of finding a browser."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > "{tmp_path}/got"\n')
    program.chmod(0o755)
    environment = {**os.environ, "BROWSER": f"{program} %s"}
    command = [sys.executable, "-m", "mdpext_dask.cli", "show", str(store), "--json", "--progress", "none"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    said = json.loads(found.stdout)
    assert said["opened"]
    assert (tmp_path / "got").read_text() == Path(said["file"]).as_uri()
