"""Manifests for Kubernetes: a Dask cluster, and a job with a cluster of its own.

``DaskCluster`` and ``DaskJob`` are resources of the Dask operator (``kubernetes.dask.org/v1``). From them it
makes a scheduler with the service ``NAME-scheduler``, a deployment for each worker and, for a job, the pod
``NAME-runner``; all have the label ``dask.org/cluster-name``. It sets ``DASK_SCHEDULER_ADDRESS`` and
``DASK_WORKER_NAME`` in them, and deletes the cluster when the runner has ended.
"""

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from mdpext_dask.compute.dask_settings import DASK_CONFIG
from mdpext_dask.errors import SpecError
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec, files_of
from mdpext_dask.store.remote_drivers import check_no_password

Manifest = dict[str, Any]

DASK_API = "kubernetes.dask.org/v1"
CLUSTER_LABEL, COMPONENT_LABEL = "dask.org/cluster-name", "dask.org/component"
RUNNER = "job-runner"
# Annotations of a job: where its store is, and the digest of the job.
STORE_ANNOTATION, DIGEST_ANNOTATION = "mdpext/store", "mdpext/sha256"
DATA = "/data"
SCHEDULER_PORT, DASHBOARD_PORT, WORKER_PORT = 8786, 8787, 8788
# Names and passwords for object stores, as environment variables; pods start without it as well.
SECRET = "mdpext-store"  # noqa: S105 the name of one
# A service's name has at most 63 characters and starts with a letter; the operator appends to it.
_LONGEST_NAME = 53
_PREFIX = "mdpext-"
_DIGEST_LENGTH = 8
_USER = 1000
# The only folder that pods may write to, but for the store.
_TMP = "/tmp"  # noqa: S108 a volume of the pod's own
_NANNY_ENVIRONMENT = "distributed.nanny.pre-spawn-environ."
# Least memory of the scheduler and the runner, in GiB; a scheduler stays below it with 100,000 tasks.
_SMALLEST_GIB = 2.0
_WAIT_SECONDS = 1800
# An interrupted run (exit code 3) continues where it stopped; other errors would only come again.
_RUN = """\
tries=0
until mdpext run /job/job.toml --store "$MDPEXT_STORE" --progress plain; do
  code=$?
  tries=$((tries + 1))
  if [ "$code" -ne 3 ] || [ "$tries" -ge 10 ]; then exit "$code"; fi
  echo "interrupted; goes on in 30 s ($tries of 10)" >&2
  sleep 30
done
"""
_WAIT = (
    "import sys; from distributed import Client; "
    f"Client(sys.argv[1], timeout={_WAIT_SECONDS}).wait_for_workers(1, timeout={_WAIT_SECONDS})"
)


def resource_name(job: str) -> str:
    """Return the name of a job's resources: lower case, hyphens, short enough for what is appended."""
    name = _PREFIX + re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    if len(name) <= _LONGEST_NAME:
        return name.rstrip("-")
    digest = hashlib.sha256(job.encode()).hexdigest()[:_DIGEST_LENGTH]
    return name[: _LONGEST_NAME - _DIGEST_LENGTH - 1].rstrip("-") + "-" + digest


def scheduler_address(name: str, namespace: str) -> str:
    """Return a cluster's address, as the operator gives it to workers."""
    return f"tcp://{name}-scheduler.{namespace}.svc.cluster.local:{SCHEDULER_PORT}"


def cluster_manifest(cluster: ClusterSection, name: str) -> Manifest:
    """Return a Dask cluster with a scheduler and the workers that a job asks for.

    Parameters
    ----------
    cluster
        Section of the job.
    name
        Of the cluster; see :func:`resource_name`.

    Raises
    ------
    SpecError
        If no image is given.
    """
    return {
        "apiVersion": DASK_API,
        "kind": "DaskCluster",
        "metadata": {"name": name, "namespace": cluster.namespace},
        "spec": _cluster_spec(cluster, name),
    }


