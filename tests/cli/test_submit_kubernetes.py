"""Handing a job to Kubernetes and following it.

No cluster is here, so a program that stands in for ``kubectl`` plays one (see ``stub_kubectl.py``): tested is
the client's side alone. Whether the manifests are valid is tested in ``test_manifests.py``.
"""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdpext_dask.cli.submit import follow as following
from mdpext_dask.cli.submit.kubernetes import _overlap
from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, SpecError
from mdpext_dask.job.spec import JobSpec, parse_job
from tests.support.inside import run_inside
from tests.support.refusals import refusal
from tests.support.submissions import program, to_kubernetes

STUB = Path(__file__).parents[1] / "support" / "stub_kubectl.py"
STORE = "s3://bucket/small.zarr"


class Cluster:
    """The cluster that the stub plays."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.json"

    def set(self, **what: Any) -> None:
        self.file.write_text(json.dumps(what))

    def update(self, **what: Any) -> None:
        self.set(**{**json.loads(self.file.read_text()), **what})

    def calls(self, word: str) -> list[list[str]]:
        return [call for call in json.loads(self.file.read_text()).get("calls", []) if word in call]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    programs = program(tmp_path / "bin", "kubectl", f'exec {sys.executable} {STUB} "$@"')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    found = Cluster(tmp_path)
    monkeypatch.setenv("STUB_CLUSTER", str(found.file))
    monkeypatch.setattr(following, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(following, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(following, "_REST", 0.0)
    # What is at a URL is not this test's to find out.
    monkeypatch.setattr(following, "_stage_of", lambda _: ("seed", 0, 0))
    monkeypatch.setattr(following, "_state_of", lambda _: (None, "no such bucket"))
    found.set(status=["Successful"])
    return found


@pytest.fixture
def spec(small_job: Callable[..., dict[str, dict[str, Any]]]) -> JobSpec:
    return parse_job(small_job(cluster={"kind": "kubernetes", "image": "registry/image"}))


def test_a_dry_run_needs_no_kubectl(tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    document, _ = to_kubernetes(spec, tmp_path / "a folder", STORE, dry_run=True)
    file = tmp_path / "a folder" / "job.yaml"
    commands = [shlex.join(["kubectl", "apply", "--filename", str(file)])]
    assert document == {
        "to": "kubernetes", "store": STORE, "folder": str(file.parent), "files": [str(file)],
        "commands": commands, "jobs": ["daskjob/mdpext-small"], "state": "written",
    }  # fmt: skip
    assert [one["kind"] for one in yaml.safe_load_all(file.read_text())][-1] == "DaskJob"
    json.dumps(document)


def test_the_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Path(__file__).resolve().parents[2] / "workflows" / "manhattan.toml"
    arguments = ["submit", str(job), "--to", "kubernetes", "--dry-run", "--store", STORE]
    done = run_inside(capsys, *arguments, "--set", "cluster.image=registry/image")
    file = tmp_path / "manhattan-kubernetes" / "job.yaml"
    assert (done.returncode, done.stdout) == (0, f"kubectl apply --filename {shlex.quote(str(file))}\n")
    file.unlink()
    refused = run_inside(capsys, *arguments)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: cluster.image")
    assert not file.exists()


def test_without_kubectl_the_file_stays(tmp_path: Path, spec: JobSpec, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "job" / "job.yaml"
    refusal(lambda: to_kubernetes(spec, file.parent, STORE), "no kubectl", str(file), kind=SpecError)
    assert file.exists()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("E1128 noise\nThe connection to the server a:8080 was refused", "a:8080 was refused"),
        ('error: the server doesn\'t have a resource type "daskjob"', "operator is not installed"),
        ('error: no matches for kind "DaskJob" in version "v1"', "operator is not installed"),
        ("Error from server (Forbidden): daskjobs is forbidden", "Forbidden"),
    ],
)
def test_cluster_that_refuses(tmp_path: Path, spec: JobSpec, cluster: Cluster, said: str, shown: str) -> None:
    cluster.set(status=[None], refuse=said)
    refusal(lambda: to_kubernetes(spec, tmp_path / "job", STORE), shown, kind=SpecError)
    assert (tmp_path / "job" / "job.yaml").exists()


def test_array_jobs_are_for_others(tmp_path: Path, spec: JobSpec) -> None:
    with pytest.raises(SpecError, match="--array"):
        to_kubernetes(spec, tmp_path / "job", STORE, array=True)


def test_a_job_is_followed_to_its_end(tmp_path: Path, spec: JobSpec, cluster: Cluster) -> None:
    log = ["domain: 0.21 s", "seed: 3.00 s", "extend: 7.10 s"]
    states = [None, "JobCreated", "ClusterCreated", "Running", "Running", "Successful"]
    cluster.set(status=states, exit_code=0, log=log)
    document, notes = to_kubernetes(spec, tmp_path / "job", STORE)
    assert document["state"] == "done"
    # Each line once, although it is asked for again and again.
    assert [note for note in notes if note in log] == log
    assert any("operator has not seen it" in note for note in notes)
    (applied,) = cluster.calls("apply")
    assert applied[-1] == document["files"][0]
    assert all(call[:2] == ["--namespace", "default"] for call in cluster.calls("get"))


@pytest.mark.slow
def test_what_keeps_pods_from_starting_is_said_once(tmp_path: Path, spec: JobSpec, cluster: Cluster) -> None:
    states = ["ClusterCreated", "ClusterCreated", "Running", "Successful"]
    cluster.set(status=states, waiting="ImagePullBackOff", exit_code=0)
    _, notes = to_kubernetes(spec, tmp_path / "job", STORE)
    assert [note for note in notes if "ImagePullBackOff" in note] == [
        "Kubernetes job mdpext-small waits: worker: ImagePullBackOff (registry/image)"
    ]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, GuaranteeViolation),
        (137, IncompleteStoreError),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, SpecError), (3, IncompleteStoreError)]
        ),
    ],
)
def test_it_fails(tmp_path: Path, spec: JobSpec, cluster: Cluster, code: int, error: type[Exception]) -> None:
    log = ["seed: 1.00 s", "error: what was wrong"]
    cluster.set(status=["Running", "Failed"], log=log, exit_code=code)
    refusal(lambda: to_kubernetes(spec, tmp_path / "job", STORE), "what was wrong", kind=error)


@pytest.mark.slow
def test_a_pod_gone(tmp_path: Path, spec: JobSpec, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.set(status=["Running", "Failed"])
    with pytest.raises(IncompleteStoreError, match="submit again"):
        to_kubernetes(spec, tmp_path / "job", STORE)
    # A complete store counts, whatever has become of the job.
    cluster.set(status=["Running", "Failed"])
    monkeypatch.setattr(following, "_state_of", lambda _: ("complete", ""))
    assert to_kubernetes(spec, tmp_path / "job", STORE)[0]["state"] == "done"


def test_a_job_taken_away(tmp_path: Path, spec: JobSpec, cluster: Cluster, monkeypatch: Any) -> None:
    cluster.set(status=["Running"])

    def take_away(_: str) -> tuple[str, int, int]:
        cluster.update(job=None)
        return "seed", 0, 0

    monkeypatch.setattr(following, "_stage_of", take_away)
    with pytest.raises(IncompleteStoreError, match="gone"):
        to_kubernetes(spec, tmp_path / "job", STORE)


def test_an_interrupt(tmp_path: Path, spec: JobSpec, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.set(status=["Running"])

    def interrupt(_: str) -> tuple[str, int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "_stage_of", interrupt)
    with pytest.raises(IncompleteStoreError, match="goes on"):
        to_kubernetes(spec, tmp_path / "job", STORE)
    assert not cluster.calls("delete")


def test_the_client_may_leave_and_come_back(tmp_path: Path, spec: JobSpec, cluster: Cluster) -> None:
    cluster.set(status=["Running"])
    document, _ = to_kubernetes(spec, tmp_path / "job", STORE, detach=True)
    assert document["state"] == "submitted"
    cluster.update(status=["Running", "Running", "Successful"], exit_code=0)
    document, notes = to_kubernetes(spec, tmp_path / "job", STORE)
    assert document["state"] == "done"
    assert len(cluster.calls("apply")) == 1
    assert "on Kubernetes, namespace" in notes[0]  # before it is asked
    assert any("there already" in note for note in notes)


def test_another_job_of_the_name_is_not_touched(tmp_path: Path, spec: JobSpec, cluster: Cluster) -> None:
    cluster.set(status=["Running"])
    to_kubernetes(spec, tmp_path / "job", STORE, detach=True)
    with pytest.raises(SpecError, match="another store"):
        to_kubernetes(spec, tmp_path / "job", "s3://bucket/other.zarr")
    assert len(cluster.calls("apply")) == 1
    assert not cluster.calls("delete")


@pytest.mark.parametrize("ended", ["Failed", pytest.param("Successful", marks=pytest.mark.slow)])
def test_after_end_job_is_submitted_anew(tmp_path: Path, spec: JobSpec, cluster: Cluster, ended: str) -> None:
    """Applied again as it is, a job that has ended would not start; and its pods must be gone before."""
    cluster.set(status=["Running"])
    to_kubernetes(spec, tmp_path / "job", STORE, detach=True)
    cluster.update(status=[ended], next=["Running", "Successful"], exit_code=0)
    document, _ = to_kubernetes(spec, tmp_path / "job", STORE)
    assert document["state"] == "done"
    assert len(cluster.calls("apply")) == 2
    (deleted,) = cluster.calls("delete")
    assert {"--cascade=foreground", "--wait"} <= set(deleted)


@pytest.mark.slow
def test_no_answer(tmp_path: Path, spec: JobSpec, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.set(status=["Running", "Running", "Successful"], exit_code=0)
    looks = iter(["connection refused", "connection refused", None])

    def cut_off(_: str) -> tuple[str, int, int]:
        cluster.update(refuse=next(looks, None))
        return "seed", 0, 0

    monkeypatch.setattr(following, "_stage_of", cut_off)
    document, notes = to_kubernetes(spec, tmp_path / "job", STORE)
    assert document["state"] == "done"
    assert sum("connection refused" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [([], ["a"], ["a"]), (["a"], ["a", "b"], ["b"]), (["a", "b"], ["b", "c"], ["c"]), (["a"], ["b"], ["b"])],
)
def test_lines_are_told_once(before: list[str], now: list[str], new: list[str]) -> None:
    assert now[_overlap(before, now) :] == new
