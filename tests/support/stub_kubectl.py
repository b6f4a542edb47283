"""A program that answers as ``kubectl`` would, for one job, from a file: a cluster in so many steps.

What is tested with it is only that the client asks the right questions and reads the answers rightly. The
file (``$STUB_CLUSTER``) has ``status``: what the operator says of the job at one look after the other, the
last one for ever; ``exit_code`` of the runner, ``log``: its lines; ``waiting``: why a worker does not start;
``refuse``: what is said instead of any answer. What is called is added to ``calls``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(os.environ["STUB_CLUSTER"])


def main(arguments: list[str]) -> int:
    cluster = json.loads(FILE.read_text())
    cluster.setdefault("calls", []).append(arguments)
    words = [word for word in arguments if not word.startswith("-")]
    if "--namespace" in arguments:
        words.remove(arguments[arguments.index("--namespace") + 1])
    code = 0
    if cluster.get("refuse"):
        print(cluster["refuse"], file=sys.stderr)
        code = 1
    elif words[0] == "apply":
        cluster["job"] = list(yaml.safe_load_all(Path(words[1]).read_text()))[-1]
        print("daskjob created")
    elif words[0] == "delete":
        cluster["job"] = None
        cluster["status"] = cluster.pop("next", cluster["status"])
    elif words[:2] == ["get", "daskjob"]:
        if cluster.get("job"):
            status = cluster["status"][0]
            if len(cluster["status"]) > 1:
                del cluster["status"][0]
            shown = {} if status is None else {"status": {"jobStatus": status}}
            cluster["shown"] = status
            print(json.dumps({**cluster["job"], **shown}))
    elif words[:2] == ["get", "pods"]:
        print(json.dumps({"items": pods(cluster)}))
    elif words[0] == "logs":
        if cluster.get("shown") in ("Running", "Successful", "Failed"):
            print("\n".join(cluster.get("log", [])))
        else:
            print("Error from server (BadRequest): container is waiting to start", file=sys.stderr)
            code = 1
    else:
        print(f"unknown command {words}", file=sys.stderr)
        code = 1
    FILE.write_text(json.dumps(cluster))
    return code


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    ended = cluster.get("shown") in ("Successful", "Failed")
    if ended and "exit_code" not in cluster:
        return []  # evicted with its machine
    runner = {"terminated": {"exitCode": cluster["exit_code"]}} if ended else {}
    reason = cluster.get("waiting") or "ContainerCreating"
    return [
        pod("job-runner", "runner", runner or {"waiting": {"reason": "PodInitializing"}}),
        pod("worker", "worker", {"waiting": {"reason": reason}}),
        pod("worker", "worker", {"waiting": {"reason": reason}}),
    ]


def pod(component: str, container: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"dask.org/component": component}},
        "status": {"containerStatuses": [{"name": container, "image": "registry/image", "state": state}]},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