def job_manifests(spec: JobSpec, store: str, text: str) -> list[Manifest]:
    """Return the manifests of a job: its file, a network policy for its cluster, and the job itself.

    Parameters
    ----------
    spec
        The job; the kind of its cluster does not matter.
    store
        URL, or path below ``/data``.
    text
        The job's file, to be run on :func:`scheduler_address`.

    Raises
    ------
    SpecError
        If no image is given, or the pods could not see the store or a file that the job names.
    """
    cluster, name = spec.cluster, resource_name(spec.job.name)
    _check_places(spec, store)
    job = {"job": {"spec": _runner(cluster, name, store)}, "cluster": {"spec": _cluster_spec(cluster, name)}}
    digest = hashlib.sha256(json.dumps([text, job], sort_keys=True).encode()).hexdigest()
    same_cluster = {"podSelector": {"matchLabels": {CLUSTER_LABEL: name}}}
    # A scheduler runs what it is sent, so nobody else may send it anything.
    policy = {**same_cluster, "policyTypes": ["Ingress"], "ingress": [{"from": [same_cluster]}]}
    dask_job = _manifest(DASK_API, "DaskJob", name, cluster, spec=job)
    dask_job["metadata"]["annotations"] = {STORE_ANNOTATION: store, DIGEST_ANNOTATION: digest}
    return [
        _manifest("v1", "ConfigMap", f"{name}-job", cluster, data={"job.toml": text}),
        _manifest("networking.k8s.io/v1", "NetworkPolicy", name, cluster, spec=policy),
        dask_job,
    ]


