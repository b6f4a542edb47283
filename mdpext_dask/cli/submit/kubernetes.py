"""A job on Kubernetes: one manifest, applied with ``kubectl``, and followed by asking for its pods.

The Dask operator runs the job, so it does not depend on whoever follows it. It is identified by its name in
its namespace: submitting it again while it runs follows it; after it has ended, this resumes it.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdpext_dask.cli.submit.files import job_text, write_files
from mdpext_dask.cli.submit.follow import JobState, follow
from mdpext_dask.compute import kubernetes
from mdpext_dask.errors import ClusterError, SpecError
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec

MANIFEST_FILE = "job.yaml"
_HEADING = """\
Made by mdpext submit for the Dask operator (https://kubernetes.dask.org).
Start:               kubectl apply -f FILE
Stop, or start anew: kubectl delete --cascade=foreground -f FILE
The store stays, and the job goes on where it stopped."""
_ANSWER_SECONDS = 60
_DELETE_SECONDS = 300
_ENDED = ("Successful", "Failed")
# What a container waits for if nothing is wrong.
_STARTING = ("ContainerCreating", "PodInitializing")
_LOG_LINES = 200


def submit(
    spec: JobSpec,
    store_url: str,
    folder: Path,
    *,
    dry_run: bool,
    array: bool,
    detach: bool,
    observer: Observer,
) -> dict[str, Any]:
    """Write a job's manifest, submit it to Kubernetes, and follow it; see :mod:`mdpext_dask.cli.submit`.

    Raises
    ------
    SpecError
        If the job cannot run in pods, another one of its name is running, or Kubernetes refuses it or
        does not answer; the file can then be submitted from elsewhere.
    IncompleteStoreError, GuaranteeViolation, SolverError
        If it fails.
    """
    if array:
        raise SpecError("--array: on Kubernetes there are only jobs with a Dask cluster")
    name = kubernetes.resource_name(spec.job.name)
    address = kubernetes.scheduler_address(name, spec.cluster.namespace)
    text = job_text(spec, ClusterSection(kind="address", address=address))
    manifests = kubernetes.job_manifests(spec, store_url, text)
    digest = manifests[-1]["metadata"]["annotations"][kubernetes.DIGEST_ANNOTATION]
    job = KubernetesJob(name, spec.cluster.namespace, observer)
    files = write_files(folder, {MANIFEST_FILE: kubernetes.yaml_text(manifests, _HEADING)})
    apply = ["kubectl", "apply", "--filename", files[0]]
    document = {
        "to": "kubernetes",
        "store": store_url,
        "folder": str(folder),
        "files": files,
        "commands": [shlex.join(apply)],
        "jobs": [f"daskjob/{job.resource}"],
    }
    if dry_run:
        return {**document, "state": "written"}
    tell_beyond(observer, spec, to="kubernetes")
    try:
        _hand_over(job, digest, apply, observer)
    except ClusterError as error:
        raise SpecError(f"{files[0]} is written, but not submitted: {error}") from None
    if detach:
        return {**document, "state": "submitted"}
    follow(job.name, job.state, store_url, observer)
    return {**document, "state": "done"}


class KubernetesJob:
    """A ``DaskJob``, read by ``kubectl``.

    Parameters
    ----------
    resource, namespace
        Its name, and the namespace.
    observer
        Is told what the runner prints.
    """

    def __init__(self, resource: str, namespace: str, observer: Observer) -> None:
        self.resource = resource
        self._namespace = namespace
        self._observer = observer
        self._printed: list[str] = []

    @property
    def name(self) -> str:
        """What people call it."""
        return f"Kubernetes job {self.resource}"

    def state(self) -> JobState:
        """Ask for its state, and pass on what the runner has printed since then.

        Raises
        ------
        ClusterError
            If Kubernetes does not answer.
        """
        job = self.read()
        if job is None:
            return JobState("gone")
        status = (job.get("status") or {}).get("jobStatus")
        if status is None:
            return JobState("pending", "the Dask operator has not seen it yet (does it run?)")
        self._pass_on()
        if status == "Running":
            return JobState("running")
        pods = self._pods()
        if status not in _ENDED:
            return JobState("pending", "; ".join(_obstacles(pods)))
        if status == "Successful":
            return JobState("done")
        errors = [line for line in self._printed if line.startswith("error: ")]
        message = errors[-1].removeprefix("error: ") if errors else ""
        return JobState("failed", message, _exit_code(pods))

    def read(self) -> dict[str, Any] | None:
        """Return the job as Kubernetes has it, or None where there is none.

        Raises
        ------
        ClusterError
            If Kubernetes does not answer.
        """
        found = self.ask("get", "daskjob", self.resource, "--ignore-not-found", "--output", "json")
        return _parsed(found) if found.strip() else None

    def ask(self, *arguments: str, seconds: float = _ANSWER_SECONDS) -> str:
        """Return the answer of ``kubectl`` in the job's namespace.

        Raises
        ------
        ClusterError
            With its message, if it fails.
        """
        return _kubectl(["kubectl", "--namespace", self._namespace, *arguments], seconds)

    def _pods(self) -> list[dict[str, Any]]:
        found = self.ask(
            "get", "pods", "--selector", f"{kubernetes.CLUSTER_LABEL}={self.resource}", "--output", "json"
        )
        pods: list[dict[str, Any]] = _parsed(found).get("items", [])
        return pods

    def _pass_on(self) -> None:
        try:
            container = ("--container", "runner", f"--tail={_LOG_LINES}")
            text = self.ask("logs", f"{self.resource}-runner", *container)
        except ClusterError:
            return  # it has not started, or is not kept
        lines = text.splitlines()
        for line in lines[_overlap(self._printed, lines) :]:
            self._observer(Note(line))
        self._printed = lines


def _hand_over(job: KubernetesJob, digest: str, apply: Sequence[str], observer: Observer) -> None:
    there = job.read()
    if there is not None:
        status = (there.get("status") or {}).get("jobStatus")
        if status in _ENDED:
            # Applied again as it is, it would not start; its pods go first, the next job needs their names.
            options = ("--ignore-not-found", "--wait", "--cascade=foreground")
            job.ask("delete", "daskjob", job.resource, *options, seconds=_DELETE_SECONDS)
        elif there["metadata"].get("annotations", {}).get(kubernetes.DIGEST_ANNOTATION) == digest:
            observer(Note(f"{job.name} is there already, and goes on"))
            return
        else:
            raise SpecError(
                f"{job.name} is there already, for another store or with other settings; let it end, or take "
                f"it away with kubectl delete daskjob {job.resource}"
            )
    _kubectl(apply, _ANSWER_SECONDS)


def _kubectl(command: Sequence[str], seconds: float) -> str:
    try:
        done = subprocess.run(  # noqa: S603 arguments are our own or checked
            command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise ClusterError("there is no kubectl here; install it, or apply the file elsewhere") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"kubectl does not answer: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1] if lines else f"exit code {done.returncode}"
        if re.search(r"no matches for kind \"Dask|resource type \"daskjob\"", done.stderr):
            said = "the Dask operator is not installed (https://kubernetes.dask.org)"
        raise ClusterError(f"kubectl: {said}")
    return done.stdout


def _parsed(text: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        raise ClusterError(f"kubectl: not JSON: {text[:80]!r}") from None
    return answer


def _obstacles(pods: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reasons why pods do not start, each once."""
    found = dict[str, None]()  # in order, each once
    for pod in pods:
        component = pod["metadata"].get("labels", {}).get(kubernetes.COMPONENT_LABEL, "pod")
        status = pod.get("status") or {}
        reasons = [
            condition.get("message", condition["reason"])
            for condition in status.get("conditions") or []
            if condition.get("reason") == "Unschedulable"
        ]
        kinds = ("initContainerStatuses", "containerStatuses")
        for container in [container for kind in kinds for container in status.get(kind) or []]:
            reason = container.get("state", {}).get("waiting", {}).get("reason")
            if reason and reason not in _STARTING:
                reasons.append(f"{reason} ({container.get('image', 'no image')})")
        found |= dict.fromkeys(f"{component}: {reason}" for reason in reasons)
    return list(found)


def _exit_code(pods: Sequence[dict[str, Any]]) -> int | None:
    """Return the runner's exit code, if its pod is still there."""
    for pod in pods:
        if pod["metadata"].get("labels", {}).get(kubernetes.COMPONENT_LABEL) != kubernetes.RUNNER:
            continue
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = container.get("state", {}).get("terminated")
            if ended is not None and container["name"] == "runner":
                return int(ended["exitCode"])
    return None


def _overlap(before: Sequence[str], now: Sequence[str]) -> int:
    """Return how many of the first lines printed now are the last lines printed before."""
    for length in range(min(len(before), len(now)), 0, -1):
        if list(before[-length:]) == list(now[:length]):
            return length
    return 0
