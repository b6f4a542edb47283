"""What Kubernetes is handed: valid by its schemas and the Dask operator's, and what the operator makes of it.

There is no cluster here. The schemas are those that a cluster holds manifests against, and the pods,
deployments and services are made by the operator's own code.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from dask_kubernetes.constants import MAX_CLUSTER_NAME_LEN, VALID_CLUSTER_NAME
from dask_kubernetes.operator.controller import controller
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask import load_job
from mdpext_dask.cli.submit.kubernetes import MANIFEST_FILE, submit
from mdpext_dask.compute.dask_settings import DASK_CONFIG
from mdpext_dask.compute.kubernetes import cluster_manifest, environment, resource_name, yaml_text
from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.events import silent
from mdpext_dask.job.spec import JobSpec, files_of, parse_job
from tests.support.commands import parse
from tests.support.manifest_checks import complaints
from tests.support.refusals import refusal

Job = Callable[..., dict[str, dict[str, Any]]]
Documents = list[dict[str, Any]]
Made = dict[str, dict[str, Any]]
PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy" / "kubernetes"
IMAGE = "registry.example.org/mdpext-dask:0.1.0"
EXAMPLE = [f"cluster.image={IMAGE}", "cluster.volume_claim=mdpext-data"]
EXAMPLE += ["cluster.memory_gib=2.0", "cluster.workers=4"]
STORE = "/data/manhattan.zarr"


def manifest_text(spec: JobSpec, store: str) -> str:
    """Return the manifest that a dry run writes."""
    with tempfile.TemporaryDirectory() as folder:
        submit(spec, store, Path(folder), dry_run=True, array=False, detach=False, observer=silent)
        return (Path(folder) / MANIFEST_FILE).read_text()


@pytest.fixture(scope="module")
def demo() -> JobSpec:
    return load_job(PROJECT / "workflows" / "manhattan.toml", EXAMPLE)


@pytest.fixture(scope="module")
def documents(demo: JobSpec) -> Documents:
    return list(yaml.safe_load_all(manifest_text(demo, STORE)))


@pytest.fixture(scope="module")
def made(documents: Documents) -> Made:
    """Return what the operator makes of the job, by its own functions."""
    job = documents[-1]
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    labels, spec = job["metadata"]["labels"], job["spec"]
    cluster = controller.build_cluster_spec(
        name, spec["cluster"]["spec"]["worker"], spec["cluster"]["spec"]["scheduler"], {}, labels
    )
    scheduler, worker = cluster["spec"]["scheduler"], cluster["spec"]["worker"]
    return {
        "runner": controller.build_job_pod_spec(name, name, namespace, spec["job"]["spec"], {}, labels),
        "cluster": cluster,
        "scheduler": controller.build_scheduler_deployment_spec(name, scheduler["spec"], {}, labels),
        "service": controller.build_scheduler_service_spec(name, scheduler["service"], {}, labels),
        "group": controller.build_default_worker_group_spec(name, worker, {}, labels),
        "worker": controller.build_worker_deployment_spec(
            f"{name}-default", namespace, name, "0123456789", worker["spec"], {}, labels
        ),
    }


@pytest.fixture(scope="module")
def pods(made: Made) -> Made:
    """Return the pods of the runner, the scheduler and a worker."""
    return {"runner": made["runner"], **{n: made[n]["spec"]["template"] for n in ("scheduler", "worker")}}


def test_a_job_is_valid(documents: Documents) -> None:
    assert [one["kind"] for one in documents] == ["ConfigMap", "NetworkPolicy", "DaskJob"]
    assert [complaints(one) for one in documents] == [[], [], []]


@pytest.mark.parametrize("part", ["runner", "cluster", "scheduler", "service", "group", "worker"])
def test_what_the_operator_makes_of_it_is_valid(part: str, made: Made) -> None:
    assert complaints(made[part]) == []


def test_the_shipped_job_is_what_a_dry_run_writes(demo: JobSpec) -> None:
    assert (DEPLOY / "daskjob.yaml").read_text() == manifest_text(demo, STORE)


def test_the_shipped_cluster_is_what_a_job_would_ask_for(demo: JobSpec) -> None:
    text = (DEPLOY / "daskcluster.yaml").read_text()
    manifest = cluster_manifest(demo.cluster, "mdpext")
    assert yaml.safe_load(text) == manifest
    heading = "".join(line.removeprefix("# ") for line in text.splitlines(True) if line.startswith("#"))
    assert text == yaml_text([manifest], heading)
    assert complaints(manifest) == []


def test_the_shipped_volume_is_the_one_that_the_job_wants(demo: JobSpec) -> None:
    claim = yaml.safe_load((DEPLOY / "volume.yaml").read_text())
    assert (complaints(claim), claim["metadata"]["name"]) == ([], demo.cluster.volume_claim)
    # Pods on several machines write to it.
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


# --- the check itself -----------------------------------------------------------------------------


def _misspell(tree: Any, path: tuple[Any, ...], name: str) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[name] = tree.pop(path[-1])


RUNNER = ("spec", "job", "spec")
WORKER = ("spec", "cluster", "spec", "worker", "spec")


@pytest.mark.parametrize(
    ("document", "path", "name"),
    [
        (2, (*RUNNER, "restartPolicy"), "restartPolice"),
        (2, (*WORKER, "containers", 0, "livenessProbe", "failureThreshold"), "failures"),
        (1, ("spec", "policyTypes"), "policyType"), (0, ("data",), "datum"),
    ],
)  # fmt: skip
def test_misspelt_key_is_found(documents: Documents, document: int, path: tuple[Any, ...], name: str) -> None:
    manifest = copy.deepcopy(documents[document])
    _misspell(manifest, path, name)
    assert any(name in said for said in complaints(manifest))


def test_pods_are_checked_more_strictly_once_the_operator_has_made_them(made: Made) -> None:
    runner = copy.deepcopy(made["runner"])
    _misspell(runner, ("spec", "containers", 0, "volumeMounts"), "volumeMount")
    assert any("volumeMount" in said for said in complaints(runner))


# --- what is in it --------------------------------------------------------------------------------


def test_the_runner_gets_the_same_job(demo: JobSpec, documents: Documents) -> None:
    job = parse_job(tomllib.loads(documents[0]["data"]["job.toml"]))
    assert (job.fingerprint(), job.job, job.cluster.kind) == (demo.fingerprint(), demo.job, "address")


def test_runner_goes_where_operator_puts_the_scheduler(documents: Documents, made: Made, pods: Made) -> None:
    address = parse_job(tomllib.loads(documents[0]["data"]["job.toml"])).cluster.address
    for name in ("runner", "worker"):
        (container,) = pods[name]["spec"]["containers"]
        assert {"name": "DASK_SCHEDULER_ADDRESS", "value": address} in container["env"]
    assert made["runner"]["spec"]["initContainers"][0]["command"][-1] == address
    host = f"{made['service']['metadata']['name']}.{documents[-1]['metadata']['namespace']}"
    assert address == f"tcp://{host}.svc.cluster.local:8786"


def test_labels_select_the_pods_that_they_are_meant_to(documents: Documents, made: Made, pods: Made) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, has in labels.items() if selector.items() <= has.items()}

    assert selected(made["service"]["spec"]["selector"]) == {"scheduler"}
    policy = documents[1]["spec"]
    assert selected(policy["podSelector"]["matchLabels"]) == set(pods)
    (rule,) = policy["ingress"]
    assert [selected(peer["podSelector"]["matchLabels"]) for peer in rule["from"]] == [set(pods)]
    # Ports have the numbers that the processes listen on.
    (container,) = pods["scheduler"]["spec"]["containers"]
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in made["service"]["spec"]["ports"]:
        assert port["port"] == numbers[port["targetPort"]]
    options = parse(container["command"] + container["args"])
    listened = {"tcp-comm": options["port"], "http-dashboard": options["dashboard_address"].removeprefix(":")}
    assert {name: str(number) for name, number in numbers.items()} == listened


def test_commands_are_those_of_the_programs(pods: Made) -> None:
    (worker,) = pods["worker"]["spec"]["containers"]
    options = parse(worker["command"] + worker["args"])
    assert (options["nthreads"], options["memory_limit"]) == (1, "2048MiB")
    assert not options["dashboard"]
    assert f":{worker['ports'][0]['containerPort']}" == options["dashboard_address"]
    assert worker["resources"]["limits"] == {"memory": "2048Mi"}
    (runner,) = pods["runner"]["spec"]["containers"]
    line = next(line for line in runner["command"][-1].splitlines() if "mdpext" in line)
    options = parse(line.removeprefix("until ").removesuffix("; do"))
    assert (str(options["job"]), options["store"]) == ("/job/job.toml", "$MDPEXT_STORE")
    assert {"name": "MDPEXT_STORE", "value": STORE} in runner["env"]
    compile(pods["runner"]["spec"]["initContainers"][0]["command"][2], "wait", "exec")


def test_nobody_is_root_and_nothing_can_be_written_but_what_must_be(pods: Made) -> None:
    for pod in (pod["spec"] for pod in pods.values()):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.pop("tmp") == container["workingDir"] == "/tmp"
            assert set(mounts) <= volumes
            assert ("data" in mounts) == (container["name"] in ("runner", "worker"))


def test_dask_reads_its_settings_from_the_environment() -> None:
    """Also those that it hands to worker processes, which go by their own names."""
    code = (
        "import dask, distributed, json, os, sys\n"
        "from distributed.nanny import _get_env_variables\n"
        "keys = json.loads(sys.argv[1])\n"
        "found = {key: dask.config.get(key) for key in keys if 'environ' not in key}\n"
        "nanny = _get_env_variables('distributed.nanny.pre-spawn-environ')\n"
        "print(json.dumps([found, {**os.environ, **nanny}]))\n"
    )
    ours = {item["name"]: item["value"] for item in environment()}
    env = {"PATH": os.environ["PATH"], **ours, "HOME": "/nowhere", "DASK_CONFIG": "/nowhere"}
    command = [sys.executable, "-c", code, json.dumps(list(DASK_CONFIG))]
    found, worker = json.loads(subprocess.check_output(command, env=env))
    before = "distributed.nanny.pre-spawn-environ."
    assert found == {key: value for key, value in DASK_CONFIG.items() if not key.startswith(before)}
    assert len(found) > 5
    expected = {key.removeprefix(before): str(v) for key, v in DASK_CONFIG.items() if key.startswith(before)}
    assert expected.items() <= worker.items()
    assert {worker[f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "OPENBLAS")} == {"1"}


@pytest.mark.parametrize(
    ("codes", "exit_code", "calls"),
    [([0], 0, 1), ([3, 3, 0], 0, 3), ([2], 2, 1), ([3, 1], 1, 2), ([3] * 20, 3, 10), ([137], 137, 1)],
)
def test_the_runner_goes_on(tmp_path: Path, made: Made, codes: list[int], exit_code: int, calls: int) -> None:
    """In a real shell, with stubs for ``mdpext`` and ``sleep``."""
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    stub = f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit $code
"""
    for name, text in (("mdpext", stub), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (runner,) = made["runner"]["spec"]["containers"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MDPEXT_STORE": "s3://a b/c$d.zarr"}
    done = subprocess.run(runner["command"], env=env, capture_output=True, check=False)
    assert done.returncode == exit_code
    said = (tmp_path / "calls").read_text().splitlines()
    assert said == ["run /job/job.toml --store s3://a b/c$d.zarr --progress plain"] * calls


# --- names, places, refusals ----------------------------------------------------------------------


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True))
def test_any_job_has_a_name_that_the_operator_takes(name: str) -> None:
    found = resource_name(name)
    assert VALID_CLUSTER_NAME.match(found)
    assert len(found) <= MAX_CLUSTER_NAME_LEN
    assert found[0].isalpha()


