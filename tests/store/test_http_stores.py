"""Finished stores on a web server of plain files, and URLs for which there is no driver."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from mdpext_dask import audit, evaluate, open_mechanism
from mdpext_dask.errors import (
    EXIT_BAD_INPUT,
    GuaranteeViolation,
    IncompleteStoreError,
    MdpextError,
    StoreAccessError,
    StoreError,
)
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.store import objects, remote
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remote import RetryPolicy
from tests.support import servers
from tests.support.inside import mdpext
from tests.support.refusals import refused

pytest.importorskip("aiohttp")

Job = Callable[..., dict[str, Any]]
IMPATIENT = RetryPolicy(attempts=3, first_delay=0.01, longest_delay=0.02, silence_seconds=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    """Return a folder with a finished store of several blocks."""
    folder = tmp_path_factory.mktemp("served")
    job = small_job(domain={"cell_km": 5.0}, store={"block_cells": [1, 2]}, outputs={"count": 4})
    build(parse_job(job), str(folder / "small.zarr"))
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("ranges",), id="ranges"),
        pytest.param((), id="no ranges"),
        pytest.param(("listing",), id="listing", marks=pytest.mark.slow),
        pytest.param(("ranges", "forbid"), id="forbid", marks=pytest.mark.slow),
    ],
)
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of the finished store on a server that may know ranges and indexes, and hide absence."""
    with servers.static_server(folder, *request.param) as server:
        yield f"{server}/small.zarr"


