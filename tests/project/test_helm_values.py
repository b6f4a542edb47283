"""Values for the charts: only keys that the charts have, and what becomes of them is valid.

The operator's chart is in its package. Of ``dask/dask`` only names are here: those in its ``values.yaml``
of 2023 (https://github.com/dask/helm-chart, commit e581ea8), and those that its templates read besides. How
the templates put a worker's command together is from there too; from the middle of 2026 on (pull request
535) they start it with ``dask worker``, before with ``dask-worker``.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from dask.utils import parse_bytes

from mdpext_dask.compute.kubernetes import environment
from tests.support.commands import parse
from tests.support.manifest_checks import complaints, operator_values, unknown_values

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"


def keys(names: str, **more: Any) -> dict[str, Any]:
    """Return keys whose values may be anything, and others."""
    return {**dict.fromkeys(names.split()), **more}


_ANY: dict[str, Any] = {}
_IMAGE = keys("repository tag pullPolicy pullSecrets")
_MOUNTS = keys("volumes volumeMounts")
_INGRESS = keys("enabled ingressClassName pathType tls secretName hostname annotations")
_POD = keys("name replicas extraArgs env tolerations affinity nodeSelector serviceAccountName")
_POD |= dict.fromkeys(["resources", "securityContext", "livenessProbe", "readinessProbe", "metrics"], _ANY)
_SCHEDULER = "enabled serviceType loadBalancerIP servicePort serviceAnnotations"
_WORKER = "custom_scheduler_url port portDashboard threads_per_worker"
_WORKER_ANY = dict.fromkeys(["strategy", "default_resources", "annotations"], _ANY)
_JUPYTER = "enabled rbac serviceType servicePort password passwordHint"
_JUPYTER_ANY = dict.fromkeys(["command", "args", "extraConfig"], _ANY)
DASK_CHART: dict[str, Any] = keys(
    "nameOverride fullnameOverride additional_worker_groups",
    scheduler=keys(_SCHEDULER, **_POD, image=_IMAGE),
    webUI=keys("name servicePort", ingress=_INGRESS),
    worker=keys(_WORKER, **_POD, **_WORKER_ANY, image={**_IMAGE, "dask_worker": None}, mounts=_MOUNTS),
    jupyter=keys(_JUPYTER, **_POD, **_JUPYTER_ANY, image=_IMAGE, mounts=_MOUNTS, ingress=_INGRESS),
)
# Ports that the templates have.
DASHBOARD, OF_WORKERS = 8787, 8790


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "values.yaml").read_text())
    return read


def test_the_operator_s_values_are_known_to_its_chart() -> None:
    given = yaml.safe_load((DEPLOY / "operator-values.yaml").read_text())
    known = operator_values()
    assert unknown_values(given, known) == []
    assert unknown_values({**given, "resource": {}}, known) == [".resource"]
    assert unknown_values({"rbac": {"clutser": False}}, known) == [".rbac.clutser"]


def test_the_values_are_known_to_the_chart(values: dict[str, Any]) -> None:
    assert unknown_values(values, DASK_CHART) == []
    wrong = {"worker": {"replica": 2}, "sheduler": {}}
    assert unknown_values(wrong, DASK_CHART) == [".worker.replica", ".sheduler"]


@pytest.mark.parametrize(("part", "port"), [("scheduler", DASHBOARD), ("worker", OF_WORKERS)])
def test_what_the_templates_put_into_pods_is_valid(values: dict[str, Any], part: str, port: int) -> None:
    given = values[part]
    mounts = given.get("mounts", {"volumes": [], "volumeMounts": []})
    container = {
        "name": part,
        "image": f"{given['image']['repository']}:{given['image']['tag']}",
        "volumeMounts": mounts["volumeMounts"],
        **{key: given[key] for key in ("env", "resources", "livenessProbe", "readinessProbe")},
    }
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part}}
    pod["spec"] = {"containers": [container], "volumes": mounts["volumes"]}
    pod["spec"]["securityContext"] = given["securityContext"]
    assert complaints(pod) == []
    pod["spec"]["securityContext"] = {**given["securityContext"], "runAsNonroot": True}
    assert complaints(pod) != []
    assert given["securityContext"]["runAsNonRoot"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert given[probe]["httpGet"] == {"path": "/health", "port": port}


def test_workers_are_started_as_everywhere_else(values: dict[str, Any]) -> None:
    worker, scheduler = values["worker"], values["scheduler"]
    memory = worker["resources"]["limits"]["memory"]
    command = ["dask", "worker", "mdpext-dask-scheduler:8786"]
    command += ["--nthreads", str(worker["threads_per_worker"])]
    command += ["--memory-limit", memory, "--no-dashboard", "--dashboard-address", str(OF_WORKERS)]
    options = parse([*command, *worker["extraArgs"]])
    assert (options["nthreads"], parse_bytes(options["memory_limit"])) == (1, 2**31)
    assert worker["env"] == scheduler["env"] == environment()


def test_nothing_is_published(values: dict[str, Any]) -> None:
    assert values["scheduler"]["serviceType"] == "ClusterIP"
    assert values["webUI"]["ingress"]["enabled"] is False
    assert values["jupyter"]["enabled"] is False