def test_long_names_that_differ_at_the_end_stay_apart() -> None:
    assert resource_name("Rome_20.km") == "mdpext-rome-20-km"
    assert resource_name("a" * 100) != resource_name("a" * 101)


def test_an_image_is_needed(small_job: Job) -> None:
    spec = parse_job(small_job(cluster={"kind": "kubernetes"}))
    refusal(lambda: manifest_text(spec, "s3://bucket/small.zarr"), "cluster.image", kind=SpecError)
    refusal(lambda: cluster_manifest(spec.cluster, "name"), "cluster.image", kind=SpecError)


@pytest.mark.parametrize("claim", ["disk", None])
@pytest.mark.parametrize(
    ("store", "needs_claim"),
    [("/data/a.zarr", True), ("/data/deep/a.zarr", True), ("s3://bucket/a.zarr", False)],
)
def test_a_store_that_pods_see(small_job: Job, store: str, needs_claim: bool, claim: str | None) -> None:
    spec = parse_job(small_job(cluster={"kind": "kubernetes", "image": IMAGE, "volume_claim": claim}))
    if needs_claim and claim is None:
        assert "cluster.volume_claim" in refusal(lambda: manifest_text(spec, store), store, kind=SpecError)
    else:
        assert [complaints(one) for one in yaml.safe_load_all(manifest_text(spec, store))] == [[], [], []]


