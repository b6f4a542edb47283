"""Stores behind URLs, with real servers on loopback: S3, S3 that fails, plain HTTP, memory."""

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from mdpext_dask import audit, build, open_mechanism
from mdpext_dask.errors import (
    EXIT_BAD_INPUT,
    EXIT_INCOMPLETE,
    GuaranteeViolation,
    MdpextError,
    StoreAccessError,
)
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.summary import summarise
from mdpext_dask.store import objects, remote
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remote import RetryPolicy
from tests.support import servers
from tests.support.inside import mdpext
from tests.support.processes import job_file, processes_in, wait_until
from tests.support.refusals import refused

pytest.importorskip("s3fs")
pytest.importorskip("moto")

Job = Callable[..., dict[str, Any]]
# Several blocks, of little.
BLOCKS = {"domain": {"cell_km": 5.0}, "store": {"block_cells": [1, 2]}, "outputs": {"count": 4}}
IMPATIENT = RetryPolicy(
    attempts=4, first_delay=0.01, longest_delay=0.05, connect_seconds=10, silence_seconds=10,
    request_seconds=30, total_seconds=120, settle_seconds=0.05,
)  # fmt: skip


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the endpoint of an S3 server."""
    with servers.s3_server(tmp_path_factory.mktemp("s3") / "log") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def proxy_of_all(s3: str) -> Iterator[servers.Proxy]:
    with servers.faulty_proxy(s3) as proxy:
        yield proxy


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let stores of this process and its children be at an endpoint."""
    secrets = {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {**secrets, "ENDPOINT_URL": endpoint, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # Connections are kept for as long as the process lives, wherever they went.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    servers.make_bucket(s3, name)
    connect(monkeypatch, s3)
    return f"s3://{name}"


@pytest.fixture
def proxy(
    proxy_of_all: servers.Proxy,
    bucket: str,  # noqa: ARG001 is connected to the server before this connects it to the proxy
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[servers.Proxy]:
    """Yield a proxy before the server, through which the bucket is reached from now on, without patience."""
    proxy_of_all.misbehave()
    connect(monkeypatch, proxy_of_all.endpoint)
    monkeypatch.setattr(remote, "POLICY", IMPATIENT)
    yield proxy_of_all
    proxy_of_all.misbehave()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    """Return a finished local store of several blocks."""
    path = tmp_path_factory.mktemp("local") / "small.zarr"
    build(parse_job(small_job(**BLOCKS)), str(path))
    return path


@pytest.fixture
def url(bucket: str) -> str:
    """Return the URL of a store that is not there yet."""
    return f"{bucket}/small.zarr"


@pytest.fixture
def copied(url: str, local: Path) -> str:
    """Return the URL of a copy of the local store."""
    store = objects.open_objects(url)
    for path in (path for path in local.rglob("*") if path.is_file()):
        objects.put_bytes(store, path.relative_to(local).as_posix(), path.read_bytes())
    return url


@pytest.fixture
def job(tmp_path: Path, small_job: Job) -> Path:
    """Return the file of the job of the local store."""
    return job_file(tmp_path, small_job(**BLOCKS))


def shards_of(url: object) -> dict[str, str]:
    """Return the digests of all shards, as the receipts have them."""
    found = MechanismStore.open(str(url)).read_receipts().values()
    return {key: digest for receipt in found for key, digest in receipt.shards.items()}


def put(url: str, key: str, value: bytes = b"x") -> None:
    objects.put_bytes(objects.open_objects(url), key, value)


def keys_of(url: str) -> list[str]:
    return objects.list_keys(objects.open_objects(url, read_only=True), "")


def run(job: Path, url: str) -> int:
    return mdpext("run", job, "--store", url, "--progress", "none")


# --- S3 -------------------------------------------------------------------------------------------


def test_a_store_in_s3_has_the_same_bytes_as_a_local_one(bucket: str, local: Path, small_job: Job) -> None:
    job, url = parse_job(small_job(**BLOCKS)), f"{bucket}/deep/small.zarr"
    assert build(job, url)["state"] == "complete"
    assert shards_of(url) == shards_of(local)
    open_mechanism(url, verify=True).sample(lon=-73.98, lat=40.75, n=2)
    assert audit(url).holds
    summary = summarise(MechanismStore.open(url))
    assert summary["blocks_done"] == summary["blocks"] == 4
    assert not [key for key in keys_of(url) if key.endswith(objects.LEFTOVER)]


def test_overwriting_deletes_its_own_objects_only(bucket: str, copied: str) -> None:
    others = {f"{bucket}/small.zarr2": "zarr.json", bucket: "small.zar", f"{bucket}/other": "deep/in/it"}
    for place, key in others.items():
        put(place, key)
    put(copied, "probability/c/77/0/0")
    MechanismStore.clear(copied)
    assert keys_of(copied) == []
    for place, key in others.items():
        assert objects.exists(objects.open_objects(place), key)


def test_half_deleted_is_not_complete(copied: str, small_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(objects, "delete_keys", interrupted)
        refused(KeyboardInterrupt, "", MechanismStore.clear, copied)
    assert MechanismStore.find(copied, parse_job(small_job(**BLOCKS))) is None
    refused(MdpextError, "not complete", open_mechanism, copied)


def test_of_many_creators_one_is_told_that_it_is_the_one(bucket: str, tmp_path: Path) -> None:
    def create(url: str, number: int) -> bool:
        return objects.create_exclusively(objects.open_objects(url), "lock/a", f"{number}".encode())

    for url in (bucket, str(tmp_path), f"memory://{uuid.uuid4().hex}"):
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(create, [url] * 3, range(3)))
        assert answers.count(True) == 1
        assert objects.get_bytes(objects.open_objects(url), "lock/a") == b"%d" % answers.index(True)
        assert len(keys_of(url)) == 1


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_missing_is_said_at_once(small_job: Job) -> None:
    url = "s3://nowhere-at-all/small.zarr"
    for ask in (
        lambda: build(parse_job(small_job()), url),
        lambda: MechanismStore.open(url),
        lambda: put(url, "a"),
        lambda: objects.get_bytes(objects.open_objects(url), "a"),
    ):
        assert refused(StoreAccessError, "nowhere-at-all.*NoSuchBucket", ask).exit_code == EXIT_BAD_INPUT


@pytest.mark.slow
def test_a_shard_that_is_missing_is_never_read_as_something(copied: str, local: Path) -> None:
    objects.delete_keys(objects.open_objects(copied), list(shards_of(local)))
    mechanism = open_mechanism(copied)
    refused(MdpextError, "", mechanism.row, x_km=0, y_km=0)
    refused(MdpextError, "", mechanism.sample_points, np.zeros((3, 2)), planar=True)
    refused(GuaranteeViolation, "missing shards", open_mechanism, copied, verify=True)
    assert not audit(copied).holds


# --- S3 that fails --------------------------------------------------------------------------------

THROTTLED = {"kind": "status", "status": 503}
DENIED = {"kind": "status", "status": 403, "code": "AccessDenied", "message": "Access Denied"}


@pytest.mark.parametrize(
    "fault",
    [
        THROTTLED,
        {"kind": "cut"},
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in (
                {"kind": "status", "status": 500, "code": "InternalError"},
                {"kind": "status", "status": 400, "code": "RequestTimeout", "method": "GET|PUT"},
                {"kind": "hang", "times": 2}, {"kind": "reset"}, {"kind": "lost"},
            )
        ),
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('status', '')}",
)  # fmt: skip
def test_faults_that_pass(proxy: servers.Proxy, bucket: str, fault: Any, monkeypatch: Any) -> None:
    if fault["kind"] == "hang":
        monkeypatch.setattr(remote, "POLICY", replace(IMPATIENT, silence_seconds=1, attempts=8))
    store, value = objects.open_objects(bucket), os.urandom(100_000)
    proxy.misbehave({**fault, "in_turns": True})
    for name in ("a/b", "a/c", "d"):
        objects.put_bytes(store, name, value)
    assert objects.get_bytes(store, "a/b") == value
    assert objects.get_bytes(store, "nothing") is None
    assert objects.list_keys(store, "a/") == ["a/b", "a/c"]
    assert [objects.exists(store, key) for key in ("d", "e")] == [True, False]
    assert objects.get_many_json(store, ["e"] * 5) == [None] * 5
    objects.delete_keys(store, ["a/b", "d", "e"])
    assert objects.list_keys(store, "") == ["a/c"]
    assert not objects.is_empty(store)
    assert fault["kind"] in {request["fault"] for request in proxy.log()}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (THROTTLED, "503 SlowDown: Please reduce your request rate"),
        ({"kind": "hang"}, "Read timeout on endpoint"),
        pytest.param({"kind": "lost"}, "Connection was closed", marks=pytest.mark.slow),
        pytest.param({"kind": "reset", "method": "GET"}, "", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else "",
)
def test_patience_ends(proxy: servers.Proxy, bucket: str, fault: Any, said: str, monkeypatch: Any) -> None:
    objects.put_bytes(objects.open_objects(bucket), "a", b"value")
    if fault["kind"] == "hang":
        monkeypatch.setattr(remote, "POLICY", replace(IMPATIENT, silence_seconds=0.3))
    store = objects.open_objects(bucket)
    proxy.misbehave(fault)
    line = f"^{bucket}: a cannot be read: .*{said}.*tried 4 times"
    assert refused(StoreAccessError, line, objects.get_bytes, store, "a").exit_code == EXIT_INCOMPLETE
    # Nobody else has asked again, but for aiohttp, once, on a connection that was closed while it was kept.
    assert len(proxy.log()) in range(4, 5 if fault is THROTTLED else 9)
    proxy.misbehave()
    assert objects.get_bytes(objects.open_objects(bucket), "a") == b"value"


def test_a_refusal_is_said_at_once(proxy: servers.Proxy, bucket: str) -> None:
    store = objects.open_objects(bucket)
    proxy.misbehave(DENIED)
    for ask in (
        lambda: objects.put_bytes(store, "a", b""),
        lambda: objects.get_bytes(store, "a"),
        lambda: objects.list_keys(store, ""),
        lambda: objects.delete_keys(store, ["a"]),
        lambda: objects.exists(store, "a"),
        lambda: objects.is_empty(store),
        lambda: objects.create_exclusively(store, "a", b"token"),
    ):
        before = len(proxy.log())
        error = refused(StoreAccessError, r"403.*Access ?Denied|403 Forbidden", ask)
        assert error.exit_code == EXIT_BAD_INPUT
        assert len(proxy.log()) == before + 1


def test_a_server_that_is_not_there_is_one_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "POLICY", replace(IMPATIENT, attempts=2))
    for endpoint in ("http://127.0.0.1:1", "http://no-such-host.invalid"):
        connect(monkeypatch, endpoint)
        with pytest.raises(StoreAccessError, match=r"Could not connect to the endpoint.*tried 2 times"):
            MechanismStore.open(f"{bucket}/small.zarr")


@pytest.mark.parametrize("kind", ["lost", pytest.param("careless", marks=pytest.mark.slow)])
def test_creators_know_their_own_object(proxy: servers.Proxy, bucket: str, kind: str) -> None:
    """Where the answer was lost, and where the server knows no conditions."""
    store = objects.open_objects(bucket)
    proxy.misbehave({"kind": kind, "method": "PUT", "times": {"lost": 1, "careless": 100}[kind]})
    assert objects.create_exclusively(store, "lock", b"mine")
    assert not objects.create_exclusively(store, "lock", b"not mine")
    assert objects.get_bytes(store, "lock") == b"mine"


@pytest.mark.slow
def test_a_finished_store_is_read_without_permission_to_list(proxy: servers.Proxy, copied: str) -> None:
    """S3 then answers 403 for what is not there, which is never taken for a chunk of fill values."""
    unlisted = {**DENIED, "path": "list-type"}, {"kind": "forbid", "method": "GET"}
    proxy.misbehave(*unlisted)
    mechanism = open_mechanism(copied, verify=True)
    mechanism.sample(lon=-73.98, lat=40.75, n=2)
    assert summarise(MechanismStore.open(copied))["blocks_done"] == 4
    proxy.misbehave()
    objects.delete_keys(objects.open_objects(copied), ["probability/c/0/0/0"])
    proxy.misbehave(*unlisted)
    refused(StoreAccessError, r"probability/c/0/0/0 cannot be read: 403", open_mechanism, copied, verify=True)
    with pytest.raises(StoreAccessError, match=r"probability/c/0/0/0 cannot be read: 403"):
        mechanism.dataset.probability[0, 0].load()


@pytest.mark.parametrize(
    "paths",
    [
        ("receipts/",),
        pytest.param(
            ("seed/", "probability/c", "problem/", "kept", "audit/", "prior"), marks=pytest.mark.slow
        ),
    ],
)
def test_no_answer_is_not_called_damage(proxy: servers.Proxy, copied: str, paths: tuple[str, ...]) -> None:
    for path in paths:
        proxy.misbehave({**THROTTLED, "path": path})
        if path != "audit/":
            refused(StoreAccessError, f"{path}.*503", open_mechanism, copied, verify=True)
        with pytest.raises(StoreAccessError):
            audit(copied)
        proxy.misbehave()
        assert MechanismStore.open(copied).state == "complete"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({**THROTTLED, "method": "PUT", "path": "receipts/|probability", "first": 6}, "503"),
        ({"kind": "hang", "first": 200}, "Read timeout"),
    ],
)
def test_a_job_ends_with_one_line_where_the_server_has_gone_and_goes_on_later(
    proxy: servers.Proxy,
    url: str,
    local: Path,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: dict[str, Any],
    said: str,
) -> None:
    if fault["kind"] == "hang":
        monkeypatch.setattr(remote, "POLICY", replace(IMPATIENT, silence_seconds=1, attempts=3))
    proxy.misbehave(fault)
    assert run(job, url) == EXIT_INCOMPLETE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {url}: ")
    assert said in line
    proxy.misbehave()
    assert run(job, url) == 0
    assert shards_of(url) == shards_of(local)