def _loss_km(url: str) -> float:
    return float(evaluate(url, bound=BoundRequest(seconds=0), attacks=None)["loss_km"])


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(("ranges",), id="ranges"),
        pytest.param((), id="no ranges", marks=pytest.mark.slow),
        pytest.param(("listing",), id="listing", marks=pytest.mark.slow),
        pytest.param(("ranges", "forbid"), id="forbid", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_read_over_http(url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = open_mechanism(folder / "small.zarr")
    mechanism = open_mechanism(url, verify=True)
    assert np.array_equal(mechanism.row(x_km=1, y_km=2), local.row(x_km=1, y_km=2))
    # As it is in workers that somebody computes it with.
    assert pickle.loads(pickle.dumps(mechanism.dataset)).identical(local.dataset)
    assert audit(url).epsilon == audit(folder / "small.zarr").epsilon
    assert _loss_km(url) == _loss_km(str(folder / "small.zarr"))
    points = tmp_path / "points.csv"
    points.write_text("lon,lat\n-73.98,40.75\n-73.97,40.76\n")
    assert mdpext("sample", url, points, "-o", tmp_path / "out.csv") == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    capsys.readouterr()
    assert mdpext("status", url, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["blocks_done"]) == ("complete", 4)
    assert mdpext("audit", url) == 0


def test_every_kind_of_range_is_what_it_is_in_a_file(url: str, folder: Path) -> None:
    """Also from servers that answer with everything."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

    remote = objects.open_objects(url, read_only=True)
    local = objects.open_objects(str(folder / "small.zarr"), read_only=True)
    key, prototype = "probability/c/0/0/0", default_buffer_prototype()
    length = len(objects.get_bytes(local, key) or b"")
    ranges = (0, 1), (3, length // 2), (length - 1, length), (0, length)
    requests = [
        *(RangeByteRequest(first, end) for first, end in ranges),
        *(OffsetByteRequest(offset) for offset in (0, 5)),
        *(SuffixByteRequest(count) for count in (7, length)),
    ]
    found, expected = (
        sync(store.get_partial_values(prototype, [(key, part) for part in requests]))
        for store in (remote, local)
    )
    assert [part and part.to_bytes() for part in found] == [part and part.to_bytes() for part in expected]


def test_writing_over_http_is_refused(url: str, small_job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job = parse_job(small_job())
    said = f"^{url}: can only be read"
    refused(StoreError, said, build, job, url)
    refused(StoreError, said, build, job, url, overwrite=True)
    refused(StoreError, said, MechanismStore.open, url, mode="r+")
    with pytest.raises(StoreAccessError, match="cannot be listed over plain HTTP"):
        objects.list_keys(objects.open_objects(url, read_only=True), "receipts/")
    assert mdpext("partition", url, "0", "--progress", "none") == EXIT_BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_missing_on_a_server_is_never_read_as_something(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "small.zarr", tmp_path / "small.zarr")
    shards = sorted((tmp_path / "small.zarr" / "probability" / "c").rglob("0"))
    with servers.static_server(tmp_path, "ranges") as server:
        mechanism = open_mechanism(f"{server}/small.zarr")
        for shard in (path for path in shards if path.is_file()):
            shard.unlink()
        said = r"damaged|missing|not a"
        refused(MdpextError, said, mechanism.row, x_km=0, y_km=0)
        refused(MdpextError, said, mechanism.sample, lon=-73.98, lat=40.75)
        refused(MdpextError, said, mechanism.sample_points, np.zeros((3, 2)), planar=True)
        refused(GuaranteeViolation, "missing shards", open_mechanism, f"{server}/small.zarr", verify=True)
        assert not audit(f"{server}/small.zarr").holds


def test_an_unfinished_store_and_none_at_all(small_job: Job, tmp_path: Path) -> None:
    job = small_job(domain={"cell_km": 5.0}, store={"block_cells": [1, 2]}, outputs={"count": 4})
    init(parse_job(job), str(tmp_path / "small.zarr"))
    with servers.static_server(tmp_path) as server:
        summary = summarise(MechanismStore.open(f"{server}/small.zarr"))
        assert (summary["state"], summary["blocks_done"]) == ("planned", 0)
        refused(IncompleteStoreError, "4 of 4 blocks are missing", open_mechanism, f"{server}/small.zarr")
        refused(StoreError, "not a mechanism store", open_mechanism, f"{server}/nothing.zarr")


@pytest.mark.slow
def test_a_web_server_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLICY", IMPATIENT)
    with servers.static_server(folder, "ranges") as server, servers.faulty_proxy(server) as proxy:
        url = f"{proxy.endpoint}/small.zarr"
        proxy.misbehave({"kind": "status", "status": 503, "in_turns": True})
        assert open_mechanism(url, verify=True).sample(lon=-73.98, lat=40.75, n=1).shape == (1, 2)
        proxy.misbehave({"kind": "cut", "in_turns": True})
        open_mechanism(url, verify=True)
        for fault, said in (
            ({"kind": "status", "status": 503}, "503.*tried 3 times"),
            ({"kind": "status", "status": 403}, "403"),
            ({"kind": "hang"}, "imeout.*tried 3 times"),
        ):
            proxy.misbehave(fault)
            monkeypatch.setattr(remote, "POLICY", replace(IMPATIENT, silence_seconds=0.5))
            refused(StoreAccessError, f"zarr.json cannot be read: .*{said}", open_mechanism, url)
    refused(StoreAccessError, "tried 3 times", open_mechanism, url)


def test_a_url_without_a_driver_says_what_to_install() -> None:
    """In a process of its own, where what is installed here is not."""
    code = """
import sys
sys.modules |= {"s3fs": None, "aiohttp": None}
from mdpext_dask.store.objects import open_objects
for url in ("s3://bucket/a.zarr", "https://host/a.zarr"):
    try:
        open_objects(url, read_only=True)
    except OSError as error:
        print(f"{type(error).__name__} {error}")
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, url in zip(answer.stdout.splitlines(), ("s3://bucket", "https://host"), strict=True):
        assert line.startswith(f"StoreError {url}/a.zarr: the driver is not installed: ")
        assert line.endswith("; pip install 'mdpext-dask[cloud]'")
    with pytest.raises(StoreError, match=r"^teapot://a/b: cannot be opened: Protocol not known: teapot"):
        open_mechanism("teapot://a/b")


def test_a_driver_that_connects_at_once_finds_nobody() -> None:
    said, url = r"^ftp://127.0.0.1:1/a: does not answer: .*refused", "ftp://127.0.0.1:1/a"
    assert refused(StoreAccessError, said, open_mechanism, url).exit_code == 3