def test_a_store_that_pods_do_not_see(small_job: Job) -> None:
    spec = parse_job(small_job(cluster={"kind": "kubernetes", "image": IMAGE, "volume_claim": "disk"}))
    for store in (
        "/home/me/a.zarr", "/database/a.zarr", "/data/../a.zarr", "/data", "a.zarr",
        "file:///home/me/a.zarr", "memory://a.zarr",
    ):  # fmt: skip
        said = refusal(partial(manifest_text, spec, store), store, kind=SpecError)
        assert "cluster.volume_claim" not in said


def test_a_manifest_has_no_password(demo: JobSpec) -> None:
    with pytest.raises(StoreError, match=r"^s3://\.\.\.: an address with a password in it"):
        manifest_text(demo, "s3://me:secret@bucket/a.zarr")


def test_files_of_the_job_must_be_where_pods_see_them(small_job: Job) -> None:
    cluster = {"kind": "kubernetes", "image": IMAGE, "volume_claim": "disk"}
    there = parse_job(small_job(cluster=cluster, domain={"roads": "/data/rome"}))
    assert files_of(there) == {"domain.roads": "/data/rome"}
    assert "/data/rome" in manifest_text(there, STORE)
    here = {"domain": {"roads": "/home/me/rome"}, "loss": {"tasks_file": "/home/me/tasks.csv"}}
    spec = parse_job(small_job(cluster=cluster, **here))
    said = "domain.roads (/home/me/rome), loss.tasks_file (/home/me/tasks.csv)"
    refusal(lambda: manifest_text(spec, STORE), said, kind=SpecError)
    del cluster["volume_claim"]
    unclaimed = parse_job(small_job(cluster=cluster, domain={"roads": "/data/rome"}))
    refusal(lambda: manifest_text(unclaimed, "s3://b/a.zarr"), "cluster.volume_claim", kind=SpecError)


def test_without_a_memory_limit_there_is_none(small_job: Job) -> None:
    spec = parse_job(small_job(cluster={"kind": "kubernetes", "image": IMAGE}))
    worker = cluster_manifest(spec.cluster, "name")["spec"]["worker"]["spec"]["containers"][0]
    assert worker["resources"] == {"requests": {"cpu": "1"}}
    assert "--memory-limit" not in worker["args"]
