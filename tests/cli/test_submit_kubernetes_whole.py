"""A job on a toy Kubernetes, with the Dask operator's real controller and real Dask processes.

The API server and the node are toys (see ``toy_kubernetes.py``). ``kubectl`` is the real one where it is on
the PATH, and else one of a few lines.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask import build
from mdpext_dask.cli.submit import follow as following
from mdpext_dask.cli.submit.files import job_text
from mdpext_dask.errors import IncompleteStoreError, SpecError
from mdpext_dask.job.spec import JobSpec, parse_job
from tests.support.processes import wait_until
from tests.support.refusals import refused
from tests.support.submissions import program, to_kubernetes
from tests.support.toy_kubernetes import KINDS, ToyKubernetes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STORE = "/data/small.zarr"
HERE = Path(__file__).parents[1] / "support"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyKubernetes]:
    """Return a toy cluster that the operator watches."""
    if shutil.which("kubectl") is None:
        text = f'exec {sys.executable} {HERE / "toy_kubectl.py"} "$@"'
        programs = program(tmp_path / "bin", "kubectl", text)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(following, "_LONGEST_WAIT", 1.0)
    monkeypatch.setattr(following, "_REST", 1.0)
    with ToyKubernetes(tmp_path) as toy, (tmp_path / "operator.txt").open("wb") as log:
        monkeypatch.setenv("KUBECONFIG", str(toy.kubeconfig))
        controller = ["-m", "dask_kubernetes.operator.controller.controller"]
        operator = subprocess.Popen(
            [sys.executable, "-m", "kopf", "run", "--standalone", "--namespace=default", *controller],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield toy
        finally:
            operator.kill()
            operator.wait()


@pytest.fixture
def spec(small_job: Callable[..., dict[str, dict[str, Any]]]) -> JobSpec:
    cluster = {"kind": "kubernetes", "image": "image", "volume_claim": "disk", "memory_gib": 1.0}
    return parse_job(small_job(cluster=cluster))


def hand_over(spec: JobSpec, folder: Path, *, detach: bool = False) -> tuple[dict[str, Any], list[str]]:
    return to_kubernetes(spec, folder / "written", STORE, detach=detach)


def rows_of(store: Path) -> dict[str, bytes]:
    array = store / "probability"
    return {str(f.relative_to(array)): f.read_bytes() for f in array.rglob("*") if f.is_file()}


def names(toy: ToyKubernetes, *plurals: str) -> list[str]:
    return [one["metadata"]["name"] for kind in KINDS if kind[1] in plurals for one in toy.objects.all(*kind)]


def expected(spec: JobSpec, folder: Path) -> dict[str, bytes]:
    inline = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"kind": "inline"})})
    build(inline, str(folder / "inline.zarr"))
    return rows_of(folder / "inline.zarr")


def test_a_job_runs_and_is_submitted_again(tmp_path: Path, cluster: ToyKubernetes, spec: JobSpec) -> None:
    document, notes = hand_over(spec, tmp_path)
    assert document["state"] == "done"
    assert any(note.startswith("extend: ") for note in notes)
    assert rows_of(tmp_path / "data" / "small.zarr") == expected(spec, tmp_path)
    # The operator has taken the cluster down; what the job has said is kept.
    gone = ("deployments", "daskclusters", "services")
    wait_until(lambda: names(cluster, *gone) == [], "the operator to tidy up", 30)
    assert names(cluster, "daskjobs", "pods") == ["mdpext-small-runner", "mdpext-small"]
    daskjobs = "kubernetes.dask.org/v1", "daskjobs"
    (before,) = cluster.objects.all(*daskjobs)
    assert hand_over(spec, tmp_path)[0]["state"] == "done"
    (after,) = cluster.objects.all(*daskjobs)
    assert before["metadata"]["uid"] != after["metadata"]["uid"]


@pytest.mark.usefixtures("cluster")
def test_the_client_may_leave(tmp_path: Path, spec: JobSpec) -> None:
    assert hand_over(spec, tmp_path, detach=True)[0]["state"] == "submitted"
    document, notes = hand_over(spec, tmp_path)
    assert document["state"] == "done"
    assert any("there already" in note for note in notes)


def _when_running(toy: ToyKubernetes) -> None:
    """Wait until the runner is at work."""
    wait_until(lambda: "loss: begins" in (toy.node.log_of("mdpext-small-runner") or ""), "the runner")


@pytest.mark.parametrize("killed", [["worker"], ["scheduler"], ["scheduler", "worker"]])
def test_killed_pods_come_back(tmp_path: Path, cluster: Any, spec: JobSpec, killed: Sequence[str]) -> None:
    hand_over(spec, tmp_path, detach=True)
    _when_running(cluster)
    for component in killed:
        cluster.node.kill(component)
    assert hand_over(spec, tmp_path)[0]["state"] == "done"
    assert rows_of(tmp_path / "data" / "small.zarr") == expected(spec, tmp_path)


def test_after_a_killed_runner(tmp_path: Path, cluster: ToyKubernetes, spec: JobSpec) -> None:
    hand_over(spec, tmp_path, detach=True)
    _when_running(cluster)
    cluster.node.kill("job-runner")
    refused(IncompleteStoreError, "submit again", hand_over, spec, tmp_path)
    assert hand_over(spec, tmp_path)[0]["state"] == "done"
    assert rows_of(tmp_path / "data" / "small.zarr") == expected(spec, tmp_path)


def test_a_wrong_job(tmp_path: Path, cluster: ToyKubernetes, small_job: Any) -> None:
    section = {"kind": "kubernetes", "image": "image", "volume_claim": "disk"}
    wrong = parse_job(small_job(cluster=section, domain={"roads": "/data/nowhere"}))
    refused(SpecError, r"nowhere.*does not exist", hand_over, wrong, tmp_path)
    assert "nowhere" in (cluster.node.log_of("mdpext-small-runner") or "")


def test_a_run_here_has_its_workers_there(tmp_path: Path, cluster: ToyKubernetes, spec: JobSpec) -> None:
    """``kind = "kubernetes"``: through a port that is passed on, to a cluster that ends with the run."""
    job = tmp_path / "job.toml"
    job.write_text(job_text(spec, spec.cluster))
    # In a process of its own: the libraries beneath leave connections to be closed by its end.
    command = [sys.executable, "-m", "mdpext_dask.cli", "run", job, "--json"]
    command += ["--store", tmp_path / "direct.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "complete"
    assert rows_of(tmp_path / "direct.zarr") == expected(spec, tmp_path)
    gone = ("deployments", "daskclusters", "services", "pods")
    wait_until(lambda: names(cluster, *gone) == [], "the operator to tidy up", 30)