def yaml_text(manifests: Sequence[Manifest], heading: str) -> str:
    """Return manifests as one YAML file below a comment; long texts keep their lines."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 YAML's own signature
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    # yaml.dump_all would begin a lone document with a marker.
    documents = [yaml.dump(one, Dumper=Dumper, sort_keys=False, width=110) for one in manifests]
    return comment + "---\n".join(documents)


def environment() -> list[Manifest]:
    """Return the settings of Dask as environment variables, and one thread for each library."""
    values: dict[str, Any] = {}
    for key, value in DASK_CONFIG.items():
        if key.startswith(_NANNY_ENVIRONMENT):
            values[key.removeprefix(_NANNY_ENVIRONMENT)] = value
        else:
            values["DASK_" + key.upper().replace("-", "_").replace(".", "__")] = value
    for library in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
        values[f"{library}_NUM_THREADS"] = 1
    values |= {"HOME": _TMP, "PYTHONDONTWRITEBYTECODE": 1}
    return [{"name": name, "value": str(value)} for name, value in sorted(values.items())]


def _check_places(spec: JobSpec, store: str) -> None:
    check_no_password(store)
    claim = spec.cluster.volume_claim
    seen = f"{DATA} and URLs" if claim else f"URLs, and {DATA} with cluster.volume_claim"
    scheme, separator, _ = store.partition("://")
    if (separator and scheme in ("file", "memory", "local")) or not (separator or _on_volume(store, claim)):
        raise SpecError(f"--store {store}: pods see only {seen}")
    if unseen := [f"{key} ({path})" for key, path in files_of(spec).items() if not _on_volume(path, claim)]:
        seen = DATA if claim else f"{DATA}, with cluster.volume_claim"
        raise SpecError(f"{', '.join(unseen)}: pods see only what is in {seen}")


def _on_volume(path: str, claim: str | None) -> bool:
    return claim is not None and posixpath.normpath(path).startswith(DATA + "/")


def _cluster_spec(cluster: ClusterSection, name: str) -> Manifest:
    health: Manifest = {"httpGet": {"path": "/health", "port": "http-dashboard"}}
    # Long enough for a scheduler that is busy with many tasks, or a worker in the middle of one.
    patient = {**health, "periodSeconds": 30, "timeoutSeconds": 15, "failureThreshold": 10}
    probes: Manifest = {"readinessProbe": {**patient, "periodSeconds": 5}, "livenessProbe": patient}
    limit = "" if cluster.memory_gib is None else f"--memory-limit {_mebibytes(cluster.memory_gib)}MiB"
    scheduler = _container(
        cluster, "scheduler", _SMALLEST_GIB, command=["dask"],
        args=f"scheduler --port {SCHEDULER_PORT} --dashboard-address :{DASHBOARD_PORT}".split(),
        ports=[_port("tcp-comm", SCHEDULER_PORT), _port("http-dashboard", DASHBOARD_PORT)], **probes,
    )  # fmt: skip
    worker = _container(
        cluster, "worker", cluster.memory_gib, store=True, command=["dask"],
        # Without a scheduler for 300 s, it starts anew.
        args=f"worker --name $(DASK_WORKER_NAME) --nthreads 1 {limit} --local-directory {_TMP} "
        f"--death-timeout 300 --no-dashboard --dashboard-address :{WORKER_PORT}".split(),
        ports=[_port("http-dashboard", WORKER_PORT)], **probes,
    )  # fmt: skip
    service = {
        "type": "ClusterIP",
        "selector": {CLUSTER_LABEL: name, COMPONENT_LABEL: "scheduler"},
        "ports": [
            {"name": port, "protocol": "TCP", "port": number, "targetPort": port}
            for port, number in (("tcp-comm", SCHEDULER_PORT), ("http-dashboard", DASHBOARD_PORT))
        ],
    }
    return {
        "worker": {"replicas": cluster.requested, "spec": _pod(worker, cluster.volume_claim)},
        "scheduler": {"spec": _pod(scheduler), "service": service},
    }


def _runner(cluster: ClusterSection, name: str, store: str) -> Manifest:
    memory = None if cluster.memory_gib is None else max(cluster.memory_gib, _SMALLEST_GIB)
    container = _container(cluster, "runner", memory, store=True, command=["/bin/sh", "-c", _RUN])
    container["env"] = [{"name": "MDPEXT_STORE", "value": store.replace("$(", "$$(")}, *container["env"]]
    container["volumeMounts"].append({"name": "job", "mountPath": "/job", "readOnly": True})
    # Scheduler and runner are made at the same time, and nodes may first have to fetch the image.
    wait = ["python", "-c", _WAIT, scheduler_address(name, cluster.namespace)]
    waiting = _container(cluster, "wait-for-workers", None, command=wait)
    pod = _pod(container, cluster.volume_claim)
    pod["volumes"].append({"name": "job", "configMap": {"name": f"{name}-job"}})
    return {"restartPolicy": "Never", "initContainers": [waiting], **pod}


def _manifest(api: str, kind: str, name: str, cluster: ClusterSection, **content: Any) -> Manifest:
    metadata = {"name": name, "namespace": cluster.namespace, "labels": {"app.kubernetes.io/name": "mdpext"}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _container(
    cluster: ClusterSection, name: str, memory_gib: float | None, *, store: bool = False, **content: Any
) -> Manifest:
    """Return a container, with or without access to the store."""
    if cluster.image is None:
        raise SpecError("cluster.image: Kubernetes needs the name of a container image with this package")
    memory = {} if memory_gib is None else {"memory": f"{_mebibytes(memory_gib)}Mi"}
    mounts = [{"name": "tmp", "mountPath": _TMP}]
    if store and cluster.volume_claim is not None:
        mounts.append({"name": "data", "mountPath": DATA})
    rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    return {
        "name": name,
        "image": cluster.image,
        "workingDir": _TMP,
        "env": environment(),
        "envFrom": [{"secretRef": {"name": SECRET, "optional": True}}] if store else [],
        "resources": {"requests": {"cpu": "1", **memory}, **({"limits": memory} if memory else {})},
        "securityContext": {**rights, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
        **content,
    }


def _pod(container: Manifest, volume_claim: str | None = None) -> Manifest:
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    if volume_claim is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": volume_claim}})
    return {
        # Code that a scheduler is made to run must not find keys to the cluster.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _mebibytes(gib: float) -> int:
    return math.ceil(gib * 1024)