@pytest.mark.slow
def test_two_workers_while_requests_fail(proxy: servers.Proxy, url: str, local: Path, small_job: Job) -> None:
    proxy.misbehave(
        {**THROTTLED, "in_turns": True, "method": "GET"}, {"kind": "cut", "in_turns": True, "method": "PUT"}
    )
    job = small_job(**BLOCKS, cluster={"kind": "local", "workers": 2})
    assert build(parse_job(job), url)["state"] == "complete"
    assert shards_of(url) == shards_of(local)
    proxy.misbehave()
    open_mechanism(url, verify=True)


@pytest.mark.parametrize("fault", [THROTTLED, DENIED], ids=["503", "403"])
@pytest.mark.slow
def test_what_a_worker_is_refused_is_one_line_here(
    proxy: servers.Proxy,
    url: str,
    small_job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: dict[str, Any],
) -> None:
    job = job_file(tmp_path, small_job(**BLOCKS, cluster={"kind": "local", "workers": 2}))
    # Workers have the patience that is the default.
    monkeypatch.setattr(remote, "POLICY", RetryPolicy())
    proxy.misbehave({**fault, "method": "PUT", "path": "zarr/probability/c"})
    assert run(job, url) == (EXIT_INCOMPLETE if fault is THROTTLED else EXIT_BAD_INPUT)
    lines = [line for line in capsys.readouterr().err.splitlines() if "trying again" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {url}: probability/c/")


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_stopped(url: str, local: Path, small_job: Job, tmp_path: Path) -> None:
    job = job_file(tmp_path, small_job(**BLOCKS, cluster={"kind": "local", "workers": 2}))
    with processes_in(tmp_path) as processes:
        command = processes.mdpext("run", job, "--store", url)
        receipts = objects.open_objects(url, read_only=True)
        # Two of them, and the description of their group.
        wait_until(lambda: len(objects.list_keys(receipts, "receipts/")) >= 3, command)
        assert not command.ended()
        command.kill_group()
        done = MechanismStore.open(url).read_receipts()
        assert processes.mdpext("run", job, "--store", url).code() == 0
    after = MechanismStore.open(url).read_receipts()
    # Whole receipts: time and process are in them, so that none was done again.
    assert {block: after[block] for block in done} == done
    assert shards_of(url) == shards_of(local)
    assert not [key for key in keys_of(url) if key.endswith((objects.LEFTOVER, objects.LOCK))]


@pytest.mark.slow
def test_every_command_takes_a_url(url: str, local: Path, job: Path, tmp_path: Path) -> None:
    """In processes of their own, with nothing but the environment."""
    points = tmp_path / "points.csv"
    points.write_text("lon,lat\n-73.98,40.75\n-73.97,40.76\n")
    with processes_in(tmp_path, {"PYTHONWARNINGS": "error"}) as processes:
        for arguments in (
            ("init", job, "--store", url),
            ("partition", url, "--range", "0:4"),
            ("finalise", url),
            ("status", url),
            ("audit", url),
            ("audit", url, "--method", "sampled", "--pairs", "1000"),
            ("evaluate", url),
            ("sample", url, points, "-o", tmp_path / "out.csv"),
            ("run", job, "--store", url, "--overwrite"),
        ):
            command = processes.mdpext(*arguments)
            assert command.code() == 0, (arguments, command.stderr)
            assert "Traceback" not in command.stderr
            assert "Unclosed" not in command.stderr
    assert shards_of(url) == shards_of(local)
